//! Each genre of mutant, before and after.

use crate::{Mutant, Position, Span, change, places};

/// The range of the last occurrence of `part`.
fn span(text: &str, part: &str) -> Span {
    let at = text.rfind(part).expect("the part");
    let position = |at: usize| {
        let before = &text[..at];
        let line = before.rfind('\n').map_or(0, |at| at + 1);
        Position { line: before.matches('\n').count() + 1, column: at - line + 1 }
    };
    Span { start: position(at), end: position(at + part.len()) }
}

fn mutant(number: u32, genre: &str, text: &str, part: &str, replacement: &str) -> Mutant {
    let [file, genre, replacement] = ["a.rs", genre, replacement].map(str::to_owned);
    Mutant { number, file, genre, replacement, span: span(text, part) }
}

/// The rewritten file on one line, with a short name for the module.
fn woven(text: &str, mutants: &[Mutant]) -> String {
    let mut file = syn::parse_file(text).expect("Rust");
    let all: Vec<&Mutant> = mutants.iter().collect();
    assert!(change::weave(&mut file, &all).is_empty());
    let text = prettyplease::unparse(&file).replace("crate::woven_mutants::is", "M");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_change_is_a_branch() {
    let cases = [
        (
            "fn f() -> bool { a < b }",
            "BinaryOperator",
            "<",
            "<=",
            "fn f() -> bool { (if M(1u32) { a <= b } else { a < b }) }",
        ),
        (
            "fn f() { a += b; }",
            "BinaryOperator",
            "+=",
            "-=",
            "fn f() { (if M(1u32) { a -= b } else { a += b }); }",
        ),
        (
            "fn f() -> bool { a as u8 > b }",
            "BinaryOperator",
            ">",
            "<",
            "fn f() -> bool { (if M(1u32) { (a as u8) < b } else { a as u8 > b }) }",
        ),
        (
            "fn f() -> bool { !a }",
            "UnaryOperator",
            "!",
            "",
            "fn f() -> bool { (if M(1u32) { a } else { !a }) }",
        ),
        ("fn f() -> u8 { g() }", "FnValue", "g()", "0", "fn f() -> u8 { if M(1u32) { return 0; } g() }"),
        (
            "fn f() { match a { 1 => b(), _ => {} } }",
            "MatchArm",
            "1 => b()",
            "",
            "fn f() { match a { 1 if !M(1u32) => b(), _ => {} } }",
        ),
        (
            "fn f() { match a { 1 if b => {} _ => {} } }",
            "MatchArmGuard",
            "b",
            "true",
            "fn f() { match a { 1 if (if M(1u32) { true } else { b }) => {} _ => {} } }",
        ),
        (
            "fn f() { S { a: 1, ..s } }",
            "StructField",
            "a: 1",
            "",
            "fn f() { (if M(1u32) { S { ..s } } else { S { a: 1, ..s } }) }",
        ),
    ];
    for (text, genre, part, replacement, expect) in cases {
        assert_eq!(woven(text, &[mutant(1, genre, text, part, replacement)]), expect);
    }
}

#[test]
fn alternatives_hold_no_other_change() {
    let text = "fn f() -> u8 { a + b * c }";
    let found = woven(
        text,
        &[mutant(1, "BinaryOperator", text, "+", "-"), mutant(2, "BinaryOperator", text, "*", "/")],
    );
    assert_eq!(
        found,
        "fn f() -> u8 { (if M(1u32) { a - b * c } else { a + (if M(2u32) { b / c } else { b * c }) }) }"
    );
}

#[test]
fn each_function_has_its_own() {
    let text = "fn f() -> u8 { fn g() -> u8 { h() } g() }";
    let found = woven(
        text,
        &[
            mutant(1, "FnValue", text, "fn g() -> u8 { h() } g()", "1"),
            mutant(2, "FnValue", text, "h()", "2"),
        ],
    );
    assert_eq!(
        found,
        "fn f() -> u8 { if M(1u32) { return 1; } fn g() -> u8 { if M(2u32) { return 2; } h() } g() }"
    );
}

#[test]
fn what_runs_in_the_compiler_stays() {
    for text in ["const A: u8 = b + c;", "const fn f() -> u8 { b + c }", "fn f() { [0; b + c] }"] {
        let plain = woven(text, &[]);
        assert_eq!(woven(text, &[mutant(1, "BinaryOperator", text, "+", "-")]), plain);
    }
}

#[test]
fn alternatives_of_conditions_with_let_are_no_rust() {
    let text = "fn f() { if let Some(a) = b && c {} }";
    let mut file = syn::parse_file(text).expect("Rust");
    assert_eq!(change::weave(&mut file, &[&mutant(7, "BinaryOperator", text, "&&", "||")]), [7]);
}

#[test]
fn the_compilers_errors_find_their_mutant() {
    let text = "fn f() -> bool { a < b }";
    let mut file = syn::parse_file(text).expect("Rust");
    change::weave(&mut file, &[&mutant(3, "BinaryOperator", text, "<", "<=")]);
    let text = prettyplease::unparse(&file);
    let places = places::of(&syn::parse_file(&text).expect("Rust"), "a.rs");
    assert_eq!(places.iter().map(|place| place.number).collect::<Vec<_>>(), [3]);
    let changed = span(&text, "a <= b");
    assert!(places[0].changed.start <= changed.start && changed.end <= places[0].changed.end);
}
