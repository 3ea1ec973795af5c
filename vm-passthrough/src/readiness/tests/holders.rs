//! Functions that processes hold.

use super::*;

#[test]
fn in_use() {
    let open = |path: &str| {
        let scene = Scene::new();
        scene.sim.write("proc/4242/comm", "reader\n").unwrap();
        let node = if path.starts_with("dev") {
            scene.sim.path(path)
        } else {
            scene.sim.device_dir(address(DISK)).unwrap().join(path)
        };
        std::fs::create_dir_all(scene.sim.path("proc/4242/fd")).unwrap();
        std::os::unix::fs::symlink(node, scene.sim.path("proc/4242/fd/3")).unwrap();
        let directory = format!("sys/bus/pci/devices/{DISK}");
        for (path, name) in [
            ("nvme/nvme0", "nvme0"),
            ("nvme/nvme0/nvme0n1", "nvme0n1"),
            ("nvme/nvme0/nvme0n1/nvme0n1p1", "nvme0n1p1"),
            ("drm/card0", "dri/card0"),
            ("accel/accel0", "accel/accel0"),
            ("sound/card1/controlC1", "snd/controlC1"),
            ("sound/card1/input7/event7", "input/event7"),
            ("input/input8/event8", "input/event8"),
            ("usb1/1-1/1-1:1.0/0003:046D:C31C.0001/hidraw/hidraw0", "hidraw0"),
        ] {
            scene.sim.write(&format!("{directory}/{path}/dev"), "1:1\n").unwrap();
            scene.sim.write(&format!("{directory}/{path}/uevent"), &format!("DEVNAME={name}\n")).unwrap();
        }
        scene.write(&format!("proc/driver/nvidia/gpus/{DISK}/information"), "Model: x\nDevice Minor: \t 2\n")
    };
    for path in [
        "dev/nvme0",
        "dev/nvme0n1",
        "dev/nvme0n1p1",
        "dev/dri/card0",
        "dev/accel/accel0",
        "dev/snd/controlC1",
        "dev/nvidia2",
        "dev/vfio/1",
        "resource0",
    ] {
        open(path).check(Code::InUse, Blocks, &["process 4242 (reader) has", path, "open"], &["kill 4242"]);
    }
    // Keyboards and the like let go when they are unplugged.
    for path in ["dev/nvme1", "dev/null", "dev/nvidia20", "config", "dev/input/event8", "dev/hidraw0"] {
        assert_eq!(open(path).explain().blockers, [], "{path}");
    }
    let mut unchecked = open("dev/nvme0");
    unchecked.options.check_open_files = false;
    assert_eq!(unchecked.explain().blockers, []);
}

/// A device node in this directory of the function, which a process has open.
fn node_in(directory: &str) -> Scene {
    let scene = Scene::new();
    scene.sim.write("proc/4242/comm", "reader\n").unwrap();
    std::fs::create_dir_all(scene.sim.path("proc/4242/fd")).unwrap();
    std::os::unix::fs::symlink(scene.sim.path("dev/node"), scene.sim.path("proc/4242/fd/3")).unwrap();
    let directory = format!("sys/bus/pci/devices/{DISK}/{directory}");
    scene.write(&format!("{directory}/dev"), "1:1\n").write(&format!("{directory}/uevent"), "DEVNAME=node\n")
}

#[track_caller]
fn is_found(scene: &Scene) {
    scene.check(Code::InUse, Blocks, &["process 4242 (reader) has", "dev/node open"], &["kill 4242"]);
}

#[test]
fn nodes_are_looked_for_eight_directories_deep() {
    is_found(&node_in("a/b/c/d/e/f/g/h"));
    assert_eq!(node_in("a/b/c/d/e/f/g/h/i").explain().blockers, []);
}

#[test]
fn as_many_directories_are_searched_as_any_driver_makes() {
    let scene = node_in("z");
    let many = scene.sim.device_dir(address(DISK)).unwrap().join("many");
    std::fs::create_dir(&many).unwrap();
    // With `many`, `power` and `z` these are 4097.
    for number in 0..4094 {
        std::fs::create_dir(many.join(number.to_string())).unwrap();
    }
    assert_eq!(scene.explain().blockers, []);
    std::fs::remove_dir(many.join("0")).unwrap();
    is_found(&scene);
}

/// A function behind a bridge has attributes of PCI; a SCSI disk has a vendor, too.
#[test]
fn nodes_of_functions_behind_are_not_searched() {
    let with = |attributes: &[&str]| {
        let scene = node_in("host0/0:0:0:0");
        let directory = format!("sys/bus/pci/devices/{DISK}/host0/0:0:0:0");
        attributes.iter().fold(scene, |scene, name| scene.write(&format!("{directory}/{name}"), "x\n"))
    };
    is_found(&with(&["vendor"]));
    is_found(&with(&["class"]));
    assert_eq!(with(&["vendor", "class"]).explain().blockers, []);
}

#[test]
fn five_processes_are_named() {
    let opened_by = |count: u32| {
        let scene = Scene::new();
        for pid in 4001..=4000 + count {
            scene.sim.write(&format!("proc/{pid}/comm"), "reader\n").unwrap();
            std::fs::create_dir_all(scene.sim.path(&format!("proc/{pid}/fd"))).unwrap();
            let link = scene.sim.path(&format!("proc/{pid}/fd/3"));
            std::os::unix::fs::symlink(scene.sim.path("dev/vfio/1"), link).unwrap();
        }
        scene
    };
    let kill = &["kill 4001 4002 4003 4004 4005)"];
    for (count, more) in [(5, ""), (6, ", 1 more"), (8, ", 3 more")] {
        let scene = opened_by(count);
        scene.check(Code::InUse, Blocks, &["process 4001 (reader) has", &format!("open{more}, by ")], kill);
        assert!(more.is_empty() != scene.explain().blockers[0].evidence.contains("more"), "{count}");
    }
}

#[test]
fn five_leases_are_named() {
    let scene = Scene::new().write("proc/self/comm", "worker\n");
    let manager = crate::PassthroughManager::with_host(scene.sim.plain_host()).unwrap();
    let mut leases = Vec::new();
    for (count, more) in [(1, ""), (5, ""), (6, "; 1 more"), (8, "; 3 more")] {
        while leases.len() < count {
            leases.push(manager.share(address(DISK)).unwrap());
        }
        let evidence = scene.explain().blockers[0].evidence.clone();
        assert_eq!(evidence.matches(".shared").count(), count.min(5), "{evidence}");
        assert!(evidence.ends_with(&format!(".shared{more}")), "{evidence}");
    }
}

/// The functions of one claim share its record.
#[test]
fn a_claim_of_two_functions_is_reported_once() {
    let scene = Scene::new().write("proc/self/comm", "vm-service\n");
    let audio = SimFunction::new(address("0000:01:00.1"), 0x10de, 0x22ba, 0x04_0300).group(1);
    scene.sim.add(&audio.below(address(PORT))).unwrap();
    let host = crate::sim::SimDrivers::new(&scene.sim).host();
    let mut manager = crate::PassthroughManager::with_host(host.clone()).unwrap();
    let persistent = ClaimOptions { persistent: true, ..ClaimOptions::default() };
    manager.claim(address(DISK), &persistent).unwrap();
    // Another process takes it up.
    let path = scene.sim.path(&format!("run/ledger/{DISK}.claim"));
    let (_, mut entry) = ledger::read_record(&host, &path).unwrap();
    assert!(entry.function(address("0000:01:00.1")).is_some());
    entry.user = Some(ledger::Owner { pid: 4242, ..entry.owner.clone() });
    std::fs::write(&path, entry.text()).unwrap();
    let record = std::fs::File::open(&path).unwrap();
    rustix::fs::flock(&record, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let readiness = scene.explain();
    assert_eq!(readiness.functions.len(), 2);
    let found = readiness.blockers.iter().filter(|found| found.code == Code::Claimed);
    assert_eq!(found.map(|found| found.function).collect::<Vec<_>>(), [address(DISK)], "{readiness}");
}

#[test]
fn in_use_shared() {
    let scene = Scene::new()
        .write("proc/self/comm", "worker\n")
        .write(&format!("proc/{}/stat", std::process::id()), &format!("1 (a) b) S{} 77 0", " 0".repeat(18)));
    let manager = crate::PassthroughManager::with_host(scene.sim.plain_host()).unwrap();
    let lease = manager.share(address(DISK)).unwrap();
    let pid = std::process::id().to_string();
    let owner = format!("process {pid} (worker), by ");
    scene.check(
        Code::InUseShared,
        Blocks,
        &[&owner, ".shared"],
        &["wait until they have ended", &format!("kill {pid}")],
    );
    let sharers = manager.sharers(address(DISK)).unwrap();
    assert_eq!((sharers.len(), sharers[0].started), (1, Some(77)));
    // Another process has the ID by now, and a child of the owner the lease.
    let scene = scene.write(&format!("proc/{pid}/stat"), &format!("1 (a) S{} 78 0", " 0".repeat(18)));
    scene.check(Code::InUseShared, Blocks, &["has ended, but a child of it lives"], &[]);
    drop(lease);
    assert_eq!(scene.explain().blockers, []);
}

#[test]
fn claimed() {
    let scene = Scene::new().write("proc/self/comm", "vm-service\n");
    let host = crate::sim::SimDrivers::new(&scene.sim).host();
    let codes = || {
        let blockers = explain(&host, address(DISK), &scene.options).unwrap().blockers;
        blockers.iter().map(|found| found.code.as_str()).collect::<Vec<_>>().join(" ")
    };
    let mut manager = crate::PassthroughManager::with_host(host.clone()).unwrap();
    let claim = |persistent| ClaimOptions { persistent, ..ClaimOptions::default() };
    let own = manager.claim(address(DISK), &claim(false)).unwrap();
    assert_eq!(codes(), "", "this process has it");
    manager.release(&own).unwrap();
    manager.claim(address(DISK), &claim(true)).unwrap();
    assert_eq!(codes(), "", "no process has it");

    // Another process takes it up.
    let path = scene.sim.path(&format!("run/ledger/{DISK}.claim"));
    let (_, mut entry) = ledger::read_record(&host, &path).unwrap();
    entry.user = Some(ledger::Owner { pid: 4242, guest: Some("web1".into()), ..entry.owner.clone() });
    std::fs::write(&path, entry.text()).unwrap();
    assert_eq!(codes(), "", "it has died");
    let record = std::fs::File::open(&path).unwrap();
    rustix::fs::flock(&record, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let evidence =
        format!("process 4242 (vm-service, guest web1) has it, by /run/vm-passthrough/ledger/{DISK}.claim");
    scene.check(Code::Claimed, Blocks, &[&evidence], &["wait until that process has ended", "kill 4242"]);
    // While somebody writes the ledger, locks of records tell nothing.
    let writer = ledger::Ledger::lock(&host, claim::DEADLINE).unwrap();
    scene.check(Code::Unchecked, Warns, &["whether another process has claimed it"], &["run this again"]);
    drop(writer);
    assert_eq!(codes(), "claimed");
    drop(record);
    assert_eq!(codes(), "");
}
