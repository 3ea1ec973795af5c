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
            Op::Cast(element) => {
                let from = first.map_or(*element, |x| x.element);
                return self.cast(&inputs[0], from, *element, &to);
            }
            Op::MatMul => ("MatMul", Vec::new()),
            Op::Convolution(how) => {
                let pads = [how.pads[0][0], how.pads[1][0], how.pads[0][1], how.pads[1][1]];
                let [extents, window] = [0, 1].map(|of| &graph.type_of(node.operands[of]).extents[2..]);
                let dilations = [0, 1].map(|axis| if window[axis] == 1 { 1 } else { how.dilations[axis] });
                let reach = [0, 1].map(|axis| (window[axis] - 1) * dilations[axis] + 1);
                let strides = strides(how.strides, extents, reach, how.pads);
                let attributes = [
                    ("strides", Attribute::Ints(&strides)),
                    ("pads", Attribute::Ints(&pads)),
                    ("dilations", Attribute::Ints(&dilations)),
                    ("group", Attribute::Int(how.groups as i64)),
                ];
                return self.write_owned("Conv", &inputs, &outputs, &attributes);
            }
            Op::Pool(pool) => {
                let extents = &graph.type_of(node.operands[0]).extents[2..];
                let strides = strides(pool.strides, extents, pool.window, pool.pads);
                let pads = [pool.pads[0][0], pool.pads[1][0], pool.pads[0][1], pool.pads[1][1]];
                let attributes = [
                    ("kernel_shape", Attribute::Ints(&pool.window)),
                    ("strides", Attribute::Ints(&strides)),
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
            // ONNX Runtime takes no part of a single number, and puts nothing around it.
            Op::Slice { starts: all, .. } | Op::Pad { before: all, .. } if all.is_empty() => {
                ("Identity", Vec::new())
            }
            Op::Slice { starts, ends, steps } => {
                let axes: Vec<u64> = (0..starts.len() as u64).collect();
                // A step beyond the end leads nowhere, and ONNX has steps of i64.
                let beyond = |(axis, step): (usize, &u64)| (*step).min(ends[axis] - starts[axis]);
                let steps = steps.iter().enumerate().map(beyond).collect();
                let all = [("starts", starts), ("ends", ends), ("axes", &axes), ("steps", &steps)];
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
                self.write_cast(&clamped, Element::I64, &wide);
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

    /// A known array of one number.
    fn number(&mut self, name: String, element: Element, number: f64) -> String {
        self.initializers.push((name.clone(), Cow::Owned(Tensor::number(element, number))));
        name
    }

    /// Elements as those of another type. Where what becomes of one is the runtime's matter in ONNX, operations say it.
    fn cast(&mut self, from: &str, element: Element, to: Element, name: &str) {
        let extra = |what: &str| format!("{name}.{what}");
        if element == Element::U8 && to.is_float() {
            // Some devices take the bytes for truth values.
            self.write_cast(from, Element::I32, &extra("wide"));
            return self.write_cast(&extra("wide"), to, name);
        }
        let wide = match (element, to) {
            // Comparisons and bounds are not of all types.
            (Element::Bool, _) => None,
            (Element::I64 | Element::F64, _) => Some(element),
            _ if element.range().is_none() && (to.is_int() || to == Element::Bool) => Some(Element::F32),
            (_, Element::Bool) => Some(Element::I32),
            _ => None,
        };
        let Some(wide) = wide.filter(|_| to == Element::Bool || to.is_int() && element.range().is_none())
        else {
            return self.write_cast(from, to, name);
        };
        let mut x = from.to_owned();
        if wide != element {
            self.write_cast(from, wide, &extra("wide"));
            x = extra("wide");
        }
        let zero = self.number(extra("zero"), wide, 0.0);
        if to == Element::Bool {
            // Some devices keep the byte.
            self.write("Equal", &[&x, &zero], &[&extra("is_zero")], &[]);
            return self.write("Not", &[&extra("is_zero")], &[name], &[]);
        }
        let (least, greatest) = to.range().unwrap_or_default();
        // The greatest float that is within.
        let mut bits = wide.from_f64(greatest as f64);
        if wide.to_f64(bits) as i128 > i128::from(greatest) {
            bits -= 1;
        }
        let most = wide.to_f64(bits);
        let bounds =
            [self.number(extra("least"), wide, least as f64), self.number(extra("most"), wide, most)];
        // NaN stays, and is the one that differs from itself; on some devices an infinity does, too.
        self.write("Clip", &[&x, &bounds[0], &bounds[1]], &[&extra("clipped")], &[]);
        self.write("Equal", &[&extra("clipped"), &extra("clipped")], &[&extra("is_number")], &[]);
        self.write("Where", &[&extra("is_number"), &extra("clipped"), &zero], &[&extra("within")], &[]);
        if most as i128 == i128::from(greatest) {
            return self.write_cast(&extra("within"), to, name);
        }
        self.write_cast(&extra("within"), to, &extra("cast"));
        let end = extra("greatest");
        let bytes = greatest.to_le_bytes()[..to.bytes() as usize].to_vec();
        let ty = crate::TensorType::new(to, &[]);
        self.initializers.push((end.clone(), Cow::Owned(Tensor { ty, bytes })));
        self.write("Greater", &[&x, &bounds[1]], &[&extra("is_beyond")], &[]);
        self.write("Where", &[&extra("is_beyond"), &end, &extra("cast")], &[name], &[]);
    }

    fn write_cast(&mut self, from: &str, to: Element, name: &str) {
        self.write("Cast", &[from], &[name], &[("to", Attribute::Int(data_type(to) as i64))]);
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
        let bounds = [("least", 0), ("greatest", greatest)]
            .map(|(what, bound)| self.number(format!("{name}.{what}"), element, bound as f64));
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

/// From one window to the next, and no further than behind the last, where some devices go wrong.
fn strides(strides: [u64; 2], extents: &[u64], reach: [u64; 2], pads: [[u64; 2]; 2]) -> [u64; 2] {
    [0, 1].map(|axis| {
        let padded = extents[axis] + pads[axis][0] + pads[axis][1];
        strides[axis].min(padded - reach[axis] + 1)
    })
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
