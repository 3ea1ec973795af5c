//! How a kernel takes its arguments: what compilers and launches agree on.
//!
//! # The block of parameters
//!
//! A kernel takes one block of bytes, little-endian, in which lie one behind the other, each at the next multiple of
//! its alignment:
//!
//! * the [tensor maps](TensorMap) of [`MAP_BYTES`] bytes, aligned to [`MAP_ALIGN`]; the launch makes them from views;
//! * the parameters in their order. A view of rank `r` takes `2 r` words of 8 bytes: the address of its first element;
//!   then every extent in elements, slowest dimension first; then the stride in bytes of every dimension but the last,
//!   whose elements lie one behind the other. A scalar takes its own size (`bool` one byte).
//! * for a kernel that can be stopped, a [`Guard`] of two words: the address of a cancel flag, and fuel.
//!
//! On CUDA the block is the kernel's one parameter.
//!
//! A launch must have checked that the grid has 1 to [`MAX_GRID`] blocks along each axis, and the arguments against the
//! kernel's parameters: extents and alignment as the view's type says, each extent at most [`MAX_EXTENT`], scalars in range, no
//! view that is written overlapping another, and the memory of each view really there. A guest's kernel then touches no byte outside of its views.

use std::fmt;

#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};

/// The most dimensions of a view.
pub const MAX_RANK: usize = 4;
/// The greatest extent of a view in one dimension, in elements.
pub const MAX_EXTENT: u64 = 1 << 40;
/// The most blocks of a grid along x, y and z. Compilers assume these limits, so launches enforce them even if a device has higher
/// ones.
pub const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Behind the name of a kernel's symbol in an object for a processor, the name of an absolute symbol: the bytes of stack that the kernel
/// needs.
pub const STACK_SUFFIX: &str = ".stack";
/// Bytes of each of three areas below the scratch memory of a CPU kernel, from the lowest address up: read-only zeros
/// ([`SCRATCH_ZEROS`]), a sink that is written and never read ([`SCRATCH_SINK`]), and a guard without access. Code redirects loads
/// that are out of bounds to the zeros, and stores to the sink.
///
/// It is a multiple of the page sizes of all processors, and longer than any access of a kernel, so a redirected access does not
/// reach another area.
pub const SCRATCH_AREA: u32 = 64 << 10;
/// Bytes from the begin of the zeros to the scratch memory.
pub const SCRATCH_ZEROS: u32 = 3 * SCRATCH_AREA;
/// Bytes from the begin of the sink to the scratch memory.
pub const SCRATCH_SINK: u32 = 2 * SCRATCH_AREA;
/// Bytes of parameters that every device takes.
pub const PARAMETER_BYTES: u32 = 4096;
/// Bytes of parameters that CUDA takes from CUDA 12.1 on, with PTX 8.1 on sm_70 and newer; and CPUs. No device takes more.
pub const MAX_PARAMETER_BYTES: u32 = 32_764;
/// Bytes of a tensor map.
pub const MAP_BYTES: u32 = 128;
/// What the offset of a tensor map is a multiple of, in bytes.
pub const MAP_ALIGN: u32 = 64;

/// Where a kernel's arguments go in the block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct ParamLayout {
    /// By parameter, in the kernel's order.
    pub slots: Vec<Slot>,
    /// What the launch makes from views.
    pub maps: Vec<TensorMap>,
    /// For a kernel that can be stopped.
    pub guard: Option<Guard>,
    /// Size of the block in bytes.
    pub bytes: u32,
}

/// A parameter of a layout to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// A view.
    View {
        /// Its number of dimensions, 1 to [`MAX_RANK`].
        rank: u32,
    },
    /// A scalar.
    Scalar {
        /// Its size: 1, 2, 4 or 8 bytes.
        bytes: u32,
    },
}

/// Where one argument goes. Offsets are in bytes from the start of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
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
        /// Its size.
        bytes: u32,
    },
}

impl Slot {
    /// Its first byte.
    pub fn offset(self) -> u32 {
        match self {
            Self::View { offset, .. } | Self::Scalar { offset, .. } => offset,
        }
    }

    /// Its size in bytes.
    pub fn bytes(self) -> u32 {
        match self {
            Self::View { rank, .. } => 16 * rank,
            Self::Scalar { bytes, .. } => bytes,
        }
    }

    /// Offset of extent `dimension` of a view.
    pub fn extent_offset(self, dimension: u32) -> Option<u32> {
        match self {
            Self::View { offset, rank } if dimension < rank => Some(offset + 8 + 8 * dimension),
            _ => None,
        }
    }

    /// Offset of the stride of `dimension` of a view, which is not the last.
    pub fn stride_offset(self, dimension: u32) -> Option<u32> {
        match self {
            Self::View { offset, rank } if dimension + 1 < rank => Some(offset + 8 + 8 * (rank + dimension)),
            _ => None,
        }
    }
}

/// How the launch of a kernel is stopped. All threads poll the cancel flag now and then, and leave when it is not 0. A
/// thread that is out of fuel sets it to [`Guard::OUT_OF_FUEL`] and leaves; the host sets it to [`Guard::STOP`] when the
/// time is up. Offsets are in bytes from the start of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct Guard {
    /// Of the cancel flag's address (8 bytes). The flag has 4 bytes, is aligned to 4, must be there for the whole launch,
    /// and must be 0 when it begins. The host sees it too.
    pub stop: u32,
    /// Of the fuel (8 bytes): how often each thread may begin the body of any loop whose end is not known beforehand to
    /// come soon. At most 2^62 counts.
    pub fuel: u32,
}

impl Guard {
    /// What a thread leaves in the cancel flag when it is out of fuel.
    pub const OUT_OF_FUEL: u32 = 0x6675_656c;
    /// What the host sets the cancel flag to.
    pub const STOP: u32 = 1;
}

/// A descriptor in the block by which a kernel copies boxes of a view with the Tensor Memory Accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct TensorMap {
    /// Its first byte in the block, a multiple of [`MAP_ALIGN`].
    pub offset: u32,
    /// What it copies.
    pub tile: Tile,
}

/// The boxes of a view that a kernel copies at once. What of a box lies outside of the view reads as zeros, and is not
/// written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct Tile {
    /// The view: its index among the kernel's parameters.
    pub parameter: u32,
    /// Rows and columns of the box in elements, 1 to 256 each; a row has a multiple of 16 bytes. It covers the view's last
    /// two dimensions, and one element of each before. A view of one dimension has one row.
    pub shape: [u32; 2],
    /// How the box lies in shared memory.
    pub swizzle: Swizzle,
    /// The view's elements.
    pub element: Element,
    /// Are boxes copied to the view, not from it?
    pub writes: bool,
}

/// The name of a symbol that a module whose kernels have tensor maps may have: [`NOTHING_BYTES`] bytes of the device's memory, aligned to
/// 64, all zero. A view without elements has none that a map could name, so it is made of the first element there if the kernel reads
/// by it, where it finds the zero that it would find outside of the view, and of the one in the middle if it writes by it. No kernel's symbol,
/// `vir_` and its name, is the same.
pub const NOTHING: &str = "vir$nothing";
/// The bytes of [`NOTHING`].
pub const NOTHING_BYTES: u32 = 128;

impl Tile {
    /// Bytes of a row of the box.
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.shape[1]) * u64::from(self.element.bytes())
    }
}

/// How a box lies in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub enum Swizzle {
    /// Row behind row.
    None,
    /// Rows of up to 128 bytes, each in 128 bytes; in the row with number `r`, the 16 bytes with number `n` lie at
    /// place `n ^ r % 8`. The box is aligned to 1024 bytes.
    Bytes128,
}

/// An element of a view, as launches and the Tensor Memory Accelerator know it. Copies keep its bits, whatever it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub enum Element {
    /// 8 bits: integers, `bool`, floats of 8 bits.
    U8,
    /// An integer of 16 bits.
    U16,
    /// An integer of 32 bits.
    U32,
    /// An integer of 64 bits.
    U64,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32 that becomes tf32: copies to shared memory round it to the nearest.
    Tf32,
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::Tf32 => "tf32",
        })
    }
}

impl Element {
    /// Its size in bytes.
    pub fn bytes(self) -> u32 {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::F32 | Self::Tf32 => 4,
            Self::U64 | Self::F64 => 8,
        }
    }
}

impl ParamLayout {
    /// The layout of a kernel with these parameters that copies these boxes, the same on every target; `guarded` if it can
    /// be stopped. With more parameters than any device takes, it has more bytes than [`MAX_PARAMETER_BYTES`].
    pub fn new(
        fields: impl IntoIterator<Item = Field>,
        tiles: impl IntoIterator<Item = Tile>,
        guarded: bool,
    ) -> Self {
        let mut bytes = 0u32;
        let mut take = |size: u32, align: u32| {
            let offset = bytes.checked_next_multiple_of(align).unwrap_or(u32::MAX);
            bytes = offset.saturating_add(size);
            offset
        };
        let map = |tile| TensorMap { offset: take(MAP_BYTES, MAP_ALIGN), tile };
        let maps = tiles.into_iter().map(map).collect();
        let slot = |field| match field {
            Field::View { rank } => Slot::View { offset: take(rank.saturating_mul(16), 8), rank },
            Field::Scalar { bytes } => Slot::Scalar { offset: take(bytes, bytes.clamp(1, 8)), bytes },
        };
        let slots = fields.into_iter().map(slot).collect();
        let guard = guarded.then(|| Guard { stop: take(8, 8), fuel: take(8, 8) });
        Self { slots, maps, guard, bytes }
    }

    /// Offset and bytes of all that lies in the block.
    pub fn fields(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let maps = self.maps.iter().map(|map| (map.offset, MAP_BYTES));
        let slots = self.slots.iter().map(|slot| (slot.offset(), slot.bytes()));
        let guard = self.guard.iter().flat_map(|guard| [(guard.stop, 8), (guard.fuel, 8)]);
        maps.chain(slots).chain(guard)
    }

    /// What the block is aligned to, in bytes.
    pub fn align(&self) -> u32 {
        if self.maps.is_empty() { 8 } else { MAP_ALIGN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_where() {
        let scalar = |bytes| Field::Scalar { bytes };
        let check =
            |fields: &[Field], maps: u32, guarded, offsets: &[u32], bytes, guard: Option<[u32; 2]>| {
                let tile = |parameter| Tile {
                    parameter,
                    shape: [8, 8],
                    swizzle: Swizzle::None,
                    element: Element::F16,
                    writes: false,
                };
                let layout = ParamLayout::new(fields.iter().copied(), (0..maps).map(tile), guarded);
                let found: Vec<_> = layout.slots.iter().map(|slot| slot.offset()).collect();
                assert_eq!((&*found, layout.bytes), (offsets, bytes), "{fields:?}");
                assert_eq!(layout.guard.map(|guard| [guard.stop, guard.fuel]), guard);
                assert!(layout.maps.iter().zip(0..).all(|(map, number)| map.offset == MAP_BYTES * number));
                let ends = layout.fields().map(|(offset, bytes)| offset + bytes);
                assert_eq!(ends.max().unwrap_or(0), bytes, "no byte behind the last field");
                assert_eq!(layout.align(), if maps > 0 { 64 } else { 8 });
            };
        check(&[], 0, false, &[], 0, None);
        check(&[scalar(1), scalar(2), scalar(1), scalar(4)], 0, false, &[0, 2, 4, 8], 12, None);
        check(&[scalar(1), Field::View { rank: 2 }, scalar(4)], 0, true, &[0, 8, 40], 64, Some([48, 56]));
        check(&[Field::View { rank: 1 }, scalar(4)], 2, true, &[256, 272], 296, Some([280, 288]));
        check(&[scalar(8); 600], 0, false, &(0..600).map(|n| 8 * n).collect::<Vec<_>>(), 4800, None);
        let slot = Slot::View { offset: 8, rank: 3 };
        assert_eq!([0, 1, 2, 3].map(|d| slot.extent_offset(d)), [Some(16), Some(24), Some(32), None]);
        assert_eq!([0, 1, 2].map(|d| slot.stride_offset(d)), [Some(40), Some(48), None]);
        let huge = ParamLayout::new([Field::View { rank: u32::MAX }, scalar(4)], [], true);
        assert!(huge.bytes > MAX_PARAMETER_BYTES);
    }
}
