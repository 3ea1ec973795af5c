//! The fuzz targets, run briefly: each kind of outside bytes through its function, from the seeds in `fuzz/seeds`,
//! mutated in a fixed order so that a failure repeats.

use std::path::Path;
use std::time::{Duration, Instant};

/// How long each target runs at most.
const LIMIT: Duration = Duration::from_secs(5);
/// How many inputs each target gets at most.
const INPUTS: u64 = 100_000;

/// Xorshift64*: the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Changes `data` in one of the ways that fuzzers find useful.
fn mutate(data: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(data.len() + 1);
    let len = random.below(32).min(data.len() - at);
    match random.below(7) {
        0 if at < data.len() => data[at] = random.next() as u8,
        1 if at < data.len() => data[at] ^= 1 << random.below(8),
        2 => drop(data.drain(at..at + len)),
        3 => {
            let copy = data[at..at + len].to_vec();
            let to = random.below(data.len() + 1);
            data.splice(to..to, copy);
        }
        4 => {
            let from = random.below(other.len() + 1);
            let until = from + random.below(64).min(other.len() - from);
            data.splice(at..at, other[from..until].iter().copied());
        }
        5 => data[at..at + len].fill([0x00, 0xff, b'9', b'[', b'"'][random.below(5)]),
        _ => data.insert(at, random.next() as u8),
    }
}

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
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..INPUTS {
        if started.elapsed() > LIMIT {
            break;
        }
        let mut data = match random.below(8) {
            0 => (0..random.below(4096)).map(|_| random.next() as u8).collect(),
            _ => seeds[random.below(seeds.len())].clone(),
        };
        for _ in 0..=random.below(8) {
            mutate(&mut data, &seeds[random.below(seeds.len())], &mut random);
        }
        function(&data);
    }
}

#[test]
fn guest_toml() {
    run("guest_toml", vm_service::config::fuzz);
}

#[test]
fn sysfs() {
    run("sysfs", vm_passthrough::sim::fuzz_sysfs);
}

#[test]
fn config_space() {
    run("config_space", vm_passthrough::guest::fuzz_config_space);
}
