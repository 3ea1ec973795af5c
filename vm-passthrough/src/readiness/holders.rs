//! Who holds a function, so that its driver can't let go of it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Host, PciAddress, blocks, files, pci};

/// Most directories of a function that are looked into for device nodes.
const MAX_DIRECTORIES: usize = 4096;
/// How deep below a function device nodes are looked for (`nvme/nvme0/nvme0n1/nvme0n1p1` is 4).
const MAX_DEPTH: usize = 8;
/// Most holders that are named.
const MAX_HOLDERS: usize = 64;

/// One who holds a function.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Holder {
    /// A process that has one of the function's device nodes open.
    Process {
        /// Process ID.
        pid: u32,
        /// Name of its command.
        command: String,
        /// The open file.
        file: PathBuf,
    },
    /// A file system on one of the function's disks.
    Mount {
        /// The disk or partition.
        device: PathBuf,
        /// Where it is mounted.
        mounted_on: PathBuf,
    },
    /// A block device, such as one of device-mapper or RAID, that is made of one of the function's disks.
    Block {
        /// The disk or partition.
        device: PathBuf,
        /// What is made of it.
        by: String,
    },
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, command, file } => {
                write!(f, "process {pid} ({command}) has {} open", file.display())
            }
            Self::Mount { device, mounted_on } => {
                write!(f, "{} is mounted on {}", device.display(), mounted_on.display())
            }
            Self::Block { device, by } => write!(f, "{by} is made of {}", device.display()),
        }
    }
}

/// Names those who hold the function: processes with one of its device nodes open, mounts, stacked block devices.
///
/// It looks only at what can be read without waiting for a process that is itself stuck: a process that has mapped
/// a device and closed its file is not seen. What can't be read is passed over.
pub fn holders(host: &Host, address: PciAddress) -> Vec<Holder> {
    let nodes = Nodes::find(host, address, |_| true);
    let mut found = nodes.stacked.clone();
    found.extend(mounts(host, &nodes));
    found.extend(processes(host, &nodes, address));
    found.sort();
    found.dedup();
    found.truncate(MAX_HOLDERS);
    found
}

/// The processes that use a function which is not being unbound: those that have a node of it open, or of what is made of
/// its disks, or one of its BARs in sysfs. What is behind USB, and input devices, are left out: whoever reads a keyboard lets go of it when it is unplugged.
pub fn users(host: &Host, address: PciAddress) -> Vec<Holder> {
    let mut nodes = Nodes::find(host, address, |name| !is_unpluggable(name));
    nodes.unbinding = false;
    let device = host.pci_device(address);
    let device = fs::canonicalize(&device).unwrap_or(device);
    for index in 0..6 {
        for suffix in ["", "_wc"] {
            nodes.files.insert(device.join(format!("resource{index}{suffix}")), String::new());
        }
    }
    let own = std::process::id();
    let mut found = processes(host, &nodes, address);
    found.retain(|holder| !matches!(holder, Holder::Process { pid, .. } if *pid == own));
    found.sort();
    found.dedup();
    found
}

/// Whether a directory below a function has devices whose users let go of them when they are unplugged.
fn is_unpluggable(name: &str) -> bool {
    let is_number = |text: &str| text.starts_with(|first: char| first.is_ascii_digit());
    name == "input" || name.strip_prefix("usb").is_some_and(is_number)
}

/// The device nodes of a function.
#[derive(Debug, Default)]
struct Nodes {
    /// Path to `major:minor`, which is empty when it is not known. What is made of its disks is among them.
    files: BTreeMap<PathBuf, String>,
    /// Whether it has no driver, or is losing it.
    unbinding: bool,
    /// What is made of its disks.
    stacked: Vec<Holder>,
}

impl Nodes {
    /// Finds them, except below directories whose name `enter` refuses.
    fn find(host: &Host, address: PciAddress, enter: fn(&str) -> bool) -> Self {
        let device = host.pci_device(address);
        let mut nodes =
            Self { unbinding: device.exists() && !device.join("driver").exists(), ..Self::default() };
        if let Some(group) =
            fs::read_link(device.join("iommu_group")).ok().as_deref().and_then(Path::file_name)
        {
            nodes.files.insert(host.dev.join("vfio").join(group), String::new());
        }
        for entry in entries(&device.join("vfio-dev")) {
            if let Some(name) = entry.file_name() {
                nodes.files.insert(host.dev.join("vfio/devices").join(name), String::new());
            }
        }
        if let Some(minor) = pci::nvidia_minor(host, address) {
            nodes.files.insert(host.dev.join(format!("nvidia{minor}")), String::new());
        }
        let mut left = MAX_DIRECTORIES;
        // The link to the function is followed, none below it.
        for child in entries(&device) {
            nodes.walk(host, &child, 1, &mut left, enter);
        }
        nodes
    }

    /// Whether it is the node of a VFIO device that is being unbound, which this function is too. Linux takes the node
    /// and its name in sysfs away before it waits for those who have it open, so that nothing says whose it was.
    fn is_unbinding(&self, host: &Host, node: &Path) -> bool {
        self.unbinding && node.parent() == Some(&host.dev.join("vfio/devices")) && !node.exists()
    }

    fn walk(
        &mut self,
        host: &Host,
        directory: &Path,
        depth: usize,
        left: &mut usize,
        enter: fn(&str) -> bool,
    ) {
        let own = directory.file_name().unwrap_or_default();
        if !enter(&own.to_string_lossy()) {
            return;
        }
        if depth > MAX_DEPTH || *left == 0 || !fs::symlink_metadata(directory).is_ok_and(|data| data.is_dir())
        {
            return;
        }
        *left -= 1;
        // A function behind this one, with a driver of its own.
        if directory.join("vendor").exists() && directory.join("class").exists() {
            return;
        }
        if let Ok(Some(number)) = files::read(&directory.join("dev")) {
            let text = files::read(&directory.join("uevent")).ok().flatten().unwrap_or_default();
            let named = text.lines().find_map(|line| line.strip_prefix("DEVNAME="));
            let node = host.dev.join(named.map_or(Path::new(own), Path::new));
            for above in entries(&directory.join("holders")) {
                let above = above.file_name().unwrap_or_default().to_string_lossy();
                self.add_stacked(host, node.clone(), &above);
                for (below, above) in blocks::stack(host, &above) {
                    self.add_stacked(host, blocks::node(host, &below), &above);
                }
            }
            self.files.insert(node, number.trim().to_owned());
        }
        for child in entries(directory) {
            self.walk(host, &child, depth + 1, left, enter);
        }
    }

    /// Adds what is made of a disk, or of what is made of it: its users use the disk.
    fn add_stacked(&mut self, host: &Host, device: PathBuf, above: &str) {
        for node in blocks::nodes(host, above) {
            self.files.insert(node, blocks::number(host, above).unwrap_or_default());
        }
        self.stacked.push(Holder::Block { device, by: blocks::shown(host, above) });
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Mounts of the nodes, from `mountinfo` (proc(5)).
fn mounts(host: &Host, nodes: &Nodes) -> Vec<Holder> {
    let text = files::read(&host.proc.join("self/mountinfo")).ok().flatten().unwrap_or_default();
    let mut found = Vec::new();
    for line in text.lines() {
        let Some((mount, source)) = line.split_once(" - ") else { continue };
        let (Some(number), Some(mounted_on)) = (mount.split(' ').nth(2), mount.split(' ').nth(4)) else {
            continue;
        };
        // File systems such as btrfs have a number of their own; their source tells.
        let source = source.split(' ').nth(1).unwrap_or_default();
        let node =
            nodes.files.iter().find(|(path, its)| *its == number || path.as_path() == Path::new(source));
        if let Some((path, _)) = node {
            found.push(Holder::Mount { device: path.clone(), mounted_on: unescape(mounted_on).into() });
        }
    }
    found
}

/// The octal escapes of `mountinfo`.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// The path of a file that has been removed since it was opened, from its link in procfs.
fn without_deleted(file: &Path) -> Option<PathBuf> {
    file.to_str()?.strip_suffix(" (deleted)").map(Into::into)
}

fn processes(host: &Host, nodes: &Nodes, address: PciAddress) -> Vec<Holder> {
    let mut found = Vec::new();
    for process in entries(&host.proc) {
        let Some(pid) = process.file_name().and_then(|name| name.to_str()?.parse().ok()) else { continue };
        let command = || files::read_trimmed(&process.join("comm")).unwrap_or_default();
        for descriptor in entries(&process.join("fd")) {
            let Ok(file) = fs::read_link(&descriptor) else { continue };
            let file = host.captured_path(&file).unwrap_or(file);
            let file = without_deleted(&file).filter(|node| nodes.is_unbinding(host, node)).unwrap_or(file);
            if nodes.files.contains_key(&file)
                || nodes.is_unbinding(host, &file)
                || is_vfio_device(&process, &descriptor, &file, address)
            {
                found.push(Holder::Process { pid, command: command(), file });
            }
        }
    }
    found
}

/// Whether a descriptor is a VFIO device file of the function that was got through its group, which has no node of
/// its own: Linux names the function in `fdinfo` (`vfio-device-syspath`, since 6.16).
fn is_vfio_device(process: &Path, descriptor: &Path, file: &Path, address: PciAddress) -> bool {
    if !file.to_string_lossy().starts_with("anon_inode:[vfio-device]") {
        return false;
    }
    let info = process.join("fdinfo").join(descriptor.file_name().unwrap_or_default());
    files::read(&info).ok().flatten().is_some_and(|text| {
        text.lines()
            .filter_map(|line| line.strip_prefix("vfio-device-syspath:"))
            .any(|path| path.trim().ends_with(&format!("/{address}")))
    })
}
