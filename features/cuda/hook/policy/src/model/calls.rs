//! A program's calls, by chance, and what is not its doing.

use super::State;
use crate::driver::GRANULE;
use crate::plan::BREAK_EVEN;

/// Numbers that a seed gives.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    /// The place of one of so many, if there are any.
    pub(super) fn one(&mut self, of: usize) -> usize {
        self.below(of.max(1) as u64) as usize
    }
}

/// A program's allocation, and what must be there: a word for each granule, if it was ever written.
pub(super) struct Expected {
    pub(super) address: u64,
    pub(super) words: Vec<Option<u64>>,
}

/// A call. Allocations have numbers.
pub(super) enum Call {
    /// So many bytes.
    Allocate(u64),
    /// The first words of one to the beginning of another.
    Copy {
        from: usize,
        to: usize,
        words: usize,
    },
    Free(usize),
    /// Lets another thread have it.
    Give(usize),
    /// Writes a word.
    Launch {
        own: usize,
        word: usize,
    },
    BeginCapture,
    EndCapture,
    Pin(usize),
    /// Looks at everything.
    Look,
}

/// Chooses a program's calls.
pub(super) struct Calls {
    pub(super) random: Random,
    last: u64,
}

impl Calls {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: Random(seed | 1), last: 99 }
    }

    /// The next call of who has these allocations, and may have so many.
    pub(super) fn next(&mut self, own: &[Expected], most: usize, is_capturing: bool) -> Call {
        let random = &mut self.random;
        // One array that grows, as a rule: what was allocated last takes over another, which is freed.
        let grows = random.below(4) != 0 && own.len() > 1;
        let what = match self.last {
            0..30 if grows => 30,
            30..60 if grows => 60,
            _ => random.below(100),
        };
        let follows = grows && self.last < 60;
        self.last = what;
        let largest = || (0..own.len() - 1).max_by_key(|at| own[*at].words.len()).unwrap_or(0);
        match what {
            0..30 if own.len() < most => Call::Allocate(match random.below(3) {
                0 => (1 + random.below(4)) * GRANULE,
                _ => BREAK_EVEN + random.below(2 * BREAK_EVEN / GRANULE) * GRANULE - random.below(2) * 4096,
            }),
            30..60 if own.len() > 1 => {
                let (from, to) = match follows {
                    true => (largest(), own.len() - 1),
                    false => (random.one(own.len()), random.one(own.len())),
                };
                let most = own[from].words.len().min(own[to].words.len());
                let words = if random.below(2) == 0 { most } else { random.one(most + 1) };
                if from == to { Call::Look } else { Call::Copy { from, to, words } }
            }
            60..75 if !own.is_empty() => Call::Free(if follows { largest() } else { random.one(own.len()) }),
            75..80 if !own.is_empty() => Call::Give(random.one(own.len())),
            80..90 if !own.is_empty() => {
                let own_one = random.one(own.len());
                Call::Launch { own: own_one, word: random.one(own[own_one].words.len()) }
            }
            90..92 if !is_capturing => Call::BeginCapture,
            92..97 if is_capturing => Call::EndCapture,
            97 if !own.is_empty() => Call::Pin(random.one(own.len())),
            _ => Call::Look,
        }
    }
}

impl State {
    /// Faults, work, and somebody else who takes memory and gives it back.
    pub(super) fn weather(&mut self, random: &mut Random) {
        if random.below(40) == 0 {
            self.fails_in = Some(random.below(6) as u32);
        }
        self.is_busy = random.below(8) == 0;
        if random.below(6) == 0 {
            let free = self.free / GRANULE;
            self.taken = random.below(3).min(1) * (free - random.below(free + 1) / 2) * GRANULE;
        }
    }
}
