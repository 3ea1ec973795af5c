//! Graphs of floats whose products are quantised.

use vm_graph::{
    Builder, Element, GraphError, Op, Tensor, ValidGraph, Value, evaluate, quantize_mat_muls, validate,
};

fn graph(build: impl FnOnce(&mut Builder, Value) -> Result<Value, GraphError>) -> ValidGraph {
    let mut builder = Builder::new("model");
    let x = builder.input("x", Element::F32, &[2, 4]).unwrap();
    let y = build(&mut builder, x).unwrap();
    builder.output("y", y).unwrap();
    builder.finish().unwrap()
}

fn count(graph: &ValidGraph, op: fn(&Op) -> bool) -> usize {
    graph.nodes.iter().filter(|node| op(&node.op)).count()
}

const SAMPLE: [f64; 8] = [-1.0, 0.5, 0.25, 3.0, 2.0, -0.75, 1.5, 0.0];

/// How many values are quantised and dequantised, and how far the output is off, of the greatest.
fn check(graph: &ValidGraph, counts: [usize; 2], tolerance: f64) {
    let samples = [vec![SAMPLE.to_vec()], vec![SAMPLE.map(|x| -x / 2.0).to_vec()]];
    let quantized = quantize_mat_muls(graph, &samples).unwrap();
    let found = [
        count(&quantized, |op| matches!(op, Op::Quantize { .. })),
        count(&quantized, |op| matches!(op, Op::Dequantize { .. })),
    ];
    assert_eq!(found, counts, "{:?}", quantized.nodes);
    assert_eq!(validate(quantized.clone().into_inner()).unwrap(), quantized);
    for sample in &samples {
        let (expected, found) = (evaluate(graph, sample).unwrap(), evaluate(&quantized, sample).unwrap());
        let greatest = expected[0].iter().fold(0f64, |most, x| most.max(x.abs()));
        for (expected, found) in expected[0].iter().zip(&found[0]) {
            let off = (expected - found).abs();
            assert!(
                off <= tolerance * greatest || expected.is_nan() && found.is_nan(),
                "{found}, not {expected}"
            );
        }
    }
}

#[test]
fn products_are_of_integers() {
    let weight = |b: &mut Builder| {
        let values: Vec<f64> = (0..12).map(|at| (f64::from(at) * 0.618).fract() - 0.5).collect();
        let weight = b.constant(Tensor::from_f64s(Element::F32, &[3, 4], &values))?;
        // What is computed of constants is one.
        b.transpose(weight, &[1, 0])
    };
    let layer = graph(|b, x| {
        let weight = weight(b)?;
        let y = b.mat_mul(x, weight)?;
        b.relu(y)
    });
    check(&layer, [2, 3], 0.02);
    let quantized = quantize_mat_muls(&layer, &[vec![SAMPLE.to_vec()]]).unwrap();
    let floats = quantized.nodes.iter().filter(|node| matches!(&node.op, Op::Constant(tensor) if tensor.ty.rank() > 0 && tensor.ty.element.is_float()));
    assert_eq!(floats.count(), 0, "the weights are integers");
    // A value that two products take is quantised once, and dequantised for each.
    let square = graph(|b, x| {
        let turned = b.transpose(x, &[1, 0])?;
        let y = b.mat_mul(x, turned)?;
        b.mat_mul(y, x)
    });
    check(&square, [4, 5], 0.03);
    // All zeros, what is not finite, integers, and constants alone.
    let zeros = |b: &mut Builder| b.constant(Tensor::from_f64s(Element::F32, &[4, 1], &[0.0; 4]));
    check(
        &graph(|b, x| {
            let zeros = zeros(b)?;
            b.mat_mul(x, zeros)
        }),
        [2, 3],
        0.0,
    );
    check(
        &graph(|b, x| {
            let nan = b.number_like(x, f64::NAN)?;
            let x = b.add(x, nan)?;
            let zeros = zeros(b)?;
            b.mat_mul(x, zeros)
        }),
        [0, 0],
        0.0,
    );
    check(
        &graph(|b, x| {
            let x = b.cast(x, Element::I32)?;
            let turned = b.transpose(x, &[1, 0])?;
            b.mat_mul(x, turned)
        }),
        [0, 0],
        0.0,
    );
    check(
        &graph(|b, x| {
            let weight = weight(b)?;
            let turned = b.transpose(weight, &[1, 0])?;
            let known = b.mat_mul(turned, weight)?;
            let known = b.slice(known, 0, 0, 2)?;
            let x = b.slice(x, 1, 0, 3)?;
            b.add(x, known)
        }),
        [0, 0],
        0.0,
    );
}

#[test]
fn ranges_come_of_samples() {
    let layer = graph(|b, x| {
        let turned = b.transpose(x, &[1, 0])?;
        b.mat_mul(x, turned)
    });
    let error = quantize_mat_muls(&layer, &[]).unwrap_err().to_string();
    assert!(error.contains("there is no sample"), "{error}");
    let error = quantize_mat_muls(&layer, &[vec![SAMPLE.to_vec()], vec![vec![1.0]]]).unwrap_err().to_string();
    assert!(error.contains("argument 0"), "{error}");
    // What is beyond the samples ends at their ends.
    let quantized = quantize_mat_muls(&layer, &[vec![SAMPLE.to_vec()]]).unwrap();
    let most = evaluate(&layer, &[SAMPLE.to_vec()]).unwrap()[0].iter().copied().fold(0.0, f64::max);
    let far = evaluate(&quantized, &[vec![100.0; 8]]).unwrap();
    assert!(far[0].iter().all(|x| *x <= most * 1.01), "{far:?}");
}
