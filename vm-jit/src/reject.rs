//! What a target does not compile, said in a code and a place.

use std::fmt;
use vm_ir::text::{Mark, render};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// Why a target does not compile a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[non_exhaustive]
pub enum RejectKind {
    /// The target has no way to do this op on this type.
    #[error("{target} has no `{op}` of {ty}; compute in another type")]
    #[strum(serialize = "unsupported-op")]
    Op {
        /// The target.
        target: String,
        /// The op.
        op: &'static str,
        /// The type.
        ty: Scalar,
    },
    /// The shared arrays need more than one block can have.
    #[error("the shared arrays take {needed} bytes, a block on {target} has {available}; make them smaller")]
    SharedMemory {
        /// The target.
        target: String,
        /// Bytes of all shared arrays.
        needed: u64,
        /// Bytes that one block can have.
        available: u64,
    },
    /// The local arrays need more than one thread can have.
    #[error("the local arrays take {needed} bytes, a thread on {target} has {available}; make them smaller")]
    LocalMemory {
        /// The target.
        target: String,
        /// Bytes of all local arrays.
        needed: u64,
        /// Bytes that one thread can have.
        available: u64,
    },
    /// The target has no clusters, or no such.
    #[error(
        "{target} has no clusters of {blocks} blocks; compile for sm_90 or newer, or write the kernel without"
    )]
    Cluster {
        /// The target.
        target: String,
        /// Blocks of a cluster.
        blocks: u32,
    },
    /// A guest's kernel may be stopped in a loop, and its blocks write into each other's shared memory.
    #[error(
        "a guest's kernel that gathers in a cluster may be stopped in a loop while its neighbours go on; let no loop take more than 4096 iterations, known beforehand"
    )]
    StoppedCluster,
    /// The target has no surfaces.
    #[error(
        "{target} has no surfaces, as @{surface} is one; copy the image into a buffer, and take a view of that"
    )]
    #[strum(serialize = "unsupported-surface")]
    Surface {
        /// The target.
        target: String,
        /// The parameter.
        surface: String,
    },
    /// The parameters take more bytes than a launch can pass.
    #[error("the parameters take {needed} bytes, a launch passes {available}; split the kernel")]
    Parameters {
        /// Bytes of all parameters.
        needed: u32,
        /// Bytes that a launch can pass.
        available: u32,
    },
    /// What the threads of a block know while they wait for each other takes too much memory.
    #[error(
        "the values of a block take {needed} bytes, {available} are allowed; split the kernel or make the block smaller"
    )]
    #[strum(serialize = "scratch-memory")]
    Scratch {
        /// Bytes of all values and shared arrays of a block.
        needed: u64,
        /// Bytes that one block can have.
        available: u64,
    },
    /// The kernel is too large for the code generator.
    #[error("the kernel comes to {needed} {what} or more, {available} are allowed; split it")]
    #[strum(serialize = "too-large")]
    Size {
        /// What is counted.
        what: &'static str,
        /// How many there were when the code generator stopped.
        needed: u64,
        /// How many are allowed.
        available: u64,
    },
    /// The code generator gave up.
    #[error("the code generator gave up: {what}; split the kernel")]
    Generator {
        /// What it says.
        what: String,
    },
    /// A tile kernel has a shape that the target has no instructions for, or the target has no tile kernels.
    #[error("{what}")]
    #[strum(serialize = "unsupported-tile")]
    Tile {
        /// What is asked for, and what there is.
        what: String,
    },
    /// The driver is too old for the target.
    #[error("{target} needs {needed}, the driver takes {available} at most; update the driver")]
    #[strum(serialize = "driver-too-old")]
    Version {
        /// The target.
        target: String,
        /// What it needs.
        needed: String,
        /// What there is.
        available: String,
    },
}

impl RejectKind {
    /// A code that scripts may rely on.
    pub fn code(&self) -> &'static str {
        self.into()
    }
}

/// One reason for which a target does not compile a kernel, with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// The kernel.
    pub kernel: String,
    /// Where in the guest it came from.
    pub guest: GuestAddr,
    /// The line of the op or of the kernel; 0 if unknown.
    pub line: u32,
    /// Why.
    pub kind: RejectKind,
}

impl Reject {
    pub(crate) fn new(kernel: &Kernel, line: u32, kind: RejectKind) -> Reject {
        Reject { kernel: kernel.name().to_owned(), guest: kernel.guest_address(), line, kind }
    }
}

impl Reject {
    /// The reason with its line of the text that the module was read from, and carets below what is rejected.
    pub fn render(&self, source: &str) -> String {
        let op = match self.kind {
            RejectKind::Op { op, .. } => Some(op),
            _ => None,
        };
        render(source, &Mark { line: self.line, op, message: &self.to_string(), ..Mark::default() })
    }
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel @{} (guest {})", self.kernel, self.guest)?;
        if self.line != 0 {
            write!(f, ", line {}", self.line)?;
        }
        write!(f, ": {} [{}]", self.kind, self.kind.code())
    }
}

/// Every reason for which a target does not compile a module; at least one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct Rejected(pub Vec<Reject>);
