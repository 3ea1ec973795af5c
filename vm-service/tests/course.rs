//! The course's chapters for the shell, step by step: each block is run, and shows what it is said to show.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Blocks of code with their language and the line that each begins in.
fn blocks(text: &str) -> Vec<(&str, usize, String)> {
    let mut blocks: Vec<(&str, usize, String)> = Vec::new();
    let mut is_inside = false;
    for (number, line) in (1..).zip(text.lines()) {
        match line.strip_prefix("```") {
            Some(language) if !is_inside => {
                blocks.push((language, number, String::new()));
                is_inside = true;
            }
            Some(_) => is_inside = false,
            None if is_inside => {
                if let Some((.., block)) = blocks.last_mut() {
                    *block += line;
                    block.push('\n');
                }
            }
            None => {}
        }
    }
    blocks
}

/// Is a line as it is shown? `…` stands for anything.
fn is_like(shown: &str, line: &str) -> bool {
    let mut parts = shown.split('…');
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some((_, behind)) = rest.split_once(part) else { return false };
        rest = behind;
    }
    rest.ends_with(last)
}

/// Are lines as they are shown? A line of `…` stands for any, or none.
fn are_like(shown: &[&str], lines: &[&str]) -> bool {
    match (shown, lines) {
        ([], []) => true,
        (["…", shown @ ..], _) => (0..=lines.len()).any(|from| are_like(shown, &lines[from..])),
        ([first, shown @ ..], [line, lines @ ..]) => is_like(first, line) && are_like(shown, lines),
        _ => false,
    }
}

fn check(chapter: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/course").join(chapter);
    let text = fs::read_to_string(&path).expect("a chapter");
    let folder = tempfile::tempdir().expect("a directory");
    let programs = Path::new(env!("CARGO_BIN_EXE_vm-service")).parent().expect("a directory").to_owned();
    let path = std::env::var("PATH").unwrap_or_default();
    let blocks = blocks(&text);
    let mut ran = 0;
    for (at, (language, line, block)) in blocks.iter().enumerate() {
        if *language != "sh" {
            continue;
        }
        let output = Command::new("sh")
            .args(["-eu", "-c", block])
            .current_dir(folder.path())
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("HOME", folder.path())
            .env_remove("VM_SERVICE_LOG_DIR")
            .output()
            .expect("a shell");
        let (said, wrong) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{chapter}:{line}: {}\n{said}{wrong}", output.status);
        let Some(("text", _, shown)) = blocks.get(at + 1) else { panic!("{chapter}:{line} shows nothing") };
        let (shown, lines): (Vec<&str>, Vec<&str>) = (shown.lines().collect(), said.lines().collect());
        assert!(
            are_like(&shown, &lines),
            "{chapter}:{line} shows\n{}\nand there is\n{said}",
            shown.join("\n")
        );
        ran += 1;
    }
    assert!(ran > 2, "{chapter} has only {ran} steps");
}

#[test]
fn the_command_line() {
    check("1-command-line.md");
}

#[test]
fn gpus_in_enclosures() {
    check("5-egpu.md");
}

#[test]
fn logs() {
    check("6-logs.md");
}

#[test]
fn what_is_shown_is_compared() {
    let check =
        |shown: &str, line: &str, like: bool| assert_eq!(is_like(shown, line), like, "{shown:?}, {line:?}");
    check("a", "a", true);
    check("a", "ab", false);
    check("a…", "abc", true);
    check("a…c", "abc", true);
    check("a…b…c", "a1b2c", true);
    check("a…b…c", "a1c2b", false);
    assert!(are_like(&["a", "…", "c"], &["a", "b", "b", "c"]));
    assert!(are_like(&["a", "…"], &["a"]));
    assert!(!are_like(&["a", "…", "c"], &["a", "b"]));
}
