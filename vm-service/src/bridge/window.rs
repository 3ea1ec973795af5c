//! Memory that programs share with their workers, and which session has which part of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_bridge::wire::preamble::Token;

/// Parts begin and end at multiples of it.
const PAGE: u64 = 4096;
/// The most parts at a time, of all sessions.
const PARTS: usize = 1 << 16;

/// A window. Who maps it sees all of it: that sessions keep to their parts is an agreement among programs that trust each other with it,
/// but what a worker maps is kept to its session's.
#[derive(Debug)]
pub(super) struct Window {
    file: File,
    bytes: u64,
    parts: Mutex<Parts>,
}

/// A part: where it ends, whose it is, and whether it is a lane.
#[derive(Debug)]
struct Part {
    end: u64,
    owner: Token,
    is_lane: bool,
}

/// By where they begin.
#[derive(Debug, Default)]
struct Parts(BTreeMap<u64, Part>);

impl Window {
    /// One over the first bytes of a memory file that can't shrink.
    pub(super) fn new(file: OwnedFd, bytes: u64) -> Self {
        Self { file: file.into(), bytes: bytes / PAGE * PAGE, parts: Mutex::default() }
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the first free part of a length for a session, and writes a mark there. `None` when there is no room. Lanes have half of the window
    /// at most, and none of them more than an eighth.
    ///
    /// # Errors
    /// When the memory can't be had.
    pub(super) fn take(&self, len: u64, token: Token, is_lane: bool, mark: u64) -> io::Result<Option<u64>> {
        let Some(start) = self.parts().take(self.bytes, len, token, is_lane) else { return Ok(None) };
        if let Err(error) = self.file.write_all_at(&mark.to_ne_bytes(), start) {
            self.parts().give(start, token);
            return Err(error);
        }
        Ok(Some(start))
    }

    /// Takes a part back; no when the session does not have it.
    pub(super) fn give(&self, start: u64, token: Token) -> bool {
        self.parts().give(start, token)
    }

    /// Takes back all that a session has, whose worker has ended.
    pub(super) fn forget(&self, token: Token) {
        self.parts().0.retain(|_, part| part.owner != token);
    }

    /// The file, for a session's worker to map what the session has.
    pub(super) fn for_part(&self, start: u64, len: u64, token: Token) -> Option<BorrowedFd<'_>> {
        self.parts().has(start, len, token).then(|| self.file.as_fd())
    }
}

impl Parts {
    fn take(&mut self, bytes: u64, len: u64, owner: Token, is_lane: bool) -> Option<u64> {
        let len = len.checked_next_multiple_of(PAGE).filter(|len| *len > 0)?;
        let lanes = || self.0.iter().filter(|(_, part)| part.is_lane).map(|(start, part)| part.end - start);
        let is_too_much = is_lane && (len > bytes / 8 || lanes().sum::<u64>() + len > bytes / 2);
        if self.0.len() >= PARTS || is_too_much {
            return None;
        }
        let mut start = 0;
        for (taken, part) in &self.0 {
            if taken - start >= len {
                break;
            }
            start = part.end;
        }
        let end = start.checked_add(len).filter(|end| *end <= bytes)?;
        self.0.insert(start, Part { end, owner, is_lane });
        Some(start)
    }

    fn give(&mut self, start: u64, token: Token) -> bool {
        let had = self.0.get(&start).is_some_and(|part| part.owner == token);
        if had {
            self.0.remove(&start);
        }
        had
    }

    fn has(&self, start: u64, len: u64, token: Token) -> bool {
        let found = self.0.get(&start).filter(|part| part.owner == token);
        found.is_some_and(|part| len > 0 && start.checked_add(len).is_some_and(|last| last <= part.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Token = [1; 16];
    const B: Token = [2; 16];

    #[test]
    fn parts_are_of_one_session_and_are_free_behind_it() {
        let file =
            crate::vmm::memory::memfd("window", 16 * PAGE, rustix::fs::MemfdFlags::empty()).expect("a file");
        let window = Window::new(file.into(), 16 * PAGE + 7);
        let take = |pages: u64, token: Token, expect: Option<u64>| {
            let taken = window.take(pages * PAGE, token, false, 0x1234_5678_9abc).expect("memory");
            assert_eq!(taken, expect.map(|page| page * PAGE), "{pages} {token:?}");
            if let Some(start) = taken {
                let mut mark = [0; 8];
                window.file.read_exact_at(&mut mark, start).expect("memory");
                assert_eq!(u64::from_ne_bytes(mark), 0x1234_5678_9abc);
            }
        };
        take(4, A, Some(0));
        take(4, B, Some(4));
        take(8, A, Some(8));
        take(1, B, None);
        take(0, B, None);
        let has = |start: u64, len: u64, token: Token| window.for_part(start, len, token).is_some();
        assert!(has(4 * PAGE, 4 * PAGE, B) && has(4 * PAGE, PAGE, B));
        for (start, len, token) in [
            (4 * PAGE, 4 * PAGE, A),
            (4 * PAGE, 5 * PAGE, B),
            (5 * PAGE, PAGE, B),
            (4 * PAGE, 0, B),
            (4 * PAGE, u64::MAX, B),
            (16 * PAGE, PAGE, B),
        ] {
            assert!(!has(start, len, token), "{start} {len} {token:?}");
        }
        assert!(!window.give(4 * PAGE, A) && !window.give(5 * PAGE, B));
        assert!(window.give(4 * PAGE, B) && !window.give(4 * PAGE, B));
        take(5, B, None);
        take(3, B, Some(4));
        take(1, A, Some(7));
        window.forget(A);
        take(4, B, Some(0));
        take(9, B, Some(7));
        take(1, A, None);
        for len in [u64::MAX, u64::MAX - 4094] {
            assert_eq!(window.take(len, A, false, 0).expect("memory"), None);
        }
        window.forget(B);
        let lane = |pages: u64| window.take(pages * PAGE, A, true, 0).expect("memory").is_some();
        assert!(!lane(3));
        assert_eq!([(); 5].map(|()| lane(2)), [true, true, true, true, false]);
        take(8, B, Some(8));
    }
}
