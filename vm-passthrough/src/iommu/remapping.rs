//! Whether interrupts are remapped, so that a function can't raise any that was not given to it.

use crate::{Host, files};

/// What is known of interrupt remapping, and from where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterruptRemapping {
    /// Interrupts are remapped.
    On,
    /// They are not: a function can forge any interrupt.
    Off {
        /// What shows it.
        evidence: String,
    },
    /// Nothing that can be read tells.
    Unknown,
}

/// Reads what there is on interrupt remapping: the names of the interrupt chips, and what VT-d units can do.
pub fn interrupt_remapping(host: &Host) -> InterruptRemapping {
    let path = host.proc.join("interrupts");
    let interrupts = files::read(&path).ok().flatten().unwrap_or_default();
    // Linux prefixes the chips of remapped interrupts with `IR-`, for VT-d and for AMD.
    if interrupts.split_ascii_whitespace().any(|word| word.starts_with("IR-")) {
        return InterruptRemapping::On;
    }
    let units = host.sys.join("class/iommu");
    for name in files::names(&units).unwrap_or_default() {
        let register = units.join(&name).join("intel-iommu/ecap");
        let value = files::read_trimmed(&register).and_then(|text| u64::from_str_radix(&text, 16).ok());
        // VT-d 4.1, 11.4.3: bit 3, interrupt remapping support.
        if value.is_some_and(|value| value & 0x8 == 0) {
            let evidence =
                format!("the IOMMU {name} can't remap interrupts (bit 3 of {})", register.display());
            return InterruptRemapping::Off { evidence };
        }
    }
    let x86 = |word: &str| word.starts_with("PCI-MSI") || word.ends_with("IO-APIC");
    if interrupts.split_ascii_whitespace().any(x86) {
        let evidence = format!("no interrupt chip in {} is remapped (none begins with IR-)", path.display());
        return InterruptRemapping::Off { evidence };
    }
    InterruptRemapping::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::SimHost;

    #[test]
    fn tells_remapping() {
        fn check(interrupts: &str, ecap: &str, expect: &str) {
            let sim = SimHost::new().unwrap();
            sim.write("proc/interrupts", interrupts).unwrap();
            sim.write("sys/class/iommu/dmar0/intel-iommu/ecap", ecap).unwrap();
            let found = match interrupt_remapping(&sim.plain_host()) {
                InterruptRemapping::On => "on".into(),
                InterruptRemapping::Off { evidence } => evidence,
                InterruptRemapping::Unknown => "unknown".into(),
            };
            assert!(found.contains(expect), "{interrupts:?} {ecap}: {found}");
        }
        check(" 24: 0 IR-PCI-MSIX-0000:01:00.0 0-edge nvme", "f050da\n", "on");
        check("  0: 0 IR-IO-APIC 2-edge timer", "f050da\n", "on");
        check("  0: 0 IO-APIC 2-edge timer", "f050da\n", "none begins with IR-");
        check(" 24: 0 PCI-MSI 1-edge x", "f050da\n", "none begins with IR-");
        check("  0: 0 IO-APIC 2-edge timer", "f05000\n", "dmar0 can't remap");
        check("  0: 0 GICv3 2-edge timer", "f050da\n", "unknown");
        check("", "hostile", "unknown");
    }
}
