//! The headers and what is made of the tables for other languages: they are what the tables and the Rust side say, and C and C++ compile them.

mod common;

use std::path::Path;
use std::{env, fs};

use vmkernels::sys::accelerator::LAYOUT;

/// The header as cbindgen writes it.
fn generated() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let [major, minor, patch] =
        [env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"), env!("CARGO_PKG_VERSION_PATCH")];
    let macros = format!(
        "#define VMK_VERSION_MAJOR {major}\n#define VMK_VERSION_MINOR {minor}\n#define VMK_VERSION_PATCH {patch}\n\
         #define VMK_VERSION (10000 * VMK_VERSION_MAJOR + 100 * VMK_VERSION_MINOR + VMK_VERSION_PATCH)"
    );
    config.after_includes = config.after_includes.map(|text| text.replace("VERSION_MACROS", &macros));
    let mut header = Vec::new();
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(root.join("src/sys/abi.rs"))
        .with_src(Path::new(env!("OUT_DIR")).join("functions.rs"))
        .generate()
        .unwrap()
        .write(&mut header);
    String::from_utf8(header).unwrap()
}

/// That a file is as it is made.
fn check_kept(name: &str, generated: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    if env::var_os("VMK_WRITE_HEADER").is_some() {
        fs::write(&path, generated).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == generated, "{name} is out of date: set VMK_WRITE_HEADER=1 and run this test again");
}

#[test]
fn it_is_up_to_date() {
    check_kept("include/vmkernels.h", &generated());
    check_kept("include/vmaccel.h", &made("vmaccel.h"));
    for name in ["accelerator_gen.go", "kernels_gen.go"] {
        check_kept(&format!("../../../bindings/go/{name}"), &made(name));
    }
    check_kept("../../../bindings/python/vmaccel/kernels.py", &made("kernels.py"));
}

/// A file as build.rs makes it of the tables.
fn made(name: &str) -> String {
    fs::read_to_string(Path::new(env!("OUT_DIR")).join(name)).unwrap()
}

/// The functions of the header: names and parameters.
fn functions(header: &str) -> Vec<(String, usize)> {
    let text: String =
        header.split("/*").map(|part| part.split_once("*/").map_or(part, |(_, code)| code)).collect();
    let code: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let code = code.join(" ");
    let statements = code.split(';').filter_map(|statement| {
        let (before, parameters) = statement.trim().split_once('(')?;
        let name = before.rsplit([' ', '*']).next()?;
        let parameters = parameters.trim_end_matches([')', ' ']);
        let count = if parameters == "void" { 0 } else { parameters.split(',').count() };
        ["vmk_", "cuda_", "vma_"].iter().any(|with| name.starts_with(with)).then(|| (name.to_owned(), count))
    });
    statements.collect()
}

#[test]
fn it_declares_what_the_library_exports_and_nothing_else() {
    let both = generated() + &made("vmaccel.h");
    let declared: Vec<String> = functions(&both).into_iter().map(|(name, _)| name).collect();
    let map = fs::read_to_string(Path::new(env!("OUT_DIR")).join("vmkernels.map")).unwrap();
    let mut exported: Vec<&str> =
        map.lines().map(|line| line.trim().trim_end_matches(';')).filter(|line| line.contains("_")).collect();
    exported.retain(|line| ["vmk_", "cuda_", "vma_"].iter().any(|with| line.starts_with(with)));
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    assert_eq!(sorted(declared), sorted(exported.into_iter().map(str::to_owned).collect()));
}

#[test]
fn c_and_c_plus_plus_compile_it() {
    let folder = tempfile::tempdir().unwrap();
    // Both, in any order; and what is where in structures is as Rust has it.
    let mut source = String::from(
        "#include <stddef.h>\n#include <vmaccel.h>\n#include <vmkernels.h>\n#include <vmaccel.h>\n\
         int main(void) { return VMK_VERSION == 0 || VMA_VERSION != VMK_VERSION || VMA_TIMEOUT != -6; }\n",
    );
    for (at, (what, value)) in LAYOUT.iter().enumerate() {
        source += &format!("extern char check_{at}[{what} == {value} ? 1 : -1];\n");
    }
    for (compiler, standard, suffix) in
        [("gcc", "c11", "c"), ("gcc", "c99", "c"), ("g++", "c++11", "cc"), ("g++", "c++20", "cc")]
    {
        let file = folder.path().join(format!("program.{suffix}"));
        fs::write(&file, &source).unwrap();
        let standard = format!("-std={standard}");
        let include = format!("-I{}/include", env!("CARGO_MANIFEST_DIR"));
        common::run(
            compiler,
            &[
                &standard,
                "-Wall",
                "-Wextra",
                "-pedantic",
                "-Werror",
                &include,
                "-fsyntax-only",
                file.to_str().unwrap(),
            ],
        );
    }
}

/// Each function of the header, with the signature of the specification, is assigned to a pointer of just that type.
#[test]
fn signatures_are_those_of_the_specification() {
    let table = include_str!("signatures.h");
    let folder = tempfile::tempdir().unwrap();
    let mut source = String::from("#include <vmkernels.h>\n");
    let mut count = 0;
    let types = [("float", ""), ("uint16_t", "_bf16"), ("uint16_t", "_f16")];
    for line in table.lines() {
        let Some(line) = line.strip_prefix("int32_t ") else { continue };
        for (element, suffix) in types {
            let (name, parameters) = line.split_once('(').unwrap();
            let parameters = parameters.trim_end_matches(';').replace("T *", &format!("{element} *"));
            source += &format!("int32_t (*const check_{name}{suffix})({parameters} = {name}{suffix};\n");
            count += 1;
        }
    }
    let known = functions(&generated())
        .iter()
        .filter(|(name, _)| {
            name.starts_with("cuda_") && !name.contains("_ws") && !name.ends_with("_workspace_size")
        })
        .count();
    assert_eq!(count, known, "tests/signatures.h and the header have not the same functions");
    let file = folder.path().join("signatures.c");
    fs::write(&file, source).unwrap();
    let include = format!("-I{}/include", env!("CARGO_MANIFEST_DIR"));
    common::run(
        "gcc",
        &[
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-pedantic",
            "-Werror",
            "-Wno-enum-conversion",
            &include,
            "-fsyntax-only",
            file.to_str().unwrap(),
        ],
    );
}
