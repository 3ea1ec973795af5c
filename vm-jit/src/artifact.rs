//! What a compiler gives: code, and all that is needed to launch it.
//!
//! [`vm_abi`] has the block of parameters that a launch fills. A guest's kernel with loops that need watching, and on a CPU
//! any of a guest's, has a [`Guard`](vm_abi::Guard) in it.

use serde::{Deserialize, Serialize};
use std::fmt;
use vm_abi::{Element, Field, ParamLayout, Tile};
use vm_ir::module::ParamKind;
use vm_ir::{Kernel, Scalar};

const _: () =
    assert!(vm_abi::MAX_RANK == vm_ir::limits::MAX_RANK && vm_abi::MAX_EXTENT == vm_ir::limits::MAX_EXTENT);

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
    /// LLVM IR as text.
    LlvmIr,
    /// An ELF object of machine code; see [`backend::cpu`](crate::backend::cpu).
    Elf,
    /// The IR in its binary form.
    Ir,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Ptx => "PTX",
            Format::LlvmIr => "LLVM IR",
            Format::Elf => "ELF",
            Format::Ir => "IR",
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
    /// How a tile kernel multiplies, on a target that has several ways.
    pub products: Option<Products>,
}

/// How a tile kernel multiplies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Products {
    /// The instructions of its products, each once, in the order of the kernel; none if it has no products.
    pub by: Vec<Instruction>,
    /// Why it goes by neither tensor maps nor `wgmma` on a target that has both; nothing if it does, or the target has not.
    pub fallback: Vec<Note>,
}

/// What multiplies tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
pub enum Instruction {
    /// Hopper's, of a group of four warps, from shared memory.
    #[strum(serialize = "wgmma")]
    Wgmma,
    /// A warp's, from registers.
    #[strum(serialize = "mma.sync")]
    MmaSync,
    /// No tensor core: one multiplication and addition after the other.
    #[strum(serialize = "cores")]
    Cores,
}

/// Something that is said of a kernel, with its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The line of the op, the declaration or the kernel; 0 if unknown.
    pub line: u32,
    /// What is said.
    pub what: String,
}

/// The layout of a kernel's parameters, the same on every target. `tiles` are the boxes of views that it copies with the
/// Tensor Memory Accelerator.
pub(crate) fn layout(kernel: &Kernel, tiles: &[Tile], guarded: bool) -> ParamLayout {
    let fields = kernel.params().iter().map(|param| match &param.kind {
        ParamKind::View(view) => Field::View { rank: view.rank() as u32 },
        ParamKind::Scalar { value, .. } => Field::Scalar { bytes: kernel.type_of(*value).scalar().bytes() },
    });
    ParamLayout::new(fields, tiles.iter().copied(), guarded)
}

/// What the Tensor Memory Accelerator takes an element of a view for.
pub fn element(ty: Scalar) -> Element {
    match ty {
        Scalar::F16 => Element::F16,
        Scalar::Bf16 => Element::Bf16,
        Scalar::F32 => Element::F32,
        Scalar::Tf32 => Element::Tf32,
        Scalar::F64 => Element::F64,
        _ => match ty.bytes() {
            1 => Element::U8,
            2 => Element::U16,
            4 => Element::U32,
            _ => Element::U64,
        },
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
            Format::Ptx | Format::LlvmIr => std::str::from_utf8(&self.code).ok(),
            Format::Elf | Format::Ir => None,
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
