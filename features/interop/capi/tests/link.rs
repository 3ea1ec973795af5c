//! The libraries as they are installed: C programs with either, and what the shared one exports.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles a program of this crate's with the library.
fn compile(name: &str, source: &str, library: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let prefix = common::installed();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join(name);
    let mut command = Command::new("gcc");
    command
        .args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-pedantic", "-Werror", "-o"])
        .arg(&program);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source));
    command.arg(format!("-I{}/include", prefix.display())).arg(format!("-L{}/lib", prefix.display()));
    common::run_command(command.args(library).args(["-lpthread", "-lm", "-ldl"]));
    (folder, program)
}

fn run(program: &Path) -> String {
    let library = common::installed().join("lib");
    common::run_command(Command::new(program).env("LD_LIBRARY_PATH", library).env("VMK_DEVICE", "cpu"))
}

#[test]
fn the_examples_with_each_library() {
    for library in [&["-lvmkernels"][..], &["-l:libvmkernels.a", "-lgcc_s"]] {
        for name in ["attention", "decode", "devices", "submit", "vector_add"] {
            let (_folder, program) = compile(name, &format!("examples/{name}.c"), library);
            assert_eq!(run(&program), "ok\n", "{name}, {library:?}");
        }
    }
}

#[test]
fn forks_unloading_and_the_end() {
    let (_folder, program) = compile("process", "tests/process.c", &[]);
    assert_eq!(run(&program), "ok\n");
}

/// Forks, unloading, ends while work is under way, and what is left of all that was freed: each process ends by itself, and well.
#[test]
fn processes_with_accelerators() {
    let (_folder, program) = compile("accelerator", "tests/accelerator.c", &["-lvmkernels"]);
    let library = common::installed().join("lib");
    for what in ["leaks", "forks", "unload", "idle", "calls", "waits", "kernel", "job", "in-job", "stuck"] {
        common::run_command(Command::new(&program).arg(what).env("LD_LIBRARY_PATH", &library));
    }
}

/// A renderer and a worker in turns: a resource's life, what is refused, and what ends whatever the worker does.
#[test]
fn resources_of_graphics() {
    let (_folder, program) = compile("graphics", "tests/graphics.c", &["-lvmkernels"]);
    let library = common::installed().join("lib");
    for what in ["life", "misuse", "never-hangs"] {
        common::run_command(Command::new(&program).arg(what).env("LD_LIBRARY_PATH", &library));
    }
}

/// The examples of accelerators reach no memory that is not theirs, and leave none.
#[test]
fn valgrind_finds_nothing() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: there is no valgrind");
        return;
    }
    for name in ["vector_add", "submit"] {
        let (_folder, program) = compile(name, &format!("examples/{name}.c"), &["-lvmkernels"]);
        let mut command = Command::new("valgrind");
        // Code of the compiler's lies in memory that is used again.
        command.args(["--quiet", "--smc-check=all-non-file", "--leak-check=full", "--error-exitcode=1"]);
        command
            .args(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"])
            .arg(&program)
            .arg("cpu");
        let printed = common::run_command(command.env("LD_LIBRARY_PATH", common::installed().join("lib")));
        assert_eq!(printed, "ok\n", "{name}");
    }
}

#[test]
fn it_exports_what_the_header_has_with_its_version() {
    let prefix = common::installed();
    let library = prefix.join("lib/libvmkernels.so");
    let library = library.to_str().unwrap();
    let symbols = common::run("nm", &["-D", "--defined-only", "--with-symbol-versions", library]);
    let version = format!("VMKERNELS_{}", env!("CARGO_PKG_VERSION_MAJOR"));
    let exported: BTreeSet<String> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .filter(|name| *name != version && *name != format!("{version}@@{version}"))
        .map(|name| {
            let (name, of) = name.split_once("@@").unwrap_or_else(|| panic!("{name} has no version"));
            assert_eq!(of, version, "{name}");
            name.to_owned()
        })
        .collect();
    let header = |name| fs::read_to_string(prefix.join("include").join(name)).unwrap();
    let header = header("vmkernels.h") + &header("vmaccel.h");
    let words = header.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let named: BTreeSet<&str> = words.collect();
    assert!(exported.len() > 10, "{exported:?}");
    for name in &exported {
        assert!(named.contains(name.as_str()), "{name} is not in the header");
    }
    let dynamic = common::run("objdump", &["-p", library]);
    let soname = format!("libvmkernels.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    assert!(dynamic.lines().any(|line| line.contains("SONAME") && line.ends_with(&soname)), "{dynamic}");
}
