//! A program's session: what it has of the driver.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thiserror::Error;
use vm_cuda_api::Object;

use super::callbacks;
use super::deadline::Watch;
use super::exports::Sharing;
use super::handles::{Handles, Layout};
use super::host::{Charge, ENTRY, HostMemory};
use super::nvml::Asked;
use super::options::Options;
use super::pot::Pot;
use super::prints::Prints;
use super::quota::Quota;
use super::ranges::Ranges;
use super::slice::Slice;
use super::special::Conditions;
use super::staged::Counts;
use super::sys::{self, Driver, Mapping, Word};
use super::turn::Turn;
use super::untold::Untold;
use crate::recording::Recorder;
use crate::wire::{Malformed, WINDOW, code, control};

/// The most lanes of a session: threads of its program.
const LANES: usize = 1024;
/// The most windows: allocations of the host's memory.
const WINDOWS: usize = 1 << 16;
/// The most functions that graphs call.
const CALLED: usize = 1 << 20;
/// The most parameters of a kernel.
const PARAMETERS: u64 = 4096;

/// Why a session ended that its program did not end.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The connection failed.
    #[error("the connection of a CUDA program failed: {0}")]
    Connection(#[from] io::Error),
    /// It says what it should not.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// What a program has of the driver, over all its lanes.
#[derive(Debug)]
pub struct Session {
    driver: Arc<Driver>,
    handles: Mutex<Handles>,
    ranges: Mutex<Ranges>,
    windows: Mutex<Windows>,
    host: HostMemory,
    quota: Quota,
    recorder: Option<Recorder>,
    watch: Option<Arc<Watch>>,
    lanes: AtomicUsize,
    /// A capture may be running: what reads the program's memory then can't be recorded.
    captures: AtomicBool,
    /// Does it end as something of it makes no progress?
    is_late: AtomicBool,
    callbacks: callbacks::Shared,
    prints: Option<Arc<Prints>>,
    /// Copies in graphs of memory that only the program has.
    staged: Arc<Counts>,
    /// What the driver does not tell of conditions of graphs.
    conditions: Mutex<Conditions>,
    /// Where it is known what other programs share.
    sharing: Option<Sharing>,
    /// What it has asked NVML.
    asked: Asked,
    /// The program's connection, by which it sees that the session has ended.
    connection: Mutex<Option<UnixStream>>,
    /// Functions of the program that graphs call, and what the driver calls each.
    functions: Mutex<HashMap<[u64; 2], [u64; 2]>>,
    /// What the driver reads as long as a linker is there.
    kept: Mutex<BTreeMap<u64, Options>>,
    /// Streams being captured, and the charge for all that they record.
    recorded: Mutex<(HashSet<u64>, Charge)>,
    /// What is done once the driver has begun, and before the program is told.
    start: Start,
    pub(super) turn: Turn,
    untold: Untold,
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(super) const RELAXED: u64 = 2;

/// Memory of the program's files that this process maps.
#[derive(Debug, Default)]
struct Windows {
    /// Memory of the host, by its address.
    mapped: BTreeMap<u64, Mapped>,
    /// Ranges of the window that lanes map, and those that the driver may still have pinned although they are unmapped here.
    claims: Vec<(u64, u64)>,
}

/// Memory of the host at the address where the program has it.
#[derive(Debug)]
struct Mapped {
    mapping: Mapping,
    /// Where it begins in its file.
    offset: u64,
    /// Set before the driver registers it, and cleared by its removal alone.
    is_registered: bool,
    _charge: Charge,
}

/// A range of the window that a lane maps, until this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    session: Arc<Session>,
    range: (u64, u64),
}

impl Claim {
    /// Keeps the range from being freed as long as this process lives: the driver may have pages of it pinned.
    pub(super) fn leak(self) {
        locked(&self.session.windows).claims.push(self.range);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let claims = &mut locked(&self.session.windows).claims;
        if let Some(at) = claims.iter().position(|claim| *claim == self.range) {
            claims.swap_remove(at);
        }
    }
}

/// Done once. What it answers is the result of `cuInit`.
#[derive(Default)]
struct Start(Mutex<Option<Box<dyn FnOnce() -> u32 + Send>>>, AtomicBool);

impl fmt::Debug for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Start")
    }
}

pub(super) fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// A session that has nothing yet, and may have all that there is.
    #[must_use]
    pub fn new(driver: Arc<Driver>) -> Self {
        Self::with_limits(driver, None, None, None)
    }

    /// One that has device memory of a pot, whose work on the device has to make progress within a deadline, and that keeps the device busy for no
    /// more than a slice.
    #[must_use]
    pub fn with_limits(
        driver: Arc<Driver>,
        pot: Option<Pot>,
        deadline: Option<Duration>,
        slice: Option<Slice>,
    ) -> Self {
        let watches = deadline.is_some() || slice.is_some();
        let host = HostMemory::new(u64::MAX);
        Self {
            handles: Mutex::new(Handles::new(host.clone())),
            ranges: Mutex::new(Ranges::new(host.clone())),
            recorded: Mutex::new((HashSet::new(), host.charge(0))),
            host,
            quota: Quota::new(pot),
            watch: watches.then(|| Arc::new(Watch::new(deadline, slice))),
            driver,
            windows: Mutex::default(),
            recorder: None,
            lanes: AtomicUsize::new(0),
            captures: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            callbacks: callbacks::Shared::default(),
            prints: None,
            staged: Arc::default(),
            conditions: Mutex::default(),
            sharing: None,
            asked: Asked::default(),
            connection: Mutex::default(),
            functions: Mutex::default(),
            kept: Mutex::default(),
            start: Start::default(),
            turn: Turn::default(),
            untold: Untold::default(),
        }
    }

    /// One that shares with others by a connection that their server [serves](super::Exports::serve). Its timeouts are as who made it has set them: a
    /// worker may not.
    #[must_use]
    pub fn share_by(self, server: UnixStream) -> Self {
        Self { sharing: Some(Sharing::new(server)), ..self }
    }

    /// Sets the budget of host memory.
    #[must_use]
    pub fn with_host_memory(self, host: HostMemory) -> Self {
        Self {
            handles: Mutex::new(Handles::new(host.clone())),
            ranges: Mutex::new(Ranges::new(host.clone())),
            recorded: Mutex::new((HashSet::new(), host.charge(0))),
            host,
            ..self
        }
    }

    /// Errors that no call has returned yet.
    pub(super) fn untold(&self) -> &Untold {
        &self.untold
    }

    pub(super) fn host(&self) -> &HostMemory {
        &self.host
    }

    /// One whose program is given what the driver prints in this process.
    #[must_use]
    pub fn printing(self, prints: Arc<Prints>) -> Self {
        self.callbacks.print(prints.clone());
        Self { prints: Some(prints), ..self }
    }

    pub(super) fn prints(&self) -> Option<&Arc<Prints>> {
        self.prints.as_ref()
    }

    pub(super) fn sharing(&self) -> Option<&Sharing> {
        self.sharing.as_ref()
    }

    /// Has something done once the driver has begun: a confined process gives up then what only its beginning takes. It returns a result of the
    /// driver's, and the session ends where that is an error.
    pub fn when_started(&self, act: impl FnOnce() -> u32 + Send + 'static) {
        *locked(&self.start.0) = Some(Box::new(act));
    }

    /// The driver has begun: the result for the program.
    pub(super) fn started(&self) -> u32 {
        self.start.1.store(true, Ordering::SeqCst);
        let act = locked(&self.start.0).take();
        let result = act.map_or(0, |act| act());
        if result != 0 {
            self.end();
        }
        result
    }

    /// Has the driver begun, behind which this process may do less?
    pub(super) fn has_started(&self) -> bool {
        self.start.1.load(Ordering::SeqCst)
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Records what the program does from now on.
    #[must_use]
    pub fn recorded_by(self, recorder: Option<Recorder>) -> Self {
        Self { recorder, ..self }
    }

    pub(super) fn recorder(&self) -> Option<&Recorder> {
        self.recorder.as_ref()
    }

    pub(super) fn quota(&self) -> &Quota {
        &self.quota
    }

    /// What looks at its streams, where it has a deadline or a time slice.
    pub(super) fn watch(&self) -> Option<&Arc<Watch>> {
        self.watch.as_ref()
    }

    pub(super) fn handles(&self) -> MutexGuard<'_, Handles> {
        locked(&self.handles)
    }

    /// Returns the number of an object that a call has returned. The object ends with its owner, and with the current context if objects of its kind
    /// belong to contexts.
    pub(super) fn give(
        &self,
        object: Object,
        real: u64,
        owner: Option<u64>,
        is_new: bool,
    ) -> Result<u64, u32> {
        let mut handles = self.handles();
        if !is_new && handles.knows(object, real) {
            return handles.give(object, real);
        }
        drop(handles);
        let mut context = [0];
        if object.is_of_context() {
            // No context is current: the object belongs to none.
            let _ = self.driver.named("cuCtxGetCurrent", &[Word::At(0)], &mut context);
        }
        handles = self.handles();
        let id = if is_new { handles.make(object, real)? } else { handles.give(object, real)? };
        let context = handles.id(Object::Context, context[0]).map(|context| (Object::Context, context));
        let owner = owner.and_then(|owner| match handles.object(owner)? {
            Object::Function => Some((Object::Library, handles.library_of(owner)?)),
            object => Some((object, owner)),
        });
        for owner in [context, owner].into_iter().flatten() {
            handles.own(owner, (object, id));
        }
        Ok(id)
    }

    /// Updates the session when objects, given by their driver handles, have ended.
    pub(super) fn ended(&self, objects: &[(Object, u64)]) {
        for (_, stream) in objects.iter().filter(|(object, _)| *object == Object::Stream) {
            self.ends_capture(*stream);
        }
    }

    /// Memory of devices that the program has.
    pub(super) fn ranges(&self) -> MutexGuard<'_, Ranges> {
        locked(&self.ranges)
    }

    /// Notes that a capture may begin.
    pub(super) fn captures(&self) {
        self.captures.store(true, Ordering::Relaxed);
    }

    /// Notes that the capture of a stream has begun.
    pub(super) fn begins_capture(&self, stream: u64) {
        locked(&self.recorded).0.insert(stream);
    }

    /// Notes that the capture of a stream, or the stream, has ended. The graph has its own charge.
    pub(super) fn ends_capture(&self, stream: u64) {
        let (streams, recorded) = &mut *locked(&self.recorded);
        if streams.remove(&stream) && streams.is_empty() {
            recorded.shrink(0);
        }
    }

    /// Takes memory for what a call may record, while a stream is captured.
    pub(super) fn record(&self, bytes: u64) -> Result<(), u32> {
        let (streams, recorded) = &mut *locked(&self.recorded);
        if streams.is_empty() { Ok(()) } else { recorded.grow(bytes) }
    }

    /// Returns whether a stream is captured.
    pub(super) fn is_recorded(&self) -> bool {
        self.may_capture() && !locked(&self.recorded).0.is_empty()
    }

    /// Adds a charge to what captures have recorded.
    pub(super) fn record_more(&self, charge: Charge) {
        let (streams, recorded) = &mut *locked(&self.recorded);
        if !streams.is_empty() {
            recorded.merge(charge);
        }
    }

    /// Makes a call that the driver refuses to threads that capture, and that is none of the program's.
    pub(super) fn relaxed(&self, call: impl FnOnce(&Driver) -> u32) -> u32 {
        let (name, mut mode) = ("cuThreadExchangeStreamCaptureMode", [RELAXED]);
        let exchanged = self.may_capture() && self.driver.named(name, &[Word::At(0)], &mut mode) == 0;
        let result = call(&self.driver);
        if exchanged {
            self.driver.named(name, &[Word::At(0)], &mut mode);
        }
        result
    }

    /// May a capture be running?
    pub(super) fn may_capture(&self) -> bool {
        self.captures.load(Ordering::Relaxed)
    }

    pub(super) fn callbacks(&self) -> callbacks::Shared {
        self.callbacks.clone()
    }

    /// What copies in graphs of memory that only the program has have in common.
    pub(super) fn staged(&self) -> &Arc<Counts> {
        &self.staged
    }

    pub(super) fn asked(&self) -> &Asked {
        &self.asked
    }

    pub(super) fn conditions(&self) -> MutexGuard<'_, Conditions> {
        locked(&self.conditions)
    }

    /// What the driver calls for a function of the program with its argument, as often as graphs with it are launched.
    pub(super) fn function(&self, function: u64, argument: u64) -> Result<[u64; 2], u32> {
        let mut functions = locked(&self.functions);
        if let Some(known) = functions.get(&[function, argument]) {
            return Ok(*known);
        }
        if functions.len() >= CALLED {
            return Err(code::OUT_OF_MEMORY);
        }
        let words = [control::FUNCTION, function, argument, 0, 0];
        let charge = self.host.charge(ENTRY);
        let made = sys::keep_callback(sys::Callback {
            callbacks: self.callbacks(),
            words,
            stays: true,
            _charge: charge,
        });
        functions.insert([function, argument], made);
        Ok(made)
    }

    /// The function of the program, with its argument, for which the driver has this argument.
    pub(super) fn known_function(&self, at: u64) -> Option<[u64; 2]> {
        locked(&self.functions).iter().find(|(_, made)| made[1] == at).map(|(words, _)| *words)
    }

    /// Keeps what the driver reads and writes as long as a linker is there; the next one at its place replaces it.
    pub(super) fn keep(&self, link: u64, options: Options) {
        locked(&self.kept).insert(link, options);
    }

    /// The linker is gone.
    pub(super) fn forget(&self, link: u64) {
        locked(&self.kept).remove(&link);
    }

    /// What is in a linker's logs.
    pub(super) fn put_logs(&self, link: u64, reply: &mut Vec<u8>) {
        if let Some(options) = locked(&self.kept).get(&link) {
            options.put_logs(reply);
        }
    }

    /// A lane more, unless there are too many.
    pub(super) fn enter(&self) -> bool {
        let entered = self.lanes.fetch_add(1, Ordering::SeqCst) < LANES;
        if !entered {
            self.leave();
        }
        entered
    }

    /// Has it no lanes?
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.load(Ordering::SeqCst) == 0
    }

    pub(super) fn leave(&self) {
        self.lanes.fetch_sub(1, Ordering::SeqCst);
    }

    /// Does nothing of it go on?
    pub fn has_ended(&self) -> bool {
        self.turn.has_ended()
    }

    /// Nothing of it goes on.
    pub fn end(&self) {
        self.turn.end();
        if let Some(connection) = locked(&self.connection).take() {
            // It may be closed already.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// What calls are answered that are under way when it ends.
    pub(super) fn end_code(&self) -> u32 {
        if self.is_late.load(Ordering::SeqCst) { code::LAUNCH_TIMEOUT } else { code::UNAVAILABLE }
    }

    /// What the program has on the device makes no progress: nothing of it goes on, and the program is told why.
    pub(super) fn end_late(&self) {
        tracing::warn!("a CUDA program is ended: what it has on the device makes no progress");
        self.is_late.store(true, Ordering::SeqCst);
        if let Some(mut connection) = locked(&self.connection).as_ref() {
            let word = control::ENDED | u64::from(code::LAUNCH_TIMEOUT);
            // A program that takes no answers is not waited for.
            let told =
                connection.set_nonblocking(true).and_then(|()| connection.write_all(&word.to_ne_bytes()));
            if let Err(error) = told {
                tracing::debug!(%error, "it is not told why");
            }
        }
        self.end();
    }

    /// It ends with this connection, and this connection with it.
    pub(super) fn connect(&self, connection: UnixStream) {
        *locked(&self.connection) = Some(connection);
    }

    /// Maps memory of the program, a part of a file, where the program has it.
    pub(super) fn map(&self, at: u64, len: u64, offset: u64, memory: &OwnedFd) -> Result<(), u32> {
        let end = at.checked_add(len).filter(|end| *end <= WINDOW.end).ok_or(code::INVALID_VALUE)?;
        if at < WINDOW.start || at == end || !at.is_multiple_of(4096) || !(len | offset).is_multiple_of(4096)
        {
            return Err(code::INVALID_VALUE);
        }
        let mapped = &mut locked(&self.windows).mapped;
        if mapped.len() >= WINDOWS {
            return Err(code::OUT_OF_MEMORY);
        }
        let charge = self.host.take(len)?;
        let mapping = Mapping::new(at, len, offset, memory).map_err(|_| code::OUT_OF_MEMORY)?;
        mapped.insert(at, Mapped { mapping, offset, is_registered: false, _charge: charge });
        Ok(())
    }

    /// Returns the length of memory that the driver is about to register. From now on only [`unmap`](Self::unmap) removes it.
    pub(super) fn begin_registration(&self, at: u64) -> Result<u64, u32> {
        let windows = &mut locked(&self.windows);
        let found = windows.mapped.get_mut(&at).filter(|mapped| !mapped.is_registered);
        let mapped = found.ok_or(code::INVALID_VALUE)?;
        mapped.is_registered = true;
        Ok(mapped.mapping.len())
    }

    /// Unmaps memory of the program. Unless the driver has confirmed that its pages are not pinned, the part of the window stays in use.
    pub(super) fn unmap(&self, at: u64, is_unpinned: bool) {
        let windows = &mut *locked(&self.windows);
        if let Some(mapped) = windows.mapped.remove(&at)
            && !is_unpinned
        {
            let claim = (mapped.offset, mapped.mapping.len());
            if !windows.claims.contains(&claim) {
                windows.claims.push(claim);
            }
        }
    }

    /// Claims a range of the window for a lane.
    pub(super) fn claim(self: &Arc<Self>, offset: u64, len: u64) -> Claim {
        let range = (offset, len);
        locked(&self.windows).claims.push(range);
        Claim { session: self.clone(), range }
    }

    /// Unmaps what this process maps of a part of the window and the driver never had. `NOT_READY` if it maps more of it, or the driver does.
    pub(super) fn release(&self, offset: u64, len: u64) -> u32 {
        let overlaps = |start: u64, bytes: u64| {
            start < offset.saturating_add(len) && offset < start.saturating_add(bytes)
        };
        let windows = &mut *locked(&self.windows);
        let is_of_part = |mapped: &Mapped| overlaps(mapped.offset, mapped.mapping.len());
        windows.mapped.retain(|_, mapped| mapped.is_registered || !is_of_part(mapped));
        let is_used = windows.mapped.values().any(is_of_part)
            || windows.claims.iter().any(|(start, bytes)| overlaps(*start, *bytes));
        if is_used { code::NOT_READY } else { 0 }
    }

    /// Returns whether a window has all of a range.
    pub(super) fn has(&self, at: u64, len: u64) -> bool {
        let windows = locked(&self.windows);
        let found = windows.mapped.range(..=at).next_back();
        found.is_some_and(|(start, mapped)| {
            at.checked_add(len).is_some_and(|end| end <= start + mapped.mapping.len())
        })
    }

    /// Returns whether the program has all of a range, in one allocation of a device or in one window: the driver rejects a copy that goes from one
    /// allocation to the next. Every address reaches 0 bytes.
    pub(super) fn reaches(&self, at: u64, len: u64) -> bool {
        len == 0 || self.ranges().has(at, len) || self.has(at, len) || self.is_of_device(at, len)
    }

    /// Asks the driver whether a range is in an allocation of a device: it alone knows what graphs allocate.
    fn is_of_device(&self, at: u64, len: u64) -> bool {
        /// `CU_POINTER_ATTRIBUTE_…`: `MEMORY_TYPE`, `RANGE_START_ADDR` and `RANGE_SIZE`; and `CU_MEMORYTYPE_DEVICE`.
        const ATTRIBUTES: [u64; 3] = [2, 11, 12];
        const DEVICE: u32 = 2;
        let mut memory = [0; 3];
        let known = ATTRIBUTES.into_iter().enumerate().all(|(to, attribute)| {
            let words = [Word::At(to), Word::Is(attribute), Word::Is(at)];
            self.driver.named("cuPointerGetAttribute", &words, &mut memory) == 0
        });
        let [kind, start, size] = memory;
        let end = |at: u64, len| at.checked_add(len);
        known
            && kind as u32 == DEVICE
            && start <= at
            && end(at, len).is_some_and(|to| Some(to) <= end(start, size))
    }

    /// The length of the memory that both have at an address.
    pub(super) fn window(&self, at: u64) -> Option<u64> {
        locked(&self.windows).mapped.get(&at).map(|mapped| mapped.mapping.len())
    }

    /// Has it known where the parameters of a function, or a kernel, are.
    pub(super) fn lay_out(&self, function: u64) -> Result<(), u32> {
        let (real, name) = {
            let handles = self.handles();
            let (real, known) = handles.function(function)?;
            if known.is_some() {
                return Ok(());
            }
            let is_kernel = handles.is_kernel(function);
            (real, if is_kernel { "cuKernelGetParamInfo" } else { "cuFuncGetParamInfo" })
        };
        let layout = self.layout(name, real)?;
        self.handles().lay_out(function, layout);
        Ok(())
    }

    /// Asks the driver, by a function of this name, where the parameters of a function or a kernel are.
    pub(super) fn layout(&self, name: &str, real: u64) -> Result<Layout, u32> {
        let mut layout = Vec::new();
        loop {
            let mut memory = [0; 2];
            let index = layout.len() as u64;
            let words = [Word::Is(real), Word::Is(index), Word::At(0), Word::At(1)];
            match self.driver.named(name, &words, &mut memory) {
                0 if index < PARAMETERS => layout.push((memory[0], memory[1])),
                // There are no more.
                code::INVALID_VALUE => return Ok(layout.into()),
                0 => return Err(code::INVALID_VALUE),
                code => return Err(code),
            }
        }
    }
}
