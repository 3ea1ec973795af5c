//! Rows as some threads of a warp take them: each a vector of 16 bytes where rows allow it, several of them at once.

use vm_ir::Scalar;
use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};

/// Threads of a block.
pub(crate) const THREADS: u32 = 256;

/// Vectors that a thread loads before it stores.
const AT_ONCE: i64 = 4;

/// How a row is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pieces {
    /// Elements that a thread takes in a row, of which every row has a multiple.
    pub lanes: u8,
    /// Threads that share a row: a power of two up to 32.
    pub threads: u32,
    /// Does every row begin at a multiple of a vector's bytes?
    pub aligned: bool,
}

/// The longest vector of 16 bytes at most of which rows are whole, if their buffers begin at multiples of `align` bytes.
pub(crate) fn lanes(element: Scalar, columns: u64, align: u32) -> u8 {
    let bytes = element.bytes().max(1);
    let most = (16.min(align) / bytes).clamp(1, 8);
    let all = [8u8, 4, 2, 1].into_iter();
    all.filter(|lanes| u32::from(*lanes) <= most)
        .find(|lanes| columns.is_multiple_of(u64::from(*lanes)))
        .unwrap_or(1)
}

impl Pieces {
    /// For rows of so many elements.
    pub(crate) fn of(element: Scalar, columns: u64, align: u32) -> Pieces {
        Pieces::with_lanes(lanes(element, columns, align), columns)
    }

    pub(crate) fn with_lanes(lanes: u8, columns: u64) -> Pieces {
        let vectors = columns / u64::from(lanes);
        Pieces { lanes, threads: vectors.clamp(1, 32).next_power_of_two().min(32) as u32, aligned: lanes > 1 }
    }

    pub(crate) fn suffix(self) -> String {
        format!("{}x{}", self.threads, self.lanes)
    }

    /// Rows of a block.
    pub(crate) fn rows(self) -> u64 {
        u64::from(THREADS / self.threads)
    }

    /// A view of rows, of `rank` dimensions, whose last extent is named.
    pub(crate) fn view<'b>(
        self,
        k: Builder<'b>,
        name: &str,
        element: Scalar,
        rank: usize,
        access: Access,
    ) -> PlaceRef<'b> {
        let mut dims = vec![Dim::ANY; rank];
        dims[rank - 1] = Dim::Any { multiple: self.lanes.into() };
        let mut names = vec![""; rank];
        names[rank - 1] = "d";
        let mut ty = ViewType::new(element, rank, access).with_dims(&dims).named(&names);
        if self.aligned {
            ty = ty.aligned(element.bytes() * u32::from(self.lanes));
        }
        k.view_of(name, ty)
    }

    /// The row of this thread, i64, and its first column.
    pub(crate) fn place<'b>(self, k: Builder<'b>) -> (Val<'b>, Val<'b>) {
        let thread = k.thread_id(Axis::X);
        let shift = self.threads.trailing_zeros() as i32;
        let row = k.block_id(Axis::X).to(Scalar::I64) * self.rows() + thread.shr_u(shift).to(Scalar::I64);
        let column = (thread & (self.threads as i32 - 1)) * i32::from(self.lanes);
        (row.named("row"), column.to(Scalar::I64).named("column"))
    }

    /// Does `work` for all of a thread's columns from the first on, several vectors at a time.
    pub(crate) fn each<'b>(
        self,
        k: Builder<'b>,
        first: Val<'b>,
        columns: Val<'b>,
        work: &dyn Fn(&[Val<'b>]),
    ) {
        let stride = i64::from(self.threads) * i64::from(self.lanes);
        let several = k.range(first, columns - stride * (AT_ONCE - 1)).step(stride * AT_ONCE);
        let next = several.fold(first, |column, _| {
            work(
                &(0..AT_ONCE)
                    .map(|at| if at == 0 { column } else { column + at * stride })
                    .collect::<Vec<_>>(),
            );
            column + stride * AT_ONCE
        });
        self.rest(k, next, columns, AT_ONCE - 1, work);
    }

    /// The same of at most so many vectors.
    fn rest<'b>(self, k: Builder<'b>, next: Val<'b>, columns: Val<'b>, most: i64, work: &dyn Fn(&[Val<'b>])) {
        if most == 0 {
            return;
        }
        let stride = i64::from(self.threads) * i64::from(self.lanes);
        let at = |number: i64| if number == 0 { next } else { next + number * stride };
        let all = || work(&(0..most).map(at).collect::<Vec<_>>());
        k.if_else(at(most - 1).lt(columns), all, || self.rest(k, next, columns, most - 1, work));
    }

    /// An element, or a vector of them.
    pub(crate) fn load<'b, const N: usize>(self, view: PlaceRef<'b>, at: [Val<'b>; N]) -> Val<'b> {
        if self.lanes == 1 { view.at(at).load() } else { view.at(at).load_vector(self.lanes) }
    }
}
