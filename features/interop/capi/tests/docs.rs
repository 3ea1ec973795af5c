//! The programs of docs/c-api.md and of the course compile and do what they are for.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn the_program_of_the_document() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/c-api.md");
    let text = fs::read_to_string(document).unwrap();
    let source = text.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("program.c"), folder.path().join("program"));
    fs::write(&file, source).unwrap();
    let prefix = common::installed();
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-o"]).arg(&program).arg(&file);
    compile.arg(format!("-I{}/include", prefix.display())).arg(format!("-L{}/lib", prefix.display()));
    common::run_command(compile.arg("-lvmkernels"));
    let printed = common::run_command(Command::new(&program).env("LD_LIBRARY_PATH", prefix.join("lib")));
    let wanted = text.split("prints\n\n```text\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    assert_eq!(printed, wanted);
    for line in text.lines().filter(|line| line.starts_with("| −")) {
        let name = line.split('`').nth(1).unwrap();
        assert!(fs::read_to_string(prefix.join("include/vmkernels.h")).unwrap().contains(name), "{name}");
    }
}

/// Its files are blocks with their name, and its shell lines print what the block behind them shows.
#[test]
fn the_chapter_of_the_course() {
    let chapter = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/course/3-c.md");
    let text = fs::read_to_string(chapter).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for block in text.split("\n```c ").skip(1) {
        let (name, rest) = block.split_once('\n').unwrap();
        fs::write(folder.path().join(name), rest.split("```").next().unwrap()).unwrap();
    }
    let library = common::installed().join("lib");
    let shells: Vec<&str> = text.split("\n```sh\n").skip(1).collect();
    assert_eq!(shells.len(), 2);
    for shell in shells {
        let (lines, rest) = shell.split_once("```\n\n```text\n").expect("what it prints");
        let mut command = Command::new("sh");
        command.args(["-e", "-c", lines]).current_dir(folder.path());
        command.env("PKG_CONFIG_PATH", library.join("pkgconfig")).env("LD_LIBRARY_PATH", &library);
        assert_eq!(common::run_command(&mut command), rest.split("```").next().unwrap(), "{lines}");
    }
}
