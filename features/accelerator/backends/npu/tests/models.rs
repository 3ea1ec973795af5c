//! Models on the emulated Hexagon and on the processor, beside what they compute by definition.

mod common;

use std::time::Duration;

use common::{on_each, options};
use vm_graph::{
    Builder, Convolution, Element, GraphError, Op, Pool, Pooling, Reduction, Tensor, ValidGraph, Value,
    evaluate,
};
use vm_npu::{NpuAccelerator, NpuError, Provider};

const LIMIT: Duration = Duration::from_secs(60);

/// Numbers of both signs, none of them large.
fn numbers(count: u64, seed: f64) -> Vec<f64> {
    (0..count).map(|at| (((at as f64 + seed) * 12.9898).sin() * 43_758.545).fract()).collect()
}

fn constant(b: &mut Builder, extents: &[u64], seed: f64) -> Result<Value, GraphError> {
    let values = numbers(extents.iter().product(), seed);
    b.constant(Tensor::from_f64s(Element::F32, extents, &values))
}

fn graph(extents: &[u64], build: &dyn Fn(&mut Builder, Value) -> Result<Value, GraphError>) -> ValidGraph {
    let mut builder = Builder::new("model");
    let x = builder.input("x", Element::F32, extents).unwrap();
    let y = build(&mut builder, x).unwrap();
    builder.output("y", y).unwrap();
    builder.finish().unwrap()
}

/// Runs a graph of one input.
fn run(npu: &NpuAccelerator, graph: &ValidGraph, x: &[f64]) -> Result<Vec<f64>, NpuError> {
    let context = npu.context(&options())?;
    let model = context.compile(graph)?;
    let mut arrays = context.buffers(&model)?;
    let input = &graph.inputs[0].ty;
    arrays.inputs[0].bytes_mut().copy_from_slice(&Tensor::from_f64s(input.element, &input.extents, x).bytes);
    let arrays = context.submit(&model, arrays, LIMIT)?.wait()?;
    let output = &arrays.outputs[0];
    Ok(Tensor { ty: output.ty().clone(), bytes: output.bytes().to_vec() }.to_f64s())
}

/// Compares on each device; the emulated one computes in f16, and may be off by a part of the greatest.
fn check(off: f64, extents: &[u64], build: &dyn Fn(&mut Builder, Value) -> Result<Value, GraphError>) {
    check_on(off, extents, &numbers(extents.iter().product(), 0.25), build);
}

/// The same, of these numbers.
fn check_on(
    off: f64,
    extents: &[u64],
    x: &[f64],
    build: &dyn Fn(&mut Builder, Value) -> Result<Value, GraphError>,
) {
    let graph = graph(extents, build);
    let x = x.to_vec();
    let expected = evaluate(&graph, std::slice::from_ref(&x)).unwrap().remove(0);
    let greatest = expected.iter().fold(1e-3f64, |greatest, x| greatest.max(x.abs()));
    on_each(|npu| {
        let found = run(npu, &graph, &x).unwrap_or_else(|error| panic!("{error}: {:?}", graph.nodes));
        let tolerance = if npu.provider() == Provider::Cpu { 1e-5 } else { off };
        assert_eq!(found.len(), expected.len());
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let is_near = (found - expected).abs() <= tolerance * greatest;
            assert!(is_near, "{} {at}: {found} for {expected}: {:?}", npu.device(), graph.nodes);
        }
    });
}

#[test]
fn layers() {
    check(1e-2, &[4, 64], &|b, x| {
        let (up, down) = (constant(b, &[64, 96], 1.0)?, constant(b, &[96, 64], 2.0)?);
        let h = b.mat_mul(x, up)?;
        let h = b.gelu(h)?;
        b.mat_mul(h, down)
    });
    check(1e-2, &[2, 8, 32], &|b, x| {
        let (weight, bias) = (constant(b, &[32], 3.0)?, constant(b, &[32], 4.0)?);
        b.layer_norm(x, weight, bias, 1e-5)
    });
    check(1e-2, &[2, 4, 16, 8], &|b, q| {
        let k = constant(b, &[2, 4, 16, 8], 5.0)?;
        let k = b.transpose(k, &[0, 1, 3, 2])?;
        let scores = b.mat_mul(q, k)?;
        let scale = b.number_like(scores, 8f64.sqrt().recip())?;
        let scores = b.mul(scores, scale)?;
        let shares = b.softmax(scores, 3)?;
        let v = constant(b, &[2, 4, 16, 8], 6.0)?;
        b.mat_mul(shares, v)
    });
    check(1e-2, &[1, 3, 12, 12], &|b, x| {
        let (weight, bias) = (constant(b, &[8, 3, 3, 3], 7.0)?, constant(b, &[8], 8.0)?);
        let how = Convolution { pads: [[1, 1], [1, 1]], ..Convolution::default() };
        let y = b.convolution(how, x, weight, Some(bias))?;
        let y = b.relu(y)?;
        b.pool(Pool { how: Pooling::MaxPool, window: [2, 2], strides: [2, 2], pads: [[0; 2]; 2] }, y)
    });
    check(1e-2, &[6, 32], &|b, x| {
        // RMS norm.
        let square = b.mul(x, x)?;
        let mean = b.reduce(Reduction::Mean, square, &[1])?;
        let epsilon = b.number_like(x, 1e-5)?;
        let mean = b.add(mean, epsilon)?;
        let root = b.sqrt(mean)?;
        b.div(x, root)
    });
    check(1e-2, &[4, 8], &|b, x| {
        let left = b.slice(x, 1, 0, 4)?;
        let right = b.slice(x, 1, 4, 8)?;
        let turned = b.neg(right)?;
        b.concat(&[turned, left], 1)
    });
}

/// What ONNX leaves to the runtime, and what it has no numbers for.
#[test]
fn beyond_the_ends() {
    for element in
        [Element::U8, Element::I8, Element::I16, Element::U16, Element::I32, Element::U32, Element::I64]
    {
        let cast = move |b: &mut Builder, x| {
            let x = b.cast(x, element)?;
            // An NPU has not all of them as its outputs.
            b.cast(x, Element::F32)
        };
        let x = [
            0.0,
            -0.9,
            1.9,
            300.0,
            -300.0,
            3e9,
            -3e9,
            1e20,
            -1e20,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::NAN,
        ];
        let graph = graph(&[12], &cast);
        let expected = evaluate(&graph, &[x.to_vec()]).unwrap().remove(0);
        on_each(|npu| {
            if npu.provider() == Provider::Cpu {
                assert_eq!(
                    run(npu, &graph, &x).unwrap(),
                    expected.iter().map(|x| Element::F32.round(*x)).collect::<Vec<_>>(),
                    "{element}"
                );
            }
        });
    }
    // Of f16, whose infinities are the nearest to these.
    check_on(1e-2, &[6], &[0.0, -0.9, 1.9, 1e6, -1e6, 1e20], &|b, x| b.cast(x, Element::U8));
    check_on(1e-2, &[3], &[0.0, 16.0, -0.5], &|b, x| b.cast(x, Element::Bool));
    check_on(1e-2, &[3], &[0.0, 16.0, 1.0], &|b, x| {
        let x = b.cast(x, Element::I32)?;
        b.cast(x, Element::Bool)
    });
    for step in [3, 1 << 32, 1 << 63, u64::MAX] {
        check(1e-2, &[4], &|b, x| b.slice_by(x, 0, 1, 4, step));
        let strides = [step, step];
        let pool = Pool { how: Pooling::MaxPool, window: [2, 2], strides, pads: [[0; 2]; 2] };
        check(1e-2, &[1, 1, 4, 4], &|b, x| b.pool(pool, x));
        check(1e-2, &[1, 4, 4, 4], &|b, x| {
            let weight = constant(b, &[8, 4, 1, 1], 3.0)?;
            b.convolution(Convolution { dilations: strides, ..Convolution::default() }, x, weight, None)
        });
    }
    check(1e-2, &[], &|b, x| b.add_node(Op::Slice { starts: vec![], ends: vec![], steps: vec![] }, &[x]));
    check(1e-2, &[], &|b, x| b.pad(x, &[], &[]));
}

/// Quantised to 8 bits, with every number of them explicit.
#[test]
fn quantised() {
    // One step of the output more or less.
    check(4e-2, &[4, 64], &|b, x| {
        let scale = b.number_like(x, 2.0 / 255.0)?;
        let zero = b.constant(Tensor::number(Element::U8, 128.0))?;
        let q = b.quantize(x, scale, zero, None)?;
        let x = b.dequantize(q, scale, zero, None)?;
        let weights: Vec<f64> = numbers(64 * 32, 9.0).iter().map(|x| (x * 127.0).round()).collect();
        let weights = b.constant(Tensor::from_f64s(Element::I8, &[64, 32], &weights))?;
        let weight_scale = b.number_like(x, 1.0 / 127.0)?;
        let weight_zero = b.constant(Tensor::number(Element::I8, 0.0))?;
        let weights = b.dequantize(weights, weight_scale, weight_zero, None)?;
        let y = b.mat_mul(x, weights)?;
        let out = b.number_like(y, 30.0 / 255.0)?;
        let q = b.quantize(y, out, zero, None)?;
        b.dequantize(q, out, zero, None)
    });
}

/// What a provider can't take is an error with a remedy, and runs nowhere else by itself.
#[test]
fn no_silent_fallback() {
    // Arithmetic of f64 is on no NPU.
    let mut builder = Builder::new("model");
    let x = builder.input("x", Element::F64, &[4]).unwrap();
    let y = builder.exp(x).unwrap();
    builder.output("y", y).unwrap();
    let graph = builder.finish().unwrap();
    on_each(|npu| {
        let found = run(npu, &graph, &[0.0; 4]);
        if npu.provider() == Provider::Cpu {
            assert_eq!(found.unwrap(), [1.0; 4]);
            return;
        }
        let error = found.unwrap_err();
        assert!(matches!(error, NpuError::Fallback { .. }), "{error:?}");
        assert!(error.to_string().contains("nothing is run on the processor"), "{error}");
        let mut allowed = options();
        allowed.fallback = true;
        let context = npu.context(&allowed).unwrap();
        let model = context.compile(&graph).unwrap();
        let arrays = context.buffers(&model).unwrap();
        let arrays = context.submit(&model, arrays, LIMIT).unwrap().wait().unwrap();
        assert_eq!(arrays.outputs[0].bytes()[..8], 1f64.to_le_bytes());
    });
}

/// A compiled model is loaded by another context, and refused as another graph's.
#[test]
fn blobs() {
    let one = graph(&[2, 16], &|b, x| b.exp(x));
    let other = graph(&[16, 2], &|b, x| b.exp(x));
    on_each(|npu| {
        if npu.provider() == Provider::Cpu {
            return;
        }
        let blob = npu.context(&options()).unwrap().compile(&one).unwrap().blob().clone();
        assert!(!blob.is_empty());
        let context = npu.context(&options()).unwrap();
        let model = context.load_blob(&one, blob.clone()).unwrap();
        let arrays = context.buffers(&model).unwrap();
        let arrays = context.submit(&model, arrays, LIMIT).unwrap().wait().unwrap();
        let one_is = f32::from_le_bytes(arrays.outputs[0].bytes()[..4].try_into().unwrap());
        assert!((one_is - 1.0).abs() < 1e-2, "{one_is}");
        let error = context.load_blob(&other, blob.clone()).unwrap_err();
        assert!(matches!(error, NpuError::Refused { .. }), "{error:?}");
        for cut in [0, 1, blob.len() / 2, blob.len() - 1] {
            let error = context.load_blob(&one, blob[..cut].into()).unwrap_err();
            assert!(
                matches!(error, NpuError::Refused { .. } | NpuError::Fallback { .. }),
                "{cut}: {error:?}"
            );
        }
    });
}

/// Buffers of another model are refused; an inference without time is ended, and the next one runs.
#[test]
fn bindings_and_deadlines() {
    let graph = graph(&[64, 64], &|b, x| {
        let mut y = x;
        for _ in 0..64 {
            y = b.mat_mul(y, x)?;
            y = b.tanh(y)?;
        }
        Ok(y)
    });
    on_each(|npu| {
        let context = npu.context(&options()).unwrap();
        let model = context.compile(&graph).unwrap();
        let mut arrays = context.buffers(&model).unwrap();
        arrays.inputs.pop();
        let error = context.submit(&model, arrays, LIMIT).unwrap_err();
        assert!(error.to_string().contains("1 arrays"), "{error}");
        let mut arrays = context.buffers(&model).unwrap();
        arrays.outputs.swap(0, 0);
        arrays.inputs[0] = context.buffer(&vm_graph::TensorType::new(Element::F32, &[64, 63])).unwrap();
        let error = context.submit(&model, arrays, LIMIT).unwrap_err();
        assert!(error.to_string().contains("x is f32[64, 64], and was given f32[64, 63]"), "{error}");
        let arrays = context.buffers(&model).unwrap();
        let ended = context.submit(&model, arrays, Duration::ZERO).unwrap().wait();
        // A provider that runs the whole model in one call can't be ended within it.
        assert!(matches!(ended, Ok(_) | Err(NpuError::Deadline { .. })), "{ended:?}");
        let arrays = context.buffers(&model).unwrap();
        context.submit(&model, arrays, LIMIT).unwrap().wait().unwrap();
    });
}
