//! Which tiles a block computes, of one product or of many.
//!
//! Numbers are i32: no copy reaches further, and they take half the registers of the role that fetches.

use super::Gemm;
use vm_ir::Scalar;
use vm_ir::builder::{Builder, FragmentRef, PlaceRef, Val};
use vm_ir::op::Axis;

/// One product, or many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Batch {
    /// One.
    One,
    /// As many as there are matrices: each view has a dimension more, the slowest.
    Batched,
    /// As many as B has matrices, which are its slowest dimension, each of so many rows of A and of C: those from `offsets[i]` to
    /// `offsets[i + 1]`. A is not transposed; there is one offset more than matrices.
    Grouped,
}

impl Batch {
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Batch::One => "",
            Batch::Batched => "_batched",
            Batch::Grouped => "_grouped",
        }
    }

    /// The rank of A and C, and that of B.
    pub(super) fn of_rows(self) -> usize {
        if self == Batch::Batched { 3 } else { 2 }
    }

    pub(super) fn of_columns(self) -> usize {
        if self == Batch::One { 2 } else { 3 }
    }

    pub(super) fn rank_of_a(self) -> u8 {
        self.of_rows() as u8
    }
}

/// A tile of C.
#[derive(Clone, Copy)]
pub(super) struct Spot<'b> {
    batch: Batch,
    /// The number of the product, of many.
    matrix: Option<Val<'b>>,
    /// Where it begins.
    pub(super) row: Val<'b>,
    pub(super) column: Val<'b>,
    /// How many of its rows there are, where others' are behind.
    rows: Option<Val<'b>>,
    /// Where what the block has of it in the end begins, behind there.
    own: Option<[Val<'b>; 2]>,
}

impl<'b> Spot<'b> {
    pub(super) fn matrix_of_a(&self) -> Option<Val<'b>> {
        self.matrix.filter(|_| self.batch == Batch::Batched)
    }

    pub(super) fn matrix_of_b(&self) -> Option<Val<'b>> {
        self.matrix
    }

    /// What the block has of it in the end.
    pub(super) fn own(&self) -> Spot<'b> {
        match self.own {
            Some([down, right]) => {
                Spot { row: self.row + down, column: self.column + right, own: None, ..*self }
            }
            None => *self,
        }
    }

    pub(super) fn row_of_a(&self) -> Val<'b> {
        self.row
    }

    /// Loads what C has.
    pub(super) fn get(&self, fragment: FragmentRef<'b>, c: PlaceRef<'b>) {
        match self.matrix_of_a() {
            Some(matrix) => fragment.get(c, [matrix, self.row, self.column]),
            None => fragment.get(c, [self.row, self.column]),
        }
    }

    /// Stores what C is to have.
    pub(super) fn put(&self, fragment: FragmentRef<'b>, c: PlaceRef<'b>) {
        match (self.matrix_of_a(), self.rows) {
            (Some(matrix), _) => fragment.put(c, [matrix, self.row, self.column]),
            (None, None) => fragment.put(c, [self.row, self.column]),
            (None, Some(rows)) => fragment.put_rows(c, [self.row, self.column], rows),
        }
    }
}

impl<'b> Spot<'b> {
    /// Stores what C is to have, of a tile that was computed transposed.
    pub(super) fn put_transposed(&self, fragment: FragmentRef<'b>, c: PlaceRef<'b>) {
        match self.matrix_of_a() {
            Some(matrix) => fragment.put_transposed(c, [matrix, self.row, self.column]),
            None => fragment.put_transposed(c, [self.row, self.column]),
        }
    }
}

/// The way of a block through tiles.
pub(super) struct Walk<'a, 'b> {
    pub(super) gemm: &'a Gemm,
    pub(super) k: Builder<'b>,
    pub(super) c: PlaceRef<'b>,
    pub(super) offsets: Option<PlaceRef<'b>>,
}

impl<'b> Walk<'_, 'b> {
    /// Does something for each tile of the block.
    pub(super) fn each(&self, body: impl Fn(Spot<'b>)) {
        let k = self.k;
        let cluster = self.gemm.cluster as i32;
        let high = self.gemm.tile[0] as i32;
        let blocks = self.gemm.blocks() as i32;
        let first = match blocks {
            1 => k.block_id(Axis::X),
            _ => k.cluster_id(),
        };
        let step = k.grid_dim(Axis::X);
        let step = if blocks > 1 { step / blocks } else { step };
        let share = self.share();
        // Rows that the blocks of a cluster have together, and where this one's begin.
        let own = (cluster > 1).then(|| k.cluster_rank() * high);
        let batch = self.gemm.batch;
        let dimension = batch.rank_of_a() - 2;
        let extent = |dimension| self.c.extent(dimension).to(Scalar::I32);
        let tall = high * cluster;
        let up = |extent: Val<'b>, by: i32| (extent + (by - 1)) / by;
        let wide = up(extent(dimension + 1), self.gemm.tile[1] as i32).named("wide");
        if self.gemm.band == 0 && batch != Batch::Grouped {
            let matrix = (batch == Batch::Batched).then(|| k.block_id(Axis::Z));
            let row = k.block_id(Axis::Y) * high;
            let column = first * self.gemm.tile[1] as i32;
            return body(Spot { batch, matrix, row, column, rows: None, own: share });
        }
        match (batch, self.offsets) {
            (Batch::Grouped, Some(offsets)) => {
                let groups = offsets.extent(0).to(Scalar::I32) - 1;
                // Tiles of the groups before, of which each block has had its share.
                k.range(k.i32(0), groups).fold(k.i32(0), |group, before| {
                    let begin = offsets.at([group]).load();
                    let end = offsets.at([group + 1]).load();
                    let high = up((end - begin).max(0), tall);
                    let tiles = high * wide;
                    let due = (first - before) % step;
                    let due = due.lt(0).select(due + step, due);
                    k.range(due, tiles).step(step).each(|tile| {
                        let (row, column) = self.in_band(tile, high, wide, tall);
                        let rows = Some(end - begin - row);
                        body(Spot { batch, matrix: Some(group), row: begin + row, column, rows, own: None });
                    });
                    before + tiles
                });
            }
            _ => {
                let high = up(extent(dimension), tall).named("high");
                let tiles = high * wide;
                let count = if batch == Batch::Batched { tiles * extent(0) } else { tiles };
                k.range(first, count).step(step).each(|number| {
                    let (matrix, tile) = match batch {
                        Batch::Batched => (Some(number / tiles), number % tiles),
                        _ => (None, number),
                    };
                    let (row, column) = self.in_band(tile, high, wide, tall);
                    let row = own.map_or(row, |own| row + own);
                    body(Spot { batch, matrix, row, column, rows: None, own: share });
                });
            }
        }
    }

    /// Where the block's share of a tile begins whose inner dimension blocks have shared. Of one that is not shared out all but the
    /// first have nothing: it begins where nothing is stored.
    fn share(&self) -> Option<[Val<'b>; 2]> {
        let (k, gemm) = (self.k, self.gemm);
        if gemm.split <= 1 {
            return None;
        }
        let rank = k.cluster_rank();
        let along = match gemm.shares() {
            true => rank * gemm.own_dims()[1] as i32,
            false => rank.eq(0).select(k.i32(0), k.i32(i32::MIN)),
        };
        Some(if gemm.swapped { [along, k.i32(0)] } else { [k.i32(0), along] })
    }

    /// Where a tile begins, of which there are `high` rows, each of so many rows of C, of `wide`.
    fn in_band(&self, tile: Val<'b>, high: Val<'b>, wide: Val<'b>, tall: i32) -> (Val<'b>, Val<'b>) {
        let band = self.gemm.band.max(1) as i32;
        let of_band = wide * band;
        let top = tile / of_band * band;
        let inside = tile % of_band;
        // The last band may be lower.
        let height = (high - top).min(band);
        let row = (top + inside % height) * tall;
        (row, inside / height * self.gemm.tile[1] as i32)
    }
}
