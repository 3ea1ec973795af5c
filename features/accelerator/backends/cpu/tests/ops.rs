//! Every op on values on every type, on corner cases and random numbers, against the interpreter: exactly, or within what
//! the op's row allows; as single numbers of neighbouring threads, and as vectors.

mod common;

use common::Machine;
use vm_ir::filetest::{Random, compare, is_on_values, op_kernel, op_launch, op_tolerance};
use vm_ir::format::to_f64;
use vm_ir::interp::{Limits, run};
use vm_ir::op::TABLE;
use vm_ir::{Trust, text, validate};
use vm_jit::legal::types_of;

#[test]
fn ops_on_values() {
    let machines = Machine::all();
    let mut random = Random(7);
    let (mut ran, mut failures) = (0, String::new());
    let only = std::env::var("VM_CPU_OP").ok();
    for row in TABLE {
        if !is_on_values(row) || only.as_ref().is_some_and(|only| only != row.mnemonic) {
            continue;
        }
        for (from, to) in types_of(row.opcode) {
            for lanes in [1, 4, 16] {
                let source = op_kernel(row, from, to, lanes);
                let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
                let valid =
                    validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("{errors}\n{source}"));
                let launch = op_launch(&valid.kernels()[0], lanes, &mut random);
                let mut theirs = launch.clone();
                run(&valid, &mut theirs, &Limits::default()).unwrap();
                for machine in &machines {
                    let mut ours = launch.clone();
                    let place = format!("{} {from} {to} in {lanes} on {}", row.mnemonic, machine.name());
                    match machine.run(&valid, &mut ours, 1) {
                        Ok(0) => {}
                        Ok(stop) => failures += &format!("{place}: stopped with {stop}\n"),
                        Err(error) => failures += &format!("{place}: {error}\n"),
                    }
                    let last = ours.arguments.len() - 1;
                    let (got, wanted) =
                        (ours.arguments[last].tensor().unwrap(), theirs.arguments[last].tensor().unwrap());
                    let tolerance = op_tolerance(row, from);
                    if let Err(mismatch) = compare(got, wanted, tolerance) {
                        let inputs: Vec<String> = launch.arguments[..last]
                            .iter()
                            .map(|a| a.tensor().unwrap())
                            .map(|t| {
                                format!(
                                    "{:#x} = {}",
                                    t.bits(mismatch.index),
                                    to_f64(t.element, t.bits(mismatch.index))
                                )
                            })
                            .collect();
                        failures += &format!("{place}: {mismatch} for {inputs:?}\n");
                    }
                    ran += 1;
                }
            }
        }
    }
    println!("{ran} kernels");
    assert!(failures.is_empty(), "{failures}");
    assert!(only.is_some() || ran > 900, "{ran}");
}
