//! Memory of other owners, and memory that a forked child leaves alone.
#![allow(unsafe_code)]

mod pinned;

use std::any::Any;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use vm_runtime::sys::BorrowedMemory;
use vm_runtime::{Buffer, Queue as _};

use crate::Accelerator;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout;
use crate::node::{Array, Storage};
use crate::share::Place;

pub use pinned::Pinned;

/// A buffer that is given back by the process that has it: a forked child has none of the threads that would, and may find
/// their locks taken.
#[derive(Debug)]
pub(crate) struct Held {
    buffer: ManuallyDrop<Buffer<Accelerator>>,
    process: u32,
    is_lent: bool,
}

impl Held {
    pub(crate) fn new(buffer: Buffer<Accelerator>) -> Self {
        Self { buffer: ManuallyDrop::new(buffer), process: std::process::id(), is_lent: false }
    }

    /// One of memory that somebody else owns, and that is never written.
    fn lent(buffer: Buffer<Accelerator>) -> Self {
        Self { buffer: ManuallyDrop::new(buffer), process: std::process::id(), is_lent: true }
    }

    /// The memory of a stream's buffer for another stream of the device, whose work from here on begins behind what the first was given.
    pub(crate) fn elsewhere(to: &Device, from: &Device, buffer: &Arc<Held>) -> Result<Arc<Self>> {
        to.worker()?.wait_event(&from.worker()?.record()?)?;
        // SAFETY: both streams are of one device, and the keeper has the buffer until what the other was given has run. Lent memory is
        // not written, nor is what has another owner by its own stream.
        let memory = unsafe { BorrowedMemory::new(buffer.address(), buffer.bytes()) };
        let keeper = (Arc::clone(buffer), from.lease(), from.clone());
        Ok(Arc::new(Self::lent(to.worker()?.adopt(memory, keeper))))
    }

    /// A block of pinned memory for the stream of a device that copies.
    pub(crate) fn pinned(to: &Device, block: &Arc<Buffer<Accelerator>>) -> Result<Self> {
        // SAFETY: the device reaches the block by its address, and the keeper has it; whoever copies waits for it.
        let memory = unsafe { BorrowedMemory::new(block.address(), block.bytes()) };
        Ok(Self::lent(to.worker()?.adopt(memory, Arc::clone(block))))
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// The bytes that it begins with, of the processor's memory, when the device has done what it was given.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> Result<()> {
        if self.bytes() < bytes.len() as u64 {
            return Err(Error::Device("an array ends behind its memory".into()));
        }
        let from = self.address() as *const u8;
        // SAFETY: the memory is this buffer's and long enough; whoever calls has waited for the device, and nothing writes the elements
        // of an array again.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Deref for Held {
    type Target = Buffer<Accelerator>;

    fn deref(&self) -> &Self::Target {
        &self.buffer
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: this value is being dropped, so nobody uses the field again.
            unsafe { ManuallyDrop::drop(&mut self.buffer) };
        }
    }
}

impl Place {
    /// An array of these elements where they are. `keeper` keeps the memory, and is dropped when the array and all views of it were and
    /// the device is done with it: on whichever thread.
    ///
    /// # Errors
    /// [`Error::Value`] for elements that kernels can't work on where they are, or that lie at no addresses; [`Error::Shape`].
    ///
    /// # Safety
    /// The device may read all bytes of [`Place::span`] until `keeper` is dropped, and nobody writes them before what reads them has run.
    pub unsafe fn adopt(self, device: &Device, keeper: impl Any + Send + Sync) -> Result<Array> {
        if self.shape.contains(&0) {
            return Array::empty(device, self.dtype, &self.shape);
        }
        if !self.is_aligned() {
            let what = format!("{:#x} is not aligned as {} must be", self.address, self.dtype);
            return Err(Error::Value { function: "from_dlpack", what });
        }
        let (first, bytes, offset) = self.buffer()?;
        // SAFETY: the caller promises it of all but less than 16 bytes before, which are on the same page and which no kernel touches, as
        // views begin behind them.
        let memory = unsafe { BorrowedMemory::new(first, bytes) };
        let buffer = Arc::new(Held::lent(device.worker()?.adopt(memory, keeper)));
        let storage = Storage { buffer, offset, strides: self.strides };
        Ok(Array::ready(device, self.dtype, self.shape, storage))
    }

    /// An array of copies of these elements, which the host can read.
    ///
    /// # Errors
    /// As [`Place::span`] and [`Array::from_bytes`].
    ///
    /// # Safety
    /// The host may read all bytes of [`Place::span`], and nobody writes them meanwhile.
    pub unsafe fn copied(&self, device: &Device) -> Result<Array> {
        let (first, span) = self.span()?;
        if span == 0 || self.strides != layout::dense(&self.shape) {
            // SAFETY: as the caller promises.
            return Array::from_bytes(device, self.dtype, &self.shape, &unsafe { self.read()? });
        }
        // SAFETY: they lie one behind the other, from the first one on.
        let bytes = unsafe { std::slice::from_raw_parts(first as *const u8, span as usize) };
        Array::from_bytes(device, self.dtype, &self.shape, bytes)
    }

    /// Copies an array's elements here.
    ///
    /// # Errors
    /// [`Error::Value`] if it has another shape or type, or these elements are not one behind the other; as [`Array::read`].
    ///
    /// # Safety
    /// The host may write all bytes of [`Place::span`], and nobody else reads or writes them meanwhile.
    pub unsafe fn fill(&self, array: &Array) -> Result<()> {
        let (first, span) = self.span()?;
        let is_like = self.shape == array.shape() && self.dtype == array.dtype();
        if !is_like || self.strides != layout::dense(&self.shape) {
            let what = format!("{:?} of {} don't go there as they are", array.shape(), array.dtype());
            return Err(Error::Value { function: "from_device", what });
        }
        if span == 0 {
            return Ok(());
        }
        // SAFETY: they lie one behind the other, from the first one on.
        array.read(unsafe { std::slice::from_raw_parts_mut(first as *mut u8, span as usize) })
    }

    /// The elements, one behind the other, where the host can read them.
    ///
    /// # Errors
    /// As [`Place::span`].
    ///
    /// # Safety
    /// The host may read all bytes of [`Place::span`], and nobody writes them meanwhile.
    unsafe fn read(&self) -> Result<Vec<u8>> {
        self.span()?;
        let bytes = self.dtype.bytes() as usize;
        let count = self.shape.iter().product::<u64>() as usize;
        let mut read: Vec<u8> = Vec::new();
        if read.try_reserve_exact(count.saturating_mul(bytes)).is_err() {
            return Err(Error::OutOfMemory(format!("the host has no memory for {count} elements")));
        }
        if count == 0 {
            return Ok(read);
        }
        // Rows of elements that lie one behind the other are copied as one.
        let (mut run, mut outer) = (1u64, self.shape.len());
        while outer > 0 && (self.shape[outer - 1] == 1 || self.strides[outer - 1] == run.cast_signed()) {
            run *= self.shape[outer - 1];
            outer -= 1;
        }
        let mut at = vec![0u64; outer];
        loop {
            let step = |(at, stride): (&u64, &i64)| {
                at.cast_signed().wrapping_mul(*stride).wrapping_mul(bytes as i64)
            };
            let offset = at.iter().zip(&self.strides).map(step).fold(0i64, i64::wrapping_add);
            let from = self.address.wrapping_add_signed(offset) as *const u8;
            // SAFETY: these elements are of the span, which the caller promises.
            read.extend_from_slice(unsafe { std::slice::from_raw_parts(from, run as usize * bytes) });
            let Some(next) = (0..outer).rev().find(|d| at[*d] + 1 < self.shape[*d]) else { return Ok(read) };
            at[next] += 1;
            at[next + 1..].fill(0);
        }
    }
}

impl Device {
    /// Lets what comes begin after what another library's stream of this device was given.
    ///
    /// # Errors
    /// [`Error::Device`] where there are no such streams; the driver's.
    ///
    /// # Safety
    /// It is a handle of a stream of the device's primary context, which is not destroyed meanwhile.
    pub unsafe fn follow(&self, stream: u64) -> Result<()> {
        // SAFETY: as the caller promises; queues are opened in the primary context.
        self.with_queue(move |queue| unsafe { queue.follow(stream) })
    }

    /// Lets what another library's stream of this device is given from here on begin after what came so far.
    ///
    /// # Errors
    /// As [`Device::follow`].
    ///
    /// # Safety
    /// As [`Device::follow`].
    pub unsafe fn precede(&self, stream: u64) -> Result<()> {
        // SAFETY: as above.
        self.with_queue(move |queue| unsafe { queue.precede(stream) })
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::{DType, Given, Kernel};

    fn floats(array: &Array) -> Vec<f32> {
        let bytes = array.to_bytes().expect("the elements");
        bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().expect("four"))).collect()
    }

    #[test]
    fn what_is_adopted_is_computed_with_where_it_is() {
        let device = Device::open("cpu").expect("the processor");
        let (memory, alive) =
            (Arc::new([1f32, 2.0, 3.0, 4.0, 5.0, 6.0]), |of: &Arc<_>| Arc::strong_count(of));
        let address = memory.as_ptr() as u64 + 20;
        let place = Place { address, dtype: DType::Float32, shape: vec![2, 3], strides: vec![-3, -1] };
        // SAFETY: the memory is the keeper's, and nobody writes it.
        let array = unsafe { place.clone().adopt(&device, Arc::clone(&memory)) }.expect("an array");
        assert_eq!(array.share().expect("a place").place(), &place);
        assert_eq!(floats(&array), [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]);
        let view = array.permute(&[1, 0]).expect("a view");
        let sum = view.binary(crate::Binary::Add, &view).expect("a sum");
        assert_eq!(floats(&sum), [12.0, 6.0, 10.0, 4.0, 8.0, 2.0]);
        let copy = array.copied().expect("a copy");
        assert_eq!(floats(&copy), floats(&array));
        assert_ne!(copy.share().expect("a place").place().address, address);
        // SAFETY: as above.
        let host = unsafe { place.copied(&device) }.expect("a copy");
        assert_eq!(floats(&host), floats(&array));
        assert_eq!(alive(&memory), 2);
        drop((array, view, sum));
        device.stop().expect("an end");
        assert_eq!(alive(&memory), 1);
    }

    #[test]
    fn what_others_own_is_not_written() {
        let device = Device::open("cpu").expect("the processor");
        let text = "vir 1\nkernel @set(@y: view<f32, [?], readwrite>) at 0x0 block(32) {\n  %i = global_id.x : i64\n  %v = load @y[%i] : f32\n  %w = add %v, %v : f32\n  store @y[%i], %w\n}\n";
        let kernel = Kernel::parse(text).expect("a kernel");
        let memory = Arc::new([1f32; 4]);
        let place = Place::dense(memory.as_ptr() as u64, DType::Float32, &[3]);
        // SAFETY: the keeper has the memory, and nobody writes it.
        let mut lent = unsafe { place.adopt(&device, Arc::clone(&memory)) }.expect("an array");
        kernel.launch(&device, [1, 1, 1], vec![Given::Update(&mut lent)]).expect("a launch");
        assert_eq!((floats(&lent), *memory), (vec![2.0; 3], [1.0; 4]));
    }
}
