//! What the documents name exists: files, links, commands, options and scenarios.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use clap::{CommandFactory as _, Parser as _};
use vm_passthrough::readiness::BlockerCode;
use vm_service::cli::Cli;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The documents with their text.
fn documents() -> Vec<(PathBuf, String)> {
    let mut paths: Vec<PathBuf> = ["README.md", "CONTRIBUTING.md", "ROADMAP.md", "CHANGELOG.md"]
        .iter()
        .map(|name| root().join(name))
        .collect();
    for folder in ["docs", "docs/course"] {
        let docs = fs::read_dir(root().join(folder)).expect("documents");
        paths.extend(
            docs.map(|entry| entry.expect("an entry").path())
                .filter(|path| path.extension().is_some_and(|extension| extension == "md")),
        );
    }
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(&path).expect("a document"))).collect()
}

/// Every `code span` and every line of a code block that is shell.
fn code(text: &str) -> Vec<String> {
    let mut code = Vec::new();
    let mut block = None;
    for line in text.lines() {
        if let Some(language) = line.strip_prefix("```") {
            block = if block.is_some() { None } else { Some(language.to_owned()) };
        } else if let Some(language) = &block {
            if language == "sh" || language == "console" {
                code.push(line.strip_prefix("$ ").unwrap_or(line).to_owned());
            }
        } else {
            code.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    code
}

#[test]
fn links_lead_somewhere() {
    let mut checked = 0;
    for (document, text) in documents() {
        // Not in blocks of code, where an index may stand before a call.
        let prose = text.split("\n```").step_by(2);
        for part in prose.flat_map(|prose| prose.split("](").skip(1)) {
            let target = part.split([')', '#']).next().unwrap_or_default();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            let path = document.parent().expect("a directory").join(target);
            assert!(path.exists(), "{} links to {target}, which is gone", document.display());
            checked += 1;
        }
    }
    assert!(checked > 10, "only {checked} links were found");
}

#[test]
fn paths_exist() {
    let mut checked = 0;
    for (document, text) in documents() {
        for span in code(&text) {
            for word in span.split_whitespace() {
                let word = word.trim_end_matches(['.', ',', ':', ';']);
                let top = word.split('/').next().unwrap_or_default();
                let ours = [
                    "vm-ir",
                    "vm-jit",
                    "vm-passthrough",
                    "vm-service",
                    "features",
                    "docs",
                    "tests",
                    "fuzz",
                    ".ci",
                ]
                .contains(&top);
                // The fuzzer's corpus is made where it runs.
                if ours && word.contains('/') && !word.contains('{') && !word.starts_with("fuzz/corpus/") {
                    assert!(root().join(word).exists(), "{} names {word}, which is gone", document.display());
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 10, "only {checked} paths were found");
}

#[test]
fn commands_parse() {
    let mut checked = BTreeSet::new();
    for (document, text) in documents() {
        for span in code(&text) {
            let words: Vec<&str> = span.split_whitespace().collect();
            let args: Vec<&str> = match words.as_slice() {
                ["vm-service", args @ ..] => args.to_vec(),
                ["cargo", "run", rest @ ..] if rest.contains(&"vm-service") => {
                    rest.iter().skip_while(|word| **word != "--").skip(1).copied().collect()
                }
                _ => continue,
            };
            if args.is_empty() {
                continue;
            }
            let args = args
                .iter()
                // Up to what is the shell's: a comment, a pipe, a redirection.
                .take_while(|word| !["#", "|", ">", "2>&1"].contains(*word))
                .map(|word| if word.trim_end_matches('…') == "ADDR" { "0000:65:00.0" } else { word });
            let parsed = Cli::try_parse_from(std::iter::once("vm-service").chain(args));
            if let Err(error) = parsed {
                panic!("{} shows `{span}`, which is no command: {error}", document.display());
            }
            checked.extend(words.get(1).map(|word| (*word).to_owned()));
        }
    }
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        assert!(name == "help" || checked.contains(name), "no document shows `vm-service {name}`");
    }
}

#[test]
fn options_exist() {
    let mut cli = Cli::command();
    cli.build();
    let mut known: BTreeSet<String> = BTreeSet::new();
    let mut commands = vec![&cli];
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands());
        let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
        known.extend(shown.filter_map(|argument| argument.get_long()).map(str::to_owned));
    }
    let text = |name: &str| fs::read_to_string(root().join(name)).expect("a document");
    let operating = text("docs/operating.md") + &text("docs/daemon.md");
    for option in &known {
        let obvious = ["help", "version"].contains(&option.as_str());
        assert!(
            obvious || operating.contains(&format!("--{option}")),
            "docs/operating.md and docs/daemon.md miss --{option}"
        );
    }
    // Options of other programs, of the testbed, of vmhook and of the tests on a GPU.
    let others = "again all-targets bench bins cflags cloud-hypervisor example examples features fuzz ignored jobs lib library libs libs-only-L linux list locked log markdown monitor most nightly no-default-features nocapture nvrtc only package path pid processors profile quick release reserve retry seed shard stacks test tests tiles-for timeout unix-socket variant verbose workspace";
    known.extend(others.split(' ').map(str::to_owned));
    for (document, text) in documents() {
        for span in code(&text) {
            for option in span.split_whitespace().filter_map(|word| word.strip_prefix("--")) {
                let option = option.split('=').next().unwrap_or_default();
                let named = option.is_empty() || known.contains(option);
                assert!(named, "{} names --{option}, which is gone", document.display());
            }
        }
    }
}

/// The files below a folder, with their text.
fn sources(folder: PathBuf) -> Vec<(PathBuf, String)> {
    let (mut sources, mut folders) = (Vec::new(), vec![folder]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of source") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let text = fs::read_to_string(&path).expect("source");
                sources.push((path, text));
            }
        }
    }
    sources
}

/// Folders with a Cargo.toml that are no programs for tests.
fn packages(folder: PathBuf) -> Vec<PathBuf> {
    const OTHERS: [&str; 5] = ["bindings", "examples", "fuzz", "target", "tests"];
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("UTF-8");
        if !entry.path().is_dir() || name.starts_with('.') || OTHERS.contains(&name.as_str()) {
            continue;
        }
        if entry.path().join("Cargo.toml").exists() {
            found.push(entry.path());
        } else {
            found.extend(packages(entry.path()));
        }
    }
    found
}

#[test]
fn the_crates_of_the_architecture_use_what_it_says() {
    let text = fs::read_to_string(root().join("docs/architecture.md")).expect("docs/architecture.md");
    let mut told = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> =
            line.trim_matches('|').split(" | ").map(|cell| cell.trim_matches([' ', '|'])).collect();
        if let [path, name, _, uses @ ..] = &cells[..]
            && name.starts_with('`')
            && name.ends_with('`')
            && !path.starts_with("`tests/")
            && *path != "`fuzz/`"
        {
            let uses: BTreeSet<_> =
                uses.iter().flat_map(|uses| uses.split(", ")).filter(|uses| !uses.is_empty()).collect();
            let place = root().join(path.trim_matches('`')).join("Cargo.toml");
            told.insert(
                place,
                (name.trim_matches('`').to_owned(), uses.into_iter().map(str::to_owned).collect()),
            );
        }
    }
    let mut manifests: Vec<_> = packages(root()).iter().map(|package| package.join("Cargo.toml")).collect();
    manifests.extend(["bindings/python/Cargo.toml", "examples/gpt/Cargo.toml"].map(|path| root().join(path)));
    let read =
        |path: &Path| -> toml::Table { fs::read_to_string(path).expect("a manifest").parse().expect("TOML") };
    let all: Vec<_> = manifests.into_iter().map(|path| (read(&path), path)).collect();
    let name_of = |manifest: &toml::Table| manifest["package"]["name"].as_str().expect("a name").to_owned();
    let ours: BTreeSet<_> = all.iter().map(|(manifest, _)| name_of(manifest)).collect();
    let mut found = BTreeMap::new();
    for (manifest, path) in &all {
        let mut uses = BTreeSet::new();
        let others = manifest
            .get("target")
            .and_then(toml::Value::as_table)
            .into_iter()
            .flat_map(|target| target.values());
        let tables =
            others.filter_map(|target| target.get("dependencies")).chain(manifest.get("dependencies"));
        for (name, how) in
            tables.filter_map(toml::Value::as_table).flatten().filter(|(name, _)| ours.contains(*name))
        {
            let is_optional = how.get("optional").and_then(toml::Value::as_bool) == Some(true);
            uses.insert(if is_optional { format!("(`{name}`)") } else { format!("`{name}`") });
        }
        found.insert(path.clone(), (name_of(manifest), uses));
    }
    let (testing, released): (Vec<_>, Vec<_>) =
        found.iter().partition(|(path, _)| path.starts_with(root().join("features/testing")));
    for (_, (name, uses)) in released {
        for (_, (other, _)) in &testing {
            assert!(
                !uses.iter().any(|uses| uses.contains(other.as_str())),
                "{name} is released and uses {other}"
            );
        }
    }
    for (path, uses) in &found {
        assert_eq!(Some(uses), told.get(path), "docs/architecture.md says otherwise of {}", path.display());
    }
    assert_eq!(found.len(), told.len(), "docs/architecture.md has crates that are gone: {:?}", told.keys());
}

#[test]
fn every_module_with_unsafe_code_is_told() {
    let safety = fs::read_to_string(root().join("docs/safety.md")).expect("docs/safety.md");
    let chapter = safety.split("\n## ").find(|chapter| chapter.starts_with("unsafe\n")).expect("its chapter");
    let told = code(chapter);
    let mut found = 0;
    for (path, text) in packages(root()).into_iter().flat_map(|package| sources(package.join("src"))) {
        let path = path.strip_prefix(root()).expect("below it").to_str().expect("UTF-8").to_owned();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        if path.ends_with("/tests.rs") || !code.contains("allow(unsafe_code") {
            continue;
        }
        found += 1;
        let sys = path.split('/').any(|part| ["sys", "sys.rs"].contains(&part));
        let named = told.iter().any(|span| span.contains('/') && path.starts_with(span.as_str()));
        assert!(sys || named, "docs/safety.md does not say why {path} has unsafe code");
    }
    assert!(found > 20, "only {found} modules with unsafe code were found");
}

#[test]
fn scenarios_exist() {
    let sources: String =
        sources(root().join("tests/testbed/src")).into_iter().map(|(_, text)| text).collect();
    let mut checked = 0;
    for (document, text) in documents() {
        for span in code(&text) {
            let words: Vec<&str> = span.split_whitespace().collect();
            let (["cargo", "testbed", scenarios @ ..] | [".ci/run", scenarios @ ..]) = words.as_slice()
            else {
                continue;
            };
            for scenario in scenarios.iter().filter(|word| !word.starts_with('-')) {
                let known = sources.contains(&format!("\"{scenario}\""));
                assert!(known, "{} names the scenario {scenario}, which is gone", document.display());
                checked += 1;
            }
        }
    }
    assert!(checked > 0, "no document names a scenario");
}

#[test]
fn every_blocker_code_is_documented() {
    let operating = fs::read_to_string(root().join("docs/operating.md")).expect("docs/operating.md");
    for code in BlockerCode::ALL {
        let row = format!("| `{code}` | {} |", code.summary());
        assert!(operating.contains(&row), "docs/operating.md misses the row {row}");
    }
}
