//! What the hook asks of a driver: virtual memory, copies, and what is known of work. The tests have one without a device.

use thiserror::Error;

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("CUDA error {0}")]
pub struct Failure(pub u32);

/// `CUDA_ERROR_INVALID_VALUE`.
pub const INVALID_VALUE: Failure = Failure(1);
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: Failure = Failure(2);

/// What a driver answers.
pub type Result<T> = std::result::Result<T, Failure>;

/// A device's number.
pub type Device = i32;
/// A context's handle.
pub type Context = u64;
/// A handle of physical memory.
pub type Handle = u64;

/// Where physical memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The device's own.
    Device(Device),
    /// The host's, which the device reaches.
    Host(Device),
}

/// The driver, below the hook. All sizes and addresses are multiples of [`GRANULE`].
pub trait Driver {
    /// A copy between two places of a device, as the program asked for it.
    type Copy: Clone + Send;
    /// Host memory that has what [`save`](Driver::save) copied there.
    type Saved: Send;

    /// Reserves addresses.
    ///
    /// # Errors
    /// The driver's.
    fn reserve(&self, bytes: u64) -> Result<u64>;
    /// Gives them back; nothing is mapped there.
    ///
    /// # Errors
    /// The driver's.
    fn unreserve(&self, address: u64, bytes: u64) -> Result<()>;
    /// Allocates physical memory.
    ///
    /// # Errors
    /// [`OUT_OF_MEMORY`]; the driver's.
    fn create(&self, place: Place, bytes: u64) -> Result<Handle>;
    /// Gives it back, once it is mapped nowhere.
    ///
    /// # Errors
    /// The driver's.
    fn release(&self, handle: Handle) -> Result<()>;
    /// Maps all of it, for the device and its peers to read and write.
    ///
    /// # Errors
    /// The driver's; then nothing is mapped.
    fn map(&self, address: u64, bytes: u64, handle: Handle, device: Device) -> Result<()>;
    /// Ends one mapping.
    ///
    /// # Errors
    /// The driver's.
    fn unmap(&self, address: u64, bytes: u64) -> Result<()>;
    /// Runs a copy that was put off.
    ///
    /// # Errors
    /// The driver's.
    fn copy(&self, copy: &Self::Copy) -> Result<()>;
    /// Waits for all work of a context.
    ///
    /// # Errors
    /// The driver's.
    fn synchronize(&self, context: Context) -> Result<()>;
    /// Is it known that no device has work, so that nothing but a call can look at memory?
    fn is_idle(&self) -> bool;
    /// Free bytes of a context's device.
    ///
    /// # Errors
    /// The driver's.
    fn free_bytes(&self, context: Context) -> Result<u64>;
    /// Bytes that memory pools hold, once they have given back what they can if they are to be trimmed.
    fn pools(&self, trims: bool) -> u64 {
        let _ = trims;
        0
    }
    /// Copies what is at ranges of a context's device to host memory, one behind the other.
    ///
    /// # Errors
    /// [`OUT_OF_MEMORY`] where the host has too little; the driver's.
    fn save(&self, context: Context, ranges: &[Range]) -> Result<Self::Saved>;
    /// Copies it back to ranges, each from its offset in the host memory on. A range is mapped when it is asked for, ahead of the copies.
    ///
    /// # Errors
    /// What a range could not be mapped for: no more are asked for; the driver's. Behind an error no copy runs on.
    fn restore(
        &self,
        context: Context,
        saved: &Self::Saved,
        ranges: impl Iterator<Item = Result<(u64, Range)>>,
    ) -> Result<()>;
    /// Makes a range zero.
    ///
    /// # Errors
    /// The driver's.
    fn clear(&self, context: Context, range: Range) -> Result<()>;
}

/// Addresses of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first.
    pub address: u64,
    /// How many.
    pub bytes: u64,
}

/// What physical memory comes in, and addresses of it are multiples of.
pub const GRANULE: u64 = 2 << 20;
