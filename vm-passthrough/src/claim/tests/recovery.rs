//! Recovery of the claims of dead processes.

use super::*;
use crate::claim::act::begin_release;
use crate::claim::recover::Failure;
use crate::ledger::LedgerError;

#[test]
fn recovery_near_a_function_and_elsewhere() {
    // In the GPU's IOMMU group, but in another slot; and in another group.
    let (neighbour, elsewhere) = (address("0000:01:01.0"), address("0000:03:00.0"));
    for (is_near, claimed, unread) in [(true, gpu(), neighbour), (false, nvme(), elsewhere)] {
        let sim = new_sim();
        let host = SimDrivers::new(&sim).host();
        leave_claim(&host, gpu());
        leave_claim(&host, nvme());
        sim.add(&SimFunction::network(neighbour).group(1)).unwrap();
        for damaged in [neighbour, elsewhere] {
            let path = sim.path(&format!("run/ledger/{damaged}.claim"));
            fs::write(&path, "nonsense\n").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        let mut manager = manager(host);
        let recovery = match is_near {
            true => manager.recover_near(&[neighbour]).unwrap(),
            false => manager.recover_except(&[neighbour]).unwrap(),
        };
        let recovered: Vec<_> = recovery.recovered.iter().map(|entry| entry.target).collect();
        assert_eq!(recovered, [claimed]);
        let [ClaimError::Record(record)] = &recovery.failed[..] else { panic!("{:?}", recovery.failed) };
        assert_eq!(record.target, Some(unread));
        assert_eq!(on_vfio(&sim, &[gpu(), audio(), usb()]), !is_near);
        assert_eq!(on_vfio(&sim, &[nvme()]), is_near);
    }
}

/// The record says so before the ledger is unlocked.
#[test]
fn the_start_of_a_release_is_recorded() {
    let sim = new_sim();
    let ledger = Ledger::lock(&SimDrivers::new(&sim).host(), LONG).unwrap();
    let mut journal = ledger.create(gpu(), true).unwrap();
    let releasing = || ledger.entries().unwrap()[0].as_ref().unwrap().entry.releasing;
    assert!(!releasing());
    begin_release(&mut journal);
    assert!(journal.entry.releasing && releasing());
}

#[test]
fn a_void_record_that_stays_blocks_its_target() {
    let sim = new_sim();
    let ledger = Ledger::lock(&SimDrivers::new(&sim).host(), LONG).unwrap();
    let entry = ledger.create(gpu(), false).unwrap().entry;
    let error = LedgerError::Untrusted { path: "record".into(), what: "can't be removed".into() };
    let failure = Failure::Void(entry, error);
    assert_eq!([gpu(), audio()].map(|address| failure.is_about(address)), [true, false]);
}
