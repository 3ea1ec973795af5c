//! Chains of elementwise steps.

use vm_graph::Value;

use super::activation::silu;
use super::{Built, Draft, Drawn};
use crate::call::Function as _;
use crate::elementwise::{Along, Elementwise, Input, Op};

/// A chain: each step is an operation or two.
pub(crate) fn chain(of: &Elementwise) -> Drawn {
    of.chain.check()?;
    let mut g = Draft::of("elementwise", of.buffers())?;
    let mut inputs = Vec::new();
    let (mut arrays, mut numbers) = (0.., of.numbers.iter());
    // A buffer is numbered as its input, of which numbers are some.
    for (input, at) in of.chain.inputs.iter().flatten().zip(&mut arrays) {
        inputs.push(match input {
            Input::Array(_, along) => {
                let x = g.float(&format!("x{at}"))?;
                if *along == Along::Rows { g.reshape(x, &[of.rows, 1])? } else { x }
            }
            Input::Number => g.number(numbers.next().copied().unwrap_or_default().into())?,
        });
    }
    let outputs = of.chain.fold(&inputs, |op, a, b| step(&mut g, op, a, b))?;
    let extents = [of.rows, of.columns];
    for (at, value) in outputs.into_iter().enumerate() {
        let is_whole = g.type_of(value).extents == extents;
        let value = if is_whole { value } else { g.expand(value, &extents)? };
        g.put(&format!("y{at}"), value)?;
    }
    g.finish()
}

fn step(g: &mut Draft, op: Op, a: Value, b: Value) -> Built {
    match op {
        Op::Add => g.add(a, b),
        Op::Sub => g.sub(a, b),
        Op::Mul => g.mul(a, b),
        Op::Div => g.div(a, b),
        Op::Min => g.min(a, b),
        Op::Max => g.max(a, b),
        Op::Neg => g.neg(a),
        Op::Abs => g.abs(a),
        Op::Exp => g.exp(a),
        Op::Rsqrt => {
            let root = g.sqrt(a)?;
            g.reciprocal(root)
        }
        Op::Tanh => g.tanh(a),
        Op::Sigmoid => g.sigmoid(a),
        Op::Relu => g.relu(a),
        Op::Silu => silu(g, a),
        Op::Gelu => g.gelu(a),
        Op::GeluTanh => g.gelu_tanh(a),
    }
}
