//! Formats of `printf`, as C has them: what its arguments are, and what it prints. A kernel leaves records of what is to be printed in a ring of memory,
//! which the host reads when the kernel has ended.
//!
//! The ring begins with 64 bytes, of which the first 8 count the bytes that were ever put into it; behind them are as many as its size. A
//! record is words of 8 bytes: its place as words, shifted by 16, and below that how many words it has; the address of the format; and the block of
//! arguments. Newer records are put over the oldest. A program may write what it wants into the ring: only what it prints is at stake.

/// Bytes in front of the ring.
pub const HEAD: u64 = 64;
/// The most bytes of arguments: those of 32.
pub const MAX_ARGUMENTS: u64 = 256;
/// The format of a record of an assertion that failed. Its arguments are the addresses of the message, the file and the function, the line, and the
/// indices of the block and of the thread.
pub(crate) const ASSERTION: u64 = u64::MAX;
/// The most characters that a width or a precision adds.
const MAX_WIDTH: usize = 1024;

/// A part of a format.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Piece<'f> {
    Text(&'f [u8]),
    Conversion(Conversion),
}

/// A number in a format.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Count {
    None,
    Given(usize),
    Argument,
}

/// `%-08.3ld`
#[derive(Clone, Copy, Debug, PartialEq)]
struct Conversion {
    left: bool,
    plus: bool,
    space: bool,
    alternative: bool,
    zeros: bool,
    width: Count,
    precision: Count,
    /// Bytes of an integer.
    size: u64,
    kind: u8,
}

/// The parts of a format, up to its NUL. What is no conversion is text.
fn pieces(format: &[u8]) -> impl Iterator<Item = Piece<'_>> {
    let end = format.iter().position(|byte| *byte == 0).unwrap_or(format.len());
    let mut left = &format[..end];
    std::iter::from_fn(move || {
        let piece = match left {
            [] => return None,
            [b'%', b'%', ..] => (Piece::Text(b"%"), 2),
            [b'%', rest @ ..] => match conversion(rest) {
                Some((conversion, length)) => (Piece::Conversion(conversion), length + 1),
                None => (Piece::Text(b"%"), 1),
            },
            _ => {
                let length = left.iter().position(|byte| *byte == b'%').unwrap_or(left.len());
                (Piece::Text(&left[..length]), length)
            }
        };
        left = &left[piece.1..];
        Some(piece.0)
    })
}

/// The conversion that stands behind a `%`, and its length.
fn conversion(text: &[u8]) -> Option<(Conversion, usize)> {
    let mut found = Conversion {
        left: false,
        plus: false,
        space: false,
        alternative: false,
        zeros: false,
        width: Count::None,
        precision: Count::None,
        size: 4,
        kind: 0,
    };
    let mut at = 0;
    loop {
        match text.get(at)? {
            b'-' => found.left = true,
            b'+' => found.plus = true,
            b' ' => found.space = true,
            b'#' => found.alternative = true,
            b'0' => found.zeros = true,
            _ => break,
        }
        at += 1;
    }
    found.width = count(text, &mut at);
    if text.get(at)? == &b'.' {
        at += 1;
        found.precision = match count(text, &mut at) {
            Count::None => Count::Given(0),
            given => given,
        };
    }
    let sizes: [(&[u8], u64); 8] =
        [(b"hh", 1), (b"h", 2), (b"ll", 8), (b"l", 8), (b"z", 8), (b"j", 8), (b"t", 8), (b"L", 8)];
    if let Some((word, size)) = sizes.iter().find(|(word, _)| text[at..].starts_with(word)) {
        (found.size, at) = (*size, at + word.len());
    }
    found.kind = *text.get(at)?;
    b"diouxXcsfFeEgGaAp".contains(&found.kind).then_some((found, at + 1))
}

fn count(text: &[u8], at: &mut usize) -> Count {
    if text.get(*at) == Some(&b'*') {
        *at += 1;
        return Count::Argument;
    }
    let digits = text[*at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = text[*at..*at + digits]
        .iter()
        .fold(0usize, |number, digit| number.saturating_mul(10).saturating_add(usize::from(digit - b'0')));
    *at += digits;
    if digits == 0 { Count::None } else { Count::Given(number.min(MAX_WIDTH)) }
}

impl Conversion {
    fn is_float(&self) -> bool {
        b"fFeEgGaA".contains(&self.kind)
    }

    /// Bytes that its value has among the arguments.
    fn bytes(&self) -> u64 {
        match self.kind {
            b's' | b'p' => 8,
            b'c' => 4,
            _ if self.is_float() => 8,
            _ => self.size.max(4),
        }
    }

    /// How many arguments come before its value.
    fn counts(&self) -> u64 {
        [self.width, self.precision].iter().filter(|count| **count == Count::Argument).count() as u64
    }
}

/// The bytes that the arguments of a format take, one behind the other, each at a multiple of its size; and how many they are.
pub(crate) fn arguments(format: &[u8]) -> (u64, u64) {
    pieces(format).fold((0, 0), |(end, number), piece| match piece {
        Piece::Text(_) => (end, number),
        Piece::Conversion(conversion) => {
            let (counts, bytes) = (conversion.counts(), conversion.bytes());
            ((end + 4 * counts).next_multiple_of(bytes) + bytes, number + counts + 1)
        }
    })
}

/// What `printf` prints, of a format and its block of arguments, up to `limit` bytes; `string` has what is at an address, without its NUL. What
/// the block does not have is zero.
///
/// ```
/// let mut arguments = 7u64.to_le_bytes().to_vec();
/// arguments.extend(2.5f64.to_le_bytes());
/// assert_eq!(vm_ptx::print::format(b"%03d: %.2e\n\0", &arguments, 100, |_| None), b"007: 2.50e+00\n");
/// ```
pub fn format(
    format: &[u8],
    arguments: &[u8],
    limit: usize,
    mut string: impl FnMut(u64) -> Option<Vec<u8>>,
) -> Vec<u8> {
    let mut end = 0;
    let mut next = |bytes: u64| {
        let at = (end as u64).next_multiple_of(bytes);
        end = (at + bytes) as usize;
        (at..at + bytes)
            .rev()
            .fold(0u64, |value, at| value << 8 | u64::from(arguments.get(at as usize).copied().unwrap_or(0)))
    };
    let mut out = Vec::new();
    for piece in pieces(format) {
        match piece {
            Piece::Text(text) => out.extend(text),
            Piece::Conversion(mut conversion) => {
                let mut given = |count| match count {
                    Count::None => None,
                    Count::Given(number) => Some(number as i64),
                    Count::Argument => Some(i64::from(next(4) as i32)),
                };
                let (width, precision) = (given(conversion.width), given(conversion.precision));
                conversion.left |= width.is_some_and(|width| width < 0);
                let width = width.map_or(0, |width| width.unsigned_abs().min(MAX_WIDTH as u64) as usize);
                let precision = precision.and_then(|precision| usize::try_from(precision).ok());
                let value = next(conversion.bytes());
                conversion.print(&mut out, value, width, precision.map(|p| p.min(MAX_WIDTH)), &mut string);
            }
        }
        if out.len() >= limit {
            out.truncate(limit);
            break;
        }
    }
    out
}

impl Conversion {
    fn print(
        &self,
        out: &mut Vec<u8>,
        value: u64,
        width: usize,
        precision: Option<usize>,
        string: &mut impl FnMut(u64) -> Option<Vec<u8>>,
    ) {
        let signed = value as i64;
        let signed = match (self.bytes(), self.size) {
            (8, _) => signed,
            (_, 1) => i64::from(signed as i8),
            (_, 2) => i64::from(signed as i16),
            _ => i64::from(signed as i32),
        };
        let unsigned = match self.size {
            8 => signed as u64,
            size => signed as u64 & ((1 << (8 * size)) - 1),
        };
        let (mut sign, body, zeros) = match self.kind {
            b'c' => (String::new(), vec![value as u8], false),
            b's' => {
                let mut text = string(value).unwrap_or_else(|| b"(null)".to_vec());
                text.truncate(precision.unwrap_or(usize::MAX));
                (String::new(), text, false)
            }
            b'p' if value == 0 => (String::new(), b"(nil)".to_vec(), false),
            b'p' => (String::new(), format!("{value:#x}").into_bytes(), false),
            b'd' | b'i' => {
                let digits = digits(signed.unsigned_abs().to_string(), precision);
                (self.sign(signed < 0), digits, precision.is_none())
            }
            b'o' => {
                let mut text = digits(format!("{unsigned:o}"), precision);
                if self.alternative && text.first() != Some(&b'0') {
                    text.insert(0, b'0');
                }
                (String::new(), text, precision.is_none())
            }
            b'u' => (String::new(), digits(unsigned.to_string(), precision), precision.is_none()),
            b'x' | b'X' => {
                let text = digits(format!("{unsigned:x}"), precision);
                let prefix = if self.alternative && unsigned != 0 { "0x" } else { "" };
                (prefix.to_owned(), text, precision.is_none())
            }
            _ => {
                let float = f64::from_bits(value);
                let text = self.float(float.abs(), precision);
                let (prefix, text) = match text.strip_prefix("0x") {
                    Some(rest) => ("0x", rest),
                    None => ("", &*text),
                };
                (self.sign(float.is_sign_negative()) + prefix, text.as_bytes().to_vec(), float.is_finite())
            }
        };
        let mut body = body;
        if self.kind.is_ascii_uppercase() {
            sign.make_ascii_uppercase();
            body.make_ascii_uppercase();
        }
        let fill = width.saturating_sub(sign.len() + body.len());
        let (zeros, left) = (zeros && self.zeros && !self.left, self.left);
        let blanks = |is: bool, byte| std::iter::repeat_n(byte, if is { fill } else { 0 });
        out.extend(blanks(!zeros && !left, b' '));
        out.extend(sign.bytes());
        out.extend(blanks(zeros, b'0'));
        out.extend(body);
        out.extend(blanks(left, b' '));
    }

    fn sign(&self, negative: bool) -> String {
        let sign = match (negative, self.plus, self.space) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (.., true) => " ",
            _ => "",
        };
        sign.to_owned()
    }

    /// A float without its sign.
    fn float(&self, value: f64, precision: Option<usize>) -> String {
        if !value.is_finite() {
            return if value.is_nan() { "nan" } else { "inf" }.to_owned();
        }
        let digits = precision.unwrap_or(6);
        match self.kind.to_ascii_lowercase() {
            b'f' => self.pointed(format!("{value:.digits$}"), ""),
            b'e' => self.with_exponent(value, digits),
            b'g' => {
                // As many digits as that in all, and without zeros at their end.
                let digits = digits.max(1);
                let exponent = exponent(value, digits - 1);
                let text = match (-4..digits as i32).contains(&exponent) {
                    true => format!("{value:.*}", (digits as i32 - 1 - exponent) as usize),
                    false => self.with_exponent(value, digits - 1),
                };
                if self.alternative {
                    let (mantissa, exponent) = text.split_at(text.find('e').unwrap_or(text.len()));
                    return self.pointed(mantissa.to_owned(), exponent);
                }
                let (mantissa, exponent) = text.split_at(text.find('e').unwrap_or(text.len()));
                let mantissa = match mantissa.contains('.') {
                    true => mantissa.trim_end_matches('0').trim_end_matches('.'),
                    false => mantissa,
                };
                format!("{mantissa}{exponent}")
            }
            _ => self.hexadecimal(value, precision),
        }
    }

    /// With a point, where `#` asks for one.
    fn pointed(&self, mantissa: String, exponent: &str) -> String {
        let point = if self.alternative && !mantissa.contains('.') { "." } else { "" };
        format!("{mantissa}{point}{exponent}")
    }

    fn with_exponent(&self, value: f64, digits: usize) -> String {
        let text = format!("{value:.digits$e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(rest) => ('-', rest),
            None => ('+', exponent),
        };
        self.pointed(mantissa.to_owned(), &format!("e{sign}{exponent:0>2}"))
    }

    /// `0x1.8p+1`
    fn hexadecimal(&self, value: f64, precision: Option<usize>) -> String {
        let bits = value.to_bits();
        let (mut exponent, mut fraction) = ((bits >> 52 & 0x7ff) as i32 - 1023, bits & ((1 << 52) - 1));
        let mut first = 1;
        if exponent == -1023 {
            (exponent, first) = (if fraction == 0 { 0 } else { -1022 }, 0);
        }
        let mut digits = 13;
        match precision {
            Some(precision) if precision < 13 => {
                // To nearest, ties to even.
                let dropped = 4 * (13 - precision as u32);
                let whole = u64::from(first == 1) << 52 | fraction;
                let (kept, rest) = (whole >> dropped, whole & ((1 << dropped) - 1));
                let half = 1 << (dropped - 1);
                let kept = kept + u64::from(rest > half || (rest == half && kept & 1 == 1));
                first = kept >> (52 - dropped);
                fraction = kept & ((1 << (52 - dropped)) - 1);
                digits = precision;
            }
            Some(_) => {}
            None => {
                while digits > 0 && fraction & 0xf == 0 {
                    (fraction, digits) = (fraction >> 4, digits - 1);
                }
            }
        }
        let more = precision.unwrap_or(0).saturating_sub(13);
        let fraction = match digits + more {
            0 => String::new(),
            _ => format!(
                ".{}{}",
                if digits > 0 { format!("{fraction:0digits$x}") } else { String::new() },
                "0".repeat(more)
            ),
        };
        self.pointed(format!("0x{first}{fraction}"), &format!("p{exponent:+}"))
    }
}

/// At least as many digits as that; none of a zero of which none are asked for.
fn digits(text: String, precision: Option<usize>) -> Vec<u8> {
    let least = precision.unwrap_or(1);
    let text = if least == 0 && text == "0" { String::new() } else { text };
    format!("{text:0>least$}").into_bytes()
}

/// The exponent of a number that is rounded to so many digits behind its first.
fn exponent(value: f64, digits: usize) -> i32 {
    let text = format!("{value:.digits$e}");
    text.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0)
}

/// A record of a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The address of its format.
    pub format: u64,
    /// The block of its arguments.
    pub arguments: Vec<u8>,
}

impl Record {
    /// Returns what CUDA prints of an assertion that failed, or `None` if the record is of `printf`; `string` has what is at an address, without its NUL.
    pub fn assertion(&self, string: impl Fn(u64) -> Option<Vec<u8>>) -> Option<Vec<u8>> {
        let words: Vec<u64> =
            self.arguments.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let (&[message, file, function, line, ref indices @ ..], ASSERTION) = (&words[..], self.format)
        else {
            return None;
        };
        let &[bx, by, bz, x, y, z] = indices else { return None };
        let [message, file, function] = [message, file, function]
            .map(|at| String::from_utf8_lossy(&string(at).unwrap_or_default()).into_owned());
        let text = format!(
            "{file}:{line}: {function}: block: [{bx},{by},{bz}], thread: [{x},{y},{z}] Assertion `{message}` failed.\n"
        );
        Some(text.into_bytes())
    }
}

/// Returns the records of a ring, the oldest first. A ring that overflowed has the newest ones. Records are read lazily.
pub fn records(count: u64, ring: &[u8]) -> impl DoubleEndedIterator<Item = Record> {
    let size = ring.len() as u64;
    let is_ring = size >= 8 && size.is_power_of_two();
    let count = if is_ring { count & !7 } else { 0 };
    let word = move |at: u64| {
        let at = (at & size.wrapping_sub(1)) as usize;
        ring.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    let first = count.saturating_sub(size);
    let (mut at, mut found) = (first, Vec::new());
    while at < count {
        let (place, words) = (word(at) >> 16, word(at) & 0xffff);
        let end = at.saturating_add(8 * words);
        // What was written over in its middle is no record.
        if place != (at >> 3) & (u64::MAX >> 16)
            || !(2..=2 + MAX_ARGUMENTS / 8).contains(&words)
            || end > count
        {
            at += 8;
            continue;
        }
        // In words, of which a ring has fewer than 2^32.
        found.push(((at - first) / 8) as u32);
        at = end;
    }
    found.into_iter().map(move |place| {
        let at = first + 8 * u64::from(place);
        let words = word(at) & 0xffff;
        let arguments = (2..words).flat_map(|index| word(at + 8 * index).to_le_bytes()).collect();
        Record { format: word(at + 8), arguments }
    })
}
