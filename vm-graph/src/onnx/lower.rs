//! Operations as nodes of ONNX.

use std::borrow::Cow;
use std::collections::HashSet;

use super::proto::Message;
use super::{data_type, inner_name};
use crate::op::{Binary, Comparison, Logic, Pooling, Reduction, Unary};
use crate::{Element, Node, Op, Tensor, ValidGraph, Value};

/// The nodes and the known arrays of a model.
pub(super) struct Lowering<'a> {
    graph: &'a ValidGraph,
    /// What each value is called.
    names: Vec<String>,
    pub(super) nodes: Vec<Message<'static>>,
    pub(super) initializers: Vec<(String, Cow<'a, Tensor>)>,
    /// Which operation gave a value, for those that are constants.
    constants: Vec<Option<&'a Tensor>>,
}

/// What an attribute is.
enum Attribute<'a> {
    Int(i64),
    Ints(&'a [u64]),
    Float(f32),
    Text(&'static str),
}

impl<'a> Lowering<'a> {
    pub(super) fn of(graph: &'a ValidGraph) -> Lowering<'a> {
        let values = graph.types().len();
        let mut names: Vec<String> = (0..values as u32).map(|value| inner_name(Value(value))).collect();
        for (name, input) in names.iter_mut().zip(&graph.inputs) {
            name.clone_from(&input.name);
        }
        let mut constants = vec![None; graph.inputs.len()];
        for node in &graph.nodes {
            match &node.op {
                Op::Constant(tensor) => constants.push(Some(tensor)),
                op => constants.extend((0..op.results()).map(|_| None)),
            }
        }
        // A value is called as the output that it is, unless it has a name already.
        let mut copies = Vec::new();
        let mut named = HashSet::new();
        for output in &graph.outputs {
            let at = output.value.0 as usize;
            if at >= graph.inputs.len() && constants[at].is_none() && named.insert(at) {
                names[at].clone_from(&output.name);
            } else {
                copies.push((output.value, output.name.as_str()));
            }
        }
        let mut lowering = Lowering { graph, names, nodes: Vec::new(), initializers: Vec::new(), constants };
        let mut value = graph.inputs.len() as u32;
        for node in &graph.nodes {
            lowering.node(node, Value(value));
            value += node.op.results() as u32;
        }
        for (value, name) in copies {
            let from = lowering.names[value.0 as usize].clone();
            lowering.write("Identity", &[&from], &[name], &[]);
        }
        lowering
    }

    fn node(&mut self, node: &'a Node, result: Value) {
        let graph = self.graph;
        let mut inputs: Vec<String> =
            node.operands.iter().map(|value| self.names[value.0 as usize].clone()).collect();
        let to = self.names[result.0 as usize].clone();
        let mut outputs = vec![to.clone()];
        let extra = |what: &str| format!("{to}.{what}");
        let first = node.operands.first().map(|value| graph.type_of(*value));
        let axis_of = |axis: &u32| Attribute::Int((*axis).into());
        // Extents and the like are operands.
        let mut given = |what: &str, numbers: &[u64], is_scalar: bool| {
            let name = format!("{to}.{what}");
            let extents = if is_scalar { Vec::new() } else { vec![numbers.len() as u64] };
            let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let ty = crate::TensorType { element: Element::I64, extents };
            self.initializers.push((name.clone(), Cow::Owned(Tensor { ty, bytes })));
            name
        };
        let (kind, attributes): (&str, Vec<(&str, Attribute<'_>)>) = match &node.op {
            Op::Constant(tensor) => {
                self.initializers.push((to, Cow::Borrowed(tensor)));
                return;
            }
            Op::Unary(unary) => match unary_name(*unary) {
                "GeluTanh" => ("Gelu", vec![("approximate", Attribute::Text("tanh"))]),
                name => (name, Vec::new()),
            },
            Op::Binary(binary) => (binary_name(*binary), Vec::new()),
            Op::Logic(Logic::And) => ("And", Vec::new()),
            Op::Logic(Logic::Or) => ("Or", Vec::new()),
            Op::Logic(Logic::Xor) => ("Xor", Vec::new()),
            Op::Compare(Comparison::Equal) => ("Equal", Vec::new()),
            Op::Compare(Comparison::Less) => ("Less", Vec::new()),
            Op::Compare(Comparison::LessOrEqual) => ("LessOrEqual", Vec::new()),
            Op::Compare(Comparison::Greater) => ("Greater", Vec::new()),
            Op::Compare(Comparison::GreaterOrEqual) => ("GreaterOrEqual", Vec::new()),
            Op::Select => ("Where", Vec::new()),
            Op::Cast(element) => ("Cast", vec![("to", Attribute::Int(data_type(*element) as i64))]),
            Op::MatMul => ("MatMul", Vec::new()),
            Op::Convolution(how) => {
                let pads = [how.pads[0][0], how.pads[1][0], how.pads[0][1], how.pads[1][1]];
                let attributes = [
                    ("strides", Attribute::Ints(&how.strides)),
                    ("pads", Attribute::Ints(&pads)),
                    ("dilations", Attribute::Ints(&how.dilations)),
                    ("group", Attribute::Int(how.groups as i64)),
                ];
                return self.write_owned("Conv", &inputs, &outputs, &attributes);
            }
            Op::Pool(pool) => {
                let pads = [pool.pads[0][0], pool.pads[1][0], pool.pads[0][1], pool.pads[1][1]];
                let attributes = [
                    ("kernel_shape", Attribute::Ints(&pool.window)),
                    ("strides", Attribute::Ints(&pool.strides)),
                    ("pads", Attribute::Ints(&pads)),
                ];
                let kind = match pool.how {
                    Pooling::MaxPool => "MaxPool",
                    Pooling::AveragePool => "AveragePool",
                };
                return self.write_owned(kind, &inputs, &outputs, &attributes);
            }
            Op::Transpose { order } => {
                let order: Vec<u64> = order.iter().map(|axis| (*axis).into()).collect();
                return self.write_owned(
                    "Transpose",
                    &inputs,
                    &outputs,
                    &[("perm", Attribute::Ints(&order))],
                );
            }
            Op::Reshape { extents } => {
                inputs.push(given("extents", extents, false));
                ("Reshape", Vec::new())
            }
            Op::Expand { extents } => {
                inputs.push(given("extents", extents, false));
                ("Expand", Vec::new())
            }
            Op::Concat { axis } => ("Concat", vec![("axis", axis_of(axis))]),
            Op::Slice { starts, ends, steps } => {
                let axes: Vec<u64> = (0..starts.len() as u64).collect();
                let all = [("starts", starts), ("ends", ends), ("axes", &axes), ("steps", steps)];
                inputs.extend(all.map(|(what, numbers)| given(what, numbers, false)));
                ("Slice", Vec::new())
            }
            Op::Pad { before, after } => {
                let pads: Vec<u64> = before.iter().chain(after).copied().collect();
                inputs.push(given("pads", &pads, false));
                ("Pad", Vec::new())
            }
            Op::Gather { axis } => {
                inputs[1] = self.clamped(node, 1, *axis, extra("index"));
                ("Gather", vec![("axis", axis_of(axis))])
            }
            Op::GatherElements { axis } => {
                inputs[1] = self.clamped(node, 1, *axis, extra("index"));
                ("GatherElements", vec![("axis", axis_of(axis))])
            }
            Op::ScatterRows { add } => {
                let column = given("column", &[u64::MAX, 1], false);
                let clamped = self.clamped(node, 1, 0, extra("index"));
                let (wide, reshaped) = (extra("wide"), extra("rows"));
                let i64s = [("to", Attribute::Int(data_type(Element::I64) as i64))];
                self.write("Cast", &[&clamped], &[&wide], &i64s);
                self.write("Reshape", &[&wide, &column], &[&reshaped], &[]);
                inputs[1] = reshaped;
                let reduction = if *add { "add" } else { "none" };
                ("ScatterND", vec![("reduction", Attribute::Text(reduction))])
            }
            Op::Reduce { how, axes, keep } => {
                let axes: Vec<u64> = axes.iter().map(|axis| (*axis).into()).collect();
                inputs.push(given("axes", &axes, false));
                let kind = match how {
                    Reduction::Sum => "ReduceSum",
                    Reduction::Mean => "ReduceMean",
                    Reduction::Max => "ReduceMax",
                    Reduction::Min => "ReduceMin",
                };
                (kind, vec![("keepdims", Attribute::Int((*keep).into()))])
            }
            Op::ArgMax { axis } => ("ArgMax", vec![("axis", axis_of(axis)), ("keepdims", Attribute::Int(1))]),
            Op::TopK { axis, k } => {
                inputs.push(given("k", &[*k], false));
                outputs.push(self.names[result.0 as usize + 1].clone());
                (
                    "TopK",
                    vec![
                        ("axis", axis_of(axis)),
                        ("largest", Attribute::Int(1)),
                        ("sorted", Attribute::Int(1)),
                    ],
                )
            }
            Op::CumSum { axis } => {
                inputs.push(given("axis", &[(*axis).into()], true));
                ("CumSum", Vec::new())
            }
            Op::Softmax { axis } => ("Softmax", vec![("axis", axis_of(axis))]),
            // Of one element: some devices take the logarithm of a share that they rounded to 0.
            Op::LogSoftmax { axis } if first.is_some_and(|x| x.extents[*axis as usize] == 1) => {
                inputs.push(inputs[0].clone());
                ("Sub", Vec::new())
            }
            Op::LogSoftmax { axis } => ("LogSoftmax", vec![("axis", axis_of(axis))]),
            Op::LayerNorm { epsilon } => (
                "LayerNormalization",
                vec![("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(*epsilon as f32))],
            ),
            Op::Quantize { axis } => {
                ("QuantizeLinear", axis.iter().map(|axis| ("axis", axis_of(axis))).collect())
            }
            Op::Dequantize { axis } => {
                ("DequantizeLinear", axis.iter().map(|axis| ("axis", axis_of(axis))).collect())
            }
        };
        debug_assert!(first.is_some(), "{kind} takes something");
        self.write_owned(kind, &inputs, &outputs, &attributes);
    }

    /// Indices into a dimension, none beyond it.
    fn clamped(&mut self, node: &Node, operand: usize, axis: u32, name: String) -> String {
        let index = node.operands[operand];
        let greatest = self.graph.type_of(node.operands[0]).extents[axis as usize] - 1;
        let within = |x: &f64| (0.0..=greatest as f64).contains(x);
        let from = self.names[index.0 as usize].clone();
        if let Some(tensor) = self.constants[index.0 as usize]
            && tensor.to_f64s().iter().all(within)
        {
            return from;
        }
        if greatest == 0 {
            // Some devices refuse bounds that are equal.
            self.write("Sub", &[&from, &from], &[&name], &[]);
            return name;
        }
        let element = self.graph.type_of(index).element;
        let bounds = [("least", 0), ("greatest", greatest)].map(|(what, bound)| {
            let name = format!("{name}.{what}");
            self.initializers.push((name.clone(), Cow::Owned(Tensor::number(element, bound as f64))));
            name
        });
        self.write("Clip", &[&from, &bounds[0], &bounds[1]], &[&name], &[]);
        name
    }

    fn write_owned(
        &mut self,
        kind: &str,
        inputs: &[String],
        outputs: &[String],
        attributes: &[(&str, Attribute<'_>)],
    ) {
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
        self.write(kind, &inputs, &outputs, attributes);
    }

    fn write(&mut self, kind: &str, inputs: &[&str], outputs: &[&str], attributes: &[(&str, Attribute<'_>)]) {
        let mut node = Message::new();
        inputs.iter().for_each(|input| node.text(1, input));
        outputs.iter().for_each(|output| node.text(2, output));
        node.text(3, &format!("n.{}", self.nodes.len()));
        node.text(4, kind);
        for (name, attribute) in attributes {
            let mut proto = Message::new();
            proto.text(1, name);
            let kind = match attribute {
                Attribute::Float(number) => {
                    proto.float(2, *number);
                    1
                }
                Attribute::Int(number) => {
                    proto.number(3, number.cast_unsigned());
                    2
                }
                Attribute::Text(text) => {
                    proto.text(4, text);
                    3
                }
                Attribute::Ints(numbers) => {
                    numbers.iter().for_each(|number| proto.number(8, *number));
                    7
                }
            };
            proto.number(20, kind);
            node.message(5, proto);
        }
        self.nodes.push(node);
    }
}

fn unary_name(unary: Unary) -> &'static str {
    match unary {
        Unary::Neg => "Neg",
        Unary::Abs => "Abs",
        Unary::Sign => "Sign",
        Unary::Round => "Round",
        Unary::Floor => "Floor",
        Unary::Ceil => "Ceil",
        Unary::Reciprocal => "Reciprocal",
        Unary::Sqrt => "Sqrt",
        Unary::Exp => "Exp",
        Unary::Log => "Log",
        Unary::Sin => "Sin",
        Unary::Cos => "Cos",
        Unary::Tanh => "Tanh",
        Unary::Erf => "Erf",
        Unary::Sigmoid => "Sigmoid",
        Unary::Relu => "Relu",
        Unary::Gelu => "Gelu",
        Unary::GeluTanh => "GeluTanh",
        Unary::Not => "Not",
    }
}

fn binary_name(binary: Binary) -> &'static str {
    match binary {
        Binary::Add => "Add",
        Binary::Sub => "Sub",
        Binary::Mul => "Mul",
        Binary::Div => "Div",
        Binary::Pow => "Pow",
        Binary::Min => "Min",
        Binary::Max => "Max",
    }
}
