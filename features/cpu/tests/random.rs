//! Random kernels on this machine and on the interpreter: they must agree in every bit but those of NaNs.
//!
//! `VM_CPU_SEEDS=FROM..TO cargo test --release -p vm-cpu --test random -- --nocapture` runs as many as wanted.

mod common;

use common::Machine;
use vm_ir::arbitrary::{Options, kernel};
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::interp::{Limits, run};
use vm_ir::{Trust, text, validate};

/// Kernels that were compiled wrong once, made without `loops`.
const KNOWN: [u64; 2] = [200_173, 200_886];

fn seeds() -> Vec<u64> {
    let given = std::env::var("VM_CPU_SEEDS").ok();
    let range = given.as_deref().and_then(|text| text.split_once(".."));
    match range {
        Some((from, to)) => (from.parse().unwrap()..to.parse().unwrap()).collect(),
        None => (0..60).chain(KNOWN).collect(),
    }
}

#[test]
fn the_interpreter_agrees() {
    let machine = Machine::new();
    let limits = Limits { races: false, ..Limits::default() };
    let (mut ran, mut failures) = (0u64, String::new());
    for seed in seeds() {
        // Without vectors, neighbouring threads are run together in those of the machine.
        let options = Options { vectors: seed % 2 == 0, loops: !KNOWN.contains(&seed), ..Options::default() };
        let (module, launch) = kernel(seed, options);
        let valid = validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("seed {seed}: {errors}"));
        let (mut ours, mut theirs) = (launch.clone(), launch);
        run(&valid, &mut theirs, &limits).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let result = machine.run(&valid, &mut ours, 1 << 40).and_then(|stop| match stop {
            0 => Ok(()),
            word => Err(format!("stopped with {word:#x}")),
        });
        let outputs = ours.arguments.iter().zip(&theirs.arguments);
        let result = result.and_then(|()| {
            outputs.enumerate().try_for_each(|(number, (got, wanted))| {
                match (got.tensor(), wanted.tensor()) {
                    (Some(got), Some(wanted)) => compare(got, wanted, Tolerance::Exact)
                        .map_err(|mismatch| format!("argument {number} ({}): {mismatch}", got.element)),
                    _ => Ok(()),
                }
            })
        });
        if let Err(error) = result {
            failures += &format!("seed {seed}: {error}\n");
            if std::env::var_os("VM_CPU_PRINT").is_some() {
                println!("{}", text::print(&valid));
            }
            assert!(failures.lines().count() < 10, "{failures}");
        }
        ran += 1;
        if ran.is_multiple_of(10_000) {
            println!("{ran} kernels");
        }
    }
    println!("{ran} kernels, every one as on the interpreter");
    assert!(failures.is_empty(), "{failures}");
}
