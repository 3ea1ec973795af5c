//! Guests that are threads: they have a home, a control socket, and claims in the ledger, and no machine.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::ledger::Ledger;
use vm_passthrough::manager::ManagerError;
use vm_passthrough::readiness::{self, ExplainOptions};
use vm_passthrough::sim::SimHost;
use vm_passthrough::{Host, PassthroughManager, PciAddress};

use super::TIMEOUT;
use crate::api::{
    AttachRequest, AttachedDevice, DetachHow, DetachRequest, DetachedDevice, DetachedHow, DeviceState,
    EventKind, GuestDevice, GuestEvent, GuestState, GuestStatus, Readiness, Refusal, RefusalCode, StoppedHow,
};
use crate::config::GuestConfig;
use crate::daemon::launch::{Launch, Launched, Plan};
use crate::guest::control::{Answer, Controlled, GuestHome, Outbox, Server};

/// The name of one that never runs.
pub(super) const NEVER: &str = "never";

/// The name of one that ignores its power button.
pub(super) const DEAF: &str = "deaf";

/// Makes such guests, and can kill them.
#[derive(Clone, Default)]
pub(super) struct Threads(Arc<Mutex<All>>);

/// Those that were started, by name.
type All = BTreeMap<String, (Sender<Order>, JoinHandle<()>)>;

/// What a guest is told.
enum Order {
    Stop(StoppedHow),
    Attach(PciAddress, Answer),
    Detach(PciAddress, DetachHow, Answer),
    /// As a kill would have it. Its records go to whoever kills it, who puts them back before it goes on.
    Die(Sender<Vec<(PciAddress, Vec<u8>)>>, Receiver<()>),
}

impl Threads {
    fn all(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills a guest: its devices stay bound as they are, and its claims in the ledger.
    pub(super) fn kill(&self, sim: &SimHost, host: &Host, name: &str) {
        self.kill_and(sim, host, name, || ());
    }

    /// As [`kill`](Self::kill), and does something before anybody hears of it.
    pub(super) fn kill_and<T>(&self, sim: &SimHost, host: &Host, name: &str, act: impl FnOnce() -> T) -> T {
        let (orders, thread) = self.all().remove(name).expect("a guest");
        let ((records, taken), (goes_on, wait)) = (channel(), channel());
        orders.send(Order::Die(records, wait)).expect("it lives");
        let records = taken.recv_timeout(TIMEOUT).expect("its records");
        {
            let _ledger = Ledger::lock(host, TIMEOUT).expect("the ledger");
            for (address, record) in records {
                sim.set(address, "driver_override", "vfio-pci\n").expect("an attribute");
                sim.set_driver(address, Some("vfio-pci")).expect("bound");
                fs::write(host.state.join(format!("ledger/{address}.claim")), record).expect("a record");
            }
        }
        let done = act();
        goes_on.send(()).expect("it waits");
        thread.join().expect("no panic");
        done
    }

    /// Whether a guest lives.
    pub(super) fn has(&self, name: &str) -> bool {
        self.all().get(name).is_some_and(|(_, thread)| !thread.is_finished())
    }

    /// Ends all of them in order.
    pub(super) fn end_all(&self) {
        for (_, (orders, thread)) in std::mem::take(&mut *self.all()) {
            // It may have ended already.
            let _ = orders.send(Order::Stop(StoppedHow::Cut));
            let _ = thread.join();
        }
    }
}

impl Launch for Threads {
    fn launch(&self, plan: Plan<'_>) -> io::Result<Box<dyn Launched>> {
        let Plan { host, home, lock, mut log, connection, .. } = plan;
        let config = GuestConfig::load(&home.join("guest.toml")).map_err(io::Error::other)?;
        let home = GuestHome::inherit(host, &config.name, lock).map_err(io::Error::other)?;
        for &address in &config.devices {
            let explained = readiness::explain(host, address, &ExplainOptions::default());
            if let Ok(found) = explained.as_ref()
                && !found.is_ready()
            {
                writeln!(log, "error: nothing was touched, because of what stands in the way:\n{found}")?;
                return Ok(Box::new(Ended(3)));
            }
        }
        let mut manager = PassthroughManager::with_host(host.clone()).map_err(io::Error::other)?;
        for &address in &config.devices {
            if let Err(error) = claim(&mut manager, &config.name, address) {
                writeln!(log, "error: {error}")?;
                return Ok(Box::new(Ended(1)));
            }
        }
        writeln!(log, "{} runs", config.name)?;
        let (orders, received) = channel();
        let status = GuestStatus {
            name: config.name.clone(),
            pid: std::process::id(),
            state: if config.name == NEVER { GuestState::Starting } else { GuestState::Running },
            since: 0,
            vcpus: config.vcpus,
            memory: config.memory,
            devices: config.devices.iter().map(device).collect(),
            dma_bytes: None,
            peer_to_peer: None,
            console: None,
            how: None,
            confinement: None,
        };
        let mut guest = None;
        let server = Server::start(home.listen()?, Some(connection), |outbox| {
            let (status, orders) = (Mutex::new(status), Mutex::new(orders.clone()));
            guest.insert(Arc::new(Fake { status, orders, outbox })).clone()
        })?;
        let guest = guest.ok_or_else(|| io::Error::other("no guest"))?;
        let live = move || guest.live(&received, manager, home, server);
        self.all().insert(config.name, (orders, std::thread::spawn(live)));
        Ok(Box::new(Runs))
    }
}

fn claim(manager: &mut PassthroughManager, guest: &str, address: PciAddress) -> Result<(), ManagerError> {
    let mut options = ClaimOptions::default();
    options.guest = Some(guest.to_owned());
    manager.claim(address, &options).map(drop)
}

fn device(address: &PciAddress) -> GuestDevice {
    GuestDevice { address: address.to_string(), state: DeviceState::Attached, health: None }
}

struct Fake {
    status: Mutex<GuestStatus>,
    orders: Mutex<Sender<Order>>,
    outbox: Outbox,
}

impl Fake {
    /// Does what it is asked until it ends.
    fn live(
        &self,
        orders: &Receiver<Order>,
        mut manager: PassthroughManager,
        home: GuestHome,
        server: Server,
    ) {
        self.tell(EventKind::Started, None, None);
        for order in orders {
            match order {
                Order::Stop(how) => {
                    self.tell(EventKind::Ended, None, Some(how));
                    manager.close().expect("all is released");
                    // As in a process: the socket goes before the name.
                    drop(server);
                    drop(home);
                    return;
                }
                Order::Attach(address, answer) => {
                    let name = self.status().name;
                    let claimed = claim(&mut manager, &name, address).map_err(|error| {
                        let found = readiness::explain(manager.host(), address, &ExplainOptions::default());
                        match found {
                            Ok(found) if !found.is_ready() => {
                                let blockers = vec![Readiness::from(&found)];
                                Refusal { blockers, ..Refusal::new(RefusalCode::Blocked, error) }
                            }
                            _ => Refusal::failed(error),
                        }
                    });
                    if claimed.is_ok() {
                        self.change(|devices| devices.push(device(&address)));
                        self.tell(EventKind::DeviceAttached, Some(address), None);
                    }
                    let attached = AttachedDevice {
                        address: address.to_string(),
                        guest_address: None,
                        left: Vec::new(),
                    };
                    answer.send(claimed.map(|()| [attached]));
                }
                Order::Detach(address, how, answer) => {
                    let address_text = address.to_string();
                    let none = || Refusal::new(RefusalCode::NotFound, "the guest has no such device");
                    let released = manager.claimed(address).ok_or_else(none);
                    let released =
                        released.and_then(|claimed| manager.release(&claimed).map_err(Refusal::failed));
                    if released.is_ok() {
                        self.change(|devices| devices.retain(|device| device.address != address_text));
                        self.tell(EventKind::DeviceDetached, Some(address), None);
                    }
                    let how = match how {
                        DetachHow::Surprise => DetachedHow::Surprise,
                        DetachHow::Orderly | DetachHow::OrderlyThenSurprise => DetachedHow::Orderly,
                    };
                    answer.send(released.map(|()| DetachedDevice { address: address_text, how }));
                }
                Order::Die(records, goes_on) => {
                    let ledger = manager.host().state.join("ledger");
                    let devices = self.status().devices;
                    let left = devices.iter().map(|device| {
                        let record =
                            fs::read(ledger.join(format!("{}.claim", device.address))).expect("a record");
                        (device.address.parse().expect("an address"), record)
                    });
                    let left = left.collect();
                    drop(manager);
                    records.send(left).expect("it is killed");
                    goes_on.recv_timeout(TIMEOUT).expect("it is killed");
                    drop(home.into_lock());
                    drop(server);
                    return;
                }
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Vec<GuestDevice>)) {
        let mut status = self.status.lock().expect("a status");
        change(&mut status.devices);
        status.devices.sort_by(|one, other| one.address.cmp(&other.address));
    }

    fn tell(&self, event: EventKind, address: Option<PciAddress>, how: Option<StoppedHow>) {
        let address = address.map(|address| address.to_string());
        self.outbox.event(GuestEvent { address, how, ..GuestEvent::new(&self.status().name, event) });
    }

    fn order(&self, order: Order) {
        // One that has ended answers nothing more.
        let _ = self.orders.lock().expect("a channel").send(order);
    }
}

impl Controlled for Fake {
    fn status(&self) -> GuestStatus {
        self.status.lock().expect("a status").clone()
    }

    fn power_button(&self) {
        if self.status().name == DEAF {
            return;
        }
        self.order(Order::Stop(StoppedHow::Orderly));
    }

    fn stop(&self) {
        self.order(Order::Stop(StoppedHow::Cut));
    }

    fn reset(&self, answer: Answer) {
        answer.send(Ok(()));
    }

    fn attach(&self, request: AttachRequest, answer: Answer) {
        self.order(Order::Attach(request.address.0, answer));
    }

    fn detach(&self, request: DetachRequest, answer: Answer) {
        self.order(Order::Detach(request.address.0, request.options.how, answer));
    }
}

/// The process of a guest that runs, as far as the daemon sees it.
struct Runs;

impl Launched for Runs {
    fn ended(&mut self) -> io::Result<Option<Option<i32>>> {
        Ok(None)
    }

    fn kill(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self) {}
}

/// That of one that has ended.
struct Ended(i32);

impl Launched for Ended {
    fn ended(&mut self) -> io::Result<Option<Option<i32>>> {
        Ok(Some(Some(self.0)))
    }

    fn kill(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self) {}
}
