//! Finds every PCI function in sysfs.

use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;
use thiserror::Error;

use super::attributes::{Attributes, Buffer, is_gone, link_target};
use super::config::{self, ConfigSource as _, ConfigState};
use super::{
    Bar, BarKind, Link, PciAddress, PciClass, PciFunction, PciIds, PowerState, Sriov, kind, regs, text,
};
use crate::Host;

/// Why the host's PCI functions could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ScanError {
    /// The directory of all PCI functions can't be read.
    #[error("can't list the PCI functions in {path}: {source}; check that sysfs is mounted there")]
    List {
        /// The directory.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// There is no such function.
    #[error("there is no PCI function {address} (looked in {path}); a scan finds those that there are")]
    NotFound {
        /// The function.
        address: PciAddress,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// A function's attributes can't be read.
    #[error("can't read PCI function {address} in {path}: {source}")]
    Read {
        /// The function.
        address: PciAddress,
        /// Its directory.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// A function's `uevent` has no class and IDs.
    #[error(
        "{path}/uevent of PCI function {address} has no PCI_CLASS and PCI_ID that can be; it is not what Linux \
         writes and the function was not read"
    )]
    Malformed {
        /// The function.
        address: PciAddress,
        /// Its directory.
        path: PathBuf,
    },
}

/// Every PCI function of the host, sorted by address. One that vanishes meanwhile is left out, as is one whose
/// attributes make no sense or can't be read (with a warning in the log).
///
/// Nothing is read that waits for a function's lock in the Linux kernel, which an unbind that is stuck holds: not
/// `driver_override`, for which there is [`driver_override`], and not `sriov_numvfs`, in whose place links to the
/// virtual functions are counted.
///
/// # Errors
/// When sysfs can't be read: its directory, or not one function in it.
pub fn scan(host: &Host) -> Result<Vec<PciFunction>, ScanError> {
    scan_by(host, Source::Config)
}

/// As [`scan`], from what the Linux kernel remembers alone: no config space is read, so that a function that stalls can't hold
/// whoever looks for others. Links and capabilities are missing, and what is a bridge is known by its class.
///
/// # Errors
/// As for [`scan`].
pub fn scan_attributes(host: &Host) -> Result<Vec<PciFunction>, ScanError> {
    scan_by(host, Source::Attributes)
}

fn scan_by(host: &Host, source: Source) -> Result<Vec<PciFunction>, ScanError> {
    let dir = open_dir(host)?;
    let addresses =
        list(&dir).map_err(|errno| ScanError::List { path: host.sys.join(DEVICES), source: errno.into() })?;
    let mut functions = Vec::with_capacity(addresses.len());
    let mut buffer = [0; _];
    let mut unread = None;
    for address in addresses {
        match read(&dir, address, source, &mut buffer) {
            Ok(function) => {
                tracing::trace!(%address, class = %format_args!("{:06x}", function.class.0), group = ?function.iommu_group, driver = ?function.driver, "read");
                functions.push(function);
            }
            Err(Failure::Gone) => {}
            Err(Failure::Malformed) => {
                tracing::warn!(%address, "left out: its uevent in sysfs has no PCI_CLASS and PCI_ID that can be");
            }
            Err(Failure::System(errno)) => {
                let path = host.pci_device(address);
                let error = ScanError::Read { address, path, source: errno.into() };
                // What this process lacks, it lacks for all of them.
                if matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM) {
                    return Err(error);
                }
                tracing::warn!("left out: {error}");
                unread.get_or_insert(error);
            }
        }
    }
    match unread {
        Some(error) if functions.is_empty() => Err(error),
        _ => Ok(functions),
    }
}

/// One PCI function of the host.
///
/// # Errors
/// When there is no such function, or it can't be read.
pub fn read_function(host: &Host, address: PciAddress) -> Result<PciFunction, ScanError> {
    read_by(host, address, Source::Config)
}

/// As [`read_function`], with what [`scan_attributes`] has of it.
///
/// # Errors
/// As for [`read_function`].
pub fn read_attributes(host: &Host, address: PciAddress) -> Result<PciFunction, ScanError> {
    read_by(host, address, Source::Attributes)
}

fn read_by(host: &Host, address: PciAddress, source: Source) -> Result<PciFunction, ScanError> {
    read(&open_dir(host)?, address, source, &mut [0; _]).map_err(|failure| match failure {
        Failure::Gone => ScanError::NotFound { address, path: host.sys.join(DEVICES) },
        Failure::Malformed => ScanError::Malformed { address, path: host.pci_device(address) },
        Failure::System(errno) => {
            ScanError::Read { address, path: host.pci_device(address), source: errno.into() }
        }
    })
}

/// What the config space of a function shows of it; `None` where it can't be read. It wakes a function that is in D3cold.
pub(crate) fn config_state(host: &Host, address: PciAddress) -> Option<ConfigState> {
    ConfigState::of(&read_config(host, address).ok()?, is_virtual(host, address))
}

/// Whether it is a virtual function.
pub(crate) fn is_virtual(host: &Host, address: PciAddress) -> bool {
    host.pci_device(address).join("physfn").exists()
}

/// The physical function of a virtual one.
pub(crate) fn physical_function(host: &Host, address: PciAddress) -> Option<PciAddress> {
    crate::files::link_name(&host.pci_device(address).join("physfn"))?.parse().ok()
}

/// Config space of a function, as far as the caller may read it: 64, 256 or 4096 bytes. It wakes a function that is
/// in D3cold.
///
/// # Errors
/// When there is no such function, or it can't be read.
pub fn read_config(host: &Host, address: PciAddress) -> Result<Vec<u8>, ScanError> {
    let path = host.pci_device(address);
    let read = || {
        let mut bytes = Vec::new();
        let file = crate::files::open(&path.join("config"))?;
        file.take(config::EXTENDED_CONFIG_SIZE as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read().map_err(|source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => ScanError::NotFound { address, path: host.sys.join(DEVICES) },
        _ => ScanError::Read { address, path: path.clone(), source },
    })
}

/// The virtual functions that a physical function has, in their order.
pub fn virtual_functions(host: &Host, physical: PciAddress) -> Vec<PciAddress> {
    let dir = host.pci_device(physical);
    let link = |index| crate::files::link_name(&dir.join(format!("virtfn{index}")))?.parse().ok();
    (0..u16::MAX).map_while(link).collect()
}

/// The driver that a function's `driver_override` restricts it to.
///
/// In most releases of the Linux kernel reading it takes the function's lock, so that it waits as long as a driver does to
/// bind or unbind: it has a deadline, and is not part of a scan.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] when `deadline` passed first. Otherwise what the Linux kernel answered.
pub fn driver_override(host: &Host, address: PciAddress, deadline: Duration) -> io::Result<Option<String>> {
    let text = host.writer().read(&host.pci_device(address).join("driver_override"), deadline)?;
    Ok(text::driver_override(text.as_bytes()))
}

/// Where all functions are, below the root of sysfs.
const DEVICES: &str = "bus/pci/devices";

/// Where what is read of a function comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Its attributes and its config space.
    Config,
    /// The attributes that the Linux kernel answers from memory.
    Attributes,
}

/// Why one function was not read.
enum Failure {
    /// It is not there, or no longer.
    Gone,
    /// It has no class and IDs.
    Malformed,
    /// Anything else.
    System(Errno),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        if is_gone(errno) { Self::Gone } else { Self::System(errno) }
    }
}

fn open_dir(host: &Host) -> Result<OwnedFd, ScanError> {
    let path = host.sys.join(DEVICES);
    rustix::fs::open(&path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| ScanError::List { path, source: errno.into() })
}

/// The addresses of all functions, sorted.
fn list(dir: &OwnedFd) -> Result<Vec<PciAddress>, Errno> {
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
    let mut addresses = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        addresses.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<PciAddress>().ok()));
    }
    addresses.sort_unstable();
    Ok(addresses)
}

/// Reads one function.
fn read(
    devices: &OwnedFd,
    address: PciAddress,
    source: Source,
    buffer: &mut Buffer,
) -> Result<PciFunction, Failure> {
    let name = address.to_string();
    let attributes = Attributes::open(devices, &name)?;
    let power_state = attributes.read("power_state", buffer)?.map_or(PowerState::Unknown, text::power_state);
    let (class, mut ids) = identity(&attributes, source, buffer)?;
    // The bridge right above, from where the function's directory lies.
    let path = link_target(devices, &name, buffer)?.unwrap_or_default();
    let upstream = path.rsplit('/').nth(1).and_then(|name| name.parse().ok());
    // `pciDOMAIN:BUS` is a host bridge; only a controller's lies below another function.
    let controller = path.rsplit('/').skip_while(|name| !name.starts_with("pci")).nth(1);
    let controller = controller.and_then(|name| name.parse().ok());
    let driver = attributes.link("driver", buffer)?.map(str::to_owned);
    let device_type =
        kind::refine(kind::from_ids(class, &ids), driver.as_deref(), || attributes.has("accel"));
    let iommu_group = attributes.link("iommu_group", buffer)?.and_then(|name| name.parse().ok());
    let numa_node = attributes.read("numa_node", buffer)?.and_then(text::decimal);
    let resets = attributes.read("reset_method", buffer)?.map(text::resets).unwrap_or_default();
    let mut is_one =
        |name| attributes.read(name, buffer).map(|text| text.is_some_and(|text| text.starts_with(b"1")));
    let boot_display = class.base() == 0x03 && (is_one("boot_vga")? || is_one("boot_display")?);

    // Reading config space would wake the function out of D3cold, which takes a second or more and power.
    let asleep = power_state == PowerState::D3Cold || source == Source::Attributes;
    let file = if asleep { None } else { attributes.config()? };
    let mut space = [0; config::CONFIG_SIZE];
    let len = file.as_ref().map_or(0, |file| file.read(0, &mut space));
    let state = || ConfigState::of(&space[..len], attributes.has("physfn"));
    let answers = len >= config::HEADER_SIZE && state() == Some(ConfigState::Alive);
    let space = if answers { &space[..len] } else { &[][..] };
    let capabilities = config::capabilities(space);
    let express = capabilities.iter().find(|cap| cap.id == regs::CAP_ID_EXP);
    let extended_capabilities = match &file {
        Some(file) if express.is_some() => config::extended_capabilities(file),
        _ => Vec::new(),
    };
    let is_resizable = |capability: &&super::ExtendedCapability| capability.id == regs::EXT_CAP_ID_REBAR;
    let resizable = match (&file, extended_capabilities.iter().find(is_resizable)) {
        (Some(file), Some(capability)) => config::resizable(file, capability.offset.into()),
        _ => Vec::new(),
    };
    ids.revision = match space.get(usize::from(regs::CLASS_REVISION)) {
        Some(&revision) => revision,
        None => attributes.read("revision", buffer)?.and_then(text::hex_number).unwrap_or(0) as u8,
    };
    let header_type = match space.get(usize::from(regs::HEADER_TYPE)) {
        Some(&header_type) => header_type & regs::HEADER_TYPE_MASK,
        // A bridge to PCI or to CardBus, by its class.
        None => match (class.base(), class.subclass()) {
            (0x06, 0x04) => 1,
            (0x06, 0x07) => 2,
            _ => 0,
        },
    };
    let link = match express {
        Some(express) => config::link(space, express.offset.into()),
        None if space.len() < config::CONFIG_SIZE && !asleep => read_link(&attributes, buffer)?,
        None => None,
    };
    let sriov = match attributes.link("physfn", buffer)?.and_then(|name| name.parse().ok()) {
        Some(physical) => Some(Sriov::Virtual { physical }),
        None => attributes.read("sriov_totalvfs", buffer)?.map(|text| {
            let total_vfs = text::decimal(text).unwrap_or(0);
            Sriov::Physical { total_vfs, num_vfs: attributes.enabled_vfs(total_vfs) }
        }),
    };
    // Every function has this one. It is read last: as the directory answers for one function only, all that was
    // read before is of a function that was there all the while.
    let (bars, rom) = text::resource(attributes.read("resource", buffer)?.ok_or(Failure::Gone)?);
    Ok(PciFunction {
        address,
        ids,
        class,
        device_type,
        header_type,
        upstream,
        controller,
        bars,
        resizable,
        rom,
        iommu_group,
        driver,
        numa_node,
        link,
        power_state,
        sriov,
        resets,
        capabilities,
        extended_capabilities,
        boot_display,
    })
}

/// Class and IDs, the latter without the revision. `uevent` has them in one file; in some releases of the Linux kernel it waits for
/// the function's lock (6.10), which the attributes never do.
fn identity(
    attributes: &Attributes,
    source: Source,
    buffer: &mut Buffer,
) -> Result<(PciClass, PciIds), Failure> {
    if source == Source::Attributes {
        let mut number = |name| attributes.read(name, buffer).map(|text| text.and_then(text::hex_number));
        let (class, vendor, device) = (number("class")?, number("vendor")?, number("device")?);
        let subsystem = (number("subsystem_vendor")?, number("subsystem_device")?);
        if let (Some(class), Some(vendor), Some(device)) = (class, vendor, device) {
            let ids = PciIds {
                vendor: vendor as u16,
                device: device as u16,
                subsystem_vendor: subsystem.0.unwrap_or(0) as u16,
                subsystem_device: subsystem.1.unwrap_or(0) as u16,
                revision: 0,
            };
            return Ok((PciClass(class as u32 & 0xff_ffff), ids));
        }
        // A captured tree may have `uevent` alone.
    }
    let uevent = attributes.read("uevent", buffer)?.ok_or(Failure::Gone)?;
    text::uevent(uevent).ok_or(Failure::Malformed)
}

/// The size of a function's BAR now, by sysfs `resource`; `None` when it has none.
pub(crate) fn bar_size(host: &Host, address: PciAddress, index: u8) -> Option<u64> {
    bars(host, address).iter().find(|bar| bar.index == index).map(|bar| bar.size)
}

/// The BARs that Linux knows of a function; none where they can't be read.
pub(crate) fn bars(host: &Host, address: PciAddress) -> Vec<Bar> {
    let text =
        crate::files::read(&host.pci_device(address).join("resource")).ok().flatten().unwrap_or_default();
    text::resource(text.as_bytes()).0
}

/// The sizes of a bridge's non-prefetchable and prefetchable windows; `None` where they can't be read.
pub(crate) fn bridge_windows(host: &Host, bridge: PciAddress) -> Option<[u64; 2]> {
    let text = crate::files::read(&host.pci_device(bridge).join("resource")).ok()??;
    text::windows(text.as_bytes())
}

/// The first BAR of a config space's header that has another address in its registers than it was given.
pub(crate) fn lost_bar(header: &[u8], bars: &[Bar]) -> Option<Bar> {
    let register = |index: u8| {
        let at = usize::from(regs::BASE_ADDRESS_0) + usize::from(index) * 4;
        let bytes = header.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        u64::from(bytes.map_or(0, u32::from_le_bytes))
    };
    let is_lost = |bar: &&Bar| {
        let address = match bar.kind {
            BarKind::Io => register(bar.index) & !0x3,
            BarKind::Memory32 => register(bar.index) & !0xf,
            BarKind::Memory64 => register(bar.index.saturating_add(1)) << 32 | register(bar.index) & !0xf,
        };
        bar.address != 0 && address != bar.address
    };
    bars.iter().find(is_lost).copied()
}

/// The link by the attributes, for who may not read the capabilities; `None` where there is none.
fn read_link(attributes: &Attributes, buffer: &mut Buffer) -> Result<Option<Link>, Errno> {
    // 255 lanes is what a function that does not answer reads as.
    let mut width = |name| -> Result<u8, Errno> {
        let text = attributes.read(name, buffer)?;
        Ok(text.and_then(text::decimal).filter(|&width| width != 255).unwrap_or(0))
    };
    let (max_width, width) = (width("max_link_width")?, width("current_link_width")?);
    if max_width == 0 {
        return Ok(None);
    }
    let mut speed = |name| attributes.read(name, buffer).map(|text| text.map_or(0, text::link_speed));
    let max_speed = speed("max_link_speed")?;
    let speed = if width == 0 { 0 } else { speed("current_link_speed")? };
    Ok(Some(Link { speed, width, max_speed, max_width }))
}

#[cfg(test)]
mod tests;
