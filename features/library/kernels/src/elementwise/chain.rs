//! What a chain computes.

use std::convert::Infallible;

use vm_ir::Scalar;
use vm_ir::builder::Val;

use super::{MAX_INPUTS, MAX_OUTPUTS, MAX_STEPS};
use crate::call::CallError;
use crate::row::Precision;

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

    fn of<'b>(self, a: Val<'b>, b: Val<'b>, precision: Precision) -> Val<'b> {
        let exp = |x| precision.exp(x);
        let quotient = |a: Val<'b>, b: Val<'b>| match precision {
            Precision::Full => a / b,
            Precision::Rough => (a / b).fast(),
        };
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
            Op::Exp => exp(a),
            Op::Rsqrt => a.rsqrt(),
            Op::Tanh => a.tanh(),
            Op::Sigmoid => quotient(constant(1.0), exp(-a) + 1.0),
            Op::Relu => a.maximum(constant(0.0)),
            Op::Silu => quotient(a, exp(-a) + 1.0),
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
    pub(crate) inputs: [Option<Input>; MAX_INPUTS],
    steps: [Option<(Op, Value, Value)>; MAX_STEPS],
    pub(super) outputs: [Option<(Value, Scalar)>; MAX_OUTPUTS],
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

    /// An array times a number of the call: to FP8, with the reciprocal of a tensor's scale.
    pub fn scale(input: Scalar, output: Scalar) -> Chain {
        let mut chain = Chain::new();
        let (x, factor) = (chain.input(input, Along::All), chain.number());
        let y = chain.step(Op::Mul, x, factor);
        chain.output(y, output);
        chain
    }

    /// An array in other elements. What is beyond the greatest of FP8 becomes that one, 448 of E4M3 and 57,344 of E5M2.
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

    pub(super) fn arrays(&self) -> impl Iterator<Item = (Scalar, Along)> + '_ {
        self.inputs.iter().flatten().filter_map(|input| match input {
            Input::Array(element, along) => Some((*element, *along)),
            Input::Number => None,
        })
    }

    /// The types of arrays that are accessed in vectors.
    pub(super) fn elements(&self) -> Vec<Scalar> {
        let outputs = self.outputs.iter().flatten().map(|(_, element)| *element);
        self.arrays()
            .filter(|(_, along)| matches!(along, Along::All | Along::Columns))
            .map(|(element, _)| element)
            .chain(outputs)
            .collect()
    }

    /// Does an element's place in its row matter?
    pub(super) fn has_rows(&self) -> bool {
        self.arrays().any(|(_, along)| matches!(along, Along::Columns | Along::Rows))
    }

    /// What a name says of it.
    pub(super) fn name(&self) -> String {
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
    pub(crate) fn check(&self) -> Result<(), CallError> {
        let unsupported = |what: String| Err(CallError::Unsupported { function: "elementwise", what });
        if self.overfull {
            return unsupported(format!(
                "the most are {MAX_INPUTS} inputs, {MAX_STEPS} steps and {MAX_OUTPUTS} outputs"
            ));
        }
        if self.outputs[0].is_none() || self.arrays().next().is_none() {
            return unsupported("a chain has an array and an output, at least".into());
        }
        let floats = [Scalar::F32, Scalar::Bf16, Scalar::F16, Scalar::F8E4M3, Scalar::F8E5M2];
        let outputs = self.outputs.iter().flatten().map(|(_, element)| *element);
        let mut elements = self.arrays().map(|(element, _)| element).chain(outputs);
        if let Some(other) = elements.find(|element| !floats.contains(element)) {
            return unsupported(format!("an array of {other}; there are f32, bf16, f16, f8e4m3 and f8e5m2"));
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
    pub(super) fn compute<'b>(&self, inputs: &[Val<'b>]) -> Vec<Val<'b>> {
        let rough =
            self.outputs.iter().flatten().all(|(_, element)| Precision::of(*element) == Precision::Rough);
        let precision = if rough { Precision::Rough } else { Precision::Full };
        let Ok(outputs) = self.fold(inputs, |op, a, b| Ok::<_, Infallible>(op.of(a, b, precision)));
        outputs
    }

    /// The outputs, of the inputs' values and what a step makes of two.
    ///
    /// # Errors
    /// That of a step.
    pub(crate) fn fold<T: Copy, E>(
        &self,
        inputs: &[T],
        mut step: impl FnMut(Op, T, T) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let mut steps = Vec::new();
        let value = |steps: &[T], Value(number): Value| match number.checked_sub(FIRST_STEP) {
            Some(step) => steps[usize::from(step)],
            None => inputs[usize::from(number)],
        };
        for (op, a, b) in self.steps.iter().flatten() {
            let next = step(*op, value(&steps, *a), value(&steps, *b))?;
            steps.push(next);
        }
        Ok(self.outputs.iter().flatten().map(|(of, _)| value(&steps, *of)).collect())
    }
}
