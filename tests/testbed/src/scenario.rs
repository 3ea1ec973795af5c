//! What a scenario is.

use std::fmt;
use std::time::Duration;

use crate::agent::{L1, L2};
use crate::sweep::Sweep;

/// Which VFIO back end L1 has, and so which Linux kernel it boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Debian's stock Linux kernel: group and container.
    Group,
    /// The self-built Linux kernel: iommufd and device cdevs.
    Iommufd,
}

impl Variant {
    /// All of them.
    pub const ALL: &'static [Self] = &[Self::Group, Self::Iommufd];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Iommufd => "iommufd",
        }
    }

    /// The variant of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|variant| variant.name() == name)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The variants that a scenario runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variants {
    /// This one.
    Only(Variant),
    /// Both; a part of the sweep takes one.
    Both,
}

impl Variants {
    /// All of them.
    pub fn all(self) -> &'static [Variant] {
        match self {
            Self::Only(Variant::Group) => &[Variant::Group],
            Self::Only(Variant::Iommufd) => &[Variant::Iommufd],
            Self::Both => Variant::ALL,
        }
    }

    /// Those that a sweep takes; `place` is the scenario's among others.
    pub fn taken(self, place: usize, sweep: Sweep) -> impl Iterator<Item = Variant> {
        let all = self.all();
        // Far from the points that scenarios have, so that these are taken on either.
        let first = (place + (1 << 32)) * all.len();
        all.iter()
            .enumerate()
            .filter(move |(at, _)| sweep.takes(first + at, all.len()))
            .map(|(_, variant)| *variant)
    }
}

impl fmt::Display for Variants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.all().iter().map(|variant| variant.name()).collect();
        f.pad(&names.join(","))
    }
}

/// A disk image that the testbed makes for L1's devices; `{NAME}` in the device arguments is its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its name in the device arguments.
    pub name: &'static str,
    /// Its size in MiB.
    pub mib: u64,
}

/// In the device arguments, the image of the disk with CuPy.
pub const CUPY_DISK: &str = "{cupy}";

/// What goes into L1 beside the agent and `vm-service`.
#[derive(Clone, Copy, Debug)]
pub struct Contents {
    /// Compilers and accelerators in `vm-service`: most of what there is to build of it.
    pub accelerators: bool,
    /// The Linux kernel and the initial RAM disk of a Linux guest, as `/guest/kernel` and `/guest/initrd`.
    pub linux_guest: bool,
    /// The bare guest, as `/guest/bare`.
    pub bare_guest: bool,
    /// Other VMMs to compare with: this machine's QEMU with its libraries and firmware, and cloud-hypervisor where the
    /// testbed was given one.
    pub peers: bool,
    /// The examples of Linux programs that use a shared accelerator, in the Linux guest: by the protocol's client as `/bin/softmax`, by
    /// a worker as `/bin/worker`.
    pub examples: bool,
    /// This machine's Python with numpy and the wheel of the Python package, in the Linux guest: below `/python`.
    pub python: bool,
    /// The same in L1.
    pub python_in_l1: bool,
    /// A CUDA driver for the processor, beside `vm-service`; in the Linux guest, the bridge's `libcuda.so.1` and a program of CUDA's static
    /// runtime as nvcc builds it, below `/cuda`.
    pub cuda: bool,
    /// CuPy, with this machine's Python, NVIDIA's compiler of kernels and its headers: on a disk for L1, whose image is [`CUPY_DISK`] in the
    /// device arguments. The Linux guest has the modules of its file system.
    pub cupy: bool,
    /// The library's examples that scenarios run: of a VMM that implements its boundary itself, of two processes that drive
    /// one device, of what mapping RAM for DMA takes, and of turns at a dma-buf, as `/bin/own_vmm`, `/bin/vfio_edu`, `/bin/map_ram` and
    /// `/bin/dma_buf`.
    pub library_examples: bool,
    /// This machine's systemd, with the units of the project's package.
    pub systemd: bool,
}

impl Contents {
    /// None of it.
    pub const NONE: Self = Self {
        accelerators: false,
        linux_guest: false,
        bare_guest: false,
        peers: false,
        examples: false,
        python: false,
        python_in_l1: false,
        cuda: false,
        cupy: false,
        library_examples: false,
        systemd: false,
    };

    /// What either has.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self {
            accelerators: self.accelerators || other.accelerators,
            linux_guest: self.linux_guest || other.linux_guest,
            bare_guest: self.bare_guest || other.bare_guest,
            peers: self.peers || other.peers,
            examples: self.examples || other.examples,
            python: self.python || other.python,
            python_in_l1: self.python_in_l1 || other.python_in_l1,
            cuda: self.cuda || other.cuda,
            cupy: self.cupy || other.cupy,
            library_examples: self.library_examples || other.library_examples,
            systemd: self.systemd || other.systemd,
        }
    }
}

/// What one side of a scenario does.
pub type Side<M> = fn(&mut M) -> anyhow::Result<()>;

/// One scenario: a machine, and what is done in it.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it proves, in a sentence.
    pub about: &'static str,
    /// The variants that it runs on.
    pub variants: Variants,
    /// How many PCI Express root ports L1 has: `port0`, `port1` …, as devices 4, 5 … of its root bus.
    pub ports: u8,
    /// QEMU's arguments for L1's other devices.
    pub devices: &'static [&'static str],
    /// Disk images for them.
    pub disks: &'static [Disk],
    /// L1's memory in MiB.
    pub memory_mib: u32,
    /// How long it may take, with L1's start and power-off.
    pub deadline: Duration,
    /// What L1 needs.
    pub contents: Contents,
    /// What L1's agent does.
    pub l1: Side<L1>,
    /// What the agent of a Linux guest does.
    pub l2: Option<Side<L2>>,
}

impl Scenario {
    /// Whether L1 is the same machine for both, so that they can be run in it one after the other. What is large in it, or in its guests, only
    /// takes memory of those that did not ask for it. Ports at which devices are pulled are nobody else's: QEMU does not wholly forget a display that
    /// was at one, and ends when another comes there.
    pub fn has_machine_of(&self, other: &Self) -> bool {
        const EXTERNAL_PORTS: &str = "file={external-ports}";
        let devices = |of: &Self| (of.ports, of.devices, of.disks);
        let large = |Contents { examples, python, python_in_l1, cuda, cupy, peers, systemd, .. }| {
            [examples, python, python_in_l1, cuda, cupy, peers, systemd]
        };
        devices(self) == devices(other)
            && large(self.contents) == large(other.contents)
            && !self.devices.contains(&EXTERNAL_PORTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_sweep_takes_turns_with_variants() {
        let taken = |variants: Variants, place: usize, seed: Option<u64>| -> Vec<Variant> {
            let seed = seed.map(|seed| seed.to_string());
            variants.taken(place, Sweep::parse(seed.as_deref()).expect("a seed")).collect()
        };
        for place in 0..50 {
            let mut turns = [0; 2];
            for seed in 0..20 {
                let [one] = taken(Variants::Both, place, Some(seed))[..] else { panic!("not one") };
                turns[usize::from(one == Variant::Iommufd)] += 1;
                assert_eq!(taken(Variants::Only(Variant::Group), place, Some(seed)), [Variant::Group]);
            }
            assert!(turns.iter().all(|&turns| turns > 0), "{turns:?}");
            assert_eq!(taken(Variants::Both, place, None), Variant::ALL);
        }
    }
}
