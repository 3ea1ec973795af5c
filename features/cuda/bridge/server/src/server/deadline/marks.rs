//! A lane's side of the [deadline](super): what its calls put on streams, and the marks behind that.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use vm_cuda_api::Object;

use super::{Entry, GROUP, Key, LEGACY, PER_THREAD, Stream, Watch};
use crate::server::effects::{self, Effect};
use crate::server::session::{Session, locked};
use crate::wire::{Reader, code};

/// A call that is under way: what is learned of it when it has been made.
pub(in crate::server) enum Pending {
    /// Nothing.
    Nothing,
    /// So much more is on a stream, by its place among those that the lane knows; or so much is copied.
    Puts {
        at: usize,
        weight: u64,
        copies: bool,
    },
    /// A stream waits.
    Waits(Arc<Stream>, bool),
    /// Streams by their numbers, and how much is done of each if the call succeeds.
    Synchronizes(Vec<(u64, u64)>),
    Captures,
    /// A graph of the driver's is made executable.
    Instantiates(u64),
    Destroys(Arc<Stream>),
    Retains(u64),
    Switches,
    /// A context ends, or the primary one of a device may: what was known of streams.
    Ends(Ending, Box<Known>),
}

/// Which context ends.
#[derive(Clone, Copy)]
pub(in crate::server) enum Ending {
    Context(u64),
    Releases(u64),
    Resets(u64),
}

type Known = (HashMap<u64, Entry>, HashMap<u64, Vec<u64>>);

/// What a lane knows of streams.
#[derive(Debug)]
pub(in crate::server) struct Marks {
    watch: Arc<Watch>,
    lane: u64,
    /// By handles of the program, and whether the thread's default stream is meant.
    known: Vec<(u64, bool, Arc<Stream>)>,
}

impl Marks {
    pub(in crate::server) fn new(watch: Arc<Watch>) -> Self {
        let lane = watch.lanes.fetch_add(1, SeqCst);
        Self { watch, lane, known: Vec::new() }
    }

    /// The place of a stream among those that this lane knows.
    fn find(&mut self, session: &Session, id: u64, own: bool) -> Option<usize> {
        /// A lane that uses more asks anew.
        const KNOWN: usize = 32;
        let own = own && id == 0 || id == PER_THREAD;
        let is_it = |(known, is_own, stream): &(u64, bool, Arc<Stream>)| {
            *known == id && *is_own == own && !stream.gone.load(Relaxed)
        };
        if let Some(at) = self.known.iter().position(is_it) {
            return Some(at);
        }
        let handle = match id {
            0 if own => PER_THREAD,
            0 => LEGACY,
            _ => session.handles().real(Object::Stream, id).ok()?,
        };
        let stream = self.watch.stream(session.driver(), handle, self.lane)?;
        if self.known.len() >= KNOWN {
            // That of the thread is kept: nobody else marks it.
            self.known.retain(|(_, own, _)| *own);
        }
        self.known.push((id, own, stream));
        Some(self.known.len() - 1)
    }

    /// Marks the default stream of this thread.
    pub(in crate::server) fn close(&self, session: &Session) {
        for (_, _, stream) in self.known.iter().filter(|(_, own, stream)| *own && stream.has_tail()) {
            self.watch.mark(session, stream, false);
        }
    }

    /// Is something on the default stream of this thread that nobody sees, and that has to be seen soon?
    pub(in crate::server) fn is_unseen(&self) -> bool {
        self.watch.pace.is_some() && self.known.iter().any(|(_, own, stream)| *own && stream.has_tail())
    }

    /// A call comes, in its turn.
    pub(in crate::server) fn before(
        &mut self,
        session: &Session,
        number: usize,
        payload: &[u8],
    ) -> Result<Pending, u32> {
        let word = |at: usize| payload.get(8 * at..).and_then(|rest| Reader(rest).word().ok()).unwrap_or(0);
        let effect = effects::of(number);
        if !matches!(effect, Some((Effect::Launches(_) | Effect::LaunchesGraph, _))) {
            self.close(session);
        }
        let Some((effect, own)) = effect else { return Ok(Pending::Nothing) };
        let (id, weight) = match effect {
            Effect::Launches(at) | Effect::Copies(Some(at)) | Effect::Works(at) => (word(at), 1),
            Effect::Copies(None) => (0, 1),
            Effect::LaunchesGraph => {
                (word(1), locked(&self.watch.state).graphs.get(&word(0)).copied().unwrap_or(GROUP))
            }
            Effect::Waits(at) | Effect::Captures(at) => (word(at), 0),
            Effect::Synchronizes(at) => return Ok(self.synchronizes(session, at.map(word), own)),
            Effect::Instantiates => {
                return Ok(Pending::Instantiates(session.handles().real(Object::Graph, word(1))?));
            }
            Effect::Destroys => return Ok(self.destroys(session, word(0))),
            Effect::DestroysGraph => {
                locked(&self.watch.state).graphs.remove(&word(0));
                return Ok(Pending::Nothing);
            }
            Effect::Retains => return Ok(Pending::Retains(word(1))),
            Effect::Switches => return Ok(Pending::Switches),
            Effect::EndsContext => {
                let context = session.handles().real(Object::Context, word(0))?;
                return Ok(self.ends(Ending::Context(context)));
            }
            Effect::ReleasesPrimary => return Ok(self.ends(Ending::Releases(word(0)))),
            Effect::ResetsPrimary => return Ok(self.ends(Ending::Resets(word(0)))),
            Effect::Refused => return Err(code::NOT_SUPPORTED),
        };
        let Some(at) = self.find(session, id, own) else { return Ok(Pending::Nothing) };
        let stream = &self.known[at].2;
        if matches!(effect, Effect::Launches(_) | Effect::LaunchesGraph | Effect::Copies(_)) {
            self.watch.hold(session, stream);
            if session.has_ended() {
                return Err(session.end_code());
            }
        }
        self.watch.order(session, stream);
        if weight > 0 {
            let copies = matches!(effect, Effect::Copies(_));
            if copies {
                stream.copying.fetch_add(1, SeqCst);
                self.watch.puts();
            }
            return Ok(Pending::Puts { at, weight, copies });
        }
        self.watch.close(session, stream);
        // A wait for what is captured makes a stream a part of the capture.
        let captures = matches!(effect, Effect::Captures(_));
        let may_capture = captures || session.may_capture();
        if may_capture {
            self.watch.beginning.fetch_add(1, SeqCst);
            drop(locked(&self.watch.asking));
        }
        Ok(if captures { Pending::Captures } else { Pending::Waits(stream.clone(), may_capture) })
    }

    fn synchronizes(&mut self, session: &Session, id: Option<u64>, own: bool) -> Pending {
        let put = |stream: &Arc<Stream>| (stream.number, stream.put.load(SeqCst));
        let done = match id {
            Some(id) => self.find(session, id, own).map(|at| put(&self.known[at].2)).into_iter().collect(),
            None => {
                let context = super::current(session.driver());
                let state = locked(&self.watch.state);
                let streams = state.entries.values().map(|entry| &entry.stream);
                streams.filter(|stream| stream.context == context).map(put).collect()
            }
        };
        Pending::Synchronizes(done)
    }

    fn destroys(&mut self, session: &Session, id: u64) -> Pending {
        let real = session.handles().real(Object::Stream, id);
        let Some(handle) = real.ok().filter(|handle| *handle > PER_THREAD) else { return Pending::Nothing };
        let mut state = locked(&self.watch.state);
        let key = Key::Handle(handle);
        let Some(number) = state.numbers.get(&key).copied() else { return Pending::Nothing };
        let Some(stream) = state.entries.get(&number).map(|entry| entry.stream.clone()) else {
            return Pending::Nothing;
        };
        drop(state);
        // What is on it goes on.
        self.watch.close(session, &stream);
        state = locked(&self.watch.state);
        if let Some(entry) = state.entries.get_mut(&number) {
            entry.destroyed = true;
        }
        state.numbers.remove(&key);
        Pending::Destroys(stream)
    }

    /// Nobody asks for what ends.
    fn ends(&self, ending: Ending) -> Pending {
        locked(&self.watch.state).ending.1 += 1;
        // A lane that is idle may be marking the default stream of its thread.
        drop(locked(&self.watch.asking));
        let mut state = locked(&self.watch.state);
        let known = (std::mem::take(&mut state.entries), std::mem::take(&mut state.events));
        Pending::Ends(ending, Box::new(known))
    }

    /// The call was made: what it said, and returned.
    pub(in crate::server) fn after(
        &mut self,
        session: &Session,
        pending: Pending,
        result: Option<u32>,
        reply: &[u8],
    ) {
        let done = result == Some(0);
        let watch = &self.watch;
        let returned = || Reader(reply).word().unwrap_or(0);
        match pending {
            Pending::Nothing => {}
            Pending::Puts { at, weight, copies } => {
                let Some((_, _, stream)) = self.known.get(at) else { return };
                if copies {
                    stream.copying.fetch_sub(1, SeqCst);
                }
                if done {
                    let put = stream.put.fetch_add(weight, SeqCst) + weight;
                    watch.puts();
                    if put - stream.marked.load(Relaxed).min(put) >= watch.group() {
                        watch.mark(session, stream, false);
                    }
                }
            }
            Pending::Waits(stream, may_capture) => {
                if may_capture {
                    watch.beginning.fetch_sub(1, SeqCst);
                }
                if done {
                    watch.mark(session, &stream, true);
                }
            }
            Pending::Synchronizes(streams) if done => {
                let mut state = locked(&watch.state);
                for (number, put) in streams {
                    if let Some(entry) = state.entries.get_mut(&number).filter(|entry| entry.reached < put) {
                        entry.reached = put;
                        entry.waited = entry.waited.map(|_| Duration::ZERO);
                    }
                }
            }
            Pending::Captures => {
                watch.beginning.fetch_sub(1, SeqCst);
            }
            Pending::Instantiates(graph) if done => {
                let weight = Watch::weigh(session.driver(), graph);
                locked(&watch.state).graphs.insert(returned(), weight);
            }
            Pending::Destroys(stream) => {
                if done {
                    return stream.gone.store(true, Relaxed);
                }
                let mut state = locked(&watch.state);
                if let Some(entry) = state.entries.get_mut(&stream.number) {
                    entry.destroyed = false;
                    state.numbers.insert(stream.key, stream.number);
                }
            }
            Pending::Retains(device) if done => {
                if let Ok(context) = session.handles().real(Object::Context, returned()) {
                    locked(&watch.state).primaries.insert(device, context);
                }
            }
            Pending::Instantiates(_) | Pending::Retains(_) | Pending::Synchronizes(_) => {}
            Pending::Switches => self.switch(session),
            Pending::Ends(ending, known) => {
                Self::ended(watch, session, ending, *known, done);
                self.switch(session);
            }
        }
    }

    /// Default streams are of another context from now on.
    fn switch(&mut self, session: &Session) {
        self.close(session);
        self.known.clear();
    }

    /// Knows of streams again what is not of a context that has ended.
    fn ended(watch: &Watch, session: &Session, ending: Ending, (entries, events): Known, done: bool) {
        let mut state = locked(&watch.state);
        let primary = |device: u64| state.primaries.get(&device).copied();
        let gone = match ending {
            _ if !done => None,
            Ending::Context(context) => Some(context),
            Ending::Releases(device) if session.driver().has_primary(device) == Ok(true) => None,
            Ending::Releases(device) | Ending::Resets(device) => primary(device),
        };
        for (number, entry) in entries {
            if gone == Some(entry.stream.context) {
                entry.stream.gone.store(true, Relaxed);
                state.numbers.remove(&entry.stream.key);
            } else {
                state.entries.insert(number, entry);
            }
        }
        for (context, mut events) in events.into_iter().filter(|(context, _)| gone != Some(*context)) {
            state.events.entry(context).or_default().append(&mut events);
        }
        if let Some(context) = gone {
            state.groups.remove(&context);
        }
        state.ending.1 -= 1;
        if state.ending.1 == 0 {
            state.ending.0 = Duration::ZERO;
        }
    }

    /// The thread has nothing to do for a while.
    pub(in crate::server) fn idle(&self, session: &Session) {
        // Whoever ends a context waits for this, and this for nobody.
        let Ok(_asking) = self.watch.asking.try_lock() else { return };
        let ends = self.watch.state.try_lock().map_or(true, |state| state.ending.1 > 0);
        if !ends {
            self.close(session);
        }
    }

    /// The thread ends. Its default stream goes on.
    pub(in crate::server) fn end(&self, session: &Session) {
        self.close(session);
        let mut state = locked(&self.watch.state);
        for (_, _, stream) in self.known.iter().filter(|(_, own, _)| *own) {
            if let Some(entry) = state.entries.get_mut(&stream.number) {
                entry.destroyed = true;
            }
            state.numbers.remove(&stream.key);
        }
    }
}
