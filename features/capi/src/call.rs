//! A call: a function of the ABI, its arguments as words, and the checks that need no device.

use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;
use vm_ir::Scalar;
use vm_kernels::call::Function;

use crate::error::Failure;

/// A function of the ABI.
#[derive(Debug)]
pub(crate) struct Spec {
    /// Its place in the table.
    pub(crate) index: u16,
    /// Its parameters but the stream.
    pub(crate) parameters: &'static [Parameter],
    /// Which function of the library it is, with these arguments.
    pub(crate) make: fn(&Arguments<'_>) -> Result<Box<dyn Function>, Failure>,
    /// The numbers of f32 that each of its launches takes, in their order, if they vary from call to call.
    pub(crate) numbers: Option<NumbersOf>,
}

/// Numbers that vary.
pub(crate) type Numbers = [f32; 8];

/// What they are for arguments.
pub(crate) type NumbersOf = fn(&Arguments<'_>) -> Result<Numbers, Failure>;

/// A parameter.
#[derive(Debug)]
pub(crate) struct Parameter {
    /// Its name in C.
    pub(crate) name: &'static str,
    /// What it is.
    pub(crate) kind: Kind,
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory; a buffer of the function, in the order of the parameters.
    Pointer {
        /// May it be NULL? Then the function has no such buffer.
        optional: bool,
    },
    /// Memory to work in, of as many bytes as are needed.
    Workspace,
    /// A count, or an extent: not negative.
    Extent,
    /// 0 or 1.
    Flag,
    /// Any integer.
    #[allow(dead_code)]
    Number,
    /// A float, by its bits.
    Float,
    /// A number, or a float by its bits, which the same call may have another of.
    Varying,
}

/// The most parameters of a function, but the stream.
pub(crate) const PARAMETERS: usize = 15;

/// The arguments of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arguments<'a> {
    /// The function.
    pub(crate) spec: &'static Spec,
    /// The name in C by which it was called.
    pub(crate) name: &'static str,
    /// What `T` is.
    pub(crate) element: Scalar,
    /// A word for each parameter.
    pub(crate) words: &'a [u64],
}

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
    /// A few bits of it, for tables.
    pub(crate) fn hash(&self) -> u64 {
        let mut hash = FxHasher::default();
        Hash::hash(self, &mut hash);
        hash.finish()
    }
}

impl Arguments<'_> {
    /// What the call is found by.
    pub(crate) fn key(&self) -> Key {
        let mut words = [0; PARAMETERS];
        for ((to, word), parameter) in words.iter_mut().zip(self.words).zip(self.spec.parameters) {
            *to = match parameter.kind {
                Kind::Pointer { .. } => u64::from(*word != 0),
                Kind::Workspace | Kind::Varying => 0,
                _ => *word,
            };
        }
        Key { function: self.spec.index, element: self.element, aligned: self.aligned(), words }
    }

    /// Are all pointers multiples of 16?
    fn aligned(&self) -> bool {
        self.pointers().all(|(_, address)| address.is_multiple_of(16))
    }

    /// 16 if all pointers and all rows, of so many elements, begin on multiples of 16 bytes; else an element's bytes.
    pub(crate) fn align(&self, rows: &[u64]) -> u32 {
        let bytes = self.element.bytes();
        let whole = rows.iter().all(|row| row.wrapping_mul(bytes.into()).is_multiple_of(16));
        if self.aligned() && whole { 16 } else { bytes }
    }

    /// The names and addresses of all pointers that must be or are there.
    pub(crate) fn pointers(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.spec.parameters.iter().zip(self.words).filter_map(|(parameter, word)| match parameter.kind {
            Kind::Pointer { optional } if !optional || *word != 0 => Some((parameter.name, *word)),
            _ => None,
        })
    }

    /// The memory to work in that is one of the arguments, and its name.
    pub(crate) fn workspace(&self) -> Option<(&'static str, u64)> {
        let mut all = self.spec.parameters.iter().zip(self.words);
        all.find(|(parameter, _)| parameter.kind == Kind::Workspace)
            .map(|(parameter, word)| (parameter.name, *word))
    }

    /// 16 if all pointers are multiples of that; else an element's bytes.
    pub(crate) fn align_of_pointers(&self) -> u32 {
        self.align(&[])
    }

    fn word(&self, name: &str) -> u64 {
        let at = self.spec.parameters.iter().position(|parameter| parameter.name == name);
        at.and_then(|at| self.words.get(at)).copied().unwrap_or(0)
    }

    /// An extent.
    pub(crate) fn extent(&self, name: &str) -> u64 {
        self.word(name)
    }

    /// A float.
    pub(crate) fn float(&self, name: &str) -> f32 {
        f32::from_bits(self.word(name) as u32)
    }

    /// A flag; of a pointer whether it is there.
    pub(crate) fn is(&self, name: &str) -> bool {
        self.word(name) != 0
    }

    /// That no extent is negative.
    ///
    /// # Errors
    /// [`Failure::Invalid`].
    pub(crate) fn check(&self) -> Result<(), Failure> {
        for (parameter, word) in self.spec.parameters.iter().zip(self.words) {
            if parameter.kind == Kind::Extent && word.cast_signed() < 0 {
                let what = format!("is {}: it must not be negative", word.cast_signed());
                return Err(Failure::invalid(self.name, parameter.name, what));
            }
        }
        Ok(())
    }
}
