//! Little-endian numbers in byte slices.

use thiserror::Error;

/// Bytes that are no frame of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the frame is malformed at byte {offset}: {what}")]
pub struct Malformed {
    /// Offset in the frame at which it shows.
    pub offset: usize,
    /// What is wrong.
    pub what: &'static str,
}

/// What was to be written does not fit the bytes that are left, or the protocol's caps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("there is no room for {what}: give a larger buffer, or split the batch")]
pub struct NoRoom {
    /// What has no room.
    pub what: &'static str,
}

/// Reads a frame from its start to its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a> {
    bytes: &'a [u8],
    /// Offset of `bytes` in the frame.
    offset: usize,
}

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8], offset: usize) -> Self {
        Self { bytes, offset }
    }

    pub(crate) fn bad<T>(&self, what: &'static str) -> Result<T, Malformed> {
        Err(Malformed { offset: self.offset, what })
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let Some((head, rest)) = self.bytes.split_at_checked(count) else { return self.bad("it ends early") };
        self.bytes = rest;
        self.offset += count;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// A reserved number, which must be zero.
    pub(crate) fn zero16(&mut self) -> Result<(), Malformed> {
        match self.u16()? {
            0 => Ok(()),
            _ => self.bad("a reserved field is not zero"),
        }
    }

    /// A reserved number, which must be zero.
    pub(crate) fn zero32(&mut self) -> Result<(), Malformed> {
        match self.u32()? {
            0 => Ok(()),
            _ => self.bad("a reserved field is not zero"),
        }
    }

    /// That nothing is left.
    pub(crate) fn end(&self) -> Result<(), Malformed> {
        if self.bytes.is_empty() { Ok(()) } else { self.bad("bytes are left over") }
    }
}

/// Writes a frame.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    bytes: &'a mut [u8],
    len: usize,
}

impl<'a> Output<'a> {
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn room(&self) -> usize {
        self.bytes.len() - self.len
    }

    /// Goes on behind what was written before.
    pub(crate) fn resume(&mut self, len: usize) {
        self.len = len.min(self.bytes.len());
    }

    /// Forgets what was written from `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Writes; the caller has seen that there is room.
    pub(crate) fn put(&mut self, data: &[u8]) {
        if let Some(slot) = self.bytes.get_mut(self.len..self.len + data.len()) {
            slot.copy_from_slice(data);
            self.len += data.len();
        }
    }

    pub(crate) fn zeros(&mut self, count: usize) {
        for _ in 0..count {
            self.put(&[0]);
        }
    }

    /// Overwrites what was written.
    pub(crate) fn patch(&mut self, offset: usize, data: &[u8]) {
        if let Some(slot) = self.bytes.get_mut(offset..offset + data.len()) {
            slot.copy_from_slice(data);
        }
    }
}

/// `bytes` rounded up to a multiple of 8.
pub(crate) const fn padded(bytes: usize) -> usize {
    bytes.div_ceil(8) * 8
}
