//! All that the driver knows, under one lock: tables of contexts, memory, streams, events, modules and graphs.
//!
//! One lock keeps every check true until the access it was made for. Whatever changes what a wait looks at wakes all waits.

use crate::{
    array::Array,
    capture::Capture,
    config::Config,
    context::Context,
    error::{Error, Result},
    event::Event,
    exec::Exec,
    graph::{Graph, Node},
    host::Allocation,
    memory::{Arena, Span},
    module::{Function, Module},
    pool::Pool,
    stream::Stream,
    sys,
    virtual_memory::Physical,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::fd::OwnedFd,
    sync::{
        Condvar, LazyLock, Mutex, MutexGuard,
        atomic::{AtomicU32, Ordering},
    },
    thread::ThreadId,
    time::Instant,
};

/// The file of a device's memory is sparse and its offsets are never reused, so that nothing is seen through an old one.
const FILE: u64 = 1 << 46;

pub(crate) struct Device {
    /// Bytes that are allocated.
    pub(crate) used: u64,
    pub(crate) file: OwnedFd,
    /// The first offset of the file that was never used.
    next: u64,
    pub(crate) primary: u64,
    pub(crate) primary_count: u64,
    pub(crate) primary_flags: u32,
    pub(crate) default_pool: u64,
    pub(crate) pool: u64,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) initialized: bool,
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: u64,
    pub(crate) contexts: BTreeMap<u64, Context>,
    pub(crate) arena: Arena,
    pub(crate) spans: BTreeMap<u64, Span>,
    /// Where memory is that other processes may have.
    pub(crate) exported: BTreeSet<u64>,
    pub(crate) host: BTreeMap<u64, Allocation>,
    pub(crate) hints: vm_cuda_api::hints::Hints,
    pub(crate) reservations: BTreeMap<u64, u64>,
    pub(crate) physical: BTreeMap<u64, Physical>,
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) defaults: HashMap<(u64, Option<ThreadId>), u64>,
    pub(crate) events: BTreeMap<u64, Event>,
    pub(crate) modules: BTreeMap<u64, Module>,
    pub(crate) functions: BTreeMap<u64, Function>,
    pub(crate) libraries: crate::library::Libraries,
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: BTreeMap<u64, Graph>,
    pub(crate) nodes: BTreeMap<u64, Node>,
    pub(crate) execs: BTreeMap<u64, Exec>,
    pub(crate) user_objects: BTreeMap<u64, crate::user_object::UserObject>,
    pub(crate) conditions: BTreeMap<u64, crate::conditional::Condition>,
    pub(crate) pools: BTreeMap<u64, Pool>,
    pub(crate) arrays: BTreeMap<u64, Array>,
    pub(crate) links: BTreeMap<u64, crate::link::Link>,
    ids: u64,
    /// Handles of what has ended.
    freed: Vec<u64>,
}

impl State {
    fn new(config: &Config) -> std::io::Result<Self> {
        let mut state = Self { memory: config.settings.memory, ..Self::default() };
        state.arena = Arena::new()?;
        for device in 0..config.settings.devices {
            let file = sys::memory_file(&format!("vm-cuda-driver-{device}"), FILE)?;
            let (default_pool, primary) = (state.id(), state.id());
            state.pools.insert(default_pool, Pool::new(device));
            state.devices.push(Device {
                used: 0,
                file,
                next: 0,
                primary,
                primary_count: 0,
                primary_flags: 0,
                default_pool,
                pool: default_pool,
            });
        }
        Ok(state)
    }

    /// A handle that nothing else has: a pointer that nothing is mapped at. Like an allocator, it first returns what was freed last, so that a
    /// program that keeps the handle of an object that has ended soon has that of another one.
    pub(crate) fn id(&mut self) -> u64 {
        self.freed.pop().unwrap_or_else(|| {
            self.ids += 1;
            0x10_0000 + self.ids * 0x40
        })
    }

    /// Frees the handles of objects that have ended.
    pub(crate) fn free_ids(&mut self, ids: impl IntoIterator<Item = u64>) {
        self.freed.extend(ids);
    }

    /// Counts `len` bytes of a device's memory as used, and says at which offset of its file they are.
    pub(crate) fn claim(&mut self, device: usize, len: u64) -> Result<u64> {
        let total = self.memory;
        let used = self.devices.get(device).ok_or(Error::InvalidDevice)?.used;
        if used.checked_add(len).is_none_or(|used| used > total) {
            // As driver 580 does.
            self.trim_all(device);
        }
        let device = self.devices.get_mut(device).ok_or(Error::InvalidDevice)?;
        let used = device.used.checked_add(len).filter(|used| *used <= total).ok_or(Error::OutOfMemory)?;
        let pages = len.checked_next_multiple_of(crate::memory::PAGE).ok_or(Error::OutOfMemory)?;
        let offset = device.next;
        device.next = offset.checked_add(pages).filter(|next| *next <= FILE).ok_or(Error::OutOfMemory)?;
        device.used = used;
        Ok(offset)
    }

    /// The device of an ordinal.
    pub(crate) fn device(&self, ordinal: i32) -> Result<usize> {
        if !self.initialized {
            return Err(Error::NotInitialized);
        }
        usize::try_from(ordinal).ok().filter(|at| *at < self.devices.len()).ok_or(Error::InvalidDevice)
    }
}

struct Shared {
    config: Config,
    state: Mutex<State>,
    changed: Condvar,
}

static SHARED: LazyLock<Shared> = LazyLock::new(|| {
    let mut config = Config::read();
    let state = State::new(&config).unwrap_or_else(|_| {
        // No address space or files: as a machine without a device.
        config.settings.devices = 0;
        State::default()
    });
    Shared { config, state: Mutex::new(state), changed: Condvar::new() }
});

/// The process that called `cuInit`.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Makes this the process that the driver works in.
pub(crate) fn begin() {
    // What fork() copies has neither threads nor a lock that is surely free.
    let _ = PROCESS.compare_exchange(0, std::process::id(), Ordering::Relaxed, Ordering::Relaxed);
}

/// Whether this process was forked from the one that the driver works in: as with the real one, it can't be used here.
pub(crate) fn forked() -> bool {
    ![0, std::process::id()].contains(&PROCESS.load(Ordering::Relaxed))
}

/// The settings.
pub(crate) fn config() -> &'static Config {
    &SHARED.config
}

/// The state, locked.
pub(crate) fn lock() -> MutexGuard<'static, State> {
    SHARED.state.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// Wakes all that wait.
pub(crate) fn changed() {
    SHARED.changed.notify_all();
}

/// Waits, without a limit, until something changed.
pub(crate) fn pause(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    SHARED.changed.wait(state).unwrap_or_else(|poison| poison.into_inner())
}

/// Waits until `done`, with the state unlocked meanwhile.
pub(crate) fn wait(
    mut state: MutexGuard<'static, State>,
    done: impl Fn(&State) -> bool,
) -> Result<MutexGuard<'static, State>> {
    let deadline = config().deadline();
    while !done(&state) {
        let Some(deadline) = deadline else {
            state = pause(state);
            continue;
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::LaunchTimeout);
        }
        let (again, _) =
            SHARED.changed.wait_timeout(state, left).unwrap_or_else(|poison| poison.into_inner());
        state = again;
    }
    Ok(state)
}
