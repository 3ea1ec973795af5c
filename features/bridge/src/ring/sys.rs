//! The memory of a lane, and how who sleeps for it is woken.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::thread::futex;

use super::{HEADS, PLACE, PLACES};

/// What is waited for: that decides how long it is looked for before who waits sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// The other side.
    Peer,
    /// The device, for which the driver itself looks as long as it takes.
    Device,
}

impl Awaited {
    /// How long it is looked for: briefly where the other side may wait for this processor.
    fn look(self) -> Duration {
        static HAS_ENOUGH: LazyLock<bool> = LazyLock::new(|| {
            const ENOUGH: usize = 4;
            std::thread::available_parallelism().map_or(1, usize::from) >= ENOUGH
        });
        Duration::from_micros(match (*HAS_ENOUGH, self) {
            (false, _) => 5,
            (true, Self::Peer) => 50,
            (true, Self::Device) => 1000,
        })
    }
}

/// How long it sleeps before it looks whether the other side is there.
pub(super) const SLEEP: Duration = Duration::from_millis(100);

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

    /// Wakes who sleeps on a word.
    pub(super) fn wake(&self, at: usize) {
        fence(Ordering::SeqCst);
        let word = self.word(at);
        if word.load(Ordering::Relaxed) != 0 {
            word.store(0, Ordering::SeqCst);
            // Nobody to be woken is no failure, and neither are more bytes than are read.
            let _ = match &self.wake {
                Wake::Futex => futex::wake(word, futex::Flags::empty(), 1).map(drop),
                Wake::Stream(stream) => {
                    send(stream, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(drop)
                }
            };
        }
    }

    /// Waits until something is so: no longer than a while, at whose end it may still not be.
    pub(super) fn wait(&self, sleeps: usize, awaited: Awaited, is_so: impl FnMut() -> bool) -> bool {
        self.wait_for(sleeps, awaited, SLEEP, is_so)
    }

    /// As [`wait`](Self::wait), with a sleep of so long.
    pub(super) fn wait_for(
        &self,
        sleeps: usize,
        awaited: Awaited,
        sleep: Duration,
        mut is_so: impl FnMut() -> bool,
    ) -> bool {
        if is_so() {
            return true;
        }
        let until = Instant::now() + awaited.look();
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
            && let Ok(timeout) = sleep.try_into()
        {
            // Woken, interrupted or late: what is waited for is looked at again.
            match &self.wake {
                Wake::Futex => drop(futex::wait(word, futex::Flags::empty(), 1, Some(&timeout))),
                Wake::Stream(stream) => self.sleep(stream, &timeout),
            }
        }
        word.store(0, Ordering::SeqCst);
        is_so()
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
