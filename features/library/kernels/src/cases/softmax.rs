//! Softmax and its gradient.

use super::{Case, Expected, LONG, numbers, odd_shapes, random, shapes, tolerance};
use crate::softmax::{Softmax, SoftmaxBackward};
use std::rc::Rc;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (extents, input, output) in shapes().into_iter().chain(odd_shapes()) {
        let log = extents[1] % 2 == 1;
        cases.extend([forward(extents, input, output, log), backward(extents, input, output, log)]);
    }
    // More than a block holds: a cluster, or by an online sum.
    cases.push(forward([1, 33_000], Scalar::F32, Scalar::F32, false));
    cases.push(forward([1, 33_001], Scalar::Bf16, Scalar::Bf16, true));
    cases.push(backward([1, 17_000], Scalar::F32, Scalar::F32, false));
    for (columns, element) in LONG {
        let log = columns % 2 == 1;
        cases.push(forward([1, columns], element, element, log));
        cases.push(backward([1, columns], element, element, log));
    }
    cases.push(forward([1, 262_144], Scalar::Bf16, Scalar::Bf16, false));
    cases.extend([[0, 5], [5, 0]].map(|extents| forward(extents, Scalar::F32, Scalar::F32, false)));
    cases.push(special());
    cases
}

fn of_rows(columns: u64, values: &[f64], f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    values.chunks((columns as usize).max(1)).flat_map(f).collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
    x.iter().map(|x| (x - max).exp() / sum).collect()
}

fn forward(extents: [u64; 2], input: Scalar, output: Scalar, log: bool) -> Case {
    let [rows, columns] = extents;
    // Of all magnitudes: a factor of 8 makes some powers small.
    let values = numbers(rows + 7 * columns, rows * columns).iter().map(|x| x * 8.0).collect::<Vec<_>>();
    let x = Tensor::from_f64s(input, &extents, values);
    let expected = of_rows(columns, &x.to_f64s(), |x| {
        let y = softmax(x);
        if log { y.iter().map(|y| y.ln()).collect() } else { y }
    });
    let scale = if log { 1.0 } else { 1.0 / columns.max(1) as f64 };
    Case {
        name: format!("{}softmax of {input} to {output}, {rows} x {columns}", if log { "log " } else { "" }),
        function: Rc::new(Softmax { output, log, ..Softmax::of(rows, columns, input) }),
        buffers: vec![x, random(1, output, &extents)],
        expected: vec![Expected { scale, ..Expected::new(1, expected, tolerance(output)) }],
    }
}

fn backward(extents: [u64; 2], input: Scalar, output: Scalar, log: bool) -> Case {
    let [rows, columns] = extents;
    let values = numbers(11 + columns, rows * columns);
    let y = of_rows(columns, &values, |x| {
        let y = softmax(x);
        if log { y.iter().map(|y| y.ln()).collect() } else { y }
    });
    let y = Tensor::from_f64s(input, &extents, y);
    let dy = random(12, input, &extents);
    let pairs: Vec<(f64, f64)> = y.to_f64s().into_iter().zip(dy.to_f64s()).collect();
    let rows_of = pairs.chunks((columns as usize).max(1));
    let expected = rows_of.flat_map(|row| {
        let sum: f64 = row.iter().map(|(y, dy)| if log { *dy } else { y * dy }).sum();
        row.iter().map(move |(y, dy)| if log { dy - y.exp() * sum } else { y * (dy - sum) })
    });
    let expected = expected.collect();
    let scale = if log { 1.0 } else { 1.0 / columns.max(1) as f64 };
    Case {
        name: format!(
            "gradient of a {}softmax of {input} to {output}, {rows} x {columns}",
            if log { "log " } else { "" }
        ),
        function: Rc::new(SoftmaxBackward { rows, columns, input, output, log, align: 16 }),
        buffers: vec![y, dy, random(1, output, &extents)],
        expected: vec![Expected { scale, ..Expected::new(2, expected, tolerance(output)) }],
    }
}

/// Infinities, NaN, and what underflows.
fn special() -> Case {
    const INF: f64 = f64::INFINITY;
    let rows: [([f64; 4], [f64; 4]); 6] = [
        ([0.0, -INF, 0.0, -INF], [0.5, 0.0, 0.5, 0.0]),
        ([-INF; 4], [f64::NAN; 4]),
        ([1.0, INF, 0.0, 0.0], [f64::NAN; 4]),
        ([1.0, f64::NAN, 0.0, 0.0], [f64::NAN; 4]),
        ([3e38, 3e38, -3e38, 0.0], [0.5, 0.5, 0.0, 0.0]),
        ([-0.0, 0.0, -0.0, 0.0], [0.25; 4]),
    ];
    let x = rows.iter().flat_map(|(x, _)| *x);
    let expected = rows.iter().flat_map(|(_, y)| *y).collect();
    Case {
        name: "softmax of special values".into(),
        function: Rc::new(Softmax::of(6, 4, Scalar::F32)),
        buffers: vec![Tensor::from_f64s(Scalar::F32, &[6, 4], x), random(1, Scalar::F32, &[6, 4])],
        expected: vec![Expected::new(1, expected, 1e-6)],
    }
}
