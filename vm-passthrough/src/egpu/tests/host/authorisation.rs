//! Tunnels that firmware, bolt or others have built, and an `authorized` that lies.

use std::time::Duration;

use super::*;
use crate::deadlines;

const AUTHORIZED: &str = "sys/bus/thunderbolt/devices/0-1/authorized";

impl Rig {
    /// Somebody else authorises it, as bolt does, or takes its tunnel down.
    fn write_authorized(&self, value: &str) {
        self.host().writer().write(&self.sim.path(AUTHORIZED), value, deadlines::TUNNEL).unwrap();
    }
}

/// bolt, or the firmware before Linux started (`boot`), has built its tunnel: it is taken over, and stays when no GPU is behind it.
#[test]
fn a_tunnel_of_others_is_taken_over_and_left() {
    for boot in ["0\n", "1\n"] {
        let mut rig = Rig::new();
        rig.sim.write("sys/bus/thunderbolt/devices/0-1/boot", boot).unwrap();
        rig.write_authorized("1");
        assert_eq!(rig.poll(), State::Ready, "{:?}", rig.manager.failure());
        assert_eq!(rig.told, ["enumerating", "verifying", "ready"]);
        assert!(!rig.manager.enclosure().is_built());
    }
    // Behind ours it does not stay.
    for ours in [false, true] {
        let mut rig = Rig::new();
        rig.manager.enclosure().deadlines.enumeration = Duration::from_millis(800);
        if ours {
            assert_eq!(rig.poll(), State::Disconnected);
        } else {
            rig.write_authorized("1");
            rig.sim.remove(address(GPU)).unwrap();
        }
        let sim = rig.sim.clone();
        rig.drivers.observe(move || drop(sim.remove(address(GPU))));
        let state = if ours { rig.take(Event::Connect) } else { rig.poll() };
        assert_eq!(state, State::Failed(Fault::NotEnumerated), "{:?}", rig.manager.failure());
        assert!(rig.manager.failure().unwrap().contains("no GPU came"), "{:?}", rig.manager.failure());
        assert_eq!(rig.authorized(), if ours { "0\n" } else { "1\n" });
    }
}

/// bolt authorises it just before this does: Linux refuses the second time, and the tunnel is there.
#[test]
fn one_that_bolt_authorises_at_the_same_time_is_connected() {
    let mut rig = Rig::new();
    assert_eq!(rig.poll(), State::Disconnected);
    let (sim, path) = (rig.sim.clone(), rig.sim.path(AUTHORIZED));
    rig.drivers.observe(move || {
        if fs::read_to_string(&path).unwrap() == "0\n" {
            sim.build_tunnel("0-1".parse().unwrap(), true).unwrap();
            fs::write(&path, "1\n").unwrap();
        }
    });
    assert_eq!(rig.take(Event::Connect), State::Ready, "{:?}", rig.manager.failure());
    assert!(!rig.manager.enclosure().is_built(), "it is bolt's");
}

/// A write that succeeds and is not so afterwards.
#[test]
fn an_authorized_that_lies_is_read_back() {
    let mut rig = Rig::new();
    assert_eq!(rig.poll(), State::Disconnected);
    let (sim, path) = (rig.sim.clone(), rig.sim.path(AUTHORIZED));
    rig.drivers.observe(move || {
        if fs::read_to_string(&path).unwrap() == "1\n" {
            sim.take_down_tunnel("0-1".parse().unwrap()).unwrap();
            fs::write(&path, "0\n").unwrap();
        }
    });
    assert_eq!(rig.take(Event::Connect), State::Failed(Fault::NotAuthorised));
    assert!(rig.manager.failure().unwrap().contains("reads 0 afterwards"), "{:?}", rig.manager.failure());
}

/// Runtime power management drops the tunnel: it is built again where the policy connects it without being asked, and what to do
/// about it is said. One that an operator takes down stays down.
#[test]
fn one_whose_tunnel_was_dropped_comes_back_by_the_policy() {
    let mut known = Rig::new();
    known.connect();
    let known = known.manager.enclosure().known();
    for (authorise, known, comes_back) in [
        (Authorise::Always, None, true),
        (Authorise::Known, Some(known.clone()), true),
        (Authorise::Known, None, false),
        (Authorise::Ask, Some(known), false),
    ] {
        let mut rig = Rig::by(Policy { authorise, ..Policy::default() }, known, "1\n");
        rig.connect();
        assert!(rig.manager.enclosure().is_built());
        (rig.told, rig.why) = (Vec::new(), Vec::new());
        rig.sim.take_down_tunnel("0-1".parse().unwrap()).unwrap();
        rig.sim.write(AUTHORIZED, "0\n").unwrap();
        let state = rig.poll();
        assert!(rig.why[0].contains("devices/0-1/power/control"), "{:?}", rig.why);
        let (wanted, told) = match comes_back {
            true => (State::Ready, &["recovering", "recovering", "ready"][..]),
            false => (State::Disconnected, &["disconnected"][..]),
        };
        let told: Vec<String> = told.iter().map(ToString::to_string).collect();
        assert_eq!((state, &rig.told), (wanted, &told), "{authorise}: {:?}", rig.why);
        rig.take(Event::Connect);
        assert_eq!(rig.take(Event::Disconnect { force: false }), State::Disconnected);
        (rig.told, rig.why) = (Vec::new(), Vec::new());
        assert_eq!(rig.poll(), State::Disconnected);
        assert!(rig.told.is_empty() && rig.why.is_empty(), "{:?}", rig.why);
    }
}
