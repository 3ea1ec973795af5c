//! Each fault alone, and what it ends in.

use super::*;
use crate::egpu::{Fault, Rung};

/// Connects what the script makes of an eGPU and looks at it each second for a minute: where it has been and is then.
fn check(script: &str, been: &str, end: State) {
    let mut rig = Rig::new(1, &script.parse().unwrap());
    rig.poll(Duration::ZERO);
    rig.take(Event::Connect);
    while rig.egpu().now() < Duration::from_secs(60) {
        rig.poll(Duration::from_secs(1));
    }
    assert_eq!((&*rig.been(), rig.state()), (been, end), "{script}: {:?}", rig.manager.failure());
    let (is_well, resources) = (rig.egpu().is_well(), rig.egpu().resources());
    let is_usable = matches!(end, State::Ready | State::InUse);
    assert!(!is_usable || is_well, "{script}: not well");
    // What can't be used holds nothing, but where its tunnel can't be taken down.
    let is_kept = is_usable || end == State::Failed(Fault::NotStopped);
    assert!(is_kept || resources == Resources::default(), "{script}: {resources:?}");
}

const CONNECTED: &str = "disconnected authorising enumerating verifying ready";

/// As [`check`], of what happens after it was connected.
fn check_connected(script: &str, been: &str, end: State) {
    let been = if been.is_empty() { CONNECTED.to_owned() } else { format!("{CONNECTED} {been}") };
    check(script, &been, end);
}

#[test]
fn faults_while_it_is_connected() {
    let failed = State::Failed;
    let refused = "disconnected authorising failed";
    check("", CONNECTED, State::Ready);
    check("unplug", "", State::Absent);
    check("authorise fails", refused, failed(Fault::NotAuthorised));
    check("authorise fails 1", refused, failed(Fault::NotAuthorised));
    check("at 100ms unplug", "disconnected authorising failed absent", State::Absent);
    let none = "disconnected authorising enumerating draining failed";
    for coming in ["nothing", "no-gpu", "other", "endless"] {
        check(&format!("enumerate {coming}"), none, failed(Fault::NotEnumerated));
    }
    check("at 500ms unplug", &format!("{none} absent"), State::Absent);
    check("at 500ms tunnel drops", none, failed(Fault::NotEnumerated));
    let climbed = "disconnected authorising enumerating verifying recovering";
    check("enumerate no-room", &format!("{climbed} draining failed"), failed(Fault::Unrecovered));
    check("enumerate no-room 1", &format!("{climbed} ready"), State::Ready);
    check("at 500ms hang", &format!("{climbed} ready"), State::Ready);
    check("at 500ms hang unplug", &format!("{climbed} draining failed"), failed(Fault::Unrecovered));
    check("tunnel comes", "enumerating verifying ready", State::Ready);
    check("errors 0.1", &format!("{climbed} draining failed"), failed(Fault::Unrecovered));
    check("errors 1e-5\ncorrupt 1e-3", CONNECTED, State::Ready);
}

#[test]
fn faults_afterwards() {
    let failed = State::Failed;
    let recovered = "degraded recovering ready";
    let given_up = "degraded recovering draining failed";
    check_connected("at 5s unplug", "absent", State::Absent);
    check_connected("at 5s unplug\nat 9s plug", "absent disconnected", State::Disconnected);
    check_connected(
        "at 5s unplug\nat 9s plug\nat 12s tunnel comes",
        "absent disconnected enumerating verifying ready",
        State::Ready,
    );
    check_connected("at 5s tunnel drops", "disconnected", State::Disconnected);
    check_connected("at 5s suspend", "", State::Ready);
    check_connected("at 5s suspend drops", "recovering ready", State::Ready);
    for cure in ["soft", "hard", "reconnect"] {
        check_connected(&format!("at 5s hang {cure}"), recovered, State::Ready);
    }
    check_connected("at 5s hang unplug", given_up, failed(Fault::Unrecovered));
    check_connected("at 5s errors 0.1", given_up, failed(Fault::Unrecovered));
    check_connected("at 5s errors 0.1\nat 7s errors 0", "degraded ready", State::Ready);
    check_connected("at 5s observe fails 10", "", State::Ready);
    check_connected("at 5s observe fails\nat 7s hang unplug", given_up, failed(Fault::Unrecovered));
    check_connected("at 5s temperature 89", "", State::Ready);
    check_connected("at 5s temperature 95", "draining failed", failed(Fault::Overheated));
    check_connected("sensor fails\nat 5s temperature 95", "", State::Ready);
    check_connected(
        "fan fails\nat 5s work\nat 6s temperature 80",
        "in-use draining failed",
        failed(Fault::Overheated),
    );
    check_connected("at 5s work\nat 6s temperature 80", "in-use", State::InUse);
    // A stop that failed is tried again until it is done.
    check_connected(
        "at 5s temperature 95\ndeauthorise fails 2",
        "draining failed draining failed draining failed",
        failed(Fault::Overheated),
    );
    check_connected(
        "at 5s temperature 95\ndeauthorise fails 1\nat 26s tunnel drops",
        "draining failed",
        failed(Fault::Overheated),
    );
    // Of what a guest has the guest alone can read the temperature.
    check_connected("at 5s guest takes\nat 9s temperature 95", "in-use", State::InUse);
}

#[test]
fn faults_of_its_users() {
    check_connected("at 5s work 10s", "in-use ready", State::Ready);
    check_connected("at 5s work", "in-use", State::InUse);
    check_connected("at 5s work 10s\nat 6s stall", "in-use", State::InUse);
    check_connected("at 5s guest takes", "in-use", State::InUse);
    check_connected("at 5s guest takes\nat 9s guest leaves", "in-use ready", State::Ready);
    check_connected("at 5s guest takes\nat 9s unplug", "in-use absent", State::Absent);
    check_connected("at 5s guest takes\nat 9s tunnel drops", "in-use disconnected", State::Disconnected);
    check_connected("at 5s work\nat 9s hang", "in-use degraded recovering ready", State::Ready);
    check_connected("at 5s guest takes\nat 9s hang", "in-use degraded recovering ready", State::Ready);
    // What the guest can't be made to give back is reset under it.
    check_connected(
        "detach fails 1\nat 5s guest takes\nat 9s hang",
        "in-use degraded recovering ready in-use",
        State::InUse,
    );
    // What could not be undone at first is undone later.
    check_connected("settle fails 3\nat 5s guest takes\nat 9s unplug", "in-use absent", State::Absent);
    check_connected("at 5s driver sticks 20s\nat 9s unplug", "absent", State::Absent);
    check_connected("at 5s driver sticks 20s\nat 9s tunnel drops", "disconnected", State::Disconnected);
}

/// Connects it, asks for it back after ten seconds, and looks at it once more.
fn check_disconnected(script: &str, force: bool, been: &str, end: State) {
    let mut rig = Rig::new(1, &script.parse().unwrap());
    rig.poll(Duration::ZERO);
    rig.take(Event::Connect);
    for _ in 0..10 {
        rig.poll(Duration::from_secs(1));
    }
    rig.been.clear();
    rig.take(Event::Disconnect { force });
    rig.poll(Duration::from_secs(1));
    assert_eq!((&*rig.been(), rig.state()), (been, end), "{script}: {:?}", rig.manager.failure());
    let (cuts, resources) = (rig.egpu().cuts().len(), rig.egpu().resources());
    assert!(force || cuts == 0, "{script}: {:?}", rig.egpu().cuts());
    let is_kept = !matches!(end, State::Absent | State::Disconnected);
    assert!(is_kept || resources == Resources::default(), "{script}: {resources:?}");
}

#[test]
fn faults_while_it_is_disconnected() {
    let failed = State::Failed;
    let done = "draining disconnected";
    let kept = "draining in-use";
    for force in [false, true] {
        check_disconnected("", force, done, State::Disconnected);
        check_disconnected("at 5s suspend", force, done, State::Disconnected);
        check_disconnected("at 5s guest takes", force, done, State::Disconnected);
        check_disconnected("deauthorise fails", force, "draining failed", failed(Fault::NotDeauthorised));
        check_disconnected("at 5s work 6s", force, done, State::Disconnected);
    }
    check_disconnected("at 5s work", false, kept, State::InUse);
    check_disconnected("at 5s work", true, done, State::Disconnected);
    check_disconnected("guest refuses\nat 5s guest takes", false, kept, State::InUse);
    check_disconnected("guest refuses\nat 5s guest takes", true, done, State::Disconnected);
    check_disconnected("detach fails\nat 5s guest takes", true, done, State::Disconnected);
    check_disconnected("at 5s guest takes\nrelease fails", false, "draining in-use ready", State::Ready);
    check_disconnected("release fails", true, done, State::Disconnected);
    check_disconnected("at 5s driver sticks 8s", false, "draining failed", failed(Fault::Stuck));
    check_disconnected("at 5s driver sticks 8s", true, done, State::Disconnected);
    check_disconnected("at 5s driver sticks 10min", true, "draining failed", failed(Fault::NotDeauthorised));
    check_disconnected(
        "at 5s guest takes\nat 12s unplug\nguest refuses",
        false,
        "draining disconnected absent",
        State::Absent,
    );
    // It is not said to work because nobody could take it away.
    check_disconnected(
        "at 5s work\nat 11s hang",
        false,
        "draining degraded",
        State::Degraded { missed: 2, in_use: true },
    );
    check_disconnected("at 5s work\nat 11s hang", true, done, State::Disconnected);
}

/// A reset that an operator asks for is the only one, and leaves no new tunnel behind that is of no use.
#[test]
fn one_reset_is_made_when_asked_for() {
    let check = |script: &str, rung: Rung, been: &str, end: State, tunnels: usize| {
        let mut rig = Rig::new(1, &script.parse().unwrap());
        rig.poll(Duration::ZERO);
        rig.take(Event::Connect);
        rig.poll(Duration::from_secs(5));
        rig.egpu().advance(Duration::from_secs(1));
        rig.been.clear();
        rig.take(Event::Reset(rung));
        assert_eq!((&*rig.been(), rig.state()), (been, end), "{script}: {:?}", rig.manager.failure());
        assert_eq!(rig.egpu().resources().tunnels, tunnels, "{script}");
    };
    let failed = State::Failed(Fault::Unsound);
    for rung in [Rung::SoftReset, Rung::HardReset, Rung::Reconnect] {
        check("", rung, "recovering ready", State::Ready, 1);
    }
    check("reset soft fails", Rung::SoftReset, "recovering failed", failed, 1);
    check("at 7s hang hard\nreset hard lies", Rung::HardReset, "recovering failed", failed, 1);
    for coming in ["nothing", "no-gpu", "other", "endless"] {
        let script = format!("at 5s enumerate {coming}");
        check(&script, Rung::Reconnect, "recovering failed", failed, 0);
    }
    check("at 4s work", Rung::SoftReset, "", State::InUse, 1);
}

#[test]
fn users_that_are_ended_are_named() {
    let mut rig = Rig::new(1, &"at 5s work".parse().unwrap());
    rig.poll(Duration::ZERO);
    rig.take(Event::Connect);
    rig.poll(Duration::from_secs(9));
    let mut why = Vec::new();
    rig.manager.take(Event::Disconnect { force: true }, &mut |change| why.extend(change.error.clone()));
    assert!(matches!(&*why, [ended] if ended.starts_with("job ") && ended.ends_with("SIGTERM")), "{why:?}");
}

#[test]
fn bytes_are_carried_as_long_as_it_is_there() {
    let script = "corrupt 0.01\nat 5s hang".parse().unwrap();
    let mut rig = Rig::new(7, &script);
    let carry = |rig: &mut Rig| {
        let mut bytes = vec![0; 1 << 20];
        let carried = rig.egpu().transfer(&mut bytes, &mut []);
        carried.map(|carried| (carried, bytes.iter().filter(|byte| **byte != 0).count() as u64))
    };
    assert!(carry(&mut rig).is_err());
    rig.poll(Duration::ZERO);
    rig.take(Event::Connect);
    let before = rig.egpu().now();
    let (carried, wrong) = carry(&mut rig).unwrap();
    assert!(wrong > 0 && wrong == carried.corrupted, "{carried:?} {wrong}");
    assert_eq!(rig.egpu().now(), before + carried.duration);
    // It goes on the way.
    rig.egpu().link.rate = 1;
    assert!(carry(&mut rig).unwrap_err().to_string().contains("it went meanwhile"));
    assert_eq!(
        rig.egpu().resources(),
        Resources { functions: 2, bindings: 2, tunnels: 1, ..Resources::default() }
    );
}
