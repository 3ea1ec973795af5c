//! The memory of a lane, and what wakes who sleeps for it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::thread::futex;

use super::{HEADS, PLACE, PLACES};

/// How who sleeps is woken.
#[derive(Debug)]
pub(super) enum Wake {
    /// By the word that it sleeps on.
    Futex,
    /// By a byte.
    Stream(UnixStream),
}

/// The memory of a lane.
#[derive(Debug)]
pub(super) struct Memory {
    base: *mut u8,
    len: usize,
    pub(super) wake: Wake,
    hung_up: AtomicBool,
}

// SAFETY: it is used through atomics and copies alone.
unsafe impl Send for Memory {}

impl Memory {
    /// Maps a part of a file: the length is one of [`SIZES`](super::SIZES).
    pub(super) fn map(file: impl AsFd, offset: u64, len: usize, wake: Wake) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping; no reference is made to what is in it but to atomics.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, offset) }?;
        Ok(Self { base: base.cast(), len, wake, hung_up: AtomicBool::new(false) })
    }

    /// Bytes of its ring.
    pub(super) fn ring(&self) -> usize {
        self.len - HEADS - PLACES * PLACE
    }

    /// Where an answer goes.
    pub(super) fn place(&self, number: u64) -> usize {
        HEADS + self.ring() + (number % PLACES as u64) as usize * PLACE
    }

    /// Where in this process it is.
    pub(super) fn address(&self, at: usize) -> u64 {
        self.base.wrapping_add(at) as u64
    }

    /// Has the other side closed the stream?
    pub(super) fn hung_up(&self) -> bool {
        self.hung_up.load(Ordering::Relaxed)
    }

    pub(super) fn long(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the place is within the mapping and aligned; both sides use it as an atomic.
        unsafe { AtomicU64::from_ptr(self.base.wrapping_add(at).cast()) }
    }

    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.wrapping_add(at).cast()) }
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: it is within the mapping, which is not this side's memory otherwise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.wrapping_add(at), bytes.len()) };
    }

    /// Replaces what is in `to` by so many bytes.
    pub(super) fn read_to(&self, at: usize, len: usize, to: &mut Vec<u8>) {
        assert!(at + len <= self.len);
        to.clear();
        to.reserve(len);
        // SAFETY: it is within the mapping, and there is room for it; what the other side writes meanwhile may be seen in part.
        unsafe { std::ptr::copy_nonoverlapping(self.base.wrapping_add(at), to.as_mut_ptr(), len) };
        // SAFETY: they were just written.
        unsafe { to.set_len(len) };
    }

    pub(super) fn read(&self, at: usize, to: &mut [u8]) {
        assert!(at + to.len() <= self.len);
        // SAFETY: it is within the mapping; what the other side writes meanwhile may be seen in part.
        unsafe { std::ptr::copy_nonoverlapping(self.base.wrapping_add(at), to.as_mut_ptr(), to.len()) };
    }

    /// As [`read`](Self::read), without bringing `to` into the caches: about twice as fast where what is copied in all has no room there.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn read_past_caches(&self, at: usize, to: &mut [u8]) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        const LINE: usize = 64;
        const VECTOR: usize = size_of::<__m128i>();
        assert!(at + to.len() <= self.len);
        let (before, lines) = to.split_at_mut(to.as_ptr().align_offset(LINE).min(to.len()));
        let mut lines = lines.chunks_exact_mut(LINE);
        self.read(at, before);
        let mut from = at + before.len();
        for line in &mut lines {
            let source = self.base.wrapping_add(from).cast::<__m128i>();
            let target = line.as_mut_ptr().cast::<__m128i>();
            // SAFETY: the assertion above keeps `source` within the mapping. The other side may write at the same time; the data is then
            // mixed, which the caller allows.
            let vectors: [__m128i; LINE / VECTOR] =
                std::array::from_fn(|n| unsafe { _mm_loadu_si128(source.wrapping_add(n)) });
            for (n, vector) in vectors.into_iter().enumerate() {
                // SAFETY: `target` points into `line`, which is 64 bytes at an address that is a multiple of 64.
                unsafe { _mm_stream_si128(target.wrapping_add(n), vector) };
            }
            from += LINE;
        }
        self.read(from, lines.into_remainder());
        // SAFETY: every processor of this kind has it. Without the fence, later stores could be visible before these.
        unsafe { _mm_sfence() };
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn read_past_caches(&self, at: usize, to: &mut [u8]) {
        self.read(at, to);
    }

    /// Has this processor fetch the beginning of a frame.
    pub(super) fn fetch(&self, at: usize) {
        const LINE: usize = 64;
        const LINES: usize = 4;
        for line in (0..LINES).map(|line| at + line * LINE).filter(|line| *line < self.len) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: it is a hint, of an address within the mapping.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(self.base.wrapping_add(line).cast::<i8>());
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = line;
        }
    }

    /// Wakes who dozes, if somebody does.
    pub(super) fn rouse(&self, at: usize) {
        // Nobody to be woken is no failure, and neither are more bytes than are read.
        let _ = match &self.wake {
            Wake::Futex => futex::wake(self.word(at), futex::Flags::empty(), 1).map(drop),
            Wake::Stream(stream) => send(stream, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(drop),
        };
    }

    /// Sleeps while a word is 1, until it is roused, for so long at most.
    pub(super) fn doze(&self, at: usize, timeout: Duration) {
        let Ok(timeout) = timeout.try_into() else { return };
        // Woken, interrupted or late: what is waited for is looked at again.
        match &self.wake {
            Wake::Futex => drop(futex::wait(self.word(at), futex::Flags::empty(), 1, Some(&timeout))),
            Wake::Stream(stream) => self.sleep(stream, &timeout),
        }
    }

    /// Sleeps until a byte comes.
    fn sleep(&self, stream: &UnixStream, timeout: &Timespec) {
        if self.hung_up() {
            // Nothing comes any more.
            return std::thread::sleep(Duration::from_millis(1));
        }
        let mut fds = [PollFd::new(stream, PollFlags::IN)];
        if poll(&mut fds, Some(timeout)).is_ok_and(|ready| ready > 0) {
            match recv(stream, &mut [0; 64][..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.hung_up.store(true, Ordering::Relaxed),
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => self.hung_up.store(true, Ordering::Relaxed),
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it is this mapping's own.
        let _ = unsafe { munmap(self.base.cast::<c_void>(), self.len) };
    }
}
