//! Functions and drivers that never answer.

use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use rustix::fs::inotify;

use super::*;
use crate::deadlines;

/// A look at an enclosure opens no config space, neither its own nor another's: whichever stalls keeps no heartbeat and no thermal
/// guard waiting.
#[test]
fn looking_waits_for_no_function() {
    let mut rig = Rig::new();
    let other = "0000:03:00.0";
    rig.sim.add(&SimFunction::nvme(address(other)).driver("nvme")).unwrap();
    rig.connect();
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    for function in [PORT, SWITCH[0], SWITCH[1], GPU, other] {
        let dir = rig.sim.device_dir(address(function)).unwrap();
        for file in ["config", "current_link_speed"] {
            // The simulated port has no link of its own.
            if dir.join(file).exists() {
                inotify::add_watch(&watch, dir.join(file), inotify::WatchFlags::OPEN).unwrap();
            }
        }
    }
    let seen = rig.manager.enclosure().observe().unwrap();
    assert_eq!(seen.functions, [address(GPU)]);
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    assert_eq!(events.next().map(|_| ()), Err(rustix::io::Errno::AGAIN), "config space is opened");
}

/// What is read back has a deadline.
#[test]
fn a_function_that_stalls_is_not_sound() {
    let mut rig = Rig::new();
    rig.connect();
    rig.drivers.stall(address(GPU));
    let began = Instant::now();
    let verified = rig.manager.enclosure().act(Action::Verify);
    assert!(
        verified.as_ref().is_err_and(|error| error.to_string().contains("did not answer within")),
        "{verified:?}"
    );
    assert!(began.elapsed() >= deadlines::HEARTBEAT);
    // Nor does the slot above it keep anybody, which is asked for its power.
    rig.drivers.stall(address(SWITCH[1]));
    assert_eq!(crate::pci::slot_power(&rig.host(), address(SWITCH[1])), None);
}

/// What is not as Linux set it up.
#[test]
fn what_a_function_lost_is_read_back() {
    let check = |change: &dyn Fn(&mut Vec<u8>), enable: &str, reason: Option<&str>| {
        let mut rig = Rig::new();
        rig.connect();
        let config = rig.sim.device_dir(address(GPU)).unwrap().join("config");
        let mut bytes = fs::read(&config).unwrap();
        change(&mut bytes);
        fs::write(config, bytes).unwrap();
        rig.sim.set(address(GPU), "enable", enable).unwrap();
        let verified = rig.manager.enclosure().act(Action::Verify).map_err(|error| error.to_string());
        match reason {
            None => verified.unwrap(),
            Some(reason) => assert!(verified.as_ref().is_err_and(|why| why.contains(reason)), "{verified:?}"),
        }
    };
    check(&|_| (), "1\n", None);
    check(&|bytes| bytes[0x10..0x28].fill(0), "1\n", Some("its BAR 0 has another address than the 0x"));
    check(&|bytes| bytes[0x13] ^= 0x10, "1\n", Some("its BAR 0 has another address"));
    check(&|bytes| bytes[0x04] = 0, "1\n", Some("memory accesses off, which nouveau has turned on"));
    check(&|bytes| bytes[0x04] = 0, "0\n", None);
    check(&|bytes| bytes[0x08] ^= 1, "1\n", Some("and was 10de:"));
    check(&|bytes| bytes[0x2e] ^= 1, "1\n", Some("and was 10de:"));
    check(&|bytes| bytes.fill(0xff), "1\n", Some("off the bus"));
}

/// A heartbeat sees another revision and another board, too.
#[test]
fn another_of_the_same_model_is_not_it() {
    for at in [0x00, 0x02, 0x08, 0x2c, 0x2e] {
        let mut rig = Rig::new();
        rig.connect();
        let config = rig.sim.device_dir(address(GPU)).unwrap().join("config");
        let mut bytes = fs::read(&config).unwrap();
        bytes[at] ^= 1;
        fs::write(config, bytes).unwrap();
        assert_eq!(rig.poll().name(), "degraded", "{at:#x}");
        assert!(rig.why.iter().any(|why| why.contains("and was 10de:")), "{:?}", rig.why);
    }
}

/// The unbind of a driver that waits for whoever uses it for ever has a deadline, and the holders are named.
#[test]
fn a_driver_that_hangs_in_unbind_is_left_and_its_holders_named() {
    let mut rig = Rig::new();
    rig.connect();
    rig.manager.enclosure().deadlines.unbinding = Duration::from_millis(100);
    rig.drivers.hold(address(GPU));
    // It comes after its work was waited for.
    let begins = (rig.sim.clone(), rig.sim.device_dir(address(GPU)).unwrap());
    rig.drivers.observe(move || {
        let (sim, dir) = &begins;
        if !dir.join("driver").exists() && dir.exists() {
            let node = dir.join("drm/card0");
            fs::create_dir_all(&node).unwrap();
            fs::write(node.join("dev"), "226:0\n").unwrap();
            fs::write(node.join("uevent"), "DEVNAME=dri/card0\n").unwrap();
            let open = sim.path("proc/4711/fd");
            if fs::create_dir_all(&open).is_ok() {
                let _ = std::os::unix::fs::symlink(sim.path("dev/dri/card0"), open.join("3"));
            }
            sim.write("proc/4711/comm", "persistenced\n").unwrap();
        }
    });
    assert_eq!(rig.take(Event::Disconnect { force: false }), State::Failed(Fault::Stuck), "{:?}", rig.why);
    let why = rig.manager.failure().unwrap();
    let parts = ["did not unbind it from nouveau within 0.1 s", "process 4711 (persistenced)"];
    assert!(parts.iter().all(|part| why.contains(part)), "{why}");
    assert!(rig.is_there() && rig.authorized() == "1\n");
}

/// A guest has it: only it can read the temperature.
#[test]
fn one_that_a_guest_has_is_not_stopped_by_its_temperature() {
    let mut rig = Rig::new();
    rig.connect();
    rig.warm(95_000);
    let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
    let claimed = manager.claim(address(GPU), &ClaimOptions::default()).unwrap();
    assert_eq!(rig.manager.enclosure().temperature(), None);
    assert_eq!(rig.poll(), State::InUse);
    manager.release(&claimed).unwrap();
    assert_eq!(rig.poll(), State::Failed(Fault::Overheated), "{:?}", rig.told);
}

/// An emergency stop that fails is not taken for one that is done, and is tried again.
#[test]
fn a_stop_that_failed_is_tried_again() {
    let mut rig = Rig::new();
    rig.connect();
    rig.warm(95_000);
    rig.drivers.fail("authorized", "0", 2, libc::EIO);
    for _ in 0..2 {
        assert_eq!(rig.poll(), State::Failed(Fault::NotStopped), "{:?}", rig.told);
        assert!(rig.is_there() && rig.authorized() == "1\n");
    }
    assert_eq!(rig.poll(), State::Failed(Fault::Overheated));
    assert!(!rig.is_there() && rig.authorized() == "0\n");
}

/// What NVIDIA's driver reports of it (Xid 79) is the reason, and what it reported before it came is not.
#[test]
fn what_its_driver_reported_is_named() {
    let mut rig = Rig::new();
    let xid = |number| format!("3,700,9,-;NVRM: Xid (PCI:0000:32:00): {number}, it says so\n");
    rig.sim.write("dev/kmsg", &xid(13)).unwrap();
    rig.connect();
    rig.fall_off();
    rig.poll();
    assert!(!rig.why.iter().any(|why| why.contains("Xid")), "{:?}", rig.why);
    rig.sim.write("dev/kmsg", &(xid(13) + &xid(79))).unwrap();
    rig.poll();
    let why = rig.why.last().unwrap();
    assert!(why.contains("off the bus; its driver reported Xid 79: it says so"), "{why}");
}

/// Why it is not sound is known where it is taken as it is.
#[test]
fn why_one_is_not_sound_is_kept() {
    let mut rig = Rig::new();
    rig.connect();
    rig.fall_off();
    assert!(!rig.manager.enclosure().adopt().unwrap());
    let enclosure = HostEnclosure::new(
        &rig.host(),
        ID.parse().unwrap(),
        Policy::default(),
        None,
        Cancel::default(),
        Box::new(FakeGuests(rig.guests.clone())),
    );
    rig.manager = Manager::new(enclosure, LIMITS);
    assert!(!rig.manager.enclosure().adopt().unwrap());
    assert_eq!(rig.take(Event::Adopted { sound: false }), State::Failed(Fault::Unsound));
    assert!(rig.manager.failure().unwrap().contains("off the bus"), "{:?}", rig.manager.failure());
}

/// A new tunnel behind which nothing comes is taken down again.
#[test]
fn a_reconnect_that_brings_nothing_leaves_no_tunnel() {
    let mut rig = Rig::new();
    rig.connect();
    rig.manager.enclosure().deadlines.enumeration = Duration::from_millis(800);
    let sim = rig.sim.clone();
    rig.drivers.observe(move || {
        // It is gone as soon as its tunnel is down.
        if sim.device_dir(address(GPU)).is_err() {
            let _ = fs::write(sim.path("sim/usb4/0-1/functions"), format!("{} 7 \n", SWITCH[0]));
        }
    });
    assert_eq!(rig.take(Event::Reset(Rung::Reconnect)), State::Failed(Fault::Unsound), "{:?}", rig.why);
    assert_eq!(rig.authorized(), "0\n", "{:?}", rig.manager.failure());
}
