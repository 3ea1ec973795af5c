//! Elementwise chains.

use super::{Case, Expected, LONG, numbers, random, tolerance};
use crate::elementwise::{Along, Chain, Elementwise, Op};
use std::rc::Rc;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

/// Of a few numbers, where functions have their bends.
type Definition = fn(f64, f64) -> f64;

pub(super) fn cases() -> Vec<Case> {
    use Scalar::{Bf16, F8E4M3, F8E5M2, F16, F32};
    let unary: [(Op, Definition); 12] = [
        (Op::Neg, |a, _| -a),
        (Op::Abs, |a, _| a.abs()),
        (Op::Exp, |a, _| a.exp()),
        (Op::Rsqrt, |a, _| 1.0 / a.sqrt()),
        (Op::Tanh, |a, _| a.tanh()),
        (Op::Sigmoid, |a, _| 1.0 / (1.0 + (-a).exp())),
        (Op::Relu, |a, _| if a.is_nan() { a } else { a.max(0.0) }),
        (Op::Silu, |a, _| a / (1.0 + (-a).exp())),
        (Op::Gelu, |a, _| a * 0.5 * (1.0 + erf(a / 2f64.sqrt()))),
        (Op::GeluTanh, |a, _| {
            a * 0.5 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (a + 0.044715 * a * a * a)).tanh())
        }),
        (Op::Min, |a, b| a.min(b)),
        (Op::Max, |a, b| a.max(b)),
    ];
    let binary: [(Op, Definition); 4] =
        [(Op::Add, |a, b| a + b), (Op::Sub, |a, b| a - b), (Op::Mul, |a, b| a * b), (Op::Div, |a, b| a / b)];
    let mut cases = Vec::new();
    for (at, (op, definition)) in unary.into_iter().enumerate() {
        let (input, output) = [(F32, F32), (Bf16, Bf16), (F16, F32), (F32, Bf16)][at % 4];
        let chain = Chain::unary(op, input, output);
        cases.push(case(&format!("{op:?}"), Elementwise::of(chain, 1031 + at as u64), definition));
    }
    for (at, (op, definition)) in binary.into_iter().enumerate() {
        let (input, output) = [(F32, F32), (Bf16, Bf16), (F16, F16), (F32, F16)][at];
        let chain = Chain::binary(op, input, output);
        cases.push(case(&format!("{op:?}"), Elementwise::of(chain, [1, 2, 1023, 1024][at]), definition));
    }
    for (input, output, align) in [(F32, Bf16, 16), (Bf16, F32, 4), (F16, Bf16, 2)] {
        let cast = Elementwise { align, ..Elementwise::of(Chain::cast(input, output), 523) };
        cases.push(case("cast", cast, |a, _| a));
        let scale = Elementwise { numbers: [-1.5; 4], ..Elementwise::of(Chain::scale(input, output), 77) };
        cases.push(case("scale", scale, |a, _| -1.5 * a));
    }
    for (input, output, n, align) in [
        (F32, F8E4M3, 1003, 16),
        (Bf16, F8E5M2, 4096 + 37, 16),
        (F16, F8E4M3, 33, 2),
        (F8E4M3, Bf16, 517, 16),
        (F8E5M2, F32, 65, 1),
        (F8E4M3, F8E5M2, 40, 16),
    ] {
        let of = |chain| Elementwise { align, ..Elementwise::of(chain, n) };
        cases.push(case("cast", of(Chain::cast(input, output)), |a, _| a));
        let scale = Elementwise { numbers: [0.4; 4], ..of(Chain::scale(input, output)) };
        cases.push(case("scale", scale, |a, _| f64::from(0.4f32) * a));
    }
    cases.extend([F8E4M3, F8E5M2].map(every));
    cases.push(case("swiglu", Elementwise::of(Chain::swiglu(Bf16, Bf16), 2049), |a, b| {
        a / (1.0 + (-a).exp()) * b
    }));
    // Several rows, in the place of one.
    for (rows, columns, align) in [(5, 24, 16), (3, 33, 16), (4, 40, 4)] {
        let narrow = Elementwise { rows, align, ..Elementwise::of(Chain::cast(F16, F8E4M3), columns) };
        cases.push(case("cast", narrow, |a, _| a));
        let of = |chain| Elementwise { rows, align, ..Elementwise::of(chain, columns) };
        let swiglu = of(Chain::swiglu(Bf16, F16));
        cases.push(case("swiglu", swiglu, |a, b| a / (1.0 + (-a).exp()) * b));
        cases.push(case("Add", of(Chain::binary(Op::Add, F32, F32)), |a, b| a + b));
        cases.push(case("cast", of(Chain::cast(F32, Bf16)), |a, _| a));
    }
    cases.push(case("cast", Elementwise::of(Chain::cast(F32, Bf16), 2 * 4096 + 19), |a, _| a));
    cases.push(case("nothing", Elementwise::of(Chain::cast(F32, F32), 0), |a, _| a));
    cases.push(special());
    for (extents, element) in [
        ([5, 24], Bf16),
        ([3, 129], F32),
        ([7, 1], F32),
        ([2, 4096], F32),
        ([1, 33_000], F32),
        ([2, 777], F16),
    ] {
        cases.push(broadcast(extents, element));
    }
    cases.extend(LONG.map(|(columns, element)| broadcast([1, columns], element)));
    cases
}

/// One or two arrays of one type, and one output.
fn case(what: &str, function: Elementwise, definition: Definition) -> Case {
    use crate::call::Function;
    let specified = function.buffers();
    let (rows, count) = (function.rows, function.rows * function.columns);
    let mut buffers: Vec<Tensor> = specified
        .iter()
        .enumerate()
        .map(|(at, buffer)| {
            let values = numbers(31 + at as u64, count).into_iter().map(|x| x * 5.0);
            // Roots are of numbers above 0.
            let values = values.map(|x: f64| if what == "Rsqrt" { x.abs() + 0.1 } else { x });
            Tensor::from_f64s(buffer.element, &buffer.extents, values)
        })
        .collect();
    let output = buffers.len() - 1;
    let (a, b) = (buffers[0].to_f64s(), buffers[output.min(2) - 1].to_f64s());
    let expected = a.iter().zip(&b).map(|(a, b)| definition(*a, *b)).collect();
    let element = specified[output].element;
    buffers[output] = random(1, element, &specified[output].extents);
    Case {
        name: format!("{what} of {} to {element}, {count} elements in {rows}", specified[0].element),
        function: Rc::new(function),
        buffers,
        expected: vec![Expected::new(output, expected, tolerance(element))],
    }
}

/// Infinities, NaN, zeros.
fn special() -> Case {
    const INF: f64 = f64::INFINITY;
    let x = [INF, -INF, f64::NAN, -0.0, 0.0, -200.0, 200.0];
    let y = vec![INF, f64::NAN, f64::NAN, 0.0, 0.0, 0.0, 200.0];
    let mut chain = Chain::new();
    let of = chain.input(Scalar::F32, Along::All);
    let [silu, relu] = [Op::Silu, Op::Relu].map(|op| chain.apply(op, of));
    chain.output(silu, Scalar::F32);
    chain.output(relu, Scalar::F32);
    let relu = vec![INF, 0.0, f64::NAN, 0.0, 0.0, 0.0, 200.0];
    Case {
        name: "silu and relu of special values".into(),
        function: Rc::new(Elementwise::of(chain, 7)),
        buffers: vec![
            Tensor::from_f64s(Scalar::F32, &[1, 7], x),
            random(1, Scalar::F32, &[1, 7]),
            random(1, Scalar::F32, &[1, 7]),
        ],
        expected: vec![Expected::new(1, y, 1e-6), Expected::new(2, relu, 0.0)],
    }
}

/// Every number of FP8 as f32; and back, what is nearest, beyond the greatest, and between two.
fn every(element: Scalar) -> Case {
    let mut chain = Chain::new();
    let [x, y] = [element, Scalar::F32].map(|element| chain.input(element, Along::All));
    chain.output(x, Scalar::F32);
    chain.output(y, element);
    let x = Tensor::from_bits(element, &[1, 256], 0..256);
    let all = x.to_f64s();
    let steps = all.iter().map(|x| if x.is_infinite() { 3.0 } else { x * 1.25 });
    let y = Tensor::from_f64s(Scalar::F32, &[1, 256], steps);
    let nearest = |y: &f64| {
        let finite = all.iter().filter(|x| x.is_finite());
        // Of two as near the even one, whose bits end in 0.
        let by = |x: &&f64| ((**x - y).abs(), Tensor::from_f64s(element, &[1], [**x]).bits(0) & 1);
        let best = finite.min_by(|a, b| by(a).partial_cmp(&by(b)).unwrap_or(std::cmp::Ordering::Equal));
        if y.is_nan() { *y } else { best.copied().unwrap_or(f64::NAN) }
    };
    let back: Vec<f64> = y.to_f64s().iter().map(nearest).collect();
    Case {
        name: format!("every number of {element} as f32, and others in it"),
        function: Rc::new(Elementwise::of(chain, 256)),
        buffers: vec![x, y, random(1, Scalar::F32, &[1, 256]), random(1, element, &[1, 256])],
        expected: vec![Expected::exact(2, all), Expected::exact(3, back)],
    }
}

/// max(x · row + column, the one) · number, and x + row.
fn broadcast(extents: [u64; 2], element: Scalar) -> Case {
    let [rows, columns] = extents;
    let mut chain = Chain::new();
    let x = chain.input(element, Along::All);
    let row = chain.input(Scalar::F32, Along::Columns);
    let column = chain.input(element, Along::Rows);
    let number = chain.number();
    let product = chain.step(Op::Mul, x, row);
    let sum = chain.step(Op::Add, product, column);
    let scaled = chain.step(Op::Mul, sum, number);
    let other = chain.step(Op::Add, x, row);
    chain.output(scaled, Scalar::F32);
    chain.output(other, element);
    let function = Elementwise { chain, rows, columns, numbers: [3.0, 0.0, 0.0, 0.0], align: 16 };
    let (x, row, column) =
        (random(41, element, &extents), random(42, Scalar::F32, &[columns]), random(43, element, &[rows]));
    let [xs, of_columns, of_rows] = [&x, &row, &column].map(Tensor::to_f64s);
    let at = |at: usize| (xs[at], of_columns[at % columns as usize], of_rows[at / columns as usize]);
    let all = (0..xs.len()).map(at);
    let first = all.clone().map(|(x, row, column)| (x * row + column) * 3.0).collect();
    let second = all.map(|(x, row, _)| x + row).collect();
    Case {
        name: format!("chain with a row and a column of {element}, {rows} x {columns}"),
        function: Rc::new(function),
        buffers: vec![x, row, column, random(1, Scalar::F32, &extents), random(1, element, &extents)],
        expected: vec![Expected::new(3, first, 1e-5), Expected::new(4, second, tolerance(element))],
    }
}

/// The error function: by its series, and far out by its continued fraction.
pub(super) fn erf(x: f64) -> f64 {
    let squared = x * x;
    if squared > 9.0 {
        let fraction = (1..60).rev().fold(0.0, |below, n| f64::from(n) / 2.0 / (x.abs() + below));
        let rest = (-squared).exp() / std::f64::consts::PI.sqrt() / (x.abs() + fraction);
        return x.signum() * (1.0 - rest);
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..100 {
        term *= -squared / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}
