//! Whether a driver in the guest finds what it needs. The guest sees memory BARs, MSI and MSI-X (the `guest` module):
//! no INTx, no port I/O, no expansion ROM.
//!
//! * INTx: a function with an interrupt pin (PCI Local Bus 3.0, 6.2.4) but neither MSI nor MSI-X has no other interrupt.
//!   One without a pin raises none, and needs none.
//! * Port I/O: what it is for, no register tells. Beside memory BARs an I/O BAR is a second way to the same registers
//!   as a rule, for firmware, or because the specification once asked for it: GPUs, network and AHCI controllers work
//!   without. Without a memory BAR there is no other way. And a few classes are programmed through port I/O by their
//!   definition, whatever else they have ([`PORT_CLASSES`]).
//! * ROM: firmware and boot loaders run it; the guest has neither. Of drivers, those of AMD's GPUs look for the video BIOS
//!   there: radeon there alone, amdgpu in registers too.

use super::{BlockerCode, Case, Severity};
use crate::pci::{self, Bar, BarKind, DeviceType, PciFunction, PowerState, regs};

const REMEDY: &str = "pass another device; a VMM that has this (QEMU does) can use this one: vfio-pci is bound by hand \
                      then, through its driver_override in sysfs";

/// Class, subclass and, where one counts, interface of functions whose programming interface is in port I/O.
const PORT_CLASSES: &[(u8, u8, Option<u8>, &str)] = &[
    (0x01, 0x01, None, "PCI IDE Controller Specification 1.0"),
    (0x0c, 0x03, Some(0x00), "Universal Host Controller Interface 1.1"),
];

pub(super) fn judge(case: &mut Case<'_>) {
    // Companions stay with the host, bound to vfio-pci.
    let function = case.function.clone();
    interrupts(case, &function);
    port_io(case, &function);
    rom(case, &function);
}

fn interrupts(case: &mut Case<'_>, function: &PciFunction) {
    let has_messages =
        function.capabilities.iter().any(|known| matches!(known.id, regs::CAP_ID_MSI | regs::CAP_ID_MSIX));
    if has_messages || function.power_state == PowerState::D3Cold {
        return;
    }
    let Ok(config) = pci::read_config(case.host, function.address) else { return };
    let Some(&pin @ 1..=4) = config.get(usize::from(regs::INTERRUPT_PIN)) else { return };
    let path = case.host.pci_device(function.address).join("config");
    if config.len() < pci::config::CONFIG_SIZE {
        case.add(
            BlockerCode::Unchecked,
            Severity::Warning,
            function.address,
            format!("{} ends before the capabilities, where MSI and MSI-X are", path.display()),
            "run this as root".into(),
        );
        return;
    }
    let pin = char::from(b'A' + pin - 1);
    case.blocker(
        BlockerCode::LegacyInterrupt,
        format!("{} has interrupt pin INT{pin} and neither MSI nor MSI-X", path.display()),
        REMEDY.into(),
    );
}

fn port_io(case: &mut Case<'_>, function: &PciFunction) {
    let (ports, memory): (Vec<&Bar>, Vec<&Bar>) =
        function.bars.iter().partition(|bar| bar.kind == BarKind::Io);
    let Some(first) = ports.first() else { return };
    let class = function.class;
    let by_class = PORT_CLASSES.iter().find(|(base, subclass, interface, _)| {
        (class.base(), class.subclass()) == (*base, *subclass)
            && interface.is_none_or(|interface| interface == class.interface())
    });
    let why = match by_class {
        Some((.., specification)) => {
            format!("class {:06x} is programmed through it ({specification})", class.0)
        }
        None if memory.is_empty() => "there is no memory BAR".into(),
        None => return,
    };
    let path = case.host.pci_device(function.address).join("resource");
    case.blocker(
        BlockerCode::PortIo,
        format!("BAR {} in {} is port I/O, and {why}", first.index, path.display()),
        REMEDY.into(),
    );
}

fn rom(case: &mut Case<'_>, function: &PciFunction) {
    let is_display = function.device_type == DeviceType::GpuAmd && function.class.base() == 0x03;
    let Some(rom) = function.rom.filter(|_| is_display) else { return };
    let path = case.host.pci_device(function.address).join("resource");
    case.add(
        BlockerCode::RomHidden,
        Severity::Warning,
        function.address,
        format!("{} has a ROM of {}", path.display(), super::memory::size_text(rom.size)),
        "nothing with the driver amdgpu, which also reads the video BIOS through registers; radeon finds it in the \
         ROM alone and does not start: pass a newer GPU"
            .into(),
    );
}
