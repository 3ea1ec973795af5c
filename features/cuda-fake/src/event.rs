//! Events: places in streams, with the time they were reached.

use crate::{
    error::{Error, Result},
    state::{self, State},
    stream::{Mark, Work},
};
use std::time::Instant;

const DISABLE_TIMING: u32 = 2;

pub(crate) struct Event {
    pub(crate) context: u64,
    flags: u32,
    mark: Option<Mark>,
    pub(crate) time: Option<Instant>,
    /// The capture that it was last recorded in, the stream, and how many nodes there were.
    pub(crate) capture: Option<(u64, u64, usize)>,
}

impl State {
    /// An event was recorded.
    pub(crate) fn mark(&mut self, id: u64, mark: Mark) {
        if let Some(event) = self.events.get_mut(&id) {
            (event.mark, event.capture, event.time) = (Some(mark), None, None);
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
    let id = state.id();
    state.events.insert(id, Event { context, flags, mark: None, time: None, capture: None });
    Ok(id)
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
    let mark = if capture.is_some() {
        None
    } else {
        Some(state.submit(stream, Work::Record { event: id }, vec![])?)
    };
    if let Some(event) = state.events.get_mut(&id) {
        (event.mark, event.capture, event.time) = (mark, capture, None);
    }
    Ok(())
}

/// `cuStreamWaitEvent`: an event that was never recorded is done.
pub(crate) fn wait(handle: u64, id: u64, flags: u32) -> Result {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    let event = state.events.get(&id).ok_or(Error::InvalidHandle)?;
    let (mark, capture) = (event.mark, event.capture);
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
        (None, None) => state.submit(stream, Work::Nothing, mark.into_iter().collect()).map(drop),
    }
}

/// What an event waits for, to be looked at by the host: not in a capture.
fn reached(state: &mut State, id: u64) -> Result<Option<Mark>> {
    let event = state.events.get(&id).ok_or(Error::InvalidHandle)?;
    if let Some((capture, ..)) = event.capture {
        state.invalidate(capture);
        return Err(Error::CapturedEvent);
    }
    let mark = event.mark;
    state.refuse_in_capture()?;
    Ok(mark)
}

/// `cuEventQuery`.
pub(crate) fn query(id: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    let mark = reached(&mut state, id)?;
    let done = mark.is_none_or(|mark| state.is_done(mark));
    if done { Ok(()) } else { Err(Error::NotReady) }
}

/// `cuEventSynchronize`.
pub(crate) fn synchronize(id: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    let mark = reached(&mut state, id)?;
    match mark {
        Some(mark) => crate::stream::finish(state, mark),
        None => Ok(()),
    }
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
