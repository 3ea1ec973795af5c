//! IOMMU groups, the addresses that devices may not use, and who isolates whom.

mod acs;
mod remapping;
mod variant;
mod viability;

use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use thiserror::Error;

pub use acs::{IsolationBreak, IsolationFault, isolation_breaks};
pub use remapping::{InterruptRemapping, interrupt_remapping};
pub use variant::{DriverChoice, DriverReason, VfioDriver, VfioDrivers};
pub(crate) use viability::{Occupant, Part, in_the_way, occupants};
pub use viability::{VFIO_DRIVER, is_vfio_driver};

use crate::{Host, PciAddress, files};

/// A range of I/O virtual addresses, both ends included.
pub type IovaRange = RangeInclusive<u64>;

/// The smallest set of functions that the IOMMU can tell from all others: they go to one guest together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuGroup {
    /// Its number.
    pub number: u32,
    /// Its functions, sorted.
    pub members: Vec<PciAddress>,
    /// Its members that are no PCI functions, such as platform devices, by the names of their directories.
    pub others: Vec<String>,
    /// I/O virtual addresses that no guest RAM may have, sorted as the Linux kernel does.
    pub reserved: Vec<ReservedRegion>,
    /// Default domain: `DMA`, `DMA-FQ`, `identity` or `blocked`; `None` when the Linux kernel does not say.
    pub domain: Option<String>,
    /// Whether VFIO made it for a function that no IOMMU translates for (`enable_unsafe_noiommu_mode`).
    pub noiommu: bool,
}

/// A range of I/O virtual addresses that is reserved in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedRegion {
    /// The addresses.
    pub range: IovaRange,
    /// Why.
    pub kind: ReservedKind,
}

/// Why a range is reserved (Linux `Documentation/ABI/testing/sysfs-kernel-iommu_groups`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "kebab-case")]
#[non_exhaustive]
pub enum ReservedKind {
    /// The firmware wants it mapped one to one at all times; the function can't be given away.
    Direct,
    /// The firmware wants it mapped one to one until a driver takes over; VFIO ignores it.
    DirectRelaxable,
    /// Never mapped.
    Reserved,
    /// Interrupt messages.
    Msi,
}

impl ReservedKind {
    /// Whether guest RAM can't be mapped there.
    pub const fn excludes_ram(self) -> bool {
        !matches!(self, Self::DirectRelaxable)
    }
}

/// Why a group can't be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IommuError {
    /// The Linux kernel refuses.
    #[error("can't read {path}: {source}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// There is no such group.
    #[error("there is no IOMMU group {number} (looked in {path}); scan again, its functions may be gone")]
    NotFound {
        /// The group.
        number: u32,
        /// Where it was looked for.
        path: PathBuf,
    },
}

/// The directory of a group.
pub(crate) fn group_dir(host: &Host, number: u32) -> PathBuf {
    host.sys.join("kernel/iommu_groups").join(number.to_string())
}

/// Reads group `number`.
///
/// # Errors
/// When there is no such group, or the Linux kernel refuses.
pub fn group(host: &Host, number: u32) -> Result<IommuGroup, IommuError> {
    let dir = group_dir(host, number);
    let devices = dir.join("devices");
    let names =
        files::names(&devices).map_err(|source| IommuError::Read { path: devices.clone(), source })?;
    let (mut members, mut others) = (Vec::new(), Vec::new());
    for name in names {
        match name.parse::<PciAddress>() {
            Ok(address) => members.push(address),
            Err(_) => others.push(name),
        }
    }
    if members.is_empty() {
        return Err(IommuError::NotFound { number, path: dir });
    }
    members.sort_unstable();
    let reserved = dir.join("reserved_regions");
    let text = files::read(&reserved).map_err(|source| IommuError::Read { path: reserved, source })?;
    Ok(IommuGroup {
        number,
        members,
        others,
        reserved: text.iter().flat_map(|text| text.lines()).filter_map(reserved_region).collect(),
        domain: files::read_trimmed(&dir.join("type")),
        noiommu: files::read_trimmed(&dir.join("name")).is_some_and(|name| name == "vfio-noiommu"),
    })
}

/// One line of `reserved_regions`: first and last address, and kind. A kind that is not known counts as reserved.
fn reserved_region(line: &str) -> Option<ReservedRegion> {
    let mut words = line.split_ascii_whitespace();
    let mut number = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let (start, end) = (number()?, number()?);
    let kind = words.next()?.parse().unwrap_or(ReservedKind::Reserved);
    (start <= end).then_some(ReservedRegion { range: start..=end, kind })
}

/// Whether the host has an IOMMU that Linux uses: one in `class/iommu`, or a group.
pub fn is_present(host: &Host) -> bool {
    let has = |path: &str| files::names(&host.sys.join(path)).is_ok_and(|names| !names.is_empty());
    has("class/iommu") || has("kernel/iommu_groups")
}

/// Bits of an I/O virtual address that the IOMMU of `address` translates; of all IOMMUs the least when it is not
/// known which one that is. `None` where the hardware does not say.
pub fn address_width(host: &Host, address: PciAddress) -> Option<u8> {
    let own = host.pci_device(address).join("iommu");
    if own.exists() {
        return unit_width(&own);
    }
    let units = host.sys.join("class/iommu");
    files::names(&units).ok()?.iter().filter_map(|name| unit_width(&units.join(name))).min()
}

/// Address width of one IOMMU, from its capability registers.
fn unit_width(unit: &std::path::Path) -> Option<u8> {
    let register = |path: &str| u64::from_str_radix(&files::read_trimmed(&unit.join(path))?, 16).ok();
    if let Some(capabilities) = register("intel-iommu/cap") {
        // VT-d 4.1, 11.4.2: MGAW is the guest address width less one; SAGAW has a bit for each table depth.
        let width = (capabilities >> 16 & 0x3f) as u8 + 1;
        let tables = match capabilities >> 8 & 0x1f {
            sagaw if sagaw & 0x8 != 0 => 57,
            sagaw if sagaw & 0x4 != 0 => 48,
            sagaw if sagaw & 0x2 != 0 => 39,
            _ => width,
        };
        return Some(width.min(tables));
    }
    // AMD I/O Virtualization 3.08, 3.4.17: HATS, the depth of the host tables.
    let features = register("amd-iommu/features")?;
    Some(match features >> 10 & 0x3 {
        0 => 48,
        1 => 57,
        _ => 64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimFunction, SimHost};

    #[test]
    fn reads_a_group() {
        let sim = SimHost::new().unwrap();
        let (gpu, audio) = ("0000:01:00.0".parse().unwrap(), "0000:01:00.1".parse().unwrap());
        sim.add(&SimFunction::gpu(gpu)).unwrap();
        sim.add(&SimFunction::new(audio, 0x10de, 0x22ba, 0x04_0300).group(1)).unwrap();
        sim.write(
            "sys/kernel/iommu_groups/1/reserved_regions",
            "0x000000007d800000 0x000000007f7fffff direct\n\
             0x00000000000e8000 0x00000000000effff direct-relaxable\n\
             0x00000000fee00000 0x00000000feefffff msi\n\
             0x000000fd00000000 0x000000ffffffffff reserved\n\
             0x2 0x1 reserved\nhostile\n0x0 zz msi\n",
        )
        .unwrap();
        let found = group(&sim.plain_host(), 1).unwrap();
        assert_eq!(found.members, [gpu, audio]);
        let reserved: Vec<_> = found.reserved.iter().map(|r| (*r.range.start(), r.kind)).collect();
        use ReservedKind::{Direct, DirectRelaxable, Msi, Reserved};
        assert_eq!(
            reserved,
            [
                (0x7d80_0000, Direct),
                (0xe_8000, DirectRelaxable),
                (0xfee0_0000, Msi),
                (0xfd_0000_0000, Reserved)
            ]
        );
        assert_eq!(found.domain.as_deref(), Some("DMA-FQ"));
        assert!(!found.noiommu);
        let error = group(&sim.plain_host(), 7).unwrap_err().to_string();
        assert!(error.contains("no IOMMU group 7"), "{error}");
    }

    #[test]
    fn reads_the_address_width() {
        fn check(file: &str, register: &str, expect: Option<u8>) {
            let sim = SimHost::new().unwrap();
            sim.delete("sys/devices/virtual/iommu/dmar0/intel-iommu").unwrap();
            sim.write(&format!("sys/devices/virtual/iommu/dmar0/{file}"), register).unwrap();
            let width = address_width(&sim.plain_host(), "0000:01:00.0".parse().unwrap());
            assert_eq!(width, expect, "{file} {register}");
        }
        check("intel-iommu/cap", "d2008c40660462\n", Some(39));
        check("intel-iommu/cap", "d2008c222f0686\n", Some(48));
        check("intel-iommu/cap", "zz\n", None);
        check("amd-iommu/features", "25bf732fa2295afe:1d\n", None);
        check("amd-iommu/features", "29d3\n", Some(64));
        check("amd-iommu/features", "21d3\n", Some(48));
        check("other", "", None);
    }
}
