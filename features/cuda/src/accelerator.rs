//! The CUDA devices of this machine.

use vm_accel::{Accelerator, DeviceInfo, Error, MAX_PARAMETER_BYTES, PARAMETER_BYTES, QueueOptions, Result};

use crate::context::{Shared, Traits};
use crate::queue::CudaQueue;
use crate::result::{Context, Device, Stream};
use crate::sys::{BorrowedContext, BorrowedStream, CUdevice_attribute as Attribute, Driver, driver};

/// One CUDA device.
#[derive(Debug)]
pub struct CudaAccelerator {
    device: Device,
    info: DeviceInfo,
}

/// Every CUDA device that can be used, in CUDA's order, which is not that of the PCI addresses. One that can't is left
/// out with a warning.
///
/// # Errors
/// [`Error::Unavailable`] where there is no driver, with what to install.
pub fn devices() -> Result<Vec<CudaAccelerator>> {
    let count = driver()?.device_count()?;
    Ok((0..count)
        .filter_map(|ordinal| {
            CudaAccelerator::new(ordinal)
                .inspect_err(|error| tracing::warn!(ordinal, %error, "a CUDA device is left out"))
                .ok()
        })
        .collect())
}

impl CudaAccelerator {
    /// The device with a number in CUDA's order.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where there is no driver, with what to install; [`Error::NoDevice`];
    /// [`Error::Unsupported`] for a device without stream-ordered memory.
    pub fn new(ordinal: u32) -> Result<Self> {
        let driver = driver()?;
        let found = driver.device_count()?;
        if ordinal >= found {
            return Err(Error::NoDevice { wanted: ordinal.to_string(), found });
        }
        let device = driver.device(ordinal)?;
        Ok(Self { device, info: info(driver, device)? })
    }

    /// The device at a PCI address, as in `0000:65:00.0`.
    ///
    /// # Errors
    /// As [`CudaAccelerator::new`].
    pub fn at(address: &str) -> Result<Self> {
        let driver = driver()?;
        let found = driver.device_count()?;
        for ordinal in 0..found {
            let device = driver.device(ordinal)?;
            if device.address(driver)?.eq_ignore_ascii_case(address) {
                return Ok(Self { device, info: info(driver, device)? });
            }
        }
        Err(Error::NoDevice { wanted: format!("at {address}"), found })
    }

    /// A queue on a stream that somebody else owns: what it is given comes in order with what its owner gives the stream, and
    /// launches, fills and copies wait for nothing and copy nothing beside. Without a `context` the stream is one of the
    /// device's primary context, as PyTorch's and the CUDA runtime's are. On whichever thread, the current context is
    /// afterwards what it was before.
    ///
    /// A [`Session`](vm_accel::Session) on it launches kernels with all checks; memory that others own it takes as
    /// [`BorrowedMemory`](vm_accel::sys::BorrowedMemory). Dropping the queue waits for the stream, as its kernels are unloaded then.
    ///
    /// # Errors
    /// [`Error::Host`] for a context of another device; the driver's.
    pub fn borrow(
        &self,
        context: Option<BorrowedContext>,
        stream: BorrowedStream,
        options: &QueueOptions,
    ) -> Result<CudaQueue> {
        let driver = driver()?;
        let context = match context {
            Some(context) => Context::borrow(driver, self.device, &context)?,
            None => Context::retain(driver, self.device)?,
        };
        CudaQueue::new(self.shared(context, options), |shared| Ok(Stream::borrow(&shared.context, &stream)))
    }

    fn shared(&self, context: Context, options: &QueueOptions) -> Shared {
        let traits = Traits {
            name: self.info.name.clone(),
            unified: self.info.unified,
            host_registration: self.info.host_registration,
        };
        Shared::new(self.device, traits, context, options)
    }
}

fn info(driver: &Driver, device: Device) -> Result<DeviceInfo> {
    let get = |attribute| device.attribute(driver, attribute);
    let [major, minor] = [
        get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ];
    let name = device.name(driver)?;
    if get(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? == 0 {
        return Err(Error::Unsupported { what: "stream-ordered memory pools".into(), device: name });
    }
    Ok(DeviceInfo {
        name,
        backend: "cuda",
        target: format!("sm_{major}{minor}"),
        address: Some(device.address(driver)?),
        driver: format!("CUDA {}", driver.version()?),
        memory_bytes: device.memory(driver)?,
        units: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        lanes: get(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
        block_items: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        block: [
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)?,
        ],
        grid: [
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
        ],
        shared_bytes: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        parameter_bytes: parameter_bytes(major, &driver.version()?),
        // Without concurrent access the host faults while any kernel runs.
        unified: get(Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)? != 0,
        host_registration: get(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)? != 0,
    })
}

/// What a device of a compute capability passes with a driver that knows CUDA up to a version, written as in `13.0`.
fn parameter_bytes(major: u32, cuda: &str) -> u32 {
    let number = |text: &str| text.parse().unwrap_or(0);
    let cuda = cuda.split_once('.').map_or((0, 0), |(major, minor)| (number(major), number(minor)));
    if major >= 7 && cuda >= (12, 1) { MAX_PARAMETER_BYTES } else { PARAMETER_BYTES }
}

impl Accelerator for CudaAccelerator {
    type Queue = CudaQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn open(&self, options: &QueueOptions) -> Result<CudaQueue> {
        let context = Context::for_thread(driver()?, self.device)?;
        CudaQueue::new(self.shared(context, options), |shared| Stream::new(&shared.context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_many_bytes_of_parameters_pass() {
        let check = |major, cuda, bytes| assert_eq!(parameter_bytes(major, cuda), bytes, "{major} {cuda}");
        check(9, "13.0", 32_764);
        check(7, "12.1", 32_764);
        check(9, "12.0", 4096);
        check(6, "12.8", 4096);
        check(9, "nonsense", 4096);
    }
}
