//! Whether a driver in the guest finds what it needs. The guest sees BARs, the expansion ROM, MSI, MSI-X and INTx
//! (the `guest` module).
//!
//! * INTx: a function with an interrupt pin (PCI Local Bus 3.0, 6.2.4) but neither MSI nor MSI-X has no other interrupt.
//!   VFIO masks the pin whenever it fires: in the function (Interrupt Disable, PCI 2.3), or else by the host's line, and then
//!   nobody else may use that. PCI Express always has the former; of older functions only the Linux kernel's probe tells.
//! * Port I/O: a guest has little room for it, and I/O BARs may get none. What they are for, no register tells. Beside memory BARs an I/O BAR is a second way to the same registers
//!   as a rule, for firmware, or because the specification once asked for it: GPUs, network and AHCI controllers work
//!   without. Without a memory BAR there is no other way. And a few classes are programmed through port I/O by their
//!   definition, whatever else they have ([`PORT_CLASSES`]).

use super::{BlockerCode, Case, Seat, Severity};
use crate::files;
use crate::pci::{self, Bar, BarKind, PciFunction, PowerState, regs};

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
}

fn interrupts(case: &mut Case<'_>, function: &PciFunction) {
    let may_share = |id| matches!(id, regs::CAP_ID_MSI | regs::CAP_ID_MSIX | regs::CAP_ID_EXP);
    if function.capabilities.iter().any(|known| may_share(known.id))
        || function.power_state == PowerState::D3Cold
    {
        return;
    }
    let Ok(config) = pci::read_config(case.host, function.address) else { return };
    let Some(1..=4) = config.get(usize::from(regs::INTERRUPT_PIN)) else { return };
    // Who may read no more than the header knows of no capabilities.
    if config.len() < pci::config::CONFIG_SIZE {
        return;
    }
    let Some(line) = files::read_trimmed(&case.host.pci_device(function.address).join("irq")) else { return };
    let path = case.host.proc.join("interrupts");
    let interrupts = files::read(&path).ok().flatten().unwrap_or_default();
    let row = interrupts.lines().find_map(|row| row.trim_start().strip_prefix(&line)?.strip_prefix(':'));
    // Linux serves level-triggered pins of I/O APICs so.
    let Some((_, handlers)) = row.and_then(|row| row.split_once("-fasteoi")) else { return };
    let handlers: Vec<_> = handlers.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let own = usize::from(function.driver.is_some());
    if handlers.len() <= own {
        return;
    }
    let physical = match case.seat() {
        Seat::BuiltIn => "pass another device",
        Seat::Slot => "put the card into another slot, whose line no other device of the host has",
        Seat::Enclosure => {
            "connect the enclosure to another port of the host, whose line no other device has"
        }
    };
    let elsewhere =
        case.remedy(physical, "put it into another slot of the virtual machine that this host is");
    let fix = format!(
        "nothing, if the device can mask its interrupt pin (PCI 2.3), which nearly all can; VFIO gives no INTx of one that can't: \
         {elsewhere}"
    );
    case.add(
        BlockerCode::LegacyInterrupt,
        Severity::Warning,
        function.address,
        format!("{} has {} on line {line}, which INTx leads to", path.display(), handlers.join(", ")),
        fix,
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
    if super::guest::places(case, function.address, first.index) {
        return;
    }
    let path = case.host.pci_device(function.address).join("resource");
    case.blocker(
        BlockerCode::PortIo,
        format!("BAR {} in {} is port I/O, and {why}", first.index, path.display()),
        "pass fewer devices with I/O BARs: each slot of the guest takes 4096 ports, of which there are 61440; to a guest that \
         runs, have it start with the device",
    );
}
