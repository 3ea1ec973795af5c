//! Claims on a simulated host: what they change, and that whatever fails, or is killed, all is as it was before.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::*;
use crate::iommu::VFIO_DRIVER;
use crate::ledger::{Ledger, crash, line_of};
use crate::manager::ManagerError;
use crate::readiness::holders;
use crate::sim::{SimDrivers, SimFunction, SimHost};
use crate::{Host, PassthroughManager};

mod binding;
mod damaged;
mod locks;
mod lost;
mod orphans;
mod recovery;
mod resets;
mod resizing;
mod shared;
mod vfs;

/// For what must fail.
const SHORT: Duration = Duration::from_millis(60);
/// For what must succeed: a process that is just started by another test may hold a lock of this one until it becomes another program.
const LONG: Duration = Duration::from_secs(60);

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

fn gpu() -> PciAddress {
    address("0000:01:00.0")
}

fn audio() -> PciAddress {
    address("0000:01:00.1")
}

fn usb() -> PciAddress {
    address("0000:01:00.2")
}

fn nvme() -> PciAddress {
    address("0000:02:00.0")
}

/// A GPU with audio (which has an override of its own) and USB (without a driver), and an NVMe.
fn new_sim() -> SimHost {
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::gpu(gpu()).group(1).driver("nvidia").resizable(1, 0x7fc0)).unwrap();
    sim.add(&SimFunction::new(audio(), 0x10de, 0x22ba, 0x04_0300).group(1).driver("snd_hda_intel")).unwrap();
    sim.set(audio(), "driver_override", "snd_hda_intel\n").unwrap();
    sim.add(&SimFunction::new(usb(), 0x10de, 0x1ad8, 0x0c_0330).group(1)).unwrap();
    sim.add(&SimFunction::nvme(nvme()).group(2).driver("nvme")).unwrap();
    sim.write("proc/sys/kernel/random/boot_id", "boot-1\n").unwrap();
    sim.write("proc/self/comm", "tester\n").unwrap();
    sim
}

fn manager(host: Host) -> PassthroughManager {
    PassthroughManager::with_host(host).unwrap()
}

fn release(manager: &mut PassthroughManager, address: PciAddress) -> Result<(), ManagerError> {
    manager.find_claim(address).and_then(|claimed| manager.release(&claimed))
}

fn release_within(
    manager: &mut PassthroughManager,
    address: PciAddress,
    deadline: Duration,
) -> Result<(), ManagerError> {
    manager.find_claim(address).and_then(|claimed| manager.release_within(&claimed, deadline))
}

type Bindings = BTreeMap<PciAddress, (Option<String>, String, String)>;

/// Driver, `driver_override` and `resource` of every function.
fn bindings(sim: &SimHost) -> Bindings {
    [gpu(), audio(), usb(), nvme()]
        .into_iter()
        .map(|address| {
            let directory = sim.device_dir(address).unwrap();
            let read = |name| fs::read_to_string(directory.join(name)).unwrap();
            (address, (sim.driver_of(address), read("driver_override"), read("resource")))
        })
        .collect()
}

fn on_vfio(sim: &SimHost, addresses: &[PciAddress]) -> bool {
    addresses.iter().all(|&address| sim.driver_of(address).as_deref() == Some(VFIO_DRIVER))
}

fn ledger_files(sim: &SimHost) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(sim.path("run/ledger"))
        .into_iter()
        .flatten()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "lock")
        .collect();
    names.sort();
    names
}

fn within(deadline: Duration) -> ClaimOptions {
    ClaimOptions { deadline, lock_deadline: deadline, ..ClaimOptions::default() }
}

/// Claims `target` as a process that is killed leaves it.
fn leave_claim(host: &Host, target: PciAddress) {
    drop(take(host, target, &within(LONG), || crate::pci::scan(host)).unwrap());
}

fn persistent() -> ClaimOptions {
    ClaimOptions { persistent: true, ..ClaimOptions::default() }
}

#[track_caller]
fn fails<T: std::fmt::Debug>(result: Result<T, ManagerError>, expect: &[&str]) {
    let error = result.unwrap_err().to_string();
    for part in expect {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn takes_the_companions_and_gives_all_back() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    let claim = manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    assert_eq!(claim.addresses(), [gpu(), audio(), usb()]);
    assert_eq!(claim.functions[0].address, usb());
    assert_eq!(claim.functions[1].driver.as_deref(), Some("snd_hda_intel"));
    assert_eq!(claim.functions[1].driver_override.as_deref(), Some("snd_hda_intel"));
    assert!(on_vfio(&sim, &[gpu(), audio(), usb()]));
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("nvme"));
    assert!(sim.path("dev/vfio/1").exists());
    assert_eq!(ledger_files(&sim), ["0000:01:00.0.claim"]);
    assert_eq!(fs::metadata(sim.path("run/ledger")).unwrap().permissions().mode() & 0o777, 0o700);

    fails(
        manager.claim(audio(), &ClaimOptions::default()),
        &["0000:01:00.1 is claimed by this manager already"],
    );
    release(&mut manager, audio()).unwrap();
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
    assert!(!sim.path("dev/vfio/1").exists());
    fails(release(&mut manager, gpu()), &["0000:01:00.0 is not claimed"]);
}

#[test]
fn closing_or_dropping_the_manager_gives_back() {
    let sim = new_sim();
    let before = bindings(&sim);
    for close in [true, false] {
        let mut manager = manager(SimDrivers::new(&sim).host());
        manager.claim(gpu(), &ClaimOptions::default()).unwrap();
        manager.claim(nvme(), &ClaimOptions::default()).unwrap();
        assert_eq!(manager.claims().len(), 2);
        if close {
            manager.close().unwrap();
        } else {
            drop(manager);
        }
        assert_eq!(bindings(&sim), before);
    }
}

/// A variant that is made for the function takes it, but not its companions, and gives it back, also after a crash.
#[test]
fn a_variant_takes_what_it_is_made_for() {
    let sim = new_sim();
    sim.add_driver("nvgrace_gpu_vfio_pci").unwrap();
    let alias = "alias vfio_pci:v000010DEd*sv*sd*bc03sc*i* nvgrace_gpu_vfio_pci\n";
    sim.write("lib/modules/6.12.0/modules.alias", alias).unwrap();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    let on = || [gpu(), audio()].map(|address| sim.driver_of(address).unwrap_or_default());
    let mut best = manager(drivers.host());
    let claim = best.claim(gpu(), &ClaimOptions::default()).unwrap();
    assert_eq!(on(), ["nvgrace_gpu_vfio_pci", "vfio-pci"]);
    assert_eq!(claim.functions.last().unwrap().vfio_driver, "nvgrace_gpu_vfio_pci");
    release(&mut best, gpu()).unwrap();
    assert_eq!(bindings(&sim), before);

    let named = |name: &str| {
        let driver = VfioDriver::Named(name.into());
        ClaimOptions { driver, ..persistent() }
    };
    best.claim(gpu(), &named("vfio-pci")).unwrap();
    assert_eq!(on(), ["vfio-pci", "vfio-pci"]);
    release(&mut best, gpu()).unwrap();
    fails(best.claim(gpu(), &named("nvidia")), &["nvidia is no VFIO driver"]);
    let force = ClaimOptions { force: true, ..named("other_vfio_pci") };
    fails(best.claim(gpu(), &force), &["other_vfio_pci is not loaded", "modprobe other_vfio_pci"]);
    assert_eq!(bindings(&sim), before);

    // One that is on vfio-pci already goes back there.
    sim.set(gpu(), "driver_override", "vfio-pci\n").unwrap();
    sim.set_driver(gpu(), Some("vfio-pci")).unwrap();
    let before = bindings(&sim);
    best.claim(gpu(), &named("nvgrace_gpu_vfio_pci")).unwrap();
    assert_eq!(on(), ["nvgrace_gpu_vfio_pci", "vfio-pci"]);
    release(&mut manager(drivers.host()), gpu()).unwrap();
    assert_eq!(bindings(&sim), before);
}

#[test]
fn a_function_on_vfio_already_is_left_there() {
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    sim.set_driver(usb(), Some("vfio-pci")).unwrap();
    let before = bindings(&sim);
    let mut manager = manager(drivers.host());
    let claim = manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    assert!(claim.functions[0].kept);
    release(&mut manager, gpu()).unwrap();
    assert_eq!(bindings(&sim), before);
    assert!(
        drivers
            .writes()
            .iter()
            .all(|(path, value)| !path.to_string_lossy().contains("00.2") && !value.contains("00.2"))
    );
}

#[test]
fn takes_the_whole_group_when_asked() {
    let sim = new_sim();
    let other = address("0000:01:01.0");
    sim.add(&SimFunction::network(other).group(1).driver("e1000e")).unwrap();
    let mut manager = manager(SimDrivers::new(&sim).host());
    fails(manager.claim(gpu(), &ClaimOptions::default()), &["0000:01:01.0", "e1000e"]);
    assert!(ledger_files(&sim).is_empty());
    let options = ClaimOptions { with_group: true, ..ClaimOptions::default() };
    assert_eq!(manager.claim(gpu(), &options).unwrap().addresses(), [gpu(), audio(), usb(), other]);
    release(&mut manager, gpu()).unwrap();
    assert_eq!(sim.driver_of(other).as_deref(), Some("e1000e"));
}

/// A bridge's hot-plug driver keeps the group from being used, so the whole group goes without it until it is released.
#[test]
fn a_group_goes_with_the_hot_plug_driver_of_its_bridge() {
    let sim = new_sim();
    let bridge = address("0000:00:05.0");
    sim.add(&SimFunction::root_port(bridge).group(1).driver("shpchp")).unwrap();
    let before = bindings(&sim);
    let options = ClaimOptions { with_group: true, ..ClaimOptions::default() };
    let mut alone = manager(SimDrivers::new(&sim).host());
    fails(alone.claim(gpu(), &ClaimOptions::default()), &["0000:00:05.0", "shpchp", "--with-group"]);
    let force = ClaimOptions { force: true, ..ClaimOptions::default() };
    fails(alone.claim(gpu(), &force), &["0000:00:05.0 (shpchp)", "a claim of the whole group"]);
    assert_eq!(bindings(&sim), before);

    let claim = alone.claim(gpu(), &options).unwrap();
    assert_eq!(claim.addresses(), [bridge, gpu(), audio(), usb()]);
    assert!(on_vfio(&sim, &[gpu(), audio(), usb()]));
    assert_eq!(sim.driver_of(bridge), None);
    release(&mut alone, gpu()).unwrap();
    assert_eq!(bindings(&sim), before);
    assert_eq!(sim.driver_of(bridge).as_deref(), Some("shpchp"));

    // Whatever write fails, all is as it was.
    for path in ["shpchp/unbind", "nvidia/unbind"] {
        let drivers = SimDrivers::new(&sim);
        drivers.fail(path, "", 1, libc::EIO);
        fails(manager(drivers.host()).claim(gpu(), &options), &[path, "everything is as it was before"]);
        assert_eq!(bindings(&sim), before, "{path}");
        assert_eq!(sim.driver_of(bridge).as_deref(), Some("shpchp"), "{path}");
    }
}

#[test]
fn what_the_host_uses_is_only_taken_by_force() {
    let sim = new_sim();
    sim.add_child(
        nvme(),
        "block",
        "nvme/nvme0/nvme0n1",
        &[("dev", "259:0\n"), ("uevent", "DEVNAME=nvme0n1\n")],
    )
    .unwrap();
    sim.write("proc/self/mountinfo", "30 1 259:0 / /srv rw - ext4 /dev/nvme0n1 rw\n").unwrap();
    let before = bindings(&sim);
    let mut manager = manager(SimDrivers::new(&sim).host());
    assert!(!manager.explain(nvme()).unwrap().is_ready());
    fails(manager.claim(nvme(), &ClaimOptions::default()), &["mounted-disk", "/srv"]);
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
    manager.claim(nvme(), &ClaimOptions { force: true, ..ClaimOptions::default() }).unwrap();
    assert!(on_vfio(&sim, &[nvme()]));
}

#[test]
fn without_vfio_pci_it_says_what_to_load() {
    let sim = new_sim();
    sim.delete("sys/bus/pci/drivers/vfio-pci").unwrap();
    let before = bindings(&sim);
    let mut manager = manager(SimDrivers::new(&sim).host());
    fails(manager.claim(gpu(), &ClaimOptions::default()), &["vfio-pci-unavailable"]);
    let force = ClaimOptions { force: true, ..ClaimOptions::default() };
    fails(manager.claim(gpu(), &force), &["modprobe vfio-pci"]);
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
}

/// Every write of a claim fails once: all is as it was before.
#[test]
fn any_failing_write_undoes_all() {
    let total = {
        let sim = new_sim();
        let drivers = SimDrivers::new(&sim);
        let mut manager = manager(drivers.host());
        manager.claim(gpu(), &ClaimOptions::default()).unwrap();
        drivers.writes()
    };
    // Override and bind for each, unbind for the two that have a driver.
    assert_eq!(total.len(), 8);
    for (path, value) in &total {
        let sim = new_sim();
        let before = bindings(&sim);
        let drivers = SimDrivers::new(&sim);
        drivers.fail(path.to_str().unwrap(), value, 1, libc::EIO);
        let mut manager = manager(drivers.host());
        let result = manager.claim(gpu(), &ClaimOptions::default());
        fails(result, &[path.to_str().unwrap(), "everything is as it was before"]);
        assert_eq!(bindings(&sim), before, "{}", path.display());
        assert!(ledger_files(&sim).is_empty());
    }
}

/// A claim is cancelled before and after each of its writes: all is as it was before, or it was complete already.
#[test]
fn a_cancelled_claim_undoes_all() {
    let before = bindings(&new_sim());
    let mut undone = 0;
    // Before and after each of eight writes; the last comes with nothing left to do.
    for point in 0..16 {
        let sim = new_sim();
        let drivers = SimDrivers::new(&sim);
        let cancel = Cancel::default();
        let (asked, passed) = (cancel.clone(), std::sync::atomic::AtomicUsize::new(0));
        drivers.observe(move || {
            if passed.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == point {
                asked.request();
            }
        });
        let mut manager = manager(drivers.host());
        let options = ClaimOptions { cancel: Some(cancel), ..persistent() };
        fails(
            manager.claim(gpu(), &options),
            &["as the claim was cancelled; everything is as it was before"],
        );
        assert_eq!(bindings(&sim), before, "{point}");
        assert!(ledger_files(&sim).is_empty());
        undone += drivers.writes().len();
    }
    assert!(undone > 16, "some were cancelled after something was done");
}

#[test]
fn a_derived_cancel_handle_is_requested_with_either_source() {
    let (cancel, flag) = (Cancel::default(), Arc::new(AtomicBool::default()));
    let source = flag.clone();
    let derived = cancel.or(move || source.load(Ordering::SeqCst));
    assert_eq!(cancel, cancel.clone());
    assert_ne!(cancel, derived);
    let requested = || (cancel.is_requested(), derived.is_requested());
    assert_eq!(requested(), (false, false));
    flag.store(true, Ordering::SeqCst);
    assert_eq!(requested(), (false, true));
    flag.store(false, Ordering::SeqCst);
    assert_eq!(requested(), (false, false));
    cancel.request();
    assert_eq!(requested(), (true, true));

    let cancel = Cancel::default();
    let derived = cancel.or(|| false);
    derived.request();
    assert_eq!((cancel.is_requested(), derived.is_requested()), (false, true));
}

#[test]
fn what_could_not_be_undone_is_undone_later() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    drivers.fail("nvidia/unbind", "", 1, libc::EIO);
    drivers.fail("snd_hda_intel/bind", "", 2, libc::ENOMEM);
    let mut manager = manager(drivers.host());
    let claim = manager.claim(gpu(), &ClaimOptions::default());
    fails(
        claim,
        &["can't unbind it from nvidia", "can't bind it to snd_hda_intel", "the ledger remembers it"],
    );
    // The others were released all the same.
    assert_eq!(sim.driver_of(gpu()).as_deref(), Some("nvidia"));
    assert_eq!(sim.driver_of(audio()), None);
    assert_eq!(ledger_files(&sim), ["0000:01:00.0.claim"]);

    let recovery = manager.recover().unwrap();
    assert!(recovery.recovered.is_empty());
    assert!(recovery.failed[0].to_string().contains("can't bind it to snd_hda_intel"));
    // A claim of another function has nothing to do with it, one of the same function undoes it first.
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    assert_eq!(sim.driver_of(audio()), None);
    release(&mut manager, nvme()).unwrap();
    manager.claim(audio(), &ClaimOptions::default()).unwrap();
    release(&mut manager, audio()).unwrap();
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
}

#[test]
fn a_release_that_fails_can_be_tried_again() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    drivers.fail("nvidia/bind", "", 1, libc::EIO);
    fails(release(&mut manager, gpu()), &["not wholly released", "can't bind it to nvidia", "dmesg"]);
    assert_eq!(manager.claims().len(), 1);
    release(&mut manager, gpu()).unwrap();
    assert_eq!(bindings(&sim), before);

    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    sim.delete("sys/bus/pci/drivers/nvidia").unwrap();
    fails(release(&mut manager, gpu()), &["modprobe nvidia"]);
    sim.add_driver("nvidia").unwrap();
    release(&mut manager, gpu()).unwrap();
    assert_eq!(bindings(&sim), before);
}

#[test]
fn a_function_that_vanished_has_nothing_to_give_back() {
    let sim = new_sim();
    let mut manager = manager(SimDrivers::new(&sim).host());
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    sim.remove(nvme()).unwrap();
    release(&mut manager, nvme()).unwrap();
    assert!(ledger_files(&sim).is_empty());
    fails(manager.claim(nvme(), &ClaimOptions::default()), &["there is no PCI function 0000:02:00.0"]);
}

#[test]
fn a_function_that_was_given_another_driver_keeps_it() {
    let sim = new_sim();
    let mut manager = manager(SimDrivers::new(&sim).host());
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    sim.add_driver("uio_pci_generic").unwrap();
    sim.set_driver(nvme(), Some("uio_pci_generic")).unwrap();
    release(&mut manager, nvme()).unwrap();
    let (driver, driver_override, _) = &bindings(&sim)[&nvme()];
    assert_eq!((driver.as_deref(), driver_override.as_str()), (Some("uio_pci_generic"), "(null)\n"));
}

#[test]
fn double_claims_are_refused() {
    let sim = new_sim();
    let before = bindings(&sim);
    let host = SimDrivers::new(&sim).host();
    let mut first = manager(host.clone());
    let mut second = manager(host);
    first.claim(gpu(), &ClaimOptions::default()).unwrap();
    let owner = format!("process {} (tester)", std::process::id());
    fails(
        second.claim(gpu(), &ClaimOptions::default()),
        &["claimed already by", &owner, "stop that process"],
    );
    fails(second.claim(audio(), &ClaimOptions::default()), &["claimed already by", &owner]);
    fails(release(&mut second, gpu()), &["claimed already by", &owner]);
    assert!(second.recover().unwrap().recovered.is_empty());
    assert!(on_vfio(&sim, &[gpu(), audio(), usb()]));
    second.claim(nvme(), &ClaimOptions::default()).unwrap();
    drop((first, second));
    assert_eq!(bindings(&sim), before);
}

#[test]
fn persistent_claims_live_until_released() {
    let sim = new_sim();
    let before = bindings(&sim);
    let host = SimDrivers::new(&sim).host();
    assert!(manager(host.clone()).claim(gpu(), &persistent()).unwrap().persistent);
    let mut user = manager(host.clone());
    assert!(user.recover().unwrap().recovered.is_empty());
    assert!(on_vfio(&sim, &[gpu(), audio(), usb()]));
    fails(
        user.claim(gpu(), &persistent()),
        &["claimed already by", "until it is released; run `vm-service release 0000:01:00.0` first"],
    );

    // One process at a time may use it.
    assert!(user.claim(gpu(), &ClaimOptions::default()).unwrap().persistent);
    let mut other = manager(host.clone());
    fails(other.claim(gpu(), &ClaimOptions::default()), &["claimed already by", "stop that process first"]);
    fails(release(&mut other, gpu()), &["claimed already by", "stop that process first"]);
    release(&mut user, gpu()).unwrap();
    assert!(on_vfio(&sim, &[gpu(), audio(), usb()]));
    other.claim(gpu(), &ClaimOptions::default()).unwrap();
    drop(other);
    assert!(on_vfio(&sim, &[gpu(), audio(), usb()]));

    // The process that makes one holds it until it hands it over.
    let made = user.begin_claim(nvme(), &persistent()).unwrap().make().unwrap();
    let mut other = manager(host.clone());
    fails(other.claim(nvme(), &ClaimOptions::default()), &["(tester), until it is released"]);
    drop(made);
    fails(other.claim(nvme(), &persistent()), &["(tester), which has ended, until it is released"]);
    release(&mut other, nvme()).unwrap();

    // It covers what it covers.
    sim.add(&SimFunction::network(address("0000:01:01.0")).group(1)).unwrap();
    let group = ClaimOptions { with_group: true, ..ClaimOptions::default() };
    fails(user.claim(gpu(), &group), &["does not cover 0000:01:01.0"]);

    release(&mut manager(host), audio()).unwrap();
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
}

#[test]
fn a_second_writer_waits_and_is_told_who_writes() {
    let sim = new_sim();
    let host = SimDrivers::new(&sim).host();
    // Of a companion.
    let lock = FunctionLock::take(&host, usb(), LONG).unwrap().unwrap();
    let mut manager = manager(host);
    let owner = format!("process {} (tester)", std::process::id());
    let hurried = ClaimOptions { lock_deadline: SHORT, ..within(LONG) };
    let expect = "cannot claim 0000:01:00.0: timed out after 0.1 s waiting for ";
    fails(manager.claim(gpu(), &hurried), &[expect, &owner, " to unlock 0000:01:00.2; "]);
    assert!(ledger_files(&sim).is_empty());
    // Another device is nobody's.
    manager.claim(nvme(), &within(LONG)).unwrap();
    // Who would lose more than time waits longer, and can be called off.
    let cancel = Cancel::default();
    let patient = ClaimOptions {
        lock_deadline: crate::deadlines::FUNCTIONS,
        cancel: Some(cancel.clone()),
        ..within(LONG)
    };
    let asks = std::thread::spawn(move || cancel.request());
    fails(manager.claim(gpu(), &patient), &["0000:01:00.0 was not taken", "everything is as it was before"]);
    asks.join().unwrap();
    let waiting = std::thread::spawn(move || manager.claim(gpu(), &within(LONG)).map(|_| manager));
    std::thread::sleep(SHORT);
    drop(lock);
    waiting.join().unwrap().unwrap();
}

#[test]
fn the_claims_of_another_boot_are_void() {
    let sim = new_sim();
    let host = SimDrivers::new(&sim).host();
    manager(host.clone()).claim(gpu(), &persistent()).unwrap();
    // What a reboot does.
    for (address, driver) in [(gpu(), Some("nvidia")), (audio(), Some("snd_hda_intel")), (usb(), None)] {
        sim.set_driver(address, driver).unwrap();
        sim.set(address, "driver_override", "(null)\n").unwrap();
    }
    sim.write("proc/sys/kernel/random/boot_id", "boot-2\n").unwrap();
    let before = bindings(&sim);
    let entries = Ledger::lock(&host, LONG).unwrap().entries().unwrap();
    assert!(entries[0].as_ref().unwrap().void);
    let mut manager = manager(host);
    fails(release(&mut manager, gpu()), &["not claimed"]);
    assert!(manager.recover().unwrap().recovered.is_empty());
    assert!(ledger_files(&sim).is_empty());
    assert_eq!(bindings(&sim), before);
    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
}

/// A process that has the function's node open makes unbinding block.
#[test]
fn a_driver_override_that_does_not_stay_is_noticed() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    let file = sim.device_dir(nvme()).unwrap().join("driver_override");
    // A udev rule, or driverctl, has its own opinion.
    drivers.observe(move || {
        if fs::read_to_string(&file).unwrap() == "vfio-pci\n" {
            fs::write(&file, "pci-stub\n").unwrap();
        }
    });
    fails(
        manager(drivers.host()).claim(nvme(), &ClaimOptions::default()),
        &["driver_override is pci-stub after vfio-pci was written to it", "everything is as it was before"],
    );
    assert_eq!(bindings(&sim), before);
    assert!(
        !drivers.writes().iter().any(|(path, _)| path.ends_with("unbind")),
        "its driver lost it for nothing"
    );
}

#[test]
fn a_held_function_times_out_and_names_the_holder() {
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    sim.write("proc/4711/comm", "Xorg\n").unwrap();
    sim.write("dev/nvidia3", "").unwrap();
    sim.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: x\nDevice Minor: \t 3\n").unwrap();
    fs::create_dir_all(sim.path("proc/4711/fd")).unwrap();
    let mut manager = manager(drivers.host());

    // Claiming: the native driver is held. Opened after the claim was judged harmless.
    drivers.hold(gpu());
    symlink(sim.path("dev/nvidia3"), sim.path("proc/4711/fd/7")).unwrap();
    let blame = ["within 0.1 s", "process 4711 (Xorg) has", "/dev/nvidia3 open", "the ledger remembers it"];
    fails(manager.claim(gpu(), &ClaimOptions { force: true, ..within(SHORT * 2) }), &blame);
    assert_eq!(ledger_files(&sim), ["0000:01:00.0.claim"]);
    assert_eq!(bindings(&sim)[&audio()], before[&audio()], "the companions were released");
    fails(release_within(&mut manager, gpu(), SHORT), &["process 4711 (Xorg)", "the ledger remembers it"]);
    drivers.let_go(gpu());
    release(&mut manager, gpu()).unwrap();
    assert_eq!(bindings(&sim), before);

    // Releasing: vfio-pci is held.
    fs::remove_file(sim.path("proc/4711/fd/7")).unwrap();
    manager.claim(gpu(), &within(LONG)).unwrap();
    drivers.hold(gpu());
    symlink(sim.path("dev/vfio/1"), sim.path("proc/4711/fd/7")).unwrap();
    fails(
        release_within(&mut manager, gpu(), SHORT),
        &["did not unbind it from vfio-pci", "process 4711 (Xorg) has", "/dev/vfio/1 open"],
    );
    drop(manager);
    assert_eq!(ledger_files(&sim), ["0000:01:00.0.claim"]);
    drivers.let_go(gpu());
    assert_eq!(self::manager(drivers.host()).recover().unwrap().recovered[0].target, gpu());
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
}

#[test]
fn holders_are_found() {
    let sim = new_sim();
    let dir = "sys/bus/pci/devices/0000:02:00.0";
    for (path, dev, name) in [
        ("nvme/nvme0", "243:0", "nvme0"),
        ("nvme/nvme0/nvme0n1", "259:0", "nvme0n1"),
        ("nvme/nvme0/nvme0n1/nvme0n1p1", "259:1", "nvme0n1p1"),
    ] {
        sim.write(&format!("{dir}/{path}/dev"), &format!("{dev}\n")).unwrap();
        sim.write(&format!("{dir}/{path}/uevent"), &format!("MAJOR=1\nDEVNAME={name}\n")).unwrap();
    }
    fs::create_dir_all(sim.path(&format!("{dir}/nvme/nvme0/nvme0n1/holders/dm-0"))).unwrap();
    // A function behind it, and a loop: neither is entered.
    sim.write(&format!("{dir}/0000:03:00.0/vendor"), "1\n").unwrap();
    sim.write(&format!("{dir}/0000:03:00.0/class"), "1\n").unwrap();
    sim.write(&format!("{dir}/0000:03:00.0/x/dev"), "9:9\n").unwrap();
    symlink(sim.path(dir), sim.path(&format!("{dir}/nvme/nvme0/device"))).unwrap();
    let root = sim.root().display();
    sim.write(
        "proc/self/mountinfo",
        &format!(
            "30 1 259:1 / /mnt/a\\040b rw shared:1 - ext4 {root}/dev/nvme0n1p1 rw\n\
             31 1 0:40 / /srv rw - btrfs {root}/dev/nvme0n1 rw\n32 1 9:9 / /x rw - ext4 /dev/x rw\nnonsense\n"
        ),
    )
    .unwrap();
    sim.write("proc/12/comm", "smartd\n").unwrap();
    sim.write("proc/12/fdinfo/4", "vfio-device-syspath: /sys/devices/pci0000:00/0000:02:00.0\n").unwrap();
    sim.write("proc/12/fdinfo/5", "vfio-device-syspath: /sys/devices/pci0000:00/0000:09:00.0\n").unwrap();
    fs::create_dir_all(sim.path("proc/12/fd")).unwrap();
    symlink(sim.path("dev/nvme0"), sim.path("proc/12/fd/3")).unwrap();
    symlink("anon_inode:[vfio-device]", sim.path("proc/12/fd/4")).unwrap();
    symlink("anon_inode:[vfio-device]", sim.path("proc/12/fd/5")).unwrap();
    symlink("/dev/null", sim.path("proc/12/fd/0")).unwrap();
    // A node that goes as soon as unbinding begins.
    symlink(sim.path("dev/vfio/devices/vfio7 (deleted)"), sim.path("proc/12/fd/6")).unwrap();

    let found: Vec<_> = holders(&sim.plain_host(), nvme()).iter().map(ToString::to_string).collect();
    assert_eq!(
        found,
        [
            format!("process 12 (smartd) has {root}/dev/nvme0 open"),
            "process 12 (smartd) has anon_inode:[vfio-device] open".to_owned(),
            format!("{root}/dev/nvme0n1 is mounted on /srv"),
            format!("{root}/dev/nvme0n1p1 is mounted on /mnt/a b"),
            format!("dm-0 is made of {root}/dev/nvme0n1"),
        ]
    );
    // Only of a function that is losing its driver.
    sim.set_driver(nvme(), None).unwrap();
    let found: Vec<_> = holders(&sim.plain_host(), nvme()).iter().map(ToString::to_string).collect();
    assert!(
        found.contains(&format!("process 12 (smartd) has {root}/dev/vfio/devices/vfio7 open")),
        "{found:?}"
    );
    assert!(holders(&sim.plain_host(), address("0000:77:00.0")).is_empty());
}

#[test]
fn a_ledger_that_others_may_have_written_is_refused_and_left() {
    fn check(prepare: impl Fn(&SimHost, &Path), expect: &[&str]) {
        let sim = new_sim();
        let before = bindings(&sim);
        let host = SimDrivers::new(&sim).host();
        drop(Ledger::lock(&host, LONG).unwrap());
        let directory = sim.path("run/ledger");
        prepare(&sim, &directory);
        let files = ledger_files(&sim);
        let mut manager = manager(host);
        fails(manager.claim(gpu(), &within(SHORT)), expect);
        fails(release_within(&mut manager, gpu(), SHORT), expect);
        match manager.recover() {
            Ok(recovery) => {
                assert!(recovery.failed.iter().any(|error| error.to_string().contains(expect[0])))
            }
            Err(error) => assert!(error.to_string().contains(expect[0]), "{error}"),
        }
        assert_eq!(bindings(&sim), before);
        assert_eq!(ledger_files(&sim), files, "nothing is lost");
    }
    check(
        |_, dir| fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap(),
        &["can be written to by others (mode 777)"],
    );
    check(
        |sim, dir| {
            fs::remove_dir_all(dir).unwrap();
            symlink(sim.path("dev"), dir).unwrap();
        },
        &["is not a directory"],
    );
    check(
        |_, dir| {
            fs::remove_dir_all(dir).unwrap();
            fs::write(dir, "").unwrap();
        },
        &["is not a directory"],
    );
}

const CHILD: &str = "VM_PASSTHROUGH_TEST_KILL";

/// What the child that is killed does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scenario {
    ClaimAndRelease,
    ClaimPersistent,
    ReleasePersistent,
    Recover,
}

const SCENARIOS: [Scenario; 4] =
    [Scenario::ClaimAndRelease, Scenario::ClaimPersistent, Scenario::ReleasePersistent, Scenario::Recover];

/// A process is killed, by SIGKILL, before and after every write to sysfs and every change of the ledger, halfway
/// through a line too. The next one finds and restores all.
#[test]
fn killed_anywhere_all_is_restored() {
    if let Ok(order) = std::env::var(CHILD) {
        be_killed(&order);
        return;
    }
    for (number, scenario) in SCENARIOS.into_iter().enumerate() {
        // A run that is not killed says how many points there are.
        let total = {
            let sim = prepared(scenario);
            assert!(child(&sim, number, -1).success());
            fs::read_to_string(sim.path("points")).unwrap().parse::<i64>().unwrap()
        };
        assert!(total > 15, "{scenario:?}: {total}");
        let mut claimed = 0;
        for point in 0..total {
            let sim = prepared(scenario);
            let original = bindings(&new_sim());
            assert_eq!(child(&sim, number, point).signal(), Some(9), "{scenario:?} at {point}");
            let mut manager = manager(SimDrivers::new(&sim).host());
            // The three ways to a restored host take turns.
            let recovery = match (scenario, point % 3) {
                (_, 0) => manager.recover().unwrap(),
                (Scenario::ClaimAndRelease | Scenario::Recover, 1) => {
                    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
                    release(&mut manager, gpu()).unwrap();
                    Recovery::default()
                }
                _ => {
                    let result = release(&mut manager, gpu());
                    if !matches!(result, Err(ManagerError::Claim(ClaimError::NotClaimed(_)))) {
                        result.unwrap();
                    }
                    Recovery::default()
                }
            };
            assert!(recovery.failed.is_empty(), "{scenario:?} at {point}: {recovery:?}");
            if !ledger_files(&sim).is_empty() {
                // Killed after a persistent claim was complete, or before its release had begun.
                assert!(matches!(scenario, Scenario::ClaimPersistent | Scenario::ReleasePersistent));
                assert!(on_vfio(&sim, &[gpu(), audio(), usb()]), "{scenario:?} at {point}");
                claimed += 1;
                release(&mut manager, gpu()).unwrap();
            }
            assert_eq!(bindings(&sim), original, "{scenario:?} at {point}");
            assert!(ledger_files(&sim).is_empty());
        }
        if scenario == Scenario::ReleasePersistent {
            assert!(claimed > 0);
        }
    }
}

/// A host as it is before the child acts.
fn prepared(scenario: Scenario) -> SimHost {
    let sim = new_sim();
    let host = SimDrivers::new(&sim).host();
    match scenario {
        Scenario::ClaimAndRelease | Scenario::ClaimPersistent => {}
        Scenario::ReleasePersistent => {
            manager(host).claim(gpu(), &persistent()).unwrap();
        }
        Scenario::Recover => {
            // As a process leaves it that was killed with a claim: the journal lives on without its owner.
            let mut owner = manager(host);
            owner.claim(gpu(), &ClaimOptions::default()).unwrap();
            let path = sim.path("run/ledger/0000:01:00.0.claim");
            let journal = fs::read(&path).unwrap();
            let directories = [gpu(), audio(), usb()];
            drop(owner);
            fs::write(&path, journal).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            for address in directories {
                sim.set_driver(address, Some(VFIO_DRIVER)).unwrap();
                sim.set(address, "driver_override", "vfio-pci\n").unwrap();
            }
        }
    }
    sim
}

fn child(sim: &SimHost, scenario: usize, point: i64) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "claim::tests::killed_anywhere_all_is_restored", "--test-threads=1", "--quiet"])
        .env(CHILD, format!("{scenario} {point} {}", sim.root().display()))
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap()
}

fn be_killed(order: &str) {
    let mut words = order.splitn(3, ' ');
    let scenario = SCENARIOS[words.next().unwrap().parse::<usize>().unwrap()];
    let point = words.next().unwrap().parse().unwrap();
    let root = Path::new(words.next().unwrap());
    let drivers = SimDrivers::at(root);
    drivers.observe(crash::crash_point);
    crash::arm(point);
    let mut manager = manager(drivers.host());
    match scenario {
        Scenario::ClaimAndRelease => {
            manager.claim(gpu(), &resizing::options(256 << 20)).unwrap();
            release(&mut manager, gpu()).unwrap();
        }
        Scenario::ClaimPersistent => drop(manager.claim(gpu(), &persistent()).unwrap()),
        Scenario::ReleasePersistent => release(&mut manager, gpu()).unwrap(),
        Scenario::Recover => assert_eq!(manager.recover().unwrap().recovered.len(), 1),
    }
    fs::write(root.join("points"), crash::passed().to_string()).unwrap();
}
