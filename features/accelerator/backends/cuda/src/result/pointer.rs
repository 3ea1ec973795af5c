//! What the driver knows of a thread's context and of an address.

use std::ffi::c_void;
use std::ptr;

use vm_accel::Result;

use crate::sys::{CUcontext, CUpointer_attribute as Attribute, Driver};

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;

/// A context that somebody else owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its handle.
    pub context: CUcontext,
    /// A number that no other context of the process has or had, where the driver tells one; else its handle.
    pub id: u64,
}

/// Memory that the driver knows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The address of its first byte.
    pub address: u64,
    /// How many it has; 0 where the driver does not tell.
    pub bytes: u64,
    /// Is it of another context of the current one's device? Kernels of the current one do not reach it.
    pub foreign: bool,
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
        Ok(Some(Place { context, id }))
    }

    /// The number of the current context's device.
    pub(crate) fn current_device(&self) -> Result<u32> {
        let mut device = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.cuCtxGetDevice(&raw mut device) }?;
        Ok(device.max(0) as u32)
    }

    /// What memory an address is in. `current` is the current context.
    pub(crate) fn allocation(&self, address: u64, current: CUcontext) -> Result<Option<Allocation>> {
        let (mut kind, mut first, mut bytes) = (0u32, 0u64, 0usize);
        let mut of: CUcontext = ptr::null_mut();
        let wanted = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
        ];
        let values = [
            (&raw mut kind).cast(),
            (&raw mut first).cast(),
            (&raw mut bytes).cast(),
            (&raw mut of).cast::<c_void>(),
        ];
        // SAFETY: the places are locals of the types that the manual says.
        unsafe { self.attributes(address, wanted, values) }?;
        // Of an address that it does not know it tells zeros.
        if kind == 0 {
            return Ok(None);
        }
        // Pinned memory is every context's. Of memory pools and mappings it may tell no context.
        let other = kind == DEVICE && !of.is_null() && of != current;
        Ok(Some(Allocation { address: first, bytes: bytes as u64, foreign: other && self.foreign(address)? }))
    }

    /// Whether device memory of another context is one that the current one does not reach.
    #[cold]
    fn foreign(&self, address: u64) -> Result<bool> {
        let (mut managed, mut device) = (0u32, -1i32);
        let wanted =
            [Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
        let values = [(&raw mut managed).cast(), (&raw mut device).cast::<c_void>()];
        // SAFETY: as above.
        unsafe { self.attributes(address, wanted, values) }?;
        // Managed memory is every context's; that of another device is reached if its owner enabled that.
        Ok(managed == 0 && u32::try_from(device) == Ok(self.current_device()?))
    }

    /// Asks about an address.
    ///
    /// # Safety
    /// Each value is a place of the type that the manual says of its attribute.
    unsafe fn attributes<const N: usize>(
        &self,
        address: u64,
        mut wanted: [Attribute; N],
        mut values: [*mut c_void; N],
    ) -> Result<()> {
        // SAFETY: as many attributes as places; the caller promises the rest.
        unsafe { self.cuPointerGetAttributes(N as u32, wanted.as_mut_ptr(), values.as_mut_ptr(), address) }
    }
}
