//! Products of matrices by integers of 8 bits, of graphs that were made in floats: static quantisation after training.

use std::collections::HashMap;

use crate::evaluate::evaluate_all;
use crate::{Builder, Element, GraphError, Op, Place, Tensor, ValidGraph, Value};

/// The graph with the factors and results of each product of floats quantised, by explicit [`Op::Quantize`] and [`Op::Dequantize`] around it, as
/// providers take products of integers. All else stays in floats, and so do products of what is not finite.
///
/// `samples` are arguments as [`evaluate`](crate::evaluate) takes them. What depends on an input is quantised to u8, from the least to the greatest
/// that it is on the samples, and ends there for others; what does not, as weights, to i8 with a zero point of 0.
///
/// # Errors
/// [`GraphError::Rule`] without samples, and as `evaluate` of the samples.
pub fn quantize_mat_muls(graph: &ValidGraph, samples: &[Vec<Vec<f64>>]) -> Result<ValidGraph, GraphError> {
    let Some(first) = samples.first() else {
        return Err(GraphError::rule(Place::Graph, "there is no sample by which to tell ranges"));
    };
    let known = evaluate_all(graph, first)?;
    let mut ranges: Vec<[f64; 2]> = known.iter().map(|values| range([0.0; 2], values)).collect();
    for sample in &samples[1..] {
        for (of, values) in ranges.iter_mut().zip(evaluate_all(graph, sample)?) {
            *of = range(*of, &values);
        }
    }
    let mut pass =
        Pass { graph, builder: Builder::new(&graph.name), ranges, known, quantized: HashMap::new() };
    // What each value is in the new graph, and whether it depends on an input.
    let mut values: Vec<(Value, bool)> = Vec::new();
    for input in &graph.inputs {
        values.push((pass.builder.input(&input.name, input.ty.element, &input.ty.extents)?, true));
    }
    for node in &graph.nodes {
        let operands: Vec<Value> = node.operands.iter().map(|value| values[value.0 as usize].0).collect();
        let depends = node.operands.iter().any(|value| values[value.0 as usize].1);
        let result = Value(values.len() as u32);
        let is_product = node.op == Op::MatMul && depends && graph.type_of(result).element.is_float();
        let taken = node.operands.iter().copied().chain([result]);
        if !is_product || !taken.into_iter().all(|value| pass.is_finite(value)) {
            let made = pass.builder.push(node.op.clone(), &operands)?;
            values.extend(made.into_iter().map(|value| (value, depends)));
            continue;
        }
        let mut factors = Vec::new();
        for (old, new) in node.operands.iter().zip(operands) {
            let depends = values[old.0 as usize].1;
            factors.push(if depends { pass.variable(*old, new)? } else { pass.weight(*old)? });
        }
        let product = pass.builder.mat_mul(factors[0], factors[1])?;
        values.push((pass.variable(result, product)?, true));
    }
    for output in &graph.outputs {
        pass.builder.output(&output.name, values[output.value.0 as usize].0)?;
    }
    Ok(pass.builder.finish()?.eliminate_dead_code())
}

/// With these values, too.
fn range([least, greatest]: [f64; 2], values: &[f64]) -> [f64; 2] {
    // NaN stays.
    let wider = |a: f64, b: f64, more: bool| if a.is_nan() || more { a } else { b };
    values.iter().fold([least, greatest], |[least, greatest], x| {
        [wider(least, *x, least <= *x), wider(greatest, *x, greatest >= *x)]
    })
}

struct Pass<'a> {
    graph: &'a ValidGraph,
    builder: Builder,
    ranges: Vec<[f64; 2]>,
    /// Values on the first sample: those that depend on no input are so on all.
    known: Vec<Vec<f64>>,
    /// What a value of the graph is, quantised, with its scale and its zero point.
    quantized: HashMap<Value, [Value; 3]>,
}

impl Pass<'_> {
    fn is_finite(&self, value: Value) -> bool {
        self.ranges[value.0 as usize].iter().all(|end| end.is_finite())
    }

    /// A scale and a zero point.
    fn numbers(&mut self, like: Element, scale: f64, zero: Tensor) -> Result<[Value; 2], GraphError> {
        Ok([self.builder.constant(Tensor::number(like, scale))?, self.builder.constant(zero)?])
    }

    /// A value, which is `new` in the new graph, quantised and back.
    fn variable(&mut self, old: Value, new: Value) -> Result<Value, GraphError> {
        let [q, scale, zero] = match self.quantized.get(&old) {
            Some(found) => *found,
            None => {
                let element = self.graph.type_of(old).element;
                let [least, greatest] = self.ranges[old.0 as usize];
                let scale = scale(element, (greatest - least) / 255.0);
                let zero = Tensor::number(Element::U8, (-least / scale).round());
                let [scale, zero] = self.numbers(element, scale, zero)?;
                let q = self.builder.quantize(new, scale, zero, None)?;
                self.quantized.insert(old, [q, scale, zero]);
                [q, scale, zero]
            }
        };
        // Each user has one of its own, as providers want it.
        self.builder.dequantize(q, scale, zero, None)
    }

    /// A value that depends on no input.
    fn weight(&mut self, old: Value) -> Result<Value, GraphError> {
        let ty = self.graph.type_of(old).clone();
        let [least, greatest] = self.ranges[old.0 as usize];
        let scale = scale(ty.element, greatest.max(-least) / 127.0);
        let values: Vec<f64> =
            self.known[old.0 as usize].iter().map(|x| (x / scale).round_ties_even()).collect();
        let q = self.builder.constant(Tensor::from_f64s(Element::I8, &ty.extents, &values))?;
        let [scale, zero] = self.numbers(ty.element, scale, Tensor::number(Element::I8, 0.0))?;
        self.builder.dequantize(q, scale, zero, None)
    }
}

/// A scale as its element has it; 1 of nothing but zeros.
fn scale(element: Element, scale: f64) -> f64 {
    let scale = element.round(scale);
    if scale > 0.0 && scale.is_finite() { scale } else { 1.0 }
}
