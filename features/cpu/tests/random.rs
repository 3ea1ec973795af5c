//! Random kernels on this machine and on the interpreter: they must agree in every bit but those of NaNs.
//!
//! `VM_CPU_SEEDS=FROM..TO cargo test --release -p vm-cpu --test random -- --nocapture` runs as many as wanted.

mod common;

use common::Machine;
use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
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
        None => (0..400).chain(KNOWN).collect(),
    }
}

/// Compiles and runs the kernel of a seed; what differs, if something does.
fn check(machine: &Machine, seed: u64) -> Option<String> {
    let limits = Limits { races: false, ..Limits::default() };
    // Without vectors, neighbouring threads are run together in those of the machine.
    let (vectors, loops) = (seed.is_multiple_of(2), !KNOWN.contains(&seed));
    let options = Options { vectors, loops, ..Options::default() };
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
        outputs.enumerate().try_for_each(|(number, (got, wanted))| match (got.tensor(), wanted.tensor()) {
            (Some(got), Some(wanted)) => compare(got, wanted, Tolerance::Exact)
                .map_err(|mismatch| format!("argument {number} ({}): {mismatch}", got.element)),
            _ => Ok(()),
        })
    });
    let error = result.err()?;
    if std::env::var_os("VM_CPU_PRINT").is_some() {
        println!("{}", text::print(&valid));
    }
    Some(format!("seed {seed}: {error}"))
}

#[test]
fn the_interpreter_agrees() {
    let seeds = seeds();
    let (ran, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for first in 0..cores {
            let (seeds, ran, failures) = (&seeds, &ran, &failures);
            scope.spawn(move || {
                let machine = Machine::new();
                for seed in seeds.iter().skip(first).step_by(cores) {
                    if let Some(failure) = check(&machine, *seed) {
                        failures.lock().unwrap().push(failure);
                    }
                    if failures.lock().unwrap().len() >= 10 {
                        return;
                    }
                    let ran = ran.fetch_add(1, Ordering::Relaxed) + 1;
                    if ran.is_multiple_of(10_000) {
                        println!("{ran} kernels");
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(ran.into_inner(), seeds.len());
    println!("{} kernels, every one as on the interpreter", seeds.len());
}
