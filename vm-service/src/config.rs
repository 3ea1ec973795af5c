//! Guests as TOML files: the model, and the limits that it keeps.

mod accelerator;
mod device;
mod error;
mod files;
mod net;
mod read;
mod size;
mod vsock;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vm_passthrough::PciAddress;

use crate::os::sandbox::Measure;

pub use accelerator::{
    AcceleratorDevice, MIN_HOST_MEMORY, SharedAccelerator, TIME_PERIOD, Trust, parse_deadline,
    parse_time_slice,
};
pub use device::{DeviceSettings, RomSetting};
pub use error::{ConfigError, MissingFile, Problem};
pub(crate) use files::open_file;
pub use net::{MacAddress, Net};
pub(crate) use read::{GUEST_WAIVERS, is_name, memory_argument, name_rule, uneven, vcpus_argument};
pub use size::{format_size, parse_size};
pub use vsock::Vsock;

/// One guest, as its file describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    /// Its name: letters, digits, `-` and `_`, at most 64, of which the first is not `-`.
    pub name: String,
    /// Number of vCPUs, 1 to 255.
    pub vcpus: u8,
    /// RAM in bytes, a multiple of 2 MiB.
    pub memory: u64,
    /// Size in bytes of the huge pages that its RAM is made of; `None` for pages of whatever size the Linux kernel finds.
    pub hugepages: Option<u64>,
    /// The host's NUMA nodes for its RAM and vCPUs; `None` for those of its devices.
    pub numa_nodes: Option<Vec<u16>>,
    /// What it boots.
    pub boot: Boot,
    /// Host PCI functions that it owns.
    pub devices: Vec<PciAddress>,
    /// What is said of those of which anything is.
    pub settings: BTreeMap<PciAddress, DeviceSettings>,
    /// Whether its devices reach each other's BARs by DMA.
    pub peer_to_peer: bool,
    /// Slots for devices that come while it runs; `None` for a few, as far as there is room.
    pub hot_plug_slots: Option<u8>,
    /// Accelerators of the host that it shares.
    pub accelerators: Vec<SharedAccelerator>,
    /// The vsock device, if its context id is chosen.
    pub vsock: Option<Vsock>,
    /// Its virtio-blk disks, in order.
    pub disks: Vec<Disk>,
    /// Its network interfaces, in order.
    pub nets: Vec<Net>,
    /// Measures of its VMM's confinement that the operator waived.
    pub unconfined: Vec<Measure>,
}

impl GuestConfig {
    /// Size in bytes of the pages of which its RAM has a whole number.
    pub fn ram_page(&self) -> u64 {
        self.hugepages.unwrap_or(MEMORY_STEP)
    }
}

/// What a guest boots: a Linux kernel (bzImage or vmlinux), or a bare ELF program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// The Linux kernel or program.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Command line.
    pub cmdline: String,
}

/// A virtio-blk disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// A raw image file or a block device.
    pub path: PathBuf,
    /// Whether the guest may only read it.
    pub read_only: bool,
}

/// Most bytes that a guest file may have.
pub const MAX_FILE: usize = 1 << 20;
/// Most characters in a guest's name.
pub const MAX_NAME: usize = 64;
/// Least RAM of a guest, in bytes.
pub const MIN_MEMORY: u64 = 2 << 20;
/// Most RAM of a guest, in bytes.
pub const MAX_MEMORY: u64 = 16 << 40;
/// RAM comes in multiples of this, in bytes: the size of a huge page.
pub const MEMORY_STEP: u64 = 2 << 20;
/// Sizes of huge pages that x86-64 has, in bytes.
pub const HUGEPAGE_SIZES: [u64; 2] = [2 << 20, 1 << 30];
/// Most bytes of a command line: Linux on x86-64 reads 2,048 with the final zero.
pub const MAX_CMDLINE: usize = 2047;
/// Most passthrough devices of one guest: each sits behind a root port of its own on bus 0.
pub const MAX_DEVICES: usize = 16;
/// Most slots of one guest for devices that come while it runs.
pub const MAX_HOT_PLUG_SLOTS: u8 = 16;
/// Most accelerators that one guest shares.
pub const MAX_ACCELERATORS: usize = 4;
/// Most virtio-blk disks of one guest.
pub const MAX_DISKS: usize = 8;
/// Most NUMA nodes of a guest.
pub const MAX_NUMA_NODES: usize = 8;
/// Most network interfaces of one guest.
pub const MAX_NETS: usize = 8;

/// Feeds arbitrary bytes to the reader of guest files, for fuzzing: it must answer with a guest or with errors
/// that can be printed, and a guest that it accepts must keep every limit.
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match GuestConfig::parse(text, std::path::Path::new("fuzz.toml")) {
        Ok(guest) => {
            assert!(!guest.name.is_empty() && guest.name.len() <= MAX_NAME);
            assert!(guest.vcpus >= 1);
            assert!(guest.memory >= MIN_MEMORY && guest.memory <= MAX_MEMORY);
            assert_eq!(guest.memory % guest.hugepages.unwrap_or(MEMORY_STEP), 0);
            assert!(guest.boot.cmdline.len() <= MAX_CMDLINE);
            assert!(guest.devices.len() <= MAX_DEVICES && guest.disks.len() <= MAX_DISKS);
            assert!(guest.settings.keys().all(|device| guest.devices.contains(device)));
            assert!(guest.hot_plug_slots.is_none_or(|slots| slots <= MAX_HOT_PLUG_SLOTS));
            assert!(guest.nets.len() <= MAX_NETS);
            assert!(guest.nets.iter().all(|net| (1..=15).contains(&net.tap.len())));
            assert!(guest.nets.iter().filter_map(|net| net.mac).all(|mac| mac.0[0] & 1 == 0));
            assert!(guest.accelerators.len() <= MAX_ACCELERATORS);
            assert!(guest.accelerators.iter().all(|shared| shared.time_slice <= TIME_PERIOD));
            assert!(guest.accelerators.iter().filter_map(|shared| shared.window).all(u64::is_power_of_two));
            assert!(guest.vsock.is_none_or(|vsock| vsock.cid >= 3 && vsock.cid < u32::MAX));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[cfg(test)]
mod tests;
