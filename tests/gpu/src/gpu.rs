//! The device that the tests run on.

use std::sync::Arc;
use std::time::Duration;

use vm_accel::{Accelerator, Worker, WorkerOptions};
use vm_cuda::CudaAccelerator;
use vm_jit::Target;

/// How long anything that should be short may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

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

    /// A worker with the usual options.
    pub(crate) fn worker(&self) -> vm_accel::Result<Worker<CudaAccelerator>> {
        Worker::start(Arc::clone(&self.accelerator), WorkerOptions::default())
    }

    /// The architecture to assemble for.
    pub(crate) fn architecture(&self) -> anyhow::Result<String> {
        let target = self.target()?.to_string();
        let name = target.trim_start_matches("ptx:");
        Ok(name.split(',').next().unwrap_or(name).to_owned())
    }

    /// What to compile for.
    pub(crate) fn target(&self) -> anyhow::Result<Target> {
        Ok(format!("ptx:{}", self.accelerator.info().target).parse()?)
    }
}
