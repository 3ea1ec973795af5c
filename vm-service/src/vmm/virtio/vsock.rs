//! virtio-vsock (section 5.10), by the Linux kernel's vhost-vsock: its packets never reach this process.

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_kern::vsock::Vsock;
use vhost::vsock::VhostVsock as _;
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::QueueT as _;
use vm_memory::{
    Address as _, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _, GuestRegionMmap,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::worker::Worker;
use super::{Activation, VirtioDevice};
use crate::config;
use crate::vmm::error::MachineError;
use crate::vmm::{Stop, sys};

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

/// How long vhost may take to stop.
const STOP_DEADLINE: Duration = Duration::from_secs(10);

type Vhost = Vsock<Arc<GuestMemoryMmap>>;

/// The device.
pub(in crate::vmm) struct VsockDevice {
    cid: u32,
    config: [u8; 8],
    features: u64,
    memory: Arc<GuestMemoryMmap>,
    /// Holds the context id. The serving thread has it while there is one.
    vhost: Arc<Mutex<Option<Vhost>>>,
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
        let memory = Arc::new(memory.clone());
        let vhost = open(&memory)?;
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
        let config = u64::from(cid).to_le_bytes();
        Ok(Self { cid, config, features, memory, vhost: Arc::new(Mutex::new(Some(vhost))) })
    }

    /// The guest's context id.
    pub(in crate::vmm) fn cid(&self) -> u32 {
        self.cid
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
        format!("the vsock device with context id {}", self.cid)
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
        (STOP_DEADLINE, "see what the Linux kernel's log says of vhost")
    }

    fn start(&self, work: Activation) -> io::Result<Worker> {
        let (shared, memory, cid) = (self.vhost.clone(), self.memory.clone(), self.cid);
        let offered = self.features;
        Worker::run("virtio-vsock", move |end| {
            let vhost = shared.lock().unwrap_or_else(PoisonError::into_inner).take();
            let vhost = match vhost {
                Some(vhost) => Ok(vhost),
                // It was lost when the device was last reset.
                None => open(&memory).and_then(|vhost| match take(&vhost, cid)? {
                    true => Ok(vhost),
                    false => Err(MachineError::Vsock { reason: format!("its context id {cid} is taken") }),
                }),
            };
            let interrupt = work.interrupt.clone();
            let served = vhost
                .map_err(|error| error.to_string())
                .and_then(|vhost| serve(&vhost, work, offered, end).map_err(|error| error.to_string()));
            if let Err(reason) = served {
                tracing::warn!(cid, reason, "the guest's vsock device was not started");
                interrupt.give_up();
                return;
            }
            // What served is closed by now, and with it every connection. The id is taken again at once.
            match open(&memory).and_then(|vhost| Ok(take(&vhost, cid)?.then_some(vhost))) {
                Ok(vhost) => *shared.lock().unwrap_or_else(PoisonError::into_inner) = vhost,
                Err(error) => {
                    tracing::debug!(%error, "the vsock device is opened again when the guest starts it")
                }
            }
        })
    }
}

/// Lets vhost serve the queues until it is asked to end.
fn serve(vhost: &Vhost, work: Activation, offered: u64, end: &Stop) -> vhost::Result<()> {
    if work.features & !offered != 0 {
        // No vhost-vsock is known that lacks one of the transport's.
        return Err(vhost::Error::InvalidOperation);
    }
    vhost.set_features(work.features)?;
    let region = |region: &GuestRegionMmap| VhostUserMemoryRegionInfo {
        guest_phys_addr: region.start_addr().raw_value(),
        memory_size: region.len(),
        userspace_addr: region.as_ptr() as u64,
        // Those are for another process, and this is none.
        mmap_offset: 0,
        mmap_handle: -1,
    };
    let regions: Vec<VhostUserMemoryRegionInfo> = work.memory.iter().map(region).collect();
    vhost.set_mem_table(&regions)?;
    let mut served = 0;
    for (index, queue, kick) in work.queues.iter().filter(|(index, ..)| *index < SERVED) {
        let slot = usize::from(*index);
        let data = VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: queue.size(),
            flags: 0,
            desc_table_addr: queue.desc_table(),
            used_ring_addr: queue.used_ring(),
            avail_ring_addr: queue.avail_ring(),
            log_addr: None,
        };
        vhost.set_vring_num(slot, queue.size())?;
        vhost.set_vring_addr(slot, &data)?;
        vhost.set_vring_base(slot, 0)?;
        let silent = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(vhost::Error::IoctlError);
        let call = work.interrupt.trigger(*index).map_or_else(silent, Ok)?;
        vhost.set_vring_call(slot, &call)?;
        vhost.set_vring_kick(slot, kick)?;
        served += 1;
    }
    // A driver that enabled not both wants nothing.
    if served == SERVED {
        vhost.start()?;
    }
    let end = sys::borrow(end.event());
    while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(&end, PollFlags::IN)], None) {}
    tracing::debug!(descriptor = vhost.as_raw_fd(), "the vsock device is stopped");
    Ok(())
}
