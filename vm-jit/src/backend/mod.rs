//! Targets: what a module is compiled for. Each has a module of its own, of one shape: `mod.rs` says what it
//! does and has its options, `writer.rs` writes.

pub mod amdgcn;
#[cfg(feature = "cpu")]
pub mod cpu;
mod flow;
pub(crate) mod ir;
mod place;
pub mod ptx;
mod stage;

use std::fmt;
use std::str::FromStr;

use vm_ir::Kernel;

use crate::reject::RejectKind;

/// Bytes that a thread's local arrays may have on a GPU. Its driver keeps so much for all threads that may run at once, beside what a guest may have:
/// on a GPU of 132 multiprocessors that is 1 GiB.
const LOCAL_BYTES: u64 = 4096;

/// What is wrong with a kernel's local arrays on a GPU.
fn local_reject(kernel: &Kernel, target: &str) -> Option<RejectKind> {
    let (needed, available) = (kernel.local_bytes(), LOCAL_BYTES);
    (needed > available).then(|| RejectKind::LocalMemory { target: target.to_owned(), needed, available })
}

/// What a module is compiled for, with all options that change the result. Its text form is canonical.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// PTX, for an NVIDIA GPU: `ptx:sm_90a`.
    Ptx(ptx::Options),
    /// LLVM IR, for an AMD GPU: `amdgcn:gfx942`.
    Amdgcn(amdgcn::Options),
    /// Machine code for a CPU: `cpu` for this machine, `cpu:x86-64-v3` for one that is named.
    #[cfg(feature = "cpu")]
    Cpu(cpu::Options),
    /// The IR in its binary form, for a host that compiles it: `ir`.
    Ir,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Ptx(options) => write!(f, "ptx:{options}"),
            Target::Amdgcn(options) => write!(f, "amdgcn:{options}"),
            #[cfg(feature = "cpu")]
            Target::Cpu(options) => write!(f, "cpu:{options}"),
            Target::Ir => f.write_str("ir"),
        }
    }
}

/// No target is written like this.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownTarget {
    /// The kind is unknown.
    #[error(
        "no target `{0}`; a target is `ptx:ARCHITECTURE`, such as ptx:sm_90a, `amdgcn:CHIP`, such as amdgcn:gfx942, `cpu`, or `ir`"
    )]
    Kind(String),
    /// The kind was left out when this program was built.
    #[error("this program was built without the target `{0}`; build it with the cargo feature `cpu`")]
    LeftOut(String),
    /// The architecture is.
    #[error(transparent)]
    Arch(#[from] ptx::UnknownArch),
    /// The chip is.
    #[error(transparent)]
    Chip(#[from] amdgcn::UnknownChip),
    /// The machine is.
    #[cfg(feature = "cpu")]
    #[error(transparent)]
    Isa(#[from] cpu::UnknownIsa),
}

impl FromStr for Target {
    type Err = UnknownTarget;

    /// Reads `ptx:ARCHITECTURE`, `amdgcn:CHIP`, `cpu`, `cpu:MACHINE` or `cpu:MACHINE+faults`, and `ir`; the other options have their defaults. `cpu` is the most that
    /// this machine counts as, and is written by that name.
    fn from_str(text: &str) -> Result<Target, UnknownTarget> {
        match text.split_once(':') {
            Some(("ptx", arch)) => Ok(Target::Ptx(ptx::Options::new(arch.parse()?))),
            Some(("amdgcn", chip)) => Ok(Target::Amdgcn(amdgcn::Options { chip: chip.parse()? })),
            #[cfg(feature = "cpu")]
            Some(("cpu", isa)) => Ok(Target::Cpu(isa.parse()?)),
            #[cfg(feature = "cpu")]
            None if text == "cpu" => Ok(Target::Cpu(cpu::Options::new(cpu::Isa::host()?))),
            #[cfg(not(feature = "cpu"))]
            Some(("cpu", _)) => Err(UnknownTarget::LeftOut(text.to_owned())),
            #[cfg(not(feature = "cpu"))]
            None if text == "cpu" => Err(UnknownTarget::LeftOut(text.to_owned())),
            None if text == "ir" => Ok(Target::Ir),
            _ => Err(UnknownTarget::Kind(text.to_owned())),
        }
    }
}
