//! The operations.

use serde::{Deserialize, Serialize};

use crate::limits::{MAX_RANK, capped};
use crate::{Element, Tensor};

/// An operation. Where it takes two arrays element by element, their extents are made equal as in NumPy: from the last dimension on,
/// an extent of 1, or one that is not there, stands for any.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Op {
    /// `() → x`: an array whose contents are known.
    Constant(Tensor),
    /// `x → y`: a function of each element.
    Unary(Unary),
    /// `a, b → c`: of numbers.
    Binary(Binary),
    /// `a, b → c`: of truth values.
    Logic(Logic),
    /// `a, b → bool`.
    Compare(Comparison),
    /// `condition, a, b → c`: `a` where the condition is true, `b` elsewhere.
    Select,
    /// `x → y`: as elements of another type. Floats to integers are cut off towards 0; what the integer does not have is
    /// the nearest that it has, and NaN is 0.
    Cast(Element),
    /// `a[…, m, k], b[…, k, n] → c[…, m, n]`: products of matrices of floats, or of i32, which wrap around.
    MatMul,
    /// `x[n, c, h, w], weight[o, c / groups, kh, kw], bias[o]? → y[n, o, oh, ow]`: a convolution in two dimensions.
    Convolution(Convolution),
    /// `x[n, c, h, w] → y[n, c, oh, ow]`.
    Pool(Pool),
    /// `x → y`: dimensions in another order; dimension `i` of the result is the operand's `order[i]`.
    Transpose {
        /// Each dimension of the operand, once.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        order: Vec<u32>,
    },
    /// `x → y`: the same elements in the same order, of other extents.
    Reshape {
        /// The extents, with a product of the same.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        extents: Vec<u64>,
    },
    /// `x → y`: repeated along dimensions of extent 1, or that are not there.
    Expand {
        /// The extents of the result.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        extents: Vec<u64>,
    },
    /// `x… → y`: one behind the other along a dimension.
    Concat {
        /// The dimension.
        axis: u32,
    },
    /// `x → y`: of each dimension the elements from `starts` to before `ends`, each `steps`-th.
    Slice {
        /// The first of each dimension.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        starts: Vec<u64>,
        /// Behind the last of each dimension.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        ends: Vec<u64>,
        /// From one to the next, 1 at least.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        steps: Vec<u64>,
    },
    /// `x → y`: with zeros before and behind.
    Pad {
        /// Before each dimension.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        before: Vec<u64>,
        /// Behind each dimension.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        after: Vec<u64>,
    },
    /// `x, index → y`: of a dimension the parts that the indices name, whose dimensions stand in its place.
    Gather {
        /// The dimension.
        axis: u32,
    },
    /// `x, index → y`: as many as there are indices; along one dimension each from where its index says.
    GatherElements {
        /// The dimension.
        axis: u32,
    },
    /// `x, index[n], rows[n, …] → y`: `x` with rows put, or added, where the indices say. Of several that are put into
    /// one place any may be the one that stays.
    ScatterRows {
        /// Added to what is there.
        add: bool,
    },
    /// `x → y`: over some dimensions.
    Reduce {
        /// How.
        how: Reduction,
        /// The dimensions, in increasing order.
        #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
        axes: Vec<u32>,
        /// Do they stay, with an extent of 1?
        keep: bool,
    },
    /// `x → i64`: where the greatest of a dimension is, the first of equal ones. The dimension stays, with an extent of 1.
    ArgMax {
        /// The dimension.
        axis: u32,
    },
    /// `x → values, i64`: the greatest of a dimension and where they are, in decreasing order, of equal ones the first first.
    TopK {
        /// The dimension.
        axis: u32,
        /// How many.
        k: u64,
    },
    /// `x → y`: of each element the sum of those up to it along a dimension.
    CumSum {
        /// The dimension.
        axis: u32,
    },
    /// `x → y`: `exp(x) / Σ exp(x)` along a dimension.
    Softmax {
        /// The dimension.
        axis: u32,
    },
    /// `x → y`: the logarithm of that.
    LogSoftmax {
        /// The dimension.
        axis: u32,
    },
    /// `x, weight[n], bias[n] → y`: `(x − mean) / √(variance + ε) · weight + bias` along the last dimension.
    LayerNorm {
        /// ε, as an f32 has it.
        epsilon: f64,
    },
    /// `x, scale, zero point → y`: `round(x / scale) + zero point`, to nearest even, at the ends of the type where it is beyond;
    /// the zero point has the type of the result. Both are one number, or have one for each position along a dimension.
    Quantize {
        /// The dimension, where there are several scales.
        axis: Option<u32>,
    },
    /// `x, scale, zero point → y`: `(x − zero point) · scale`.
    Dequantize {
        /// The dimension, where there are several scales.
        axis: Option<u32>,
    },
}

impl Op {
    /// Its name, as messages have it.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Unary(unary) => unary.into(),
            Op::Binary(binary) => binary.into(),
            Op::Logic(logic) => logic.into(),
            Op::Compare(comparison) => comparison.into(),
            Op::Pool(pool) => (&pool.how).into(),
            Op::Reduce { how, .. } => how.into(),
            other => other.into(),
        }
    }

    /// How many values it has.
    pub fn results(&self) -> usize {
        if matches!(self, Op::TopK { .. }) { 2 } else { 1 }
    }
}

macro_rules! names {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[derive(strum::IntoStaticStr, strum::VariantArray)]
        #[serde(rename_all = "snake_case")]
        #[strum(serialize_all = "snake_case")]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$of])* $variant,)*
        }

        impl $name {
            /// Every one.
            pub const ALL: &[$name] = <$name as strum::VariantArray>::VARIANTS;
        }
    };
}

names! {
    /// A function of an element. All are of floats; `Neg`, `Abs` and `Sign` also of signed integers, `Not` of truth values.
    Unary {
        /// −x.
        Neg,
        /// |x|.
        Abs,
        /// −1, 0 or 1.
        Sign,
        /// To the nearest integer, of two the even one.
        Round,
        /// To the greatest integer that is no greater.
        Floor,
        /// To the least integer that is no less.
        Ceil,
        /// 1 / x.
        Reciprocal,
        /// √x.
        Sqrt,
        /// eˣ.
        Exp,
        /// The natural logarithm.
        Log,
        /// The sine, of radians.
        Sin,
        /// The cosine, of radians.
        Cos,
        /// The hyperbolic tangent.
        Tanh,
        /// The error function.
        Erf,
        /// 1 / (1 + e⁻ˣ).
        Sigmoid,
        /// max(x, 0).
        Relu,
        /// x · Φ(x) with the error function.
        Gelu,
        /// The same by tanh: x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³))).
        GeluTanh,
        /// The other truth value.
        Not,
    }
}

names! {
    /// Arithmetic. Integers wrap around; `Div` and `Pow` are of floats alone.
    Binary {
        /// a + b.
        Add,
        /// a − b.
        Sub,
        /// a · b.
        Mul,
        /// a / b.
        Div,
        /// a to the power of b.
        Pow,
        /// The lesser; NaN if one is NaN.
        Min,
        /// The greater; NaN if one is NaN.
        Max,
    }
}

names! {
    /// Of truth values.
    Logic {
        /// Both.
        And,
        /// At least one.
        Or,
        /// Just one.
        Xor,
    }
}

names! {
    /// A comparison of numbers. Every one with NaN is false.
    Comparison {
        /// a = b.
        Equal,
        /// a < b.
        Less,
        /// a ≤ b.
        LessOrEqual,
        /// a > b.
        Greater,
        /// a ≥ b.
        GreaterOrEqual,
    }
}

names! {
    /// What becomes of the elements of some dimensions. NaN among them makes it NaN; ONNX does not say that of `Max` and `Min`, and runtimes may leave it out there.
    Reduction {
        /// Their sum.
        Sum,
        /// Their mean.
        Mean,
        /// The greatest.
        Max,
        /// The least.
        Min,
    }
}

names! {
    /// What becomes of the elements of a window.
    Pooling {
        /// The greatest.
        MaxPool,
        /// The mean of those that are not padding.
        AveragePool,
    }
}

/// How a convolution goes over its operand, along its height and its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Convolution {
    /// Elements from one window to the next.
    pub strides: [u64; 2],
    /// Zeros before, and behind, less than a window.
    pub pads: [[u64; 2]; 2],
    /// From one element of a window to the next.
    pub dilations: [u64; 2],
    /// Groups of channels that are convolved apart.
    pub groups: u64,
}

impl Default for Convolution {
    /// Every window, without padding.
    fn default() -> Self {
        Self { strides: [1; 2], pads: [[0; 2]; 2], dilations: [1; 2], groups: 1 }
    }
}

/// How windows go over an operand, along its height and its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// What becomes of a window.
    pub how: Pooling,
    /// Extents of a window.
    pub window: [u64; 2],
    /// Elements from one window to the next.
    pub strides: [u64; 2],
    /// Padding before, and behind, less than a window.
    pub pads: [[u64; 2]; 2],
}
