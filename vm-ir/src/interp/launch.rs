//! A launch: grid, arguments and limits, checked against the kernel's parameters.

use crate::format::{from_f64, signed, to_f64};
use crate::limits::{MAX_EXTENT, MAX_GRID_X, MAX_GRID_YZ};
use crate::module::{Kernel, ParamKind, Place};
use crate::types::Scalar;
use std::time::Instant;

/// Memory for a view: elements row by row, one row directly behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// What one element is.
    pub element: Scalar,
    /// The extents, slowest dimension first.
    pub extents: Vec<u64>,
    /// The elements, little-endian.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(element: Scalar, extents: &[u64]) -> Tensor {
        let elements: u64 = extents.iter().product();
        Tensor {
            element,
            extents: extents.to_vec(),
            bytes: vec![0; elements as usize * element.bytes() as usize],
        }
    }

    /// A tensor of these numbers, each rounded to the element.
    pub fn from_f64s(element: Scalar, extents: &[u64], values: impl IntoIterator<Item = f64>) -> Tensor {
        Tensor::from_bits(element, extents, values.into_iter().map(|v| from_f64(element, v)))
    }

    /// A tensor of these bits.
    pub fn from_bits(element: Scalar, extents: &[u64], bits: impl IntoIterator<Item = u64>) -> Tensor {
        let size = element.bytes() as usize;
        let bytes = bits.into_iter().flat_map(|b| b.to_le_bytes().into_iter().take(size)).collect();
        Tensor { element, extents: extents.to_vec(), bytes }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.element.bytes() as usize
    }

    /// Is it without elements?
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bits of an element; 0 beyond the end.
    pub fn bits(&self, index: usize) -> u64 {
        let size = self.element.bytes() as usize;
        let mut word = [0; 8];
        if let Some(bytes) = self.bytes.get(index * size..(index + 1) * size) {
            word[..size].copy_from_slice(bytes);
        }
        u64::from_le_bytes(word)
    }

    /// Sets the bits of an element; nothing beyond the end.
    pub fn set_bits(&mut self, index: usize, bits: u64) {
        let size = self.element.bytes() as usize;
        if let Some(bytes) = self.bytes.get_mut(index * size..(index + 1) * size) {
            bytes.copy_from_slice(&bits.to_le_bytes()[..size]);
        }
    }

    /// All elements as numbers; integers as signed ones.
    pub fn to_f64s(&self) -> Vec<f64> {
        (0..self.len())
            .map(|i| match self.element.is_int() {
                true => signed(self.element, self.bits(i)) as f64,
                false => to_f64(self.element, self.bits(i)),
            })
            .collect()
    }
}

/// An argument of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// For a scalar parameter: its bits.
    Bits(u64),
    /// For a view.
    Tensor(Tensor),
}

impl Argument {
    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<&Tensor> {
        match self {
            Argument::Tensor(tensor) => Some(tensor),
            Argument::Bits(_) => None,
        }
    }
}

/// What to run. Arguments are in the order of the kernel's parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name.
    pub kernel: String,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// The arguments. Each view has memory of its own, so views never overlap.
    pub arguments: Vec<Argument>,
}

/// What a run may use.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Steps: one for each op and thread that executes it, and for each block one for each of its threads and one
    /// for every eight bytes of its shared arrays.
    pub fuel: u64,
    /// When to give up.
    pub deadline: Option<Instant>,
    /// Bytes for the values of one block.
    pub memory: usize,
    /// Report races?
    pub races: bool,
}

impl Default for Limits {
    /// 10^9 steps, no deadline, 1 GiB, races reported.
    fn default() -> Limits {
        Limits { fuel: 1_000_000_000, deadline: None, memory: 1 << 30, races: true }
    }
}

/// What a run took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Steps: one for each op and thread that executed it.
    pub steps: u64,
}

/// A launch that does not fit its kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The module has no such kernel.
    #[error("the module has no kernel @{0}")]
    NoKernel(String),
    /// The grid is empty or too large.
    #[error("a grid of {0} × {1} × {2} blocks; each must be at least 1, at most 2^31 - 1, 65535 and 65535")]
    Grid(u32, u32, u32),
    /// The grid is no multiple of the cluster.
    #[error("a grid of {grid} blocks along x; the kernel's clusters need a multiple of {cluster}")]
    Cluster {
        /// Blocks along x.
        grid: u32,
        /// Blocks of a cluster.
        cluster: u32,
    },
    /// Too few or too many arguments.
    #[error("the kernel takes {expected} arguments, {found} are given")]
    Count {
        /// How many it takes.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// Extents of one name that differ.
    #[error(
        "the extents called {name} differ: @{first} has {expected} in dimension {first_dimension}, @{second} has {found} in \
         dimension {dimension}"
    )]
    Extents {
        /// The name.
        name: String,
        /// The view that has it first.
        first: String,
        /// Of that view.
        first_dimension: usize,
        /// The extent there.
        expected: u64,
        /// The view that has another.
        second: String,
        /// Of that view.
        dimension: usize,
        /// The other extent.
        found: u64,
    },
    /// An argument that does not fit its parameter.
    #[error("argument {name}: {what}")]
    Argument {
        /// The parameter.
        name: String,
        /// What is wrong.
        what: String,
    },
}

impl Launch {
    /// Does the launch fit the kernel?
    ///
    /// # Errors
    ///
    /// What does not fit, the first of it.
    pub fn check(&self, kernel: &Kernel) -> Result<(), LaunchError> {
        let [x, y, z] = self.grid;
        if x == 0 || y == 0 || z == 0 || x > MAX_GRID_X || y > MAX_GRID_YZ || z > MAX_GRID_YZ {
            return Err(LaunchError::Grid(x, y, z));
        }
        if !x.is_multiple_of(kernel.cluster()) {
            return Err(LaunchError::Cluster { grid: x, cluster: kernel.cluster() });
        }
        let (expected, found) = (kernel.params().len(), self.arguments.len());
        if expected != found {
            return Err(LaunchError::Count { expected, found });
        }
        for (param, argument) in kernel.params().iter().zip(&self.arguments) {
            let wrong = |what: String| Err(LaunchError::Argument { name: param.name.to_string(), what });
            match (&param.kind, argument) {
                (ParamKind::Scalar { value, range }, Argument::Bits(bits)) => {
                    let scalar = kernel.type_of(*value).scalar();
                    if bits & !scalar.mask() != 0 {
                        return wrong(format!("{bits:#x} has bits beyond {scalar}"));
                    }
                    let number = signed(scalar, *bits);
                    if let Some((least, greatest)) = range.filter(|(l, g)| number < *l || number > *g) {
                        return wrong(format!("{number} is not from {least} to {greatest}"));
                    }
                }
                (ParamKind::View(view), Argument::Tensor(tensor)) => {
                    if tensor.element != view.element {
                        return wrong(format!("is of {}, the view is of {}", tensor.element, view.element));
                    }
                    let fits = tensor.extents.len() == view.rank()
                        && tensor
                            .extents
                            .iter()
                            .zip(&view.dims)
                            .all(|(e, d)| *e <= MAX_EXTENT && d.admits(*e));
                    if !fits {
                        return wrong(format!("extents {:?} do not fit {view}", tensor.extents));
                    }
                    let elements = tensor.extents.iter().try_fold(1u64, |n, e| n.checked_mul(*e));
                    if elements != Some(tensor.len() as u64) {
                        return wrong(format!(
                            "extents {:?} do not count its {} elements",
                            tensor.extents,
                            tensor.len()
                        ));
                    }
                    let row = tensor.extents.last().copied().unwrap_or(0) * u64::from(view.element.bytes());
                    if view.rank() > 1 && !row.is_multiple_of(u64::from(view.align)) {
                        return wrong(format!("rows of {row} bytes are not aligned to {}", view.align));
                    }
                }
                (ParamKind::Scalar { .. }, Argument::Tensor(_)) => {
                    return wrong("is a tensor, not a number".into());
                }
                (ParamKind::View(_), Argument::Bits(_)) => return wrong("is a number, not a tensor".into()),
            }
        }
        self.check_names(kernel)
    }

    /// Have extents of one name as many elements?
    fn check_names(&self, kernel: &Kernel) -> Result<(), LaunchError> {
        let views = kernel.params().iter().zip(&self.arguments).enumerate();
        for (index, (param, argument)) in views {
            let (ParamKind::View(view), Some(tensor)) = (&param.kind, argument.tensor()) else { continue };
            for (dimension, (name, found)) in view.names.iter().zip(&tensor.extents).enumerate() {
                let Some(name) = name else { continue };
                let (first, first_dimension) = kernel.same_extent(index as u16, dimension);
                let extents = self.arguments.get(usize::from(first)).and_then(Argument::tensor);
                let expected = extents.and_then(|t| t.extents.get(first_dimension)).copied();
                if let Some(expected) = expected.filter(|expected| expected != found) {
                    return Err(LaunchError::Extents {
                        name: name.to_string(),
                        first: kernel.place_name(Place::View(first)).to_owned(),
                        first_dimension,
                        expected,
                        second: param.name.to_string(),
                        dimension,
                        found: *found,
                    });
                }
            }
        }
        Ok(())
    }
}
