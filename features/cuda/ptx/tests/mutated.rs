//! PTX of nvcc with changes: each text is refused or becomes a valid kernel, without a panic. `VM_PTX_MUTATIONS` says how many.

mod common;

use common::{Random, text};
use vm_ptx::{Input, Module, Options, link};

/// One change of a text, by line or by word.
fn change(text: &str, words: &[&str], random: &mut Random) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if lines.is_empty() {
        return text.to_owned();
    }
    let at = random.below(lines.len() as u64) as usize;
    let other = random.below(lines.len() as u64) as usize;
    match random.below(8) {
        0 => {
            lines.remove(at);
        }
        1 => lines.insert(at, lines[other].clone()),
        2 => lines.swap(at, other),
        3 => lines.truncate(at),
        4..=6 => {
            let line: Vec<&str> = lines[at].split_inclusive([' ', '\t', '.', ',']).collect();
            if !line.is_empty() {
                let hit = random.below(line.len() as u64) as usize;
                let word = words[random.below(words.len() as u64) as usize];
                lines[at] = line.iter().enumerate().map(|(i, w)| if i == hit { word } else { w }).collect();
            }
        }
        _ => {
            let mut bytes = std::mem::take(&mut lines[at]).into_bytes();
            if !bytes.is_empty() {
                let hit = random.below(bytes.len() as u64) as usize;
                bytes[hit] = b" .,;:{}[]()@!%<>-+0123456789abfrsux\"\\|_"[random.below(39) as usize];
            }
            lines[at] = String::from_utf8_lossy(&bytes).into_owned();
        }
    }
    lines.join("\n")
}

#[test]
fn changed() {
    let count = std::env::var("VM_PTX_MUTATIONS").map_or(400, |count| count.parse().unwrap());
    let mut random = Random::new(std::env::var("VM_PTX_SEED").map_or(1, |seed| seed.parse().unwrap()));
    let sources = ["basics", "shared", "grids", "basics-debug", "maths"].map(text);
    let all = sources.join("\n");
    let words: Vec<&str> = all.split_inclusive([' ', '\t', '.', ',', '\n']).collect();
    let (mut read, mut translated) = (0, 0);
    let mut last = sources[0].clone();
    for _ in 0..count {
        // The kernels of a file are many; one and what stands before the first is enough.
        let source = &sources[random.below(sources.len() as u64) as usize];
        let mut text = source.clone();
        for _ in 0..1 + random.below(3) {
            text = change(&text, &words, &mut random);
        }
        let inputs =
            [&last, &text].map(|text| Input { name: "changed", text, optional: random.below(2) == 0 });
        let _ = link(&inputs, None);
        let parsed = Module::parse(&text);
        last = text;
        let Ok(module) = parsed else { continue };
        read += 1;
        let names: Vec<&str> = module.kernels().collect();
        if names.is_empty() {
            continue;
        }
        let name = names[random.below(names.len() as u64) as usize];
        let block = [[256, 1, 1], [16, 16, 1], [1, 1, 1], [0, 0, 0], [33, 1, 2]][random.below(5) as usize];
        let options =
            Options { block, dynamic_shared: random.next() as u32 >> random.below(32), data: random.next() };
        translated += usize::from(module.translate(name, &options).is_ok());
    }
    assert!(
        count < 100 || read > count / 8 && translated > count / 20,
        "{read} read, {translated} translated"
    );
}
