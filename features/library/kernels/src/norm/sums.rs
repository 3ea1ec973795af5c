//! Sums of what blocks have summed.

use vm_ir::builder::BuildError;
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use crate::call::{Entry, Launch, Operand, kernel_name};
use crate::family::{Kind, Resources};

/// Threads of a block along columns.
const THREADS: u32 = 32;

/// A kernel that adds up parts of each column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormSums {
    /// The elements of the results.
    pub element: Scalar,
    /// Results, whose parts lie behind one another.
    pub results: u8,
    /// Threads that share a column: 1 to 32.
    pub rows: u8,
    /// Columns that a thread takes: 1, or 4 where all are a multiple of that.
    pub lanes: u8,
}

impl NormSums {
    /// For so many parts of so many columns.
    pub(crate) fn of(
        element: Scalar,
        results: u8,
        [parts, columns]: [u64; 2],
        resources: &Resources,
    ) -> Self {
        if resources.kind == Kind::Cpu {
            return NormSums { element, results, rows: 1, lanes: 1 };
        }
        // About four parts for each thread.
        let rows = parts.div_ceil(4).next_power_of_two().clamp(1, 32) as u8;
        // Few columns are taken by more blocks.
        let lanes = if columns % 4 == 0 && columns >= 4096 { 4 } else { 1 };
        NormSums { element, results, rows, lanes }
    }

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let NormSums { element, results, rows, lanes } = self;
        format!("sum_of_parts_{element}_{results}r{rows}x{lanes}")
    }

    /// The launch for so many columns.
    pub(crate) fn launch(self, columns: u64, operands: Vec<Operand>) -> Launch {
        let blocks = columns.div_ceil(u64::from(THREADS) * u64::from(self.lanes));
        let grid = [blocks as u32, self.results.into(), 1];
        Launch { entry: Entry::NormSums(self), grid, operands }
    }

    /// Its kernel. Parameters: `parts`, of f32, parts × columns, those of each result behind those of the one before; and for each result
    /// `sums`, an element for each column.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let (rows, lanes) = (i32::from(self.rows), self.lanes);
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name())).block_size([THREADS, self.rows.into(), 1]);
        let multiple = u32::from(lanes);
        let parts = ViewType::new(Scalar::F32, 2, Access::Read)
            .with_dims(&[Dim::ANY, Dim::Any { multiple }])
            .aligned(4 * multiple);
        let parts = k.view_of("parts", parts.named(&["parts", "columns"]));
        let results: Vec<_> = (0..self.results)
            .map(|result| {
                let ty = ViewType::new(self.element, 1, Access::Write)
                    .with_dims(&[Dim::Any { multiple }])
                    .aligned(self.element.bytes() * multiple);
                k.view_of(&format!("sums_{result}"), ty.named(&["columns"]))
            })
            .collect();
        let columns = parts.extent(1);
        let column = (k.global_id(Axis::X).to(Scalar::I64) * i64::from(lanes)).named("column");
        let first = k.thread_id(Axis::Y);
        let inside = column.lt(columns);
        let result = k.block_id(Axis::Y);
        let count = parts.extent(0).to(Scalar::I32).div_u(i32::from(self.results));
        let before = result * count;
        let at = column.min(columns - i64::from(lanes));
        let zero = k.constant(Type::vector(Scalar::F32, lanes).unwrap_or(Type::F32), 0.0);
        let range = k.range(before + first, before + count).step(rows).unroll(8);
        let sum = range.fold(zero, |part, sum| {
            let part = parts.at([part, at]);
            sum + if lanes == 1 { part.load() } else { part.load_vector(lanes) }
        });
        let sum = if rows == 1 {
            sum
        } else {
            let wide = i32::from(lanes);
            let shared = k.shared("of_threads", Scalar::F32, &[rows.unsigned_abs(), THREADS * multiple]);
            let along = k.thread_id(Axis::X) * wide;
            shared.at([first, along]).store(sum);
            k.barrier();
            k.range(k.i32(0), rows).unroll(8).fold(zero, |part, sum| {
                let part = shared.at([part, along]);
                sum + if lanes == 1 { part.load() } else { part.load_vector(lanes) }
            })
        };
        let sum = sum.to(self.element);
        for (number, sums) in (0i32..).zip(results) {
            k.if_(inside & first.eq(0) & result.eq(number), || sums.at([at]).store(sum));
        }
        block.kernel()
    }
}
