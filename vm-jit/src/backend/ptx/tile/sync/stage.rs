//! Where the stages of channels lie in shared memory, and where an element lies in a stage.
//!
//! A stage is one or more slabs: all rows, of up to 128 bytes each. The 16-byte pieces of a row change places by the row's number,
//! so that eight rows that are read at once lie in all banks. That pattern repeats after eight rows.

use super::super::layout::SIGNALS;
use crate::backend::ptx::asm::{Reg, def};
use crate::backend::ptx::writer::Writer;
use vm_ir::tile::{Channel, Tile};

/// Bytes of a piece, which `ldmatrix` reads and `cp.async` copies at once.
pub(super) const PIECE: u32 = 16;

/// How a stage lies in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stage {
    /// Bytes of an element.
    pub(super) size: u32,
    /// Rows, those added so that instructions find whole blocks.
    pub(super) rows: u32,
    /// Pieces in a row of a slab; a power of two.
    pub(super) pieces: u32,
    pub(super) slabs: u32,
}

impl Stage {
    pub(super) fn of(channel: &Channel) -> Stage {
        let size = channel.element.bytes();
        // A block is 16 rows or columns; of what is added up, 32 bytes.
        let block = (32 / size).max(16);
        let [rows, columns] = channel.dims.map(|extent| extent.next_multiple_of(block));
        let all = columns * size / PIECE;
        let pieces = 1 << all.trailing_zeros().min(3);
        Stage { size, rows, pieces, slabs: all / pieces }
    }

    /// Bytes of a row of a slab, and of a slab.
    pub(super) fn pitch(self) -> u32 {
        self.pieces * PIECE
    }

    pub(super) fn slab_bytes(self) -> u32 {
        self.rows * self.pitch()
    }

    pub(super) fn bytes(self) -> u32 {
        self.slabs * self.slab_bytes()
    }

    pub(super) fn columns(self) -> u32 {
        self.slabs * self.pitch() / self.size
    }

    /// By what the row's number is divided before it changes the pieces' places.
    fn shift(self) -> u32 {
        3 - self.pieces.trailing_zeros()
    }

    /// What a row has its pieces moved by: an exclusive or on the byte in the row.
    pub(super) fn moved(self, row: u32) -> u32 {
        ((row >> self.shift()) & (self.pieces - 1)) * PIECE
    }

    /// To the place of an element come so many bytes for a multiple of eight rows, and that far to the right: an exclusive or,
    /// and an addition.
    pub(super) fn further(self, rows: u32, bytes: u32) -> (u32, u32) {
        (bytes % self.pitch(), rows * self.pitch() + bytes / self.pitch() * self.slab_bytes())
    }
}

/// Offsets in bytes from the first byte of shared memory.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// By channel.
    pub(super) stages: Vec<(u32, Stage)>,
    /// By channel: the barriers of full stages; those of empty ones are behind.
    pub(super) barriers: Vec<u32>,
    /// The barriers of what the roles tell each other, full and empty, and the words of 8 bytes.
    pub(super) signals: u32,
    /// All of it, and what aligning it may take.
    pub(super) bytes: u32,
}

/// What shared memory is aligned to.
pub(super) const ALIGN: u32 = 128;

impl Layout {
    pub(super) fn of(tile: &Tile) -> Layout {
        let mut layout = Layout::default();
        let mut at = 0u32;
        let mut take = |bytes: u32| {
            let begin = at;
            at += bytes;
            begin
        };
        for channel in &tile.channels {
            let stage = Stage::of(channel);
            layout.stages.push((take(stage.bytes() * channel.stages), stage));
        }
        for channel in &tile.channels {
            layout.barriers.push(take(16 * channel.stages));
        }
        layout.signals = take(SIGNALS * (16 + 8));
        layout.bytes = at + ALIGN;
        layout
    }
}

impl Writer<'_> {
    /// The offset in a stage of what lies in a row, so many bytes to the right.
    pub(super) fn offset_in(&mut self, stage: Stage, row: Reg, byte: Reg) -> Reg {
        let by = match stage.shift() {
            0 => row,
            shift => def!(self, B32, "shr.u32", row, i64::from(shift)),
        };
        let by = def!(self, B32, "and.b32", by, i64::from(stage.pieces - 1));
        let by = def!(self, B32, "shl.b32", by, 4);
        let at = if stage.slabs > 1 {
            let pitch = stage.pitch();
            let slab = def!(self, B32, "shr.u32", byte, i64::from(pitch.trailing_zeros()));
            let low = def!(self, B32, "and.b32", byte, i64::from(pitch - 1));
            let low = def!(self, B32, "xor.b32", low, by);
            def!(self, B32, "mad.lo.u32", slab, i64::from(stage.slab_bytes()), low)
        } else {
            def!(self, B32, "xor.b32", byte, by)
        };
        def!(self, B32, "mad.lo.u32", row, i64::from(stage.pitch()), at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use vm_ir::Scalar;
    use vm_ir::module::Line;

    #[test]
    fn eight_rows_lie_in_all_banks() {
        for (element, dims) in [
            (Scalar::Bf16, [64, 64]),
            (Scalar::Bf16, [64, 32]),
            (Scalar::F16, [16, 16]),
            (Scalar::F32, [32, 96]),
            (Scalar::I8, [32, 128]),
            (Scalar::F16, [5, 3]),
        ] {
            let channel =
                Channel { name: "c".into(), element, dims, stages: 1, multicast: false, line: Line(0) };
            let stage = Stage::of(&channel);
            assert!(stage.columns() >= dims[1] && stage.rows >= dims[0], "{stage:?}");
            let at = |row: u32, piece: u32| {
                let (by, more) = stage.further(0, piece * PIECE);
                row * stage.pitch() + (by ^ stage.moved(row)) + more
            };
            let all: HashSet<u32> = (0..stage.rows)
                .flat_map(|row| (0..stage.pieces * stage.slabs).map(move |piece| at(row, piece)))
                .collect();
            assert_eq!(all.len() as u32 * PIECE, stage.bytes(), "{stage:?}");
            assert!(all.iter().all(|at| at + PIECE <= stage.bytes()));
            for piece in 0..stage.pieces * stage.slabs {
                let banks: HashSet<u32> = (0..8).map(|row| at(row, piece) % 128).collect();
                assert_eq!(banks.len(), 8, "{stage:?}");
            }
        }
    }
}
