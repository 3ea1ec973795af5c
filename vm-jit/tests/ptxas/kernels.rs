//! The kernels under vm-ir/filetests/run.

use crate::assembler::{TARGETS, assemble, assemble_for_all, with_ptxas};
use std::collections::HashSet;
use std::path::Path;
use vm_ir::{Kernel, Module, Trust, ValidModule, text, validate};
use vm_jit::legal::rejects;
use vm_jit::{RejectKind, Target};

/// All kernels, in as few modules as their names allow.
fn modules() -> Vec<Module> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests/run");
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        let module = text::parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
        kernels.extend(module.kernels().iter().cloned());
    }
    assert!(kernels.len() >= 15);
    let mut modules = Vec::new();
    while !kernels.is_empty() {
        let mut names = HashSet::new();
        let (now, later) = kernels.into_iter().partition(|k| names.insert(k.name().to_owned()));
        modules.push(Module::new(now));
        kernels = later;
    }
    modules
}

/// Those of a module's kernels that an architecture has shared memory and clusters for. That is all that it may lack.
fn fitting(module: &ValidModule, arch: &str) -> ValidModule {
    let target: Target = format!("ptx:{arch}").parse().unwrap();
    let fits = |kernel: &&Kernel| {
        let rejects = rejects(&Module::from((*kernel).clone()), &target);
        let lacks = |kind: &RejectKind| match kind {
            RejectKind::SharedMemory { .. } => true,
            RejectKind::Cluster { .. } => matches!(arch, "sm_70" | "sm_75" | "sm_80" | "sm_86" | "sm_89"),
            _ => false,
        };
        let unfit = rejects.iter().any(|r| lacks(&r.kind));
        assert_eq!(rejects.is_empty(), !unfit, "{rejects:?}");
        !unfit
    };
    validate(Module::new(module.kernels().iter().filter(fits).cloned().collect()), module.trust()).unwrap()
}

fn check(trust: Trust) {
    with_ptxas(|folder| {
        // Kernels for trusted modules only are left out of a guest's.
        let valid: Vec<ValidModule> = modules()
            .into_iter()
            .map(|module| {
                let kernels = module.kernels().iter();
                let allowed = kernels.filter(|k| validate(Module::from((*k).clone()), trust).is_ok());
                validate(Module::new(allowed.cloned().collect()), trust).unwrap()
            })
            .collect();
        let fitting: Vec<_> = TARGETS
            .iter()
            .flat_map(|(arch, release)| valid.iter().map(move |m| (*arch, *release, fitting(m, arch))))
            .collect();
        let all: Vec<_> = fitting.iter().map(|(arch, release, m)| (*arch, *release, m)).collect();
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
