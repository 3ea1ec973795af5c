//! Random calls of a program's, with the hook's manager and without: whoever looks sees the same.

mod calls;
mod threads;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use crate::driver::{
    Context, Device, Driver, Failure, GRANULE, Handle, INVALID_VALUE, OUT_OF_MEMORY, Place, Range, Result,
};
use crate::manager::{Cant, Event, Manager};
use crate::plan::BREAK_EVEN;
use crate::tracker::{Allocation, Tag};
use calls::{Call, Calls, Expected, Random};

/// A device that has one word for each granule.
#[derive(Default)]
struct Simulated {
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Reservations: address and bytes.
    reserved: BTreeMap<u64, u64>,
    /// Of each handle its words, where it is, and whether the program has it still.
    memory: HashMap<Handle, Memory>,
    /// Address, bytes, handle.
    mapped: BTreeMap<u64, (u64, Handle)>,
    free: u64,
    /// Somebody else's, who takes and gives back.
    taken: u64,
    is_busy: bool,
    /// Calls until one fails.
    fails_in: Option<u32>,
    /// Is to unmap one of them?
    unmaps_fail: bool,
    copies_fail: bool,
    /// So many restores failed when they had begun.
    halfway: u32,
    /// That nothing was done wrong.
    wrong: Vec<String>,
}

struct Memory {
    words: Vec<u64>,
    place: Place,
    is_released: bool,
    mappings: u32,
}

#[derive(Clone)]
struct Copy {
    to: u64,
    from: u64,
    bytes: u64,
}

impl State {
    fn fault(&mut self) -> Result<()> {
        match &mut self.fails_in {
            Some(0) => {
                self.fails_in = None;
                Err(Failure(999))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn collect(&mut self, handle: Handle) {
        let gone = self.memory.get(&handle).is_some_and(|of| of.is_released && of.mappings == 0);
        if gone
            && let Some(of) = self.memory.remove(&handle)
            && matches!(of.place, Place::Device(_))
        {
            self.free += of.words.len() as u64 * GRANULE;
        }
    }

    fn word(&mut self, address: u64) -> Option<&mut u64> {
        let (start, (bytes, handle)) = self.mapped.range(..=address).next_back()?;
        if address - start >= *bytes {
            return None;
        }
        let (at, handle) = ((address - start) / GRANULE, *handle);
        self.memory.get_mut(&handle)?.words.get_mut(at as usize)
    }
}

impl Driver for Simulated {
    type Copy = Copy;
    type Saved = Vec<u64>;

    fn reserve(&self, bytes: u64) -> Result<u64> {
        let mut state = self.state.borrow_mut();
        state.fault()?;
        state.next += GRANULE;
        let address = (1 << 40) + state.next;
        state.next += bytes;
        state.reserved.insert(address, bytes);
        Ok(address)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        let mut state = self.state.borrow_mut();
        if state.mapped.range(address..address + bytes).next().is_some() {
            state.wrong.push(format!("{address:#x} is given back while it is mapped"));
        }
        if state.reserved.remove(&address) != Some(bytes) {
            state.wrong.push(format!("{address:#x} is not a reservation of {bytes}"));
        }
        Ok(())
    }

    fn create(&self, place: Place, bytes: u64) -> Result<Handle> {
        let mut state = self.state.borrow_mut();
        state.fault()?;
        if matches!(place, Place::Device(_)) {
            if state.free - state.taken < bytes {
                return Err(OUT_OF_MEMORY);
            }
            state.free -= bytes;
        }
        state.next += 1;
        let handle = state.next;
        // What was somebody else's.
        let words = vec![u64::MAX; (bytes / GRANULE) as usize];
        state.memory.insert(handle, Memory { words, place, is_released: false, mappings: 0 });
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<()> {
        let mut state = self.state.borrow_mut();
        match state.memory.get_mut(&handle) {
            Some(of) if !of.is_released => of.is_released = true,
            _ => state.wrong.push(format!("{handle} is released twice")),
        }
        state.collect(handle);
        Ok(())
    }

    fn map(&self, address: u64, bytes: u64, handle: Handle, _: Device) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.fault()?;
        let inside = state
            .reserved
            .range(..=address)
            .next_back()
            .is_some_and(|(start, all)| address + bytes <= start + all);
        let over = state
            .mapped
            .range(..address + bytes)
            .next_back()
            .is_some_and(|(start, (all, _))| start + all > address);
        let Some(of) = state.memory.get_mut(&handle).filter(|of| !of.is_released) else {
            return Err(INVALID_VALUE);
        };
        if !inside || over || of.words.len() as u64 * GRANULE != bytes {
            state.wrong.push(format!("{address:#x} can't be mapped"));
            return Err(INVALID_VALUE);
        }
        of.mappings += 1;
        state.mapped.insert(address, (bytes, handle));
        Ok(())
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        let mut state = self.state.borrow_mut();
        if state.unmaps_fail {
            state.fault()?;
        }
        match state.mapped.remove(&address) {
            Some((all, handle)) if all == bytes => {
                if let Some(of) = state.memory.get_mut(&handle) {
                    of.mappings -= 1;
                }
                state.collect(handle);
                Ok(())
            }
            _ => {
                state.wrong.push(format!("{address:#x} is not a mapping of {bytes}"));
                Err(INVALID_VALUE)
            }
        }
    }

    fn copy(&self, copy: &Copy) -> Result<()> {
        let mut state = self.state.borrow_mut();
        if state.copies_fail {
            return Err(Failure(999));
        }
        for at in (0..copy.bytes).step_by(GRANULE as usize) {
            let word = state.word(copy.from + at).map(|word| *word);
            match (word, state.word(copy.to + at)) {
                (Some(word), Some(to)) => *to = word,
                _ => return Err(Failure(700)),
            }
        }
        Ok(())
    }

    fn synchronize(&self, _: Context) -> Result<()> {
        Ok(())
    }

    fn is_idle(&self) -> bool {
        !self.state.borrow().is_busy
    }

    fn free_bytes(&self, _: Context) -> Result<u64> {
        let state = self.state.borrow();
        Ok(state.free - state.taken)
    }

    fn save(&self, _: Context, ranges: &[Range]) -> Result<Vec<u64>> {
        let mut state = self.state.borrow_mut();
        state.fault()?;
        let words = ranges.iter().flat_map(words);
        words.map(|at| state.word(at).map(|word| *word).ok_or(Failure(700))).collect()
    }

    fn restore(
        &self,
        _: Context,
        saved: &Vec<u64>,
        ranges: impl Iterator<Item = Result<(u64, Range)>>,
    ) -> Result<()> {
        for (copied, next) in ranges.enumerate() {
            let mut state = self.state.borrow_mut();
            let restored = next.and_then(|next| state.fault().map(|()| next));
            state.halfway += u32::from(copied != 0 && restored.is_err());
            let (offset, range) = restored?;
            let saved = &saved[(offset / GRANULE) as usize..];
            for (at, word) in words(&range).zip(saved) {
                *state.word(at).ok_or(Failure(700))? = *word;
            }
        }
        Ok(())
    }

    fn clear(&self, _: Context, range: Range) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.fault()?;
        words(&range).try_for_each(|at| state.word(at).map(|word| *word = 0).ok_or(Failure(700)))
    }
}

/// The addresses of a range's words.
fn words(range: &Range) -> impl Iterator<Item = u64> + use<> {
    (range.address..range.address + range.bytes).step_by(GRANULE as usize)
}

/// What runs did, to see that they did everything.
#[derive(Debug, Default)]
struct Did {
    moved: u32,
    copied: u32,
    of_host: u32,
    failed: u32,
    paused: u32,
    not_paused: u32,
    not_resumed: u32,
    no_room: u32,
    halfway: u32,
    dropped: u32,
    stayed: u32,
}

impl Did {
    /// Counts what a manager did, in which nothing was wrong.
    fn look(&mut self, manager: &mut Manager<Simulated>) {
        for event in manager.events() {
            match event {
                Event::Moved { .. } => self.moved += 1,
                Event::Copied { .. } => self.copied += 1,
                Event::Filled { of_host: true, .. } => self.of_host += 1,
                _ => {}
            }
        }
        let mut state = manager.driver().state.borrow_mut();
        self.halfway += std::mem::take(&mut state.halfway);
        assert_eq!(state.wrong, Vec::<String>::new());
    }

    /// Tries to pause, with faults.
    fn pause(&mut self, random: &mut Random, manager: &mut Manager<Simulated>) {
        faults(manager, Some(random));
        let free = manager.driver().state.borrow().free;
        match manager.pause() {
            Ok(report) => {
                self.paused += 1;
                self.dropped += u32::from(report.dropped != 0);
                self.stayed += u32::from(report.kept.failed != 0);
                // Settling took memory, if anything.
                assert!(manager.driver().state.borrow().free <= free + report.bytes);
                assert_eq!(manager.accounts(0).paused, report.bytes);
                let is_away = |of: &Allocation| of.pieces.iter().all(|piece| piece.of_host);
                let stays = |of: &Allocation| of.is_pinned || report.kept.failed != 0;
                assert!(manager.tracker().all().all(|of| stays(of) || is_away(of)));
            }
            Err(error) => {
                self.not_paused += 1;
                assert!(!manager.is_paused() && manager.accounts(0).paused == 0, "{error}");
            }
        }
        faults(manager, None);
    }

    /// Tries to resume, with faults, and while somebody else has some of the memory.
    fn resume(&mut self, random: &mut Random, manager: &mut Manager<Simulated>) {
        faults(manager, Some(random));
        let mut state = manager.driver().state.borrow_mut();
        state.taken = random.below(3) / 2 * random.below(state.free / GRANULE + 1) * GRANULE;
        let free = state.free - state.taken;
        drop(state);
        let away = manager.tracker().all().flat_map(|of| &of.away);
        let left: u64 = away.filter(|away| away.left.is_some()).map(|away| away.bytes).sum();
        match manager.resume() {
            Ok((_, saved)) => assert!(saved.iter().all(|saved| !saved.is_empty())),
            Err(Cant::NoRoom { bytes, missing }) => {
                self.no_room += 1;
                assert!(missing != 0 && bytes - missing <= free + left);
            }
            Err(_) => self.not_resumed += 1,
        }
        faults(manager, None);
    }
}

/// Has a pause or its end fail by chance, or not.
fn faults(manager: &Manager<Simulated>, random: Option<&mut Random>) {
    let mut state = manager.driver().state.borrow_mut();
    state.unmaps_fail = random.is_some();
    state.fails_in = random.and_then(|random| (random.below(3) == 0).then(|| random.below(12) as u32));
}

/// Pauses, lets somebody else have the memory, and resumes; what was dropped is zero.
fn pause(random: &mut Random, manager: &mut Manager<Simulated>, all: &mut Vec<Expected>, did: &mut Did) {
    did.pause(random, manager);
    // A program that ends frees on.
    if manager.is_paused() && random.below(6) == 0 && !all.is_empty() {
        let gone = all.remove(random.one(all.len()));
        assert_eq!(manager.free(gone.address), Ok(true));
    }
    let is_dropped = |of: &&Allocation| of.away.iter().any(|away| away.saved.is_none());
    let dropped: Vec<u64> = manager.tracker().all().filter(is_dropped).map(|of| of.address).collect();
    while manager.is_paused() {
        did.resume(random, manager);
    }
    let mut state = manager.driver().state.borrow_mut();
    for of in all.iter_mut().filter(|of| dropped.contains(&of.address)) {
        // What stayed is what it was, which a program can't know.
        for (word, expected) in (0..).zip(&mut of.words) {
            let found = state.word(of.address + word * GRANULE).map(|word| *word);
            assert!(found == Some(0) || expected.is_none() || found == *expected);
            *expected = found;
        }
    }
}

/// A manager of a device.
fn manager() -> Manager<Simulated> {
    let simulated = Simulated::default();
    simulated.state.borrow_mut().free = 24 * BREAK_EVEN;
    Manager::new(simulated, None)
}

/// A program's end: all is what it must be, and is freed.
fn end(manager: &mut Manager<Simulated>, all: Vec<Expected>) {
    let mut state = manager.driver().state.borrow_mut();
    (state.fails_in, state.taken) = (None, 0);
    drop(state);
    manager.settle().expect("what is missing");
    look(manager, &all);
    for gone in all {
        assert_eq!(manager.free(gone.address), Ok(true));
    }
    let state = manager.driver().state.borrow();
    assert_eq!(state.wrong, Vec::<String>::new());
    assert_eq!((state.free, state.mapped.len(), state.reserved.len()), (24 * BREAK_EVEN, 0, 0));
}

/// A program of so many calls. Each is made as the hook makes it: what looks at memory is settled before.
fn run(seed: u64, count: u32, did: &mut Did) {
    let (mut calls, mut manager) = (Calls::new(seed), manager());
    let mut all: Vec<Expected> = Vec::new();
    let mut captures = 0;
    for number in 0..count {
        let random = &mut calls.random;
        manager.driver().state.borrow_mut().weather(random);
        if captures == 0 && random.below(30) == 0 {
            if let Some(of) = all.first().filter(|_| random.below(2) == 0) {
                let tag = Tag { name: "cache".into(), is_droppable: true };
                assert!(manager.tag(of.address, tag));
            }
            pause(random, &mut manager, &mut all, did);
        }
        assert!(captures == 0 || manager.pause() == Err(Cant::Capture));
        match calls.next(&all, 6, captures != 0) {
            Call::Allocate(bytes) => match manager.allocate(7, 0, bytes) {
                Ok(Some(address)) => {
                    let words = vec![None; bytes.div_ceil(GRANULE) as usize];
                    for other in &all {
                        let end = other.address + other.words.len() as u64 * GRANULE;
                        assert!(address >= end || address + bytes <= other.address);
                    }
                    all.push(Expected { address, words });
                }
                Ok(None) => assert!(captures > 0),
                Err(_) => did.failed += 1,
            },
            Call::Copy { from, to, words } => {
                let bytes = words as u64 * GRANULE;
                let copy = Copy { to: all[to].address, from: all[from].address, bytes };
                match manager.copy(copy.to, copy.from, bytes, copy.clone()) {
                    Ok(true) => {}
                    Ok(false) => manager.driver().copy(&copy).expect("a copy of what is there"),
                    Err(_) => continue,
                }
                for word in 0..words {
                    // What nobody wrote may be anything, and is so in both.
                    all[to].words[word] = all[from].words[word];
                }
            }
            Call::Free(gone) | Call::Give(gone) => {
                let gone = all.remove(gone);
                // The driver may refuse a wait, or a fault comes in the middle: nothing of it is seen.
                assert!(
                    manager.free(gone.address).is_ok_and(|own| own)
                        || manager.tracker().at(gone.address).is_none()
                );
            }
            Call::Launch { own, word } => {
                if manager.settle().is_ok() {
                    let value = u64::from(number) << 8 | 1;
                    let address = all[own].address + word as u64 * GRANULE;
                    *manager.driver().state.borrow_mut().word(address).expect("memory") = value;
                    all[own].words[word] = Some(value);
                }
            }
            Call::BeginCapture => captures = u32::from(manager.begin_capture().is_ok()),
            Call::EndCapture => {
                captures = 0;
                manager.end_capture().expect("an end");
            }
            Call::Pin(own) => {
                let _ = manager.pin(all[own].address + GRANULE / 2);
            }
            Call::Look => {
                if manager.settle().is_ok() {
                    look(&manager, &all);
                }
            }
        }
        did.look(&mut manager);
    }
    let _ = manager.end_capture();
    end(&mut manager, all);
}

fn look(manager: &Manager<Simulated>, all: &[Expected]) {
    for of in all {
        for (word, expected) in (0..).zip(&of.words) {
            let found =
                manager.driver().state.borrow_mut().word(of.address + word * GRANULE).map(|word| *word);
            assert!(found.is_some(), "{:#x} has no memory", of.address);
            if expected.is_some() {
                assert_eq!(found, *expected, "word {word} of {:#x}", of.address);
            }
        }
    }
}

#[test]
fn the_program_is_told_that_a_copy_failed() {
    let check = |settle: fn(&mut Manager<Simulated>) -> bool| {
        let mut manager = manager();
        let mut allocate = |bytes| manager.allocate(7, 0, bytes).ok().flatten().expect("memory");
        let (from, to) = (allocate(BREAK_EVEN), allocate(2 * BREAK_EVEN));
        let copy = Copy { to, from, bytes: BREAK_EVEN };
        assert_eq!(manager.copy(to, from, BREAK_EVEN, copy), Ok(true));
        manager.driver().state.borrow_mut().copies_fail = true;
        assert!(settle(&mut manager));
        manager.driver().state.borrow_mut().copies_fail = false;
        assert!(manager.is_unsettled() && !manager.waits());
        // Once.
        assert_eq!((manager.settle(), manager.settle()), (Err(Failure(999)), Ok(())));
    };
    check(|manager| manager.settle_for_nobody() == Err(Failure(999)));
    check(|manager| manager.put_nothing_off() == Err(Failure(999)));
    check(|manager| manager.pause() == Err(Cant::Driver(Failure(999))));
}

#[test]
fn nobody_sees_that_memory_is_moved() {
    // A million calls where sweeps are whole.
    let programs: u32 = if std::env::var_os("SWEEP_SEED").is_some() { 2_000 } else { 25_000 };
    let first: u64 = std::env::var("SWEEP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let mut did = Did::default();
    for program in 0..programs {
        run(first.wrapping_add(program.into()).wrapping_mul(0x9e37_79b9_7f4a_7c15), 40, &mut did);
    }
    // A part of the sweep meets what is rare less often.
    let some = programs / 500;
    assert!(did.moved > 5 * some && did.copied > some && did.of_host > 0, "{did:?}");
    assert!(did.failed > 5 * some && did.paused > 5 * some && did.not_paused > some, "{did:?}");
    assert!(did.not_resumed > some && did.no_room > some && did.halfway > some, "{did:?}");
    assert!(did.dropped > some && did.stayed > 0, "{did:?}");
}
