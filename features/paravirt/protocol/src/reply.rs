//! What a guest is answered: one result for each operation of its batch.

use crate::wire::{Input, Malformed, NoRoom, Output, padded};
use crate::{MAX_OPERATIONS, MAX_REPLY_BYTES, Status, VERSION};

const MAGIC: [u8; 4] = *b"vmar";
const HEADER: usize = 16;
const RESULT_HEADER: usize = 8;

/// The bytes of a reply with `results` results whose answers together have `answers` bytes, each padded to 8.
pub const fn reply_bytes(results: usize, answers: usize) -> usize {
    HEADER + results * RESULT_HEADER + answers
}

/// A reply whose every result is well formed.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    status: Status,
    body: &'a [u8],
    results: usize,
}

impl<'a> Reply<'a> {
    /// Reads a reply, all of it.
    ///
    /// # Errors
    /// Where it is no reply of this version.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut input = Input::new(bytes, 0);
        if bytes.len() > MAX_REPLY_BYTES {
            return input.bad("it is longer than a reply may be");
        }
        if input.take(4)? != MAGIC {
            return Err(Malformed { offset: 0, what: "it does not begin as a reply" });
        }
        if input.u16()? != VERSION {
            return Err(Malformed { offset: 4, what: "it has another version of the protocol" });
        }
        let Some(status) = Status::from_code(input.u16()?) else {
            return Err(Malformed { offset: 6, what: "there is no such status" });
        };
        if input.u32()? as usize != bytes.len() {
            return Err(Malformed { offset: 8, what: "its length is not the one that it tells" });
        }
        let results = input.u32()? as usize;
        if results > MAX_OPERATIONS || results > input.left() / RESULT_HEADER {
            return Err(Malformed { offset: 12, what: "it tells more results than it can have" });
        }
        let reply = Self { status, body: bytes.get(HEADER..).unwrap_or(&[]), results };
        let mut seen = reply.results();
        for result in &mut seen {
            result?;
        }
        seen.input.end()?;
        Ok(reply)
    }

    /// How the batch ended: `Ok`, or why none of it was begun.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The results, in the order of the operations. None of them is an error of the outer kind.
    pub fn results(&self) -> Results<'a> {
        Results { input: Input::new(self.body, HEADER), left: self.results }
    }

    /// `Ok` if the batch and all operations ended so, else how the first that did not ended.
    ///
    /// # Errors
    /// The status that is not `Ok`, and the number of its operation.
    pub fn check(&self) -> Result<(), (usize, Status)> {
        if self.status != Status::Ok {
            return Err((0, self.status));
        }
        for (index, result) in self.results().enumerate() {
            if let Ok((status, _)) = result
                && status != Status::Ok
            {
                return Err((index, status));
            }
        }
        Ok(())
    }
}

/// The results of a reply: how an operation ended, and its answer.
#[derive(Clone, Debug)]
pub struct Results<'a> {
    input: Input<'a>,
    left: usize,
}

impl<'a> Iterator for Results<'a> {
    type Item = Result<(Status, &'a [u8]), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let result = result(&mut self.input);
        if result.is_err() {
            self.left = 0;
        }
        Some(result)
    }
}

fn result<'a>(input: &mut Input<'a>) -> Result<(Status, &'a [u8]), Malformed> {
    let start = *input;
    let Some(status) = Status::from_code(input.u16()?) else { return start.bad("there is no such status") };
    input.zero16()?;
    let bytes = input.u32()? as usize;
    if bytes < RESULT_HEADER || !bytes.is_multiple_of(8) {
        return start.bad("a result has no such length");
    }
    Ok((status, input.take(bytes - RESULT_HEADER)?))
}

/// Writes a reply into bytes that the caller gives.
#[derive(Debug)]
pub struct ReplyWriter<'a> {
    output: Output<'a>,
    results: u32,
}

impl<'a> ReplyWriter<'a> {
    /// A reply without results, to a batch that ended with `status`.
    ///
    /// # Errors
    /// When there is not even room for the header.
    pub fn new(bytes: &'a mut [u8], status: Status) -> Result<Self, NoRoom> {
        let cap = bytes.len().min(MAX_REPLY_BYTES);
        let mut output = Output::new(bytes.get_mut(..cap).unwrap_or_default());
        if output.room() < HEADER {
            return Err(NoRoom { what: "a reply's header" });
        }
        output.put(&MAGIC);
        output.put(&VERSION.to_le_bytes());
        output.put(&status.code().to_le_bytes());
        output.zeros(8);
        Ok(Self { output, results: 0 })
    }

    /// Bytes that are left for further results.
    pub fn room(&self) -> usize {
        self.output.room()
    }

    /// Adds a result with an answer.
    ///
    /// # Errors
    /// When there is no room.
    pub fn result(&mut self, status: Status, answer: &[u8]) -> Result<(), NoRoom> {
        let body = padded(answer.len());
        if self.output.room().checked_sub(RESULT_HEADER).is_none_or(|room| room < body) {
            return Err(NoRoom { what: "a result" });
        }
        self.results += 1;
        self.output.put(&status.code().to_le_bytes());
        self.output.zeros(2);
        self.output.put(&((RESULT_HEADER + body) as u32).to_le_bytes());
        self.output.put(answer);
        self.output.zeros(body - answer.len());
        Ok(())
    }

    /// Ends the reply and returns its length in bytes.
    pub fn finish(mut self) -> usize {
        let len = self.output.len();
        self.output.patch(8, &(len as u32).to_le_bytes());
        self.output.patch(12, &self.results.to_le_bytes());
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_as_they_were_written() {
        let mut bytes = [0xaa; 64];
        let mut writer = ReplyWriter::new(&mut bytes, Status::Ok).unwrap();
        writer.result(Status::Ok, b"abc").unwrap();
        writer.result(Status::Quota, b"").unwrap();
        assert!(writer.result(Status::Ok, &[0; 64]).is_err());
        let len = writer.finish();
        assert_eq!(len, reply_bytes(2, 8));
        let reply = Reply::decode(&bytes[..len]).unwrap();
        assert_eq!(reply.check(), Err((1, Status::Quota)));
        let first = reply.results().next().unwrap().unwrap();
        assert_eq!(first, (Status::Ok, &b"abc\0\0\0\0\0"[..]));
        assert!(ReplyWriter::new(&mut [0; 15], Status::Ok).is_err());
    }
}
