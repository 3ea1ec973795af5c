//! The programs of the conformance suite, compiled for a GPU.
#![allow(unsafe_code)]

use anyhow::Context;
use vm_accel::Artifact;
use vm_accel::programs::{Program, SOURCE};
use vm_ir::{Trust, ValidModule, text, validate};

use crate::gpu::{Gpu, named};

/// The module with a program. Only the one that is to be stopped is a guest's.
fn module(program: Program) -> anyhow::Result<ValidModule> {
    let trust = if program == Program::Spin { Trust::Guest } else { Trust::Trusted };
    let module = text::parse(SOURCE).context("the suite's programs")?;
    validate(module, trust).context("the suite's programs")
}

/// The kernel of a program: the broken one is another's, broken.
fn entry(program: Program) -> &'static str {
    if program == Program::Broken { Program::Add.name() } else { program.name() }
}

/// A program, compiled.
pub(crate) fn artifact(program: Program, gpu: &Gpu) -> anyhow::Result<Artifact> {
    let kernels = gpu.compile(&module(program)?)?;
    let artifact = named(&kernels, entry(program))?.artifact().clone();
    match program {
        Program::Broken => {
            let image = b".version 7.0\n.target sm_70\n.address_size 64\nnonsense\n".to_vec();
            // SAFETY: it can't be loaded.
            Ok(unsafe { Artifact::new(image, artifact.signature().clone()) }?)
        }
        _ => Ok(artifact),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_have_the_blocks_and_parameters_that_the_suite_wants() {
        let target = "ptx:sm_80".parse().unwrap();
        for &program in Program::ALL {
            let module = module(program).unwrap_or_else(|error| panic!("{program:?}: {error:#}"));
            let compiled = vm_jit::compile(&module, &target).unwrap();
            let wanted = program.signature();
            let entry = compiled.entry(entry(program)).expect("a kernel");
            assert_eq!(entry.block, wanted.block, "{program:?}");
            assert_eq!(entry.params.slots.len(), wanted.parameters.len(), "{program:?}");
            assert_eq!(entry.params.guard.is_some(), wanted.guarded, "{program:?}");
        }
    }
}
