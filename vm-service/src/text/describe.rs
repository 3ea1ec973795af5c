//! How values of the model read in the text that a person gets.

use vm_passthrough::PciAddress;
use vm_passthrough::gpu::ChipReport;
use vm_passthrough::pci::{
    Bar, BarKind, DeviceType, Link, PartKind, PciFunction, PowerState, ResetMethod, Sriov,
};
use vm_passthrough::readiness::Readiness;
use vm_passthrough::telemetry::GpuLink;
use vm_passthrough::usb4::{Lanes, LinkRates, Rate};

use crate::api::{DeviceErrors, DeviceHealth, DeviceInterrupts, ErrorCount, GpuProcess, LinkHealth, Usage};
use crate::config::format_size;
use crate::devices::gpus::Gpu;

/// That a function is not there.
pub(crate) fn not_there(address: PciAddress) -> String {
    format!(
        "there is no PCI function {address} on this host; `vm-service list --all` shows those that there are"
    )
}

/// Why functions are not passed to a guest: every blocker, as `explain` reports it.
pub(crate) fn blocked<'a>(blocked: impl IntoIterator<Item = &'a Readiness>) -> String {
    let reports: Vec<_> = blocked.into_iter().map(ToString::to_string).collect();
    format!("nothing was touched, because of what stands in the way:\n{}", reports.join("\n"))
}

/// What a function is, in a word or by the name of its class.
pub(crate) fn device_type(function: &PciFunction) -> &'static str {
    match function.device_type {
        DeviceType::GpuNvidia => "GPU NVIDIA",
        DeviceType::GpuAmd => "GPU AMD",
        DeviceType::GpuIntel => "GPU Intel",
        DeviceType::Npu => "NPU",
        DeviceType::Accelerator => "accelerator",
        DeviceType::Nvme => "NVMe",
        DeviceType::Network => "network",
        DeviceType::Bridge => "bridge",
        _ => function.class_name().unwrap_or("other"),
    }
}

/// Whether a function is what accelerators are: a GPU, an NPU or another processing accelerator.
pub(crate) fn is_accelerator(kind: DeviceType) -> bool {
    matches!(
        kind,
        DeviceType::GpuNvidia
            | DeviceType::GpuAmd
            | DeviceType::GpuIntel
            | DeviceType::Npu
            | DeviceType::Accelerator
    )
}

/// Vendor and device by name, and by number where the PCI ID database knows no name.
pub(crate) fn name(function: &PciFunction) -> String {
    let vendor =
        function.vendor_name().map_or_else(|| format!("vendor {:04x}", function.ids.vendor), str::to_owned);
    let device =
        function.device_name().map_or_else(|| format!("device {:04x}", function.ids.device), str::to_owned);
    format!("{vendor} {device}")
}

/// Vendor and device by their numbers.
pub(crate) fn id(function: &PciFunction) -> String {
    format!("{:04x}:{:04x}", function.ids.vendor, function.ids.device)
}

/// Which chip a GPU is, and how that is known.
pub(crate) fn chip(report: &ChipReport) -> String {
    match (&report.chip, report.named) {
        // Names of the database have letters behind them, as in GA102GL.
        (Ok(chip), Some(named)) if !named.starts_with(chip.name) => {
            format!("{chip}, by its registers; {named}, by the PCI ID database")
        }
        (Ok(chip), _) => format!("{chip}, by its registers"),
        (Err(why), Some(named)) => format!("{named}, by the PCI ID database; {why}"),
        (Err(why), None) => format!("not known: {why}"),
    }
}

/// A speed of a link in gigatransfers per second.
fn speed(megatransfers: u32) -> String {
    format!("{} GT/s", f64::from(megatransfers) / 1000.0)
}

/// A link as it is now: `16 GT/s x8`.
pub(crate) fn link(link: Link) -> String {
    if link.speed == 0 || link.width == 0 {
        return "down".into();
    }
    format!("{} x{}", speed(link.speed), link.width)
}

/// A link as it is now, and what the function could do where that is more.
pub(crate) fn link_in_full(now: Link) -> String {
    if now.speed < now.max_speed || now.width < now.max_width {
        return format!("{}, of {} x{}", link(now), speed(now.max_speed), now.max_width);
    }
    link(now)
}

/// Errors of PCI Express by their severity.
pub(crate) fn errors(errors: &DeviceErrors) -> String {
    let severity = |count: &ErrorCount, name: &str| {
        let kinds: Vec<_> = count.kinds.iter().map(|kind| format!("{} {}", kind.name, kind.count)).collect();
        let kinds = if kinds.is_empty() { String::new() } else { format!(" ({})", kinds.join(", ")) };
        format!("{} {name}{kinds}", count.total)
    };
    let DeviceErrors { correctable, nonfatal, fatal } = errors;
    [severity(correctable, "correctable"), severity(nonfatal, "nonfatal"), severity(fatal, "fatal")]
        .join(", ")
}

/// Interrupts that the host has handled.
pub(crate) fn interrupts(interrupts: &DeviceInterrupts) -> String {
    let vectors = if interrupts.vectors == 1 { "vector" } else { "vectors" };
    let rate = interrupts.per_second.map_or_else(String::new, |rate| format!(", {rate} a second"));
    format!("{} on {} {vectors}{rate}", interrupts.total, interrupts.vectors)
}

/// The state of a device in a line.
pub(crate) fn health(health: &DeviceHealth) -> String {
    let link = health.link.map(|now| {
        let LinkHealth { speed, width, possible_speed, possible_width } = now;
        let now = Link { speed, width, max_speed: possible_speed, max_width: possible_width };
        format!("link {}", link_in_full(now))
    });
    let power = Some(power_state(health.power_state).to_owned());
    let interrupts = health.interrupts.map(|own| format!("interrupts {}", interrupts(&own)));
    let errors = health.errors.as_ref().map(|own| format!("errors {}", errors(own)));
    [power, link, interrupts, errors]
        .into_iter()
        .flatten()
        .chain(health.unread.clone())
        .collect::<Vec<_>>()
        .join("; ")
}

/// What a part of a device is.
pub(crate) fn part_kind(kind: PartKind) -> &'static str {
    match kind {
        PartKind::Mdev => "mediated device",
        PartKind::Vgpu => "vGPU",
        PartKind::Mig => "MIG instance",
        _ => "part",
    }
}

/// A power state by its name in the specification.
pub(crate) fn power_state(state: PowerState) -> &'static str {
    state.into()
}

/// A reset by its name in sysfs.
pub(crate) fn reset_method(method: ResetMethod) -> &'static str {
    method.into()
}

/// The SR-IOV side of a function.
pub(crate) fn sriov(sriov: Sriov) -> String {
    match sriov {
        Sriov::Physical { total_vfs, num_vfs } => {
            format!("{num_vfs} of {total_vfs} virtual functions enabled")
        }
        Sriov::Virtual { physical } => format!("virtual function of {physical}"),
    }
}

/// A size in bytes with its unit.
pub(crate) fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1024) { format_size(bytes) } else { format!("{bytes} bytes") }
}

/// A time of this length as one number with its unit: `42s`, `5m`, `3h`, `12d`.
pub(crate) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// What uses a GPU; the processes are not in it.
pub(crate) fn usage(usage: &Usage) -> String {
    if let Some(why) = &usage.unknown {
        return format!("unknown: {why}");
    }
    let memory = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let parts = [
        usage.busy_percent.map(|busy| format!("{busy} % busy")),
        usage
            .memory_used_bytes
            .zip(usage.memory_bytes)
            .map(|(used, of)| format!("{:.1} of {:.1} GiB", memory(used), memory(of))),
        usage.temperature_celsius.map(|degrees| format!("{degrees} °C")),
        usage.power_watts.map(|watts| format!("{watts:.0} W")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// The rates of a router's link: one number where both directions have it.
pub(crate) fn link_rates(rates: LinkRates) -> String {
    each_way(rates, |lanes| Rate(lanes.rate()).to_string())
}

/// As [`link_rates`], with the lanes of each direction.
pub(crate) fn link_lanes(rates: LinkRates) -> String {
    each_way(rates, |lanes| format!("{} ({} x {})", Rate(lanes.rate()), lanes.count, Rate(lanes.speed)))
}

fn each_way(rates: LinkRates, text: impl Fn(Lanes) -> String) -> String {
    let (receive, transmit) = (text(rates.receive), text(rates.transmit));
    match receive == transmit {
        true => receive,
        false => format!("{receive} to the host, {transmit} from it"),
    }
}

/// A GPU's link to the host, which may be a tunnel's.
pub(crate) fn gpu_link(link: GpuLink) -> String {
    match link {
        GpuLink::Pcie(link) => self::link_in_full(link),
        GpuLink::Tunnel { .. } if link.is_down() => "tunnel, down".into(),
        GpuLink::Tunnel { rates: Some(rates), .. } => format!("tunnel, {}", link_rates(rates)),
        GpuLink::Tunnel { .. } => "tunnel".into(),
    }
}

/// A number, and the limit that it has: `87 of 303 W`.
pub(crate) fn of_limit(now: f64, limit: Option<f64>, unit: &str) -> String {
    match limit {
        Some(limit) => format!("{now:.0} of {limit:.0} {unit}"),
        None => format!("{now:.0} {unit}"),
    }
}

/// Who has a GPU: its guest, or its driver.
pub(crate) fn holder(gpu: &Gpu) -> String {
    match (&gpu.guest, &gpu.function.driver) {
        (Some(guest), _) => format!("guest {guest}"),
        (None, Some(driver)) => driver.clone(),
        (None, None) => "-".into(),
    }
}

/// A process that uses a GPU.
pub(crate) fn gpu_process(process: &GpuProcess) -> String {
    let memory = process.memory_bytes.map(|bytes| format!(", {:.1} GiB", bytes as f64 / f64::from(1 << 30)));
    format!("{} ({}){}", process.pid, process.command.as_deref().unwrap_or("?"), memory.unwrap_or_default())
}

/// A BAR without its index.
pub(crate) fn bar(bar: &Bar) -> String {
    let kind = match bar.kind {
        BarKind::Io => "I/O ports",
        BarKind::Memory32 => "32-bit memory",
        BarKind::Memory64 => "64-bit memory",
    };
    let prefetchable = if bar.prefetchable { ", prefetchable" } else { "" };
    let address = if bar.address == 0 { "no address".into() } else { format!("at {:#x}", bar.address) };
    format!("{} {kind}{prefetchable}, {address}", size(bar.size))
}

/// A capability by its name in the PCI Local Bus and PCI Express specifications.
pub(crate) fn capability(id: u8) -> &'static str {
    match id {
        0x01 => "Power Management",
        0x02 => "AGP",
        0x03 => "Vital Product Data",
        0x04 => "Slot Identification",
        0x05 => "MSI",
        0x06 => "CompactPCI Hot Swap",
        0x07 => "PCI-X",
        0x08 => "HyperTransport",
        0x09 => "Vendor Specific",
        0x0a => "Debug Port",
        0x0b => "CompactPCI Resource Control",
        0x0c => "Hot-Plug",
        0x0d => "Subsystem ID",
        0x0e => "AGP 8x",
        0x0f => "Secure Device",
        0x10 => "PCI Express",
        0x11 => "MSI-X",
        0x12 => "SATA Configuration",
        0x13 => "Advanced Features",
        0x14 => "Enhanced Allocation",
        0x15 => "Flattening Portal Bridge",
        _ => "unknown",
    }
}

/// An extended capability by its name in the PCI Express specification.
pub(crate) fn extended_capability(id: u16) -> &'static str {
    match id {
        0x0001 => "Advanced Error Reporting",
        0x0002 | 0x0009 => "Virtual Channel",
        0x0003 => "Device Serial Number",
        0x0004 => "Power Budgeting",
        0x0005 => "Root Complex Link Declaration",
        0x0006 => "Root Complex Internal Link Control",
        0x0007 => "Root Complex Event Collector",
        0x0008 => "Multi-Function Virtual Channel",
        0x000a => "Root Complex Register Block",
        0x000b => "Vendor Specific",
        0x000d => "Access Control Services",
        0x000e => "Alternative Routing-ID Interpretation",
        0x000f => "Address Translation Services",
        0x0010 => "SR-IOV",
        0x0012 => "Multicast",
        0x0013 => "Page Request Interface",
        0x0015 => "Resizable BAR",
        0x0016 => "Dynamic Power Allocation",
        0x0017 => "TPH Requester",
        0x0018 => "Latency Tolerance Reporting",
        0x0019 => "Secondary PCI Express",
        0x001b => "Process Address Space ID",
        0x001d => "Downstream Port Containment",
        0x001e => "L1 PM Substates",
        0x001f => "Precision Time Measurement",
        0x0023 => "Designated Vendor Specific",
        0x0024 => "VF Resizable BAR",
        0x0025 => "Data Link Feature",
        0x0026 => "16.0 GT/s Physical Layer",
        0x0027 => "Lane Margining",
        0x002a => "32.0 GT/s Physical Layer",
        0x002e => "Data Object Exchange",
        _ => "unknown",
    }
}
