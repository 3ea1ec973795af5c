//! Products of one row and a matrix, on processors: no tile has work for so few rows, and what counts is how fast the matrix is read.
//!
//! C is `[1, N]`, A is `[1, K]`. Rows of B that is transposed are neighbours of A's along the inner dimension: some of them at a time are
//! multiplied with the same part of A. Rows of one that is not are added up, eight at a time, each times a number of A, so that long stretches of
//! memory are read.

use super::{Batch, Gemm};
use crate::row::in_pairs;
use vm_ir::Scalar;
use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::Axis;

use super::epilogue::Parameters;

/// Rows of B that are added up at once.
const ADDED: i32 = 8;

/// A block's part of a row: the views of A, B and C, and which product of a batch it is of.
struct Line<'a, 'b> {
    gemm: Gemm,
    k: Builder<'b>,
    views: [PlaceRef<'b>; 3],
    after: &'a Parameters<'b>,
    matrix: Option<Val<'b>>,
    /// The inner dimension.
    depth: Val<'b>,
    /// The block's columns: the first, and the one behind the last.
    columns: [Val<'b>; 2],
}

impl Gemm {
    /// Are products those of a row?
    pub(super) fn is_line(&self) -> bool {
        self.tile[0] == 1
    }

    /// The body of a kernel of a row, with its views.
    pub(super) fn line<'b>(&self, k: Builder<'b>, views: [PlaceRef<'b>; 3], after: Parameters<'b>) {
        let [_, b, c] = views;
        let rank = if self.batch == Batch::Batched { 3 } else { 2 };
        let of = |view: PlaceRef<'b>, back: u8| view.extent(rank - back).to(Scalar::I32);
        let depth = of(b, if self.b_transposed { 1 } else { 2 }).named("depth");
        let wide = self.tile[1] as i32;
        let first = k.block_id(Axis::X) * wide;
        let end = (first + wide).min(of(c, 1));
        let multiply = |matrix: Option<Val<'b>>| {
            let line = Line { gemm: *self, k, views, after: &after, matrix, depth, columns: [first, end] };
            // The sums of rows that are multiplied at once have room in registers.
            match (self.b_transposed, line.lanes()) {
                (true, ..=8) => line.by_rows::<4>(),
                (true, _) => line.by_rows::<2>(),
                (false, _) => line.by_columns(),
            }
        };
        match self.batch {
            // There may be more matrices than a grid has blocks along z.
            Batch::Batched => {
                let all = k.range(k.block_id(Axis::Z), of(c, 3));
                all.step(k.grid_dim(Axis::Z)).each(|matrix| multiply(Some(matrix)));
            }
            _ => multiply(None),
        }
    }
}

impl<'b> Line<'_, 'b> {
    fn lanes(&self) -> u8 {
        self.gemm.tile[2] as u8
    }

    /// So many neighbours of a view, as f32.
    fn load(&self, view: usize, [row, column]: [Val<'b>; 2], lanes: u8) -> Val<'b> {
        let place = match self.matrix {
            Some(matrix) => self.views[view].at([matrix, row, column]),
            None => self.views[view].at([row, column]),
        };
        if lanes == 1 { place.load() } else { place.load_vector(lanes) }.to(Scalar::F32)
    }

    /// A part of A.
    fn left(&self, at: Val<'b>, lanes: u8) -> Val<'b> {
        self.load(0, [self.k.i32(0), at], lanes)
    }

    /// Stores what becomes of sums.
    fn store(&self, column: Val<'b>, sums: Val<'b>, lanes: u8) {
        let (k, c) = (self.k, self.views[2]);
        let old = || self.load(2, [k.i32(0), column], lanes);
        let found = self.after.of_values(&self.gemm, sums, old, column, lanes).to(self.gemm.output);
        match self.matrix {
            Some(matrix) => c.at([matrix, k.i32(0), column]).store(found),
            None => c.at([k.i32(0), column]).store(found),
        }
    }

    /// Of B that is transposed, so many rows at once.
    fn by_rows<const TOGETHER: usize>(&self) {
        let (k, lanes, [first, end]) = (self.k, self.lanes(), self.columns);
        let whole = self.depth & -i32::from(lanes);
        k.range(first, end).step(TOGETHER as i32).each(|column| {
            // Behind the last the last is taken again.
            let rows: [Val<'b>; TOGETHER] =
                std::array::from_fn(|at| if at == 0 { column } else { (column + at as i32).min(end - 1) });
            let add = |at: Val<'b>, sums: [Val<'b>; TOGETHER], lanes: u8| {
                let left = self.left(at, lanes);
                std::array::from_fn(|row| self.load(1, [rows[row], at], lanes).fma(left, sums[row]))
            };
            let zeros = [k.f32(0.0).splat(lanes); TOGETHER];
            let sums = k
                .range(k.i32(0), whole)
                .step(i32::from(lanes))
                .fold(zeros, |at, sums| add(at, sums, lanes))
                .map(|sums| in_pairs((0..lanes).map(|lane| sums.lane(lane)).collect(), |a, b| a + b));
            let sums = k.range(whole, self.depth).fold(sums, |at, sums| add(at, sums, 1));
            for (at, sum) in sums.into_iter().enumerate() {
                let place = column + at as i32;
                k.if_(place.lt(end), || self.store(place, sum, 1));
            }
        });
    }

    /// Of B that is not.
    fn by_columns(&self) {
        let (k, lanes, [first, end]) = (self.k, self.lanes(), self.columns);
        let wide = i32::from(lanes);
        let sums = k.shared("sums", Scalar::F32, &[self.gemm.tile[1]]);
        let whole = (end - first) & -wide;
        let each = |work: &dyn Fn(Val<'b>)| k.range(k.i32(0), whole).step(wide).each(work);
        each(&|at| sums.at([at]).store(k.f32(0.0).splat(lanes)));
        let add = |at: Val<'b>, count: i32| {
            let rows: Vec<_> = (0..count).map(|row| if row == 0 { at } else { at + row }).collect();
            let left: Vec<_> = rows.iter().map(|row| self.left(*row, 1).splat(lanes)).collect();
            each(&|column| {
                let place = || sums.at([column]);
                let sum = rows.iter().zip(&left).fold(place().load_vector(lanes), |sum, (row, left)| {
                    self.load(1, [*row, first + column], lanes).fma(*left, sum)
                });
                place().store(sum);
            });
        };
        let many = self.depth & -ADDED;
        k.range(k.i32(0), many).step(ADDED).each(|at| add(at, ADDED));
        k.range(many, self.depth).each(|at| add(at, 1));
        each(&|at| self.store(first + at, sums.at([at]).load_vector(lanes), lanes));
        k.range(first + whole, end).each(|column| {
            let sum = k
                .range(k.i32(0), self.depth)
                .fold(k.f32(0.0), |at, sum| self.load(1, [at, column], 1).fma(self.left(at, 1), sum));
            self.store(column, sum, 1);
        });
    }
}
