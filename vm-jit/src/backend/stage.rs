//! How a tile lies in shared memory.
//!
//! A stage is one or more slabs: all rows, of up to 128 bytes each. The 16-byte pieces of a row change places by the row's number,
//! so that eight rows that are read at once lie in all banks. That pattern repeats after eight rows.

use vm_ir::tile::Channel;

/// Bytes of a piece, which an instruction reads or copies at once.
pub(in crate::backend) const PIECE: u32 = 16;

/// How a stage lies in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) struct Stage {
    /// Bytes of an element.
    pub(in crate::backend) size: u32,
    /// Rows, those added so that instructions find whole blocks.
    pub(in crate::backend) rows: u32,
    /// Pieces in a row of a slab; a power of two.
    pub(in crate::backend) pieces: u32,
    pub(in crate::backend) slabs: u32,
}

impl Stage {
    pub(in crate::backend) fn of(channel: &Channel) -> Stage {
        Stage::of_size(channel.element.bytes(), channel.dims)
    }

    /// That of a tile of elements of so many bytes.
    pub(in crate::backend) fn of_size(size: u32, dims: [u32; 2]) -> Stage {
        // A block is 16 rows or columns; of what is added up, 32 bytes.
        let block = (32 / size).max(16);
        let [rows, columns] = dims.map(|extent| extent.next_multiple_of(block));
        let all = columns * size / PIECE;
        let pieces = 1 << all.trailing_zeros().min(3);
        Stage { size, rows, pieces, slabs: all / pieces }
    }

    /// Bytes of a row of a slab, and of a slab.
    pub(in crate::backend) fn pitch(self) -> u32 {
        self.pieces * PIECE
    }

    pub(in crate::backend) fn slab_bytes(self) -> u32 {
        self.rows * self.pitch()
    }

    pub(in crate::backend) fn bytes(self) -> u32 {
        self.slabs * self.slab_bytes()
    }

    pub(in crate::backend) fn columns(self) -> u32 {
        self.slabs * self.pitch() / self.size
    }

    /// By what the row's number is divided before it changes the pieces' places.
    pub(in crate::backend) fn shift(self) -> u32 {
        3 - self.pieces.trailing_zeros()
    }

    /// What a row has its pieces moved by: an exclusive or on the byte in the row.
    pub(in crate::backend) fn moved(self, row: u32) -> u32 {
        ((row >> self.shift()) & (self.pieces - 1)) * PIECE
    }

    /// To the place of an element come so many bytes for a multiple of eight rows, and that far to the right: an exclusive or,
    /// and an addition.
    pub(in crate::backend) fn further(self, rows: u32, bytes: u32) -> (u32, u32) {
        (bytes % self.pitch(), rows * self.pitch() + bytes / self.pitch() * self.slab_bytes())
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
