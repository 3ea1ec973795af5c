//! Memory that is shared with other libraries: where an array's elements are, and where those of others.

use std::fmt;
use std::sync::Arc;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::evaluate;
use crate::layout;
use crate::node::{Array, Storage};

/// What buffers of others begin at a multiple of: the widest access of a kernel.
const ALIGN: u64 = 16;

/// Where elements are that somebody else says so: none of it is to be trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The address of the first element, as the device sees it.
    pub address: u64,
    /// The type of the elements.
    pub dtype: DType,
    /// Extents, slowest dimension first.
    pub shape: Vec<u64>,
    /// From one element of a dimension to the next, in elements.
    pub strides: Vec<i64>,
}

impl Place {
    /// Elements one behind the other.
    pub fn dense(address: u64, dtype: DType, shape: &[u64]) -> Self {
        Self { address, dtype, shape: shape.to_vec(), strides: layout::dense(shape) }
    }

    /// The first byte of all elements, and how many bytes there are from it to the end of the last.
    ///
    /// # Errors
    /// [`Error::Shape`] for more elements than an array has, [`Error::Value`] for addresses that there are not.
    pub fn span(&self) -> Result<(u64, u64)> {
        let function = "from_dlpack";
        layout::check(function, &self.shape)?;
        if self.shape.len() != self.strides.len() {
            let what = format!("{} strides for {} dimensions", self.strides.len(), self.shape.len());
            return Err(Error::Value { function, what });
        }
        if self.shape.contains(&0) {
            return Ok((self.address, 0));
        }
        let bytes = i128::from(self.dtype.bytes());
        let (mut low, mut high) = (i128::from(self.address), i128::from(self.address) + bytes);
        for (extent, stride) in self.shape.iter().zip(&self.strides) {
            let reach = i128::from(extent - 1) * i128::from(*stride) * bytes;
            *(if reach < 0 { &mut low } else { &mut high }) += reach;
        }
        // Addresses of user space end below.
        match (u64::try_from(low), u64::try_from(high - low)) {
            (Ok(low), Ok(span)) if self.address != 0 && low != 0 && high < 1 << 63 => Ok((low, span)),
            _ => {
                let what = format!("elements at {low:#x} to {high:#x} are at no addresses of a process's");
                Err(Error::Value { function, what })
            }
        }
    }

    /// May kernels work where it is?
    pub fn is_aligned(&self) -> bool {
        self.address.is_multiple_of(self.dtype.bytes())
    }

    /// Of what a buffer is that has all elements, and of which of its elements is the first.
    pub(crate) fn buffer(&self) -> Result<(u64, u64, i64)> {
        let (low, span) = self.span()?;
        let first = low & !(ALIGN - 1);
        let offset = (self.address - first) / self.dtype.bytes();
        Ok((first, low - first + span, offset.cast_signed()))
    }
}

/// Where an array's elements are, which are there as long as this value, and never change.
#[derive(Clone)]
pub struct Shared {
    place: Place,
    _storage: Storage,
    _lease: Arc<()>,
    /// Behind what is of it.
    device: Device,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("device", &self.device).field("place", &self.place).finish()
    }
}

impl Shared {
    /// The device whose addresses they are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where they are. The device may yet have to compute them.
    pub fn place(&self) -> &Place {
        &self.place
    }
}

impl Array {
    /// Where its elements are; they are given to the device to be computed, if that was not done yet.
    ///
    /// # Errors
    /// What computing them fails with.
    pub fn share(&self) -> Result<Shared> {
        let storage = evaluate::storage(self)?;
        let bytes = self.dtype().bytes();
        let address =
            storage.buffer.address().wrapping_add_signed(storage.offset.wrapping_mul(bytes.cast_signed()));
        let (dtype, shape, strides) = (self.dtype(), self.shape().to_vec(), storage.strides.clone());
        let place = Place { address, dtype, shape, strides };
        let device = self.device().clone();
        Ok(Shared { place, _storage: storage, _lease: device.lease(), device })
    }

    /// An array of the same elements in memory of its own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or what computing them fails with.
    pub fn copied(&self) -> Result<Array> {
        let copy = Array::empty(self.device(), self.dtype(), self.shape())?;
        if self.size() != 0 {
            let (dtype, shape, storage) = (self.dtype(), self.shape().to_vec(), evaluate::storage(&copy)?);
            evaluate::copy(self, evaluate::Output { dtype, shape, storage })?;
        }
        Ok(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_others_are_checked() {
        let check = |address, shape: &[u64], strides: &[i64], expect: Option<(u64, u64)>| {
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            let place = Place { address, dtype: DType::Float32, shape, strides };
            assert_eq!(place.span().ok(), expect, "{place:?}");
        };
        check(4096, &[2, 3], &[3, 1], Some((4096, 24)));
        check(4096, &[3], &[-2], Some((4096 - 16, 20)));
        check(4096, &[5], &[0], Some((4096, 4)));
        check(4096, &[], &[], Some((4096, 4)));
        check(0, &[0], &[1], Some((0, 0)));
        check(0, &[1], &[1], None);
        check(4096, &[2, 3], &[1], None);
        check(4096, &[2048], &[-1], None);
        check(4096, &[1 << 40], &[1 << 40], None);
        check(4096, &[2], &[i64::MAX], None);
        check(4096, &[2], &[i64::MIN], None);
        check(u64::MAX - 3, &[1], &[1], None);
        check(4096, &[u64::MAX], &[1], None);
    }
}
