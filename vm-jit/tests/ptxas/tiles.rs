//! Tile kernels: those under vm-ir/filetests/tile, and the families of `vm-kernels`, none of which spills.

use crate::assembler::{TARGETS, assemble_for_all, with_ptxas};
use std::path::Path;
use vm_ir::{GuestAddr, Kernel, Module, Scalar, Trust, ValidModule, text, validate};
use vm_jit::Target;
use vm_kernels::attention::Attention;
use vm_kernels::gemm::Gemm;

fn kernels() -> Vec<Kernel> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests/tile");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let parse = |path| text::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut kernels: Vec<Kernel> = files.flat_map(|path| parse(path).kernels().to_vec()).collect();
    assert!(kernels.len() >= 2);
    for b_transposed in [false, true] {
        for (element, output, tile) in [
            (Scalar::Bf16, Scalar::Bf16, [128, 256, 64]),
            (Scalar::F16, Scalar::F16, [128, 256, 64]),
            (Scalar::Bf16, Scalar::F32, [128, 128, 64]),
        ] {
            let large = Gemm { b_transposed, element, output, tile, ..Gemm::LARGE };
            kernels.push(large.kernel(GuestAddr(0)).unwrap());
        }
        let small = Gemm { b_transposed, ..Gemm::SMALL };
        kernels.push(small.kernel(GuestAddr(0)).unwrap());
        // For little shared memory.
        for element in [Scalar::F16, Scalar::Bf16] {
            let less = Gemm { element, output: element, tile: [128, 64, 32], groups: 2, stages: 2, ..small };
            kernels.push(less.kernel(GuestAddr(0)).unwrap());
        }
        let odd = Gemm { tile: [48, 40, 16], groups: 1, ..small };
        kernels.push(odd.kernel(GuestAddr(0)).unwrap());
    }
    for (dim, causal) in [(64, false), (64, true), (128, false), (128, true)] {
        let large = Attention::of(dim, causal);
        kernels.push(large.kernel(GuestAddr(0)).unwrap());
        let small = Attention { element: Scalar::F16, tile: [64, 64], groups: 1, ..large };
        kernels.push(small.kernel(GuestAddr(0)).unwrap());
    }
    kernels
}

#[test]
fn tile_kernels_are_assembled_and_do_not_spill() {
    with_ptxas(|folder| {
        let (mut all, mut rejected) = (Vec::new(), 0);
        let kernels = kernels();
        let modules: Vec<ValidModule> = kernels
            .iter()
            .flat_map(|kernel| {
                [Trust::Guest, Trust::Trusted]
                    .map(|trust| validate(Module::from(kernel.clone()), trust).unwrap())
            })
            .collect();
        for (arch, release) in TARGETS.into_iter().chain([("sm_90", "13.0")]) {
            let target: Target = format!("ptx:{arch}").parse().unwrap();
            for pair in modules.chunks(2) {
                // The host's own are without what cancels them: those of two architectures are enough.
                let pair = if ["sm_80", "sm_90a"].contains(&arch) { pair } else { &pair[..1] };
                match &vm_jit::legal::rejects(&Module::from(pair[0].kernels()[0].clone()), &target)[..] {
                    [] => all.extend(pair.iter().map(|module| (arch, release, module))),
                    [reject] => {
                        let reason = reject.kind.to_string();
                        let says = format!("a block of {arch} has ");
                        assert!(
                            reason.contains("bytes of shared memory") && reason.contains(&says),
                            "{reason}"
                        );
                        rejected += 1;
                    }
                    more => panic!("{arch}: {more:?}"),
                }
            }
        }
        // Those with 64 and 99 KiB have no room for the largest.
        assert!(rejected > 10 && rejected * 4 < all.len(), "{rejected} of {}", all.len());
        assemble_for_all(folder, "3", &all);
    });
}
