//! Processes of the host that use an eGPU, and claims of it.

use super::*;

/// Its work is waited for only so long; by force, and where it burns, it is ended, and named.
#[test]
fn processes_are_ended_by_force_and_named() {
    for (stubborn, event, ending, end) in [
        (false, Event::Disconnect { force: true }, "SIGTERM", State::Disconnected),
        (true, Event::Disconnect { force: true }, "SIGKILL", State::Disconnected),
        (false, Event::Temperature(90_000), "SIGTERM", State::Failed(Fault::Overheated)),
    ] {
        let mut rig = Rig::new();
        rig.connect();
        rig.open_by(4711, "train");
        if stubborn {
            rig.drivers.ignore_sigterm(4711);
        }
        assert_eq!(rig.take(event), end, "{:?}", rig.manager.failure());
        let [why, ..] = &*rig.why else { panic!("{:?}", rig.why) };
        let parts = ["process 4711 (train) has ", "dev/dri/card0 open", ending];
        assert!(parts.iter().all(|part| why.contains(part)), "{why}");
        assert!(!rig.sim.path("proc/4711").exists() && !rig.is_there());
    }
}

/// The first process of the host is not ended, and the emergency goes on without it.
#[test]
fn the_first_process_is_left_alone() {
    let mut rig = Rig::new();
    rig.connect();
    rig.open_by(1, "systemd");
    let ended = rig.manager.enclosure().act(Action::StopWork { force: true });
    assert!(
        matches!(&ended, Err(EgpuError::Used { users, .. }) if users[0].contains("systemd")),
        "{ended:?}"
    );
    assert!(rig.sim.path("proc/1").exists());
    // Nor is any of a host that is only files.
    let host = rig.sim.plain_host();
    assert!(host.processes().is_none());
}

/// Looking at every process of the host takes long: it is done when something changes, and when the answer matters.
#[test]
fn processes_are_looked_for_when_something_has_changed() {
    let mut rig = Rig::new();
    rig.connect();
    assert_eq!(rig.poll(), State::Ready);
    rig.open_by(4711, "train");
    assert_eq!(rig.poll(), State::Ready, "remembered");
    let status = "power/runtime_status";
    rig.sim.set(address(GPU), status, "suspended\n").unwrap();
    assert_eq!(rig.poll(), State::InUse);
    // Whoever began since is seen before it is taken away.
    rig.sim.delete("proc/4711").unwrap();
    rig.sim.set(address(GPU), status, "active\n").unwrap();
    assert_eq!(rig.poll(), State::Ready);
    rig.open_by(4712, "late");
    let unbound = rig.manager.enclosure().act(Action::Unbind { force: false });
    assert!(matches!(unbound, Err(EgpuError::Used { .. })), "{unbound:?}");
}

/// It is no failure of the GPU's that somebody has just begun to use it.
#[test]
fn one_that_is_used_just_before_it_is_unbound_is_kept() {
    let mut rig = Rig::new();
    rig.connect();
    // The claim of a guest, after all were asked, and before it is unbound.
    let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
    let claimed = Arc::new(Mutex::new(None));
    let taken = claimed.clone();
    rig.guests.lock().unwrap().2 = Some(Box::new(move || {
        let device = manager.claim(address(GPU), &ClaimOptions::default()).unwrap();
        *taken.lock().unwrap() = Some((manager, device));
    }));
    assert_eq!(rig.take(Event::Disconnect { force: false }), State::InUse, "{:?}", rig.manager.failure());
    assert!(rig.is_there() && claimed.lock().unwrap().is_some());
}

/// A claim that nobody holds is released before its function is unbound, and its driver gets it no more.
#[test]
fn claims_are_released_first() {
    let mut rig = Rig::new();
    rig.connect();
    let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
    let persistent = ClaimOptions { persistent: true, ..ClaimOptions::default() };
    manager.claim(address(GPU), &persistent).unwrap();
    assert_eq!(rig.driver().as_deref(), Some("vfio-pci"));
    rig.manager.enclosure().act(Action::Release).unwrap();
    let claims = crate::ledger::claims(&rig.host(), crate::claim::DEADLINE).unwrap();
    assert_eq!((claims.len(), rig.driver(), rig.is_there()), (0, None, true));
    let writes = rig.drivers.writes();
    assert!(!writes.iter().any(|(path, _)| path.ends_with("nouveau/bind")), "{writes:?}");
    assert_eq!(rig.take(Event::Disconnect { force: false }), State::Disconnected);
}
