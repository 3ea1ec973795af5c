//! Why Linux uses no IOMMU, from the kernel command line and the firmware's ACPI tables.

use super::Case;
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
    let has_table = !table.is_empty() && tables.join(table).exists();
    let mut shown = vec![match (table, has_table) {
        ("", _) => String::new(),
        (_, true) => format!("the firmware has {name} on ({})", tables.join(table).display()),
        (_, false) => format!("there is no {}", tables.join(table).display()),
    }];
    let options: Vec<&str> =
        words.iter().copied().filter(|word| word.to_lowercase().contains("iommu")).collect();
    if !words.is_empty() {
        shown.push(match &options[..] {
            [] => format!("{} has no IOMMU option", path.display()),
            _ => format!("{} has {}", path.display(), options.join(" ")),
        });
    }
    shown.retain(|text| !text.is_empty());
    let mut fixes = Vec::new();
    let firmware = match case.facts.vendor {
        CpuVendor::Intel => "enable VT-d in the firmware setup",
        CpuVendor::Amd => "enable the IOMMU (AMD-Vi) in the firmware setup",
        CpuVendor::Arm => "enable the SMMU in the firmware setup, if the processor has one for PCI Express",
        CpuVendor::Other => "enable the IOMMU in the firmware setup",
    };
    if !has_table {
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
        fixes.push("boot Linux with intel_iommu=on (iommu=pt alone does not enable the IOMMU)".into());
    }
    if fixes.is_empty() {
        fixes.push(match case.facts.vendor {
            CpuVendor::Intel => "look for lines with DMAR: in dmesg; Linux needs CONFIG_INTEL_IOMMU".into(),
            CpuVendor::Amd => "look for lines with AMD-Vi: in dmesg; Linux needs CONFIG_AMD_IOMMU".into(),
            _ => {
                "look for lines with smmu in dmesg; Linux needs CONFIG_ARM_SMMU_V3 or CONFIG_ARM_SMMU".into()
            }
        });
    } else if !is_x86 && !has_table {
        fixes.push("use a Linux kernel with a driver for it (CONFIG_ARM_SMMU_V3)".into());
    }
    if has_table && is_x86 {
        fixes.push("the firmware setup needs no change".into());
    }
    (shown.join(", "), fixes.join("; "))
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
        "intel_iommu" if !["on", "off", "igfx_off", "sm_on", "sp_off"].iter().any(|known| has(known)) => {
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
