//! Reads back from functions whether they are what they were, and set up as Linux set them up.

use super::super::EgpuError;
use super::{Result, heartbeat, step};
use crate::pci::{self, BarKind, PciIds, regs};
use crate::readiness::{UnassignedBars, unassigned_bars};
use crate::{Host, PciAddress, deadlines, files, iommu};

/// Whether each function answers, has its identity and its BARs, and takes accesses to them where a driver of the host has it.
///
/// # Errors
/// The first thing that is not so.
pub(super) fn verify(host: &Host, functions: &[(PciAddress, PciIds)]) -> Result<()> {
    if functions.is_empty() {
        return Err(step("verify it", "it has no functions"));
    }
    functions.iter().try_for_each(|(address, ids)| {
        let unsound = |what: String| EgpuError::Unsound { address: *address, what };
        verify_function(host, *address, ids).map_err(unsound)
    })
}

fn verify_function(host: &Host, address: PciAddress, ids: &PciIds) -> Result<(), String> {
    let dir = host.pci_device(address);
    let config = host.writer().read_bytes(&dir.join("config"), deadlines::HEARTBEAT);
    let config = config.map_err(|error| match error.kind() {
        std::io::ErrorKind::TimedOut => heartbeat::silent(),
        _ => format!("its config space can't be read: {error}"),
    })?;
    heartbeat::check_ids(&config, ids)?;
    if let Some(UnassignedBars { evidence, fix }) = unassigned_bars(host, address) {
        return Err(format!("{evidence}; {fix}"));
    }
    let bars = pci::bars(host, address);
    if let Some(bar) = pci::lost_bar(&config, &bars) {
        return Err(format!(
            "its BAR {} has another address than the {:#x} that Linux gave it, as after a loss of power",
            bar.index, bar.address
        ));
    }
    // A guest switches its device's own.
    let driver = files::link_name(&dir.join("driver")).filter(|driver| !iommu::is_vfio_driver(driver));
    let is_enabled = files::read_trimmed(&dir.join("enable")).is_some_and(|count| count != "0");
    let command = config.get(usize::from(regs::COMMAND)).copied().unwrap_or(0);
    match driver {
        Some(driver)
            if is_enabled
                && bars.iter().any(|bar| bar.kind != BarKind::Io)
                && u16::from(command) & regs::COMMAND_MEMORY == 0 =>
        {
            Err(format!("its Command register has memory accesses off, which {driver} has turned on"))
        }
        _ => Ok(()),
    }
}
