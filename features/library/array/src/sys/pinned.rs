//! Pinned memory as bytes.

use std::slice;
use std::sync::Arc;

use vm_runtime::Buffer;

use crate::Accelerator;
use crate::device::Device;

/// A block of the host's memory that a device knows. [`Array::from_bytes`](crate::Array::from_bytes) of its bytes, and
/// [`Array::read`](crate::Array::read) into them, are one copy by the device; other memory goes through the worker's own, part by part.
#[derive(Debug)]
pub struct Pinned {
    /// Others have it while the device copies, which is waited for.
    buffer: Arc<Buffer<Accelerator>>,
    address: *mut u8,
    bytes: usize,
    _lease: Arc<()>,
    /// Behind what is of it: it ends with all its memory.
    _device: Device,
}

// SAFETY: the address is the buffer's, which goes with it.
unsafe impl Send for Pinned {}
// SAFETY: what is shared is only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The memory of a buffer that nobody else has, all 0; none where the host can't reach it.
    pub(crate) fn new(device: &Device, buffer: Buffer<Accelerator>) -> Option<Self> {
        let address = buffer.host_address()? as *mut u8;
        let bytes = usize::try_from(buffer.bytes()).ok()?;
        // SAFETY: the buffer is that long there, and nobody else has it.
        unsafe { address.write_bytes(0, bytes) };
        let (buffer, _lease, _device) = (Arc::new(buffer), device.lease(), device.clone());
        Some(Self { buffer, address, bytes, _lease, _device })
    }

    pub(crate) fn buffer(&self) -> &Arc<Buffer<Accelerator>> {
        &self.buffer
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the buffer is that long there, was written when this was made, and lives as long as this, also behind `Device::stop`.
        unsafe { slice::from_raw_parts(self.address, self.bytes) }
    }

    /// The same, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and they are nobody else's: this is no clone of another.
        unsafe { slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}
