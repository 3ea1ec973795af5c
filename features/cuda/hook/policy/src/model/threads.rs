//! Several threads of a program, each of which makes random calls as the hook makes them: one lock for each look at the manager, and the driver's own
//! function without it. A thread uses what it allocated or was given, as a program's own synchronisation has it; the clock settles in between, and
//! somebody pauses and resumes when no call is inside.
//!
//! One thread runs at a time, and at every lock, at every look at the flag and before every call of the driver it gives its turn to one that a seed
//! chooses. So a seed that fails fails again.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::calls::{Call, Calls, Expected, Random};
use super::{Copy, Did, Simulated, end, look, manager};
use crate::driver::{Driver as _, Failure, GRANULE, Result};
use crate::manager::{Freed, Manager};

/// Threads of the program; two more are the clock, and who pauses.
const THREADS: usize = 4;
const CLOCK: usize = THREADS;
const CONTROL: usize = THREADS + 1;
const ALL: usize = THREADS + 2;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whose turn it is.
struct Turns {
    turn: Mutex<Turn>,
    wakes: [Condvar; ALL],
}

struct Turn {
    of: usize,
    random: Random,
    is_there: [bool; ALL],
    /// Has a thread panicked?
    is_over: bool,
    /// What the turns were, so that two runs can be compared.
    digest: u64,
}

/// That a thread ends as another has panicked.
struct Stopped;

impl Turns {
    fn new(seed: u64) -> Self {
        let (random, is_there) = (Random(seed | 1), [true; ALL]);
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
        let mut there: Vec<usize> = (0..ALL).filter(|of| turn.is_there[*of]).collect();
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
    /// The gate, and how many calls have passed it.
    is_closed: AtomicBool,
    inside: AtomicUsize,
    /// What each thread is given by others.
    given: [Mutex<Vec<Expected>>; THREADS],
}

/// A thread of it.
struct Thread<'a> {
    process: &'a Process,
    me: usize,
    calls: Calls,
    own: Vec<Expected>,
    is_capturing: bool,
}

impl Process {
    /// As the hook's `with`.
    fn with<R>(&self, me: usize, f: impl FnOnce(&mut Manager<Simulated>) -> R) -> R {
        self.turns.step(me);
        let mut manager = lock(&self.manager);
        let result = f(&mut manager);
        lock(&self.did).look(&mut manager);
        self.unsettled.store(manager.is_unsettled(), Ordering::Release);
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

    /// A call passes the gate.
    fn enter(&self, me: usize) {
        self.turns.step(me);
        while self.is_closed.load(Ordering::Acquire) {
            self.turns.step(me);
        }
        self.inside.fetch_add(1, Ordering::AcqRel);
    }

    /// Closes the gate now and then, and pauses once nobody is inside; some other time if that takes long.
    fn control(&self, mut random: Random) {
        while self.turns.is_running() {
            self.turns.step(CONTROL);
            if random.below(100) != 0 {
                continue;
            }
            self.is_closed.store(true, Ordering::Release);
            let mut moment = random.below(100);
            while moment != 0 && self.inside.load(Ordering::Acquire) != 0 {
                self.turns.step(CONTROL);
                moment -= 1;
            }
            if self.inside.load(Ordering::Acquire) == 0 {
                self.with(CONTROL, |manager| lock(&self.did).pause(&mut random, manager));
                while self.with(CONTROL, |manager| manager.is_paused()) {
                    self.with(CONTROL, |manager| lock(&self.did).resume(&mut random, manager));
                }
            }
            self.is_closed.store(false, Ordering::Release);
        }
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
    /// So many calls, and what it has then.
    fn calls(mut self, count: u32) -> Vec<Expected> {
        for number in 0..count {
            self.process.enter(self.me);
            self.own.append(&mut lock(&self.process.given[self.me]));
            lock(&self.process.manager).driver().state.borrow_mut().weather(&mut self.calls.random);
            match self.calls.next(&self.own, 4, self.is_capturing) {
                Call::Allocate(bytes) => self.allocate(bytes),
                Call::Copy { from, to, words } => self.copy(from, to, words),
                Call::Free(at) => self.free(at),
                Call::Give(at) => {
                    let to = self.calls.random.one(THREADS);
                    lock(&self.process.given[to]).push(self.own.remove(at));
                }
                Call::Launch { own, word } => self.launch(number, own, word),
                Call::BeginCapture => {
                    self.is_capturing = self.process.with(self.me, Manager::begin_capture).is_ok();
                }
                Call::EndCapture => self.end_capture(),
                Call::Pin(at) => {
                    let address = self.own[at].address + GRANULE / 2;
                    let _ = self.process.with(self.me, |manager| manager.pin(address));
                }
                Call::Look => {
                    if self.process.before(self.me).is_ok() {
                        self.process.turns.step(self.me);
                        look(&lock(&self.process.manager), &self.own);
                    }
                }
            }
            self.process.inside.fetch_sub(1, Ordering::AcqRel);
        }
        if self.is_capturing {
            self.end_capture();
        }
        self.own
    }

    fn allocate(&mut self, bytes: u64) {
        match self.process.with(self.me, |manager| manager.allocate(7, 0, bytes)) {
            Ok(Some(address)) => {
                self.own.push(Expected { address, words: vec![None; bytes.div_ceil(GRANULE) as usize] });
            }
            // Only captures have the driver allocate itself, and it has nothing to do with what is tried here.
            Ok(None) => {}
            Err(_) => lock(&self.process.did).failed += 1,
        }
    }

    fn copy(&mut self, from: usize, to: usize, words: usize) {
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

    fn free(&mut self, at: usize) {
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
    fn launch(&mut self, number: u32, at: usize, word: usize) {
        if self.process.before(self.me).is_err() {
            return;
        }
        let value = (u64::from(number) << 8 | self.me as u64) << 1 | 1;
        let address = self.own[at].address + word as u64 * GRANULE;
        self.process.driver(self.me, |driver| {
            *driver.state.borrow_mut().word(address).expect("memory") = value;
        });
        self.own[at].words[word] = Some(value);
    }

    fn end_capture(&mut self) {
        self.is_capturing = false;
        self.process.with(self.me, Manager::end_capture).expect("an end");
    }
}

/// A process whose threads make so many calls each. Its digest is the same whenever the seed is.
fn run(seed: u64, calls: u32, all: &mut Did) -> std::result::Result<u64, String> {
    let process = Process {
        turns: Turns::new(seed),
        manager: Mutex::new(manager()),
        unsettled: AtomicBool::new(false),
        did: Mutex::new(std::mem::take(all)),
        is_closed: AtomicBool::new(false),
        inside: AtomicUsize::new(0),
        given: Default::default(),
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let process = &process;
        let clock = scope.spawn(|| process.turns.run(CLOCK, || process.clock()));
        let own = |me: usize| seed ^ (me as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let random = Random(own(CONTROL) | 1);
        let control = scope.spawn(|| process.turns.run(CONTROL, || process.control(random)));
        let start = |me: usize| {
            let thread =
                Thread { process, me, calls: Calls::new(own(me)), own: Vec::new(), is_capturing: false };
            scope.spawn(move || process.turns.run(me, || thread.calls(calls)))
        };
        let threads: Vec<_> = (0..THREADS).map(start).collect();
        let mut results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("caught")).collect();
        let others = [clock, control].map(|thread| thread.join().expect("caught").map(|()| Vec::new()));
        results.extend(others);
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
    end(&mut manager, left);
    *all = std::mem::take(&mut lock(&process.did));
    let next = manager.driver().state.borrow().next;
    Ok(lock(&process.turns.turn).digest.wrapping_add(next))
}

#[test]
fn no_thread_sees_that_memory_is_moved() {
    // A million calls where sweeps are whole.
    let (programs, calls): (u32, _) =
        if std::env::var_os("SWEEP_SEED").is_some() { (100, 250) } else { (1_000, 250) };
    let first: u64 = std::env::var("SWEEP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let mut did = Did::default();
    for program in 0..programs {
        let seed = first.wrapping_add(program.into()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if let Err(wrong) = run(seed, calls, &mut did) {
            panic!("{wrong}");
        }
    }
    // A part of the sweep meets what is rare less often.
    let some = programs / 25;
    assert!(did.moved > some && did.copied > some && did.of_host > 0 && did.failed > 5 * some, "{did:?}");
    assert!(did.paused > 5 * some && did.not_paused > some, "{did:?}");
    assert!(did.not_resumed > some && did.halfway > some, "{did:?}");
}

#[test]
fn a_seed_is_one_schedule() {
    let digest = |seed: u64| run(seed * 2, 100, &mut Did::default()).expect("nothing wrong");
    let digests: Vec<u64> = (0..8).map(digest).collect();
    assert_eq!((0..8).map(digest).collect::<Vec<_>>(), digests);
    assert!(digests.windows(2).all(|pair| pair[0] != pair[1]), "{digests:?}");
}
