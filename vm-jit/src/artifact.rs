//! What a compiler gives: code, and all that is needed to launch it.
//!
//! # Parameters
//!
//! A kernel takes one block of [`ParamLayout::bytes`] bytes, little-endian, which the launch fills:
//!
//! * a view at its offset: the base address; then every extent in elements, slowest dimension first; then the
//!   stride in bytes of every dimension but the last. Each is 8 bytes.
//! * a scalar at its offset, in its own size (`bool` in one byte).
//! * a guest's kernel with loops that need watching, and on a CPU any of a guest's, ends with [`Guard`]: the address of a
//!   cancel flag and the iterations that each thread may begin.
//!
//! On CUDA the block is the kernel's one parameter: `kernelParams` is a pointer to a pointer to it.
//!
//! Whoever launches must have checked the arguments against the kernel's parameters: extents and alignment as
//! the view's type says, each extent at most [`MAX_EXTENT`](vm_ir::limits::MAX_EXTENT), scalars in range, no
//! view that is written overlapping another, and the memory of each view really there. A guest's kernel then
//! touches no byte outside of its views.

use serde::{Deserialize, Serialize};
use std::fmt;
use vm_ir::module::ParamKind;
use vm_ir::{Kernel, Scalar};

/// What a target made of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// The target, as [`Target`](crate::Target) writes it.
    pub target: String,
    /// What the bytes are.
    pub format: Format,
    /// The code.
    #[serde(with = "serde_bytes")]
    pub code: Vec<u8>,
    /// The kernels in the order of the module.
    pub entries: Vec<Entry>,
}

/// What the bytes of an artifact are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Format {
    /// PTX text, without a terminating zero.
    Ptx,
    /// An ELF object of machine code; see [`target::cpu`](crate::target::cpu).
    Elf,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Ptx => "PTX",
            Format::Elf => "ELF",
        })
    }
}

/// A kernel in an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The kernel's name.
    pub kernel: String,
    /// Its symbol in the code.
    pub symbol: String,
    /// Threads of a block along x, y and z; a launch must use just these.
    pub block: [u32; 3],
    /// Blocks of a cluster; the grid of a launch must be a multiple along x. The code says it itself, so a launch need
    /// not.
    pub cluster: u32,
    /// Where its arguments go.
    pub params: ParamLayout,
    /// Bytes of shared memory that the code declares by itself.
    pub static_shared: u32,
    /// Bytes of shared memory that the launch must ask for. On a CPU, of the scratch memory that each thread brings.
    /// On CUDA, above 48 KiB after opting in to so much
    /// (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`).
    pub dynamic_shared: u32,
    /// The most that a thread does, in weighted operations (about as long as an addition each); [`u64::MAX`] where that has
    /// no bound. A polled loop counts as often as it has iterations between two poll points: there a launch that is to be
    /// cancelled is.
    pub work: u64,
}

/// Where in the parameter block a kernel's arguments go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamLayout {
    /// By parameter, in the kernel's order.
    pub slots: Vec<Slot>,
    /// For a guest's kernel that has cancellable loops; on a CPU, where a launch can be stopped between two blocks, for
    /// any of a guest's.
    pub guard: Option<Guard>,
    /// Size of the block in bytes.
    pub bytes: u32,
}

/// Where one argument goes. Offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Slot {
    /// A view: base, extents, strides.
    View {
        /// Of the base; the others follow it.
        offset: u32,
        /// Number of extents; there is one stride less.
        rank: u32,
    },
    /// A scalar.
    Scalar {
        /// Of its bits.
        offset: u32,
        /// Its type, which gives its size.
        #[serde(with = "scalar")]
        ty: Scalar,
    },
}

/// How the launch of a guest's kernel is cancelled. All threads poll the cancel flag now and then, and leave
/// when it is not 0. A thread that is out of fuel sets it to [`Guard::OUT_OF_FUEL`] and leaves; the host
/// sets it to anything else when the deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guard {
    /// Offset of the cancel flag's address (8 bytes). The flag has 4 bytes, is aligned to 4, must be there for
    /// the whole launch, and must be 0 when it begins.
    pub stop: u32,
    /// Offset of the number of iterations that each thread may take (8 bytes): how often it may begin the body of
    /// any loop whose end is not known beforehand to come soon. At most 2^62 counts.
    pub fuel: u32,
}

impl Guard {
    /// What a thread leaves in the cancel flag when it is out of fuel.
    pub const OUT_OF_FUEL: u32 = 0x6675_656c;
}

impl Slot {
    /// Offset of extent `dimension` of a view.
    pub fn extent_offset(&self, dimension: u32) -> Option<u32> {
        match *self {
            Slot::View { offset, rank } if dimension < rank => Some(offset + 8 + 8 * dimension),
            _ => None,
        }
    }

    /// Offset of the stride of `dimension` of a view, which is not the last.
    pub fn stride_offset(&self, dimension: u32) -> Option<u32> {
        match *self {
            Slot::View { offset, rank } if dimension + 1 < rank => Some(offset + 8 + 8 * (rank + dimension)),
            _ => None,
        }
    }
}

impl ParamLayout {
    /// The layout for a kernel, the same on every target.
    pub fn of(kernel: &Kernel, guarded: bool) -> ParamLayout {
        let mut bytes = 0u32;
        let mut take = |size: u32| {
            let offset = bytes.next_multiple_of(size.min(8));
            bytes = offset + size;
            offset
        };
        let slots = kernel
            .params()
            .iter()
            .map(|param| match &param.kind {
                ParamKind::View(view) => {
                    let rank = view.rank() as u32;
                    let offset = take(8);
                    (1..2 * rank).for_each(|_| {
                        take(8);
                    });
                    Slot::View { offset, rank }
                }
                ParamKind::Scalar { value, .. } => {
                    let ty = kernel.type_of(*value).scalar();
                    Slot::Scalar { offset: take(ty.bytes()), ty }
                }
            })
            .collect();
        let guard = guarded.then(|| Guard { stop: take(8), fuel: take(8) });
        ParamLayout { slots, guard, bytes }
    }
}

impl Artifact {
    /// The entry of a kernel.
    pub fn entry(&self, kernel: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.kernel == kernel)
    }

    /// The code as text, for targets whose code is text.
    pub fn text(&self) -> Option<&str> {
        match self.format {
            Format::Ptx => std::str::from_utf8(&self.code).ok(),
            Format::Elf => None,
        }
    }

    /// All of it as bytes, for a cache. [`Artifact::from_bytes`] reads them.
    pub fn to_bytes(&self) -> Vec<u8> {
        // It fails only for types that have no such form; what is empty reads as no artifact.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// Reads what [`Artifact::to_bytes`] wrote; `None` if it is anything else.
    pub fn from_bytes(bytes: &[u8]) -> Option<Artifact> {
        let (artifact, rest) = postcard::take_from_bytes(bytes).ok()?;
        rest.is_empty().then_some(artifact)
    }
}

/// A scalar as its code.
mod scalar {
    use serde::de::{Deserialize as _, Deserializer, Error as _};
    use serde::ser::Serializer;
    use vm_ir::Scalar;

    pub(super) fn serialize<S: Serializer>(ty: &Scalar, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(ty.code())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Scalar, D::Error> {
        Scalar::from_code(u8::deserialize(deserializer)?).ok_or_else(|| D::Error::custom("no scalar's code"))
    }
}
