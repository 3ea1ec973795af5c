//! Descriptors for the Tensor Memory Accelerator.

use std::collections::HashMap;
use std::ptr;

use rustc_hash::FxBuildHasher;
use vm_accel::{Element, MAX_RANK, Result, Swizzle, Tensor, Tile};

use crate::sys::{
    CUtensorMap, CUtensorMapDataType as DataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle, Driver,
};

/// How many are kept.
const MAPS: usize = 1024;

/// Tensor maps that are kept for the launches of the same views that follow.
#[derive(Default)]
pub(crate) struct Maps(HashMap<Tensor, [u64; 16], FxBuildHasher>);

impl Maps {
    /// The tensor map of a view. A context must be current.
    pub(crate) fn of(&mut self, driver: &Driver, tensor: &Tensor) -> Result<[u64; 16]> {
        if let Some(map) = self.0.get(tensor) {
            return Ok(*map);
        }
        let map = driver.tensor_map(tensor)?;
        if self.0.len() >= MAPS {
            self.0.clear();
        }
        self.0.insert(*tensor, map);
        Ok(map)
    }
}

impl Driver {
    /// The tensor map of a view. A context must be current.
    fn tensor_map(&self, tensor: &Tensor) -> Result<[u64; 16]> {
        let (rank, Tile { shape: [rows, columns], swizzle, element, .. }) =
            (tensor.extents().len(), *tensor.tile());
        // The driver counts dimensions from the fastest.
        let (mut extents, mut strides) = ([1; MAX_RANK], [0; MAX_RANK]);
        extents.iter_mut().zip(tensor.extents().iter().rev()).for_each(|(to, from)| *to = *from);
        strides.iter_mut().zip(tensor.strides().iter().rev()).for_each(|(to, from)| *to = *from);
        let (shape, steps) = ([columns, rows, 1, 1], [1; MAX_RANK]);
        let element = match element {
            Element::U8 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            Element::U16 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            Element::U32 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            Element::U64 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
            Element::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Element::Bf16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            Element::F32 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            Element::Tf32 => DataType::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
            Element::F64 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
        };
        let swizzle = match swizzle {
            Swizzle::None => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: the pointers are to locals, and to as many numbers as the rank, which is at most 4. The address is not
        // used: what the map describes was promised by the view that it is made of.
        unsafe {
            self.cuTensorMapEncodeTiled(
                &raw mut map,
                element,
                rank as u32,
                ptr::without_provenance_mut(tensor.address() as usize),
                extents.as_ptr(),
                strides.as_ptr(),
                shape.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }?;
        Ok(map.opaque)
    }
}
