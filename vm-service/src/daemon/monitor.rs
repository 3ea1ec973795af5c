//! Watches the state of guests' devices: links, errors, interrupts.
//!
//! One thread reads it, which may wait for a device that does not answer; whoever asks for it gets what was read last, and waits
//! for nobody.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use vm_passthrough::pci::{self, AerCount, Interrupts, LinkHealth};
use vm_passthrough::{Host, PciAddress};

use super::events::Events;
use crate::api::{DeviceHealth, EventKind, GuestEvent};
use crate::deadlines::DEVICE_HEALTH;

/// How old what is known of a device may become before it is read again.
const AGE: Duration = Duration::from_secs(5);

/// The devices that guests have, and their state.
pub(super) struct Monitor {
    host: Host,
    events: Events,
    devices: Mutex<BTreeMap<PciAddress, Device>>,
}

struct Device {
    guest: String,
    seen: Option<Sample>,
}

/// What was read of a device, and when.
#[derive(Clone)]
struct Sample {
    at: Instant,
    health: pci::DeviceHealth,
    interrupts: Option<Interrupts>,
    per_second: Option<u64>,
}

impl Monitor {
    /// That of `host`; `events` tells what changes.
    pub(super) fn new(host: Host, events: Events) -> Self {
        Self { host, events, devices: Mutex::default() }
    }

    fn devices(&self) -> MutexGuard<'_, BTreeMap<PciAddress, Device>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A guest has this device from now on.
    pub(super) fn attached(&self, guest: &str, address: &str) {
        // A guest's word is no address until it is read as one.
        if let Ok(address) = address.parse() {
            self.devices().insert(address, Device { guest: guest.to_owned(), seen: None });
        }
    }

    /// A guest does not have this device any more.
    pub(super) fn detached(&self, guest: &str, address: &str) {
        if let Ok(address) = address.parse::<PciAddress>() {
            self.devices().retain(|other, device| *other != address || device.guest != guest);
        }
    }

    /// A guest has no devices any more.
    pub(super) fn ended(&self, guest: &str) {
        self.devices().retain(|_, device| device.guest != guest);
    }

    /// The state of a guest's device, as it was read last.
    pub(super) fn health(&self, guest: &str, address: &str) -> Option<DeviceHealth> {
        let devices = self.devices();
        let device = devices.get(&address.parse().ok()?).filter(|device| device.guest == guest)?;
        let Sample { health, interrupts, per_second, .. } = device.seen.as_ref()?;
        Some(DeviceHealth::new(health, *interrupts, *per_second))
    }

    /// Reads all of which too little is known, and tells what has changed.
    fn look(&self, age: Duration) {
        let is_due = |device: &Device| device.seen.as_ref().is_none_or(|seen| seen.at.elapsed() >= age);
        let due: Vec<_> =
            self.devices().iter().filter(|(_, device)| is_due(device)).map(|(&address, _)| address).collect();
        if due.is_empty() {
            return;
        }
        let interrupts = pci::interrupts(&self.host);
        for address in due {
            let at = Instant::now();
            // One that has gone is told of by its guest.
            let Ok(health) = pci::health(&self.host, address, DEVICE_HEALTH) else { continue };
            let mut devices = self.devices();
            let Some(device) = devices.get_mut(&address) else { continue };
            let interrupts = interrupts.get(&address).copied();
            let mut sample = Sample { at, health, interrupts, per_second: None };
            let mut events = Vec::new();
            if let Some(before) = &device.seen {
                sample.per_second = rate(before, &sample);
                events = changes(&before.health, &mut sample.health);
            }
            device.seen = Some(sample);
            let guest = device.guest.clone();
            drop(devices);
            for (kind, text) in events {
                let address = Some(address.to_string());
                self.events.tell(&GuestEvent { address, text: Some(text), ..GuestEvent::new(&guest, kind) });
            }
        }
    }
}

/// Interrupts a second between two moments; `None` where vectors were set up again meanwhile.
fn rate(before: &Sample, now: &Sample) -> Option<u64> {
    let (before, from, to) = (before.at, before.interrupts?.total, now.interrupts?.total);
    let millis =
        u64::try_from(now.at.saturating_duration_since(before).as_millis()).ok().filter(|&ms| ms > 0)?;
    Some(to.checked_sub(from)?.saturating_mul(1000) / millis)
}

/// What is to be told of a device that has changed. A link that was not read is as it was.
fn changes(before: &pci::DeviceHealth, now: &mut pci::DeviceHealth) -> Vec<(EventKind, String)> {
    let mut told = Vec::new();
    if now.link.is_none() && before.power_state == now.power_state && !now.unread.is_empty() {
        now.link = before.link;
    }
    if let (Some(before), Some(now)) = (&before.link, &now.link)
        // Its speed follows how busy the device is.
        && (before.is_down(), before.link.width) != (now.is_down(), now.link.width)
    {
        told.push((EventKind::DeviceLink, format!("the link {}", describe(now))));
    }
    if let (Some(before), Some(now)) = (&before.errors, &now.errors) {
        let severities = [
            ("correctable", &before.correctable, &now.correctable),
            ("nonfatal", &before.nonfatal, &now.nonfatal),
            ("fatal", &before.fatal, &now.fatal),
        ];
        let new: Vec<_> = severities
            .into_iter()
            .filter(|(_, before, now)| now.total > before.total)
            .map(|(severity, before, now)| {
                format!("{} {severity} ({})", now.total - before.total, kinds(before, now))
            })
            .collect();
        if !new.is_empty() {
            told.push((EventKind::DeviceErrors, format!("new errors on PCI Express: {}", new.join(", "))));
        }
    }
    told
}

/// The kinds of which there are more.
fn kinds(before: &AerCount, now: &AerCount) -> String {
    let earlier =
        |kind: &str| before.kinds.iter().find(|(name, _)| name == kind).map_or(0, |(_, count)| *count);
    let more = now.kinds.iter().filter(|(kind, count)| *count > earlier(kind)).map(|(kind, _)| kind.as_str());
    let more: Vec<_> = more.collect();
    if more.is_empty() { "of no kind that Linux names".into() } else { more.join(", ") }
}

fn describe(link: &LinkHealth) -> String {
    if link.is_down() {
        return "is down".into();
    }
    let lanes = |count: u8| if count == 1 { "1 lane".to_owned() } else { format!("{count} lanes") };
    match link.link.width < link.possible_width {
        true => format!("runs with {}, and could with {}", lanes(link.link.width), link.possible_width),
        false => format!("runs with {}, all that it could", lanes(link.link.width)),
    }
}

/// The thread that reads, until this is dropped.
pub(super) struct Reading {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reading {
    /// Looks for devices that are due as often.
    ///
    /// # Errors
    /// When this process has no threads left.
    pub(super) fn every(interval: Duration, monitor: Arc<Monitor>) -> io::Result<Self> {
        let (end, ended) = channel();
        let thread = Builder::new().name("monitor".into()).spawn(move || {
            // Nothing is ever sent.
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                monitor.look(AGE.min(interval.saturating_mul(100)));
            }
        })?;
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        drop(self.end.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that watches the state of devices panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_passthrough::sim::{SimFunction, SimHost};

    use super::*;

    const DISK: &str = "0000:02:00.0";

    struct Scene {
        sim: SimHost,
        monitor: Monitor,
        told: tokio::sync::mpsc::Receiver<GuestEvent>,
    }

    impl Scene {
        fn new() -> Self {
            let sim = SimHost::new().expect("a host");
            sim.add(&SimFunction::nvme(DISK.parse().expect("an address"))).expect("a function");
            let events = Events::default();
            let told = events.listen().expect("a listener");
            let monitor = Monitor::new(sim.plain_host(), events);
            let scene = Self { sim, monitor, told };
            scene.errors(0, 0);
            scene.monitor.attached("web1", DISK);
            scene
        }

        fn set(&self, attribute: &str, text: &str) {
            self.sim.set(DISK.parse().expect("an address"), attribute, text).expect("written");
        }

        fn errors(&self, correctable: u64, fatal: u64) {
            self.set(
                "aer_dev_correctable",
                &format!("RxErr 0\nBadTLP {correctable}\nTOTAL_ERR_COR {correctable}\n"),
            );
            self.set("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 0\n");
            self.set("aer_dev_fatal", &format!("TOTAL_ERR_FATAL {fatal}\n"));
        }

        /// What a look tells.
        fn look(&mut self) -> Vec<String> {
            self.monitor.look(Duration::ZERO);
            std::iter::from_fn(|| self.told.try_recv().ok()).map(|event| event.to_string()).collect()
        }
    }

    #[test]
    fn changes_are_told_once_and_not_what_was_before() {
        let mut scene = Scene::new();
        scene.errors(7, 0);
        assert_eq!(scene.monitor.health("web1", DISK), None);
        assert_eq!(scene.look(), [""; 0]);
        let health = scene.monitor.health("web1", DISK).expect("a state");
        assert_eq!(health.errors.as_ref().map(|errors| errors.correctable.total), Some(7));
        scene.errors(9, 1);
        scene.set("current_link_speed", "2.5 GT/s PCIe\n");
        assert_eq!(
            scene.look(),
            [format!(
                "web1 device-errors {DISK}: new errors on PCI Express: 2 correctable (BadTLP), 1 fatal (of no kind that \
                 Linux names)"
            )]
        );
        assert_eq!(scene.look(), [""; 0]);
        for (width, told) in [
            ("1", "runs with 1 lane, and could with 4"),
            ("0", "is down"),
            ("4", "runs with 4 lanes, all that it could"),
        ] {
            scene.set("current_link_width", width);
            assert_eq!(scene.look(), [format!("web1 device-link {DISK}: the link {told}")]);
        }
        // Of a device that is pulled the guest tells.
        scene.sim.remove(DISK.parse().expect("an address")).expect("removed");
        assert_eq!(scene.look(), [""; 0]);
    }

    #[test]
    fn a_device_is_its_guests_alone() {
        let mut scene = Scene::new();
        scene.look();
        assert_eq!(scene.monitor.health("web2", DISK), None);
        scene.monitor.detached("web2", DISK);
        scene.monitor.ended("web2");
        scene.monitor.attached("web1", "../../etc");
        assert!(scene.monitor.health("web1", DISK).is_some());
        scene.monitor.detached("web1", DISK);
        assert_eq!(scene.monitor.health("web1", DISK), None);
    }

    #[test]
    fn interrupts_have_a_rate_once_they_were_counted_twice() {
        let sample = |seconds: u64, total: Option<u64>| Sample {
            at: *BEGIN + Duration::from_secs(seconds),
            health: pci::DeviceHealth {
                power_state: pci::PowerState::D0,
                link: None,
                errors: None,
                unread: Vec::new(),
            },
            interrupts: total.map(|total| Interrupts { vectors: 1, total }),
            per_second: None,
        };
        static BEGIN: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        let check = |from, to, expect| assert_eq!(rate(&sample(0, from), &sample(5, to)), expect);
        check(Some(10), Some(1010), Some(200));
        check(Some(10), Some(10), Some(0));
        check(Some(10), Some(9), None);
        check(None, Some(9), None);
        check(Some(0), Some(u64::MAX), Some(u64::MAX / 5000));
        assert_eq!(rate(&sample(0, Some(1)), &sample(0, Some(2))), None);
    }
}
