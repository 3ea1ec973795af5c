//! A compiled kernel as the accelerator gets it: the module's image, the entry symbol, how a block looks, and what the
//! parameters are. [`vm_abi`] says where they lie.
#![allow(unsafe_code)]

use std::sync::Arc;

use vm_abi::{Element, Field, MAX_PARAMETER_BYTES, MAX_RANK, ParamLayout, Tile};

use crate::error::{Error, Result};
use crate::tensor;

/// What a kernel wants of one extent of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Any number of elements.
    Any,
    /// A multiple of this many, which is at least 1.
    Multiple(u32),
    /// Just this many.
    Fixed(u64),
    /// As many as another extent has. The view is this one or comes before it.
    Same {
        /// The view: its index among the kernel's parameters.
        parameter: u32,
        /// Its dimension, slowest first.
        dimension: u32,
    },
}

impl Extent {
    /// Whether an extent is what the kernel wants, as far as that is said without the other arguments.
    pub fn admits(self, extent: u64) -> bool {
        match self {
            Self::Any | Self::Same { .. } => true,
            Self::Multiple(number) => number != 0 && extent.is_multiple_of(u64::from(number)),
            Self::Fixed(fixed) => extent == fixed,
        }
    }
}

/// What a parameter is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// A view of memory.
    View {
        /// What the kernel wants of each extent, slowest dimension first; their number is the rank, 1 to [`MAX_RANK`].
        extents: Vec<Extent>,
        /// Its elements. Signed integers are as unsigned ones; whatever else has one byte is `u8`.
        element: Element,
        /// A power of two that the address and every stride must be multiples of.
        align: u32,
        /// Whether the kernel writes through it. Such a view may overlap no other of the launch.
        writes: bool,
    },
    /// A surface, by its handle.
    Surface {
        /// As of a view: layers if it has any, rows, pixels of a row, numbers of a pixel.
        extents: Vec<Extent>,
        /// The numbers of a pixel.
        element: Element,
        /// Whether the kernel writes it. Such a surface is no other of the launch.
        writes: bool,
    },
    /// A number.
    Scalar {
        /// How many there are: 1, 2, 4 or 8.
        bytes: u32,
        /// The least and the greatest value, as a signed integer of that size.
        range: Option<(i64, i64)>,
    },
}

impl ParameterKind {
    /// What the kernel wants of the extents of a view or a surface.
    pub(crate) fn extents(&self) -> &[Extent] {
        match self {
            Self::View { extents, .. } | Self::Surface { extents, .. } => extents,
            Self::Scalar { .. } => &[],
        }
    }
}

/// One parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, for errors.
    pub name: String,
    /// What it is bound to.
    pub kind: ParameterKind,
}

/// What a launch must know of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The kernel's symbol in the image.
    pub entry: String,
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Blocks of a cluster, neighbours along x that run at the same time: a grid has a multiple of that along x. 1
    /// for a kernel whose blocks are by themselves. The code says it too, so it is no part of a launch.
    pub cluster: u32,
    /// Bytes of shared memory that each block gets beside what the code declares by itself.
    pub shared_bytes: u32,
    /// The parameters, in the order in which arguments are given.
    pub parameters: Vec<Parameter>,
    /// The boxes of views that it copies by tensor maps, which the launch makes.
    pub tiles: Vec<Tile>,
    /// Whether it can be stopped: then it has a [`Guard`](vm_abi::Guard).
    pub guarded: bool,
    /// The static cost bound: the most that a thread does before it ends or polls the cancel flag, in operations about as long as an addition
    /// each; [`u64::MAX`] where that is not known.
    pub cost_bound: u64,
}

impl Signature {
    /// Where the parameters lie.
    fn layout(&self) -> ParamLayout {
        let fields = self.parameters.iter().map(|parameter| match &parameter.kind {
            ParameterKind::Scalar { bytes, .. } => Field::Scalar { bytes: *bytes },
            of_extents => Field::View { rank: of_extents.extents().len() as u32 },
        });
        ParamLayout::new(fields, self.tiles.iter().copied(), self.guarded)
    }

    /// Whether a parameter is a view with this dimension.
    fn has_extent(&self, parameter: u32, dimension: u32) -> bool {
        let kind = self.parameters.get(parameter as usize).map(|parameter| &parameter.kind);
        kind.is_some_and(|kind| (dimension as usize) < kind.extents().len())
    }

    /// Where the parameters lie, if a kernel can have them.
    fn check(&self) -> Result<ParamLayout, String> {
        if self.entry.is_empty() || self.entry.bytes().any(|byte| byte == 0) {
            return Err("the entry symbol is empty or holds a zero byte".into());
        }
        if self.block.contains(&0) {
            return Err(format!("a block of {:?} threads has none", self.block));
        }
        if self.cluster == 0 {
            return Err("a cluster of no blocks".into());
        }
        for (index, Parameter { name, kind }) in (0..).zip(&self.parameters) {
            match kind {
                ParameterKind::View { extents, element, .. }
                | ParameterKind::Surface { extents, element, .. } => {
                    let align = match kind {
                        ParameterKind::View { align, .. } => *align,
                        _ => element.bytes(),
                    };
                    if !(1..=MAX_RANK).contains(&extents.len()) {
                        return Err(format!(
                            "the view {name} has {} dimensions, not 1 to {MAX_RANK}",
                            extents.len()
                        ));
                    }
                    if !align.is_power_of_two() || align < element.bytes() {
                        return Err(format!("the view {name} is aligned to {align} bytes"));
                    }
                    if extents.contains(&Extent::Multiple(0)) {
                        return Err(format!("an extent of the view {name} is a multiple of 0"));
                    }
                    let known = |extent: &Extent| match *extent {
                        Extent::Same { parameter, dimension } => {
                            parameter <= index && self.has_extent(parameter, dimension)
                        }
                        _ => true,
                    };
                    if !extents.iter().all(known) {
                        return Err(format!("an extent of the view {name} is that of no view before it"));
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
        self.tiles.iter().try_for_each(|tile| tensor::check_tile(tile, &self.parameters))?;
        let layout = self.layout();
        if layout.bytes > MAX_PARAMETER_BYTES {
            let bytes = layout.bytes;
            return Err(format!(
                "its parameters take {bytes} bytes, no device takes over {MAX_PARAMETER_BYTES}"
            ));
        }
        Ok(layout)
    }
}

/// A signature that was checked, and where its parameters lie.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) signature: Signature,
    pub(crate) params: ParamLayout,
}

impl Layout {
    /// That a view of such elements is what the parameter with this number wants, if it wants a view.
    pub(crate) fn check_element(&self, index: usize, given: Element) -> Result<()> {
        match self.signature.parameters.get(index) {
            Some(Parameter {
                name,
                kind: ParameterKind::View { element, .. } | ParameterKind::Surface { element, .. },
            }) if *element != given => Err(Error::Arguments {
                kernel: self.signature.entry.clone(),
                parameter: name.clone(),
                reason: format!("elements of {element} are wanted, {given} were given"),
            }),
            _ => Ok(()),
        }
    }
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
    /// [`Error::Load`] if no kernel can have that signature: too many parameters; boxes that no view has; a
    /// block without threads; an entry that is no symbol.
    ///
    /// # Safety
    /// The kernel takes just these parameters, where [`Artifact::params`] says. Launched in blocks of this size with arguments that they admit, it
    /// reaches no memory but the elements of its views, its cancel flag, and shared and local memory of its own, whatever
    /// the scalars and the grid are. What a compiler made from a validated module keeps to that.
    pub unsafe fn new(image: impl Into<Arc<[u8]>>, signature: Signature) -> Result<Self> {
        match signature.check() {
            Ok(params) => Ok(Self { image: image.into(), layout: Arc::new(Layout { signature, params }) }),
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

    /// Where its parameters lie.
    pub fn params(&self) -> &ParamLayout {
        &self.layout.params
    }

    /// Bytes of the block of parameters.
    pub fn parameter_bytes(&self) -> u32 {
        self.layout.params.bytes
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

    fn scalar(bytes: u32) -> Parameter {
        parameter(ParameterKind::Scalar { bytes, range: None })
    }

    fn view(rank: usize, element: Element, align: u32) -> Parameter {
        parameter(ParameterKind::View { extents: vec![Extent::Any; rank], element, align, writes: false })
    }

    fn parameter_of(extents: Vec<Extent>) -> Parameter {
        parameter(ParameterKind::View { extents, element: Element::F32, align: 4, writes: false })
    }

    #[test]
    fn a_signature_that_no_kernel_has_is_refused() {
        let check = |change: &dyn Fn(&mut Signature), bytes: Option<u32>| {
            let mut signature = Signature {
                entry: "k".into(),
                block: [1; 3],
                cluster: 1,
                shared_bytes: 0,
                parameters: vec![],
                tiles: vec![],
                guarded: false,
                cost_bound: u64::MAX,
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
        check(&|signature| signature.guarded = true, Some(16));
        check(&|signature| signature.entry = String::new(), None);
        check(&|signature| signature.entry = "a\0b".into(), None);
        check(&|signature| signature.block = [32, 0, 1], None);
        check(&|signature| signature.cluster = 0, None);
        with(vec![scalar(4), scalar(8)], Some(16));
        with(vec![scalar(3)], None);
        with([vec![scalar(8); 4095], vec![scalar(4)]].concat(), Some(32_764));
        with(vec![scalar(8); 4096], None);
        with(vec![parameter(ParameterKind::Scalar { bytes: 4, range: Some((1, 0)) })], None);
        with(vec![view(1, Element::F32, 4), view(4, Element::F16, 256), scalar(1)], Some(81));
        with(vec![view(0, Element::F32, 4)], None);
        with(vec![view(5, Element::F32, 4)], None);
        let same = |parameter, dimension| {
            let extents = vec![Extent::Any, Extent::Same { parameter, dimension }];
            vec![view(1, Element::F32, 4), parameter_of(extents), view(2, Element::F32, 4)]
        };
        with(same(0, 0), Some(80));
        with(same(1, 0), Some(80));
        with(same(0, 1), None);
        with(same(2, 0), None);
        with(vec![view(1, Element::F32, 2)], None);
        with(vec![view(1, Element::F32, 12)], None);
    }
}
