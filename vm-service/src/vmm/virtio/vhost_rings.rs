//! Queues that the Linux kernel serves by itself (vhost): what goes through them never reaches this process.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::QueueT as _;
use vm_memory::{Address as _, GuestMemoryBackend as _, GuestMemoryRegion as _, GuestRegionMmap};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::Activation;
use super::registers::TRANSPORT_FEATURES;
use crate::vmm::{Stop, sys};

/// How soon stopping vhost is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// What serves queues: vhost of the Linux kernel, with what it serves them for.
pub(super) trait Transport: Send + Sync {
    /// Serves these queues for a driver that is ready. `broken` is signalled when it breaks them.
    fn start(&self, work: &Activation, broken: &EventFd) -> vhost::Result<()>;
    /// Touches neither queues nor RAM any more.
    fn stop(&self) -> vhost::Result<()>;
}

/// Has queues served until it is asked to end. `name` is the device's, for messages.
pub(super) fn serve(transport: &dyn Transport, name: &str, work: &Activation, end: &Stop) {
    let started = eventfd().and_then(|broken| transport.start(work, &broken).map(|()| broken));
    let given_up = match &started {
        Ok(broken) => {
            let (end, broken) = (sys::borrow(end.event()), sys::borrow(broken));
            let mut events = [PollFd::new(&end, PollFlags::IN), PollFd::new(&broken, PollFlags::IN)];
            while let Err(rustix::io::Errno::INTR) = poll(&mut events, None) {}
            let is_broken = !events[1].revents().is_empty();
            is_broken.then(|| "its driver broke a queue".to_owned())
        }
        Err(error) => Some(format!("it was not started: {error}")),
    };
    // What was not started whole is stopped too. Until it is, this thread has not ended, and the machine knows.
    while let Err(error) = transport.stop() {
        tracing::error!(%error, "{name} can't be stopped; it is tried again");
        std::thread::sleep(RETRY);
    }
    if let Some(reason) = given_up {
        tracing::warn!("{name}: {reason}");
        work.interrupt.give_up();
    }
}

/// Gives vhost, which knows the features `offered`, the guest's RAM and the first `served` queues of a device. Whether the
/// driver enabled all of them: one that did not wants nothing.
pub(super) fn set_up(
    vhost: &impl VhostBackend,
    offered: u64,
    work: &Activation,
    served: u16,
    broken: &EventFd,
) -> vhost::Result<bool> {
    if work.features & TRANSPORT_FEATURES & !offered != 0 {
        // No vhost is known that lacks one of the transport's.
        return Err(vhost::Error::InvalidOperation);
    }
    vhost.set_features(work.features & offered)?;
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
    let mut enabled = 0;
    for (index, queue, kick) in work.queues.iter().filter(|(index, ..)| *index < served) {
        let slot = usize::from(*index);
        let data = VringConfigData {
            queue_max_size: queue.max_size(),
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
        let call = work.interrupt.trigger(*index).map_or_else(eventfd, Ok)?;
        vhost.set_vring_call(slot, &call)?;
        vhost.set_vring_err(slot, broken)?;
        vhost.set_vring_kick(slot, kick)?;
        enabled += 1;
    }
    Ok(enabled == served)
}

fn eventfd() -> vhost::Result<EventFd> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(vhost::Error::IoctlError)
}
