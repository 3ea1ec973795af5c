//! One host with a dozen kinds of device, in every place on the bus: each is explained, attached, used by a Linux guest and
//! given back to the driver that it had. In a part of the sweep one of two kinds is taken, on one of the two back ends. `bench-rack` does the same with QEMU beside.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::device_kinds::XHCI;
use super::e1000::{self, E1000};
use super::linux_ati::{self, ATI};
use super::linux_big_bars::IVSHMEM;
use super::linux_e1000e::{self, E1000E, exchange_with};
use super::linux_igb::{self, IGB, IGB_VF};
use super::linux_nvme::NVME;
use super::linux_storage::VIRTIO_BLOCK;
use super::topology;
use crate::agent::{Disk, Ended, Engine, Function, Guest, GuestPlan, L1, L2, net};
use crate::scenario::{self, Contents, Scenario, Side, Variant, Variants};
use crate::scenarios::bare_edu::EDU;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "rack",
    about: "one host with a dozen kinds of device: each is explained, used by a Linux guest, and given back",
    variants: Variants::Both,
    ports: 13,
    devices: &[
        // The host's console is on the first, so that it is on no other.
        "-device",
        "VGA,addr=2.0",
        "-drive",
        "file={first},if=none,id=drive0,format=raw,cache=unsafe",
        "-drive",
        "file={second},if=none,id=drive1,format=raw,cache=unsafe",
        "-drive",
        "file={third},if=none,id=drive2,format=raw,cache=unsafe",
        "-drive",
        "file={fourth},if=none,id=drive3,format=raw,cache=unsafe",
        "-device",
        "x3130-upstream,id=switch0,bus=port0",
        "-device",
        "xio3130-downstream,id=down0,bus=switch0,chassis=21",
        "-device",
        "nvme,serial=below,drive=drive0,bus=down0",
        "-device",
        "pcie-pci-bridge,id=bridge0,bus=port1",
        "-device",
        "nvme,serial=behind,drive=drive1,bus=bridge0,addr=1.0",
        "-device",
        "virtio-blk-pci,drive=drive2,bus=port2,iommu_platform=on,disable-legacy=on",
        "-device",
        "qemu-xhci,id=usb0,bus=port3",
        "-device",
        "usb-storage,bus=usb0.0,drive=drive3",
        "-netdev",
        "hubport,id=net0,hubid=0",
        "-netdev",
        "hubport,id=net1,hubid=0",
        "-netdev",
        "hubport,id=net2,hubid=0",
        "-netdev",
        "hubport,id=net3,hubid=0",
        "-device",
        "e1000e,netdev=net0,mac=52:54:00:00:00:01,bus=port4",
        "-device",
        "e1000e,netdev=net1,mac=52:54:00:00:00:02,bus=port5",
        "-device",
        "e1000,netdev=net2,mac=52:54:00:00:00:03,bus=port6",
        "-device",
        "igb,netdev=net3,mac=52:54:00:00:00:04,bus=port7",
        "-device",
        "ati-vga,model=rv100,bus=port8",
        "-object",
        "memory-backend-ram,id=shared,size=16M",
        "-device",
        "ivshmem-plain,memdev=shared,bus=port9",
        "-device",
        "bochs-display,bus=port10",
        "-device",
        "virtio-rng-pci,bus=port11,iommu_platform=on,disable-legacy=on",
        "-device",
        "edu,bus=port12,dma_mask=0xffffffffffffffff",
    ],
    disks: &[
        scenario::Disk { name: "first", mib: 16 },
        scenario::Disk { name: "second", mib: 16 },
        scenario::Disk { name: "third", mib: 16 },
        scenario::Disk { name: "fourth", mib: 16 },
    ],
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, ..Contents::NONE },
    l1: |l1| each(l1, &[Engine::VmService]),
    l2: Some(l2),
};

pub(super) const BENCHMARK: Scenario = Scenario {
    name: "bench-rack",
    about: "gives each of a dozen kinds of device to a guest of vm-service and to one of QEMU",
    contents: Contents { peers: true, ..SCENARIO.contents },
    l1: |l1| each(l1, &[Engine::VmService, Engine::Qemu]),
    ..SCENARIO
};

const TIMEOUT: Duration = Duration::from_secs(600);
const LEN: usize = 256 << 10;
const HOST_SEED: u64 = 0x686f_7374;
const GUEST_SEED: u64 = 0x0067_7565_7374;
const GUEST_AT: u64 = 8 << 20;
const HOST_WORDS: [u32; 2] = [0x600d_0001, 0x600d_0002];
const GUEST_WORDS: [u32; 2] = [0x6e57_0001, 0x6e57_0002];
/// The first and a later page.
const PAGES: [u64; 2] = [0, 1 << 20];
/// What QEMU's edu reads at 0.
const EDU_ID: u32 = 0x0100_00ed;

/// A kind of device.
struct Kind {
    name: &'static str,
    /// Its ids, and which of those with the same in L1.
    ids: (u16, u16),
    number: usize,
    usage: Usage,
}

/// What a guest does with one.
enum Usage {
    /// Reads and writes its one disk.
    Disk,
    /// Exchanges data with L1 over the network, by the guest's side of that scenario.
    Network(Side<L2>),
    /// Reads its ROM and its ports.
    Rom,
    /// Reads and writes pages of this BAR.
    Bar(usize),
    /// Reads random numbers.
    Random,
    /// Reads its identification.
    Identification,
}

impl Kind {
    const fn new(name: &'static str, ids: (u16, u16), number: usize, usage: Usage) -> Self {
        Self { name, ids, number, usage }
    }

    fn in_host(&self) -> Result<Function> {
        let mut found = Function::find_all(self.ids.0, self.ids.1)?;
        ensure!(self.number < found.len(), "{}: {} functions are there", self.name, found.len());
        Ok(found.swap_remove(self.number))
    }
}

const KINDS: &[Kind] = &[
    Kind::new("NVMe below a switch", NVME, 0, Usage::Disk),
    Kind::new("NVMe behind a conventional bridge", NVME, 1, Usage::Disk),
    Kind::new("virtio-blk through the IOMMU", VIRTIO_BLOCK, 0, Usage::Disk),
    Kind::new("USB controller with a disk", XHCI, 0, Usage::Disk),
    Kind::new("e1000e (MSI-X)", E1000E, 1, Usage::Network(linux_e1000e::l2)),
    Kind::new("e1000 (INTx, ports)", E1000, 0, Usage::Network(e1000::exchange)),
    Kind::new("virtual function of igb", IGB_VF, 0, Usage::Network(linux_igb::l2)),
    Kind::new("ATI Rage (ROM, ports)", ATI, 0, Usage::Rom),
    Kind::new("shared memory (ivshmem)", IVSHMEM, 0, Usage::Bar(2)),
    Kind::new("display controller (bochs)", (0x1234, 0x1111), 1, Usage::Bar(0)),
    Kind::new("virtio-rng through the IOMMU", (0x1af4, 0x1044), 0, Usage::Random),
    Kind::new("edu", EDU, 0, Usage::Identification),
];

fn each(l1: &mut L1, engines: &[Engine]) -> Result<()> {
    let physical = Function::find(IGB.0, IGB.1)?;
    // A virtual function has the link of its physical one, which is up while its interface is.
    l1.vm_service(&["vfs", "create", &physical.address, "1"], TIMEOUT)?.succeeded()?;
    net::turn_on(&net::interface_of(&physical)?)?;
    for (number, kind) in KINDS.iter().enumerate() {
        // Linux as the testbed builds it has no drivers of USB; Debian's has.
        if kind.ids == XHCI && !Path::new("/sys/bus/pci/drivers/xhci_hcd").exists() {
            ensure!(l1.variant == Variant::Iommufd, "there is no driver of USB");
            continue;
        }
        // Each is the one of two neighbours on one back end, and the other on the other; a part of the sweep has one of these.
        let is_turn = l1.sweep.takes(number, 2) == (l1.variant == Variant::Group);
        if engines.len() == 1 && !l1.sweep.is_whole() && !is_turn && kind.ids != XHCI {
            continue;
        }
        for &engine in engines {
            let name = if engine == Engine::VmService { "vm-service" } else { "QEMU" };
            match give(l1, number, kind, engine).with_context(|| format!("{}, {name}", kind.name)) {
                Ok(took) => l1.figure(&format!("{}: run of its guest, {name}", kind.name), took, "s"),
                // It may have no answer for one.
                Err(error) if engine != Engine::VmService => {
                    l1.proved(format!("QEMU does not: {error:#}"));
                }
                Err(error) => return Err(error),
            }
        }
    }
    l1.vm_service(&["vfs", "remove", &physical.address], TIMEOUT)?.succeeded()?;
    Ok(())
}

/// Gives a device to a guest and takes it back; how long the guest ran, in seconds.
fn give(l1: &mut L1, number: usize, kind: &Kind, engine: Engine) -> Result<f64> {
    let function = kind.in_host()?;
    let driver = function.driver();
    let explained = l1.vm_service(&["explain", &function.address], TIMEOUT)?.succeeded()?;
    ensure!(explained.stdout.contains("ready"), "explain says {}", explained.stdout);
    let seed = number as u64;
    let mut cmdline = format!("kind={number} {}", topology::parameter(&[&function])?);
    match kind.usage {
        Usage::Disk => drop(disk(&function)?.write_pattern(HOST_SEED + seed, 0, LEN)?),
        Usage::Bar(bar) => drop(function.exchange_words(bar, &PAGES, Some(&HOST_WORDS))?),
        Usage::Rom => cmdline = format!("{cmdline} {}", linux_ati::expectation(&function)?),
        Usage::Network(_) | Usage::Random | Usage::Identification => {}
    }
    let is_qemu = engine == Engine::Qemu;
    if is_qemu {
        l1.vm_service(&["claim", &function.address], TIMEOUT)?.succeeded()?;
    }
    let name = format!("rack{number}{}", if is_qemu { "-qemu" } else { "" });
    let plan = GuestPlan { engine, cmdline: &cmdline, ..GuestPlan::linux(&name, &function) };
    let run = |l1: &mut L1| -> Result<Ended> {
        if matches!(kind.usage, Usage::Network(_)) {
            return exchange_with(l1, &Function::find_all(E1000E.0, E1000E.1)?[0], &plan);
        }
        Guest::start(l1, &plan)?.end(TIMEOUT)?.succeeded(l1)
    };
    let ended = run(l1);
    if is_qemu {
        l1.vm_service(&["release", &function.address], TIMEOUT)?.succeeded()?;
    }
    let ended = ended?;
    ensure!(function.driver() == driver, "its driver is {:?}, and was {driver:?}", function.driver());
    match kind.usage {
        Usage::Disk => {
            let disk = disk(&function)?;
            disk.check_pattern(HOST_SEED + seed, 0, LEN)?;
            disk.check_pattern(GUEST_SEED + seed, GUEST_AT, LEN)?;
        }
        Usage::Bar(bar) if kind.ids == IVSHMEM => {
            let words = function.exchange_words(bar, &PAGES, None)?;
            ensure!(words == GUEST_WORDS, "the host reads {words:x?}");
        }
        _ => {}
    }
    l1.proved(format!("{}: explained, attached, used, and given back to {driver:?}", kind.name));
    Ok(ended.process.took.as_secs_f64())
}

fn disk(function: &Function) -> Result<Disk> {
    Disk::all(function, 1)?.pop().context("it has no disk")
}

fn l2(l2: &mut L2) -> Result<()> {
    let number: usize = l2.parameter("kind")?.parse()?;
    let kind = KINDS.get(number).context("there is no such kind")?;
    let function = Function::find(kind.ids.0, kind.ids.1)?;
    topology::compare(l2, &[&function])?;
    let seed = number as u64;
    match kind.usage {
        Usage::Disk => {
            let disk = disk(&function)?;
            disk.check_pattern(HOST_SEED + seed, 0, LEN)?;
            disk.write_pattern(GUEST_SEED + seed, GUEST_AT, LEN)?;
        }
        Usage::Network(exchange) => exchange(l2)?,
        Usage::Rom => return linux_ati::compare(l2),
        Usage::Bar(bar) => {
            let before = function.exchange_words(bar, &PAGES, Some(&GUEST_WORDS))?;
            // What a display shows is lost in a reset.
            ensure!(kind.ids != IVSHMEM || before == HOST_WORDS, "the guest reads {before:x?}");
            let words = function.exchange_words(bar, &PAGES, None)?;
            ensure!(words == GUEST_WORDS, "the guest reads {words:x?}");
        }
        Usage::Random => {
            let mut bytes = [0; 64];
            let current = fs::read_to_string("/sys/class/misc/hw_random/rng_current")?;
            ensure!(current.starts_with("virtio_rng"), "random numbers come from {current}");
            File::open("/dev/hwrng")?.read_exact(&mut bytes)?;
            ensure!(bytes != [0; 64], "the numbers are all 0");
        }
        Usage::Identification => {
            let id = function.exchange_words(0, &[0], None)?;
            ensure!(id == [EDU_ID], "it reads {id:x?}");
        }
    }
    l2.prove(true, format!("{}: used", kind.name))
}
