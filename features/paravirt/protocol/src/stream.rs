//! Frames on a stream: how batches and replies follow each other where there is no queue.
//!
//! The device begins with its [configuration](crate::Config), [`CONFIG_BYTES`](crate::CONFIG_BYTES) bytes. Then each side
//! sends frames: a header of [`FRAME_BYTES`], and the batch or the reply.

use crate::wire::{Input, Malformed};
use crate::{MAX_BATCH_BYTES, MAX_REPLY_BYTES};

/// Bytes before each batch and each reply.
pub const FRAME_BYTES: usize = 16;

/// The shortest batch and the shortest reply: a header alone.
const LEAST: u32 = 16;

/// What stands before a batch or a reply on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Bytes of the batch or reply, a multiple of 8 and at least 16.
    pub bytes: u32,
    /// Before a batch: the most bytes of the reply to it, at least 16. Before a reply 0.
    pub room: u32,
    /// A number of the guest's choice for a batch, which comes back before the reply to it.
    pub tag: u32,
}

impl FrameHeader {
    /// Its bytes.
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.room.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.tag.to_le_bytes());
        bytes
    }

    /// The tag, whatever else is wrong.
    pub fn tag(bytes: &[u8; FRAME_BYTES]) -> u32 {
        u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]])
    }

    /// Reads what stands before a batch.
    ///
    /// # Errors
    /// When a length is none that it may have. Nobody knows then where the next frame begins.
    pub fn decode_batch(bytes: &[u8; FRAME_BYTES]) -> Result<Self, Malformed> {
        let header = Self::decode(bytes, MAX_BATCH_BYTES)?;
        if header.room < LEAST {
            return Err(Malformed { offset: 4, what: "there is no room for a reply's header" });
        }
        Ok(header)
    }

    /// Reads what stands before a reply.
    ///
    /// # Errors
    /// As [`decode_batch`](Self::decode_batch).
    pub fn decode_reply(bytes: &[u8; FRAME_BYTES]) -> Result<Self, Malformed> {
        let header = Self::decode(bytes, MAX_REPLY_BYTES)?;
        if header.room != 0 {
            return Err(Malformed { offset: 4, what: "a reserved field is not zero" });
        }
        Ok(header)
    }

    fn decode(bytes: &[u8; FRAME_BYTES], most: usize) -> Result<Self, Malformed> {
        let mut input = Input::new(bytes, 0);
        let header = Self { bytes: input.u32()?, room: input.u32()?, tag: input.u32()? };
        input.zero32()?;
        let what = match header.bytes {
            bytes if !bytes.is_multiple_of(8) => "a frame's length is no multiple of 8",
            bytes if bytes < LEAST => "a frame is too short",
            bytes if bytes as usize > most => "a frame is too long",
            _ => return Ok(header),
        };
        Err(Malformed { offset: 0, what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked() {
        let check = |bytes: u32, room: u32, batch: Option<&str>, reply: Option<&str>| {
            let header = FrameHeader { bytes, room, tag: 0x0102_0304 };
            let encoded = header.encode();
            assert_eq!(FrameHeader::tag(&encoded), header.tag);
            for (read, expect) in
                [(FrameHeader::decode_batch(&encoded), batch), (FrameHeader::decode_reply(&encoded), reply)]
            {
                assert_eq!(read.map_err(|error| error.what), expect.map_or(Ok(header), Err), "{header:?}");
            }
        };
        let (long, short) = (Some("a frame is too long"), Some("a frame is too short"));
        let (ragged, reserved) =
            (Some("a frame's length is no multiple of 8"), Some("a reserved field is not zero"));
        let room = Some("there is no room for a reply's header");
        check(16, 16, None, reserved);
        check(16, 0, room, None);
        check(1 << 20, u32::MAX, None, reserved);
        check(0, 16, short, short);
        check(8, 15, short, short);
        check(24, 15, room, reserved);
        check(20, 16, ragged, ragged);
        check(u32::MAX, 16, ragged, ragged);
        check((1 << 20) + 8, 16, long, long);
        check(u32::MAX - 7, 0, long, long);
        let mut bytes = FrameHeader { bytes: 16, room: 16, tag: 0 }.encode();
        bytes[15] = 1;
        assert!(FrameHeader::decode_batch(&bytes).is_err());
    }
}
