//! A HIP for tests, which runs kernels on the host's processor and notes each wrong use of it.
//!
//! A [`Fake`] is one device more of the one fake HIP of the process. It is told ([`know`]) what to run for a code object: the kernels
//! that were compiled for the host's processor from the same IR, by the object's bytes or by its kernels' symbols. A launch runs those on the fake's memory with the block of
//! parameters that it was given; or an emulator ([`know_by`]) runs the code object itself. What it does not show is what only the GPU's own code or only AMD's library
//! does.
#![allow(unsafe_code)]

mod calls;
mod code;
mod heap;
mod object;
mod stream;

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

pub use object::{Kernel, Range, Run, code_object, know, know_by, know_symbols};

use crate::sys::{Hip, Status};
use crate::{RocmAccelerator, RocmDevice};
use heap::Heap;
use stream::{Command, Stream};

/// What a device is like.
#[derive(Clone, Debug)]
pub struct FakeOptions {
    /// Its architecture, as in `gfx942`.
    pub architecture: String,
    /// Threads of a wave.
    pub wavefront: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Whether host and device may use managed memory at the same time.
    pub unified: bool,
    /// Its PCI address, as in `0000:65:00.0`; without one, that of its number.
    pub address: Option<String>,
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            architecture: "gfx942".into(),
            wavefront: 64,
            memory_bytes: 1 << 30,
            unified: true,
            address: None,
        }
    }
}

/// One device of the fake HIP. It stays until the process ends.
#[derive(Clone)]
pub struct Fake(Arc<State>);

/// A device's state.
struct State {
    ordinal: usize,
    options: FakeOptions,
    heap: Mutex<Heap>,
    streams: Mutex<Vec<Arc<Stream>>>,
    faults: Mutex<Vec<String>>,
    /// By call: how many succeed before one fails, and with what.
    planned: Mutex<HashMap<&'static str, (u32, Status)>>,
    lost: Mutex<Option<Status>>,
    held: Mutex<bool>,
    released: Condvar,
}

/// What a handle stands for.
#[derive(Clone)]
enum Object {
    Stream(Arc<Stream>),
    Event(Arc<stream::Event>),
    Module(Arc<object::Loaded>),
    /// A kernel of a module, by its place there.
    Function(Arc<object::Loaded>, usize),
    Graph(Vec<Command>),
    Executable(Arc<[Command]>),
}

impl Object {
    fn name(&self) -> &'static str {
        match self {
            Self::Stream(_) => "stream",
            Self::Event(_) => "event",
            Self::Module(_) => "module",
            Self::Function(..) => "kernel",
            Self::Graph(_) => "graph",
            Self::Executable(_) => "executable graph",
        }
    }
}

/// The devices.
static DEVICES: RwLock<Vec<Arc<State>>> = RwLock::new(Vec::new());
/// What handles stand for, and on which device.
static OBJECTS: Mutex<Option<HashMap<usize, (usize, Object)>>> = Mutex::new(None);
/// The next handle.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// Has the fake stand for the system's HIP in all of this process, as for [`RocmAccelerator::at`]. Whether it does: not where HIP was
/// asked for before.
pub fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| crate::sys::install(calls::table()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn devices() -> Vec<Arc<State>> {
    DEVICES.read().unwrap_or_else(PoisonError::into_inner).clone()
}

fn with_objects<T>(act: impl FnOnce(&mut HashMap<usize, (usize, Object)>) -> T) -> T {
    act(lock(&OBJECTS).get_or_insert_default())
}

impl Fake {
    /// One device more.
    pub fn new(options: FakeOptions) -> Self {
        let mut devices = DEVICES.write().unwrap_or_else(PoisonError::into_inner);
        let state = State {
            ordinal: devices.len(),
            heap: Mutex::new(Heap::new(options.memory_bytes)),
            options,
            streams: Mutex::default(),
            faults: Mutex::default(),
            planned: Mutex::default(),
            lost: Mutex::default(),
            held: Mutex::default(),
            released: Condvar::new(),
        };
        devices.push(Arc::new(state));
        Self(Arc::clone(&devices[devices.len() - 1]))
    }

    /// The device as an accelerator.
    ///
    /// # Panics
    /// When it can't be opened.
    pub fn accelerator(&self) -> RocmAccelerator {
        self.accelerator_without(&[]).unwrap_or_else(|error| panic!("a fake device opens: {error}"))
    }

    /// The same, of a HIP that lacks some functions, as an older one does.
    ///
    /// # Errors
    /// What is said of those that it takes to open a device.
    pub fn accelerator_without(&self, functions: &[&str]) -> Result<RocmAccelerator, crate::RocmError> {
        let mut hip = calls::table();
        functions.iter().for_each(|name| hip.forget(name));
        let hip: &'static Hip = Box::leak(Box::new(hip));
        RocmAccelerator::of(hip, &self.listed())
    }

    /// The same, where the compute driver lists the device as something else.
    ///
    /// # Errors
    /// What is said of that.
    pub fn accelerator_as(&self, listed: &RocmDevice) -> Result<RocmAccelerator, crate::RocmError> {
        RocmAccelerator::of(Box::leak(Box::new(calls::table())), listed)
    }

    /// The device as the compute driver would list it.
    pub fn listed(&self) -> RocmDevice {
        let State { ordinal, options, .. } = &*self.0;
        RocmDevice {
            node: *ordinal as u32 + 1,
            gpu_id: *ordinal as u32 + 1,
            name: "fake".into(),
            architecture: options.architecture.clone(),
            address: self.0.address(),
            device_id: 0x74a1,
            compute_units: 4,
            wavefront: options.wavefront,
            shared_bytes: 64 << 10,
            memory_bytes: options.memory_bytes,
            render_node: None,
        }
    }

    /// Lets one call fail with a code: the first after `successes` others. One that means that the device is lost lets all fail that
    /// follow.
    pub fn fail(&self, call: &str, successes: u32, status: Status) {
        if let Some(call) = crate::sys::FUNCTIONS.iter().find(|name| **name == call) {
            lock(&self.0.planned).insert(call, (successes, status));
        }
    }

    /// Whether a call that was to fail is still to come.
    pub fn fails(&self, call: &str) -> bool {
        lock(&self.0.planned).contains_key(call)
    }

    /// Lets the device do nothing, or go on.
    pub fn hold(&self, held: bool) {
        *lock(&self.0.held) = held;
        self.0.released.notify_all();
    }

    /// How it was used wrongly so far.
    pub fn faults(&self) -> Vec<String> {
        lock(&self.0.faults).clone()
    }

    /// What was allocated or made on it and not ended, a line for each.
    pub fn left(&self) -> Vec<String> {
        let mut left = lock(&self.0.heap).left();
        with_objects(|objects| {
            for (handle, (ordinal, object)) in objects.iter() {
                if *ordinal == self.0.ordinal && !matches!(object, Object::Function(..)) {
                    left.push(format!("{} {handle:#x}", object.name()));
                }
            }
        });
        left.sort_unstable();
        left
    }
}

impl State {
    fn address(&self) -> String {
        if let Some(address) = &self.options.address {
            return address.clone();
        }
        format!("{:04x}:{:02x}:00.0", self.ordinal >> 8, self.ordinal & 0xff)
    }

    fn fault(&self, call: &str, what: std::fmt::Arguments<'_>) {
        let mut text = format!("{call}: ");
        let _ = write!(text, "{what}");
        lock(&self.faults).push(text);
    }

    /// What a call is to fail with.
    fn planned(&self, call: &str) -> Option<Status> {
        let mut planned = lock(&self.planned);
        let (left, status) = planned.get_mut(call)?;
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let status = *status;
        planned.remove(call);
        Some(status)
    }

    fn is_lost(&self) -> bool {
        lock(&self.lost).is_some()
    }

    /// Whether commands on this device may reach these bytes.
    fn reaches(&self, at: u64, bytes: u64) -> bool {
        devices().iter().any(|state| {
            let heap = lock(&state.heap);
            heap.find(at, bytes).is_some_and(|kind| state.ordinal == self.ordinal || kind.is_hosts())
        })
    }

    /// Whether a command that has not run uses these bytes.
    fn in_use(&self, at: u64, bytes: u64) -> bool {
        let meets = |(from, length): (u64, u64)| from < at + bytes && at < from + length;
        lock(&self.streams)
            .iter()
            .any(|stream| stream.pending(|command| command.ranges().into_iter().any(meets)))
    }
}

/// A new handle.
fn handle(state: &State, object: Object) -> *mut c_void {
    let handle = NEXT.fetch_add(0x10, Ordering::Relaxed);
    with_objects(|objects| objects.insert(handle, (state.ordinal, object)));
    ptr::without_provenance_mut(handle)
}

#[cfg(test)]
mod tests;
