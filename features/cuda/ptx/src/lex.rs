//! The tokens of PTX.

use crate::error::{Error, Result};
use crate::limits::MAX_NAME;

/// A token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Token<'t> {
    /// A name, a register or an opcode: `%r1`, `add`, `$L__BB0_2`.
    Word(&'t str),
    /// What stands behind a dot: `.s32` is `Dot("s32")`.
    Dot(&'t str),
    /// An integer, as 64 bits.
    Int(u64),
    /// `0f3F800000`.
    F32(u32),
    /// `0d3FF0000000000000`, or a decimal float.
    F64(u64),
    /// What is in quotation marks.
    Text(&'t str),
    /// Any other sign.
    Sign(u8),
    /// The end.
    End,
}

/// A token and where it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spanned<'t> {
    pub(crate) token: Token<'t>,
    pub(crate) line: u32,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// Reads tokens one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Lexer<'t> {
    text: &'t str,
    at: usize,
    line: u32,
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$')
}

impl<'t> Lexer<'t> {
    pub(crate) fn new(text: &'t str) -> Lexer<'t> {
        Lexer { text, at: 0, line: 1 }
    }

    fn peek(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.at + ahead).copied().unwrap_or(0)
    }

    /// Skips to behind the end of this line.
    pub(crate) fn skip_line(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
    }

    /// Returns the offset behind the last token.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Goes on from here.
    pub(crate) fn skip_to(&mut self, at: usize, line: u32) {
        (self.at, self.line) = (at, line);
    }

    /// Skips to behind the brace that closes the one that was read last; false if none does.
    pub(crate) fn skip_block(&mut self) -> bool {
        let bytes = self.text.as_bytes();
        let mut open = 1usize;
        while let Some(byte) = bytes.get(self.at) {
            self.at += 1;
            match byte {
                b'\n' => self.line += 1,
                b'{' => open += 1,
                b'}' => open -= 1,
                b'"' => {
                    self.take(|b| b != b'"' && b != b'\n');
                    self.at += usize::from(self.peek(0) == b'"');
                }
                b'/' if self.peek(0) == b'/' => self.skip_line(),
                b'/' if self.peek(0) == b'*' => {
                    let Some(length) = self.text.get(self.at + 1..).and_then(|rest| rest.find("*/")) else {
                        return false;
                    };
                    let comment = &bytes[self.at..self.at + 1 + length];
                    self.line += comment.iter().filter(|b| **b == b'\n').count() as u32;
                    self.at += length + 3;
                }
                _ => {}
            }
            if open == 0 {
                return true;
            }
        }
        false
    }

    fn skip_blanks(&mut self) -> Result<()> {
        loop {
            match (self.peek(0), self.peek(1)) {
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                (b' ' | b'\t' | b'\r', _) => self.at += 1,
                (b'/', b'/') => self.skip_line(),
                (b'/', b'*') => {
                    let comment = &self.text[self.at..];
                    let Some(length) = comment.find("*/") else {
                        return Err(Error::syntax(self.line, "a comment does not end"));
                    };
                    self.line += comment[..length].bytes().filter(|b| *b == b'\n').count() as u32;
                    self.at += length + 2;
                }
                _ => return Ok(()),
            }
        }
    }

    /// The bytes from here on that `keep` accepts.
    fn take(&mut self, keep: impl Fn(u8) -> bool) -> &'t str {
        let start = self.at;
        let rest = &self.text.as_bytes()[start..];
        self.at += rest.iter().position(|b| !keep(*b)).unwrap_or(rest.len());
        &self.text[start..self.at]
    }

    fn named(&self, name: &'t str) -> Result<&'t str> {
        if name.len() > MAX_NAME {
            return Err(Error::large(self.line, "letters in a name", MAX_NAME));
        }
        Ok(name)
    }

    pub(crate) fn next(&mut self) -> Result<Spanned<'t>> {
        self.skip_blanks()?;
        let (start, line) = (self.at, self.line);
        let token = match self.peek(0) {
            0 if self.at >= self.text.len() => Token::End,
            b'0'..=b'9' => self.number()?,
            b'%' => {
                self.at += 1;
                self.take(in_word);
                Token::Word(self.named(&self.text[start..self.at])?)
            }
            byte if in_word(byte) => {
                let name = self.take(in_word);
                Token::Word(self.named(name)?)
            }
            b'.' if in_word(self.peek(1)) => {
                self.at += 1;
                // `.L2::128B` is one.
                let mut name = self.take(in_word);
                while self.peek(0) == b':' && self.peek(1) == b':' {
                    self.at += 2;
                    self.take(in_word);
                    name = &self.text[start + 1..self.at];
                }
                Token::Dot(self.named(name)?)
            }
            b'"' => {
                self.at += 1;
                let text = self.take(|b| b != b'"' && b != b'\n');
                if self.peek(0) != b'"' {
                    return Err(Error::syntax(line, "a text in quotation marks does not end on its line"));
                }
                self.at += 1;
                Token::Text(text)
            }
            byte if byte.is_ascii_graphic() => {
                self.at += 1;
                Token::Sign(byte)
            }
            byte => return Err(Error::syntax(line, format!("the byte {byte:#04x} is in no PTX"))),
        };
        Ok(Spanned { token, line, start, end: self.at })
    }

    fn number(&mut self) -> Result<Token<'t>> {
        let line = self.line;
        let start = self.at;
        let wrong = |text: &str| Error::syntax(line, format!("{text} is no number"));
        let digits = |text: &str, radix| u64::from_str_radix(text, radix).map_err(|_| wrong(text));
        let second = if self.peek(0) == b'0' { self.peek(1).to_ascii_lowercase() } else { 0 };
        if matches!(second, b'f' | b'd' | b'x' | b'b') {
            self.at += 2;
            let body = self.take(|b| b.is_ascii_hexdigit());
            return match second {
                b'f' if body.len() == 8 => Ok(Token::F32(digits(body, 16)? as u32)),
                b'd' if body.len() == 16 => Ok(Token::F64(digits(body, 16)?)),
                b'x' | b'b' => {
                    let value = digits(body, if second == b'x' { 16 } else { 2 })?;
                    self.unsigned();
                    Ok(Token::Int(value))
                }
                _ => Err(wrong(&self.text[start..self.at])),
            };
        }
        let body = self.take(|b| b.is_ascii_digit());
        let float =
            self.peek(0) == b'.' && self.peek(1).is_ascii_digit() || matches!(self.peek(0), b'e' | b'E');
        if float {
            if self.peek(0) == b'.' {
                self.at += 1;
                self.take(|b| b.is_ascii_digit());
            }
            if matches!(self.peek(0), b'e' | b'E') {
                self.at += 1;
                if matches!(self.peek(0), b'+' | b'-') {
                    self.at += 1;
                }
                self.take(|b| b.is_ascii_digit());
            }
            let text = &self.text[start..self.at];
            return text.parse::<f64>().map(|value| Token::F64(value.to_bits())).map_err(|_| wrong(text));
        }
        let value =
            if body.len() > 1 && body.starts_with('0') { digits(&body[1..], 8)? } else { digits(body, 10)? };
        self.unsigned();
        Ok(Token::Int(value))
    }

    /// Skips the `U` of an unsigned literal.
    fn unsigned(&mut self) {
        if matches!(self.peek(0), b'U' | b'u') {
            self.at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: &[Token<'_>]) {
        let mut lexer = Lexer::new(text);
        let mut found = Vec::new();
        loop {
            match lexer.next().unwrap().token {
                Token::End => break,
                token => found.push(token),
            }
        }
        assert_eq!(found, expect, "{text}");
    }

    #[test]
    fn tokens() {
        check(
            "add.s32 %r1, -5;",
            &[
                Token::Word("add"),
                Token::Dot("s32"),
                Token::Word("%r1"),
                Token::Sign(b','),
                Token::Sign(b'-'),
                Token::Int(5),
                Token::Sign(b';'),
            ],
        );
        check(
            "0f3F800000 0d3FF0000000000000 1.5",
            &[Token::F32(0x3f80_0000), Token::F64(1f64.to_bits()), Token::F64(1.5f64.to_bits())],
        );
        check(
            "0x10U 010 0b11 18446744073709551615",
            &[Token::Int(16), Token::Int(8), Token::Int(3), Token::Int(u64::MAX)],
        );
        check(
            ".L2::128B // c\n/* d\n*/ $L__BB0_2:",
            &[Token::Dot("L2::128B"), Token::Word("$L__BB0_2"), Token::Sign(b':')],
        );
    }

    #[test]
    fn wrong() {
        for (text, line) in
            [("\n0f3F8", 2), ("/* a", 1), ("\"a\n\"", 1), ("99999999999999999999", 1), ("\n\n\u{e9}", 3)]
        {
            assert_eq!(Lexer::new(text).next().unwrap_err().line, line, "{text}");
        }
    }
}
