//! Random kernels on an emulator and on the interpreter: they must agree in every bit but those of NaNs.
//!
//! `AMDGCN_SEEDS=FROM+COUNT` runs so many kernels, from that one on.

use std::ops::RangeFrom;
use vm_ir::arbitrary::{Options, TileShapes, kernel, tile_kernel};
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::interp::{Argument, Launch, Limits, run};
use vm_ir::{Module, Trust, text, validate};
use vm_jit::backend::amdgcn::Chip;
use vm_jit::{Reject, compile};

use super::{EMULATED, Emulation, chips, sweep, target};

/// Kernels for each chip; with a seed, how many of them; and kernels of tiles, which take some seconds.
const KERNELS: u64 = 2000;
const PART: u64 = 40;
const TILES: u64 = 24;
const TILES_PART: u64 = 4;
/// Those of which LLVM loses a value: with registers of 16 bits, and of an `or` of 64. They are run each time.
const LOST: [u64; 2] = [3007, 1_000_623];
/// Of each thread: more than any kernel needs.
const FUEL: u64 = 1 << 40;

/// The seeds to begin with, and how many kernels are run at most: of so many, or of a part of them.
fn seeds(all: u64, part: u64) -> (RangeFrom<u64>, u64) {
    let given = std::env::var("AMDGCN_SEEDS").ok();
    let given = given.as_deref().and_then(|text| text.split_once('+'));
    let number = |text: &str| text.parse().expect("AMDGCN_SEEDS is FROM+COUNT");
    match (given, sweep::seed()) {
        (Some((from, count)), _) => (number(from).., number(count)),
        (None, None) => (0.., all),
        (None, Some(seed)) => (seed % (2 * all).., part),
    }
}

/// Whether it wants what there is not: clusters of threads, products of one row, wide fragments, more room.
fn is_known(reject: &Reject) -> bool {
    let reason = reject.to_string();
    match reject.kind.code() {
        "cluster" | "unsupported-op" => reason.contains("cluster"),
        "unsupported-tile" => {
            let known =
                ["has one row", "is a share of columns", "up to 32 bits", "shared memory", "registers"];
            known.iter().any(|known| reason.contains(known))
        }
        _ => false,
    }
}

/// What differs of a kernel; `None` if it wants what there is not.
fn check(
    emulation: &mut Emulation,
    chip: Chip,
    (module, launch): (Module, Launch),
) -> Option<Result<(), String>> {
    let valid = validate(module, Trust::Guest).unwrap();
    let artifact = match compile(&valid, &target(chip)) {
        Ok(artifact) => artifact,
        Err(rejected) if rejected.0.iter().all(is_known) => return None,
        Err(rejected) => return Some(Err(rejected.to_string())),
    };
    let (mut ours, mut theirs) = (launch.clone(), launch);
    let given = |given: &Argument| match given.tensor() {
        Some(tensor) => format!("{:?}", tensor.extents),
        None => format!("{given:?}"),
    };
    let given: Vec<_> = ours.arguments.iter().map(given).collect();
    run(&valid, &mut theirs, &Limits { races: false, ..Limits::default() }).unwrap();
    let compared = match emulation.run(&artifact, chip, &mut ours, &[], FUEL) {
        Ok(0) => ours.arguments.iter().zip(&theirs.arguments).enumerate().try_for_each(|(number, pair)| {
            let Some((got, wanted)) = pair.0.tensor().zip(pair.1.tensor()) else { return Ok(()) };
            compare(got, wanted, Tolerance::Exact)
                .map_err(|mismatch| format!("argument {number}: {mismatch}"))
        }),
        Ok(stop) => Err(format!("stopped with {stop:#x}")),
        Err(error) => Err(error),
    };
    if compared.is_err() && std::env::var_os("AMDGCN_PRINT").is_some() {
        println!("{}\n; a grid of {:?}, {}", text::print(&valid), ours.grid, given.join(" "));
    }
    Some(compared)
}

/// Runs kernels of these seeds, then of others, as many as given.
fn check_all(first: &[u64], all: u64, part: u64, kernel: fn(u64) -> (Module, Launch)) {
    let Some(mut emulation) = Emulation::start() else { return };
    let mut failures = String::new();
    for chip in chips(&EMULATED) {
        let (from, count) = seeds(all, part);
        let mut run = |seed| Some((seed, check(&mut emulation, chip, kernel(seed))?));
        let first: Vec<_> = first.iter().filter_map(|seed| run(*seed)).collect();
        for (seed, result) in first.into_iter().chain(from.filter_map(run).take(count as usize)) {
            if let Err(error) = result {
                println!("seed {seed} on {chip}: {error}");
                failures += &format!("seed {seed} on {chip}: {error}\n");
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn random_kernels_compute_emulated_what_the_interpreter_does() {
    check_all(&LOST, KERNELS, PART, |seed| {
        let (vectors, together) = (seed.is_multiple_of(2), seed % 4 < 3);
        // LLVM loses values of what they are without.
        let bytes = !LOST.contains(&seed);
        kernel(seed, Options { vectors, together, bytes, ..Options::default() })
    });
}

#[test]
fn random_tile_kernels_compute_emulated_what_the_interpreter_does() {
    check_all(&[], TILES, TILES_PART, |seed| {
        let shapes = if seed.is_multiple_of(2) { TileShapes::Odd } else { TileShapes::Whole };
        tile_kernel(seed, shapes)
    });
}
