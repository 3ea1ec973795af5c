//! A fake of the Linux kernel's side of VFIO and iommufd, so that the real code runs without a device.
//!
//! [`Kernel`] makes a host tree whose device nodes are links to memfds. The ioctls of [`sys`](super::super::sys) look up the
//! file that they are made on: [`ioctl`] answers for a node of a fake, and leaves all other files to Linux. Reads, writes and
//! mappings of regions need no fake: a device's memfd holds each region at its index << 40, as vfio-pci's file does.
//!
//! Each kind of file has a module. The answers and error numbers are those of vfio-pci, the group and container code, type 1 and iommufd. A test changes the
//! machine through [`Kernel::state`], which it must not hold while it calls the code under test.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, IntoRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use crate::host::SysfsWriter;
use crate::{Host, PciAddress};

mod device;
mod spaces;

pub(super) use device::{Device, Effect, Region};
pub(super) use spaces::Map;
use spaces::Maps;

/// Numbers of the ioctls (`linux/vfio.h`, `linux/iommufd.h`). A few are used twice, by different kinds of file.
pub(super) mod number {
    pub(in super::super) const API_VERSION: u32 = 100;
    pub(in super::super) const CHECK_EXTENSION: u32 = 101;
    pub(in super::super) const SET_IOMMU: u32 = 102;
    pub(in super::super) const GROUP_STATUS: u32 = 103;
    pub(in super::super) const SET_CONTAINER: u32 = 104;
    pub(in super::super) const UNSET_CONTAINER: u32 = 105;
    pub(in super::super) const DEVICE_FD: u32 = 106;
    pub(in super::super) const DEVICE_INFO: u32 = 107;
    pub(in super::super) const REGION_INFO: u32 = 108;
    pub(in super::super) const IRQ_INFO: u32 = 109;
    pub(in super::super) const SET_IRQS: u32 = 110;
    pub(in super::super) const RESET: u32 = 111;
    /// Device ioctl.
    pub(in super::super) const HOT_RESET_INFO: u32 = 112;
    /// Container ioctl.
    pub(in super::super) const IOMMU_INFO: u32 = 112;
    /// Device ioctl.
    pub(in super::super) const HOT_RESET: u32 = 113;
    /// Container ioctl.
    pub(in super::super) const MAP_DMA: u32 = 113;
    pub(in super::super) const UNMAP_DMA: u32 = 114;
    pub(in super::super) const FEATURE: u32 = 117;
    pub(in super::super) const BIND: u32 = 118;
    pub(in super::super) const ATTACH: u32 = 119;
    pub(in super::super) const DESTROY: u32 = 0x80;
    pub(in super::super) const IOAS_ALLOC: u32 = 0x81;
    pub(in super::super) const IOVA_RANGES: u32 = 0x84;
    pub(in super::super) const IOAS_MAP: u32 = 0x85;
    pub(in super::super) const IOAS_UNMAP: u32 = 0x86;
    pub(in super::super) const IOAS_MAP_FILE: u32 = 0x8f;
}

/// The argument of an ioctl.
pub(in crate::vfio) enum Argument<'a> {
    /// A structure that begins with its size.
    Sized(&'a mut [u8]),
    /// A number.
    Value(u64),
    /// Bytes that are only read.
    Bytes(&'a [u8]),
}

#[derive(Clone, Copy, Debug)]
enum Node {
    Container,
    Group(u32),
    Iommu,
    Device(PciAddress),
}

/// Device and inode number of a file.
type Inode = (u64, u64);
type Shared = Arc<Mutex<State>>;

/// The nodes of all fakes. They are found by inode and not by thread, as mappings are made by several threads.
static NODES: Mutex<BTreeMap<Inode, (Shared, Node)>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers an ioctl on a fake's node; `None` for any other file.
pub(in crate::vfio) fn ioctl(
    fd: BorrowedFd<'_>,
    request: u64,
    argument: Argument<'_>,
) -> Option<io::Result<i32>> {
    let (shared, node) = find(fd.as_raw_fd())?;
    assert_eq!(request >> 8, u64::from(b';'), "not a request of VFIO or iommufd");
    let answer = lock(&shared).ioctl(node, (request & 0xff) as u32, argument);
    Some(answer)
}

fn find(fd: i32) -> Option<(Shared, Node)> {
    let file = fs::metadata(format!("/proc/self/fd/{fd}")).ok()?;
    lock(&NODES).get(&(file.dev(), file.ino())).cloned()
}

/// Files of this process that are open on the memfd `name`, other than the fake's own.
fn users(name: &str) -> usize {
    let target = format!("/memfd:{name} (deleted)");
    let files = fs::read_dir("/proc/self/fd").expect("the list of files").flatten();
    files.filter(|file| fs::read_link(file.path()).is_ok_and(|link| link == Path::new(&target))).count() - 1
}

/// Returns the path of the file mapped at an address of this process: empty for anonymous memory, `None` if nothing is mapped.
fn mapped_file(address: u64) -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").expect("the list of mappings");
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let parse = |text| u64::from_str_radix(text, 16).ok();
        (parse(start)? <= address && address < parse(end)?)
            .then(|| rest.split_whitespace().skip(4).collect::<Vec<_>>().join(" "))
    })
}

fn memory() -> File {
    File::options().read(true).write(true).open("/proc/self/mem").expect("this process's memory")
}

fn get32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_ne_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

fn get64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_ne_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

pub(super) fn put32(bytes: &mut [u8], offset: usize, value: u32) {
    bytes[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
}

pub(super) fn put64(bytes: &mut [u8], offset: usize, value: u64) {
    bytes[offset..offset + 8].copy_from_slice(&value.to_ne_bytes());
}

/// A capability header with its body, to be chained.
fn capability(id: u16, version: u16, body: &[u8]) -> Vec<u8> {
    [&id.to_ne_bytes()[..], &version.to_ne_bytes(), &[0; 4], body].concat()
}

/// A count, padding, and pairs, as in the capabilities of sparse mappings and of IOVA ranges.
fn pairs(pairs: &[(u64, u64)]) -> Vec<u8> {
    let words = pairs.iter().flat_map(|&(first, second)| [first, second]);
    let mut bytes = [(pairs.len() as u32).to_ne_bytes(), [0; 4]].concat();
    bytes.extend(words.flat_map(u64::to_ne_bytes));
    bytes
}

/// Appends capabilities to the answer in `argument`, whose fixed part has `fixed` bytes, as `vfio_info_cap_add` and its callers
/// do: if they don't fit, the size field returns the bytes needed and the offset field stays 0.
fn append(argument: &mut [u8], fixed: usize, offset_field: usize, capabilities: &[Vec<u8>]) {
    let total = fixed + capabilities.iter().map(Vec::len).sum::<usize>();
    if argument.len() < total {
        put32(argument, 0, total as u32);
        return;
    }
    let mut at = fixed;
    put32(argument, offset_field, at as u32);
    for (position, capability) in capabilities.iter().enumerate() {
        argument[at..at + capability.len()].copy_from_slice(capability);
        let next = if position + 1 < capabilities.len() { at + capability.len() } else { 0 };
        put32(argument, at + 4, next as u32);
        at += capability.len();
    }
}

#[derive(Debug, Default)]
pub(super) struct Group {
    pub(super) viable: bool,
    pub(super) in_container: bool,
}

/// Changes an answer, or its bytes.
type Twist = Box<dyn FnMut(&mut [u8], io::Result<i32>) -> io::Result<i32> + Send>;

/// The machine.
pub(super) struct State {
    host: Option<Host>,
    /// The numbers of the ioctls that were made.
    pub(super) log: Vec<u32>,
    failures: BTreeMap<u32, (Errno, usize)>,
    twists: BTreeMap<u32, Twist>,
    pub(super) version: i32,
    pub(super) type1: bool,
    /// Page sizes of the IOMMU.
    pub(super) page_sizes: u64,
    pub(super) iova_ranges: Vec<(u64, u64)>,
    /// Mappings that the container may have.
    pub(super) dma_limit: u32,
    pub(super) alignment: u64,
    /// Whether BARs have dma-bufs, as from Linux 6.19 on.
    pub(super) dma_bufs: bool,
    /// Whether binding takes a token, as from Linux 6.18 on.
    pub(super) tokens: bool,
    iommu_set: bool,
    /// Mappings of the container.
    pub(super) container: Maps,
    pub(super) groups: BTreeMap<u32, Group>,
    pub(super) ioases: BTreeMap<u32, Maps>,
    pub(super) devices: BTreeMap<PciAddress, Device>,
    /// Writes to sysfs: the file, the value and the deadline.
    pub(super) writes: Vec<(String, String, Duration)>,
    /// Whether writing `on` to `power/control` moves a function out of D3cold.
    pub(super) wakes: bool,
}

impl State {
    pub(super) fn device(&mut self, address: PciAddress) -> &mut Device {
        self.devices.get_mut(&address).expect("a function")
    }

    /// Has the next ioctls of a number fail.
    pub(super) fn fail(&mut self, number: u32, error: Errno, times: usize) {
        self.failures.insert(number, (error, times));
    }

    /// Changes the answers to the ioctls of a number.
    pub(super) fn twist(
        &mut self,
        number: u32,
        twist: impl FnMut(&mut [u8], io::Result<i32>) -> io::Result<i32> + Send + 'static,
    ) {
        self.twists.insert(number, Box::new(twist));
    }

    /// Answers as the Linux kernel again.
    pub(super) fn untwist(&mut self) {
        self.twists.clear();
        self.failures.clear();
    }

    /// How often an ioctl was made.
    pub(super) fn count(&self, number: u32) -> usize {
        self.log.iter().filter(|&&made| made == number).count()
    }

    fn ioctl(&mut self, node: Node, number: u32, argument: Argument<'_>) -> io::Result<i32> {
        self.log.push(number);
        if let Some((error, times)) = self.failures.get_mut(&number)
            && *times > 0
        {
            *times -= 1;
            return Err((*error).into());
        }
        match argument {
            Argument::Sized(bytes) => {
                assert_eq!(get32(bytes, 0) as usize, bytes.len(), "a wrong size");
                let answer = self.sized(node, number, bytes).map_err(io::Error::from);
                match self.twists.get_mut(&number) {
                    Some(twist) => twist(bytes, answer),
                    None => answer,
                }
            }
            Argument::Value(value) => self.with_value(node, number, value).map_err(io::Error::from),
            Argument::Bytes(bytes) => self.with_bytes(node, number, bytes).map_err(io::Error::from),
        }
    }

    fn with_value(&mut self, node: Node, number: u32, value: u64) -> Result<i32, Errno> {
        match (node, number) {
            (Node::Container, number::API_VERSION) => Ok(self.version),
            (Node::Container, number::CHECK_EXTENSION) => Ok((value == 3 && self.type1).into()),
            (Node::Container, number::SET_IOMMU) => {
                if self.iommu_set || !self.groups.values().any(|group| group.in_container) {
                    return Err(Errno::INVAL);
                }
                if value != 3 || !self.type1 {
                    return Err(Errno::NODEV);
                }
                self.iommu_set = true;
                Ok(0)
            }
            (Node::Group(group), number::UNSET_CONTAINER) => {
                let in_use =
                    self.devices.values().any(|device| device.group == group && users(&device.name) > 0);
                let of = self.groups.get_mut(&group).ok_or(Errno::NODEV)?;
                if !of.in_container {
                    return Err(Errno::INVAL);
                }
                if in_use {
                    return Err(Errno::BUSY);
                }
                of.in_container = false;
                if !self.groups.values().any(|group| group.in_container) {
                    self.iommu_set = false;
                    self.container.clear();
                }
                Ok(0)
            }
            (Node::Device(address), number::RESET) => {
                let path = self.sysfs_config(address);
                let device = self.device(address);
                if !device.has_reset {
                    return Err(Errno::INVAL);
                }
                let effect = if device.resets.len() > 1 {
                    device.resets.pop_front().expect("an effect")
                } else {
                    device.resets[0].clone()
                };
                device.apply(&path, &effect).map(|()| 0)
            }
            _ => Err(Errno::NOTTY),
        }
    }

    fn with_bytes(&mut self, node: Node, number: u32, bytes: &[u8]) -> Result<i32, Errno> {
        match (node, number) {
            (Node::Group(group), number::SET_CONTAINER) => {
                let container = find(get32(bytes, 0) as i32).ok_or(Errno::BADFD)?;
                let group = self.groups.get_mut(&group).ok_or(Errno::NODEV)?;
                if group.in_container {
                    return Err(Errno::INVAL);
                }
                if !matches!(container.1, Node::Container) {
                    return Err(Errno::BADFD);
                }
                if !group.viable {
                    return Err(Errno::PERM);
                }
                group.in_container = true;
                Ok(0)
            }
            (Node::Group(group), number::DEVICE_FD) => {
                let name = bytes.strip_suffix(&[0]).and_then(|name| std::str::from_utf8(name).ok());
                let (name, token) = name.map(|name| name.split_once(' ').unwrap_or((name, ""))).unwrap();
                let token = token.strip_prefix("vf_token=");
                let address: PciAddress = name.parse().map_err(|_| Errno::NODEV)?;
                if self.devices.get(&address).is_none_or(|device| device.group != group) {
                    return Err(Errno::NODEV);
                }
                if !self.groups[&group].in_container || !self.iommu_set {
                    return Err(Errno::INVAL);
                }
                let token = token
                    .map(|token| u128::from_str_radix(&token.replace('-', ""), 16).unwrap().to_be_bytes());
                self.open(address, token)?;
                let file = self.device(address).file.try_clone().expect("a file");
                Ok(OwnedFd::from(file).into_raw_fd())
            }
            _ => Err(Errno::NOTTY),
        }
    }

    /// Checks the VF token, then resets the function as its first open does.
    fn open(&mut self, address: PciAddress, token: Option<[u8; 16]>) -> Result<(), Errno> {
        let path = self.sysfs_config(address);
        let device = self.device(address);
        match (device.token, token) {
            (None, Some(_)) => return Err(Errno::INVAL),
            (Some(wanted), given) if given != Some(wanted) => return Err(Errno::ACCESS),
            _ => {}
        }
        if device.has_reset && device.open_resets {
            let _ = device.apply(&path, &Effect::Resets);
        }
        Ok(())
    }

    fn sysfs_config(&self, address: PciAddress) -> std::path::PathBuf {
        self.host.as_ref().expect("a host").pci_device(address).join("config")
    }

    fn sized(&mut self, node: Node, number: u32, argument: &mut [u8]) -> Result<i32, Errno> {
        match node {
            Node::Container => self.of_container(number, argument),
            Node::Group(group) if number == number::GROUP_STATUS => {
                let group = &self.groups[&group];
                let flags = if group.in_container { 3 } else { group.viable.into() };
                put32(argument, 4, flags);
                Ok(0)
            }
            Node::Group(_) => Err(Errno::NOTTY),
            Node::Iommu => self.of_iommufd(number, argument),
            Node::Device(address) => self.of_device(address, number, argument),
        }
    }
}

/// Writes to sysfs as the Linux kernel's own files would take it.
struct Writer(Shared);

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Writer")
    }
}

impl SysfsWriter for Writer {
    fn write(&self, path: &Path, value: &str, deadline: Duration) -> io::Result<()> {
        let mut state = lock(&self.0);
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name == "control" && value == "on" && state.wakes {
            fs::write(path.parent().unwrap().parent().unwrap().join("power_state"), "D0\n")?;
        }
        state.writes.push((name, value.into(), deadline));
        fs::write(path, value)
    }
}

/// A host with the fake's nodes. Dropping it takes the nodes away.
pub(super) struct Kernel {
    _root: tempfile::TempDir,
    pub(super) host: Host,
    shared: Shared,
    /// Makes the names of the memfds unique.
    id: usize,
    /// The nodes' files, which are gone with the last that is open.
    files: Vec<File>,
    inodes: Vec<Inode>,
}

impl Kernel {
    /// A host with both back ends and no function.
    pub(super) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let root = tempfile::tempdir().unwrap();
        let shared = Arc::new(Mutex::new(State {
            host: None,
            log: Vec::new(),
            failures: BTreeMap::new(),
            twists: BTreeMap::new(),
            version: 0,
            type1: true,
            page_sizes: !0xfff,
            iova_ranges: vec![(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)],
            dma_limit: 65535,
            alignment: 4096,
            dma_bufs: true,
            tokens: true,
            iommu_set: false,
            container: Maps::new(),
            groups: BTreeMap::new(),
            ioases: BTreeMap::new(),
            devices: BTreeMap::new(),
            writes: Vec::new(),
            wakes: true,
        }));
        let host = Host::at(root.path(), Arc::new(Writer(shared.clone())));
        lock(&shared).host = Some(host.clone());
        fs::create_dir_all(host.dev.join("vfio/devices")).unwrap();
        fs::create_dir_all(&host.state).unwrap();
        let id = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut kernel = Self { _root: root, host, shared, id, files: Vec::new(), inodes: Vec::new() };
        for (path, node) in [("vfio/vfio", Node::Container), ("iommu", Node::Iommu)] {
            let (file, _) = kernel.node(path, node);
            kernel.files.push(file);
        }
        kernel
    }

    /// Makes the node `path` of `/dev`, and returns its file with the name of that.
    fn node(&mut self, path: &str, node: Node) -> (File, String) {
        let name = format!("vfio-{}-{}", self.id, path.replace('/', "-"));
        let file = File::from(
            memfd_create(&*name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd"),
        );
        symlink(format!("/proc/self/fd/{}", file.as_raw_fd()), self.host.dev.join(path)).unwrap();
        let metadata = file.metadata().unwrap();
        let inode = (metadata.dev(), metadata.ino());
        lock(&NODES).insert(inode, (self.shared.clone(), node));
        self.inodes.push(inode);
        (file, name)
    }

    /// Adds a function of a group, bound to vfio-pci, with an FLR and all kinds of interrupts. BAR 0 has 64 KiB, BAR 2 has 8 KiB
    /// with the MSI-X table, BAR 4 has 1 MiB of which two parts can be mapped, and the ROM has 128 KiB.
    pub(super) fn add(&mut self, address: &str, group: u32, config: &[u8]) -> PciAddress {
        let address: PciAddress = address.parse().unwrap();
        let number = self.state().devices.len();
        let (file, name) = self.node(&format!("vfio/devices/vfio{number}"), Node::Device(address));
        if !self.state().groups.contains_key(&group) {
            let (file, _) = self.node(&format!("vfio/{group}"), Node::Group(group));
            self.files.push(file);
        }
        let sysfs = self.host.pci_device(address);
        fs::create_dir_all(sysfs.join("power")).unwrap();
        fs::create_dir_all(sysfs.join(format!("vfio-dev/vfio{number}"))).unwrap();
        fs::write(sysfs.join(format!("vfio-dev/vfio{number}/dev")), "511:0\n").unwrap();
        symlink("../../../bus/pci/drivers/vfio-pci", sysfs.join("driver")).unwrap();
        symlink(format!("../../../kernel/iommu_groups/{group}"), sysfs.join("iommu_group")).unwrap();
        fs::write(sysfs.join("config"), config).unwrap();
        fs::write(sysfs.join("power_state"), "D0\n").unwrap();
        fs::write(sysfs.join("power/control"), "auto\n").unwrap();
        fs::write(sysfs.join("reset_method"), "flr\n").unwrap();
        let mut regions = vec![Region::default(); 9];
        regions[0] = Region { size: 0x10000, flags: 7, ..Region::default() };
        regions[2] = Region { size: 0x2000, flags: 7, msix: true, ..Region::default() };
        let sparse = Some(vec![(0x8_0000, 0x1_0000), (0, 0x4000)]);
        regions[4] = Region { size: 0x10_0000, flags: 7, sparse, msix: true };
        regions[6] = Region { size: 0x2_0000, flags: 1, ..Region::default() };
        regions[7] = Region { size: 0x100, flags: 3, ..Region::default() };
        let device = Device {
            file,
            name,
            group,
            has_reset: true,
            regions,
            // INTx masks itself; the vectors of the others do not grow in number.
            irqs: vec![Some((7, 1)), Some((9, 4)), Some((9, 8)), Some((9, 1)), Some((9, 1))],
            free_vectors: 2048,
            triggers: BTreeMap::new(),
            unmask: None,
            token: None,
            open_resets: false,
            resets: VecDeque::from([Effect::Resets]),
            reset_count: 0,
            hot_set: Vec::new(),
            hot_reset: Effect::Resets,
            hot_owned: true,
            config: config.to_vec(),
            after_reset: Vec::new(),
            bound: false,
            attached: None,
        };
        for (index, region) in device.regions.iter().enumerate().filter(|(_, region)| region.size != 0) {
            // Sparse, up to the end of the last.
            device.file.set_len(Device::at(index as u64, region.size)).expect("a sparse file");
        }
        device.write(7, 0, config);
        let mut state = self.state();
        state.groups.entry(group).or_insert(Group { viable: true, in_container: false });
        state.devices.insert(address, device);
        drop(state);
        address
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared)
    }

    /// Replaces a file of a function in sysfs.
    pub(super) fn sysfs(&self, address: PciAddress, name: &str, text: &str) {
        fs::write(self.host.pci_device(address).join(name), text).unwrap();
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.inodes.iter().for_each(|inode| drop(lock(&NODES).remove(inode)));
        // Its writer holds the state.
        self.state().host = None;
    }
}
