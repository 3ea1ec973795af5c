//! What `accel-tiles` sends, as the kernel library lays it out: a product and attention of bf16, of extents that are no multiples of a
//! tile. The program that measures guests against the host launches the same.

use vm_ir::builder::BuildError;
use vm_ir::{GuestAddr, Kernel};
use vm_kernels::attention::Forward;
use vm_kernels::family::{Kind, Problem, Resources, Sample, Variant as _};
use vm_kernels::gemm::Product;

/// The device that they are laid out for: an H100, whose tensor cores take operands from shared memory. A processor runs them too.
const DEVICE: Resources =
    Resources { compute_units: 132, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };

/// A launch.
pub(crate) struct Tile {
    /// What the guest calls it.
    pub(crate) name: &'static str,
    /// Its kernel.
    pub(crate) kernel: Kernel,
    /// Blocks along x, y and z.
    pub(crate) grid: [u32; 3],
    /// What the parameters take. The last view is the result.
    pub(crate) arguments: Vec<Sample>,
}

/// All of them.
pub(crate) fn tiles() -> Result<[Tile; 2], BuildError> {
    Ok([tile("product", &Product::of(200, 136, 328))?, tile("attention", &Forward::of(1, 2, 200, 64, true))?])
}

fn tile<P: Problem>(name: &'static str, problem: &P) -> Result<Tile, BuildError> {
    let variants = problem.variants(&DEVICE);
    let variant = variants.first().expect("an H100 has room for the first guess");
    let (kernel, grid) = (variant.kernel(GuestAddr(0x1000))?, problem.grid(variant, &DEVICE));
    Ok(Tile { name, kernel, grid, arguments: problem.arguments() })
}
