//! What is made of `functions.txt` for Python: a function over arrays of each, with its types and what it says of itself.

use std::fmt::Write as _;

use super::table::{Argument, Function, Language, Mark, Parameter, of_names};

const HEAD: &str = r#"# Code generated from features/library/kernels/functions.txt; do not edit. VMK_WRITE_HEADER=1 cargo test --package vm-capi --test header
"""Every function of the kernel library, by the names that they have in C without `cuda_`.

Arrays are those of `float32`, `bfloat16` or `float16`, of one type in a call, where no type is said. Shapes say what fits together: `batch...` are any number
of dimensions, also none. An array that is given does not change: what a function changes comes back. A `TypeError` or a `ValueError` names the
argument that can't be, what it is and what it must be.
"""

from __future__ import annotations

from typing import Literal, Optional, Union, overload

from ._vmaccel import Array, run_kernel

"#;

/// Columns of a docstring.
const WIDTH: usize = 140;

/// The module `vmaccel.kernels`.
pub(crate) fn kernels(functions: &[Function]) -> String {
    let mut names: Vec<_> = functions.iter().map(|one| format!("\"{}\"", plain(one.name))).collect();
    names.sort();
    let mut out = format!("{HEAD}__all__ = [\n    {},\n]  # fmt: skip\n", wrapped(&names.join(", ")));
    functions.iter().for_each(|function| write(function, &mut out));
    out
}

fn plain(name: &str) -> &str {
    name.strip_prefix("cuda_").unwrap_or(name)
}

fn write(function: &Function, out: &mut String) {
    let name = plain(function.name);
    let (mut given, mut passed, mut flag) = (Vec::new(), Vec::new(), None);
    let arguments = function.arguments();
    for (at, argument) in arguments.iter().enumerate() {
        if !matches!(argument, Argument::Array { .. }) && !given.contains(&"*".to_owned()) {
            given.push("*".to_owned());
        }
        let (name, kind) = match *argument {
            Argument::Array { parameter, optional: false } => (parameter, "Array".to_owned()),
            Argument::Array { parameter, .. } => (parameter, "Optional[Array] = None".into()),
            Argument::Number(number) => (number, typed(&function.parameters[number])),
            Argument::Wanted(name) => {
                flag = Some(at);
                passed.push(name.to_owned());
                continue;
            }
        };
        let name = function.parameters[name].name.to_lowercase();
        given.push(format!("{name}: {kind}"));
        passed.push(name);
    }
    let returns = |wanted: bool| {
        let of = function.results().filter(|(_, one)| wanted || !one.is_optional()).count();
        if of == 1 { "Array".to_owned() } else { format!("tuple[{}]", vec!["Array"; of].join(", ")) }
    };
    let mut result = returns(false);
    if let Some(flag) = flag.map(|at| &passed[at]) {
        result = format!("Union[{result}, {}]", returns(true));
        let shown = given.join(", ");
        for (kind, result) in [
            ("Literal[False] = False", &returns(false)),
            ("Literal[True]", &returns(true)),
            ("bool", &result),
        ] {
            let _ = write!(out, "\n\n@overload\ndef {name}({shown}, {flag}: {kind}) -> {result}: ...");
        }
        given.push(format!("{flag}: bool = False"));
        *out += "\n";
    }
    let _ = write!(
        out,
        "\n\ndef {name}({}) -> {result}:\n    \"\"\"{}\n    \"\"\"\n    return run_kernel(\"{name}\", {})\n",
        given.join(", "),
        documented(function, flag.map(|at| passed[at].as_str())),
        passed.join(", ")
    );
}

/// The type of a number, and its default.
fn typed(parameter: &Parameter) -> String {
    let kind = match parameter.kind {
        "float" => "float",
        "flag" => "bool",
        _ => "int",
    };
    match parameter.default {
        None => kind.into(),
        Some("0") if kind == "bool" => "bool = False".into(),
        Some(text) if text.contains("sqrt") => format!("Optional[{kind}] = None"),
        Some(text) if kind == "float" && !text.contains(['.', 'e']) => format!("float = {text}.0"),
        Some(text) => format!("{kind} = {text}"),
    }
}

/// The comment in Python's words, and behind it what is taken and given back.
fn documented(function: &Function, flag: Option<&str>) -> String {
    let (mut takes, mut gives, mut numbers) = (Vec::new(), Vec::new(), String::new());
    for argument in function.arguments() {
        match argument {
            Argument::Array { parameter, optional } => {
                let parameter = &function.parameters[parameter];
                let missing = match parameter.mark {
                    Mark::Updated(Some(number)) => format!("; or None, where {number} is 0"),
                    _ if optional => "; or None".into(),
                    _ => String::new(),
                };
                takes.push((parameter.name, shape(parameter) + &missing));
            }
            Argument::Number(number) => {
                let parameter = &function.parameters[number];
                if let Some(text) = parameter.default.filter(|text| text.contains("sqrt")) {
                    let _ = write!(numbers, " {} is {text} where it is None.", parameter.name);
                }
            }
            Argument::Wanted(_) => {}
        }
    }
    for (_, parameter) in function.results() {
        let wanted = flag.filter(|_| parameter.is_optional()).map(|flag| format!("; with {flag}"));
        gives.push((parameter.name, shape(parameter) + &wanted.unwrap_or_default()));
    }
    let mut comment = in_python(function, &function.comment(Language::Python).join(" "));
    if !comment.ends_with('.') {
        comment.push('.');
    }
    format!(
        "{}\n\n    Takes\n{}    Gives\n{}",
        wrapped(&(comment + &numbers)),
        listed(&takes),
        listed(&gives).trim_end_matches('\n')
    )
}

/// The shape of an array, and its type where it is not that of the call.
fn shape(parameter: &Parameter) -> String {
    let kind = match parameter.element() {
        "T" => "",
        "float" => " of float32",
        "int64_t" => " of int64",
        _ => " of int32",
    };
    format!("[{}]{kind}", parameter.shape.as_ref().map_or("", |shape| shape.text))
}

/// Lines of names and shapes; names with the same one stand together.
fn listed(all: &[(&str, String)]) -> String {
    let mut lines: Vec<(String, &str)> = Vec::new();
    for (name, shape) in all {
        match lines.last_mut().filter(|(_, last)| last == shape) {
            Some((names, _)) => *names += &format!(", {}", name.to_lowercase()),
            None => lines.push((name.to_lowercase(), shape)),
        }
    }
    lines.iter().map(|(names, shape)| format!("        {names}: {shape}\n")).collect()
}

/// A text with the names that things have in Python.
fn in_python(function: &Function, text: &str) -> String {
    let named = |word: &str| {
        let array = function.parameters.iter().any(|one| one.is_pointer() && one.name == word);
        if array { word.to_lowercase() } else { plain(word).to_owned() }
    };
    let (mut out, mut word) = (String::new(), String::new());
    for letter in text.chars() {
        if of_names(letter) {
            word.push(letter);
        } else {
            out += &named(&word);
            out.push(letter);
            word.clear();
        }
    }
    out + &named(&word)
}

/// A text in lines, all but the first indented.
fn wrapped(text: &str) -> String {
    let (mut out, mut column) = (String::new(), 4);
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        if column > 4 && column + word.len() > WIDTH {
            let _ = write!(out, "\n    {word}");
            column = 4 + word.len();
        } else {
            out += if out.is_empty() { "" } else { " " };
            out += word;
            column += word.len() + 1;
        }
    }
    out
}
