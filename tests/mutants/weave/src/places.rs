//! The places of mutants in a rewritten file.

use syn::File;

use crate::{Position, Span, Woven, change};

fn span(span: proc_macro2::Span) -> Span {
    let position = |at: proc_macro2::LineColumn| Position { line: at.line, column: at.column + 1 };
    Span { start: position(span.start()), end: position(span.end()) }
}

pub(crate) fn of(file: &File, name: &str) -> Vec<Woven> {
    let mut all = Vec::new();
    change::branches(file, |number, changed, whole| {
        all.push(Woven { number, file: name.to_owned(), changed: span(changed), whole: span(whole) });
    });
    all
}
