//! Makes the functions of the ABI, the script that gives them symbol versions, and packages for other languages, of `accelerator.txt` and the kernel
//! library's `functions.txt`.

#[path = "build/accelerator.rs"]
mod accelerator;
#[path = "build/go.rs"]
mod go;
#[path = "build/python.rs"]
mod python;
#[path = "../../library/kernels/src/functions/table.rs"]
#[allow(unreachable_pub, reason = "it is a module of another crate")]
mod table;

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use table::{Function, Language, Mark, Parameter};

/// The kernel library's table.
const TABLE: &str = "../../library/kernels/functions.txt";

/// A C type as Rust has it.
fn rust_type(kind: &str, element: &str) -> Option<String> {
    let element = match element {
        "f32" => "c_float",
        "bf16" => "vmk_bf16",
        "f16" => "vmk_f16",
        _ => return None,
    };
    let of = |target: &str| match target {
        "T" => Some(element),
        "float" => Some("c_float"),
        "int" | "flag" => Some("c_int"),
        "int32_t" => Some("i32"),
        "int64_t" => Some("i64"),
        "uint64_t" => Some("u64"),
        "uint8_t" => Some("u8"),
        _ => None,
    };
    match (kind.strip_suffix('*').map(str::trim), kind) {
        (Some(target), _) => match target.strip_prefix("const ") {
            Some(target) => Some(format!("*const {}", of(target)?)),
            None => Some(format!("*mut {}", of(target)?)),
        },
        (None, kind) => of(kind).map(str::to_owned),
    }
}

/// What a parameter is passed on as: an expression of a word.
fn passed(parameter: &Parameter) -> String {
    let name = parameter.name;
    match parameter.kind {
        _ if parameter.is_pointer() => format!("{name}.addr() as u64"),
        "float" => format!("u64::from({name}.to_bits())"),
        "flag" => format!("u64::from({name} != 0)"),
        "uint64_t" => name.into(),
        _ => format!("i64::from({name}) as u64"),
    }
}

/// The variants of a function: what is behind its name, and what is added to its parameters.
fn variants(function: &Function) -> Vec<(&'static str, &'static str)> {
    match function.workspace {
        false => vec![("", "stream: *mut c_void")],
        true => vec![
            ("", "stream: *mut c_void"),
            ("_ws", "workspace: *mut c_void, workspace_bytes: usize, stream: *mut c_void"),
        ],
    }
}

fn write(functions: &[Function]) -> Result<(String, Vec<String>), String> {
    let (mut text, mut table, mut names) = (String::new(), String::new(), Vec::new());
    let mut by_name = String::new();
    for (index, function) in functions.iter().enumerate() {
        let bad = || format!("functions.txt: a type of {} is none", function.name);
        let Function { name, parameters, .. } = function;
        let specs = parameters
            .iter()
            .map(|parameter| {
                format!("Parameter {{ name: \"{}\", kind: Kind::{:?} }}", parameter.name, parameter.kind())
            })
            .collect::<Vec<_>>();
        let _ = writeln!(
            table,
            "    Spec {{ index: {index}, parameters: &[{}], make: MAKERS[{index}].make, numbers: MAKERS[{index}].numbers }},",
            specs.join(", ")
        );
        for (number, element) in function.elements.iter().enumerate() {
            let suffix = if number == 0 { String::new() } else { format!("_{element}") };
            let given = parameters
                .iter()
                .map(|parameter| Some(format!("{}: {}", parameter.name, rust_type(parameter.kind, element)?)))
                .collect::<Option<Vec<_>>>()
                .ok_or_else(bad)?
                .join(", ");
            let words = parameters.iter().map(passed).collect::<Vec<_>>().join(", ");
            let comment = match number {
                0 => function
                    .comment(Language::C)
                    .iter()
                    .map(|line| format!("/// {line}\n"))
                    .collect::<String>(),
                _ => format!("/// {name} of {element}.\n"),
            };
            let _ = writeln!(by_name, "    (\"{name}{suffix}\", {index}, Scalar::{}),", scalar(element));
            for (behind, added) in variants(function) {
                let full = format!("{name}{suffix}{behind}");
                let workspace = if behind.is_empty() {
                    "None"
                } else {
                    "Some((workspace.addr() as u64, workspace_bytes as u64))"
                };
                let comment = match behind {
                    "" => comment.clone(),
                    _ => format!(
                        "/// {name}{suffix} with memory to work in: {name}{suffix}_workspace_size tells how much.\n"
                    ),
                };
                let _ = writeln!(
                    text,
                    "{comment}#[unsafe(no_mangle)]\npub unsafe extern \"C\" fn {full}({given}, {added}) -> vmk_status {{\n    \
                     // SAFETY: as the caller promises.\n    \
                     unsafe {{ run(&FUNCTIONS[{index}], \"{full}\", Scalar::{}, &[{words}], {workspace}, stream) }}\n}}\n",
                    scalar(element)
                );
                names.push(full);
            }
            if function.workspace || parameters.iter().any(|parameter| parameter.is_scratch()) {
                let what =
                    if function.workspace { format!("{name}{suffix}_ws") } else { format!("{name}{suffix}") };
                let full = format!("{name}{suffix}_workspace_size");
                let given = parameters
                    .iter()
                    .filter(|parameter| !parameter.is_pointer())
                    .map(|parameter| {
                        Some(format!("{}: {}", parameter.name, rust_type(parameter.kind, element)?))
                    })
                    .collect::<Option<Vec<_>>>()
                    .ok_or_else(bad)?
                    .join(", ");
                let words = parameters
                    .iter()
                    .map(|parameter| if parameter.is_pointer() { "16".into() } else { passed(parameter) })
                    .collect::<Vec<_>>()
                    .join(", ");
                let _ = writeln!(
                    text,
                    "/// How many bytes {what} needs to work in, at a multiple of 16.\n#[unsafe(no_mangle)]\npub unsafe extern \"C\" fn {full}({given}, bytes: *mut usize) -> vmk_status {{\n    \
                     // SAFETY: as the caller promises.\n    \
                     unsafe {{ workspace_size(&FUNCTIONS[{index}], \"{full}\", Scalar::{}, &[{words}], bytes) }}\n}}\n",
                    scalar(element)
                );
                names.push(full);
            }
        }
    }
    let _ = writeln!(
        text,
        "/// All functions' names, each with its place in the table and its elements.\n\
         pub(crate) static BY_NAME: &[(&str, usize, Scalar)] = &[\n{by_name}];\n"
    );
    let _ = writeln!(text, "/// All functions.\npub(crate) static FUNCTIONS: &[Spec] = &[\n{table}];");
    Ok((text, names))
}

/// All functions by name, for tests: what they are called with, where they are, and calls with a word for each parameter.
fn by_name(functions: &[Function]) -> Result<String, String> {
    let (mut table, mut places, mut calls) = (String::new(), String::new(), String::new());
    let own = |kind: &'static str, name: &'static str| Parameter {
        name,
        kind,
        shape: None,
        mark: Mark::None,
        default: None,
    };
    for function in functions {
        let bad = || format!("functions.txt: a type of {} is none", function.name);
        let Function { name, parameters, elements, workspace, .. } = function;
        for (number, element) in elements.iter().enumerate() {
            let suffix = if number == 0 { String::new() } else { format!("_{element}") };
            let behind: &[&str] = if *workspace { &["", "_ws"] } else { &[""] };
            let mut forms: Vec<(&str, Vec<&Parameter>, Vec<Parameter>)> = Vec::new();
            for form in behind {
                let mut added = Vec::new();
                if *form == "_ws" {
                    added.extend([own("void *", "workspace"), own("size_t", "workspace_bytes")]);
                }
                added.push(own("void *", "stream"));
                forms.push((form, parameters.iter().collect(), added));
            }
            if *workspace || parameters.iter().any(|parameter| parameter.is_scratch()) {
                let numbers = parameters.iter().filter(|parameter| !parameter.is_pointer());
                forms.push(("_workspace_size", numbers.collect(), vec![own("size_t *", "bytes")]));
            }
            for (form, first, added) in &forms {
                let full = format!("{name}{suffix}{form}");
                let all = || first.iter().copied().chain(added);
                let (mut listed, mut words, mut types, mut given) =
                    (Vec::new(), Vec::new(), Vec::new(), Vec::new());
                for (at, parameter) in all().enumerate() {
                    let Parameter { name, kind, .. } = parameter;
                    let (optional, scratch) = (parameter.is_optional(), parameter.is_scratch());
                    let kind = kind.replace("T *", &format!("{element} *"));
                    listed.push(format!(
                        "Parameter {{ name: \"{name}\", kind: \"{kind}\", optional: {optional}, scratch: {scratch} }}"
                    ));
                    let ty = match kind.as_str() {
                        "void *" | "size_t *" => "*mut c_void".to_owned(),
                        "size_t" => "usize".to_owned(),
                        _ => rust_type(parameter.kind, element).ok_or_else(bad)?,
                    };
                    given.push(match (ty.as_str(), ty.starts_with('*')) {
                        (_, true) => {
                            format!("std::ptr::with_exposed_provenance_mut::<c_void>(w{at} as usize).cast()")
                        }
                        ("c_float", _) => format!("f32::from_bits(w{at} as u32)"),
                        (ty, _) => format!("w{at} as {ty}"),
                    });
                    words.push(format!("w{at}"));
                    types.push(ty);
                }
                let _ = writeln!(
                    table,
                    "    Entry {{ name: \"{full}\", parameters: &[{}] }},",
                    listed.join(", ")
                );
                let _ = writeln!(places, "        \"{full}\" => super::{full} as *const c_void,");
                let _ = writeln!(
                    calls,
                    "        (\"{full}\", &[{}]) => {{\n            \
                     // SAFETY: as the caller promises, it is this function, whose signature this is.\n            \
                     let f = unsafe {{ transmute::<*const c_void, unsafe extern \"C\" fn({}) -> i32>(function) }};\n            \
                     // SAFETY: as the caller promises.\n            \
                     Some(unsafe {{ f({}) }})\n        }}",
                    words.join(", "),
                    types.join(", "),
                    given.join(", ")
                );
            }
        }
    }
    Ok(format!(
        "/// All functions that have kernels, with their `_ws` and `_workspace_size`.\npub const TABLE: &[Entry] = &[\n{table}];\n\n\
         /// Where this program has a function.\npub fn place(name: &str) -> Option<*const c_void> {{\n    Some(match name {{\n{places}        \
         _ => return None,\n    }})\n}}\n\n\
         /// Calls a function with a word for each parameter: addresses, integers, a float's bits. None if the name is none, or has other\n\
         /// parameters.\n///\n/// # Safety\n/// `function` is the function of that name, of this library or another of the same version; what it asks for.\n\
         pub unsafe fn call(name: &str, function: *const c_void, words: &[u64]) -> Option<i32> {{\n    match (name, words) {{\n{calls}        \
         _ => None,\n    }}\n}}\n"
    ))
}

/// An element's type as the IR calls it.
fn scalar(element: &str) -> &'static str {
    match element {
        "bf16" => "Bf16",
        "f16" => "F16",
        _ => "F32",
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for file in [
        "build.rs",
        "build",
        TABLE,
        "../../library/kernels/src/functions/table.rs",
        "accelerator.txt",
        "src/sys/abi.rs",
    ] {
        println!("cargo::rerun-if-changed={file}");
    }
    let out = env::var("OUT_DIR")?;
    let table = fs::read_to_string(TABLE)?;
    let functions = table::parse(&table)?;
    let (text, mut names) = write(&functions)?;
    fs::write(Path::new(&out).join("by_name.rs"), by_name(&functions)?)?;
    let abi = fs::read_to_string("src/sys/abi.rs")?;
    let own = abi.lines().filter_map(|line| line.split("extern \"C\" fn ").nth(1)?.split('(').next());
    names.extend(own.map(str::to_owned));
    fs::write(Path::new(&out).join("functions.rs"), text)?;
    let items = accelerator::parse(&fs::read_to_string("accelerator.txt")?)?;
    let [major, minor, patch] =
        ["MAJOR", "MINOR", "PATCH"].map(|part| env::var(format!("CARGO_PKG_VERSION_{part}")));
    fs::write(Path::new(&out).join("vmaccel.h"), accelerator::header(&items, [&major?, &minor?, &patch?]))?;
    fs::write(Path::new(&out).join("accelerator_gen.go"), go::accelerators(&items))?;
    fs::write(Path::new(&out).join("kernels_gen.go"), go::kernels(&functions))?;
    fs::write(Path::new(&out).join("kernels.py"), python::kernels(&functions))?;
    let (text, of_accelerators) = accelerator::write(&items);
    fs::write(Path::new(&out).join("accelerator.rs"), text)?;
    names.extend(of_accelerators);
    let version = format!("VMKERNELS_{}", env::var("CARGO_PKG_VERSION_MAJOR")?);
    let map = format!("{version} {{\n  global:\n    {};\n  local: *;\n}};\n", names.join(";\n    "));
    fs::write(Path::new(&out).join("vmkernels.map"), map)?;
    Ok(())
}
