//! What is wrong with a guest file, and where.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::device::VF_TOKEN;

/// Why a guest file was not accepted.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("the guest file {file} can't be read: {source}; give the path of a TOML file that describes a guest", file = .file.display())]
    Read {
        /// The guest file.
        file: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file is there and can't be a guest file.
    #[error("the guest file {file} can't be read: {reason}", file = .file.display())]
    NotText {
        /// The guest file.
        file: PathBuf,
        /// Why not, and what to do.
        reason: String,
    },
    /// The file was read and has mistakes.
    #[error("{}", Joined(.0))]
    Invalid(Vec<Problem>),
    /// Files that the guest needs are not there, or are not what they should be.
    #[error("{}", Joined(.0))]
    MissingFiles(Vec<MissingFile>),
}

/// A file that the guest needs is not there, or is not what it should be.
#[derive(Debug, Error)]
#[error("`{key}` names {path}: {reason}", path = .path.display())]
pub struct MissingFile {
    /// Key that names it, as in `disks[0].path`.
    pub key: String,
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it, and what to do.
    pub reason: String,
}

/// Problems, one after the other.
struct Joined<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for Joined<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

/// One mistake in a guest file.
///
/// Displays as `FILE:LINE:COLUMN: KEY WHAT` with the offending line and a caret below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The guest file.
    pub file: PathBuf,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What is wrong and what is allowed; names the key.
    pub message: String,
    /// The line, unless the mistake is something missing from the whole file.
    excerpt: Option<Excerpt>,
}

/// The line with a mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Excerpt {
    /// The line, shortened around the mistake when it is long, and its control characters replaced.
    line: String,
    /// Characters before the mistake.
    before: usize,
    /// Characters that are marked.
    marked: usize,
}

/// Most characters of a line that are shown.
const MAX_EXCERPT: usize = 100;

impl Problem {
    /// A problem at the bytes `span` of `text`.
    pub(super) fn new(file: &Path, text: &str, span: Range<usize>, message: String) -> Self {
        let start = floor_char(text, span.start);
        let line_start = text[..start].rfind('\n').map_or(0, |i| i + 1);
        let line = text[..line_start].bytes().filter(|&b| b == b'\n').count() + 1;
        let content = text[line_start..].split('\n').next().unwrap_or_default();
        let column = text[line_start..start].chars().count();
        let end = floor_char(text, span.end.clamp(start, line_start + content.len()).max(start));
        let marked = text[start..end].chars().count().max(1);

        let whole_file = span == (0..0);

        // Long lines are shown from 40 characters before the mistake.
        let from = if content.chars().count() > MAX_EXCERPT { column.saturating_sub(40) } else { 0 };
        let excerpt: String = content
            .chars()
            .skip(from)
            .take(MAX_EXCERPT)
            .map(|c| if c == '\t' { ' ' } else { c })
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect();
        let before = column - from;
        let excerpt = Excerpt {
            line: excerpt.trim_end().to_owned(),
            before,
            marked: marked.min(MAX_EXCERPT.saturating_sub(before).max(1)),
        };
        Self {
            file: file.into(),
            line,
            column: column + 1,
            message,
            excerpt: (!whole_file && !content.contains(VF_TOKEN)).then_some(excerpt),
        }
    }
}

impl Problem {
    /// The key that it is about, as in `boot.kernel`; `None` for a text that is not TOML.
    pub fn key(&self) -> Option<&str> {
        self.message.split('`').nth(1)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.file.display(), self.line, self.column, self.message)?;
        let Some(Excerpt { line, before, marked }) = &self.excerpt else { return Ok(()) };
        let number = self.line.to_string();
        let width = number.len();
        write!(f, "\n  {number} | {line}\n  {:width$} | {:before$}{}", "", "", "^".repeat(*marked))
    }
}

/// The last character boundary of `text` at or before `index`.
fn floor_char(text: &str, index: usize) -> usize {
    let mut index = index.min(text.len());
    while !text.is_char_boundary(index) {
        index -= 1;
    }
    index
}
