//! Tile kernels: those under vm-ir/filetests/tile, and the families of `vm-kernels`, none of which spills.

use crate::assembler::{TARGETS, assemble_for_all, with_ptxas};
use std::path::Path;
use vm_ir::{GuestAddr, Kernel, Module, Scalar, Trust, ValidModule, text, validate};
use vm_jit::Target;
use vm_kernels::attention::{Attention, Backward, Decode, Gradient, Mask, Order, SplitBackward};
use vm_kernels::gemm::{Activation, Batch, Epilogue, Gemm, Scales};

fn filetests() -> Vec<Kernel> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests/tile");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let parse = |path| text::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    let kernels: Vec<Kernel> = files.flat_map(|path| parse(path).kernels().to_vec()).collect();
    assert!(kernels.len() >= 10);
    kernels
}

/// The variants for `wgmma`.
fn large() -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for b_transposed in [false, true] {
        for (element, output, tile) in [
            (Scalar::Bf16, Scalar::Bf16, [128, 256, 64]),
            (Scalar::F16, Scalar::F16, [128, 256, 64]),
            (Scalar::Bf16, Scalar::F32, [128, 128, 64]),
        ] {
            let large = Gemm { b_transposed, element, output, tile, ..Gemm::LARGE };
            kernels.push(large.kernel(GuestAddr(0)).unwrap());
        }
        kernels.push(Gemm { b_transposed, ..Gemm::SMALL }.kernel(GuestAddr(0)).unwrap());
    }
    let all = Epilogue {
        scaled: true,
        scales: Scales::Rows,
        plus: true,
        bias: true,
        activation: Activation::Silu,
        ..Epilogue::NONE
    };
    let large = Gemm { b_transposed: true, ..Gemm::LARGE };
    for variant in [
        Gemm { cluster: 2, stages: 4, ..Gemm::LARGE },
        Gemm { a_transposed: true, ..large },
        Gemm { epilogue: all, ..large },
        Gemm { element: Scalar::F8E4M3, tile: [128, 256, 128], cluster: 2, stages: 4, ..large },
        Gemm { element: Scalar::I8, output: Scalar::I32, tile: [128, 256, 128], ..large },
        Gemm { element: Scalar::Tf32, output: Scalar::F32, tile: [128, 256, 32], ..large },
        Gemm {
            element: Scalar::F8E4M3,
            tile: [128, 128, 128],
            epilogue: Epilogue { scales: Scales::Blocks, ..Epilogue::NONE },
            ..large
        },
        Gemm { batch: Batch::Batched, cluster: 2, ..large },
        Gemm { batch: Batch::Grouped, ..large },
        Gemm { tile: [64, 32, 128], groups: 1, stages: 8, ..large },
        Gemm { split: 2, band: 0, ..large },
        Gemm { split: 2, band: 8, tile: [128, 128, 64], epilogue: all, ..large },
        Gemm { split: 4, overlap: true, band: 0, tile: [64, 64, 128], groups: 1, ..large },
        Gemm { split: 4, band: 0, tile: [8, 64, 128], swapped: true, groups: 1, ..large },
        Gemm { split: 2, overlap: true, band: 0, tile: [16, 64, 256], swapped: true, groups: 1, ..large },
        Gemm { overlap: true, ..large },
        Gemm { epilogue: Epilogue { activation: Activation::Gelu, bias: true, ..Epilogue::NONE }, ..large },
    ] {
        kernels.push(variant.kernel(GuestAddr(0)).unwrap());
    }
    for (dim, causal) in [64, 128, 192, 256].into_iter().flat_map(|dim| [(dim, false), (dim, true)]) {
        let large = Attention::of(dim, causal);
        for packed in [false, true] {
            kernels.push(Attention { packed, log_sums: packed, ..large }.kernel(GuestAddr(0)).unwrap());
        }
        let windows = Attention { mask: Mask::Window, element: Scalar::F16, log_sums: true, ..large };
        kernels.push(windows.kernel(GuestAddr(0)).unwrap());
        let fp8 = Attention::fp8(dim, causal, 1 << 13);
        let packed = Attention { packed: causal, log_sums: true, element: Scalar::F16, ..fp8 };
        let apart = Attention { packed: false, ..packed };
        let packed = if dim == 256 { Attention { tile: [128, 96], ..packed } } else { packed };
        kernels.extend([fp8, apart, packed].map(|variant| variant.kernel(GuestAddr(0)).unwrap()));
        if dim <= 128 {
            let large = Backward::of(dim, causal);
            // In a window all tiles take as long, so that none need balance.
            let windows = Backward { mask: Mask::Window, element: Scalar::F16, ..Backward::of(dim, false) };
            kernels.extend([large, windows].map(|variant| variant.kernel(GuestAddr(0)).unwrap()));
            kernels.extend([large.prepare(GuestAddr(0)), large.finish(GuestAddr(0))].map(Result::unwrap));
        }
        kernels.extend(gradients(SplitBackward::of(dim, causal), causal));
        if dim == 256 {
            // Sums that leave no room for a second block of a multiprocessor, though shared memory does.
            kernels.extend(gradients(SplitBackward::small(dim, causal), causal));
        }
        let caches = if causal { [0, 16] } else { [32, 64] };
        kernels.extend(caches.map(|page| Decode::of(dim, page).kernel(GuestAddr(0)).unwrap()));
        kernels.push(Decode::of(dim, 0).join(GuestAddr(0)).unwrap());
    }
    kernels
}

/// The kernels of the gradients: of packed sequences in windows, and of whole ones.
fn gradients(variant: SplitBackward, packed: bool) -> impl Iterator<Item = Kernel> {
    let variant = match packed {
        // In a window all tiles take as long, so that none need balance.
        true => {
            SplitBackward { mask: Mask::Window, order: Order::Heads, element: Scalar::F16, packed, ..variant }
        }
        false => variant,
    };
    Gradient::ALL.into_iter().map(move |of| variant.kernel(of, GuestAddr(0)).unwrap())
}

/// Those for other architectures, which have fewer registers for a sum, and some less shared memory.
fn small() -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for b_transposed in [false, true] {
        let of_half = Gemm { element: Scalar::F16, output: Scalar::F16, ..Gemm::SMALL };
        for variant in [
            Gemm { tile: [128, 128, 64], ..Gemm::LARGE },
            Gemm { tile: [128, 64, 32], groups: 2, stages: 2, ..of_half },
            Gemm { tile: [48, 40, 16], ..Gemm::SMALL },
            Gemm { tile: [64, 64, 64], split: 2, band: 0, ..Gemm::SMALL },
        ] {
            kernels.push(Gemm { b_transposed, ..variant }.kernel(GuestAddr(0)).unwrap());
        }
    }
    for (dim, causal) in [(64, false), (64, true), (128, false), (128, true)] {
        let large = Attention::of(dim, causal);
        let of_half = Attention { element: Scalar::F16, groups: 1, tile: [64, 64], ..large };
        kernels.push(of_half.kernel(GuestAddr(0)).unwrap());
        let fp8 = Attention { groups: 1, tile: [64, 64], stages: 2, ..Attention::fp8(dim, causal, 0) };
        kernels.push(fp8.kernel(GuestAddr(0)).unwrap());
        // Of 128 queries, in two groups, as many keys as threads have registers for.
        let keys = if dim == 64 { 64 } else { 48 };
        if dim == 64 || !causal {
            kernels.push(Attention { tile: [128, keys], groups: 2, ..large }.kernel(GuestAddr(0)).unwrap());
        }
    }
    for (dim, packed) in [(64, true), (128, false), (128, true), (192, true), (256, true)] {
        kernels.extend(gradients(SplitBackward::small(dim, packed), packed));
        let page = if packed { 16 } else { 0 };
        let halves = Decode { element: Scalar::F16, ..Decode::small(dim, page) };
        kernels.push(halves.kernel(GuestAddr(0)).unwrap());
    }
    kernels
}

#[test]
fn tile_kernels_are_assembled_and_do_not_spill() {
    with_ptxas(|folder| {
        let valid = |kernels: Vec<Kernel>, trusts: &[Trust]| -> Vec<ValidModule> {
            let valid = |kernel: &Kernel, trust| validate(Module::from(kernel.clone()), trust).unwrap();
            let of = |kernel| trusts.iter().map(move |trust| valid(kernel, *trust)).collect::<Vec<_>>();
            kernels.iter().flat_map(of).collect()
        };
        let both = [Trust::Guest, Trust::Trusted];
        let (filetests, large) = (valid(filetests(), &both), valid(large(), &both));
        let small = valid(small(), &[Trust::Guest]);
        let (mut all, mut too_large) = (Vec::new(), 0);
        for (arch, release) in TARGETS.into_iter().chain([("sm_90", "13.0")]) {
            let target: Target = format!("ptx:{arch}").parse().unwrap();
            let families = match arch {
                "sm_90a" => &large[..],
                "sm_80" => &small,
                _ => &[],
            };
            // Guests' code has what the host's own has, and more.
            let step = if arch == "sm_90a" { 1 } else { both.len() };
            for module in filetests.iter().step_by(step).chain(families) {
                match &vm_jit::legal::rejects(&Module::from(module.kernels()[0].clone()), &target)[..] {
                    [] => all.push((arch, release, module)),
                    [reject] => {
                        let reason = reject.kind.to_string();
                        let said = format!("a block of {arch} has ");
                        assert!(
                            reason.contains("bytes of shared memory") && reason.contains(&said),
                            "{reason}"
                        );
                        too_large += 1;
                    }
                    more => panic!("{arch}: {more:?}"),
                }
            }
        }
        // Those with 64 and 96 KiB have no room for the largest.
        assert!(too_large > 0 && too_large * 8 < all.len(), "{too_large} of {}", all.len());
        assemble_for_all(folder, "3", &all);
    });
}
