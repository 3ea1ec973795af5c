//! What a family is to who chooses among its variants.
//!
//! A [`Problem`] is what is to be computed, of certain extents. Its *shape class* ([`Problem::class`]) is what it shares with those
//! for which the same variant will do, and its family has a table of variants for the class, the best guess first: without any
//! measurement the first that compiles is taken. A tuner (that of `vm-runtime`, say) measures them and keeps the choice by
//! family and class.
//!
//! Nothing here knows devices: what they have is told by [`Resources`], and whether a target has a variant's instructions its
//! compiler says.

use vm_ir::builder::BuildError;
use vm_ir::interp::Tensor;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// What a device has, as far as the choice of a variant depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// What runs blocks: SMs, CUs, cores. At least 1.
    pub compute_units: u32,
    /// The most bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// What runs a block.
    pub kind: Kind,
    /// The most blocks of a cluster; 1 without clusters.
    pub cluster: u32,
}

/// What runs a block: how the same work is laid out depends on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Many threads at the same time, which hide the latency of memory.
    Gpu,
    /// One thread of a processor, whose caches keep what is read twice.
    Cpu,
}

/// An argument of a launch that is measured.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample {
    /// A view of random numbers, as data decides how fast a device multiplies: zeros take less power.
    Random {
        /// The type of the elements.
        element: Scalar,
        /// The extents in elements, slowest dimension first.
        extents: Vec<u64>,
    },
    /// A view of numbers that matter, such as offsets.
    Values(Tensor),
    /// A number: its bits, of this type.
    Number(u64, Type),
}

impl Sample {
    /// A number of f32.
    pub fn f32(value: f32) -> Sample {
        Sample::Number(value.to_bits().into(), Type::F32)
    }
}

/// A launch of one of a variant's kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The blocks over which it is launched.
    pub grid: [u32; 3],
    /// Its arguments in the order of its parameters, by their places in [`Problem::arguments`].
    pub arguments: Vec<usize>,
}

/// A variant of a family.
pub trait Variant: Clone + Send + 'static {
    /// Its name, which tells it from all others and is the same on every machine.
    fn name(&self) -> String;

    /// Its kernel; of several the one that has most to do.
    ///
    /// # Errors
    /// A number that no kernel can have.
    fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError>;

    /// All its kernels, in the order in which they are launched one behind the other; as a rule the one.
    ///
    /// # Errors
    /// As [`kernel`](Self::kernel).
    fn kernels(&self, guest: GuestAddr) -> Result<Vec<Kernel>, BuildError> {
        Ok(vec![self.kernel(guest)?])
    }
}

/// What is to be computed by a family.
pub trait Problem {
    /// A variant.
    type Variant: Variant;

    /// The family's name: letters, digits and `_`.
    fn family(&self) -> &str;

    /// The shape class: what a choice is kept by, besides the family and the device. The same text for problems that share it.
    fn class(&self) -> String;

    /// The variants for the class that such a device has room for, the best guess first.
    fn variants(&self, resources: &Resources) -> Vec<Self::Variant>;

    /// The blocks over which a variant's [kernel](Variant::kernel) is launched.
    fn grid(&self, variant: &Self::Variant, resources: &Resources) -> [u32; 3];

    /// The launches of a variant's [kernels](Variant::kernels); as a rule one, of all arguments.
    fn steps(&self, variant: &Self::Variant, resources: &Resources) -> Vec<Step> {
        let arguments = (0..self.arguments().len()).collect();
        vec![Step { grid: self.grid(variant, resources), arguments }]
    }

    /// The arguments of all launches, which all variants share: of the one in the order of the parameters.
    fn arguments(&self) -> Vec<Sample>;

    /// Operations of all launches, for their rate; a multiplication and an addition are two.
    fn operations(&self) -> f64;
}

/// An extent as a shape class has it: rounded up to the next power of two, or to that and a half.
pub fn rounded(extent: u64) -> u64 {
    let power = extent.clamp(1, 1 << 62).next_power_of_two();
    let less = power / 4 * 3;
    if extent <= less && power >= 4 { less } else { power }
}
