//! Events: places in streams, with the time they were reached.

use crate::{
    error::{Error, Result},
    ipc::refusal,
    state::{self, State},
    stream::{Mark, Work},
    sys::Shared,
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
/// How often an event of several processes is looked at.
const PAUSE: Duration = Duration::from_micros(200);

pub(crate) struct Event {
    pub(crate) context: u64,
    flags: u32,
    mark: Option<Mark>,
    pub(crate) time: Option<Instant>,
    /// The capture that it was last recorded in, the stream, and how many nodes there were.
    pub(crate) capture: Option<(u64, u64, usize)>,
    /// How often it was recorded, and that was reached, in all processes that have it.
    shared: Option<Arc<Shared>>,
}

impl Event {
    /// Its record was reached.
    pub(crate) fn reach(&mut self) {
        self.time = Some(Instant::now());
        if let Some(shared) = &self.shared {
            shared.counts()[1].fetch_add(1, Ordering::SeqCst);
        }
    }

    /// What must be reached of it in all processes.
    fn awaited(&self) -> Option<Awaited> {
        let shared = self.shared.clone()?;
        let count = shared.counts()[0].load(Ordering::SeqCst);
        Some(Awaited { shared, count })
    }
}

/// A record of an event of several processes.
#[derive(Clone)]
pub(crate) struct Awaited {
    shared: Arc<Shared>,
    count: u64,
}

impl Awaited {
    fn is_done(&self) -> bool {
        self.shared.counts()[1].load(Ordering::SeqCst) >= self.count
    }

    /// Waits for it, with nothing locked.
    pub(crate) fn wait(&self) -> Result {
        let until = state::config().deadline();
        while !self.is_done() {
            if until.is_some_and(|until| Instant::now() > until) {
                return Err(Error::LaunchTimeout);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

impl State {
    /// An event was recorded.
    pub(crate) fn mark(&mut self, id: u64, mark: Mark) {
        if let Some(event) = self.events.get_mut(&id) {
            (event.mark, event.capture, event.time) = (Some(mark), None, None);
            if let Some(shared) = &event.shared {
                shared.counts()[0].fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    /// Where an event was recorded last.
    pub(crate) fn mark_of(&self, id: u64) -> Option<Mark> {
        self.events.get(&id)?.mark
    }
}

/// `cuEventCreate`.
pub(crate) fn create(flags: u32) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    if flags & !7 != 0 || (flags & 4 != 0 && flags & DISABLE_TIMING == 0) {
        return Err(Error::InvalidValue);
    }
    let shared = if flags & INTERPROCESS != 0 { Some(Arc::new(Shared::new()?)) } else { None };
    Ok(state.add_event(context, flags, shared))
}

impl State {
    fn add_event(&mut self, context: u64, flags: u32, shared: Option<Arc<Shared>>) -> u64 {
        let id = self.id();
        self.events.insert(id, Event { context, flags, mark: None, time: None, capture: None, shared });
        id
    }
}

/// `cuIpcGetEventHandle`: of one that was made for it. The handle says where in `/proc` its file is.
pub(crate) fn handle(id: u64) -> Result<[u32; 2]> {
    let state = state::lock();
    state.current()?;
    let event = state.events.get(&id).ok_or(Error::InvalidHandle)?;
    let shared = event.shared.as_ref().ok_or(Error::InvalidValue)?;
    Ok([std::process::id(), shared.file() as u32])
}

/// `cuIpcOpenEventHandle`.
pub(crate) fn open(path: &str) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    let shared = Shared::open(path).map_err(|error| refusal(&error))?;
    Ok(state.add_event(context, DISABLE_TIMING | INTERPROCESS, Some(Arc::new(shared))))
}

/// `cuEventDestroy`.
pub(crate) fn destroy(id: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    state.events.remove(&id).map(drop).ok_or(Error::InvalidHandle)
}

/// `cuEventRecord`.
pub(crate) fn record(id: u64, handle: u64) -> Result {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    let owner = state.events.get(&id).ok_or(Error::InvalidHandle)?.context;
    if owner != state.streams[&stream].context {
        return Err(Error::InvalidHandle);
    }
    let capture = state.capture_point(stream)?;
    if capture.is_none() {
        let mark = state.submit(stream, Work::Record { event: id }, vec![])?;
        state.mark(id, mark);
    } else if let Some(event) = state.events.get_mut(&id) {
        (event.mark, event.capture, event.time) = (None, capture, None);
    }
    Ok(())
}

/// `cuStreamWaitEvent`: an event that was never recorded is done.
pub(crate) fn wait(handle: u64, id: u64, flags: u32) -> Result {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    let event = state.events.get(&id).ok_or(Error::InvalidHandle)?;
    let (mark, capture, awaited) = (event.mark, event.capture, event.awaited());
    if flags & !1 != 0 {
        return Err(Error::InvalidValue);
    }
    match (capture, state.streams[&stream].capture) {
        (Some(point), _) if state.captures.contains_key(&point.0) => state.join(stream, point),
        (Some(_), _) => Ok(()),
        (None, Some(own)) if mark.is_some_and(|mark| !state.is_done(mark)) && flags & 1 == 0 => {
            state.invalidate(own);
            Err(Error::CaptureIsolation)
        }
        (None, Some(_)) => Ok(()),
        (None, None) => {
            let work = awaited.map_or(Work::Nothing, Work::Await);
            state.submit(stream, work, mark.into_iter().collect()).map(drop)
        }
    }
}

/// What an event waits for, to be looked at by the host: not in a capture.
fn reached(state: &mut State, id: u64) -> Result<(Option<Mark>, Option<Awaited>)> {
    let event = state.events.get(&id).ok_or(Error::InvalidHandle)?;
    if let Some((capture, ..)) = event.capture {
        state.invalidate(capture);
        return Err(Error::CapturedEvent);
    }
    let found = (event.mark, event.awaited());
    state.refuse_in_capture()?;
    Ok(found)
}

/// `cuEventQuery`.
pub(crate) fn query(id: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    let (mark, awaited) = reached(&mut state, id)?;
    let done = mark.is_none_or(|mark| state.is_done(mark)) && awaited.is_none_or(|awaited| awaited.is_done());
    if done { Ok(()) } else { Err(Error::NotReady) }
}

/// `cuEventSynchronize`.
pub(crate) fn synchronize(id: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    let (mark, awaited) = reached(&mut state, id)?;
    match mark {
        Some(mark) => crate::stream::finish(state, mark)?,
        None => drop(state),
    }
    awaited.map_or(Ok(()), |awaited| awaited.wait())
}

/// `cuEventElapsedTime`, in milliseconds.
pub(crate) fn elapsed(start: u64, end: u64) -> Result<f32> {
    let state = state::lock();
    state.current()?;
    let time = |id: u64| {
        let event = state.events.get(&id).ok_or(Error::InvalidHandle)?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(Error::InvalidHandle);
        }
        let mark = event.mark.ok_or(Error::InvalidHandle)?;
        event.time.filter(|_| state.is_done(mark)).ok_or(Error::NotReady)
    };
    let (start, end) = (time(start)?, time(end)?);
    let ms = |duration: std::time::Duration| duration.as_secs_f32() * 1e3;
    Ok(if end >= start { ms(end - start) } else { -ms(start - end) })
}
