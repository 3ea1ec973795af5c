//! The functions of the kernel library, by their graphs, on the processor and on the emulated Hexagon.

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use common::{on_each, options};
use vm_graph::ValidGraph;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;
use vm_kernels::cases::{Case, all};
use vm_kernels::graph::names;
use vm_npu::{NpuContext, NpuError, Provider};

/// The most elements of all buffers of a case.
const MOST: usize = 1 << 13;

/// What the buffers hold behind a graph that ran.
fn run(context: &NpuContext, case: &Case, graph: &ValidGraph) -> Result<Vec<Tensor>, NpuError> {
    let names = names(&case.function.buffers());
    let place = |name: &str| {
        let found = names.iter().position(|known| known == name);
        found.or_else(|| names.iter().position(|known| Some(known.as_str()) == name.strip_suffix("_out")))
    };
    let model = context.compile(graph)?;
    let mut arrays = context.buffers(&model)?;
    for (input, buffer) in graph.inputs.iter().zip(&mut arrays.inputs) {
        let given = &case.buffers[place(&input.name).expect("an input is a buffer")];
        buffer.bytes_mut().copy_from_slice(&given.bytes);
    }
    let arrays = context.submit(&model, arrays, Duration::from_secs(60))?.wait()?;
    let mut behind = case.buffers.clone();
    for (output, buffer) in graph.outputs.iter().zip(&arrays.outputs) {
        behind[place(&output.name).expect("an output is a buffer")].bytes = buffer.bytes().to_vec();
    }
    Ok(behind)
}

/// The greatest part of its scale by which an element is off. Elements of FP8 may be a step off, as ONNX Runtime rounds them by another
/// rule, and its infinities end at the greatest number.
fn worst(case: &Case, behind: &[Tensor]) -> f64 {
    let mut worst = 0f64;
    for expected in &case.expected {
        let greatest = expected.values.iter().fold(expected.scale, |greatest, x| greatest.max(x.abs()));
        let found = &behind[expected.buffer];
        let step = match found.element {
            Scalar::F8E4M3 => 0.125,
            Scalar::F8E5M2 => 0.25,
            _ => 0.0,
        };
        for (found, wanted) in found.to_f64s().iter().zip(&expected.values) {
            let is_special = step > 0.0 && !(wanted.is_finite() && found.is_finite());
            if found != wanted && !(found.is_nan() && wanted.is_nan()) && !is_special {
                let off = ((found - wanted).abs() - step * wanted.abs()) / greatest;
                worst = worst.max(if off.is_nan() { f64::INFINITY } else { off });
            }
        }
    }
    worst
}

/// The function's name.
fn kind(case: &Case) -> String {
    let text = format!("{:?}", case.function);
    let inner = text.strip_prefix("Strided { function: ").unwrap_or(&text);
    inner.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

/// What the emulated Hexagon does not take, with words of the reason.
const NOT_ON_HEXAGON: &[(&str, &str)] =
    &[("Fill", "Having zero graph inputs is not supported"), ("Quantise", "can't take all of the model")];
/// What answers with positions: two numbers that are the same in f16 may change places.
const POSITIONS: [&str; 4] = ["Argmax", "Sample", "SoftmaxTopK", "TopK"];

/// Is a case in the part of the sweep that is taken?
fn is_taken(number: usize) -> bool {
    let seed = std::env::var("SWEEP_SEED").ok().map(|seed| seed.parse::<usize>().expect("a number"));
    seed.is_none_or(|seed| (number + seed).is_multiple_of(4))
}

#[test]
fn functions() {
    on_each(|npu| {
        let is_processor = npu.provider() == Provider::Cpu;
        let context = npu.context(&options()).unwrap();
        let (mut ran, mut tried) = (BTreeSet::new(), BTreeSet::new());
        let mut wrong = Vec::new();
        for (number, case) in all().into_iter().enumerate() {
            let kind = kind(&case);
            let Ok(graph) = case.function.graph() else { continue };
            if case.buffers.iter().map(Tensor::len).sum::<usize>() > MOST {
                continue;
            }
            // What becomes of NaN and infinities in f16 is the device's matter.
            if !is_processor
                && case
                    .buffers
                    .iter()
                    .any(|tensor| !tensor.element.is_int() && tensor.to_f64s().iter().any(|x| !x.is_finite()))
            {
                continue;
            }
            // A model takes the emulator long, and it has no bf16: one of each function.
            let is_first =
                matches!(case.buffers[0].element, Scalar::F32 | Scalar::F16) && tried.insert(kind.clone());
            if !is_first && (!is_processor || !is_taken(number)) {
                continue;
            }
            match run(&context, &case, &graph) {
                Ok(behind) => {
                    let off = worst(&case, &behind);
                    let tolerance =
                        match case.expected.iter().map(|expected| expected.tolerance).fold(1e-5, f64::max) {
                            _ if !is_processor => 2e-2,
                            own => 2.0 * own,
                        };
                    if off > tolerance && (is_processor || !POSITIONS.contains(&kind.as_str())) {
                        wrong.push(format!("{}: off by {off:.1e} of the greatest", case.name));
                    }
                    ran.insert(kind);
                }
                // It has no such kernel of its own.
                Err(error)
                    if is_processor && error.to_string().contains("Could not find an implementation") => {}
                Err(error) => {
                    let told = error.to_string();
                    let is_known = |(known, words): &(&str, &str)| *known == kind && told.contains(words);
                    if is_processor || !NOT_ON_HEXAGON.iter().any(is_known) {
                        wrong.push(format!("{}: {told}", case.name));
                    }
                }
            }
        }
        println!("{}: {} functions ran: {ran:?}", npu.device(), ran.len());
        assert!(wrong.is_empty(), "{}: {} wrong:\n{}", npu.device(), wrong.len(), wrong.join("\n"));
    });
}
