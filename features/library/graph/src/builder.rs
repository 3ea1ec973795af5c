//! What makes graphs.

use crate::graph::{check_name, check_ports, check_together, check_type, node_types};
use crate::limits::MAX_NODES;
use crate::op::{Binary, Comparison, Convolution, Logic, Pool, Reduction, Unary};
use crate::{
    Element, Graph, GraphError, Input, Node, Op, Output, Place, Tensor, TensorType, ValidGraph, Value,
};

type Built<T = Value> = Result<T, GraphError>;

/// Makes a graph, operation by operation. Each is checked when it is added, so that an error comes from the line that made it.
#[derive(Clone, Debug)]
pub struct Builder {
    graph: Graph,
    types: Vec<TensorType>,
}

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident $variant:ident,)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Errors
            /// [`GraphError::Rule`].
            pub fn $name(&mut self, x: Value) -> Built {
                self.add_node(Op::Unary(Unary::$variant), &[x])
            }
        )*
    };
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident $op:ident $variant:ident,)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Errors
            /// [`GraphError::Rule`].
            pub fn $name(&mut self, a: Value, b: Value) -> Built {
                self.add_node(op!($op $variant), &[a, b])
            }
        )*
    };
}

macro_rules! op {
    (Binary $variant:ident) => {
        Op::Binary(Binary::$variant)
    };
    (Logic $variant:ident) => {
        Op::Logic(Logic::$variant)
    };
    (Comparison $variant:ident) => {
        Op::Compare(Comparison::$variant)
    };
}

impl Builder {
    /// An empty graph of this name.
    pub fn new(name: &str) -> Builder {
        let graph =
            Graph { name: name.to_owned(), inputs: Vec::new(), nodes: Vec::new(), outputs: Vec::new() };
        Builder { graph, types: Vec::new() }
    }

    /// An input. All of them come before the first operation.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn input(&mut self, name: &str, element: Element, extents: &[u64]) -> Built {
        let number = self.graph.inputs.len();
        let said = |what: String| GraphError::rule(Place::Input(number), what);
        let ty = TensorType::new(element, extents);
        check_name(name).and_then(|()| check_type(&ty)).map_err(said)?;
        if !self.graph.nodes.is_empty() {
            return Err(said("inputs come before operations".to_owned()));
        }
        self.graph.inputs.push(Input { name: name.to_owned(), ty: ty.clone() });
        Ok(self.define(ty))
    }

    /// An output.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn output(&mut self, name: &str, value: Value) -> Built<()> {
        let number = self.graph.outputs.len();
        let known = check_name(name).and_then(|()| {
            let is_known = (value.0 as usize) < self.types.len();
            is_known.then_some(()).ok_or_else(|| format!("there is no value {}", value.0))
        });
        known.map_err(|what| GraphError::rule(Place::Output(number), what))?;
        self.graph.outputs.push(Output { name: name.to_owned(), value });
        Ok(())
    }

    /// The graph.
    ///
    /// # Errors
    /// [`GraphError::Rule`] of the graph as a whole.
    pub fn finish(self) -> Result<ValidGraph, GraphError> {
        let Graph { inputs, outputs, .. } = &self.graph;
        let whole = |what| GraphError::rule(Place::Graph, what);
        check_name(&self.graph.name)
            .and_then(|()| check_ports(inputs.len(), outputs.len()))
            .map_err(whole)?;
        check_together(&self.graph)?;
        Ok(ValidGraph::checked(self.graph, self.types))
    }

    /// The type of a value.
    ///
    /// # Panics
    /// For a value of another graph.
    pub fn type_of(&self, value: Value) -> &TensorType {
        &self.types[value.0 as usize]
    }

    /// Any operation of one result.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn add_node(&mut self, op: Op, operands: &[Value]) -> Built {
        let results = self.push(op, operands)?;
        Ok(results[0])
    }

    pub(crate) fn push(&mut self, op: Op, operands: &[Value]) -> Built<Vec<Value>> {
        let number = self.graph.nodes.len();
        let place = Place::Node(number, op.name());
        if number == MAX_NODES {
            return Err(GraphError::rule(place, format!("there can be {MAX_NODES} operations")));
        }
        let node = Node { op, operands: operands.to_vec() };
        let results = node_types(&node, &self.types).map_err(|what| GraphError::rule(place, what))?;
        self.graph.nodes.push(node);
        Ok(results.into_iter().map(|ty| self.define(ty)).collect())
    }

    /// The operations of another graph, on values in the place of its inputs, whose types they have; gives its outputs.
    ///
    /// # Errors
    /// [`GraphError::Rule`], before anything was added.
    pub fn inline(&mut self, graph: &ValidGraph, inputs: &[Value]) -> Built<Vec<Value>> {
        let whole = |what: String| Err(GraphError::rule(Place::Graph, what));
        let (name, takes) = (&graph.name, graph.inputs.len());
        if inputs.len() != takes {
            return whole(format!("{name} takes {takes} inputs, and is given {}", inputs.len()));
        }
        for (number, (value, input)) in inputs.iter().zip(&graph.inputs).enumerate() {
            let given = self.types.get(value.0 as usize);
            if given != Some(&input.ty) {
                let given =
                    given.map_or(format!("value {}, which is not defined", value.0), TensorType::to_string);
                let what = format!("{} of {name} is {}, and is given {given}", input.name, input.ty);
                return Err(GraphError::rule(Place::Argument(number), what));
            }
        }
        let operations = self.graph.nodes.len() + graph.nodes.len();
        if operations > MAX_NODES {
            return whole(format!("with {name} it has {operations} operations; there can be {MAX_NODES}"));
        }
        // Its results have the numbers that follow.
        let first = self.types.len();
        let own = |value: &Value| match inputs.get(value.0 as usize) {
            Some(input) => *input,
            None => Value((first + value.0 as usize - takes) as u32),
        };
        self.graph.nodes.extend(
            graph
                .nodes
                .iter()
                .map(|node| Node { op: node.op.clone(), operands: node.operands.iter().map(own).collect() }),
        );
        self.types.extend_from_slice(&graph.types()[takes..]);
        Ok(graph.outputs.iter().map(|output| own(&output.value)).collect())
    }

    fn define(&mut self, ty: TensorType) -> Value {
        self.types.push(ty);
        Value(self.types.len() as u32 - 1)
    }

    /// An array whose contents are known.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn constant(&mut self, tensor: Tensor) -> Built {
        self.add_node(Op::Constant(tensor), &[])
    }

    /// A number of the type of another value.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn number_like(&mut self, like: Value, number: f64) -> Built {
        let element = self.type_of(like).element;
        self.constant(Tensor::number(element, number))
    }

    unary! {
        /// −x, of floats or signed integers.
        neg Neg,
        /// |x|, of floats or signed integers.
        abs Abs,
        /// −1, 0 or 1.
        sign Sign,
        /// The nearest integer, of two the even one.
        round Round,
        /// The greatest integer that is no greater.
        floor Floor,
        /// The least integer that is no less.
        ceil Ceil,
        /// 1 / x.
        reciprocal Reciprocal,
        /// √x.
        sqrt Sqrt,
        /// eˣ.
        exp Exp,
        /// The natural logarithm.
        log Log,
        /// The sine, of radians.
        sin Sin,
        /// The cosine, of radians.
        cos Cos,
        /// The hyperbolic tangent.
        tanh Tanh,
        /// The error function.
        erf Erf,
        /// 1 / (1 + e⁻ˣ).
        sigmoid Sigmoid,
        /// max(x, 0).
        relu Relu,
        /// x · Φ(x) with the error function.
        gelu Gelu,
        /// The same by tanh.
        gelu_tanh GeluTanh,
        /// The other truth value.
        not Not,
    }

    binary! {
        /// a + b.
        add Binary Add,
        /// a − b.
        sub Binary Sub,
        /// a · b.
        mul Binary Mul,
        /// a / b, of floats.
        div Binary Div,
        /// a to the power of b, of floats.
        pow Binary Pow,
        /// The lesser; NaN if one is NaN.
        min Binary Min,
        /// The greater; NaN if one is NaN.
        max Binary Max,
        /// Both truth values.
        and Logic And,
        /// At least one of them.
        or Logic Or,
        /// Just one of them.
        xor Logic Xor,
        /// a = b.
        equal Comparison Equal,
        /// a < b.
        less Comparison Less,
        /// a ≤ b.
        less_or_equal Comparison LessOrEqual,
        /// a > b.
        greater Comparison Greater,
        /// a ≥ b.
        greater_or_equal Comparison GreaterOrEqual,
    }

    /// `a` where the condition is true, `b` elsewhere.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn select(&mut self, condition: Value, a: Value, b: Value) -> Built {
        self.add_node(Op::Select, &[condition, a, b])
    }

    /// As elements of another type; the value itself where it has them already.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn cast(&mut self, x: Value, element: Element) -> Built {
        if self.type_of(x).element == element {
            return Ok(x);
        }
        self.add_node(Op::Cast(element), &[x])
    }

    /// Products of matrices.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn mat_mul(&mut self, a: Value, b: Value) -> Built {
        self.add_node(Op::MatMul, &[a, b])
    }

    /// A convolution in two dimensions, as [`Op::Convolution`].
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn convolution(&mut self, how: Convolution, x: Value, weight: Value, bias: Option<Value>) -> Built {
        let operands: Vec<_> = [x, weight].into_iter().chain(bias).collect();
        self.add_node(Op::Convolution(how), &operands)
    }

    /// The greatest, or the mean, of windows.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn pool(&mut self, pool: Pool, x: Value) -> Built {
        self.add_node(Op::Pool(pool), &[x])
    }

    /// Dimensions in another order: `i` of the result is `order[i]`.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn transpose(&mut self, x: Value, order: &[u32]) -> Built {
        self.add_node(Op::Transpose { order: order.to_vec() }, &[x])
    }

    /// The same elements, of other extents.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn reshape(&mut self, x: Value, extents: &[u64]) -> Built {
        self.add_node(Op::Reshape { extents: extents.to_vec() }, &[x])
    }

    /// Repeated along dimensions of extent 1, or that are not there.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn expand(&mut self, x: Value, extents: &[u64]) -> Built {
        self.add_node(Op::Expand { extents: extents.to_vec() }, &[x])
    }

    /// One behind the other along a dimension.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn concat(&mut self, parts: &[Value], axis: u32) -> Built {
        self.add_node(Op::Concat { axis }, parts)
    }

    /// Of one dimension the elements from `start` to before `end`.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn slice(&mut self, x: Value, axis: u32, start: u64, end: u64) -> Built {
        self.slice_by(x, axis, start, end, 1)
    }

    /// Of one dimension each `step`-th of the elements from `start` to before `end`.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn slice_by(&mut self, x: Value, axis: u32, start: u64, end: u64, step: u64) -> Built {
        let mut ends = self.type_of(x).extents.clone();
        let (mut starts, mut steps) = (vec![0; ends.len()], vec![1; ends.len()]);
        if (axis as usize) < ends.len() {
            let axis = axis as usize;
            (starts[axis], ends[axis], steps[axis]) = (start, end, step);
        } else {
            // Refused as of a wrong number of dimensions.
            starts.push(start);
        }
        self.add_node(Op::Slice { starts, ends, steps }, &[x])
    }

    /// With zeros before and behind each dimension.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn pad(&mut self, x: Value, before: &[u64], after: &[u64]) -> Built {
        self.add_node(Op::Pad { before: before.to_vec(), after: after.to_vec() }, &[x])
    }

    /// The parts of a dimension that indices name.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn gather(&mut self, x: Value, index: Value, axis: u32) -> Built {
        self.add_node(Op::Gather { axis }, &[x, index])
    }

    /// Elements, each from where its index says along a dimension.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn gather_elements(&mut self, x: Value, index: Value, axis: u32) -> Built {
        self.add_node(Op::GatherElements { axis }, &[x, index])
    }

    /// With rows put in, or added, where indices say.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn scatter_rows(&mut self, x: Value, index: Value, rows: Value, add: bool) -> Built {
        self.add_node(Op::ScatterRows { add }, &[x, index, rows])
    }

    /// Over some dimensions, which stay with an extent of 1.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn reduce(&mut self, how: Reduction, x: Value, axes: &[u32]) -> Built {
        self.add_node(Op::Reduce { how, axes: axes.to_vec(), keep: true }, &[x])
    }

    /// Over some dimensions, which are gone then.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn reduce_away(&mut self, how: Reduction, x: Value, axes: &[u32]) -> Built {
        self.add_node(Op::Reduce { how, axes: axes.to_vec(), keep: false }, &[x])
    }

    /// Where the greatest of a dimension is.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn arg_max(&mut self, x: Value, axis: u32) -> Built {
        self.add_node(Op::ArgMax { axis }, &[x])
    }

    /// The greatest of a dimension, and where they are.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn top_k(&mut self, x: Value, axis: u32, k: u64) -> Built<[Value; 2]> {
        let results = self.push(Op::TopK { axis, k }, &[x])?;
        Ok([results[0], results[1]])
    }

    /// Of each element the sum of those up to it along a dimension.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn cum_sum(&mut self, x: Value, axis: u32) -> Built {
        self.add_node(Op::CumSum { axis }, &[x])
    }

    /// `exp(x) / Σ exp(x)` along a dimension.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn softmax(&mut self, x: Value, axis: u32) -> Built {
        self.add_node(Op::Softmax { axis }, &[x])
    }

    /// Its logarithm.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn log_softmax(&mut self, x: Value, axis: u32) -> Built {
        self.add_node(Op::LogSoftmax { axis }, &[x])
    }

    /// Rows with a mean of 0 and a variance of 1, times `weight`, plus `bias`.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn layer_norm(&mut self, x: Value, weight: Value, bias: Value, epsilon: f64) -> Built {
        self.add_node(Op::LayerNorm { epsilon }, &[x, weight, bias])
    }

    /// Integers of floats by a scale and a zero point, whose type they have.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn quantize(&mut self, x: Value, scale: Value, zero: Value, axis: Option<u32>) -> Built {
        self.add_node(Op::Quantize { axis }, &[x, scale, zero])
    }

    /// Floats of such integers.
    ///
    /// # Errors
    /// [`GraphError::Rule`].
    pub fn dequantize(&mut self, x: Value, scale: Value, zero: Value, axis: Option<u32>) -> Built {
        self.add_node(Op::Dequantize { axis }, &[x, scale, zero])
    }
}
