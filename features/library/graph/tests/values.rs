//! What each operation computes, on values that were worked out by hand.

use vm_graph::{
    Builder, Convolution, Element, GraphError, Pool, Pooling, Reduction, Tensor, Value, decode, encode,
    evaluate, onnx, validate,
};

type Built = Result<Value, GraphError>;

/// Builds a graph of one f32 input, and compares its output. It is the same after it went through bytes, and can be an ONNX model.
fn check(extents: &[u64], x: &[f64], build: impl Fn(&mut Builder, Value) -> Built, expected: &[f64]) {
    let mut builder = Builder::new("graph");
    let input = builder.input("x", Element::F32, extents).unwrap();
    let output = build(&mut builder, input).unwrap();
    builder.output("y", output).unwrap();
    let graph = builder.finish().unwrap();
    let found = evaluate(&graph, &[x.to_vec()]).unwrap().remove(0);
    let is_near =
        |a: f64, b: f64| a == b || (a - b).abs() <= 1e-9 * b.abs().max(1.0) || a.is_nan() && b.is_nan();
    assert_eq!(found.len(), expected.len(), "{found:?}");
    assert!(found.iter().zip(expected).all(|(a, b)| is_near(*a, *b)), "{found:?}\n{expected:?}");
    let again = validate(decode(&encode(&graph).unwrap()).unwrap()).unwrap();
    assert_eq!(again, graph);
    assert!(onnx::model(&graph).len() > 20);
}

fn i64s(b: &mut Builder, extents: &[u64], values: &[f64]) -> Built {
    b.constant(Tensor::from_f64s(Element::I64, extents, values))
}

fn f32s(b: &mut Builder, extents: &[u64], values: &[f64]) -> Built {
    b.constant(Tensor::from_f64s(Element::F32, extents, values))
}

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

#[test]
fn elements() {
    let x = [-1.5, -0.5, 0.0, 0.5, 2.5, NAN];
    check(&[6], &x, |b, x| b.neg(x), &[1.5, 0.5, 0.0, -0.5, -2.5, NAN]);
    check(&[6], &x, |b, x| b.sign(x), &[-1.0, -1.0, 0.0, 1.0, 1.0, NAN]);
    check(&[6], &x, |b, x| b.round(x), &[-2.0, 0.0, 0.0, 0.0, 2.0, NAN]);
    check(&[6], &x, |b, x| b.relu(x), &[0.0, 0.0, 0.0, 0.5, 2.5, NAN]);
    check(&[2], &[0.0, 1.0], |b, x| b.gelu(x), &[0.0, 0.841_344_746_068_543]);
    check(&[2], &[0.0, 1.0], |b, x| b.gelu_tanh(x), &[0.0, 0.841_191_990_608_302_5]);
    check(&[2], &[0.0, 3f64.ln()], |b, x| b.sigmoid(x), &[0.5, 0.75]);
    let clipped = |b: &mut Builder, x| {
        let (least, greatest) = (b.number_like(x, -1.0)?, b.number_like(x, 1.0)?);
        let x = b.max(x, least)?;
        b.min(x, greatest)
    };
    check(&[6], &x, clipped, &[-1.0, -0.5, 0.0, 0.5, 1.0, NAN]);
    let cast = |to| move |b: &mut Builder, x| b.cast(x, to);
    check(
        &[6],
        &[-1.5, 1e9, -1e9, INF, 300.0, NAN],
        cast(Element::I8),
        &[-1.0, 127.0, -128.0, 127.0, 127.0, 0.0],
    );
    check(&[3], &[0.0, 0.2, NAN], cast(Element::Bool), &[0.0, 1.0, 1.0]);
    check(&[2], &[1.003, 1e39], cast(Element::Bf16), &[1.0, INF]);
    check(&[2], &[2049.0, 1e5], cast(Element::F16), &[2048.0, INF]);
    check(&[3], &[17.1, 500.0, -0.001], cast(Element::F8E4M3), &[18.0, 448.0, -0.001_953_125]);
    let wraps = |b: &mut Builder, x| {
        let x = b.cast(x, Element::U8)?;
        b.mul(x, x)
    };
    check(&[2], &[16.0, 17.0], wraps, &[0.0, 33.0]);
    let where_positive = |b: &mut Builder, x| {
        let zero = b.number_like(x, 0.0)?;
        let is_positive = b.greater(x, zero)?;
        let minus = b.number_like(x, -7.0)?;
        b.select(is_positive, x, minus)
    };
    check(&[6], &x, where_positive, &[-7.0, -7.0, -7.0, 0.5, 2.5, -7.0]);
}

#[test]
fn places() {
    let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    check(&[2, 3], &x, |b, x| b.transpose(x, &[1, 0]), &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    check(&[2, 3], &x, |b, x| b.slice(x, 1, 1, 3), &[2.0, 3.0, 5.0, 6.0]);
    check(&[6], &x, |b, x| b.slice_by(x, 0, 1, 6, 2), &[2.0, 4.0, 6.0]);
    check(&[3, 1], &x[..3], |b, x| b.expand(x, &[3, 2]), &[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
    check(&[1, 2], &x[..2], |b, x| b.pad(x, &[1, 0], &[0, 1]), &[0.0, 0.0, 0.0, 1.0, 2.0, 0.0]);
    check(&[2, 1], &x[..2], |b, x| b.concat(&[x, x], 1), &[1.0, 1.0, 2.0, 2.0]);
    let gather = |axis| {
        move |b: &mut Builder, x| {
            let index = i64s(b, &[2], &[7.0, -7.0])?;
            b.gather(x, index, axis)
        }
    };
    check(&[2, 3], &x, gather(0), &[4.0, 5.0, 6.0, 1.0, 2.0, 3.0]);
    check(&[2, 3], &x, gather(1), &[3.0, 1.0, 6.0, 4.0]);
    let elements = |b: &mut Builder, x| {
        let index = i64s(b, &[2, 1], &[2.0, 0.0])?;
        b.gather_elements(x, index, 1)
    };
    check(&[2, 3], &x, elements, &[3.0, 4.0]);
    let scatter = |add| {
        move |b: &mut Builder, x| {
            let index = i64s(b, &[3], &[1.0, 9.0, 0.0])?;
            let rows = f32s(b, &[3, 2], &[10.0, 20.0, 30.0, 40.0, 50.0, 60.0])?;
            b.scatter_rows(x, index, rows, add)
        }
    };
    check(&[3, 2], &x, scatter(true), &[51.0, 62.0, 13.0, 24.0, 35.0, 46.0]);
    check(&[3, 2], &x, scatter(false), &[50.0, 60.0, 10.0, 20.0, 30.0, 40.0]);
}

#[test]
fn rows() {
    let x = [1.0, 5.0, 3.0, 5.0, 2.0, 6.0];
    check(&[2, 3], &x, |b, x| b.reduce(Reduction::Sum, x, &[1]), &[9.0, 13.0]);
    check(&[2, 3], &x, |b, x| b.reduce_away(Reduction::Mean, x, &[0]), &[3.0, 3.5, 4.5]);
    check(&[2, 3], &x, |b, x| b.reduce_away(Reduction::Max, x, &[0, 1]), &[6.0]);
    check(&[2, 3], &x, |b, x| b.cum_sum(x, 1), &[1.0, 6.0, 9.0, 5.0, 7.0, 13.0]);
    check(&[6], &x, |b, x| b.arg_max(x, 0), &[5.0]);
    check(&[5], &[2.0, NAN, 5.0, 5.0, 1.0], |b, x| b.arg_max(x, 0), &[2.0]);
    check(&[6], &x, |b, x| Ok(b.top_k(x, 0, 3)?[0]), &[6.0, 5.0, 5.0]);
    check(&[6], &x, |b, x| Ok(b.top_k(x, 0, 3)?[1]), &[5.0, 1.0, 3.0]);
    check(&[2], &[0.0, 3f64.ln()], |b, x| b.softmax(x, 0), &[0.25, 0.75]);
    check(&[2], &[1000.0, 1000.0], |b, x| b.log_softmax(x, 0), &[-(2f64.ln()); 2]);
    let norm = |b: &mut Builder, x| {
        let (weight, bias) = (f32s(b, &[2], &[2.0, 3.0])?, f32s(b, &[2], &[10.0, 20.0])?);
        b.layer_norm(x, weight, bias, 0.0)
    };
    check(&[1, 2], &[1.0, 3.0], norm, &[8.0, 23.0]);
    let norm_of_one = |b: &mut Builder, x| {
        let (weight, bias) = (f32s(b, &[1], &[2.0])?, f32s(b, &[1], &[10.0])?);
        // An f32 has 0 for it.
        b.layer_norm(x, weight, bias, 1e-300)
    };
    check(&[1], &[1.0], norm_of_one, &[NAN]);
    let square = |b: &mut Builder, x| {
        let turned = b.transpose(x, &[1, 0])?;
        b.mat_mul(x, turned)
    };
    check(&[2, 3], &x, square, &[35.0, 33.0, 33.0, 65.0]);
    let batched = |b: &mut Builder, x| {
        let one = f32s(b, &[2, 1], &[1.0, 1.0])?;
        b.mat_mul(x, one)
    };
    check(&[3, 1, 2], &x, batched, &[6.0, 8.0, 8.0]);
    let wraps = |b: &mut Builder, x| {
        let x = b.cast(x, Element::I32)?;
        let turned = b.transpose(x, &[1, 0])?;
        b.mat_mul(x, turned)
    };
    check(&[1, 2], &[46_341.0, 3.0], wraps, &[-2_147_479_006.0]);
    let quantised = |b: &mut Builder, x| {
        let scale = f32s(b, &[2], &[0.5, 10.0])?;
        let zero = b.constant(Tensor::from_f64s(Element::U8, &[2], &[0.0, 100.0]))?;
        let q = b.quantize(x, scale, zero, Some(0))?;
        b.dequantize(q, scale, zero, Some(0))
    };
    check(&[2, 2], &[0.74, -1.0, 25.0, 1e6], quantised, &[0.5, 0.0, 20.0, 1550.0]);
}

#[test]
fn images() {
    let x: Vec<f64> = (1..=9).map(f64::from).collect();
    let all = |how: Convolution| {
        move |b: &mut Builder, x| {
            let weight = f32s(b, &[1, 1, 2, 2], &[1.0, 10.0, 100.0, 1000.0])?;
            b.convolution(how, x, weight, None)
        }
    };
    check(&[1, 1, 3, 3], &x, all(Convolution::default()), &[5421.0, 6532.0, 8754.0, 9865.0]);
    let strided = Convolution { strides: [2, 2], pads: [[1, 0], [0, 1]], ..Convolution::default() };
    check(&[1, 1, 3, 3], &x, all(strided), &[2100.0, 300.0, 8754.0, 906.0]);
    let dilated = Convolution { dilations: [2, 2], ..Convolution::default() };
    check(&[1, 1, 3, 3], &x, all(dilated), &[9731.0]);
    // Zeros of padding are multiplied as others are.
    let of_zero = |b: &mut Builder, x| {
        let weight = f32s(b, &[1, 1, 1, 2], &[1.0, INF])?;
        b.convolution(Convolution { pads: [[0; 2], [0, 1]], ..Convolution::default() }, x, weight, None)
    };
    check(&[1, 1, 1, 1], &[5.0], of_zero, &[NAN]);
    let grouped = |b: &mut Builder, x| {
        let weight = f32s(b, &[2, 1, 1, 1], &[2.0, 3.0])?;
        let bias = f32s(b, &[2], &[0.5, 0.25])?;
        b.convolution(Convolution { groups: 2, ..Convolution::default() }, x, weight, Some(bias))
    };
    check(&[1, 2, 1, 2], &x[..4], grouped, &[2.5, 4.5, 9.25, 12.25]);
    let pool = |how| {
        move |b: &mut Builder, x| {
            b.pool(Pool { how, window: [2, 2], strides: [2, 2], pads: [[0, 1], [0, 1]] }, x)
        }
    };
    check(&[1, 1, 3, 3], &x, pool(Pooling::MaxPool), &[5.0, 6.0, 8.0, 9.0]);
    check(&[1, 1, 3, 3], &x, pool(Pooling::AveragePool), &[3.0, 4.5, 7.5, 9.0]);
}
