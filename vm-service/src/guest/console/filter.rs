//! Filters a guest's console output for the operator's terminal. It passes text, and the control sequences that place, color and edit it.
//!
//! Other sequences change the clipboard or the title, print, lock the keyboard, or make the terminal send a reply. A reply that comes
//! after the operator has left the console is input of the shell, and a guest can choose the text of some. The filter is therefore an
//! allowlist, and passes only whole sequences, none of which has a reply. It assumes a UTF-8 terminal: bytes from 0x80 to 0x9f pass only within a character.
//!
//! The syntax is that of ECMA-48, the meaning that of xterm (ctlseqs).

use std::io::{self, Write};
use std::time::Duration;

/// The longest control sequence that passes.
const SEQUENCE: usize = 256;
/// The longest string that is dropped: a longer one has lost its terminator.
const STRING: usize = 64 << 10;
/// The time between two attempts to write to a full non-blocking terminal.
const RETRY: Duration = Duration::from_millis(10);

/// The DEC private modes that pass: keys, cursor, alternate screen, mouse, bracketed paste.
/// [`RESTORE`] resets each of them, so a mode whose default differs between terminals is not in the list. Nor is
/// 1004, which has some terminals report at once whether they have the focus.
const MODES: [&str; 20] = [
    "1", "5", "6", "7", "12", "25", "47", "1000", "1002", "1003", "1005", "1006", "1015", "1047", "1048",
    "1049", "2004", "2026", "8", "45",
];

/// Resets what sequences that pass have changed, and keeps the text and the cursor position of the main screen.
const RESTORE: &[u8] = concat!(
    // The main screen. Its cursor is restored, so it is saved first, in case the terminal shows that screen already.
    "\x1b7\x1b[?1049;47;1047l",
    // A soft reset, then all of it for terminals without one. Reset margins and a reset origin move the cursor.
    "\x1b[!p",
    "\x0f\x1b(B\x1b)B\x1b*B\x1b+B\x1b[0m\x1b>\x1b[4;20l",
    "\x1b7\x1b[?6l\x1b[r\x1b8",
    "\x1b[?1;5;12;45;1000;1002;1003;1005;1006;1015;2004;2026l\x1b[?7;8;25h",
    // The cursor's shape, and tab stops at each eighth column.
    "\x1b[0 q\x1b[?5W",
)
.as_bytes();

const ESC: u8 = 0x1b;

/// The state of the parser.
#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    /// In a multi-byte character, with the number of missing bytes.
    Character(usize),
    /// In an escape sequence.
    Escape,
    /// In a control sequence.
    Control,
    /// In a string, with its length so far.
    String(usize),
}

/// The filter, with the bytes of an unfinished sequence.
#[derive(Debug, Default)]
struct Filter {
    state: State,
    kept: Vec<u8>,
}

impl Filter {
    /// Appends the allowed part of `bytes` to `out`.
    fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        bytes.iter().for_each(|byte| self.next(*byte, out));
    }

    fn next(&mut self, byte: u8, out: &mut Vec<u8>) {
        match self.state {
            State::Text => self.text(byte, out),
            State::Character(missing) if byte & 0xc0 == 0x80 => {
                self.kept.push(byte);
                self.state = State::Character(missing - 1);
                if missing == 1 {
                    match self.kept[..] {
                        // A C1 control.
                        [0xc2, control @ 0x80..0xa0] => self.control_of_two_bytes(control),
                        // Some terminals accept overlong encodings of controls.
                        _ => self.end(std::str::from_utf8(&self.kept).is_ok(), out),
                    }
                }
            }
            State::Character(_) => {
                // Not UTF-8: in Latin-1 these bytes are letters.
                let letters = self.kept.iter().all(|byte| *byte >= 0xa0);
                self.end(letters, out);
                self.text(byte, out);
            }
            State::Escape => match byte {
                b'[' if self.kept.len() == 1 => {
                    self.kept.push(byte);
                    self.state = State::Control;
                }
                b']' | b'P' | b'X' | b'^' | b'_' if self.kept.len() == 1 => self.string(),
                0x20..=0x2f if self.kept.len() < SEQUENCE => self.kept.push(byte),
                0x30..=0x7e => {
                    self.kept.push(byte);
                    let passes = is_harmless_escape(&self.kept[1..]);
                    self.end(passes, out);
                }
                _ => self.broken(byte, out),
            },
            State::Control => match byte {
                0x20..=0x3f if self.kept.len() < SEQUENCE => self.kept.push(byte),
                0x40..=0x7e => {
                    self.kept.push(byte);
                    let passes = is_harmless_control(&self.kept[2..]);
                    self.end(passes, out);
                }
                _ => self.broken(byte, out),
            },
            State::String(length) => match byte {
                // The rest of the terminator `ESC \` is an escape sequence, which is dropped.
                ESC => {
                    self.end(false, out);
                    self.text(byte, out);
                }
                // Strings have no line feeds. An unterminated one swallows only its line.
                0x07 | b'\n' | b'\r' | 0x18 | 0x1a => self.end(false, out),
                _ if length >= STRING => self.broken(byte, out),
                _ => self.state = State::String(length + 1),
            },
        }
    }

    fn text(&mut self, byte: u8, out: &mut Vec<u8>) {
        match byte {
            // BEL to CR, and shifts between character sets.
            0x07..=0x0f | 0x20..=0x7e => out.push(byte),
            ESC => self.begin(State::Escape, byte),
            0xc2..=0xdf => self.begin(State::Character(1), byte),
            0xe0..=0xef => self.begin(State::Character(2), byte),
            0xf0..=0xf4 => self.begin(State::Character(3), byte),
            0xa0.. => out.push(byte),
            // Also drops ENQ, to which a terminal replies with its answerback, and C1 controls.
            _ => {}
        }
    }

    fn begin(&mut self, state: State, byte: u8) {
        self.kept = vec![byte];
        self.state = state;
    }

    fn control_of_two_bytes(&mut self, control: u8) {
        match control {
            0x9b => {
                self.kept = b"\x1b[".to_vec();
                self.state = State::Control;
            }
            0x90 | 0x98 | 0x9d..=0x9f => self.string(),
            _ => self.state = State::Text,
        }
    }

    fn string(&mut self) {
        self.kept.clear();
        self.state = State::String(0);
    }

    /// Ends a sequence, and emits it if it passes.
    fn end(&mut self, passes: bool, out: &mut Vec<u8>) {
        if passes {
            out.append(&mut self.kept);
        }
        self.kept.clear();
        self.state = State::Text;
    }

    /// Drops a sequence at a byte that is not part of it.
    fn broken(&mut self, byte: u8, out: &mut Vec<u8>) {
        self.end(false, out);
        self.text(byte, out);
    }
}

/// Whether an escape sequence places the cursor, resets the terminal or selects a character set. Requests for a reply and switches of the
/// encoding do not pass.
fn is_harmless_escape(after: &[u8]) -> bool {
    matches!(
        after,
        [b'7' | b'8' | b'D' | b'E' | b'H' | b'M' | b'=' | b'>' | b'c']
            | [b'(' | b')' | b'*' | b'+', b'0' | b'A' | b'B' | b'U']
            | b"#8"
    )
}

/// Whether a control sequence places the cursor, edits, colors, or sets a mode of [`MODES`]. No request for a reply passes.
fn is_harmless_control(after: &[u8]) -> bool {
    let Some((last, before)) = after.split_last() else { return false };
    let Ok(before) = std::str::from_utf8(before) else { return false };
    let is_numbers = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b';' | b':'));
    let (is_private, numbers) = match before.strip_prefix('?') {
        Some(numbers) => (true, numbers),
        None => (false, before),
    };
    match (is_private, last) {
        (false, b'p') => before == "!",
        (false, b'q') => before.strip_suffix(' ').is_some_and(is_numbers),
        _ if !is_numbers(numbers) => false,
        (false, b'@'..=b'I' | b'J'..=b'M' | b'P' | b'S' | b'X' | b'Z' | b'`'..=b'b' | b'd'..=b'g') => true,
        (false, b'm' | b'r' | b's' | b'u') | (true, b'J' | b'K') => true,
        // With six numbers it starts mouse highlighting.
        (false, b'T') => !numbers.contains(';'),
        (false, b'h' | b'l') => numbers.split(';').all(|mode| matches!(mode, "4" | "20")),
        (true, b'h' | b'l') => numbers.split(';').all(|mode| MODES.contains(&mode)),
        _ => false,
    }
}

/// Writes to a terminal through a filter. On drop it resets the terminal state that passed sequences have changed.
#[derive(Debug)]
pub struct Filtered<W: Write> {
    output: W,
    filter: Filter,
    passed: Vec<u8>,
    /// Whether more than text has passed.
    is_changed: bool,
}

impl<W: Write> Filtered<W> {
    /// Wraps `output`.
    pub fn new(output: W) -> Self {
        Self { output, filter: Filter::default(), passed: Vec::new(), is_changed: false }
    }
}

impl<W: Write> Drop for Filtered<W> {
    fn drop(&mut self) {
        if self.is_changed {
            // The terminal may have gone.
            let _ = self.output.write_all(RESTORE).and_then(|()| self.output.flush());
        }
    }
}

impl<W: Write> Write for Filtered<W> {
    /// Writes the allowed part, and blocks until the terminal has taken it.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.passed.clear();
        self.filter.pass(bytes, &mut self.passed);
        self.is_changed |= self.passed.iter().any(|byte| matches!(byte, &ESC | 0x0e));
        let mut rest = &self.passed[..];
        while !rest.is_empty() {
            match self.output.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Another process has made the terminal non-blocking.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(RETRY),
                Err(error) => return Err(error),
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(pieces: &[&[u8]]) -> Vec<u8> {
        let (mut filter, mut out) = (Filter::default(), Vec::new());
        pieces.iter().for_each(|piece| filter.pass(piece, &mut out));
        out
    }

    #[test]
    fn what_programs_draw_with_passes() {
        let texts: [&[u8]; 12] = [
            b"login: \x07\x08\t\r\n",
            "Grüße, \u{2500}\u{1f600} ÀÛ\u{9b0}".as_bytes(),
            b"\x1b[1;31mred\x1b[0m\x1b[38;2;1;2;3m\x1b[4:3m",
            b"\x1b[2J\x1b[H\x1b[10;20H\x1b[K\x1b[3A\x1b[?25l\x1b[?1049h\x1b[?1;2004h\x1b[4h",
            b"\x1b7\x1b8\x1bM\x1b(0lqk\x1b(B\x1bc\x0e\x0f",
            b"\x1b[!p\x1b[2 q",
            b"\x1b[1;24r\x1b[2S\x1b[T\x1b[5b",
            // Latin-1.
            b"Gr\xfc\xdfe\r\n",
            b"\xff\xfe",
            b"",
            b"\x1b#8",
            b"a\xe4b",
        ];
        for text in texts {
            assert_eq!(passed(&[text]), text, "{:?}", String::from_utf8_lossy(text));
            // Split at any byte.
            for at in 0..text.len() {
                assert_eq!(passed(&[&text[..at], &text[at..]]), text, "{at}");
            }
        }
    }

    #[test]
    fn what_acts_on_the_operator_is_dropped() {
        let texts: [&[u8]; 65] = [
            b"\xe0\x82\x9b",
            b"\xf0\x80\x82\x9d",
            b"\x1b]52;c;Y3VybA==\x07",
            b"\x1b]52;c;Y3VybA==\x1b\\",
            b"\x1b]0;title\x07",
            b"\x1b]10;?\x1b\\",
            b"\x1b]8;;http://a\x1b\\",
            b"\x1b[21t",
            b"\x1b[20t",
            b"\x1b[8;9;9t",
            b"\x1b[22;0t",
            b"\x1bP$qm\x1b\\",
            b"\x1bP+q544e\x1b\\",
            b"\x1bP\x07more\x1b\\",
            b"\x1b_Ga\x1b\\",
            b"\x1b^text\x1b\\",
            b"\x1bXtext\x1b\\",
            b"\x05",
            b"\x1bZ",
            b"\x1b[?5i",
            b"\x1b[5i",
            b"\x1b[2h",
            b"\x1b[?9999h",
            b"\x1b[?1;9999h",
            b"\x1b[>c",
            b"\x1b[>q",
            b"\x1b[1;1;1;1;1;1*y",
            b"\x1b[?2004$p",
            b"\x1b[>4;2m",
            // Reports: status, cursor position, device attributes, size, modes, settings, checksums, version.
            b"\x1b[5n",
            b"\x1b[6n",
            b"\x1b[?6n",
            b"\x1b[?15n",
            b"\x1b[?996n",
            b"\x1b[n",
            b"\x1b[c",
            b"\x1b[0c",
            b"\x1b[=c",
            b"\x1b[>0c",
            b"\x1b[11t",
            b"\x1b[13t",
            b"\x1b[14t",
            b"\x1b[14;2t",
            b"\x1b[16t",
            b"\x1b[18t",
            b"\x1b[19t",
            b"\x1b[4$p",
            b"\x1b[x",
            b"\x1b[1x",
            b"\x1b[1$w",
            b"\x1b[2$w",
            b"\x1b[1$u",
            b"\x1b[1;1'|",
            b"\x1b[1'{",
            b"\x1b[>0q",
            b"\x1b[?u",
            b"\x1b[?4m",
            b"\x1b[?1;1;0S",
            b"\x1b[?62n",
            b"\x1b[?1004h",
            // A mode whose default is not known.
            b"\x1b[?1034h",
            b"\x1b%@",
            b"\x1b G",
            // C1 controls in UTF-8.
            b"\xc2\x9d52;c;Y3VybA==\xc2\x9c\x07",
            b"\xc2\x9b21t",
        ];
        for text in texts {
            let whole = [text, b"after"].concat();
            // A BEL outside of an OSC rings.
            let text = |out: Vec<u8>| String::from_utf8_lossy(&out).replace('\x07', "").replace("more", "");
            assert_eq!(text(passed(&[&whole])), "after", "{:?}", String::from_utf8_lossy(&whole));
            for at in 0..whole.len() {
                assert_eq!(text(passed(&[&whole[..at], &whole[at..]])), "after", "{at}: {whole:?}");
            }
        }
        // Bare C1 controls are dropped.
        assert_eq!(passed(&[b"\x9b21t\x9d0;x"]), b"21t0;x");
    }

    /// The terminal is left as it was, whatever passed.
    #[test]
    fn what_passes_is_reset() {
        let restore = str::from_utf8(RESTORE).expect("text");
        let resets = |mode: &str| {
            restore.split("\x1b[?").any(|part| {
                let end = part.find(|c: char| !c.is_ascii_digit() && c != ';').unwrap_or(part.len());
                matches!(part.as_bytes().get(end), Some(b'h' | b'l'))
                    && part[..end].split(';').any(|of| of == mode)
            })
        };
        // 1048 saves or restores the cursor, and is no state.
        let left: Vec<_> = MODES.into_iter().filter(|mode| *mode != "1048" && !resets(mode)).collect();
        assert_eq!(left, [""; 0]);
        // Insertion, line feed mode, keypad, character sets, attributes, margins, the cursor's shape, tab stops.
        for part in ["[4;20l", ">", "(B", ")B", "*B", "+B", "[0m", "[r", "[0 q", "[?5W"] {
            assert!(restore.contains(&format!("\x1b{part}")), "{part}");
        }
        assert!(restore.contains('\x0f'));

        let written = |bytes: &[u8]| {
            let mut out = Vec::new();
            Filtered::new(&mut out).write_all(bytes).expect("written");
            out
        };
        assert_eq!(written(b"text\r\n"), b"text\r\n");
        for changes in [&b"\x1b[?1049h"[..], b"\x1b(0", b"\x0e", b"\x1b[?1h"] {
            assert_eq!(written(changes), [changes, RESTORE].concat());
        }
    }

    #[test]
    fn a_sequence_that_does_not_end_swallows_no_more_than_its_line() {
        assert_eq!(passed(&[b"\x1b]Rtext\nnext"]), b"next");
        assert_eq!(passed(&[b"\x1b[31\nnext"]), b"\nnext");
        assert_eq!(passed(&[b"\x1b[3\x1b[31mred"]), b"\x1b[31mred");
        assert_eq!(passed(&[b"\x1b", b"\x1b[31mred"]), b"\x1b[31mred");
        let long = [b"\x1b[".to_vec(), vec![b'1'; 1000], b"mend".to_vec()].concat();
        assert!(passed(&[&long]).ends_with(b"mend"));
        let endless = [b"\x1b]".to_vec(), vec![b'x'; STRING + 2], b"end".to_vec()].concat();
        assert!(passed(&[&endless]).ends_with(b"end"));
    }

    /// Filtering twice changes nothing.
    #[test]
    fn what_passes_is_harmless_by_itself() {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let alphabet = b"\x1b\x1b\x1b[]P?;0125tnhmc \\\x07\x05\xc2\x9b\x9c\x9d\xe2\x80X^_!$>q\n";
        for _ in 0..2000 {
            let text: Vec<u8> = (0..64)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    alphabet[(state >> 33) as usize % alphabet.len()]
                })
                .collect();
            let once = passed(&[&text]);
            // The period ends a character that may have begun.
            let whole = [&once[..], b"."].concat();
            assert_eq!(passed(&[&whole]), whole, "{text:?}");
        }
    }
}
