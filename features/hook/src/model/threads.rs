//! Several threads of a program, each of which makes random calls as the hook makes them: one lock for each look at the manager, and the driver's own
//! function without it. A thread uses what it allocated or was given, as a program's own synchronisation has it; the clock settles in between.
//!
//! One thread runs at a time, and at every lock, at every look at the flag and before every call of the driver it gives its turn to one that a seed
//! chooses. So a seed that fails fails again.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::{Copy, Did, Expected, Random, Simulated, look};
use crate::driver::{Driver as _, Failure, GRANULE, Result};
use crate::manager::{Event, Freed, Manager};
use crate::plan::BREAK_EVEN;

/// Threads of the program; one more is the clock.
const THREADS: usize = 4;
const CLOCK: usize = THREADS;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whose turn it is.
struct Turns {
    turn: Mutex<Turn>,
    wakes: [Condvar; THREADS + 1],
}

struct Turn {
    of: usize,
    random: Random,
    is_there: [bool; THREADS + 1],
    /// Has a thread panicked?
    is_over: bool,
    /// What the turns were, so that two runs can be compared.
    digest: u64,
}

/// That a thread ends as another has panicked.
struct Stopped;

impl Turns {
    fn new(seed: u64) -> Self {
        let (random, is_there) = (Random(seed | 1), [true; THREADS + 1]);
        let turn = Turn { of: 0, random, is_there, is_over: false, digest: 0 };
        Self { turn: Mutex::new(turn), wakes: Default::default() }
    }

    /// Gives the turn to the next, and waits for it.
    fn step(&self, me: usize) {
        let mut turn = lock(&self.turn);
        // Every other time a thread goes on.
        if turn.random.below(2) == 0 {
            self.pass(&mut turn);
        }
        self.wait(turn, me);
    }

    fn pass(&self, turn: &mut Turn) {
        let mut there: Vec<usize> = (0..=THREADS).filter(|of| turn.is_there[*of]).collect();
        // The clock sleeps most of the time.
        if there.len() > 1 && turn.random.below(8) != 0 {
            there.retain(|of| *of != CLOCK);
        }
        if !there.is_empty() {
            turn.of = there[turn.random.below(there.len() as u64) as usize];
            turn.digest = turn.digest.rotate_left(5).wrapping_mul(31).wrapping_add(turn.of as u64);
            self.wakes[turn.of].notify_one();
        }
    }

    fn wait(&self, mut turn: MutexGuard<'_, Turn>, me: usize) {
        while turn.of != me && !turn.is_over {
            turn = self.wakes[me].wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        if turn.is_over {
            drop(turn);
            resume_unwind(Box::new(Stopped));
        }
    }

    /// Runs a thread, from its first turn to its last.
    fn run<R>(&self, me: usize, thread: impl FnOnce() -> R) -> std::result::Result<R, Box<dyn Any + Send>> {
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.wait(lock(&self.turn), me);
            thread()
        }));
        let mut turn = lock(&self.turn);
        turn.is_there[me] = false;
        turn.is_over |= result.is_err();
        self.pass(&mut turn);
        if turn.is_over {
            self.wakes.iter().for_each(Condvar::notify_all);
        }
        result
    }

    /// Are the program's threads still there?
    fn is_running(&self) -> bool {
        lock(&self.turn).is_there[..THREADS].contains(&true)
    }
}

/// A process.
struct Process {
    turns: Turns,
    manager: Mutex<Manager<Simulated>>,
    unsettled: AtomicBool,
    did: Mutex<Did>,
    /// What each thread is given by others.
    given: [Mutex<Vec<Expected>>; THREADS],
}

/// A thread of it.
struct Thread<'a> {
    process: &'a Process,
    me: usize,
    random: Random,
    own: Vec<Expected>,
    captures: u32,
}

impl Process {
    /// As the hook's `with`.
    fn with<R>(&self, me: usize, f: impl FnOnce(&mut Manager<Simulated>) -> R) -> R {
        self.turns.step(me);
        let mut manager = lock(&self.manager);
        let result = f(&mut manager);
        let mut did = lock(&self.did);
        for event in manager.events() {
            match event {
                Event::Moved { .. } => did.moved += 1,
                Event::Copied { .. } => did.copied += 1,
                Event::Filled { of_host: true, .. } => did.of_host += 1,
                _ => {}
            }
        }
        self.unsettled.store(manager.is_unsettled(), Ordering::Release);
        assert_eq!(manager.driver().state.borrow().wrong, Vec::<String>::new());
        result
    }

    /// The driver's own function, which is called without the manager's lock.
    fn driver<R>(&self, me: usize, f: impl FnOnce(&Simulated) -> R) -> R {
        self.turns.step(me);
        f(lock(&self.manager).driver())
    }

    fn is_unsettled(&self, me: usize) -> bool {
        self.turns.step(me);
        self.unsettled.load(Ordering::Acquire)
    }

    /// As the hook's `before`.
    fn before(&self, me: usize) -> Result<()> {
        if self.is_unsettled(me) { self.with(me, Manager::settle) } else { Ok(()) }
    }

    fn clock(&self) {
        while self.turns.is_running() {
            if self.is_unsettled(CLOCK) {
                let _ = self.with(CLOCK, Manager::settle_for_nobody);
            }
        }
    }
}

impl Thread<'_> {
    fn below(&mut self, n: usize) -> usize {
        self.random.below(n.max(1) as u64) as usize
    }

    /// So many calls, and what it has then.
    fn calls(mut self, calls: u32) -> Vec<Expected> {
        let mut last = 99;
        for call in 0..calls {
            self.own.append(&mut lock(&self.process.given[self.me]));
            self.weather();
            // One array that grows, as a rule: what was allocated last takes over another, which is freed.
            let grows = self.below(4) != 0 && self.own.len() > 1;
            let what = match last {
                0..30 if grows => 30,
                30..60 if grows => 60,
                _ => self.below(100),
            };
            let follows = grows && last < 60;
            last = what;
            match what {
                0..30 if self.own.len() < 4 => self.allocate(),
                30..60 if self.own.len() > 1 => self.copy(follows),
                60..75 if !self.own.is_empty() => self.free(follows),
                75..80 if !self.own.is_empty() => {
                    let (at, to) = (self.below(self.own.len()), self.below(THREADS));
                    let gone = self.own.remove(at);
                    lock(&self.process.given[to]).push(gone);
                }
                80..90 if !self.own.is_empty() => self.launch(call),
                90..92 if self.captures == 0 => {
                    let begun = self.process.with(self.me, Manager::begin_capture);
                    self.captures = u32::from(begun.is_ok());
                }
                92..97 if self.captures != 0 => self.end_capture(),
                97 if !self.own.is_empty() => {
                    let at = self.below(self.own.len());
                    let address = self.own[at].address + GRANULE / 2;
                    let _ = self.process.with(self.me, |manager| manager.pin(address));
                }
                _ => {
                    if self.process.before(self.me).is_ok() {
                        self.process.turns.step(self.me);
                        look(&lock(&self.process.manager), &self.own);
                    }
                }
            }
        }
        if self.captures != 0 {
            self.end_capture();
        }
        self.own
    }

    /// What is not the program's doing: faults, work, and somebody else who takes memory and gives it back.
    fn weather(&mut self) {
        let (fails, busy, takes) = (self.below(60), self.below(8), self.below(6));
        let (fails_in, much, part) = (self.below(6), self.below(3), self.random.below(1 << 20));
        let manager = lock(&self.process.manager);
        let mut state = manager.driver().state.borrow_mut();
        state.is_busy = busy == 0;
        if fails == 0 {
            state.fails_in = Some(fails_in as u32);
        }
        if takes == 0 {
            let free = state.free / GRANULE;
            state.taken = much.min(1) as u64 * (free - part % (free + 1) / 2) * GRANULE;
        }
    }

    fn allocate(&mut self) {
        let bytes = match self.below(3) {
            0 => (1 + self.random.below(4)) * GRANULE,
            _ => BREAK_EVEN + self.random.below(BREAK_EVEN / GRANULE) * GRANULE - self.random.below(2) * 4096,
        };
        match self.process.with(self.me, |manager| manager.allocate(7, 0, bytes)) {
            Ok(Some(address)) => {
                self.own.push(Expected { address, words: vec![None; bytes.div_ceil(GRANULE) as usize] });
            }
            // Only captures have the driver allocate itself, and it has nothing to do with what is tried here.
            Ok(None) => {}
            Err(_) => lock(&self.process.did).failed += 1,
        }
    }

    fn largest(&self) -> usize {
        (0..self.own.len().saturating_sub(1)).max_by_key(|at| self.own[*at].words.len()).unwrap_or(0)
    }

    fn copy(&mut self, follows: bool) {
        let (from, to) = match follows {
            true => (self.largest(), self.own.len() - 1),
            false => (self.below(self.own.len()), self.below(self.own.len())),
        };
        if from == to {
            return;
        }
        let most = self.own[from].words.len().min(self.own[to].words.len());
        let words = if self.below(2) == 0 { most } else { self.below(most + 1) };
        let bytes = words as u64 * GRANULE;
        let copy = Copy { to: self.own[to].address, from: self.own[from].address, bytes };
        // A target that waits for memory leaves things unsettled.
        let put_off = match self.process.is_unsettled(self.me) {
            false => Ok(false),
            true => {
                self.process.with(self.me, |manager| manager.copy(copy.to, copy.from, bytes, copy.clone()))
            }
        };
        match put_off {
            Ok(true) => {}
            Ok(false) => {
                self.process.driver(self.me, |driver| driver.copy(&copy)).expect("a copy of what is there");
            }
            Err(_) => return,
        }
        for word in 0..words {
            self.own[to].words[word] = self.own[from].words[word];
        }
    }

    fn free(&mut self, follows: bool) {
        let at = if follows { self.largest() } else { self.below(self.own.len()) };
        let Expected { address, .. } = self.own.remove(at);
        // The driver may refuse a wait, or a fault comes in the middle: nothing of it is seen.
        let freed = self.process.with(self.me, |manager| {
            let freed = manager.begin_free(address);
            assert!(!matches!(freed, Ok(Freed::Not)));
            assert!(freed.is_ok() || manager.tracker().at(address).is_none(), "{address:#x} is still there");
            freed
        });
        if let Ok(Freed::AfterWork(of)) = freed {
            // Others go on meanwhile; one that captures lets nobody wait.
            self.process.with(self.me, |manager| {
                let waited = if manager.is_capturing() { Err(Failure(900)) } else { Ok(()) };
                manager.end_free(of, waited).expect("it can be released");
            });
        }
    }

    /// A kernel that writes.
    fn launch(&mut self, call: u32) {
        if self.process.before(self.me).is_err() {
            return;
        }
        let at = self.below(self.own.len());
        let word = self.below(self.own[at].words.len());
        let value = (u64::from(call) << 8 | self.me as u64) << 1 | 1;
        let address = self.own[at].address + word as u64 * GRANULE;
        self.process.driver(self.me, |driver| {
            *driver.state.borrow_mut().word(address).expect("memory") = value;
        });
        self.own[at].words[word] = Some(value);
    }

    fn end_capture(&mut self) {
        self.captures = 0;
        self.process.with(self.me, Manager::end_capture).expect("an end");
    }
}

/// A process whose threads make so many calls each. Its digest is the same whenever the seed is.
fn run(seed: u64, calls: u32, all: &mut Did) -> std::result::Result<u64, String> {
    let simulated = Simulated::default();
    simulated.state.borrow_mut().free = 24 * BREAK_EVEN;
    let process = Process {
        turns: Turns::new(seed),
        manager: Mutex::new(Manager::new(simulated, None)),
        unsettled: AtomicBool::new(false),
        did: Mutex::default(),
        given: Default::default(),
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let process = &process;
        let clock = scope.spawn(|| process.turns.run(CLOCK, || process.clock()));
        let start = |me: usize| {
            let random = Random((seed ^ (me as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1);
            let thread = Thread { process, me, random, own: Vec::new(), captures: 0 };
            scope.spawn(move || process.turns.run(me, || thread.calls(calls)))
        };
        let threads: Vec<_> = (0..THREADS).map(start).collect();
        let mut results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("caught")).collect();
        results.push(clock.join().expect("caught").map(|()| Vec::new()));
        results
    });
    let mut left: Vec<Expected> = Vec::new();
    for (thread, result) in results.into_iter().enumerate() {
        match result {
            Ok(own) => left.extend(own),
            Err(panic) if panic.is::<Stopped>() => {}
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                return Err(format!("seed {seed}, thread {thread}: {}", text.unwrap_or_default()));
            }
        }
    }
    left.extend(process.given.iter().flat_map(|given| std::mem::take(&mut *lock(given))));
    let mut manager = lock(&process.manager);
    manager.driver().state.borrow_mut().fails_in = None;
    manager.driver().state.borrow_mut().taken = 0;
    manager.settle().expect("what is missing");
    look(&manager, &left);
    for gone in left {
        assert_eq!(manager.free(gone.address), Ok(true), "seed {seed}");
    }
    let state = manager.driver().state.borrow();
    assert_eq!(state.wrong, Vec::<String>::new(), "seed {seed}");
    let rest = (state.free, state.mapped.len(), state.reserved.len());
    assert_eq!(rest, (24 * BREAK_EVEN, 0, 0), "seed {seed}");
    let did = lock(&process.did);
    all.moved += did.moved;
    all.copied += did.copied;
    all.of_host += did.of_host;
    all.failed += did.failed;
    Ok(lock(&process.turns.turn).digest.wrapping_add(state.next))
}

#[test]
fn no_thread_sees_that_memory_is_moved() {
    // A million calls where sweeps are whole.
    let (programs, calls) = if std::env::var_os("SWEEP_SEED").is_some() { (100, 250) } else { (1_000, 250) };
    let first: u64 = std::env::var("SWEEP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let mut did = Did::default();
    for program in 0..programs {
        let seed = first.wrapping_add(program).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if let Err(wrong) = run(seed, calls, &mut did) {
            panic!("{wrong}");
        }
    }
    assert!(did.moved > 50 && did.copied > 20 && did.of_host > 0 && did.failed > 100, "{did:?}");
}

#[test]
fn a_seed_is_one_schedule() {
    let digest = |seed: u64| run(seed * 2, 100, &mut Did::default()).expect("nothing wrong");
    let digests: Vec<u64> = (0..8).map(digest).collect();
    assert_eq!((0..8).map(digest).collect::<Vec<_>>(), digests);
    assert!(digests.windows(2).all(|pair| pair[0] != pair[1]), "{digests:?}");
}
