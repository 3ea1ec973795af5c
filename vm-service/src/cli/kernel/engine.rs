//! What runs a kernel: the interpreter, or an accelerator of this machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_ir::ValidModule;
use vm_ir::interp::{self, Argument, BoundsCounter, Launch, Limits, OutOfBounds};
#[cfg(feature = "cuda")]
use vm_passthrough::accelerator::{Assemble, CudaAccelerator, CudaAssembler, assemble::Assembler};
#[cfg(feature = "rocm")]
use vm_passthrough::accelerator::{
    RocmAccelerator,
    rocm::{self, Roots},
};
use vm_passthrough::claim::{ClaimError, SharedLease};
use vm_passthrough::manager::ManagerError;
use vm_passthrough::{DeviceType, Host, PassthroughManager, PciAddress, PciFunction, pci};

use super::args::DeviceArg;
use crate::failure::Failure;
use crate::text::describe;

/// What the first argument is when this program is not the operator's but an assembler's process: it then makes a cubin
/// of PTX, with limits that the process which started it has set.
#[cfg(feature = "cuda")]
pub(crate) const ASSEMBLE: &str = "assemble-ptx";

/// A launch that fits its kernel, and how long it may take.
#[derive(Clone, Debug)]
#[cfg_attr(
    not(any(feature = "cpu", feature = "cuda", feature = "rocm")),
    expect(dead_code, reason = "no accelerator asks")
)]
pub(crate) struct Task {
    /// The module that the kernel is in.
    pub(crate) module: ValidModule,
    /// The text of the module, by which errors show their lines; empty where there is none.
    pub(crate) source: Arc<str>,
    /// Kernel, grid and arguments.
    pub(crate) launch: Launch,
    /// When to stop it.
    pub(crate) deadline: Duration,
    /// The most iterations of loops that a thread of a guest's kernel may begin.
    pub(crate) fuel: Option<u64>,
    /// Where compiled kernels are kept.
    pub(crate) cache: Option<PathBuf>,
    /// How often it is launched again to be timed.
    pub(crate) repeat: Option<u32>,
}

impl Task {
    /// How often it is launched in all.
    pub(crate) fn launches(&self) -> u32 {
        self.repeat.unwrap_or(0).saturating_add(1)
    }
}

/// How a launch went.
#[derive(Clone, Debug)]
pub(crate) struct Ran {
    /// The arguments with what the kernel wrote, in their order.
    pub(crate) arguments: Vec<Argument>,
    /// What ran it.
    pub(crate) device: String,
    /// What it was compiled for; `None` where nothing was compiled.
    pub(crate) target: Option<String>,
    /// How long compiling and loading took, where it was compiled.
    pub(crate) compile: Option<Duration>,
    /// How long the kernel ran, as the host saw it.
    pub(crate) run: Duration,
    /// How long the launches took that were there to be timed.
    pub(crate) repeated: Option<Spread>,
    /// Ops with accesses out of bounds; `None` where nobody looked.
    pub(crate) out_of_bounds: Option<Vec<OutOfBounds>>,
}

/// How long some launches of a kernel took, as the host saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spread {
    /// How many there were.
    pub(crate) launches: u32,
    /// Half of them took no longer; of an even number, the mean of the two in the middle.
    pub(crate) median: Duration,
    /// The shortest.
    pub(crate) min: Duration,
    /// The longest.
    pub(crate) max: Duration,
}

impl Spread {
    /// The spread of times; `None` of none.
    pub(crate) fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let (min, max) = (*times.first()?, *times.last()?);
        let (low, high) = (times.get((times.len() - 1) / 2)?, times.get(times.len() / 2)?);
        let launches = u32::try_from(times.len()).unwrap_or(u32::MAX);
        Some(Self { launches, median: (*low + *high) / 2, min, max })
    }
}

/// Runs a task on a device.
///
/// # Errors
/// When the device is not there or the kernel does not end well; the message says which.
pub(crate) fn run(task: Task, device: DeviceArg, host: &Host) -> Result<Ran, Failure> {
    match device {
        DeviceArg::Interpreter => interpret(task),
        DeviceArg::Cpu => on_cpu(task),
        DeviceArg::Pci(address) => on_function(task, address, host),
        DeviceArg::Rocm(number) => on_function(task, numbered(number, host)?, host),
        DeviceArg::Npu(_) => Err(no_kernels()),
    }
}

/// Runs a task on the interpreter.
///
/// # Errors
/// As the interpreter says.
pub(crate) fn interpret(task: Task) -> Result<Ran, Failure> {
    tracing::debug!("the interpreter runs @{}, a step at a time", task.launch.kernel);
    // The deadline is the limit here: how many steps a kernel needs is the operator's to know.
    let deadline = Instant::now().checked_add(task.deadline);
    let limits = Limits { fuel: u64::MAX, deadline, ..Limits::default() };
    let mut times = Vec::new();
    let (mut arguments, mut out_of_bounds) = (Vec::new(), None);
    for _ in 0..task.launches() {
        let (mut launch, mut counter) = (task.launch.clone(), BoundsCounter::default());
        let start = Instant::now();
        interp::observe(&task.module, &mut launch, &limits, &mut counter).map_err(|error| match *error.kind {
            interp::RunErrorKind::Deadline => Failure::failed(format_args!(
                "{error}; the interpreter takes one step at a time: give it a smaller grid, or more time with --deadline"
            )),
            _ => Failure::failed(error.render(&task.source)),
        })?;
        times.push(start.elapsed());
        arguments = launch.arguments;
        out_of_bounds = Some(counter.found());
    }
    let run = times.remove(0);
    let repeated = Spread::of(times);
    let run = repeated.map_or(run, |spread| spread.median);
    let device = "interpreter".into();
    Ok(Ran { arguments, device, target: None, compile: None, run, repeated, out_of_bounds })
}

#[cfg(feature = "cpu")]
fn on_cpu(task: Task) -> Result<Ran, Failure> {
    let cpu = vm_passthrough::CpuAccelerator::new().map_err(Failure::failed)?;
    super::accelerated::run(task, cpu, |compiler| compiler)
}

#[cfg(not(feature = "cpu"))]
fn on_cpu(_: Task) -> Result<Ran, Failure> {
    Err(Failure::failed(
        "this vm-service was built without the cargo feature `cpu`; build it with --features cpu, or use --device \
         interpreter",
    ))
}

/// Runs a task on the accelerator that a PCI function is, which is shared meanwhile.
fn on_function(task: Task, address: PciAddress, host: &Host) -> Result<Ran, Failure> {
    let (kind, _lease) = share(address, host)?;
    match kind {
        DeviceType::GpuAmd => on_rocm(task, address, host),
        _ => on_cuda(task, address),
    }
}

/// Finds the GPU that a PCI function is, and keeps others from claiming it as [`lease`] says.
///
/// # Errors
/// When there is none there, or it can't be shared.
pub(super) fn share(address: PciAddress, host: &Host) -> Result<(DeviceType, Option<SharedLease>), Failure> {
    let function = pci::read_function(host, address).map_err(|error| match error {
        pci::ScanError::NotFound { .. } => Failure::failed(format_args!(
            "there is no PCI function {address} on this host; `vm-service list` shows its accelerators"
        )),
        error => Failure::failed(error),
    })?;
    if let Some(refusal) = refusal(&function) {
        return Err(refusal);
    }
    Ok((function.device_type, lease(address, host)?))
}

/// Why a function runs no kernels; `None` for a GPU of NVIDIA's or AMD's, which does.
pub(crate) fn refusal(function: &PciFunction) -> Option<Failure> {
    let address = function.address;
    match function.device_type {
        DeviceType::GpuNvidia | DeviceType::GpuAmd => None,
        DeviceType::Npu | DeviceType::Accelerator => Some(no_kernels()),
        _ => Some(Failure::failed(format_args!(
            "{address} ({}) is no accelerator that runs kernels; `vm-service list` shows those that there are, and \
             `vm-service launch --device cpu` runs anywhere",
            describe::name(function)
        ))),
    }
}

/// The lease that keeps others from claiming the function while a kernel runs on it. Who is not root has none, and can't
/// claim either.
pub(crate) fn lease(address: PciAddress, host: &Host) -> Result<Option<SharedLease>, Failure> {
    let manager = PassthroughManager::with_host(host.clone()).map_err(Failure::failed)?;
    match manager.share(address) {
        Ok(lease) => Ok(Some(lease)),
        Err(ManagerError::Claim(ClaimError::Ledger(error))) if !rustix::process::geteuid().is_root() => {
            tracing::debug!("the use of {address} is not recorded for others: {error}");
            Ok(None)
        }
        Err(error) => Err(Failure::failed(error)),
    }
}

#[cfg(feature = "cuda")]
fn on_cuda(task: Task, address: PciAddress) -> Result<Ran, Failure> {
    let (gpu, assembler) = cuda(address)?;
    super::accelerated::run(task, gpu, |compiler| compiler.assembler(assembler))
}

/// An NVIDIA GPU, and what assembles for it.
///
/// # Errors
/// When there is no driver that can be used, or it does not have that GPU.
#[cfg(feature = "cuda")]
pub(crate) fn cuda(address: PciAddress) -> Result<(CudaAccelerator, Option<Arc<dyn Assemble>>), Failure> {
    let gpu = CudaAccelerator::at(&address.to_string()).map_err(Failure::failed)?;
    // Where there is no ptxas, this program is the assembler's process (see `ASSEMBLE`).
    let own = || Some(Assembler::driver(std::env::current_exe().ok()?, [ASSEMBLE.into()]));
    let assembler = Assembler::find().ok().or_else(own);
    Ok((gpu, assembler.map(|found| Arc::new(CudaAssembler(found)) as Arc<dyn Assemble>)))
}

#[cfg(not(feature = "cuda"))]
fn on_cuda(_: Task, address: PciAddress) -> Result<Ran, Failure> {
    Err(without(address, "cuda"))
}

#[cfg(feature = "rocm")]
fn on_rocm(task: Task, address: PciAddress, host: &Host) -> Result<Ran, Failure> {
    super::accelerated::run(task, rocm(address, host)?, |compiler| compiler)
}

/// An AMD GPU, to run kernels.
///
/// # Errors
/// When the compute driver does not list it, or there is no HIP that can be used or has it.
#[cfg(feature = "rocm")]
pub(crate) fn rocm(address: PciAddress, host: &Host) -> Result<RocmAccelerator, Failure> {
    RocmAccelerator::at(&roots(host), &address.to_string()).map_err(Failure::failed)
}

#[cfg(feature = "rocm")]
fn roots(host: &Host) -> Roots {
    Roots { sys: host.sys.clone(), dev: host.dev.clone() }
}

/// Where the AMD GPU is that the compute driver lists in this place, from 0 on.
///
/// # Errors
/// When it does not list so many, or none at all.
#[cfg(feature = "rocm")]
pub(super) fn numbered(number: usize, host: &Host) -> Result<PciAddress, Failure> {
    let listed = rocm::devices(&roots(host)).map_err(Failure::failed)?;
    let device = listed.get(number).ok_or_else(|| {
        Failure::failed(format_args!(
            "there is no rocm:{number}: the compute driver lists {} of AMD's GPUs, counted from 0; `vm-service list` shows \
             which there are",
            listed.len()
        ))
    })?;
    device.address.parse().map_err(Failure::failed)
}

#[cfg(not(feature = "rocm"))]
fn on_rocm(_: Task, address: PciAddress, _: &Host) -> Result<Ran, Failure> {
    Err(without(address, "rocm"))
}

#[cfg(not(feature = "rocm"))]
pub(super) fn numbered(number: usize, _: &Host) -> Result<PciAddress, Failure> {
    Err(without(format_args!("rocm:{number}"), "rocm"))
}

fn no_kernels() -> Failure {
    Failure::failed(
        "an NPU runs models, not kernels of threads: `vm-service launch MODEL --device npu:0`; or run the kernel with --device cpu",
    )
}

#[cfg(not(all(feature = "cuda", feature = "rocm")))]
pub(crate) fn without(device: impl std::fmt::Display, feature: &str) -> Failure {
    Failure::failed(format_args!(
        "{device} needs the cargo feature `{feature}`, which this vm-service was built without; build it with \
         --features {feature}, or use --device cpu"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_middle_and_the_ends() {
        let check = |times: &[u64], expect: Option<(u32, u64, u64, u64)>| {
            let spread = Spread::of(times.iter().map(|time| Duration::from_micros(*time)).collect());
            let micros = |time: Duration| time.as_micros() as u64;
            let found = spread.map(|s| (s.launches, micros(s.median), micros(s.min), micros(s.max)));
            assert_eq!(found, expect, "{times:?}");
        };
        check(&[], None);
        check(&[7], Some((1, 7, 7, 7)));
        check(&[40, 10, 30], Some((3, 30, 10, 40)));
        check(&[40, 10, 30, 20], Some((4, 25, 10, 40)));
    }
}
