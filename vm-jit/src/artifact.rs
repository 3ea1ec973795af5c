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

use std::fmt;
use vm_ir::module::ParamKind;
use vm_ir::{Kernel, Scalar};

/// What a target made of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// The target, as [`Target`](crate::Target) writes it.
    pub target: String,
    /// What the bytes are.
    pub format: Format,
    /// The code.
    pub code: Vec<u8>,
    /// The kernels in the order of the module.
    pub entries: Vec<Entry>,
}

/// What the bytes of an artifact are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        ty: Scalar,
    },
}

/// How the launch of a guest's kernel is cancelled. All threads poll the cancel flag now and then, and leave
/// when it is not 0. A thread that is out of fuel sets it to [`Guard::OUT_OF_FUEL`] and leaves; the host
/// sets it to anything else when the deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        let mut out = Vec::with_capacity(self.code.len() + 256);
        put_bytes(&mut out, self.target.as_bytes());
        out.push(match self.format {
            Format::Ptx => 0,
            Format::Elf => 1,
        });
        put_bytes(&mut out, &self.code);
        put(&mut out, self.entries.len() as u32);
        for entry in &self.entries {
            put_bytes(&mut out, entry.kernel.as_bytes());
            put_bytes(&mut out, entry.symbol.as_bytes());
            entry.block.iter().for_each(|d| put(&mut out, *d));
            put(&mut out, entry.cluster);
            put(&mut out, entry.static_shared);
            put(&mut out, entry.dynamic_shared);
            out.extend_from_slice(&entry.work.to_le_bytes());
            put(&mut out, entry.params.bytes);
            put(&mut out, entry.params.slots.len() as u32);
            for slot in &entry.params.slots {
                match *slot {
                    Slot::View { offset, rank } => {
                        put(&mut out, offset);
                        put(&mut out, rank);
                    }
                    Slot::Scalar { offset, ty } => {
                        put(&mut out, offset);
                        put(&mut out, 0x100 | u32::from(ty.code()));
                    }
                }
            }
            let guard = entry.params.guard;
            out.push(u8::from(guard.is_some()));
            if let Some(guard) = guard {
                put(&mut out, guard.stop);
                put(&mut out, guard.fuel);
            }
        }
        out
    }

    /// Reads what [`Artifact::to_bytes`] wrote; `None` if it is anything else.
    pub fn from_bytes(bytes: &[u8]) -> Option<Artifact> {
        let mut input = Input(bytes);
        let target = input.text()?;
        let format = match input.take(1)? {
            [0] => Format::Ptx,
            [1] => Format::Elf,
            _ => return None,
        };
        let code = input.bytes()?.to_vec();
        let mut entries = Vec::new();
        for _ in 0..input.number()? {
            let (kernel, symbol) = (input.text()?, input.text()?);
            let block = [input.number()?, input.number()?, input.number()?];
            let cluster = input.number()?;
            let (static_shared, dynamic_shared) = (input.number()?, input.number()?);
            let work = u64::from_le_bytes(input.take(8)?.try_into().ok()?);
            let bytes = input.number()?;
            let mut slots = Vec::new();
            for _ in 0..input.number()? {
                let (offset, word) = (input.number()?, input.number()?);
                slots.push(match word {
                    0..=0xff => Slot::View { offset, rank: word },
                    _ => Slot::Scalar { offset, ty: Scalar::from_code(u8::try_from(word & !0x100).ok()?)? },
                });
            }
            let guard = match input.take(1)? {
                [0] => None,
                [1] => Some(Guard { stop: input.number()?, fuel: input.number()? }),
                _ => return None,
            };
            let params = ParamLayout { slots, guard, bytes };
            entries.push(Entry {
                kernel,
                symbol,
                block,
                cluster,
                params,
                static_shared,
                dynamic_shared,
                work,
            });
        }
        input.0.is_empty().then_some(Artifact { target, format, code, entries })
    }
}

fn put(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u32);
    out.extend_from_slice(bytes);
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    fn number(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let count = self.number()? as usize;
        self.take(count)
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }
}
