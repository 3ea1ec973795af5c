//! Enclosures: what became of them, and what is allowed.

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::egpu;

/// What came of a command on an enclosure.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EgpuReport {
    /// UUID of its router, which it keeps wherever it is connected.
    pub enclosure: String,
    /// Its name, as it says it.
    pub name: String,
    /// Its router, as in `0-1`; null where it is not connected any more.
    pub router: Option<String>,
    /// Where it is now: `absent`, `disconnected`, `authorising`, `enumerating`, `verifying`, `ready`, `in-use`, `degraded`,
    /// `recovering`, `draining` or `failed`.
    pub state: String,
    /// Why it has failed: `not-authorised`, `not-enumerated`, `unsound`, `unrecovered`, `overheated`,
    /// `not-stopped`, `stuck` or `not-deauthorised`.
    pub fault: Option<String>,
    /// Addresses of its PCI functions that are no bridges.
    pub functions: Vec<String>,
    /// How it is known that they are its functions: `inferred`, as Linux does not say which router a function is behind.
    pub functions_basis: String,
    /// The guest that it was given to.
    pub guest: Option<String>,
    /// The way there.
    pub steps: Vec<EgpuStep>,
}

/// A step on the way.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EgpuStep {
    /// Where it was then.
    pub state: String,
    /// What was done there: `authorise`, `enumerate`, `verify`, `stop-work`, `detach`, `unbind`, `deauthorise`, `soft-reset`,
    /// `hard-reset` or `reconnect`.
    pub action: Option<String>,
    /// Milliseconds since the command began.
    pub milliseconds: f64,
    /// Why, where something had failed; or which users were ended.
    pub error: Option<String>,
}

/// A step in the life of an enclosure.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EgpuChange {
    /// UUID of its router.
    pub enclosure: String,
    /// Its name, as it says it.
    pub name: String,
    /// When, as RFC 3339 has it, in UTC.
    pub time: String,
    /// Where it was.
    pub from: String,
    /// Where it is.
    pub state: String,
    /// What is done there: `authorise`, `enumerate`, `verify`, `stop-work`, `detach`, `release`, `unbind`, `deauthorise`,
    /// `soft-reset`, `hard-reset` or `reconnect`.
    pub action: Option<String>,
    /// Why it has failed, where it has.
    pub fault: Option<String>,
    /// Why, where something had failed; or which users were ended.
    pub error: Option<String>,
}

/// A warning of `egpu watch`, or that it does not hold any more.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EgpuWarning {
    /// UUID of the enclosure's router; null where it is about all.
    pub enclosure: Option<String>,
    /// Its name, as it says it.
    pub name: Option<String>,
    /// When, as RFC 3339 has it, in UTC.
    pub time: String,
    /// What is wrong, or was.
    pub warning: String,
    /// Whether its cause has ended. A warning is withdrawn with the text that it was raised with.
    pub withdrawn: bool,
}

/// What became of a simulated eGPU.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EgpuSimulation {
    /// What chance began with.
    pub seed: u64,
    /// How long it was watched, in seconds of virtual time.
    pub seconds: f64,
    /// Its life.
    pub changes: Vec<SimulatedChange>,
    /// Where it is at the end.
    pub state: String,
    /// Why it has failed, where it has.
    pub fault: Option<String>,
    /// Which users lost it by an action, not by a fault, as in `job 7 by detach by force`.
    pub cut: Vec<String>,
    /// Tunnels at the end, 0 or 1.
    pub tunnels: usize,
    /// PCI functions that the host has of it at the end.
    pub functions: usize,
    /// Those that are bound to a driver.
    pub bindings: usize,
    /// Those that are claimed for a guest.
    pub claims: usize,
    /// Work of the host that runs on it, and guests that have it.
    pub users: usize,
}

/// A step in the life of a simulated eGPU.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SimulatedChange {
    /// Milliseconds of virtual time at which it began.
    pub milliseconds: f64,
    /// Where it was.
    pub from: String,
    /// Where it is.
    pub state: String,
    /// What is done there: `authorise`, `enumerate`, `verify`, `stop-work`, `detach`, `release`, `unbind`, `deauthorise`,
    /// `soft-reset`, `hard-reset` or `reconnect`.
    pub action: Option<String>,
    /// Why it has failed, where it has.
    pub fault: Option<String>,
    /// Why, where something had failed; or which users were ended.
    pub error: Option<String>,
}

/// A fault of an enclosure of a simulated host.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EgpuInjection {
    /// The enclosure's router, as in `0-1`.
    pub router: String,
    /// The fault, in the words of a script for `egpu simulate`.
    pub fault: String,
}

/// What is allowed of enclosures, and which are known.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EgpuPolicy {
    /// Which are authorised: `never`, `ask`, `known` or `always`.
    pub authorise: String,
    /// Whether only where the IOMMU keeps them from the host's memory.
    pub dma_protection: bool,
    /// The slowest link, in Mbit/s.
    pub minimum_megabits: u32,
    /// The least power of their slots, in watts.
    pub minimum_watts: u32,
    /// Those that are known.
    pub known: Vec<KnownEnclosure>,
}

/// An enclosure that is known.
#[derive(Debug, Serialize, JsonSchema)]
pub struct KnownEnclosure {
    /// UUID of its router.
    pub enclosure: String,
    /// The name that it had.
    pub name: String,
    /// What was in it: vendor, device, subsystem and revision, as in `10de:2684 1043:889a a1`.
    pub accelerators: Vec<String>,
    /// The guest that gets it whenever it comes.
    pub guest: Option<String>,
}

/// One check of an enclosure, or of what it needs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EgpuCheck {
    /// What was checked: `system`, `drivers`, `eGPU`, `tunnel`, `integrity` or `health`.
    pub name: String,
    /// The worst of what was found.
    pub verdict: CheckVerdict,
    /// What was found.
    pub evidence: Vec<String>,
    /// What to do, for each thing that is not as it should be.
    pub remedies: Vec<String>,
}

/// What came of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// All is as it should be.
    Passed,
    /// Something may make trouble.
    Warning,
    /// Something is wrong.
    Failed,
}

/// What a state waits for, in a word.
pub(crate) fn action_of(state: egpu::State) -> Option<String> {
    state.awaited().map(|action| action.to_string())
}

/// Why an enclosure has failed, in a word.
pub(crate) fn fault_of(state: egpu::State) -> Option<String> {
    match state {
        egpu::State::Failed(fault) => Some(fault.to_string()),
        _ => None,
    }
}
