//! Problems of every table of variants, and the devices that they are for.

use vm_ir::Scalar;
use vm_kernels::attention::{Forward, Generate, Gradients, Mask};
use vm_kernels::family::{Kind, Resources};
use vm_kernels::gemm::{Activation, Auxiliary, Batch, Epilogue, Product, Scales};

pub(crate) const H200: Resources =
    Resources { compute_units: 132, shared_bytes: 232_448, kind: Kind::Gpu, cluster: 8 };
/// One with less shared memory.
pub(crate) const TIGHT: Resources = Resources { shared_bytes: 101_376, cluster: 1, ..H200 };

/// Every kind of product that a GPU does.
pub(crate) fn kinds() -> Vec<Product> {
    use Scalar::{Bf16, F8E4M3, F8E5M2, F16, F32, I8, I32, Tf32};
    let mut kinds = Vec::new();
    let plain = Product::of(1, 1, 1);
    for (element, output) in [(Bf16, Bf16), (F16, F16), (Bf16, F32), (F16, F32)] {
        for (a_transposed, b_transposed) in [(false, false), (false, true), (true, false), (true, true)] {
            kinds.push(Product { element, output, a_transposed, b_transposed, ..plain });
        }
    }
    for (element, output) in
        [(Tf32, F32), (F8E4M3, Bf16), (F8E4M3, F16), (F8E5M2, F32), (I8, I32), (I8, Bf16)]
    {
        kinds.push(Product { element, output, b_transposed: true, ..plain });
    }
    let all =
        Epilogue { scaled: true, plus: true, bias: true, activation: Activation::Silu, ..Epilogue::NONE };
    let rows = Epilogue { scales: Scales::Rows, ..Epilogue::NONE };
    let blocks = Epilogue { scales: Scales::Blocks, ..Epilogue::NONE };
    let fp8 = Product { element: F8E4M3, b_transposed: true, ..plain };
    kinds.extend([Product { epilogue: all, ..plain }, Product { epilogue: all, output: F32, ..plain }]);
    kinds.extend([Product { epilogue: rows, ..fp8 }, Product { epilogue: blocks, ..fp8 }]);
    for aux in [Auxiliary::Store, Auxiliary::Gradient] {
        let epilogue =
            Epilogue { aux, activation: Activation::Gelu, bias: aux == Auxiliary::Store, ..Epilogue::NONE };
        kinds.extend([
            Product { epilogue, ..plain },
            Product { epilogue, output: F32, b_transposed: true, ..plain },
        ]);
    }
    kinds.push(Product { element: I8, epilogue: all, b_transposed: true, ..plain });
    for b_transposed in [false, true] {
        kinds.push(Product { batch: Batch::Batched, matrices: 4, b_transposed, ..plain });
        kinds.push(Product { batch: Batch::Grouped, matrices: 8, b_transposed, ..plain });
    }
    kinds
}

/// Products whose factors pass through registers on their way to the tensor core: of f32, which are divided, and those whose second factor is
/// turned around, as it has no 16 bits and is not given transposed.
pub(crate) fn by_registers() -> Vec<Product> {
    use Scalar::{F32, I8, Tf32};
    let plain = Product::of(1, 1, 1);
    let f32 = Product { element: F32, output: F32, ..plain };
    let bytes = [Scalar::F8E4M3, Scalar::F8E5M2].map(|element| Product { element, ..plain });
    let mut all = vec![Product { b_transposed: true, ..f32 }, f32, Product { element: Tf32, ..f32 }];
    all.extend(bytes);
    all.push(Product { element: I8, output: Scalar::I32, ..plain });
    all
}

/// Extents of each table.
pub(crate) const EXTENTS: [[u64; 3]; 7] = [
    [1, 4096, 4096],
    [16, 11008, 4096],
    [64, 4096, 11008],
    [512, 512, 512],
    [1024, 1024, 1024],
    [2048, 2048, 2048],
    [8192, 8192, 8192],
];

/// Every kind of attention.
pub(crate) fn attentions() -> Vec<Forward> {
    let mut all = Vec::new();
    for dim in [64, 128, 192, 256] {
        for (mask, log_sums, packed) in [
            (Mask::Full, false, false),
            (Mask::Causal, true, false),
            (Mask::Window, true, false),
            (Mask::Full, true, true),
            (Mask::Window, false, true),
        ] {
            let heads = [8, if log_sums { 2 } else { 8 }];
            let element = if log_sums { Scalar::F16 } else { Scalar::Bf16 };
            let short = (!packed).then_some([300, 500]);
            for tokens in short.into_iter().chain([[8192, 8192]]) {
                let of = Forward::of(2, 8, 0, dim, false);
                for fp8 in [false, true] {
                    all.push(Forward {
                        mask,
                        fp8,
                        log_sums,
                        heads,
                        element,
                        tokens,
                        packed,
                        window: [100, 20],
                        ..of
                    });
                }
            }
        }
    }
    all
}

/// Every kind of gradients.
pub(crate) fn gradients() -> Vec<Gradients> {
    let mut all = Vec::new();
    for dim in [64, 128, 192, 256] {
        for (mask, element, packed) in [
            (Mask::Full, Scalar::Bf16, false),
            (Mask::Causal, Scalar::F16, false),
            (Mask::Window, Scalar::Bf16, false),
            (Mask::Causal, Scalar::Bf16, true),
            (Mask::Window, Scalar::F16, true),
            (Mask::Full, Scalar::F32, false),
        ] {
            if element == Scalar::F32 && dim > 128 {
                // What has less shared memory has no room.
                continue;
            }
            let heads = [8, if packed { 2 } else { 8 }];
            let of = Gradients::of(2, 8, 0, dim, false);
            let tokens = if mask == Mask::Full { [300, 500] } else { [4096; 2] };
            all.push(Gradients { mask, element, packed, heads, tokens, window: [100, 20], ..of });
        }
    }
    all
}

pub(crate) fn generations() -> Vec<Generate> {
    let mut all = Vec::new();
    for (dim, page) in
        [64, 128, 192, 256].into_iter().flat_map(|dim| [0, 16, 20, 48, 96, 64].map(|page| (dim, page)))
    {
        let element = if page == 16 { Scalar::F16 } else { Scalar::Bf16 };
        let of = Generate { element, dim, page, batch: 3, heads: [16, 2], queries: 2, tokens: 5000 };
        all.extend([of, Generate { batch: 64, queries: 1, ..of }]);
    }
    all
}
