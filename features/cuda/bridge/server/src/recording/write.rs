//! Writes a recording while its session runs.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{ASKS, Answer, Call, MAGIC, Part, Recording, event, name};
use crate::orders::Order;
use crate::wire::{Header, own};

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
    names: Names,
    written: u64,
    limit: u64,
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

/// Bytes of which the front is kept.
fn part(bytes: &[u8], most: usize) -> Part {
    let kept = bytes.get(..most).unwrap_or(bytes).to_vec();
    let crc = if kept.len() < bytes.len() { crc32fast::hash(bytes) } else { 0 };
    Part { len: bytes.len(), kept, crc }
}

fn put_part(to: &mut Vec<u8>, part: &Part) {
    put(to, part.len as u64);
    put(to, part.kept.len() as u64);
    to.extend_from_slice(&part.kept);
    if part.kept.len() < part.len {
        to.extend_from_slice(&part.crc.to_le_bytes());
    }
}

fn put_order(to: &mut Vec<u8>, order: Order, more: &[u8]) {
    to.push(event::ORDER);
    order.iter().for_each(|word| put(to, *word));
    put_part(to, &part(more, usize::MAX));
}

/// Numbers of functions, in the order in which they were named.
type Names = HashMap<u16, u64>;

/// Appends a call, before it its function's name where that is new; none of a function that has no name.
fn put_call(to: &mut Vec<u8>, names: &mut Names, call: &Call) {
    let Some(name) = name(call.number) else { return };
    let next = names.len() as u64;
    let id = *names.entry(call.number).or_insert(next);
    if id == next {
        to.push(event::NAME);
        put(to, name.len() as u64);
        to.extend_from_slice(name.as_bytes());
    }
    to.push(event::CALL);
    for number in [call.lane, call.ticket, id, if call.answer.is_some() { ASKS } else { 0 }] {
        put(to, number);
    }
    put_part(to, &call.payload);
    put_part(to, &call.bulk);
    if let Some(Answer { code, reply }) = &call.answer {
        put(to, (*code).into());
        put_part(to, reply);
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
    /// Begins a recording, which ends with the last event that is whole in `limit` bytes.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn new(mut file: File, limit: u64) -> io::Result<Self> {
        file.write_all(&MAGIC)?;
        let state = State { file, names: Names::new(), written: MAGIC.len() as u64, limit, has_ended: false };
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
        // What a kernel takes is all of it, so that another driver can have such kernels.
        let longest = if header.call == own::LAYOUT { LONG } else { REPLY };
        let call = Call {
            lane,
            ticket: header.ticket,
            number: header.call,
            payload: part(payload, most(header.call)),
            bulk: part(bulk, 0),
            answer: header.asks.then(|| Answer { code, reply: part(reply, longest) }),
        };
        let mut bytes = Vec::with_capacity(256);
        let mut state = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        put_call(&mut bytes, &mut state.names, &call);
        state.write(&bytes);
    }

    /// An order has come over the connection.
    pub(crate) fn order(&self, order: Order, more: &[u8]) {
        let mut bytes = Vec::new();
        put_order(&mut bytes, order, more);
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
        if self.written > self.limit {
            tracing::warn!("the recording of a CUDA program ends: it has its {} bytes", self.limit);
            self.has_ended = true;
        } else if let Err(error) = self.file.write_all(bytes) {
            tracing::warn!(%error, "the recording of a CUDA program ends");
            self.has_ended = true;
        }
    }
}

impl Recording {
    /// A recording of this, with no more than so many bytes of each part of an image.
    #[must_use]
    pub fn to_bytes(&self, images: usize) -> Vec<u8> {
        let (mut bytes, mut names) = (MAGIC.to_vec(), Names::new());
        self.orders.iter().for_each(|(order, more)| put_order(&mut bytes, *order, more));
        for call in &self.calls {
            if call.number == own::IMAGE && call.payload.kept.len() > images {
                let payload = if call.payload.kept.len() == call.payload.len {
                    part(&call.payload.kept, images)
                } else {
                    Part { kept: call.payload.kept[..images].to_vec(), ..call.payload }
                };
                put_call(&mut bytes, &mut names, &Call { payload, ..call.clone() });
            } else {
                put_call(&mut bytes, &mut names, call);
            }
        }
        bytes
    }
}
