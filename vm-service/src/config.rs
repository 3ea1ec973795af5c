//! Guests as TOML files.

use std::path::PathBuf;

use vm_passthrough::PciAddress;

/// One guest, as its file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestConfig {
    /// Its name: letters, digits, `-` and `_`, at most 64.
    pub name: String,
    /// Number of vCPUs, 1 to 255.
    pub vcpus: u8,
    /// RAM in bytes, a multiple of 2 MiB.
    pub memory: u64,
    /// What it boots.
    pub boot: Boot,
    /// Host PCI functions that it owns.
    pub devices: Vec<PciAddress>,
    /// Its virtio-blk disks, in order.
    pub disks: Vec<Disk>,
}

/// What a guest boots: a Linux kernel (bzImage or vmlinux), or a bare ELF program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The Linux kernel or program.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Command line.
    pub cmdline: String,
}

/// A virtio-blk disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// A raw image file or a block device.
    pub path: PathBuf,
    /// Whether the guest may only read it.
    pub read_only: bool,
}
