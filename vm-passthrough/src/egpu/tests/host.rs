//! Enclosures of a simulated host: what connecting and disconnecting does to it.

mod authorisation;
mod bad_days;
mod fixes;
mod users;
mod waits;

use std::fs;
use std::sync::{Arc, Mutex};

use super::*;
use crate::PciAddress;
use crate::claim::{Cancel, ClaimOptions};
use crate::pci::PciIds;
use crate::sim::{SimDrivers, SimFunction, SimHost};
use crate::{Host, PassthroughManager};

const ID: &str = "d2030000-00a0-751e-a3f4-c0e5ae7b0d30";

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

const PORT: &str = "0000:00:07.0";
const SWITCH: [&str; 2] = ["0000:30:00.0", "0000:31:01.0"];
const GPU: &str = "0000:32:00.0";

/// What was asked of guests, by force or not; what they answer; and what happens as they do.
type Asked = Arc<Mutex<(Vec<bool>, Result<(), String>, Option<Box<dyn FnOnce() + Send>>)>>;

/// A host with an enclosure that is not connected yet.
struct Rig {
    sim: SimHost,
    drivers: SimDrivers,
    manager: Manager<HostEnclosure>,
    /// The states that the manager went through, and why.
    told: Vec<String>,
    why: Vec<String>,
    /// What was asked of guests, and what they answer.
    guests: Asked,
}

struct FakeGuests(Asked);

impl std::fmt::Debug for FakeGuests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeGuests")
    }
}

impl Guests for FakeGuests {
    fn detach(&self, functions: &[PciAddress], force: bool) -> Result<(), String> {
        assert_eq!(functions, [address(GPU)]);
        let mut asked = self.0.lock().unwrap();
        asked.0.push(force);
        if let Some(happens) = asked.2.take() {
            happens();
        }
        asked.1.clone()
    }
}

impl Rig {
    fn new() -> Self {
        Self::with(None, "1\n")
    }

    fn with(known: Option<KnownEgpu>, deauthorization: &str) -> Self {
        Self::by(Policy::default(), known, deauthorization)
    }

    fn by(policy: Policy, known: Option<KnownEgpu>, deauthorization: &str) -> Self {
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::root_port(address(PORT)).group(7)).unwrap();
        sim.set(address(PORT), "removable", "removable\n").unwrap();
        let [upstream, downstream] = SWITCH.map(address);
        sim.add(&SimFunction::root_port(upstream).below(address(PORT)).group(7)).unwrap();
        sim.add(&SimFunction::root_port(downstream).below(upstream).group(7)).unwrap();
        sim.add(&SimFunction::gpu(address(GPU)).below(downstream).group(8).driver("nouveau")).unwrap();
        sim.add_domain(
            0,
            None,
            &[("security", "user\n"), ("iommu_dma_protection", "1\n"), ("deauthorization", deauthorization)],
        )
        .unwrap();
        let route = "0-1".parse().unwrap();
        sim.add_router(route, &[("authorized", "0\n"), ("unique_id", &format!("{ID}\n"))]).unwrap();
        sim.write("proc/sys/kernel/osrelease", "6.14.0\n").unwrap();
        sim.enclose(route, &[upstream, downstream, address(GPU)]).unwrap();
        let drivers = SimDrivers::new(&sim);
        let guests = Arc::new(Mutex::new((Vec::new(), Ok(()), None)));
        let enclosure = HostEnclosure::new(
            &drivers.host(),
            ID.parse().unwrap(),
            policy,
            known,
            Cancel::default(),
            Box::new(FakeGuests(guests.clone())),
        );
        let manager = Manager::new(enclosure, LIMITS);
        Self { sim, drivers, manager, told: Vec::new(), why: Vec::new(), guests }
    }

    fn poll(&mut self) -> State {
        let (told, why) = (&mut self.told, &mut self.why);
        let mut tell = |change: &Change| {
            told.push(change.to.name().to_owned());
            why.extend(change.error.clone());
        };
        self.manager.poll(&mut tell).unwrap();
        self.manager.state()
    }

    fn take(&mut self, event: Event) -> State {
        let (told, why) = (&mut self.told, &mut self.why);
        let mut tell = |change: &Change| {
            told.push(change.to.name().to_owned());
            why.extend(change.error.clone());
        };
        self.manager.take(event, &mut tell);
        self.manager.state()
    }

    fn connect(&mut self) {
        assert_eq!(self.poll(), State::Disconnected);
        assert_eq!(self.take(Event::Connect), State::Ready, "{:?}", self.manager.failure());
    }

    fn driver(&self) -> Option<String> {
        self.sim.driver_of(address(GPU))
    }

    fn is_there(&self) -> bool {
        self.sim.device_dir(address(GPU)).is_ok()
    }

    fn authorized(&self) -> String {
        fs::read_to_string(self.sim.path("sys/bus/thunderbolt/devices/0-1/authorized")).unwrap()
    }

    fn host(&self) -> Host {
        self.drivers.host()
    }

    /// Its temperature, by its driver.
    fn warm(&self, millidegrees: i32) {
        let sensor = self.sim.device_dir(address(GPU)).unwrap().join("hwmon/hwmon4");
        fs::create_dir_all(&sensor).unwrap();
        fs::write(sensor.join("temp1_input"), format!("{millidegrees}\n")).unwrap();
    }

    /// A process of the host opens a node of its driver.
    fn open_by(&self, pid: u32, command: &str) {
        let node = self.sim.device_dir(address(GPU)).unwrap().join("drm/card0");
        fs::create_dir_all(&node).unwrap();
        fs::write(node.join("dev"), "226:0\n").unwrap();
        fs::write(node.join("uevent"), "DEVNAME=dri/card0\n").unwrap();
        self.sim.write(&format!("proc/{pid}/comm"), &format!("{command}\n")).unwrap();
        let open = self.sim.path(&format!("proc/{pid}/fd"));
        fs::create_dir_all(&open).unwrap();
        std::os::unix::fs::symlink(self.sim.path("dev/dri/card0"), open.join("3")).unwrap();
    }

    /// What reads like a function that has fallen off the bus.
    fn fall_off(&self) {
        let config = self.sim.device_dir(address(GPU)).unwrap().join("config");
        let len = fs::read(&config).unwrap().len();
        fs::write(config, vec![0xff; len]).unwrap();
    }
}

#[test]
fn it_is_connected_used_and_disconnected() {
    let mut rig = Rig::new();
    assert!(!rig.is_there());
    rig.connect();
    assert_eq!(rig.told, ["disconnected", "authorising", "enumerating", "verifying", "ready"]);
    assert!(rig.is_there() && rig.authorized() == "1\n");
    assert_eq!(rig.manager.enclosure().functions(), [address(GPU)]);
    assert_eq!(rig.poll(), State::Ready);
    // A claim of a guest is a use; one that nobody holds is none.
    let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
    let claimed = manager.claim(address(GPU), &ClaimOptions::default()).unwrap();
    assert_eq!(rig.poll(), State::InUse);
    rig.guests.lock().unwrap().1 = Err("web1 does not let go of it".into());
    assert_eq!(rig.take(Event::Disconnect { force: false }), State::InUse);
    assert!(rig.manager.failure().unwrap().contains("web1 does not let go"), "{:?}", rig.manager.failure());
    assert!(rig.is_there());
    manager.release(&claimed).unwrap();
    rig.guests.lock().unwrap().1 = Ok(());
    assert_eq!(rig.poll(), State::Ready);
    assert_eq!(
        rig.take(Event::Disconnect { force: false }),
        State::Disconnected,
        "{:?}",
        rig.manager.failure()
    );
    assert!(!rig.is_there() && rig.authorized() == "0\n");
    assert_eq!(rig.guests.lock().unwrap().0, [false, false]);
    assert_eq!(rig.poll(), State::Disconnected);
    // And again.
    assert_eq!(rig.take(Event::Connect), State::Ready);
    assert_eq!(rig.driver().as_deref(), Some("nouveau"));
}

#[test]
fn what_the_ledger_notes_of_it_goes_with_it() {
    let mut rig = Rig::new();
    rig.connect();
    let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
    let persistent = ClaimOptions { persistent: true, ..ClaimOptions::default() };
    manager.claim(address(GPU), &persistent).unwrap();
    assert_eq!(
        rig.take(Event::Disconnect { force: false }),
        State::Disconnected,
        "{:?}",
        rig.manager.failure()
    );
    assert_eq!(crate::ledger::claims(&rig.host(), crate::claim::DEADLINE).unwrap().len(), 0);
}

#[test]
fn what_the_ledger_notes_of_it_is_undone_when_that_can_be() {
    let mut rig = Rig::new();
    rig.connect();
    let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
    let persistent = ClaimOptions { persistent: true, ..ClaimOptions::default() };
    manager.claim(address(GPU), &persistent).unwrap();
    let claims = |rig: &Rig| crate::ledger::claims(&rig.host(), crate::claim::DEADLINE).unwrap().len();
    // It is pulled, and a driver does not let go of it at once.
    rig.sim.delete("sys/bus/thunderbolt/devices/0-1").unwrap();
    for _ in 0..2 {
        assert_eq!(rig.poll(), State::Absent);
        assert!(rig.manager.leftover().unwrap().contains(GPU), "{:?}", rig.manager.leftover());
        assert_eq!(claims(&rig), 1);
    }
    rig.sim.remove(address(GPU)).unwrap();
    assert_eq!(rig.poll(), State::Absent);
    assert_eq!((rig.manager.leftover(), claims(&rig)), (None, 0));
}

#[test]
fn whoever_begins_to_use_it_meanwhile_keeps_it() {
    for force in [false, true] {
        let mut rig = Rig::new();
        rig.connect();
        // A guest has it by the time that all were asked.
        let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
        let claimed = manager.claim(address(GPU), &ClaimOptions::default()).unwrap();
        let unbound = rig.manager.enclosure().act(Action::Unbind { force });
        assert_eq!(unbound.is_ok(), force, "{unbound:?}");
        assert_eq!(rig.driver().is_some(), !force);
        drop((claimed, manager));
    }
}

#[test]
fn nobody_claims_it_between_its_driver_and_the_end_of_its_tunnel() {
    let mut rig = Rig::new();
    rig.connect();
    rig.manager.enclosure().act(Action::Unbind { force: false }).unwrap();
    let host = rig.host();
    let (send, asks) = std::sync::mpsc::channel();
    let claim = std::thread::spawn(move || {
        let mut manager = PassthroughManager::with_host(host).unwrap();
        send.send(()).unwrap();
        manager.claim(address(GPU), &ClaimOptions::default()).map(drop)
    });
    asks.recv().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    rig.manager.enclosure().act(Action::Deauthorise).unwrap();
    assert!(claim.join().unwrap().is_err());
    assert!(!rig.is_there());
    // Where that fails it can be claimed again.
    let mut rig = Rig::new();
    rig.connect();
    rig.manager.enclosure().act(Action::Unbind { force: false }).unwrap();
    rig.drivers.fail("authorized", "0", 1, libc::EIO);
    rig.manager.enclosure().act(Action::Deauthorise).unwrap_err();
    let mut manager = PassthroughManager::with_host(rig.host()).unwrap();
    manager.claim(address(GPU), &ClaimOptions::default()).unwrap();
}

#[test]
fn another_gpu_in_a_known_enclosure_is_disconnected() {
    let id = ID.parse().unwrap();
    let other = PciIds { vendor: 0x10de, device: 1, subsystem_vendor: 0, subsystem_device: 0, revision: 0 };
    let mut rig = Rig::with(Some(KnownEgpu { id, accelerators: vec![other] }), "1\n");
    assert_eq!(rig.poll(), State::Disconnected);
    assert_eq!(rig.take(Event::Connect), State::Failed(Fault::NotEnumerated));
    assert!(rig.manager.failure().unwrap().contains("--remember"), "{:?}", rig.manager.failure());
    assert!(!rig.is_there() && rig.authorized() == "0\n");
    // With what it really has it is connected.
    let mut rig = Rig::new();
    rig.connect();
    let known = rig.manager.enclosure().known();
    assert_eq!((known.id, known.accelerators.len()), (id, 1));
    Rig::with(Some(known), "1\n").connect();
}

#[test]
fn steps_that_fail_leave_nothing_half_done() {
    // The tunnel is refused.
    let mut rig = Rig::new();
    rig.drivers.fail("authorized", "1", 1, libc::EIO);
    rig.poll();
    assert_eq!(rig.take(Event::Connect), State::Failed(Fault::NotAuthorised));
    assert!(rig.manager.failure().unwrap().contains("authorized"), "{:?}", rig.manager.failure());
    assert!(!rig.is_there());
    assert_eq!(rig.take(Event::Connect), State::Ready);
    // A driver does not let go of it.
    rig.drivers.fail("unbind", "", 1, libc::EBUSY);
    assert_eq!(rig.take(Event::Disconnect { force: false }), State::Failed(Fault::Stuck));
    assert!(rig.is_there());
    assert_eq!(
        rig.take(Event::Disconnect { force: false }),
        State::Disconnected,
        "{:?}",
        rig.manager.failure()
    );
    // A domain that takes no tunnel down.
    let mut rig = Rig::with(None, "0\n");
    rig.connect();
    assert_eq!(rig.take(Event::Disconnect { force: false }), State::Failed(Fault::NotDeauthorised));
    assert!(rig.manager.failure().unwrap().contains("pull its cable"), "{:?}", rig.manager.failure());
    assert_eq!(rig.driver(), None);
    // Its cable is pulled then.
    rig.sim.delete("sys/bus/thunderbolt/devices/0-1").unwrap();
    assert_eq!(rig.poll(), State::Absent);
}

#[test]
fn one_that_does_not_answer_is_recovered_by_the_rung_that_helps() {
    let mut rig = Rig::new();
    rig.connect();
    rig.fall_off();
    rig.told.clear();
    assert_eq!([rig.poll(), rig.poll()].map(State::name), ["degraded"; 2]);
    // A simulated reset of a function brings nothing back, and its bus has none: the tunnel does, as that is another function.
    let config = rig.sim.device_dir(address(GPU)).unwrap().join("config");
    let fresh = SimFunction::gpu(address(GPU)).config_space();
    let writes = {
        let sim = rig.sim.clone();
        move || {
            if !sim.path("sys/bus/pci/devices").join(GPU).exists() {
                let hidden = "sim/usb4/0-1/hidden";
                fs::write(sim.path(hidden).join(SWITCH[1]).join(GPU).join("config"), &fresh).unwrap();
            }
        }
    };
    rig.drivers.observe(writes);
    let state = rig.poll();
    assert_eq!(state, State::Ready, "{:?} {:?}", rig.told, rig.manager.failure());
    let told = [
        "degraded",
        "degraded",
        "recovering",
        "recovering",
        "recovering",
        "recovering",
        "recovering",
        "ready",
    ];
    assert_eq!(rig.told, told);
    assert!(fs::read(config).unwrap().starts_with(&0x10de_u16.to_le_bytes()));
    assert_eq!(rig.poll(), State::Ready);
}

#[test]
fn one_that_stays_silent_is_given_up() {
    let mut rig = Rig::new();
    rig.connect();
    rig.fall_off();
    let states = [rig.poll(), rig.poll(), rig.poll()];
    assert_eq!(states[2], State::Failed(Fault::Unrecovered), "{:?}", rig.told);
    assert!(!rig.is_there() && rig.authorized() == "0\n");
}

#[test]
fn one_that_is_too_hot_is_stopped() {
    let mut rig = Rig::new();
    rig.connect();
    rig.warm(89_999);
    assert_eq!(rig.poll(), State::Ready);
    rig.warm(90_000);
    assert_eq!(rig.poll(), State::Failed(Fault::Overheated));
    assert!(!rig.is_there() && rig.authorized() == "0\n");
    assert_eq!(rig.guests.lock().unwrap().0, [true]);
}
