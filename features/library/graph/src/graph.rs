//! Graphs as they are written, and as they are known to be valid.

use std::ops::Deref;

use serde::{Deserialize, Serialize};

use crate::limits::{
    MAX_BYTES, MAX_ELEMENTS, MAX_NAME, MAX_NODES, MAX_OPERANDS, MAX_PORTS, MAX_RANK, capped,
};
use crate::{Element, GraphError, Op, Place, TensorType, infer};

/// A value, by its number: the inputs' come first, then those of each operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Value(pub u32);

/// An input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
}

/// An output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// The value.
    pub value: Value,
}

/// An operation on values that are defined before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What it does.
    pub op: Op,
    /// What it takes.
    #[serde(deserialize_with = "capped::<_, _, MAX_OPERANDS>")]
    pub operands: Vec<Value>,
}

/// A graph as it was written or sent. [`validate`] makes it one that can be compiled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// Its name: letters of ASCII, digits and underscores, as all names here.
    pub name: String,
    /// What it is given.
    #[serde(deserialize_with = "capped::<_, _, MAX_PORTS>")]
    pub inputs: Vec<Input>,
    /// Its operations.
    #[serde(deserialize_with = "capped::<_, _, MAX_NODES>")]
    pub nodes: Vec<Node>,
    /// What it gives.
    #[serde(deserialize_with = "capped::<_, _, MAX_PORTS>")]
    pub outputs: Vec<Output>,
}

/// A graph that keeps every rule, and the types of its values.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidGraph {
    graph: Graph,
    types: Vec<TensorType>,
}

impl Deref for ValidGraph {
    type Target = Graph;

    fn deref(&self) -> &Graph {
        &self.graph
    }
}

impl ValidGraph {
    /// The type of one of its values.
    ///
    /// # Panics
    /// For a value of another graph.
    pub fn type_of(&self, value: Value) -> &TensorType {
        &self.types[value.0 as usize]
    }

    /// The type of an output.
    ///
    /// # Panics
    /// If there is no such one.
    pub fn output_type(&self, number: usize) -> &TensorType {
        self.type_of(self.outputs[number].value)
    }

    /// The graph without what was found out of it.
    pub fn into_inner(self) -> Graph {
        self.graph
    }

    /// The graph without operations that no output depends on. All inputs stay.
    pub fn eliminate_dead_code(self) -> ValidGraph {
        let ValidGraph { mut graph, types } = self;
        let mut live = vec![false; types.len()];
        live[..graph.inputs.len()].fill(true);
        graph.outputs.iter().for_each(|output| live[output.value.0 as usize] = true);
        let mut end = types.len();
        for node in graph.nodes.iter().rev() {
            let results = end - node.op.results()..end;
            end = results.start;
            if live[results.clone()].contains(&true) {
                live[results].fill(true);
                node.operands.iter().for_each(|value| live[value.0 as usize] = true);
            }
        }
        let mut count = 0;
        let numbers: Vec<Value> = live
            .iter()
            .map(|is_live| {
                count += u32::from(*is_live);
                Value(count.saturating_sub(1))
            })
            .collect();
        graph.nodes.retain(|node| {
            end += node.op.results();
            live[end - 1]
        });
        let operands = graph.nodes.iter_mut().flat_map(|node| &mut node.operands);
        let outputs = graph.outputs.iter_mut().map(|output| &mut output.value);
        operands.chain(outputs).for_each(|value| *value = numbers[value.0 as usize]);
        let types = types.into_iter().zip(live).filter_map(|(ty, is_live)| is_live.then_some(ty)).collect();
        ValidGraph { graph, types }
    }

    /// The types of all values, in the order of their numbers.
    pub(crate) fn types(&self) -> &[TensorType] {
        &self.types
    }

    /// For one whose parts were checked one by one.
    pub(crate) fn checked(graph: Graph, types: Vec<TensorType>) -> ValidGraph {
        ValidGraph { graph, types }
    }
}

/// Checks a graph.
///
/// # Errors
/// [`GraphError::Rule`]: the first that is broken.
pub fn validate(graph: Graph) -> Result<ValidGraph, GraphError> {
    let whole = |what: String| GraphError::rule(Place::Graph, what);
    let name = |place: Place, name: &str| check_name(name).map_err(|what| GraphError::rule(place, what));
    name(Place::Graph, &graph.name)?;
    if graph.nodes.len() > MAX_NODES {
        return Err(whole(format!("it has {} operations; there can be {MAX_NODES}", graph.nodes.len())));
    }
    check_ports(graph.inputs.len(), graph.outputs.len()).map_err(whole)?;
    let mut types = Vec::with_capacity(graph.inputs.len() + graph.nodes.len());
    for (number, input) in graph.inputs.iter().enumerate() {
        let place = Place::Input(number);
        name(place.clone(), &input.name)?;
        check_type(&input.ty).map_err(|what| GraphError::rule(place, what))?;
        types.push(input.ty.clone());
    }
    for (number, node) in graph.nodes.iter().enumerate() {
        let results = node_types(node, &types)
            .map_err(|what| GraphError::rule(Place::Node(number, node.op.name()), what))?;
        types.extend(results);
    }
    for (number, output) in graph.outputs.iter().enumerate() {
        name(Place::Output(number), &output.name)?;
        if output.value.0 as usize >= types.len() {
            let what = format!("there is no value {}", output.value.0);
            return Err(GraphError::rule(Place::Output(number), what));
        }
    }
    check_together(&graph)?;
    Ok(ValidGraph { graph, types })
}

/// What no part of a graph shows by itself, once its names are known to be names.
pub(crate) fn check_together(graph: &Graph) -> Result<(), GraphError> {
    let whole = |what: String| Err(GraphError::rule(Place::Graph, what));
    let bytes = |node: &Node| match &node.op {
        Op::Constant(tensor) => tensor.bytes.len() as u64,
        _ => 0,
    };
    let constants = graph.nodes.iter().map(bytes).fold(0, u64::saturating_add);
    if constants > MAX_BYTES as u64 {
        return whole(format!("its constants have {constants} bytes; there can be {MAX_BYTES}"));
    }
    let mut names: Vec<_> = graph.inputs.iter().map(|input| input.name.as_str()).collect();
    names.extend(graph.outputs.iter().map(|output| output.name.as_str()));
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => whole(format!("two of its inputs and outputs are called {}", pair[0])),
        None => Ok(()),
    }
}

pub(crate) fn check_ports(inputs: usize, outputs: usize) -> Result<(), String> {
    if inputs > MAX_PORTS || outputs > MAX_PORTS {
        return Err(format!(
            "it has {inputs} inputs and {outputs} outputs; there can be {MAX_PORTS} of each"
        ));
    }
    if outputs == 0 {
        return Err("it has no outputs".to_owned());
    }
    Ok(())
}

pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let is_name = (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(fits);
    is_name.then_some(()).ok_or_else(|| {
        let shown: String = name.chars().take(MAX_NAME).collect();
        format!("{shown:?} is no name: 1 to {MAX_NAME} letters, digits and _")
    })
}

pub(crate) fn check_type(ty: &TensorType) -> Result<(), String> {
    if ty.rank() > MAX_RANK {
        return Err(format!("it has {} dimensions; there can be {MAX_RANK}", ty.rank()));
    }
    match ty.elements() {
        0 => Err("it has no elements".to_owned()),
        elements if elements > MAX_ELEMENTS => {
            Err(format!("{ty} has too many elements; there can be {MAX_ELEMENTS}"))
        }
        _ => Ok(()),
    }
}

/// The types of what an operation gives.
pub(crate) fn node_types(node: &Node, types: &[TensorType]) -> Result<Vec<TensorType>, String> {
    if node.operands.len() > MAX_OPERANDS {
        return Err(format!("it takes {} values; there can be {MAX_OPERANDS}", node.operands.len()));
    }
    let operand = |value: &Value| {
        types.get(value.0 as usize).ok_or_else(|| format!("value {} is not defined before it", value.0))
    };
    let operands = node.operands.iter().map(operand).collect::<Result<Vec<_>, _>>()?;
    let results = infer::types(&node.op, &operands)?;
    debug_assert_eq!(results.len(), node.op.results());
    results.iter().try_for_each(check_type)?;
    if let Op::Constant(tensor) = &node.op {
        if tensor.bytes.len() as u64 != tensor.ty.bytes() {
            return Err(format!("{} bytes of {} for {}", tensor.bytes.len(), tensor.ty.bytes(), tensor.ty));
        }
        if tensor.ty.element == Element::Bool && tensor.bytes.iter().any(|byte| *byte > 1) {
            return Err("a truth value is a byte of 0 or 1".to_owned());
        }
    }
    Ok(results)
}
