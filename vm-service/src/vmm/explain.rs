//! The options of `explain` for a guest, before its machine is made: `explain` judges with them as the machine will place.

use std::path::Path;

use vm_passthrough::pci::placement::FunctionRequest;
use vm_passthrough::readiness::{ExplainOptions, RamPages};

use super::cpu::cpuid;
use super::machine::open_kvm;
use super::virtio::VirtioPci;
use crate::config::GuestConfig;
use crate::os::limits;

/// What `explain` has to know of a guest; everything else is as by default. `kvm` is the KVM device node, of which the
/// number of address bits is asked; where that can't be had it is the one that the host's processors have.
pub(crate) fn explain_options(config: &GuestConfig, kvm: Option<&Path>) -> ExplainOptions {
    let supported = kvm.and_then(|path| cpuid::supported(&open_kvm(path).ok()?).ok());
    let mut options = ExplainOptions::for_memory(config.memory);
    options.physical_address_bits = supported.as_ref().map(cpuid::phys_bits);
    options.processor_reserved = supported.as_ref().map_or(0..0, cpuid::reserved);
    options.emulated = emulated(config);
    options.open_files = limits::REST;
    options.bar_sizes = config.bar_sizes();
    options.pages = config.hugepages.map_or(RamPages::Any, RamPages::Huge);
    options
}

/// The BARs of the machine's own devices: the accelerators that it shares, vsock, disks, network interfaces.
fn emulated(config: &GuestConfig) -> Vec<FunctionRequest> {
    let virtio = |name: String, window| FunctionRequest { name, slot: None, bars: VirtioPci::bars(window) };
    let shared = config.accelerators.iter();
    let mut own: Vec<_> =
        shared.clone().map(|shared| virtio(format!("the shared {}", shared.device), shared.window)).collect();
    if config.vsock.is_some() || shared.clone().any(|shared| shared.window.is_some()) {
        own.push(virtio("the vsock device".into(), None));
    }
    own.extend(config.disks.iter().map(|disk| virtio(format!("the disk {}", disk.path.display()), None)));
    own.extend(config.nets.iter().map(|net| virtio(format!("the network interface at {}", net.tap), None)));
    own
}
