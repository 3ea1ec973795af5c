//! Elementwise steps, and chains of them in one kernel: one read of each input and one write of each output.
//!
//! A [`Chain`] is the description, of up to [`MAX_INPUTS`] inputs, [`MAX_STEPS`] steps and [`MAX_OUTPUTS`] outputs. A residual that is
//! added, scaled and rounded:
//!
//! ```
//! use vm_ir::Scalar;
//! use vm_kernels::elementwise::{Along, Chain, Elementwise, Op};
//!
//! let mut chain = Chain::new();
//! let x = chain.input(Scalar::F32, Along::All);
//! let residual = chain.input(Scalar::F32, Along::All);
//! let factor = chain.number();
//! let sum = chain.step(Op::Add, x, residual);
//! let scaled = chain.step(Op::Mul, sum, factor);
//! chain.output(scaled, Scalar::Bf16);
//! let function = Elementwise { chain, rows: 1024, columns: 768, numbers: [0.5, 0.0, 0.0, 0.0], align: 16 };
//! ```
//!
//! Arrays are of f32, bf16, f16, f8e4m3 or f8e5m2. Everything is computed in f32, and rounded once, to the elements of an output, to FP8 as the IR's
//! conversion does: to the nearest, and what is beyond the greatest number to that. There are chains for what is used most:
//! [`Chain::unary`], [`Chain::binary`], [`Chain::scale`], [`Chain::cast`], [`Chain::swiglu`].

mod chain;

use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, kernel_name};
use crate::family::{Kind, Resources};
use crate::graph::{self, NoGraph};
use crate::row::{Layout, View, column, each_row, grid_of, lanes, matrix, row};
use crate::strided::step;

pub use chain::{Along, Chain, Input, Op, Value};

/// The most inputs of a chain.
pub const MAX_INPUTS: usize = 4;
/// The most steps.
pub const MAX_STEPS: usize = 8;
/// The most outputs.
pub const MAX_OUTPUTS: usize = 2;
/// Threads of a block that takes elements in a row.
const THREADS: u32 = 128;
/// Elements that a processor's thread takes in a row, and of those at once.
const RUN: u32 = 4096;
const AT_ONCE: u8 = 16;
/// Such vectors of an iteration.
const VECTORS: i64 = 4;

/// A variant of a chain's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChainKernel {
    /// What is computed.
    pub chain: Chain,
    /// How its elements are divided among threads.
    pub cut: Cut,
}

/// How elements are divided among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// Each thread takes so many in a row; arrays have one dimension.
    Flat {
        /// How many.
        lanes: u8,
        /// Bytes to whose multiples arrays are aligned.
        align: u8,
    },
    /// A block's only thread takes [`RUN`] elements, as a processor does; arrays have one dimension.
    Run,
    /// By rows.
    Rows(Layout),
}

/// A parameter of the kernel.
#[derive(Clone, Copy)]
enum Given<'b> {
    Array(View<'b>, Along),
    Number(Val<'b>),
}

impl ChainKernel {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let cut = match self.cut {
            Cut::Flat { lanes, align } => format!("x{lanes}a{align}"),
            Cut::Run => "run".to_owned(),
            Cut::Rows(layout) => layout.name(),
        };
        format!("chain_{}_{cut}", self.chain.name())
    }

    /// Its kernel. Parameters: the inputs in their order, and the outputs.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name()));
        let view = |name: &str, element, along, access| match (self.cut, along) {
            (_, Along::One) => View::of(k, name, ViewType::new(element, 1, access)),
            (Cut::Flat { align, .. }, _) => {
                let align = u32::from(align).max(element.bytes());
                let ty = ViewType::new(element, 1, access).aligned(align).named(&["n"]);
                View::of(k, name, ty)
            }
            (Cut::Run, _) => View::of(k, name, ViewType::new(element, 1, access).named(&["n"])),
            (Cut::Rows(layout), Along::All) => matrix(k, layout, name, element, access),
            (Cut::Rows(layout), Along::Columns) => row(k, layout, name, element, access),
            (Cut::Rows(_), Along::Rows) => column(k, name, element, access),
        };
        let inputs = self.chain.inputs.iter().flatten().enumerate().map(|(at, input)| match *input {
            Input::Array(element, along) => {
                Given::Array(view(&format!("x{at}"), element, along, Access::Read), along)
            }
            Input::Number => Given::Number(k.scalar(&format!("x{at}"), Type::F32)),
        });
        let inputs: Vec<Given<'_>> = inputs.collect();
        let outputs = self.chain.outputs.iter().flatten().enumerate();
        let outputs: Vec<View<'_>> = outputs
            .map(|(at, (_, element))| view(&format!("y{at}"), *element, Along::All, Access::Write))
            .collect();
        let Some(first) = outputs.first() else { return block.kernel() };
        match self.cut {
            Cut::Flat { .. } | Cut::Run => self.flat(k, first.place, &inputs, &outputs),
            Cut::Rows(layout) => each_row(k, layout, *first, |row| {
                let matrices = inputs.iter().filter_map(|input| match input {
                    Given::Array(view, Along::All) => Some(*view),
                    _ => None,
                });
                let of_row = inputs.iter().map(|input| match input {
                    Given::Array(view, Along::Rows) => row.load(*view),
                    Given::Array(view, Along::One) => one(k, *view),
                    Given::Number(number) => *number,
                    Given::Array(..) => k.f32(0.0),
                });
                let of_row: Vec<_> = of_row.collect();
                row.hold(&matrices.collect::<Vec<_>>()).each(|piece| {
                    let mut matrix = 0;
                    let values = inputs.iter().zip(&of_row).map(|(input, number)| match input {
                        Given::Array(_, Along::All) => {
                            matrix += 1;
                            piece[matrix - 1]
                        }
                        Given::Array(view, Along::Columns) => piece.of_row(*view),
                        _ => piece.splat(*number),
                    });
                    let values: Vec<_> = values.collect();
                    for (view, value) in outputs.iter().zip(self.chain.compute(&values)) {
                        piece.store(*view, value);
                    }
                });
            }),
        }
        block.kernel()
    }

    /// A thread takes a vector, and the last one what is left; or several, and behind them elements.
    fn flat<'b>(&self, k: Builder<'b>, first: PlaceRef<'b>, inputs: &[Given<'b>], outputs: &[View<'b>]) {
        let n = first.extent(0);
        let compute = |at: Val<'b>, lanes: u8| {
            let values: Vec<_> = inputs
                .iter()
                .map(|input| match input {
                    Given::Array(view, Along::One) => splat(one(k, *view), lanes),
                    Given::Array(view, _) => {
                        let element = view.place.at([at]).cached(Cache::Stream);
                        if lanes == 1 { element.load() } else { element.load_vector(lanes) }.to(Scalar::F32)
                    }
                    Given::Number(number) => splat(*number, lanes),
                })
                .collect();
            for (view, value) in outputs.iter().zip(self.chain.compute(&values)) {
                view.place.at([at]).cached(Cache::Stream).store(value.to(view.element));
            }
        };
        let Cut::Flat { lanes, .. } = self.cut else {
            let first = (k.block_id(Axis::X).to(Scalar::I64) * i64::from(RUN)).named("first");
            let end = (first + i64::from(RUN)).min(n);
            let (one, many) = (i64::from(AT_ONCE), i64::from(AT_ONCE) * VECTORS);
            let (groups, whole) = (end & -many, end & -one);
            k.range(first, groups).step(many).each(|at| {
                compute(at, AT_ONCE);
                (1..VECTORS).for_each(|vector| compute(at + vector * one, AT_ONCE));
            });
            k.range(first.max(groups), whole).step(one).each(|at| compute(at, AT_ONCE));
            return k.range(first.max(whole), end).each(|at| compute(at, 1));
        };
        k.block_size([THREADS, 1, 1]);
        let at = (k.global_id(Axis::X).to(Scalar::I64) * i32::from(lanes)).named("at");
        if lanes == 1 {
            return k.if_(at.lt(n), || compute(at, 1));
        }
        k.if_else(
            (at + i32::from(lanes)).le(n),
            || compute(at, lanes),
            || {
                k.range(k.i64(0), i64::from(lanes)).each(|lane| {
                    let at = at + lane;
                    k.if_(at.lt(n), || compute(at, 1));
                });
            },
        );
    }
}

/// The only element of a view, as f32.
fn one<'b>(k: Builder<'b>, view: View<'b>) -> Val<'b> {
    view.place.at([k.i64(0)]).load().to(Scalar::F32)
}

fn splat(number: Val<'_>, lanes: u8) -> Val<'_> {
    if lanes == 1 { number } else { number.splat(lanes) }
}

/// A chain over arrays. Buffers: the arrays of the inputs in their order, and those of the outputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Elementwise {
    /// What is computed.
    pub chain: Chain,
    /// Rows; 1 where there are none.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// The numbers of the call, as many as the chain has.
    pub numbers: [f32; MAX_INPUTS],
    /// Bytes to whose multiples all buffers are aligned; 16 or more is fastest.
    pub align: u32,
}

impl Elementwise {
    /// Of `n` elements in aligned buffers, without numbers.
    pub fn of(chain: Chain, n: u64) -> Elementwise {
        Elementwise { chain, rows: 1, columns: n, numbers: [0.0; MAX_INPUTS], align: 16 }
    }
}

/// What inputs and outputs are called.
const NAMES: [[&str; MAX_INPUTS]; 2] = [["x0", "x1", "x2", "x3"], ["y0", "y1", "y2", "y3"]];

impl Function for Elementwise {
    fn buffers(&self) -> Vec<Buffer> {
        let extents = |along| match along {
            Along::All => vec![self.rows, self.columns],
            Along::Columns => vec![self.columns],
            Along::Rows => vec![self.rows],
            Along::One => vec![1],
        };
        let inputs =
            self.chain.inputs.iter().flatten().zip(NAMES[0]).filter_map(|(input, name)| match input {
                Input::Array(element, along) => {
                    Some(Buffer::new(name, *element, &extents(*along), Access::Read))
                }
                Input::Number => None,
            });
        let outputs = self
            .chain
            .outputs
            .iter()
            .flatten()
            .zip(NAMES[1])
            .map(|((_, element), name)| Buffer::new(name, *element, &extents(Along::All), Access::Write));
        inputs.chain(outputs).collect()
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::elementwise::chain(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launch(0, resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        self.launch(step(buffers), resources)
    }
}

impl Elementwise {
    /// The launch, of rows that begin at multiples of `step` elements; of dense ones with 0.
    fn launch(&self, step: u64, resources: &Resources) -> Result<Call, CallError> {
        let Elementwise { chain, rows, columns, numbers, align } = *self;
        chain.check()?;
        let unsupported = |what| CallError::Unsupported { function: "elementwise", what };
        if rows == 0 || columns == 0 {
            return Ok(Call::default());
        }
        let elements = chain.elements();
        let count = rows
            .checked_mul(columns)
            .filter(|count| *count < 1 << 40)
            .ok_or_else(|| unsupported(format!("{rows} × {columns} elements; the most are 2^40")))?;
        let (cut, grid) = if chain.has_rows() || step != 0 {
            let held = chain.arrays().filter(|(_, along)| *along == Along::All).count() as u32;
            let alone = Resources { cluster: 1, ..*resources };
            let layout = Layout::strided([columns, step], &elements, align, held, &alone);
            let grid = grid_of("elementwise", layout, [rows, columns])?.unwrap_or([1, 1, 1]);
            (Cut::Rows(layout), grid)
        } else {
            let wide = lanes(1 << 20, &elements, align);
            let align = if align.is_power_of_two() { align.min(16) as u8 } else { 1 };
            let (cut, of_block) = match resources.kind {
                Kind::Cpu => (Cut::Run, RUN),
                Kind::Gpu => (Cut::Flat { lanes: wide, align }, THREADS * u32::from(wide)),
            };
            let blocks = count.div_ceil(of_block.into());
            if blocks >= 1 << 31 {
                return Err(unsupported(format!("{count} elements in vectors of {wide}")));
            }
            (cut, [blocks as u32, 1, 1])
        };
        let flat = !matches!(cut, Cut::Rows(_));
        let mut buffers = self.buffers().into_iter().enumerate();
        let mut view = || {
            buffers.next().map(|(at, buffer)| match flat && buffer.extents.len() == 2 {
                true => Operand::whole(at, buffer.element, &[count]),
                false => Operand::whole(at, buffer.element, &buffer.extents),
            })
        };
        let mut given = numbers.iter();
        let mut operands: Vec<Operand> = Vec::new();
        for input in chain.inputs.iter().flatten() {
            operands.extend(match input {
                Input::Array(..) => view(),
                Input::Number => given.next().map(|number| Operand::f32(*number)),
            });
        }
        while let Some(output) = view() {
            operands.push(output);
        }
        let entry = Entry::Chain(ChainKernel { chain, cut });
        Ok(Call { launches: vec![Launch { entry, grid, operands }], workspace: 0 })
    }
}
