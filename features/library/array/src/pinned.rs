//! Memory of the host that a device copies from and to by itself, at the full speed of the link.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vm_runtime::{Buffer, MemoryKind};

use crate::Accelerator;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sys::{Held, Pinned};

/// The blocks of a device, and by which stream each was allocated.
pub(crate) type Blocks = Mutex<Vec<(usize, Weak<Buffer<Accelerator>>)>>;

/// A buffer, and what keeps it.
type Kept = Box<dyn Deref<Target = Buffer<Accelerator>>>;

impl Device {
    /// Allocates such memory, all of it 0.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], and [`Error::Device`] where the device has none.
    pub fn pinned(&self, bytes: u64) -> Result<Pinned> {
        let buffer = self.worker()?.allocate_kind(MemoryKind::Pinned, bytes.max(1))?;
        let none = || Error::Device("the device has no memory that the host reaches, too".into());
        let block = Pinned::new(self, buffer).ok_or_else(none)?;
        let mut blocks = self.blocks().lock().unwrap_or_else(PoisonError::into_inner);
        blocks.retain(|(_, block)| block.strong_count() != 0);
        blocks.push((self.number(), Arc::downgrade(block.buffer())));
        Ok(block)
    }

    /// The block that bytes lie in, for this stream, and where in it; none where only another stream can name it.
    pub(crate) fn pinned_at(&self, bytes: &[u8]) -> Result<Option<(Kept, u64)>> {
        let address = bytes.as_ptr() as u64;
        let blocks = self.blocks().lock().unwrap_or_else(PoisonError::into_inner);
        let live = blocks.iter().filter_map(|(number, block)| Some((*number, block.upgrade()?)));
        let found = live.into_iter().find_map(|(number, block)| {
            let offset = address.checked_sub(block.host_address()?)?;
            let end = offset.checked_add(bytes.len() as u64)?;
            (end <= block.bytes()).then_some((number, block, offset))
        });
        drop(blocks);
        let Some((number, block, offset)) = found else { return Ok(None) };
        if number == self.number() {
            return Ok(Some((Box::new(block), offset)));
        }
        // A guest's is no address.
        match self.info().backend {
            "guest" => Ok(None),
            _ => Ok(Some((Box::new(Held::pinned(self, &block)?), offset))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Array, DType};

    #[test]
    fn blocks_are_found_while_they_live() {
        let device = Device::open("cpu").expect("the processor");
        let block = device.pinned(4096).expect("memory");
        let at = |bytes: &[u8]| device.pinned_at(bytes).expect("a block").map(|(_, offset)| offset);
        let bytes = block.bytes();
        assert_eq!([at(bytes), at(&bytes[8..24]), at(&bytes[4096..])], [Some(0), Some(8), Some(4096)]);
        assert_eq!(at(&[0; 16]), None);
        let other = device.pinned(64).expect("memory");
        assert_eq!(at(other.bytes()), Some(0));
        drop(block);
        assert_eq!(
            device.blocks().lock().expect("the blocks").iter().filter(|(_, b)| b.strong_count() != 0).count(),
            1
        );
    }

    #[test]
    fn blocks_stay_behind_the_end_of_their_device() {
        let device = Device::open("cpu").expect("the processor");
        let mut block = device.pinned(64).expect("memory");
        device.stop().expect("an end");
        drop(device);
        block.bytes_mut().fill(3);
        assert_eq!(block.bytes(), [3; 64]);
    }

    #[test]
    fn copies_go_both_ways() {
        let device = Device::open("cpu").expect("the processor");
        let mut block = device.pinned(64).expect("memory");
        let array = Array::from_bytes(&device, DType::UInt8, &[64], &[7; 64]).expect("an array");
        array.read(block.bytes_mut()).expect("the elements");
        assert_eq!(block.bytes(), [7; 64]);
        block.bytes_mut()[9] = 1;
        let other = Array::from_bytes(&device, DType::UInt8, &[64], block.bytes()).expect("an array");
        assert_eq!(other.to_bytes().expect("the elements"), block.bytes());
    }
}
