//! How rows are read: in chunks of 1,024 columns, each by one warp.
//!
//! What is summed is summed by chunk, whoever reads it and however wide, so that results don't depend on the launch.

use super::numbers::Nan;
use vm_ir::builder::{Builder, PlaceRef, Val};
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

    /// Reads a chunk by the warp: for each access its first column and its elements as f32, by column.
    pub(super) fn chunk<'b>(
        &self,
        x: PlaceRef<'b>,
        row: Val<'b>,
        chunk: Val<'b>,
        nan: Nan,
    ) -> Vec<(Val<'b>, Vec<Val<'b>>)> {
        let k = row.builder();
        self.part(x, row, chunk * CHUNK + k.lane_id() * self.vector, nan)
    }

    /// Reads what one lane has of a chunk, from its first column on.
    pub(super) fn part<'b>(
        &self,
        x: PlaceRef<'b>,
        row: Val<'b>,
        first: Val<'b>,
        nan: Nan,
    ) -> Vec<(Val<'b>, Vec<Val<'b>>)> {
        let k = row.builder();
        let lanes = self.vector as u8;
        let ty = Type::vector(Scalar::F32, lanes).unwrap_or(Type::F32);
        let padding = k.bits(ty, nan.padding().to_bits().into());
        let columns = x.extent(1);
        let loads = (0..self.loads).map(|load| {
            let column = first + load * 32 * self.vector;
            let inside = column.to(Scalar::I64).lt(columns);
            let place = x.at([row, column]);
            let load = || match lanes {
                1 => place.load(),
                _ => place.load_vector(lanes),
            };
            (column, k.if_else(inside, || load().to(Scalar::F32), || padding))
        });
        let loads: Vec<_> = loads.collect();
        loads
            .into_iter()
            .map(|(column, value)| match lanes {
                1 => (column, vec![value]),
                _ => (column, (0..lanes).map(|lane| value.lane(lane)).collect()),
            })
            .collect()
    }
}

/// Chunks of the row of a matrix, as an i32.
pub(super) fn chunks<'b>(x: PlaceRef<'b>) -> Val<'b> {
    (x.extent(1) + i64::from(CHUNK - 1)).shr_u(CHUNK.ilog2()).to(Scalar::I32)
}
