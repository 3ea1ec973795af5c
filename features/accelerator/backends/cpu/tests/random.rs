//! Random kernels on this machine and on the interpreter: they must agree in every bit but those of NaNs. Ops that are not
//! exact the interpreter does in another way; with them, this machine must agree with what it does as an older one.
//!
//! Half of the kernels of rows are compiled as large kernels are. They must also find a planted fault that once let a guest
//! escape: accesses out of bounds were redirected to areas of 128 bytes in the scratch memory, and rows of whole warps overran
//! them. `vm-jit/src/backend/cpu/spoil.rs` plants it in kernels whose names end with `_with_narrow_spare`.
//!
//! With a number in `SWEEP_SEED` a sixth of them is taken, from another one on.
//! `VM_CPU_SEEDS=FROM..TO cargo test --release -p vm-cpu --test random -- --nocapture` runs as many as wanted.

mod common;

use common::Machine;
use common::large::same;
use std::io::Write as _;
use std::num::NonZero;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use vm_ir::arbitrary::{Options, RowShapes, TileShapes, kernel, row_kernel, tile_kernel};
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

/// The same of the kernel of rows of a seed.
fn check_rows(machines: &[Machine], seed: u64) -> Option<String> {
    check_rows_of("random", machines, seed)
}

/// The same for a kernel with a name that may plant a fault.
fn check_rows_of(name: &str, machines: &[Machine], seed: u64) -> Option<String> {
    let shapes = RowShapes::ALL[(seed % 3) as usize];
    let (seed, effort) = (seed / 3, (seed / 3) % 2);
    let machine = &machines[(seed / 2 % machines.len() as u64) as usize];
    let name =
        if effort == 1 { name.replacen("random", "random_as_a_large_one", 1) } else { name.to_owned() };
    let limits = Limits { races: false, ..Limits::default() };
    let (module, launch) = row_kernel(&name, seed, shapes);
    let seed = format!("rows of seed {seed}, {shapes:?}");
    let valid = validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("{seed}: {errors}"));
    let (mut ours, mut theirs) = (launch.clone(), launch);
    run(&valid, &mut theirs, &limits).unwrap_or_else(|error| panic!("{seed}: {error}"));
    let result = machine.run(&valid, &mut ours, 1 << 40).and_then(|stop| match stop {
        0 => same(&ours, &theirs),
        word => Err(format!("stopped with {word:#x}")),
    });
    let error = result.err()?;
    if std::env::var_os("VM_CPU_PRINT").is_some() {
        println!("{}", text::print(&valid));
    }
    Some(format!("{seed}, as {name} on {}: {error}", machine.name()))
}

/// If set to a seed, this process searches for a kernel that shows the planted fault, from that seed on, and exits with an error
/// at the first one.
const SEARCH: &str = "VM_CPU_SEARCH";
/// The most kernels of a search.
const WITHIN: u64 = 1000;
/// First seeds of the searches: ten arbitrary numbers.
const SEARCHES: [u64; 10] =
    [0, 1 << 20, 77_777, 3_141_593, 27_182_818, 123_456_789, 999_999_937, 1 << 40, 42, 8191];

/// Each search runs in a process of its own, since a kernel that escapes may crash it.
#[test]
fn the_layout_that_let_a_guest_escape_is_found() {
    const NAME: &str = "the_layout_that_let_a_guest_escape_is_found";
    if let Ok(first) = std::env::var(SEARCH) {
        let (first, machines) = (first.parse::<u64>().unwrap(), Machine::all());
        for number in 0..WITHIN {
            println!("kernel {}", number + 1);
            std::io::stdout().flush().unwrap();
            if let Some(found) = check_rows_of("random_with_narrow_spare", &machines, first + number) {
                println!("found: {found}");
                std::io::stdout().flush().unwrap();
                // Skips destructors, which would wait for a kernel that may not end.
                std::process::exit(1);
            }
        }
        return;
    }
    let searches = match std::env::var("SWEEP_SEED").ok() {
        Some(seed) => vec![SEARCHES[seed.parse::<usize>().unwrap() % SEARCHES.len()]],
        None => SEARCHES.to_vec(),
    };
    for first in searches {
        let mut search = Command::new(std::env::current_exe().unwrap());
        search.args([NAME, "--exact", "--nocapture"]).env(SEARCH, first.to_string());
        let done = search.output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        let count = said.lines().filter(|line| line.starts_with("kernel ")).count();
        let how = said.lines().find_map(|line| line.strip_prefix("found: "));
        println!("from {first}: {count} kernels, {}: {}", done.status, how.unwrap_or("it ended the process"));
        assert!(count > 0 && !done.status.success(), "not found in {count} kernels from {first}:\n{said}");
    }
}

#[test]
fn the_interpreter_agrees_on_rows() {
    let count = on_all_cores(&seeds(), check_rows);
    println!("{count} kernels of rows, every one as on the interpreter");
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
