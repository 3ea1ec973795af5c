//! The small programs that the [conformance suite](crate::conformance) runs: what each does, in words, and how it is
//! launched. An implementation brings them compiled for it; the [simulated accelerator](crate::fake) has them in Rust.

use vm_abi::Element;

use crate::artifact::{Extent, Parameter, ParameterKind, Signature};

/// One program. Views are of the type in brackets; `?` is any extent.
///
/// A grid may have more threads than there is work, or fewer: programs without a word on their grid do all their
/// work whatever it is.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(serialize_all = "lowercase")]
pub enum Program {
    /// `add(input [u32; ?], output [u32; ?], addend u32)`: `output[i] = input[i] + addend`, wrapping, for every `i`
    /// below both extents. Blocks of 256.
    Add,
    /// `bump(data [u32; ?], by u32)`: `data[i] += by`, wrapping, for every `i`. Blocks of 256.
    Bump,
    /// `copy2(source [u32; ?, ?], target [u32; ?, ?])`: `target[i, j] = source[i, j]` for all indices below both
    /// extents. Blocks of 64.
    Copy2,
    /// `copy3`: the same with three dimensions.
    Copy3,
    /// `copy4`: the same with four dimensions.
    Copy4,
    /// `scalars(output [u64; 4], a u8, b u16, c u32, d u64)`: sets the four elements to the four numbers, each with
    /// zeros above. Blocks of 1.
    Scalars,
    /// `reverse(data [u32; ?*64])`: each block reverses the 64 elements from 64 times its x in `data`, by way of 256
    /// bytes of dynamic shared memory and a barrier. Blocks of 64; the grid has a block for every 64 elements.
    Reverse,
    /// `ids(output [u32; ?, 16])`: `output[b, i] = bx | by << 4 | bz << 8 | tx << 12 | ty << 16 | tz << 20`, where
    /// `bx, by, bz` is the block, `tx, ty, tz` the thread in it, `b` the block's number, `i` the item's, x fastest.
    /// Blocks of 4×2×2; the first extent is the number of blocks.
    Ids,
    /// `spin(output [u32; 1], turns u64)`, guarded: each thread begins the body of a loop `turns` times, and then
    /// sets `output[0]` to 1. One that was stopped sets nothing. Blocks of 32.
    Spin,
    /// An artifact with the signature of [`Program::Add`] and an image that can't be loaded.
    Broken,
}

/// All of them but [`Program::Broken`], which has the code of [`Program::Add`]'s cut off, as kernels of one module in
/// the text of `vm-ir`, for implementations that run what `vm-jit` compiles. [`Program::Spin`] is guarded: it has to be
/// compiled as a guest's, the others as trusted.
pub const SOURCE: &str = include_str!("programs.vir");

impl Program {
    /// All of them.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// The name, which is also the entry symbol in [`Program::signature`].
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// How it is launched. An implementation may change the entry and `shared_bytes`.
    pub fn signature(self) -> Signature {
        let mut list = List(Vec::new());
        let (mut block, mut shared_bytes) = ([256, 1, 1], 0);
        match self {
            Self::Add | Self::Broken => {
                list.view("input", &[Extent::Any], Element::U32, false);
                list.view("output", &[Extent::Any], Element::U32, true);
                list.scalar("addend", 4);
            }
            Self::Bump => {
                list.view("data", &[Extent::Any], Element::U32, true);
                list.scalar("by", 4);
            }
            Self::Copy2 | Self::Copy3 | Self::Copy4 => {
                let rank = match self {
                    Self::Copy2 => 2,
                    Self::Copy3 => 3,
                    _ => 4,
                };
                block = [64, 1, 1];
                list.view("source", &vec![Extent::Any; rank], Element::U32, false);
                list.view("target", &vec![Extent::Any; rank], Element::U32, true);
            }
            Self::Scalars => {
                block = [1, 1, 1];
                list.view("output", &[Extent::Fixed(4)], Element::U64, true);
                for (name, bytes) in [("a", 1), ("b", 2), ("c", 4), ("d", 8)] {
                    list.scalar(name, bytes);
                }
            }
            Self::Reverse => {
                block = [64, 1, 1];
                shared_bytes = 256;
                list.view("data", &[Extent::Multiple(64)], Element::U32, true);
            }
            Self::Ids => {
                block = [4, 2, 2];
                list.view("output", &[Extent::Any, Extent::Fixed(16)], Element::U32, true);
            }
            Self::Spin => {
                block = [32, 1, 1];
                list.view("output", &[Extent::Fixed(1)], Element::U32, true);
                list.scalar("turns", 8);
            }
        }
        Signature {
            entry: self.name().into(),
            block,
            cluster: 1,
            shared_bytes,
            parameters: list.0,
            tiles: Vec::new(),
            guarded: self == Self::Spin,
            cost_bound: 64,
        }
    }
}

struct List(Vec<Parameter>);

impl List {
    fn view(&mut self, name: &str, extents: &[Extent], element: Element, writes: bool) {
        let kind = ParameterKind::View { extents: extents.to_vec(), element, align: element.bytes(), writes };
        self.0.push(Parameter { name: name.into(), kind });
    }

    fn scalar(&mut self, name: &str, bytes: u32) {
        self.0.push(Parameter { name: name.into(), kind: ParameterKind::Scalar { bytes, range: None } });
    }
}
