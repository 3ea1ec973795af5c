//! A model as one graph of array operations, which NPUs run: the steps that run as kernels elsewhere, each by the graph of its function.

use std::ops::Range;

use thiserror::Error;
use vm_graph::{Builder, GraphError, Tensor, TensorType, ValidGraph, Value};
use vm_ir::Scalar;
use vm_kernels::graph::{NoGraph, element, names};

use crate::config::Config;
use crate::generate::Generation;
use crate::parameters::{Parameter, Parameters};
use crate::program::{Memory, Part, Step, Steps};

/// Why steps have no graph.
#[derive(Debug, Error)]
pub enum ExportError {
    /// A function has none.
    #[error(transparent)]
    Function(#[from] NoGraph),
    /// The whole would be no graph.
    #[error("a graph of these steps is refused: {0}")]
    Graph(#[from] GraphError),
    /// A step's buffers are not what its function wants, or not as they are written.
    #[error("{function}: {what}")]
    Step {
        /// The function.
        function: String,
        /// What does not fit.
        what: String,
    },
}

/// What the parameters of a graph are.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// Inputs, by the parameters' names with `_` for each full stop.
    Inputs,
    /// Constants, of these masters by the parameters' places: NPUs compile them in.
    Constants(&'a [f32]),
}

/// An input or an output of a graph of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Where it begins in the memory of the steps.
    pub part: Part,
    /// Its extents.
    pub extents: Vec<u64>,
}

impl Port {
    /// Of this name, part and extents.
    pub fn new(name: impl Into<String>, part: Part, extents: &[u64]) -> Port {
        Port { name: name.into(), part, extents: extents.to_vec() }
    }
}

/// The token behind each of prompts of so many tokens, as a graph.
///
/// Inputs are `tokens`, i32 `[batch, prompt]`, and `last`, i32 `[batch]`: for each sequence the row of its last token among those of all. What is
/// behind that token has no effect, so one graph serves prompts that are shorter. Outputs are `logits`, `[batch, vocabulary]`, and `token`, i32 `[batch]`.
///
/// # Errors
/// [`ExportError`], as of prompts that are longer than the model's sequences, or of too few masters.
pub fn next_token(config: &Config, prompt: u64, weights: Weights<'_>) -> Result<ValidGraph, ExportError> {
    let Config { batch, vocabulary, element, tokens, .. } = *config;
    if prompt == 0 || prompt > tokens {
        return Err(wrong("prompts", format!("they have {prompt} tokens; 1 to {tokens} are possible")));
    }
    let parameters = Parameters::of(config);
    let mut memory = Memory::default();
    let arrays = [
        memory.array("weights", element, &[parameters.len()]),
        memory.array("masters", Scalar::F32, &[parameters.len()]),
    ];
    let generation = Generation::of(config, &parameters, arrays, prompt, &mut memory);
    let of = generation.arrays;
    let mut inputs =
        vec![Port::new("tokens", of.prompts, &[batch, prompt]), Port::new("last", of.last, &[batch])];
    let mut constants = Vec::new();
    for parameter in &parameters.all {
        let port = port(parameter, arrays);
        match weights {
            Weights::Inputs => inputs.push(port),
            Weights::Constants(masters) => {
                let end = parameter.offset.saturating_add(parameter.len());
                let values = masters.get(parameter.offset as usize..end as usize).ok_or_else(|| {
                    let what = format!("it ends at {end}, and there are {} masters", masters.len());
                    wrong(&parameter.name, what)
                })?;
                let values: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
                constants.push((port, values));
            }
        }
    }
    let outputs =
        [Port::new("logits", of.logits, &[batch, vocabulary]), Port::new("token", of.token, &[batch])];
    graph("gpt", &memory, &generation.prompt, &inputs, &constants, &outputs)
}

fn port(parameter: &Parameter, [weights, masters]: [Part; 2]) -> Port {
    let array = if parameter.is_norm() { masters } else { weights };
    Port::new(parameter.name.replace('.', "_"), array.at(parameter.offset), &parameter.extents)
}

/// Steps as a graph, with constants by their values. What they read and nobody has written is zero, as it is in memory.
///
/// # Errors
/// [`ExportError`]: steps are arrays as they are written; one that is read in parts of several that were written has no graph.
pub fn graph(
    name: &str,
    memory: &Memory,
    steps: &Steps,
    inputs: &[Port],
    constants: &[(Port, Vec<f64>)],
    outputs: &[Port],
) -> Result<ValidGraph, ExportError> {
    let pieces = memory.arrays.iter().map(|_| Vec::new()).collect();
    let mut export = Export { memory, builder: Builder::new(name), pieces };
    for port in inputs {
        let element = element(export.scalar(port.part)?);
        let value = export.builder.input(&port.name, element, &port.extents)?;
        export.write(port.part, &port.extents, value).map_err(|what| wrong(&port.name, what))?;
    }
    for (port, values) in constants {
        let element = element(export.scalar(port.part)?);
        let count = TensorType::new(element, &port.extents).elements();
        if values.len() as u64 != count {
            return Err(wrong(&port.name, format!("it has {count} elements, and is given {}", values.len())));
        }
        let value = export.builder.constant(Tensor::from_f64s(element, &port.extents, values))?;
        export.write(port.part, &port.extents, value).map_err(|what| wrong(&port.name, what))?;
    }
    for step in &steps.0 {
        export.step(step)?;
    }
    for port in outputs {
        let value = export.read(&port.name, port.part, &port.extents)?;
        export.builder.output(&port.name, value)?;
    }
    Ok(export.builder.finish()?.eliminate_dead_code())
}

fn wrong(function: &str, what: String) -> ExportError {
    ExportError::Step { function: function.to_owned(), what }
}

/// A graph of steps that is being made.
struct Export<'a> {
    memory: &'a Memory,
    builder: Builder,
    /// What each array holds; no two parts of one overlap.
    pieces: Vec<Vec<Piece>>,
}

/// Elements of an array, and the value that they are.
struct Piece {
    range: Range<u64>,
    value: Value,
}

fn range(part: Part, extents: &[u64]) -> Range<u64> {
    let len = extents.iter().fold(1u64, |product, extent| product.saturating_mul(*extent));
    part.first..part.first.saturating_add(len)
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn within(a: &Range<u64>, b: &Range<u64>) -> bool {
    b.start <= a.start && a.end <= b.end
}

impl Export<'_> {
    fn step(&mut self, step: &Step) -> Result<(), ExportError> {
        let function = format!("{:?}", step.function);
        self.memory.check(step).map_err(|what| wrong(&function, what))?;
        let graph = step.function.graph()?;
        let buffers = step.function.buffers();
        let names = names(&buffers);
        let place = |name: &str| names.iter().position(|known| known == name);
        let mut inputs = Vec::new();
        for input in &graph.inputs {
            let at = place(&input.name).ok_or_else(|| wrong(&function, format!("no {}", input.name)))?;
            inputs.push(self.read(&function, step.parts[at], &input.ty.extents)?);
        }
        let values = self.builder.inline(&graph, &inputs)?;
        for (output, value) in graph.outputs.iter().zip(values) {
            let before = || output.name.strip_suffix("_out");
            let at = place(&output.name).or_else(|| place(before()?));
            let at = at.ok_or_else(|| wrong(&function, format!("no {}", output.name)))?;
            self.write(step.parts[at], &buffers[at].extents, value).map_err(|what| wrong(&function, what))?;
        }
        Ok(())
    }

    fn scalar(&self, part: Part) -> Result<Scalar, ExportError> {
        let array = self.memory.arrays.get(part.array);
        let array = array.ok_or_else(|| wrong("a port", format!("there is no array {}", part.array)))?;
        Ok(array.element)
    }

    /// What a part holds.
    fn read(&mut self, function: &str, part: Part, extents: &[u64]) -> Result<Value, ExportError> {
        let (wanted, element) = (range(part, extents), element(self.scalar(part)?));
        let pieces = &self.pieces[part.array];
        let Some(Piece { range, value }) = pieces.iter().find(|piece| within(&wanted, &piece.range)) else {
            if pieces.iter().any(|piece| overlap(&wanted, &piece.range)) {
                let name = &self.memory.arrays[part.array].name;
                let what = format!(
                    "it reads {wanted:?} of {name}, which were not written as a whole; write them so"
                );
                return Err(wrong(function, what));
            }
            let zero = self.builder.constant(Tensor::number(element, 0.0))?;
            return Ok(self.builder.expand(zero, extents)?);
        };
        let (mut value, length, first) = (*value, range.end - range.start, wanted.start - range.start);
        if *range != wanted {
            value = self.builder.reshape(value, &[length])?;
            value = self.builder.slice(value, 0, first, first + wanted.end - wanted.start)?;
        }
        if self.builder.type_of(value).extents != extents {
            value = self.builder.reshape(value, extents)?;
        }
        Ok(value)
    }

    /// Notes what a part holds from here on.
    fn write(&mut self, part: Part, extents: &[u64], value: Value) -> Result<(), String> {
        let range = range(part, extents);
        let array = self.memory.arrays.get(part.array).ok_or("there is no such array")?;
        if range.end > array.len {
            return Err(format!("{range:?} ends behind {}, which has {} elements", array.name, array.len));
        }
        let pieces = &mut self.pieces[part.array];
        if let Some(piece) =
            pieces.iter().find(|piece| overlap(&piece.range, &range) && !within(&piece.range, &range))
        {
            return Err(format!("it writes a part of {:?} of {}; write all of it", piece.range, array.name));
        }
        pieces.retain(|piece| !within(&piece.range, &range));
        pieces.push(Piece { range, value });
        Ok(())
    }
}
