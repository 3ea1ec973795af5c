//! Every kernel of the small GPT-2 is assembled for Hopper without spills, as a guest's and as the host's own.

#[allow(dead_code)]
#[path = "../../../vm-jit/tests/ptxas/assembler.rs"]
mod assembler;
#[allow(dead_code)]
#[path = "../../../vm-jit/tests/ptxas/sweep.rs"]
mod sweep;

use std::collections::HashSet;

use gpt::config::Config;
use gpt::generate::Generation;
use gpt::train::Training;
use vm_ir::{GuestAddr, Module, Trust, ValidModule, validate};
use vm_kernels::call::Entry;
use vm_kernels::family::{Kind, Resources};

const H200: Resources = Resources { compute_units: 132, shared_bytes: 232_448, kind: Kind::Gpu, cluster: 8 };

fn entries() -> HashSet<Entry> {
    let config = Config::SMALL;
    let mut training = Training::of(&config);
    let parts = [training.arrays.weights, training.arrays.masters];
    let generation = Generation::of(&config, &training.parameters, parts, 960, &mut training.memory);
    let update = training.update(1);
    let all = [&training.gradients, &update, &generation.prompt, &generation.token];
    let steps = all.into_iter().flat_map(|steps| &steps.0);
    let calls = steps.map(|step| step.function.call(&H200).unwrap());
    calls.flat_map(|call| call.launches).map(|launch| launch.entry).collect()
}

#[test]
fn none_spills() {
    assembler::with_ptxas(|folder| {
        let kernels: Vec<_> = entries().iter().map(|entry| entry.kernel(GuestAddr(0)).unwrap()).collect();
        let modules: Vec<ValidModule> = kernels
            .iter()
            .flat_map(|kernel| [Trust::Guest, Trust::Trusted].map(|trust| (kernel, trust)))
            .map(|(kernel, trust)| validate(Module::from(kernel.clone()), trust).unwrap())
            .collect();
        let errors: Vec<String> = modules
            .iter()
            .filter_map(|module| assembler::assemble(folder, module, "sm_90a", "13.0", "3").err())
            .collect();
        assert!(errors.is_empty(), "{} of {}:\n{}", errors.len(), modules.len(), errors.join("\n"));
    });
}
