//! What a kernel computes, without where anything lies: by it, and by its [`Form`], a kernel is found again.

use crate::dtype::DType;
use crate::op::{Binary, Reduction, Unary};

/// The most dimensions of a kernel's iteration.
pub(crate) const MAX_DIMS: usize = 4;

/// A value of a program: its number.
pub(crate) type Value = u16;

/// One step of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// The element of an array.
    Leaf(u8),
    /// A number of the launch.
    Number(u8),
    /// An affine function of the element's place, an `Int64`.
    Index(u8),
    /// In another type.
    Cast(Value),
    Unary(Unary, Value),
    Binary(Binary, Value, Value),
    /// The second where the first, a truth value, is; else the third.
    Select(Value, Value, Value),
    /// A complex number of its parts.
    Complex(Value, Value),
    /// The element of a flat array at an index, an `Int64`; 0 beyond it.
    Gather(u8, Value),
    /// 53 or 24 random bits as a number in [0, 1): of the counter and the key, `Int64`s.
    Uniform(Value, Value),
    /// 64 random bits.
    Bits(Value, Value),
    /// What a reduction came to.
    Reduced(u8),
}

/// Steps, each of a type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Program {
    pub(crate) steps: Vec<(Step, DType)>,
    /// How many of them are of elements that are reduced; what is behind them is of results.
    pub(crate) elements: usize,
    /// Which values are reduced, and in which type.
    pub(crate) reductions: Vec<(Reduction, Value, DType)>,
    pub(crate) outputs: Vec<(Value, DType)>,
    pub(crate) leaves: Vec<DType>,
    pub(crate) numbers: Vec<DType>,
    pub(crate) indices: u8,
}

/// How an array lies along a dimension of the iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Along {
    /// The same elements all along it.
    Not,
    /// With a positive stride.
    Forward,
    /// With a negative stride.
    Back,
}

/// How an array lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) dims: [Along; MAX_DIMS],
    /// Is there a last dimension of one element behind them, of a complex number's two parts?
    pub(crate) tail: bool,
    /// Bytes to whose multiples all of it is aligned.
    pub(crate) align: u8,
    /// Is it a flat array, that is gathered from?
    pub(crate) flat: bool,
}

/// How a program is run: all that a kernel depends on beside it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    /// Dimensions of the iteration.
    pub(crate) rank: u8,
    /// The one that is reduced.
    pub(crate) reduced: Option<u8>,
    /// Are there parts of the reduced dimension, each with a result?
    pub(crate) partial: bool,
    pub(crate) leaves: Vec<Place>,
    pub(crate) outputs: Vec<Place>,
    /// Elements along the last dimension that are taken at once.
    pub(crate) lanes: u8,
    /// Is a block one thread of a processor?
    pub(crate) cpu: bool,
}

/// Vectors of a thread of a GPU, of so many elements of a dense array each: what is read together is on its way together.
pub(crate) fn vectors_of_a_thread(rank: usize, lanes: u8) -> u32 {
    if rank == 1 && lanes > 1 { 2 } else { 1 }
}
