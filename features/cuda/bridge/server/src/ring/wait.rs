//! How a side of a lane waits for a word of its memory, and is woken.

use std::time::Duration;

use super::sys::Memory;
use crate::sync::{Ordering, fence};

/// What is waited for: that decides how long it is looked for before who waits sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// The other side.
    Peer,
    /// The device, for which the driver itself looks as long as it takes.
    Device,
}

impl Awaited {
    /// Looks for a while, which is brief where the other side may wait for this processor.
    #[cfg(not(loom))]
    fn look(self, mut is_so: impl FnMut() -> bool) -> bool {
        use std::sync::LazyLock;
        use std::time::Instant;

        static HAS_ENOUGH: LazyLock<bool> = LazyLock::new(|| {
            const ENOUGH: usize = 4;
            std::thread::available_parallelism().map_or(1, usize::from) >= ENOUGH
        });
        if is_so() {
            return true;
        }
        let micros = match (*HAS_ENOUGH, self) {
            (false, _) => 5,
            (true, Self::Peer) => 50,
            (true, Self::Device) => 1000,
        };
        let until = Instant::now() + Duration::from_micros(micros);
        loop {
            for _ in 0..64 {
                if is_so() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if Instant::now() >= until {
                return false;
            }
        }
    }

    /// loom looks at every order of things: to look again would only make more of them.
    #[cfg(loom)]
    fn look(self, mut is_so: impl FnMut() -> bool) -> bool {
        is_so()
    }
}

/// How long it sleeps before it looks whether the other side is there.
pub(super) const SLEEP: Duration = Duration::from_millis(100);

impl Memory {
    /// Wakes who sleeps on a word.
    pub(super) fn wake(&self, at: usize) {
        fence(Ordering::SeqCst);
        let word = self.word(at);
        if word.load(Ordering::Relaxed) != 0 {
            word.store(0, Ordering::SeqCst);
            self.rouse(at);
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
        if awaited.look(&mut is_so) {
            return true;
        }
        let word = self.word(sleeps);
        word.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !is_so() {
            self.doze(sleeps, sleep);
        }
        word.store(0, Ordering::SeqCst);
        is_so()
    }
}
