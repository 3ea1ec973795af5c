//! An accelerator of the host that the guest shares, as a virtio device of its own kind ([`vm_paravirt`]). Its queue is
//! served by the guest's worker, a process; here it is started, watched over, and ended.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_queue::QueueT as _;
use vm_memory::{Address as _, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _};
use vm_paravirt::{Config, DEVICE_ID, FEATURE_IMPORT, QUEUE_SIZE};
use vmm_sys_util::eventfd::EventFd;

use super::worker::Worker;
use super::{Activation, VirtioDevice};
use crate::accelerator::{Open, Report, Start, WorkerProcess, WorkerProgram};
use crate::config::SharedAccelerator;
use crate::vmm::error::MachineError;
use crate::vmm::sys;

/// Processing accelerator (PCI Code and ID Assignment 1.11, class 0x12).
const CLASS: u32 = 0x12_0000;
/// How long after a worker was started the next may be: a guest that resets its device for ever costs the host no more.
const START_INTERVAL: Duration = Duration::from_millis(250);
/// How often a worker is asked whether it is there.
const PING_PERIOD: Duration = Duration::from_secs(2);
/// How long it may take to answer.
const PING_PATIENCE: Duration = Duration::from_secs(20);

/// The device.
pub(in crate::vmm) struct AcceleratorDevice {
    worker: Arc<Maker>,
    config: [u8; vm_paravirt::CONFIG_BYTES],
    /// A worker that has opened its accelerator and waits for the guest's driver.
    ready: Mutex<Option<WorkerProcess>>,
}

/// What it takes to make a worker.
struct Maker {
    program: WorkerProgram,
    open: Open,
    ram: Vec<File>,
    /// When the last one was started.
    last: Mutex<Instant>,
}

impl Maker {
    fn make(&self) -> Result<(WorkerProcess, String), crate::accelerator::WorkerError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::sleep(START_INTERVAL.saturating_sub(last.elapsed()));
        *last = Instant::now();
        drop(last);
        let ram: Vec<BorrowedFd<'_>> = self.ram.iter().map(File::as_fd).collect();
        WorkerProcess::spawn(&self.program, &self.open, &ram)
    }
}

impl AcceleratorDevice {
    /// Starts a worker, and so sees that the accelerator can be had.
    ///
    /// # Errors
    /// When it can't.
    pub(in crate::vmm) fn open(
        guest: &str,
        shared: &SharedAccelerator,
        memory: &GuestMemoryMmap,
        program: &WorkerProgram,
    ) -> Result<Self, MachineError> {
        let device = shared.device.to_string();
        let failed = |reason: String| MachineError::Accelerator { device: device.clone(), reason };
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let open = Open {
            guest: guest.to_owned(),
            device: device.clone(),
            memory: shared.memory,
            deadline_us: micros(shared.deadline),
            time_slice_us: micros(shared.time_slice),
            ram: memory.iter().map(|region| (region.start_addr().raw_value(), region.len())).collect(),
        };
        let ram = memory
            .iter()
            .map(|region| {
                let shared = region.file_offset().ok_or_else(|| io::Error::other("the RAM is no memfd"))?;
                shared.file().try_clone()
            })
            .collect::<io::Result<_>>()
            .map_err(|error| failed(format!("the guest's RAM can't be shared: {error}")))?;
        // Nothing was started before.
        let last = Instant::now().checked_sub(START_INTERVAL).unwrap_or_else(Instant::now);
        let maker = Maker { program: program.clone(), open, ram, last: Mutex::new(last) };
        let (worker, name) = maker.make().map_err(|error| failed(error.to_string()))?;
        tracing::info!("the guest shares the accelerator {device}, {name}");
        Ok(Self {
            worker: Arc::new(maker),
            config: Config::new(shared.memory, micros(shared.deadline)).encode(),
            ready: Mutex::new(Some(worker)),
        })
    }
}

impl VirtioDevice for AcceleratorDevice {
    fn name(&self) -> String {
        format!("the shared accelerator {}", self.worker.open.device)
    }

    fn id(&self) -> u16 {
        DEVICE_ID
    }

    fn class(&self) -> u32 {
        CLASS
    }

    fn features(&self) -> u64 {
        FEATURE_IMPORT
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn start(&self, work: Activation) -> io::Result<Worker> {
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (maker, interrupt) = (self.worker.clone(), work.interrupt.clone());
        let queue = work.queues.into_iter().next();
        Worker::run("accelerator", move |end| {
            // A driver that enables no queue wants nothing.
            let Some((index, queue, doorbell)) = queue else { return };
            let start = Start {
                size: queue.size(),
                descriptors: queue.desc_table(),
                available: queue.avail_ring(),
                used: queue.used_ring(),
                event_index: queue.event_idx_enabled(),
            };
            let ended = ready
                .map_or_else(|| maker.make().map(|(worker, _)| worker), Ok)
                .map_err(|error| error.to_string());
            let ended = ended.and_then(|worker| {
                let doorbell = sys::borrow(&doorbell);
                let vector = interrupt.trigger(index);
                let told = worker.start(start, doorbell, vector.as_ref().map(|vector| sys::borrow(vector)));
                told.map_err(|error| error.to_string()).and_then(|()| supervise(worker, end))
            });
            if let Err(reason) = ended {
                tracing::warn!(guest = %maker.open.guest, accelerator = %maker.open.device, "the worker was ended: {reason}");
                interrupt.give_up();
            }
        })
    }
}

/// Watches over a worker until the device is reset. The worker is gone when this returns.
///
/// # Errors
/// Why it was ended before.
fn supervise(mut worker: WorkerProcess, end: &EventFd) -> Result<(), String> {
    let period = Timespec::try_from(PING_PERIOD).map_err(|error| error.to_string())?;
    let mut asked: Option<Instant> = None;
    loop {
        let (end, socket) = (sys::borrow(end), worker.socket());
        let mut fds = [PollFd::new(&end, PollFlags::IN), PollFd::new(&socket, PollFlags::IN)];
        match poll(&mut fds, Some(&period)) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.to_string()),
            Ok(_) => {}
        }
        let (ended, reported) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if ended {
            return Ok(());
        }
        if reported {
            match worker.report(Duration::ZERO) {
                Ok(Some(Report::Here)) => asked = None,
                Ok(Some(Report::Broken(reason) | Report::Overdue(reason) | Report::Failed(reason))) => {
                    return Err(reason);
                }
                Ok(Some(Report::Ready { .. })) => return Err("it reported out of order".into()),
                Ok(None) => {
                    return Err(worker.kill().unwrap_or_else(|| "it is stuck in the Linux kernel".into()));
                }
                Err(error) => return Err(format!("it can't be heard: {error}")),
            }
        } else if let Some(asked) = asked {
            if asked.elapsed() > PING_PATIENCE {
                return Err(format!("it did not answer within {} s", PING_PATIENCE.as_secs()));
            }
        } else if worker.ping().is_ok() {
            asked = Some(Instant::now());
        }
    }
}
