//! The crate's modules use each other as the table in docs/architecture.md says, and so never in a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// What each module uses, by its name.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// The rows of the table, in order: a module, and what it may use.
fn table() -> Vec<(String, BTreeSet<String>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("../docs/architecture.md")).expect("docs/architecture.md");
    let row = |line: &str| {
        let [module, _, uses] =
            line.strip_prefix("| `vm-passthrough/src/")?.split(" | ").collect::<Vec<_>>()[..]
        else {
            return None;
        };
        let module = module.trim_end_matches('`').trim_end_matches(".rs").to_owned();
        let uses = uses.trim_end_matches('|').split(',').map(|name| name.trim().to_owned());
        Some((module, uses.filter(|name| !name.is_empty()).collect()))
    };
    text.lines().filter_map(row).collect()
}

/// What the modules' sources name by `crate::`, without their tests.
fn sources() -> Uses {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let lib = code(&src.join("lib.rs"));
    let modules: BTreeSet<String> =
        lib.split("mod ").skip(1).filter_map(|rest| Some(rest.split_once(';')?.0.to_owned())).collect();
    // Names that lib.rs exports, and the modules that they come from.
    let mut exports = BTreeMap::new();
    for (module, names) in
        lib.split("pub use ").skip(1).filter_map(|rest| rest.split_once(';')?.0.split_once("::"))
    {
        for name in names.trim_matches(['{', '}']).split(',') {
            exports.insert(name.trim().to_owned(), module.to_owned());
        }
    }
    let mut uses = Uses::new();
    for file in files(&src) {
        let path = file.strip_prefix(&src).expect("below src");
        let module =
            path.iter().next().and_then(|name| name.to_str()).expect("UTF-8").trim_end_matches(".rs");
        if !modules.contains(module) {
            continue;
        }
        let found = uses.entry(module.to_owned()).or_default();
        for name in named(&code(&file)) {
            let used = if modules.contains(&name) { Some(&name) } else { exports.get(&name) };
            let used = used.unwrap_or_else(|| panic!("{}: what is crate::{name}?", file.display()));
            if used != module {
                found.insert(used.clone());
            }
        }
    }
    uses
}

/// The sources below a directory, without tests.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let is_test = |path: &PathBuf| path.file_stem().is_some_and(|name| name == "tests");
    let (dirs, files): (Vec<_>, Vec<_>) =
        entries.filter(|path| !is_test(path)).partition(|path| path.is_dir());
    files.into_iter().chain(dirs.iter().flat_map(|dir| self::files(dir))).collect()
}

/// The code of a file: without comments, and without the tests at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("a source");
    let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

/// The first names behind each `crate::`.
fn named(code: &str) -> Vec<String> {
    let name = |text: &str| -> String {
        text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let mut found = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let Some(group) = rest.strip_prefix('{') else {
            found.push(name(rest));
            continue;
        };
        let mut depth = 0;
        let mut starts = true;
        for (at, character) in group.char_indices() {
            if starts && !character.is_whitespace() && depth == 0 {
                found.push(name(&group[at..]));
            }
            starts = depth == 0 && (character == ',' || starts && character.is_whitespace());
            match character {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                _ => {}
            }
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

#[test]
fn modules_use_what_stands_before_them_and_nothing_else() {
    let table = table();
    let mut before = BTreeSet::new();
    for (module, uses) in &table {
        let later: Vec<_> = uses.difference(&before).collect();
        assert!(
            later.is_empty(),
            "docs/architecture.md: {module} uses {later:?}, which do not stand above it"
        );
        before.insert(module.clone());
    }
    let table: Uses = table.into_iter().collect();
    let sources = sources();
    for (module, uses) in &sources {
        let row = table.get(module).unwrap_or_else(|| panic!("docs/architecture.md has no row for {module}"));
        assert_eq!(uses, row, "what {module} uses (left), and may use by docs/architecture.md (right)");
    }
    assert_eq!(sources.len(), table.len(), "docs/architecture.md has rows for what is not there");
}

#[test]
fn paths_are_found() {
    let check = |code: &str, expect: &[&str]| assert_eq!(named(code), expect, "{code}");
    check("use crate::pci::{self, Bar};\nlet x = crate::files::open(path);", &["pci", "files"]);
    check("use crate::{Host, claim::{Plan, Step}, files};", &["Host", "claim", "files"]);
    check("use crate::{\n    Host,\n    PciAddress,\n};\npub(crate) fn x() {}", &["Host", "PciAddress"]);
}
