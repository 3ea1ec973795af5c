//! What a graph computes, in f64.

mod array;
mod scalar;

use array::Array;

use crate::limits::MAX_ELEMENTS;
use crate::op::{Binary, Pooling, Reduction};
use crate::{Element, GraphError, Op, Place, TensorType, ValidGraph};

/// The outputs' elements, for the inputs' elements. Floats are f64 all along: they are rounded only where they are cast to narrow floats or
/// to integers, so that a device's results can be told by how far they are from these. Integers are exact up to 2^53.
///
/// # Errors
/// [`GraphError::Rule`] of an argument with too few or too many elements, or whose values its type does not have.
pub fn evaluate(graph: &ValidGraph, arguments: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, GraphError> {
    let values = evaluate_all(graph, arguments)?;
    Ok(graph.outputs.iter().map(|output| values[output.value.0 as usize].clone()).collect())
}

/// The elements of all values, in the order of their numbers.
pub(crate) fn evaluate_all(graph: &ValidGraph, arguments: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, GraphError> {
    if arguments.len() != graph.inputs.len() {
        let what = format!("it takes {} arguments, and is given {}", graph.inputs.len(), arguments.len());
        return Err(GraphError::rule(Place::Graph, what));
    }
    let mut values = Vec::new();
    for (number, (input, argument)) in graph.inputs.iter().zip(arguments).enumerate() {
        let said = |what: String| Err(GraphError::rule(Place::Argument(number), what));
        if input.ty.elements() != argument.len() as u64 {
            return said(format!("it has {} elements, and {} has others", argument.len(), input.ty));
        }
        if let (Some((least, greatest)), false) = (input.ty.element.range(), argument.is_empty()) {
            let fits = |x: &f64| *x == x.trunc() && (least as f64..=greatest as f64).contains(x);
            if let Some(x) = argument.iter().find(|x| !fits(x)) {
                return said(format!("{x} is no {}", input.ty.element));
            }
        }
        values.push(Array::new(&input.ty.extents, argument.clone()));
    }
    for node in &graph.nodes {
        let operands: Vec<&Array> = node.operands.iter().map(|value| &values[value.0 as usize]).collect();
        let types: Vec<&TensorType> = node.operands.iter().map(|value| graph.type_of(*value)).collect();
        let first = values.len();
        let results = &graph.types()[first..first + node.op.results()];
        let made = apply(&node.op, &operands, &types, results);
        values.extend(made);
    }
    Ok(values.into_iter().map(|array| array.elements).collect())
}

fn apply(op: &Op, operands: &[&Array], types: &[&TensorType], results: &[TensorType]) -> Vec<Array> {
    let to = &results[0];
    let element = to.element;
    debug_assert!(to.elements() <= MAX_ELEMENTS);
    let one = match (op, operands) {
        (Op::Constant(tensor), _) => Array::new(&to.extents, tensor.to_f64s()),
        (Op::Unary(unary), [x]) => x.map(|x| scalar::wrapped(element, scalar::unary(*unary, x))),
        (Op::Binary(binary), [a, b]) => a.zip(b, &to.extents, |a, b| scalar::binary(*binary, element, a, b)),
        (Op::Logic(logic), [a, b]) => a.zip(b, &to.extents, |a, b| scalar::logic(*logic, a, b)),
        (Op::Compare(how), [a, b]) => a.zip(b, &to.extents, |a, b| scalar::compare(*how, a, b)),
        (Op::Select, [condition, a, b]) => {
            let [condition, a, b] = [condition, a, b].map(|array| array.spread(&to.extents));
            let chosen = condition.elements.iter().zip(a.elements.iter().zip(&b.elements));
            let chosen = chosen.map(|(condition, (a, b))| if *condition != 0.0 { *a } else { *b });
            Array::new(&to.extents, chosen.collect())
        }
        (Op::Cast(element), [x]) => x.map(|x| scalar::cast(types[0].element, *element, x)),
        (Op::MatMul, [a, b]) => a.mat_mul(b, &to.extents, |sum, a, b| match element.range() {
            None => sum + a * b,
            Some(_) => scalar::wrapped(element, sum + scalar::binary(Binary::Mul, element, a, b)),
        }),
        (Op::Convolution(how), [x, weight, bias @ ..]) => {
            x.convolution(weight, bias.first().copied(), how, &to.extents)
        }
        (Op::Pool(pool), [x]) => x.pool(pool, &to.extents, |window| match pool.how {
            Pooling::MaxPool => scalar::reduce(Reduction::Max, Element::F64, window),
            Pooling::AveragePool => scalar::reduce(Reduction::Mean, Element::F64, window),
        }),
        (Op::Transpose { order }, [x]) => x.pick(&to.extents, |at| order_of(order, at)),
        (Op::Reshape { .. }, [x]) => Array::new(&to.extents, x.elements.clone()),
        (Op::Expand { .. }, [x]) => x.spread(&to.extents),
        (Op::Concat { axis }, parts) => Array::concat(parts, *axis as usize, &to.extents),
        (Op::Slice { starts, steps, .. }, [x]) => x.pick(&to.extents, |at| {
            at.iter().zip(starts.iter().zip(steps)).map(|(at, (start, step))| start + at * step).collect()
        }),
        (Op::Pad { before, .. }, [x]) => {
            let inside = |at: &[u64]| -> Option<Vec<u64>> {
                let moved = at.iter().zip(before.iter().zip(&x.extents));
                moved.map(|(at, (before, extent))| at.checked_sub(*before).filter(|at| at < extent)).collect()
            };
            x.pick_some(&to.extents, inside)
        }
        (Op::Gather { axis }, [x, index]) => {
            let (axis, rank) = (*axis as usize, index.extents.len());
            x.pick(&to.extents, |at| {
                let named = index.at(&at[axis..axis + rank]);
                let mut from = at.to_vec();
                from.splice(axis..axis + rank, [clamped(named, x.extents[axis])]);
                from
            })
        }
        (Op::GatherElements { axis }, [x, index]) => {
            let axis = *axis as usize;
            x.pick(&to.extents, |at| {
                let mut from = at.to_vec();
                from[axis] = clamped(index.at(at), x.extents[axis]);
                from
            })
        }
        (Op::ScatterRows { add }, [x, index, rows]) => {
            let mut all = (*x).clone();
            let row = all.elements.len() / all.extents[0] as usize;
            for (index, from) in index.elements.iter().zip(rows.elements.chunks(row)) {
                let at = clamped(*index, x.extents[0]) as usize * row;
                for (to, from) in all.elements[at..at + row].iter_mut().zip(from) {
                    *to = if *add { scalar::wrapped(element, *to + from) } else { *from };
                }
            }
            all
        }
        (Op::Reduce { how, axes, .. }, [x]) => {
            x.reduce(axes, &to.extents, |part| scalar::reduce(*how, element, part))
        }
        (Op::ArgMax { axis }, [x]) => {
            x.along(*axis as usize, &to.extents, |part| vec![scalar::order(part)[0] as f64])
        }
        (Op::TopK { axis, k }, [x]) => {
            let axis = *axis as usize;
            let best = |part: &[f64]| {
                let mut order = scalar::order(part);
                order.truncate(*k as usize);
                order
            };
            let values =
                x.along(axis, &to.extents, |part| best(part).into_iter().map(|at| part[at]).collect());
            let places =
                x.along(axis, &to.extents, |part| best(part).into_iter().map(|at| at as f64).collect());
            return vec![values, places];
        }
        (Op::CumSum { axis }, [x]) => x.along(*axis as usize, &to.extents, |part| {
            let sums = part.iter().scan(0.0, |sum, x| {
                *sum = scalar::wrapped(element, *sum + x);
                Some(*sum)
            });
            sums.collect()
        }),
        (Op::Softmax { axis }, [x]) => x.along(*axis as usize, &to.extents, |part| {
            scalar::log_softmax(part).into_iter().map(f64::exp).collect()
        }),
        (Op::LogSoftmax { axis }, [x]) => x.along(*axis as usize, &to.extents, scalar::log_softmax),
        (Op::LayerNorm { epsilon }, [x, weight, bias]) => x.along(x.extents.len() - 1, &to.extents, |row| {
            let n = row.len() as f64;
            let mean = row.iter().sum::<f64>() / n;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            let scale = 1.0 / (variance + f64::from(*epsilon as f32)).sqrt();
            let scaled = row.iter().zip(weight.elements.iter().zip(&bias.elements));
            scaled.map(|(x, (weight, bias))| (x - mean) * scale * weight + bias).collect()
        }),
        (Op::Quantize { axis }, [x, scale, zero]) => {
            let of = |array: &Array| array.along_axis(*axis, &to.extents);
            let quantised = |x: f64, scale: f64, zero: f64| {
                let (least, greatest) = element.range().unwrap_or((0, 0));
                let rounded = (x / scale).round_ties_even() + zero;
                if rounded.is_nan() { zero } else { rounded.clamp(least as f64, greatest as f64) }
            };
            let scaled = x.elements.iter().zip(of(scale).elements.into_iter().zip(of(zero).elements));
            Array::new(&to.extents, scaled.map(|(x, (scale, zero))| quantised(*x, scale, zero)).collect())
        }
        (Op::Dequantize { axis }, [x, scale, zero]) => {
            let of = |array: &Array| array.along_axis(*axis, &to.extents);
            let scaled = x.elements.iter().zip(of(scale).elements.into_iter().zip(of(zero).elements));
            Array::new(&to.extents, scaled.map(|(x, (scale, zero))| (x - zero) * scale).collect())
        }
        _ => unreachable!("{op:?} was checked with its operands"),
    };
    vec![one]
}

fn order_of(order: &[u32], at: &[u64]) -> Vec<u64> {
    let mut from = vec![0; at.len()];
    for (axis, at) in order.iter().zip(at) {
        from[*axis as usize] = *at;
    }
    from
}

/// The position that an index names.
fn clamped(index: f64, extent: u64) -> u64 {
    (index.max(0.0) as u64).min(extent - 1)
}
