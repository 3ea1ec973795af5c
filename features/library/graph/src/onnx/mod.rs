//! Graphs as ONNX models, of opset 21 (ONNX 1.16), which the execution providers of NPUs take.
//!
//! Every graph can be one. What a provider makes of it, and with which precision, is the provider's matter: types that it does not
//! have it refuses.

mod lower;
mod proto;

use lower::Lowering;
use proto::Message;

use crate::{Element, Tensor, TensorType, ValidGraph, Value};

/// The version of ONNX's operators that models name.
pub const OPSET: u64 = 21;
/// The version of ONNX's format.
const IR_VERSION: u64 = 10;

/// The bytes of a model (`ModelProto` of `onnx.proto`), whose inputs and outputs are called as the graph's.
pub fn model(graph: &ValidGraph) -> Vec<u8> {
    let Lowering { nodes, initializers, .. } = Lowering::of(graph);
    let mut body = Message::new();
    nodes.into_iter().for_each(|node| body.message(1, node));
    body.text(2, &graph.name);
    for (name, tensor) in &initializers {
        body.message(5, tensor_proto(name, tensor));
    }
    for input in &graph.inputs {
        body.message(11, value_info(&input.name, &input.ty));
    }
    for (number, output) in graph.outputs.iter().enumerate() {
        body.message(12, value_info(&output.name, graph.output_type(number)));
    }
    let mut opset = Message::new();
    opset.text(1, "");
    opset.number(2, OPSET);
    let mut model = Message::new();
    model.number(1, IR_VERSION);
    model.text(2, "vm-graph");
    model.message(7, body);
    model.message(8, opset);
    model.into_bytes()
}

/// `TensorProto.DataType`.
fn data_type(element: Element) -> u64 {
    match element {
        Element::F32 => 1,
        Element::U8 => 2,
        Element::I8 => 3,
        Element::U16 => 4,
        Element::I16 => 5,
        Element::I32 => 6,
        Element::I64 => 7,
        Element::Bool => 9,
        Element::F16 => 10,
        Element::F64 => 11,
        Element::U32 => 12,
        Element::Bf16 => 16,
        Element::F8E4M3 => 17,
        Element::F8E5M2 => 19,
    }
}

fn tensor_proto<'a>(name: &str, tensor: &'a Tensor) -> Message<'a> {
    let mut proto = Message::new();
    tensor.ty.extents.iter().for_each(|extent| proto.number(1, *extent));
    proto.number(2, data_type(tensor.ty.element));
    proto.text(8, name);
    proto.bytes(9, &tensor.bytes);
    proto
}

fn value_info(name: &str, ty: &TensorType) -> Message<'static> {
    let mut shape = Message::new();
    for extent in &ty.extents {
        let mut dimension = Message::new();
        dimension.number(1, *extent);
        shape.message(1, dimension);
    }
    let mut tensor = Message::new();
    tensor.number(1, data_type(ty.element));
    tensor.message(2, shape);
    let mut of = Message::new();
    of.message(1, tensor);
    let mut info = Message::new();
    info.text(1, name);
    info.message(2, of);
    info
}

/// What a value is called that is neither an input nor an output.
fn inner_name(value: Value) -> String {
    // No name of a graph has a full stop.
    format!("v.{}", value.0)
}
