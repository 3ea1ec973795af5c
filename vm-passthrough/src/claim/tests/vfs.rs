//! Virtual functions.

use super::*;
use crate::claim::{VfError, VfOptions};
use crate::manager::ManagerError;

/// A physical function that a driver of the host serves, and the manager.
fn physical() -> (SimHost, SimDrivers, PciAddress, PassthroughManager) {
    let sim = SimHost::new().unwrap();
    let address: PciAddress = "0000:01:00.0".parse().unwrap();
    sim.add(&SimFunction::nvme(address).group(1).sriov(8).driver("nvme")).unwrap();
    let drivers = SimDrivers::new(&sim);
    let manager = PassthroughManager::with_host(drivers.host()).unwrap();
    (sim, drivers, address, manager)
}

fn numvfs(sim: &SimHost, address: PciAddress) -> String {
    std::fs::read_to_string(sim.device_dir(address).unwrap().join("sriov_numvfs")).unwrap()
}

#[test]
fn they_are_created_claimed_released_and_removed() {
    let (sim, drivers, address, mut manager) = physical();
    let options = VfOptions::default();
    let made = manager.create_vfs(address, 3, &options).unwrap();
    assert_eq!(made.len(), 3);
    assert_eq!(manager.create_vfs(address, 3, &options).unwrap(), made, "that number is there already");
    let autoprobe: Vec<_> =
        drivers.writes().into_iter().filter(|(path, _)| path.ends_with("sriov_drivers_autoprobe")).collect();
    assert_eq!(autoprobe.len(), 1, "{autoprobe:?}");
    assert_eq!(autoprobe[0].1, "0", "no driver of the host takes them");

    let claimed = manager.claim(made[1], &ClaimOptions::default()).unwrap();
    let refused = manager.remove_vfs(address, &VfOptions { force: true, ..options.clone() });
    assert!(
        matches!(refused, Err(ManagerError::Vfs(VfError::Claim(ClaimError::Taken { .. })))),
        "{refused:?}"
    );
    assert!(
        manager.claim(address, &ClaimOptions::default()).is_err(),
        "nor is the physical function taken from under them"
    );
    manager.release(&claimed).unwrap();
    assert_eq!(sim.driver_of(made[1]), None);
    assert_eq!(manager.remove_vfs(address, &options).unwrap(), made);
    assert_eq!(manager.remove_vfs(address, &options).unwrap(), []);
    assert_eq!(numvfs(&sim, address), "0\n");
    manager.claim(address, &ClaimOptions::default()).unwrap();
    let refused = manager.create_vfs(address, 1, &options);
    assert!(
        matches!(refused, Err(ManagerError::Vfs(VfError::Claim(ClaimError::Taken { .. })))),
        "{refused:?}"
    );
}

/// As many as it can have are removed, although a process that died had claimed one, and vfio-pci is not loaded.
#[test]
fn neither_dead_claims_nor_a_missing_driver_prevent_removal() {
    let (sim, drivers, address, manager) = physical();
    let other: PciAddress = "0000:02:00.0".parse().unwrap();
    sim.add(&SimFunction::nvme(other).group(2).driver("nvme")).unwrap();
    let options = VfOptions::default();
    for is_claimed in [true, false] {
        let made = manager.create_vfs(address, 8, &options).unwrap();
        assert_eq!(made.len(), 8);
        if is_claimed {
            leave_claim(&drivers.host(), made[7]);
            leave_claim(&drivers.host(), other);
        } else {
            sim.delete("sys/bus/pci/drivers/vfio-pci").unwrap();
            assert!(!manager.explain(made[0]).unwrap().is_ready());
        }
        assert_eq!(manager.remove_vfs(address, &options).unwrap(), made);
        assert_eq!(numvfs(&sim, address), "0\n");
        assert_eq!(ledger_files(&sim), ["0000:02:00.0.claim"]);
    }
}

#[test]
fn what_is_refused_changes_nothing() {
    let (sim, drivers, address, manager) = physical();
    let none: PciAddress = "0000:02:00.0".parse().unwrap();
    sim.add(&SimFunction::nvme(none).group(2).driver("nvme")).unwrap();
    let check = |address, count, expect: &str| {
        let error = manager.create_vfs(address, count, &VfOptions::default()).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
        assert_eq!(numvfs(&sim, "0000:01:00.0".parse().unwrap()), "0\n");
    };
    check(address, 0, "from 1 to 8 virtual functions, not 0");
    check(address, 9, "from 1 to 8 virtual functions, not 9");
    check(none, 1, "0000:02:00.0 is no physical function");
    check("0000:03:00.0".parse().unwrap(), 1, "no PCI function");
    check(none, 1, "mstconfig");
    sim.set(address, "sriov_totalvfs", "0\n").unwrap();
    for count in [0, 4] {
        check(address, count, "its firmware offers none");
        check(address, count, "mstconfig");
    }
    sim.set(address, "sriov_totalvfs", "8\n").unwrap();
    for (errno, expect) in
        [(libc::ENOENT, "creates none"), (libc::ENOMEM, "pci=realloc"), (libc::EACCES, "as root")]
    {
        drivers.fail("sriov_numvfs", "2", 1, errno);
        check(address, 2, expect);
    }
    manager.create_vfs(address, 2, &VfOptions::default()).unwrap();
    let error = manager.create_vfs(address, 3, &VfOptions::default()).unwrap_err().to_string();
    assert!(error.contains("has 2 virtual functions already"), "{error}");
}

#[test]
fn what_the_host_uses_is_removed_by_force_only() {
    let (sim, drivers, address, manager) = physical();
    let made = manager.create_vfs(address, 2, &VfOptions::default()).unwrap();
    sim.set_driver(made[1], Some("nvme")).unwrap();
    sim.add_child(made[1], "net", "net/eth0", &[]).unwrap();
    let route = "Iface\tDestination\tGateway\neth0\t00000000\t0102A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
    sim.write("proc/net/route", route).unwrap();
    let error = manager.remove_vfs(address, &VfOptions::default()).unwrap_err().to_string();
    assert!(error.contains("default-route") && error.contains("eth0"), "{error}");
    assert_eq!(numvfs(&sim, address), "2\n");

    // A virtual function that a process has open keeps the Linux kernel from it: it is said, and it goes on.
    drivers.hold(made[1]);
    let options = VfOptions { force: true, deadline: Duration::from_millis(50), ..VfOptions::default() };
    let error = manager.remove_vfs(address, &options).unwrap_err().to_string();
    assert!(error.contains("stop what has a virtual function open"), "{error}");
}
