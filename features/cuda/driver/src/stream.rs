//! Streams: each runs its work in order in a thread of its own, behind what the rules of default streams and events say.

use crate::{
    conditional::{self, How},
    copy::{Copy, Fill},
    error::{Error, Result},
    event::Awaited,
    exec::Step,
    memory::{By, READ_WRITE},
    module::Launch,
    state::{self, State},
    sys::{Callback, HostFunction},
    user_object::{self, Kept},
};
use std::{
    cell::Cell,
    collections::VecDeque,
    sync::{
        MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

/// `CU_STREAM_LEGACY`.
pub(crate) const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: u64 = 2;
const NON_BLOCKING: u32 = 1;

/// A place in a stream: done once that many items of it are.
pub(crate) type Mark = (u64, u64);

/// What a stream does.
#[derive(Clone)]
pub(crate) enum Work {
    Copy(Copy),
    Fill(Fill),
    Launch(Launch),
    Host {
        function: HostFunction,
        data: u64,
    },
    Callback {
        function: Callback,
        stream: u64,
        data: u64,
    },
    Record {
        event: u64,
    },
    /// Until another process has reached it.
    Await(Awaited),
    /// Only order: what it depends on.
    Nothing,
    /// A graph's memory is there.
    Allocate {
        at: u64,
    },
    /// It is there no more.
    Unallocate {
        at: u64,
    },
    /// Conditions are as at a launch of these.
    Assign(Vec<Step>),
    Conditional {
        handle: u64,
        how: How,
        graphs: Vec<Step>,
    },
    /// Objects that a graph kept until it had run.
    LetGo(Kept),
    /// `cuMemFreeAsync`.
    Free {
        at: u64,
    },
    Write {
        at: u64,
        value: u64,
        wide: bool,
    },
    Wait {
        at: u64,
        value: u64,
        wide: bool,
        flags: u32,
    },
}

struct Item {
    work: Work,
    behind: Vec<Mark>,
    _queued: Queued,
}

pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    /// The legacy default stream of its context.
    pub(crate) legacy: bool,
    queue: VecDeque<Item>,
    pub(crate) submitted: u64,
    pub(crate) done: u64,
    pub(crate) destroyed: bool,
    pub(crate) capture: Option<u64>,
    started: bool,
}

impl Stream {
    fn blocks(&self) -> bool {
        !self.legacy && self.flags & NON_BLOCKING == 0
    }
}

/// Bytes of the work queued on all streams.
static QUEUED: AtomicU64 = AtomicU64::new(0);
/// The limit of queued work. A GPU's driver has room for some thousand launches, and blocks then.
const MOST_QUEUED: u64 = 1 << 30;
/// Beyond this many queued bytes, a copy of pageable memory blocks instead of being staged.
const MOST_STAGED: u64 = 256 << 20;

/// The bytes of one queued item.
struct Queued(u64);

impl Queued {
    /// Counts an item, or fails if the limit is reached. Items that only free memory always succeed.
    fn new(work: &Work) -> Result<Self> {
        /// Bytes of an item.
        const ITEM: u64 = 256;
        let bytes = ITEM
            + match work {
                Work::Copy(Copy { staged: Some(bytes), .. }) => bytes.len() as u64,
                Work::Launch(launch) => launch.parameters.len() as u64,
                _ => 0,
            };
        let frees = matches!(work, Work::Free { .. } | Work::Unallocate { .. } | Work::LetGo(_));
        if QUEUED.load(Ordering::Relaxed) + bytes > MOST_QUEUED && !frees {
            return Err(Error::OutOfMemory);
        }
        QUEUED.fetch_add(bytes, Ordering::Relaxed);
        Ok(Self(bytes))
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        QUEUED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Returns whether a copy of so many bytes may be staged.
pub(crate) fn may_stage(bytes: usize) -> bool {
    QUEUED.load(Ordering::Relaxed) + bytes as u64 <= MOST_STAGED
}

impl State {
    /// Whether a place in a stream was reached; a stream that is gone did all of it.
    pub(crate) fn is_done(&self, (stream, count): Mark) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.done >= count)
    }

    /// The ends of all streams of a context.
    pub(crate) fn marks_of(&self, context: u64) -> Vec<Mark> {
        let of = self.streams.iter().filter(|(_, stream)| stream.context == context);
        of.map(|(&id, stream)| (id, stream.submitted)).collect()
    }

    fn add_stream(&mut self, context: u64, flags: u32, priority: i32, legacy: bool) -> u64 {
        let id = self.id();
        self.streams.insert(
            id,
            Stream {
                context,
                flags,
                priority,
                legacy,
                queue: VecDeque::new(),
                submitted: 0,
                done: 0,
                destroyed: false,
                capture: None,
                started: false,
            },
        );
        id
    }

    /// The stream of a handle: default streams are the current context's.
    pub(crate) fn stream(&mut self, handle: u64) -> Result<u64> {
        let context = self.current()?;
        let key = match handle {
            0 | LEGACY => (context, None),
            PER_THREAD => (context, Some(thread::current().id())),
            _ => {
                let stream = self.streams.get(&handle).filter(|stream| !stream.destroyed && !stream.legacy);
                let context = stream.ok_or(Error::InvalidHandle)?.context;
                let context = self.contexts.get(&context).ok_or(Error::ContextIsDestroyed)?;
                return context.error.map_or(Ok(handle), Err);
            }
        };
        if let Some(&id) = self.defaults.get(&key) {
            return Ok(id);
        }
        let id = self.add_stream(context, 0, 0, key.1.is_none());
        self.defaults.insert(key, id);
        Ok(id)
    }

    /// Makes a stream end once it has done what was submitted.
    pub(crate) fn retire(&mut self, id: u64) {
        self.abandon(id);
        match self.streams.get_mut(&id) {
            Some(stream) if stream.started => (stream.destroyed, stream.capture) = (true, None),
            _ => drop(self.streams.remove(&id)),
        }
        state::changed();
    }

    /// Adds work to a stream, or to the capture that it is in.
    pub(crate) fn submit(&mut self, id: u64, work: Work, behind: Vec<Mark>) -> Result<Mark> {
        if self.streams.get(&id).is_some_and(|stream| stream.capture.is_some()) {
            self.record(id, work)?;
            return Ok((id, 0));
        }
        self.refuse_implicit(id)?;
        self.enqueue(id, work, behind)
    }

    /// Adds work to a stream behind what the legacy default stream orders it behind.
    pub(crate) fn enqueue(&mut self, id: u64, work: Work, mut behind: Vec<Mark>) -> Result<Mark> {
        let queued = Queued::new(&work)?;
        let stream = self.streams.get(&id).ok_or(Error::InvalidHandle)?;
        let (context, legacy, blocks) = (stream.context, stream.legacy, stream.blocks());
        let waits = |other: &Stream| (legacy && other.blocks()) || (blocks && other.legacy);
        let others = self.streams.iter().filter(|(_, other)| other.context == context && waits(other));
        behind.extend(others.map(|(&id, other)| (id, other.submitted)));
        behind.retain(|&mark| !self.is_done(mark));
        let stream = self.streams.get_mut(&id).ok_or(Error::InvalidHandle)?;
        if !stream.started {
            let name = format!("stream-{id:x}");
            thread::Builder::new().name(name).spawn(move || run(id)).map_err(|_| Error::OutOfMemory)?;
            stream.started = true;
        }
        stream.queue.push_back(Item { work, behind, _queued: queued });
        stream.submitted += 1;
        let mark = (id, stream.submitted);
        state::changed();
        Ok(mark)
    }
}

/// Waits until a place was reached, and returns the error of the context that is current then.
pub(crate) fn finish(state: MutexGuard<'static, State>, mark: Mark) -> Result {
    let state = state::wait(state, |state| state.is_done(mark))?;
    state.current().map(drop)
}

thread_local! {
    static WORKS: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is a stream's thread: a function of the caller's that it runs may not call the driver.
pub(crate) fn works() -> bool {
    WORKS.get()
}

/// A stream's thread.
fn run(id: u64) {
    WORKS.set(true);
    let mut state = state::lock();
    loop {
        let Some(stream) = state.streams.get(&id) else { return };
        let (context, destroyed) = (stream.context, stream.destroyed);
        let ready = stream.queue.front().map(|item| item.behind.iter().all(|&mark| state.is_done(mark)));
        match ready {
            None if destroyed => {
                state.streams.remove(&id);
                state::changed();
                return;
            }
            Some(true) => {}
            _ => {
                state = state::pause(state);
                continue;
            }
        }
        let Some(item) = state.streams.get_mut(&id).and_then(|stream| stream.queue.pop_front()) else {
            return;
        };
        let delay = state::config().tests.delay;
        if !delay.is_zero() {
            drop(state);
            thread::sleep(delay);
            state = state::lock();
        }
        let (next, result) = perform(state, context, item.work);
        state = next;
        if let Err(error) = result {
            state.fail(context, error);
        }
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.done += 1;
        }
        state::changed();
    }
}

/// Does one thing, unlocked where it is the caller's or may take long. A context that failed does nothing more, but its
/// callbacks are called and its events recorded, so that nobody waits for ever.
pub(crate) fn perform(
    mut state: MutexGuard<'static, State>,
    context: u64,
    work: Work,
) -> (MutexGuard<'static, State>, Result) {
    let error = state.contexts.get(&context).and_then(|context| context.error);
    match work {
        Work::Callback { function, stream, data } => {
            drop(state);
            crate::ptx::print::flush();
            function(stream, error.map_or(0, Error::code), data);
            (state::lock(), Ok(()))
        }
        Work::Record { event } => {
            if let Some(event) = state.events.get_mut(&event) {
                event.reach();
            }
            (state, Ok(()))
        }
        Work::Nothing => (state, Ok(())),
        Work::LetGo(kept) => {
            let mut ended = Vec::new();
            state.let_objects_go(kept, &mut ended);
            drop(state);
            user_object::end(ended);
            (state::lock(), Ok(()))
        }
        Work::Await(awaited) => {
            drop(state);
            let result = awaited.wait();
            (state::lock(), result)
        }
        _ if error.is_some() => (state, Ok(())),
        Work::Host { function, data } => {
            drop(state);
            crate::ptx::print::flush();
            function(data);
            (state::lock(), Ok(()))
        }
        Work::Launch(launch) => launch.run(state, context),
        Work::Wait { at, value, wide, flags } => wait_value(state, context, at, value, wide, flags),
        Work::Copy(copy) => {
            let result = copy.run(&state, context);
            (state, result)
        }
        Work::Fill(fill) => {
            let result = fill.run(&state, context);
            (state, result)
        }
        Work::Free { at } => {
            let result = state.release(at);
            (state, result)
        }
        Work::Allocate { at } => {
            let result = state.set_there(at, true);
            (state, result)
        }
        Work::Unallocate { at } => {
            let result = state.set_there(at, false);
            (state, result)
        }
        Work::Assign(steps) => {
            state.assign(&steps);
            (state, Ok(()))
        }
        Work::Conditional { handle, how, graphs } => conditional::run(state, context, handle, how, &graphs),
        Work::Write { at, value, wide } => {
            let result = write_value(&state, context, at, value, wide);
            (state, result)
        }
    }
}

fn write_value(state: &State, context: u64, at: u64, value: u64, wide: bool) -> Result {
    let len = if wide { 8 } else { 4 };
    let range = state.reach(at, len, By::Kernel(context), READ_WRITE, false).ok_or(Error::IllegalAddress)?;
    range.store(0, value as u32);
    if wide {
        range.store(1, (value >> 32) as u32);
    }
    Ok(())
}

fn wait_value(
    mut state: MutexGuard<'static, State>,
    context: u64,
    at: u64,
    value: u64,
    wide: bool,
    flags: u32,
) -> (MutexGuard<'static, State>, Result) {
    loop {
        let Some(range) = state.reach(at, if wide { 8 } else { 4 }, By::Kernel(context), 1, false) else {
            return (state, Err(Error::IllegalAddress));
        };
        let low = u64::from(range.load(0));
        let now = if wide { low | u64::from(range.load(1)) << 32 } else { low };
        let reached = match flags & 3 {
            // As the driver has it: the signed difference is not negative.
            0 if wide => now.wrapping_sub(value) as i64 >= 0,
            0 => (now as u32).wrapping_sub(value as u32) as i32 >= 0,
            1 => now == value,
            2 => now & value != 0,
            _ => !(now | value) & if wide { u64::MAX } else { u32::MAX.into() } != 0,
        };
        if reached || !state.works(context) {
            return (state, Ok(()));
        }
        drop(state);
        thread::sleep(std::time::Duration::from_micros(50));
        state = state::lock();
    }
}

/// `cuStreamCreate` and `cuStreamCreateWithPriority`.
pub(crate) fn create(flags: u32, priority: i32) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Error::InvalidValue);
    }
    Ok(state.add_stream(context, flags, priority.clamp(-5, 0), false))
}

/// `cuStreamDestroy`: returns at once, and what was submitted runs.
pub(crate) fn destroy(handle: u64) -> Result {
    let mut state = state::lock();
    if handle <= PER_THREAD {
        return Err(Error::InvalidHandle);
    }
    let id = state.stream(handle)?;
    if state.defaults.values().any(|default| *default == id) {
        return Err(Error::InvalidHandle);
    }
    if let Some(capture) = state.streams[&id].capture {
        state.invalidate(capture);
    }
    state.retire(id);
    Ok(())
}

/// `cuStreamSynchronize`.
pub(crate) fn synchronize(handle: u64) -> Result {
    let mut state = state::lock();
    let id = state.stream(handle)?;
    state.refuse_capturing(id)?;
    let mark = (id, state.streams[&id].submitted);
    let mut marks = vec![mark];
    marks.extend(state.legacy_marks(id));
    let state = state::wait(state, |state| marks.iter().all(|&mark| state.is_done(mark)))?;
    state.current().map(drop)
}

impl State {
    /// What the legacy default stream also waits for: the blocking streams of its context.
    fn legacy_marks(&self, id: u64) -> Vec<Mark> {
        let Some(legacy) = self.streams.get(&id).filter(|stream| stream.legacy) else { return Vec::new() };
        let of = self.streams.iter().filter(|(_, other)| other.context == legacy.context && other.blocks());
        of.map(|(&id, other)| (id, other.submitted)).collect()
    }
}

/// `cuStreamQuery`.
pub(crate) fn query(handle: u64) -> Result {
    let mut state = state::lock();
    let id = state.stream(handle)?;
    state.refuse_capturing(id)?;
    let mark = (id, state.streams[&id].submitted);
    let done = state.is_done(mark) && state.legacy_marks(id).iter().all(|&mark| state.is_done(mark));
    if done { Ok(()) } else { Err(Error::NotReady) }
}

/// Submits work to the stream of a handle.
pub(crate) fn submit(handle: u64, work: Work) -> Result {
    let mut state = state::lock();
    let id = state.stream(handle)?;
    state.submit(id, work, Vec::new()).map(drop)
}

/// `cuStreamAddCallback`: not in a capture.
pub(crate) fn add_callback(handle: u64, function: Callback, data: u64, flags: u32) -> Result {
    let mut state = state::lock();
    let id = state.stream(handle)?;
    if flags != 0 {
        return Err(Error::InvalidValue);
    }
    state.refuse_capturing(id)?;
    state.submit(id, Work::Callback { function, stream: handle, data }, Vec::new()).map(drop)
}

/// Flags, priority and context of a stream, and its number.
pub(crate) fn facts(handle: u64) -> Result<(u32, i32, u64, u64)> {
    let mut state = state::lock();
    let id = state.stream(handle)?;
    let stream = &state.streams[&id];
    Ok((stream.flags, stream.priority, stream.context, id))
}
