//! Writes a recording while its session runs.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{ASKS, MAGIC, event, name};
use crate::orders::Order;
use crate::wire::{Header, own};

/// The most bytes of a recording: it ends then.
const MOST: u64 = 1 << 30;
/// Of what is longer the front alone is kept, but of images, which have no bytes of the program's data.
const LONG: usize = 8 << 10;
/// The same of copies, whose bytes are the program's.
const COPY: usize = 512;
/// The same of answers.
const REPLY: usize = 64;

/// Writes a session's events to a file, in the order in which they end.
#[derive(Debug)]
pub struct Recorder {
    file: Mutex<State>,
    lanes: AtomicU64,
}

#[derive(Debug)]
struct State {
    file: File,
    names: HashMap<u16, u64>,
    written: u64,
    has_ended: bool,
}

/// Appends a number.
pub(super) fn put(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

/// Appends bytes, or the front of them.
fn put_part(to: &mut Vec<u8>, bytes: &[u8], most: usize) {
    let kept = if bytes.len() <= most { bytes } else { &bytes[..most] };
    put(to, bytes.len() as u64);
    put(to, kept.len() as u64);
    to.extend_from_slice(kept);
    if kept.len() < bytes.len() {
        to.extend_from_slice(&crc32fast::hash(bytes).to_le_bytes());
    }
}

/// How much is kept of what comes with a call.
fn most(number: u16) -> usize {
    match name(number) {
        _ if number == own::IMAGE => usize::MAX,
        Some(name) if name.starts_with("cuMemcpy") => COPY,
        _ => LONG,
    }
}

impl Recorder {
    /// Begins a recording.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn new(mut file: File) -> io::Result<Self> {
        file.write_all(&MAGIC)?;
        let state = State { file, names: HashMap::new(), written: MAGIC.len() as u64, has_ended: false };
        Ok(Self { file: Mutex::new(state), lanes: AtomicU64::new(0) })
    }

    /// A number for a lane.
    pub(crate) fn lane(&self) -> u64 {
        self.lanes.fetch_add(1, Ordering::Relaxed)
    }

    /// A call has been made; of one whose answer is waited for, the result and what is returned.
    pub(crate) fn call(
        &self,
        lane: u64,
        header: Header,
        [payload, bulk]: [&[u8]; 2],
        (code, reply): (u32, &[u8]),
    ) {
        let Some(name) = name(header.call) else { return };
        let mut state = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = Vec::with_capacity(256);
        let next = state.names.len() as u64;
        let id = *state.names.entry(header.call).or_insert(next);
        if id == next {
            bytes.push(event::NAME);
            put(&mut bytes, name.len() as u64);
            bytes.extend_from_slice(name.as_bytes());
        }
        bytes.push(event::CALL);
        for number in [lane, header.ticket, id, if header.asks { ASKS } else { 0 }] {
            put(&mut bytes, number);
        }
        put_part(&mut bytes, payload, most(header.call));
        put_part(&mut bytes, bulk, 0);
        if header.asks {
            put(&mut bytes, code.into());
            put_part(&mut bytes, reply, REPLY);
        }
        state.write(&bytes);
    }

    /// An order has come over the connection.
    pub(crate) fn order(&self, order: Order, more: &[u8]) {
        let mut bytes = vec![event::ORDER];
        order.iter().for_each(|word| put(&mut bytes, *word));
        put_part(&mut bytes, more, usize::MAX);
        self.file.lock().unwrap_or_else(PoisonError::into_inner).write(&bytes);
    }
}

impl State {
    /// An event is written whole: what a worker that is killed leaves can be read.
    fn write(&mut self, bytes: &[u8]) {
        if self.has_ended {
            return;
        }
        self.written += bytes.len() as u64;
        let result = if self.written > MOST {
            Err(io::Error::other(format!("it has {MOST} bytes, which is the most")))
        } else {
            self.file.write_all(bytes)
        };
        if let Err(error) = result {
            tracing::warn!(%error, "the recording of a CUDA program ends");
            self.has_ended = true;
        }
    }
}
