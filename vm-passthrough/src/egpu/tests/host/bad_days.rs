//! What eGPUs suffer from hosts, and what is done about it.

use super::*;
use crate::deadlines;
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

/// It was pulled and plugged in again between two looks.
#[test]
fn one_that_was_replugged_unseen_is_not_taken_for_disconnected() {
    let mut rig = Rig::new();
    rig.connect();
    assert_eq!(rig.poll(), State::Ready);
    rig.sim.take_down_tunnel("0-1".parse().unwrap()).unwrap();
    let router = rig.sim.path("sys/bus/thunderbolt/devices/0-1");
    let dir = fs::canonicalize(&router).unwrap();
    let [other, attributes] = ["other", "attributes"].map(|name| dir.with_file_name(name));
    // Another directory with the same in it, before the old one can give it its number.
    fs::create_dir(&other).unwrap();
    for file in ["authorized", "unique_id"] {
        fs::copy(dir.join(file), other.join(file)).unwrap();
    }
    fs::write(other.join("authorized"), "0\n").unwrap();
    fs::rename(&dir, attributes).unwrap();
    fs::rename(&other, &dir).unwrap();
    assert_eq!(rig.poll(), State::Absent);
    assert_eq!(rig.poll(), State::Disconnected);
    assert_eq!(rig.take(Event::Connect), State::Ready, "{:?}", rig.manager.failure());
}

/// What says that it has the same UUID is refused where it is, and keeps nobody from disconnecting the one that was there before.
#[test]
fn another_with_its_uuid_does_not_keep_it() {
    let mut rig = Rig::new();
    rig.connect();
    let twin = [("authorized", "0\n"), ("unique_id", &*format!("{ID}\n"))];
    rig.sim.add_router("0-3".parse().unwrap(), &twin).unwrap();
    assert_eq!(rig.poll(), State::Ready, "{:?}", rig.manager.failure());
    rig.warm(95_000);
    assert_eq!(rig.poll(), State::Failed(Fault::Overheated));
    assert!(!rig.is_there() && rig.authorized() == "0\n");
    assert!(matches!(rig.take(Event::Connect), State::Failed(Fault::NotAuthorised)));
    let failure = rig.manager.failure().unwrap();
    assert!(failure.contains("0-1 and 0-3 both say"), "{failure}");
}

/// A new tunnel is for what may have one: what would not be connected keeps its own, and whatever it has.
#[test]
fn what_may_not_be_connected_is_not_reconnected() {
    let id = ID.parse().unwrap();
    let other = PciIds { vendor: 0x10de, device: 1, subsystem_vendor: 0, subsystem_device: 0, revision: 0 };
    let mut rig = Rig::with(Some(KnownEgpu { id, accelerators: vec![other] }), "1\n");
    let host = rig.host();
    host.writer()
        .write(&rig.sim.path("sys/bus/thunderbolt/devices/0-1/authorized"), "1", deadlines::TUNNEL)
        .unwrap();
    rig.manager.enclosure().adopt().unwrap();
    let refused = rig.manager.enclosure().act(Action::Reset(Rung::Reconnect));
    assert!(matches!(refused, Err(EgpuError::AnotherGpu { .. })), "{refused:?}");
    assert!(rig.is_there() && rig.authorized() == "1\n");
    assert_eq!(rig.driver().as_deref(), Some("nouveau"));
}
