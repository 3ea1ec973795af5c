//! The fuzz functions, run briefly: the files under `filetests` as seeds, in text and in binary, mutated in a fixed
//! order so that a failure repeats.
//!
//! `VIR_FUZZ=1000000 cargo test --release -p vm-ir --test fuzz` tries as many inputs of each form.

use std::path::Path;
use std::time::{Duration, Instant};
use vm_ir::binary::{Lines, encode};
use vm_ir::{fuzz, text};

/// How long each form runs at most, unless the number of inputs is asked for.
const LIMIT: Duration = Duration::from_secs(5);
/// How many inputs each form gets at most.
const INPUTS: u64 = 50_000;
/// How long one input may take, on a loaded machine without optimisation.
const ONE_INPUT: Duration = Duration::from_secs(20);

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
fn mutate(data: &mut Vec<u8>, other: &[u8], random: &mut Random, words: &[&str]) {
    let at = random.below(data.len() + 1);
    let len = random.below(24).min(data.len() - at);
    match random.below(8) {
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
        5 if !words.is_empty() => {
            let word = words[random.below(words.len())];
            data.splice(at..at + len, word.bytes());
        }
        6 if at < data.len() => data[at] = data[at].wrapping_add(random.below(5) as u8).wrapping_sub(2),
        _ => data.insert(at, random.next() as u8),
    }
}

/// The text of every file, without comments.
fn seeds() -> Vec<String> {
    let mut paths = Vec::new();
    for folder in ["run", "validate"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests").join(folder);
        paths.extend(std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    }
    paths.sort();
    let without_comments = |text: String| {
        text.lines()
            .map(|line| line.split(';').next().unwrap_or("").trim_end().to_owned() + "\n")
            .collect::<String>()
    };
    let read = |path| without_comments(std::fs::read_to_string(path).unwrap());
    paths.iter().map(read).filter(|text| text.len() < 16_000).collect()
}

fn run(seeds: &[Vec<u8>], words: &[&str], function: impl Fn(&[u8])) {
    assert!(seeds.len() > 10);
    seeds.iter().for_each(|seed| function(seed));
    let asked: Option<u64> = std::env::var("VIR_FUZZ").ok().and_then(|n| n.parse().ok());
    let started = Instant::now();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for number in 0..asked.unwrap_or(INPUTS) {
        if asked.is_none() && started.elapsed() > LIMIT {
            break;
        }
        let mut data = match random.below(32) {
            0 => (0..random.below(1024)).map(|_| random.next() as u8).collect(),
            _ => seeds[random.below(seeds.len())].clone(),
        };
        for _ in 0..=random.below(4) {
            mutate(&mut data, &seeds[random.below(seeds.len())], &mut random, words);
        }
        let begun = Instant::now();
        function(&data);
        assert!(begun.elapsed() < ONE_INPUT, "input {number} took {:?}", begun.elapsed());
    }
}

#[test]
fn binary_modules() {
    let modules: Vec<_> = seeds().iter().filter_map(|text| text::parse(text).ok()).collect();
    let bytes = |lines| modules.iter().map(move |m| encode(m, lines));
    let seeds: Vec<Vec<u8>> = bytes(Lines::Keep).chain(bytes(Lines::Strip)).collect();
    run(&seeds, &[], fuzz::binary);
}

#[test]
fn text_modules() {
    let seeds: Vec<Vec<u8>> = seeds().into_iter().map(String::into_bytes).collect();
    let mut words =
        vec!["{", "}", "%n", "%f", "-1", "0x7fc00000", "18446744073709551615", " : i32", " : vec4<f32>"];
    words.extend(vm_ir::op::TABLE.iter().map(|row| row.mnemonic));
    run(&seeds, &words, fuzz::text);
}
