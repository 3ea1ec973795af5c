//! All families compiled for what has tile kernels.

use vm_ir::{GuestAddr, Module, Scalar, Trust, validate};
use vm_kernels::attention::{Attention, Backward, Gradient, SplitBackward};
use vm_kernels::gemm::Gemm;

#[test]
fn all_are_compiled() {
    let mut kernels = Vec::new();
    for b_transposed in [false, true] {
        for output in [Scalar::Bf16, Scalar::F32] {
            let large = Gemm { b_transposed, output, ..Gemm::LARGE };
            let large = if output == Scalar::F32 { Gemm { tile: [128, 128, 64], ..large } } else { large };
            kernels.push(large.kernel(GuestAddr(0)).unwrap());
            kernels.push(Gemm { b_transposed, output, ..Gemm::SMALL }.kernel(GuestAddr(0)).unwrap());
        }
    }
    for (dim, causal) in [64, 128, 192, 256].into_iter().flat_map(|dim| [(dim, false), (dim, true)]) {
        kernels.push(Attention::of(dim, causal).kernel(GuestAddr(0)).unwrap());
        kernels.push(Attention::fp8(dim, causal, 1 << 13).kernel(GuestAddr(0)).unwrap());
        for split in [SplitBackward::of(dim, causal), SplitBackward::small(dim, causal)] {
            kernels.extend(Gradient::ALL.map(|of| split.kernel(of, GuestAddr(0)).unwrap()));
            kernels.push(split.prepare(GuestAddr(0)).unwrap());
        }
        if dim > 128 {
            continue;
        }
        let backward = Backward::of(dim, causal);
        let all =
            [backward.prepare(GuestAddr(0)), backward.kernel(GuestAddr(0)), backward.finish(GuestAddr(0))];
        kernels.extend(all.map(Result::unwrap));
    }
    for (kernel, trust) in
        kernels.iter().flat_map(|kernel| [(kernel, Trust::Guest), (kernel, Trust::Trusted)])
    {
        let module = validate(Module::from(kernel.clone()), trust).unwrap();
        vm_jit::compile(&module, &"ptx:sm_90a".parse().unwrap()).unwrap();
        // Older architectures have room for less.
        match vm_jit::compile(&module, &"ptx:sm_80".parse().unwrap()) {
            Ok(artifact) => assert_eq!(artifact.entries.len(), 1),
            Err(error) => assert!(error.to_string().contains("bytes of shared memory"), "{error}"),
        }
    }
}
