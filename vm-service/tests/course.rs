//! The course runs as it is written: shell lines of `docs/course`, by the built `vm-service`, on a machine that needs no GPU.
//!
//! Lines of a block `sh` run in a folder of the chapter's own, each to exit status 0 or to the one that it tells (`# exit status 3`). A block `text`
//! right behind is what they print to standard output: `…` is any part of a line, and on a line of its own any lines. A block with a file's name
//! (`vir scale.vir`) is that file. Other blocks are not run: `console` is what needs more than any machine has.
#![cfg(feature = "cpu")]

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

struct Block<'a> {
    info: &'a str,
    lines: Vec<&'a str>,
}

fn blocks(chapter: &str) -> Vec<Block<'_>> {
    let (mut blocks, mut inside) = (Vec::new(), false);
    for line in chapter.lines() {
        if let Some(info) = line.strip_prefix("```") {
            inside = !inside;
            if inside {
                blocks.push(Block { info, lines: Vec::new() });
            }
        } else if inside && let Some(block) = blocks.last_mut() {
            block.lines.push(line);
        }
    }
    blocks
}

/// Whether a line is as shown.
fn is_line(shown: &str, line: &str) -> bool {
    let Some((start, rest)) = shown.split_once('…') else { return shown.trim_end() == line.trim_end() };
    let Some(line) = line.strip_prefix(start) else { return false };
    line.char_indices().map(|(at, _)| at).chain([line.len()]).any(|at| is_line(rest, &line[at..]))
}

/// Whether what was printed is as shown.
fn is_shown(shown: &[&str], printed: &[&str]) -> bool {
    match shown {
        [] => printed.is_empty(),
        ["…", rest @ ..] => (0..=printed.len()).any(|at| is_shown(rest, &printed[at..])),
        [line, rest @ ..] => {
            printed.split_first().is_some_and(|(first, more)| is_line(line, first) && is_shown(rest, more))
        }
    }
}

/// Runs a line as somebody would who is not root, and gives what it printed.
fn run_line(folder: &Path, line: &str) -> Result<String, String> {
    let programs = Path::new(env!("CARGO_BIN_EXE_vm-service")).parent().expect("a folder");
    let path = env::var("PATH").expect("PATH");
    let output = Command::new("timeout")
        .args(["60", "sh", "-c", line])
        .env_clear()
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("HOME", folder)
        .env("VM_SERVICE_LOG_DIR", folder.join(".local/state/vm-service"))
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("`{line}`: timeout can't be started: {error}"))?;
    let wanted = line.split_once("# exit status ").map_or("0", |(_, status)| status.trim());
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.code().map(|code| code.to_string()).as_deref() == Some(wanted) {
        return Ok(printed);
    }
    let err = String::from_utf8_lossy(&output.stderr);
    Err(format!("`{line}`: {}, not {wanted}\n{printed}{err}", output.status))
}

/// Runs a chapter, and gives the number of its lines.
fn run(chapter: &str) -> Result<usize, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let blocks = blocks(chapter);
    let mut count = 0;
    for (at, block) in blocks.iter().enumerate() {
        if let Some((_, name)) = block.info.split_once(' ') {
            fs::write(folder.path().join(name), block.lines.join("\n") + "\n")
                .map_err(|error| format!("{name}: {error}"))?;
        }
        if block.info != "sh" {
            continue;
        }
        let mut printed = String::new();
        for line in &block.lines {
            printed += &run_line(folder.path(), line)?;
            count += 1;
        }
        let shown = blocks.get(at + 1).filter(|next| next.info == "text");
        if shown.is_some_and(|shown| !is_shown(&shown.lines, &printed.lines().collect::<Vec<_>>())) {
            return Err(format!(
                "`{}` printed something else than is shown:\n{printed}",
                block.lines.join("; ")
            ));
        }
    }
    Ok(count)
}

#[test]
fn each_chapter_runs() {
    let course = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/course");
    let mut count = 0;
    for entry in fs::read_dir(course).expect("docs/course") {
        let path = entry.expect("an entry").path();
        // That one needs the library for C: features/interop/capi/tests/docs.rs runs it.
        if path.ends_with("3-c.md") {
            continue;
        }
        let chapter = fs::read_to_string(&path).expect("a chapter");
        count += run(&chapter).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    assert!(count > 25, "only {count} lines were run");
}

#[test]
fn what_is_not_so_fails() {
    for (chapter, wanted) in [
        ("```sh\ntrue\nfalse # exit status 1\n```", Ok(2)),
        ("```console\nfalse\n```", Ok(0)),
        ("```vir k.vir\nvir 1\n```\n```sh\ncat k.vir\n```\n```text\nvir 1\n```", Ok(1)),
        ("```sh\nseq 4\n```\n```text\n1\n…\n4\n```", Ok(1)),
        ("```sh\necho ran 0.2 ms, well\n```\n```text\nran … ms, well\n```", Ok(1)),
        ("```sh\nfalse\n```", Err("exit status: 1, not 0")),
        ("```sh\ntrue # exit status 3\n```", Err("exit status: 0, not 3")),
        ("```sh\nvm-service lits\n```", Err("exit status: 2, not 0")),
        ("```sh\nseq 4\n```\n```text\n1\n…\n5\n```", Err("something else")),
        ("```sh\nseq 2\n```\n```text\n1\n```", Err("something else")),
        ("```sh\ntrue\n```\n```text\n1\n```", Err("something else")),
        ("```sh\necho ran 0.2 ms, ill\n```\n```text\nran … ms, well\n```", Err("something else")),
    ] {
        let found = run(chapter);
        let so = match (&found, wanted) {
            (Ok(count), Ok(wanted)) => *count == wanted,
            (Err(error), Err(wanted)) => error.contains(wanted),
            _ => false,
        };
        assert!(so, "{chapter}\n{found:?}, not {wanted:?}");
    }
}
