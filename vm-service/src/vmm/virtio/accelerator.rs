//! An accelerator of the host that the guest shares, as a virtio device of its own kind ([`vm_paravirt`]). Its queue is
//! served by the guest's worker, a process; here it is started, watched over, and ended.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use virtio_queue::QueueT as _;
use vm_memory::{
    Address as _, FileOffset, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _, MmapRegion,
};
use vm_paravirt::{Config, DEVICE_ID, FEATURE_IMPORT, FEATURE_WINDOW, QUEUE_SIZE, Takes, WINDOW_ID};

use super::programs::Programs;
use super::supervisor::{Maker, supervise};
use super::vsock::Peer;
use super::worker::Worker;
use super::{Activation, Busy, VirtioDevice};
use crate::accelerators::{Open, Ready, Start, WorkerProcess};
use crate::config::{SharedAccelerator, Trust};
use crate::deadlines::ACCELERATOR_STOP;
use crate::os::process::ChildProgram;
use crate::vmm::error::MachineError;
use crate::vmm::{Stop, memory, sys};

/// Processing accelerator (PCI Code and ID Assignment 1.11, class 0x12).
const CLASS: u32 = 0x12_0000;
/// The device.
pub(in crate::vmm) struct AcceleratorDevice {
    maker: Arc<Maker>,
    config: [u8; vm_paravirt::CONFIG_BYTES],
    reach: Reach,
}

/// How the guest reaches the worker.
enum Reach {
    /// Through a virtqueue, by a driver. Holds a worker that has opened its accelerator and waits for the driver.
    Queue(Mutex<Option<WorkerProcess>>),
    /// Over vsock, by programs, with data in a window.
    Programs { window: Arc<MmapRegion>, programs: Arc<Programs>, serving: Mutex<Serving> },
}

/// What serves programs.
enum Serving {
    /// A worker that has opened its accelerator, until the guest first starts.
    Ready(WorkerProcess),
    /// A thread, with its workers.
    Runs(Worker),
    /// Nothing, until the guest starts once more.
    Ended,
}

impl AcceleratorDevice {
    /// Starts a worker, and so sees that the accelerator can be had. `peer` is the guest in the host's vsock, if
    /// it is there. It goes on until it is open or `stop` is requested.
    ///
    /// # Errors
    /// When it can't.
    pub(in crate::vmm) fn open(
        guest: &str,
        shared: &SharedAccelerator,
        memory: &GuestMemoryMmap,
        peer: Option<Arc<Peer>>,
        program: &ChildProgram,
        stop: &Stop,
    ) -> Result<Self, MachineError> {
        let device = shared.device.to_string();
        let failed = |reason: String| MachineError::Accelerator { device: device.clone(), reason };
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let mut open = Open {
            guest: guest.to_owned(),
            device: device.clone(),
            memory: shared.memory,
            deadline_us: micros(shared.deadline),
            time_slice_us: micros(shared.time_slice),
            poll_us: micros(shared.poll),
            ram: Vec::new(),
            port: None,
            trust: shared.trust.clone(),
            unconfined: shared.unconfined.clone(),
        };
        let config = Config::new(shared.memory, micros(shared.deadline));
        let made = |open, files| {
            let maker = Maker::new(program.clone(), open, files)
                .map_err(|error| failed(format!("the guest's time can't be kept: {error}")))?;
            let (worker, Ready { name, confinement }) =
                maker.make(stop).map_err(|error| failed(error.to_string()))?;
            tracing::info!("the guest shares the accelerator {device}, {name}");
            match shared.trust {
                Trust::Kernels => tracing::info!("the worker of {device} is confined: {confinement}"),
                // Each CUDA program has a worker of its own.
                Trust::Driver { .. } => tracing::info!("workers of {device} are confined: {confinement:#}"),
            }
            Ok::<_, MachineError>((Arc::new(maker), worker))
        };
        let Some(bytes) = shared.window else {
            open.ram = memory.iter().map(|region| (region.start_addr().raw_value(), region.len())).collect();
            let files = memory.iter().map(|region| file(region.file_offset())).collect::<io::Result<_>>();
            let files = files.map_err(|error| failed(format!("the guest's RAM can't be shared: {error}")))?;
            let (maker, worker) = made(open, files)?;
            let reach = Reach::Queue(Mutex::new(Some(worker)));
            return Ok(Self { maker, config: config.encode(), reach });
        };
        let window = memory::window(bytes)
            .and_then(|window| Ok((file(window.file_offset())?, Arc::new(window))))
            .map_err(|error| failed(format!("there is no room for a window of {bytes} bytes: {error}")));
        let (window_file, window) = window?;
        let peer = peer.ok_or_else(|| failed("the guest has no vsock device".into()))?;
        let (programs, port) = Programs::listen(peer)
            .map_err(|error| failed(format!("no vsock port can be listened at: {error}")))?;
        open.ram = vec![(0, bytes)];
        open.port = Some(port);
        let (maker, worker) = made(open, vec![window_file])?;
        let takes = match shared.trust {
            Trust::Kernels => Takes::Batches,
            Trust::Driver { .. } => Takes::CudaPrograms,
        };
        let config = Config { takes, ..config.with_window(bytes, port) }.encode();
        let serving = Mutex::new(Serving::Ready(worker));
        let reach = Reach::Programs { window, programs: Arc::new(programs), serving };
        Ok(Self { maker, config, reach })
    }
}

fn file(part: Option<&FileOffset>) -> io::Result<File> {
    part.ok_or_else(|| io::Error::other("it is no memfd"))?.file().try_clone()
}

impl VirtioDevice for AcceleratorDevice {
    fn name(&self) -> String {
        format!("the shared accelerator {}", self.maker.open().device)
    }

    fn id(&self) -> u16 {
        DEVICE_ID
    }

    fn class(&self) -> u32 {
        CLASS
    }

    fn features(&self) -> u64 {
        match self.reach {
            Reach::Queue(_) => FEATURE_IMPORT,
            Reach::Programs { .. } => FEATURE_WINDOW,
        }
    }

    fn queue_sizes(&self) -> &[u16] {
        match self.reach {
            Reach::Queue(_) => &[QUEUE_SIZE],
            Reach::Programs { .. } => &[],
        }
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn window(&self) -> Option<(u8, Arc<MmapRegion>)> {
        match &self.reach {
            Reach::Queue(_) => None,
            Reach::Programs { window, .. } => Some((WINDOW_ID, window.clone())),
        }
    }

    fn stopping(&self) -> (Duration, &'static str) {
        (
            ACCELERATOR_STOP,
            "its worker was ended: see what the Linux kernel's log says of the accelerator's driver",
        )
    }

    /// Ends the worker that serves programs, with all that it still does to the window.
    fn stop(&self, until: Instant) -> Result<(), Busy> {
        let Reach::Programs { serving, .. } = &self.reach else { return Ok(()) };
        let mut serving = serving.lock().unwrap_or_else(PoisonError::into_inner);
        if let Serving::Runs(worker) = &*serving {
            worker.end(until)?;
        }
        *serving = Serving::Ended;
        Ok(())
    }

    fn reset(&self) -> io::Result<()> {
        if let Reach::Programs { programs, serving, .. } = &self.reach {
            let mut serving = serving.lock().unwrap_or_else(PoisonError::into_inner);
            let worker = match std::mem::replace(&mut *serving, Serving::Ended) {
                Serving::Ready(worker) => Some(worker),
                Serving::Ended => None,
                runs @ Serving::Runs(_) => {
                    *serving = runs;
                    return Ok(());
                }
            };
            programs.begin()?;
            let (programs, maker) = (programs.clone(), self.maker.clone());
            let run = move |end: &_| programs.run(&maker, worker, end);
            *serving = Serving::Runs(Worker::run("accelerator", run)?);
        }
        Ok(())
    }

    fn start(&self, work: Activation) -> io::Result<Worker> {
        let ready = match &self.reach {
            Reach::Queue(ready) => ready.lock().unwrap_or_else(PoisonError::into_inner).take(),
            Reach::Programs { .. } => None,
        };
        let (maker, interrupt) = (self.maker.clone(), work.interrupt.clone());
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
                .map_or_else(|| maker.make(end).map(|(worker, _)| worker), Ok)
                .map_err(|error| error.to_string());
            let ended = ended.and_then(|worker| {
                let doorbell = sys::borrow(&doorbell);
                let vector = interrupt.trigger(index);
                let told = worker.start(start, doorbell, vector.as_ref().map(|vector| sys::borrow(vector)));
                told.map_err(|error| error.to_string()).and_then(|()| supervise(worker, end, None))
            });
            if let Err(reason) = ended
                && !end.requested()
            {
                maker.tell_end(&reason);
                interrupt.give_up();
            }
        })
    }
}
