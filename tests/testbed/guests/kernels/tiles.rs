//! What `accel-tiles` sends, as the kernel library lays it out: a product and attention of bf16, of extents that are no multiples of a
//! tile. The program that measures guests against the host launches the same.

use std::f32::consts::LN_2;

use vm_ir::Scalar;
use vm_kernels::attention::{DotProductAttention, Mask};
use vm_kernels::call::{CallError, Function, Launch};
use vm_kernels::family::{Kind, Resources};
use vm_kernels::gemm::{Multiply, Product};

/// The device that they are laid out for: an H100, whose tensor cores take operands from shared memory. A processor runs them too.
const DEVICE: Resources =
    Resources { compute_units: 132, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };

/// All launches, with what guests call them. A buffer is an argument of one view, and the last is the result's.
pub(crate) fn tiles() -> Result<Vec<(&'static str, Launch)>, CallError> {
    let product = Multiply { product: Product::of(200, 136, 328), alpha: 1.0, beta: 0.0 };
    let attention = DotProductAttention {
        element: Scalar::Bf16,
        fp8: None,
        batch: 1,
        heads: [2, 1],
        lengths: [200; 2],
        dim: 64,
        mask: Mask::Causal,
        window: [0; 2],
        bias: false,
        log_sums: false,
        // Exponentials of integers are then powers of two, which are rounded to nothing else.
        scale: LN_2,
        align: 16,
    };
    let functions: [(_, &dyn Function); 2] = [("product", &product), ("attention", &attention)];
    let mut all = Vec::new();
    for (name, function) in functions {
        all.extend(function.call(&DEVICE)?.launches.into_iter().map(|launch| (name, launch)));
    }
    Ok(all)
}
