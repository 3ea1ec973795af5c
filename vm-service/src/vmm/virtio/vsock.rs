//! virtio-vsock (section 5.10), by the Linux kernel's vhost-vsock: its packets never reach this process.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vhost::VhostBackend as _;
use vhost::vhost_kern::vsock::Vsock;
use vhost::vsock::VhostVsock as _;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::vhost_rings::{self, Transport};
use super::worker::Worker;
use super::{Activation, VirtioDevice};
use crate::config;
use crate::deadlines::VHOST_STOP;
use crate::vmm::error::MachineError;

/// Communication controller, other.
const CLASS: u32 = 0x07_8000;
const ID: u16 = 19;
const QUEUE_SIZE: u16 = 256;
/// The queues that vhost serves, receive and transmit. Behind them is one for events, of which there are none.
const SERVED: u16 = 2;
/// The first context id of a guest.
const FIRST_CID: u32 = 3;
/// How many ids are tried where none is chosen.
const ATTEMPTS: u32 = 1 << 16;

type Vhost = Vsock<Arc<GuestMemoryMmap>>;

/// What carries a guest's vsock. The guest keeps its context id while it is stopped.
struct Carrier {
    vhost: Vhost,
    features: u64,
}

/// A guest in the host's vsock. Its context id is its own for as long as this lives: through resets of its device and its
/// reboots, and for as long as anybody trusts connections for where they come from.
pub(in crate::vmm) struct Peer {
    cid: u32,
    transport: Box<dyn Transport>,
    /// How often its device was reset.
    resets: AtomicU64,
    /// Signalled at each reset.
    watchers: Mutex<Vec<EventFd>>,
}

impl Peer {
    fn new(cid: u32, transport: Box<dyn Transport>) -> Self {
        Self { cid, transport, resets: AtomicU64::new(0), watchers: Mutex::default() }
    }

    /// A peer that nothing carries.
    #[cfg(test)]
    pub(super) fn unconnected(cid: u32) -> Self {
        Self::new(cid, Box::new(tests::Nothing))
    }

    /// The guest's context id.
    pub(super) fn cid(&self) -> u32 {
        self.cid
    }

    /// Whether a connection is the guest's. Nobody chooses the context id that he comes from: the Linux kernel writes it, 2
    /// or 1 for programs of the host, and each guest's own for what vhost carries.
    pub(super) fn is_from_guest(&self, from: u32) -> bool {
        from >= FIRST_CID && from == self.cid
    }

    /// How often its device was reset. All its connections from before are dead.
    pub(super) fn resets(&self) -> u64 {
        self.resets.load(Ordering::Acquire)
    }

    /// Is signalled at each reset.
    ///
    /// # Errors
    /// When there are no file descriptors left.
    pub(super) fn watch(&self) -> io::Result<EventFd> {
        let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner).push(event.try_clone()?);
        Ok(event)
    }

    /// Says that its device was reset.
    pub(super) fn reset(&self) {
        self.resets.fetch_add(1, Ordering::AcqRel);
        for watcher in &*self.watchers.lock().unwrap_or_else(PoisonError::into_inner) {
            // It fails only when the counter is full, and then it is signalled.
            let _ = watcher.write(1);
        }
    }
}

/// The device.
pub(in crate::vmm) struct VsockDevice {
    config: [u8; 8],
    features: u64,
    peer: Arc<Peer>,
}

impl VsockDevice {
    /// Takes the context id that was chosen, or the first that is free.
    ///
    /// # Errors
    /// When the host has no vhost-vsock, or the id is another guest's.
    pub(in crate::vmm) fn open(
        chosen: Option<config::Vsock>,
        memory: &GuestMemoryMmap,
    ) -> Result<Self, MachineError> {
        let vhost = open(&Arc::new(memory.clone()))?;
        let failed = |error: vhost::Error| MachineError::Vsock { reason: error.to_string() };
        let features = vhost.get_features().map_err(failed)?;
        let cid = match chosen {
            Some(config::Vsock { cid }) => take(&vhost, cid)?.then_some(cid).ok_or(MachineError::Vsock {
                reason: format!(
                    "another guest of this host has the context id {cid}; choose another `vsock.cid`, or leave [vsock] out \
                     for one that is free"
                ),
            })?,
            None => first_free(&vhost)?,
        };
        Ok(Self::new(Peer::new(cid, Box::new(Carrier { vhost, features })), features))
    }

    fn new(peer: Peer, features: u64) -> Self {
        Self { config: u64::from(peer.cid).to_le_bytes(), features, peer: Arc::new(peer) }
    }

    /// The guest, for those who listen for its connections.
    pub(in crate::vmm) fn peer(&self) -> Arc<Peer> {
        self.peer.clone()
    }
}

fn open(memory: &Arc<GuestMemoryMmap>) -> Result<Vhost, MachineError> {
    let vhost = Vsock::new(memory.clone()).map_err(|error| {
        let reason = match error {
            vhost::Error::VhostOpen(error) => format!(
                "/dev/vhost-vsock can't be opened: {error}; load its module (`modprobe vhost_vsock`), and let this user open \
                 it"
            ),
            error => error.to_string(),
        };
        MachineError::Vsock { reason }
    })?;
    vhost.set_owner().map_err(|error| MachineError::Vsock { reason: error.to_string() })?;
    Ok(vhost)
}

/// Takes a context id; `false` when another guest has it.
fn take(vhost: &Vhost, cid: u32) -> Result<bool, MachineError> {
    match vhost.set_guest_cid(cid.into()) {
        Ok(()) => Ok(true),
        Err(vhost::Error::IoctlError(error)) if error.raw_os_error() == Some(libc::EADDRINUSE) => Ok(false),
        Err(error) => Err(MachineError::Vsock { reason: format!("the context id {cid}: {error}") }),
    }
}

fn first_free(vhost: &Vhost) -> Result<u32, MachineError> {
    for cid in FIRST_CID..FIRST_CID + ATTEMPTS {
        if take(vhost, cid)? {
            return Ok(cid);
        }
    }
    Err(MachineError::Vsock { reason: format!("no context id up to {} is free", FIRST_CID + ATTEMPTS) })
}

impl VirtioDevice for VsockDevice {
    fn name(&self) -> String {
        format!("the vsock device with context id {}", self.peer.cid)
    }

    fn id(&self) -> u16 {
        ID
    }

    fn class(&self) -> u32 {
        CLASS
    }

    /// The low bits are the device's own; what vhost says beyond them is the transport's.
    fn features(&self) -> u64 {
        self.features & 0xff_ffff
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; SERVED as usize + 1]
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn stopping(&self) -> (Duration, &'static str) {
        (VHOST_STOP, "see what the Linux kernel's log says of vhost")
    }

    fn start(&self, work: Activation) -> io::Result<Worker> {
        let (peer, name) = (self.peer.clone(), self.name());
        Worker::run("virtio-vsock", move |end| {
            vhost_rings::serve(&*peer.transport, &name, &work, end);
            peer.reset();
        })
    }
}

impl Transport for Carrier {
    fn start(&self, work: &Activation, broken: &EventFd) -> vhost::Result<()> {
        let is_used = vhost_rings::set_up(&self.vhost, self.features, work, SERVED, broken)?;
        if is_used { self.vhost.start() } else { Ok(()) }
    }

    fn stop(&self) -> vhost::Result<()> {
        self.vhost.stop()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Instant;

    use super::*;
    use crate::vmm::pci::MsixTable;
    use crate::vmm::virtio::interrupt::Interrupt;

    /// Carries nothing.
    pub(super) struct Nothing;

    impl Transport for Nothing {
        fn start(&self, _: &Activation, _: &EventFd) -> vhost::Result<()> {
            Ok(())
        }

        fn stop(&self) -> vhost::Result<()> {
            Ok(())
        }
    }

    /// The context ids of a host's guests, as the Linux kernel keeps them: an id is free again when its file is closed.
    type Taken = Arc<Mutex<BTreeSet<u32>>>;

    struct Fake {
        cid: u32,
        taken: Taken,
        said: Mutex<Vec<&'static str>>,
        fails: bool,
        stops: AtomicU64,
    }

    impl Transport for Arc<Fake> {
        fn start(&self, _: &Activation, _: &EventFd) -> vhost::Result<()> {
            self.said.lock().unwrap().push("start");
            if self.fails { Err(vhost::Error::InvalidQueue) } else { Ok(()) }
        }

        fn stop(&self) -> vhost::Result<()> {
            self.said.lock().unwrap().push("stop");
            // Once it does not work at first.
            match self.stops.fetch_add(1, Ordering::Relaxed) {
                0 => Err(vhost::Error::InvalidQueue),
                _ => Ok(()),
            }
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            self.taken.lock().unwrap().remove(&self.cid);
        }
    }

    /// A driver that enabled no queue. Where KVM does not open there is none.
    fn activation() -> Option<Activation> {
        let kvm = kvm_ioctls::Kvm::new().inspect_err(|error| println!("skipped: no KVM: {error}")).ok()?;
        let vm = Arc::new(kvm.create_vm().unwrap());
        vm.create_irq_chip().unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(vm_memory::GuestAddress(0), 1 << 20)]).unwrap();
        let vmm = vm_passthrough::guest::KvmVmm::new(vm, memory.clone()).unwrap();
        let msix = Arc::new(MsixTable::new(vmm, 4).unwrap());
        Some(Activation {
            memory,
            features: 0,
            queues: Vec::new(),
            interrupt: Arc::new(Interrupt::new(msix, 3)),
        })
    }

    #[test]
    fn a_guest_keeps_its_context_id_through_resets() {
        const CID: u32 = 7;
        for fails in [false, true] {
            let taken = Taken::default();
            taken.lock().unwrap().insert(CID);
            let (said, stops) = (Mutex::default(), AtomicU64::new(0));
            let fake = Arc::new(Fake { cid: CID, taken: taken.clone(), said, fails, stops });
            let device = VsockDevice::new(Peer::new(CID, Box::new(fake.clone())), 0);
            assert_eq!(device.config(), 7u64.to_le_bytes());
            let peer = device.peer();
            let watch = peer.watch().unwrap();
            for round in 1..=3 {
                let Some(activation) = activation() else { return };
                let worker = device.start(activation).unwrap();
                worker.end(Instant::now() + Duration::from_secs(60)).unwrap();
                assert!(taken.lock().unwrap().contains(&CID), "the id was free for a moment");
                assert_eq!((peer.resets(), watch.read().unwrap()), (round, 1));
            }
            let expect = ["start", "stop", "stop", "start", "stop", "start", "stop"];
            assert_eq!(*fake.said.lock().unwrap(), expect);
            // Whoever listens for the guest holds the id, too.
            drop((device, fake));
            assert!(taken.lock().unwrap().contains(&CID));
            drop(peer);
            assert!(taken.lock().unwrap().is_empty());
        }
    }

    #[test]
    fn only_the_guest_itself_is_trusted() {
        for (cid, from, trusted) in [
            (3, 3, true),
            (7, 7, true),
            (7, 8, false),
            (7, 2, false),
            (7, 1, false),
            (7, 0, false),
            (7, u32::MAX, false),
            (2, 2, false),
            (1, 1, false),
            (0, 0, false),
        ] {
            assert_eq!(Peer::unconnected(cid).is_from_guest(from), trusted, "{cid} {from}");
        }
    }
}
