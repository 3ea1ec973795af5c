//! Memory that programs share with their workers, and which session has which part of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use vm_bridge::wire::preamble::{Token, random};

use super::capacity::is_within_share;

/// Parts begin and end at multiples of it.
pub(super) const PAGE: u64 = 4096;
/// How long a part is waited for that is another session's which ends.
const ENDS: Duration = Duration::from_secs(5);
/// The most parts at a time, of all sessions.
const PARTS: u64 = 1 << 16;

/// Bytes of a challenge.
const CHALLENGE: u64 = 16;

/// A window. A program that maps it sees all of it: programs that keep to their parts do so because they trust each other. Workers map only what their
/// sessions have. The last page is for challenges, by which a program proves that it maps the window at all.
#[derive(Debug)]
pub(super) struct Window {
    file: File,
    /// Where its last page begins.
    bytes: u64,
    parts: Mutex<Parts>,
    /// A session has ended.
    freed: Condvar,
}

/// A part: where it ends, whose it is, whether it is a lane, and whether it has been cleared.
#[derive(Debug)]
struct Part {
    end: u64,
    owner: Token,
    is_lane: bool,
    is_clear: bool,
}

/// Random bytes in the window. Their place is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Challenge<'a> {
    window: &'a Window,
    place: u64,
    words: [u64; 2],
}

impl Challenge<'_> {
    /// Where in the window it is.
    pub(super) fn offset(&self) -> u64 {
        self.window.bytes + self.place * CHALLENGE
    }

    /// Whether these are its words.
    pub(super) fn is_answer(&self, words: [u64; 2]) -> bool {
        self.words == words
    }
}

impl Drop for Challenge<'_> {
    fn drop(&mut self) {
        self.window.parts().challenges.remove(&self.place);
    }
}

#[derive(Debug, Default)]
struct Parts {
    /// By where they begin.
    taken: BTreeMap<u64, Part>,
    /// How many sessions wait for their worker's end.
    ending: usize,
    /// Places of challenges that are in use.
    challenges: BTreeSet<u64>,
}

impl Window {
    /// One over the first bytes of a memory file that can't shrink.
    pub(super) fn new(file: OwnedFd, bytes: u64) -> Self {
        let bytes = (bytes / PAGE).saturating_sub(1) * PAGE;
        Self { file: file.into(), bytes, parts: Mutex::default(), freed: Condvar::new() }
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a challenge for a program. `None` while there are too many.
    ///
    /// # Errors
    /// When the memory can't be had.
    pub(super) fn challenge(&self) -> io::Result<Option<Challenge<'_>>> {
        let bytes: [u8; CHALLENGE as usize] = random()?;
        let place = {
            let challenges = &mut self.parts().challenges;
            let Some(place) = (0..PAGE / CHALLENGE).find(|place| !challenges.contains(place)) else {
                return Ok(None);
            };
            challenges.insert(place);
            place
        };
        let (first, second) = bytes.split_at(8);
        let words = [first, second].map(|half| half.try_into().map_or(0, u64::from_ne_bytes));
        let challenge = Challenge { window: self, place, words };
        self.file.write_all_at(&bytes, challenge.offset())?;
        Ok(Some(challenge))
    }

    /// Allocates the first free part of a length for a session, clears it, and writes a mark there. `None` when there is no room, or the session has its
    /// share. Lanes have half of the window at most, and none of them more than an eighth.
    ///
    /// # Errors
    /// When the memory can't be had.
    pub(super) fn take(&self, len: u64, token: Token, is_lane: bool, mark: u64) -> io::Result<Option<u64>> {
        let until = Instant::now() + ENDS;
        let mut parts = self.parts();
        let start = loop {
            if let Some(start) = parts.take(self.bytes, len, token, is_lane) {
                break start;
            }
            // What a program had that has ended is free for the next one.
            let left = until.saturating_duration_since(Instant::now());
            if parts.ending == 0 || left.is_zero() {
                return Ok(None);
            }
            parts = self.freed.wait_timeout(parts, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(parts);
        // A worker is not given a part before it is clear, so that one which can't be cleared is free at once.
        let len = len.next_multiple_of(PAGE);
        let cleared =
            self.clear(start, len).and_then(|()| self.file.write_all_at(&mark.to_ne_bytes(), start));
        let mut parts = self.parts();
        match cleared {
            Ok(()) => parts.taken.get_mut(&start).into_iter().for_each(|part| part.is_clear = true),
            Err(error) => {
                parts.give(start, token);
                return Err(error);
            }
        }
        Ok(Some(start))
    }

    /// Replaces pages by new ones. A device that still has the old ones pinned does not reach the new ones.
    fn clear(&self, start: u64, len: u64) -> io::Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if fallocate(&self.file, flags, start, len).is_ok() {
            return Ok(());
        }
        for at in (0..len).step_by(ZEROS.len()) {
            let len = (len - at).min(ZEROS.len() as u64) as usize;
            self.file.write_all_at(&ZEROS[..len], start + at)?;
        }
        Ok(())
    }

    /// How long a part of a session is.
    pub(super) fn len_of(&self, start: u64, token: Token) -> Option<u64> {
        self.parts().taken.get(&start).filter(|part| part.owner == token).map(|part| part.end - start)
    }

    /// Frees a part of a session, of which its worker maps nothing.
    pub(super) fn give(&self, start: u64, token: Token) -> bool {
        self.parts().give(start, token)
    }

    /// A session's program has ended: its worker will have soon.
    pub(super) fn ends(&self) {
        self.parts().ending += 1;
    }

    /// Frees all parts of a session that [ends](Self::ends), if its worker has exited.
    pub(super) fn forget(&self, token: Token, has_exited: bool) {
        let mut parts = self.parts();
        parts.ending -= 1;
        parts.taken.retain(|_, part| part.owner != token || !has_exited);
        self.freed.notify_all();
    }

    /// The file, for a session's worker to map what the session has.
    pub(super) fn for_part(&self, start: u64, len: u64, token: Token) -> Option<BorrowedFd<'_>> {
        self.parts().has(start, len, token).then(|| self.file.as_fd())
    }
}

impl Parts {
    fn take(&mut self, bytes: u64, len: u64, owner: Token, is_lane: bool) -> Option<u64> {
        let len = len.checked_next_multiple_of(PAGE).filter(|len| *len > 0)?;
        let sum = |of: &dyn Fn(&Part) -> bool| {
            let parts = self.taken.iter().filter(|(_, part)| of(part));
            parts.fold((0, 0), |(count, bytes), (start, part)| (count + 1, bytes + (part.end - start)))
        };
        let ((count, used), (own_count, own)) = (sum(&|_| true), sum(&|part| part.owner == owner));
        if is_lane {
            let own = sum(&|part| part.is_lane && part.owner == owner).1;
            let free = (bytes / 2).saturating_sub(sum(&|part| part.is_lane).1);
            if len > bytes / 8 || !is_within_share(own, len, free) {
                return None;
            }
        }
        if !is_within_share(own, len, bytes - used) || !is_within_share(own_count, 1, PARTS - count) {
            return None;
        }
        let mut start = 0;
        for (taken, part) in &self.taken {
            if taken - start >= len {
                break;
            }
            start = part.end;
        }
        let end = start.checked_add(len).filter(|end| *end <= bytes)?;
        self.taken.insert(start, Part { end, owner, is_lane, is_clear: false });
        Some(start)
    }

    fn give(&mut self, start: u64, token: Token) -> bool {
        let had = self.taken.get(&start).is_some_and(|part| part.owner == token);
        if had {
            self.taken.remove(&start);
        }
        had
    }

    fn has(&self, start: u64, len: u64, token: Token) -> bool {
        let found = self.taken.get(&start).filter(|part| part.owner == token && part.is_clear);
        found.is_some_and(|part| len > 0 && start.checked_add(len).is_some_and(|last| last <= part.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Token = [1; 16];
    const B: Token = [2; 16];

    fn window(pages: u64) -> Window {
        let bytes = (pages + 1) * PAGE;
        let file =
            crate::vmm::memory::memfd("window", bytes, rustix::fs::MemfdFlags::empty()).expect("a file");
        Window::new(file.into(), bytes + 7)
    }

    /// Allocates a part, which has its mark and zeros, and fills it.
    fn take(window: &Window, pages: u64, token: Token, is_lane: bool) -> Option<u64> {
        const MARK: u64 = 0x1234_5678_9abc;
        let start = window.take(pages * PAGE, token, is_lane, MARK).expect("memory")?;
        let mut bytes = vec![1; (pages * PAGE) as usize];
        window.file.read_exact_at(&mut bytes, start).expect("memory");
        assert_eq!(bytes[..8], MARK.to_ne_bytes());
        assert!(bytes[8..].iter().all(|byte| *byte == 0), "{start}: it was cleared");
        bytes.fill(0xa5);
        window.file.write_all_at(&bytes, start).expect("memory");
        Some(start / PAGE)
    }

    fn end(window: &Window, token: Token) {
        window.ends();
        window.forget(token, true);
    }

    #[test]
    fn parts_are_of_one_session_and_are_free_behind_it() {
        let window = window(64);
        let take = |pages: u64, token: Token| take(&window, pages, token, false);
        assert_eq!(take(4, A), Some(0));
        assert_eq!(take(4, B), Some(4));
        assert_eq!(take(8, A), Some(8));
        assert_eq!((take(0, B), take(64, B)), (None, None));
        let has = |start: u64, len: u64, token: Token| window.for_part(start, len, token).is_some();
        assert!(has(4 * PAGE, 4 * PAGE, B) && has(4 * PAGE, PAGE, B));
        for (start, len, token) in [
            (4 * PAGE, 4 * PAGE, A),
            (4 * PAGE, 5 * PAGE, B),
            (5 * PAGE, PAGE, B),
            (4 * PAGE, 0, B),
            (4 * PAGE, u64::MAX, B),
            (64 * PAGE, PAGE, B),
        ] {
            assert!(!has(start, len, token), "{start} {len} {token:?}");
        }
        let lens = [(4, A), (5, B), (4, B), (8, A)].map(|(page, token)| window.len_of(page * PAGE, token));
        assert_eq!(lens, [None, None, Some(4 * PAGE), Some(8 * PAGE)]);
        assert!(!window.give(4 * PAGE, A) && !window.give(5 * PAGE, B));
        assert!(window.give(4 * PAGE, B) && !window.give(4 * PAGE, B));
        assert_eq!((take(3, B), take(1, A), take(5, B)), (Some(4), Some(7), Some(16)));
        end(&window, A);
        assert_eq!((take(4, B), take(8, B)), (Some(0), Some(7)));
        for len in [u64::MAX, u64::MAX - 4094] {
            assert_eq!(window.take(len, A, false, 0).expect("memory"), None);
        }
        end(&window, B);
        assert!(window.parts().taken.is_empty());
    }

    #[test]
    fn lanes_have_half_of_a_window_and_wait_for_a_session_that_ends() {
        let window = window(16);
        let lane = |pages: u64| take(&window, pages, A, true).is_some();
        assert!(!lane(3));
        assert_eq!([(); 4].map(|()| lane(2)), [true, true, true, false]);
        assert_eq!(take(&window, 1, B, true), Some(6), "one session does not get all of that half");
        assert_eq!(take(&window, 6, B, false), Some(7));
        window.ends();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| take(&window, 6, A, false));
            window.forget(B, true);
            assert_eq!(waits.join().expect("a thread"), Some(6));
        });
    }

    #[test]
    fn a_session_whose_worker_has_not_exited_keeps_its_parts() {
        let window = window(16);
        assert_eq!(take(&window, 4, A, false), Some(0));
        window.ends();
        window.forget(A, false);
        assert_eq!(take(&window, 4, B, false), Some(4));
    }

    #[test]
    fn one_session_cannot_use_up_a_window() {
        let window = window(90);
        let all = |pages: u64, token: Token| {
            std::iter::from_fn(|| window.take(pages * PAGE, token, false, 0).expect("memory")).count()
        };
        assert_eq!((all(10, A), all(1, B)), (8, 8));
        end(&window, A);
        // Its number of parts is bounded, too.
        let window = self::window(2 * PARTS);
        let all = |token: Token| {
            let mut parts = window.parts();
            let bytes = window.bytes;
            (0..PARTS).take_while(|_| parts.take(bytes, PAGE, token, false).is_some()).count() as u64
        };
        // Few are taken here, as each looks at all others.
        window.parts().taken.extend((0..PARTS - 90).map(|at| {
            let start = bytes_of(PARTS + at);
            (start, Part { end: start + PAGE, owner: [3; 16], is_lane: false, is_clear: true })
        }));
        assert_eq!((all(A), all(B)), (80, 8));
    }

    fn bytes_of(pages: u64) -> u64 {
        pages * PAGE
    }

    #[test]
    fn a_challenge_is_in_the_window_behind_all_parts_and_is_answered_by_its_bytes() {
        let window = window(4);
        let all: Vec<_> = std::iter::from_fn(|| window.challenge().expect("memory")).collect();
        assert_eq!(all.len(), 256);
        let mut seen = BTreeSet::new();
        for challenge in &all {
            assert!(challenge.offset() >= 4 * PAGE && challenge.offset() + CHALLENGE <= 5 * PAGE);
            let mut words = [[0; 8]; 2];
            window.file.read_exact_at(words.as_flattened_mut(), challenge.offset()).expect("memory");
            let words = words.map(u64::from_ne_bytes);
            assert!(challenge.is_answer(words) && !challenge.is_answer([words[0], words[1] ^ 1]));
            assert!(seen.insert(words) && words != [0; 2]);
        }
        drop(all);
        assert!(window.parts().challenges.is_empty());
        assert_eq!(take(&window, 4, A, false), None, "a session has its share alone");
        assert_eq!(take(&window, 3, A, false), Some(0));
    }
}
