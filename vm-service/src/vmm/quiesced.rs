//! The order of a restart, in types: everything stops, then RAM is loaded, then vCPUs run.
//!
//! ```text
//! Machine::new ─▶ Quiesced ─▶ Program::load ─▶ vcpu::start (takes it) ─▶ VcpuThreads::stop ─▶ Halted ─▶ Quiesced::stop_all …
//! ```

use super::error::MachineError;
use super::pci::PciRoot;
use super::vcpu::Halted;

/// Nobody writes the guest's RAM but who has this: no vCPU is in the guest, no device's thread, worker or DMA reaches it.
/// Only [`stop_all`](Self::stop_all) and a machine that was just made give one, and starting the vCPUs takes it.
#[derive(Debug)]
pub(super) struct Quiesced(());

impl Quiesced {
    /// Of a machine that was just made. What is given its RAM, whenever that is, does nothing before the guest's driver says
    /// so; passed-through devices are attached reset.
    pub(super) fn unstarted() -> Self {
        Self(())
    }

    /// Stops every device, of a guest whose vCPUs have halted; those that are passed through are reset. While one of them is
    /// [awaited](PciRoot::awaits) the guest has reached none: they are as they were attached, and that may still be going on.
    ///
    /// # Errors
    /// When one does not stop in time or can't be reset. All others are stopped even then.
    pub(super) fn stop_all(_: &Halted, pci: &PciRoot) -> Result<Self, MachineError> {
        pci.ask_to_stop();
        let devices = if pci.awaits() { Vec::new() } else { pci.all_devices() };
        for device in &devices {
            if let Err(error) = device.stop() {
                tracing::debug!(%error, "a device could not be stopped; resetting it tells");
            }
        }
        let mut result = Ok(Self(()));
        for device in &devices {
            let reset = device.reset();
            result = result.and_then(|quiesced| match reset {
                Ok(()) => Ok(quiesced),
                Err(source) => Err(MachineError::Device { address: device.address(), source }),
            });
        }
        pci.stop().and(result)
    }
}
