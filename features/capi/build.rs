//! Makes the functions of the ABI, and the script that gives them symbol versions, of `functions.txt` and `accelerator.txt`.

#[path = "build/accelerator.rs"]
mod accelerator;
#[path = "build/go.rs"]
mod go;

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// A function of the table.
struct Function {
    /// The lines of its comment.
    comment: Vec<String>,
    name: String,
    parameters: Vec<Parameter>,
    /// `f32`, `bf16`, ….
    elements: Vec<String>,
    /// May it need memory beside its arguments?
    workspace: bool,
}

struct Parameter {
    name: String,
    /// As it is written in the table.
    kind: String,
    /// May it be NULL? Marked by `?`.
    optional: bool,
    /// Is it memory to work in, of as many bytes as are needed? Marked by `!`.
    scratch: bool,
    /// Is it a number that calls differ in which are else the same? Marked by `%`.
    varying: bool,
}

fn parse(table: &str) -> Result<Vec<Function>, String> {
    let mut functions = Vec::new();
    let mut comment = Vec::new();
    for line in table.lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            comment.push(text.to_owned());
        } else if !line.is_empty() && !line.starts_with('#') {
            let function = parse_line(line, std::mem::take(&mut comment));
            functions.push(function.ok_or_else(|| format!("functions.txt: {line}"))?);
        }
    }
    Ok(functions)
}

fn parse_line(line: &str, comment: Vec<String>) -> Option<Function> {
    let (name, rest) = line.split_once('(')?;
    let (parameters, rest) = rest.split_once("):")?;
    let mut elements: Vec<String> = rest.split_whitespace().map(str::to_owned).collect();
    let workspace = elements.iter().any(|word| word == "+workspace");
    elements.retain(|word| word != "+workspace");
    let parameter = |text: &str| {
        let text = text.trim();
        let at = text.rfind([' ', '*'])? + 1;
        let (kind, name) = (text[..at].trim(), &text[at..]);
        let [optional, scratch, varying] = ['?', '!', '%'].map(|mark| name.ends_with(mark));
        Some(Parameter {
            name: name.trim_end_matches(['?', '!', '%']).into(),
            kind: kind.into(),
            optional,
            scratch,
            varying,
        })
    };
    let parameters = parameters.split(',').map(parameter).collect::<Option<_>>()?;
    Some(Function { comment, name: name.into(), parameters, elements, workspace })
}

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

/// How a parameter is passed on, and what it is: an expression of `Parameter::…`, and one of a word.
fn passed(parameter: &Parameter) -> (String, String) {
    let Parameter { name, kind, optional, scratch, varying } = parameter;
    match kind.as_str() {
        "float" if *varying => ("Varying".into(), format!("u64::from({name}.to_bits())")),
        _ if *varying => ("Varying".into(), format!("i64::from({name}) as u64")),
        _ if *scratch => ("Workspace".into(), format!("{name}.addr() as u64")),
        kind if kind.ends_with('*') => {
            (format!("Pointer {{ optional: {optional} }}"), format!("{name}.addr() as u64"))
        }
        "float" => ("Float".into(), format!("u64::from({name}.to_bits())")),
        "flag" => ("Flag".into(), format!("u64::from({name} != 0)")),
        "int32_t" => ("Number".into(), format!("i64::from({name}) as u64")),
        "uint64_t" => ("Number".into(), name.clone()),
        _ => ("Extent".into(), format!("i64::from({name}) as u64")),
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
                let (kind, name) = (passed(parameter).0, &parameter.name);
                format!("Parameter {{ name: \"{name}\", kind: Kind::{kind} }}")
            })
            .collect::<Vec<_>>();
        let make = name.strip_prefix("cuda_").unwrap_or(name);
        let numbers = match parameters.iter().any(|parameter| parameter.varying) {
            true => format!("Some(crate::functions::{make}_numbers)"),
            false => "None".into(),
        };
        let _ = writeln!(
            table,
            "    Spec {{ index: {index}, parameters: &[{}], make: crate::functions::{make}, numbers: {numbers} }},",
            specs.join(", ")
        );
        for (number, element) in function.elements.iter().enumerate() {
            let suffix = if number == 0 { String::new() } else { format!("_{element}") };
            let given = parameters
                .iter()
                .map(|parameter| {
                    Some(format!("{}: {}", parameter.name, rust_type(&parameter.kind, element)?))
                })
                .collect::<Option<Vec<_>>>()
                .ok_or_else(bad)?
                .join(", ");
            let words = parameters.iter().map(|parameter| passed(parameter).1).collect::<Vec<_>>().join(", ");
            let comment = match number {
                0 => function.comment.iter().map(|line| format!("/// {line}\n")).collect::<String>(),
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
            if function.workspace || parameters.iter().any(|parameter| parameter.scratch) {
                let what =
                    if function.workspace { format!("{name}{suffix}_ws") } else { format!("{name}{suffix}") };
                let full = format!("{name}{suffix}_workspace_size");
                let given = parameters
                    .iter()
                    .filter(|parameter| !parameter.kind.ends_with('*'))
                    .map(|parameter| {
                        Some(format!("{}: {}", parameter.name, rust_type(&parameter.kind, element)?))
                    })
                    .collect::<Option<Vec<_>>>()
                    .ok_or_else(bad)?
                    .join(", ");
                let words = parameters
                    .iter()
                    .map(
                        |parameter| {
                            if parameter.kind.ends_with('*') { "16".into() } else { passed(parameter).1 }
                        },
                    )
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
    let own = |kind: &str, name: &str| Parameter {
        name: name.into(),
        kind: kind.into(),
        optional: false,
        scratch: false,
        varying: false,
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
            if *workspace || parameters.iter().any(|parameter| parameter.scratch) {
                let numbers = parameters.iter().filter(|parameter| !parameter.kind.ends_with('*'));
                forms.push(("_workspace_size", numbers.collect(), vec![own("size_t *", "bytes")]));
            }
            for (form, first, added) in &forms {
                let full = format!("{name}{suffix}{form}");
                let all = || first.iter().copied().chain(added);
                let (mut listed, mut words, mut types, mut given) =
                    (Vec::new(), Vec::new(), Vec::new(), Vec::new());
                for (at, parameter) in all().enumerate() {
                    let Parameter { name, kind, optional, scratch, .. } = parameter;
                    let kind = kind.replace("T *", &format!("{element} *"));
                    listed.push(format!(
                        "Parameter {{ name: \"{name}\", kind: \"{kind}\", optional: {optional}, scratch: {scratch} }}"
                    ));
                    let ty = match kind.as_str() {
                        "void *" | "size_t *" => "*mut c_void".to_owned(),
                        "size_t" => "usize".to_owned(),
                        _ => rust_type(&parameter.kind, element).ok_or_else(bad)?,
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
    for file in ["build.rs", "build", "functions.txt", "accelerator.txt", "src/sys/abi.rs"] {
        println!("cargo::rerun-if-changed={file}");
    }
    let out = env::var("OUT_DIR")?;
    let functions = parse(&fs::read_to_string("functions.txt")?)?;
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
    let (text, of_accelerators) = accelerator::write(&items);
    fs::write(Path::new(&out).join("accelerator.rs"), text)?;
    names.extend(of_accelerators);
    let version = format!("VMKERNELS_{}", env::var("CARGO_PKG_VERSION_MAJOR")?);
    let map = format!("{version} {{\n  global:\n    {};\n  local: *;\n}};\n", names.join(";\n    "));
    fs::write(Path::new(&out).join("vmkernels.map"), map)?;
    Ok(())
}
