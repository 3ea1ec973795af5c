//! Random kernels on this machine and on the interpreter: they must agree in every bit but those of NaNs. Ops that are not
//! exact the interpreter does in another way; with them, this machine must agree with what it does as an older one.
//!
//! With a number in `SWEEP_SEED` a sixth of them is taken, from another one on.
//! `VM_CPU_SEEDS=FROM..TO cargo test --release -p vm-cpu --test random -- --nocapture` runs as many as wanted.

mod common;

use common::Machine;
use common::large::same;
use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use vm_ir::arbitrary::{Options, TileShapes, kernel, tile_kernel};
use vm_ir::interp::{Limits, run};
use vm_ir::{Trust, text, validate};

/// Kernels that were compiled wrong once, made without `loops` and `indices`.
const KNOWN: [u64; 2] = [200_173, 200_886];

fn seeds() -> Vec<u64> {
    let given = std::env::var("VM_CPU_SEEDS").ok();
    let range = given.as_deref().and_then(|text| text.split_once(".."));
    match range {
        Some((from, to)) => (from.parse().unwrap()..to.parse().unwrap()).collect(),
        None => match std::env::var("SWEEP_SEED").ok() {
            Some(seed) => {
                let first = seed.parse::<u64>().unwrap() % 400;
                (first..first + 66).map(|seed| seed % 400).chain(KNOWN).collect()
            }
            None => (0..400).chain(KNOWN).collect(),
        },
    }
}

/// Compiles and runs the kernel of a seed; what differs, if something does.
fn check(machines: &[Machine], seed: u64) -> Option<String> {
    let machine = &machines[(seed / 2 % machines.len() as u64) as usize];
    let limits = Limits { races: false, ..Limits::default() };
    // Without vectors, neighbouring threads are run together in those of the machine.
    let (vectors, loops) = (seed.is_multiple_of(2), !KNOWN.contains(&seed));
    let options = Options { vectors, loops, indices: loops, strides: loops, ..Options::default() };
    let (module, launch) = kernel(seed, options);
    let valid = validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("seed {seed}: {errors}"));
    let (mut ours, mut theirs) = (launch.clone(), launch);
    run(&valid, &mut theirs, &limits).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    let result = machine.run(&valid, &mut ours, 1 << 40).and_then(|stop| match stop {
        0 => Ok(()),
        word => Err(format!("stopped with {word:#x}")),
    });
    let result = result.and_then(|()| same(&ours, &theirs));
    let error = result.err()?;
    if std::env::var_os("VM_CPU_PRINT").is_some() {
        println!("{}", text::print(&valid));
    }
    Some(format!("seed {seed} on {}: {error}", machine.name()))
}

/// The same of the tile kernel of a seed.
fn check_tile(machines: &[Machine], seed: u64) -> Option<String> {
    let machine = &machines[(seed % machines.len() as u64) as usize];
    let limits = Limits { races: false, ..Limits::default() };
    let shapes = if seed.is_multiple_of(8) { TileShapes::Whole } else { TileShapes::Odd };
    let (module, launch) = tile_kernel(seed, shapes);
    let valid = validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("seed {seed}: {errors}"));
    let (mut ours, mut theirs) = (launch.clone(), launch);
    run(&valid, &mut theirs, &limits).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    let result = machine.run(&valid, &mut ours, 1 << 40).and_then(|stop| match stop {
        0 => same(&ours, &theirs),
        word => Err(format!("stopped with {word:#x}")),
    });
    let error = result.err()?;
    if std::env::var_os("VM_CPU_PRINT").is_some() {
        println!("{}", text::print(&valid));
    }
    Some(format!("tile kernel of seed {seed} on {}: {error}", machine.name()))
}

/// The same with ops that are not exact, on this machine and as each older one.
fn check_inexact(machines: &[Machine], seed: u64) -> Option<String> {
    let options = Options { inexact: true, vectors: seed.is_multiple_of(2), ..Options::default() };
    let (module, launch) = kernel(seed, options);
    let valid = validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("seed {seed}: {errors}"));
    let mut results = machines.iter().map(|machine| {
        let mut launch = launch.clone();
        machine.run(&valid, &mut launch, 1 << 40).map(|stop| (stop, launch))
    });
    let (stop, first) = match results.next()? {
        Ok(result) => result,
        Err(error) => return Some(format!("seed {seed}: {error}")),
    };
    for (result, machine) in results.zip(&machines[1..]) {
        let result = result.and_then(|(other, launch)| match other == stop {
            true => same(&launch, &first),
            false => Err(format!("stopped with {other:#x}, not {stop:#x}")),
        });
        if let Err(error) = result {
            return Some(format!("seed {seed} on {}: {error}", machine.name()));
        }
    }
    None
}

#[test]
fn the_interpreter_agrees() {
    let count = on_all_cores(&seeds(), check);
    println!("{count} kernels, every one as on the interpreter");
}

#[test]
fn the_interpreter_agrees_on_tiles() {
    let seeds: Vec<u64> = seeds().into_iter().step_by(3).collect();
    let count = on_all_cores(&seeds, check_tile);
    println!("{count} tile kernels, every one as on the interpreter");
}

#[test]
fn older_machines_agree() {
    if Machine::all().len() == 1 {
        println!("skipped: there is no older machine whose code this one runs");
        return;
    }
    let count = on_all_cores(&seeds(), check_inexact);
    println!("{count} kernels, every one as on an older machine");
}

/// Checks all of them and gives their number.
fn on_all_cores(seeds: &[u64], check: fn(&[Machine], u64) -> Option<String>) -> usize {
    let (ran, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for first in 0..cores {
            let (ran, failures) = (&ran, &failures);
            scope.spawn(move || {
                let machines = Machine::all();
                for seed in seeds.iter().skip(first).step_by(cores) {
                    if let Some(failure) = check(&machines, *seed) {
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
    let ran = ran.into_inner();
    assert_eq!(ran, seeds.len());
    ran
}
