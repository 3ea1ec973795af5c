//! The device that the tests run on.

use std::sync::Arc;

use vm_accel::Accelerator;
use vm_cuda::CudaAccelerator;
use vm_jit::Target;

/// The device under test.
pub(crate) struct Gpu {
    pub(crate) accelerator: Arc<CudaAccelerator>,
}

impl Gpu {
    /// The device with a number in CUDA's order.
    pub(crate) fn open(device: u32) -> vm_accel::Result<Self> {
        Ok(Self { accelerator: Arc::new(CudaAccelerator::new(device)?) })
    }

    /// It in one line.
    pub(crate) fn describe(&self) -> String {
        let info = self.accelerator.info();
        let address = info.address.as_deref().unwrap_or("no address");
        format!("{} ({}) at {address}, {}", info.name, info.target, info.driver)
    }

    /// What to compile for.
    pub(crate) fn target(&self) -> anyhow::Result<Target> {
        Ok(format!("ptx:{}", self.accelerator.info().target).parse()?)
    }
}
