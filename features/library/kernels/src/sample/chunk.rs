//! How rows are read: in chunks of 1,024 columns, each by one warp.
//!
//! What is summed is summed by chunk, whoever reads it and however wide, so that results don't depend on the launch.

use super::numbers::Nan;
use vm_ir::builder::{Builder, Carry, PlaceRef, Val};
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{Scalar, Type};

/// Columns of a chunk.
pub const CHUNK: u32 = 1024;

/// How a matrix of logits is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reader {
    /// What it holds: f32, bf16 or f16.
    pub element: Scalar,
    /// Elements of an access: 1; or those of 16 bytes, where rows begin at multiples of these.
    pub vector: u32,
    /// Accesses of a thread in a chunk, a power of two: all of it, or as many as the columns of short rows need.
    pub loads: u32,
}

impl Reader {
    /// For rows of so many columns, in memory with this alignment.
    pub fn of(element: Scalar, columns: u64, align: u32) -> Reader {
        let wide = 16 / element.bytes();
        let vector = if align.is_multiple_of(16) && columns.is_multiple_of(wide.into()) { wide } else { 1 };
        let taken = columns.clamp(1, CHUNK.into()).div_ceil(u64::from(32 * vector));
        Reader { element, vector, loads: taken.next_power_of_two() as u32 }
    }

    pub(super) fn name(&self) -> String {
        format!("{}x{}x{}", self.element, self.vector, self.loads)
    }

    /// The matrix as a parameter.
    pub(super) fn view<'b>(&self, k: Builder<'b>, name: &str) -> PlaceRef<'b> {
        let ty = ViewType::new(self.element, 2, Access::Read);
        k.view_of(
            name,
            match self.vector {
                1 => ty,
                vector => ty.aligned(16).with_dims(&[Dim::ANY, Dim::Any { multiple: vector }]),
            },
        )
    }

    /// Reads a chunk by the warp.
    pub(super) fn chunk<'b>(
        &self,
        x: PlaceRef<'b>,
        row: Val<'b>,
        chunk: Val<'b>,
        nan: Nan,
    ) -> Vec<Piece<'b>> {
        self.part(x, row, self.first(chunk), nan)
    }

    /// Where this lane's part of a chunk begins.
    pub(super) fn first<'b>(&self, chunk: Val<'b>) -> Val<'b> {
        chunk * CHUNK + chunk.builder().lane_id() * self.vector
    }

    /// Reads a part, about `batch` elements at a time, which are handed to `each` in order.
    pub(super) fn fold_part<'b, T: Carry<'b>>(
        &self,
        (x, row, first): (PlaceRef<'b>, Val<'b>, Val<'b>),
        (nan, batch): (Nan, u32),
        state: T,
        each: impl FnOnce(T, &[Piece<'b>]) -> T,
    ) -> T {
        let k = row.builder();
        let batch = (batch / self.vector).clamp(1, 8);
        if self.loads <= batch {
            return each(state, &self.part(x, row, first, nan));
        }
        let some = Reader { loads: batch, ..*self };
        let step = batch * 32 * self.vector;
        k.range(k.i32(0), self.loads * 32 * self.vector)
            .step(step)
            .fold(state, |at, state| each(state, &some.part(x, row, first + at, nan)))
    }

    /// Reads what one lane has of a chunk, from its first column on. What is behind the last column is padding: the last elements are
    /// read in its place, so that all loads are on their way together.
    pub(super) fn part<'b>(&self, x: PlaceRef<'b>, row: Val<'b>, first: Val<'b>, nan: Nan) -> Vec<Piece<'b>> {
        let k = row.builder();
        let lanes = self.vector as u8;
        let ty = Type::vector(Scalar::F32, lanes).unwrap_or(Type::F32);
        let padding = k.bits(ty, nan.padding().to_bits().into());
        let columns = x.extent(1).to(Scalar::I32);
        let last = columns - self.vector as i32;
        let loads: Vec<_> = (0..self.loads)
            .map(|load| {
                let column = first + load * 32 * self.vector;
                let place = x.at([row, column.min(last)]);
                (column, if lanes == 1 { place.load() } else { place.load_vector(lanes) })
            })
            .collect();
        let pieces = loads.into_iter().map(|(first, loaded)| {
            let value = first.lt(columns).select(loaded.to(Scalar::F32), padding);
            let logits =
                if lanes == 1 { vec![value] } else { (0..lanes).map(|lane| value.lane(lane)).collect() };
            Piece { first, logits }
        });
        pieces.collect()
    }
}

/// What a lane reads at once.
pub(super) struct Piece<'b> {
    /// Its first column.
    pub(super) first: Val<'b>,
    /// Its logits, as f32.
    pub(super) logits: Vec<Val<'b>>,
}

impl<'b> Piece<'b> {
    /// Each logit with its column.
    pub(super) fn each(&self) -> impl Iterator<Item = (Val<'b>, Val<'b>)> + '_ {
        (0i32..)
            .zip(&self.logits)
            .map(|(lane, x)| (*x, if lane == 0 { self.first } else { self.first + lane }))
    }
}

/// Chunks of the row of a matrix, as an i32.
pub(super) fn chunks<'b>(x: PlaceRef<'b>) -> Val<'b> {
    (x.extent(1) + i64::from(CHUNK - 1)).shr_u(CHUNK.ilog2()).to(Scalar::I32)
}
