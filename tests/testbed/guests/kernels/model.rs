//! What `accel-model` sends: a product of small integers, of which one side is the model's.

use vm_graph::{Builder, Element, GraphError, Tensor, ValidGraph};

/// `y = x · w`, of f32: x of 4 × 32, w of 32 × 16.
pub fn product() -> Result<ValidGraph, GraphError> {
    let weights: Vec<f64> = (0..32).flat_map(|k| (0..16).map(move |n| f64::from((k + n) % 5 - 2))).collect();
    let mut graph = Builder::new("product");
    let x = graph.input("x", Element::F32, &[4, 32])?;
    let w = graph.constant(Tensor::from_f64s(Element::F32, &[32, 16], &weights))?;
    let y = graph.mat_mul(x, w)?;
    graph.output("y", y)?;
    graph.finish()
}
