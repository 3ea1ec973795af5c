//! The line that an error is on, with carets below what is wrong.

use super::lexer::{Lexer, Token};
use std::ops::Range;

/// Most characters of a line that are shown.
const MAX_WIDTH: usize = 100;

/// What is to be marked in a line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mark<'a> {
    /// The line, from 1; 0 if it is unknown.
    pub line: u32,
    /// The op that the error is about.
    pub op: Option<&'a str>,
    /// Which of the op's operands, from 1.
    pub operand: Option<usize>,
    /// The message. A name of its own that is in the line is what is marked.
    pub message: &'a str,
}

/// A message with the line of `source` that it is about, and carets below the operand, the name or the op:
///
/// ```text
/// kernel @k at 0x0, line 3, lt: operand 1 is i32, not f16, bf16, f32 or f64; write lt.s or lt.u
///   3 |   %inside = lt %i, %n : bool
///     |                ^^
/// ```
///
/// The message alone where the source has no such line.
pub fn render(source: &str, mark: &Mark<'_>) -> String {
    let line = mark.line.checked_sub(1).and_then(|before| source.lines().nth(before as usize));
    match line {
        Some(line) => format!("{}\n{}", mark.message, excerpt(line, mark.line, find(line, mark))),
        None => mark.message.to_owned(),
    }
}

/// A message with its line of `source`, and carets below the token at `column`, which counts bytes from 1.
pub(super) fn render_at(source: &str, message: &str, line: u32, column: u32) -> String {
    let Some(text) = line.checked_sub(1).and_then(|before| source.lines().nth(before as usize)) else {
        return message.to_owned();
    };
    let start = floor_char(text, (column as usize).saturating_sub(1));
    let token = Lexer::tokens(&text[start..]).next().map_or(0, |(token, _)| token.end);
    format!("{message}\n{}", excerpt(text, line, start..start + token))
}

/// The bytes of a line that are wrong.
fn find(line: &str, mark: &Mark<'_>) -> Range<usize> {
    let tokens: Vec<_> = Lexer::tokens(line).collect();
    let op = mark.op.and_then(|op| {
        let is =
            |word: &str| word.strip_prefix(op).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        tokens.iter().position(|(_, token)| matches!(token, Token::Word(word) if is(word)))
    });
    let operand = op.zip(mark.operand).and_then(|(op, operand)| {
        // Behind the count of a `for`, operands are values and literals up to the types.
        let (skipped, end) = if mark.op == Some("for") { (1, '{') } else { (0, ':') };
        let behind = tokens[op + 1..].iter().take_while(|(_, token)| *token != Token::Punct(end));
        let is = |token: &Token<'_>| {
            matches!(
                token,
                Token::Value(_) | Token::Number(_) | Token::Word("true" | "false" | "inf" | "nan")
            )
        };
        behind.filter(|(_, token)| is(token)).nth(skipped + operand.checked_sub(1)?)
    });
    let named = || {
        let names: Vec<_> = Lexer::tokens(mark.message).map(|(_, token)| token).collect();
        let is = |token: &Token<'_>| matches!(token, Token::Value(_) | Token::Global(_));
        let name = names.iter().filter(|name| is(name) && Some(**name) != kernel(&names));
        name.into_iter().find_map(|name| tokens.iter().find(|(_, token)| token == name))
    };
    let first = || {
        let word = tokens.iter().find(|(_, token)| *token == Token::Word("yield"));
        word.or(tokens.first())
    };
    let found = operand.or_else(named).or_else(|| op.and_then(|op| tokens.get(op))).or_else(first);
    found.map_or(0..0, |(range, _)| range.clone())
}

/// The kernel that a message names at its beginning.
fn kernel<'t>(message: &[Token<'t>]) -> Option<Token<'t>> {
    let at = message.iter().position(|token| *token == Token::Word("kernel"))?;
    message.get(at + 1).copied()
}

fn excerpt(line: &str, number: u32, marked: Range<usize>) -> String {
    let (start, end) = (floor_char(line, marked.start), floor_char(line, marked.end));
    let column = line[..start].chars().count();
    // Long lines are shown from 40 characters before the mistake.
    let from = if line.chars().count() > MAX_WIDTH { column.saturating_sub(40) } else { 0 };
    let shown: String = line
        .chars()
        .skip(from)
        .take(MAX_WIDTH)
        .map(|c| if c == '\t' { ' ' } else { c })
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect();
    let before = column - from;
    let carets =
        line[start..end.max(start)].chars().count().clamp(1, MAX_WIDTH.saturating_sub(before).max(1));
    let number = number.to_string();
    let width = number.len();
    format!("  {number} | {}\n  {:width$} | {:before$}{}", shown.trim_end(), "", "", "^".repeat(carets))
}

/// The last character boundary of `text` at or before `index`.
fn floor_char(text: &str, index: usize) -> usize {
    (0..=index.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use crate::valid::{Trust, validate};

    /// What is marked of a kernel with this body, whose first line is line 8, and on which line.
    fn marked(body: &str) -> Vec<(u32, String)> {
        let head = "vir 1\nkernel @k(\n  @x: view<f32, [?], read>,\n  @y: view<f32, [?, ?], write>,\n  %n: i32,\n  %f: f32\n) at 0x0 block(64) {\n";
        let source = format!("{head}{body}\n}}\n");
        let rendered = match super::super::parse(&source) {
            Err(error) => vec![error.render(&source)],
            Ok(module) => match validate(module, Trust::Guest) {
                Ok(_) => Vec::new(),
                Err(errors) => errors.0.iter().map(|error| error.render(&source)).collect(),
            },
        };
        let read = |text: &String| {
            let [_, line, carets] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
            let number: u32 = line.split('|').next().unwrap().trim().parse().unwrap();
            let at = carets.find('^').unwrap();
            (number, line.chars().skip(at).take(carets.len() - at).collect())
        };
        rendered.iter().map(read).collect()
    }

    #[test]
    fn errors_mark_what_is_wrong() {
        let check = |body: &str, expect: &[(u32, &str)]| {
            let found = marked(body);
            let found: Vec<_> = found.iter().map(|(line, text)| (*line, text.as_str())).collect();
            assert_eq!(found, expect, "{body}");
        };
        check("  %a = addd %n, %n : i32", &[(8, "addd")]);
        check("  %a = add %n, %ö : i32", &[(8, "%")]);
        check("  %a = add %n, %missing : i32", &[(8, "%missing")]);
        check("  %a = const 1.5 : i32", &[(8, "1.5")]);
        check("  %a = add %n, 1.5 : i32", &[(8, "1.5")]);
        check("  %a = add %n,\n    1.5 : i32", &[(9, "1.5")]);
        check("  %a = lt %n, 1 : bool", &[(8, "%n")]);
        check("  %a = add %n, %f : i32 ; %f", &[(8, "%f")]);
        check("  %a = add %f, %f : i32", &[(8, "add")]);
        check("  store @y[%n], %f", &[(8, "@y")]);
        check("  store @y[%n, %f], %f", &[(8, "%f")]);
        check("  %v = load @x[%n, %n] : f32", &[(8, "@x")]);
        check("  store @x[%n], %f", &[(8, "@x")]);
        check(
            "  %a = lt.s %n, 4 : bool\n  if %a {\n    %b = add %n, %n : i32\n    for %k: i32 = 0 to 4 step %f {\n      %c = exp %n : i32\n    }\n  }",
            &[(11, "%f"), (12, "%n")],
        );
        check(
            "  %a = lt.s %n, 4 : bool\n  %b = if %a : i32 {\n    yield 1\n  } else {\n    yield %f\n  }",
            &[(12, "yield")],
        );
        check("  %a = lt.s %n, 4 : bool\n  %b = if %a : i32 {\n    yield 1\n  } else {\n  }", &[(12, "}")]);
        check(
            "  %t = thread_id.x : i32\n  %a = lt.s %t, 4 : bool\n  if %a {\n    barrier.block\n  }",
            &[(11, "barrier.block")],
        );
        let long = format!("  %a = add %n,{}%f : i32", " ".repeat(200));
        check(&long, &[(8, "%f")]);
    }

    #[test]
    fn a_type_that_is_missing_is_marked_where_it_belongs() {
        // What is marked: where in the line, and what is there.
        let check = |body: &str, line: u32, column: u32, found: &str| {
            let source = format!(
                "vir 1\nkernel @k(@x: view<f32, [?], readwrite>, @h: view<i32, [?], readwrite>, %n: i32, %f: f32) at 0x0 block(64) {{\n{body}\n}}\n"
            );
            let error = super::super::parse(&source).unwrap_err();
            let expect = format!("expected \":\" and the type of the result, found {found}");
            assert_eq!((error.kind.to_string(), error.line, error.column), (expect, line, column), "{body}");
            let rendered = error.render(&source);
            let carets = rendered.lines().last().unwrap();
            assert_eq!(carets.find('^'), Some("  3 | ".len() + column as usize - 1), "{rendered}");
            assert!(rendered.lines().count() == 3, "{rendered}");
        };
        let end = "the end of the line";
        check("  %v = load @x[%n]\n  store @x[%n], %v", 3, 19, end);
        check("  %v = load @x[%n] ; a comment\n\n  ; another\n  store @x[%n], %v", 3, 19, end);
        check("  %a = add %n, %n  \n  %b = add %a, %n : i32", 3, 18, end);
        check("  %a = add %n,\n    %n\n  %b = add %a, %n : i32", 4, 7, end);
        check("  %a = lt.s %n, 4\n  if %a {\n  }", 3, 18, end);
        check("  %a = vec.splat %f", 3, 20, end);
        check("  %a = global_id.x\n  %b = add %n, %n : i32", 3, 19, end);
        check("  %old = atomic.add.device @h[%n], 1\n  store @h[%n], %old", 3, 37, end);
        // On one line it is the token that is there instead.
        check("  %v = load @x[%n] }", 3, 20, "\"}\"");
        check("  %v = vec.splat %f f32", 3, 21, "\"f32\"");
    }

    #[test]
    fn a_parameter_is_marked_on_its_own_line() {
        let source = "vir 1\n\nkernel @k(\n  %n: i32 in [5, 4],\n  @x: view<f32, [?], read,\n    align 3>\n) at 0x0\n  block(0) {\n}\n";
        let errors = validate(super::super::parse(source).unwrap(), Trust::Guest).unwrap_err();
        let rendered = errors.render(source);
        let lines: Vec<_> = rendered.lines().filter(|line| line.starts_with("  ")).collect();
        assert_eq!(
            lines,
            [
                "  3 | kernel @k(",
                "    | ^^^^^^",
                "  4 |   %n: i32 in [5, 4],",
                "    |   ^^",
                "  5 |   @x: view<f32, [?], read,",
                "    |   ^^"
            ]
        );
    }
}
