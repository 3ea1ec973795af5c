//! The fuzz targets, run briefly: each kind of outside bytes through its function, from the seeds in `fuzz/seeds`,
//! mutated in a fixed order so that a failure repeats.

use std::path::Path;
use std::time::{Duration, Instant};

use vm_ir::mutate::Mutator;

/// How long each target runs at most.
const LIMIT: Duration = Duration::from_secs(5);
/// How many inputs each target gets at most.
const INPUTS: u64 = 100_000;

/// What means something in numbers, lists and strings.
const WORDS: &[&str] = &["9", "18446744073709551615", "-1", "[", "[[", "\"", "\0\0\0\0", "\u{ff}\u{ff}"];

fn run(target: &str, function: impl Fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let mut paths: Vec<_> = std::fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).expect("a seed")).collect();
    assert!(!seeds.is_empty(), "{} has no seeds", dir.display());
    seeds.iter().for_each(|seed| function(seed));

    let started = Instant::now();
    let mut mutator = Mutator::new(0x9e37_79b9_7f4a_7c15);
    for _ in 0..INPUTS {
        if started.elapsed() > LIMIT {
            break;
        }
        let mut data = match mutator.below(8) {
            0 => (0..mutator.below(4096)).map(|_| mutator.number() as u8).collect(),
            _ => seeds[mutator.below(seeds.len())].clone(),
        };
        for _ in 0..=mutator.below(8) {
            let other = mutator.below(seeds.len());
            mutator.bytes(&mut data, &seeds[other], WORDS);
        }
        function(&data);
    }
}

#[test]
fn guest_toml() {
    run("guest_toml", vm_service::config::fuzz);
}

#[test]
fn bridge() {
    run("bridge", |data| {
        vm_bridge::server::fuzz::frames(data);
    });
}

#[test]
fn control() {
    run("control", vm_service::guest::control::fuzz);
}

#[test]
fn sysfs() {
    run("sysfs", vm_passthrough::sim::fuzz_sysfs);
}

#[test]
fn config_space() {
    run("config_space", vm_passthrough::sim::fuzz_config_space);
}

#[test]
fn ledger() {
    run("ledger", vm_passthrough::ledger::fuzz_record);
}

#[test]
fn recording() {
    run("recording", vm_bridge::recording::fuzz);
}
