//! Runs the `.vir` files under `filetests`.

use std::path::{Path, PathBuf};
use vm_ir::binary::{Lines, decode, encode};
use vm_ir::{Trust, text, validate};

fn files(folder: &str) -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "vir"))
        .map(|path| (path.clone(), std::fs::read_to_string(&path).unwrap()))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no files in {}", folder.display());
    files
}

#[test]
fn run() {
    for (path, text) in ["run", "surface", "tile"].into_iter().flat_map(files) {
        match vm_ir::filetest::run_file(&text) {
            Ok(cases) => assert!(cases > 0, "{} runs nothing", path.display()),
            Err(failure) => panic!("{}: {failure}", path.display()),
        }
    }
}

#[test]
fn every_file_round_trips() {
    for (path, text) in ["run", "surface", "tile", "validate"].into_iter().flat_map(files) {
        let Ok(module) = text::parse(&text) else { continue };
        let printed = text::print(&module);
        assert_eq!(text::parse(&printed).as_ref(), Ok(&module), "{}", path.display());
        assert_eq!(text::print(&text::parse(&printed).unwrap()), printed, "{}", path.display());
        for lines in [Lines::Keep, Lines::Strip] {
            let bytes = encode(&module, lines);
            let back = decode(&bytes).unwrap();
            assert_eq!(back, module, "{}", path.display());
            assert_eq!(encode(&back, lines), bytes, "{}", path.display());
            if lines == Lines::Keep {
                let line = |m: &vm_ir::Module| m.kernels()[0].body().ops.first().map(|op| op.line.0);
                assert_eq!(line(&back), line(&module), "{}", path.display());
            }
        }
    }
}

/// Every comment `; error: TEXT` must meet an error on its line, and every error such a comment. A file is
/// validated as a guest's.
#[test]
fn validate_files() {
    let mut failures = String::new();
    for (path, text) in files("validate") {
        let wanted: Vec<(u32, &str)> = text
            .lines()
            .enumerate()
            .filter_map(|(i, line)| Some((i as u32 + 1, line.split_once("; error:")?.1.trim())))
            .collect();
        assert!(!wanted.is_empty(), "{} expects no error", path.display());
        let found: Vec<(u32, String)> = match text::parse(&text) {
            Err(error) => vec![(error.line, error.to_string())],
            Ok(module) => match validate(module, Trust::Guest) {
                Ok(_) => Vec::new(),
                Err(errors) => errors.0.iter().map(|e| (e.line, e.to_string())).collect(),
            },
        };
        let matches = found.len() == wanted.len()
            && found
                .iter()
                .zip(&wanted)
                .all(|((at, error), (line, part))| at == line && error.contains(part));
        if !matches {
            let list = |errors: Vec<(u32, String)>| {
                errors.iter().map(|(l, e)| format!("\n  {l}: {e}")).collect::<String>()
            };
            let wanted = wanted.into_iter().map(|(line, part)| (line, part.to_owned())).collect();
            failures += &format!("\n{}\n wanted{}\n found{}", path.display(), list(wanted), list(found));
        }
    }
    assert!(failures.is_empty(), "{failures}");
}
