//! What crosses: frames, and values in them.
//!
//! A request is its [`Header`] and a payload, an answer a [`Answer`] and a payload, all in the machine's own order of bytes. Of a function that
//! is packed by its table the payload has a word per parameter (a number, a handle, a string's length, or whether a pointer is there), then
//! what is behind pointers that are read, each in whole words. An answer has what was written, in order.

pub mod facts;
pub mod image;
pub mod node;
pub mod nvml;
pub mod preamble;
pub mod strided;

use thiserror::Error;

/// What both sides say first. It changes with what is written.
pub const VERSION: u32 = 7;
/// The most bytes of a payload.
pub const PAYLOAD: usize = (1 << 20) + 4096;
/// The most bytes of a program's memory that go with one call.
pub const CHUNK: usize = 1 << 20;
/// The most bytes of an image: of a module, or of a library.
pub const IMAGE: usize = 2 << 30;
/// The most values behind one pointer.
pub const ITEMS: usize = 1 << 14;
/// The most bytes of a log.
pub const LOG: usize = 256 << 10;
/// The length of a string that is not there.
pub const NOTHING: u64 = u64::MAX;
/// Addresses where memory of the host is the same in both processes: a range that neither uses otherwise.
pub const WINDOW: std::ops::Range<u64> = 0x2000_0000_0000..0x2400_0000_0000;

/// Results of the driver that the bridge itself gives.
pub mod code {
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: u32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_NOT_INITIALIZED`.
    pub const NOT_INITIALIZED: u32 = 3;
    /// `CUDA_ERROR_DEVICE_UNAVAILABLE`: the server is gone.
    pub const UNAVAILABLE: u32 = 46;
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: u32 = 100;
    /// `CUDA_ERROR_INVALID_IMAGE`.
    pub const INVALID_IMAGE: u32 = 200;
    /// `CUDA_ERROR_INVALID_CONTEXT`.
    pub const INVALID_CONTEXT: u32 = 201;
    /// `CUDA_ERROR_FILE_NOT_FOUND`.
    pub const FILE_NOT_FOUND: u32 = 301;
    /// `CUDA_ERROR_OPERATING_SYSTEM`.
    pub const OPERATING_SYSTEM: u32 = 304;
    /// `CUDA_ERROR_INVALID_HANDLE`.
    pub const INVALID_HANDLE: u32 = 400;
    /// `CUDA_ERROR_NOT_FOUND`.
    pub const NOT_FOUND: u32 = 500;
    /// `CUDA_ERROR_MAP_FAILED`.
    pub const MAP_FAILED: u32 = 205;
    /// `CUDA_ERROR_NOT_READY`.
    pub const NOT_READY: u32 = 600;
    /// `CUDA_ERROR_LAUNCH_TIMEOUT`: what the program has on the device makes no progress.
    pub const LAUNCH_TIMEOUT: u32 = 702;
    /// `CUDA_ERROR_NOT_PERMITTED`.
    pub const NOT_PERMITTED: u32 = 800;
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u32 = 801;
    /// `CUDA_ERROR_TIMEOUT`: what is asked of a device is not answered.
    pub const TIMEOUT: u32 = 909;
}

/// Calls of the bridge's own, with numbers behind those of the driver's functions.
pub mod own {
    /// Where a function's parameters are: pairs of offset and size.
    pub const LAYOUT: u16 = 0x8000;
    /// A part of an image, which the next load takes.
    pub const IMAGE: u16 = 0x8001;
    /// A part of what the linker made: where it begins, and how long it is.
    pub const LINKED: u16 = 0x8002;
    /// Where the multiprocessors of the current context's device are: two arrays of bytes, one behind the other.
    pub const TOPOLOGY: u16 = 0x8003;
    /// What was printed for the program: a descriptor (1 or 2), how many bytes, and these; nothing where there is nothing more.
    pub const PRINTED: u16 = 0x8004;
}

/// What is before a request.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Header {
    /// Bytes of the payload.
    pub len: u32,
    /// The function's number, or one of [`own`].
    pub call: u16,
    /// Is an answer waited for?
    pub asks: bool,
    /// Does it end with bytes for the driver alone, behind [`ring::FRONT`](crate::ring::FRONT)?
    pub is_bulk: bool,
    /// Its place among all calls.
    pub ticket: u64,
}

impl Header {
    /// Bytes of one.
    pub const SIZE: usize = 16;

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..4].copy_from_slice(&self.len.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.call.to_ne_bytes());
        bytes[6] = self.asks.into();
        bytes[7] = self.is_bulk.into();
        bytes[8..].copy_from_slice(&self.ticket.to_ne_bytes());
        bytes
    }

    /// As it came.
    ///
    /// # Errors
    /// When the payload is too long.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Result<Self, Malformed> {
        let [a, b, c, d, e, f, asks, bulk, ticket @ ..] = bytes;
        let header = Self {
            len: u32::from_ne_bytes([a, b, c, d]),
            call: u16::from_ne_bytes([e, f]),
            asks: asks != 0,
            is_bulk: bulk != 0,
            ticket: u64::from_ne_bytes(ticket),
        };
        if header.len as usize > PAYLOAD { Err(Malformed) } else { Ok(header) }
    }
}

/// What is before an answer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Answer {
    /// Bytes of the payload.
    pub len: u32,
    /// The driver's result.
    pub code: u32,
}

impl Answer {
    /// In the result: something was printed for the program, which may ask for it.
    pub const PRINTED: u32 = 1 << 31;
    /// Bytes of one.
    pub const SIZE: usize = 8;

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..4].copy_from_slice(&self.len.to_ne_bytes());
        bytes[4..].copy_from_slice(&self.code.to_ne_bytes());
        bytes
    }

    /// As it came.
    ///
    /// # Errors
    /// When the payload is too long.
    pub fn from_bytes([a, b, c, d, e, f, g, h]: [u8; Self::SIZE]) -> Result<Self, Malformed> {
        let answer = Self { len: u32::from_ne_bytes([a, b, c, d]), code: u32::from_ne_bytes([e, f, g, h]) };
        if answer.len as usize > PAYLOAD { Err(Malformed) } else { Ok(answer) }
    }
}

/// What came is not what is written.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("the other side of the bridge sent what is no frame; both must be of one version")]
pub struct Malformed;

/// Appends a word.
pub fn put(to: &mut Vec<u8>, word: u64) {
    to.extend_from_slice(&word.to_ne_bytes());
}

/// Appends bytes, and fills the last word.
pub fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend_from_slice(bytes);
    to.resize(to.len().next_multiple_of(8), 0);
}

/// Reads a payload from its front.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next word.
    ///
    /// # Errors
    /// When there is none.
    pub fn word(&mut self) -> Result<u64, Malformed> {
        let (word, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(u64::from_ne_bytes(*word))
    }

    /// The next bytes, of whole words.
    ///
    /// # Errors
    /// When there are not as many.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let padded =
            len.checked_next_multiple_of(8).filter(|padded| *padded <= self.0.len()).ok_or(Malformed)?;
        let (bytes, rest) = self.0.split_at(padded);
        self.0 = rest;
        Ok(&bytes[..len])
    }

    /// The last bytes, which need not be whole words: they go as they are in the program's memory.
    ///
    /// # Errors
    /// When there are not as many.
    pub fn last(self, len: usize) -> Result<&'a [u8], Malformed> {
        self.0.get(..len).ok_or(Malformed)
    }
}

/// What goes over the connection itself, beside lanes: words and perhaps a file, each answered with a word, a result.
pub mod control {
    use std::time::Duration;

    /// Words of an order.
    pub const WORDS: usize = 4;
    /// Bytes of one.
    pub const SIZE: usize = 8 * WORDS;
    /// The version.
    pub const HELLO: u64 = 0;
    /// A lane on a stream, whose other end is the file.
    pub const LANE: u64 = 1;
    /// An address, a length and an offset: memory that both have there, which is that part of the file.
    pub const WINDOW: u64 = 2;
    /// A lane in memory, which is the file; or, with a length and an offset, that part of the file, where a second file is a stream that wakes who
    /// sleeps.
    pub const RING: u64 = 3;
    /// Where the program's functions are called that streams call: the other end of a stream is the file. On it come [`CALL`] words (what it is,
    /// function, argument, stream, status), each answered with a word when it has returned.
    pub const CALLBACKS: u64 = 4;
    /// A variable of the program's environment that the driver reads when it starts: which of [`VARIABLES`], and the length of its value, which follows.
    pub const VARIABLE: u64 = 5;
    /// A length, and 1 where it is for a lane: allocates a part of the window, filled with zeros, for this session alone. Behind a 0 come two words: where the part begins,
    /// and a number that is written there. Only sessions whose connection carries no files, and that have answered a [`CHALLENGE`], may.
    pub const TAKE: u64 = 6;
    /// Where a part of the window begins: frees it. The gateway passes the order to the worker with the part's length as the second word, and the worker answers
    /// [`NOT_READY`](super::code::NOT_READY) while it maps any of the part.
    pub const GIVE: u64 = 7;
    /// What the server knows of its driver and devices, without a context: behind a 0 come a length and so many bytes, which are
    /// [`Facts`](super::facts::Facts).
    pub const FACTS: u64 = 8;
    /// A device's UUID in two words, and 1 where the session is for questions alone, as with [`NVML`]: behind a 0 come [`MEMORY_WORDS`], its memory, how much of it is free, and 1 where this session has a primary
    /// context of it.
    pub const MEMORY: u64 = 9;
    /// Two words of what the program was given for memory that it exported as a file: it has closed that.
    pub const FORGET: u64 = 10;
    /// A length: a [`Question`](super::nvml::Question) of so many bytes for NVIDIA's NVML follows. Behind a 0 come a length and so many bytes, its answer. A session
    /// that has asked, and has no lane, ends when nothing comes for [`QUIET`].
    pub const NVML: u64 = 11;
    /// How long that is.
    pub const QUIET: Duration = Duration::from_secs(10);
    /// Asks for a challenge: behind a 0 comes where in the window the server has written 16 random bytes.
    pub const CHALLENGE: u64 = 12;
    /// Those bytes as two words, which prove that the program maps the window. A challenge can be answered once.
    pub const PROVE: u64 = 13;
    /// Words that are answered to [`MEMORY`].
    pub const MEMORY_WORDS: usize = 3;
    /// In a word that is not asked for, the last that comes: the session has ended, and what is below this is why, a result for all calls from then on.
    pub const ENDED: u64 = 1 << 63;
    /// These variables.
    pub const VARIABLES: [&str; 4] =
        ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"];
    /// The most bytes of a value.
    pub const VALUE: usize = 4096;
    /// Words of a call.
    pub const CALL: usize = 5;
    /// A function with its argument.
    pub const FUNCTION: u64 = 0;
    /// One that gets its stream and the status as well.
    pub const CALLBACK: u64 = 1;
    /// Memory of the program that is read, no more than [`CHUNK`](super::CHUNK): an address, a width, a pitch and rows. Behind a 0 its bytes are answered; what is
    /// not 0 says that the program does not have it.
    pub const FETCH: u64 = 2;
    /// Memory of the program that is written: the same, and the bytes.
    pub const STORE: u64 = 3;
    /// What was printed for the program: a descriptor (1 or 2), how many bytes, no more than [`CHUNK`](super::CHUNK), two zeros, and the bytes.
    pub const PRINT: u64 = 4;
}
