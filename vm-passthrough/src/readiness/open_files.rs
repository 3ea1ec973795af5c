//! Which processes have a function's device nodes open.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::pci::PciFunction;
use crate::{Host, files};

/// A file that a process has open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// The process.
    pub pid: u32,
    /// Its name, empty when it can't be read.
    pub command: String,
    /// What it has open.
    pub path: PathBuf,
}

impl fmt::Display for OpenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} open in pid {} ({})", self.path.display(), self.pid, self.command)
    }
}

/// The files by which processes other than this one use `function`: the nodes that its driver made (disks, DRM,
/// accel, NVIDIA's), VFIO's own, and its resources in sysfs. Processes that may not be looked into are passed over.
pub fn open_files(host: &Host, function: &PciFunction) -> Vec<OpenFile> {
    let nodes = nodes(host, function);
    let dir = host.pci_device(function.address);
    let dir = fs::canonicalize(&dir).unwrap_or(dir);
    let is_resource = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        path.parent() == Some(&dir) && name.starts_with("resource")
    };
    let own = std::process::id();
    let mut found = Vec::new();
    let mut pids: Vec<u32> =
        files::names(&host.proc).unwrap_or_default().iter().filter_map(|name| name.parse().ok()).collect();
    pids.sort_unstable();
    for pid in pids.into_iter().filter(|&pid| pid != own) {
        let process = host.proc.join(pid.to_string());
        let Ok(entries) = fs::read_dir(process.join("fd")) else { continue };
        let mut seen = BTreeSet::new();
        for entry in entries.flatten() {
            let Ok(path) = fs::read_link(entry.path()) else { continue };
            if (nodes.contains(&path) || is_resource(&path)) && seen.insert(path.clone()) {
                let command = files::read_trimmed(&process.join("comm")).unwrap_or_default();
                found.push(OpenFile { pid, command, path });
            }
        }
    }
    found
}

/// The device nodes of a function.
fn nodes(host: &Host, function: &PciFunction) -> BTreeSet<PathBuf> {
    let dir = host.pci_device(function.address);
    let dev = &host.dev;
    let mut nodes = BTreeSet::new();
    for (class, below) in [("drm", "dri"), ("accel", "accel"), ("vfio-dev", "vfio/devices")] {
        for name in files::names(&dir.join(class)).unwrap_or_default() {
            nodes.insert(dev.join(below).join(name));
        }
    }
    if let Some(group) = function.iommu_group {
        nodes.insert(dev.join("vfio").join(group.to_string()));
    }
    for name in files::names(&dir.join("nvme")).unwrap_or_default() {
        for disk in files::names(&dir.join("nvme").join(&name)).unwrap_or_default() {
            if disk.starts_with("nvme") {
                nodes.insert(dev.join(&disk));
                for part in files::names(&dir.join("nvme").join(&name).join(&disk)).unwrap_or_default() {
                    if part.starts_with(&disk) {
                        nodes.insert(dev.join(part));
                    }
                }
            }
        }
        nodes.insert(dev.join(name));
    }
    // NVIDIA's driver makes no node in sysfs; it says the number of /dev/nvidiaN in its own file.
    let information =
        host.proc.join("driver/nvidia/gpus").join(function.address.to_string()).join("information");
    if let Ok(Some(text)) = files::read(&information) {
        let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:"));
        if let Some(minor) = minor.and_then(|minor| minor.trim().parse::<u32>().ok()) {
            nodes.insert(dev.join(format!("nvidia{minor}")));
        }
    }
    nodes
}
