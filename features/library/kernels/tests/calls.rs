//! Every case of every function, in the interpreter and on this machine's processor: as each device's variant and, on the processor, as each of the
//! machines that it can be, as a guest's and as the host's own. With a number in `SWEEP_SEED` every third case is taken in the interpreter, and
//! another third on the processor, once each. Cases of long rows are for processors, one way each.

mod common;

use vm_ir::Trust;
use vm_ir::interp::{Limits, run};
use vm_kernels::cases::{Case, all};
use vm_kernels::family::{Kind, Resources};

/// A GPU. The interpreter and processors take its variants, too.
const GPU: Resources = Resources { compute_units: 4, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };
/// One without clusters.
const OLDER: Resources = Resources { cluster: 1, ..GPU };
/// A processor.
const CPU: Resources = Resources { kind: Kind::Cpu, cluster: 1, ..GPU };

/// Is it one of so many elements that the interpreter takes long?
fn is_long(case: &Case) -> bool {
    case.buffers.iter().any(|tensor| tensor.len() >= 1 << 16)
}

/// The devices for which a case has launches of its own.
fn resources(case: &Case) -> Vec<Resources> {
    let mut calls = Vec::new();
    let mut all = vec![GPU, OLDER, CPU];
    all.retain(|resources| {
        let call = case.function.call(resources).unwrap();
        let is_new = !calls.contains(&call);
        calls.push(call);
        is_new
    });
    all
}

#[test]
fn in_the_interpreter() {
    for case in all().into_iter().filter(|case| !is_long(case) && common::sweep::part(&case.name, 3)) {
        let mut launch = |module: &_, launch: &mut _, _: &[_]| {
            run(module, launch, &Limits::default()).map(|_| ()).map_err(|error| error.to_string())
        };
        for resources in common::sweep::taken(&case.name, resources(&case)) {
            case.check(&resources, Trust::Guest, &mut launch)
                .unwrap_or_else(|e| panic!("{resources:?}: {e}"));
        }
    }
}

#[test]
fn on_this_processor() {
    let machines = common::machine::Machine::all();
    let is_taken = |case: &Case| common::sweep::part(&format!("{} on a processor", case.name), 3);
    for case in all().into_iter().filter(is_taken) {
        for resources in common::sweep::taken(&format!("device of {}", case.name), resources(&case)) {
            let machines = machines.iter();
            let ways =
                machines.flat_map(|machine| [Trust::Guest, Trust::Trusted].map(|trust| (machine, trust)));
            let seed = common::sweep::seed().or_else(|| is_long(&case).then_some(0));
            let what = format!("{resources:?}, {}", case.name);
            for (machine, trust) in common::sweep::chosen(seed, &what, ways) {
                let mut launch = |module: &_, launch: &mut _, strides: &[_]| match machine.run_strided(
                    module,
                    launch,
                    strides,
                    1 << 40,
                )? {
                    0 => Ok(()),
                    stop => Err(format!("it was stopped: {stop}")),
                };
                case.check(&resources, trust, &mut launch)
                    .unwrap_or_else(|error| panic!("{}, {trust:?}, {resources:?}: {error}", machine.name()));
            }
        }
    }
}
