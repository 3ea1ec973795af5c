//! Answers that are more than a status: what the accelerator is, and its error log.

use crate::wire::{Input, Malformed, NoRoom, Output, padded};
use crate::{MAX_TEXT, Status};

/// What an accelerator is, and what it allows its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info<'a> {
    /// The product's name.
    pub name: &'a str,
    /// What code is compiled for, as in `ptx:sm_90a`.
    pub target: &'a str,
    /// Bytes of device memory that the guest may hold.
    pub memory_bytes: u64,
    /// Bytes of it that are not held yet.
    pub memory_free: u64,
    /// The longest that a launch may take, in microseconds.
    pub deadline_us: u64,
    /// The most iterations of cancellable loops that a thread may begin.
    pub fuel: u64,
    /// Units that run blocks.
    pub units: u32,
    /// Threads that run in step.
    pub lanes: u32,
    /// The most threads of a block.
    pub block_threads: u32,
    /// The most bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// The most blocks along x, y and z.
    pub grid: [u32; 3],
    /// The most modules that the guest may have at once.
    pub modules: u32,
    /// The most buffers that the guest may have at once.
    pub buffers: u32,
}

impl<'a> Info<'a> {
    /// The most bytes that it takes.
    pub const MAX_BYTES: usize = 72 + 2 * MAX_TEXT;

    /// Writes it and returns how many bytes it took. Texts are cut at [`MAX_TEXT`] bytes.
    ///
    /// # Errors
    /// When there is no room.
    pub fn encode(&self, bytes: &mut [u8]) -> Result<usize, NoRoom> {
        let (name, target) = (cut(self.name), cut(self.target));
        let mut output = Output::new(bytes);
        if output.room() < padded(72 + name.len() + target.len()) {
            return Err(NoRoom { what: "what the accelerator is" });
        }
        for long in [self.memory_bytes, self.memory_free, self.deadline_us, self.fuel] {
            output.put(&long.to_le_bytes());
        }
        let [x, y, z] = self.grid;
        for word in [
            self.units,
            self.lanes,
            self.block_threads,
            self.shared_bytes,
            x,
            y,
            z,
            self.modules,
            self.buffers,
        ] {
            output.put(&word.to_le_bytes());
        }
        for text in [name, target] {
            output.put(&(text.len() as u16).to_le_bytes());
        }
        output.put(name.as_bytes());
        output.put(target.as_bytes());
        output.zeros(padded(output.len()) - output.len());
        Ok(output.len())
    }

    /// Reads it.
    ///
    /// # Errors
    /// When the bytes are something else.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut input = Input::new(bytes, 0);
        let (memory_bytes, memory_free) = (input.u64()?, input.u64()?);
        let (deadline_us, fuel) = (input.u64()?, input.u64()?);
        let (units, lanes, block_threads, shared_bytes) =
            (input.u32()?, input.u32()?, input.u32()?, input.u32()?);
        let grid = [input.u32()?, input.u32()?, input.u32()?];
        let (modules, buffers) = (input.u32()?, input.u32()?);
        let (name, target) = (usize::from(input.u16()?), usize::from(input.u16()?));
        if name > MAX_TEXT || target > MAX_TEXT {
            return input.bad("a text is too long");
        }
        Ok(Self {
            name: text(&mut input, name)?,
            target: text(&mut input, target)?,
            memory_bytes,
            memory_free,
            deadline_us,
            fuel,
            units,
            lanes,
            block_threads,
            shared_bytes,
            grid,
            modules,
            buffers,
        })
    }
}

/// An entry of the error log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry<'a> {
    /// The number of the batch, counted from 0 in the order in which the device took them.
    pub batch: u64,
    /// The number of the operation in it.
    pub operation: u32,
    /// How it ended.
    pub status: Status,
    /// What happened, in words.
    pub text: &'a str,
}

impl LogEntry<'_> {
    /// The bytes that it takes in an answer.
    pub fn bytes(&self) -> usize {
        16 + padded(cut(self.text).len())
    }
}

/// Writes entries of the error log.
#[derive(Debug)]
pub struct LogWriter<'a>(Output<'a>);

impl<'a> LogWriter<'a> {
    /// No entries so far.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self(Output::new(bytes))
    }

    /// Adds an entry; its text is cut at [`MAX_TEXT`] bytes.
    ///
    /// # Errors
    /// When there is no room.
    pub fn entry(&mut self, entry: &LogEntry<'_>) -> Result<(), NoRoom> {
        if self.0.room() < entry.bytes() {
            return Err(NoRoom { what: "an entry of the log" });
        }
        let text = cut(entry.text);
        self.0.put(&entry.batch.to_le_bytes());
        self.0.put(&entry.operation.to_le_bytes());
        self.0.put(&entry.status.code().to_le_bytes());
        self.0.put(&(text.len() as u16).to_le_bytes());
        self.0.put(text.as_bytes());
        self.0.zeros(padded(text.len()) - text.len());
        Ok(())
    }

    /// The bytes written.
    pub fn finish(self) -> usize {
        self.0.len()
    }
}

/// Reads the entries of an answer to [`Operation::Log`](crate::Operation::Log).
#[derive(Clone, Debug)]
pub struct LogReader<'a>(Input<'a>);

impl<'a> LogReader<'a> {
    /// The entries in an answer.
    pub fn new(answer: &'a [u8]) -> Self {
        Self(Input::new(answer, 0))
    }

    fn entry(&mut self) -> Result<LogEntry<'a>, Malformed> {
        let (batch, operation) = (self.0.u64()?, self.0.u32()?);
        let status = match Status::from_code(self.0.u16()?) {
            Some(status) => status,
            None => return self.0.bad("there is no such status"),
        };
        let len = usize::from(self.0.u16()?);
        if len > MAX_TEXT {
            return self.0.bad("a text is too long");
        }
        let text = text(&mut self.0, len)?;
        self.0.take(padded(len) - len)?;
        Ok(LogEntry { batch, operation, status, text })
    }
}

impl<'a> Iterator for LogReader<'a> {
    type Item = Result<LogEntry<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.left() == 0 {
            return None;
        }
        let entry = self.entry();
        if entry.is_err() {
            self.0 = Input::new(&[], 0);
        }
        Some(entry)
    }
}

fn text<'a>(input: &mut Input<'a>, len: usize) -> Result<&'a str, Malformed> {
    match core::str::from_utf8(input.take(len)?) {
        Ok(text) => Ok(text),
        Err(_) => input.bad("a text is not UTF-8"),
    }
}

/// At most [`MAX_TEXT`] bytes of a text, whole characters.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        let text = "a".repeat(MAX_TEXT - 1);
        for (end, len) in
            [("b", MAX_TEXT), ("bc", MAX_TEXT), ("\u{e9}", MAX_TEXT - 1), ("\u{20ac}x", MAX_TEXT - 1)]
        {
            assert_eq!(cut(&(text.clone() + end)).len(), len, "{end}");
        }
        assert_eq!(cut("\u{e9}"), "\u{e9}");
    }

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        let info = Info {
            name: "NVIDIA H200",
            target: "ptx:sm_90a",
            memory_bytes: 1,
            memory_free: 2,
            deadline_us: 3,
            fuel: 4,
            units: 5,
            lanes: 6,
            block_threads: 7,
            shared_bytes: 8,
            grid: [9, 10, 11],
            modules: 12,
            buffers: 13,
        };
        let mut bytes = [0; Info::MAX_BYTES];
        let len = info.encode(&mut bytes).unwrap();
        assert_eq!(len % 8, 0);
        assert_eq!(Info::decode(&bytes[..len]), Ok(info));
        assert!(Info::decode(&bytes[..40]).is_err());
        assert!(info.encode(&mut [0; 80]).is_err());
        let long = "ä".repeat(MAX_TEXT);
        let long = Info { name: &long, target: &long, ..info };
        let len = long.encode(&mut bytes).unwrap();
        assert_eq!(Info::decode(&bytes[..len]).unwrap().name.len(), MAX_TEXT);
    }

    #[test]
    fn the_log_is_read_as_it_was_written() {
        let entry = |text| LogEntry { batch: 9, operation: 3, status: Status::Deadline, text };
        let mut bytes = [0; 570];
        let mut writer = LogWriter::new(&mut bytes);
        writer.entry(&entry("late")).unwrap();
        writer.entry(&entry("")).unwrap();
        let long = "x".repeat(600);
        assert!(writer.entry(&entry(&long)).is_ok(), "it is cut");
        assert!(writer.entry(&entry("more than is left")).is_err());
        let len = writer.finish();
        let read: std::vec::Vec<_> = LogReader::new(&bytes[..len]).collect::<Result<_, _>>().unwrap();
        assert_eq!(read[..2], [entry("late"), entry("")]);
        assert_eq!(read[2].text.len(), MAX_TEXT);
        assert!(LogReader::new(&bytes[..20]).last().unwrap().is_err());
    }
}
