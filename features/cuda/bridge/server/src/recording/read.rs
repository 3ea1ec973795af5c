//! Reads a recording, which may be anybody's.

use thiserror::Error;

use super::{ASKS, Answer, Call, MAGIC, Part, Recording, event, number};
use crate::wire::{PAYLOAD, control};

/// The most lanes.
const LANES: u64 = 1024;
/// The most calls.
const CALLS: usize = 1 << 24;

/// It is no recording, or one that was changed.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("at byte {at} of the recording: {what}; record it anew by `vm-service bridge serve --record`")]
pub struct BadRecording {
    /// Where.
    pub at: usize,
    /// What is wrong there.
    pub what: &'static str,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

type Result<T> = std::result::Result<T, BadRecording>;

impl<'a> Reader<'a> {
    fn bad<T>(&self, what: &'static str) -> Result<T> {
        Err(BadRecording { at: self.at, what })
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        match self.bytes[self.at..].get(..len) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => self.bad("it ends within an event"),
        }
    }

    fn number(&mut self) -> Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return if shift == 63 && byte > 1 { self.bad("a number is too large") } else { Ok(number) };
            }
        }
        self.bad("a number is too large")
    }

    fn below(&mut self, end: u64, what: &'static str) -> Result<u64> {
        let number = self.number()?;
        if number < end { Ok(number) } else { self.bad(what) }
    }

    fn part(&mut self) -> Result<Part> {
        let len = self.below(PAYLOAD as u64 + 1, "a part is too long")? as usize;
        let kept = self.below(len as u64 + 1, "more is kept than there was")? as usize;
        let kept = self.take(kept)?.to_vec();
        let crc = if kept.len() < len { self.take(4)?.first_chunk().copied() } else { None };
        Ok(Part { len, kept, crc: crc.map_or(0, u32::from_le_bytes) })
    }

    fn call(&mut self, names: &[u16]) -> Result<Call> {
        let lane = self.below(LANES, "there are too many lanes")?;
        let ticket = self.number()?;
        let name = self.below(names.len() as u64, "a function has no name")?;
        let asks = match self.number()? {
            0 => false,
            ASKS => true,
            _ => return self.bad("a call has unknown flags"),
        };
        let (payload, bulk) = (self.part()?, self.part()?);
        if payload.len + bulk.len.next_multiple_of(8) > PAYLOAD {
            return self.bad("a call is too long");
        }
        let answer = if asks {
            let code = self.below(1 << 32, "a result is too large")? as u32;
            Some(Answer { code, reply: self.part()? })
        } else {
            None
        };
        Ok(Call { lane, ticket, number: names[name as usize], payload, bulk, answer })
    }
}

impl Recording {
    /// Reads one. An event that is not whole at the end is left out: its worker was killed.
    ///
    /// # Errors
    /// When it is none.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.take(MAGIC.len())? != MAGIC {
            return Err(BadRecording { at: 0, what: "it is no recording of this form" });
        }
        let (mut recording, mut names) = (Self::default(), Vec::new());
        while reader.at < bytes.len() {
            match recording.event(&mut reader, &mut names) {
                Err(BadRecording { what: "it ends within an event", .. }) => break,
                other => other?,
            }
        }
        recording.calls.sort_by_key(|call| call.ticket);
        match recording.calls.windows(2).any(|two| two[0].ticket == two[1].ticket) {
            true => reader.bad("two calls have one ticket"),
            false => Ok(recording),
        }
    }

    fn event(&mut self, reader: &mut Reader<'_>, names: &mut Vec<u16>) -> Result<()> {
        match reader.take(1)?[0] {
            event::NAME => {
                let len = reader.below(256, "a name is too long")? as usize;
                let name = std::str::from_utf8(reader.take(len)?).ok().and_then(number);
                match name {
                    Some(number) if names.len() < usize::from(u16::MAX) => names.push(number),
                    _ => return reader.bad("there is no such function"),
                }
            }
            event::CALL if self.calls.len() < CALLS => self.calls.push(reader.call(names)?),
            event::CALL => return reader.bad("there are too many calls"),
            event::ORDER => {
                let mut order = [0; control::WORDS];
                for word in &mut order {
                    *word = reader.number()?;
                }
                let more = reader.part()?;
                if more.kept.len() < more.len || more.len > control::VALUE {
                    return reader.bad("an order is not whole");
                }
                self.orders.push((order, more.kept));
            }
            _ => return reader.bad("there is no such event"),
        }
        Ok(())
    }
}
