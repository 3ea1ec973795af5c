//! What eGPUs suffer from hosts, and what is done about it.

use super::*;
use crate::usb4::Route;

/// After a suspend the tunnel is there and nothing is behind it: it is built again.
#[test]
fn one_that_is_lost_after_a_suspend_is_reconnected() {
    let mut rig = Rig::new();
    rig.connect();
    rig.told.clear();
    rig.sim.unlink(address(GPU)).unwrap();
    assert!(!rig.is_there() && rig.authorized() == "1\n");
    assert_eq!(rig.poll(), State::Ready, "{:?} {:?}", rig.told, rig.manager.failure());
    assert_eq!(rig.told, ["recovering", "recovering", "ready"]);
    assert!(rig.is_there());
    assert_eq!(rig.driver().as_deref(), Some("nouveau"));
}

/// Runtime power management: one that sleeps is not asked, as that would wake it.
#[test]
fn one_that_sleeps_is_left_alone() {
    let mut rig = Rig::new();
    rig.connect();
    rig.warm(95_000);
    rig.fall_off();
    let dir = rig.sim.device_dir(address(GPU)).unwrap().join("power");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("runtime_status"), "suspended\n").unwrap();
    for _ in 0..5 {
        assert_eq!(rig.poll(), State::Ready, "{:?}", rig.manager.failure());
    }
    // Awake, it is found to have fallen off, as it is hot.
    fs::write(dir.join("runtime_status"), "active\n").unwrap();
    assert_eq!(rig.poll(), State::Failed(Fault::Overheated), "{:?}", rig.told);
}

/// Runtime power management took the tunnel down, and nothing that was noted of it is left.
#[test]
fn one_whose_tunnel_was_dropped_is_disconnected() {
    let mut rig = Rig::new();
    rig.connect();
    let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
    let persistent = ClaimOptions { persistent: true, ..ClaimOptions::default() };
    manager.claim(address(GPU), &persistent).unwrap();
    let router: Route = "0-1".parse().unwrap();
    rig.sim.take_down_tunnel(router).unwrap();
    rig.sim.write("sys/bus/thunderbolt/devices/0-1/authorized", "0\n").unwrap();
    assert_eq!(rig.poll(), State::Disconnected);
    assert_eq!(crate::ledger::claims(&rig.host(), crate::claim::DEADLINE).unwrap().len(), 0);
    assert_eq!(rig.take(Event::Connect), State::Ready, "{:?}", rig.manager.failure());
}

/// At another port all of its addresses are others, and it is the same eGPU.
#[test]
fn one_that_comes_back_at_another_port_is_known() {
    let mut rig = Rig::new();
    rig.connect();
    rig.sim.take_down_tunnel("0-1".parse().unwrap()).unwrap();
    rig.sim.delete("sys/bus/thunderbolt/devices/0-1").unwrap();
    assert_eq!(rig.poll(), State::Absent);
    let (port, upstream, downstream) = ("0000:00:07.2", "0000:50:00.0", "0000:51:04.0");
    let gpu = "0000:52:00.0";
    rig.sim.add(&SimFunction::root_port(address(port)).group(17)).unwrap();
    rig.sim.set(address(port), "removable", "removable\n").unwrap();
    rig.sim.add(&SimFunction::root_port(address(upstream)).below(address(port)).group(17)).unwrap();
    rig.sim.add(&SimFunction::root_port(address(downstream)).below(address(upstream)).group(17)).unwrap();
    rig.sim.add(&SimFunction::gpu(address(gpu)).below(address(downstream)).group(18)).unwrap();
    let route = "0-3".parse().unwrap();
    rig.sim.add_router(route, &[("authorized", "0\n"), ("unique_id", &format!("{ID}\n"))]).unwrap();
    rig.sim.enclose(route, &[upstream, downstream, gpu].map(address)).unwrap();
    assert_eq!(rig.poll(), State::Disconnected);
    assert_eq!(rig.take(Event::Connect), State::Ready, "{:?}", rig.manager.failure());
    assert_eq!(rig.manager.enclosure().functions(), [address(gpu)]);
}
