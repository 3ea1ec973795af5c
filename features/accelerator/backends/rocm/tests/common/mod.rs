//! The programs of the conformance suite for the fake: compiled for an AMD GPU, whose code has the signature, and for the host's
//! processor, which runs them.
#![allow(unsafe_code, dead_code)]

use vm_accel::programs::{Program, SOURCE};
use vm_accel::{Artifact, Signature};
use vm_ir::{Trust, text, validate};
use vm_jit::{Target, compile};
use vm_rocm::fake::{Kernel, code_object};

/// The program for an architecture.
pub(crate) fn program(architecture: &str, program: Program) -> Artifact {
    let (_, signature, kernel) = compiled(architecture, program);
    let image = code_object(architecture, vec![kernel]);
    let image = if program == Program::Broken { &image[..image.len() / 2] } else { &image };
    // SAFETY: the fake runs what vm-jit made of a valid module; the module is the suite's own.
    unsafe { Artifact::new(image, signature) }.unwrap()
}

/// The text for LLVM, what a launch must know, and the kernel for the fake.
pub(crate) fn compiled(architecture: &str, program: Program) -> (Vec<u8>, Signature, Kernel) {
    let name = if program == Program::Broken { Program::Add.name() } else { program.name() };
    // As the host's own they have no guard, but for the one that must be stopped.
    let trust = if program == Program::Spin { Trust::Guest } else { Trust::Trusted };
    let valid = validate(text::parse(SOURCE).unwrap(), trust).unwrap();
    let target = |text: &str| text.parse::<Target>().unwrap();
    let gpu = compile(&valid, &target(&format!("amdgcn:{architecture}"))).unwrap();
    let cpu = compile(&valid, &target("cpu")).unwrap();
    let (entry, own) = (gpu.entry(name).unwrap(), cpu.entry(name).unwrap());
    let guarded = |guarded| Signature { guarded, ..program.signature() };
    let signature = Signature {
        entry: entry.symbol.clone(),
        block: entry.block,
        shared_bytes: entry.dynamic_shared,
        ..guarded(entry.params.guard.is_some())
    };
    let host = Signature {
        entry: own.symbol.clone(),
        block: own.block,
        shared_bytes: own.dynamic_shared,
        cost_bound: own.work,
        ..guarded(own.params.guard.is_some())
    };
    // SAFETY: vm-jit made it of a valid module; the module is the suite's own.
    let host = unsafe { Artifact::new(cpu.code.clone(), host) }.unwrap();
    assert_eq!(*host.params(), own.params);
    let kernel = Kernel { symbol: entry.symbol.clone(), params: entry.params.clone(), cpu: host };
    (gpu.code, signature, kernel)
}
