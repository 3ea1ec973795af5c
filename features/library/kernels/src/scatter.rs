//! Rows that are added to those of a table by their numbers, and so the gradient of an embedding.
//!
//! Atomics add them in any order. In a fixed order, three kernels do: the first clears the workspace, the second makes a list of the rows that go to each
//! row of the table, in any order, and the third has a warp for each such list, which sorts it, and adds up in registers. So a row of the table is
//! written once. A list of more rows than a warp has lanes is not followed: the warp looks through all indices.

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Workspace};
use crate::family::Resources;
use crate::flat::{Fill, floats};
use crate::gather::{blocks, check_index};
use crate::graph::{self, NoGraph};
use crate::pieces::{Pieces, THREADS, lanes};
use crate::strided::aligned;
use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, IRBlock, Val};
use vm_ir::limits::MAX_GRID_YZ;
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scatter {
    /// Adds by atomics. Its parameters: `x`, `[n, d]`; `indices`, `[n]`; `y`, f32, `[rows, d]`.
    Atomic {
        /// What is added.
        element: Scalar,
        /// What an index is.
        index: Scalar,
        /// How a row is taken.
        pieces: Pieces,
    },
    /// Clears what is found. Its parameters: `last` and `count`, i32, `[rows]`.
    Clear,
    /// Finds what goes where. Its parameters: `indices`, `[n]`; `last` and `count`, i32, `[rows]`; `before`, i32, `[n]`: the row that is the next of
    /// the same list, or −1.
    Find {
        /// What an index is.
        index: Scalar,
    },
    /// Adds in the order of the rows. Its parameters: `x`, `[n, d]`; `indices`, `[n]`; `last` and `count`, i32, `[rows]`; `before`, i32, `[n]`; `y`,
    /// `[rows, d]`.
    Ordered {
        /// What is added.
        element: Scalar,
        /// What an index is.
        index: Scalar,
        /// What it is added to.
        output: Scalar,
        /// How a row is taken: by 32 threads, one vector of each.
        pieces: Pieces,
        /// Does each row of the table become its sum, zeros if nothing goes there? Then there is a warp for each of these, else for each of x.
        all: bool,
    },
}

impl Scatter {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        match self {
            Scatter::Atomic { element, index, pieces } => {
                format!("scatter_{element}_{index}_{}", pieces.suffix())
            }
            Scatter::Clear => "scatter_clear".into(),
            Scatter::Find { index } => format!("scatter_find_{index}"),
            Scatter::Ordered { element, index, output, pieces, all } => {
                let all = if *all { "_all" } else { "" };
                format!("scatter_ordered{all}_{element}_{index}_{output}_{}", pieces.suffix())
            }
        }
    }

    /// Its kernel.
    ///
    /// # Errors
    /// Pieces that there are not.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        match *self {
            Scatter::Atomic { element, index, pieces } => atomic(k, element, index, pieces),
            Scatter::Clear => clear(k),
            Scatter::Find { index } => find(k, index),
            Scatter::Ordered { element, index, output, pieces, all } => {
                ordered(k, [element, index, output], pieces, all)
            }
        }
        block.kernel()
    }
}

fn atomic(k: Builder<'_>, element: Scalar, index: Scalar, pieces: Pieces) {
    let x = pieces.view(k, "x", element, 2, Access::Read);
    let indices = k.view("indices", index, 1, Access::Read);
    let y = pieces.view(k, "y", Scalar::F32, 2, Access::ReadWrite);
    let (row, first) = pieces.place(k);
    k.if_(row.lt(indices.extent(0)) & row.lt(x.extent(0)), || {
        let to = indices.at([row]).load().to(Scalar::I64);
        k.if_(to.ge(0) & to.lt(y.extent(0)), || {
            pieces.each(k, first, x.extent(1), &|columns| {
                let values: Vec<_> = columns.iter().map(|column| x.at([row, *column]).load()).collect();
                for (column, value) in columns.iter().zip(values) {
                    y.at([to, *column]).atomic_add(value.to(Scalar::F32));
                }
            });
        });
    });
}

fn clear(k: Builder<'_>) {
    let [last, count] = ["last", "count"].map(|name| k.view(name, Scalar::I32, 1, Access::Write));
    let row = k.global_id(Axis::X);
    k.if_(row.lt(last.extent(0)) & row.lt(count.extent(0)), || {
        last.at([row]).store(-1);
        count.at([row]).store(0);
    });
}

fn find(k: Builder<'_>, index: Scalar) {
    let indices = k.view("indices", index, 1, Access::Read);
    let [last, count] = ["last", "count"].map(|name| k.view(name, Scalar::I32, 1, Access::ReadWrite));
    let before = k.view("before", Scalar::I32, 1, Access::Write);
    let row = k.global_id(Axis::X);
    k.if_(row.lt(indices.extent(0)), || {
        let to = indices.at([row]).load().to(Scalar::I64);
        k.if_(to.ge(0) & to.lt(last.extent(0)) & to.lt(count.extent(0)), || {
            let next = last.at([to]).atomic_exchange(row.to(Scalar::I32));
            before.at([row]).store(next);
            count.at([to]).atomic_add(1);
        });
    });
}

fn ordered<'b>(k: Builder<'b>, [element, index, output]: [Scalar; 3], pieces: Pieces, all: bool) {
    let x = pieces.view(k, "x", element, 2, Access::Read);
    let indices = k.view("indices", index, 1, Access::Read);
    let [last, count, before] =
        ["last", "count", "before"].map(|name| k.view(name, Scalar::I32, 1, Access::Read));
    let access = if all { Access::Write } else { Access::ReadWrite };
    let y = pieces.view(k, "y", output, 2, access);
    let n = indices.extent(0).min(x.extent(0));
    let lane = k.lane_id();
    let row = (k.block_id(Axis::X) * (THREADS / 32) as i32 + k.warp_id()).to(Scalar::I64);
    let columns = 32 * i64::from(pieces.lanes);
    let column =
        k.block_id(Axis::Y).to(Scalar::I64) * columns + lane.to(Scalar::I64) * i64::from(pieces.lanes);
    let column = column.named("column");
    let known = |to: Val<'b>| to.ge(0) & to.lt(y.extent(0)) & to.lt(last.extent(0)) & to.lt(count.extent(0));
    // The row of the table, or −1, how many go there, and the last one that was found.
    let none = || (k.i64(-1), k.i32(0), k.i32(-1));
    let there = |to: Val<'b>| (to, count.at([to]).load(), last.at([to]).load());
    let (to, many, from) = match all {
        true => k.if_else(known(row), || there(row), none),
        false => k.if_else(
            row.lt(n),
            || {
                let to = indices.at([row]).load().to(Scalar::I64);
                // One of a list has none before it.
                k.if_else(known(to), || k.if_else(before.at([row]).load().eq(-1), || there(to), none), none)
            },
            none,
        ),
    };
    // All threads of a warp have the same, which they agree on by reductions.
    let (to, many, from) = (to.warp_max(), many.warp_max(), from.warp_max());
    let ty = Type::vector(Scalar::F32, pieces.lanes).filter(|_| pieces.lanes > 1).unwrap_or(Type::F32);
    let zero = k.constant(ty, 0.0);
    let inside = column.lt(x.extent(1));
    let add = |sum: Val<'b>, row: Val<'b>| {
        let row = row.to(Scalar::I64);
        sum + k.if_else(
            inside & row.ge(0) & row.lt(n),
            || pieces.load(x, [row, column]).to(Scalar::F32),
            || zero,
        )
    };
    let sum = k.if_else(
        many.le(32),
        || {
            // Each lane has one of the list, and how many of it are less.
            let (_, mine) = k.range(k.i32(0), many).fold((from, k.i32(i32::MAX)), |number, (next, mine)| {
                let mine = lane.eq(number).select(next, mine);
                let at = next.to(Scalar::I64);
                let inside = at.ge(0) & at.lt(before.extent(0));
                (k.if_else(inside, || before.at([at]).load(), || k.i32(-1)).warp_max(), mine)
            });
            let rank = k
                .range(k.i32(0), many)
                .fold(k.i32(0), |other, rank| rank + mine.shuffle(other).lt(mine).to(Scalar::I32));
            k.range(k.i32(0), many).fold(zero, |number, sum| {
                let whose = (rank.eq(number) & lane.lt(many)).ballot().ctz();
                add(sum, mine.shuffle(whose & 31))
            })
        },
        || {
            const AT_ONCE: i32 = 4;
            let (_, _, sum) = k.while_(
                (k.i64(0), k.i32(0), zero),
                |(base, found, _)| found.lt(many) & base.lt(n),
                |(base, found, sum)| {
                    let here = (0..AT_ONCE).map(|part| {
                        let at = base + (lane + 32 * part).to(Scalar::I64);
                        k.if_else(
                            at.lt(n),
                            || indices.at([at]).load().to(Scalar::I64).eq(to),
                            || k.bool(false),
                        )
                    });
                    let here: Vec<_> = here.collect();
                    let (mut found, mut sum) = (found, sum);
                    for (part, here) in (0..AT_ONCE).zip(here) {
                        let mask = (here & to.ge(0)).ballot();
                        found = found + mask.popcount();
                        let first = base.to(Scalar::I32) + 32 * part;
                        (_, sum) = k.while_(
                            (mask, sum),
                            |(mask, _)| mask.ne(0),
                            |(mask, sum)| (mask & (mask - 1), add(sum, first + mask.ctz())),
                        );
                    }
                    (base + i64::from(32 * AT_ONCE), found, sum)
                },
            );
            sum
        },
    );
    k.if_(to.ge(0) & inside, || {
        let sum = match all {
            true => sum,
            false => pieces.load(y, [to, column]).to(Scalar::F32) + sum,
        };
        y.at([to, column]).store(sum.to(output));
    });
}

/// Rows that are added to those of a table by their numbers: y\[indices\[i\], :\] += x\[i, :\]. What has an index that is negative or not below `rows`
/// is left out.
///
/// Its buffers: `x`, `[count, columns]`; `indices`, `[count]`; `y`, `[rows, columns]`. With one column it adds numbers.
///
/// The deterministic form adds up in f32 in the order of the indices, rounds once, and takes a workspace of 8 bytes for each row of the table and 4 for each
/// that is added. The other one adds by atomics, in any order, to f32 alone. It takes longer where rows meet; the deterministic one, where more than 32
/// rows go to one of the table: for each such row a warp reads the indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScatterAdd {
    /// Rows of the table.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// Rows that are added.
    pub count: u64,
    /// What is added: f32, f16 or bf16.
    pub element: Scalar,
    /// What it is added to: likewise; f32 if it is not deterministic.
    pub output: Scalar,
    /// What an index is: i32 or i64.
    pub index: Scalar,
    /// Bytes to whose multiples x and y are aligned; 16 is fast.
    pub align: u32,
    /// Does it give the same bits at each run?
    pub deterministic: bool,
}

impl Function for ScatterAdd {
    fn buffers(&self) -> Vec<Buffer> {
        let ScatterAdd { rows, columns, count, element, output, index, .. } = *self;
        vec![
            Buffer::new("x", element, &[count, columns], Access::Read),
            Buffer::new("indices", index, &[count], Access::Read),
            Buffer::new("y", output, &[rows, columns], Access::ReadWrite),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::tables::scatter_add(self)
    }

    fn call(&self, _: &Resources) -> Result<Call, CallError> {
        self.launches(false)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        ScatterAdd { align: aligned(self.align, buffers), ..*self }.call(resources)
    }
}

impl ScatterAdd {
    /// The call, or that which sets all of y.
    fn launches(&self, all: bool) -> Result<Call, CallError> {
        const NAME: &str = "scatter_add";
        let ScatterAdd { rows, columns, count, element, output, index, align, deterministic } = *self;
        check_index(NAME, index)?;
        floats(NAME, &[element, output])?;
        if [rows, columns, count].contains(&0) {
            return Ok(Call::default());
        }
        let [x, indices, y] =
            [(0, element, vec![count, columns]), (1, index, vec![count]), (2, output, vec![rows, columns])]
                .map(|(at, element, extents)| Operand::whole(at, element, &extents));
        if !deterministic {
            if output != Scalar::F32 {
                let what = format!("atomics on {output}; there are those on f32, or the deterministic form");
                return Err(CallError::Unsupported { function: NAME, what });
            }
            // One by one: so neighbouring threads add to neighbours.
            let pieces = Pieces { aligned: false, ..Pieces::with_lanes(1, columns) };
            let grid = [blocks(NAME, count, pieces.rows())?, 1, 1];
            let entry = Entry::Scatter(Scatter::Atomic { element, index, pieces });
            return Ok(Call {
                launches: vec![Launch { entry, grid, operands: vec![x, indices, y] }],
                workspace: 0,
            });
        }
        if count > i32::MAX as u64 {
            return Err(CallError::Unsupported {
                function: NAME,
                what: format!("{count} rows; at most 2^31 − 1 are ordered"),
            });
        }
        let lanes = lanes(element, columns, align).min(lanes(output, columns, align));
        let pieces = Pieces { threads: 32, ..Pieces::with_lanes(lanes, columns) };
        let tiles = columns.div_ceil(32 * u64::from(lanes));
        let tiles = u32::try_from(tiles).ok().filter(|tiles| *tiles <= MAX_GRID_YZ).ok_or_else(|| {
            CallError::Unsupported {
                function: NAME,
                what: format!("{columns} columns; at most 65,535 · 32 vectors are ordered"),
            }
        })?;
        let mut workspace = Workspace::default();
        let [last, found] = [(); 2].map(|()| workspace.take(Scalar::I32, &[rows]));
        let before = workspace.take(Scalar::I32, &[count]);
        let per_block = u64::from(THREADS);
        let launch = |kernel, grid, operands| Launch { entry: Entry::Scatter(kernel), grid, operands };
        let lists = vec![last.clone(), found.clone()];
        let launches = vec![
            launch(Scatter::Clear, [blocks(NAME, rows, per_block)?, 1, 1], lists.clone()),
            launch(
                Scatter::Find { index },
                [blocks(NAME, count, per_block)?, 1, 1],
                [vec![indices.clone()], lists.clone(), vec![before.clone()]].concat(),
            ),
            launch(
                Scatter::Ordered { element, index, output, pieces, all },
                [blocks(NAME, if all { rows } else { count }, per_block / 32)?, tiles, 1],
                [vec![x, indices], lists, vec![before, y]].concat(),
            ),
        ];
        Ok(Call { launches, workspace: workspace.bytes() })
    }
}

/// The gradient of an [`Embedding`](crate::gather::Embedding): dtable\[v, :\] = Σ dy\[i, :\] over all i with indices\[i\] = v, zeros if there are none. Indices out of range add
/// to nothing.
///
/// Its buffers: `dy`, `[count, columns]`; `indices`, `[count]`; `dtable`, `[rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingGradient {
    /// What is added, and how.
    pub add: ScatterAdd,
    /// Is it added to the gradient that is there?
    pub accumulate: bool,
}

impl Function for EmbeddingGradient {
    fn buffers(&self) -> Vec<Buffer> {
        let mut all = self.add.buffers();
        all[0].name = "dy";
        all[2].name = "dtable";
        all[2].access = if self.accumulate { Access::ReadWrite } else { Access::Write };
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::tables::embedding_gradient(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let ScatterAdd { rows, columns, count, output, align, deterministic, .. } = self.add;
        let all = !self.accumulate && deterministic && count > 0;
        let mut call = self.add.launches(all)?;
        if !self.accumulate && !all {
            let size = rows.checked_mul(columns).ok_or_else(|| CallError::Unsupported {
                function: "embedding_gradient",
                what: format!("{rows} rows of {columns} columns; their product overflows"),
            })?;
            let fill = Fill { sizes: vec![size], element: output, align, value: 0.0 };
            let mut launches = fill.call(resources)?.launches;
            for operand in launches.iter_mut().flat_map(|launch| &mut launch.operands) {
                if let Operand::Buffer(buffer, _) = operand {
                    *buffer = 2;
                }
            }
            launches.append(&mut call.launches);
            call.launches = launches;
        }
        Ok(call)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let add = ScatterAdd { align: aligned(self.add.align, buffers), ..self.add };
        EmbeddingGradient { add, ..*self }.call(resources)
    }
}
