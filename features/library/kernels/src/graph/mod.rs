//! Functions as graphs of array operations: what they compute, for NPUs, which take whole networks and no kernels.
//!
//! [`Function::graph`](crate::call::Function::graph) gives one. Its inputs are the buffers that are read, its outputs those that are written, both by the names
//! that [`names`] gives; a buffer whose contents of before count and that is written is an input of its name, and an output called `NAME_out`.
//! Numbers of a call are constants. Buffers without elements are left out. Floats are computed in f32, as kernels do, and have the
//! elements of their buffers at the ends; strided rows are no matter of a graph, which has dense arrays.
//!
//! ```
//! use vm_ir::Scalar;
//! use vm_kernels::call::Function;
//! use vm_kernels::softmax::Softmax;
//!
//! # fn main() -> Result<(), vm_kernels::graph::NoGraph> {
//! let graph = Softmax::of(4, 1000, Scalar::F16).graph()?;
//! assert_eq!(graph.outputs[0].name, "y");
//! let model = vm_graph::onnx::model(&graph);
//! # assert!(!model.is_empty());
//! # Ok(())
//! # }
//! ```

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod cache;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod gemm;
pub(crate) mod loss;
pub(crate) mod norm;
pub(crate) mod quantise;
pub(crate) mod rope;
pub(crate) mod sample;
pub(crate) mod softmax;
pub(crate) mod tables;
pub(crate) mod training;

use std::ops::{Deref, DerefMut};

use thiserror::Error;
use vm_graph::{Builder, Element, GraphError, Reduction, Tensor, TensorType, ValidGraph, Value};
use vm_ir::Scalar;
use vm_ir::view::Access;

use crate::call::{Buffer, CallError};

/// Why a function has no graph.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoGraph {
    /// There are no operations or no arrays for what it computes.
    #[error("{function} has no graph: {why}")]
    Unstated {
        /// The function's name.
        function: &'static str,
        /// What can't be stated.
        why: String,
    },
    /// There is no such function.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A graph would be beyond what graphs may be: of too many elements, or of too many inputs.
    #[error("a graph of it is refused: {0}")]
    Graph(#[from] GraphError),
}

/// A graph, or why there is none.
pub(crate) type Drawn = Result<ValidGraph, NoGraph>;
/// A value of a graph.
type Built = Result<Value, GraphError>;

/// What a graph calls these buffers: by their names, with `_0`, `_1` and so on behind where several have the same.
pub fn names(buffers: &[Buffer]) -> Vec<String> {
    let named = |at: usize| {
        let name = buffers[at].name;
        let same = |buffers: &[Buffer]| buffers.iter().filter(|buffer| buffer.name == name).count();
        match same(buffers) {
            1 => name.to_owned(),
            _ => format!("{name}_{}", same(&buffers[..at])),
        }
    };
    (0..buffers.len()).map(named).collect()
}

/// A graph that is being made, and the buffers of its function, by their names.
pub(crate) struct Draft {
    builder: Builder,
    function: &'static str,
    ports: Vec<Port>,
}

struct Port {
    name: String,
    buffer: Buffer,
    /// The input, of a buffer with elements that is read.
    value: Option<Value>,
}

impl Deref for Draft {
    type Target = Builder;

    fn deref(&self) -> &Builder {
        &self.builder
    }
}

impl DerefMut for Draft {
    fn deref_mut(&mut self) -> &mut Builder {
        &mut self.builder
    }
}

impl Draft {
    /// Of a function with these buffers, some of which are written and have elements.
    pub(crate) fn of(function: &'static str, buffers: Vec<Buffer>) -> Result<Draft, NoGraph> {
        if buffers.iter().all(|buffer| buffer.is_empty() || buffer.access == Access::Read) {
            return Err(NoGraph::Unstated { function, why: "nothing that it writes has elements".into() });
        }
        let mut builder = Builder::new(function);
        let mut ports = Vec::new();
        for (name, buffer) in names(&buffers).into_iter().zip(buffers) {
            let value = match buffer.access {
                Access::Read | Access::ReadWrite if !buffer.is_empty() => {
                    Some(builder.input(&name, element(buffer.element), &buffer.extents)?)
                }
                _ => None,
            };
            ports.push(Port { name, buffer, value });
        }
        Ok(Draft { builder, function, ports })
    }

    /// An error of this function.
    pub(crate) fn no(&self, why: impl Into<String>) -> NoGraph {
        NoGraph::Unstated { function: self.function, why: why.into() }
    }

    fn port(&self, name: &str) -> Result<&Port, NoGraph> {
        let port = self.ports.iter().find(|port| port.name == name);
        port.ok_or_else(|| self.no(format!("it has no buffer {name}")))
    }

    /// Has a buffer no elements?
    pub(crate) fn is_empty(&self, name: &str) -> bool {
        self.port(name).is_ok_and(|port| port.buffer.is_empty())
    }

    /// What a buffer holds.
    pub(crate) fn given(&self, name: &str) -> Result<Value, NoGraph> {
        let port = self.port(name)?;
        port.value.ok_or_else(|| self.no(format!("{name} has no elements, and arrays of a graph have some")))
    }

    /// What a buffer of floats holds, in f32.
    pub(crate) fn float(&mut self, name: &str) -> Result<Value, NoGraph> {
        let element = self.port(name)?.buffer.element;
        if element.is_int() || element == Scalar::Bool {
            return Err(self.no(format!("{name} is of {element}, and its arithmetic is of floats")));
        }
        let value = self.given(name)?;
        Ok(self.cast(value, Element::F32)?)
    }

    /// The same where there is such a buffer.
    pub(crate) fn float_if(&mut self, there: bool, name: &str) -> Result<Option<Value>, NoGraph> {
        there.then(|| self.float(name)).transpose()
    }

    /// What a buffer holds behind the call, in any elements, with the buffer's extents or as many elements.
    pub(crate) fn put(&mut self, name: &str, value: Value) -> Result<(), NoGraph> {
        let Port { buffer, value: before, .. } = self.port(name)?;
        let output = if before.is_some() { format!("{name}_out") } else { name.to_owned() };
        let (element, extents) = (element(buffer.element), buffer.extents.clone());
        let value = self.cast(value, element)?;
        let value = self.shaped(value, &extents)?;
        Ok(self.output(&output, value)?)
    }

    pub(crate) fn finish(self) -> Drawn {
        Ok(self.builder.finish()?)
    }

    /// A number of f32.
    pub(crate) fn number(&mut self, number: f64) -> Built {
        self.constant(Tensor::number(Element::F32, number))
    }

    /// Integers from `first` on, with these extents.
    pub(crate) fn count_from(&mut self, first: i64, element: Element, extents: &[u64]) -> Built {
        let ty = TensorType::new(element, extents);
        let size = element.bytes() as usize;
        let bytes = (first..).take(ty.elements() as usize);
        let bytes = bytes.flat_map(|number| number.to_le_bytes().into_iter().take(size)).collect();
        self.constant(Tensor { ty, bytes })
    }

    /// An integer of the type of another value.
    pub(crate) fn integer_like(&mut self, like: Value, number: i64) -> Built {
        let element = self.type_of(like).element;
        self.count_from(number, element, &[])
    }

    /// A number everywhere.
    pub(crate) fn filled(&mut self, element: Element, number: f64, extents: &[u64]) -> Built {
        // Narrow floats are repeated by few runtimes.
        let wide = if element.range().is_none() && element.bytes() < 4 { Element::F32 } else { element };
        let number = self.constant(Tensor::number(wide, number))?;
        let all = self.expand(number, extents)?;
        self.cast(all, element)
    }

    /// x times a number.
    pub(crate) fn times(&mut self, x: Value, factor: f64) -> Built {
        if factor == 1.0 {
            return Ok(x);
        }
        let factor = self.number_like(x, factor)?;
        self.mul(x, factor)
    }

    /// x and a number.
    pub(crate) fn plus(&mut self, x: Value, number: f64) -> Built {
        let number = self.number_like(x, number)?;
        self.add(x, number)
    }

    /// x where a condition is true, a number elsewhere.
    pub(crate) fn or(&mut self, condition: Value, x: Value, other: f64) -> Built {
        let other = self.number_like(x, other)?;
        self.select(condition, x, other)
    }

    /// Of these extents, of which there are as many elements; itself if it has them.
    pub(crate) fn shaped(&mut self, x: Value, extents: &[u64]) -> Built {
        if self.type_of(x).extents == extents { Ok(x) } else { self.reshape(x, extents) }
    }

    /// With its last two dimensions in the other order.
    pub(crate) fn turned(&mut self, x: Value) -> Built {
        let mut order: Vec<u32> = (0..self.type_of(x).rank() as u32).collect();
        let rank = order.len();
        if rank >= 2 {
            order.swap(rank - 1, rank - 2);
        }
        self.transpose(x, &order)
    }

    pub(crate) fn sum(&mut self, x: Value, axes: &[u32]) -> Built {
        self.reduce(Reduction::Sum, x, axes)
    }

    pub(crate) fn mean(&mut self, x: Value, axes: &[u32]) -> Built {
        self.reduce(Reduction::Mean, x, axes)
    }

    /// Which elements are NaN.
    pub(crate) fn nan(&mut self, x: Value) -> Built {
        let is_number = self.equal(x, x)?;
        self.not(is_number)
    }

    /// Is one of these zeros and ones a one?
    pub(crate) fn any(&mut self, ones: Value, axes: &[u32]) -> Built {
        let any = self.reduce(Reduction::Max, ones, axes)?;
        let half = self.number(0.5)?;
        self.greater(any, half)
    }

    /// Which integers are from 0 to below a bound.
    pub(crate) fn below(&mut self, index: Value, bound: u64) -> Built {
        let zero = self.integer_like(index, 0)?;
        let from_zero = self.greater_or_equal(index, zero)?;
        // A bound that the integers do not have is above all of them.
        let Some((_, most)) = self.type_of(index).element.range() else { return Ok(from_zero) };
        if bound > most.cast_unsigned() {
            return Ok(from_zero);
        }
        let bound = self.integer_like(index, bound.cast_signed())?;
        let is_below = self.less(index, bound)?;
        self.and(from_zero, is_below)
    }

    /// 1 where an index, along the last dimension of extent 1, is a column's number, 0 elsewhere; in truth values.
    pub(crate) fn hits(&mut self, index: Value, columns: u64) -> Built {
        let element = self.type_of(index).element;
        let all = self.count_from(0, element, &[columns])?;
        self.equal(index, all)
    }
}

/// What a graph calls elements: integers have a sign, and what is multiplied as tf32 lies in memory as f32.
pub fn element(scalar: Scalar) -> Element {
    match scalar {
        Scalar::Bool => Element::Bool,
        Scalar::I8 => Element::I8,
        Scalar::I16 => Element::I16,
        Scalar::I32 => Element::I32,
        Scalar::I64 => Element::I64,
        Scalar::F16 => Element::F16,
        Scalar::Bf16 => Element::Bf16,
        Scalar::F32 | Scalar::Tf32 => Element::F32,
        Scalar::F64 => Element::F64,
        Scalar::F8E4M3 => Element::F8E4M3,
        Scalar::F8E5M2 => Element::F8E5M2,
    }
}
