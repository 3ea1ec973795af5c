//! Records that were damaged, or that a newer version wrote: they are kept and named, and stand in the way of their own
//! device only, whatever becomes of them.

use super::*;

/// A host with a claim of the GPU, and the text of its record.
fn claimed() -> (SimHost, Host, String) {
    let sim = new_sim();
    let host = SimDrivers::new(&sim).host();
    manager(host.clone()).claim(gpu(), &persistent()).unwrap();
    let text = fs::read_to_string(record(&sim)).unwrap();
    (sim, host, text)
}

fn record(sim: &SimHost) -> std::path::PathBuf {
    sim.path("run/ledger/0000:01:00.0.claim")
}

fn codes(host: &Host, address: PciAddress) -> Vec<&'static str> {
    let readiness = manager(host.clone()).explain(address).unwrap();
    readiness.blockers.iter().map(|blocker| blocker.code.as_str()).collect()
}

/// Runs the commands of a remedy: the words from the first `echo` or `rm` to the end. A report names the real host's paths,
/// which are looked up in the simulated host.
fn obey(sim: &SimHost, host: &Host, remedy: &str) {
    let simulated = |path: &str| match path.strip_prefix("/run/vm-passthrough/") {
        Some(path) => sim.path("run").join(path),
        None if Path::new(path).starts_with(sim.root()) => path.into(),
        None => sim.path(path.trim_start_matches('/')),
    };
    let from = remedy.find("echo ").or_else(|| remedy.find("rm ")).expect(remedy);
    for command in remedy[from..].split("; ") {
        if let Some(path) = command.strip_prefix("rm ") {
            fs::remove_file(simulated(path)).unwrap();
            continue;
        }
        let (value, path) = command.strip_prefix("echo").unwrap().split_once("> ").unwrap();
        let value = format!("{}\n", value.trim());
        host.writer()
            .write(&simulated(path), &value, SHORT)
            .unwrap_or_else(|error| panic!("{command}: {error}"));
    }
}

/// The record of the GPU is what it is: nothing touches it, all say so, others go on.
fn is_kept(sim: &SimHost, host: &Host, what: &str) {
    let path = record(sim);
    let kept = path.is_file().then(|| fs::read(&path).unwrap());
    let before = bindings(sim);
    for address in [gpu(), usb()] {
        assert!(codes(host, address).contains(&"claim-record-unreadable"), "{what}: {address}");
        fails(manager(host.clone()).claim(address, &within(SHORT)), &["0000:01:00.0.claim", "; rm "]);
        fails(release_within(&mut manager(host.clone()), address, SHORT), &["0000:01:00.0.claim", "; rm "]);
        fails(manager(host.clone()).share(address), &["0000:01:00.0.claim", "; rm "]);
    }
    assert!(!codes(host, nvme()).contains(&"claim-record-unreadable"), "{what}");
    let mut other = manager(host.clone());
    let recovery = other.recover().unwrap();
    assert_eq!((recovery.recovered.len(), recovery.failed.len()), (0, 1), "{what}");
    other.claim(nvme(), &ClaimOptions { persistent: true, ..within(LONG) }).unwrap();
    release(&mut manager(host.clone()), nvme()).unwrap();
    assert_eq!(bindings(sim), before, "{what}");
    assert_eq!(path.is_file().then(|| fs::read(&path).unwrap()), kept, "{what}");
}

/// What an interrupted write, a full disk or an editor leaves: the former drivers are not lost, and what is to be done by
/// hand does it.
#[test]
fn a_damaged_record_is_kept_and_can_be_put_right_by_hand() {
    let (sim, host, text) = claimed();
    let bytes = text.as_bytes();
    let cut = |at: usize| bytes[..at].to_vec();
    let mut cases: Vec<(String, Vec<u8>)> =
        vec![("empty".into(), Vec::new()), ("halved".into(), cut(bytes.len() / 2))];
    for at in (0..bytes.len()).step_by(23).chain(text.match_indices('\n').map(|(at, _)| at + 1)) {
        if at < bytes.len() {
            cases.push((format!("cut at {at}"), cut(at)));
        }
        let mut zeroed = bytes.to_vec();
        zeroed[at.min(bytes.len() - 1)..].fill(0);
        cases.push((format!("zeroed from {at}"), zeroed));
        let mut changed = bytes.to_vec();
        changed[at.min(bytes.len() - 1)] ^= 4;
        cases.push((format!("changed at {at}"), changed));
    }
    cases.push(("nonsense".into(), b"nonsense\nmore\n".to_vec()));
    cases.push(("too long".into(), vec![b'x'; 2 << 20]));
    for (what, bytes) in &cases {
        fs::write(record(&sim), bytes).unwrap();
        is_kept(&sim, &host, what);
    }

    let former = bindings(&new_sim());
    for (what, bytes) in &cases {
        let (sim, host, _) = claimed();
        fs::write(record(&sim), bytes).unwrap();
        let readiness = manager(host.clone()).explain(gpu()).unwrap();
        let told =
            readiness.blockers.iter().find(|blocker| blocker.code.as_str() == "claim-record-unreadable");
        obey(&sim, &host, &told.unwrap().remedy);
        let drivers =
            |all: &Bindings| -> Vec<_> { all.values().map(|(driver, ..)| driver.clone()).collect() };
        assert_eq!(drivers(&bindings(&sim)), drivers(&former), "{what}");
        assert!(ledger_files(&sim).is_empty());
        manager(host).claim(gpu(), &within(LONG)).unwrap();
    }
}

/// Where the lines of the functions are sound, what is to be done by hand puts their overrides back as well.
#[test]
fn what_is_still_sound_of_a_record_is_told() {
    let (sim, host, text) = claimed();
    fs::write(record(&sim), text.replace("claimed", "CLAIMED")).unwrap();
    let error = release_within(&mut manager(host.clone()), gpu(), SHORT).unwrap_err().to_string();
    for part in
        ["line 8: the checksum is wrong", "kept as it is", "drivers/nvidia/bind", "echo snd_hda_intel > "]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    obey(&sim, &host, &error);
    assert_eq!(bindings(&sim), bindings(&new_sim()));

    // One that somebody put back already has nothing left but its file.
    let (sim, host, text) = claimed();
    release(&mut manager(host.clone()), gpu()).unwrap();
    fs::write(record(&sim), &text[1..]).unwrap();
    fs::set_permissions(record(&sim), fs::Permissions::from_mode(0o600)).unwrap();
    fails(release_within(&mut manager(host), gpu(), SHORT), &["nothing of it is on vfio-pci any more: rm /"]);
}

#[test]
fn a_record_of_a_newer_version_is_kept() {
    let (sim, host, text) = claimed();
    let (first, rest) = text.split_once('\n').unwrap();
    assert!(first.ends_with(" ledger 2"));
    fs::write(record(&sim), format!("{}{rest}", line_of("ledger 3"))).unwrap();
    is_kept(&sim, &host, "newer");
    fails(
        release_within(&mut manager(host), gpu(), SHORT),
        &["a newer version of this program wrote it", "release it with that version", "drivers/nvidia/bind"],
    );
}

/// What lies in a record's place, and is none.
#[test]
fn what_is_no_record_stands_in_the_way_of_its_own_device_only() {
    fn check(prepare: impl Fn(&SimHost, &Path), expect: &str) {
        let sim = new_sim();
        let host = SimDrivers::new(&sim).host();
        drop(Ledger::lock(&host, LONG).unwrap());
        let other = address("0000:03:00.0");
        sim.add(&SimFunction::network(other).group(3).driver("e1000e")).unwrap();
        prepare(&sim, &record(&sim));
        let before = bindings(&sim);
        fails(manager(host.clone()).claim(gpu(), &within(SHORT)), &[expect, "rm "]);
        assert!(codes(&host, gpu()).contains(&"claim-record-unreadable"), "{expect}");
        manager(host).claim(other, &within(LONG)).unwrap();
        assert_eq!(bindings(&sim), before);
        assert!(record(&sim).symlink_metadata().is_ok(), "it is left");
    }
    check(|_, path| symlink("/etc/passwd", path).unwrap(), "is a symbolic link");
    check(|_, path| fs::create_dir(path).unwrap(), "can't open it: Is a directory");
    check(
        |_, path| {
            rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        },
        "is not a regular file",
    );
    check(
        |sim, path| {
            // A record under another's name would be undone twice.
            manager(SimDrivers::new(sim).host()).claim(nvme(), &persistent()).unwrap();
            fs::rename(sim.path("run/ledger/0000:02:00.0.claim"), path).unwrap();
            sim.set_driver(nvme(), Some("nvme")).unwrap();
            sim.set(nvme(), "driver_override", "(null)\n").unwrap();
        },
        "it is the record of 0000:02:00.0, but its name is not 0000:02:00.0.claim",
    );
}

/// While its process lives, that is who can give it back.
#[test]
fn a_damaged_record_of_a_process_that_lives_says_so() {
    let sim = new_sim();
    let host = SimDrivers::new(&sim).host();
    let mut owner = manager(host.clone());
    owner.claim(gpu(), &ClaimOptions::default()).unwrap();
    fs::write(record(&sim), "").unwrap();
    fails(
        manager(host).claim(gpu(), &within(SHORT)),
        &["a process still uses the claim: end it first (fuser "],
    );
    release(&mut owner, gpu()).unwrap();
    assert_eq!(bindings(&sim), bindings(&new_sim()));
    assert!(ledger_files(&sim).is_empty());
}
