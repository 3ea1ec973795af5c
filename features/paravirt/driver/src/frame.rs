//! Memory for a batch and its reply.

use core::fmt;

use vm_paravirt::{BatchWriter, Reply};

use crate::error::Error;

/// Memory for a batch and for the reply to it. While the device has it, the program has not.
pub struct Frame<M = &'static mut [u8]> {
    request: M,
    reply: M,
    /// Bytes of the reply that the device wrote.
    written: usize,
}

impl<M: AsRef<[u8]> + AsMut<[u8]>> Frame<M> {
    /// A frame in this memory.
    pub fn new(request: M, reply: M) -> Self {
        Self { request, reply, written: 0 }
    }

    /// Begins a batch.
    ///
    /// # Errors
    /// When there is not even room for its header.
    pub fn batch(&mut self) -> Result<BatchWriter<'_>, Error> {
        Ok(BatchWriter::new(self.request.as_mut())?)
    }

    /// Goes on with the batch of `len` bytes that was [sealed](BatchWriter::seal) or finished here.
    ///
    /// # Errors
    /// When there is none of that length.
    pub fn resume(&mut self, len: usize) -> Result<BatchWriter<'_>, Error> {
        Ok(BatchWriter::resume(self.request.as_mut(), len)?)
    }

    /// The memory of the batch, for bytes that are ready.
    pub fn request(&mut self) -> &mut [u8] {
        self.request.as_mut()
    }

    /// The reply that the device wrote.
    ///
    /// # Errors
    /// When it wrote none.
    pub fn reply(&self) -> Result<Reply<'_>, Error> {
        Ok(Reply::decode(self.reply.as_ref().get(..self.written).unwrap_or(&[]))?)
    }

    pub(crate) fn parts(&mut self) -> (*const u8, usize, *const u8, usize) {
        let (request, reply) = (self.request.as_ref(), self.reply.as_mut());
        (request.as_ptr(), request.len(), reply.as_mut_ptr().cast_const(), reply.len())
    }

    /// Memory of the reply, for who receives it.
    #[cfg(feature = "linux")]
    pub(crate) fn reply_memory(&mut self) -> &mut [u8] {
        self.reply.as_mut()
    }

    pub(crate) fn set_written(&mut self, written: usize) {
        self.written = written.min(self.reply.as_ref().len());
    }
}

impl<M: AsRef<[u8]>> fmt::Debug for Frame<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("request", &self.request.as_ref().len())
            .field("reply", &self.reply.as_ref().len())
            .field("written", &self.written)
            .finish()
    }
}
