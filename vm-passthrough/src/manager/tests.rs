//! The manager with devices of another's making, on a simulated host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use super::*;
use crate::guest::VfioPciDevice;
use crate::sim::{
    Fault, SimConfig, SimDeviceBuilder, SimDrivers, SimFunction, SimHost, SimLog, SimSpace, SimVmm,
};
use crate::vfio::VfioError;

/// A device that counts, and fails on request. As the real one it is owed a detach that failed.
#[derive(Debug)]
struct FakeDevice {
    address: PciAddress,
    fail: AtomicBool,
    /// Whether attaching it fails half way, so that something is left to undo.
    half: AtomicBool,
    /// Whether a detach has something to do.
    owed: AtomicBool,
    attached: AtomicUsize,
    detached: AtomicUsize,
    /// When it was stopped and when it was last detached, in the order of all devices.
    stopped: AtomicUsize,
    last: AtomicUsize,
}

impl FakeDevice {
    fn new(address: PciAddress) -> Arc<Self> {
        let (attached, detached, stopped, last) = Default::default();
        let (fail, half, owed) = Default::default();
        Arc::new(Self { address, fail, half, owed, attached, detached, stopped, last })
    }

    fn answer(&self, count: &AtomicUsize) -> Result<(), DeviceError> {
        if self.fail.load(SeqCst) {
            let reason = "it is broken".into();
            return Err(VfioError::Reset { address: self.address, reason }.into());
        }
        count.fetch_add(1, SeqCst);
        Ok(())
    }

    fn counts(&self) -> (usize, usize) {
        (self.attached.load(SeqCst), self.detached.load(SeqCst))
    }
}

/// Counts what devices do.
static ORDER: AtomicUsize = AtomicUsize::new(1);

impl PassthroughDevice for FakeDevice {
    fn address(&self) -> PciAddress {
        self.address
    }
    fn attach(&self) -> Result<(), DeviceError> {
        let attached = self.answer(&self.attached);
        if attached.is_ok() || self.half.load(SeqCst) {
            self.owed.store(true, SeqCst);
        }
        attached
    }
    fn stop(&self) -> Result<(), DeviceError> {
        self.stopped.store(ORDER.fetch_add(1, SeqCst), SeqCst);
        Ok(())
    }
    fn detach(&self) -> Result<(), DeviceError> {
        if self.owed.load(SeqCst) {
            self.last.store(ORDER.fetch_add(1, SeqCst), SeqCst);
            self.answer(&self.detached)?;
            self.owed.store(false, SeqCst);
        }
        Ok(())
    }
    fn config_read(&self, _offset: u16, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn config_write(&self, _offset: u16, _data: &[u8]) {}
    fn bar_read(&self, _bar: u8, _offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        data.fill(0xff);
        Ok(())
    }
    fn bar_write(&self, _bar: u8, _offset: u64, _data: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn reset(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn release(manager: &mut PassthroughManager, address: PciAddress) -> Result<(), ManagerError> {
    manager.find_claim(address).and_then(|claimed| manager.release(&claimed))
}

fn nvme() -> PciAddress {
    "0000:01:00.0".parse().unwrap()
}

fn gpu() -> PciAddress {
    "0000:02:00.0".parse().unwrap()
}

fn new_sim() -> (SimHost, PassthroughManager) {
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::nvme(nvme()).group(1).driver("nvme")).unwrap();
    sim.add(&SimFunction::gpu(gpu()).group(2).driver("nvidia")).unwrap();
    let manager = PassthroughManager::with_host(SimDrivers::new(&sim).host()).unwrap();
    (sim, manager)
}

#[test]
fn scans_filters_and_prints() {
    let (_sim, mut manager) = new_sim();
    assert!(manager.devices().is_empty());
    assert_eq!(manager.scan_devices().unwrap().len(), 2);
    let gpus: Vec<_> = manager.filter_by_type(DeviceType::GpuNvidia).iter().map(|gpu| gpu.address).collect();
    assert_eq!(gpus, [gpu()]);
    assert!(manager.filter_by_type(DeviceType::GpuAmd).is_empty());
    let mut out = Vec::new();
    manager.write_devices(&mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("0000:02:00.0 10de:2684 NVIDIA Corporation AD102"), "{last}");
    assert!(last.ends_with("IOMMU group 2, nvidia"), "{last}");
}

#[test]
fn a_host_without_pci_is_an_error() {
    let (sim, _manager) = new_sim();
    sim.delete("sys/bus/pci").unwrap();
    let error = PassthroughManager::with_host(sim.plain_host()).unwrap_err().to_string();
    assert!(error.contains("there is no PCI bus in"), "{error}");
}

#[test]
fn releases_only_what_is_detached() {
    let (sim, mut manager) = new_sim();
    let device = FakeDevice::new(nvme());
    let refused = |result: Result<(), ManagerError>, expect: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    refused(manager.detach_device(nvme()), "is not attached");
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();

    device.fail.store(true, SeqCst);
    refused(manager.attach_device(device.clone()), "it is broken");
    assert!(manager.attached().is_empty());
    device.fail.store(false, SeqCst);
    manager.attach_device(device.clone()).unwrap();
    refused(manager.attach_device(device.clone()), "is attached to a guest");
    refused(release(&mut manager, nvme()), "is attached to a guest; detach it first");
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("vfio-pci"));

    device.fail.store(true, SeqCst);
    refused(manager.detach_device(nvme()), "it is broken");
    assert_eq!(manager.attached(), [nvme()]);
    device.fail.store(false, SeqCst);
    manager.detach_device(nvme()).unwrap();
    release(&mut manager, nvme()).unwrap();
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("nvme"));
    assert_eq!(device.counts(), (1, 1));
}

#[test]
fn what_is_open_holds_its_claim() {
    for close in [true, false] {
        let (sim, mut manager) = new_sim();
        let driver = || sim.driver_of(nvme());
        let claimed = manager.claim(nvme(), &ClaimOptions::default()).unwrap();
        let open = claimed.hold().unwrap();
        assert!(matches!(release(&mut manager, nvme()), Err(ManagerError::Open(target)) if target == nvme()));
        assert_eq!(driver().as_deref(), Some("vfio-pci"));
        if close {
            let error = manager.close().unwrap_err().to_string();
            assert!(error.contains("while one of its functions is open"), "{error}");
        } else {
            drop(manager);
        }
        // It is neither anybody's to claim nor to recover, and who closes it last releases it.
        let mut other = PassthroughManager::with_host(SimDrivers::new(&sim).host()).unwrap();
        assert!(other.recover().unwrap().recovered.is_empty());
        assert!(matches!(other.claim(nvme(), &ClaimOptions::default()), Err(ManagerError::Claim(_))));
        assert!(claimed.clone().hold().is_ok());
        drop(open);
        assert_eq!(driver().as_deref(), Some("nvme"));
        assert!(claimed.hold().is_err());
        other.claim(nvme(), &ClaimOptions::default()).unwrap();
    }
}

#[test]
fn nothing_is_opened_of_what_is_not_claimed_any_more() {
    fn stored_and_sent<T: Clone + Send + Sync + 'static>(_: &T) {}
    let (sim, mut manager) = new_sim();
    sim.add(&SimFunction::network("0000:02:00.1".parse().unwrap()).group(2).driver("nvidia")).unwrap();
    let companion = "0000:02:00.1".parse().unwrap();
    let claimed = manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    stored_and_sent(&claimed);
    assert_eq!((claimed.address(), claimed.target), (gpu(), gpu()));
    let other = manager.claimed(companion).expect("it was claimed along");
    assert_eq!((other.address(), other.target), (companion, gpu()));
    assert!(manager.claimed(nvme()).is_none());
    drop(other.hold().unwrap());
    release(&mut manager, companion).unwrap();
    let persistent = ClaimOptions { persistent: true, ..ClaimOptions::default() };
    let reserved = manager.claim(nvme(), &persistent).unwrap();
    for claimed in [claimed, other, reserved] {
        let error = claimed.hold().unwrap_err().to_string();
        assert!(error.contains("is not held by this manager any more"), "{error}");
    }
}

#[test]
fn an_attach_that_cannot_be_undone_is_owed_a_detach() {
    let (sim, mut manager) = new_sim();
    let device = FakeDevice::new(nvme());
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    device.fail.store(true, SeqCst);
    device.half.store(true, SeqCst);
    manager.attach_device(device.clone()).unwrap_err();
    assert_eq!(manager.attached(), [nvme()]);
    assert!(matches!(release(&mut manager, nvme()), Err(ManagerError::Attached(_))));
    let error = manager.close().unwrap_err().to_string();
    assert!(error.contains("it is broken"), "{error}");
    assert_eq!((sim.driver_of(nvme()).as_deref(), device.counts()), (Some("nvme"), (0, 0)));
}

/// The real device: what a detach could not do is still owed when it is tried again.
#[test]
fn nothing_succeeds_while_a_detach_is_owed() {
    for heal in [true, false] {
        let (sim, mut manager) = new_sim();
        let log = SimLog::default();
        let config = SimConfig::new(0x144d, 0xa80a, 0x01_08_02).bytes();
        let space = SimSpace::new(vec![0..=u64::MAX], &log);
        let function = SimDeviceBuilder::new(config).log(&log).build(nvme(), space).unwrap();
        let vmm = SimVmm::new(&[(0, 0x10_0000)], &log).unwrap();
        let device = VfioPciDevice::new(function.clone(), vmm).unwrap();
        manager.claim(nvme(), &ClaimOptions::default()).unwrap();
        manager.attach_device(device).unwrap();
        let resets = function.resets();

        function.fail(Fault::Reset);
        for _ in 0..3 {
            let error = manager.detach_device(nvme()).unwrap_err().to_string();
            assert!(error.contains("VFIO_DEVICE_RESET"), "{error}");
            assert!(matches!(release(&mut manager, nvme()), Err(ManagerError::Attached(_))));
        }
        if heal {
            function.heal();
            manager.detach_device(nvme()).unwrap();
            assert_eq!(function.resets(), resets + 1);
            manager.close().unwrap();
        } else {
            let error = manager.close().unwrap_err().to_string();
            assert!(error.contains("VFIO_DEVICE_RESET"), "{error}");
        }
        assert_eq!(sim.driver_of(nvme()).as_deref(), Some("nvme"));
    }
}

#[test]
fn ending_detaches_and_gives_back() {
    for close in [true, false] {
        let (sim, mut manager) = new_sim();
        let (good, bad) = (FakeDevice::new(nvme()), FakeDevice::new(gpu()));
        for device in [&good, &bad] {
            manager.claim(device.address, &ClaimOptions::default()).unwrap();
            manager.attach_device(device.clone()).unwrap();
        }
        bad.fail.store(true, SeqCst);
        if close {
            let error = manager.close().unwrap_err().to_string();
            assert!(error.contains("0000:02:00.0: ") && error.contains("it is broken"), "{error}");
        } else {
            drop(manager);
        }
        assert_eq!(good.counts(), (1, 1));
        assert_eq!(sim.driver_of(nvme()).as_deref(), Some("nvme"));
        assert_eq!(sim.driver_of(gpu()).as_deref(), Some("nvidia"));
    }
}

#[test]
fn all_devices_are_stopped_before_the_first_is_detached() {
    let (_sim, mut manager) = new_sim();
    let devices = [FakeDevice::new(nvme()), FakeDevice::new(gpu())];
    for device in &devices {
        manager.claim(device.address, &ClaimOptions::default()).unwrap();
        manager.attach_device(device.clone()).unwrap();
    }
    manager.close().unwrap();
    let stopped = devices.iter().map(|device| device.stopped.load(SeqCst));
    let detached = devices.iter().map(|device| device.last.load(SeqCst));
    assert!(stopped.clone().all(|order| order > 0) && stopped.max() < detached.min());
}

#[test]
fn the_devices_of_a_slot_go_while_others_stay_and_may_come_again() {
    let (sim, mut manager) = new_sim();
    let [stays, first, second] = [nvme(), gpu(), "0000:02:00.1".parse().unwrap()].map(FakeDevice::new);
    sim.add(&SimFunction::network(second.address).group(2).driver("nvidia")).unwrap();
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    manager.attach_device(stays.clone()).unwrap();
    for turn in 1..3 {
        let claimed = manager.claim(gpu(), &ClaimOptions::default()).unwrap();
        for device in [&first, &second] {
            manager.attach_device(device.clone()).unwrap();
        }
        let unknown = manager.detach_slot(&[gpu(), "0000:09:00.0".parse().unwrap()]);
        assert!(matches!(unknown, Err(ManagerError::NotAttached(_))), "{unknown:?}");
        assert_eq!(manager.attached().len(), 3);
        manager.detach_slot(&[first.address, second.address]).unwrap();
        let stopped = [&first, &second].map(|device| device.stopped.load(SeqCst));
        let detached = [&first, &second].map(|device| device.last.load(SeqCst));
        assert!(stopped.iter().all(|order| *order > 0) && stopped.iter().max() < detached.iter().min());
        manager.release(&claimed).unwrap();
        assert_eq!(sim.driver_of(gpu()).as_deref(), Some("nvidia"));
        assert_eq!((manager.attached(), first.counts()), (vec![nvme()], (turn, turn)));
    }
    assert_eq!((stays.counts(), stays.stopped.load(SeqCst)), ((1, 0), 0));
}

#[test]
fn a_handle_releases_its_own_claim_and_no_other() {
    let (sim, mut manager) = new_sim();
    let first = manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    manager.release(&first).unwrap();
    // By the same manager, and for whoever comes next.
    let second = manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    assert!(manager.release(&first).unwrap_err().to_string().contains("is not claimed"));
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("vfio-pci"));
    manager.release(&second).unwrap();
    let persistent = ClaimOptions { persistent: true, ..ClaimOptions::default() };
    manager.claim(nvme(), &persistent).unwrap();
    assert!(manager.release(&second).unwrap_err().to_string().contains("is not claimed"));
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("vfio-pci"));
    // One that lives on is found by any manager.
    let mut other = PassthroughManager::with_host(SimDrivers::new(&sim).host()).unwrap();
    let found = other.find_claim(nvme()).unwrap();
    assert!(found.persistent && found.hold().is_err());
    other.release(&found).unwrap();
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("nvme"));
    assert!(other.find_claim(nvme()).unwrap_err().to_string().contains("is not claimed"));
}
