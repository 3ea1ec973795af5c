//! Lines of a stream, each no longer than it may be.

/// What came of a stream and is not taken yet.
#[derive(Debug)]
pub(super) struct Lines {
    bytes: Vec<u8>,
    /// How many of them are known to have no end of a line.
    seen: usize,
    longest: usize,
}

/// A line is longer than it may be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

impl Lines {
    /// Nothing yet; lines may have `longest` bytes.
    pub(super) fn new(longest: usize) -> Self {
        Self { bytes: Vec::new(), seen: 0, longest }
    }

    /// Takes what came next. Take all lines out before the next.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// Whether a line has begun and not ended.
    pub(super) fn has_begun(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// The next line without its end.
    pub(super) fn next_line(&mut self) -> Option<Result<Vec<u8>, TooLong>> {
        match self.bytes[self.seen..].iter().position(|&byte| byte == b'\n') {
            Some(at) if self.seen + at > self.longest => Some(Err(TooLong)),
            Some(at) => {
                let mut line: Vec<u8> = self.bytes.drain(..=self.seen + at).collect();
                line.pop();
                self.seen = 0;
                Some(Ok(line))
            }
            None => {
                self.seen = self.bytes.len();
                (self.seen > self.longest).then_some(Err(TooLong))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_lines_from_any_parts() {
        fn check(parts: &[&str], expect: &[Result<&str, TooLong>]) {
            let mut lines = Lines::new(4);
            let mut got = Vec::new();
            for part in parts {
                lines.push(part.as_bytes());
                while let Some(line) = lines.next_line() {
                    let is_end = line.is_err();
                    got.push(line.map(|line| String::from_utf8(line).expect("UTF-8")));
                    if is_end {
                        break;
                    }
                }
            }
            let got: Vec<_> = got.iter().map(|line| line.as_deref().map_err(|_| TooLong)).collect();
            assert_eq!(got, expect, "{parts:?}");
        }
        check(&["a\nb\n"], &[Ok("a"), Ok("b")]);
        check(&["ab", "cd", "\n\nx"], &[Ok("abcd"), Ok("")]);
        check(&["abcde"], &[Err(TooLong)]);
        check(&["abc", "de\n"], &[Err(TooLong)]);
        check(&["a\n", "bcdef\n"], &[Ok("a"), Err(TooLong)]);
    }
}
