//! What a call is found by: all of its arguments but where memory is.

use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;
use vm_ir::Scalar;
use vm_kernels::functions::{Arguments, Kind};

/// The most parameters of a function, but the stream.
pub(crate) const PARAMETERS: usize = 15;

/// What two calls share that launch the same kernels with the same numbers: all but where memory is, and numbers that vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    function: u16,
    element: Scalar,
    /// Are all pointers multiples of 16?
    aligned: bool,
    /// The arguments, of pointers whether they are there.
    words: [u64; PARAMETERS],
}

impl Key {
    /// That of a call.
    pub(crate) fn of(call: &Arguments<'_>) -> Self {
        let mut words = [0; PARAMETERS];
        for ((to, word), parameter) in words.iter_mut().zip(call.words).zip(call.spec.parameters) {
            *to = match parameter.kind {
                Kind::Pointer { .. } => u64::from(*word != 0),
                Kind::Workspace | Kind::Varying => 0,
                _ => *word,
            };
        }
        Self { function: call.spec.index, element: call.element, aligned: call.aligned(), words }
    }

    /// A few bits of it, for tables.
    pub(crate) fn hash(&self) -> u64 {
        let mut hash = FxHasher::default();
        Hash::hash(self, &mut hash);
        hash.finish()
    }
}
