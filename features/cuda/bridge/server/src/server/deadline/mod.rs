//! The deadline: what a program has on a device and that makes no progress for so long ends its session.
//!
//! Each lane counts what it puts on a stream, and marks the stream, with an event behind every [`GROUP`] of them. A thread looks at the marks,
//! and asks streams whether what has no mark yet is done. Each stream by itself is late when nothing of it was seen to be done for the deadline
//! times what is before its next mark, or its end, and never more than [`MOST`]. So no other stream's progress hides a kernel that does not end.
//!
//! | what | counts |
//! | --- | --- |
//! | a kernel, a copy, a fill | one |
//! | a graph | its nodes, at most [`GROUP`]: what is in it, functions of the program and waits too, is its work |
//! | a wait for an event or a value, a function of the program | nothing: there is a mark before it, and a gate behind it. As long as the gate is not reached nothing is late |
//! | the default stream and those that it waits for | as if they waited for each other's events |
//!
//! Only a lane can name the default stream of its thread: it marks that before whatever else may take long, when it is idle, and at its end.
//!
//! The same marks say when a program keeps a device busy, where it has a [time slice](pace).

mod marks;
mod pace;
mod threads;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::session::{Session, locked};
use super::slice::Slice;
use super::sys::{Driver, Word};
use crate::wire::code;

pub(super) use marks::{Marks, Pending};
use pace::{AHEAD, Looked, Pace};

/// How much a stream is marked behind.
const GROUP: u64 = 32;
/// The most deadlines that work between two marks has.
const MOST: u32 = 64;
/// Handles of default streams: that of the context, and the thread's own.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

/// What the work of a stream waits for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Order {
    /// All that block: it is the default stream.
    Legacy,
    /// The default stream.
    Blocks,
    /// Nothing else.
    Free,
}

/// What streams of a context know of each other.
#[derive(Debug, Default)]
struct Group {
    /// How much was put on the default stream.
    on_legacy: AtomicU64,
    /// Was anything put on one that blocks since?
    on_others: AtomicBool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Key {
    Handle(u64),
    Legacy { context: u64 },
    OfThread { context: u64, lane: u64 },
}

/// A stream, as lanes know it.
#[derive(Debug)]
pub(super) struct Stream {
    number: u64,
    key: Key,
    /// The driver's handle.
    handle: u64,
    context: u64,
    order: Order,
    group: Arc<Group>,
    /// How much was put on it, and how much of that is before its last mark.
    put: AtomicU64,
    marked: AtomicU64,
    /// How much of the default stream's work it is known to be behind.
    seen: AtomicU64,
    /// Copies and fills that are being made.
    copying: AtomicU32,
    gone: AtomicBool,
}

impl Stream {
    /// Is it the default stream of a thread, which only that can name?
    fn is_own(&self) -> bool {
        matches!(self.key, Key::OfThread { .. })
    }

    fn has_tail(&self) -> bool {
        self.put.load(Relaxed) > self.marked.load(Relaxed)
    }
}

/// An event behind work of a stream.
#[derive(Debug)]
pub(super) struct Mark {
    event: u64,
    /// How much is before it.
    upto: u64,
    /// Is it behind a wait?
    is_gate: bool,
    at: Instant,
}

/// A stream, as who looks at it knows it.
#[derive(Debug)]
pub(super) struct Entry {
    stream: Arc<Stream>,
    marks: VecDeque<Mark>,
    /// How much of it was seen to be done.
    reached: u64,
    /// How long nothing of it was; `None` while there is nothing to do.
    waited: Option<Duration>,
    /// When it was last seen that it had waited.
    freed: Option<Instant>,
    destroyed: bool,
}

impl Entry {
    /// Does it wait for what is no work of its own?
    fn waits(&self) -> bool {
        self.marks.front().is_some_and(|mark| mark.is_gate)
    }

    /// How long ago a mark was put there, and what was waited for before it had come.
    fn since(&self, mark: &Mark) -> Duration {
        self.freed.map_or(mark.at, |freed| freed.max(mark.at)).elapsed()
    }

    /// Is anything on it, as far as who looks can know?
    fn has_any(&self) -> bool {
        let stream = &*self.stream;
        let has_tail = !stream.is_own() && !self.destroyed && stream.put.load(SeqCst) > self.reached;
        !self.marks.is_empty() || has_tail || stream.copying.load(SeqCst) > 0
    }
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    numbers: HashMap<Key, u64>,
    groups: HashMap<u64, Arc<Group>>,
    /// Events of contexts that are not in use.
    events: HashMap<u64, Vec<u64>>,
    /// Executable graphs, by their handles here: what they count.
    graphs: HashMap<u64, u64>,
    /// Primary contexts of devices.
    primaries: HashMap<u64, u64>,
    made: u64,
    /// How long calls are under way that end contexts, and how many are.
    ending: (Duration, u32),
}

/// What looks at a session's streams.
#[derive(Debug)]
pub(super) struct Watch {
    deadline: Option<Duration>,
    pace: Option<Pace>,
    state: Mutex<State>,
    lanes: AtomicU64,
    /// Captures that begin now: no stream is asked meanwhile, which would end them.
    beginning: AtomicU32,
    asking: Mutex<()>,
    /// How often the thread that is there for that has missed a look.
    missed: AtomicU32,
}

/// Calls of a driver for this, with a context.
struct On<'a> {
    driver: &'a Driver,
    context: u64,
}

impl On<'_> {
    fn call<const N: usize>(&self, name: &str, words: &[Word], memory: &mut [u64; N]) -> u32 {
        self.driver.named(name, words, memory)
    }

    /// Does something while the context is current.
    fn within<T>(&self, act: impl FnOnce(&Self) -> T) -> T {
        if current(self.driver) == self.context {
            return act(self);
        }
        let pushed = self.call("cuCtxPushCurrent_v2", &[Word::Is(self.context)], &mut [0]) == 0;
        let result = act(self);
        if pushed {
            self.call("cuCtxPopCurrent_v2", &[Word::At(0)], &mut [0]);
        }
        result
    }

    fn new_event(&self) -> Option<u64> {
        const DISABLE_TIMING: u64 = 2;
        let mut memory = [0];
        let words = [Word::At(0), Word::Is(DISABLE_TIMING)];
        (self.call("cuEventCreate", &words, &mut memory) == 0).then_some(memory[0])
    }

    fn record(&self, event: u64, stream: u64) -> bool {
        self.call("cuEventRecord", &[Word::Is(event), Word::Is(stream)], &mut [0]) == 0
    }

    /// Would it be recorded, or refused, as a capture is going on?
    fn is_captured(&self, stream: u64) -> bool {
        let mut memory = [0];
        let result = self.call("cuStreamIsCapturing", &[Word::Is(stream), Word::At(0)], &mut memory);
        result != 0 || memory[0] & 0xffff_ffff != 0
    }
}

fn current(driver: &Driver) -> u64 {
    let mut memory = [0];
    driver.named("cuCtxGetCurrent", &[Word::At(0)], &mut memory);
    memory[0]
}

impl Watch {
    pub(super) fn new(deadline: Option<Duration>, slice: Option<Slice>) -> Self {
        Self {
            deadline,
            pace: slice.map(Pace::new),
            state: Mutex::default(),
            lanes: AtomicU64::new(0),
            beginning: AtomicU32::new(0),
            asking: Mutex::default(),
            missed: AtomicU32::new(0),
        }
    }

    /// How much a stream is marked behind.
    fn group(&self) -> u64 {
        self.pace.as_ref().map_or(GROUP, Pace::group)
    }

    /// Looks at all streams. So much time has passed since the last look.
    fn look(&self, session: &Session, passed: Duration) -> Looked {
        let mut state = locked(&self.state);
        let State { entries, events, ending, .. } = &mut *state;
        let mut looked = Looked::default();
        if ending.1 > 0 {
            ending.0 += passed;
            looked.late = self.deadline.is_some_and(|deadline| ending.0 > deadline.saturating_mul(MOST));
        }
        let passed = match &self.pace {
            // It may be what is held up that is waited for. As much counts as the slice is, so that it does not wait for ever.
            Some(pace) if session.turn.is_held() => pace.share(passed),
            _ => passed,
        };
        entries.retain(|_, entry| {
            let progress = self.advance(session, entry, events, &mut looked);
            let left = entry.marks.front().map_or(entry.stream.put.load(Relaxed), |mark| mark.upto);
            let work = left.saturating_sub(entry.reached);
            let waits = entry.waits();
            entry.waited = match entry.waited {
                _ if entry.marks.is_empty() && (work == 0 || entry.stream.is_own()) => None,
                Some(waited) if !progress && !waits => Some(waited + passed),
                _ => Some(Duration::ZERO),
            };
            if let (Some(deadline), Some(waited)) = (self.deadline, entry.waited) {
                looked.late |= waited > deadline.saturating_mul((work.min(MOST.into()) as u32).max(1));
            }
            let any = entry.has_any();
            looked.any |= any;
            looked.busy |= any && !waits;
            looked.ahead += entry.marks.iter().take_while(|mark| !mark.is_gate).count() as u32;
            looked.slow |= !waits && entry.marks.front().is_some_and(|mark| entry.since(mark) > AHEAD);
            !(entry.destroyed && entry.marks.is_empty())
        });
        if let Some(pace) = &self.pace {
            pace.are_ahead(looked.ahead);
        }
        looked
    }

    /// Learns what of a stream is done; whether anything more is.
    fn advance(
        &self,
        session: &Session,
        entry: &mut Entry,
        events: &mut HashMap<u64, Vec<u64>>,
        looked: &mut Looked,
    ) -> bool {
        let stream = &*entry.stream;
        let on = On { driver: session.driver(), context: stream.context };
        let mut progress = false;
        while let Some(mark) = entry.marks.front() {
            // A context that has failed does nothing more, and says so to whoever asks.
            let asked = on.within(|on| on.call("cuEventQuery", &[Word::Is(mark.event)], &mut [0]));
            if asked == code::NOT_READY {
                return progress;
            }
            let since = entry.since(mark);
            if mark.is_gate {
                entry.freed = Some(Instant::now());
            } else {
                looked.soon |= since <= AHEAD;
                looked.slow |= since > AHEAD;
            }
            entry.reached = entry.reached.max(mark.upto);
            events.entry(stream.context).or_default().push(mark.event);
            entry.marks.pop_front();
            progress = true;
        }
        let put = stream.put.load(SeqCst);
        if put == entry.reached || entry.destroyed || stream.is_own() {
            return progress;
        }
        // Who is idle has it, and may wait for what is locked here.
        let Ok(_asking) = self.asking.try_lock() else { return progress };
        if self.beginning.load(SeqCst) > 0 {
            return progress;
        }
        let is_done = on.within(|on| {
            // What is captured is not on its way.
            session.may_capture() && on.is_captured(stream.handle)
                || on.call("cuStreamQuery", &[Word::Is(stream.handle)], &mut [0]) != code::NOT_READY
        });
        if is_done {
            entry.reached = put;
        }
        progress || is_done
    }

    /// Marks a stream: its work as it is now, or that it has waited.
    fn mark(&self, session: &Session, stream: &Stream, is_gate: bool) {
        let upto = stream.put.load(Relaxed);
        stream.marked.store(upto, Relaxed);
        let on = On { driver: session.driver(), context: stream.context };
        let spare = locked(&self.state).events.get_mut(&stream.context).and_then(Vec::pop);
        let event = on.within(|on| {
            if session.may_capture() && on.is_captured(stream.handle) {
                return Err(spare);
            }
            let event = spare.or_else(|| on.new_event()).ok_or(None)?;
            // It may take as long as the stream is full: nothing is locked meanwhile.
            if on.record(event, stream.handle) { Ok(event) } else { Err(Some(event)) }
        });
        let mut state = locked(&self.state);
        match (event, state.entries.get_mut(&stream.number)) {
            (Ok(event), Some(entry)) => {
                entry.marks.push_back(Mark { event, upto, is_gate, at: Instant::now() });
                if let Some(pace) = self.pace.as_ref().filter(|_| !is_gate) {
                    pace.marked();
                    pace.put();
                }
            }
            (Ok(event) | Err(Some(event)), _) => {
                state.events.entry(stream.context).or_default().push(event);
            }
            (Err(None), _) => {}
        }
    }

    /// The stream of a handle of the driver's that a lane uses.
    fn stream(&self, driver: &Driver, handle: u64, lane: u64) -> Option<Arc<Stream>> {
        let context = if handle <= PER_THREAD {
            current(driver)
        } else {
            let mut memory = [0];
            driver.named("cuStreamGetCtx", &[Word::Is(handle), Word::At(0)], &mut memory);
            memory[0]
        };
        if context == 0 {
            return None;
        }
        let (key, order) = match handle {
            LEGACY => (Key::Legacy { context }, Order::Legacy),
            PER_THREAD => (Key::OfThread { context, lane }, Order::Blocks),
            _ => {
                let mut memory = [0];
                driver.named("cuStreamGetFlags", &[Word::Is(handle), Word::At(0)], &mut memory);
                let order = if memory[0] & 1 == 0 { Order::Blocks } else { Order::Free };
                (Key::Handle(handle), order)
            }
        };
        let mut state = locked(&self.state);
        if let Some(entry) = state.numbers.get(&key).and_then(|number| state.entries.get(number)) {
            return Some(entry.stream.clone());
        }
        state.made += 1;
        let number = state.made;
        let stream = Arc::new(Stream {
            number,
            key,
            handle,
            context,
            order,
            group: state.groups.entry(context).or_default().clone(),
            put: AtomicU64::new(0),
            marked: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            copying: AtomicU32::new(0),
            gone: AtomicBool::new(false),
        });
        let entry = Entry {
            stream: stream.clone(),
            marks: VecDeque::new(),
            reached: 0,
            waited: None,
            freed: None,
            destroyed: false,
        };
        state.entries.insert(number, entry);
        state.numbers.insert(key, number);
        Some(stream)
    }

    /// The default stream of a context, where it was used.
    fn legacy(&self, context: u64) -> Option<Arc<Stream>> {
        let state = locked(&self.state);
        let number = state.numbers.get(&Key::Legacy { context })?;
        state.entries.get(number).map(|entry| entry.stream.clone())
    }

    /// What a stream and the default one wait for of each other is before a gate.
    fn order(&self, session: &Session, stream: &Stream) {
        let group = &stream.group;
        match stream.order {
            Order::Free => {}
            Order::Legacy => {
                if group.on_others.load(Relaxed) {
                    self.close(session, stream);
                    self.mark(session, stream, true);
                    group.on_others.store(false, Relaxed);
                }
                group.on_legacy.fetch_add(1, Relaxed);
            }
            Order::Blocks => {
                let on_legacy = group.on_legacy.load(Relaxed);
                if stream.seen.load(Relaxed) != on_legacy {
                    // Its work is marked before what it would wait for, too.
                    if let Some(legacy) = self.legacy(stream.context) {
                        self.close(session, &legacy);
                    }
                    self.close(session, stream);
                    self.mark(session, stream, true);
                    stream.seen.store(on_legacy, Relaxed);
                }
                group.on_others.store(true, Relaxed);
            }
        }
    }

    /// Marks what of a stream has no mark yet.
    fn close(&self, session: &Session, stream: &Stream) {
        if stream.has_tail() {
            self.mark(session, stream, false);
        }
    }

    /// What a graph counts.
    fn weigh(driver: &Driver, graph: u64) -> u64 {
        /// `CU_GRAPH_NODE_TYPE_GRAPH` and `_CONDITIONAL`, which have more in them.
        const NESTS: [u64; 2] = [4, 13];
        let mut count = [0];
        let words = [Word::Is(graph), Word::Is(0), Word::At(0)];
        if driver.named("cuGraphGetNodes", &words, &mut count) != 0 || count[0] >= GROUP {
            return GROUP;
        }
        let mut memory = vec![0; GROUP as usize + 1];
        memory[0] = count[0];
        let words = [Word::Is(graph), Word::At(1), Word::At(0)];
        // The fake driver counts nodes, and has no handles of them.
        let listed = driver.named("cuGraphGetNodes", &words, &mut memory) == 0;
        let nests = memory[1..].iter().take(count[0] as usize).any(|node| {
            let mut kind = [0];
            let result = driver.named("cuGraphNodeGetType", &[Word::Is(*node), Word::At(0)], &mut kind);
            result == 0 && NESTS.contains(&(kind[0] & 0xffff_ffff))
        });
        if listed && nests { GROUP } else { count[0].max(1) }
    }
}
