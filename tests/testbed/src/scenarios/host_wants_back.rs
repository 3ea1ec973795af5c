//! The host takes a device back from a running guest, in every way that there is: it is let go at once, what is said is
//! what happened, and other guests go on.

use std::fs;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::agent::{Function, Guest, GuestPlan, L1, wait_until};
use crate::scenario::{Contents, Disk, Scenario, Variant};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "host-wants-back",
    about: "a device that the host removes, unbinds, unplugs or switches off is let go at once, and truthfully",
    variants: Variant::ALL,
    devices: &[
        // Ports do hot-plug themselves.
        "-global",
        "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
        "-device",
        "pcie-root-port,id=port0,chassis=1,addr=4.0",
        "-device",
        "pcie-root-port,id=port1,chassis=2,addr=5.0",
        "-device",
        "pcie-root-port,id=port2,chassis=3,addr=6.0",
        "-device",
        "pcie-root-port,id=port3,chassis=4,addr=7.0",
        "-device",
        "pcie-root-port,id=port4,chassis=5,addr=8.0",
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=port0",
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
    ],
    disks: &[Disk { name: "disk", mib: 16 }],
    memory_mib: 768,
    deadline: Duration::from_secs(400),
    contents: Contents { linux_guest: false, bare_guest: true, qemu: false, example: false },
    l1,
    l2: None,
};

/// Where ACPI does the hot-plug.
pub(super) const BY_ACPI: Scenario = Scenario {
    name: "host-wants-back-acpi",
    about: "a device that is unplugged through ACPI is let go at once, and truthfully",
    variants: &[Variant::Iommufd],
    devices: &[
        "-device",
        "pcie-root-port,id=port0,chassis=1,addr=4.0",
        "-device",
        "pcie-root-port,id=port1,chassis=2,addr=5.0",
        "-device",
        "edu,id=pulled,bus=port0,dma_mask=0xffffffffffffffff",
        "-device",
        "edu,bus=port1,dma_mask=0xffffffffffffffff",
    ],
    disks: &[],
    l1: by_acpi,
    ..SCENARIO
};

const PATIENCE: Duration = Duration::from_secs(120);
/// How long the host may have to wait. A port blinks for five seconds before it does what its button says.
const LET_GO: Duration = Duration::from_secs(10);

fn l1(l1: &mut L1) -> Result<()> {
    let [pulled, powered, other] = three(Function::find_all(EDU.0, EDU.1)?)?;
    let [nvme, physical] = two(Function::find_all(NVME.0, NVME.1)?)?;
    let mut others = Others::start(l1, &other)?;

    let path = nvme.path().join("remove");
    let gone = nvme.clone();
    take(l1, &mut others, &nvme, "remove", || Ok(Some(write(&path, "1"))), move || !gone.path().exists())?;
    fs::write("/sys/bus/pci/rescan", "1")?;
    let back = || (nvme.driver().as_deref() == Some("nvme")).then_some(());
    wait_until("the disk after the bus was scanned anew", PATIENCE, back)?;

    let path = Path::new("/sys/bus/pci/drivers/vfio-pci/unbind");
    take(l1, &mut others, &nvme, "unbind by hand", || Ok(Some(write(path, &nvme.address))), || true)?;
    l1.prove(nvme.driver().as_deref() == Some("nvme"), "its former driver has what was unbound by hand")?;

    let number = physical.path().join("sriov_numvfs");
    fs::write(physical.path().join("sriov_drivers_autoprobe"), "0")?;
    fs::write(&number, "1").context("can't make a virtual function")?;
    let virtual_function =
        Function::find_all(NVME.0, NVME.1)?.into_iter().find(|f| *f != nvme && *f != physical);
    let virtual_function = virtual_function.context("there is no virtual function")?;
    let gone = virtual_function.clone();
    let ask = || Ok(Some(write(&number, "0")));
    take(l1, &mut others, &virtual_function, "sriov_numvfs=0", ask, move || !gone.path().exists())?;

    let path = slot_of(&powered)?.join("power");
    let gone = powered.clone();
    take(
        l1,
        &mut others,
        &powered,
        "slot power off",
        || Ok(Some(write(&path, "0"))),
        move || !gone.path().exists(),
    )?;
    unplug(l1, &mut others, &pulled)?;
    others.end(l1)
}

fn by_acpi(l1: &mut L1) -> Result<()> {
    let [pulled, other] = two(Function::find_all(EDU.0, EDU.1)?)?;
    let mut others = Others::start(l1, &other)?;
    unplug(l1, &mut others, &pulled)?;
    others.end(l1)
}

/// QEMU presses the port's button, or has ACPI eject the device.
fn unplug(l1: &mut L1, others: &mut Others, function: &Function) -> Result<()> {
    let gone = function.clone();
    let (guest, asked) = start(l1, function, "device_del")?;
    l1.monitor("device_del pulled");
    finish(l1, others, function, "device_del", guest, asked, None, move || !gone.path().exists())
}

/// A guest with the function; and when it ran.
fn start(l1: &mut L1, function: &Function, how: &str) -> Result<(Guest, Instant)> {
    let mut guest = Guest::start(l1, &GuestPlan::bare("taken", "spin", function))?;
    guest.wait_for_log("starts after", PATIENCE)?;
    l1.step(format!("{how} of {}", function.address));
    Ok((guest, Instant::now()))
}

/// Gives a guest the function and takes it back: `ask` does that, in a thread where the Linux kernel keeps it waiting.
fn take(
    l1: &mut L1,
    others: &mut Others,
    function: &Function,
    how: &str,
    ask: impl FnOnce() -> Result<Option<Asking>>,
    is_taken: impl Fn() -> bool,
) -> Result<()> {
    let (guest, asked) = start(l1, function, how)?;
    let asking = ask()?;
    finish(l1, others, function, how, guest, asked, asking, is_taken)
}

#[expect(clippy::too_many_arguments, reason = "they are what there is of one request")]
fn finish(
    l1: &mut L1,
    others: &mut Others,
    function: &Function,
    how: &str,
    guest: Guest,
    asked: Instant,
    asking: Option<Asking>,
    is_taken: impl Fn() -> bool,
) -> Result<()> {
    wait_until(&format!("{how}: the host's having it"), PATIENCE, || {
        (is_taken() && asking.as_ref().is_none_or(JoinHandle::is_finished)).then_some(())
    })?;
    let took = asked.elapsed();
    if let Some(asking) = asking {
        asking
            .join()
            .map_err(|_| anyhow!("the thread that asks panicked"))?
            .with_context(|| how.to_owned())?;
    }
    l1.figure(&format!("{how}, until the host has it"), took.as_secs_f64(), "s");
    let ended = guest.end(PATIENCE)?;
    let said = ended.process.stderr;
    l1.prove(took < LET_GO, format!("{how}: the host has it soon")).with_context(|| said.clone())?;
    l1.prove(ended.process.code == Some(1), format!("{how}: the guest's process ends, and fails"))
        .with_context(|| said.clone())?;
    for words in [
        format!("error: the host asked for {} back", function.address),
        format!("error: {} was given up without a reset", function.address),
    ] {
        ensure!(said.contains(&words), "{how}: it did not say {words:?}, but: {said}");
    }
    for words in ["VFIO_DEVICE_RESET", "could be given back", "tried again", "panicked"] {
        ensure!(!said.contains(words), "{how}: it said {words:?}: {said}");
    }
    l1.proved(format!("{how}: it is said who took it, and that it was not reset"));
    l1.prove(others.guest.runs(), format!("{how}: the other guest goes on"))
}

/// A guest with another device, which is there all the while.
struct Others {
    guest: Guest,
    device: Function,
}

impl Others {
    fn start(l1: &mut L1, device: &Function) -> Result<Self> {
        let mut guest = Guest::start(l1, &GuestPlan::bare("other", "spin", device))?;
        guest.wait_for_log("starts after", PATIENCE)?;
        Ok(Self { guest, device: device.clone() })
    }

    /// Its device works as ever in the next guest.
    fn end(self, l1: &mut L1) -> Result<()> {
        drop(self.guest);
        Guest::start(l1, &GuestPlan::bare("next", "edu", &self.device))?.end(PATIENCE)?.succeeded(l1)?;
        Ok(())
    }
}

type Asking = JoinHandle<std::io::Result<()>>;

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

fn two(found: Vec<Function>) -> Result<[Function; 2]> {
    found.try_into().map_err(|found| anyhow!("these are not two: {found:?}"))
}

fn three(found: Vec<Function>) -> Result<[Function; 3]> {
    found.try_into().map_err(|found| anyhow!("these are not three: {found:?}"))
}
