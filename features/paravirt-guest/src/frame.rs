//! Memory for a batch and its reply.

use core::fmt;

use vm_paravirt::{BatchWriter, Reply};

use crate::error::Error;

/// Memory for a batch and for the reply to it. While the device has it, the program has not.
pub struct Frame {
    request: &'static mut [u8],
    reply: &'static mut [u8],
    /// Bytes of the reply that the device wrote.
    written: usize,
}

impl Frame {
    /// A frame in this memory.
    pub fn new(request: &'static mut [u8], reply: &'static mut [u8]) -> Self {
        Self { request, reply, written: 0 }
    }

    /// Begins a batch.
    ///
    /// # Errors
    /// When there is not even room for its header.
    pub fn batch(&mut self) -> Result<BatchWriter<'_>, Error> {
        Ok(BatchWriter::new(self.request)?)
    }

    /// The memory of the batch, for bytes that are ready.
    pub fn request(&mut self) -> &mut [u8] {
        self.request
    }

    /// The reply that the device wrote.
    ///
    /// # Errors
    /// When it wrote none.
    pub fn reply(&self) -> Result<Reply<'_>, Error> {
        Ok(Reply::decode(self.reply.get(..self.written).unwrap_or(&[]))?)
    }

    pub(crate) fn parts(&mut self) -> (*const u8, usize, *const u8, usize) {
        (self.request.as_ptr(), self.request.len(), self.reply.as_mut_ptr().cast_const(), self.reply.len())
    }

    pub(crate) fn set_written(&mut self, written: usize) {
        self.written = written.min(self.reply.len());
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("request", &self.request.len())
            .field("reply", &self.reply.len())
            .field("written", &self.written)
            .finish()
    }
}
