//! What tests of families share.
#![allow(dead_code)]

#[path = "../../../cpu/tests/common/mod.rs"]
pub(crate) mod machine;

use machine::Machine;

use vm_ir::interp::{Argument, Launch, Limits, Tensor, run};
use vm_ir::{Kernel, Module, Scalar, Trust, ValidModule, validate};

pub(crate) fn valid(kernel: Kernel, trust: Trust) -> ValidModule {
    validate(Module::from(kernel), trust).unwrap()
}

/// Numbers from -1 to 1, the same everywhere.
pub(crate) fn numbers(seed: u64, count: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

pub(crate) fn random(seed: u64, element: Scalar, extents: &[u64]) -> Tensor {
    Tensor::from_f64s(element, extents, numbers(seed, extents.iter().product()))
}

/// Runs a kernel in the interpreter and on this machine: by the place's name the arguments that it leaves.
pub(crate) fn run_everywhere(
    module: &ValidModule,
    grid: [u32; 3],
    arguments: Vec<Argument>,
) -> Vec<(String, Vec<Argument>)> {
    let name = module.kernels()[0].name();
    let launch = Launch { kernel: name.to_owned(), grid, arguments };
    let mut interpreted = launch.clone();
    run(module, &mut interpreted, &Limits::default()).unwrap();
    let mut launches = vec![("the interpreter".to_owned(), interpreted.arguments)];
    for machine in Machine::all() {
        let mut launch = launch.clone();
        assert_eq!(machine.run(module, &mut launch, 1 << 40), Ok(0), "{name} on {}", machine.name());
        launches.push((machine.name(), launch.arguments));
    }
    launches
}

/// Runs a kernel in the interpreter and on this machine, and compares an argument with what is wanted.
pub(crate) fn compare_at(
    module: &ValidModule,
    grid: [u32; 3],
    output: usize,
    arguments: Vec<Argument>,
    wanted: &[f64],
    within: f64,
) {
    let name = module.kernels()[0].name();
    for (place, launch) in run_everywhere(module, grid, arguments) {
        let found = launch[output].tensor().unwrap().to_f64s();
        assert_eq!(found.len(), wanted.len(), "{name} on {place}");
        for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let close = (found - wanted).abs() <= within * wanted.abs().max(1.0);
            assert!(close, "{name} on {place}, element {at}: {found}, not {wanted}");
        }
    }
}

/// Runs a kernel, and compares its last tensor with what is wanted.
pub(crate) fn compare(
    module: &ValidModule,
    grid: [u32; 3],
    arguments: Vec<Argument>,
    wanted: &[f64],
    within: f64,
) {
    let last = arguments.iter().rposition(|argument| argument.tensor().is_some()).unwrap();
    compare_at(module, grid, last, arguments, wanted, within);
}
