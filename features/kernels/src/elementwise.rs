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
//! Everything is computed in f32, and rounded once, to the elements of an output. There are chains for what is used most:
//! [`Chain::unary`], [`Chain::binary`], [`Chain::scale`], [`Chain::cast`], [`Chain::swiglu`].

use vm_ir::builder::{BuildError, Builder, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, kernel_name};
use crate::family::{Kind, Resources};
use crate::row::{Layout, View, column, each_row, grid_of, lanes, matrix, row};

/// The most inputs of a chain.
pub const MAX_INPUTS: usize = 4;
/// The most steps.
pub const MAX_STEPS: usize = 8;
/// The most outputs.
pub const MAX_OUTPUTS: usize = 2;
/// Threads of a block that takes elements in a row.
const THREADS: u32 = 128;

/// What an input has an element for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Along {
    /// Each element of a row, for each row: rows × columns.
    All,
    /// Each element of a row, the same for all rows: columns.
    Columns,
    /// Each row, the same for all its elements: rows.
    Rows,
    /// All elements: 1.
    One,
}

/// An input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// An array.
    Array(Scalar, Along),
    /// A number of the call, of f32.
    Number,
}

/// What a step computes of `a`, or of `a` and `b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// a + b.
    Add,
    /// a − b.
    Sub,
    /// a · b.
    Mul,
    /// a / b.
    Div,
    /// The lesser, NaN if either is.
    Min,
    /// The greater, NaN if either is.
    Max,
    /// −a.
    Neg,
    /// The magnitude of a.
    Abs,
    /// e^a.
    Exp,
    /// 1 / √a.
    Rsqrt,
    /// tanh a.
    Tanh,
    /// 1 / (1 + e^−a).
    Sigmoid,
    /// a, or 0 where a is less; NaN if a is.
    Relu,
    /// a / (1 + e^−a) (Elfwing et al. 2017).
    Silu,
    /// a · (1 + erf(a / √2)) / 2 (Hendrycks and Gimpel 2016).
    Gelu,
    /// a · (1 + tanh(√(2 / π) · (a + 0.044715 · a³))) / 2, which is near to [`Gelu`](Op::Gelu).
    GeluTanh,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Op::Add => "add",
            Op::Sub => "sub",
            Op::Mul => "mul",
            Op::Div => "div",
            Op::Min => "min",
            Op::Max => "max",
            Op::Neg => "neg",
            Op::Abs => "abs",
            Op::Exp => "exp",
            Op::Rsqrt => "rsqrt",
            Op::Tanh => "tanh",
            Op::Sigmoid => "sigmoid",
            Op::Relu => "relu",
            Op::Silu => "silu",
            Op::Gelu => "gelu",
            Op::GeluTanh => "gelu_tanh",
        }
    }

    fn of<'b>(self, a: Val<'b>, b: Val<'b>) -> Val<'b> {
        let constant = |number: f64| a.builder().constant(a.ty(), number);
        match self {
            Op::Add => a + b,
            Op::Sub => a - b,
            Op::Mul => a * b,
            Op::Div => a / b,
            Op::Min => a.minimum(b),
            Op::Max => a.maximum(b),
            Op::Neg => -a,
            Op::Abs => a.abs(),
            Op::Exp => a.exp(),
            Op::Rsqrt => a.rsqrt(),
            Op::Tanh => a.tanh(),
            Op::Sigmoid => 1.0 / ((-a).exp() + 1.0),
            Op::Relu => a.maximum(constant(0.0)),
            Op::Silu => a / ((-a).exp() + 1.0),
            Op::Gelu => a * 0.5 * ((a * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0),
            Op::GeluTanh => {
                let inner = a * (a * a).fma(constant(0.044715), constant(1.0));
                a * 0.5 * ((inner * (2.0 / std::f64::consts::PI).sqrt()).tanh() + 1.0)
            }
        }
    }
}

/// A value of a chain: an input, or what a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Value(u8);

/// From which a value is a step's.
const FIRST_STEP: u8 = MAX_INPUTS as u8;

/// Inputs, steps and outputs of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Chain {
    inputs: [Option<Input>; MAX_INPUTS],
    steps: [Option<(Op, Value, Value)>; MAX_STEPS],
    outputs: [Option<(Value, Scalar)>; MAX_OUTPUTS],
    /// More of something than there can be.
    overfull: bool,
}

impl Chain {
    /// A chain of nothing yet.
    pub fn new() -> Chain {
        Chain::default()
    }

    /// Puts it into the first free place, whose number it gives.
    fn put<T>(places: &mut [Option<T>], one: T, overfull: &mut bool) -> u8 {
        match places.iter_mut().enumerate().find(|(_, place)| place.is_none()) {
            Some((at, place)) => {
                *place = Some(one);
                at as u8
            }
            None => {
                *overfull = true;
                0
            }
        }
    }

    /// An array: the next buffer.
    pub fn input(&mut self, element: Scalar, along: Along) -> Value {
        Value(Chain::put(&mut self.inputs, Input::Array(element, along), &mut self.overfull))
    }

    /// A number of the call: the next one.
    pub fn number(&mut self) -> Value {
        Value(Chain::put(&mut self.inputs, Input::Number, &mut self.overfull))
    }

    /// A step of two values. Those of one take no notice of `b`.
    pub fn step(&mut self, op: Op, a: Value, b: Value) -> Value {
        Value(FIRST_STEP + Chain::put(&mut self.steps, (op, a, b), &mut self.overfull))
    }

    /// A step of one value.
    pub fn apply(&mut self, op: Op, a: Value) -> Value {
        self.step(op, a, a)
    }

    /// Writes a value to an array of rows × columns: the next buffer, behind those of the inputs.
    pub fn output(&mut self, value: Value, element: Scalar) {
        Chain::put(&mut self.outputs, (value, element), &mut self.overfull);
    }

    /// One step of one array: [`Op::Silu`], say.
    pub fn unary(op: Op, input: Scalar, output: Scalar) -> Chain {
        let mut chain = Chain::new();
        let x = chain.input(input, Along::All);
        let y = chain.apply(op, x);
        chain.output(y, output);
        chain
    }

    /// One step of two arrays: [`Op::Add`], say.
    pub fn binary(op: Op, input: Scalar, output: Scalar) -> Chain {
        let mut chain = Chain::new();
        let [a, b] = [0; 2].map(|_| chain.input(input, Along::All));
        let y = chain.step(op, a, b);
        chain.output(y, output);
        chain
    }

    /// An array times a number of the call.
    pub fn scale(input: Scalar, output: Scalar) -> Chain {
        let mut chain = Chain::new();
        let (x, factor) = (chain.input(input, Along::All), chain.number());
        let y = chain.step(Op::Mul, x, factor);
        chain.output(y, output);
        chain
    }

    /// An array in other elements.
    pub fn cast(input: Scalar, output: Scalar) -> Chain {
        let mut chain = Chain::new();
        let x = chain.input(input, Along::All);
        chain.output(x, output);
        chain
    }

    /// silu(gate) · up (Shazeer 2020).
    pub fn swiglu(input: Scalar, output: Scalar) -> Chain {
        let mut chain = Chain::new();
        let [gate, up] = [0; 2].map(|_| chain.input(input, Along::All));
        let gate = chain.apply(Op::Silu, gate);
        let y = chain.step(Op::Mul, gate, up);
        chain.output(y, output);
        chain
    }

    fn arrays(&self) -> impl Iterator<Item = (Scalar, Along)> + '_ {
        self.inputs.iter().flatten().filter_map(|input| match input {
            Input::Array(element, along) => Some((*element, *along)),
            Input::Number => None,
        })
    }

    /// The types of arrays that are accessed in vectors.
    fn elements(&self) -> Vec<Scalar> {
        let outputs = self.outputs.iter().flatten().map(|(_, element)| *element);
        self.arrays()
            .filter(|(_, along)| matches!(along, Along::All | Along::Columns))
            .map(|(element, _)| element)
            .chain(outputs)
            .collect()
    }

    /// Does an element's place in its row matter?
    fn has_rows(&self) -> bool {
        self.arrays().any(|(_, along)| matches!(along, Along::Columns | Along::Rows))
    }

    /// What a name says of it.
    fn name(&self) -> String {
        let value = |Value(number): Value| match number.checked_sub(FIRST_STEP) {
            Some(step) => format!("s{step}"),
            None => format!("i{number}"),
        };
        let inputs = self.inputs.iter().flatten().map(|input| match input {
            Input::Array(element, Along::All) => format!("{element}"),
            Input::Array(element, Along::Columns) => format!("{element}c"),
            Input::Array(element, Along::Rows) => format!("{element}r"),
            Input::Array(element, Along::One) => format!("{element}o"),
            Input::Number => "n".to_owned(),
        });
        let steps = self
            .steps
            .iter()
            .flatten()
            .map(|(op, a, b)| format!("{}_{}_{}", op.name(), value(*a), value(*b)));
        let outputs = self.outputs.iter().flatten().map(|(of, element)| format!("{}_{element}", value(*of)));
        inputs.chain(steps).chain(outputs).collect::<Vec<_>>().join("_")
    }

    /// # Errors
    /// What can't be a kernel.
    fn check(&self) -> Result<(), CallError> {
        let unsupported = |what: String| Err(CallError::Unsupported { function: "elementwise", what });
        if self.overfull {
            return unsupported(format!(
                "the most are {MAX_INPUTS} inputs, {MAX_STEPS} steps and {MAX_OUTPUTS} outputs"
            ));
        }
        if self.outputs[0].is_none() || self.arrays().next().is_none() {
            return unsupported("a chain has an array and an output, at least".into());
        }
        let floats = [Scalar::F32, Scalar::Bf16, Scalar::F16];
        let outputs = self.outputs.iter().flatten().map(|(_, element)| *element);
        let mut elements = self.arrays().map(|(element, _)| element).chain(outputs);
        if let Some(other) = elements.find(|element| !floats.contains(element)) {
            return unsupported(format!("an array of {other}; there are f32, bf16 and f16"));
        }
        let steps = self.steps.iter().flatten().enumerate();
        let uses = steps.flat_map(|(at, (_, a, b))| [(*a, at), (*b, at)]);
        let written = self.outputs.iter().flatten().map(|(value, _)| (*value, MAX_STEPS));
        for (Value(number), before) in uses.chain(written) {
            let is = match number.checked_sub(FIRST_STEP) {
                Some(step) => {
                    usize::from(step) < before
                        && self.steps.get(usize::from(step)).is_some_and(Option::is_some)
                }
                None => self.inputs[usize::from(number)].is_some(),
            };
            if !is {
                return unsupported("a value of another chain".into());
            }
        }
        Ok(())
    }

    /// The outputs, of the inputs' values.
    fn compute<'b>(&self, inputs: &[Val<'b>]) -> Vec<Val<'b>> {
        let mut steps: Vec<Val<'b>> = Vec::new();
        let value = |steps: &[Val<'b>], Value(number): Value| match number.checked_sub(FIRST_STEP) {
            Some(step) => steps[usize::from(step)],
            None => inputs[usize::from(number)],
        };
        for (op, a, b) in self.steps.iter().flatten() {
            let next = op.of(value(&steps, *a), value(&steps, *b));
            steps.push(next);
        }
        self.outputs.iter().flatten().map(|(of, _)| value(&steps, *of)).collect()
    }
}

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
            Cut::Flat { lanes, .. } => self.flat(k, lanes, first.place, &inputs, &outputs),
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

    /// A thread takes a vector, and the last one what is left.
    fn flat<'b>(
        &self,
        k: Builder<'b>,
        lanes: u8,
        first: PlaceRef<'b>,
        inputs: &[Given<'b>],
        outputs: &[View<'b>],
    ) {
        k.block_size([THREADS, 1, 1]);
        let at = (k.global_id(Axis::X).to(Scalar::I64) * i32::from(lanes)).named("at");
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
                    Some(Buffer { name, element: *element, extents: extents(*along), access: Access::Read })
                }
                Input::Number => None,
            });
        let outputs = self.chain.outputs.iter().flatten().zip(NAMES[1]).map(|((_, element), name)| Buffer {
            name,
            element: *element,
            extents: extents(Along::All),
            access: Access::Write,
        });
        inputs.chain(outputs).collect()
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
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
        let (cut, grid) = if chain.has_rows() {
            let held = chain.arrays().filter(|(_, along)| *along == Along::All).count() as u32;
            let layout = Layout::of(columns, &elements, align, held, &Resources { cluster: 1, ..*resources });
            let grid = grid_of("elementwise", layout, [rows, columns])?.unwrap_or([1, 1, 1]);
            (Cut::Rows(layout), grid)
        } else {
            let mut wide = lanes(1 << 20, &elements, align);
            if resources.kind == Kind::Cpu {
                wide = wide.min(4);
            }
            let blocks = count.div_ceil(u64::from(THREADS) * u64::from(wide));
            if blocks >= 1 << 31 {
                return Err(unsupported(format!("{count} elements in vectors of {wide}")));
            }
            let align = if align.is_power_of_two() { align.min(16) as u8 } else { 1 };
            (Cut::Flat { lanes: wide, align }, [blocks as u32, 1, 1])
        };
        let flat = matches!(cut, Cut::Flat { .. });
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
