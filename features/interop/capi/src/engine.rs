//! The kernels of a device, compiled and loaded once, and what a call launches: found by all of its arguments but where memory is.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use rustc_hash::FxBuildHasher;
use vm_accel::{Artifact, Extents, Grid, Scalar};
use vm_ir::{GuestAddr, Type};
use vm_kernels::call::{self as library, Entry, Region};
use vm_kernels::functions::Arguments;

use crate::call::Key;
use crate::error::Failure;
use crate::sys::{Device, is_closed};

/// Calls that are remembered; where there are more, they are found out again.
const PLANS: usize = 4096;

/// What calls do that were made before.
type Plans<K> = HashMap<Key, Arc<Plan<K>>, FxBuildHasher>;

/// A device with what was compiled for it.
pub(crate) struct Engine<D: Device> {
    pub(crate) device: D,
    /// No other of the process has it.
    number: u64,
    plans: RwLock<Plans<D::Kernel>>,
    kernels: Mutex<HashMap<Entry, Slot<D::Kernel>, FxBuildHasher>>,
}

/// The calls that a thread made last, of all engines of a device's kind: what they do is found without a lock. Of a thread that made none
/// there is nothing.
pub(crate) struct Recent<K>(Vec<Option<Known<K>>>);

/// Calls that a thread remembers, and how many of them lie in one set: one that is new takes the place of its set's oldest.
const RECENT: usize = 64;
const SET: usize = 4;

/// A call of an engine with a number.
struct Known<K> {
    engine: u64,
    key: Key,
    plan: Arc<Plan<K>>,
    packed: Packed,
}

/// The arguments of a plan's launches as they were given last; of the first of them alone where one could not be packed.
pub(crate) type Packed = Vec<vm_accel::Arguments>;

impl<K> Recent<K> {
    pub(crate) const NEW: Self = Self(Vec::new());

    fn set(&mut self, key: &Key) -> Option<&mut [Option<Known<K>>]> {
        let first = (key.hash() >> 32) as usize % (RECENT / SET) * SET;
        self.0.get_mut(first..first + SET)
    }
}

/// A kernel that is loaded, or will be by who has the lock.
type Slot<K> = Arc<Mutex<Option<Arc<Loaded<K>>>>>;

/// A loaded kernel.
pub(crate) struct Loaded<K> {
    pub(crate) artifact: Artifact,
    pub(crate) kernel: K,
}

/// What a call does.
pub(crate) struct Plan<K> {
    /// The buffers, in the order of the function's.
    pub(crate) buffers: Vec<Buffer>,
    /// One after the other.
    pub(crate) steps: Vec<Step<K>>,
    /// Bytes that it needs beside the buffers.
    pub(crate) workspace: u64,
}

/// A buffer of a call.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Which argument it is.
    pub(crate) word: usize,
    pub(crate) name: &'static str,
    pub(crate) bytes: u64,
    /// Bytes of an element.
    pub(crate) element: u64,
    pub(crate) writes: bool,
}

/// A launch.
pub(crate) struct Step<K> {
    pub(crate) kernel: Arc<Loaded<K>>,
    pub(crate) grid: Grid,
    pub(crate) operands: Vec<Operand>,
    /// The arguments as they were packed first. Those of other calls differ in addresses, tensor maps and numbers that vary alone.
    pub(crate) first: OnceLock<vm_accel::Arguments>,
}

/// An argument of a launch.
pub(crate) enum Operand {
    /// A view of a buffer, by its number; the workspace is behind the last. From an offset on.
    View {
        buffer: usize,
        offset: u64,
        extents: Extents,
    },
    Number(Scalar),
    /// One of those that vary.
    Varying(usize),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<D: Device> Engine<D> {
    pub(crate) fn new(device: D) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (plans, kernels) = Default::default();
        Self { device, number: NEXT.fetch_add(1, Ordering::Relaxed), plans, kernels }
    }

    /// What `f` gives for what a call does and what was given to its launches, if this thread remembers that.
    pub(crate) fn recent<R>(
        &self,
        key: &Key,
        f: impl FnOnce(&Plan<D::Kernel>, &mut Packed) -> R,
    ) -> Option<R> {
        let look = |recent: &std::cell::RefCell<Recent<D::Kernel>>| {
            let mut recent = recent.try_borrow_mut().ok()?;
            let mut set = recent.set(key)?.iter_mut().flatten();
            let known = set.find(|known| known.engine == self.number && known.key == *key)?;
            Some(f(&known.plan, &mut known.packed))
        };
        D::recent().try_with(look).ok()?
    }

    /// Lets this thread remember what a call does, and what was given to its launches.
    pub(crate) fn remember(&self, key: Key, plan: Arc<Plan<D::Kernel>>, packed: Packed) {
        // A thread that ends remembers nothing any more.
        let _ = D::recent().try_with(|recent| {
            let Ok(mut recent) = recent.try_borrow_mut() else { return };
            recent.0.resize_with(RECENT, || None);
            let Some(set) = recent.set(&key) else { return };
            set.rotate_right(1);
            set[0] = Some(Known { engine: self.number, key, plan, packed });
        });
    }

    /// What a call does, if it was asked before.
    pub(crate) fn known(&self, key: &Key) -> Option<Arc<Plan<D::Kernel>>> {
        self.plans.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// The function and the buffers of a call; no buffers where nothing is computed.
    ///
    /// # Errors
    /// [`Failure::Invalid`].
    pub(crate) fn outline(
        call: &Arguments<'_>,
    ) -> Result<(Box<dyn library::Function>, Vec<Buffer>), Failure> {
        let function = call.function()?;
        let buffer = |((word, _), buffer): ((usize, u64), library::Buffer)| {
            let name = call.spec.parameters[word].name;
            let element = u64::from(buffer.element.bytes());
            let bytes = buffer.len().and_then(|len| len.checked_mul(element)).filter(|all| *all <= 1 << 62);
            let many = || {
                let what = format!("has {:?} elements: more bytes than can be addressed", buffer.extents);
                Failure::invalid(call.name, name, what)
            };
            let bytes = bytes.ok_or_else(many)?;
            Ok(Buffer { word, name, bytes, element, writes: buffer.access.writes() })
        };
        let buffers =
            call.pointers().zip(function.buffers()).map(buffer).collect::<Result<Vec<_>, Failure>>()?;
        Ok((function, buffers))
    }

    /// Finds out what a call does, and remembers it.
    ///
    /// # Errors
    /// Every [`Failure`].
    pub(crate) fn plan(
        &self,
        call: &Arguments<'_>,
        function: &dyn library::Function,
        buffers: Vec<Buffer>,
    ) -> Result<Arc<Plan<D::Kernel>>, Failure> {
        let name = call.name;
        let launches =
            function.call(&self.device.resources()).map_err(|error| Failure::call(name, &error))?;
        let count = buffers.len();
        let mut steps = Vec::new();
        for launch in launches.launches {
            let kernel = self.kernel(name, launch.entry)?;
            let grid = Grid(launch.grid);
            grid.check(kernel.artifact.signature(), self.device.info())
                .map_err(|error| Failure::invalid(name, "the call", format!("is too large: {error}")))?;
            let mut varying = 0;
            let operand = |operand| match operand {
                library::Operand::Number(_, Type::F32) if call.spec.numbers.is_some() => {
                    varying += 1;
                    Ok(Operand::Varying(varying - 1))
                }
                library::Operand::Buffer(buffer, region) => view(buffer, &region),
                library::Operand::Workspace(region) => view(count, &region),
                library::Operand::Number(bits, ty) => {
                    Ok(Operand::Number(Scalar::from_bits(bits, ty.scalar().bytes())))
                }
            };
            let operands = launch.operands.into_iter().map(operand).collect::<Result<Vec<_>, _>>();
            let operands = operands.map_err(|error| Failure::device(name, &error))?;
            steps.push(Step { kernel, grid, operands, first: OnceLock::new() });
        }
        let plan = Arc::new(Plan { buffers, steps, workspace: launches.workspace });
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        if plans.len() >= PLANS {
            plans.clear();
        }
        plans.insert(Key::of(call), Arc::clone(&plan));
        Ok(plan)
    }

    /// A kernel, compiled and loaded by the first who asks; others wait for that one kernel.
    fn kernel(&self, function: &'static str, entry: Entry) -> Result<Arc<Loaded<D::Kernel>>, Failure> {
        let slot = Arc::clone(lock(&self.kernels).entry(entry).or_default());
        let mut slot = lock(&slot);
        if let Some(kernel) = &*slot {
            return Ok(Arc::clone(kernel));
        }
        let kernel = entry
            .kernel(GuestAddr(0))
            .map_err(|error| Failure::Launch { function, what: error.to_string() })?;
        let compiled = self.device.compile(kernel).map_err(|error| Failure::compiler(function, &error))?;
        if is_closed() {
            return Err(Failure::Unavailable(format!("{function}: the process ends")));
        }
        let artifact = compiled.artifact().clone();
        let load = || {
            self.device.info().check(&artifact)?;
            self.device.load(&artifact)
        };
        let kernel = load().map_err(|error| Failure::device(function, &error))?;
        Ok(Arc::clone(slot.insert(Arc::new(Loaded { artifact, kernel }))))
    }
}

/// A view as a launch takes it.
fn view(buffer: usize, region: &Region) -> vm_accel::Result<Operand> {
    let bytes = u64::from(region.element.bytes());
    let strides: Vec<u64> = region.strides.iter().map(|stride| stride.saturating_mul(bytes)).collect();
    let rows = strides.split_last().map_or(&[][..], |(_, rows)| rows);
    Ok(Operand::View { buffer, offset: region.offset, extents: Extents::strided(&region.extents, rows)? })
}
