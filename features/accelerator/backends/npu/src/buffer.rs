//! Memory that inferences read and write.

use ort::memory::Allocator;
use ort::value::{DynTensor, Shape, TensorElementType};
use vm_graph::limits::MAX_ELEMENTS;
use vm_graph::{Element, TensorType};

use crate::error::line;
use crate::{NpuError, sys};

/// An array in the host's memory, where a device reads or writes it. It is given to an inference, and comes back with its fence.
#[derive(Debug)]
pub struct Buffer {
    ty: TensorType,
    pub(crate) tensor: DynTensor,
}

impl Buffer {
    /// An array of zeros.
    pub(crate) fn new(ty: &TensorType) -> Result<Buffer, NpuError> {
        let no = |given: String| NpuError::Binding {
            name: "a buffer".to_owned(),
            expected: format!("of 1 to {MAX_ELEMENTS} elements"),
            given,
        };
        if ty.elements() == 0 || ty.elements() > MAX_ELEMENTS {
            return Err(no(ty.to_string()));
        }
        let extents: Vec<i64> = ty.extents.iter().map(|extent| *extent as i64).collect();
        let tensor = DynTensor::new(&Allocator::default(), element_type(ty.element), Shape::new(extents));
        let tensor = tensor.map_err(|error| no(line(&error)))?;
        Ok(Buffer { ty: ty.clone(), tensor })
    }

    /// What it has.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Its elements, little-endian.
    pub fn bytes(&self) -> &[u8] {
        sys::bytes(&self.tensor, self.ty.bytes() as usize)
    }

    /// The same, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        sys::bytes_mut(&mut self.tensor, self.ty.bytes() as usize)
    }
}

/// What ONNX Runtime calls elements.
pub(crate) fn element_type(element: Element) -> TensorElementType {
    match element {
        Element::Bool => TensorElementType::Bool,
        Element::U8 => TensorElementType::Uint8,
        Element::I8 => TensorElementType::Int8,
        Element::U16 => TensorElementType::Uint16,
        Element::I16 => TensorElementType::Int16,
        Element::U32 => TensorElementType::Uint32,
        Element::I32 => TensorElementType::Int32,
        Element::I64 => TensorElementType::Int64,
        Element::F16 => TensorElementType::Float16,
        Element::Bf16 => TensorElementType::Bfloat16,
        Element::F32 => TensorElementType::Float32,
        Element::F64 => TensorElementType::Float64,
        Element::F8E4M3 => TensorElementType::Float8E4M3FN,
        Element::F8E5M2 => TensorElementType::Float8E5M2,
    }
}
