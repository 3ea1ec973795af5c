//! A compiled kernel as the accelerator gets it: the module's image, the entry symbol, how a block looks, and where
//! the parameters lie.
//!
//! # The block of parameters
//! A kernel takes one block of bytes, little-endian. A view of rank `r` takes `2 r` words of 8 bytes at its offset: the
//! address of its first element; then every extent in elements, slowest dimension first; then the stride in bytes of
//! every dimension but the last, whose elements lie one behind the other. A scalar takes its own size. A [`Guard`] takes
//! two words: the address of a cancel flag, and fuel.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::error::{Error, Result};

/// The most bytes of parameters that a kernel may have.
pub const PARAMETER_BYTES: u32 = 4096;
/// The most dimensions of a view.
pub const MAX_RANK: usize = 4;
/// The greatest extent of a view in one dimension.
pub const MAX_EXTENT: u64 = 1 << 40;

/// What a kernel wants of one extent of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Any number of elements.
    Any,
    /// A multiple of this many, which is at least 1.
    Multiple(u32),
    /// Just this many.
    Fixed(u64),
}

impl Extent {
    /// Whether an extent is what the kernel wants.
    pub fn admits(self, extent: u64) -> bool {
        match self {
            Self::Any => true,
            Self::Multiple(number) => number != 0 && extent.is_multiple_of(u64::from(number)),
            Self::Fixed(fixed) => extent == fixed,
        }
    }
}

/// What a parameter is bound to. Offsets are bytes from the start of the block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// A view of memory.
    View {
        /// Where its words begin.
        offset: u32,
        /// What the kernel wants of each extent, slowest dimension first; their number is the rank, 1 to [`MAX_RANK`].
        extents: Vec<Extent>,
        /// Bytes of an element: 1, 2, 4 or 8.
        element: u32,
        /// A power of two that the address and every stride must be multiples of.
        align: u32,
        /// Whether the kernel writes through it. Such a view may overlap no other of the launch.
        writes: bool,
    },
    /// A number.
    Scalar {
        /// Where its bytes lie.
        offset: u32,
        /// How many there are: 1, 2, 4 or 8.
        bytes: u32,
        /// The least and the greatest value, as a signed integer of that size.
        range: Option<(i64, i64)>,
    },
}

/// One parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, for errors.
    pub name: String,
    /// What it is bound to.
    pub kind: ParameterKind,
}

/// Where a kernel that can be stopped finds its cancel flag and its fuel. Offsets are bytes from the start of the block.
///
/// Every thread polls the cancel flag now and then, and leaves when it is not 0. One that is out of fuel sets it
/// to [`Guard::OUT_OF_FUEL`] and leaves; the host sets it to [`Guard::STOP`] when the time is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// Of the stop word's address (8 bytes). The word has 4 bytes, and the host sees it too.
    pub stop: u32,
    /// Of the fuel (8 bytes): how often each thread may begin the body of a loop.
    pub fuel: u32,
}

impl Guard {
    /// What a thread leaves in the cancel flag when it is out of fuel.
    pub const OUT_OF_FUEL: u32 = 0x6675_656c;
    /// What the host sets the stop word to.
    pub const STOP: u32 = 1;
}

/// What a launch must know of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The kernel's symbol in the image.
    pub entry: String,
    /// Work-items of a block in each dimension.
    pub block: [u32; 3],
    /// Blocks of a cluster, neighbours along x that run at the same time: a grid has a multiple of that along x. 1
    /// for a kernel whose blocks are by themselves. The code says it too, so it is no part of a launch.
    pub cluster: u32,
    /// Bytes of shared memory that each block gets beside what the code declares by itself.
    pub shared_bytes: u32,
    /// The parameters, in the order in which arguments are given.
    pub parameters: Vec<Parameter>,
    /// For a kernel that can be stopped.
    pub guard: Option<Guard>,
    /// The most that a work-item does before it ends or looks at the stop word, in operations about as long as an addition
    /// each; [`u64::MAX`] where that is not known.
    pub work: u64,
}

impl Signature {
    /// The fields of the block: the parameter's name, the offset and the bytes of each.
    pub fn fields(&self) -> impl Iterator<Item = (&str, u32, u32)> {
        let parameters = self.parameters.iter().map(|Parameter { name, kind }| match kind {
            ParameterKind::View { offset, extents, .. } => {
                (name.as_str(), *offset, 16 * extents.len() as u32)
            }
            ParameterKind::Scalar { offset, bytes, .. } => (name.as_str(), *offset, *bytes),
        });
        let guard = self.guard.iter().flat_map(|guard| [("stop", guard.stop, 8), ("fuel", guard.fuel, 8)]);
        parameters.chain(guard)
    }

    /// Bytes of the block, if it can be one.
    fn check(&self) -> Result<u32, String> {
        if self.entry.is_empty() || self.entry.bytes().any(|byte| byte == 0) {
            return Err("the entry symbol is empty or holds a zero byte".into());
        }
        if self.block.contains(&0) {
            return Err(format!("a block of {:?} work-items has none", self.block));
        }
        if self.cluster == 0 {
            return Err("a cluster of no blocks".into());
        }
        for Parameter { name, kind } in &self.parameters {
            match kind {
                ParameterKind::View { extents, element, align, .. } => {
                    if !(1..=MAX_RANK).contains(&extents.len()) {
                        return Err(format!(
                            "the view {name} has {} dimensions, not 1 to {MAX_RANK}",
                            extents.len()
                        ));
                    }
                    if !matches!(element, 1 | 2 | 4 | 8) {
                        return Err(format!("the view {name} has elements of {element} bytes"));
                    }
                    if !align.is_power_of_two() || align < element {
                        return Err(format!("the view {name} is aligned to {align} bytes"));
                    }
                    if extents.contains(&Extent::Multiple(0)) {
                        return Err(format!("an extent of the view {name} is a multiple of 0"));
                    }
                }
                ParameterKind::Scalar { bytes, range, .. } => {
                    if !matches!(bytes, 1 | 2 | 4 | 8) {
                        return Err(format!("the scalar {name} has {bytes} bytes"));
                    }
                    if range.is_some_and(|(least, greatest)| least > greatest) {
                        return Err(format!("no number is in the range of the scalar {name}"));
                    }
                }
            }
        }
        let mut fields: Vec<_> = self.fields().map(|(name, offset, bytes)| (offset, bytes, name)).collect();
        fields.sort_unstable();
        let mut end = 0u32;
        for (offset, bytes, name) in fields {
            if offset < end || offset % bytes.min(8) != 0 || offset > PARAMETER_BYTES - bytes {
                return Err(format!(
                    "the {bytes} bytes of {name} at {offset} overlap another parameter, are misaligned or lie over \
                     {PARAMETER_BYTES}"
                ));
            }
            end = offset + bytes;
        }
        Ok(end)
    }
}

/// A signature that was checked, and the bytes of its block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) signature: Signature,
    pub(crate) bytes: u32,
}

/// A module's image and its one entry. Clones share both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    image: Arc<[u8]>,
    layout: Arc<Layout>,
}

impl Artifact {
    /// An artifact: `image` in whatever form the accelerator takes (PTX or cubin for CUDA), and what a launch must know
    /// of the kernel.
    ///
    /// # Errors
    /// [`Error::Load`] if no kernel can have that signature: parameters that overlap, are misaligned or too many; a
    /// block without work-items; an entry that is no symbol.
    ///
    /// # Safety
    /// The kernel takes just these parameters. Launched in blocks of this size with arguments that they admit, it
    /// reaches no memory but the elements of its views, its stop word, and shared and local memory of its own, whatever
    /// the scalars and the grid are. What a compiler made from a validated module keeps to that.
    pub unsafe fn new(image: impl Into<Arc<[u8]>>, signature: Signature) -> Result<Self> {
        match signature.check() {
            Ok(bytes) => Ok(Self { image: image.into(), layout: Arc::new(Layout { signature, bytes }) }),
            Err(reason) => Err(Error::Load { kernel: signature.entry, reason }),
        }
    }

    /// The module's image.
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    /// What a launch must know of the kernel.
    pub fn signature(&self) -> &Signature {
        &self.layout.signature
    }

    /// The kernel's symbol.
    pub fn entry(&self) -> &str {
        &self.layout.signature.entry
    }

    /// Bytes of the block of parameters.
    pub fn parameter_bytes(&self) -> u32 {
        self.layout.bytes
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn parameter(kind: ParameterKind) -> Parameter {
        Parameter { name: "p".into(), kind }
    }

    fn scalar(offset: u32, bytes: u32) -> Parameter {
        parameter(ParameterKind::Scalar { offset, bytes, range: None })
    }

    fn view(offset: u32, rank: usize, element: u32, align: u32) -> Parameter {
        parameter(ParameterKind::View {
            offset,
            extents: vec![Extent::Any; rank],
            element,
            align,
            writes: false,
        })
    }

    #[test]
    fn a_layout_that_no_kernel_has_is_refused() {
        let check = |change: &dyn Fn(&mut Signature), bytes: Option<u32>| {
            let mut signature = Signature {
                entry: "k".into(),
                block: [1; 3],
                cluster: 1,
                shared_bytes: 0,
                parameters: vec![],
                guard: None,
                work: u64::MAX,
            };
            change(&mut signature);
            let shown = format!("{signature:?}");
            // SAFETY: the artifact is dropped, not run.
            let artifact = unsafe { Artifact::new([], signature) };
            assert_eq!(artifact.ok().map(|artifact| artifact.parameter_bytes()), bytes, "{shown}");
        };
        let with = |parameters: Vec<Parameter>, bytes| {
            check(&|signature| signature.parameters = parameters.clone(), bytes);
        };
        with(vec![], Some(0));
        check(&|signature| signature.entry = String::new(), None);
        check(&|signature| signature.entry = "a\0b".into(), None);
        check(&|signature| signature.block = [32, 0, 1], None);
        check(&|signature| signature.cluster = 0, None);
        with(vec![scalar(0, 4), scalar(8, 8)], Some(16));
        with(vec![scalar(8, 8), scalar(0, 1)], Some(16));
        with(vec![scalar(0, 3)], None);
        with(vec![scalar(2, 4)], None);
        with(vec![scalar(0, 8), scalar(4, 4)], None);
        with(vec![scalar(4092, 4)], Some(4096));
        with(vec![scalar(4096, 4)], None);
        with(vec![scalar(u32::MAX - 3, 4)], None);
        with(vec![parameter(ParameterKind::Scalar { offset: 0, bytes: 4, range: Some((1, 0)) })], None);
        with(vec![view(0, 1, 4, 4), view(16, 4, 2, 256), scalar(80, 1)], Some(81));
        with(vec![view(0, 4, 4, 4), scalar(56, 8)], None);
        with(vec![view(4, 1, 4, 4)], None);
        with(vec![view(4088, 1, 4, 4)], None);
        with(vec![view(0, 0, 4, 4)], None);
        with(vec![view(0, 5, 4, 4)], None);
        with(vec![view(0, 1, 3, 4)], None);
        with(vec![view(0, 1, 4, 2)], None);
        with(vec![view(0, 1, 4, 12)], None);
        check(&|signature| signature.guard = Some(Guard { stop: 0, fuel: 8 }), Some(16));
        check(&|signature| signature.guard = Some(Guard { stop: 8, fuel: 12 }), None);
    }
}
