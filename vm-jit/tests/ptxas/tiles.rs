//! Tile kernels: those under vm-ir/filetests/tile, and the families of `vm-kernels`, none of which spills.

use crate::assembler::{assemble_for_all, with_ptxas};
use std::path::Path;
use vm_ir::{GuestAddr, Kernel, Module, Scalar, Trust, ValidModule, text, validate};
use vm_kernels::attention::Attention;
use vm_kernels::gemm::{Activation, Batch, Epilogue, Gemm, Scales};

fn kernels() -> Vec<Kernel> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests/tile");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    // No `wgmma` multiplies f32.
    let files = files.filter(|path| !path.ends_with("product_f32.vir"));
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
        kernels.push(Gemm { b_transposed, ..Gemm::SMALL }.kernel(GuestAddr(0)).unwrap());
    }
    let all =
        Epilogue { scaled: true, scales: Scales::Rows, plus: true, bias: true, activation: Activation::Silu };
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
    ] {
        kernels.push(variant.kernel(GuestAddr(0)).unwrap());
    }
    for (dim, causal) in [(64, false), (64, true), (128, false), (128, true)] {
        kernels.push(Attention::of(dim, causal).kernel(GuestAddr(0)).unwrap());
    }
    kernels
}

#[test]
fn tile_kernels_are_assembled_and_do_not_spill() {
    with_ptxas(|folder| {
        let modules: Vec<ValidModule> = kernels()
            .into_iter()
            .flat_map(|kernel| {
                [Trust::Guest, Trust::Trusted]
                    .map(|trust| validate(Module::from(kernel.clone()), trust).unwrap())
            })
            .collect();
        let all: Vec<_> = modules.iter().map(|module| ("sm_90a", "13.0", module)).collect();
        assemble_for_all(folder, "3", &all);
    });
}
