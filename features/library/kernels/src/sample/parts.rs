//! The first pass over logits: each warp reads a chunk, and writes what it comes to.

use super::chunk::{Piece, Reader};
use super::numbers::{NONE, Nan, pair, weight};
use vm_ir::builder::{BuildError, Builder, IRBlock, Val};
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// What is written of each chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// Its greatest logit, `maxima` of f32, and the sum of weights below that, `sums` of i64.
    Weights,
    /// The greatest key of each lane's elements, `keys` of i32, 32 for a chunk.
    Keys(Nan),
    /// The greatest pair of key and column, `pairs` of i64.
    Best(Nan),
}

/// A variant. Parameters: the logits, what is written, and of weights the scale. The grid is of a block for each row along x, and
/// for each [`Parts::WARPS`] chunks along y.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parts {
    /// How rows are read.
    pub reader: Reader,
    /// What is written.
    pub what: What,
}

impl Parts {
    /// Warps of a block.
    pub const WARPS: u32 = 8;

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let what = match self.what {
            What::Weights => "weights".to_owned(),
            What::Keys(nan) => format!("keys_{}", nan.name()),
            What::Best(nan) => format!("best_{}", nan.name()),
        };
        format!("parts_{what}_{}", self.reader.name())
    }

    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([32 * Self::WARPS, 1, 1]);
        let x = self.reader.view(k, "logits");
        // Parameters come first.
        let read = |nan| self.reader.chunk(x, row(k), chunk(k), nan);
        // Warps behind the last chunk have none.
        let if_chunk = |chunks: Val<'_>, work: &dyn Fn()| k.if_(chunk(k).to(Scalar::I64).lt(chunks), work);
        match self.what {
            What::Weights => {
                let maxima = k.view("maxima", Scalar::F32, 2, Access::Write);
                let sums = k.view("sums", Scalar::I64, 2, Access::Write);
                let scale = k.scalar("scale", Type::F32);
                if_chunk(maxima.extent(1), &|| {
                    let logits: Vec<_> =
                        read(Nan::Least).into_iter().flat_map(|piece| piece.logits).collect();
                    let (max, sum) = weigh(&logits, scale);
                    k.if_(k.lane_id().eq(0), || {
                        maxima.at([row(k), chunk(k)]).store(max);
                        sums.at([row(k), chunk(k)]).store(sum);
                    });
                });
            }
            What::Keys(nan) => {
                let keys = k.view("keys", Scalar::I32, 2, Access::Write);
                if_chunk(keys.extent(1).shr_u(5), &|| {
                    let logits = read(nan).into_iter().flat_map(|piece| piece.logits);
                    let greatest = logits.reduce(|a, b| nan.greater(a, b)).unwrap_or(k.f32(nan.padding()));
                    keys.at([row(k), chunk(k) * 32 + k.lane_id()]).store(nan.key(greatest));
                });
            }
            What::Best(nan) => {
                let pairs = k.view("pairs", Scalar::I64, 2, Access::Write);
                if_chunk(pairs.extent(1), &|| {
                    let best = best(&read(nan), nan, x.extent(1)).warp_max();
                    k.if_(k.lane_id().eq(0), || pairs.at([row(k), chunk(k)]).store(best));
                });
            }
        }
        block.kernel()
    }
}

/// The row of a block.
fn row<'b>(k: Builder<'b>) -> Val<'b> {
    k.block_id(Axis::X).to(Scalar::I64)
}

/// The chunk of a warp.
fn chunk<'b>(k: Builder<'b>) -> Val<'b> {
    k.block_id(Axis::Y) * Parts::WARPS + k.warp_id()
}

/// The greatest of what a warp has read, and the sum of weights below it.
pub(super) fn weigh<'b>(logits: &[Val<'b>], scale: Val<'b>) -> (Val<'b>, Val<'b>) {
    let k = scale.builder();
    let max = logits.iter().fold(k.f32(f32::NEG_INFINITY), |max, x| max.max(*x)).warp_max();
    let sum = logits.iter().fold(k.i64(0), |sum, x| sum + weight(*x, max, scale)).warp_add();
    (max, sum)
}

/// The greatest pair of what a thread has read.
pub(super) fn best<'b>(read: &[Piece<'b>], nan: Nan, columns: Val<'b>) -> Val<'b> {
    let k = columns.builder();
    let all: Vec<_> = read.iter().flat_map(Piece::each).collect();
    let Some(greatest) = all.iter().map(|(x, _)| *x).reduce(|a, b| nan.greater(a, b)) else {
        return k.i64(NONE);
    };
    let Some((_, first)) = all.first() else { return k.i64(NONE) };
    // The first of those that are equal to it. Columns rise, so none behind the last column comes before one that is not.
    let column = all.iter().rev().fold(*first, |column, (x, at)| {
        let is_it = match nan {
            Nan::Greatest => x.eq(greatest) | x.ne(*x),
            Nan::Least => x.eq(greatest),
        };
        is_it.select(*at, column)
    });
    column.to_u(Scalar::I64).lt(columns).select(pair(nan.key(greatest), column), k.i64(NONE))
}
