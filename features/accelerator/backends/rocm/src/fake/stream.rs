//! The fake's streams: a thread each, which runs commands in order.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use vm_accel::{Grid, ParameterKind, Slot};

use super::object::{Kernel, Loaded};
use super::{State, lock};

/// Where an event was recorded last.
#[derive(Default)]
pub(super) struct Mark {
    at: Mutex<Option<Instant>>,
    reached: Condvar,
}

impl Mark {
    pub(super) fn at(&self) -> Option<Instant> {
        *lock(&self.at)
    }

    fn reach(&self) {
        *lock(&self.at) = Some(Instant::now());
        self.reached.notify_all();
    }

    fn wait(&self) {
        let at = lock(&self.at);
        drop(self.reached.wait_while(at, |at| at.is_none()).unwrap_or_else(PoisonError::into_inner));
    }
}

/// An event.
#[derive(Default)]
pub(super) struct Event {
    pub(super) timed: bool,
    pub(super) mark: Mutex<Option<Arc<Mark>>>,
}

/// What a stream is given.
#[derive(Clone)]
pub(super) enum Command {
    Fill { at: u64, bytes: u64, value: u8 },
    Copy { to: u64, from: u64, bytes: u64 },
    Launch { module: Arc<Loaded>, place: usize, grid: Grid, words: Arc<[u64]> },
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
    Replay(Arc<[Command]>),
}

impl Command {
    /// The bytes that it reaches.
    pub(super) fn ranges(&self) -> Vec<(u64, u64)> {
        match self {
            Self::Fill { at, bytes, .. } => vec![(*at, *bytes)],
            Self::Copy { to, from, bytes } => vec![(*to, *bytes), (*from, *bytes)],
            Self::Launch { module, place, words, .. } => {
                let views = views(&module.0[*place].kernel, words);
                views.into_iter().map(|(_, at, bytes)| (at, bytes)).collect()
            }
            Self::Replay(commands) => commands.iter().flat_map(Self::ranges).collect(),
            Self::Record(_) | Self::Wait(_) => Vec::new(),
        }
    }

    /// Whether it launches a kernel of a module.
    pub(super) fn launches(&self, module: &Arc<Loaded>) -> bool {
        match self {
            Self::Launch { module: own, .. } => Arc::ptr_eq(own, module),
            Self::Replay(commands) => commands.iter().any(|command| command.launches(module)),
            _ => false,
        }
    }
}

/// The bytes of a launch's views and of its cancel flag: where in the block their address is, it, and how many.
pub(super) fn views(kernel: &Kernel, words: &[u64]) -> Vec<(u32, u64, u64)> {
    let word = |offset: u32| words.get(offset as usize / 8).copied().unwrap_or(0);
    let mut ranges = Vec::new();
    for (slot, parameter) in kernel.params.slots.iter().zip(&kernel.cpu.signature().parameters) {
        let (Slot::View { offset, rank }, ParameterKind::View { element, .. }) = (*slot, &parameter.kind)
        else {
            continue;
        };
        let extents: Vec<u64> = (0..rank).map(|at| word(offset + 8 + 8 * at)).collect();
        if extents.contains(&0) {
            continue;
        }
        let mut bytes = u64::from(element.bytes()) * extents[rank as usize - 1];
        for (at, extent) in (0..rank - 1).zip(&extents) {
            bytes = bytes.saturating_add((extent - 1).saturating_mul(word(offset + 8 * (1 + rank + at))));
        }
        ranges.push((offset, word(offset), bytes));
    }
    ranges.extend(kernel.params.guard.map(|guard| (guard.stop, word(guard.stop), 4)));
    ranges
}

/// A stream.
pub(super) struct Stream {
    state: Arc<State>,
    commands: Mutex<(VecDeque<Command>, bool)>,
    changed: Condvar,
    /// What is recorded instead of being run.
    pub(super) capture: Mutex<Option<Vec<Command>>>,
}

impl Stream {
    /// A stream of a device, and its thread.
    pub(super) fn start(state: &Arc<State>) -> std::io::Result<Arc<Self>> {
        let stream = Arc::new(Self {
            state: Arc::clone(state),
            commands: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::default(),
        });
        let own = Arc::clone(&stream);
        std::thread::Builder::new().name("fake stream".into()).spawn(move || own.serve())?;
        lock(&state.streams).push(Arc::clone(&stream));
        Ok(stream)
    }

    /// Adds a command, to what is captured if something is.
    pub(super) fn push(&self, command: Command) {
        if let Some(captured) = lock(&self.capture).as_mut() {
            return captured.push(command);
        }
        lock(&self.commands).0.push_back(command);
        self.changed.notify_all();
    }

    /// Ends it, once its commands have run.
    pub(super) fn end(&self) {
        lock(&self.commands).1 = true;
        self.changed.notify_all();
    }

    /// Whether there is such a command that has not run.
    pub(super) fn pending(&self, is: impl Fn(&Command) -> bool) -> bool {
        lock(&self.commands).0.iter().any(is)
    }

    fn serve(self: Arc<Self>) {
        loop {
            let commands = lock(&self.commands);
            let wait = self.changed.wait_while(commands, |(commands, ended)| commands.is_empty() && !*ended);
            let Some(command) = wait.unwrap_or_else(PoisonError::into_inner).0.front().cloned() else {
                break;
            };
            let held = lock(&self.state.held);
            drop(self.state.released.wait_while(held, |held| *held).unwrap_or_else(PoisonError::into_inner));
            self.run(&command);
            lock(&self.commands).0.pop_front();
        }
        let own = Arc::as_ptr(&self);
        lock(&self.state.streams).retain(|stream| Arc::as_ptr(stream) != own);
    }

    /// Runs a command. On a device that is lost nothing happens but that events are reached, so that nobody waits for ever.
    fn run(&self, command: &Command) {
        let state = &*self.state;
        match command {
            Command::Record(mark) => return mark.reach(),
            Command::Wait(mark) => return mark.wait(),
            Command::Replay(commands) => return commands.iter().for_each(|command| self.run(command)),
            _ if state.is_lost() => return,
            _ => {}
        }
        for (at, bytes) in command.ranges() {
            if !state.reaches(at, bytes) {
                state.fault("the device", format_args!("{bytes} bytes at {at:#x} are not allocated"));
                *lock(&state.lost) = Some(700);
                return;
            }
        }
        let place = |at: u64| std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
        match command {
            // SAFETY: the bytes are allocated, and to free what a command uses is noted and not done.
            Command::Fill { at, bytes, value } => unsafe { place(*at).write_bytes(*value, *bytes as usize) },
            Command::Copy { to, from, bytes } => {
                // SAFETY: as above, both.
                unsafe { place(*from).copy_to(place(*to), *bytes as usize) };
            }
            Command::Launch { module, place, grid, words } => {
                // SAFETY: its views are allocated, as above.
                if let Err(error) = unsafe { module.0[*place].run(*grid, words) } {
                    state.fault("the device", format_args!("{error}"));
                    *lock(&state.lost) = Some(719);
                }
            }
            _ => {}
        }
    }
}
