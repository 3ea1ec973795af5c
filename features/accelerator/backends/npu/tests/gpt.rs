//! A whole GPT as one model, on the processor and on the emulated Hexagon.

mod common;

use std::time::Duration;

use common::{on_each, options};
use gpt::config::Config;
use gpt::export::{Weights, next_token};
use gpt::parameters::Parameters;
use vm_graph::{Tensor, ValidGraph, evaluate, quantize_mat_muls};
use vm_ir::Scalar;
use vm_npu::Provider;

const CONFIG: Config = Config {
    element: Scalar::F32,
    layers: 2,
    width: 64,
    heads: 4,
    tokens: 12,
    vocabulary: 40,
    batch: 1,
    ..Config::TINY
};
/// Tokens of the prompt; the others are generated.
const PROMPT: usize = 8;
/// By how much of the greatest logit one may be off: on the processor, and on the Hexagon, which computes in f16.
const FLOATS: [f64; 2] = [1e-5, 1e-2];
/// The same of products of integers of 8 bits, where the nearest one may be another.
const INTEGERS: [f64; 2] = [2e-2, 1e-1];
/// The same of what such products make of the floats that they were.
const QUANTIZED: f64 = 1e-1;

/// Prompts from which the ranges of values are known, as the graph takes them.
fn samples() -> Vec<Vec<Vec<f64>>> {
    let prompt =
        |seed: u64| (0..CONFIG.tokens).map(|at| ((at + CONFIG.tokens * seed) * 9 % 40) as f64).collect();
    (0..8).map(|seed| vec![prompt(seed), vec![CONFIG.tokens as f64 - 1.0]]).collect()
}

#[test]
fn a_model_generates_tokens() {
    let parameters = Parameters::of(&CONFIG);
    let mut masters = parameters.initial(&CONFIG, 1);
    // Matrices that matter more than they do at first.
    masters[..parameters.sizes[0] as usize].iter_mut().for_each(|x| *x *= 5.0);
    let constant = next_token(&CONFIG, CONFIG.tokens, Weights::Constants(&masters)).unwrap();
    let given = next_token(&CONFIG, CONFIG.tokens, Weights::Inputs).unwrap();
    let weights: Vec<Vec<f64>> = parameters
        .all
        .iter()
        .map(|parameter| {
            let of = &masters[parameter.offset as usize..][..parameter.len() as usize];
            of.iter().map(|x| f64::from(*x)).collect()
        })
        .collect();
    let quantized = quantize_mat_muls(&constant, &samples()).unwrap();
    let bytes = |graph: &ValidGraph| vm_graph::encode(graph).unwrap().len();
    assert!(bytes(&quantized) < bytes(&constant) / 3, "{} of {}", bytes(&quantized), bytes(&constant));
    on_each(|npu| {
        let is_processor = npu.provider() == Provider::Cpu;
        for (graph, weights, [on_processor, on_hexagon]) in
            [(&constant, &[][..], FLOATS), (&given, &weights, FLOATS), (&quantized, &[], INTEGERS)]
        {
            let tolerance = if is_processor { on_processor } else { on_hexagon };
            let context = npu.context(&options()).unwrap();
            assert!(!options().fallback);
            let model = context.compile(graph).unwrap();
            let mut arrays = context.buffers(&model).unwrap();
            let mut tokens: Vec<f64> = (0..PROMPT).map(|at| ((at * at * 7 + 3) % 40) as f64).collect();
            let (mut worst, mut of_floats) = (0f64, 0f64);
            while tokens.len() < CONFIG.tokens as usize {
                let mut padded = tokens.clone();
                padded.resize(CONFIG.tokens as usize, 0.0);
                let last = vec![tokens.len() as f64 - 1.0];
                let values: Vec<Vec<f64>> =
                    [padded, last].into_iter().chain(weights.iter().cloned()).collect();
                for ((buffer, input), values) in arrays.inputs.iter_mut().zip(&graph.inputs).zip(&values) {
                    let tensor = Tensor::from_f64s(input.ty.element, &input.ty.extents, values);
                    buffer.bytes_mut().copy_from_slice(&tensor.bytes);
                }
                arrays = context.submit(&model, arrays, Duration::from_secs(60)).unwrap().wait().unwrap();
                let found: Vec<Vec<f64>> = arrays
                    .outputs
                    .iter()
                    .map(|buffer| {
                        Tensor { ty: buffer.ty().clone(), bytes: buffer.bytes().to_vec() }.to_f64s()
                    })
                    .collect();
                let expected = evaluate(graph, &values).unwrap();
                let greatest = expected[0].iter().fold(0f64, |most, x| most.max(x.abs()));
                let off = |expected: &[f64]| {
                    let off = found[0].iter().zip(expected).map(|(a, b)| (a - b).abs() / greatest);
                    off.fold(0.0, f64::max)
                };
                worst = worst.max(off(&expected[0]));
                of_floats = of_floats.max(off(&evaluate(&constant, &values[..2]).unwrap()[0]));
                let token = found[1][0];
                let most = expected[0].iter().copied().fold(f64::MIN, f64::max);
                assert!(expected[0][token as usize] >= most - tolerance * greatest, "{token} is not likely");
                tokens.push(token);
            }
            println!(
                "{}: {} operations, off by {worst:.1e}, from floats by {of_floats:.1e}: {tokens:?}",
                npu.device(),
                graph.nodes.len()
            );
            assert!(worst < tolerance && of_floats < QUANTIZED, "off by {worst:.1e}, {of_floats:.1e}");
        }
    });
}
