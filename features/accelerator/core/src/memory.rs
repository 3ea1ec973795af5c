//! Memory that a device can reach, and parts of it.
//!
//! A [`Memory`] can't be copied, and freeing takes it by value; a [`Region`] borrows it. So what safe code holds is
//! there. The promises that safe code can't make are the two `unsafe` functions here.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use crate::error::{Error, Result};

/// Where memory lies, and who can reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum MemoryKind {
    /// On the device: only the device.
    Device,
    /// On the host, locked in place: both, and copies to and from it do not wait.
    Pinned,
    /// Wherever it is used: both.
    Unified,
    /// The host's own, registered with the driver: both.
    Registered,
    /// Another API's, as Vulkan's, imported: the device, in turns with that API.
    External,
    /// A level of such an image, which has no bytes but only pixels: its address is the handle that kernels take.
    Surface,
}

impl MemoryKind {
    /// The kind in a word.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether the host can read and write it.
    pub fn host_visible(self) -> bool {
        !matches!(self, Self::Device | Self::External | Self::Surface)
    }

    /// Whether it is somebody else's, lent to the device.
    pub(crate) fn is_lent(self) -> bool {
        matches!(self, Self::Registered | Self::External | Self::Surface)
    }
}

/// One allocation of a queue.
#[derive(Debug)]
#[must_use = "memory that is dropped is freed only when its queue is closed"]
pub struct Memory {
    all: Region<'static>,
}

impl Memory {
    /// The memory of `bytes` bytes that the device sees at `address` and the host, if its kind is visible to it, at
    /// `host`.
    ///
    /// # Safety
    /// For an implementation of [`Queue`](crate::Queue). The memory stays there, and is nobody else's, until the queue
    /// gets this value back or is closed.
    pub unsafe fn from_raw(kind: MemoryKind, address: u64, host: u64, bytes: u64) -> Self {
        Self { all: Region { address, host, bytes, kind, memory: PhantomData } }
    }

    /// The device's address of the first byte.
    pub fn address(&self) -> u64 {
        self.all.address
    }

    /// The host's address of the first byte; 0 where the host can't reach it.
    pub fn host_address(&self) -> u64 {
        self.all.host
    }

    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.all.bytes
    }

    /// The kind.
    pub fn kind(&self) -> MemoryKind {
        self.all.kind
    }

    /// All of it.
    pub fn region(&self) -> Region<'_> {
        self.all
    }

    /// All of it, for a command that runs later.
    ///
    /// The pool frees or reuses memory only by commands that come after every command that was given a region of it.
    pub(crate) fn detached(&self) -> Region<'static> {
        self.all
    }
}

/// A part of a [`Memory`].
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    address: u64,
    host: u64,
    bytes: u64,
    kind: MemoryKind,
    memory: PhantomData<&'a Memory>,
}

impl<'a> Region<'a> {
    /// The part of `bytes` bytes from `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if it does not lie within.
    pub fn slice(self, offset: u64, bytes: u64) -> Result<Region<'a>> {
        if offset > self.bytes || bytes > self.bytes - offset {
            return Err(Error::OutOfRange { offset, bytes, size: self.bytes });
        }
        let host = if self.kind.host_visible() { self.host + offset } else { 0 };
        Ok(Region { address: self.address + offset, host, bytes, ..self })
    }

    /// The same, for a command that runs before whoever lent it goes on.
    pub(crate) fn detached(self) -> Region<'static> {
        Region { memory: PhantomData, ..self }
    }

    /// The device's address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The host's address of the first byte; 0 where the host can't reach it.
    pub fn host_address(&self) -> u64 {
        self.host
    }

    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The kind.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Copies memory that the host can reach into `bytes`, which must be as long.
    ///
    /// What the device writes at the same time comes out torn: wait for it first.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`], [`Error::Lengths`].
    pub fn read_host(&self, bytes: &mut [u8]) -> Result<()> {
        self.check_host(bytes.len(), true)?;
        // SAFETY: `check_host` saw that the host can reach this many bytes at this address, which the queue promised
        // (`Memory::from_raw`); Rust code reaches them only by such copies, so nothing here is borrowed as a slice.
        unsafe { std::ptr::copy_nonoverlapping(self.host as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies `bytes` into memory that the host can reach, which must be as long.
    ///
    /// What the device reads at the same time is torn: wait for it first.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`], [`Error::Lengths`].
    pub fn write_host(&self, bytes: &[u8]) -> Result<()> {
        self.check_host(bytes.len(), false)?;
        // SAFETY: as in `read_host`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host as *mut u8, bytes.len()) };
        Ok(())
    }

    fn check_host(&self, bytes: usize, reading: bool) -> Result<()> {
        if !self.kind.host_visible() || self.host == 0 {
            return Err(Error::NotHostVisible { kind: self.kind.name() });
        }
        let bytes = bytes as u64;
        match (bytes == self.bytes, reading) {
            (true, _) => Ok(()),
            (false, true) => Err(Error::Lengths { source_bytes: self.bytes, destination_bytes: bytes }),
            (false, false) => Err(Error::Lengths { source_bytes: bytes, destination_bytes: self.bytes }),
        }
    }
}
