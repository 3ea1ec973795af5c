//! Norms and their gradients.

use super::{Case, Expected, LONG, numbers, random, shapes, tolerance};
use crate::norm::{Norm, NormBackward, NormForward};
use std::rc::Rc;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

const EPSILON: f32 = 1e-5;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (at, (extents, input, output)) in shapes().into_iter().enumerate() {
        let norm = [Norm::Rms, Norm::Layer][at % 2];
        let other = [Norm::Layer, Norm::Rms][at % 2];
        cases.push(forward(norm, extents, input, output, at % 3 != 0));
        cases.push(forward(other, extents, input, output, at % 3 == 0));
        cases.push(backward(norm, extents, input, at % 2 == 0));
    }
    // Blocks that have several rows, columns beyond what registers hold, and what no cluster holds.
    cases.push(backward(Norm::Layer, [70, 96], Scalar::F32, true));
    cases.push(backward(Norm::Rms, [9, 9001], Scalar::F32, true));
    cases.push(backward(Norm::Layer, [3, 33_000], Scalar::F32, true));
    cases.push(backward(Norm::Layer, [0, 5], Scalar::F32, true));
    // Rows that begin anywhere, of a warp, a block and a cluster.
    cases.push(backward(Norm::Layer, [96, 167], Scalar::Bf16, true));
    cases.push(backward(Norm::Rms, [72, 1023], Scalar::Bf16, false));
    cases.push(backward(Norm::Layer, [8, 33_001], Scalar::F32, false));
    cases.push(forward(Norm::Layer, [1, 33_001], Scalar::Bf16, Scalar::Bf16, true));
    cases.push(forward(Norm::Rms, [1, 33_000], Scalar::F32, Scalar::Bf16, false));
    for (at, (columns, element)) in LONG.into_iter().enumerate() {
        for norm in [Norm::Rms, Norm::Layer] {
            let all = (at % 2 == 0) == (norm == Norm::Layer);
            cases.push(forward(norm, [1, columns], element, element, all));
            cases.push(backward(norm, [1, columns], element, !all));
        }
    }
    // As layers of models have them.
    for (extents, element) in [([5, 48], Scalar::F32), ([3, 130], Scalar::Bf16), ([2, 1031], Scalar::F16)] {
        cases.push(forward_with(Norm::Layer, extents, [element; 2], false, true));
        cases.push(backward_with(Norm::Layer, extents, element, false, true));
    }
    cases
}

/// Mean and `r` of each row.
fn moments(norm: Norm, columns: u64, h: &[f64]) -> Vec<(f64, f64)> {
    let rows = h.chunks((columns as usize).max(1));
    rows.map(|row| {
        let n = row.len() as f64;
        let mean = if norm == Norm::Layer { row.iter().sum::<f64>() / n } else { 0.0 };
        let variance = row.iter().map(|h| (h - mean) * (h - mean)).sum::<f64>() / n;
        (mean, 1.0 / (variance + f64::from(EPSILON)).sqrt())
    })
    .collect()
}

/// With everything that can be asked for, or with nothing.
fn forward(norm: Norm, extents: [u64; 2], input: Scalar, output: Scalar, all: bool) -> Case {
    forward_with(norm, extents, [input, output], all, all)
}

/// With a residual, and with all else.
fn forward_with(
    norm: Norm,
    extents: [u64; 2],
    [input, output]: [Scalar; 2],
    residual: bool,
    all: bool,
) -> Case {
    let [rows, columns] = extents;
    let x = Tensor::from_f64s(input, &extents, numbers(3, rows * columns).iter().map(|x| x * 2.0 + 0.5));
    let weights = if input == Scalar::F32 { Scalar::F32 } else { input };
    let weight = random(5, weights, &[columns]);
    let bias = random(6, weights, &[columns]);
    let added = random(4, input, &extents);
    let sums = x.to_f64s().into_iter().zip(added.to_f64s()).map(|(x, r)| if residual { x + r } else { x });
    let sum = Tensor::from_f64s(input, &extents, sums);
    let h = sum.to_f64s();
    let moments = moments(norm, columns, &h);
    let (w, b) = (weight.to_f64s(), bias.to_f64s());
    let y = h.iter().enumerate().map(|(at, h)| {
        let (row, column) = (at / columns as usize, at % columns as usize);
        let (mean, rstd) = moments[row];
        (h - mean) * rstd * w[column] + if all { b[column] } else { 0.0 }
    });
    let y: Vec<f64> = y.collect();
    let mut buffers = vec![x];
    buffers.extend(residual.then_some(added));
    buffers.push(weight);
    buffers.extend(all.then_some(bias));
    let mut expected = vec![Expected::new(buffers.len(), y, 2.0 * tolerance(output))];
    buffers.push(random(7, output, &extents));
    if residual {
        expected.push(Expected::new(buffers.len(), h, 1e-6));
        buffers.push(random(7, input, &extents));
    }
    if all {
        if norm == Norm::Layer {
            expected.push(Expected::new(buffers.len(), moments.iter().map(|m| m.0).collect(), 1e-5));
            buffers.push(random(7, Scalar::F32, &[rows]));
        }
        expected.push(Expected::new(buffers.len(), moments.iter().map(|m| m.1).collect(), 1e-4));
        buffers.push(random(7, Scalar::F32, &[rows]));
    }
    let function = NormForward {
        weight: weights,
        output,
        residual,
        bias: all,
        statistics: all,
        ..NormForward::of(norm, rows, columns, input, EPSILON)
    };
    let with = with(residual, all);
    let name = format!("{} of {input} to {output}, {rows} x {columns}, {with}", norm.name());
    Case { name, function: Rc::new(function), buffers, expected }
}

/// In words.
fn with(residual: bool, all: bool) -> &'static str {
    match (residual, all) {
        (true, _) => "with all",
        (false, true) => "with a bias",
        (false, false) => "alone",
    }
}

fn backward(norm: Norm, extents: [u64; 2], element: Scalar, all: bool) -> Case {
    backward_with(norm, extents, element, all, all)
}

fn backward_with(norm: Norm, extents: [u64; 2], element: Scalar, residual: bool, all: bool) -> Case {
    let [rows, columns] = extents;
    let n = columns as f64;
    let h = random(13, element, &extents);
    let weight = random(14, element, &[columns]);
    let dy = random(15, element, &extents);
    let dsum = random(16, element, &extents);
    let values = h.to_f64s();
    let moments = moments(norm, columns, &values);
    let of =
        |which: fn(&(f64, f64)) -> f64| Tensor::from_f64s(Scalar::F32, &[rows], moments.iter().map(which));
    let (w, g, s) = (weight.to_f64s(), dy.to_f64s(), dsum.to_f64s());
    let hat = |at: usize| {
        let (mean, rstd) = moments[at / columns as usize];
        (values[at] - mean) * rstd
    };
    let mut dx = Vec::new();
    let (mut dweight, mut dbias) = (vec![0.0; columns as usize], vec![0.0; columns as usize]);
    for (row, (_, rstd)) in moments.iter().enumerate() {
        let places: Vec<usize> = (row * columns as usize..(row + 1) * columns as usize).collect();
        let product = |at: usize| g[at] * w[at % columns as usize];
        let across = places.iter().map(|at| product(*at) * hat(*at)).sum::<f64>() / n;
        let along = places.iter().map(|at| product(*at)).sum::<f64>() / n;
        let along = if norm == Norm::Layer { along } else { 0.0 };
        for at in places {
            let gradient = rstd * (product(at) - hat(at) * across - along);
            dx.push(gradient + if residual { s[at] } else { 0.0 });
            dweight[at % columns as usize] += g[at] * hat(at);
            dbias[at % columns as usize] += g[at];
        }
    }
    let mut buffers = vec![h, weight, dy];
    buffers.extend(residual.then_some(dsum));
    buffers.extend((norm == Norm::Layer).then(|| of(|moments| moments.0)));
    buffers.push(of(|moments| moments.1));
    // Of a row of few elements r is large.
    let scale = moments.iter().map(|moments| moments.1).fold(1.0, f64::max);
    let tolerance = 2.0 * tolerance(element);
    let mut expected = Vec::new();
    let mut expect = |buffers: &mut Vec<Tensor>, extents: &[u64], values| {
        expected.push(Expected { scale, ..Expected::new(buffers.len(), values, tolerance) });
        buffers.push(random(17, element, extents));
    };
    expect(&mut buffers, &extents, dx);
    expect(&mut buffers, &[columns], dweight);
    if all {
        expect(&mut buffers, &[columns], dbias);
    }
    let function =
        NormBackward { norm, rows, columns, element, weight: element, residual, bias: all, align: 16 };
    let with = with(residual, all);
    let name = format!("gradient of {} of {element}, {rows} x {columns}, {with}", norm.name());
    Case { name, function: Rc::new(function), buffers, expected }
}
