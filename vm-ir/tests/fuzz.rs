//! The fuzz functions, run briefly: the files under `filetests` as seeds, in text and in binary, mutated in a fixed
//! order so that a failure repeats.
//!
//! `VIR_FUZZ=1000000 cargo test --release -p vm-ir --test fuzz` tries as many inputs of each form.

use std::path::Path;
use std::time::{Duration, Instant};
use vm_ir::binary::{Lines, encode};
use vm_ir::fuzz::{self, Reached};
use vm_ir::text;

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

/// Puts a word of the text into the place of another of its kind, or a word of `words`.
fn change_word(data: &mut Vec<u8>, random: &mut Random, words: &[&str]) {
    let in_word = |b: &u8| b.is_ascii_alphanumeric() || b"%@._-".contains(b);
    let mut spans = Vec::new();
    let mut at = 0;
    for run in data.chunk_by(|a, b| in_word(a) == in_word(b)) {
        if in_word(&run[0]) {
            spans.push(at..at + run.len());
        }
        at += run.len();
    }
    let kind = |b: u8| {
        if b.is_ascii_digit() || b == b'-' {
            b'0'
        } else if b.is_ascii_alphabetic() {
            b'a'
        } else {
            b
        }
    };
    let place = spans[random.below(spans.len())].clone();
    let here = kind(data[place.start]);
    let alike: Vec<_> = spans.iter().filter(|s| kind(data[s.start]) == here).collect();
    let word = match here {
        b'a' | b'0' if random.below(2) == 0 => words[random.below(words.len())].as_bytes().to_vec(),
        _ => data[alike[random.below(alike.len())].clone()].to_vec(),
    };
    data.splice(place, word);
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

fn run(seeds: &[Vec<u8>], words: &[&str], function: impl Fn(&[u8]) -> Reached) {
    assert!(seeds.len() > 10);
    let whole = seeds.iter().filter(|seed| function(seed) == Reached::Valid).count();
    assert!(whole > 10, "only {whole} seeds are valid");
    let mut reached = [0u64; 3];
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
        let in_words = !words.is_empty() && data.len() > 100 && random.below(4) != 0;
        if in_words {
            (0..=random.below(3)).for_each(|_| change_word(&mut data, &mut random, words));
        }
        for _ in 0..(1 + random.below(3)) * usize::from(!in_words) {
            mutate(&mut data, &seeds[random.below(seeds.len())], &mut random, words);
        }
        let begun = Instant::now();
        reached[function(&data) as usize] += 1;
        assert!(begun.elapsed() < ONE_INPUT, "input {number} took {:?}", begun.elapsed());
    }
    let [nothing, module, valid] = reached;
    println!("{nothing} inputs are no module, {module} break a rule, {valid} are valid and ran");
    // If hardly any get through the door, the rest is not tested.
    let inputs = nothing + module + valid;
    assert!(module * 100 > inputs && valid * 100 > inputs, "{nothing}, {module}, {valid}");
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
