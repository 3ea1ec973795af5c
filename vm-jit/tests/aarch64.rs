//! Code for 64-bit Arm, run by an emulator of that machine: every run of `vm-ir/filetests/run` and `tile`, and random
//! kernels against the interpreter. Every file is compiled also where there is no emulator.

#[path = "aarch64/program.rs"]
mod program;

use program::Emulator;
use std::path::Path;
use vm_ir::arbitrary::{Options, RowShapes, TileShapes, kernel, row_kernel, tile_kernel};
use vm_ir::filetest::{
    Ending, Random, Tolerance, cases, compare, is_on_values, op_kernel, op_launch, op_tolerance,
};
use vm_ir::interp::{Limits, run};
use vm_ir::op::TABLE;
use vm_ir::{Trust, text, validate};
use vm_jit::legal::types_of;
use vm_jit::{Guard, Target, compile};

/// Fuel of each thread.
const FUEL: u64 = 100_000;
/// Random kernels.
const RANDOM: u64 = 40;

fn targets() -> [Target; 2] {
    ["cpu:aarch64", "cpu:aarch64-lse"].map(|name| name.parse().unwrap())
}

#[test]
fn files() {
    let emulator = Emulator::find();
    let folders = ["run", "tile"]
        .map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests").join(name));
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let (mut ran, mut failures) = (0, String::new());
    for path in paths {
        let source = std::fs::read_to_string(&path).unwrap();
        let module = text::parse(&source).unwrap();
        for (number, case) in cases(&source, &module).unwrap().into_iter().enumerate() {
            let Some(ending @ (Ending::Well | Ending::OutOfFuel)) = case.ending() else { continue };
            let endless = ending == Ending::OutOfFuel;
            let place = format!("{} line {}", path.file_name().unwrap().display(), case.line);
            let valid = validate(module.clone(), case.trust).unwrap();
            let target = &targets()[number % 2];
            let artifact = compile(&valid, target).unwrap_or_else(|error| panic!("{place}: {error}"));
            let Ok(emulator) = &emulator else { continue };
            let mut launch = case.launch.clone();
            match emulator.run(&artifact, &mut launch, FUEL) {
                Ok(Guard::OUT_OF_FUEL) if endless => {}
                Ok(0) if !endless => {
                    if let Err(failure) = case.check(&launch.arguments) {
                        failures += &format!("{place}: {failure}\n");
                    }
                }
                Ok(stop) => failures += &format!("{place}: stopped with {stop:#x}\n"),
                Err(error) => failures += &format!("{place}: {error}\n"),
            }
            ran += 1;
        }
    }
    match emulator {
        Err(reason) => println!("skipped: {reason}"),
        Ok(_) => assert!(failures.is_empty() && ran > 50, "{ran} ran\n{failures}"),
    }
}

#[test]
fn random_kernels() {
    let emulator = match Emulator::find() {
        Ok(emulator) => emulator,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let limits = Limits { races: false, ..Limits::default() };
    for seed in 0..RANDOM {
        let options = Options { vectors: seed % 2 == 0, ..Options::default() };
        let (module, launch) = match seed % 4 {
            1 => row_kernel("random", seed, RowShapes::ALL[(seed / 4 % 3) as usize]),
            3 => tile_kernel(seed, TileShapes::Odd),
            _ => kernel(seed, options),
        };
        let valid = validate(module, Trust::Guest).unwrap();
        let (mut ours, mut theirs) = (launch.clone(), launch);
        run(&valid, &mut theirs, &limits).unwrap();
        let artifact = compile(&valid, &targets()[seed as usize / 2 % 2]).unwrap();
        assert_eq!(emulator.run(&artifact, &mut ours, 1 << 40), Ok(0), "seed {seed}");
        for (number, (got, wanted)) in ours.arguments.iter().zip(&theirs.arguments).enumerate() {
            if let (Some(got), Some(wanted)) = (got.tensor(), wanted.tensor()) {
                compare(got, wanted, Tolerance::Exact)
                    .unwrap_or_else(|mismatch| panic!("seed {seed}, argument {number}: {mismatch}"));
            }
        }
    }
}

#[test]
fn ops_on_values() {
    let emulator = Emulator::find();
    let (mut random, mut failures) = (Random(11), String::new());
    for row in TABLE.iter().filter(|row| is_on_values(row)) {
        for (number, (from, to)) in types_of(row.opcode).into_iter().enumerate() {
            let lanes = [1, 4][number % 2];
            let source = op_kernel(row, from, to, lanes);
            let valid = validate(text::parse(&source).unwrap(), Trust::Guest).unwrap();
            let place = format!("{} {from} {to} in {lanes}", row.mnemonic);
            let artifact =
                compile(&valid, &targets()[0]).unwrap_or_else(|error| panic!("{place}: {error}\n{source}"));
            let Ok(emulator) = &emulator else { continue };
            let launch = op_launch(&valid.kernels()[0], lanes, &mut random);
            let (mut ours, mut theirs) = (launch.clone(), launch);
            run(&valid, &mut theirs, &Limits::default()).unwrap();
            let stop = emulator.run(&artifact, &mut ours, 1);
            let outputs = [&ours, &theirs].map(|launch| launch.arguments.last().and_then(|a| a.tensor()));
            let result = match (stop, outputs) {
                (Ok(0), [Some(got), Some(wanted)]) => {
                    compare(got, wanted, op_tolerance(row, from)).map_err(|mismatch| mismatch.to_string())
                }
                (stop, _) => Err(format!("{stop:?}")),
            };
            if let Err(error) = result {
                failures += &format!("{place}: {error}\n");
            }
        }
    }
    if let Err(reason) = emulator {
        println!("skipped: {reason}");
    }
    assert!(failures.is_empty(), "{failures}");
}
