//! Which device a call goes to, and what there is of them.

use std::cell::Cell;
use std::collections::HashMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use vm_cuda::{CudaAccelerator, CudaLauncher, Entered, Place, device_count};

use crate::engine::Engine;
use crate::error::Failure;
use crate::sys::{Cpu, Gpu, lend, vmk_device};

/// Which device calls go to, as the environment says.
const VARIABLE: &str = "VMK_DEVICE";
/// What the engine of the first device's primary context is kept by, for threads that have none: no context's number.
const PRIMARY: u64 = u64::MAX;

/// All that a process has of the library.
pub(crate) struct State {
    chosen: AtomicI32,
    gpus: OnceLock<Result<u32, String>>,
    contexts: RwLock<HashMap<u64, &'static Engine<Gpu>>>,
    cpu: OnceLock<Engine<Cpu>>,
    /// Who starts the CPU's threads has it.
    starting: Mutex<()>,
}

/// The device of a call.
pub(crate) enum Chosen<'a> {
    /// The CPU.
    Cpu(&'a Engine<Cpu>),
    /// A context of a GPU, which is the thread's current one.
    Gpu(&'static Engine<Gpu>, Entered<'static>),
}

thread_local! {
    /// The context that this thread called in last, by its number.
    static LAST: Cell<Option<(u64, &'static Engine<Gpu>)>> = const { Cell::new(None) };
}

impl State {
    /// As the environment says.
    pub(crate) fn new() -> Self {
        let chosen = match std::env::var_os(VARIABLE).unwrap_or_default().to_str() {
            Some("cpu") => vmk_device::VMK_CPU as i32,
            Some("gpu") => vmk_device::VMK_GPU as i32,
            Some("auto" | "") => vmk_device::VMK_AUTO as i32,
            _ => -1,
        };
        let (gpus, contexts, cpu, starting) = Default::default();
        Self { chosen: AtomicI32::new(chosen), gpus, contexts, cpu, starting }
    }

    /// How many GPUs there are, or why there are none.
    pub(crate) fn gpus(&self) -> &Result<u32, String> {
        self.gpus.get_or_init(|| match device_count() {
            Ok(0) => Err("there is no CUDA device".into()),
            Ok(count) => Ok(count),
            Err(error) => Err(error.to_string()),
        })
    }

    /// Chooses the device of the calls that follow.
    ///
    /// # Errors
    /// [`Failure::Invalid`] for a number that no device has, [`Failure::Unavailable`] for one that is not there.
    pub(crate) fn choose(&self, device: i32) -> Result<(), Failure> {
        const NAME: &str = "vmk_use";
        if device == vmk_device::VMK_GPU as i32 {
            self.gpus().as_ref().map_err(|why| Failure::Unavailable(format!("{NAME}: {why}")))?;
        } else if ![vmk_device::VMK_AUTO as i32, vmk_device::VMK_CPU as i32].contains(&device) {
            let what = format!("is {device}: VMK_AUTO, VMK_CPU and VMK_GPU are possible");
            return Err(Failure::invalid(NAME, "device", what));
        }
        self.chosen.store(device, Ordering::Release);
        Ok(())
    }

    /// Whether calls go to a GPU.
    ///
    /// # Errors
    /// The environment says none of what is possible.
    pub(crate) fn on_gpu(&self) -> Result<bool, Failure> {
        match self.chosen.load(Ordering::Acquire) {
            -1 => {
                let value = std::env::var_os(VARIABLE).unwrap_or_default();
                let what = format!("is {value:?} in the environment: cpu, gpu and auto are possible");
                Err(Failure::invalid("libvmkernels", VARIABLE, what))
            }
            chosen if chosen == vmk_device::VMK_CPU as i32 => Ok(false),
            chosen if chosen == vmk_device::VMK_GPU as i32 => Ok(true),
            _ => Ok(self.gpus().is_ok()),
        }
    }

    /// The device of a call of the calling thread.
    ///
    /// # Errors
    /// [`Failure::Unavailable`]; the driver's.
    pub(crate) fn device(&self, function: &'static str) -> Result<Chosen<'_>, Failure> {
        if !self.on_gpu()? {
            return self.cpu(function).map(Chosen::Cpu);
        }
        self.gpus().as_ref().map_err(|why| Failure::Unavailable(format!("{function}: {why}")))?;
        self.context()
            .map(|(engine, entered)| Chosen::Gpu(engine, entered))
            .map_err(|error| Failure::device(function, &error))
    }

    /// The CPU, with as many threads as can be started when it is asked for first.
    fn cpu(&self, function: &'static str) -> Result<&Engine<Cpu>, Failure> {
        if let Some(engine) = self.cpu.get() {
            return Ok(engine);
        }
        let starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.cpu.get().is_none() {
            let threads = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
            let cpu = Cpu::start(threads).map_err(|error| Failure::device(function, &error))?;
            let _ = self.cpu.set(Engine::new(cpu));
        }
        drop(starting);
        self.cpu.get().ok_or_else(|| Failure::Unavailable("there is no CPU".into()))
    }

    /// The kernels of the calling thread's context, which it is in; of the first device's primary context, if it has none.
    fn context(&self) -> vm_accel::Result<(&'static Engine<Gpu>, Entered<'static>)> {
        let place = CudaLauncher::current()?;
        let id = place.map_or(PRIMARY, |place| place.id);
        let engine = match LAST.try_with(Cell::get) {
            Ok(Some((last, engine))) if last == id => engine,
            _ => self.engine(place, id)?,
        };
        let _ = LAST.try_with(|last| last.set(Some((id, engine))));
        Ok((engine, engine.device.enter(place)?))
    }

    /// The kernels of a context with a number.
    fn engine(&self, place: Option<Place>, id: u64) -> vm_accel::Result<&'static Engine<Gpu>> {
        if let Some(engine) = self.contexts.read().unwrap_or_else(PoisonError::into_inner).get(&id) {
            return Ok(engine);
        }
        let mut contexts = self.contexts.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = contexts.get(&id) {
            return Ok(engine);
        }
        let device = if place.is_some() { CudaLauncher::current_device()? } else { 0 };
        let accelerator = Arc::new(CudaAccelerator::new(device)?);
        let launcher = accelerator.launcher(place.map(lend))?;
        // As long as the process: kernels of a context stay loaded, and calls may run when the process ends.
        let engine: &'static _ = Box::leak(Box::new(Engine::new(Gpu::new(accelerator, launcher))));
        contexts.insert(id, engine);
        Ok(engine)
    }
}
