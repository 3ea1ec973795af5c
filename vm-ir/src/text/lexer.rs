//! Text to tokens.

use super::error::TextErrorKind;

/// A token; names are without their `@` or `%`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token<'t> {
    /// A word with its dots: `atomic.add.device`.
    Word(&'t str),
    /// `%name` or `%12`.
    Value(&'t str),
    /// `@name`.
    Global(&'t str),
    /// A number.
    Number(&'t str),
    /// One character.
    Punct(char),
    /// The end of the text.
    End,
}

impl Token<'_> {
    /// How a message names it.
    pub(super) fn describe(self) -> String {
        match self {
            Token::Word(w) => format!("{w:?}"),
            Token::Value(v) => format!("\"%{v}\""),
            Token::Global(g) => format!("\"@{g}\""),
            Token::Number(n) => format!("{n:?}"),
            Token::Punct(c) => format!("{:?}", c.to_string()),
            Token::End => "the end of the text".to_owned(),
        }
    }
}

/// Where a token is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) line: u32,
    pub(super) column: u32,
}

/// Reads tokens one by one.
#[derive(Clone, Debug)]
pub(super) struct Lexer<'t> {
    text: &'t str,
    at: usize,
    line: u32,
    line_start: usize,
}

impl<'t> Lexer<'t> {
    pub(super) fn new(text: &'t str) -> Lexer<'t> {
        Lexer { text, at: 0, line: 1, line_start: 0 }
    }

    /// The tokens of one line, each with its bytes, up to the first error.
    pub(super) fn tokens(line: &'t str) -> impl Iterator<Item = (std::ops::Range<usize>, Token<'t>)> {
        let mut lexer = Lexer::new(line);
        std::iter::from_fn(move || {
            lexer.skip_space();
            let start = lexer.at;
            let token = lexer.token().ok().filter(|token| *token != Token::End)?;
            Some((start..lexer.at, token))
        })
    }

    /// The next token and where it begins.
    pub(super) fn next(&mut self) -> (Position, Result<Token<'t>, TextErrorKind>) {
        self.skip_space();
        (self.position(), self.token())
    }

    /// Where the last token ended.
    pub(super) fn position(&self) -> Position {
        Position { line: self.line, column: (self.at - self.line_start) as u32 + 1 }
    }

    fn skip_space(&mut self) {
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            match byte {
                b'\n' => {
                    self.line = self.line.saturating_add(1);
                    self.line_start = self.at + 1;
                }
                b' ' | b'\t' | b'\r' => {}
                b';' => {
                    self.take(|b| b != b'\n');
                    continue;
                }
                _ => return,
            }
            self.at += 1;
        }
    }

    /// Takes bytes as long as `accept` holds. Stops between characters, as long as `accept` takes all of
    /// the bytes of a character beyond ASCII or none.
    fn take(&mut self, accept: impl Fn(u8) -> bool) -> &'t str {
        let start = self.at;
        let bytes = self.text.as_bytes();
        while bytes.get(self.at).is_some_and(|b| accept(*b)) {
            self.at += 1;
        }
        self.text.get(start..self.at).unwrap_or("")
    }

    fn token(&mut self) -> Result<Token<'t>, TextErrorKind> {
        let name = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let bytes = self.text.as_bytes();
        let Some(&first) = bytes.get(self.at) else { return Ok(Token::End) };
        match first {
            b'%' => {
                self.at += 1;
                Ok(Token::Value(self.take(name)))
            }
            b'@' => {
                self.at += 1;
                Ok(Token::Global(self.take(name)))
            }
            b'0'..=b'9' | b'-' => Ok(Token::Number(self.number())),
            b if b.is_ascii_alphabetic() || b == b'_' => Ok(Token::Word(self.take(|b| name(b) || b == b'.'))),
            b'{' | b'}' | b'(' | b')' | b'[' | b']' | b'<' | b'>' | b',' | b':' | b'=' | b'?' | b'*' => {
                self.at += 1;
                Ok(Token::Punct(char::from(first)))
            }
            _ => {
                let c = self.text[self.at..].chars().next().unwrap_or('\u{fffd}');
                self.at += c.len_utf8();
                Err(TextErrorKind::Character(c))
            }
        }
    }

    /// `-`, then digits with letters, dots, and a sign behind an exponent's `e`. What number it is, if any,
    /// depends on the type it is read as.
    fn number(&mut self) -> &'t str {
        let start = self.at;
        let bytes = self.text.as_bytes();
        self.at += 1;
        let hex = bytes[start] == b'0' && bytes.get(self.at) == Some(&b'x');
        while let Some(&byte) = bytes.get(self.at) {
            let exponent_sign =
                matches!(byte, b'+' | b'-') && !hex && matches!(bytes[self.at - 1], b'e' | b'E');
            if !(byte.is_ascii_alphanumeric() || byte == b'.' || exponent_sign) {
                break;
            }
            self.at += 1;
        }
        &self.text[start..self.at]
    }
}
