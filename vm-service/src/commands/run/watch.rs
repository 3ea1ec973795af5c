//! Watches a guest's devices while it runs: the host may want one back, and one may be lost.
//!
//! A function that is unplugged, or that somebody unbinds from vfio-pci, is kept by the Linux kernel for as long as this
//! process has it open, with whoever asked for it waiting: so the guest is ended and everything is given back. One that
//! stops answering without that is reported, and its guest, which sees what it would see on a real machine, runs on.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vm_passthrough::PciAddress;
use vm_passthrough::vfio::Presence;

use crate::vmm::Stop;

/// How often devices are asked whether they are there.
const INTERVAL: Duration = Duration::from_secs(2);

/// How long asking devices may take when the watch is to end.
const DEADLINE: Duration = Duration::from_secs(5);

/// A device to watch.
pub(super) struct Watched {
    pub(super) address: PciAddress,
    /// Readable when the host wants the device back; `None` where the Linux kernel does not say.
    pub(super) wanted: Option<OwnedFd>,
    /// Whether the device is there.
    pub(super) presence: Box<dyn Fn() -> Presence + Send>,
}

/// Watches devices until it is ended.
#[derive(Debug)]
pub(super) struct Watch {
    end: OwnedFd,
    thread: JoinHandle<Vec<String>>,
}

impl Watch {
    /// Starts to watch. `stop` is requested when the host wants a device back.
    ///
    /// # Errors
    /// When this process has no descriptors or threads left.
    pub(super) fn start(devices: Vec<Watched>, stop: Stop) -> io::Result<Self> {
        Self::every(INTERVAL, devices, stop)
    }

    fn every(interval: Duration, devices: Vec<Watched>, stop: Stop) -> io::Result<Self> {
        let end = event()?;
        let ended = end.try_clone()?;
        let thread = std::thread::Builder::new()
            .name("devices".into())
            .spawn(move || watch(interval, devices, &ended, &stop))?;
        Ok(Self { end, thread })
    }

    /// Ends it, and answers what became of devices that were lost or wanted back.
    pub(super) fn end(self) -> Vec<String> {
        // It can't be full: nothing else writes to it.
        if let Err(error) = rustix::io::write(&self.end, &1u64.to_ne_bytes()) {
            tracing::error!(%error, "the watch over the devices can't be ended");
            return Vec::new();
        }
        let until = Instant::now() + DEADLINE;
        while !self.thread.is_finished() {
            if Instant::now() >= until {
                tracing::error!(
                    "the thread that watches the devices is stuck in asking one whether it is there"
                );
                return Vec::new();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.thread.join().unwrap_or_else(|_| {
            tracing::error!("the thread that watches the devices panicked");
            Vec::new()
        })
    }
}

/// An eventfd.
///
/// # Errors
/// When this process has no descriptors left.
fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn watch(interval: Duration, mut devices: Vec<Watched>, ended: &OwnedFd, stop: &Stop) -> Vec<String> {
    let mut said = Vec::new();
    // Those that did not answer when they were last asked: once may be a reset.
    let mut missing: Vec<PciAddress> = Vec::new();
    let timeout = Timespec { tv_sec: interval.as_secs() as i64, tv_nsec: interval.subsec_nanos().into() };
    while !devices.is_empty() {
        let mut fds = vec![PollFd::new(ended, PollFlags::IN)];
        let heard = devices.iter().filter_map(|device| Some((device.address, device.wanted.as_ref()?)));
        let (addresses, wanted): (Vec<_>, Vec<_>) = heard.unzip();
        fds.extend(wanted.into_iter().map(|event| PollFd::new(event, PollFlags::IN)));
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "the devices can't be watched any more");
                return said;
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect();
        if ready.first() == Some(&true) {
            return said;
        }
        let wanted = addresses.into_iter().zip(ready.into_iter().skip(1));
        let wanted: Vec<_> = wanted.filter_map(|(address, is_ready)| is_ready.then_some(address)).collect();
        devices.retain(|device| {
            let address = device.address;
            let what = if wanted.contains(&address) {
                stop.request();
                format!("the host asked for {address} back: it is unplugged, removed or unbound; the guest was stopped")
            } else if let Presence::Gone(evidence) = (device.presence)() {
                if !missing.contains(&address) {
                    missing.push(address);
                    return true;
                }
                format!("{address} was lost while the guest ran: {evidence}; look at its slot or cable, and at dmesg")
            } else {
                missing.retain(|&other| other != address);
                return true;
            };
            tracing::error!("{what}");
            said.push(what);
            false
        });
    }
    said
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use super::*;

    /// A device whose answers come from `answers`, the last one again and again; how often it was asked is counted.
    fn device(number: u8, answers: &'static [Presence], asked: &Arc<AtomicUsize>) -> Watched {
        let asked = asked.clone();
        let presence = move || {
            let turn = asked.fetch_add(1, Ordering::SeqCst);
            answers[turn.min(answers.len() - 1)].clone()
        };
        let address = PciAddress::new(0, 0x65, 0, number).expect("an address");
        Watched { address, wanted: Some(event().expect("an eventfd")), presence: Box::new(presence) }
    }

    fn wait_until(done: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(Instant::now() < deadline, "it took too long");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_device_that_is_wanted_back_ends_the_guest() {
        let stop = Stop::new().expect("an eventfd");
        let asked = Arc::default();
        let devices = vec![device(0, &[Presence::Present], &asked), device(1, &[Presence::Present], &asked)];
        let wanted = devices[1].wanted.as_ref().expect("an eventfd").try_clone().expect("a descriptor");
        let watch = Watch::start(devices, stop.clone()).expect("a thread");
        assert!(!stop.requested());
        rustix::io::write(&wanted, &1u64.to_ne_bytes()).expect("written");
        wait_until(|| stop.requested());
        let said = watch.end();
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("0000:65:00.1 back"), "{said:?}");
    }

    #[test]
    fn a_device_that_is_lost_is_reported_once() {
        static GONE: [Presence; 1] = [Presence::Gone(String::new())];
        let stop = Stop::new().expect("an eventfd");
        let (lost, there) = (Arc::default(), Arc::<AtomicUsize>::default());
        let devices = vec![device(0, &GONE, &lost), device(1, &[Presence::Asleep], &there)];
        let watch = Watch::every(Duration::from_millis(1), devices, stop.clone()).expect("a thread");
        wait_until(|| there.load(Ordering::SeqCst) > 10);
        let said = watch.end();
        assert_eq!((said.len(), lost.load(Ordering::SeqCst)), (1, 2));
        assert!(said[0].contains("0000:65:00.0 was lost"), "{said:?}");
        assert!(!stop.requested());
    }

    #[test]
    fn a_device_that_is_missed_once_is_not_lost() {
        static BLINKS: [Presence; 4] = [
            Presence::Gone(String::new()),
            Presence::Present,
            Presence::Gone(String::new()),
            Presence::Present,
        ];
        let stop = Stop::new().expect("an eventfd");
        let asked = Arc::<AtomicUsize>::default();
        let watch =
            Watch::every(Duration::from_millis(1), vec![device(0, &BLINKS, &asked)], stop).expect("a thread");
        wait_until(|| asked.load(Ordering::SeqCst) > 5);
        assert_eq!(watch.end(), [] as [&str; 0]);
    }
}
