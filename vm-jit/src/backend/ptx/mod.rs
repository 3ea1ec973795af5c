//! PTX for NVIDIA GPUs, sm_70 to sm_121.
//!
//! * [`arch`](Arch): architectures and PTX versions.
//! * `legal`: the table of what PTX has.
//! * `writer`: a kernel, its parameters and its ops in order; `control` its regions; `negation` what a loop of them
//!   needs.
//! * `cluster`: blocks that run at the same time and exchange values.
//! * `value`, `convert`, `function`: ops on values; `memory`: views, shared arrays and
//!   atomics; `zero`: a guest's shared memory at first; `warp`: ops between threads.
//! * `tile`: kernels of tiles.
//! * `asm`: the text; `size`: how long it becomes.
//!
//! # How values live in registers
//!
//! | type | register |
//! | --- | --- |
//! | bool | predicate |
//! | i8, i16, fp8 | 32 bits, filled with zeros |
//! | f16, bf16 | 16 bits |
//! | i32, f32 | 32 bits |
//! | i64, f64 | 64 bits |
//!
//! A vector is a register for each lane. Moves between types of one width, splats and extracts cost nothing:
//! the result is the operand's register. Vector accesses become accesses of up to 16 bytes, as wide as the
//! index is known to be aligned.

mod arch;
mod asm;
mod cluster;
mod control;
mod convert;
mod function;
mod legal;
mod memory;
mod negation;
mod size;
mod tile;
mod triple;
mod value;
mod warp;
mod writer;
mod zero;

use arch::Feature;
pub use arch::{Arch, UnknownArch, Version};

use crate::artifact::{self, Artifact, Format};
use crate::contain::{self, Phase};
use crate::legal::Way;
use crate::reject::{Reject, RejectKind, Rejected};
use crate::safety::{Parameters, SafetyPlan, Unrolling, cost::Costs};
use std::fmt;
use vm_ir::op::{Accuracy, Opcode};
use vm_ir::{Kernel, Scalar, ValidModule};

/// Shared memory that a kernel can have without its launch asking for it.
const STATIC_SHARED: u64 = 48 * 1024;
/// The first PTX version with [`vm_abi::MAX_PARAMETER_BYTES`].
const LARGE_PARAMETERS: Version = Version::new(8, 1);

/// What a kernel becomes, for its safety plan. Blocks that gather can't be cancelled, for one that has left can't be written to.
pub(crate) fn safety(options: &Options) -> Parameters {
    Parameters {
        costs: Costs::Ptx(options.arch, options.version()),
        unrolling: Some(Unrolling { size: size::instructions, copy: size::COPY, budget: 1 << 15 }),
        interval: 1 << 20,
        in_loops: 1 << 20,
        straight: None,
        cancels_clusters: false,
    }
}

/// Options that change the result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// What it is for.
    pub arch: Arch,
    /// The newest PTX that the driver takes; `None` if any will do. See [`Version::of_driver`].
    pub max_version: Option<Version>,
    /// The name of the file that lines are in; with one, the code says for every op which line it is from,
    /// for profilers and debuggers. Characters that a PTX string can't hold are written as `_`.
    pub source: Option<String>,
}

impl Options {
    /// No cap on the version, no lines.
    pub fn new(arch: Arch) -> Options {
        Options { arch, max_version: None, source: None }
    }

    /// The PTX version to write.
    pub fn version(&self) -> Version {
        let preferred = self.arch.preferred_version();
        self.max_version.map_or(preferred, |max| max.min(preferred))
    }

    /// Has the target an instruction?
    fn has(&self, feature: Feature) -> bool {
        self.arch.has(feature, self.version())
    }

    fn source_name(&self) -> Option<String> {
        let clean = |c: char| if c.is_ascii_graphic() && c != '"' && c != '\\' { c } else { '_' };
        self.source.as_ref().map(|name| name.chars().map(clean).collect())
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.arch)?;
        if let Some(version) = self.max_version {
            write!(f, ",max-version={version}")?;
        }
        if let Some(source) = self.source_name() {
            write!(f, ",source={source}")?;
        }
        Ok(())
    }
}

pub(crate) fn way(options: &Options, op: Opcode, _: Accuracy, ty: Scalar, to: Scalar) -> Way {
    legal::way(options.arch, options.version(), op, ty, to)
}

/// Does it have an op on a type?
pub(crate) fn is_native(arch: Arch, version: Version, op: Opcode, ty: Scalar, to: Scalar) -> bool {
    matches!(legal::way(arch, version, op, ty, to), Way::Native)
}

/// What the head of a kernel, or what it is of tiles, asks for and the target does not have, with the lines.
pub(crate) fn rejects(options: &Options, kernel: &Kernel) -> Vec<(u32, RejectKind)> {
    let mut found = Vec::new();
    let (arch, version) = (options.arch, options.version());
    if version < arch.first_version() {
        found.push(RejectKind::Version {
            target: arch.to_string(),
            needed: format!("PTX {}", arch.first_version()),
            available: format!("PTX {version}"),
        });
    }
    let needed = kernel.shared().iter().fold(0u64, |sum, array| sum.saturating_add(array.bytes()));
    let needed = needed + if cluster::gathers(kernel.body()) { u64::from(cluster::BARRIER_BYTES) } else { 0 };
    if needed > arch.shared_bytes() {
        found.push(RejectKind::SharedMemory {
            target: arch.to_string(),
            needed,
            available: arch.shared_bytes(),
        });
    }
    found.extend(super::local_reject(kernel, &arch.to_string()));
    // What a tile kernel means does not depend on its clusters.
    if kernel.cluster() > 1 && kernel.tile().is_none() && !options.has(Feature::Cluster) {
        let (target, blocks) = (format!("{arch} with PTX {version}"), kernel.cluster());
        found.push(RejectKind::Cluster { target, blocks });
    }
    let way = kernel.tile().map(|tile| tile::Way::of(options, kernel, tile));
    let needed = match &way {
        Some(way) => way.parameter_bytes(kernel),
        None => artifact::layout(kernel, &[], true).bytes,
    };
    let large = version >= LARGE_PARAMETERS;
    let available = if large { vm_abi::MAX_PARAMETER_BYTES } else { vm_abi::PARAMETER_BYTES };
    if needed > available {
        found.push(RejectKind::Parameters { needed, available });
    }
    let of_tiles = way.map_or_else(Vec::new, tile::Way::rejects);
    found.into_iter().map(|kind| (kernel.line().0, kind)).chain(of_tiles).collect()
}

/// Writes a module that the target does not reject.
///
/// # Errors
///
/// Kernels that come to too many instructions; those of a guest that may be stopped in a loop and whose blocks write into
/// each other: a block that has left can't be written to.
pub(crate) fn write(module: &ValidModule, options: &Options, target: String) -> Result<Artifact, Rejected> {
    let mut text = String::with_capacity(16 << 10);
    let entries = writer::module(module, options, &mut text)?;
    Ok(Artifact { target, format: Format::Ptx, code: text.into_bytes(), entries })
}

/// The safety plans of a module's kernels.
fn plans<'k>(module: &'k ValidModule, options: &Options) -> Result<Vec<SafetyPlan<'k>>, Rejected> {
    let mut plans = Vec::new();
    let mut rejects = Vec::new();
    for kernel in contain::each(module, Phase::Write) {
        match SafetyPlan::of(kernel, module.trust(), &safety(options)) {
            Ok(plan) => {
                if kernel.cluster() > 1 && cluster::gathers(kernel.body()) && plan.cancellable() {
                    rejects.push(Reject::new(kernel, kernel.line().0, RejectKind::StoppedCluster));
                }
                plans.push(plan);
            }
            Err(reject) => rejects.push(reject),
        }
    }
    if rejects.is_empty() { Ok(plans) } else { Err(Rejected(rejects)) }
}
