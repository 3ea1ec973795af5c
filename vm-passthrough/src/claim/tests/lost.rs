//! Functions that stop answering, or lose power, while they are claimed or released.

use super::*;
use crate::pci::regs;

/// What of its config space changes before the host's driver is to have it again, and what the error says then.
fn check(change: impl FnOnce(&mut [u8]), expect: &[&str]) {
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    manager.claim(nvme(), &persistent()).unwrap();
    let path = sim.device_dir(nvme()).unwrap().join("config");
    let before = fs::read(&path).unwrap();
    let mut config = before.clone();
    change(&mut config);
    fs::write(&path, config).unwrap();
    drivers.fail("bus/pci/drivers/nvme/bind", &nvme().to_string(), 1, libc::ENODEV);
    fails(release(&mut manager, nvme()), expect);
    // It was found again.
    fs::write(&path, before).unwrap();
    release(&mut manager, nvme()).unwrap();
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("nvme"));
    assert!(ledger_files(&sim).is_empty());
}

#[test]
fn what_was_lost_is_said_with_the_way_to_find_it_again() {
    let remedy = "/remove; echo 1 > ";
    check(|config| config.fill(0xff), &["does not answer", remedy, "/rescan", "the ledger remembers it"]);
    let lost = "has other addresses in its BARs";
    let bar = usize::from(regs::BASE_ADDRESS_0);
    check(|config| config[bar..bar + 8].copy_from_slice(&[4, 0, 0, 0, 0, 0, 0, 0]), &[lost, remedy]);
    // Restored from what was read while it was silent.
    let restored = [4, 0xc0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    check(|config| config[bar..bar + 8].copy_from_slice(&restored), &[lost, remedy]);
    check(|_| (), &["dmesg says more"]);
}

/// Some devices fall off the bus when their driver lets go of them.
#[test]
fn a_claim_of_what_does_not_answer_any_more_fails() {
    let check = |state: &str, force: bool, expect: Option<&str>| {
        let sim = new_sim();
        sim.set(nvme(), "power_state", state).unwrap();
        let drivers = SimDrivers::new(&sim);
        let directory = sim.device_dir(nvme()).unwrap();
        drivers.observe(move || {
            if !directory.join("driver").exists() {
                let config = directory.join("config");
                let len = fs::metadata(&config).unwrap().len();
                fs::write(&config, vec![0xff; len as usize]).unwrap();
                fs::write(directory.join("power_state"), "D3cold\n").unwrap();
            }
        });
        let claimed = manager(drivers.host()).claim(nvme(), &ClaimOptions { force, ..persistent() });
        match expect {
            Some(expect) => fails(claimed, &[expect, "does not answer", "/remove; echo 1 > "]),
            None => drop(claimed.unwrap()),
        }
    };
    check("D3hot\n", false, Some("can't claim it"));
    check("D3hot\n", true, None);
    // What slept before is not woken to see.
    check("D3cold\n", false, None);
}
