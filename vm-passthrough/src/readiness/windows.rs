//! BARs without an address: which port above the function lacks the window, and how to get one.

use super::facts::{CpuVendor, HostFacts};
use super::size_text;
use crate::pci::{self, Bar, BarKind};
use crate::{Host, PciAddress, files, usb4};

/// More ports than any path from a function to its root bus has.
const MAX_DEPTH: usize = 256;

/// Memory BARs of a function to which Linux gave no address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnassignedBars {
    /// The BARs, their sizes, and the ports without a window for them.
    pub evidence: String,
    /// The fix.
    pub fix: String,
}

/// The memory BARs of a function that have no address; `None` when all have one.
pub fn unassigned_bars(host: &Host, function: PciAddress) -> Option<UnassignedBars> {
    let bars = pci::bars(host, function);
    if !bars.iter().any(is_unassigned) {
        return None;
    }
    let UnassignedBars { evidence, fix } = judge(host, &HostFacts::read(host), function, &bars)?;
    Some(UnassignedBars { evidence: host.with_host_paths(evidence), fix: host.with_host_paths(fix) })
}

fn is_unassigned(bar: &Bar) -> bool {
    bar.size > 0 && bar.address == 0 && bar.kind != BarKind::Io
}

/// Whether a bridge forwards a BAR through its prefetchable window.
fn is_prefetchable(bar: &Bar) -> bool {
    bar.prefetchable && bar.kind == BarKind::Memory64
}

/// As [`unassigned_bars`], for a function that was read before.
pub(super) fn judge(
    host: &Host,
    facts: &HostFacts,
    function: PciAddress,
    bars: &[Bar],
) -> Option<UnassignedBars> {
    let missing: Vec<_> = bars.iter().filter(|bar| is_unassigned(bar)).collect();
    if missing.is_empty() {
        return None;
    }
    let names: Vec<_> =
        missing.iter().map(|bar| format!("BAR {} ({})", bar.index, size_text(bar.size))).collect();
    let mut evidence = format!(
        "{} gives no address to {}",
        host.pci_device(function).join("resource").display(),
        names.join(", ")
    );
    let ports = ports_above(host, function);
    let mut needs = [0u64; 2];
    let mut is_short = false;
    for prefetchable in [false, true] {
        let of_window = |bar: &&Bar| is_prefetchable(bar) == prefetchable;
        let need = missing.iter().copied().filter(of_window).map(|bar| bar.size).fold(0, u64::saturating_add);
        needs[usize::from(prefetchable)] = need;
        if need == 0 {
            continue;
        }
        let all = bars.iter().filter(of_window).map(|bar| bar.size).fold(0, u64::saturating_add);
        let window = if prefetchable { "prefetchable" } else { "non-prefetchable" };
        let short = ports.iter().filter_map(|&port| {
            let size = pci::bridge_windows(host, port)?[usize::from(prefetchable)];
            (size < all).then_some((port, size))
        });
        let short: Vec<_> = short.collect();
        let Some((port, size)) = short.first() else { continue };
        is_short = true;
        let has = match size {
            0 => format!("has no {window} window"),
            size => format!("has a {window} window of {}", size_text(*size)),
        };
        evidence += &format!(
            "; port {port} above it {has}, and its {window} BARs need {}, by {}",
            size_text(all),
            host.pci_device(*port).join("resource").display()
        );
        if let [_, above @ ..] = &short[..]
            && !above.is_empty()
        {
            let above: Vec<_> = above.iter().map(|(port, _)| port.to_string()).collect();
            evidence += &format!(" ({} above it also {} too little)", above.join(", "), has_or_have(&above));
        }
    }
    let options = PciOptions::read(host);
    if !options.0.is_empty() {
        evidence += &format!("; {} has pci={}", host.proc.join("cmdline").display(), options.0.join(","));
    }
    let is_tunnelled =
        pci::read_function(host, function).is_ok_and(|function| usb4::may_be_tunnelled(host, &function));
    let fix = if is_tunnelled { tunnel_fix(&options, needs, is_short) } else { slot_fix(&options, facts) };
    Some(UnassignedBars { evidence, fix })
}

fn has_or_have(ports: &[String]) -> &'static str {
    if ports.len() == 1 { "has" } else { "have" }
}

/// The ports from the function up to its root bus, nearest first.
fn ports_above(host: &Host, function: PciAddress) -> Vec<PciAddress> {
    let above = |address: &PciAddress| pci::read_attributes(host, *address).ok()?.upstream;
    std::iter::successors(above(&function), above).take(MAX_DEPTH).collect()
}

/// How to get windows for a function behind a tunnel: the firmware reserves them for each port of the host, or Linux does.
fn tunnel_fix(options: &PciOptions, needs: [u64; 2], is_short: bool) -> String {
    const MIB: u64 = 1 << 20;
    let mut wanted = Vec::new();
    if !options.reallocates() {
        wanted.push("realloc".to_owned());
    }
    for (need, name) in needs.into_iter().zip(["hpmmiosize", "hpmmioprefsize"]) {
        let size = need.max(MIB).checked_next_power_of_two().unwrap_or(need);
        if need > 0 && options.size(name) < size {
            wanted.push(format!("{name}={}M", size / MIB));
        }
    }
    let firmware = match is_short {
        true => {
            "connect the enclosure to another port of the host: the firmware reserves too little memory for this one; or \
             update the firmware, or have its setup reserve memory for Thunderbolt or USB4, where it offers that"
        }
        false => "connect the enclosure before the host boots, or to another port of the host",
    };
    match wanted[..] {
        [] => firmware.into(),
        _ => format!("{firmware}; or boot Linux with pci={}", wanted.join(",")),
    }
}

/// How to get windows for a function in a slot.
fn slot_fix(options: &PciOptions, facts: &HostFacts) -> String {
    let firmware = match facts.vendor {
        _ if facts.is_virtual => {
            "reserve more for its port in the virtual machine that this host is (QEMU: pref64-reserve=SIZE of \
             pcie-root-port)"
        }
        CpuVendor::Intel | CpuVendor::Amd => {
            "enable \"Above 4G Decoding\" (and Resizable BAR) in the firmware setup"
        }
        CpuVendor::Arm | CpuVendor::Other => {
            "update the firmware, or use a slot whose host bridge has more memory for PCI (ranges of the device tree, or _CRS in \
             ACPI)"
        }
    };
    if options.reallocates() {
        firmware.into()
    } else {
        format!("{firmware}, or boot Linux with pci=realloc")
    }
}

/// The values of `pci=` on the kernel command line (Linux `Documentation/admin-guide/kernel-parameters.txt`).
struct PciOptions(Vec<String>);

impl PciOptions {
    fn read(host: &Host) -> Self {
        let cmdline = files::read_trimmed(&host.proc.join("cmdline")).unwrap_or_default();
        let values = cmdline.split_ascii_whitespace().filter_map(|word| word.strip_prefix("pci="));
        Self(values.flat_map(|values| values.split(',')).map(str::to_owned).collect())
    }

    /// Whether they have Linux assign windows and BARs again.
    fn reallocates(&self) -> bool {
        self.0.iter().any(|value| matches!(value.as_str(), "realloc" | "realloc=on"))
    }

    /// The bytes that an option asks for, 0 without it.
    fn size(&self, name: &str) -> u64 {
        let text = self.0.iter().rev().find_map(|value| value.strip_prefix(name)?.strip_prefix('='));
        let Some(text) = text else { return 0 };
        let digits = text.trim_end_matches(|unit: char| unit.is_ascii_alphabetic());
        let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
            "K" => 10,
            "M" => 20,
            "G" => 30,
            _ => 0,
        };
        digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift)).unwrap_or(0)
    }
}
