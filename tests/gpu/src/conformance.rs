//! The conformance suite of vm-accel.

use vm_accel::conformance;

use crate::{Arguments, Test, programs};

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![Test::new("the suite of vm-accel", |gpu, report| {
        // Made before, so that the suite's own timing is the device's.
        let made: Vec<_> = vm_accel::programs::Program::ALL
            .iter()
            .map(|&program| Ok((program, programs::artifact(program, gpu)?)))
            .collect::<anyhow::Result<_>>()?;
        let get = |wanted| match made.iter().find(|(program, _)| *program == wanted) {
            Some((_, artifact)) => artifact.clone(),
            None => panic!("no program {wanted:?}"),
        };
        let cases = conformance::check(&gpu.accelerator, &get);
        report.note(format!("{cases} cases"));
        Ok(())
    })]
}
