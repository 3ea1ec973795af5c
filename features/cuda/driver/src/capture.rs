//! Captures of streams, which become graphs: what was recorded, each node behind the one before.

use crate::{
    error::{Error, Result},
    graph::Graph,
    state::{self, State},
    stream::Work,
    user_object,
};
use std::{
    cell::Cell,
    collections::BTreeMap,
    thread::{self, ThreadId},
};

const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

thread_local! {
    static MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

/// A capture that goes on.
pub(crate) struct Capture {
    mode: i32,
    thread: ThreadId,
    origin: u64,
    graph: u64,
    invalid: bool,
    /// The other streams in it that no stream has joined yet, and the count of nodes behind their last work.
    open: BTreeMap<u64, usize>,
    /// How often something was recorded.
    count: usize,
    /// What the next node is behind.
    last: Vec<u64>,
}

impl State {
    /// Fails what a capture forbids, and the capture with it, by the rules of `cuThreadExchangeStreamCaptureMode`.
    pub(crate) fn refuse_in_capture(&mut self) -> Result {
        let (mode, thread) = (MODE.get(), thread::current().id());
        let forbids = |capture: &Capture| {
            let own = capture.thread == thread && capture.mode != RELAXED;
            match mode {
                GLOBAL => own || capture.mode == GLOBAL,
                THREAD_LOCAL => own,
                _ => false,
            }
        };
        let mut refused = false;
        for capture in self.captures.values_mut().filter(|capture| forbids(capture)) {
            capture.invalid = true;
            refused = true;
        }
        if refused { Err(Error::CaptureUnsupported) } else { Ok(()) }
    }

    /// Fails waiting for a context of which a stream is being captured, whatever the mode.
    pub(crate) fn refuse_captured(&mut self, context: u64) -> Result {
        let captured = self.streams.values().filter(|stream| stream.context == context);
        let captures: Vec<_> = captured.filter_map(|stream| stream.capture).collect();
        captures.iter().for_each(|capture| self.invalidate(*capture));
        if captures.is_empty() { Ok(()) } else { Err(Error::CaptureUnsupported) }
    }

    /// Fails waiting for a stream that is being captured.
    pub(crate) fn refuse_capturing(&mut self, stream: u64) -> Result {
        self.refuse_implicit(stream)?;
        match self.streams.get(&stream).and_then(|stream| stream.capture) {
            Some(capture) => {
                self.invalidate(capture);
                Err(Error::CaptureUnsupported)
            }
            None => Ok(()),
        }
    }

    /// Fails work of the legacy default stream while a stream that it waits for is being captured.
    pub(crate) fn refuse_implicit(&mut self, stream: u64) -> Result {
        let Some(legacy) = self.streams.get(&stream).filter(|stream| stream.legacy) else { return Ok(()) };
        let context = legacy.context;
        let waits = |other: &&crate::stream::Stream| other.context == context && other.flags & 1 == 0;
        let Some(capture) = self.streams.values().filter(waits).find_map(|other| other.capture) else {
            return Ok(());
        };
        self.invalidate(capture);
        Err(Error::CaptureImplicit)
    }

    /// Makes a capture fail when it ends.
    pub(crate) fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.invalid = true;
        }
    }

    /// Ends a capture without a graph, as the stream that began it is gone.
    pub(crate) fn abandon(&mut self, origin: u64) {
        let abandoned: Vec<_> = self
            .captures
            .extract_if(.., |_, capture| capture.origin == origin)
            .map(|(_, capture)| capture.graph)
            .collect();
        let mut ended = Vec::new();
        abandoned.into_iter().for_each(|graph| self.drop_graph(graph, &mut ended));
        user_object::end_later(ended);
        for stream in self.streams.values_mut() {
            stream.capture = stream.capture.filter(|capture| self.captures.contains_key(capture));
        }
    }

    /// The graph that a stream is captured into.
    pub(crate) fn graph_of(&mut self, stream: u64) -> Result<Option<u64>> {
        match self.capture_of(stream) {
            Some(capture) if capture.invalid => Err(Error::CaptureInvalidated),
            capture => Ok(capture.map(|capture| capture.graph)),
        }
    }

    fn capture_of(&mut self, stream: u64) -> Option<&mut Capture> {
        let capture = self.streams.get(&stream)?.capture?;
        self.captures.get_mut(&capture)
    }

    /// Adds work to the capture that a stream is in.
    pub(crate) fn record(&mut self, stream: u64, work: Work) -> Result {
        let capture = self.capture_of(stream).ok_or(Error::CaptureUnmatched)?;
        if capture.invalid {
            return Err(Error::CaptureInvalidated);
        }
        let (graph, behind) = (capture.graph, std::mem::take(&mut capture.last));
        let node = self.put_captured(graph, behind, work);
        self.go_on(stream, vec![node])
    }

    /// What a capture records next is behind these nodes.
    fn go_on(&mut self, stream: u64, nodes: Vec<u64>) -> Result {
        let capture = self.capture_of(stream).ok_or(Error::CaptureUnmatched)?;
        capture.last = nodes;
        capture.count += 1;
        if stream != capture.origin {
            capture.open.insert(stream, capture.count);
        }
        Ok(())
    }

    /// Where an event is recorded, in a stream that is being captured.
    pub(crate) fn capture_point(&mut self, stream: u64) -> Result<Option<(u64, u64, usize)>> {
        let Some(id) = self.streams.get(&stream).and_then(|stream| stream.capture) else { return Ok(None) };
        let capture = self.captures.get(&id).ok_or(Error::CaptureUnmatched)?;
        if capture.invalid { Err(Error::CaptureInvalidated) } else { Ok(Some((id, stream, capture.count))) }
    }

    /// Makes a stream wait for an event of a capture, and so a part of it.
    pub(crate) fn join(&mut self, stream: u64, (id, of, nodes): (u64, u64, usize)) -> Result {
        let joining = self.streams.get_mut(&stream).ok_or(Error::InvalidHandle)?;
        let capture = self.captures.get_mut(&id).ok_or(Error::InvalidHandle)?;
        if capture.invalid {
            return Err(Error::CaptureInvalidated);
        }
        if joining.legacy || joining.capture.is_some_and(|other| other != id) {
            capture.invalid = true;
            return Err(if joining.legacy { Error::CaptureImplicit } else { Error::CaptureIsolation });
        }
        if stream != of && capture.open.get(&of).is_some_and(|last| nodes >= *last) {
            capture.open.remove(&of);
        }
        if stream != capture.origin {
            capture.open.insert(stream, capture.count);
        }
        joining.capture = Some(id);
        Ok(())
    }
}

/// `cuThreadExchangeStreamCaptureMode`: the mode before.
pub(crate) fn exchange_mode(mode: i32) -> Result<i32> {
    if (GLOBAL..=RELAXED).contains(&mode) { Ok(MODE.replace(mode)) } else { Err(Error::InvalidValue) }
}

/// `cuStreamBeginCapture`.
pub(crate) fn begin(handle: u64, mode: i32) -> Result {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    if !(GLOBAL..=RELAXED).contains(&mode) {
        return Err(Error::InvalidValue);
    }
    if state.streams[&stream].legacy {
        return Err(Error::CaptureUnsupported);
    }
    if state.streams[&stream].capture.is_some() {
        return Err(Error::InvalidValue);
    }
    let (id, graph) = (state.id(), state.id());
    state.graphs.insert(graph, Graph::default());
    let thread = thread::current().id();
    let capture = Capture {
        mode,
        thread,
        origin: stream,
        graph,
        invalid: false,
        open: BTreeMap::new(),
        count: 0,
        last: Vec::new(),
    };
    state.captures.insert(id, capture);
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.capture = Some(id);
    }
    Ok(())
}

/// `cuStreamEndCapture`: the graph.
pub(crate) fn end(handle: u64) -> Result<u64> {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    let id = state.streams[&stream].capture.ok_or(Error::InvalidValue)?;
    let capture = state.captures.get_mut(&id).ok_or(Error::InvalidValue)?;
    if capture.origin != stream {
        capture.invalid = true;
        return Err(Error::CaptureUnmatched);
    }
    if capture.mode != RELAXED && capture.thread != thread::current().id() {
        return Err(Error::CaptureWrongThread);
    }
    let capture = state.captures.remove(&id).ok_or(Error::InvalidValue)?;
    state
        .streams
        .values_mut()
        .filter(|stream| stream.capture == Some(id))
        .for_each(|stream| stream.capture = None);
    let failed = if capture.invalid {
        Error::CaptureInvalidated
    } else if !capture.open.is_empty() {
        Error::CaptureUnjoined
    } else {
        return Ok(capture.graph);
    };
    let mut ended = Vec::new();
    state.drop_graph(capture.graph, &mut ended);
    drop(state);
    user_object::end(ended);
    Err(failed)
}

/// Status (0 none, 1 active, 2 invalidated), number and graph of the capture that a stream is in.
pub(crate) fn status(handle: u64) -> Result<(i32, u64, u64)> {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    state.refuse_implicit(stream)?;
    let Some(id) = state.streams[&stream].capture else { return Ok((0, 0, 0)) };
    let capture = state.captures.get(&id).ok_or(Error::InvalidValue)?;
    Ok((if capture.invalid { 2 } else { 1 }, id, capture.graph))
}

thread_local! {
    static SHOWN: Cell<Box<[u64]>> = Cell::default();
}

/// What a stream's next node is behind, as an array that stays until the thread's next such call: where, and how many.
pub(crate) fn last(handle: u64) -> Result<(u64, usize)> {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    let last =
        state.capture_of(stream).filter(|capture| !capture.invalid).map(|capture| capture.last.clone());
    let shown: Box<[u64]> = last.unwrap_or_default().into();
    let at = if shown.is_empty() { 0 } else { shown.as_ptr().expose_provenance() as u64 };
    let count = shown.len();
    SHOWN.set(shown);
    Ok((at, count))
}

/// `cuStreamUpdateCaptureDependencies`: nodes are what the next is behind, as well or alone.
pub(crate) fn update(handle: u64, nodes: Vec<u64>, flags: u32) -> Result {
    const SET: u32 = 1;
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    // CUDA_ERROR_ILLEGAL_STATE where nothing is captured.
    let capture = state.capture_of(stream).ok_or(Error::IllegalState)?;
    if capture.invalid {
        return Err(Error::CaptureInvalidated);
    }
    if flags > SET {
        return Err(Error::InvalidValue);
    }
    let (graph, mut last) = (capture.graph, if flags == SET { Vec::new() } else { capture.last.clone() });
    state.are_of(graph, &nodes)?;
    last.extend(nodes.into_iter().filter(|node| !last.contains(node)).collect::<Vec<_>>());
    state.go_on(stream, last)
}
