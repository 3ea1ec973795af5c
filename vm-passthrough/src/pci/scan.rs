//! Finds every PCI function in sysfs.

use std::collections::HashMap;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;
use thiserror::Error;

use super::attributes::{Attributes, Budget, Identity, KeptDir, Text, is_gone};
use super::config::{self, ConfigSource as _};
use super::{
    Bar, Capability, DeviceType, ExtendedCapability, Link, PciAddress, PciClass, PciFunction, PciIds,
    PowerState, Rom, Sriov, kind, text,
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
    #[error(
        "there is no PCI function {address} (looked in {path}); `vm-service list --all` shows all there are"
    )]
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
/// # Errors
/// When sysfs can't be read: its directory, or not one function in it.
pub fn scan(host: &Host) -> Result<Vec<PciFunction>, ScanError> {
    Scanner::new().scan(host)
}

/// One PCI function of the host.
///
/// # Errors
/// When there is no such function, or it can't be read.
pub fn read_function(host: &Host, address: PciAddress) -> Result<PciFunction, ScanError> {
    let path = host.sys.join(DEVICES);
    let dir = open_dir(host)?;
    let mut text = Text::new();
    let trust = Trust { events: false, numa_nodes: false };
    match read(&dir, address, None, trust, &mut text) {
        Ok(found) => Ok(found.function),
        Err(Failure::Gone) => Err(ScanError::NotFound { address, path }),
        Err(Failure::Malformed) => Err(ScanError::Malformed { address, path: host.pci_device(address) }),
        Err(Failure::System(errno)) => {
            Err(ScanError::Read { address, path: host.pci_device(address), source: errno.into() })
        }
    }
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

/// Reads all functions again and again, and remembers of each what cannot have changed. That saves most of config
/// space, whose reads go to the hardware.
///
/// * While a function is there, its IDs, class, place, capabilities and best link stay. They belong to
///   one directory in sysfs, told by its inode number, which the Linux kernel gives out once per boot: a function
///   that was unplugged and replaced has another directory, whoever now sits at its address.
/// * The Linux kernel counts the events that it tells udev of in `kernel/uevent_seqnum`: a function that comes or
///   goes, a driver that binds or unbinds. While the count stands still the functions are the same ones, with the
///   same drivers and groups. It is read before and after; when it moved meanwhile, all is read again.
/// * A NUMA node changes only by a write that taints the Linux kernel, so it stays while there is no such taint.
/// * The BARs of a virtual function are cut from its physical function's and stay. Those of an endpoint stay while
///   there is no event, when each has its place and none can be resized: Linux moves a BAR that has its place only to
///   resize it.
///
/// All else is read anew each time: power, links, BARs, resets, numbers of virtual functions.
///
/// The functions' directories are kept open, which saves looking up their paths, for as many functions as half
/// of the process's limit on open files allows (`ulimit -n`); the others' paths are looked up each time.
///
/// Nothing is read that waits for a function's lock in the Linux kernel, which an unbind that is stuck holds: not
/// `driver_override`, for which there is [`driver_override`], and not `sriov_numvfs`, in whose place links to the
/// virtual functions are counted.
#[derive(Debug, Default)]
pub struct Scanner {
    known: HashMap<PciAddress, Known>,
    root: PathBuf,
    /// The count of events before `known` was read, and the functions that there were.
    events: Option<u64>,
    addresses: Vec<PciAddress>,
}

impl Scanner {
    /// One that knows nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Every PCI function of the host, as [`scan`].
    ///
    /// # Errors
    /// When sysfs can't be read.
    pub fn scan(&mut self, host: &Host) -> Result<Vec<PciFunction>, ScanError> {
        if self.root != host.sys {
            self.known.clear();
            self.events = None;
            self.root.clone_from(&host.sys);
        }
        let dir = open_dir(host)?;
        let trust = Trust { events: false, numa_nodes: numa_nodes_stand(host) };
        let before = events(host);
        if before.is_some() && before == self.events {
            let addresses = std::mem::take(&mut self.addresses);
            let found = read_all(&dir, &addresses, &self.known, Trust { events: true, ..trust });
            self.addresses = addresses;
            if events(host) == before {
                return self.collect(host, found);
            }
        }
        self.addresses = list(&dir)
            .map_err(|source| ScanError::List { path: host.sys.join(DEVICES), source: source.into() })?;
        self.addresses.sort_unstable();
        // An event from here on makes the next scan read all again.
        self.events = events(host);
        let found = read_all(&dir, &self.addresses, &self.known, trust);
        self.collect(host, found)
    }

    /// Sorts what was found from what was not, and learns from it.
    fn collect(&mut self, host: &Host, found: Vec<Read>) -> Result<Vec<PciFunction>, ScanError> {
        let mut functions = Vec::with_capacity(found.len());
        let mut unread = None;
        for (address, result) in found {
            match result {
                Ok(found) => {
                    if let Some(known) = found.learned {
                        self.known.insert(address, known);
                    }
                    functions.push(found.function);
                }
                Err(Failure::Gone) => {
                    self.known.remove(&address);
                }
                Err(Failure::Malformed) => {
                    tracing::warn!(%address, "left out: its uevent in sysfs has no PCI_CLASS and PCI_ID that can be");
                }
                Err(Failure::System(errno)) => {
                    self.events = None;
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
        if let Some(error) = unread.filter(|_| functions.is_empty()) {
            return Err(error);
        }
        // Functions that are gone are forgotten, so that hot-plug does not make it grow.
        if self.known.len() > functions.len() {
            let addresses = &self.addresses;
            self.known.retain(|address, _| addresses.binary_search(address).is_ok());
        }
        Ok(functions)
    }
}

/// How many events the Linux kernel has told udev of; `None` when it does not say.
fn events(host: &Host) -> Option<u64> {
    crate::files::read_trimmed(&host.sys.join("kernel/uevent_seqnum"))?.parse().ok()
}

/// Whether nobody has overridden a NUMA node since the host was started: that taints the Linux kernel
/// (`TAINT_FIRMWARE_WORKAROUND`).
fn numa_nodes_stand(host: &Host) -> bool {
    const FIRMWARE_WORKAROUND: u64 = 1 << 11;
    crate::files::read_trimmed(&host.proc.join("sys/kernel/tainted"))
        .and_then(|text| text.parse::<u64>().ok())
        .is_some_and(|tainted| tainted & FIRMWARE_WORKAROUND == 0)
}

/// What a scan may take from what is known.
#[derive(Clone, Copy, Debug)]
struct Trust {
    /// There was no event: the functions and their drivers are the same.
    events: bool,
    /// NUMA nodes stay as long as their function.
    numa_nodes: bool,
}

/// One function's address, and what came of reading it.
type Read = (PciAddress, Result<Found, Failure>);

/// What cannot change of one function, and which directory it was read from.
#[derive(Clone, Debug)]
struct Known {
    identity: Identity,
    /// The directory, when it is kept open.
    dir: Option<Arc<KeptDir>>,
    fixed: Fixed,
    // These stay as long as there is no event.
    driver: Option<String>,
    device_type: DeviceType,
    iommu_group: Option<u32>,
    boot_display: bool,
}

#[derive(Clone, Debug)]
struct Fixed {
    ids: PciIds,
    class: PciClass,
    kind: DeviceType,
    header_type: u8,
    upstream: Option<PciAddress>,
    physical: Option<PciAddress>,
    has_vfs: bool,
    numa_node: Option<u16>,
    /// BARs and ROM that stay while there is no event.
    bars: Option<(Vec<Bar>, Option<Rom>)>,
    /// Whether the BARs stay once each has its place.
    bars_stay: bool,
    link: LinkSource,
    capabilities: Vec<Capability>,
    extended_capabilities: Vec<ExtendedCapability>,
}

/// Where the state of the link is read.
#[derive(Clone, Copy, Debug)]
enum LinkSource {
    /// There is no link.
    None,
    /// In config space: the offset of Link Status, and the most that the link can do.
    Config { status: usize, max_speed: u32, max_width: u8 },
    /// In the attributes, when config space can't be read: the most that the link can do.
    Attributes { max_speed: u32, max_width: u8 },
}

/// A function that was read, and what is worth remembering of it.
struct Found {
    function: PciFunction,
    learned: Option<Known>,
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

fn list(dir: &OwnedFd) -> Result<Vec<PciAddress>, Errno> {
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
    let mut addresses = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        if let Some(address) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) {
            addresses.push(address);
        }
    }
    Ok(addresses)
}

/// Reads many functions, on all CPUs when it is worth it.
fn read_all(
    dir: &OwnedFd,
    addresses: &[PciAddress],
    known: &HashMap<PciAddress, Known>,
    trust: Trust,
) -> Vec<Read> {
    /// What a thread takes at a time: below this it costs more than it saves.
    const PART: usize = 64;
    const MOST_THREADS: usize = 16;
    let parts = addresses.len().div_ceil(PART);
    let next = AtomicUsize::new(0);
    let read_parts = || {
        let mut text = Text::new();
        let mut done = Vec::new();
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            let Some(left) = addresses.get(part.saturating_mul(PART)..).filter(|left| !left.is_empty())
            else {
                return done;
            };
            let read =
                |&address: &PciAddress| (address, read(dir, address, known.get(&address), trust, &mut text));
            done.push((part, left.iter().take(PART).map(read).collect()));
        }
    };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    let mut found: Vec<(usize, Vec<Read>)> = std::thread::scope(|scope| {
        // What no thread could be started for is read here.
        let others: Vec<_> = (1..cpus.min(parts))
            .map_while(|_| std::thread::Builder::new().spawn_scoped(scope, read_parts).ok())
            .collect();
        let mut found = read_parts();
        found.extend(
            others
                .into_iter()
                .flat_map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))),
        );
        found
    });
    found.sort_unstable_by_key(|&(part, _)| part);
    found.into_iter().flat_map(|(_, read)| read).collect()
}

/// Reads one function. `known` is used only when it was read from the same directory.
fn read(
    devices: &OwnedFd,
    address: PciAddress,
    known: Option<&Known>,
    trust: Trust,
    text: &mut Text,
) -> Result<Found, Failure> {
    let name = Name::of(address);
    let (attributes, identity) = match known.filter(|_| trust.events) {
        Some(Known { identity, dir: Some(dir), .. }) => (Attributes::kept(Arc::clone(dir)), *identity),
        Some(known) => (Attributes::below(devices, name.as_bytes()), known.identity),
        None => {
            let attributes = Attributes::open(devices, name.as_bytes())?;
            let identity = attributes.identity()?;
            (attributes, identity)
        }
    };
    let known = known.filter(|known| known.identity == identity);

    let power_state = if attributes.read("power_state", text)? {
        text::power_state(text.bytes())
    } else {
        PowerState::Unknown
    };
    let (mut fixed, complete) = match known {
        Some(known) => (known.fixed.clone(), true),
        None => read_fixed(devices, &name, &attributes, power_state, text)?,
    };
    let (driver, device_type, iommu_group, boot_display) = match known.filter(|_| trust.events) {
        Some(known) => (known.driver.clone(), known.device_type, known.iommu_group, known.boot_display),
        None => {
            let driver = attributes.link("driver", text)?.map(str::to_owned);
            let has_accel = || attributes.has("accel");
            let device_type = kind::refine(fixed.kind, driver.as_deref(), has_accel);
            // VFIO makes and removes a group with its driver when there is no IOMMU.
            let group = attributes.link("iommu_group", text)?.and_then(|name| name.parse().ok());
            // The firmware's display moves to another function only when one comes or goes.
            let boot_display = fixed.class.base() == 0x03
                && ((attributes.read("boot_vga", text)? && text.bytes().starts_with(b"1"))
                    || (attributes.read("boot_display", text)? && text.bytes().starts_with(b"1")));
            (driver, device_type, group, boot_display)
        }
    };
    if known.is_none() || !trust.numa_nodes {
        fixed.numa_node =
            if attributes.read("numa_node", text)? { text::decimal(text.bytes()) } else { None };
    }
    let link = read_link(&attributes, fixed.link, power_state, text)?;
    let resets = if attributes.read("reset_method", text)? { text::resets(text.bytes()) } else { Vec::new() };
    let sriov = match fixed.physical {
        Some(physical) => Some(Sriov::Virtual { physical }),
        None if fixed.has_vfs => {
            let total_vfs = number(&attributes, "sriov_totalvfs", text)?;
            Some(Sriov::Physical { total_vfs, num_vfs: attributes.enabled_vfs(total_vfs) })
        }
        None => None,
    };

    let (bars, rom) = match &fixed.bars {
        // Without an event the function is still there.
        Some(bars) if trust.events => bars.clone(),
        // Every function has this one. It is read last: as the directory answers for one function only, all that was
        // read before is of a function that was there all the while.
        _ => {
            if !attributes.read("resource", text)? {
                return Err(Failure::Gone);
            }
            text::resource(text.bytes())
        }
    };
    if fixed.bars.is_none() && fixed.bars_stay && bars.iter().all(|bar| bar.address != 0) {
        fixed.bars = Some((bars.clone(), rom));
    }
    let unchanged = trust.events && known.is_some();
    let learned = (complete && !unchanged).then(|| Known {
        identity,
        dir: match known.and_then(|known| known.dir.clone()) {
            Some(dir) => Some(dir),
            None => attributes.keep(Budget::of_process()),
        },
        fixed: fixed.clone(),
        driver: driver.clone(),
        device_type,
        iommu_group,
        boot_display,
    });

    let function = PciFunction {
        address,
        ids: fixed.ids,
        class: fixed.class,
        device_type,
        header_type: fixed.header_type,
        upstream: fixed.upstream,
        bars,
        rom,
        iommu_group,
        driver,
        numa_node: fixed.numa_node,
        link,
        power_state,
        sriov,
        resets,
        capabilities: fixed.capabilities,
        extended_capabilities: fixed.extended_capabilities,
        boot_display,
    };
    Ok(Found { function, learned })
}

/// Reads what cannot change, and whether all of it could be read.
fn read_fixed(
    devices: &OwnedFd,
    name: &Name,
    attributes: &Attributes,
    power_state: PowerState,
    text: &mut Text,
) -> Result<(Fixed, bool), Failure> {
    if !attributes.read("uevent", text)? {
        return Err(Failure::Gone);
    }
    let (class, mut ids) = text::uevent(text.bytes()).ok_or(Failure::Malformed)?;
    let upstream = upstream(devices, name, text)?;
    let physical = attributes.link("physfn", text)?.and_then(|name| name.parse().ok());
    let has_vfs = physical.is_none() && attributes.has("sriov_totalvfs");

    // Reading config space would wake the function out of D3cold, which takes a second or more and power.
    let asleep = power_state == PowerState::D3Cold;
    let file = if asleep { None } else { attributes.config()? };
    let mut space = [0; config::CONFIG_SIZE];
    let len = file.as_ref().map_or(0, |file| file.read(0, &mut space));
    // A virtual function's IDs read all ones; no function's whole header does.
    let answers = len >= config::HEADER_SIZE && space[..config::HEADER_SIZE].iter().any(|&byte| byte != 0xff);
    let space = if answers { &space[..len] } else { &[][..] };

    let capabilities = config::capabilities(space);
    let express =
        capabilities.iter().find(|cap| cap.id == config::CAP_EXPRESS).map(|cap| usize::from(cap.offset));
    let extended_capabilities = match &file {
        Some(file) if express.is_some() => config::extended_capabilities(file),
        _ => Vec::new(),
    };
    ids.revision = match space.get(8) {
        Some(&revision) => revision,
        None if attributes.read("revision", text)? => text::hex_number(text.bytes()).unwrap_or(0) as u8,
        None => 0,
    };
    let header_type = match space.get(0x0e) {
        Some(&header_type) => header_type & 0x7f,
        // A bridge to PCI or to CardBus, by its class.
        None => match (class.base(), class.subclass()) {
            (0x06, 0x04) => 1,
            (0x06, 0x07) => 2,
            _ => 0,
        },
    };
    let link = match express {
        Some(offset) => match config::link(space, offset) {
            Some(link) => LinkSource::Config {
                status: offset + config::LINK_STATUS,
                max_speed: link.max_speed,
                max_width: link.max_width,
            },
            None => LinkSource::None,
        },
        None if space.len() < config::CONFIG_SIZE && !asleep => {
            let max_width = number(attributes, "max_link_width", text)?;
            // 255 lanes is what a function that does not answer reads as.
            if max_width == 0 || max_width == 255 {
                LinkSource::None
            } else {
                attributes.read("max_link_speed", text)?;
                LinkSource::Attributes { max_speed: text::link_speed(text.bytes()), max_width }
            }
        }
        None => LinkSource::None,
    };
    // All of config space was seen, and there are no BARs that can be resized in it.
    let bars_stay = physical.is_some()
        || (header_type == 0
            && space.len() == config::CONFIG_SIZE
            && (express.is_none() || !extended_capabilities.is_empty())
            && extended_capabilities.iter().all(|cap| cap.id != config::EXTENDED_CAP_RESIZABLE_BAR));
    let fixed = Fixed {
        ids,
        class,
        kind: kind::from_ids(class, &ids),
        header_type,
        upstream,
        physical,
        has_vfs,
        numa_node: None,
        bars: None,
        bars_stay,
        link,
        capabilities,
        extended_capabilities,
    };
    Ok((fixed, answers))
}

/// The link as it is now.
fn read_link(
    attributes: &Attributes,
    source: LinkSource,
    power_state: PowerState,
    text: &mut Text,
) -> Result<Option<Link>, Failure> {
    match source {
        LinkSource::None => Ok(None),
        LinkSource::Config { max_speed, max_width, .. } | LinkSource::Attributes { max_speed, max_width }
            if power_state == PowerState::D3Cold =>
        {
            Ok(Some(Link { speed: 0, width: 0, max_speed, max_width }))
        }
        LinkSource::Config { status, max_speed, max_width } => {
            let status = attributes.config()?.and_then(|config| config.read_u16(status));
            let (speed, width) = config::link_status(status.unwrap_or(u16::MAX));
            Ok(Some(Link { speed, width, max_speed, max_width }))
        }
        LinkSource::Attributes { max_speed, max_width } => {
            let width = number(attributes, "current_link_width", text)?;
            let width = if width == 255 { 0 } else { width };
            attributes.read("current_link_speed", text)?;
            let speed = if width == 0 { 0 } else { text::link_speed(text.bytes()) };
            Ok(Some(Link { speed, width, max_speed, max_width }))
        }
    }
}

/// The bridge right above, from where the function's directory lies.
fn upstream(devices: &OwnedFd, name: &Name, text: &mut Text) -> Result<Option<PciAddress>, Errno> {
    Ok(text.link_target(devices, name.as_bytes())?.and_then(|target| {
        let parent = target.rsplit('/').nth(1)?;
        parent.parse().ok()
    }))
}

/// A decimal attribute, 0 when it is absent or makes no sense.
fn number<T: std::str::FromStr + Default>(
    attributes: &Attributes,
    name: &str,
    text: &mut Text,
) -> Result<T, Errno> {
    Ok(if attributes.read(name, text)? {
        text::decimal(text.bytes()).unwrap_or_default()
    } else {
        T::default()
    })
}

/// An address as sysfs spells it, without an allocation.
struct Name {
    bytes: [u8; 16],
    len: usize,
}

impl Name {
    fn of(address: PciAddress) -> Self {
        use std::io::Write as _;
        let mut bytes = [0; 16];
        // The longest, ffffffff:ff:1f.7, fits exactly.
        let mut rest = &mut bytes[..];
        let written = write!(rest, "{address}").map(|()| 16 - rest.len());
        Self { bytes, len: written.unwrap_or(0) }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests;
