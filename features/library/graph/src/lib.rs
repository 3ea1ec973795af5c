//! Models as graphs of array operations: what accelerators take that run whole networks, as NPUs do.
//!
//! A [`Graph`] is a list of operations on arrays of fixed extents, each of which takes values that are defined before it.
//! [`Builder`] makes one, [`validate`] checks one that came from elsewhere, [`encode`] and [`decode`] are its binary form,
//! [`evaluate`] says in f64 what it computes, and [`onnx::model`] is it as an ONNX model. [`Builder::inline`] makes graphs of graphs, and
//! [`quantize_mat_muls`] has products computed in integers of 8 bits.
//!
//! ```
//! use vm_graph::{Builder, Element, Tensor, evaluate};
//!
//! # fn main() -> Result<(), vm_graph::GraphError> {
//! let mut graph = Builder::new("silu");
//! let x = graph.input("x", Element::F32, &[2, 3])?;
//! let sigmoid = graph.sigmoid(x)?;
//! let y = graph.mul(x, sigmoid)?;
//! graph.output("y", y)?;
//! let graph = graph.finish()?;
//!
//! let x = Tensor::from_f64s(Element::F32, &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
//! let y = evaluate(&graph, &[x.to_f64s()])?;
//! assert_eq!(y[0][1], 1.0 / (1.0 + (-1f64).exp()));
//!
//! let model = vm_graph::onnx::model(&graph);
//! assert!(!model.is_empty());
//! # Ok(())
//! # }
//! ```
//!
//! # What may come from a guest
//! Anything: [`decode`] and [`validate`] take any bytes, and what they accept has a meaning for any contents of its inputs. An
//! index beyond its array counts as the nearest one within, as in WebNN; integers are not divided. Every count has a cap ([`limits`]).

mod binary;
mod builder;
mod error;
mod evaluate;
mod graph;
mod infer;
pub mod limits;
pub mod onnx;
mod op;
mod quantize;
mod types;

pub use binary::{MAGIC, decode, encode};
pub use builder::Builder;
pub use error::{GraphError, Place};
pub use evaluate::evaluate;
pub use graph::{Graph, Input, Node, Output, ValidGraph, Value, validate};
pub use op::{Binary, Comparison, Convolution, Logic, Op, Pool, Pooling, Reduction, Unary};
pub use quantize::quantize_mat_muls;
pub use types::{Element, Tensor, TensorType};
