//! Why Linux uses no IOMMU, from the kernel command line and the firmware's ACPI tables.

use super::Case;
use super::acpi::{Dmar, Iort, Ivrs};
use super::facts::CpuVendor;
use crate::files;

/// What shows why Linux uses no IOMMU, and the fix, on a physical host.
pub(super) fn missing(case: &Case<'_>) -> (String, String) {
    let path = case.host.proc.join("cmdline");
    let cmdline = files::read_trimmed(&path).unwrap_or_default();
    let words: Vec<&str> = cmdline.split_ascii_whitespace().collect();
    let tables = case.host.sys.join("firmware/acpi/tables");
    let (table, name, switch) = match case.facts.vendor {
        CpuVendor::Intel => ("DMAR", "VT-d", "intel_iommu"),
        CpuVendor::Amd => ("IVRS", "AMD-Vi", "amd_iommu"),
        CpuVendor::Arm => ("IORT", "the SMMU", ""),
        CpuVendor::Other => ("", "the IOMMU", ""),
    };
    let path_of_table = tables.join(table);
    let has_table = !table.is_empty() && path_of_table.exists();
    let path_of_table = path_of_table.display();
    let mut shown = Vec::new();
    let mut fixes = Vec::new();
    // Whether the table shows that the firmware needs no change.
    let mut is_described = has_table;
    let mut arm_driver = "CONFIG_ARM_SMMU_V3 or CONFIG_ARM_SMMU";
    match (case.facts.vendor, has_table) {
        (CpuVendor::Other, _) => {}
        (_, false) => shown.push(format!("there is no {path_of_table}")),
        (CpuVendor::Intel, true) => shown.push(match Dmar::read(case.host) {
            Some(dmar) => format!("the firmware has VT-d on ({path_of_table}, flags: {})", dmar.names()),
            None => format!("the firmware has VT-d on ({path_of_table})"),
        }),
        (CpuVendor::Amd, true) if Ivrs::read(case.host).is_some_and(|ivrs| ivrs.units == 0) => {
            shown.push(format!("{path_of_table} describes no IOMMU"));
            is_described = false;
        }
        (CpuVendor::Amd, true) => shown.push(format!("the firmware has {name} on ({path_of_table})")),
        (CpuVendor::Arm, true) => match Iort::read(case.host) {
            Some(iort) if iort.smmus == (false, false) => {
                shown.push(format!("{path_of_table} describes no SMMU"));
                is_described = false;
            }
            Some(iort) => {
                let (text, smmu) = root_complex(case, &iort);
                shown.push(text);
                match smmu {
                    Some(3) => arm_driver = "CONFIG_ARM_SMMU_V3",
                    Some(_) => arm_driver = "CONFIG_ARM_SMMU",
                    None => fixes.push(UNCONNECTED.to_owned()),
                }
            }
            None => shown.push(format!("the firmware has {name} on ({path_of_table})")),
        },
    }
    let options: Vec<&str> =
        words.iter().copied().filter(|word| word.to_lowercase().contains("iommu")).collect();
    if !words.is_empty() {
        shown.push(match &options[..] {
            [] => format!("{} has no IOMMU option", path.display()),
            _ => format!("{} has {}", path.display(), options.join(" ")),
        });
    }
    let firmware = match case.facts.vendor {
        CpuVendor::Intel => "enable VT-d in the firmware setup",
        CpuVendor::Amd => "enable the IOMMU (AMD-Vi) in the firmware setup",
        CpuVendor::Arm => "enable the SMMU in the firmware setup, if the processor has one for PCI Express",
        CpuVendor::Other => "enable the IOMMU in the firmware setup",
    };
    if !is_described {
        fixes.push(firmware.to_owned());
    }
    let is_x86 = matches!(case.facts.vendor, CpuVendor::Intel | CpuVendor::Amd);
    let mut corrected = false;
    for word in &options {
        if let Some(fix) = correction(word, case.facts.vendor, switch) {
            corrected = true;
            fixes.push(fix);
        }
    }
    let is_on = enabled(&options, switch);
    if case.facts.vendor == CpuVendor::Intel && is_on != Some(true) && !corrected {
        let others = options.iter().find_map(|word| {
            let (key, values) = word.split_once('=')?;
            (key.replace('-', "_") == switch && !values.is_empty()).then_some(values)
        });
        fixes.push(match others {
            Some(values) => {
                format!("boot Linux with intel_iommu=on,{values} ({values} does not enable the IOMMU)")
            }
            None => "boot Linux with intel_iommu=on (iommu=pt alone does not enable the IOMMU)".into(),
        });
    }
    if fixes.is_empty() {
        fixes.push(match case.facts.vendor {
            CpuVendor::Intel => "look for lines with DMAR: in dmesg; Linux needs CONFIG_INTEL_IOMMU".into(),
            CpuVendor::Amd => "look for lines with AMD-Vi: in dmesg; Linux needs CONFIG_AMD_IOMMU".into(),
            _ => format!("look for lines with smmu in dmesg; Linux needs {arm_driver}"),
        });
    } else if !is_x86 && !is_described {
        fixes.push("use a Linux kernel with a driver for it (CONFIG_ARM_SMMU_V3)".into());
    }
    if is_described && is_x86 {
        fixes.push("the firmware setup needs no change".into());
    }
    (shown.join(", "), fixes.join("; "))
}

const UNCONNECTED: &str =
    "update the firmware, or use another slot: the table (IORT) has to connect the segment to an SMMU";

/// How the IORT connects the function's root complex to an SMMU, and the version of that SMMU.
fn root_complex(case: &Case<'_>, iort: &Iort) -> (String, Option<u8>) {
    let path = case.host.sys.join("firmware/acpi/tables/IORT");
    let segment = case.function.address.domain();
    let Some(root) = iort.root(segment) else {
        return (format!("{} has no root complex of PCI segment {segment:04x}", path.display()), None);
    };
    let ats = if root.ats { "supports" } else { "does not support" };
    let text = match root.smmu {
        Some(version) => {
            let version = if version == 3 { "SMMUv3" } else { "SMMU of version 1 or 2" };
            format!("{} connects PCI segment {segment:04x} to an {version}", path.display())
        }
        None => format!("{} connects PCI segment {segment:04x} to no SMMU", path.display()),
    };
    (format!("{text}; its root complex {ats} ATS"), root.smmu)
}

/// As [`root_complex`], of a function without a group on a host that uses an SMMU; with a fix if the IORT shows one.
pub(super) fn unserved(case: &Case<'_>) -> Option<(String, Option<&'static str>)> {
    let (text, smmu) = root_complex(case, &Iort::read(case.host)?);
    Some((text, smmu.is_none().then_some(UNCONNECTED)))
}

/// Why interrupts are not remapped, and the fix, on a physical host.
pub(super) fn unremapped(case: &Case<'_>) -> (String, String) {
    let path = case.host.proc.join("cmdline");
    let cmdline = files::read_trimmed(&path).unwrap_or_default();
    let off = cmdline.split_ascii_whitespace().rev().find(|word| {
        let (key, values) = word.split_once('=').unwrap_or((word, ""));
        key == "nointremap" || key == "intremap" && values.split(',').any(|value| value == "off")
    });
    let table = |name: &str| case.host.sys.join("firmware/acpi/tables").join(name).display().to_string();
    let (mut shown, mut fixes) = (Vec::new(), Vec::new());
    if let Some(off) = off {
        shown.push(format!("{} has {off}", path.display()));
        fixes.push(format!("remove {off} from the kernel command line"));
    }
    match case.facts.vendor {
        CpuVendor::Intel => match Dmar::read(case.host) {
            Some(dmar) => {
                let mut text = format!("flags of {}: {}", table("DMAR"), dmar.names());
                if dmar.opts_out_of_x2apic() {
                    text += " (X2APIC_OPT_OUT leaves remapping on)";
                }
                shown.push(text);
                match (dmar.remaps_interrupts(), off) {
                    (false, _) => fixes.push(
                        "enable VT-d interrupt remapping (or x2APIC) in the firmware setup, or update the firmware".into(),
                    ),
                    (true, Some(_)) => fixes.push("the firmware setup needs no change".into()),
                    (true, None) => {
                        fixes.push("look for lines with DMAR-IR: in dmesg; Linux needs CONFIG_IRQ_REMAP".into());
                    }
                }
            }
            None if off.is_none() => fixes.push(
                "enable VT-d interrupt remapping in the firmware setup and boot without intremap=off".into(),
            ),
            None => {}
        },
        CpuVendor::Amd => match Ivrs::read(case.host) {
            Some(ivrs) if ivrs.units != 0 && ivrs.io_apics == 0 => {
                shown
                    .push(format!("{} names no I/O APIC, without which Linux remaps nothing", table("IVRS")));
                fixes.push(
                    "update the firmware, or name the I/O APIC on the kernel command line (ivrs_ioapic[ID]=BUS:DEVICE.FUNCTION, \
                     by the lines with AMD-Vi: in dmesg)"
                        .into(),
                );
            }
            Some(ivrs) if ivrs.units != 0 => fixes.push(match off {
                Some(_) => "the firmware setup needs no change".into(),
                None => "look for lines with AMD-Vi: in dmesg; Linux needs CONFIG_IRQ_REMAP".into(),
            }),
            _ if off.is_none() => {
                fixes.push(
                    "enable interrupt remapping in the firmware setup and boot without intremap=off".into(),
                );
            }
            _ => {}
        },
        _ => {
            fixes.clear();
            shown.clear();
            if Iort::read(case.host).is_some_and(|iort| !iort.has_its) {
                shown.push(format!("{} has no interrupt translation service (ITS)", table("IORT")));
            }
            fixes.push(
                "use a host whose interrupt controller isolates message-signaled interrupts (GICv3 with ITS)"
                    .into(),
            );
        }
    }
    (shown.join(", "), fixes.join("; "))
}

/// Returns the fix that lets the IOMMU protect the host from devices behind USB4.
pub(super) fn protect_tunnels(case: &Case<'_>) -> &'static str {
    const FIRMWARE: &str = "turn on Kernel DMA Protection (pre-boot DMA protection) in the firmware setup: VT-d or AMD-Vi is on, \
                            but the firmware does not ask Linux to use it";
    const LINUX: &str = "remove what disables the IOMMU from the kernel command line (intel_iommu=off, amd_iommu=off, \
                         iommu=off): the firmware asks Linux to use it";
    let blocks = match case.facts.vendor {
        CpuVendor::Intel => Dmar::read(case.host).map(Dmar::blocks_dma_at_boot),
        CpuVendor::Amd => Ivrs::read(case.host).map(|ivrs| ivrs.blocks_dma_at_boot),
        _ => None,
    };
    match blocks {
        Some(true) => LINUX,
        Some(false) => FIRMWARE,
        None => {
            "turn on the IOMMU in the firmware setup (there \"VT-d\", \"AMD-Vi\" or \"Kernel DMA Protection\")"
        }
    }
}

/// Whether the option `switch` enables the IOMMU; its last value counts. Linux takes a hyphen in a name for an underscore
/// (`parameq` in `kernel/params.c`).
fn enabled(options: &[&str], switch: &str) -> Option<bool> {
    let values = options
        .iter()
        .filter_map(|word| word.split_once('='))
        .filter(|(key, _)| key.replace('-', "_") == switch);
    let mut values = values.flat_map(|(_, values)| values.split(','));
    values.rfind(|value| matches!(*value, "on" | "off")).map(|value| value == "on")
}

/// How to correct an option that disables the IOMMU or that Linux does not take for what it is meant to be.
fn correction(word: &str, vendor: CpuVendor, switch: &str) -> Option<String> {
    let (key, values) = word.split_once('=').unwrap_or((word, ""));
    let name = key.replace('-', "_");
    let has = |value: &str| values.split(',').any(|known| known == value);
    let is_x86 = !switch.is_empty();
    match name.as_str() {
        // Arm's Linux has none of these.
        "intel_iommu" | "amd_iommu" | "iommu" if !is_x86 => {
            Some(format!("remove {word} from the kernel command line: only x86 has it"))
        }
        // An embedded option begins after the comma, where Linux takes it for a value of the first.
        "intel_iommu" | "amd_iommu" | "iommu" if values.contains('=') => {
            let (first, second) = values.split_once(',').unwrap_or((values, ""));
            Some(format!("write {name}={first} {second} with a space on the kernel command line, not {word}"))
        }
        "iommu" if has("off") => {
            Some(format!("remove {word} from the kernel command line: it disables the IOMMU"))
        }
        "intel_iommu" | "amd_iommu" if name != switch => match vendor {
            CpuVendor::Intel => Some(format!("replace {word} by intel_iommu=on: the processor is Intel's")),
            // AMD's is enabled without an option.
            _ => Some(format!("remove {word} from the kernel command line: the processor is AMD's")),
        },
        "intel_iommu" if has("off") && !has("on") => Some(format!("replace {word} by intel_iommu=on")),
        "amd_iommu" if has("off") => {
            Some(format!("remove {word} from the kernel command line: it disables the IOMMU"))
        }
        // `intel_iommu_setup` in `drivers/iommu/intel/iommu.c`.
        "intel_iommu"
            if ![
                "on",
                "off",
                "igfx_off",
                "forcedac",
                "strict",
                "sp_off",
                "sm_on",
                "sm_off",
                "tboot_noforce",
            ]
            .iter()
            .any(|known| has(known)) =>
        {
            Some(format!("replace {word} by intel_iommu=on: Linux knows no such value"))
        }
        "intel_iommu" | "amd_iommu" | "iommu" => None,
        // Options of modules and of the core have a dot.
        _ if name.contains('.') => None,
        _ if vendor == CpuVendor::Intel => {
            Some(format!("replace {word} by intel_iommu=on: Linux knows no option {key}"))
        }
        _ => Some(format!("remove {word}: Linux knows no option {key}")),
    }
}
