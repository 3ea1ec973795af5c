//! What an array is: elements that are there, or how they are computed.

use std::sync::{Arc, Mutex, PoisonError};

use crate::device::{self, Device};
use crate::dtype::DType;
use crate::error::Result;
use crate::evaluate;
use crate::layout::{self, Map, Shape};
use crate::op::{Binary, Reduction, Unary};
use crate::sys::Held;

/// How deep expressions may be before they are evaluated.
const MAX_DEPTH: u32 = 40;

/// An array of elements on a device. It is a value: what an operation gives is another array, and none sees what becomes of one later.
///
/// Functions of elements and reductions are computed when a value is needed, together with what they are computed of. Clones are the same array.
#[derive(Clone, Debug)]
pub struct Array(pub(crate) Arc<Node>);

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) device: Device,
    pub(crate) depth: u32,
    state: Mutex<State>,
}

#[derive(Clone, Debug)]
pub(crate) enum State {
    Ready(Storage),
    Lazy(Arc<Expression>),
}

/// Where elements are.
#[derive(Clone, Debug)]
pub(crate) struct Storage {
    pub(crate) buffer: Arc<Held>,
    /// Of the first element, in elements.
    pub(crate) offset: i64,
    /// From one element of a dimension to the next, in elements.
    pub(crate) strides: Vec<i64>,
}

impl Storage {
    /// Dense elements from the beginning of a buffer on.
    pub(crate) fn dense(buffer: Arc<Held>, shape: &[u64]) -> Self {
        Self { buffer, offset: 0, strides: layout::dense(shape) }
    }
}

/// How elements are computed.
#[derive(Clone, Debug)]
pub(crate) enum Expression {
    /// A number everywhere: its bits, of a complex number those of both parts.
    Number([u64; 2]),
    /// An affine function of the place.
    Index(layout::Affine),
    Cast(Array),
    Unary(Unary, Array),
    Binary(Binary, Array, Array),
    Select(Array, Array, Array),
    Complex(Array, Array),
    /// Elements of an array at other places.
    View(Array, Map),
    /// An array of another stream of the device, where it is.
    Elsewhere(Array),
    /// Of a dense array of one dimension those at indices.
    Gather(Array, Array),
    Uniform(Array, Array),
    Bits(Array, Array),
    Reduce {
        op: Reduction,
        source: Array,
        axes: Vec<usize>,
    },
}

impl Expression {
    pub(crate) fn operands(&self) -> impl Iterator<Item = &Array> {
        let all: [Option<&Array>; 3] = match self {
            Self::Number(_) | Self::Index(_) => [None, None, None],
            Self::Cast(a) | Self::Unary(_, a) | Self::View(a, _) | Self::Elsewhere(a) => {
                [Some(a), None, None]
            }
            Self::Reduce { source, .. } => [Some(source), None, None],
            Self::Binary(_, a, b) | Self::Complex(a, b) | Self::Gather(a, b) => [Some(a), Some(b), None],
            Self::Uniform(a, b) | Self::Bits(a, b) => [Some(a), Some(b), None],
            Self::Select(a, b, c) => [Some(a), Some(b), Some(c)],
        };
        all.into_iter().flatten()
    }
}

impl Array {
    pub(crate) fn ready(device: &Device, dtype: DType, shape: Shape, storage: Storage) -> Self {
        let state = Mutex::new(State::Ready(storage));
        Self(Arc::new(Node { dtype, shape, device: device.clone(), depth: 0, state }))
    }

    /// An array that is computed later.
    ///
    /// # Errors
    /// Those of what must be computed now.
    pub(crate) fn lazy(device: &Device, dtype: DType, shape: Shape, expression: Expression) -> Result<Self> {
        let depth = expression.operands().map(|operand| operand.depth()).max().unwrap_or(0) + 1;
        if depth > MAX_DEPTH {
            for operand in expression.operands() {
                operand.evaluate()?;
            }
        }
        let depth = if depth > MAX_DEPTH { 1 } else { depth };
        let state = Mutex::new(State::Lazy(Arc::new(expression)));
        Ok(Self(Arc::new(Node { dtype, shape, device: device.clone(), depth, state })))
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Its extents, slowest dimension first.
    pub fn shape(&self) -> &[u64] {
        &self.0.shape
    }

    /// Its dimensions.
    pub fn ndim(&self) -> usize {
        self.0.shape.len()
    }

    /// Its elements.
    pub fn size(&self) -> u64 {
        layout::elements(&self.0.shape)
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The same array for what is given to another stream of its device, behind what computes it: nothing is copied.
    ///
    /// # Errors
    /// [`Error::Devices`](crate::Error::Devices) for a stream of another device.
    pub fn on(&self, stream: &Device) -> Result<Array> {
        if self.device() == stream {
            return Ok(self.clone());
        }
        if !self.device().is_same(stream) {
            device::same("on", self.device(), stream)?;
        }
        // What uses it tells what computing it fails with.
        let (dtype, shape, device, depth) =
            (self.dtype(), self.shape().to_vec(), stream.clone(), self.depth() + 1);
        let state = Mutex::new(State::Lazy(Arc::new(Expression::Elsewhere(self.clone()))));
        Ok(Self(Arc::new(Node { dtype, shape, device, depth, state })))
    }

    /// How deep what is not computed yet is.
    pub(crate) fn depth(&self) -> u32 {
        match &*self.0.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Ready(_) => 0,
            State::Lazy(_) => self.0.depth,
        }
    }

    pub(crate) fn state(&self) -> State {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, storage: Storage) {
        let before = std::mem::replace(
            &mut *self.0.state.lock().unwrap_or_else(PoisonError::into_inner),
            State::Ready(storage),
        );
        // What it was computed of may be freed now, without the lock.
        drop(before);
    }

    /// Gives it to the device to be computed, if that was not done yet.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), or what a compiler or the device fails with.
    pub fn evaluate(&self) -> Result<()> {
        evaluate::storage(self).map(drop)
    }
}
