//! Changed modules that are still valid run as machine code between canaries: whatever a guest sends, its code touches
//! its own views only, and stops.
//!
//! What is changed: every kernel of vm-ir's files and random kernels, in the binary form and in text. The same inputs in
//! every run, so that a failure repeats; the text of the kernel that runs stands in a file, in case it ends the process.
//!
//! `VM_CPU_MUTATIONS=1000000 cargo test --release -p vm-cpu --test mutated -- --nocapture` tries as many as wanted.

mod common;

use std::path::Path;
use std::time::Duration;

use common::Machine;
use vm_accel::Artifact;
use vm_ir::arbitrary::{self, Options, RowShapes, TileShapes};
use vm_ir::mutate::{Modules, Mutator, launch};
use vm_ir::{Trust, text, validate};

/// How many changed modules there are, unless another number is asked for.
const MUTATIONS: usize = 10_000;
/// Random kernels among the seeds.
const RANDOM: u64 = 24;
/// Fuel of each thread: kernels that were changed often loop for ever.
const FUEL: u64 = 200;
/// When a kernel is stopped that is slow all the same.
const TIME: Duration = Duration::from_secs(2);
/// Launches of each kernel, with other arguments.
const LAUNCHES: usize = 2;

/// What is changed.
fn seeds() -> Modules {
    let mut seeds = Modules::default();
    for folder in ["run", "surface", "tile", "validate"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../vm-ir/filetests").join(folder);
        let mut paths: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().for_each(|path| seeds.take_text(&std::fs::read_to_string(path).unwrap()));
    }
    for seed in 0..RANDOM {
        let (vectors, together) = (seed % 2 == 0, seed % 3 != 0);
        let options = Options { statements: 12, vectors, together, ..Options::default() };
        seeds.take(&arbitrary::kernel(seed, options).0);
    }
    (0..RANDOM).for_each(|seed| seeds.take(&arbitrary::tile_kernel(seed, TileShapes::Odd).0));
    for (seed, shapes) in (0..RANDOM).zip(RowShapes::ALL.into_iter().cycle()) {
        seeds.take(&arbitrary::row_kernel("random", seed, shapes).0);
    }
    seeds
}

/// What became of the inputs.
#[derive(Debug, Default)]
struct Counts {
    inputs: usize,
    /// Those that are a module, and another than before.
    modules: usize,
    valid: usize,
    /// Kernels that were compiled.
    compiled: usize,
    /// Kernels that the compiler declared itself unable to compile.
    rejected: usize,
    /// Launches.
    ran: usize,
    /// Those that were stopped.
    stopped: usize,
}

#[test]
fn what_runs_touches_its_own_views_only() {
    let machines = Machine::all();
    let seeds = seeds();
    let asked = std::env::var("VM_CPU_MUTATIONS").ok().map(|number| number.parse().unwrap());
    let running = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutated.vir");
    let mut mutator = Mutator::new(0x9e37_79b9_7f4a_7c15);
    let mut counts = Counts::default();
    while counts.inputs < asked.unwrap_or(MUTATIONS) {
        counts.inputs += 1;
        if counts.inputs.is_multiple_of(50_000) {
            println!("{counts:?}");
        }
        let Some(module) = seeds.changed(&mut mutator) else { continue };
        counts.modules += 1;
        let Ok(valid) = validate(module, Trust::Guest) else { continue };
        let machine = &machines[counts.valid % machines.len()];
        counts.valid += 1;
        let printed = text::print(&valid);
        std::fs::write(&running, &printed).unwrap();
        for kernel in valid.kernels() {
            let artifact: Artifact = match machine.compile(&valid, kernel.name()) {
                Ok(artifact) => artifact,
                Err(error) if error.starts_with("rejected: ") => {
                    counts.rejected += 1;
                    continue;
                }
                Err(error) => panic!("input {}: {error}\n{printed}", counts.inputs),
            };
            counts.compiled += 1;
            for _ in 0..LAUNCHES {
                let Some(mut launch) = launch(kernel, &mut mutator) else { continue };
                match machine.launch(&artifact, &mut launch, FUEL, TIME) {
                    Ok(stop) => {
                        counts.ran += 1;
                        counts.stopped += usize::from(stop != 0);
                    }
                    Err(error) => panic!("input {}: {error}\n{launch:?}\n{printed}", counts.inputs),
                }
            }
        }
    }
    println!("{counts:?}");
    assert!(counts.ran * 20 > counts.inputs && counts.stopped > 0, "too few of them ran: {counts:?}");
}
