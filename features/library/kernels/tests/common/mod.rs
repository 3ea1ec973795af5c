//! What tests of families share.
#![allow(dead_code)]

#[path = "../../../../accelerator/backends/cpu/tests/common/mod.rs"]
pub(crate) mod machine;
#[path = "../../../../../vm-jit/tests/ptxas/sweep.rs"]
pub(crate) mod sweep;

use machine::Machine;

use vm_ir::interp::{Argument, Launch, Limits, run};
use vm_ir::{Kernel, Module, Trust, ValidModule, validate};

pub(crate) fn valid(kernel: Kernel, trust: Trust) -> ValidModule {
    validate(Module::from(kernel), trust).unwrap()
}

/// Runs a kernel in the interpreter and on this machine, and compares an argument with what is wanted. Of the older machines that this one
/// can be, a part of the sweep has one.
pub(crate) fn compare_at(
    module: &ValidModule,
    grid: [u32; 3],
    output: usize,
    arguments: Vec<Argument>,
    wanted: &[f64],
    within: f64,
) {
    let name = module.kernels()[0].name();
    let launch = Launch { kernel: name.to_owned(), grid, arguments };
    let mut interpreted = launch.clone();
    run(module, &mut interpreted, &Limits::default()).unwrap();
    let mut launches = vec![("the interpreter".to_owned(), interpreted)];
    for machine in sweep::taken(name, Machine::all()) {
        let mut launch = launch.clone();
        assert_eq!(machine.run(module, &mut launch, 1 << 40), Ok(0), "{name} on {}", machine.name());
        launches.push((machine.name(), launch));
    }
    for (place, launch) in launches {
        let found = launch.arguments[output].tensor().unwrap().to_f64s();
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
