//! Tile kernels: what a block does as a whole, on tiles of matrices.
//!
//! A tile kernel has no threads. Its body is one sequential program for each block of the grid, and that program is what the
//! kernel means: the reference interpreter runs it as it stands. Its values are scalars, the same throughout the block; what
//! it multiplies and stores are *fragments*, matrices and columns of numbers in the registers of the block, and *channels*,
//! through which boxes of views come from global memory.
//!
//! | op | does |
//! | --- | --- |
//! | `fetch @v[%i, %j], @c` | brings the box of view `@v` that begins at row `%i`, column `%j`, of its last two dimensions, into the next stage of channel `@c`; out of bounds is zero |
//! | `mma @acc, @a, @b` | `acc += a · b`, of the newest stages of channels; `a` may be a fragment |
//! | `release @c` | gives the oldest stage of the channel back |
//! | `fill @f, %x` | sets all elements of a fragment |
//! | `map 1, @f, @g (%i, %j, %x, %y) { … }` | computes each element of the first fragment of the elements of all that are named |
//! | `row.add @m, @f` and `.max`, `.min` | joins the rows of a matrix with a column |
//! | `send @f, @c` | copies a fragment into the next stage of a channel |
//! | `get @v[%i, %j], @f` | loads a box of a view into a fragment; out of bounds is zero |
//! | `put @v[%i, %j], @f` | stores a fragment into a box of a view; what is out of bounds is left out; `put.add` adds it |
//!
//! # How it becomes fast
//!
//! The compiler splits the block's warps: one *role* runs the program for the sake of its fetches alone, as far ahead as the
//! stages of the channels allow, the others do the rest. That needs no analysis, as no scalar is computed from a fragment: all
//! roles run the same control flow and the same scalar ops. The rows of fragments are divided among
//! [`groups`](Tile::groups) of warps, each of which multiplies by itself.
//!
//! # Why it can't deadlock
//!
//! All roles run one program, so they agree on the order of fetches, releases and uses. At each `fetch`, the stages of its
//! channel that are fetched and not released are fewer than it has, which the validator proves ([`valid`](crate::valid)). A role
//! that waits to fetch waits for a release that stands *before* that fetch in the program; one that waits for a stage waits for a
//! fetch that does. So the wait that is earliest in the program always ends.
//!
//! Why not roles that the author writes, with channels between them? They may disagree: on how often a loop runs, on the order of
//! two channels, or because memory changed that both read. Each would need a proof of its own.

use crate::module::Line;
use crate::types::Scalar;

/// What a tile kernel has that others don't.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Groups of warps among which the rows of fragments are divided evenly, 1 to [`MAX_GROUPS`](crate::limits::MAX_GROUPS).
    pub groups: u32,
    /// The channels.
    pub channels: Vec<Channel>,
    /// The fragments.
    pub fragments: Vec<Fragment>,
}

/// A ring of stages, each of which holds a tile of a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channel {
    /// Its name, without `@`.
    pub name: Box<str>,
    /// What one element is.
    pub element: Scalar,
    /// Rows and columns of a stage.
    pub dims: [u32; 2],
    /// How many tiles it holds at once.
    pub stages: u32,
    /// Do the blocks of a cluster fetch the same tiles to it? Then each brings its share of the rows to all.
    pub multicast: bool,
    /// The line it was written on.
    pub line: Line,
}

/// Does `mma` multiply these into a sum of that?
pub const fn multiplies(a: Scalar, b: Scalar, sum: Scalar) -> bool {
    use Scalar::{Bf16, F8E4M3, F8E5M2, F16, F32, I8, I32, Tf32};
    match (a, b) {
        (F16, F16) | (Bf16, Bf16) | (Tf32, Tf32) | (F32, F32) => matches!(sum, F32),
        (F8E4M3 | F8E5M2, F8E4M3 | F8E5M2) => matches!(sum, F32),
        (I8, I8) => matches!(sum, I32),
        _ => false,
    }
}

/// The elements of which a box's column is a multiple: those in 16 bytes, in which copies are made.
pub const fn column_step(element: Scalar) -> u32 {
    16 / element.bytes()
}

impl Channel {
    /// Bytes of a stage.
    pub fn stage_bytes(&self) -> u64 {
        (u64::from(self.dims[0]) * u64::from(self.dims[1])).saturating_mul(self.element.bytes().into())
    }
}

/// A matrix, a column of one number for each row, or a row, in the registers of a block. A matrix of one row is a row: the
/// groups don't divide it, each has all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Its name, without `@`.
    pub name: Box<str>,
    /// What one element is.
    pub element: Scalar,
    /// Its rows.
    pub rows: u32,
    /// Its columns; `None` for a column.
    pub columns: Option<u32>,
    /// The line it was written on.
    pub line: Line,
}

impl Fragment {
    /// Number of elements.
    pub fn len(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.columns.unwrap_or(1))
    }

    /// Is it a row: a matrix of one?
    pub fn is_row(&self) -> bool {
        self.rows == 1 && self.columns.is_some()
    }

    /// Is it a row or a column: what runs along the last dimension of a view?
    pub fn is_line(&self) -> bool {
        self.is_row() || self.columns.is_none()
    }

    /// Is it without elements? The validator refuses such a fragment.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
