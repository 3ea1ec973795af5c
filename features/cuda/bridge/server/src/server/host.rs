//! The budget of host memory that a worker may hold for its session.
//!
//! The server takes large memory from the budget before it allocates it, or the call fails ([`HostMemory::take`]): windows, images, lanes, copies of
//! graphs, staging buffers. It charges small objects after the driver has made them ([`HostMemory::charge`]), and begins no call that makes one
//! without room in the budget ([`HostMemory::check`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_cuda_api::Object;

use crate::wire::code;

/// The room that a call needs to make small objects: more than any costs.
const MARGIN: u64 = 1 << 20;

/// The budget of a session.
#[derive(Clone, Debug)]
pub struct HostMemory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: u64,
    held: AtomicU64,
}

impl HostMemory {
    /// A budget of so many bytes.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Inner { limit, held: AtomicU64::new(0) }))
    }

    /// Takes so many bytes.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when there are not as many.
    pub(super) fn take(&self, bytes: u64) -> Result<Charge, u32> {
        let mut charge = self.charge(0);
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// Charges bytes that are already allocated, even beyond the limit.
    pub(super) fn charge(&self, bytes: u64) -> Charge {
        self.0.held.fetch_add(bytes, Ordering::SeqCst);
        Charge { of: self.clone(), bytes }
    }

    /// Checks that the budget has room for small objects.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if it has not.
    pub(super) fn check(&self) -> Result<(), u32> {
        if self.left() >= MARGIN { Ok(()) } else { Err(code::OUT_OF_MEMORY) }
    }

    /// Returns how many bytes are left.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.0.limit.saturating_sub(self.0.held.load(Ordering::SeqCst))
    }
}

/// Bytes taken from a budget, returned on drop.
#[derive(Debug)]
pub(super) struct Charge {
    of: HostMemory,
    bytes: u64,
}

impl Charge {
    /// Takes more bytes.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when there are not as many.
    pub(super) fn grow(&mut self, bytes: u64) -> Result<(), u32> {
        let Inner { limit, held } = &*self.of.0;
        let more = |held: u64| held.checked_add(bytes).filter(|more| more <= limit);
        held.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).map_err(|_| code::OUT_OF_MEMORY)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Returns all bytes but this many to the budget.
    pub(super) fn shrink(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.of.0.held.fetch_sub(less, Ordering::SeqCst);
    }

    /// Adds another charge of the same budget to this one.
    pub(super) fn merge(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Returns the number of bytes taken.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

/// An upper bound of the host memory that the driver and the server need for an object, without its data.
pub(super) fn cost(object: Object) -> u64 {
    match object {
        // Its logs.
        Object::Link => 1 << 20,
        Object::Context | Object::GreenContext => 256 << 10,
        Object::Stream => 64 << 10,
        Object::Graph | Object::Exec | Object::Pool | Object::Library | Object::Module => 4096,
        Object::Node => NODE,
        _ => 512,
    }
}

/// Bytes charged for a graph node, without its parameters.
pub(super) const NODE: u64 = 1024;
/// Bytes charged for a graph's reference to a user object: the driver's, and this process's own.
pub(super) const REFERENCE: u64 = 128;
/// Bytes charged for an edge of a graph: an entry at each of its nodes and its edge data, with room for vectors that double.
pub(super) const EDGE: u64 = 64;
/// Bytes charged for an object of a few words.
pub(super) const ENTRY: u64 = 256;

/// An image that is sent or read in parts.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) bytes: Vec<u8>,
    pub(super) charge: Charge,
}

impl Image {
    /// An empty image.
    pub(super) fn new(of: &HostMemory) -> Self {
        Self { bytes: Vec::new(), charge: of.charge(0) }
    }

    /// Returns the image and leaves an empty one.
    pub(super) fn take(&mut self) -> Self {
        let empty = Self::new(&self.charge.of);
        std::mem::replace(self, empty)
    }

    /// Appends a part. Clears the image if the budget has no room, or the image would exceed `most` bytes.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` then.
    pub(super) fn append(&mut self, bytes: &[u8], most: usize) -> Result<(), u32> {
        let fits = self.bytes.len() + bytes.len() <= most;
        let grown = if fits { self.charge.grow(bytes.len() as u64) } else { Err(code::OUT_OF_MEMORY) };
        match grown {
            // Doubling the capacity would exceed the charge.
            Ok(()) => self.bytes.reserve_exact(bytes.len()),
            Err(code) => {
                self.take();
                return Err(code);
            }
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Replaces the image.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the budget has no room.
    pub(super) fn set(&mut self, len: usize, bytes: impl FnOnce() -> Vec<u8>) -> Result<(), u32> {
        self.take();
        self.charge.grow(len as u64)?;
        self.bytes = bytes();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_gets_back_what_was_taken() {
        let host = HostMemory::new(2 * MARGIN);
        let mut one = host.take(MARGIN).unwrap();
        assert_eq!(host.take(MARGIN + 1).unwrap_err(), code::OUT_OF_MEMORY);
        assert_eq!(one.grow(u64::MAX), Err(code::OUT_OF_MEMORY));
        assert_eq!(host.check(), Ok(()));
        let small = host.charge(1);
        assert_eq!(host.check(), Err(code::OUT_OF_MEMORY));
        one.merge(small);
        assert_eq!(one.bytes(), MARGIN + 1);
        one.shrink(10);
        assert_eq!(host.left(), 2 * MARGIN - 10);
        let over = host.charge(3 * MARGIN);
        assert_eq!(host.left(), 0);
        drop((over, one));
        assert_eq!(host.left(), 2 * MARGIN);
    }

    #[test]
    fn an_image_is_no_longer_than_the_budget() {
        let host = HostMemory::new(100);
        let mut image = Image::new(&host);
        assert_eq!([60, 40].map(|len| image.append(&vec![1; len], 1000)), [Ok(()), Ok(())]);
        assert_eq!((image.bytes.len(), host.left()), (100, 0));
        let taken = image.take();
        assert_eq!(image.append(&[1], 1000), Err(code::OUT_OF_MEMORY));
        drop(taken);
        assert_eq!(image.append(&[1; 50], 1000), Ok(()));
        // A part that does not fit clears the image.
        assert_eq!(image.append(&[1; 50], 99), Err(code::OUT_OF_MEMORY));
        assert_eq!((image.bytes.len(), host.left()), (0, 100));
        assert_eq!(image.set(101, || unreachable!()), Err(code::OUT_OF_MEMORY));
    }
}
