//! Text as a terminal shows it: aligned columns, and lines that are no longer than its own.

use std::fmt;

/// Rows of cells below a heading, each column as wide as its widest cell, two spaces between columns.
#[derive(Clone, Debug)]
pub(crate) struct Table<const N: usize> {
    heading: [&'static str; N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    /// A table with no rows.
    pub(crate) fn new(heading: [&'static str; N]) -> Self {
        Self { heading, rows: Vec::new() }
    }

    /// Adds a row. Cells are shown as one line: control characters, which may come from hostile sysfs values, are
    /// replaced.
    pub(crate) fn push(&mut self, row: [String; N]) {
        self.rows.push(row.map(|cell| printable(&cell)));
    }
}

impl<const N: usize> Table<N> {
    /// The table in lines of at most `most` characters: columns that don't fit go below the first, indented.
    pub(crate) fn fit(&self, most: Option<usize>) -> String {
        let most = most.unwrap_or(usize::MAX);
        let mut widths = self.heading.map(|cell| cell.chars().count());
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut used = 0;
        let begins = widths.map(|width| {
            let begins = used > 0 && used + width > most;
            used = if begins { 2 } else { used } + width + 2;
            begins
        });
        let heading = self.heading.map(str::to_owned);
        let mut text = String::new();
        for row in std::iter::once(&heading).chain(&self.rows) {
            let mut line = String::new();
            for ((cell, width), begins) in row.iter().zip(widths).zip(begins) {
                if begins {
                    end(&mut text, &line, most);
                    line = "  ".into();
                }
                line += &format!("{cell:<width$}  ");
            }
            end(&mut text, &line, most);
        }
        text
    }
}

/// Adds a line, which is cut if it is too long.
fn end(text: &mut String, line: &str, most: usize) {
    let line = line.trim_end();
    match line.char_indices().nth(most.saturating_sub(1)) {
        Some((at, last)) if at + last.len_utf8() < line.len() => *text += &format!("{}…\n", &line[..at]),
        _ => *text += &format!("{line}\n"),
    }
}

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.fit(None))
    }
}

/// Each line of `text` in lines of at most `most` characters, broken between words; what goes on stands below the first
/// word behind the line's label, if it has one.
pub(crate) fn wrap(text: &str, most: Option<usize>) -> String {
    let most = most.unwrap_or(usize::MAX);
    let mut wrapped = String::new();
    for line in text.lines() {
        let (label, rest) = match line.trim_start().split_once("  ") {
            Some((label, rest)) if !label.contains(' ') => (label, rest.trim_start()),
            _ => ("", line.trim_start()),
        };
        let first = line.len() - rest.len();
        let hanging = if label.is_empty() { first + 2 } else { first };
        wrapped += &line[..first];
        let mut column = first;
        for word in rest.split_inclusive(' ') {
            let width = word.chars().count();
            if column > hanging && column + word.trim_end().chars().count() > most {
                wrapped.truncate(wrapped.trim_end().len());
                wrapped += &format!("\n{:hanging$}", "");
                column = hanging;
            }
            wrapped += word;
            column += width;
        }
        wrapped.push('\n');
    }
    wrapped
}

/// `text` as one line that a terminal only shows: control characters are replaced, and those that change the direction of what
/// follows (Unicode Standard Annex 9, 2).
pub(crate) fn printable(text: &str) -> String {
    let is_direction = |c| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if c.is_control() || is_direction(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligns_by_characters_and_replaces_control_characters() {
        let mut table = Table::new(["A", "LONG HEADING", "C"]);
        table.push(["é".into(), "x".into(), String::new()]);
        table.push(["four".into(), "\x1b[2J".into(), "end".into()]);
        assert_eq!(table.to_string(), "A     LONG HEADING  C\né     x\nfour  \u{fffd}[2J          end\n");
    }

    #[test]
    fn what_does_not_fit_goes_below() {
        let mut table = Table::new(["ADDRESS", "NAME", "READY"]);
        table.push(["01:00.0".into(), "a long name, é".into(), "yes".into()]);
        let check = |most, expect: &str| assert_eq!(table.fit(Some(most)), expect, "{most}");
        let wide = "ADDRESS  NAME            READY\n01:00.0  a long name, é  yes\n";
        check(30, wide);
        check(29, "ADDRESS  NAME\n  READY\n01:00.0  a long name, é\n  yes\n");
        check(22, "ADDRESS\n  NAME\n  READY\n01:00.0\n  a long name, é\n  yes\n");
        check(12, "ADDRESS\n  NAME\n  READY\n01:00.0\n  a long na…\n  yes\n");
        for most in 0..40 {
            assert!(table.fit(Some(most)).lines().all(|line| line.chars().count() <= most.max(1)), "{most}");
        }
    }

    #[test]
    fn lines_are_broken_between_words() {
        let text = "0000:01:00.0 a name: ready\n    found   some words, é and /a/path/that/is/long";
        let check = |most, expect: &str| assert_eq!(wrap(text, most), expect, "{most:?}");
        check(None, &format!("{text}\n"));
        check(Some(80), &format!("{text}\n"));
        let expect = "0000:01:00.0 a name:\n  ready\n    found   some words,\n            é and\n            /a/path/that/is/long\n";
        check(Some(24), expect);
        assert_eq!(wrap("", Some(0)), "");
    }
}
