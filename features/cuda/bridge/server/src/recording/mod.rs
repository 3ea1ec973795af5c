//! Recordings of sessions: what a program asked, and what was answered.
//!
//! A recording is [`MAGIC`] and events, of numbers (LEB128) and [`Part`]s. Functions are named, so a recording holds where the table of functions has
//! others before them. Of what is long the front is kept, with the length and the CRC-32 of all: images of kernels are whole, copies are not.

mod kernels;
mod read;
mod replay;
#[cfg(all(test, not(loom)))]
mod tests;
mod write;

use thiserror::Error;

pub use kernels::Parameters;
pub use read::BadRecording;
pub use replay::{Difference, Report, replay};
pub use write::Recorder;

use crate::orders::Order;
use crate::wire::own;

/// What a recording begins with; its last byte is the form.
pub const MAGIC: [u8; 8] = *b"vmbridg\x01";

/// What an event is.
mod event {
    pub(super) const NAME: u8 = 0;
    pub(super) const CALL: u8 = 1;
    pub(super) const ORDER: u8 = 2;
}

/// Is its answer waited for?
const ASKS: u64 = 1;

/// Bytes of which the front is kept.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Part {
    /// How many there were.
    pub len: usize,
    /// The front of them, or all.
    pub kept: Vec<u8>,
    /// The CRC-32 of all, where they are not all kept.
    pub crc: u32,
}

/// A call of the program's.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Call {
    /// Which lane it came by.
    pub lane: u64,
    /// Its place among all.
    pub ticket: u64,
    /// The function's number, or one of the bridge's own.
    pub number: u16,
    /// What came with it.
    pub payload: Part,
    /// Bytes for the driver that came behind that.
    pub bulk: Part,
    /// What was answered, where an answer was waited for.
    pub answer: Option<Answer>,
}

/// An answer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Answer {
    /// The result.
    pub code: u32,
    /// What was returned.
    pub reply: Part,
}

/// A session as it was recorded.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Recording {
    /// Orders over the connection, with what followed them.
    pub orders: Vec<(Order, Vec<u8>)>,
    /// Calls in the order of their tickets.
    pub calls: Vec<Call>,
}

/// What a function's number is called; the bridge's own calls have names, too.
fn name(number: u16) -> Option<&'static str> {
    match number {
        own::LAYOUT => Some("bridge:layout"),
        own::IMAGE => Some("bridge:image"),
        own::LINKED => Some("bridge:linked"),
        own::TOPOLOGY => Some("bridge:topology"),
        _ => vm_cuda_api::FUNCTIONS.get(usize::from(number)).map(|function| function.name.as_str()),
    }
}

fn number(of: &str) -> Option<u16> {
    let own = [own::LAYOUT, own::IMAGE, own::LINKED, own::TOPOLOGY]
        .into_iter()
        .find(|number| name(*number) == Some(of));
    own.or_else(|| u16::try_from(vm_cuda_api::number(of)?).ok())
}

/// Why a recording can't be replayed.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The connection to the server failed.
    #[error("call {call}, {function}: the server ended or did not answer: {source}; its log says why")]
    Server {
        /// The call's place in the recording.
        call: usize,
        /// Its function.
        function: &'static str,
        /// What failed.
        source: std::io::Error,
    },
    /// The session did not begin.
    #[error("the server does not begin a session: {0}")]
    Begin(std::io::Error),
}

/// Reads a recording as a fuzzer made it.
pub fn fuzz(bytes: &[u8]) {
    // What it makes of it is a matter of tests.
    let _ = Recording::read(bytes);
}
