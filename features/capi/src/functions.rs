//! Which function of the library each function of the ABI is. Its buffers are the pointers, in their order.

use vm_kernels::attention::{Attend, Mask};
use vm_kernels::call::Function;
use vm_kernels::gemm::{Batch, Epilogue, Multiply, Product};

use crate::call::Arguments;
use crate::error::Failure;

type Made = Result<Box<dyn Function>, Failure>;

pub(crate) fn gemm(call: &Arguments<'_>) -> Made {
    multiply(call, Batch::One, 1)
}

pub(crate) fn gemm_batched(call: &Arguments<'_>) -> Made {
    multiply(call, Batch::Batched, call.extent("batch"))
}

fn multiply(call: &Arguments<'_>, batch: Batch, matrices: u64) -> Made {
    let [m, n, k] = ["M", "N", "K"].map(|name| call.extent(name));
    let (alpha, beta) = (call.float("alpha"), call.float("beta"));
    let epilogue = Epilogue { scaled: alpha != 1.0, plus: beta != 0.0, ..Epilogue::NONE };
    let product = Product {
        element: call.element,
        output: call.element,
        epilogue,
        batch,
        matrices,
        // No copying engine takes matrices without elements.
        align: if k == 0 { 1 } else { call.align(&[n, k]) },
        ..Product::of(m, n, k)
    };
    Ok(Box::new(Multiply { product, alpha, beta }))
}

pub(crate) fn mqa_attention(call: &Arguments<'_>) -> Made {
    attend(call, 1, Mask::Full, call.is("mask"))
}

pub(crate) fn flash_attention(call: &Arguments<'_>) -> Made {
    let mask = if call.is("is_causal") { Mask::Causal } else { Mask::Full };
    attend(call, call.extent("n_heads"), mask, false)
}

fn attend(call: &Arguments<'_>, shared: u64, mask: Mask, bias: bool) -> Made {
    let (length, dim, scale) = (call.extent("seq_len"), call.extent("head_dim"), call.float("scale"));
    if dim > 256 {
        return Err(Failure::invalid(
            call.spec.name,
            "head_dim",
            format!("is {dim}: it must be at most 256"),
        ));
    }
    if !(scale > 0.0 && scale.is_finite()) {
        let what = format!("is {scale}: it must be above 0, as a rule 1 / sqrt(head_dim)");
        return Err(Failure::invalid(call.spec.name, "scale", what));
    }
    Ok(Box::new(Attend {
        element: call.element,
        batch: call.extent("batch"),
        heads: [call.extent("n_heads"), shared],
        lengths: [length, length],
        dim,
        mask,
        bias,
        scale,
        align: call.align(&[dim]),
    }))
}
