//! Strided rows: parts of wider matrices, and rows that are padded.
//!
//! A [`Strided`] is a function some of whose buffers have rows that begin `stride` elements behind each other instead of one row's. A buffer of two dimensions
//! has a row for each number of the first one; one of three or four has a row for each pair of the first two, as each token of
//! each sequence has one of all its heads. What is between rows is neither read nor written. The gate and the other half of a product, side by side:
//!
//! ```
//! use vm_ir::Scalar;
//! use vm_kernels::elementwise::{Chain, Elementwise};
//! use vm_kernels::strided::Strided;
//!
//! let chain = Chain::swiglu(Scalar::Bf16, Scalar::Bf16);
//! let function = Elementwise { rows: 512, ..Elementwise::of(chain, 2048) };
//! let function = Strided::new(Box::new(function)).rows("x0", 4096).rows("x1", 4096);
//! ```
//!
//! Kernels are the same: views of theirs have strides. Which variant is taken depends on the strides as on the columns: accesses are as wide
//! as all of them and the buffers' alignment are multiples of.

use vm_graph::ValidGraph;
use vm_ir::view::Access;

use crate::call::{Buffer, Call, CallError, Function, Operand};
use crate::family::Resources;
use crate::graph::NoGraph;

/// A function with some buffers of strided rows.
#[derive(Debug)]
pub struct Strided {
    pub(crate) function: Box<dyn Function>,
    /// Buffers by name, and from one of their rows to the next in elements.
    pub(crate) strides: Vec<(String, u64)>,
}

impl Strided {
    /// A function whose buffers are dense as yet.
    pub fn new(function: Box<dyn Function>) -> Strided {
        Strided { function, strides: Vec::new() }
    }

    /// The same with rows of a buffer of that name that begin `stride` elements behind each other. Whether they can is said by the call.
    #[must_use]
    pub fn rows(mut self, buffer: &str, stride: u64) -> Strided {
        self.strides.push((buffer.to_owned(), stride));
        self
    }

    /// The buffers, if their rows can lie so.
    fn placed(&self) -> Result<Vec<Buffer>, CallError> {
        let mut buffers = self.function.buffers();
        for (name, stride) in &self.strides {
            let wrong = |what| Err(CallError::Stride { buffer: name.clone(), what });
            let Some(at) = buffers.iter().position(|buffer| buffer.name == name) else {
                let names: Vec<_> = buffers.iter().map(|buffer| buffer.name).collect();
                return wrong(format!("there is no such buffer; there are {}", names.join(", ")));
            };
            let buffer = &mut buffers[at];
            if buffer.counted == 0 {
                return wrong("it has one dimension, and no rows".to_owned());
            }
            let row = buffer.row();
            if *stride < row {
                return wrong(format!(
                    "rows of {row} elements that begin {stride} behind each other overlap; the least is {row}"
                ));
            }
            buffer.stride = *stride;
            let bytes = buffer.len().and_then(|elements| elements.checked_mul(buffer.element.bytes().into()));
            if bytes.is_none_or(|bytes| bytes > i64::MAX as u64) {
                return wrong(format!(
                    "{} rows that begin {stride} elements behind each other are more bytes than can be addressed",
                    buffer.rows()
                ));
            }
        }
        Ok(buffers)
    }
}

impl Function for Strided {
    fn buffers(&self) -> Vec<Buffer> {
        let mut buffers = self.function.buffers();
        for buffer in &mut buffers {
            let of = self.strides.iter().rfind(|(name, _)| buffer.name == name);
            buffer.stride = of.map_or(buffer.stride, |(_, stride)| *stride);
            // What is between rows stays.
            if buffer.is_strided() && buffer.access == Access::Write {
                buffer.access = Access::ReadWrite;
            }
        }
        buffers
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        self.function.graph()
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let buffers = self.placed()?;
        if !buffers.iter().any(Buffer::is_strided) {
            return self.function.call(resources);
        }
        let mut call = self.function.call_strided(&buffers, resources)?;
        for operand in call.launches.iter_mut().flat_map(|launch| &mut launch.operands) {
            let Operand::Buffer(index, region) = operand else { continue };
            let buffer = &buffers[*index];
            if buffer.is_strided() && !buffer.is_empty() {
                *region = region.spread(buffer).ok_or_else(|| CallError::in_one_piece(buffer.name))?;
            }
        }
        Ok(call)
    }
}

/// A number of which the strides of all strided rows are multiples, as far as powers of two go; 0 where there are none.
pub(crate) fn step(buffers: &[Buffer]) -> u64 {
    strided(buffers).fold(0, |step, buffer| step | buffer.stride)
}

/// The bytes at whose multiples all rows begin, if the buffers do at multiples of `align`.
pub(crate) fn aligned(align: u32, buffers: &[Buffer]) -> u32 {
    let bytes = strided(buffers).map(|buffer| buffer.stride.saturating_mul(buffer.element.bytes().into()));
    bytes.fold(align, |align, bytes| match bytes {
        0 => align,
        bytes => align.min(1 << bytes.trailing_zeros().min(30)),
    })
}

/// # Errors
/// A buffer with strided rows and don't all begin at multiples of 16 bytes.
pub(crate) fn check_aligned(buffers: &[Buffer]) -> Result<(), CallError> {
    let wrong = strided(buffers).find(|buffer| aligned(16, std::slice::from_ref(buffer)) < 16);
    wrong.map_or(Ok(()), |buffer| {
        let what = format!(
            "rows begin {} elements of {} behind each other; this function takes multiples of 16 bytes",
            buffer.stride, buffer.element
        );
        Err(CallError::Stride { buffer: buffer.name.to_owned(), what })
    })
}

fn strided(buffers: &[Buffer]) -> impl Iterator<Item = &Buffer> {
    buffers.iter().filter(|buffer| buffer.is_strided())
}
