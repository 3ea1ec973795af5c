//! `claims`, and several addresses at once for `claim`, `release` and `explain`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

use vm_passthrough::PassthroughManager;
use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::sim::{SimDrivers, SimHost};

use super::explain_claim::crowded;
use super::host::{address, workstation};
use super::{check, check_error, vm_service};

/// Drivers of the GPU, its audio, the disk and the network card of [`workstation`].
fn drivers(sim: &SimHost) -> [Option<String>; 4] {
    ["01:00.0", "01:00.1", "02:00.0", "03:00.0"].map(|text| sim.driver_of(address(text)))
}

const ON_VFIO: &str = "vfio-pci";

/// Checks the table, in which claims of this test may be some seconds old.
#[track_caller]
fn check_claims(sim: &SimHost, expect: &str) {
    let got = vm_service(&SimDrivers::new(sim).host(), "claims");
    assert_eq!((got.exit, got.err.as_str()), (0, ""), "{}", got.out);
    let aged = (1..10).fold(got.out, |text, age| text.replace(&format!(" {age}s "), " 0s "));
    let expect = expect.trim_start_matches('\n').replace("PID", &std::process::id().to_string());
    assert_eq!(aged, expect, "claims printed\n{aged}");
}

#[test]
fn lists_claims_with_who_has_them() {
    let sim = workstation();
    sim.write("proc/self/comm", "tester\n").expect("written");
    let host = SimDrivers::new(&sim).host();
    check(&host, "claims", "nothing is claimed\n");
    assert!(!sim.path("run/ledger").exists(), "looking makes no ledger");

    // An operator's, a running guest's, and a dead process's.
    assert_eq!(vm_service(&host, "claim 01:00.0").exit, 0);
    let mut manager = PassthroughManager::with_host(host.clone()).expect("a manager");
    let mut of_guest = ClaimOptions::default();
    of_guest.guest = Some("web1".into());
    manager.claim(address("02:00.0"), &of_guest).expect("claimed");
    let mut dead = PassthroughManager::with_host(host.clone()).expect("a manager");
    dead.claim(address("03:00.0"), &ClaimOptions::default()).expect("claimed");
    let record = sim.path("run/ledger/0000:03:00.0.claim");
    let text = fs::read(&record).expect("a record");
    drop(dead);
    fs::write(&record, text).expect("written");
    check_claims(
        &sim,
        "
ADDRESS       FORMER DRIVER  PERSIST  AGE  HELD BY
0000:01:00.0  nvidia         no       0s   nobody, until released
0000:01:00.1  snd_hda_intel  no       0s   with 0000:01:00.0
0000:02:00.0  nvme           no       0s   guest web1, process PID (tester)
0000:03:00.0  igc            no       0s   process PID (tester), which died
",
    );
    let got = vm_service(&host, "claims --json");
    let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    let claims = document["claims"].as_array().expect("claims");
    let states: Vec<_> = claims.iter().map(|claim| claim["state"].as_str().unwrap_or("none")).collect();
    assert_eq!(states, ["unused", "in-use", "owner-died"]);
    assert_eq!(claims[0]["functions"][0]["driver"], "snd_hda_intel");
    assert_eq!((&claims[0]["until_released"], &claims[1]["until_released"]), (&true.into(), &false.into()));
    assert_eq!(claims[1]["owner"]["guest"], "web1");
    assert!(claims[1]["owner"]["since"].as_u64() > Some(1_700_000_000), "{}", got.out);

    // A guest that takes up the operator's claim.
    manager.claim(address("01:00.0"), &of_guest).expect("taken up");
    let got = vm_service(&host, "claims").out;
    assert_eq!(got.matches("guest web1").count(), 2, "{got}");
    let got = vm_service(&host, "claim 02:00.0");
    assert!(got.err.contains(&format!("by process {} (tester, guest web1)", std::process::id())), "{got:?}");
}

#[test]
fn tells_of_records_that_cannot_be_read() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    assert_eq!(vm_service(&host, "claim 02:00.0 03:00.0").exit, 0);
    fs::write(sim.path("run/ledger/0000:02:00.0.claim"), "nonsense\n").expect("written");
    let got = vm_service(&host, "claims --json");
    let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!(document["claims"][0]["address"], "0000:03:00.0");
    assert!(document["unreadable"][0].as_str().is_some_and(|text| text.contains("put it back by hand")));
    // The others are released all the same.
    let got = vm_service(&host, "release --all");
    assert_eq!((got.exit, got.out.as_str()), (1, "0000:03:00.0 released\n"));
    assert!(got.err.contains("0000:02:00.0.claim can't be read"), "{}", got.err);
}

#[test]
fn claims_all_or_none() {
    let sim = workstation();
    let actor = SimDrivers::new(&sim);
    let host = actor.host();
    let before = drivers(&sim);
    // The audio function is claimed along with the GPU.
    check(
        &host,
        "claim 01:00.0 01:00.1 02:00.0",
        "0000:01:00.1 claimed, taken from snd_hda_intel\n0000:01:00.0 claimed, taken from nvidia\n\
         0000:02:00.0 claimed, taken from nvme\n",
    );
    assert_eq!(drivers(&sim)[..3], [ON_VFIO; 3].map(|driver| Some(driver.into())));
    check(
        &host,
        "release 01:00.0 01:00.1 02:00.0",
        "0000:01:00.0 released\n0000:01:00.1 released\n0000:02:00.0 released\n",
    );
    assert_eq!(drivers(&sim), before);

    // One that is not there: nothing was touched.
    let writes = actor.writes();
    let got = vm_service(&host, "claim 02:00.0 07:00.0");
    assert_eq!((got.exit, got.out.as_str()), (1, ""));
    assert!(got.err.contains("there is no PCI function 0000:07:00.0"), "{}", got.err);
    assert_eq!(actor.writes(), writes);
    // One that its driver does not let go: those before it are released.
    actor.fail("bus/pci/drivers/igc/unbind", "0000:03:00.0", 1, 5);
    let got = vm_service(&host, "claim 01:00.0 02:00.0 03:00.0");
    assert_eq!((got.exit, got.out.as_str()), (1, ""));
    let says = "0000:02:00.0 is released again; 0000:01:00.0 is released again\n";
    assert!(got.err.contains("unbind it from igc") && got.err.ends_with(says), "{}", got.err);
    assert_eq!(drivers(&sim), before);
    check(&host, "claims", "nothing is claimed\n");
    assert_eq!(drivers(&sim), before);
}

#[test]
fn claims_none_while_one_is_blocked() {
    let sim = crowded();
    let actor = SimDrivers::new(&sim);
    let disk = vm_passthrough::sim::SimFunction::nvme(address("0000:09:00.0")).group(9).driver("nvme");
    sim.add(&disk).expect("a function");
    let got = vm_service(&actor.host(), "claim 09:00.0 02:00.0");
    assert_eq!((got.exit, got.out.as_str()), (3, ""));
    assert!(got.err.contains("nothing was touched") && got.err.contains("group-not-viable"), "{}", got.err);
    assert_eq!(actor.writes(), []);
}

#[test]
fn releases_each_whatever_becomes_of_the_others() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    let before = drivers(&sim);
    check(&host, "release --all", "nothing is claimed\n");
    assert_eq!(vm_service(&host, "claim 01:00.0 02:00.0").exit, 0);
    let mut manager = PassthroughManager::with_host(host.clone()).expect("a manager");
    manager.claim(address("02:00.0"), &ClaimOptions::default()).expect("taken up");

    let got = vm_service(&host, "release 02:00.0 01:00.1 03:00.0 --json");
    assert_eq!(got.exit, 1);
    let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!(document["addresses"], serde_json::json!(["0000:01:00.1"]));
    assert!(got.err.contains("0000:02:00.0 is claimed already by process"), "{}", got.err);
    assert!(got.err.contains("\nerror: 0000:03:00.0 is not claimed"), "{}", got.err);
    let got = vm_service(&host, "release --all");
    assert_eq!((got.exit, got.out.as_str()), (1, ""), "{got:?}");
    manager.close().expect("closed");
    check(&host, "release --all", "0000:02:00.0 released\n");
    assert_eq!(drivers(&sim), before);
}

#[test]
fn releases_every_record_that_it_names() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    let before = drivers(&sim);
    let record = |function: &str| sim.path(&format!("run/ledger/0000:{function}.claim"));
    // Two records that name the same functions, as nobody but a hand makes them.
    assert_eq!(vm_service(&host, "claim 01:00.1").exit, 0);
    let other = fs::read(record("01:00.1")).expect("a record");
    assert_eq!(vm_service(&host, "release 01:00.1").exit, 0);
    assert_eq!(vm_service(&host, "claim 01:00.0").exit, 0);
    fs::write(record("01:00.1"), &other).expect("written");
    check(&host, "release --all", "0000:01:00.0 released\n0000:01:00.1 released\n");
    check(&host, "claims", "nothing is claimed\n");
    assert_eq!(drivers(&sim), before);
}

#[test]
fn explains_several() {
    let sim = workstation();
    let host = sim.plain_host();
    let disk = "0000:02:00.0 Samsung Electronics Co Ltd NVMe SSD Controller PM9A1/PM9A3/980PRO: ready\n  driver  vfio-pci, as no variant of it is made for this device\n";
    let got = vm_service(&host, "explain 02:00.0 07:00.0 00:01.0");
    assert_eq!(got.exit, 1, "{got:?}");
    assert!(got.out.starts_with(disk) && got.out.contains("not-an-endpoint"), "{}", got.out);
    assert!(got.err.starts_with("error: there is no PCI function 0000:07:00.0"), "{}", got.err);
    assert_eq!(vm_service(&host, "explain 02:00.0 00:01.0").exit, 3);
    check(&host, "explain 02:00.0 02:00.0", disk);
    let missing = "there is no PCI function 0000:07:00.0 on this host; `vm-service list --all` shows those that there are";
    check_error(&host, "explain 07:00.0", 1, missing);
    check_error(&host, "release 07:00.0", 1, "0000:07:00.0 is not claimed, so there is nothing to release");
}

/// The host boots again: what was bound is with its first drivers, and `/run` is empty.
fn reboot(sim: &SimHost) {
    for (function, driver) in
        [("01:00.0", "nvidia"), ("01:00.1", "snd_hda_intel"), ("02:00.0", "nvme"), ("03:00.0", "igc")]
    {
        if sim.device_dir(address(function)).is_ok() {
            sim.set_driver(address(function), Some(driver)).expect("bound");
            sim.set(address(function), "driver_override", "(null)\n").expect("written");
        }
    }
    sim.delete("run").expect("deleted");
    fs::create_dir(sim.path("run")).expect("made");
}

#[test]
fn claims_survive_a_boot_until_they_are_released() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    let before = drivers(&sim);
    check(&host, "claim --restore", "");
    let got = vm_service(&host, "claim --restore --json");
    assert!(got.exit == 0 && got.out.contains("\"functions\": []"), "{got:?}");
    assert_eq!(vm_service(&host, "claim --persist 01:00.0 02:00.0").exit, 0);
    assert_eq!(vm_service(&host, "claim 03:00.0").exit, 0);
    check_claims(
        &sim,
        "
ADDRESS       FORMER DRIVER  PERSIST  AGE  HELD BY
0000:01:00.0  nvidia         yes      0s   nobody, until released
0000:01:00.1  snd_hda_intel  yes      0s   with 0000:01:00.0
0000:02:00.0  nvme           yes      0s   nobody, until released
0000:03:00.0  igc            no       0s   nobody, until released
",
    );
    reboot(&sim);
    assert_eq!(drivers(&sim), before);
    check_claims(
        &sim,
        "
ADDRESS       FORMER DRIVER  PERSIST  AGE  HELD BY
0000:01:00.0  -              yes      -    nobody, not claimed since the boot
0000:01:00.1  -              yes      -    with 0000:01:00.0
0000:02:00.0  -              yes      -    nobody, not claimed since the boot
",
    );
    check(
        &host,
        "claim --restore",
        "0000:01:00.1 claimed, taken from snd_hda_intel\n0000:01:00.0 claimed, taken from nvidia\n\
         0000:02:00.0 claimed, taken from nvme\n",
    );
    check(&host, "claim --restore", "0000:01:00.0 is claimed already\n0000:02:00.0 is claimed already\n");
    let restored = drivers(&sim);
    assert_eq!((restored[0].as_deref(), restored[3].as_deref()), (Some(ON_VFIO), Some("igc")));

    check(&host, "release 01:00.1", "0000:01:00.1 released\n");
    reboot(&sim);
    // One that is not claimed is released too.
    let got = vm_service(&host, "claims --json").out;
    let document: serde_json::Value = serde_json::from_str(&got).expect("JSON");
    assert_eq!(document["claims"][0]["state"], "not-restored");
    check(&host, "release --all", "0000:02:00.0 released\n");
    check(&host, "claim --restore", "");
    assert_eq!(drivers(&sim), before);
}

/// Changes an ID of a function.
fn set_id(sim: &SimHost, function: &str, from: &str, to: &str) {
    let path = sim.device_dir(address(function)).expect("a function").join("uevent");
    let before = fs::read_to_string(&path).expect("its IDs");
    assert!(before.contains(from), "{before}");
    fs::write(path, before.replace(from, to)).expect("written");
}

#[test]
fn a_claim_is_not_made_again_of_another_device() {
    let sim = workstation();
    let actor = SimDrivers::new(&sim);
    let host = actor.host();
    assert_eq!(vm_service(&host, "claim --persist 01:00.0 02:00.0 03:00.0").exit, 0);
    reboot(&sim);
    // Another card is in the first's slot, another audio function beside the GPU.
    set_id(&sim, "02:00.0", ":A80A", ":1234");
    set_id(&sim, "01:00.1", "SUBSYS_ID=0", "SUBSYS_ID=1");
    let before = drivers(&sim);
    let got = vm_service(&host, "claim --restore");
    assert_eq!((got.exit, got.out.as_str()), (1, "0000:03:00.0 claimed, taken from igc\n"), "{got:?}");
    for (part, other) in
        [("0000:02:00.0 is 144d:1234", "not 144d:a80a"), ("0000:01:00.1 is 10de:22ba", "another device")]
    {
        assert!(got.err.contains(part) && got.err.contains(other), "{part}: {}", got.err);
    }
    assert_eq!(drivers(&sim)[..3], before[..3]);
    // They stay noted, for the device may come back.
    set_id(&sim, "02:00.0", ":1234", ":A80A");
    let got = vm_service(&host, "claim --restore");
    assert_eq!(got.exit, 1);
    let says = "0000:02:00.0 claimed, taken from nvme\n";
    assert!(got.out.contains("0000:03:00.0 is claimed already") && got.out.ends_with(says), "{}", got.out);
}

#[test]
fn what_cannot_be_noted_is_not_claimed_and_what_is_noted_wrongly_stays() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    let before = drivers(&sim);
    sim.write("var/lib/vm-passthrough", "a file").expect("written");
    let got = vm_service(&host, "claim --persist 02:00.0");
    assert_eq!((got.exit, got.out.as_str()), (1, ""));
    assert!(got.err.contains("0000:02:00.0.toml can't be written"), "{}", got.err);
    assert_eq!(drivers(&sim), before);
    sim.delete("var/lib/vm-passthrough").expect("deleted");

    assert_eq!(vm_service(&host, "claim --persist 02:00.0").exit, 0);
    reboot(&sim);
    sim.write("var/lib/vm-passthrough/claims/0000:01:00.0.toml", "nonsense\n").expect("written");
    let got = vm_service(&host, "claim --restore");
    assert_eq!((got.exit, got.out.as_str()), (1, "0000:02:00.0 claimed, taken from nvme\n"));
    assert!(got.err.contains("0000:01:00.0.toml can't be used"), "{}", got.err);
    check(&host, "release 01:00.0", "0000:01:00.0 released\n");
    check(&host, "release 02:00.0", "0000:02:00.0 released\n");
}

/// The folder of notes, and their names.
fn notes(sim: &SimHost) -> Vec<String> {
    let files = fs::read_dir(sim.path(NOTES)).into_iter().flatten().flatten();
    let mut names: Vec<_> = files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

const NOTES: &str = "var/lib/vm-passthrough/claims";

#[test]
fn a_function_is_noted_once_and_a_release_forgets_all_notes_of_it() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    assert_eq!(vm_service(&host, "claim --persist 01:00.0").exit, 0);
    let older = fs::read_to_string(sim.path(NOTES).join("0000:01:00.0.toml")).expect("a note");
    reboot(&sim);
    set_id(&sim, "01:00.1", "SUBSYS_ID=0", "SUBSYS_ID=1");
    assert_eq!(vm_service(&host, "claim --restore").exit, 1);
    assert_eq!(vm_service(&host, "claim --persist 01:00.1").exit, 0);
    assert_eq!(notes(&sim), ["0000:01:00.1.toml"]);
    // An earlier version left both.
    sim.write(&format!("{NOTES}/0000:01:00.0.toml"), &older).expect("written");
    check(&host, "release 01:00.1", "0000:01:00.1 released\n");
    assert!(notes(&sim).is_empty(), "{:?}", notes(&sim));
    reboot(&sim);
    check(&host, "claim --restore", "");
    // What is only noted is released once, however often it is named.
    assert_eq!(vm_service(&host, "claim --persist 01:00.0").exit, 0);
    reboot(&sim);
    check(&host, "release 01:00.0 01:00.1", "0000:01:00.0 released\n0000:01:00.1 released\n");
}

#[test]
fn a_claim_that_fails_leaves_older_notes_as_they_were() {
    let sim = workstation();
    let actor = SimDrivers::new(&sim);
    let host = actor.host();
    let before = drivers(&sim);
    assert_eq!(vm_service(&host, "claim --persist 01:00.0").exit, 0);
    let path = sim.path(NOTES).join("0000:01:00.0.toml");
    let note = fs::read(&path).expect("a note");
    reboot(&sim);
    actor.fail("bus/pci/drivers/igc/unbind", "0000:03:00.0", 1, 5);
    assert_eq!(vm_service(&host, "claim --persist 01:00.0 03:00.0").exit, 1);
    assert_eq!(fs::read(&path).ok(), Some(note.clone()));
    // Nor does one that can't be noted.
    fs::create_dir(sim.path(NOTES).join("0000:03:00.0.toml")).expect("in the way");
    let got = vm_service(&host, "claim --persist 01:00.1 03:00.0");
    let says = "; 0000:03:00.0 is released again; 0000:01:00.1 is released again\n";
    assert!(got.err.contains("0000:03:00.0.toml can't be written") && got.err.ends_with(says), "{got:?}");
    assert_eq!(fs::read(&path).ok(), Some(note));
    assert_eq!(notes(&sim), ["0000:01:00.0.toml", "0000:03:00.0.toml"]);
    assert_eq!(drivers(&sim), before);
}

#[test]
fn a_claim_and_its_note_are_made_and_ended_together() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    for _ in 0..30 {
        std::thread::scope(|scope| {
            let claim = scope.spawn(|| assert_eq!(vm_service(&host, "claim --persist 02:00.0").exit, 0));
            while !claim.is_finished() && vm_service(&host, "release 02:00.0").exit != 0 {}
        });
        let is_claimed = sim.driver_of(address("02:00.0")).as_deref() == Some(ON_VFIO);
        assert_eq!(notes(&sim).len(), usize::from(is_claimed), "{:?}", notes(&sim));
        vm_service(&host, "release --all");
    }
}

/// While a driver is waited for, each other device can be claimed, noted, released and forgotten.
#[test]
fn a_command_whose_driver_does_not_return_delays_no_command_for_another_device() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    let before = drivers(&sim);
    let (root, stops) = (sim.root().to_owned(), Arc::new(Mutex::new(0)));
    let stuck = SimDrivers::new(&sim);
    let count = stops.clone();
    stuck.observe(move || {
        let other = SimDrivers::at(&root).host();
        let meanwhile = || {
            for line in ["claim 03:00.0", "release 03:00.0", "claim --persist 03:00.0", "release 03:00.0"] {
                let got = vm_service(&other, line);
                assert_eq!((got.exit, got.err.as_str()), (0, ""), "{line}");
            }
            let got = vm_service(&other, "claims");
            assert!(got.exit == 0 && got.out.contains("0000:02:00.0"), "{got:?}");
        };
        std::thread::scope(|scope| scope.spawn(meanwhile).join().expect("all is done"));
        *count.lock().expect("a lock") += 1;
    });
    for line in ["claim --persist 02:00.0", "release 02:00.0", "claim --restore", "release --all"] {
        if line == "claim --restore" {
            assert_eq!(vm_service(&host, "claim --persist 02:00.0").exit, 0);
            reboot(&sim);
        }
        let got = vm_service(&stuck.host(), line);
        assert_eq!((got.exit, got.err.as_str()), (0, ""), "{line}");
        // Before and after each of its three writes.
        assert_eq!(std::mem::take(&mut *stops.lock().expect("a lock")), 6, "{line}");
    }
    assert_eq!(drivers(&sim), before);
    assert!(notes(&sim).is_empty());
    check(&host, "claims", "nothing is claimed\n");
}

#[test]
fn notes_are_the_owners_alone_and_believed_only_then() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    assert_eq!(vm_service(&host, "claim --persist 02:00.0").exit, 0);
    let (folder, note) = (sim.path(NOTES), sim.path(NOTES).join("0000:02:00.0.toml"));
    let mode = |path: &Path| path.metadata().expect("there").mode() & 0o777;
    assert_eq!((mode(&folder), mode(&note)), (0o700, 0o600));
    reboot(&sim);
    let before = drivers(&sim);
    for path in [&note, &folder] {
        let kept = mode(path);
        fs::set_permissions(path, PermissionsExt::from_mode(0o777)).expect("changed");
        let got = vm_service(&host, "claim --restore");
        assert_eq!((got.exit, got.out.as_str()), (1, ""), "{got:?}");
        assert!(got.err.contains("can be written to by others (mode 777)"), "{}", got.err);
        assert_eq!(drivers(&sim), before);
        fs::set_permissions(path, PermissionsExt::from_mode(kept)).expect("changed");
    }
    check(&host, "claim --restore", "0000:02:00.0 claimed, taken from nvme\n");
}

/// A process that dies while it claims the second of two leaves nothing that is not undone.
#[test]
fn a_claim_of_several_that_is_killed_is_undone_whole() {
    let sim = workstation();
    let actor = SimDrivers::new(&sim);
    let host = actor.host();
    let before = drivers(&sim);
    let (ledger, died) = (sim.path("run/ledger"), Arc::new(Mutex::new(BTreeMap::new())));
    let (records, at_death) = (ledger.clone(), died.clone());
    actor.observe(move || {
        let names = ["0000:02:00.0.claim", "0000:03:00.0.claim"];
        let texts = names.map(|name| Some((records.join(name), fs::read(records.join(name)).ok()?)));
        if let [Some(first), Some(second)] = texts {
            *at_death.lock().expect("a lock") = BTreeMap::from([first, second]);
        }
    });
    assert_eq!(vm_service(&host, "claim 02:00.0 03:00.0").exit, 0);
    let died = std::mem::take(&mut *died.lock().expect("a lock"));
    assert_eq!(died.len(), 2, "it was seen with the second under way");
    for (path, text) in died {
        fs::write(path, text).expect("written");
    }
    check(&host, "claim --restore", "");
    assert_eq!(drivers(&sim), before);
    check(&host, "claims", "nothing is claimed\n");
    assert_eq!(drivers(&sim), before);
}

#[test]
fn a_note_without_its_own_function_or_of_a_newer_version_is_kept_and_told() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    assert_eq!(vm_service(&host, "claim --persist 02:00.0").exit, 0);
    reboot(&sim);
    let path = sim.path(NOTES).join("0000:02:00.0.toml");
    let good = fs::read_to_string(&path).expect("a note");
    let (head, _) = good.rsplit_once("\"0000:02").expect("a function");
    for (text, says) in [
        (head.to_owned(), "it does not name 0000:02:00.0 among its functions"),
        (format!("version = 3\nnews = 1\n{good}"), "it is of version 3, and a newer vm-service can read it"),
    ] {
        fs::write(&path, text).expect("written");
        let got = vm_service(&host, "claims --json");
        let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
        assert_eq!(document["claims"], serde_json::json!([]));
        assert!(document["unreadable"][0].as_str().is_some_and(|text| text.contains(says)), "{}", got.out);
        let got = vm_service(&host, "claim --restore");
        assert!(got.exit == 1 && got.err.contains(says), "{got:?}");
    }
    check(&host, "release 02:00.0", "0000:02:00.0 released\n");
}
