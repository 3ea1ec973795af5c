//! The window: hostile sessions cannot reach or read another session's parts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vm_bridge::ring::SIZES;
use vm_bridge::wire::preamble::{Preamble, Token};
use vm_bridge::wire::{code, control};

use crate::place::Place;
use crate::raw::{Lane, begin, begin_with, challenge, connect, give, open, take};

const PAGE: u64 = 4096;
/// Where memory is mapped.
const AT: u64 = 0x2000_0000_0000;

#[test]
fn only_programs_that_map_the_window_may_have_parts_of_it() {
    let place = Place::new();
    let window = place.window();
    let (stream, _token) = begin(&place);
    assert_eq!(take(&stream, PAGE, false), Err(code::NOT_PERMITTED));
    assert_eq!(give(&stream, [control::PROVE, 0, 0, 0]), code::INVALID_VALUE, "there is no challenge");
    let [first, second] = challenge(&stream, &window);
    let wrong = [control::PROVE, first, second ^ 1, 0];
    assert_eq!(give(&stream, wrong), code::INVALID_VALUE);
    let right = [control::PROVE, first, second, 0];
    assert_eq!(give(&stream, right), code::INVALID_VALUE, "a challenge is answered once");
    assert_eq!(take(&stream, PAGE, true), Err(code::NOT_PERMITTED));
    // Another session's is of no use.
    let (other, _token) = begin(&place);
    let answer = challenge(&other, &window);
    challenge(&stream, &window);
    assert_eq!(give(&stream, [control::PROVE, answer[0], answer[1], 0]), code::INVALID_VALUE);
    let [first, second] = challenge(&stream, &window);
    assert_eq!(give(&stream, [control::PROVE, first, second, 0]), 0);
    assert!(take(&stream, PAGE, false).is_ok());
    assert_eq!(give(&other, [control::PROVE, answer[0], answer[1], 0]), 0);
}

#[test]
fn a_part_is_free_when_its_worker_maps_nothing_of_it() {
    let place = Place::new();
    let window = place.window();
    let (stream, token) = begin_with(&place, &window);
    let mut lane = Lane::begin(&place, token);
    let device = lane.allocate(PAGE);
    let (start, mark) = take(&stream, 4 * PAGE, false).expect("a part");
    let write = |lane: &mut Lane, at: u64| lane.call("cuMemcpyDtoH_v2", &[device, PAGE, 0, at], &[]).0;
    // A page of it is mapped, and the driver knows that.
    assert_eq!(give(&stream, [control::WINDOW, AT, PAGE, start]), 0);
    assert_eq!(lane.call("cuMemHostAlloc", &[AT, 0], &[]).0, 0);
    assert_eq!(lane.call("cuMemHostAlloc", &[AT, 0], &[]).0, code::INVALID_VALUE, "it has it already");
    assert_eq!(give(&stream, [control::GIVE, start, 0, 0]), code::NOT_READY);
    assert_eq!(write(&mut lane, AT), 0);
    let (other, other_token) = begin_with(&place, &window);
    assert_eq!(give(&other, [control::GIVE, start, 0, 0]), code::INVALID_VALUE, "it is another's");
    let (second, _) = take(&other, PAGE, false).expect("a part");
    assert_eq!(second, start + 4 * PAGE);
    assert_eq!(lane.call("cuMemFreeHost", &[AT, 0], &[]).0, 0);
    assert_eq!(write(&mut lane, AT), code::INVALID_VALUE);
    // The worker unmaps memory that was never registered.
    assert_eq!(give(&stream, [control::WINDOW, AT, 2 * PAGE, start]), 0);
    assert_eq!(give(&stream, [control::WINDOW, AT + 2 * PAGE, 2 * PAGE, start]), 0);
    assert_eq!(write(&mut lane, AT), 0);
    let mut there = [0; 8];
    window.read_exact_at(&mut there, start).expect("the window");
    assert_ne!(u64::from_ne_bytes(there), mark);
    assert_eq!(give(&stream, [control::GIVE, start, 0, 0]), 0);
    assert_eq!([AT, AT + 2 * PAGE].map(|at| write(&mut lane, at)), [code::INVALID_VALUE; 2]);
    assert_eq!(give(&stream, [control::GIVE, start, 0, 0]), code::INVALID_VALUE, "it is free already");
    let (third, _) = take(&other, 4 * PAGE, false).expect("a part");
    assert_eq!(third, start);
    // A lane is in use until its worker does not map it, and the program sees when that is.
    let (start, _) = take(&other, SIZES[1], true).expect("a part");
    window.write_all_at(&[0; 8], start).expect("the window");
    let (ring, answer) = open(&place, Preamble::Ring(other_token), &[start, SIZES[1]]);
    assert_eq!(answer, 0);
    assert_eq!(give(&other, [control::GIVE, start, 0, 0]), code::NOT_READY);
    ring.shutdown(std::net::Shutdown::Write).expect("shut down");
    assert!(crate::raw::rest(&ring, "the lane").len() < 64);
    assert_eq!(give(&other, [control::GIVE, start, 0, 0]), 0);
    // A part stays in use until the worker has exited, unless the driver confirms that it has unpinned its pages.
    let (start, _) = take(&stream, PAGE, false).expect("a part");
    assert_eq!(give(&stream, [control::WINDOW, AT, PAGE, start]), 0);
    assert_eq!(lane.call("cuMemHostAlloc", &[AT, 0], &[]).0, 0);
    assert_eq!(lane.call("cuCtxSetCurrent", &[0], &[]).0, 0);
    assert_eq!(lane.call("cuMemFreeHost", &[AT, 1], &[]).0, code::INVALID_CONTEXT);
    assert_eq!(give(&stream, [control::GIVE, start, 0, 0]), code::NOT_READY);
    drop((stream, lane));
    place.until("its worker ends", || place.workers().len() == 1);
    place.until("its parts are free", || {
        let (next, _) = take(&other, PAGE, false).expect("a part");
        assert_eq!(give(&other, [control::GIVE, next, 0, 0]), 0);
        next == start
    });
}

#[test]
fn nothing_is_left_in_a_part_for_the_next_session() {
    let place = Place::new();
    let window = place.window();
    for by_worker in [true, false] {
        let (stream, _token) = begin_with(&place, &window);
        let (start, _) = take(&stream, 1 << 20, false).expect("a part");
        window.write_all_at(&vec![0x5a; 1 << 20], start).expect("the window");
        if !by_worker {
            assert_eq!(give(&stream, [control::GIVE, start, 0, 0]), 0);
        }
        drop(stream);
        place.until("the worker ends", || place.workers().is_empty());
        let (next, _token) = begin_with(&place, &window);
        let (again, mark) = take(&next, 1 << 20, false).expect("a part");
        assert_eq!(again, start);
        assert_eq!(foreign(&window, start, 1 << 20, &[mark]), None);
        drop(next);
        place.until("the workers end", || place.workers().is_empty());
    }
}

/// The first word of a part that is neither 0 nor one of these.
fn foreign(window: &File, start: u64, len: u64, own: &[u64]) -> Option<(u64, u64)> {
    let mut bytes = vec![0; len as usize];
    window.read_exact_at(&mut bytes, start).expect("the window");
    foreign_in(&bytes, own)
}

fn foreign_in(bytes: &[u8], own: &[u64]) -> Option<(u64, u64)> {
    let words = bytes.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes));
    (0u64..).zip(words).find(|(_, word)| *word != 0 && !own.contains(word))
}

/// An action of a hostile session. It chooses among the parts of both sessions.
#[derive(Clone, Copy, Debug)]
enum Act {
    Take {
        pages: u64,
    },
    TakeLane,
    Give {
        part: usize,
        shift: bool,
    },
    Map {
        part: usize,
        is_any: bool,
        pages: u64,
        place: u64,
    },
    Register {
        place: u64,
    },
    Free {
        place: u64,
        has_ended: bool,
    },
    Write {
        place: u64,
    },
    Read {
        place: u64,
    },
    Ring {
        part: usize,
    },
    CloseRing,
    ResetContext,
    End,
    /// Sends what is no frame: the worker ends the session.
    Break,
}

fn act() -> impl Strategy<Value = Act> {
    let (part, place) = (0usize..12, 0u64..4);
    prop_oneof![
        6 => (1u64..5).prop_map(|pages| Act::Take { pages }),
        1 => Just(Act::TakeLane),
        6 => (part.clone(), prop::bool::weighted(0.1)).prop_map(|(part, shift)| Act::Give { part, shift }),
        8 => (part.clone(), prop::bool::weighted(0.1), 1u64..5, place.clone())
            .prop_map(|(part, is_any, pages, place)| Act::Map { part, is_any, pages, place }),
        4 => place.clone().prop_map(|place| Act::Register { place }),
        4 => (place.clone(), any::<bool>()).prop_map(|(place, has_ended)| Act::Free { place, has_ended }),
        6 => place.clone().prop_map(|place| Act::Write { place }),
        6 => place.prop_map(|place| Act::Read { place }),
        2 => part.prop_map(|part| Act::Ring { part }),
        2 => Just(Act::CloseRing),
        1 => Just(Act::ResetContext),
        1 => Just(Act::End),
        1 => Just(Act::Break),
    ]
}

/// A part, as the test knows it.
#[derive(Clone, Copy, Debug)]
struct Part {
    end: u64,
    owner: u64,
    /// Its owner has asked for its end, and has no answer yet.
    ends: bool,
    has_ring: bool,
}

/// State that both sessions share with the test.
struct World<'a> {
    place: &'a Place,
    window: File,
    parts: Mutex<BTreeMap<u64, Part>>,
    /// Parts that there are or were, to be named wrongly.
    named: Mutex<Vec<(u64, u64)>>,
}

/// A session of one side.
struct Hostile<'a> {
    world: &'a World<'a>,
    /// The word that its worker writes.
    tag: u64,
    own: Vec<u64>,
    stream: UnixStream,
    token: Token,
    lane: Lane,
    device: u64,
    context: bool,
    rings: Vec<UnixStream>,
}

/// Bytes that are copied at a time.
const COPY: u64 = PAGE;

impl<'a> Hostile<'a> {
    fn begin(world: &'a World<'a>) -> Self {
        static TAGS: AtomicU64 = AtomicU64::new(0xabcd_0000_0000_0001);
        let tag = TAGS.fetch_add(1, Ordering::SeqCst);
        let (stream, token) = begin_with(world.place, &world.window);
        let mut lane = Lane::begin(world.place, token);
        let device = lane.allocate(COPY);
        Self { world, tag, own: vec![tag], stream, token, lane, device, context: true, rings: Vec::new() }
    }

    /// From now on its parts may be another's.
    fn may_lose_all(&self) {
        let mut parts = self.world.parts.lock().expect("parts");
        parts.values_mut().filter(|part| part.owner == self.tag).for_each(|part| part.ends = true);
    }

    fn own_part(&self, at: usize) -> Option<(u64, u64)> {
        let parts = self.world.parts.lock().expect("parts");
        let own: Vec<_> = parts.iter().filter(|(_, part)| part.owner == self.tag).collect();
        let (start, part) = own.get(at.checked_rem(own.len())?)?;
        Some((**start, part.end - *start))
    }

    fn named(&self, at: usize) -> Option<(u64, u64)> {
        let named = self.world.named.lock().expect("names");
        named.iter().rev().nth(at).copied()
    }

    fn took(&mut self, (start, mark): (u64, u64), len: u64) {
        self.own.push(mark);
        let part = Part { end: start + len, owner: self.tag, ends: false, has_ring: false };
        let mut parts = self.world.parts.lock().expect("parts");
        parts.retain(|at, known| {
            let overlaps = *at < part.end && start < known.end;
            assert!(!overlaps || known.ends, "{start:#x} is a part of {:#x}'s", known.owner);
            !overlaps
        });
        parts.insert(start, part);
        drop(parts);
        self.world.named.lock().expect("names").push((start, len));
        assert_eq!(foreign(&self.world.window, start, len, &[mark]), None, "{start:#x} is not empty");
    }

    /// The parts that it has hold nothing of the other.
    fn check(&self) {
        let parts: Vec<_> = {
            let parts = self.world.parts.lock().expect("parts");
            parts
                .iter()
                .filter(|(_, part)| part.owner == self.tag)
                .map(|(start, part)| (*start, *part))
                .collect()
        };
        for (start, part) in parts.into_iter().filter(|(_, part)| !part.has_ring) {
            let found = foreign(&self.world.window, start, part.end - start, &self.own);
            assert_eq!(found, None, "in {:#x}'s part at {start:#x}", self.tag);
        }
    }

    fn copy(&mut self, name: &str, place: u64) -> u32 {
        self.lane.call(name, &[self.device, COPY, 0, AT + place * 4 * PAGE], &[]).0
    }

    /// Fails where the session ends by it.
    fn act(&mut self, act: Act) -> bool {
        match act {
            Act::Take { pages } => {
                if let Ok(took) = take(&self.stream, pages * PAGE, false) {
                    self.took(took, pages * PAGE);
                }
            }
            Act::TakeLane => {
                if let Ok(took) = take(&self.stream, SIZES[1], true) {
                    self.took(took, SIZES[1]);
                }
            }
            Act::Give { part, shift } => {
                let Some((start, _)) = self.named(part) else { return true };
                let start = if shift { start + PAGE } else { start };
                let is_own = {
                    let mut parts = self.world.parts.lock().expect("parts");
                    let part = parts.get_mut(&start).filter(|part| part.owner == self.tag);
                    part.is_some_and(|part| !std::mem::replace(&mut part.ends, true))
                };
                let answer = give(&self.stream, [control::GIVE, start, 0, 0]);
                assert!(is_own || answer == code::INVALID_VALUE, "{start:#x}: {answer}");
                if is_own {
                    let mut parts = self.world.parts.lock().expect("parts");
                    match answer {
                        0 => parts.retain(|at, part| *at != start || part.owner != self.tag),
                        code::NOT_READY => {
                            parts.get_mut(&start).expect("it is still its own").ends = false;
                        }
                        other => panic!("{start:#x}: {other}"),
                    }
                }
            }
            Act::Map { part, is_any, pages, place } => {
                let named = if is_any { self.named(part) } else { self.own_part(part) };
                let Some((start, _)) = named else { return true };
                let len = pages * PAGE;
                // The gateway knows parts by where they begin.
                let own = self.world.parts.lock().expect("parts").get(&start).copied();
                let own = own.filter(|part| part.owner == self.tag);
                // A session that writes into its own lanes ends itself.
                if own.is_some_and(|part| part.end - start == SIZES[1]) {
                    return true;
                }
                let is_own = own.is_some_and(|part| start + len <= part.end);
                let order = [control::WINDOW, AT + place * 4 * PAGE, len, start];
                if is_own {
                    give(&self.stream, order);
                } else {
                    // It ends the session, and its parts may be another's before that is known here.
                    self.may_lose_all();
                    let bytes: Vec<u8> = order.iter().flat_map(|word| word.to_ne_bytes()).collect();
                    self.stream.write_all(&bytes).expect("sent");
                    assert_eq!(crate::raw::rest(&self.stream, "another's part"), []);
                    return false;
                }
            }
            Act::Register { place } => {
                self.lane.call("cuMemHostAlloc", &[AT + place * 4 * PAGE, 0], &[]);
            }
            Act::Free { place, has_ended } => {
                self.lane.call("cuMemFreeHost", &[AT + place * 4 * PAGE, has_ended.into()], &[]);
            }
            Act::Write { place } => {
                if self.context {
                    let bytes = self.tag.to_ne_bytes().repeat(COPY as usize / 8);
                    assert_eq!(self.lane.call("cuMemcpyHtoD_v2", &[self.device, COPY, 0, 0], &bytes).0, 0);
                    self.copy("cuMemcpyDtoH_v2", place);
                }
            }
            Act::Read { place } => {
                if self.context && self.copy("cuMemcpyHtoD_v2", place) == 0 {
                    let (code, bytes) = self.lane.call("cuMemcpyDtoH_v2", &[self.device, COPY, 0, 0], &[]);
                    assert_eq!(code, 0);
                    let found = foreign_in(&bytes, &self.own);
                    assert_eq!(found, None, "{:#x} reads another's bytes", self.tag);
                }
            }
            Act::Ring { part } => {
                let Some((start, len)) = self.named(part) else { return true };
                let is_own = {
                    let mut parts = self.world.parts.lock().expect("parts");
                    let part = parts.get_mut(&start).filter(|part| part.owner == self.tag);
                    part.is_some_and(|part| {
                        let is_lane = len == SIZES[1] && part.end - start == len;
                        part.has_ring |= is_lane;
                        is_lane
                    })
                };
                if is_own {
                    self.world.window.write_all_at(&[0; 8], start).expect("the window");
                    let (ring, answer) = open(self.world.place, Preamble::Ring(self.token), &[start, len]);
                    assert_eq!(answer, 0);
                    self.rings.push(ring);
                } else {
                    let mut ring = connect(self.world.place);
                    let words = [start, len].map(u64::to_ne_bytes);
                    ring.write_all(&[&Preamble::Ring(self.token).to_bytes(), words.as_flattened()].concat())
                        .expect("sent");
                    let said = crate::raw::rest(&ring, "another's part");
                    assert!(said.is_empty() || said[..8] != [0; 8], "{start:#x} {len:#x}");
                }
            }
            Act::CloseRing => {
                if let Some(ring) = self.rings.pop() {
                    ring.shutdown(std::net::Shutdown::Write).expect("shut down");
                    crate::raw::rest(&ring, "a lane");
                }
            }
            // Without a current context the driver unregisters nothing.
            Act::ResetContext => {
                self.lane.call("cuCtxSetCurrent", &[0], &[]);
                self.context = false;
            }
            Act::End => return false,
            Act::Break => {
                self.may_lose_all();
                self.lane.break_off();
                assert_eq!(crate::raw::rest(&self.stream, "no frame"), []);
                return false;
            }
        }
        true
    }
}

/// Two hostile sessions at the same time: whatever they do, neither's worker reads or writes a byte of the other's parts.
#[test]
fn no_session_reaches_another_ones_parts() {
    let place = Place::new();
    let config = Config { cases: 16, max_shrink_iters: 64, failure_persistence: None, ..Config::default() };
    let acts = || prop::collection::vec(act(), 40..80);
    let run = |(left, right): (Vec<Act>, Vec<Act>)| {
        let window = place.window();
        let world = World { place: &place, window, parts: Mutex::default(), named: Mutex::default() };
        let side = |acts: Vec<Act>| {
            let mut session = Hostile::begin(&world);
            for act in acts {
                if !session.act(act) {
                    session.may_lose_all();
                    session = Hostile::begin(&world);
                }
                session.check();
            }
            session.may_lose_all();
        };
        std::thread::scope(|scope| {
            let sides = [left, right].map(|acts| scope.spawn(|| side(acts)));
            sides.map(|side| side.join().is_ok())
        })
    };
    let result = TestRunner::new(config).run(&(acts(), acts()), |acts| {
        prop_assert_eq!(run(acts), [true, true]);
        Ok(())
    });
    result.expect("neither reaches the other's");
}
