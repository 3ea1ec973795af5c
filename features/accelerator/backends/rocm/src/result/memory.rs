//! Memory: the device's, pinned, managed and registered host memory.

use std::ffi::c_void;
use std::ptr;

use vm_accel::{MemoryKind, Result};

use super::{Device, ended};

/// `hipHostMallocPortable | hipHostMallocMapped`, which `hipHostRegister` has as the same bits.
const PORTABLE_AND_MAPPED: u32 = 3;
/// `hipHostMallocCoherent`: what either writes while a kernel runs the other sees.
const COHERENT: u32 = 0x4000_0000;
/// `hipMemAttachGlobal`.
const GLOBAL: u32 = 1;

/// One allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) kind: MemoryKind,
    pub(crate) address: u64,
    /// The host's address; 0 where the host can't reach it.
    pub(crate) host: u64,
    pub(crate) bytes: u64,
}

impl Device {
    /// Allocates. Registered memory is none.
    pub(crate) fn allocate(self, kind: MemoryKind, bytes: u64) -> Result<Live> {
        let (_entered, mut at) = (self.enter()?, ptr::null_mut());
        let size = bytes as usize;
        match kind {
            // SAFETY: the pointer is to a local.
            MemoryKind::Device => unsafe { self.hip.hipMalloc(&raw mut at, size) }?,
            MemoryKind::Unified => {
                // SAFETY: the pointer is to a local.
                unsafe { self.hip.hipMallocManaged(&raw mut at, size, GLOBAL) }?;
            }
            MemoryKind::Pinned | MemoryKind::Registered | MemoryKind::External | MemoryKind::Surface => {
                // SAFETY: the pointer is to a local.
                unsafe { self.hip.hipHostMalloc(&raw mut at, size, PORTABLE_AND_MAPPED | COHERENT) }?;
                let address = self.device_address(at).inspect_err(|_| {
                    // SAFETY: it was allocated just now.
                    ended(unsafe { self.hip.hipHostFree(at) });
                })?;
                return Ok(Live { kind: MemoryKind::Pinned, address, host: at as u64, bytes });
            }
        }
        let address = at as u64;
        Ok(Live { kind, address, host: if kind == MemoryKind::Unified { address } else { 0 }, bytes })
    }

    /// Registers host memory.
    ///
    /// # Safety
    /// The memory stays mapped until it is given back by [`free`](Self::free).
    pub(crate) unsafe fn register(self, host: *mut u8, bytes: u64) -> Result<Live> {
        let (_entered, host) = (self.enter()?, host.cast::<c_void>());
        // SAFETY: as the caller promises; a range that is not mapped is refused.
        unsafe { self.hip.hipHostRegister(host, bytes as usize, PORTABLE_AND_MAPPED) }?;
        let address = self.device_address(host).inspect_err(|_| {
            // SAFETY: it was registered just now.
            ended(unsafe { self.hip.hipHostUnregister(host) });
        })?;
        Ok(Live { kind: MemoryKind::Registered, address, host: host as u64, bytes })
    }

    /// Frees memory, or gives it back to the host.
    ///
    /// # Safety
    /// It was allocated or registered here, and not freed. No command uses it any more.
    pub(crate) unsafe fn free(self, live: Live) -> Result<()> {
        // It is known by its address, too, where the device is lost.
        let _entered = self.enter();
        let (address, host) = (live.address as *mut c_void, live.host as *mut c_void);
        match live.kind {
            // SAFETY: `hipMalloc` or `hipMallocManaged` gave it; the caller promises the rest.
            MemoryKind::Device | MemoryKind::Unified => unsafe { self.hip.hipFree(address) },
            // SAFETY: `hipHostMalloc` gave it; the caller promises the rest.
            MemoryKind::Pinned => unsafe { self.hip.hipHostFree(host) },
            // SAFETY: it was registered here; the caller promises the rest.
            MemoryKind::Registered | MemoryKind::External | MemoryKind::Surface => unsafe {
                self.hip.hipHostUnregister(host)
            },
        }
    }

    fn device_address(self, host: *mut c_void) -> Result<u64> {
        let mut address = ptr::null_mut();
        // SAFETY: the memory is pinned or registered; the pointer is to a local.
        unsafe { self.hip.hipHostGetDevicePointer(&raw mut address, host, 0) }?;
        Ok(address as u64)
    }
}
