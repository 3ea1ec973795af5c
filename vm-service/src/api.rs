//! What `--json` prints: the wire types, and the way to them from the model.
//!
//! The schema in `docs/vm-service.schema.json` is generated from these types. Within one [`VERSION`], fields and
//! kinds of values are only added; readers ignore what they do not know.

mod benchmark;
mod claim;
mod egpu;
mod function;
mod gpu;
mod guest;
mod health;
mod kernel;
mod log;
mod npu;
mod part;
mod readiness;
mod request;
mod run;
mod telemetry;
mod tuning;
mod usage;
mod usb4;

use schemars::JsonSchema;
use serde::Serialize;

pub use benchmark::{
    BenchmarkChecks, BenchmarkDirection, BenchmarkLatency, BenchmarkLink, BenchmarkMemory, BenchmarkSpread,
    BenchmarkTransfer, EgpuBenchmark,
};
pub use claim::{Claim, ClaimState, ClaimedFunction, ListedClaim, Owner};
pub use egpu::{
    CheckVerdict, EgpuChange, EgpuCheck, EgpuInjection, EgpuPolicy, EgpuReport, EgpuSimulation, EgpuStep,
    EgpuWarning, KnownEnclosure, SimulatedChange,
};
pub(crate) use egpu::{action_of, fault_of};
pub use function::{
    Bar, BarKind, Capability, DeviceType, Function, Link, PhysicalFunction, PowerState, ResetMethod, Sriov,
};
pub use gpu::Chip;
pub use guest::{
    AttachedDevice, Confinement, DetachedDevice, DetachedHow, DeviceState, EventKind, GuestDevice,
    GuestEvent, GuestLog, GuestState, GuestStatus, LeftFunction, PeerState, PeerToPeer, Problem, Refusal,
    RefusalCode, StoppedGuest, StoppedHow,
};
pub use health::{DeviceErrors, DeviceHealth, DeviceInterrupts, ErrorCount, ErrorKind, LinkHealth};
pub use kernel::{
    Check, Compiled, CompiledKernel, KernelParameter, Launched, Legal, LegalOp, Note, OutOfBounds, Output,
    Reject, Repeated, Support, TargetInfo, Tuned, TunedLaunch, Variant, VariantOutcome,
};
pub use log::{LogCategory, LogLevel, LogRecord};
pub use npu::Npu;
pub use part::{Part, PartKind, PartType};
pub use readiness::{Blocker, Readiness, Severity};
pub(crate) use request::{
    Accept, Address, AttachOptions, AttachRequest, DetachHow, DetachOptions, DetachRequest, StartOptions,
    VfioBackend,
};
pub(crate) use run::milliseconds;
pub use run::{Exits, RunDevice, RunReport};
pub use telemetry::{GpuLink, GpuRates, GpuSample, GpuState, GpuStatus, GpuTelemetry};
pub use tuning::{GpuClock, GpuConfig, GpuFan, GpuPower};
pub use usage::{GpuProcess, Usage};
pub(crate) use usb4::INFERRED;
pub use usb4::{TunnelledFunction, Usb4Domain, Usb4Lanes, Usb4Port, Usb4Retimer, Usb4Router};

/// Version of the schema.
pub const VERSION: u32 = 1;

/// What one command prints on standard output with `--json`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(title = "Output of vm-service --json")]
pub struct Document {
    /// Version of this schema. Within one version, fields and kinds of values are only added.
    pub version: u32,
    /// Whether the host is a simulated one (`--sim`), or what was watched is (`egpu simulate`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub simulated: bool,
    /// The command's own part.
    #[serde(flatten)]
    pub body: Body,
}

impl Document {
    /// A document of the present version.
    pub fn new(body: Body) -> Self {
        Self { version: VERSION, simulated: matches!(body, Body::EgpuSimulation(_)), body }
    }
}

/// What each command prints.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Body {
    /// `list`: the functions, in order of their addresses.
    List {
        /// The functions.
        functions: Vec<ListedFunction>,
        /// Devices that run models, in the order in which `--device npu:N` numbers them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        npus: Vec<Npu>,
    },
    /// `info`: one function, or one NPU that is none.
    Info {
        /// The function; left out for an NPU that is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        function: Option<Box<ListedFunction>>,
        /// The NPU that was asked for by its number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        npu: Option<Npu>,
    },
    /// `explain`, and `claim`, `run` and `start` when a device can't be passed to a guest: what was found of each function.
    Explain {
        /// The functions that were asked for.
        functions: Vec<Readiness>,
    },
    /// `claim`: what is claimed now.
    Claim(Claim),
    /// `release`: what was released.
    Release {
        /// The function that was asked for; the first of several, null when none was claimed.
        address: Option<String>,
        /// All that were released.
        addresses: Vec<String>,
    },
    /// `claims`: the claims of this host.
    Claims {
        /// The claims, in order of their addresses.
        claims: Vec<ListedClaim>,
        /// Records that can't be read: which, why and what to do.
        unreadable: Vec<String>,
    },
    /// `vfs`: physical functions and their virtual functions; after `create` and `remove`, the one that was named.
    Vfs {
        /// The physical functions.
        physical: Vec<PhysicalFunction>,
    },
    /// `egpu info`: what is connected by USB4 and Thunderbolt.
    EgpuInfo {
        /// The domains, by number.
        domains: Vec<Usb4Domain>,
        /// The PCI functions that are behind a tunnel, in order of their addresses.
        functions: Vec<TunnelledFunction>,
    },
    /// `egpu connect`: what came of it.
    EgpuConnect(EgpuReport),
    /// `egpu disconnect`: what came of it.
    EgpuDisconnect(EgpuReport),
    /// `egpu reset`: what came of it.
    EgpuReset(EgpuReport),
    /// `egpu diag`: what was checked.
    EgpuDiag {
        /// UUID of the enclosure's router.
        enclosure: String,
        /// The checks.
        checks: Vec<EgpuCheck>,
    },
    /// `egpu policy` and `egpu forget`: what is allowed, and what is known.
    EgpuPolicy(EgpuPolicy),
    /// `egpu watch`: one step in the life of an enclosure; a document for each.
    EgpuChange(EgpuChange),
    /// A warning of `egpu watch`, in one document a line.
    EgpuWarning(EgpuWarning),
    /// `egpu simulate`: what became of a simulated eGPU.
    EgpuSimulation(EgpuSimulation),
    /// `egpu inject`: what was broken of a simulated enclosure, or healed.
    EgpuInjection(EgpuInjection),
    /// `egpu log`: one record of the log files; a document for each, on a line of its own.
    EgpuLog(LogRecord),
    /// `egpu status`: GPUs, those behind a tunnel first.
    EgpuStatus {
        /// The GPUs.
        gpus: Vec<GpuStatus>,
    },
    /// `egpu monitor`: GPUs at one moment; a document on a line of its own for each.
    EgpuMonitor {
        /// When that was, by UTC (RFC 3339).
        time: String,
        /// Seconds since the moment before; null at first.
        elapsed_seconds: Option<f64>,
        /// The GPUs, those behind a tunnel first.
        gpus: Vec<GpuSample>,
    },
    /// `egpu config`: what GPUs are set to, those behind a tunnel first; after one was set, that one, as it was read back.
    EgpuConfig {
        /// The GPUs.
        gpus: Vec<GpuConfig>,
    },
    /// `egpu benchmark`: how fast a GPU is.
    EgpuBenchmark(EgpuBenchmark),
    /// `bridge coverage`: the CUDA driver's functions, or those that a library names.
    Bridge {
        /// The library, with `--of`.
        #[serde(skip_serializing_if = "Option::is_none")]
        of: Option<BridgedConsumer>,
        /// The functions, in order of their names.
        functions: Vec<BridgedFunction>,
    },
    /// `bridge replay`: what a driver answers a recorded program.
    Replay {
        /// Calls that were made.
        calls: usize,
        /// Answers that were compared.
        answers: usize,
        /// How many are not as recorded.
        different: usize,
        /// The first hundred of those.
        differences: Vec<ReplayedCall>,
    },
    /// `run`: how the guest ran.
    Run(RunReport),
    /// `guests`: the guests that run.
    Guests {
        /// The guests, in order of their names.
        guests: Vec<GuestStatus>,
    },
    /// `start`: the guest, which runs.
    Start(GuestStatus),
    /// `status`: the guest.
    Status(GuestStatus),
    /// `stop`, and `start --wait`: the guest that has ended.
    Stop(StoppedGuest),
    /// `reset`: the guest that was reset.
    Reset {
        /// Its name.
        guest: String,
    },
    /// `attach`: what the guest got, and what keeps it from having the others.
    Attach {
        /// The guest's name.
        guest: String,
        /// The devices.
        devices: Vec<AttachedDevice>,
        /// What was found of those that can't be passed to it.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        blocked: Vec<Readiness>,
    },
    /// `detach`: what was taken from guests.
    Detach {
        /// The devices.
        devices: Vec<DetachedDevice>,
    },
    /// `events`: one event; a document for each.
    Event(GuestEvent),
    /// `logs`: a guest's log.
    Logs(GuestLog),
    /// `compile`: what became of the file.
    Compile(Compiled),
    /// `compile --legal`: how the target does what the file uses.
    Legal(Legal),
    /// `compile --list-targets`: what kernels can be compiled for.
    Targets {
        /// GPUs from old to new, then processors.
        targets: Vec<TargetInfo>,
    },
    /// `launch`: how the kernel ran, and what it wrote.
    Launch(Launched),
    /// `tune`: how fast the variants of a family are, and which was chosen.
    Tune(Tuned),
}

/// A function of the CUDA driver, and how it crosses the bridge.
#[derive(Debug, Serialize, JsonSchema)]
pub struct BridgedFunction {
    /// Its name, as the library exports it.
    pub name: String,
    /// The version of CUDA it came with: 11020 is 11.2.
    pub since: i32,
    /// `forwarded`, `by hand`, `answered in the program` or `not supported`.
    pub crosses: String,
    /// Why it is not supported, where a known library names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

/// A call of a recorded program that is answered in another way.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ReplayedCall {
    /// Its place in the recording, from 0.
    pub call: usize,
    /// Its function.
    pub function: &'static str,
    /// The result, of the driver's numbers.
    pub code: u32,
    /// The same as it was recorded.
    pub recorded_code: u32,
    /// Bytes that are returned.
    pub bytes: usize,
    /// The same as they were recorded.
    pub recorded_bytes: usize,
}

/// A library above the CUDA driver, and how many of the functions that it names cross the bridge.
#[derive(Debug, Serialize, JsonSchema)]
pub struct BridgedConsumer {
    /// What `--of` calls it.
    pub name: String,
    /// The packages that were looked at, as in `torch==2.9.1`.
    pub packages: Vec<String>,
    /// How many functions it names.
    pub names: usize,
    /// How many of them cross.
    pub supported: usize,
}

/// A function, and whether it can be passed to a guest.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ListedFunction {
    /// The function.
    #[serde(flatten)]
    pub function: Function,
    /// Whether nothing keeps it from being passed to a guest.
    pub ready: bool,
    /// What was found that keeps it from that, or should be known; blockers first.
    pub blockers: Vec<Blocker>,
    /// What uses it; null where nobody can be asked, and in lists without `--usage`.
    pub usage: Option<Usage>,
    /// The parts that it is divided into: vGPUs, mediated devices, MIG instances.
    pub parts: Vec<Part>,
    /// The types of parts that it could get. Only `info` asks for them; empty in lists.
    pub part_types: Vec<PartType>,
    /// Its state. Only `info` and the daemon's answer of one device have it; null in lists.
    pub health: Option<DeviceHealth>,
    /// Its chip, as its registers tell. Only `info --registers` reads them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chip: Option<Chip>,
}

impl ListedFunction {
    /// `function` with what was found of it.
    pub fn new(function: Function, readiness: &vm_passthrough::readiness::Readiness) -> Self {
        let Readiness { ready, blockers, .. } = readiness.into();
        Self {
            function,
            ready,
            blockers,
            usage: None,
            parts: Vec::new(),
            part_types: Vec::new(),
            health: None,
            chip: None,
        }
    }
}
