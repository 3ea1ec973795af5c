//! The host takes a device back from a running guest that does not know hot-plug, in every way that there is: it is let go at once,
//! what is said is what happened, and the guest goes on, as others do.

use std::fs;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::agent::{Function, Guest, GuestPlan, L1, wait_until};
use crate::scenario::{Contents, Disk, Scenario, Variant, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "host-wants-back",
    about: "a device that the host removes, unbinds, unplugs or switches off is let go at once, and truthfully",
    variants: Variants::Both,
    ports: 6,
    devices: DEVICES,
    disks: DISKS,
    memory_mib: 768,
    deadline: Duration::from_secs(600),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

pub(super) const DISKS: &[Disk] = &[Disk { name: "disk", mib: 16 }];
/// An NVMe controller, one with a virtual function, and edus, in slots of their own.
pub(super) const DEVICES: &[&str] = &[
    // Ports do hot-plug themselves.
    "-global",
    "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
    "-drive",
    "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
    "-device",
    "nvme,id=nvme0,drive=drive0,serial=testbed,bus=port0",
    "-device",
    "edu,id=pulled,bus=port1,dma_mask=0xffffffffffffffff",
    "-device",
    "edu,bus=port2,dma_mask=0xffffffffffffffff",
    "-device",
    "nvme-subsys,id=subsystem",
    "-device",
    "nvme,serial=virtual,bus=port3,subsys=subsystem,sriov_max_vfs=1,sriov_vq_flexible=2,sriov_vi_flexible=1",
    "-device",
    "edu,bus=port4,dma_mask=0xffffffffffffffff",
    "-device",
    "edu,bus=port5,dma_mask=0xffffffffffffffff",
];

/// Where ACPI does the hot-plug.
pub(super) const BY_ACPI: Scenario = Scenario {
    name: "host-wants-back-acpi",
    about: "a device that is unplugged through ACPI is let go at once, and truthfully",
    variants: Variants::Only(Variant::Iommufd),
    ports: 2,
    devices: &[
        "-device",
        "edu,id=pulled,bus=port0,dma_mask=0xffffffffffffffff",
        "-device",
        "edu,bus=port1,dma_mask=0xffffffffffffffff",
    ],
    disks: &[],
    l1: by_acpi,
    ..SCENARIO
};

const PATIENCE: Duration = Duration::from_secs(600);

fn l1(l1: &mut L1) -> Result<()> {
    let [pulled, powered, other, idle] = exactly(Function::find_all(EDU.0, EDU.1)?)?;
    let [nvme, physical] = exactly(Function::find_all(NVME.0, NVME.1)?)?;
    let mut others = Others::start(l1, &other)?;

    let path = nvme.path().join("remove");
    take(l1, &mut others, &nvme, "remove", |_| Some(write(&path, "1")), || !nvme.path().exists())?;
    fs::write("/sys/bus/pci/rescan", "1")?;
    let back = || (nvme.driver().as_deref() == Some("nvme")).then_some(());
    wait_until("the disk after a rescan of the bus", PATIENCE, back)?;

    let path = Path::new("/sys/bus/pci/drivers/vfio-pci/unbind");
    take(l1, &mut others, &nvme, "unbind by hand", |_| Some(write(path, &nvme.address)), || true)?;
    wait_until("the driver after an unbind by hand", PATIENCE, back)?;
    l1.proved("its former driver has what was unbound by hand");

    // PCI Express gives hardware a second after VF Enable is cleared, and after a slot's power is switched off. Linux sleeps so
    // long (`sriov_disable`, pciehp's `remove_board`) also when nobody uses the function.
    let path = physical.path().join("sriov_numvfs");
    fs::write(physical.path().join("sriov_drivers_autoprobe"), "0")?;
    let enable = || -> Result<Function> {
        fs::write(&path, "1").context("can't make a virtual function")?;
        let all = Function::find_all(NVME.0, NVME.1)?;
        all.into_iter().find(|f| *f != nvme && *f != physical).context("there is no virtual function")
    };
    enable()?;
    unused(l1, "sriov_numvfs=0", || Ok(fs::write(&path, "0")?))?;
    let function = enable()?;
    let is_gone = || !function.path().exists();
    take(l1, &mut others, &function, "sriov_numvfs=0", |_| Some(write(&path, "0")), is_gone)?;

    unused(l1, "slot power off", || Ok(fs::write(slot_of(&idle)?.join("power"), "0")?))?;
    let path = slot_of(&powered)?.join("power");
    let is_gone = || !powered.path().exists();
    take(l1, &mut others, &powered, "slot power off", |_| Some(write(&path, "0")), is_gone)?;
    unplug(l1, &mut others, &pulled)?;
    others.end(l1)
}

fn by_acpi(l1: &mut L1) -> Result<()> {
    let [pulled, other] = exactly(Function::find_all(EDU.0, EDU.1)?)?;
    let mut others = Others::start(l1, &other)?;
    unplug(l1, &mut others, &pulled)?;
    others.end(l1)
}

/// Tells how long the Linux kernel takes where nobody has the function.
fn unused(l1: &mut L1, how: &str, ask: impl FnOnce() -> Result<()>) -> Result<()> {
    let asked = Instant::now();
    ask()?;
    l1.figure(&format!("{how} of what nobody uses"), asked.elapsed().as_secs_f64(), "s");
    Ok(())
}

/// QEMU presses the port's button, or has ACPI eject the device.
fn unplug(l1: &mut L1, others: &mut Others, function: &Function) -> Result<()> {
    let ask = |l1: &mut L1| {
        l1.monitor("device_del pulled");
        None
    };
    take(l1, others, function, "device_del", ask, || !function.path().exists())
}

/// Gives a guest the function and takes it back: `ask` does that, in a thread where the Linux kernel keeps it waiting.
/// Tells how long that took, and what of it is whose: until the guest's process hears of it, until that has let go of the
/// function, and what the Linux kernel does afterwards.
fn take(
    l1: &mut L1,
    others: &mut Others,
    function: &Function,
    how: &str,
    ask: impl FnOnce(&mut L1) -> Option<Asking>,
    is_taken: impl Fn() -> bool,
) -> Result<()> {
    let mut guest = Guest::start(l1, &GuestPlan::bare("taken", "spin", function))?;
    guest.wait_for_log("attached in", PATIENCE)?;
    ensure!(guest.holds_a_device(), "{how}: the guest's process is not seen to hold a device");
    l1.step(format!("{how} of {}", function.address));
    let asked = Instant::now();
    let asking = ask(l1);
    let (mut heard, mut let_go) = (None, None);
    let took = wait_until(&format!("{how}: the host's having it"), PATIENCE, || {
        let now = asked.elapsed();
        if heard.is_none() && guest.log().contains("the host asked for") {
            heard = Some(now);
        }
        if let_go.is_none() && !guest.holds_a_device() {
            let_go = Some(now);
        }
        (is_taken() && asking.as_ref().is_none_or(JoinHandle::is_finished)).then_some(now)
    })?;
    ended(asking, how)?;
    let let_go = let_go.unwrap_or(took);
    let heard = heard.unwrap_or(let_go).min(let_go);
    for (part, time) in [
        ("until the host has it", took),
        ("of it until the guest's process hears of it", heard),
        ("of it until that has let go of it", let_go - heard),
        ("of it until Linux is through with it", took - let_go),
    ] {
        l1.figure(&format!("{how}, {part}"), time.as_secs_f64(), "s");
    }
    let said = guest.log();
    l1.proved(format!("{how}: the host has it"));
    l1.prove(guest.runs() && !guest.holds_a_device(), format!("{how}: the guest goes on without it"))
        .with_context(|| said.clone())?;
    for words in [
        format!("the host asked for {} back", function.address),
        format!("the guest can't be asked for {}", function.address),
        format!("{} was given up without a reset", function.address),
    ] {
        ensure!(said.contains(&words), "{how}: it did not say {words:?}, but: {said}");
    }
    l1.proved(format!("{how}: it is said who took it, and that it was not reset"));
    let pid = rustix::process::Pid::from_raw(guest.pid().cast_signed()).context("no process ID")?;
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    let ended = guest.end(PATIENCE)?.process;
    l1.prove(ended.code == Some(0), format!("{how}: the guest's process ends well when it is asked to"))
        .with_context(|| ended.stderr.clone())?;
    for words in ["VFIO_DEVICE_RESET", "could be released", "tried again", "panicked"] {
        ensure!(!ended.stderr.contains(words), "{how}: it said {words:?}: {}", ended.stderr);
    }
    l1.prove(others.guest.runs(), format!("{how}: the other guest goes on"))
}

/// A guest with another device, which is there all the while.
pub(super) struct Others {
    guest: Guest,
    device: Function,
}

impl Others {
    pub(super) fn start(l1: &mut L1, device: &Function) -> Result<Self> {
        let mut guest = Guest::start(l1, &GuestPlan::bare("other", "spin", device))?;
        guest.wait_for_log("attached in", PATIENCE)?;
        Ok(Self { guest, device: device.clone() })
    }

    /// Its device works as ever in the next guest.
    pub(super) fn end(self, l1: &mut L1) -> Result<()> {
        drop(self.guest);
        Guest::start(l1, &GuestPlan::bare("next", "edu", &self.device))?.end(PATIENCE)?.succeeded(l1)?;
        Ok(())
    }
}

type Asking = JoinHandle<std::io::Result<()>>;

/// What came of asking.
fn ended(asking: Option<Asking>, how: &str) -> Result<()> {
    let Some(asking) = asking else { return Ok(()) };
    asking.join().map_err(|_| anyhow!("the thread that asks panicked"))?.with_context(|| how.to_owned())
}

/// Writes to an attribute, which the Linux kernel ends when the device is let go.
fn write(path: &Path, value: &str) -> Asking {
    let (path, value) = (path.to_owned(), value.to_owned());
    std::thread::spawn(move || fs::write(path, value))
}

/// The directory of the slot that a function is in.
fn slot_of(function: &Function) -> Result<std::path::PathBuf> {
    let device = function.address.split('.').next().unwrap_or_default();
    let slots = fs::read_dir("/sys/bus/pci/slots").context("there are no slots")?;
    let mut slots = slots.flatten().map(|slot| slot.path());
    slots
        .find(|slot| fs::read_to_string(slot.join("address")).is_ok_and(|address| address.trim() == device))
        .with_context(|| format!("{device} is in no slot"))
}

fn exactly<const N: usize>(found: Vec<Function>) -> Result<[Function; N]> {
    found.try_into().map_err(|found: Vec<_>| anyhow!("these are {}, not {N}: {found:?}", found.len()))
}
