//! Options of the compiler and of the linker, and their logs: buffers of this side, of which as much is returned as the program has room for.

use super::lane::Call;
use super::pack::Refused;
use super::sys::{self, Word};
use crate::wire::{LOG, Malformed, Reader, code, put, put_bytes};

/// `CUjit_option` whose values are no pointers.
const PLAIN: [u64; 11] = [0, 1, 7, 8, 9, 10, 11, 12, 13, 14, 15];
/// `CU_JIT_INFO_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER`; the option behind each is its size.
const BUFFERS: [u64; 2] = [3, 5];
/// The most that a call has: some of each kind many times over.
const MOST: u64 = 4096;

/// A log.
#[derive(Clone, Copy, Debug, Default)]
struct Log {
    /// Where the value is that says how long it is.
    size: usize,
    at: usize,
    len: usize,
    /// What is last in the program's.
    last: u8,
}

/// Options as the driver takes them: numbers of 32 bits, then words, then a word that a call may return, then buffers. None of it moves.
#[derive(Debug)]
pub(super) struct Options {
    memory: Vec<u64>,
    count: usize,
    values: usize,
    logs: [Log; 2],
}

impl Options {
    /// As many, each with its value, then how long the logs may be and what is last in them.
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, Refused> {
        let count = reader.word()?;
        if count > MOST {
            return Err(code::INVALID_VALUE.into());
        }
        let mut all: Vec<(u64, u64)> =
            (0..count).map(|_| Ok((reader.word()?, reader.word()?))).collect::<Result<_, Malformed>>()?;
        if all.iter().any(|(option, _)| !PLAIN.contains(option)) {
            return Err(code::NOT_SUPPORTED.into());
        }
        let mut logs = [Log::default(); 2];
        for (log, option) in logs.iter_mut().zip(BUFFERS) {
            let word = reader.word()?;
            log.len = usize::try_from(word as u32).ok().filter(|len| *len <= LOG).ok_or(Malformed)?;
            log.last = u8::try_from(word >> 32).map_err(|_| Malformed)?;
            if log.len > 0 {
                all.extend([(option, 0), (option + 1, log.len as u64)]);
                log.size = all.len() - 1;
            }
        }
        let mut memory: Vec<u64> =
            all.chunks(2).map(|pair| pair[0].0 | pair.get(1).map_or(0, |(option, _)| option << 32)).collect();
        let values = memory.len();
        memory.extend(all.iter().map(|(_, value)| value));
        memory.push(0);
        for log in logs.iter_mut().filter(|log| log.len > 0) {
            (log.size, log.at) = (values + log.size, memory.len());
            memory.resize(memory.len() + log.len.div_ceil(8), 0);
        }
        let base = sys::place_words(&mut memory);
        for log in logs.iter().filter(|log| log.len > 0) {
            memory[log.size - 1] = base + 8 * log.at as u64;
            let last = log.len - 1;
            memory[log.at + last / 8] |= u64::from(log.last) << (8 * (last % 8));
        }
        Ok(Self { memory, count: all.len(), values, logs })
    }

    /// How many there are, and where they and their values are; nowhere where there are none.
    pub(super) fn words(&self) -> [Word; 3] {
        let at = |at| if self.count == 0 { Word::Is(0) } else { Word::At(at) };
        [Word::Is(self.count as u64), at(0), at(self.values)]
    }

    /// Where a call returns a word.
    pub(super) fn out(&self) -> Word {
        Word::At(self.values + self.count)
    }

    /// Makes a call with them, which returns a word.
    pub(super) fn make(&mut self, call: &Call<'_>, words: &[Word]) -> Result<u64, u32> {
        match call.make(words, &mut self.memory)? {
            0 => Ok(self.memory[self.values + self.count]),
            code => Err(code),
        }
    }

    /// What is in the logs: of each how much the driver says, and that.
    pub(super) fn put_logs(&self, reply: &mut Vec<u8>) {
        for log in self.logs {
            let said = if log.len > 0 { self.memory[log.size] & 0xffff_ffff } else { 0 };
            let words = &self.memory[log.at..][..log.len.div_ceil(8)];
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            bytes.truncate(log.len);
            // A text has a zero behind it where there was room.
            let text = bytes.iter().position(|byte| *byte == 0).unwrap_or(log.len);
            let written = if text == 0 { 0 } else { text + 1 };
            bytes.truncate(written);
            put(reply, said);
            put(reply, bytes.len() as u64);
            put_bytes(reply, &bytes);
        }
    }
}
