//! What is made of `accelerator.txt`: the header, the types, and the functions of the ABI.

use std::fmt::Write as _;

/// A block of the table, with its comment.
pub(crate) struct Item {
    pub(crate) comment: Vec<String>,
    pub(crate) kind: Kind,
}

pub(crate) enum Kind {
    Handle(String),
    Callback(String, Vec<Parameter>),
    /// A name, with its values and their comments.
    Enum(String, Vec<(Vec<String>, String, i32)>),
    /// A name, with its fields.
    Struct(String, Vec<(Vec<String>, Field)>),
    Function {
        result: String,
        name: String,
        parameters: Vec<Parameter>,
    },
}

pub(crate) struct Field {
    kind: String,
    name: String,
    /// How many there are, of an array.
    count: Option<usize>,
}

pub(crate) struct Parameter {
    /// As C has it: `const char *`.
    pub(crate) kind: String,
    pub(crate) name: String,
    /// The parameter that says how many there are.
    count: Option<String>,
    optional: bool,
    /// Is the handle none afterwards?
    ends: bool,
}

/// The table.
///
/// # Errors
/// The line that is none of its.
pub(crate) fn parse(table: &str) -> Result<Vec<Item>, String> {
    let mut items = Vec::new();
    for block in table.split("\n\n") {
        let lines: Vec<&str> =
            block.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
        if !lines.is_empty() {
            items.push(item(&lines).ok_or_else(|| format!("accelerator.txt: {block}"))?);
        }
    }
    Ok(items)
}

fn item(lines: &[&str]) -> Option<Item> {
    let (comment, rest) = commented(lines);
    let (first, members) = rest.split_first()?;
    let kind = match first.split_once(' ')? {
        ("handle", name) => Kind::Handle(name.into()),
        ("callback", declared) => {
            let (name, parameters) = declared.strip_suffix(')')?.split_once('(')?;
            Kind::Callback(name.into(), self::parameters(parameters)?)
        }
        ("enum", name) => {
            let value = |(comment, line): (Vec<String>, &str)| {
                let (name, value) = line.split_once(" = ")?;
                Some((comment, name.to_owned(), value.parse().ok()?))
            };
            Kind::Enum(name.into(), self::members(members).into_iter().map(value).collect::<Option<_>>()?)
        }
        ("struct", name) => {
            let field = |(comment, line): (Vec<String>, &str)| {
                let (kind, name) = line.split_once(' ')?;
                let (name, count) = match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
                    Some((name, count)) => (name, Some(count.parse().ok()?)),
                    None => (name, None),
                };
                Some((comment, Field { kind: kind.into(), name: name.into(), count }))
            };
            Kind::Struct(name.into(), self::members(members).into_iter().map(field).collect::<Option<_>>()?)
        }
        _ => {
            let (declared, parameters) = first.strip_suffix(')')?.split_once('(')?;
            let at = declared.rfind([' ', '*'])? + 1;
            let (result, name) = (declared[..at].trim().into(), declared[at..].into());
            Kind::Function { result, name, parameters: self::parameters(parameters)? }
        }
    };
    Some(Item { comment, kind })
}

/// The comment at the front, and what comes behind it.
fn commented<'a, 'b>(lines: &'a [&'b str]) -> (Vec<String>, &'a [&'b str]) {
    let count = lines.iter().take_while(|line| line.starts_with("/// ")).count();
    (lines[..count].iter().map(|line| line[4..].to_owned()).collect(), &lines[count..])
}

fn members<'b>(mut lines: &[&'b str]) -> Vec<(Vec<String>, &'b str)> {
    let mut members = Vec::new();
    loop {
        let (comment, rest) = commented(lines);
        let Some((first, rest)) = rest.split_first() else { return members };
        members.push((comment, *first));
        lines = rest;
    }
}

fn parameters(text: &str) -> Option<Vec<Parameter>> {
    let parameter = |text: &str| {
        let text = text.trim();
        let at = text.rfind([' ', '*'])? + 1;
        let (kind, name) = (text[..at].trim(), &text[at..]);
        let (optional, ends) = (name.ends_with('?'), name.ends_with('!'));
        let name = name.trim_end_matches(['?', '!']);
        let (name, count) = match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
            Some((name, count)) => (name, Some(count.to_owned())),
            None => (name, None),
        };
        Some(Parameter { kind: kind.into(), name: name.into(), count, optional, ends })
    };
    text.split(',').filter(|text| !text.trim().is_empty()).map(parameter).collect()
}

/// A comment of C, with a margin.
fn said(out: &mut String, comment: &[String], margin: &str) {
    let _ = writeln!(out, "{margin}/* {} */", comment.join(&format!("\n{margin}   ")));
}

fn in_c(parameters: &[Parameter]) -> String {
    let shown = |parameter: &Parameter| {
        let Parameter { kind, name, .. } = parameter;
        format!("{kind}{}{name}", if kind.ends_with('*') { "" } else { " " })
    };
    match parameters {
        [] => "void".into(),
        parameters => parameters.iter().map(shown).collect::<Vec<_>>().join(", "),
    }
}

/// The header.
pub(crate) fn header(items: &[Item], [major, minor, patch]: [&str; 3]) -> String {
    let mut out = format!(
        "/* Accelerators for C and C++: memory, kernels and workers on GPUs, and on the CPU. docs/c-api.md says how to build, link and call it.
 *
 * Generated from features/interop/capi/accelerator.txt; don't edit. A test says so when it is out of date:
 *   VMK_WRITE_HEADER=1 cargo test --package vm-capi --test header
 *
 * Every function may be called from any thread, also in a job of a worker. What a function is given is looked at before anything is done:
 * handles that were freed are refused. It is not: whether pointers point to as much as is said.
 */

#ifndef VMACCEL_H
#define VMACCEL_H

#include <stdint.h>

#define VMA_VERSION_MAJOR {major}
#define VMA_VERSION_MINOR {minor}
#define VMA_VERSION_PATCH {patch}
#define VMA_VERSION (10000 * VMA_VERSION_MAJOR + 100 * VMA_VERSION_MINOR + VMA_VERSION_PATCH)

#ifdef __cplusplus
extern \"C\" {{
#endif

"
    );
    for Item { comment, kind } in items {
        said(&mut out, comment, "");
        let _ = match kind {
            Kind::Handle(name) => writeln!(out, "typedef uint64_t {name};\n"),
            Kind::Callback(name, parameters) => {
                writeln!(out, "typedef int32_t (*{name})({});\n", in_c(parameters))
            }
            Kind::Enum(name, values) => {
                let _ = writeln!(out, "typedef int32_t {name};\nenum {{");
                for (comment, value, number) in values {
                    said(&mut out, comment, "    ");
                    let _ = writeln!(out, "    {value} = {number},");
                }
                // No comma behind the last, for C++98 and -pedantic.
                out.truncate(out.trim_end_matches(",\n").len());
                writeln!(out, "\n}};\n")
            }
            Kind::Struct(name, fields) => {
                let _ = writeln!(out, "typedef struct {name} {{");
                for (comment, Field { kind, name, count }) in fields {
                    said(&mut out, comment, "    ");
                    let count = count.map(|count| format!("[{count}]")).unwrap_or_default();
                    let _ = writeln!(out, "    {kind} {name}{count};");
                }
                writeln!(out, "}} {name};\n")
            }
            Kind::Function { result, name, parameters } => {
                let space = if result.ends_with('*') { "" } else { " " };
                writeln!(out, "{result}{space}{name}({});\n", in_c(parameters))
            }
        };
    }
    out + "#ifdef __cplusplus\n}\n#endif\n\n#endif\n"
}

/// A type of C as Rust has it; a struct or an enum of the table has its own name.
fn rust_type(kind: &str) -> String {
    match kind {
        "int32_t" => "i32".into(),
        "uint8_t" => "u8".into(),
        "uint32_t" => "u32".into(),
        "uint64_t" => "u64".into(),
        "char" => "c_char".into(),
        "void" => "c_void".into(),
        kind => match (kind.strip_suffix('*').map(str::trim), kind.strip_prefix("const ")) {
            (Some(_), Some(of)) => format!("*const {}", rust_type(of.trim_end_matches('*').trim())),
            (Some(of), None) => format!("*mut {}", rust_type(of)),
            (None, _) => kind.into(),
        },
    }
}

/// How a parameter is looked at, if it is, and how it is passed on; `None` for one that says how many another has.
fn passed(
    parameter: &Parameter,
    [handles, callbacks]: [&[&str]; 2],
    counts: &[&String],
) -> Option<(Option<String>, String)> {
    let Parameter { kind, name, count, optional, ends } = parameter;
    if counts.contains(&name) {
        return None;
    }
    let mutable = !kind.starts_with("const ");
    let promised = |call: String| {
        let look =
            format!("// SAFETY: as the caller promises.\n        let {name} = unsafe {{ given::{call} }}?;");
        Some((Some(look), name.clone()))
    };
    match (kind.as_str(), count) {
        ("const char *", None) => promised(format!("text(\"{name}\", {name})")),
        (_, Some(count)) => {
            let array = if mutable { "ArrayMut" } else { "Array" };
            promised(format!("{array}::new(\"{name}\", {name}.cast(), \"{count}\", {count}.into())"))
        }
        ("void *", None) => Some((None, name.clone())),
        (kind, None) if kind.ends_with('*') => {
            let way = if mutable { "output" } else { "input" };
            let optional = if *optional { "optional_" } else { "" };
            promised(format!("{optional}{way}(\"{name}\", {name})"))
        }
        (kind, None) if handles.contains(&kind) && !ends => {
            let of = kind.trim_start_matches("vma_");
            let of = format!("{}{}", of[..1].to_uppercase(), &of[1..]);
            let look = format!("let {name} = given::find::<{of}>(\"{name}\", {name})?;");
            Some((Some(look), format!("&{name}")))
        }
        (kind, None) if callbacks.contains(&kind) && !optional => {
            Some((Some(format!("let {name} = given::function(\"{name}\", {name})?;")), name.clone()))
        }
        _ => Some((None, name.clone())),
    }
}

/// The types and functions, and the functions' names.
pub(crate) fn write(items: &[Item]) -> (String, Vec<String>) {
    let (mut out, mut names) = (String::new(), Vec::new());
    let (mut layout, mut entries, mut calls) = (String::new(), String::new(), String::new());
    let handles: Vec<&str> = items
        .iter()
        .filter_map(|item| if let Kind::Handle(name) = &item.kind { Some(name.as_str()) } else { None })
        .collect();
    let callbacks: Vec<&str> = items
        .iter()
        .filter_map(|item| if let Kind::Callback(name, _) = &item.kind { Some(name.as_str()) } else { None })
        .collect();
    for Item { comment, kind } in items {
        let comment: String = comment.iter().map(|line| format!("/// {line}\n")).collect();
        match kind {
            Kind::Handle(name) => {
                let _ = writeln!(out, "{comment}pub type {name} = u64;\n");
            }
            Kind::Callback(name, parameters) => {
                let given: Vec<String> =
                    parameters.iter().map(|parameter| rust_type(&parameter.kind)).collect();
                let _ = writeln!(
                    out,
                    "{comment}pub type {name} = Option<unsafe extern \"C\" fn({}) -> i32>;\n",
                    given.join(", ")
                );
            }
            Kind::Enum(name, values) => {
                let _ = writeln!(out, "{comment}pub type {name} = i32;\n");
                for (comment, value, number) in values {
                    let _ = writeln!(
                        out,
                        "/// {}\npub const {value}: {name} = {number};\n",
                        comment.join("\n/// ")
                    );
                }
            }
            Kind::Struct(name, fields) => {
                let _ =
                    writeln!(out, "{comment}#[repr(C)]\n#[derive(Clone, Copy, Debug)]\npub struct {name} {{");
                let mut zeros = String::new();
                let _ = writeln!(layout, "    (\"sizeof({name})\", size_of::<{name}>()),");
                for (comment, Field { kind, name: field, count }) in fields {
                    // A word of Rust's.
                    let (in_c, field) = (field, if field == "type" { "type_" } else { field });
                    let one = rust_type(kind);
                    let (all, zero) = match count {
                        Some(count) => (format!("[{one}; {count}]"), format!("[0; {count}]")),
                        None => (one, "0".into()),
                    };
                    let _ = writeln!(out, "    /// {}\n    pub {field}: {all},", comment.join("\n    /// "));
                    let _ = write!(zeros, "{field}: {zero}, ");
                    let _ = writeln!(
                        layout,
                        "    (\"offsetof({name}, {in_c})\", std::mem::offset_of!({name}, {field})),"
                    );
                }
                let _ = writeln!(
                    out,
                    "}}\n\nimpl Default for {name} {{\n    fn default() -> Self {{\n        Self {{ {zeros} }}\n    }}\n}}\n"
                );
            }
            Kind::Function { result, name, parameters } => {
                names.push(name.clone());
                if result != "vma_status" {
                    continue;
                }
                let given: Vec<String> =
                    parameters.iter().map(|one| format!("{}: {}", one.name, rust_type(&one.kind))).collect();
                let counts: Vec<&String> = parameters.iter().filter_map(|one| one.count.as_ref()).collect();
                let looked: Vec<(Option<String>, String)> = parameters
                    .iter()
                    .filter_map(|one| passed(one, [&handles, &callbacks], &counts))
                    .collect();
                let looks: String = looked
                    .iter()
                    .flat_map(|(look, _)| look)
                    .map(|look| format!("        {look}\n"))
                    .collect();
                let passed: Vec<&str> = looked.iter().map(|(_, passed)| passed.as_str()).collect();
                let make = name.trim_start_matches("vma_");
                let _ = writeln!(
                    out,
                    "{comment}///\n/// # Safety\n/// Pointers point to as much as is said, which nobody else writes meanwhile.\n\
                     #[unsafe(no_mangle)]\npub unsafe extern \"C\" fn {name}({}) -> vma_status {{\n    \
                     answer(\"{name}\", || {{\n{looks}        functions::{make}({})\n    }})\n}}\n",
                    given.join(", "),
                    passed.join(", ")
                );
                let listed: Vec<String> = parameters
                    .iter()
                    .map(|one| format!("(\"{}\", \"{}\", {})", one.kind, one.name, one.optional))
                    .collect();
                let _ = writeln!(entries, "    (\"{name}\", &[{}]),", listed.join(", "));
                let words: Vec<String> = (0..parameters.len()).map(|at| format!("w{at}")).collect();
                let cast = |(at, one): (usize, &Parameter)| match rust_type(&one.kind) {
                    kind if kind.starts_with('*') => {
                        format!("std::ptr::with_exposed_provenance_mut::<c_void>(w{at} as usize).cast()")
                    }
                    kind if callbacks.contains(&kind.as_str()) => {
                        format!("if w{at} == 0 {{ None }} else {{ callbacks.{kind} }}")
                    }
                    kind => format!("w{at} as {kind}"),
                };
                let casts: Vec<String> = parameters.iter().enumerate().map(cast).collect();
                let _ = writeln!(
                    calls,
                    "        // SAFETY: as the caller promises.\n        (\"{name}\", &[{}]) => unsafe {{ {name}({}) }},",
                    words.join(", "),
                    casts.join(", ")
                );
            }
        }
    }
    let _ = write!(
        out,
        "/// Where C has what, by its own words, for tests.\n#[cfg(feature = \"checks\")]\npub const LAYOUT: &[(&str, usize)] = &[\n{layout}];\n\n\
         /// The functions that return a status: the type and name of each parameter, and whether it may be NULL; for tests.\n\
         #[cfg(feature = \"checks\")]\npub const ACCELERATOR: &[(&str, &[(&str, &str, bool)])] = &[\n{entries}];\n\n\
         /// Functions of a caller's.\n#[cfg(feature = \"checks\")]\n#[allow(missing_docs)]\npub struct Callbacks {{\n{}}}\n\n\
         /// Calls a function with a word for each parameter, for a callback 0 or not; `None` if there is none of that name with as many.\n///\n\
         /// # Safety\n/// What the function asks for.\n#[cfg(feature = \"checks\")]\n#[allow(clippy::unnecessary_cast)]\n\
         pub unsafe fn call_accelerator(name: &str, words: &[u64], callbacks: &Callbacks) -> Option<vma_status> {{\n    \
         Some(match (name, words) {{\n{calls}        _ => return None,\n    }})\n}}\n",
        callbacks.iter().map(|name| format!("    pub {name}: {name},\n")).collect::<String>()
    );
    (out, names)
}
