//! Binding: errors of the Linux kernel, and changes that other processes make meanwhile.

use std::sync::Arc;

use super::*;
use crate::claim::bind::Binder;

#[test]
fn each_error_has_its_own_fix() {
    for (errno, fix) in [
        (libc::EACCES, "run as root"),
        (libc::EROFS, "sysfs is mounted read-only here"),
        (libc::EINVAL, "vfio-pci does so when no IOMMU translates for it"),
        (libc::EBUSY, "another driver took it in the meantime"),
        (libc::ENOSPC, "the Linux kernel had no room for it"),
        (libc::ENOENT, "the driver is not loaded, or this Linux lacks the attribute"),
    ] {
        let sim = new_sim();
        let (before, drivers) = (bindings(&sim), SimDrivers::new(&sim));
        drivers.fail("nvme/unbind", "", 1, errno);
        let claimed = manager(drivers.host()).claim(nvme(), &ClaimOptions::default());
        fails(claimed, &["can't unbind it from nvme", fix, "everything is as it was before"]);
        assert_eq!((bindings(&sim), ledger_files(&sim)), (before, vec![]), "{errno}");
    }
}

#[test]
fn a_driver_link_that_cannot_be_read_is_an_error() {
    let sim = new_sim();
    let host = sim.plain_host();
    let binder = Binder::new(&host, LONG);
    assert!(matches!(binder.driver(usb()), Ok(None)));
    // readlink(2) fails with EINVAL.
    sim.set(usb(), "driver", "").unwrap();
    let driver = binder.driver(usb());
    assert!(matches!(&driver, Err(BindError::Refused { .. })), "{driver:?}");
}

#[test]
fn a_function_may_vanish_during_a_write() {
    let sim = Arc::new(new_sim());
    let drivers = SimDrivers::new(&sim);
    let unplug = |sim: &Arc<SimHost>| {
        let sim = sim.clone();
        // The first write unplugs it, and later ones find nothing to unplug.
        drivers.observe(move || drop(sim.remove(nvme())));
    };
    let mut manager = manager(drivers.host());
    unplug(&sim);
    let vanished = "0000:02:00.0 has vanished from the host; everything is as it was before";
    fails(manager.claim(nvme(), &ClaimOptions::default()), &[vanished]);
    assert!(ledger_files(&sim).is_empty());

    drivers.observe(|| ());
    sim.add(&SimFunction::nvme(nvme()).group(2).driver("nvme")).unwrap();
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    drivers.fail("vfio-pci/unbind", "", 1, libc::ENODEV);
    unplug(&sim);
    release(&mut manager, nvme()).unwrap();
    assert!(ledger_files(&sim).is_empty());
}

#[test]
fn a_function_that_returns_to_vfio_is_not_released() {
    let sim = Arc::new(new_sim());
    let (before, drivers) = (bindings(&sim), SimDrivers::new(&sim));
    let mut manager = manager(drivers.host());
    manager.claim(nvme(), &ClaimOptions::default()).unwrap();
    let rebound = sim.clone();
    drivers.observe(move || {
        if rebound.driver_of(nvme()).is_none() {
            rebound.set_driver(nvme(), Some(VFIO_DRIVER)).unwrap();
        }
    });
    fails(release(&mut manager, nvme()), &["0000:02:00.0 is on vfio-pci after it was bound to nvme"]);
    assert_eq!(ledger_files(&sim), ["0000:02:00.0.claim"]);
    drivers.observe(|| ());
    release(&mut manager, nvme()).unwrap();
    assert_eq!(bindings(&sim), before);
}
