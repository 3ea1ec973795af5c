//! Sums of columns, as of the gradient of a bias: blocks add up slices of the rows, and a second launch adds up the slices. The order depends on
//! the extents alone.

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Workspace};
use crate::family::{Kind, Resources};
use crate::flat::floats;
use crate::gather::blocks;
use crate::graph::{self, NoGraph};
use crate::norm::NormSums;
use crate::pieces::{Pieces, THREADS, lanes};
use crate::strided::aligned;
use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, IRBlock};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Warps of a block, each of which takes rows of its own.
const WARPS: u32 = THREADS / 32;

/// A kernel that adds up slices. Its parameters: `x`, `[rows, d]`; `partial`, f32, `[slices, columns]`; the rows of a slice, i64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnSlices {
    /// What is added up.
    pub element: Scalar,
    /// Columns that a thread takes.
    pub lanes: u8,
}

impl ColumnSlices {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        format!("column_slices_{}_{}", self.element, self.lanes)
    }

    /// Its kernel.
    ///
    /// # Errors
    /// Lanes that there are not.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        slices(k, self.element, self.lanes);
        block.kernel()
    }
}

fn slices(k: Builder<'_>, element: Scalar, lanes: u8) {
    let pieces = Pieces { lanes, threads: 32, aligned: lanes > 1 };
    let wide = 32 * u32::from(lanes);
    let x = pieces.view(k, "x", element, 2, Access::Read);
    let partial = k.view("partial", Scalar::F32, 2, Access::Write);
    let height = k.scalar_in("height", Type::I64, 1, 1 << 40);
    let sums = k.shared("sums", Scalar::F32, &[WARPS, wide]);
    let (lane, warp, t) = (k.lane_id(), k.warp_id(), k.thread_id(Axis::X));
    let left = k.block_id(Axis::X).to(Scalar::I64) * i64::from(wide);
    let column = left + (lane * i32::from(lanes)).to(Scalar::I64);
    let slice = k.block_id(Axis::Y);
    let top = slice.to(Scalar::I64) * height;
    let ty = Type::vector(Scalar::F32, lanes).filter(|_| lanes > 1).unwrap_or(Type::F32);
    let zero = k.constant(ty, 0.0);
    let sum = k.if_else(
        column.lt(x.extent(1)),
        || {
            let rows = k.range(top + warp.to(Scalar::I64), (top + height).min(x.extent(0))).step(WARPS);
            rows.unroll(8).fold(zero, |row, sum| {
                let at = x.at([row, column]).cached(Cache::Stream);
                let value = if lanes == 1 { at.load() } else { at.load_vector(lanes) };
                sum + value.to(Scalar::F32)
            })
        },
        || zero,
    );
    sums.at([warp, lane * i32::from(lanes)]).store(sum);
    k.barrier();
    let column = left + t.to(Scalar::I64);
    k.if_(t.lt(wide as i32) & column.lt(x.extent(1)), || {
        let first = sums.at([k.i32(0), t]).load();
        let sum = (1..WARPS as i32).fold(first, |sum, warp| sum + sums.at([k.i32(warp), t]).load());
        partial.at([slice.to(Scalar::I64), column]).store(sum);
    });
}

/// The launch that adds up slices of a buffer, and where the sums of the slices are.
pub(crate) fn of_slices(
    function: &'static str,
    buffer: usize,
    element: Scalar,
    [rows, columns]: [u64; 2],
    align: u32,
    workspace: &mut Workspace,
) -> Result<(Launch, Operand), CallError> {
    /// Blocks, about, among which the rows are divided; the most slices; and the least rows of one.
    const BLOCKS: u64 = 1024;
    const SLICES: u64 = 256;
    const HEIGHT: u64 = 4 * WARPS as u64;
    let lanes = lanes(element, columns, align);
    let tiles = blocks(function, columns, 32 * u64::from(lanes))?;
    let slices = (BLOCKS / u64::from(tiles)).clamp(1, SLICES).min(rows.div_ceil(HEIGHT));
    let height = rows.div_ceil(slices);
    let slices = rows.div_ceil(height);
    let partial = workspace.take(Scalar::F32, &[slices, columns]);
    let x = Operand::whole(buffer, element, &[rows, columns]);
    let operands = vec![x, partial.clone(), Operand::i64(height.cast_signed())];
    let entry = Entry::ColumnSlices(ColumnSlices { element, lanes });
    Ok((Launch { entry, grid: [tiles, slices as u32, 1], operands }, partial))
}

/// Sums of columns: y\[j\] = Σ x\[i, j\], in f32, the same bits at each run. Its buffers: `x`, `[rows, columns]`; `y`, `[columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnSums {
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub columns: u64,
    /// What is added up: f32, f16 or bf16.
    pub element: Scalar,
    /// What a sum becomes: likewise.
    pub output: Scalar,
    /// Bytes to whose multiples x is aligned; 16 is fast.
    pub align: u32,
}

impl Function for ColumnSums {
    fn buffers(&self) -> Vec<Buffer> {
        let ColumnSums { rows, columns, element, output, .. } = *self;
        vec![
            Buffer::new("x", element, &[rows, columns], Access::Read),
            Buffer::new("y", output, &[columns], Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::tables::column_sums(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "column_sums";
        let ColumnSums { rows, columns, element, output, align } = *self;
        floats(NAME, &[element, output])?;
        if columns == 0 {
            return Ok(Call::default());
        }
        if rows == 0 {
            // Of no rows the sums are 0.
            let mut call = crate::flat::Fill {
                sizes: vec![columns],
                element: output,
                align: output.bytes(),
                value: 0.0,
            }
            .call(resources)?;
            for operand in call.launches.iter_mut().flat_map(|launch| &mut launch.operands) {
                if let Operand::Buffer(buffer, _) = operand {
                    *buffer = 1;
                }
            }
            return Ok(call);
        }
        let mut workspace = Workspace::default();
        let (first, partial) = of_slices(NAME, 0, element, [rows, columns], align, &mut workspace)?;
        let operands = vec![partial, Operand::whole(1, output, &[columns])];
        // Those of the second launch are 32 columns each.
        blocks(NAME, columns, 32)?;
        // On a GPU many threads share a column: few columns are many slices.
        let rows = if resources.kind == Kind::Cpu { 1 } else { 32 };
        let second = NormSums { element: output, results: 1, rows, lanes: 1 }.launch(columns, operands);
        Ok(Call { launches: vec![first, second], workspace: workspace.bytes() })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        ColumnSums { align: aligned(self.align, buffers), ..*self }.call(resources)
    }
}
