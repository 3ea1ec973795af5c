//! The kernels under vm-ir/filetests/run and surface.

use crate::assembler::{TARGETS, assemble, assemble_for_all, with_ptxas};
use std::path::Path;
use vm_ir::{Kernel, Module, Trust, ValidModule, text, validate};
use vm_jit::legal::rejects;
use vm_jit::{RejectKind, Target};

/// All kernels.
fn kernels() -> Vec<Kernel> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests");
    let of = |name| std::fs::read_dir(folder.join(name)).unwrap().map(|entry| entry.unwrap().path());
    let files = ["run", "surface"].into_iter().flat_map(of);
    let parse = |path| text::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    let kernels: Vec<Kernel> = files.flat_map(|path| parse(path).kernels().to_vec()).collect();
    assert!(kernels.len() >= 15);
    kernels
}

/// Whether an architecture has shared memory and clusters for a kernel. That is all that it may lack.
fn fits(module: &ValidModule, arch: &str) -> bool {
    let target: Target = format!("ptx:{arch}").parse().unwrap();
    let rejects = rejects(&Module::from(module.kernels()[0].clone()), &target);
    let lacks = |kind: &RejectKind| match kind {
        RejectKind::SharedMemory { .. } => true,
        RejectKind::Cluster { .. } => matches!(arch, "sm_70" | "sm_75" | "sm_80" | "sm_86" | "sm_89"),
        _ => false,
    };
    let unfit = rejects.iter().any(|r| lacks(&r.kind));
    assert_eq!(rejects.is_empty(), !unfit, "{rejects:?}");
    !unfit
}

fn check(trust: Trust) {
    with_ptxas(|folder| {
        // Kernels for trusted modules only are left out of a guest's.
        let valid = |kernel| validate(Module::from(kernel), trust).ok();
        let valid: Vec<ValidModule> = kernels().into_iter().filter_map(valid).collect();
        assert!(valid.len() >= 15);
        let all: Vec<_> = TARGETS
            .iter()
            .flat_map(|(arch, release)| valid.iter().map(move |module| (*arch, *release, module)))
            .filter(|(arch, _, module)| fits(module, arch))
            .collect();
        assemble_for_all(folder, "3", &all);
    });
}

/// Random kernels of clusters, with gathers in all kinds of control flow. The assembler's errors only: what is random
/// may spill.
#[test]
fn random_clusters() {
    with_ptxas(|folder| {
        let random = |seed| vm_ir::arbitrary::kernel(seed, vm_ir::arbitrary::Options::default()).0;
        let of_cluster = |module: &Module| module.kernels()[0].cluster() > 1;
        for (number, module) in (0..).map(random).filter(of_cluster).take(12).enumerate() {
            let trust = if number % 2 == 0 { Trust::Guest } else { Trust::Trusted };
            let module = validate(module, trust).unwrap();
            let (arch, release) = TARGETS[5 + number % 3];
            if let Err(error) = assemble(folder, &module, arch, release, "1") {
                assert!(error.contains("spill") && !error.contains("error"), "{error}");
            }
        }
    });
}

#[test]
fn guest() {
    check(Trust::Guest);
}

#[test]
fn trusted() {
    check(Trust::Trusted);
}
