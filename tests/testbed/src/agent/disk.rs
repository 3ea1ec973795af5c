//! Disks, through the Linux kernel's own drivers.

use std::fs::{self, OpenOptions};
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::data::{check_pattern, pattern};
use super::{Function, wait_until};
use crate::provision::fnv1a;

/// How long a disk may take to appear after its driver was bound.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A block device.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Its device node.
    pub node: PathBuf,
}

/// The block device of an NVMe function's first namespace.
#[derive(Clone, Debug)]
pub struct NvmeDisk {
    disk: Disk,
    /// Its controller's name, as in `nvme0`.
    pub controller: String,
}

impl NvmeDisk {
    /// The disk behind the function, when the nvme driver has made it.
    ///
    /// # Errors
    /// When it does not appear.
    pub fn of(function: &Function) -> Result<Self> {
        let disk = Disk::all(function, 1)?.swap_remove(0);
        let controller = entries(&function.path().join("nvme"), "nvme").into_iter().next();
        Ok(Self { disk, controller: controller.context("it has no controller")? })
    }
}

impl Deref for NvmeDisk {
    type Target = Disk;

    fn deref(&self) -> &Disk {
        &self.disk
    }
}

impl Disk {
    /// The `count` disks behind the function, when its driver has made them.
    ///
    /// # Errors
    /// When they do not appear.
    pub fn all(function: &Function, count: usize) -> Result<Vec<Self>> {
        wait_until(&format!("{count} disks of {}", function.address), TIMEOUT, || {
            let nodes = names(function).into_iter().map(|name| PathBuf::from("/dev").join(name));
            // A node is there before it can be opened.
            let disks: Vec<_> =
                nodes.filter(|node| fs::File::open(node).is_ok()).map(|node| Self { node }).collect();
            (disks.len() == count).then_some(disks)
        })
    }

    /// Writes a pattern, and waits until the disk has it; its checksum.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn write_pattern(&self, seed: u64, offset: u64, len: usize) -> Result<u64> {
        let bytes = pattern(seed, len);
        let file = OpenOptions::new()
            .write(true)
            .open(&self.node)
            .with_context(|| format!("can't open {}", self.node.display()))?;
        file.write_all_at(&bytes, offset)
            .with_context(|| format!("can't write to {}", self.node.display()))?;
        file.sync_all().with_context(|| format!("can't flush {}", self.node.display()))?;
        Ok(fnv1a(&bytes))
    }

    /// Reads `len` bytes and checks that they are a pattern; their checksum.
    ///
    /// # Errors
    /// When the disk fails or has other data.
    pub fn check_pattern(&self, seed: u64, offset: u64, len: usize) -> Result<u64> {
        let mut bytes = vec![0; len];
        let file =
            fs::File::open(&self.node).with_context(|| format!("can't open {}", self.node.display()))?;
        file.read_exact_at(&mut bytes, offset)
            .with_context(|| format!("can't read {}", self.node.display()))?;
        check_pattern(&self.node.display().to_string(), seed, &bytes)
    }
}

/// The disk of a namespace. With multipath the controller has a path, as in `nvme0c1n1`, and the disk is `nvme0n1`.
fn disk_name(namespace: &str) -> String {
    let path = namespace.strip_prefix("nvme").and_then(|rest| rest.split_once('c'));
    match path.and_then(|(subsystem, rest)| Some((subsystem, rest.split_once('n')?.1))) {
        Some((subsystem, number)) => format!("nvme{subsystem}n{number}"),
        None => namespace.to_owned(),
    }
}

/// The names of the disks behind a function.
fn names(function: &Function) -> Vec<String> {
    // With multipath a namespace's disk is not below its controller.
    if let Some(controller) = entries(&function.path().join("nvme"), "nvme").first() {
        let controller = function.path().join("nvme").join(controller);
        let mut namespaces = entries(&controller, "nvme");
        // Linux numbers the disks as it finds the namespaces, several at a time.
        let id = |namespace: &String| fs::read_to_string(controller.join(namespace).join("nsid")).ok();
        namespaces.sort_by_key(|namespace| id(namespace)?.trim().parse::<u32>().ok());
        return namespaces.iter().map(|namespace| disk_name(namespace)).collect();
    }
    let Ok(place) = fs::canonicalize(function.path()) else { return Vec::new() };
    let class = Path::new("/sys/class/block");
    let is_below =
        |name: &String| fs::canonicalize(class.join(name)).is_ok_and(|disk| disk.starts_with(&place));
    entries(class, "").into_iter().filter(is_below).collect()
}

/// The names in a directory that begin with `prefix`, in order.
fn entries(directory: &Path, prefix: &str) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name.starts_with(prefix)).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::disk_name;

    #[test]
    fn a_path_of_multipath_leads_to_its_disk() {
        assert_eq!(disk_name("nvme0n1"), "nvme0n1");
        assert_eq!(disk_name("nvme2c3n1"), "nvme2n1");
    }
}
