//! Rows of a table by their numbers: an embedding.

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand};
use crate::family::{Kind, Resources};
use crate::graph::{self, NoGraph};
use crate::pieces::{Pieces, THREADS};
use crate::strided::aligned;
use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, IRBlock, Val};
use vm_ir::limits::MAX_GRID_X;
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Rows of a table. Its parameters: `table`, `[rows, d]`; `indices`, `[n]`; `y`, `[n, d]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gather {
    /// What a row holds.
    pub element: Scalar,
    /// What an index is: i32 or i64.
    pub index: Scalar,
    /// How a row is taken.
    pub cut: Taken,
}

/// How rows are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Taken {
    /// By some threads each.
    Pieces(Pieces),
    /// Each by a block of one thread, as a processor does it.
    Serially,
}

/// Elements that a processor copies at once.
const AT_ONCE: u8 = 16;

impl Gather {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let cut = match self.cut {
            Taken::Pieces(pieces) => pieces.suffix(),
            Taken::Serially => "serial".to_owned(),
        };
        format!("gather_{}_{}_{cut}", self.element, self.index)
    }

    /// Its kernel.
    ///
    /// # Errors
    /// Pieces that there are not.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let Gather { element, index, cut } = *self;
        let Taken::Pieces(pieces) = cut else { return self.serial(guest) };
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        let table = pieces.view(k, "table", element, 2, Access::Read);
        let indices = k.view("indices", index, 1, Access::Read);
        let y = pieces.view(k, "y", element, 2, Access::Write);
        let zero = match pieces.lanes {
            1 => Some(Type::from(element)),
            lanes => Type::vector(element, lanes),
        };
        let zero = k.constant(zero.unwrap_or(Type::F32), 0);
        let (row, first) = pieces.place(k);
        k.if_(row.lt(indices.extent(0)) & row.lt(y.extent(0)), || {
            let from = indices.at([row]).load().to(Scalar::I64).named("from");
            let known = from.ge(0) & from.lt(table.extent(0));
            let store = |columns: &[Val<'_>], values: Vec<Val<'_>>| {
                for (column, value) in columns.iter().zip(values) {
                    y.at([row, *column]).cached(Cache::Stream).store(value);
                }
            };
            let copy = || {
                pieces.each(k, first, y.extent(1), &|columns| {
                    store(
                        columns,
                        columns.iter().map(|column| pieces.load(table, [from, *column])).collect(),
                    );
                });
            };
            let clear =
                || pieces.each(k, first, y.extent(1), &|columns| store(columns, vec![zero; columns.len()]));
            k.if_else(known, copy, clear);
        });
        block.kernel()
    }

    fn serial(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name());
        let matrix =
            |name, rows, access| k.view_of(name, ViewType::new(self.element, 2, access).named(&[rows, "d"]));
        let table = matrix("table", "", Access::Read);
        let indices = k.view_of("indices", ViewType::new(self.index, 1, Access::Read).named(&["n"]));
        let y = matrix("y", "n", Access::Write);
        let row = k.block_id(Axis::X).to(Scalar::I64).named("row");
        k.if_(row.lt(y.extent(0)), || {
            let from = indices.at([row]).load().to(Scalar::I64).named("from");
            let copy = |column, lanes| {
                let element = table.at([from, column]);
                let value = if lanes == 1 { element.load() } else { element.load_vector(lanes) };
                y.at([row, column]).store(value);
            };
            let clear = |column, lanes| {
                let ty = Type::vector(self.element, lanes).unwrap_or(self.element.into());
                y.at([row, column]).store(k.constant(ty, 0));
            };
            let known = from.ge(0) & from.lt(table.extent(0));
            let columns = y.extent(1);
            k.if_else(known, || each(k, columns, &copy), || each(k, columns, &clear));
        });
        block.kernel()
    }
}

/// Calls `work` for the columns of a row: with the first of each whole vector, and then with each that is left; and how many they are.
fn each<'b>(k: Builder<'b>, columns: Val<'b>, work: &dyn Fn(Val<'b>, u8)) {
    let whole = columns & -i64::from(AT_ONCE);
    k.range(k.i64(0), whole).step(i64::from(AT_ONCE)).each(|column| work(column, AT_ONCE));
    k.range(whole, columns).each(|column| work(column, 1));
}

/// What indices may be.
pub(crate) fn check_index(function: &'static str, index: Scalar) -> Result<(), CallError> {
    match index {
        Scalar::I32 | Scalar::I64 => Ok(()),
        other => Err(CallError::Unsupported {
            function,
            what: format!("indices of {other}; there are i32 and i64"),
        }),
    }
}

/// Blocks for rows.
pub(crate) fn blocks(function: &'static str, rows: u64, per_block: u64) -> Result<u32, CallError> {
    let blocks = u32::try_from(rows.div_ceil(per_block)).ok().filter(|blocks| *blocks <= MAX_GRID_X);
    blocks.ok_or_else(|| CallError::Unsupported {
        function,
        what: format!("{rows} rows; at most {per_block} · (2^31 − 1) are taken"),
    })
}

/// Rows of a table by their numbers: y\[i, :\] = table\[indices\[i\], :\], and zeros where the index is negative or not below `rows`. Nothing
/// outside of the table is read.
///
/// Its buffers: `table`, `[rows, columns]`; `indices`, `[count]`; `y`, `[count, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// Rows of the table.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// Rows that are wanted.
    pub count: u64,
    /// What an element is: any type of memory.
    pub element: Scalar,
    /// What an index is: i32 or i64.
    pub index: Scalar,
    /// Bytes to whose multiples table and y are aligned; 16 is fast.
    pub align: u32,
}

impl Function for Embedding {
    fn buffers(&self) -> Vec<Buffer> {
        let Embedding { rows, columns, count, element, index, .. } = *self;
        vec![
            Buffer::new("table", element, &[rows, columns], Access::Read),
            Buffer::new("indices", index, &[count], Access::Read),
            Buffer::new("y", element, &[count, columns], Access::Write),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::tables::embedding(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let Embedding { columns, count, element, index, align, .. } = *self;
        check_index("embedding", index)?;
        if columns == 0 || count == 0 {
            return Ok(Call::default());
        }
        let pieces = Pieces::of(element, columns, align);
        let operands = self.buffers().into_iter().enumerate();
        let operands =
            operands.map(|(at, buffer)| Operand::whole(at, buffer.element, &buffer.extents)).collect();
        let (cut, rows) = match resources.kind {
            Kind::Cpu => (Taken::Serially, 1),
            Kind::Gpu => (Taken::Pieces(pieces), pieces.rows()),
        };
        let grid = [blocks("embedding", count, rows)?, 1, 1];
        let entry = Entry::Gather(Gather { element, index, cut });
        Ok(Call { launches: vec![Launch { entry, grid, operands }], workspace: 0 })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        Embedding { align: aligned(self.align, buffers), ..*self }.call(resources)
    }
}
