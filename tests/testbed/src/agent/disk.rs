//! NVMe disks, through the Linux kernel's own driver.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::data::{check_pattern, pattern};
use super::{Function, wait_until};
use crate::provision::fnv1a;

/// How long a disk may take to appear after its driver was bound.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The block device of an NVMe function's first namespace.
#[derive(Clone, Debug)]
pub struct NvmeDisk {
    /// Its device node.
    pub node: PathBuf,
    /// Its controller's name, as in `nvme0`.
    pub controller: String,
}

impl NvmeDisk {
    /// The disk behind the function, when the nvme driver has made it.
    ///
    /// # Errors
    /// When it does not appear.
    pub fn of(function: &Function) -> Result<Self> {
        wait_until(&format!("the disk of {}", function.address), TIMEOUT, || {
            let controller = first_entry(&function.path().join("nvme"), "nvme")?;
            let namespace = first_entry(&function.path().join("nvme").join(&controller), "nvme")?;
            let name = disk_name(&namespace);
            let node = PathBuf::from("/dev").join(name);
            // Its node is there before it can be opened.
            fs::File::open(&node).ok().map(|_| Self { node, controller })
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

fn first_entry(directory: &std::path::Path, prefix: &str) -> Option<String> {
    let names =
        fs::read_dir(directory).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).min()
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
