//! Tests of [`gpu`](super).

mod chips;
mod hostile;
mod random;
mod registers;
mod ring;
mod sequences;

use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::{Command, HostClock, Interrupt, RegionRegisters, Ring, RingError, Ticket, bring_up};
use crate::sim::{SimClock, SimGpu, SimLog};
use crate::vfio::{AddressSpace as _, DmaPermission, HostMemory, load_u32, store_u32};

/// Where the ring and the memory that commands work on are, as the device has them.
const RING: u64 = 0x10_0000_0000;
const DATA: u64 = 0x20_0000;
/// Bytes of the latter.
const DATA_LEN: usize = 0x1000;
/// Longer than any wait that is to succeed: the clock goes only where one does not.
const TIMEOUT: Duration = Duration::from_secs(3);

/// A modelled GPU that was brought up, with memory and an interrupt, and a ring.
struct Rig {
    gpu: Arc<SimGpu>,
    clock: Arc<SimClock>,
    data: Arc<HostMemory>,
    interrupt: Interrupt,
    ring: Ring,
}

impl Rig {
    /// With a ring of that many entries, whose first fence is the other.
    fn new(entries: u32, first: u32) -> Self {
        let (gpu, clock) = gpu();
        let registers = Arc::new(RegionRegisters::new(gpu.clone(), 0).unwrap());
        bring_up(&*gpu, &*registers, &*clock).unwrap();
        let data = Arc::new(HostMemory::new(DATA_LEN).unwrap());
        gpu.dma().map(DATA, data.clone(), DmaPermission::ReadWrite).unwrap();
        let interrupt = Interrupt::enable(gpu.clone()).unwrap();
        let ring = Ring::new(registers, gpu.clone(), gpu.dma().clone(), RING, entries, first).unwrap();
        Self { gpu, clock, data, interrupt, ring }
    }

    fn wait(&mut self, ticket: Ticket) -> Result<(), RingError> {
        use std::os::fd::AsFd as _;
        self.ring.wait(ticket, self.interrupt.as_fd(), &*self.clock, TIMEOUT)
    }

    /// The dword at an offset of the memory.
    fn dword(&self, offset: u64) -> u32 {
        load_u32(&*self.data, offset).unwrap()
    }

    fn set_dword(&self, offset: u64, value: u32) {
        store_u32(&*self.data, offset, value).unwrap();
    }

    /// What has ended, as done or as an error's text.
    fn ended(&mut self) -> Vec<(Ticket, Result<(), String>)> {
        self.ring.poll().unwrap();
        std::iter::from_fn(|| self.ring.take())
            .map(|ended| (ended.ticket, ended.result.map_err(|error| error.to_string())))
            .collect()
    }
}

fn gpu() -> (Arc<SimGpu>, Arc<SimClock>) {
    let clock = Arc::<SimClock>::default();
    let gpu = SimGpu::new("0000:65:00.0".parse().unwrap(), clock.clone(), &SimLog::default()).unwrap();
    (gpu, clock)
}

/// A fill of one dword.
fn fill(offset: u64, value: u32) -> Command {
    Command::Fill { at: DATA + offset, len: 4, value }
}

#[test]
fn the_hosts_clock_waits_for_events() {
    use super::Clock as _;
    use std::os::fd::AsFd as _;
    let clock = HostClock::default();
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    assert!(!clock.wait(event.as_fd(), Duration::from_millis(1)).unwrap());
    rustix::io::write(&event, &7u64.to_ne_bytes()).unwrap();
    assert!(clock.wait(event.as_fd(), Duration::MAX).unwrap());
    assert!(!clock.wait(event.as_fd(), Duration::ZERO).unwrap(), "the signal is taken");
    let before = clock.now();
    clock.sleep(Duration::from_millis(1));
    assert!(clock.now() > before);
}
