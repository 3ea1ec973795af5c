//! Shared use and claims of the whole keep each other out.

use super::*;

fn lease_files(sim: &SimHost) -> usize {
    ledger_files(sim).iter().filter(|name| name.ends_with(".shared")).count()
}

#[test]
fn a_shared_function_is_not_claimed_and_a_claimed_one_not_shared() {
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    let (first, second) = (manager.share(gpu()).unwrap(), manager.share(gpu()).unwrap());
    assert_eq!((first.address(), lease_files(&sim)), (gpu(), 2));
    assert_eq!(manager.sharers(gpu()).unwrap().len(), 2);
    assert_eq!(manager.sharers(nvme()).unwrap(), []);
    let before = bindings(&sim);
    let mut refused = |address, force, expect: &str| {
        let options = ClaimOptions { force, ..ClaimOptions::default() };
        let error = manager.claim(address, &options).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
        assert_eq!(bindings(&sim), before);
    };
    refused(gpu(), false, "blocker in-use-shared");
    refused(gpu(), true, "0000:01:00.0 is shared by process");
    // The GPU would go with its audio function.
    refused(audio(), true, "0000:01:00.0 is shared by process");
    drop((first, second));
    assert_eq!(lease_files(&sim), 0);

    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    for address in [gpu(), audio(), usb()] {
        let error = manager.share(address).unwrap_err().to_string();
        assert!(error.contains("is claimed already by process"), "{error}");
    }
    manager.share(nvme()).unwrap();
    release(&mut manager, gpu()).unwrap();
    drop(manager.share(gpu()).unwrap());
    let error = manager.share(address("0000:77:00.0")).unwrap_err().to_string();
    assert!(error.contains("there is no PCI function 0000:77:00.0"), "{error}");
}

#[test]
fn a_persistent_claim_keeps_sharers_out_and_says_how_to_end_it() {
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    manager.claim(gpu(), &ClaimOptions { persistent: true, ..ClaimOptions::default() }).unwrap();
    let error = manager.share(gpu()).unwrap_err().to_string();
    assert!(error.contains("until it is released; run `vm-service release 0000:01:00.0` first"), "{error}");
}

#[test]
fn what_dead_processes_left_is_no_lease() {
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    // The directory is made by whoever comes first.
    drop(manager.share(gpu()).unwrap());
    for text in ["", "torn", "00000000 shared 1 0000:01:00.0 1 - x\n"] {
        sim.write("run/ledger/0000:01:00.0.4711.1.shared", text).unwrap();
        let path = sim.path("run/ledger/0000:01:00.0.4711.1.shared");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(manager.sharers(gpu()).unwrap(), []);
        // One that lives, whose line can't be read: the file's name has its process ID.
        let file = fs::File::open(&path).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let sharers = manager.sharers(gpu()).unwrap();
        assert_eq!((sharers.len(), sharers[0].owner.pid, sharers[0].started), (1, 4711, None));
        assert!(manager.claim(gpu(), &ClaimOptions::default()).is_err());
        drop(file);
        manager.claim(gpu(), &ClaimOptions::default()).unwrap();
        assert_eq!(lease_files(&sim), 0, "the claim removes it");
        release(&mut manager, gpu()).unwrap();
    }
}

/// Names the host's root to a child that shares its GPU until it is killed.
const CHILD: &str = "VM_PASSTHROUGH_SHARE";

#[test]
fn a_lease_ends_with_its_process() {
    if let Some(root) = std::env::var_os(CHILD) {
        let _lease = manager(SimDrivers::at(Path::new(&root)).host()).share(gpu()).unwrap();
        std::thread::sleep(Duration::from_secs(600));
        return;
    }
    let sim = new_sim();
    let drivers = SimDrivers::new(&sim);
    let mut manager = manager(drivers.host());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "claim::tests::shared::a_lease_ends_with_its_process", "--quiet"])
        .env(CHILD, sim.root())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while manager.sharers(gpu()).unwrap().is_empty() {
        assert!(
            std::time::Instant::now() < until && child.try_wait().unwrap().is_none(),
            "it does not share"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let sharers = manager.sharers(gpu()).unwrap();
    assert_eq!(sharers[0].owner.pid, child.id());
    assert!(manager.claim(gpu(), &ClaimOptions::default()).is_err());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(manager.sharers(gpu()).unwrap(), []);
    manager.claim(gpu(), &ClaimOptions::default()).unwrap();
    assert_eq!(lease_files(&sim), 0);
}
