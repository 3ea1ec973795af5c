//! Every case of every function, in the interpreter and on this machine's processor.

mod common;

use vm_ir::Trust;
use vm_ir::interp::{Limits, run};
use vm_kernels::cases::all;
use vm_kernels::family::Resources;

/// What a processor has. The interpreter takes any variant.
const RESOURCES: Resources = Resources { compute_units: 4, shared_bytes: 227 << 10 };

#[test]
fn in_the_interpreter() {
    for case in all() {
        let mut launch = |module: &_, launch: &mut _| {
            run(module, launch, &Limits::default()).map(|_| ()).map_err(|error| error.to_string())
        };
        case.check(&RESOURCES, Trust::Guest, &mut launch).unwrap();
    }
}

#[test]
fn on_this_processor() {
    for machine in common::machine::Machine::all() {
        for trust in [Trust::Guest, Trust::Trusted] {
            for case in all() {
                let mut launch = |module: &_, launch: &mut _| match machine.run(module, launch, 1 << 40)? {
                    0 => Ok(()),
                    stop => Err(format!("it was stopped: {stop}")),
                };
                case.check(&RESOURCES, trust, &mut launch)
                    .unwrap_or_else(|error| panic!("{}: {error}", machine.name()));
            }
        }
    }
}
