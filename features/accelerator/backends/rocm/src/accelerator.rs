//! The AMD GPUs of this machine, to run kernels on.

use vm_accel::{Accelerator, DeviceInfo, Error, PARAMETER_BYTES, QueueOptions, Result};

use crate::access;
use crate::queue::RocmQueue;
use crate::result::Device;
use crate::sys::{Attribute, Hip, hip};
use crate::topology::clean;
use crate::{RocmDevice, RocmError, Roots, devices};

/// One AMD GPU, or a partition of one.
#[derive(Debug)]
pub struct RocmAccelerator {
    device: Device,
    info: DeviceInfo,
}

/// How many devices HIP has.
///
/// # Errors
/// [`Error::Unavailable`] where there is no HIP, or no device, with what to do.
pub fn device_count() -> Result<u32> {
    hip()?.device_count()
}

impl RocmAccelerator {
    /// The device's number in HIP's order.
    pub fn ordinal(&self) -> u32 {
        self.device.ordinal()
    }

    /// The device with a number in HIP's order.
    ///
    /// # Errors
    /// [`RocmError::Hip`] where there is no HIP that can be used, or no device of that number, with what to do; what [`devices`]
    /// fails with; [`RocmError::NoDevice`] where the compute driver does not list it.
    pub fn new(ordinal: u32) -> Result<Self, RocmError> {
        let hip = hip()?;
        let found = hip.device_count()?;
        if ordinal >= found {
            return Err(Error::NoDevice { wanted: ordinal.to_string(), found }.into());
        }
        let device = Device::new(hip, ordinal);
        let (address, listed) = (device.address()?, devices(&Roots::system())?);
        let listed = listed.iter().find(|listed| listed.address == address);
        Self::with(device, listed.ok_or(RocmError::NoDevice { wanted: address })?)
    }

    /// The device at a PCI address, as in `0000:65:00.0`, of a host below `roots`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn at(roots: &Roots, address: &str) -> Result<Self, RocmError> {
        RocmDevice::at(roots, address)?.open()
    }

    /// The first of HIP's devices that has a device's address.
    pub(crate) fn of(hip: &'static Hip, listed: &RocmDevice) -> Result<Self, RocmError> {
        let (mut failed, found) = (None, hip.device_count()?);
        for ordinal in 0..found {
            let device = Device::new(hip, ordinal);
            match device.address() {
                Ok(address) if address == listed.address => return Self::with(device, listed),
                Ok(_) => {}
                // It may be another's failure.
                Err(error) => failed = Some(error),
            }
        }
        let hidden = || Error::Unavailable {
            library: hip.library.clone(),
            cause: format!("of its {found} devices none is at {}", listed.address),
            remedy: access::HIDDEN.into(),
        };
        Err(failed.unwrap_or_else(hidden).into())
    }

    fn with(device: Device, listed: &RocmDevice) -> Result<Self, RocmError> {
        device.hip.check_complete()?;
        let info = info(device, listed)?;
        Ok(Self { device, info })
    }
}

fn info(device: Device, listed: &RocmDevice) -> Result<DeviceInfo> {
    let get = |attribute| device.attribute(attribute);
    let warp_size = get(Attribute::WarpSize)?;
    if warp_size != listed.wavefront {
        // The numbers of attributes have changed once, before 5.0.
        return Err(Error::Unavailable {
            library: device.hip.library.clone(),
            cause: format!(
                "it says that waves have {warp_size} threads, and the driver {}",
                listed.wavefront
            ),
            remedy: "install a version of ROCm from 5.2 to 7, whose attributes are known".into(),
        });
    }
    Ok(DeviceInfo {
        name: match device.name()? {
            // Debian's library knows names only of some.
            name if name.is_empty() => listed.to_string(),
            name => clean(&name),
        },
        backend: "rocm",
        target: listed.architecture.clone(),
        address: Some(listed.address.clone()),
        driver: format!("HIP {}", device.hip.version()?),
        memory_bytes: device.memory_bytes()?,
        compute_units: listed.compute_units,
        warp_size,
        block_threads: get(Attribute::MaxThreadsPerBlock)?,
        block: [get(Attribute::MaxBlockDimX)?, get(Attribute::MaxBlockDimY)?, get(Attribute::MaxBlockDimZ)?],
        grid: [get(Attribute::MaxGridDimX)?, get(Attribute::MaxGridDimY)?, get(Attribute::MaxGridDimZ)?],
        shared_bytes: get(Attribute::MaxSharedMemoryPerBlock)?,
        parameter_bytes: PARAMETER_BYTES,
        // Without concurrent access the host may not look while any kernel runs.
        unified: get(Attribute::ConcurrentManagedAccess)? != 0,
        host_registration: true,
        guards: true,
    })
}

impl Accelerator for RocmAccelerator {
    type Queue = RocmQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn open(&self, options: &QueueOptions) -> Result<RocmQueue> {
        RocmQueue::open(self.device, &self.info, options)
    }
}
