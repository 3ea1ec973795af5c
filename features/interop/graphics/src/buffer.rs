//! Buffers.

use std::fmt;
use std::sync::Arc;

use vm_accel::{Error, ExternalMemory, Result, Shareable};

use crate::gpu::Gpu;
use crate::sys::{Place, RawBuffer};

/// A buffer of a [`Gpu`].
pub struct Buffer {
    name: String,
    pub(crate) raw: Arc<RawBuffer>,
    pub(crate) shared: bool,
}

impl Buffer {
    pub(crate) fn new(gpu: &Gpu, name: &str, bytes: u64, place: Place) -> Result<Self> {
        if bytes == 0 || !bytes.is_multiple_of(4) {
            return Err(Error::OutOfRange { offset: 0, bytes, size: !3 });
        }
        let raw = Arc::new(RawBuffer::new(gpu.device(), bytes, place)?);
        Ok(Self { name: name.to_owned(), raw, shared: matches!(place, Place::Shared(_)) })
    }

    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.raw.bytes
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("name", &self.name).field("bytes", &self.bytes()).finish()
    }
}

impl Shareable for Buffer {
    /// Its bytes.
    type Layout = u64;

    fn name(&self) -> &str {
        &self.name
    }

    fn layout(&self) -> u64 {
        self.bytes()
    }

    fn export(&self) -> Result<ExternalMemory> {
        let Some(memory) = &self.raw.memory else {
            return Err(self.raw.device.unsupported("sharing a buffer without memory"));
        };
        let (fd, kind) = memory.export()?;
        let (allocation, dedicated) = (memory.bytes, memory.dedicated);
        Ok(ExternalMemory { fd, kind, allocation, offset: 0, bytes: self.bytes(), dedicated })
    }
}
