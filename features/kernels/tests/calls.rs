//! Every case of every function, in the interpreter and on this machine's processor.

mod common;

use vm_ir::Trust;
use vm_ir::interp::{Limits, run};
use vm_kernels::cases::all;
use vm_kernels::family::{Kind, Resources};

/// A GPU. The interpreter and processors take its variants, too.
const GPU: Resources = Resources { compute_units: 4, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };
/// A processor.
const CPU: Resources = Resources { kind: Kind::Cpu, cluster: 1, ..GPU };

#[test]
fn in_the_interpreter() {
    for case in all() {
        let mut launch = |module: &_, launch: &mut _| {
            run(module, launch, &Limits::default()).map(|_| ()).map_err(|error| error.to_string())
        };
        for resources in [GPU, CPU] {
            case.check(&resources, Trust::Guest, &mut launch)
                .unwrap_or_else(|e| panic!("{resources:?}: {e}"));
        }
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
                for resources in [GPU, CPU] {
                    case.check(&resources, trust, &mut launch)
                        .unwrap_or_else(|error| panic!("{}, {resources:?}: {error}", machine.name()));
                }
            }
        }
    }
}
