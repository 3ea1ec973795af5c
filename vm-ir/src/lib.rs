//! What a kernel is: types, ops, regions; a builder, a text and a binary form; a validator; and a reference
//! interpreter. This crate knows no compiler, no device and no operating system.
//!
//! ```text
//! builder ─┐                        ┌─▶ interpreter
//! text ────┼─▶ Module ─▶ validate ──┤
//! binary ──┘             (a proof)  └─▶ compilers
//! ```
//!
//! * [`builder`] makes a kernel from Rust that reads like it; [`text`] and [`binary`] read and write it.
//! * [`module`] is what they make; [`types`], [`view`] and the op table in [`op`] are what it is made of.
//! * [`valid`] turns a [`Module`] into a [`ValidModule`] and says how each value relates between threads.
//! * [`interp`] runs a valid module; [`semantics`] says what the ops on values mean, [`mod@format`] what numbers are.
//!
//! # What a kernel means
//!
//! **Threads.** A launch runs a grid of blocks; the kernel fixes how many threads a block has. Every thread
//! runs the body once. Threads of a block are counted through x, then y, then z; 32 neighbours in that count,
//! from a multiple of 32, are a warp. Blocks run in any order and may run at once; none may wait for another.
//! The threads of a block make progress independently only up to a barrier: a thread that spins until a
//! neighbour writes may spin forever.
//!
//! **Evaluation.** A region's ops take effect in order, each once. An op's operands are values that are
//! already there, so there is no order among them to speak of. Every value is defined once, before its uses,
//! and never changes; what a loop carries is defined again in each iteration. Control flow is regions within
//! regions: there is no jump, no early return and no recursion, and an `if` or a loop gives its results when
//! it ends.
//!
//! **Values.** A value is a scalar or a vector of 2, 4, 8 or 16 of them. All ops on vectors work lane by
//! lane. Integers have no sign; the ops have: `.s` and `.u`. There are no pointers and no addresses: a kernel
//! reaches the views that a launch gave it and its own arrays, and no other byte.
//!
//! **Integers** wrap. Division by zero gives 0 and the remainder then is the dividend; the least integer by
//! −1 is itself, remainder 0. Shift amounts count modulo the width. Conversions from floats go towards zero
//! and saturate; NaN becomes 0. So no integer op is undefined or traps.
//!
//! **Floats** are IEEE 754: to nearest even, subnormals kept, no flags, no traps. Every op is rounded by
//! itself: nothing is fused, reassociated or approximated unless the op says so (`fma`; the `fast` class).
//! An op with an accuracy class keeps to the bounds in its row of the table: `precise` to a number of ulps (0
//! is correctly rounded), `fast` to a relative error, with subnormals as zeros if the device likes. f16 and
//! bf16 ops behave as if computed exactly and rounded once; their functions are evaluated in f32 or wider and
//! rounded. Where a NaN results, which NaN is not said; `neg`, `abs`, `select`, moves between lanes, loads,
//! stores and `bitcast` keep every bit. fp8 is stored and converted, with saturation, and not computed with.
//!
//! **Memory.** A view is a base, extents and row strides that the launch supplies and checks against the
//! view's type; extents and alignment that the type states are facts. A view that may be written overlaps no
//! other view. Indices are signed. A vector load or store covers consecutive elements of a row; each lane is
//! in or out of bounds for itself. Shared arrays belong to one block and end with it, local
//! arrays to one thread.
//!
//! A surface is a view of pixels. Its last extent is the lanes of a pixel, which has no index of its own: an access is of all lanes,
//! at an index for each other dimension. Out of bounds, and by an index of any size, a load gives zeros and a store does nothing, also
//! in a module of the host's own.
//!
//! In a local array, and in a view or a shared array of `i8` in one dimension, an access may be of another type: its value lies in so many bytes
//! from the index on, the lowest first. It is wholly in bounds or not at all: its index is a multiple of the value's size (of
//! all lanes, at most 16), and so is where the view begins, by the alignment that its type states. One at no such multiple
//! counts as out of bounds. Hardware moves such a value by one instruction, and never faults on it.
//!
//! **Threads and memory.** What a thread does to an element is seen by itself at once, and by others behind a
//! barrier of the block (or, among a warp, of the warp) that both passed, or through atomics and fences with
//! the order and scope that they name, as in C++. Two threads that touch an element with nothing between
//! them, one of them writing, and not both by atomics, race: what the element then holds is any mix of the
//! bytes written, and what is read is any of them. A race harms nothing but the values; the interpreter
//! reports it. Atomic float sums come in no fixed order, so their rounding may differ from run to run.
//!
//! **Convergence.** A barrier, `load_uniform` and everything between the threads of a warp must be reached by
//! all threads of the block or warp, or by none. The [validator](valid) proves it or refuses the kernel, so
//! code may be generated for it by splitting at barriers. `warp.add` adds in one fixed order of lanes, so it
//! gives the same everywhere.
//!
//! A guest can break the promise that nobody writes a view that the kernel only reads: the memory is its own. Its
//! results are then its own matter, but code for it must hold up. In a guest's module no load from a view therefore
//! decides who reaches what must be reached together; `load_uniform` passes on what one thread has read.
//!
//! # Two levels of trust
//!
//! The one who validates says how far a module is [trusted](Trust); nothing in the module does.
//!
//! | | a guest's | the host's own |
//! | --- | --- | --- |
//! | load from a view out of bounds | gives 0 | undefined |
//! | store or atomic to a view out of bounds | does nothing; an atomic gives 0 | undefined |
//! | index into a shared or local array | clamped: to the last element, or the last at which the vector fits, of an access by bytes the last multiple of its size; negative counts as huge | out of bounds is undefined |
//! | shared and local memory before it is written | zeros | undefined |
//! | loops | end: a launch has fuel and a deadline, and is stopped as a whole | as written |
//! | ops under "trusted modules only" | refused | allowed |
//!
//! "Undefined" is confined to the right column. The interpreter ends such a run with an error.

#[cfg(feature = "arbitrary")]
pub mod arbitrary;
pub mod binary;
pub mod builder;
#[cfg(feature = "filetest")]
pub mod filetest;
pub mod format;
#[doc(hidden)]
pub mod fuzz;
pub mod interp;
pub mod limits;
pub mod module;
#[cfg(feature = "arbitrary")]
pub mod mutate;
pub mod op;
pub mod semantics;
#[cfg(feature = "arbitrary")]
pub mod shapes;
pub mod text;
pub mod tile;
pub mod types;
pub mod valid;
pub mod view;

pub use builder::{Builder, IRBlock};
pub use module::{GuestAddr, Kernel, Module, Value};
pub use types::{Scalar, Type};
pub use valid::{Trust, ValidModule, validate};
