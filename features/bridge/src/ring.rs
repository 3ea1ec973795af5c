//! A lane in memory that both processes have: a ring of requests, and beside it places for answers.
//!
//! The program writes frames behind `head`, the server takes them up to it and moves `tail` when a call is made, so that bytes which go with
//! a call are used where they are. Answers go into [`PLACES`] places in turn. Who finds nothing looks on for a while, then sleeps on a word of
//! the memory (a futex). The other side may write anything at any time: what it wrote is copied before it is looked at, and where the
//! program's bytes are only passed on to the driver, they are never looked at.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;

use crate::wire::{Answer, Header, Malformed, PAYLOAD};

/// Bytes of requests.
const RING: usize = 8 << 20;
/// How many answers may be on their way.
pub const PLACES: usize = 4;
/// Bytes of a place for an answer: its head, and a payload.
const PLACE: usize = (64 + PAYLOAD).next_multiple_of(4096);
/// How many bytes the server takes before it says so, where there are more.
const TELL: u64 = RING as u64 / 16;
const HEADS: usize = 4096;
/// All of it.
const SIZE: usize = HEADS + RING + PLACES * PLACE;
/// Frames begin at such places.
const ALIGN: usize = 16;
/// The length of a frame that stands for the rest of the ring.
const SKIP: u32 = u32::MAX;
/// Bytes of a frame with bytes for the driver that are copied: what is before those.
pub const FRONT: usize = 32;

/// How long each side looks on before it sleeps: briefly where the other one may wait for this processor.
static LOOK: LazyLock<Duration> = LazyLock::new(|| {
    const ENOUGH: usize = 4;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Duration::from_micros(if processors < ENOUGH { 5 } else { 50 })
});
/// How long it sleeps before it looks whether the other side is there.
const SLEEP: Duration = Duration::from_millis(100);

// Where the words are, each in a line of its own.
const HEAD: usize = 0;
const TAIL: usize = 128;
const SERVER_SLEEPS: usize = 256;
const CLIENT_SLEEPS: usize = 384;
const CLOSED: usize = 512;

/// The memory of a lane.
#[derive(Debug)]
struct Memory {
    base: *mut u8,
}

// SAFETY: it is used through atomics and copies alone.
unsafe impl Send for Memory {}

impl Memory {
    fn map(file: &OwnedFd) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping; no reference is made to what is in it but to atomics.
        let base = unsafe { mmap(std::ptr::null_mut(), SIZE, protection, MapFlags::SHARED, file, 0) }?;
        Ok(Self { base: base.cast() })
    }

    fn long(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the place is within the mapping and aligned; both sides use it as an atomic.
        unsafe { AtomicU64::from_ptr(self.base.wrapping_add(at).cast()) }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.wrapping_add(at).cast()) }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= SIZE);
        // SAFETY: it is within the mapping, which is not this side's memory otherwise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.wrapping_add(at), bytes.len()) };
    }

    /// Replaces what is in `to` by so many bytes.
    fn read_to(&self, at: usize, len: usize, to: &mut Vec<u8>) {
        assert!(at + len <= SIZE);
        to.clear();
        to.reserve(len);
        // SAFETY: it is within the mapping, and there is room for it; what the other side writes meanwhile may be seen in part.
        unsafe { std::ptr::copy_nonoverlapping(self.base.wrapping_add(at), to.as_mut_ptr(), len) };
        // SAFETY: they were just written.
        unsafe { to.set_len(len) };
    }

    fn read(&self, at: usize, to: &mut [u8]) {
        assert!(at + to.len() <= SIZE);
        // SAFETY: it is within the mapping; what the other side writes meanwhile may be seen in part.
        unsafe { std::ptr::copy_nonoverlapping(self.base.wrapping_add(at), to.as_mut_ptr(), to.len()) };
    }

    /// Wakes who sleeps on a word.
    fn wake(&self, at: usize) {
        fence(Ordering::SeqCst);
        let word = self.word(at);
        if word.load(Ordering::Relaxed) != 0 {
            word.store(0, Ordering::SeqCst);
            // Nobody to be woken is no failure.
            let _ = futex::wake(word, futex::Flags::empty(), 1);
        }
    }

    /// Waits until something is so: no longer than a while, at whose end it may still not be.
    fn wait(&self, sleeps: usize, mut is_so: impl FnMut() -> bool) -> bool {
        if is_so() {
            return true;
        }
        let until = Instant::now() + *LOOK;
        loop {
            for _ in 0..64 {
                if is_so() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if Instant::now() >= until {
                break;
            }
        }
        let word = self.word(sleeps);
        word.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !is_so()
            && let Ok(timeout) = SLEEP.try_into()
        {
            // Woken, interrupted or late: what is waited for is looked at again.
            let _ = futex::wait(word, futex::Flags::empty(), 1, Some(&timeout));
        }
        word.store(0, Ordering::SeqCst);
        is_so()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it is this mapping's own.
        let _ = unsafe { munmap(self.base.cast::<c_void>(), SIZE) };
    }
}

fn place(number: u64) -> usize {
    HEADS + RING + (number % PLACES as u64) as usize * PLACE
}

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
        ftruncate(&file, SIZE as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self { memory: Memory::map(&file)?, head: 0, tail: 0, asked: 0, answered: 0 }, file))
    }

    /// Sends a request, whose payload is in two parts. `is_gone` says whether the server has ended.
    ///
    /// # Errors
    /// When it has.
    pub fn send(&mut self, header: Header, parts: [&[u8]; 2], is_gone: impl Fn() -> bool) -> io::Result<()> {
        let len = (Header::SIZE + parts[0].len() + parts[1].len()).next_multiple_of(ALIGN);
        if len > RING / 2 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = self.head as usize % RING;
        let skipped = if RING - at < len { RING - at } else { 0 };
        let end = self.head + (skipped + len) as u64;
        // The server's word is looked at only where there may be no room: it is in another processor's cache.
        while end.wrapping_sub(self.tail) > RING as u64 {
            let before = self.tail;
            let moved =
                self.memory.wait(CLIENT_SLEEPS, || self.memory.long(TAIL).load(Ordering::Acquire) != before);
            self.tail = self.memory.long(TAIL).load(Ordering::Acquire);
            if !moved && is_gone() {
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

    /// As [`receive`](Self::receive), with the payload, or as much of it as has room, in `reply`.
    ///
    /// # Errors
    /// As there.
    pub fn receive_in(
        &mut self,
        reply: &mut [u8],
        timeout: Option<Duration>,
        is_gone: impl Fn() -> bool,
    ) -> io::Result<u32> {
        let (at, answer) = self.await_answer(timeout, is_gone)?;
        let len = reply.len().min(answer.len as usize);
        self.memory.read(at + 64, &mut reply[..len]);
        Ok(answer.code)
    }

    /// Waits for the next answer: where it is.
    fn await_answer(
        &mut self,
        timeout: Option<Duration>,
        is_gone: impl Fn() -> bool,
    ) -> io::Result<(usize, Answer)> {
        let at = place(self.answered);
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let number = self.answered + 1;
        while !self.memory.wait(CLIENT_SLEEPS, || self.memory.long(at).load(Ordering::Acquire) == number) {
            // An answer that was given before the server ended counts.
            if is_gone() && self.memory.long(at).load(Ordering::Acquire) != number {
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
        self.memory.word(CLOSED).store(1, Ordering::SeqCst);
        self.memory.wake(SERVER_SLEEPS);
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
        let sealed = fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
        if !sealed || fstat(file)?.st_size as usize != SIZE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { memory: Memory::map(file)?, head: 0, tail: 0, told: 0, taken: 0, answered: 0 })
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
        self.tail = self.taken;
        loop {
            if self.tail == self.head || self.tail.wrapping_sub(self.told) > TELL {
                self.told = self.tail;
                self.memory.long(TAIL).store(self.tail, Ordering::Release);
                self.memory.wake(CLIENT_SLEEPS);
                self.head = self.memory.long(HEAD).load(Ordering::Acquire);
            }
            while self.head == self.tail {
                if has_ended() || self.memory.word(CLOSED).load(Ordering::Acquire) != 0 {
                    return Ok(None);
                }
                self.memory.wait(SERVER_SLEEPS, || {
                    self.memory.long(HEAD).load(Ordering::Acquire) != self.tail
                        || self.memory.word(CLOSED).load(Ordering::Relaxed) != 0
                });
                self.head = self.memory.long(HEAD).load(Ordering::Acquire);
            }
            let head = self.head;
            let there = head.wrapping_sub(self.tail);
            let at = self.tail as usize % RING;
            let mut bytes = [0; Header::SIZE];
            if there > RING as u64 || there < Header::SIZE as u64 || at + Header::SIZE > RING {
                return Err(Malformed);
            }
            self.memory.read(HEADS + at, &mut bytes);
            if bytes[..4] == SKIP.to_ne_bytes() {
                let rest = (RING - at) as u64;
                if at == 0 || there < rest {
                    return Err(Malformed);
                }
                self.tail += rest;
                continue;
            }
            let header = Header::from_bytes(bytes)?;
            let len = (Header::SIZE + header.len as usize).next_multiple_of(ALIGN);
            if len as u64 > there || at + len > RING {
                return Err(Malformed);
            }
            let copied = if header.is_bulk { FRONT.min(header.len as usize) } else { header.len as usize };
            self.memory.read_to(HEADS + at + Header::SIZE, copied, payload);
            self.taken = self.tail + len as u64;
            let place = self.memory.base.wrapping_add(HEADS + at + Header::SIZE + copied) as u64;
            let bulk = header.is_bulk.then_some((place, header.len as usize - copied));
            return Ok(Some(Taken { header, bulk }));
        }
    }

    /// Where the payload of the next answer goes: room for [`PAYLOAD`] bytes.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.memory.base.wrapping_add(place(self.answered) + 64) as u64
    }

    /// Where all payloads of answers go, and how many bytes that is.
    #[must_use]
    pub fn rooms(&self) -> (u64, u64) {
        (self.memory.base.wrapping_add(HEADS + RING) as u64, (PLACES * PLACE) as u64)
    }

    /// Gives an answer.
    pub fn answer(&mut self, code: u32, payload: &[u8]) {
        self.memory.write(place(self.answered) + 64, payload);
        self.answer_there(code, payload.len().min(PAYLOAD));
    }

    /// Gives an answer of so many bytes that are in their [room](Self::room) already.
    pub fn answer_there(&mut self, code: u32, len: usize) {
        let at = place(self.answered);
        self.answered += 1;
        self.memory.write(at + 8, &Answer { len: len as u32, code }.to_bytes());
        self.memory.long(at).store(self.answered, Ordering::Release);
        self.memory.wake(CLIENT_SLEEPS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Near, Far) {
        let (near, file) = Near::make().unwrap();
        (near, Far::open(&file).unwrap())
    }

    #[test]
    fn requests_come_in_order_around_the_ring() {
        let (mut near, mut far) = pair();
        const COUNT: u64 = 3000;
        let server = std::thread::spawn(move || {
            let mut payload = Vec::new();
            for ticket in 0..COUNT {
                let taken = far.take(&mut payload, || false).unwrap().unwrap();
                assert_eq!(taken.header.ticket, ticket);
                assert!(payload.iter().all(|byte| *byte == ticket as u8));
                if taken.header.asks {
                    far.answer(7, &payload);
                }
            }
            assert!(far.take(&mut payload, || false).unwrap().is_none());
        });
        let mut reply = Vec::new();
        for ticket in 0..COUNT {
            let payload = vec![ticket as u8; (ticket as usize * 37) % 30_000];
            let asks = ticket % 5 == 0;
            let header = Header { len: payload.len() as u32, ticket, asks, ..Header::default() };
            near.send(header, [&payload, &[]], || false).unwrap();
            if asks {
                assert_eq!(near.receive(&mut reply, None, || false).unwrap(), 7);
                assert_eq!(reply, payload);
            }
        }
        drop(near);
        server.join().unwrap();
    }

    #[test]
    fn who_waits_for_nobody_is_told() {
        let (mut near, far) = pair();
        drop(far);
        near.send(Header { asks: true, ..Header::default() }, [&[], &[]], || true).unwrap();
        let error = near.receive(&mut Vec::new(), None, || true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        let part = vec![0; 1 << 20];
        let header = Header { len: 1 << 20, ..Header::default() };
        let error = (0..20).find_map(|_| near.send(header, [&part, &[]], || true).err()).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let check = |head: u64, bytes: &[u8]| {
            let (near, mut far) = pair();
            near.memory.write(HEADS, bytes);
            near.memory.long(HEAD).store(head, Ordering::SeqCst);
            assert_eq!(far.take(&mut Vec::new(), || false).err(), Some(Malformed), "{head} {bytes:?}");
        };
        check(u64::MAX, &[0; 16]);
        check(8, &[0; 16]);
        check(16, &[0xff; 16]);
        check(16, &Header { len: 100, ..Header::default() }.to_bytes());
        check(1 << 22, &Header { len: PAYLOAD as u32 + 1, ..Header::default() }.to_bytes());
    }
}
