//! Views: the only global memory that a kernel can reach.
//!
//! A view is a base address, an extent for each dimension, and a stride for each dimension but the last,
//! whose elements lie one behind the other. The launch supplies them and is refused unless they fit the
//! view's type, so what the type says may be relied upon: that is what range analysis and vector accesses
//! stand on. Extents of one kernel that have the same name are equal, whatever the views.
//!
//! A surface is a view of the pixels of an image, which lie as the device likes: each has the lanes of the last dimension, and
//! is loaded and stored whole.

use crate::limits::MAX_RANK;
use crate::types::Scalar;
use std::fmt;

/// What a kernel may do with a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Load. No thread, of this launch or elsewhere, writes the memory while the kernel runs.
    Read,
    /// Store.
    Write,
    /// Load, store, atomics.
    ReadWrite,
}

impl Access {
    /// Every access, in the order of its binary code.
    pub const ALL: [Access; 3] = [Access::Read, Access::Write, Access::ReadWrite];

    /// The name in text.
    pub const fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::ReadWrite => "readwrite",
        }
    }

    /// May the kernel load?
    pub const fn reads(self) -> bool {
        !matches!(self, Access::Write)
    }

    /// May the kernel store?
    pub const fn writes(self) -> bool {
        !matches!(self, Access::Read)
    }
}

/// What is known of one extent of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// A multiple of the number, which is at least 1.
    Any {
        /// The number.
        multiple: u32,
    },
    /// Exactly this.
    Fixed(u64),
}

impl Dim {
    /// Any extent.
    pub const ANY: Dim = Dim::Any { multiple: 1 };

    /// Does a launch's extent fit?
    pub const fn admits(self, extent: u64) -> bool {
        match self {
            Dim::Any { multiple } => multiple != 0 && extent.is_multiple_of(multiple as u64),
            Dim::Fixed(fixed) => extent == fixed,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Any { multiple: 1 } => f.write_str("?"),
            Dim::Any { multiple } => write!(f, "?*{multiple}"),
            Dim::Fixed(extent) => write!(f, "{extent}"),
        }
    }
}

/// The type of a view.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ViewType {
    /// What one element is; never `bool`.
    pub element: Scalar,
    /// The extents, slowest dimension first.
    pub dims: Vec<Dim>,
    /// The names of the extents that have one, by dimension. A name stands beside a [`Dim::Any`], whose multiple is the
    /// same wherever the kernel has the name.
    pub names: [Option<Box<str>>; MAX_RANK],
    /// What the kernel may do.
    pub access: Access,
    /// The base address and every stride are multiples of this many bytes: a power of two from the element's
    /// size to 256.
    pub align: u32,
    /// Is it a surface? Its dimensions are the rows, the pixels of each and the fixed lanes of one, behind the layers if it has
    /// any; indices are those of a pixel.
    pub surface: bool,
}

impl ViewType {
    /// A view of `rank` dimensions of any extent, aligned to its element.
    pub fn new(element: Scalar, rank: usize, access: Access) -> ViewType {
        let names = Default::default();
        ViewType {
            element,
            dims: vec![Dim::ANY; rank],
            names,
            access,
            align: element.bytes(),
            surface: false,
        }
    }

    /// A surface whose pixels are found by `rank` indices and have N lanes: 2 for rows and columns, 3 for layers before them.
    pub fn surface(element: Scalar, rank: usize, lanes: u8, access: Access) -> ViewType {
        let mut view = ViewType { surface: true, ..ViewType::new(element, rank, access) };
        view.dims.push(Dim::Fixed(lanes.into()));
        view
    }

    /// The lanes of a pixel; `None` if it is no surface.
    pub fn pixel(&self) -> Option<u8> {
        match self.dims.last() {
            Some(Dim::Fixed(lanes)) if self.surface => u8::try_from(*lanes).ok(),
            _ => None,
        }
    }

    /// The same view with names for its extents, slowest dimension first; `""` leaves one without. Names beyond
    /// [`MAX_RANK`] are left out.
    pub fn named(mut self, names: &[&str]) -> ViewType {
        for (slot, name) in self.names.iter_mut().zip(names) {
            *slot = (!name.is_empty()).then(|| (*name).into());
        }
        self
    }

    /// The same view with another alignment.
    pub fn aligned(mut self, bytes: u32) -> ViewType {
        self.align = bytes;
        self
    }

    /// The same view with other extents.
    pub fn with_dims(mut self, dims: &[Dim]) -> ViewType {
        self.dims = dims.to_vec();
        self
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Number of indices of an access.
    pub fn indices(&self) -> usize {
        self.rank().saturating_sub(self.surface.into())
    }
}

impl fmt::Display for ViewType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}<{}, [", if self.surface { "surface" } else { "view" }, self.element)?;
        for (i, dim) in self.dims.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { ", " })?;
            match (self.names.get(i).and_then(Option::as_deref), dim) {
                (Some(name), Dim::Any { multiple: 1 }) => f.write_str(name)?,
                (Some(name), Dim::Any { multiple }) => write!(f, "{name}*{multiple}")?,
                _ => write!(f, "{dim}")?,
            }
        }
        write!(f, "], {}", self.access.name())?;
        if self.align != self.element.bytes() {
            write!(f, ", align {}", self.align)?;
        }
        f.write_str(">")
    }
}
