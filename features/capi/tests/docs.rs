//! The program of docs/c-api.md compiles and does what it is for.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn the_program_of_the_document() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/c-api.md");
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
