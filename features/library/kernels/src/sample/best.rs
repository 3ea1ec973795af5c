//! The greatest of each row, of what the first pass has left of its chunks.

use super::chunk::Reader;
use super::numbers::{LEAST_KEY, NONE, Nan, unpair};
use super::parts::best;
use vm_ir::builder::{BuildError, IRBlock};
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant. Parameters: the logits, or `pairs` of the first pass; `output` of i32, `[rows]`. A block, which is a warp, has a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Best {
    /// How rows are read, where they are one chunk and no first pass is made.
    pub reader: Option<Reader>,
    /// Where NaNs stand. If below all numbers, rows of none but NaNs and −∞ have no greatest: −1 is written.
    pub nan: Nan,
}

impl Best {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let of = self.reader.map_or("parts".to_owned(), |reader| reader.name());
        format!("argmax_{}_{of}", self.nan.name())
    }

    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([32, 1, 1]);
        let of = match self.reader {
            Some(reader) => reader.view(k, "logits"),
            None => k.view("pairs", Scalar::I64, 2, Access::Read),
        };
        let output = k.view("output", Scalar::I32, 1, Access::Write);
        let row = k.block_id(Axis::X).to(Scalar::I64);
        let lane = k.lane_id();
        let mine = match self.reader {
            Some(reader) => best(&reader.chunk(of, row, k.i32(0), self.nan), self.nan, of.extent(1)),
            None => {
                let all = k.range(lane.to(Scalar::I64), of.extent(1)).step(32);
                all.fold(k.i64(NONE), |chunk, best| best.max(of.at([row, chunk]).load()))
            }
        };
        let (key, column) = unpair(mine.warp_max());
        let column = match self.nan {
            Nan::Greatest => column,
            Nan::Least => key.gt(LEAST_KEY).select(column, k.i32(-1)),
        };
        k.if_(lane.eq(0), || output.at([row]).store(column));
        block.kernel()
    }
}
