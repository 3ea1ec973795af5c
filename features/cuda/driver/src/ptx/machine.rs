//! The processors: what is compiled for them, and launches.
#![allow(unsafe_code)]

use super::{lock, print::Ring};
use crate::{
    error::{Error, Result},
    state,
};
use std::{
    num::NonZero,
    ops::Range,
    sync::{
        Arc, Condvar, LazyLock, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Instant,
};
use vm_accel::{Arguments, Artifact, Extents, Grid, Memory, MemoryKind, QueueArgument, Scalar};
use vm_cpu::CpuKernel;
use vm_jit::{
    Target,
    backend::cpu::{Isa, Options},
};
use vm_ptx::{Signature, Translated};
use vm_runtime::{CpuAccelerator, CpuJITCompiler};

/// Bytes of stack for what compiles: kernels nest, and a program's thread may have little.
const STACK: usize = 64 << 20;
/// How often a thread may begin the body of a loop: the time is what ends kernels.
const FUEL: u64 = 1 << 62;

/// The processors, and a compiler for them.
struct Machine {
    accelerator: Arc<CpuAccelerator>,
    compiler: CpuJITCompiler,
}

static MACHINE: LazyLock<Result<Machine, String>> = LazyLock::new(|| {
    // What runs a kernel that needs much stack is a thread beside that of the stream.
    let threads = thread::available_parallelism().map_or(2, NonZero::get).max(2);
    let accelerator = CpuAccelerator::with_threads(NonZero::new(threads).unwrap_or(NonZero::<usize>::MIN));
    let accelerator = Arc::new(accelerator.map_err(|error| error.to_string())?);
    let isa = Isa::host().map_err(|error| error.to_string())?;
    let target = Target::Cpu(Options { strays_fault: true, ..Options::new(isa) });
    Ok(Machine { compiler: CpuJITCompiler::new(Arc::clone(&accelerator)).target(target), accelerator })
});

/// Does something on a thread with room for it.
pub(super) fn deep<T: Send>(does: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, does);
        thread.map_err(|_| Error::OutOfMemory)?.join().map_err(|_| Error::Unknown)
    })
}

/// Why a launch ended before its time.
pub(super) enum Failure {
    /// Memory that is not there was touched.
    Fault(u64),
    /// A thread trapped.
    Trap,
    /// It took too long.
    Late,
    /// It could not run, for this reason.
    Other(String),
}

/// A kernel for launches of a shape.
pub(super) struct Compiled {
    artifact: Artifact,
    kernel: Arc<CpuKernel>,
    signature: Signature,
    parameters_in_memory: bool,
    prints: bool,
    traps: bool,
}

impl Compiled {
    /// Compiles it, or says why that can't be.
    pub(super) fn new(translated: Translated) -> Result<Self, String> {
        let machine = MACHINE.as_ref().map_err(Clone::clone)?;
        let compiled =
            machine.compiler.compile_module(&translated.module).map_err(|error| error.to_string())?;
        let artifact = compiled.first().ok_or("it was compiled to nothing")?.artifact().clone();
        let kernel = machine.accelerator.load(&artifact).map_err(|error| error.to_string())?;
        let Translated { signature, parameters_in_memory, prints, traps, .. } = translated;
        Ok(Self { artifact, kernel, signature, parameters_in_memory, prints, traps })
    }

    /// Must the block of parameters be in the arena?
    pub(super) fn parameters_in_memory(&self) -> bool {
        self.parameters_in_memory
    }

    /// Does it print?
    pub(super) fn prints(&self) -> bool {
        self.prints
    }

    pub(super) fn name(&self) -> &str {
        self.kernel.name()
    }

    /// Runs a grid with this block of parameters, which is at this address too where it must be, with the arena as its memory, and waits for its end.
    /// What it prints goes to the ring. A kernel that traps writes to the page `trap`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn launch(
        &self,
        grid: [u32; 3],
        parameters: &[u8],
        block: Option<u64>,
        ring: Option<&Ring>,
        arena: &Range<u64>,
        trap: &Range<u64>,
        timer: &Timer,
    ) -> Result<(), Failure> {
        let other = |error: vm_accel::Error| Failure::Other(error.to_string());
        let machine = MACHINE.as_ref().map_err(|reason| Failure::Other(reason.clone()))?;
        let len = arena.end - arena.start;
        // SAFETY: the arena is reserved as long as the process is, what is behind it the program has registered for kernels, and neither is freed by this
        // value; where no memory is in it, accesses fault, which `run_within` is told.
        let memory = unsafe { Memory::from_raw(MemoryKind::Device, arena.start, 0, len) };
        let flag = timer.stop.as_ptr() as u64;
        // SAFETY: the flag is the timer's, which outlives the launch, and is reached as an atomic only.
        let flag = unsafe { Memory::from_raw(MemoryKind::Pinned, flag, flag, 4) };
        let scalars = self.signature.scalars.iter().zip(self.signature.arguments(parameters));
        let scalars =
            scalars.map(|(word, bits)| QueueArgument::Scalar(Scalar::from_bits(bits, word.scalar.bytes())));
        let first = [
            QueueArgument::View(memory.region(), Extents::WHOLE),
            QueueArgument::Scalar(Scalar::from_bits(arena.start, 8)),
            QueueArgument::Scalar(Scalar::from_bits(block.map_or(0, |block| block - arena.start), 8)),
        ];
        let ring = ring.map(|ring| [ring.address() - arena.start, ring.mask()]);
        let ring = ring.into_iter().flatten().chain(self.traps.then(|| trap.start - arena.start));
        let ring = ring.map(|bits| QueueArgument::Scalar(Scalar::from_bits(bits, 8)));
        let mut arguments =
            Arguments::new(&self.artifact, first.into_iter().chain(scalars).chain(ring)).map_err(other)?;
        arguments.guard(&self.artifact, flag.region(), FUEL).map_err(other)?;
        // SAFETY: the memory that the arguments name is the arena, of which pages may be missing, and the flag, which is set.
        let ran = unsafe { machine.accelerator.run_within(&self.kernel, Grid(grid), &arguments, arena) };
        match ran.map_err(other)? {
            Some(at) if trap.contains(&at) => Err(Failure::Trap),
            Some(at) => Err(Failure::Fault(at)),
            None if timer.is_late() => Err(Failure::Late),
            None => Ok(()),
        }
    }
}

/// Launches that run, each with the end of its time.
#[derive(Default)]
struct Timers {
    running: Mutex<Vec<(Instant, Arc<AtomicU32>)>>,
    changed: Condvar,
}

static TIMERS: LazyLock<Timers> = LazyLock::new(|| {
    // Without the thread nothing ends a kernel, as on a GPU.
    let _ = thread::Builder::new().name("vm-cuda timer".into()).spawn(|| TIMERS.serve());
    Timers::default()
});

impl Timers {
    /// Stops what runs too long.
    fn serve(&self) {
        let mut running = lock(&self.running);
        loop {
            let now = Instant::now();
            running
                .iter()
                .filter(|(end, _)| *end <= now)
                .for_each(|(_, stop)| stop.store(vm_accel::Guard::STOP, Ordering::Release));
            let next = running.iter().map(|(end, _)| *end).filter(|end| *end > now).min();
            running = match next {
                Some(end) => {
                    self.changed.wait_timeout(running, end - now).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(running).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

/// The time limit of a launch and of collecting its output. Stops the launch at the limit.
pub(super) struct Timer {
    /// The cancel flag, which a fault sets too.
    stop: Arc<AtomicU32>,
    end: Instant,
}

impl Timer {
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicU32::new(0));
        let end = Instant::now() + state::config().settings.kernel_time;
        let mut running = lock(&TIMERS.running);
        running.push((end, Arc::clone(&stop)));
        // The thread is awake before the end of those that run already.
        if running.len() == 1 {
            TIMERS.changed.notify_one();
        }
        Self { stop, end }
    }

    /// Returns whether the limit has passed.
    pub(super) fn is_late(&self) -> bool {
        Instant::now() >= self.end
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        lock(&TIMERS.running).retain(|(_, stop)| !Arc::ptr_eq(stop, &self.stop));
    }
}
