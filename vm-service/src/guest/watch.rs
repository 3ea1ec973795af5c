//! Watches a guest's devices while they are open: the host may want one back, one may be lost, and one may have an error.
//!
//! A function that is unplugged, or that somebody unbinds from vfio-pci, is kept by the Linux kernel for as long as this
//! process has it open, with whoever asked for it waiting. One may stop answering without that, too.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vm_passthrough::PciAddress;
use vm_passthrough::vfio::{ErrorSeverity, Presence, UncorrectableError};

use super::handle::Message;
use super::state::Event;

/// How often devices are asked whether they are there.
const INTERVAL: Duration = Duration::from_secs(2);

/// How long asking devices may take when the watch is to end.
const DEADLINE: Duration = Duration::from_secs(5);

/// A device to watch.
pub(super) struct Watched {
    pub(super) address: PciAddress,
    /// Readable when the host wants the device back; `None` where the Linux kernel does not say.
    pub(super) wanted: Option<OwnedFd>,
    /// Whether it does, however that is known: the guest's VMM, which has the device open, can silence the Linux kernel.
    pub(super) is_wanted: Box<dyn Fn() -> bool + Send>,
    /// Made readable then, too.
    pub(super) tell: Option<OwnedFd>,
    /// What error it had since this was last called.
    pub(super) error: Box<dyn Fn() -> Option<UncorrectableError> + Send>,
    /// Whether the device is there.
    pub(super) presence: Box<dyn Fn() -> Presence + Send>,
}

/// What is watched changes.
enum Change {
    Add(Watched),
    Remove(PciAddress),
}

/// Watches devices until it is ended.
#[derive(Debug)]
pub(super) struct Watch {
    changes: Sender<Change>,
    /// Written to when something was sent, or the sender is gone.
    wake: OwnedFd,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Starts to watch what is [added](Self::add): each device that the host wants back, or that is lost, is sent to `events`
    /// once.
    ///
    /// # Errors
    /// When this process has no descriptors or threads left.
    pub(super) fn start(events: Sender<Message>) -> io::Result<Self> {
        Self::every(INTERVAL, events)
    }

    fn every(interval: Duration, events: Sender<Message>) -> io::Result<Self> {
        let wake = event()?;
        let woken = wake.try_clone()?;
        let (changes, changed) = channel();
        let thread = std::thread::Builder::new()
            .name("devices".into())
            .spawn(move || watch(interval, &changed, &woken, &events))?;
        Ok(Self { changes, wake, thread })
    }

    /// Watches a device, too.
    pub(super) fn add(&self, device: Watched) {
        self.change(Change::Add(device));
    }

    /// Watches a device no more; one that was seen before may still be sent.
    pub(super) fn remove(&self, address: PciAddress) {
        self.change(Change::Remove(address));
    }

    fn change(&self, change: Change) {
        // A thread that has ended has said why.
        let _ = self.changes.send(change);
        wake(&self.wake);
    }

    /// Ends it. All that it saw was sent then.
    pub(super) fn end(self) {
        drop(self.changes);
        wake(&self.wake);
        let until = Instant::now() + DEADLINE;
        while !self.thread.is_finished() {
            if Instant::now() >= until {
                tracing::error!(
                    "the thread that watches the devices is stuck in asking one whether it is there"
                );
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.thread.join().is_err() {
            tracing::error!("the thread that watches the devices panicked");
        }
    }
}

/// An eventfd.
///
/// # Errors
/// When this process has no descriptors left.
pub(super) fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes who polls an eventfd.
pub(super) fn wake(event: &OwnedFd) {
    // It fails only when the counter is full, and then it is readable.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

fn watch(interval: Duration, changed: &Receiver<Change>, woken: &OwnedFd, events: &Sender<Message>) {
    let mut devices: Vec<Watched> = Vec::new();
    // Those that did not answer when they were last asked: once may be a reset.
    let mut missing: Vec<PciAddress> = Vec::new();
    // Fatal errors, after which the Linux kernel resets the link: they are sent when they are next asked, as it has by then.
    let mut fatal: BTreeMap<PciAddress, UncorrectableError> = BTreeMap::new();
    let timeout = Timespec { tv_sec: interval.as_secs() as i64, tv_nsec: interval.subsec_nanos().into() };
    loop {
        loop {
            match changed.try_recv() {
                Ok(Change::Add(device)) => devices.push(device),
                Ok(Change::Remove(address)) => {
                    devices.retain(|device| device.address != address);
                    missing.retain(|&other| other != address);
                    fatal.remove(&address);
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let mut fds = vec![PollFd::new(woken, PollFlags::IN)];
        let heard = devices.iter().filter_map(|device| device.wanted.as_ref());
        fds.extend(heard.map(|event| PollFd::new(event, PollFlags::IN)));
        match poll(&mut fds, (!devices.is_empty()).then_some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "the devices can't be watched any more");
                return;
            }
        }
        if fds.first().is_some_and(|fd| fd.revents().contains(PollFlags::IN)) {
            // Only this thread reads it.
            let _ = rustix::io::read(woken, &mut [0; 8]);
            continue;
        }
        devices.retain(|device| {
            let address = device.address;
            // Asked for, not waited for: a device that has errors all the time is reported no more often than that.
            let erred = match (device.error)() {
                Some(error) if error.severity == ErrorSeverity::Fatal => fatal.insert(address, error),
                Some(error) => Some(error),
                None => fatal.remove(&address),
            };
            if let Some(error) = erred {
                let _ = events.send(Event::Erred(address, error).into());
            }
            let event = if (device.is_wanted)() {
                device.tell.iter().for_each(wake);
                // One that was pulled is wanted, too, and can't be let go of in order.
                match (device.presence)() {
                    Presence::Gone(evidence) => Event::Lost(address, evidence),
                    _ => Event::WantedBack(address),
                }
            } else if let Presence::Gone(evidence) = (device.presence)() {
                if !missing.contains(&address) {
                    missing.push(address);
                    return true;
                }
                Event::Lost(address, evidence)
            } else {
                missing.retain(|&other| other != address);
                return true;
            };
            // It fails only when nobody is left to do something about it.
            let _ = events.send(event.into());
            false
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    /// A device whose answers come from `answers`, the last one again and again; how often it was asked is counted.
    fn device(number: u8, answers: &'static [Presence], asked: &Arc<AtomicUsize>) -> Watched {
        let asked = asked.clone();
        let presence = move || {
            let turn = asked.fetch_add(1, Ordering::SeqCst);
            answers[turn.min(answers.len() - 1)].clone()
        };
        let address = PciAddress::new(0, 0x65, 0, number).expect("an address");
        let wanted = event().expect("an eventfd");
        let written = wanted.try_clone().expect("a descriptor");
        Watched {
            address,
            wanted: Some(wanted),
            is_wanted: Box::new(move || rustix::io::read(&written, &mut [0; 8]).is_ok()),
            tell: None,
            error: Box::new(|| None),
            presence: Box::new(presence),
        }
    }

    fn wait_until(done: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(Instant::now() < deadline, "it took too long");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_device_that_is_wanted_back_is_sent_once() {
        let check = |is_silenced| {
            let asked = Arc::default();
            let mut devices = [0, 1].map(|number| device(number, &[Presence::Present], &asked));
            let wanted = devices[1].wanted.as_ref().expect("an eventfd").try_clone().expect("a descriptor");
            if is_silenced {
                devices[1].wanted = None;
            }
            let (events, sent) = channel();
            let watch = Watch::every(Duration::from_millis(10), events).expect("a thread");
            devices.into_iter().for_each(|device| watch.add(device));
            wake(&wanted);
            let event = sent.recv_timeout(Duration::from_secs(30));
            assert!(
                matches!(event, Ok(Message::Event(Event::WantedBack(address))) if address.function() == 1),
                "{event:?}"
            );
            watch.end();
            assert!(sent.recv().is_err());
        };
        check(false);
        check(true);
    }

    #[test]
    fn a_device_that_was_pulled_is_lost_though_the_host_wants_it() {
        static GONE: [Presence; 1] = [Presence::Gone(String::new())];
        let pulled = device(0, &GONE, &Arc::default());
        wake(pulled.wanted.as_ref().expect("an event"));
        let (events, sent) = channel();
        let watch = Watch::every(Duration::from_secs(600), events).expect("a thread");
        watch.add(pulled);
        let event = sent.recv_timeout(Duration::from_secs(60));
        assert!(matches!(event, Ok(Message::Event(Event::Lost(..)))), "{event:?}");
        watch.end();
    }

    #[test]
    fn a_device_that_is_lost_is_sent_once() {
        static GONE: [Presence; 1] = [Presence::Gone(String::new())];
        let (lost, there) = (Arc::default(), Arc::<AtomicUsize>::default());
        let devices = vec![device(0, &GONE, &lost), device(1, &[Presence::Asleep], &there)];
        let (events, sent) = channel();
        let watch = Watch::every(Duration::from_millis(1), events).expect("a thread");
        devices.into_iter().for_each(|device| watch.add(device));
        wait_until(|| there.load(Ordering::SeqCst) > 10);
        watch.end();
        let sent: Vec<_> = sent.iter().collect();
        assert!(
            matches!(&sent[..], [Message::Event(Event::Lost(address, _))] if address.function() == 0),
            "{sent:?}"
        );
        assert_eq!(lost.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_device_that_has_an_error_is_watched_on() {
        let asked = Arc::default();
        let mut device = device(0, &[Presence::Present], &asked);
        let errors = AtomicUsize::new(3);
        let take = |left: usize| left.checked_sub(1);
        device.error = Box::new(move || {
            let left = errors.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).ok()?;
            let severity = if left == 2 { ErrorSeverity::Fatal } else { ErrorSeverity::NonFatal };
            Some(UncorrectableError { severity, evidence: format!("error {left}") })
        });
        let (events, sent) = channel();
        let watch = Watch::every(Duration::from_millis(1), events).expect("a thread");
        watch.add(device);
        wait_until(|| asked.load(Ordering::SeqCst) > 5);
        watch.end();
        let sent = sent.iter().map(|message| match message {
            Message::Event(Event::Erred(_, error)) => error.evidence,
            other => panic!("{other:?}"),
        });
        // The second is fatal.
        assert_eq!(sent.collect::<Vec<_>>(), ["error 3", "error 1", "error 2"]);
    }

    #[test]
    fn a_device_that_is_missed_once_is_not_lost() {
        static BLINKS: [Presence; 4] = [
            Presence::Gone(String::new()),
            Presence::Present,
            Presence::Gone(String::new()),
            Presence::Present,
        ];
        let asked = Arc::<AtomicUsize>::default();
        let (events, sent) = channel();
        let devices = vec![device(0, &BLINKS, &asked)];
        let watch = Watch::every(Duration::from_millis(1), events).expect("a thread");
        devices.into_iter().for_each(|device| watch.add(device));
        wait_until(|| asked.load(Ordering::SeqCst) > 5);
        watch.end();
        assert!(sent.recv().is_err());
    }
}
