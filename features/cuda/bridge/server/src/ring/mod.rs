//! A lane in memory that both processes have: a ring of requests, and beside it places for answers.
//!
//! The program writes frames behind `head`, the server takes them up to it and moves `tail` when a call is made, so that bytes which go with
//! a call are used where they are. Answers go into [`PLACES`] places in turn. Who finds nothing looks on for a while, then sleeps: on a word of
//! the memory (a futex), or, where the two are of different systems, until a byte comes over a stream. The other side may write anything at any
//! time: what it wrote is copied before it is looked at, and where the program's bytes are only passed on to the driver, they are never looked at.

#[cfg_attr(loom, path = "loom.rs")]
mod sys;
mod wait;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};

use crate::sync::Ordering;
use crate::wire::{Answer, Header, Malformed, PAYLOAD};
use sys::{Memory, Wake};
use wait::{Awaited, SLEEP};

/// Bytes of requests.
const RING: usize = 8 << 20;
/// The same where there is little room: two of the largest frames go into it.
const SMALL_RING: usize = (2 << 20) + (64 << 10);
/// How many answers may be on their way.
pub const PLACES: usize = 4;
/// Bytes of a place for an answer: its head, and a payload.
const PLACE: usize = (64 + PAYLOAD).next_multiple_of(4096);
/// Of the ring's bytes the server takes one in so many before it says so, where there are more.
const TELL: u64 = 16;
const HEADS: usize = 4096;
/// How long a lane may be, largest first.
pub const SIZES: [u64; 2] =
    [(HEADS + RING + PLACES * PLACE) as u64, (HEADS + SMALL_RING + PLACES * PLACE) as u64];
/// Copies of more bytes than this go past the caches: they would push their own beginning out.
const CACHED: usize = 4 << 20;
/// Frames begin at such places.
const ALIGN: usize = 16;
/// The length of a frame that stands for the rest of the ring.
const SKIP: u32 = u32::MAX;
/// Bytes of a frame with bytes for the driver that are copied: what is before those.
pub const FRONT: usize = 32;

// Where the words are, each in a line of its own.
const HEAD: usize = 0;
const TAIL: usize = 128;
const SERVER_SLEEPS: usize = 256;
const CLIENT_SLEEPS: usize = 384;
const CLOSED: usize = 512;

/// The program's side.
#[derive(Debug)]
pub struct Near {
    memory: Memory,
    head: u64,
    /// How far the server had come when that was looked at.
    tail: u64,
    asked: u64,
    answered: u64,
}

impl Near {
    /// A lane, and the file that the server maps.
    ///
    /// # Errors
    /// When the system has no memory for it.
    pub fn make() -> io::Result<(Self, OwnedFd)> {
        let file = memfd_create("vm-bridge-lane", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, SIZES[0])?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::over(Memory::map(&file, 0, SIZES[0] as usize, Wake::Futex)?), file))
    }

    /// A lane in a part of a window, which has one of [`SIZES`]. `None` when it does not begin with `mark`. Before it is used it is told
    /// how its sides [wake](Self::wake_by) each other.
    ///
    /// # Errors
    /// When it can't be mapped.
    pub fn within(window: impl AsFd, offset: u64, len: u64, mark: u64) -> io::Result<Option<Self>> {
        let memory = Memory::map(window, offset, len as usize, Wake::Futex)?;
        if memory.long(HEAD).load(Ordering::SeqCst) != mark {
            return Ok(None);
        }
        // Somebody else may have had it.
        memory.write(0, &[0; HEADS]);
        for number in 0..PLACES as u64 {
            memory.long(memory.place(number)).store(0, Ordering::SeqCst);
        }
        Ok(Some(Self::over(memory)))
    }

    /// Who sleeps is woken over this stream, whose other end the server has.
    pub fn wake_by(&mut self, stream: UnixStream) {
        self.memory.wake = Wake::Stream(stream);
    }

    fn over(memory: Memory) -> Self {
        Self { memory, head: 0, tail: 0, asked: 0, answered: 0 }
    }

    /// Ends the lane, which must be dropped then. Where it lies in a window: the stream, which ends when the server does not use the memory any more.
    #[must_use]
    pub fn close(&mut self) -> Option<UnixStream> {
        self.say_closed();
        match std::mem::replace(&mut self.memory.wake, Wake::Futex) {
            Wake::Futex => None,
            Wake::Stream(stream) => Some(stream),
        }
    }

    fn say_closed(&self) {
        self.memory.word(CLOSED).store(1, Ordering::SeqCst);
        self.memory.wake(SERVER_SLEEPS);
    }

    /// Sends a request, whose payload is in two parts. `is_gone` says whether the server has ended.
    ///
    /// # Errors
    /// When it has.
    pub fn send(&mut self, header: Header, parts: [&[u8]; 2], is_gone: impl Fn() -> bool) -> io::Result<()> {
        let len = (Header::SIZE + parts[0].len() + parts[1].len()).next_multiple_of(ALIGN);
        let ring = self.memory.ring();
        if len > ring / 2 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = (self.head % ring as u64) as usize;
        let skipped = if ring - at < len { ring - at } else { 0 };
        let end = self.head + (skipped + len) as u64;
        // The server's word is looked at only where there may be no room: it is in another processor's cache.
        while end.wrapping_sub(self.tail) > ring as u64 {
            let before = self.tail;
            let moved = self.memory.wait(CLIENT_SLEEPS, Awaited::Peer, || {
                self.memory.long(TAIL).load(Ordering::Acquire) != before
            });
            self.tail = self.memory.long(TAIL).load(Ordering::Acquire);
            if !moved && (self.memory.hung_up() || is_gone()) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        let mut from = HEADS + at;
        if skipped > 0 {
            self.memory.write(from, &SKIP.to_ne_bytes());
            from = HEADS;
        }
        self.memory.write(from, &header.to_bytes());
        from += Header::SIZE;
        for part in parts {
            self.memory.write(from, part);
            from += part.len();
        }
        self.asked += u64::from(header.asks);
        self.head = end;
        self.memory.long(HEAD).store(end, Ordering::Release);
        self.memory.wake(SERVER_SLEEPS);
        Ok(())
    }

    /// The next answer of those asked for, within a time if there is one.
    ///
    /// # Errors
    /// When the server has ended, or is late.
    pub fn receive(
        &mut self,
        reply: &mut Vec<u8>,
        timeout: Option<Duration>,
        is_gone: impl Fn() -> bool,
    ) -> io::Result<u32> {
        let (at, answer) = self.await_answer(timeout, is_gone)?;
        self.memory.read_to(at + 64, answer.len as usize, reply);
        Ok(answer.code)
    }

    /// As [`receive`](Self::receive), with the payload, or as much of it as has room, in `reply`, which is a part of `whole` bytes.
    ///
    /// # Errors
    /// As there.
    pub fn receive_in(
        &mut self,
        reply: &mut [u8],
        whole: usize,
        timeout: Option<Duration>,
        is_gone: impl Fn() -> bool,
    ) -> io::Result<u32> {
        let (at, answer) = self.await_answer(timeout, is_gone)?;
        let len = reply.len().min(answer.len as usize);
        let (at, reply) = (at + 64, &mut reply[..len]);
        if whole > CACHED {
            self.memory.read_past_caches(at, reply)
        } else {
            self.memory.read(at, reply)
        }
        Ok(answer.code)
    }

    /// Waits for the next answer: where it is.
    fn await_answer(
        &mut self,
        timeout: Option<Duration>,
        is_gone: impl Fn() -> bool,
    ) -> io::Result<(usize, Answer)> {
        let at = self.memory.place(self.answered);
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let number = self.answered + 1;
        // What has no end waits for the device.
        let awaited = if until.is_none() { Awaited::Device } else { Awaited::Peer };
        let has_come = || self.memory.long(at).load(Ordering::Acquire) == number;
        while !self.memory.wait(CLIENT_SLEEPS, awaited, has_come) {
            // An answer that was given before the server ended counts.
            let gone = self.memory.hung_up() || is_gone();
            if gone && self.memory.long(at).load(Ordering::Acquire) != number {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        let mut head = [0; Answer::SIZE];
        self.memory.read(at + 8, &mut head);
        self.answered = number;
        Ok((at, Answer::from_bytes(head).map_err(io::Error::other)?))
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        self.say_closed();
    }
}

/// The server's side.
#[derive(Debug)]
pub struct Far {
    memory: Memory,
    /// How far the program had come when that was looked at.
    head: u64,
    tail: u64,
    /// What the program was told of that.
    told: u64,
    /// Where the request ends that was taken last.
    taken: u64,
    answered: u64,
    nap: Duration,
}

/// A request that was taken: its header, and where its bytes for the driver are, if there are any.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// What is before it.
    pub header: Header,
    /// Address and length.
    pub bulk: Option<(u64, usize)>,
}

impl Far {
    /// Maps a lane that a program made.
    ///
    /// # Errors
    /// When it is none.
    pub fn open(file: &OwnedFd) -> io::Result<Self> {
        if fstat(file)?.st_size as u64 != SIZES[0] {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Self::map(file, 0, SIZES[0], Wake::Futex)
    }

    /// Maps a lane that a program made in a part of a window.
    ///
    /// # Errors
    /// When it is none.
    pub fn within(window: &OwnedFd, offset: u64, len: u64, stream: UnixStream) -> io::Result<Self> {
        let end = offset.checked_add(len);
        let fits = end.is_some_and(|end| fstat(window).is_ok_and(|file| end <= file.st_size as u64));
        if !fits || !SIZES.contains(&len) || !offset.is_multiple_of(4096) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Self::map(window, offset, len, Wake::Stream(stream))
    }

    fn map(file: &OwnedFd, offset: u64, len: u64, wake: Wake) -> io::Result<Self> {
        if !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self::over(Memory::map(file, offset, len as usize, wake)?))
    }

    fn over(memory: Memory) -> Self {
        Self { memory, head: 0, tail: 0, told: 0, taken: 0, answered: 0, nap: SLEEP }
    }

    /// Returns the stream, which the program sees end, of a lane in a window. The lane must be dropped then.
    #[must_use]
    pub fn close(&mut self) -> Option<UnixStream> {
        match std::mem::replace(&mut self.memory.wake, Wake::Futex) {
            Wake::Futex => None,
            Wake::Stream(stream) => Some(stream),
        }
    }

    /// Sleeps no longer than so before it looks for the next time, once, whether all has ended.
    pub fn nap(&mut self, nap: Duration) {
        self.nap = nap;
    }

    /// The next request, its payload in `payload`, but for bytes for the driver, which stay. The last one's room is given back.
    ///
    /// # Errors
    /// When what is there is no request. `Ok(None)` when there are no more: the thread has ended, or the session has.
    pub fn take(
        &mut self,
        payload: &mut Vec<u8>,
        has_ended: impl Fn() -> bool,
    ) -> Result<Option<Taken>, Malformed> {
        let ring = self.memory.ring();
        self.tail = self.taken;
        loop {
            if self.tail == self.head || self.tail.wrapping_sub(self.told) > ring as u64 / TELL {
                self.told = self.tail;
                self.memory.long(TAIL).store(self.tail, Ordering::Release);
                self.memory.wake(CLIENT_SLEEPS);
                self.head = self.memory.long(HEAD).load(Ordering::Acquire);
            }
            while self.head == self.tail {
                // The end is read first: requests that were sent before it are still served.
                let ends = has_ended()
                    || self.memory.hung_up()
                    || self.memory.word(CLOSED).load(Ordering::Acquire) != 0;
                self.head = self.memory.long(HEAD).load(Ordering::Acquire);
                if self.head != self.tail {
                    break;
                }
                if ends {
                    return Ok(None);
                }
                let nap = std::mem::replace(&mut self.nap, SLEEP);
                self.memory.wait_for(SERVER_SLEEPS, Awaited::Peer, nap, || {
                    self.memory.long(HEAD).load(Ordering::Acquire) != self.tail
                        || self.memory.word(CLOSED).load(Ordering::Relaxed) != 0
                });
            }
            let head = self.head;
            let there = head.wrapping_sub(self.tail);
            let at = (self.tail % ring as u64) as usize;
            let mut bytes = [0; Header::SIZE];
            if there > ring as u64 || there < Header::SIZE as u64 || at + Header::SIZE > ring {
                return Err(Malformed);
            }
            self.memory.read(HEADS + at, &mut bytes);
            if bytes[..4] == SKIP.to_ne_bytes() {
                let rest = (ring - at) as u64;
                if at == 0 || there < rest {
                    return Err(Malformed);
                }
                self.tail += rest;
                continue;
            }
            let header = Header::from_bytes(bytes)?;
            let len = (Header::SIZE + header.len as usize).next_multiple_of(ALIGN);
            if len as u64 > there || at + len > ring {
                return Err(Malformed);
            }
            let copied = if header.is_bulk { FRONT.min(header.len as usize) } else { header.len as usize };
            self.memory.read_to(HEADS + at + Header::SIZE, copied, payload);
            self.taken = self.tail + len as u64;
            if self.taken.wrapping_add(Header::SIZE as u64) <= head {
                // The next one comes from the program's processor while this one is with the driver.
                self.memory.fetch(HEADS + (self.taken % ring as u64) as usize);
            }
            let place = self.memory.address(HEADS + at + Header::SIZE + copied);
            let bulk = header.is_bulk.then_some((place, header.len as usize - copied));
            return Ok(Some(Taken { header, bulk }));
        }
    }

    /// Where the payload of the next answer goes: room for [`PAYLOAD`] bytes.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.memory.address(self.memory.place(self.answered) + 64)
    }

    /// The memory of requests and answers, and its length in bytes.
    #[must_use]
    pub fn pinnable(&self) -> (u64, u64) {
        (self.memory.address(HEADS), (self.memory.ring() + PLACES * PLACE) as u64)
    }

    /// Gives an answer.
    pub fn answer(&mut self, code: u32, payload: &[u8]) {
        self.memory.write(self.memory.place(self.answered) + 64, payload);
        self.answer_there(code, payload.len().min(PAYLOAD));
    }

    /// Gives an answer of so many bytes that are in their [room](Self::room) already.
    pub fn answer_there(&mut self, code: u32, len: usize) {
        let at = self.memory.place(self.answered);
        self.answered += 1;
        self.memory.write(at + 8, &Answer { len: len as u32, code }.to_bytes());
        self.memory.long(at).store(self.answered, Ordering::Release);
        self.memory.wake(CLIENT_SLEEPS);
    }
}

#[cfg(all(test, loom))]
mod interleavings;
#[cfg(all(test, not(loom)))]
mod tests;
