//! The accelerators that a worker can open.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vm_accel::{Artifact, PoolOptions, QueueOptions, Worker, WorkerOptions};
use vm_ir::{Trust, ValidModule};
use vm_passthrough::accelerator::{JitCompiler, JitTarget};
#[cfg(feature = "rocm")]
use vm_passthrough::accelerator::{RocmAccelerator, rocm::Roots};
use vm_passthrough::{DeviceType, Host, pci};

use super::link::AnyLink;
use super::npu::{self, Folder};
use super::server::{Compile, Compiler, GRACE};
use super::session::{self, Guest};
#[cfg(feature = "rocm")]
use crate::accelerators::assembler::Remote;
use crate::os::sandbox::{self, Measures, Nodes};

/// What a worker's process may hold beside the accelerator's memory: what compiling takes, most of all.
const OWN_MEMORY: u64 = 1 << 30;
/// What it may hold for each processor: a thread that runs kernels has a stack of 64 MiB.
const THREAD_MEMORY: u64 = 80 << 20;
/// What a driver's library may hold of the host's memory.
const DRIVER_MEMORY: u64 = 32 << 30;
/// What an NPU's libraries may hold of it, beside the guest's quota: what compiling a model takes, most of all.
const LIBRARY_MEMORY: u64 = 8 << 30;
/// What the pool may keep of freed memory beyond the guest's quota, so that the next buffer need not wait for the device.
const KEPT: u64 = 64 << 20;
/// How long the accelerator's thread polls for more to do before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Commands that may wait for the accelerator.
const CAPACITY: usize = 4096;

/// Serves a link until it ends.
pub(super) type Serve = dyn Fn(AnyLink, &Guest) -> Result<(), String> + Send + Sync;

/// An open accelerator.
pub(super) struct Opened {
    /// The product's name.
    pub(super) name: String,
    /// What code is compiled for.
    pub(super) target: String,
    /// Serves a link with it.
    pub(super) serve: Arc<Serve>,
}

/// Which accelerator a device is.
pub(super) enum Kind {
    /// The processor.
    Cpu,
    /// An NPU, by its number and the folder of its libraries.
    Npu(String, Option<Folder>),
    /// A GPU whose driver compiles in this process.
    Nvidia,
    /// One of AMD's, and what assembles for it in a process of its own.
    #[cfg(feature = "rocm")]
    Amd(Remote),
}

impl Kind {
    /// What `cpu` is, an NPU by its number, or the GPU at a PCI address. What must be a process of its own is started: later none can be.
    ///
    /// # Errors
    /// Why there is none, and what to do.
    pub(super) fn of(device: &str, measures: Measures) -> Result<Self, String> {
        if device == "cpu" {
            return Ok(Self::Cpu);
        }
        if let Some(number) = device.strip_prefix("npu:") {
            return Ok(Self::Npu(number.to_owned(), npu::folder()?));
        }
        let address = device.parse().map_err(|error: pci::ParsePciAddressError| error.to_string())?;
        let function = pci::read_function(&Host::system(), address);
        match function.map(|function| function.device_type) {
            Ok(DeviceType::GpuAmd) => Self::amd(device, measures),
            // CUDA says what is wrong with others.
            _ => Ok(Self::Nvidia),
        }
    }

    /// The device nodes that it needs.
    pub(super) fn nodes(&self) -> Nodes {
        match self {
            Self::Cpu => Nodes::None,
            Self::Npu(..) => Nodes::Npu,
            Self::Nvidia => Nodes::Nvidia,
            #[cfg(feature = "rocm")]
            Self::Amd(_) => Nodes::Amd,
        }
    }

    /// What an NPU's libraries are read below.
    pub(super) fn folder(&self) -> Option<&Path> {
        match self {
            Self::Npu(_, folder) => folder.as_ref().map(|folder| &*folder.path),
            _ => None,
        }
    }

    #[cfg(feature = "rocm")]
    fn amd(_device: &str, measures: Measures) -> Result<Self, String> {
        Remote::start(measures).map(Self::Amd)
    }

    #[cfg(not(feature = "rocm"))]
    fn amd(device: &str, _measures: Measures) -> Result<Self, String> {
        Err(without(device, "rocm"))
    }
}

#[cfg(not(all(feature = "cuda", feature = "rocm")))]
fn without(device: &str, feature: &str) -> String {
    format!(
        "this vm-service was built without an accelerator for {device}; build it with `--features {feature}`"
    )
}

/// Opens `cpu`, an NPU, or the GPU at a PCI address, for a guest with `ram` bytes of RAM that may use `memory` bytes of it and `deadline`
/// for a launch.
///
/// # Errors
/// Why it can't be, and what to do.
pub(super) fn open(
    kind: Kind,
    address: &str,
    ram: u64,
    memory: u64,
    deadline: Duration,
) -> Result<Opened, String> {
    match kind {
        Kind::Cpu => {
            let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
            // All of the RAM is mapped for the queue, and once more for the guest's buffers.
            let mapped = ram.saturating_mul(2);
            let own = memory.saturating_add(OWN_MEMORY + threads * THREAD_MEMORY);
            sandbox::limit_memory(own, Some(mapped))?;
            open_cpu(memory, deadline)
        }
        Kind::Npu(number, folder) => {
            sandbox::limit_memory(memory.saturating_add(LIBRARY_MEMORY), None)?;
            npu::open(&number, folder.as_ref(), memory, deadline)
        }
        Kind::Nvidia => {
            sandbox::limit_memory(DRIVER_MEMORY, None)?;
            open_nvidia(address, memory, deadline)
        }
        #[cfg(feature = "rocm")]
        Kind::Amd(assembler) => {
            sandbox::limit_memory(DRIVER_MEMORY, None)?;
            open_amd(&Roots::system(), address, memory, deadline, assembler)
        }
    }
}

#[cfg(feature = "cpu")]
fn open_cpu(memory: u64, deadline: Duration) -> Result<Opened, String> {
    let cpu = vm_passthrough::accelerator::CpuAccelerator::new().map_err(|error| error.to_string())?;
    opened(cpu, memory, deadline, |compiler| compiler)
}

#[cfg(not(feature = "cpu"))]
fn open_cpu(_memory: u64, _deadline: Duration) -> Result<Opened, String> {
    Err("this vm-service was built without the CPU's accelerator; build it with `--features cpu`".into())
}

#[cfg(feature = "cuda")]
fn open_nvidia(address: &str, memory: u64, deadline: Duration) -> Result<Opened, String> {
    let gpu = vm_passthrough::accelerator::CudaAccelerator::at(address).map_err(|error| error.to_string())?;
    // The driver compiles PTX when it is loaded: this process is the one with limits on time and memory.
    opened(gpu, memory, deadline, |compiler| compiler.assembler(None))
}

#[cfg(not(feature = "cuda"))]
fn open_nvidia(address: &str, _memory: u64, _deadline: Duration) -> Result<Opened, String> {
    Err(without(address, "cuda"))
}

#[cfg(feature = "rocm")]
pub(super) fn open_amd(
    roots: &Roots,
    address: &str,
    memory: u64,
    deadline: Duration,
    assembler: Remote,
) -> Result<Opened, String> {
    let gpu = RocmAccelerator::at(roots, address).map_err(|error| error.to_string())?;
    opened(gpu, memory, deadline, |compiler| compiler.assembler(Some(Arc::new(assembler))))
}

/// How the accelerator's thread works for a guest.
pub(super) fn options(memory: u64, deadline: Duration) -> WorkerOptions {
    WorkerOptions {
        name: "accelerator".into(),
        capacity: CAPACITY,
        // A guest that waits for one small launch at a time is answered sooner.
        spin: SPIN,
        queue: QueueOptions { timeout: deadline.saturating_add(GRACE), keep_bytes: 0 },
        // The quota is counted by who allocates the buffers; this counts what they left behind too, and what is lost by
        // rounding.
        pool: PoolOptions { zero: true, limit: memory.saturating_add(KEPT) },
        ..WorkerOptions::default()
    }
}

/// Starts an accelerator's worker, and runs through everything once that it loads when it is first used, as the process
/// is confined afterwards.
#[allow(dead_code, reason = "which accelerators there are is the build's choice")]
fn opened<A: JitTarget>(
    accelerator: A,
    memory: u64,
    deadline: Duration,
    adjust: impl FnOnce(JitCompiler<A>) -> JitCompiler<A>,
) -> Result<Opened, String> {
    let accelerator = Arc::new(accelerator);
    let name = accelerator.info().name.clone();
    let target = accelerator.target().map_err(|error| error.to_string())?.to_string();
    let compiler = adjust(JitCompiler::new(accelerator.clone()));
    let worker: Worker<A> =
        Worker::start(accelerator, options(memory, deadline)).map_err(|error| error.to_string())?;
    let compiler = Jit { compiler, target: target.clone() };
    warm_up(&worker, &compiler, deadline).map_err(|error| format!("its first kernel failed: {error}"))?;
    let compiler = Compiler::Kernels(Arc::new(compiler));
    Ok(Opened {
        name,
        target,
        serve: Arc::new(move |link, guest| match link {
            AnyLink::Queue(ring) => session::serve(&worker, compiler.clone(), ring, guest),
            AnyLink::Stream(stream) => session::serve(&worker, compiler.clone(), stream, guest),
        }),
    })
}

/// A small kernel.
pub(super) const WARM_UP: &str = "vir 1
    kernel @warm_up(@x: view<f32, [?], readwrite>) at 0x0 block(32) {
      %i = global_id.x : i64
      %v = load @x[%i] : f32
      %e = exp %v : f32
      store @x[%i], %e
    }";

/// Compiles and runs it.
fn warm_up<A: JitTarget>(worker: &Worker<A>, compiler: &Jit<A>, deadline: Duration) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let module = vm_ir::text::parse(WARM_UP).map_err(|error| text(&error))?;
    let module = vm_ir::validate(module, Trust::Guest).map_err(|error| text(&error))?;
    for artifact in compiler.compile(&module)? {
        let kernel = worker.load(&artifact).map_err(|error| text(&error))?;
        let buffer = worker.allocate(4 * 64).map_err(|error| text(&error))?;
        worker.launch(&kernel, 2, &vm_accel::arguments![&buffer]).map_err(|error| text(&error))?;
        let mut result = [0f32; 64];
        worker.read(&buffer, &mut result).map_err(|error| text(&error))?;
        if result.iter().any(|value| *value != 1.0) {
            return Err(format!("it computed {} instead of 1", result[0]));
        }
    }
    worker.synchronize(deadline.saturating_add(GRACE)).map_err(|error| text(&error))
}

/// Compiles for an accelerator.
pub(super) struct Jit<A> {
    pub(super) compiler: JitCompiler<A>,
    pub(super) target: String,
}

impl<A: JitTarget> Compile for Jit<A> {
    fn target(&self) -> &str {
        &self.target
    }

    fn compile(&self, module: &ValidModule) -> Result<Vec<Artifact>, String> {
        let kernels = self.compiler.compile_module(module).map_err(|error| error.to_string())?;
        Ok(kernels.iter().map(|kernel| kernel.artifact().clone()).collect())
    }
}
