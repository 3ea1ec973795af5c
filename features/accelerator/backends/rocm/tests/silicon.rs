//! The suite that every accelerator must pass, on each AMD GPU of this machine, if there is one, and LLVM to assemble for it.
#![allow(unsafe_code)]

mod common;

use std::sync::Arc;

use vm_accel::programs::Program;
use vm_accel::{Accelerator, Artifact, conformance};
use vm_rocm::assemble::Assembler;
use vm_rocm::{RocmAccelerator, device_count};

#[test]
fn conforms() {
    let count = device_count().map_err(|error| error.to_string());
    let ready = count.and_then(|count| Ok((count, Assembler::find().map_err(|error| error.to_string())?)));
    let (count, llvm) = match ready {
        Ok(ready) => ready,
        Err(reason) => return println!("skipped: {reason}"),
    };
    for ordinal in 0..count {
        let device = Arc::new(RocmAccelerator::new(ordinal).unwrap());
        let chip = device.info().target.clone();
        println!("{ordinal}: {:?}", device.info());
        let program = |program: Program| {
            let (code, signature, _) = common::compiled(&chip, program);
            let mut image = llvm.assemble(&code, &chip).unwrap();
            if program == Program::Broken {
                image.truncate(image.len() / 2);
            }
            // SAFETY: vm-jit and LLVM made it of a valid module; the module is the suite's own.
            unsafe { Artifact::new(image, signature) }.unwrap()
        };
        assert!(conformance::check(&device, &program) >= conformance::CASES);
    }
}
