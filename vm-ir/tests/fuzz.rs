//! The fuzz functions, run briefly: the files under `filetests` as seeds, in text and in binary, mutated in a fixed
//! order so that a failure repeats.
//!
//! `VIR_FUZZ=1000000 cargo test --release -p vm-ir --test fuzz` tries as many inputs of each form.

use std::path::Path;
use std::time::{Duration, Instant};
use vm_ir::binary::{Lines, encode};
use vm_ir::fuzz::{self, Reached};
use vm_ir::mutate::Mutator;
use vm_ir::text;

/// How long each form runs at most, unless the number of inputs is asked for.
const LIMIT: Duration = Duration::from_secs(5);
/// How many inputs each form gets at least, however slow the machine, so that some of each kind are among them.
const LEAST: u64 = 1000;
/// How many inputs each form gets at most.
const INPUTS: u64 = 50_000;
/// How long one input may take, without optimisation. It is far from what any takes, and far from no end.
const ONE_INPUT: Duration = Duration::from_secs(120);

/// The text of every file, without comments.
fn seeds() -> Vec<String> {
    let mut paths = Vec::new();
    for folder in ["run", "surface", "tile", "validate"] {
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

fn run(
    seeds: &[Vec<u8>],
    change: fn(&mut Mutator, &mut Vec<u8>, &[u8]),
    function: impl Fn(&[u8]) -> Reached,
) {
    assert!(seeds.len() > 10);
    let whole = seeds.iter().filter(|seed| function(seed) == Reached::Valid).count();
    assert!(whole > 10, "only {whole} seeds are valid");
    let mut reached = [0u64; 3];
    let asked: Option<u64> = std::env::var("VIR_FUZZ").ok().and_then(|n| n.parse().ok());
    let started = Instant::now();
    let mut mutator = Mutator::new(0x9e37_79b9_7f4a_7c15);
    for number in 0..asked.unwrap_or(INPUTS) {
        if asked.is_none() && number >= LEAST && started.elapsed() > LIMIT {
            break;
        }
        let mut data = match mutator.below(32) {
            0 => (0..mutator.below(1024)).map(|_| mutator.number() as u8).collect(),
            _ => seeds[mutator.below(seeds.len())].clone(),
        };
        let other = &seeds[mutator.below(seeds.len())];
        change(&mut mutator, &mut data, other);
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
    run(&seeds, Mutator::binary, fuzz::binary);
}

#[test]
fn text_modules() {
    let seeds: Vec<Vec<u8>> = seeds().into_iter().map(String::into_bytes).collect();
    run(&seeds, Mutator::text, fuzz::text);
}
