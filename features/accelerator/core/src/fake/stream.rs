//! A simulated stream: commands in a list, run when somebody polls.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use super::Controls;
use super::heap::heap;
use super::programs::{Progress, Run};
use crate::error::{Error, Result};
use crate::external::{ExternalMemory, Timeline};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone)]
pub(super) enum Command {
    Fill {
        address: u64,
        bytes: u64,
        value: u8,
    },
    Copy {
        target: u64,
        source: u64,
        bytes: u64,
    },
    Run(Run),
    Free {
        address: u64,
    },
    Record(Arc<State>),
    /// Nothing behind it runs before the other stream has come so far.
    Wait(Arc<State>),
    /// Nothing behind it runs before another API has come so far.
    Await(Arc<dyn Timeline>, u64),
    /// What that API wrote at an address is seen from here on.
    Acquire(u64),
    /// It sees what was written there.
    Release(u64),
    /// It is told how far this has come.
    Signal(Arc<dyn Timeline>, u64),
}

/// Memory of another API, of which the device has a copy: what is not seen in turns is not seen.
struct Import {
    file: File,
    offset: u64,
    bytes: u64,
    /// What both sides had when they agreed last.
    agreed: Vec<u8>,
    /// Whether it is mapped, of what the simulated driver maps: the other API sees what was written when it is let go of.
    mapped: Option<Arc<AtomicBool>>,
}

/// One recording of an event.
#[derive(Default)]
pub(super) struct State {
    pub(super) done: AtomicBool,
    /// When it was reached, by the clock of its context.
    pub(super) at: AtomicU64,
    /// Where it was recorded; nowhere, if it was not.
    pub(super) stream: Weak<Stream>,
}

impl State {
    /// Whether nothing is to be waited for.
    pub(super) fn is_done(&self) -> bool {
        // What its stream had to do when it ended was done.
        self.done.load(Ordering::Acquire) || self.stream.strong_count() == 0
    }
}

/// What the streams of a queue and of those opened from it share.
pub(super) struct Context {
    pub(super) controls: Arc<Controls>,
    lost: Mutex<Option<Error>>,
    /// Commands run so far: the simulated clock, in microseconds.
    clock: AtomicU64,
    /// What was allocated or registered here, by address: its bytes, and whether they are the device's.
    live: Mutex<HashMap<u64, (u64, Owner)>>,
    imports: Mutex<HashMap<u64, Import>>,
}

/// Whose memory it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Device,
    Host,
    Registered,
    External,
}

impl Context {
    pub(super) fn new(controls: Arc<Controls>) -> Self {
        Self {
            controls,
            lost: Mutex::default(),
            clock: AtomicU64::new(0),
            live: Mutex::default(),
            imports: Mutex::default(),
        }
    }

    /// What ended it, if anything did.
    pub(super) fn alive(&self) -> Result<()> {
        lock(&self.lost).clone().map_or(Ok(()), Err)
    }

    fn counter(&self, owner: Owner) -> Option<&AtomicU64> {
        match owner {
            Owner::Device => Some(&self.controls.used),
            Owner::Registered => Some(&self.controls.registered),
            Owner::External => Some(&self.controls.imported),
            Owner::Host => None,
        }
    }

    pub(super) fn insert(&self, address: u64, bytes: u64, owner: Owner) {
        lock(&self.live).insert(address, (bytes, owner));
        self.counter(owner).inspect(|counter| {
            counter.fetch_add(bytes, Ordering::AcqRel);
        });
    }

    /// Takes memory of another API.
    pub(super) fn import(&self, address: u64, memory: ExternalMemory) {
        let ExternalMemory { fd, offset, bytes, .. } = memory;
        self.insert(address, bytes, Owner::External);
        let import = Import { file: fd.into(), offset, bytes, agreed: Vec::new(), mapped: None };
        lock(&self.imports).insert(address, import);
    }

    /// Maps a file that another API writes no more.
    pub(super) fn map(&self, address: u64, file: File, bytes: u64, mapped: Arc<AtomicBool>) -> Option<()> {
        self.insert(address, bytes, Owner::External);
        let import = Import { file, offset: 0, bytes, agreed: Vec::new(), mapped: Some(mapped) };
        lock(&self.imports).insert(address, import);
        self.pull(address)
    }

    /// Sees what the other API wrote.
    fn pull(&self, address: u64) -> Option<()> {
        let mut imports = lock(&self.imports);
        // A surface has no bytes here.
        let Some(import) = imports.get_mut(&address) else { return Some(()) };
        import.agreed.resize(usize::try_from(import.bytes).ok()?, 0);
        import.file.read_exact_at(&mut import.agreed, import.offset).ok()?;
        heap().write(address, &import.agreed)
    }

    /// Lets it see what was written here.
    fn push(&self, address: u64) -> Option<()> {
        let mut imports = lock(&self.imports);
        let Some(import) = imports.get_mut(&address) else { return Some(()) };
        let bytes = heap().read(address, import.bytes)?;
        if bytes != import.agreed {
            import.file.write_all_at(&bytes, import.offset).ok()?;
            import.agreed = bytes;
        }
        Some(())
    }

    /// Frees what begins at an address; false if nothing of this context does.
    pub(super) fn free(&self, address: u64) -> bool {
        let Some((bytes, owner)) = lock(&self.live).remove(&address) else { return false };
        if let Some(Import { file, mapped: Some(mapped), .. }) = lock(&self.imports).remove(&address) {
            let written = heap().read(address, bytes).map(|bytes| file.write_all_at(&bytes, 0));
            debug_assert!(matches!(written, Some(Ok(()))), "{written:?}");
            mapped.store(false, Ordering::Release);
        }
        self.counter(owner).inspect(|counter| {
            counter.fetch_sub(bytes, Ordering::AcqRel);
        });
        heap().free(address)
    }

    /// Bytes that were allocated and not freed.
    pub(super) fn bytes(&self) -> u64 {
        lock(&self.live)
            .values()
            .filter(|(_, owner)| !matches!(owner, Owner::Registered | Owner::External))
            .map(|(bytes, _)| bytes)
            .sum()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let live: Vec<_> = lock(&self.live).keys().copied().collect();
        live.into_iter().for_each(|address| {
            self.free(address);
        });
    }
}

/// A stream. Whoever waits for one of its events runs its commands, on whichever thread.
pub(super) struct Stream {
    pub(super) context: Arc<Context>,
    commands: Mutex<VecDeque<Command>>,
}

impl Stream {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context, commands: Mutex::default() }
    }

    pub(super) fn push(&self, commands: impl IntoIterator<Item = Command>) {
        lock(&self.commands).extend(commands);
    }

    /// Runs its commands, and those of other streams that it waits for, as far as they go.
    pub(super) fn run(&self) -> Result<()> {
        self.run_beside(&mut Vec::new())
    }

    /// The same for one that others wait for, which are not run again.
    fn run_beside(&self, waiting: &mut Vec<*const Self>) -> Result<()> {
        if waiting.contains(&std::ptr::from_ref(self)) {
            return Ok(());
        }
        waiting.push(self);
        let result = self.run_on(waiting);
        waiting.pop();
        result
    }

    fn run_on(&self, waiting: &mut Vec<*const Self>) -> Result<()> {
        if self.context.controls.paused.load(Ordering::Acquire) {
            return Ok(());
        }
        loop {
            let mut commands = lock(&self.commands);
            let Some(command) = commands.front_mut() else { return Ok(()) };
            if let Command::Wait(state) = command {
                let state = Arc::clone(state);
                if !state.is_done() {
                    drop(commands);
                    // What has become of it is for those to hear who ask for it.
                    let _ = state.stream.upgrade().map(|other| other.run_beside(waiting));
                    if !state.is_done() {
                        return Ok(());
                    }
                    continue;
                }
            }
            if let Command::Await(timeline, value) = command
                && !timeline.wait(*value, Instant::now()).unwrap_or(true)
            {
                return Ok(());
            }
            self.context.clock.fetch_add(1, Ordering::AcqRel);
            match self.execute(command) {
                Progress::Running => return Ok(()),
                Progress::Done => drop(commands.pop_front()),
                Progress::Fault => {
                    // Who waits for an event behind it is not kept waiting.
                    let left = std::mem::take(&mut *commands);
                    drop(commands);
                    left.iter().for_each(|command| {
                        if let Command::Record(state) = command {
                            state.done.store(true, Ordering::Release);
                        }
                    });
                    let error = Error::Lost { cause: "illegal address".into() };
                    *lock(&self.context.lost) = Some(error.clone());
                    return Err(error);
                }
            }
        }
    }

    fn execute(&self, command: &mut Command) -> Progress {
        let done = match *command {
            Command::Run(ref mut run) => return run.go(&heap()),
            Command::Fill { address, bytes, value } => heap().write(address, &vec![value; bytes as usize]),
            Command::Copy { target, source, bytes } => {
                let heap = heap();
                heap.read(source, bytes).and_then(|bytes| heap.write(target, &bytes))
            }
            Command::Free { address } => self.context.free(address).then_some(()),
            Command::Record(ref state) => {
                state.at.store(self.context.clock.load(Ordering::Acquire), Ordering::Release);
                state.done.store(true, Ordering::Release);
                Some(())
            }
            Command::Wait(_) => Some(()),
            Command::Await(..) => Some(()),
            Command::Acquire(address) => self.context.pull(address),
            Command::Release(address) => self.context.push(address),
            Command::Signal(ref timeline, value) => timeline.signal(value).ok(),
        };
        done.map_or(Progress::Fault, |()| Progress::Done)
    }
}
