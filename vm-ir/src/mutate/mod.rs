//! Changes that fuzzers find useful: to any bytes, and to modules in their binary form and in their text, most of which
//! still are modules, and some are valid.

mod modules;

pub use modules::{Modules, launch};

use crate::op::TABLE;

/// Makes changes: with the same seed the same in every run.
#[derive(Clone, Debug)]
pub struct Mutator {
    state: u64,
    words: Vec<&'static str>,
}

impl Mutator {
    /// The mutator of a seed.
    pub fn new(seed: u64) -> Mutator {
        let mut words =
            vec!["{", "}", "%n", "%f", "-1", "0x7fc00000", "18446744073709551615", " : i32", " : vec4<f32>"];
        words.extend(["i8", "i64", "f16", "align 16", "\n  local @own: i8[20]\n"]);
        words.extend(TABLE.iter().map(|row| row.mnemonic));
        // The one state that such a generator never leaves is 0.
        Mutator { state: seed.max(1), words }
    }

    /// The next number (Xorshift64*).
    pub fn number(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`; 0 if that is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.number() % bound.max(1) as u64) as usize
    }

    /// Changes one to three places of a binary module, most often single bytes. `other` is another one, to take parts
    /// from.
    pub fn binary(&mut self, data: &mut Vec<u8>, other: &[u8]) {
        if data.len() > 8 && self.below(4) != 0 {
            (0..=self.below(5) / 3).for_each(|_| self.change_byte(data));
        } else {
            (0..=self.below(3)).for_each(|_| self.bytes(data, other, &[]));
        }
    }

    /// Changes one to three places of a text, most often whole words. `other` is another one, to take parts from.
    pub fn text(&mut self, data: &mut Vec<u8>, other: &[u8]) {
        if data.len() > 100 && self.below(4) != 0 {
            (0..=self.below(5) / 3).for_each(|_| self.change_word(data));
        } else {
            let words = std::mem::take(&mut self.words);
            (0..=self.below(3)).for_each(|_| self.bytes(data, other, &words));
            self.words = words;
        }
    }

    /// A word that means something in every text.
    fn word(&mut self) -> &'static str {
        let index = self.below(self.words.len());
        self.words[index]
    }

    /// Puts a byte behind the head into the place of another, or one that is near.
    fn change_byte(&mut self, data: &mut [u8]) {
        let at = 8 + self.below(data.len() - 8);
        data[at] = match self.below(4) {
            0 => self.number() as u8,
            1 => data[at].wrapping_add(1),
            2 => data[at].wrapping_sub(1),
            _ => data[self.below(data.len())],
        };
    }

    /// Changes one place of any bytes. `other` are some to take parts from, `words` some that mean something.
    pub fn bytes(&mut self, data: &mut Vec<u8>, other: &[u8], words: &[&str]) {
        let at = self.below(data.len() + 1);
        let len = self.below(24).min(data.len() - at);
        match self.below(8) {
            0 if at < data.len() => data[at] = self.number() as u8,
            1 if at < data.len() => data[at] ^= 1 << self.below(8),
            2 => drop(data.drain(at..at + len)),
            3 => {
                let copy = data[at..at + len].to_vec();
                let to = self.below(data.len() + 1);
                data.splice(to..to, copy);
            }
            4 => {
                let from = self.below(other.len() + 1);
                let until = from + self.below(64).min(other.len() - from);
                data.splice(at..at, other[from..until].iter().copied());
            }
            5 if !words.is_empty() => {
                let word = words[self.below(words.len())];
                data.splice(at..at + len, word.bytes());
            }
            6 if at < data.len() => data[at] = data[at].wrapping_add(self.below(5) as u8).wrapping_sub(2),
            _ => data.insert(at, self.number() as u8),
        }
    }

    /// Puts a word of the text into the place of another of its kind, or one that means something everywhere.
    fn change_word(&mut self, data: &mut Vec<u8>) {
        let in_word = |b: &u8| b.is_ascii_alphanumeric() || b"%@._-".contains(b);
        let mut spans = Vec::new();
        let mut at = 0;
        for run in data.chunk_by(|a, b| in_word(a) == in_word(b)) {
            if in_word(&run[0]) {
                spans.push(at..at + run.len());
            }
            at += run.len();
        }
        let kind = |b: u8| {
            if b.is_ascii_digit() || b == b'-' {
                b'0'
            } else if b.is_ascii_alphabetic() {
                b'a'
            } else {
                b
            }
        };
        if spans.is_empty() {
            return;
        }
        let place = spans[self.below(spans.len())].clone();
        let here = kind(data[place.start]);
        let alike: Vec<_> = spans.iter().filter(|s| kind(data[s.start]) == here).collect();
        let word = match here {
            b'a' | b'0' if self.below(2) == 0 => self.word().as_bytes().to_vec(),
            _ => data[alike[self.below(alike.len())].clone()].to_vec(),
        };
        data.splice(place, word);
    }
}
