//! The device's configuration, which the driver reads before it uses the device: in its configuration space, and as the
//! first bytes of a [stream](crate::FrameHeader).

use crate::wire::{Input, Malformed};
use crate::{MAX_BATCH_BYTES, MAX_REPLY_BYTES, VERSION};

/// What the configuration space begins with.
const MAGIC: [u8; 4] = *b"vmac";

/// Bytes of the configuration space.
pub const CONFIG_BYTES: usize = 48;

/// The device's configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The protocol's version.
    pub version: u16,
    /// The most bytes of a batch.
    pub batch_bytes: u32,
    /// The most bytes of a reply.
    pub reply_bytes: u32,
    /// The most bytes of device memory that the guest may hold.
    pub memory_bytes: u64,
    /// The longest that a launch may take, in microseconds.
    pub deadline_us: u64,
    /// Bytes of the window of memory that programs share with the accelerator; 0 for a device with a queue.
    pub window_bytes: u64,
    /// The host's vsock port at which the device takes streams; 0 for a device with a queue.
    pub port: u32,
    /// What those streams are.
    pub takes: Takes,
}

/// What a device takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// Batches of operations.
    Batches,
    /// Sessions of CUDA programs, whose protocol is the bridge's.
    CudaPrograms,
}

impl Config {
    /// The configuration of a device with a queue and these quotas.
    pub fn new(memory_bytes: u64, deadline_us: u64) -> Self {
        Self {
            version: VERSION,
            batch_bytes: MAX_BATCH_BYTES as u32,
            reply_bytes: MAX_REPLY_BYTES as u32,
            memory_bytes,
            deadline_us,
            window_bytes: 0,
            port: 0,
            takes: Takes::Batches,
        }
    }

    /// That of a device which takes streams instead, with a window of N bytes.
    #[must_use]
    pub fn with_window(self, window_bytes: u64, port: u32) -> Self {
        Self { window_bytes, port, ..self }
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.batch_bytes.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.reply_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.memory_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.deadline_us.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.window_bytes.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.port.to_le_bytes());
        bytes[44] = match self.takes {
            Takes::Batches => 0,
            Takes::CudaPrograms => 1,
        };
        bytes
    }

    /// Reads it.
    ///
    /// # Errors
    /// When it is not that of this device, or of another version.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut input = Input::new(bytes, 0);
        if input.take(4)? != MAGIC {
            return Err(Malformed { offset: 0, what: "this is another device's configuration" });
        }
        let version = input.u16()?;
        if version != VERSION {
            return Err(Malformed { offset: 4, what: "the device has another version of the protocol" });
        }
        input.zero16()?;
        let config = Self {
            version,
            batch_bytes: input.u32()?,
            reply_bytes: input.u32()?,
            memory_bytes: input.u64()?,
            deadline_us: input.u64()?,
            window_bytes: input.u64()?,
            port: input.u32()?,
            takes: match input.u32()? {
                0 => Takes::Batches,
                1 => Takes::CudaPrograms,
                _ => return Err(Malformed { offset: 44, what: "the device takes what is not known" }),
            },
        };
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_recognised() {
        let config = Config::new(1 << 30, 2_000_000);
        let bytes = config.encode();
        assert_eq!(Config::decode(&bytes), Ok(config));
        let window = config.with_window(64 << 20, 1024);
        assert_eq!(Config::decode(&window.encode()), Ok(window));
        let cuda = Config { takes: Takes::CudaPrograms, ..window };
        assert_eq!(Config::decode(&cuda.encode()), Ok(cuda));
        for (at, what) in [(0, "another device"), (4, "another version"), (6, "reserved"), (44, "not known")]
        {
            let mut other = bytes;
            other[at] ^= 2;
            assert!(Config::decode(&other).unwrap_err().what.contains(what));
        }
        assert!(Config::decode(&bytes[..47]).is_err());
    }
}
