//! Rewrites source files so that one build has many mutants: `weave INPUT.json` turns each mutant into a branch that runs only if the environment variable
//! `MUTANT` is its number, and prints where the branches are. With these places an error of the compiler can be traced to a mutant.
//!
//! [`Input`] is the format of the input, [`Output`] that of the output. Mutants of code that runs in the compiler (`const`) are left out.

mod change;
mod places;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The input. Files are read from the folder `from` and written to the same path in `to`.
#[derive(Deserialize)]
struct Input {
    from: PathBuf,
    to: PathBuf,
    /// The root files of the crates. Each gets the module [`ASK`].
    roots: Vec<String>,
    mutants: Vec<Mutant>,
}

/// A mutant, as cargo-mutants lists it, and its number.
#[derive(Clone, Deserialize)]
struct Mutant {
    number: u32,
    file: String,
    genre: String,
    replacement: String,
    span: Span,
}

/// A range of a file, without the character at its end. Lines and columns start at 1.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    start: Position,
    end: Position,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Position {
    line: usize,
    column: usize,
}

/// The output.
#[derive(Default, Serialize)]
struct Output {
    woven: Vec<Woven>,
    /// Mutants that can't be parsed: `||` between conditions with `let`.
    invalid: Vec<u32>,
}

/// A mutant's place in the rewritten file.
#[derive(Serialize)]
struct Woven {
    number: u32,
    file: String,
    /// The mutant's branch.
    changed: Span,
    /// Both branches.
    whole: Span,
}

/// The module that each crate root gets.
const ASK: &str = r#"
#[doc(hidden)]
pub mod woven_mutants {
    extern crate std;
    use std::io::Write as _;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Whether this mutant is selected. If none is and `MUTANTS_REACHED` names a file, the mutant's number is appended there.
    pub fn is(number: u32) -> bool {
        static CHOSEN: OnceLock<u32> = OnceLock::new();
        static REACHED: OnceLock<Option<std::path::PathBuf>> = OnceLock::new();
        static SEEN: [AtomicBool; 1 << 16] = [const { AtomicBool::new(false) }; 1 << 16];
        let chosen = *CHOSEN.get_or_init(|| std::env::var("MUTANT").ok().and_then(|number| number.parse().ok()).unwrap_or(u32::MAX));
        if chosen != u32::MAX {
            return chosen == number;
        }
        if let Some(path) = REACHED.get_or_init(|| std::env::var_os("MUTANTS_REACHED").map(Into::into))
            && !SEEN[number as usize].swap(true, Ordering::Relaxed)
            && let Ok(mut file) = std::fs::OpenOptions::new().append(true).open(path)
        {
            let _ = file.write_all(std::format!("{number}\n").as_bytes());
        }
        false
    }
}
"#;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: weave INPUT.json")?;
    let input: Input = serde_json::from_slice(&fs::read(path)?)?;
    let mut by_file: BTreeMap<&str, Vec<&Mutant>> = BTreeMap::new();
    for root in &input.roots {
        by_file.entry(root).or_default();
    }
    for mutant in &input.mutants {
        by_file.entry(&mutant.file).or_default().push(mutant);
    }
    let mut output = Output::default();
    for (file, mutants) in by_file {
        let text = fs::read_to_string(input.from.join(file)).map_err(|error| format!("{file}: {error}"))?;
        let mut tree = syn::parse_file(&text).map_err(|error| format!("{file}: {error}"))?;
        output.invalid.extend(change::weave(&mut tree, &mutants));
        let mut text = prettyplease::unparse(&tree);
        let again = syn::parse_file(&text).map_err(|error| format!("{file}, rewritten: {error}"))?;
        output.woven.extend(places::of(&again, file));
        if input.roots.iter().any(|root| root == file) {
            text += ASK;
        }
        write(&input.to.join(file), &text)?;
    }
    println!("{}", serde_json::to_string(&output)?);
    Ok(())
}

/// Writes a file if its text differs, so that cargo compiles nothing twice.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) { Ok(()) } else { fs::write(path, text) }
}
