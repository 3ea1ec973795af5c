//! A lane's memory as loom checks it: words are loom's, and each line of bytes is a cell that one side uses at a time.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::sync::{Arc, Condvar, Mutex};

use super::{ALIGN, CLIENT_SLEEPS, CLOSED, HEAD, HEADS, PLACES, SERVER_SLEEPS, TAIL};

/// Bytes of a place for an answer.
const PLACE: usize = 128;

/// As the real one's; who sleeps is woken by what the memory has.
#[derive(Debug)]
pub(super) enum Wake {
    Futex,
    #[allow(dead_code)]
    Stream(UnixStream),
}

/// A word, and who sleeps on it.
#[derive(Debug, Default)]
struct Word {
    value: AtomicU32,
    /// Bytes that nobody has received yet.
    bytes: Mutex<usize>,
    changed: Condvar,
}

#[derive(Debug)]
struct Shared {
    head: AtomicU64,
    tail: AtomicU64,
    answers: [AtomicU64; PLACES],
    server_sleeps: Word,
    client_sleeps: Word,
    closed: Word,
    ring: usize,
    lines: Vec<UnsafeCell<[u8; ALIGN]>>,
    by_bytes: bool,
}

// SAFETY: loom checks that one side at a time is at a line, which is what is tested.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

#[derive(Debug)]
pub(super) struct Memory {
    shared: Arc<Shared>,
    pub(super) wake: Wake,
}

impl Memory {
    /// Both sides' view of a ring of so many bytes, whose sleepers are woken as by a stream, or as by a futex.
    pub(super) fn pair(ring: usize, by_bytes: bool) -> [Self; 2] {
        let lines = (ring + PLACES * PLACE) / ALIGN;
        let shared = Arc::new(Shared {
            head: AtomicU64::default(),
            tail: AtomicU64::default(),
            answers: Default::default(),
            server_sleeps: Word::default(),
            client_sleeps: Word::default(),
            closed: Word::default(),
            ring,
            lines: (0..lines).map(|_| UnsafeCell::new([0; ALIGN])).collect(),
            by_bytes,
        });
        [(); 2].map(|()| Self { shared: Arc::clone(&shared), wake: Wake::Futex })
    }

    pub(super) fn map(_: impl AsFd, _: u64, _: usize, _: Wake) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn ring(&self) -> usize {
        self.shared.ring
    }

    pub(super) fn place(&self, number: u64) -> usize {
        HEADS + self.ring() + (number % PLACES as u64) as usize * PLACE
    }

    pub(super) fn address(&self, at: usize) -> u64 {
        at as u64
    }

    pub(super) fn hung_up(&self) -> bool {
        false
    }

    pub(super) fn long(&self, at: usize) -> &AtomicU64 {
        match at {
            HEAD => &self.shared.head,
            TAIL => &self.shared.tail,
            _ => &self.shared.answers[(at - HEADS - self.ring()) / PLACE],
        }
    }

    fn sleeper(&self, at: usize) -> &Word {
        match at {
            SERVER_SLEEPS => &self.shared.server_sleeps,
            CLIENT_SLEEPS => &self.shared.client_sleeps,
            CLOSED => &self.shared.closed,
            _ => unreachable!("no word is at {at}"),
        }
    }

    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        &self.sleeper(at).value
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        for (at, byte) in (at - HEADS..).zip(bytes) {
            // SAFETY: loom checks that nobody else is here.
            self.shared.lines[at / ALIGN].with_mut(|line| unsafe { (*line)[at % ALIGN] = *byte });
        }
    }

    pub(super) fn read(&self, at: usize, to: &mut [u8]) {
        for (at, byte) in (at - HEADS..).zip(to) {
            // SAFETY: as above.
            *byte = self.shared.lines[at / ALIGN].with(|line| unsafe { (*line)[at % ALIGN] });
        }
    }

    pub(super) fn read_past_caches(&self, at: usize, to: &mut [u8]) {
        self.read(at, to);
    }

    pub(super) fn read_to(&self, at: usize, len: usize, to: &mut Vec<u8>) {
        to.clear();
        to.resize(len, 0);
        self.read(at, to);
    }

    pub(super) fn fetch(&self, _: usize) {}

    pub(super) fn rouse(&self, at: usize) {
        let word = self.sleeper(at);
        *word.bytes.lock().unwrap() += 1;
        word.changed.notify_one();
    }

    /// As the real one, without an end: what nobody wakes is a deadlock, which loom reports.
    pub(super) fn doze(&self, at: usize, _: Duration) {
        let word = self.sleeper(at);
        let mut bytes = word.bytes.lock().unwrap();
        if self.shared.by_bytes {
            while *bytes == 0 {
                bytes = word.changed.wait(bytes).unwrap();
            }
            *bytes = 0;
        } else if word.value.load(loom::sync::atomic::Ordering::SeqCst) == 1 {
            drop(word.changed.wait(bytes).unwrap());
        }
    }
}
