//! Aligned columns of text.

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

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut widths = self.heading.map(|cell| cell.chars().count());
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let heading = self.heading.map(str::to_owned);
        for row in std::iter::once(&heading).chain(&self.rows) {
            let line: Vec<String> =
                row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            writeln!(f, "{}", line.join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// `text` as one line that a terminal only shows: control characters are replaced.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
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
}
