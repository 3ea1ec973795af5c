//! What the driver knows of a thread's context and of an address.

use std::ffi::c_void;
use std::ptr;

use vm_accel::Result;

use crate::sys::{CUcontext, CUpointer_attribute as Attribute, Driver};

/// A context that somebody else owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its handle.
    pub context: CUcontext,
    /// A number that no other context of the process has or had, where the driver tells one; else its handle.
    pub id: u64,
    /// The number of its device in CUDA's order.
    pub device: u32,
}

/// Memory that the driver knows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The address of its first byte.
    pub address: u64,
    /// How many it has.
    pub bytes: u64,
}

impl Driver {
    /// The calling thread's current context.
    pub(crate) fn place(&self) -> Result<Option<Place>> {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe { self.cuCtxGetCurrent(&raw mut context) }?;
        if context.is_null() {
            return Ok(None);
        }
        let mut id = context.addr() as u64;
        if let Some(get) = self.cuCtxGetId {
            // SAFETY: the context is the current one; the pointer is to a local.
            self.check("cuCtxGetId", unsafe { get(context, &raw mut id) })?;
        }
        let mut device = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.cuCtxGetDevice(&raw mut device) }?;
        Ok(Some(Place { context, id, device: device.max(0) as u32 }))
    }

    /// What memory an address is in. A context must be current.
    pub(crate) fn allocation(&self, address: u64) -> Result<Option<Allocation>> {
        let (mut kind, mut first, mut bytes) = (0u32, 0u64, 0usize);
        let mut wanted = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut values: [*mut c_void; 3] =
            [(&raw mut kind).cast(), (&raw mut first).cast(), (&raw mut bytes).cast()];
        // SAFETY: as many attributes as places, each to a local of the type that the manual says.
        unsafe { self.cuPointerGetAttributes(3, wanted.as_mut_ptr(), values.as_mut_ptr(), address) }?;
        // Of an address that it does not know it tells zeros.
        let bytes = bytes as u64;
        Ok((kind != 0).then_some(Allocation { address: first, bytes }))
    }
}
