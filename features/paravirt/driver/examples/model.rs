//! A layer of a network on an NPU that the host shares, from an ordinary Linux program: run it as root in a guest whose file has
//! `[[accelerators]]` with `device = "npu:0"` and `window`.

use std::error::Error;

use vm_graph::{Builder, Element, GraphError, Tensor, TensorType, ValidGraph, evaluate};
use vm_paravirt_guest::linux::{Array, Device, Model};

const ROWS: u64 = 8;
const COLUMNS: u64 = 64;

/// `y = gelu(x · w)`, whose weights are of the model.
fn layer() -> Result<ValidGraph, GraphError> {
    let ty = |extents: [u64; 2]| TensorType { element: Element::F32, extents: extents.to_vec() };
    let weights = numbers(COLUMNS * COLUMNS, 7);
    let mut graph = Builder::new("layer");
    let x = graph.input("x", Element::F32, &[ROWS, COLUMNS])?;
    let w = graph.constant(Tensor::from_f64s(Element::F32, &ty([COLUMNS; 2]).extents, &weights))?;
    let y = graph.mat_mul(x, w)?;
    let y = graph.gelu(y)?;
    graph.output("y", y)?;
    graph.finish()
}

fn main() -> Result<(), Box<dyn Error>> {
    let graph = layer()?;
    let code = vm_graph::encode(&graph)?;
    let of = |ty: &TensorType| Array { elements: ty.elements(), element_bytes: ty.element.bytes() };
    let (input, output) = (graph.inputs[0].ty.clone(), graph.output_type(0).clone());

    let device = Device::find()?;
    let mut model = Model::load(device.connect()?, &device.window()?, &code, &[of(&input)], &[of(&output)])?;
    let x = numbers(input.elements(), 5);
    model.set_input(0, &Tensor::from_f64s(input.element, &input.extents, &x).bytes)?;
    model.run()?;
    let y = Tensor { ty: output, bytes: model.output(0)? }.to_f64s();

    let expected = evaluate(&graph, &[x])?.remove(0);
    let worst = y.iter().zip(&expected).map(|(y, expected)| (y - expected).abs()).fold(0.0, f64::max);
    println!("{} values, the first {:.3}: the greatest difference is {worst:.1e}", y.len(), y[0]);
    // An NPU may compute in f16.
    if worst < 2e-2 { Ok(()) } else { Err("the NPU computed something else".into()) }
}

fn numbers(count: u64, step: u64) -> Vec<f64> {
    (0..count).map(|at| ((at * step) % 17) as f64 / 16.0 - 0.5).collect()
}
