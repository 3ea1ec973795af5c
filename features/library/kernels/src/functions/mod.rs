//! The functions of the library by name, for who calls them with arguments that are words or arrays: the [`table`] of what they take, and which
//! [`Function`] a call's arguments make.

mod make;
pub mod table;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use thiserror::Error;
use vm_ir::Scalar;

pub use self::make::MAKERS;
pub use self::table::Kind;
use crate::call::Function;

/// A function of the table.
#[derive(Debug)]
pub struct Declared {
    /// What the table says of it.
    pub table: table::Function<'static>,
    /// How it is called.
    pub spec: Spec,
}

impl Declared {
    /// Its name without `cuda_`.
    pub fn name(&self) -> &'static str {
        self.table.name.strip_prefix("cuda_").unwrap_or(self.table.name)
    }
}

/// The functions of the table, in its order.
pub static FUNCTIONS: LazyLock<Vec<Declared>> = LazyLock::new(|| {
    let functions = table::parse(include_str!("../../functions.txt")).unwrap_or_default();
    let declared = |(index, (table, maker)): (usize, (table::Function<'static>, &Maker))| {
        let parameters =
            table.parameters.iter().map(|one| Parameter { name: one.name, kind: one.kind() }).collect();
        let spec = Spec {
            index: u16::try_from(index).unwrap_or(u16::MAX),
            // As long as the process, as the table is.
            parameters: Vec::leak(parameters),
            make: maker.make,
            numbers: maker.numbers,
        };
        Declared { table, spec }
    };
    functions.into_iter().zip(MAKERS).enumerate().map(declared).collect()
});

/// How a function of the table is called.
#[derive(Debug)]
pub struct Spec {
    /// Its place in the table.
    pub index: u16,
    /// Its parameters but the stream.
    pub parameters: &'static [Parameter],
    /// Which function of the library it is, with these arguments.
    pub make: Make,
    /// The numbers of f32 that each of its launches takes, in their order, if they vary from call to call.
    pub numbers: Option<NumbersOf>,
}

/// A parameter.
#[derive(Debug)]
pub struct Parameter {
    /// Its name in C.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
}

/// What makes a function of arguments.
pub type Make = fn(&Arguments<'_>) -> Result<Box<dyn Function>, Invalid>;

/// Numbers that vary.
pub type Numbers = [f32; 8];

/// What they are for arguments.
pub type NumbersOf = fn(&Arguments<'_>) -> Result<Numbers, Invalid>;

/// What makes the function of a name.
#[derive(Clone, Copy, Debug)]
pub struct Maker {
    /// The name in the table, without `cuda_`.
    pub name: &'static str,
    /// What makes the function.
    pub make: Make,
    /// What makes its numbers, if they vary.
    pub numbers: Option<NumbersOf>,
}

/// A parameter has a value that it can't have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{function}: {parameter} {what}")]
pub struct Invalid {
    /// The function.
    pub function: &'static str,
    /// The parameter.
    pub parameter: &'static str,
    /// Its value, and what it must be.
    pub what: String,
}

impl Invalid {
    fn new(function: &'static str, parameter: &'static str, what: impl Into<String>) -> Invalid {
        Invalid { function, parameter, what: what.into() }
    }
}

/// The arguments of a call.
#[derive(Clone, Copy, Debug)]
pub struct Arguments<'a> {
    /// The function.
    pub spec: &'static Spec,
    /// The name by which it was called.
    pub name: &'static str,
    /// What `T` is.
    pub element: Scalar,
    /// A word for each parameter: an address, an integer, a float's bits.
    pub words: &'a [u64],
}

impl Arguments<'_> {
    /// Are all pointers multiples of 16?
    #[inline]
    pub fn aligned(&self) -> bool {
        self.pointers().all(|(_, address)| address.is_multiple_of(16))
    }

    /// 16 if all pointers and all rows, of so many elements, begin on multiples of 16 bytes; else an element's bytes.
    pub(crate) fn align(&self, rows: &[u64]) -> u32 {
        let bytes = self.element.bytes();
        let whole = rows.iter().all(|row| row.wrapping_mul(bytes.into()).is_multiple_of(16));
        if self.aligned() && whole { 16 } else { bytes }
    }

    /// The numbers and addresses of all pointers that must be or are there.
    #[inline]
    pub fn pointers(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let all = self.spec.parameters.iter().zip(self.words).enumerate();
        all.filter_map(|(at, (parameter, word))| match parameter.kind {
            Kind::Pointer { optional } if !optional || *word != 0 => Some((at, *word)),
            _ => None,
        })
    }

    /// The memory to work in that is one of the arguments, and its name.
    #[inline]
    pub fn workspace(&self) -> Option<(&'static str, u64)> {
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

    /// The function of the library that the call is.
    ///
    /// # Errors
    /// [`Invalid`]: an extent that is negative, or a number that the function can't have.
    pub fn function(&self) -> Result<Box<dyn Function>, Invalid> {
        for (parameter, word) in self.spec.parameters.iter().zip(self.words) {
            if parameter.kind == Kind::Extent && word.cast_signed() < 0 {
                let what = format!("is {}: it must not be negative", word.cast_signed());
                return Err(Invalid::new(self.name, parameter.name, what));
            }
        }
        (self.spec.make)(self)
    }
}
