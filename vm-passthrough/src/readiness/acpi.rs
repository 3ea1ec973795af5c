//! Reads the ACPI tables that describe IOMMUs. A malformed part counts as absent.

use std::io::Read as _;

use crate::{Host, files};

/// Limit of a table's length.
const MOST_BYTES: u64 = 1 << 20;
/// Length of an ACPI table header.
const HEADER: usize = 36;

fn table(host: &Host, name: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = files::open(&host.sys.join("firmware/acpi/tables").join(name)).ok()?;
    file.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    (bytes.len() > HEADER && bytes.starts_with(name.as_bytes())).then_some(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|field| u16::from_le_bytes(*field))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|field| u32::from_le_bytes(*field))
}

/// Flags of the DMA remapping table (VT-d 4.1, 8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dmar(u8);

impl Dmar {
    pub(super) fn read(host: &Host) -> Option<Self> {
        table(host, "DMAR")?.get(HEADER + 1).copied().map(Self)
    }

    /// Whether the platform can remap interrupts.
    pub(super) fn remaps_interrupts(self) -> bool {
        self.0 & 1 != 0
    }

    /// Whether the firmware asks Linux to leave x2APIC off.
    pub(super) fn opts_out_of_x2apic(self) -> bool {
        self.0 & 1 << 1 != 0
    }

    /// Whether the firmware blocks DMA until Linux enables the IOMMU (Kernel DMA Protection).
    pub(super) fn blocks_dma_at_boot(self) -> bool {
        self.0 & 1 << 2 != 0
    }

    /// Names of the flags that are set.
    pub(super) fn names(self) -> String {
        let names = [
            (self.remaps_interrupts(), "INTR_REMAP"),
            (self.opts_out_of_x2apic(), "X2APIC_OPT_OUT"),
            (self.blocks_dma_at_boot(), "DMA_CTRL_PLATFORM_OPT_IN"),
        ];
        let set: Vec<_> = names.iter().filter(|(is_set, _)| *is_set).map(|(_, name)| *name).collect();
        if set.is_empty() { "none".into() } else { set.join(", ") }
    }
}

/// The I/O virtualization reporting structure (AMD IOMMU 3.09, 5.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ivrs {
    /// IOMMUs.
    pub(super) units: usize,
    /// I/O APICs behind these IOMMUs.
    pub(super) io_apics: usize,
    /// Whether the firmware blocks DMA until Linux enables the IOMMU.
    pub(super) blocks_dma_at_boot: bool,
}

impl Ivrs {
    pub(super) fn read(host: &Host) -> Option<Self> {
        let bytes = table(host, "IVRS")?;
        let mut found = Self { blocks_dma_at_boot: u32_at(&bytes, HEADER)? & 1 << 1 != 0, ..Self::default() };
        let mut at = HEADER + 12;
        while let Some((&kind, len)) = bytes.get(at).zip(u16_at(&bytes, at + 2)) {
            let len = usize::from(len);
            if len < 4 {
                break;
            }
            let block = bytes.get(at..(at + len).min(bytes.len())).unwrap_or_default();
            let first = match kind {
                0x10 => 24,
                0x11 | 0x40 => 40,
                _ => block.len(),
            };
            if matches!(kind, 0x10 | 0x11 | 0x40) {
                found.units += 1;
                found.io_apics += io_apics(block.get(first..).unwrap_or_default());
            }
            at += len;
        }
        Some(found)
    }
}

/// I/O APICs among the device entries of an IOMMU (5.2.2.5 and after).
fn io_apics(mut entries: &[u8]) -> usize {
    const SPECIAL: u8 = 72;
    const IO_APIC: u8 = 1;
    let mut count = 0;
    while let Some(&kind) = entries.first() {
        let len = match kind {
            0..64 => 4,
            64..128 => 8,
            128..192 => 16,
            192.. => 22 + usize::from(entries.get(21).copied().unwrap_or(0)),
        };
        count += usize::from(kind == SPECIAL && entries.get(7) == Some(&IO_APIC));
        entries = entries.get(len..).unwrap_or_default();
    }
    count
}

/// The I/O remapping table of Arm hosts (Arm DEN 0049E).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Iort {
    /// Whether the table has an interrupt translation service.
    pub(super) has_its: bool,
    /// Whether the table has an SMMUv3, and an older SMMU.
    pub(super) smmus: (bool, bool),
    pub(super) roots: Vec<RootComplex>,
}

/// A PCI root complex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RootComplex {
    pub(super) segment: u32,
    /// Whether it translates addresses that a device translated itself (ATS).
    pub(super) ats: bool,
    /// The version of the SMMU that translates its DMA: 3, or 2 for an earlier one.
    pub(super) smmu: Option<u8>,
}

impl Iort {
    pub(super) fn read(host: &Host) -> Option<Self> {
        let bytes = table(host, "IORT")?;
        let (count, mut at) = (u32_at(&bytes, HEADER)?, u32_at(&bytes, HEADER + 4)? as usize);
        let smmu = |at: usize| match bytes.get(at) {
            Some(4) => Some(3),
            Some(3) => Some(2),
            _ => None,
        };
        let mut found = Self::default();
        for _ in 0..count {
            let Some((&kind, len)) = bytes.get(at).zip(u16_at(&bytes, at + 1)) else { break };
            match kind {
                0 => found.has_its = true,
                2 => {
                    let (mappings, first) = (u32_at(&bytes, at + 8)?, u32_at(&bytes, at + 12)? as usize);
                    // A mapping ends with the offset of the node that it leads to, and flags.
                    let leads_to = (0..mappings.min(1024) as usize)
                        .filter_map(|index| u32_at(&bytes, at + first + 20 * index + 12))
                        .find_map(|node| smmu(node as usize));
                    found.roots.push(RootComplex {
                        segment: u32_at(&bytes, at + 28)?,
                        ats: u32_at(&bytes, at + 24)? & 1 != 0,
                        smmu: leads_to,
                    });
                }
                3 => found.smmus.1 = true,
                4 => found.smmus.0 = true,
                _ => {}
            }
            if len < 16 {
                break;
            }
            at += usize::from(len);
        }
        Some(found)
    }

    /// Returns the root complex of a PCI segment, preferably one behind an SMMU.
    pub(super) fn root(&self, segment: u32) -> Option<RootComplex> {
        let mut roots = self.roots.iter().copied().filter(|root| root.segment == segment);
        let first = roots.clone().next();
        roots.find(|root| root.smmu.is_some()).or(first)
    }
}
