//! A function of the library as launches: which kernels run, over which blocks, with which arguments.
//!
//! A [`Function`] is what is computed of which extents, its numbers (`alpha`, an epsilon) included. [`Function::buffers`] says which memory it
//! is called with, and [`Function::call`] how a device does it: one launch after the other, each of an [`Entry`], which is small and
//! hashable, so that whoever calls keeps what it has compiled and loaded by it.
//!
//! A function allocates nothing. What its launches hand to each other lies in a workspace of the caller's, of as many bytes as
//! [`Call::workspace`] says and aligned to [`WORKSPACE_ALIGN`]; its contents before a call don't matter.

use std::any::Any;
use std::fmt;

use thiserror::Error;
use vm_graph::ValidGraph;
use vm_ir::builder::BuildError;
use vm_ir::limits::MAX_GRID_YZ;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

use crate::append::{Advance, Append};
use crate::attention::{Attention, Backward, BackwardPass, Decode, Gradient, SplitBackward};
use crate::columns::ColumnSlices;
use crate::elementwise::ChainKernel;
use crate::experts::Experts;
use crate::family::Resources;
use crate::flat::{Finish, Flat, FlatRows, Squares};
use crate::gather::Gather;
use crate::gemm::Gemm;
use crate::graph::NoGraph;
use crate::loss::{LossRows, LossSum};
use crate::norm::{NormGradient, NormRows, NormSums};
use crate::quantise::Quantised;
use crate::rope::Rotate;
use crate::sample::{Best, Draw, Parts, Router, Select, Serial, Shares};
use crate::scatter::Scatter;
use crate::softmax::SoftmaxRows;
use crate::transpose::Transposed;

/// Bytes to whose multiples a workspace, and each part of one, is aligned.
pub const WORKSPACE_ALIGN: u64 = 256;

/// What is computed, of which extents. As an [`Any`] it tells which function it is.
pub trait Function: Any + fmt::Debug {
    /// The buffers of a call, in order.
    fn buffers(&self) -> Vec<Buffer>;

    /// What it computes, as a graph of array operations: [`graph`](crate::graph) says what its inputs and outputs are.
    ///
    /// # Errors
    /// [`NoGraph`]: why there is none, as of draws, or of arrays that have no elements.
    fn graph(&self) -> Result<ValidGraph, NoGraph>;

    /// The launches that compute it on such a device. Extents of 0 are none at all.
    ///
    /// # Errors
    /// [`CallError`]: an extent or a type for which there is no kernel.
    fn call(&self, resources: &Resources) -> Result<Call, CallError>;

    /// The launches where some buffers have strided rows, with regions as of dense ones: [`Strided`](crate::strided::Strided) puts the
    /// distances into them. `buffers` are those of [`buffers`](Self::buffers) with their strides, which say how wide accesses can be.
    ///
    /// # Errors
    /// [`CallError`]: as of a call, or a buffer whose rows can't lie so. Functions without rows have no other answer.
    fn call_strided(&self, buffers: &[Buffer], _: &Resources) -> Result<Call, CallError> {
        let buffer = buffers.iter().find(|buffer| buffer.is_strided()).map_or("", |buffer| buffer.name);
        Err(CallError::in_one_piece(buffer))
    }
}

/// Why a function can't be called.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CallError {
    /// There is no kernel for one of its numbers.
    #[error("{function}: {what}")]
    Unsupported {
        /// The function's name.
        function: &'static str,
        /// Which number it is, and which ones there are.
        what: String,
    },
    /// The device has no room for any variant.
    #[error("{function}: no variant fits into {shared_bytes} bytes of shared memory")]
    NoRoom {
        /// The function's name.
        function: &'static str,
        /// What a block has.
        shared_bytes: u32,
    },
    /// A buffer's rows can't lie as they are said to.
    #[error("{buffer}: {what}")]
    Stride {
        /// The buffer's name.
        buffer: String,
        /// How they are said to lie, and how they can.
        what: String,
    },
}

impl CallError {
    /// A buffer that is taken as one piece has strided rows.
    pub(crate) fn in_one_piece(buffer: &str) -> CallError {
        let what = "is taken in one piece: its rows must lie one behind the other".to_owned();
        CallError::Stride { buffer: buffer.to_owned(), what }
    }
}

/// Memory that a function is called with: an array, slowest dimension first, contiguous or of strided rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Its name.
    pub name: &'static str,
    /// What it holds.
    pub element: Scalar,
    /// Its extents in elements.
    pub extents: Vec<u64>,
    /// What happens to it.
    pub access: Access,
    /// Dimensions that count its rows; what is behind them is a row. One of two dimensions, the first two of more, none of one.
    pub counted: usize,
    /// Elements from where a row begins to where the next one does; as many as a row has where rows lie one behind the other.
    pub stride: u64,
}

impl Buffer {
    /// A dense array.
    pub fn new(name: &'static str, element: Scalar, extents: &[u64], access: Access) -> Buffer {
        let counted = extents.len().saturating_sub(1).min(2);
        let buffer = Buffer { name, element, extents: extents.to_vec(), access, counted, stride: 0 };
        buffer.counting(counted)
    }

    /// The same, with rows that so many dimensions count.
    pub(crate) fn counting(mut self, counted: usize) -> Buffer {
        self.counted = counted;
        self.stride = self.row();
        self
    }

    /// Elements of a row; `u64::MAX` if there are more.
    pub fn row(&self) -> u64 {
        self.extents[self.counted..].iter().fold(1, |product, extent| product.saturating_mul(*extent))
    }

    /// Rows; `u64::MAX` if there are more.
    pub fn rows(&self) -> u64 {
        self.extents[..self.counted].iter().fold(1, |product, extent| product.saturating_mul(*extent))
    }

    /// Are its rows strided?
    pub fn is_strided(&self) -> bool {
        self.stride != self.row()
    }

    /// Elements of memory from its first one to its last one, with those between rows; none if there are more than a u64 can count.
    pub fn len(&self) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        let (row, rows) = (self.row(), self.rows());
        let before = (rows - 1).checked_mul(self.stride).filter(|_| rows < u64::MAX && row < u64::MAX)?;
        before.checked_add(row)
    }

    /// Has it no elements?
    pub fn is_empty(&self) -> bool {
        self.extents.contains(&0)
    }
}

/// What a function does on a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Call {
    /// One after the other.
    pub launches: Vec<Launch>,
    /// Bytes that the launches hand to each other.
    pub workspace: u64,
}

/// A launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub entry: Entry,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// The arguments, in the order of the kernel's parameters.
    pub operands: Vec<Operand>,
}

/// An argument of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// A view of a buffer: its number in [`Function::buffers`], and what of it.
    Buffer(usize, Region),
    /// A view of the workspace.
    Workspace(Region),
    /// A number: its bits, of this type.
    Number(u64, Type),
}

/// What a view is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// What it holds.
    pub element: Scalar,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its extents in elements, slowest dimension first.
    pub extents: Vec<u64>,
    /// From one element of a dimension to the next, in elements. That of the last is 1.
    pub strides: Vec<u64>,
}

impl Region {
    /// A dense array.
    pub fn dense(element: Scalar, offset: u64, extents: &[u64]) -> Region {
        let mut strides = vec![1; extents.len()];
        for at in (1..extents.len()).rev() {
            strides[at - 1] = extents[at].saturating_mul(strides[at]);
        }
        Region { element, offset, extents: extents.to_vec(), strides }
    }

    /// The same elements of a buffer with strided rows, of which this is a region as of a dense one. None if a dimension goes on from
    /// one row to the next.
    pub(crate) fn spread(&self, buffer: &Buffer) -> Option<Region> {
        let bytes = u64::from(self.element.bytes());
        if self.element.bytes() != buffer.element.bytes() || !self.offset.is_multiple_of(bytes) {
            return None;
        }
        let row = buffer.row();
        let first = self.offset / bytes;
        let offset =
            (first / row).checked_mul(buffer.stride)?.checked_add(first % row)?.checked_mul(bytes)?;
        // The last element of a row that is there.
        let mut last = first % row;
        let mut strides = self.strides.clone();
        let dimensions = strides.len();
        for (number, (stride, extent)) in strides.iter_mut().zip(&self.extents).enumerate() {
            if number + 1 < dimensions && stride.is_multiple_of(row) {
                *stride = (*stride / row).checked_mul(buffer.stride)?;
            } else {
                last = extent.saturating_sub(1).checked_mul(*stride)?.checked_add(last)?;
            }
        }
        (last < row).then(|| Region { element: self.element, offset, extents: self.extents.clone(), strides })
    }
}

impl Launch {
    /// The launches of a grid of any number of blocks along y and z, each of as many as there can be. By operand it is told which dimensions of its view are
    /// counted along y and along z, each block's by one: a launch has its part of these.
    pub(crate) fn folded(
        entry: Entry,
        x: u32,
        [y, z]: [u64; 2],
        operands: &[(Operand, [Option<usize>; 2])],
    ) -> Vec<Launch> {
        let most = u64::from(MAX_GRID_YZ);
        let parts =
            |count: u64| (0..count.div_ceil(most)).map(move |at| [at * most, most.min(count - at * most)]);
        let launch = |along_y: [u64; 2], along_z: [u64; 2]| {
            let part = |(operand, [of_y, of_z]): &(Operand, [Option<usize>; 2])| {
                operand.part(*of_y, along_y).part(*of_z, along_z)
            };
            let grid = [x, along_y[1] as u32, along_z[1] as u32];
            Launch { entry, grid, operands: operands.iter().map(part).collect() }
        };
        parts(z).flat_map(|z| parts(y).map(move |y| (y, z))).map(|(y, z)| launch(y, z)).collect()
    }
}

impl Operand {
    /// A view of some of a dimension's: the first, and how many. All of it without a dimension.
    pub(crate) fn part(&self, dimension: Option<usize>, [first, count]: [u64; 2]) -> Operand {
        let mut part = self.clone();
        if let (Operand::Buffer(_, region) | Operand::Workspace(region), Some(at)) = (&mut part, dimension) {
            region.offset += first * region.strides[at] * u64::from(region.element.bytes());
            region.extents[at] = count;
        }
        part
    }

    /// A buffer as a whole, of these extents (which may be others than the buffer's own, of as many elements).
    pub fn whole(buffer: usize, element: Scalar, extents: &[u64]) -> Operand {
        Operand::Buffer(buffer, Region::dense(element, 0, extents))
    }

    /// A number of f32.
    pub fn f32(number: f32) -> Operand {
        Operand::Number(number.to_bits().into(), Type::F32)
    }

    /// A number of i32.
    pub fn i32(number: i32) -> Operand {
        Operand::Number(u64::from(number.cast_unsigned()), Type::I32)
    }

    /// A number of i64.
    pub fn i64(number: i64) -> Operand {
        Operand::Number(number.cast_unsigned(), Type::I64)
    }
}

/// Parts of a workspace, one behind the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Workspace(u64);

impl Workspace {
    /// The next part.
    pub fn take(&mut self, element: Scalar, extents: &[u64]) -> Operand {
        let region = Region::dense(element, self.0, extents);
        let bytes = extents
            .iter()
            .fold(u64::from(element.bytes()), |product, extent| product.saturating_mul(*extent));
        self.0 = self.0.saturating_add(bytes).checked_next_multiple_of(WORKSPACE_ALIGN).unwrap_or(u64::MAX);
        Operand::Workspace(region)
    }

    /// Bytes of all parts; `u64::MAX` if there are more.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

/// A kernel's name in its module: the variant's, or, where that is too long for one, its beginning and a hash of it (FNV-1a).
pub(crate) fn kernel_name(variant: &str) -> String {
    const MOST: usize = 60;
    if variant.len() <= MOST {
        return variant.to_owned();
    }
    let hash = variant
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let begin: String = variant.chars().take(MOST - 17).collect();
    format!("{begin}_{hash:016x}")
}

/// A kernel of any family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Entry {
    /// A product.
    Gemm(Gemm),
    /// What the chunks of logits come to.
    Parts(Parts),
    /// The greatest of each row.
    Best(Best),
    /// The k greatest of each row.
    Select(Select),
    /// The greatest of each row, or the k greatest, by one thread.
    Serial(Serial),
    /// A draw from each row.
    Draw(Draw),
    /// The k greatest of softmax of short rows.
    Router(Router),
    /// What the k greatest have of softmax of long rows.
    Shares(Shares),
    /// Attention.
    Attention(Attention),
    /// A kernel of its gradients.
    AttentionBackward(Backward, BackwardPass),
    /// The sums of O's rows times those of its gradient, for one of these.
    AttentionDelta(SplitBackward),
    /// One of its gradients.
    AttentionGradient(SplitBackward, Gradient),
    /// Attention of a few queries to a cache.
    Decode(Decode),
    /// What joins the parts of that.
    DecodeJoin(Decode),
    /// The same of each element of many tensors.
    Flat(Flat),
    /// The same of strided rows.
    FlatRows(FlatRows),
    /// Sums of squares of many tensors.
    Squares(Squares),
    /// A norm of such sums.
    Finish(Finish),
    /// Rows of a table.
    Gather(Gather),
    /// Rows that are added to those of a table.
    Scatter(Scatter),
    /// Sums of columns.
    ColumnSlices(ColumnSlices),
    /// A transpose.
    Transposed(Transposed),
    /// A rotary embedding.
    Rotate(Rotate),
    /// What is put into a cache of keys and values.
    Append(Append),
    /// Lengths of a cache that grow.
    Advance(Advance),
    /// The load of experts.
    Experts(Experts),
    /// A softmax or its gradient.
    Softmax(SoftmaxRows),
    /// Normalised rows.
    Norm(NormRows),
    /// Their gradient.
    NormBackward(NormGradient),
    /// Sums of parts of gradients.
    NormSums(NormSums),
    /// Losses or their gradients.
    CrossEntropy(LossRows),
    /// Losses as one, or the number of targets.
    Losses(LossSum),
    /// A chain of elementwise steps.
    Chain(ChainKernel),
    /// An array in FP8, and its scales.
    Quantised(Quantised),
}

impl Entry {
    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        match self {
            Entry::Gemm(gemm) => gemm.kernel(guest),
            Entry::Parts(parts) => parts.kernel(guest),
            Entry::Best(best) => best.kernel(guest),
            Entry::Select(select) => select.kernel(guest),
            Entry::Serial(serial) => serial.kernel(guest),
            Entry::Draw(draw) => draw.kernel(guest),
            Entry::Router(router) => router.kernel(guest),
            Entry::Shares(shares) => shares.kernel(guest),
            Entry::Attention(attention) => attention.kernel(guest),
            Entry::AttentionBackward(backward, pass) => backward.pass(*pass, guest),
            Entry::AttentionDelta(split) => split.prepare(guest),
            Entry::AttentionGradient(split, of) => split.kernel(*of, guest),
            Entry::Decode(decode) => decode.kernel(guest),
            Entry::DecodeJoin(decode) => decode.join(guest),
            Entry::Flat(flat) => flat.kernel(guest),
            Entry::FlatRows(rows) => rows.kernel(guest),
            Entry::Squares(squares) => squares.kernel(guest),
            Entry::Finish(finish) => finish.kernel(guest),
            Entry::Gather(gather) => gather.kernel(guest),
            Entry::Scatter(scatter) => scatter.kernel(guest),
            Entry::ColumnSlices(slices) => slices.kernel(guest),
            Entry::Transposed(transposed) => transposed.kernel(guest),
            Entry::Rotate(rotate) => rotate.kernel(guest),
            Entry::Append(append) => append.kernel(guest),
            Entry::Advance(advance) => advance.kernel(guest),
            Entry::Experts(experts) => experts.kernel(guest),
            Entry::Softmax(rows) => rows.kernel(guest),
            Entry::Norm(rows) => rows.kernel(guest),
            Entry::NormBackward(rows) => rows.kernel(guest),
            Entry::NormSums(sums) => sums.kernel(guest),
            Entry::CrossEntropy(rows) => rows.kernel(guest),
            Entry::Losses(sum) => sum.kernel(guest),
            Entry::Chain(chain) => chain.kernel(guest),
            Entry::Quantised(quantised) => quantised.kernel(guest),
        }
    }
}
