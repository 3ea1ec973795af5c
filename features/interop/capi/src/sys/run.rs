//! A call from C: checks, the plan, the launches.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

use vm_accel::{Memory, MemoryKind, Other, QueueArgument, Tensor};
use vm_ir::Scalar;
use vm_kernels::functions::{Arguments, Kind, Numbers, Spec};

use super::abi::{keep, vmk_status};
use super::device::Device;
use super::gate;
use crate::call::{Key, PARAMETERS};
use crate::engine::{Buffer, Engine, Operand, Packed, Plan, Step};
use crate::error::Failure;
use crate::state::{Chosen, State};

/// What memory to work in is a multiple of.
const WORKSPACE_ALIGN: u64 = 16;

/// The process's state, made by its first call and never dropped: at exit other threads may still call.
static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());

/// A child has none of its parent's threads, and locks of theirs may be taken: it begins anew.
extern "C" fn in_child() {
    STATE.store(ptr::null_mut(), Ordering::Release);
    gate::in_child();
}

/// The process's state.
pub(super) fn state() -> &'static State {
    static AT_FORK: Once = Once::new();
    let known = STATE.load(Ordering::Acquire);
    // SAFETY: it is null, or was leaked by whoever put it there.
    if let Some(state) = unsafe { known.as_ref() } {
        return state;
    }
    AT_FORK.call_once(|| {
        // SAFETY: the handler does nothing but store a pointer and a number.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    let made = Box::into_raw(Box::new(State::new()));
    match STATE.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it was leaked above, and is never dropped.
        Ok(_) => unsafe { &*made },
        Err(other) => {
            // SAFETY: nobody else has seen it.
            drop(unsafe { Box::from_raw(made) });
            // SAFETY: as for the one that was known.
            unsafe { &*other }
        }
    }
}

unsafe extern "C" {
    // pthread.h; libc has it not.
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// PTHREAD_CANCEL_DISABLE of glibc and musl.
const CANCEL_DISABLE: c_int = 1;

/// While it lives, nobody cancels the thread: that would unwind it with locks of the library taken.
pub(super) struct Uncancelled(c_int);

impl Uncancelled {
    pub(super) fn new() -> Self {
        let mut before = 0;
        // SAFETY: it changes a number of the calling thread, and puts what it was into ours.
        let _ = unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
        Self(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: as above; what it was may be lost.
        let _ = unsafe { pthread_setcancelstate(self.0, ptr::null_mut()) };
    }
}

/// Runs `f`, keeps the text of what went wrong for the thread, and makes a status of it. No panic leaves this.
pub(super) fn answer(function: &'static str, f: impl FnOnce() -> Result<(), Failure>) -> vmk_status {
    let _uncancelled = Uncancelled::new();
    let passed = gate::enter();
    let ends = || Err(Failure::Unavailable(format!("{function}: the process ends")));
    let done = if passed.is_some() { catch_unwind(AssertUnwindSafe(f)) } else { Ok(ends()) };
    let done = done.unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        // What the panic holds may panic when it is dropped.
        std::mem::forget(panic);
        Err(Failure::Launch { function, what: format!("a bug of libvmkernels, please report it: {said}") })
    });
    match done {
        Ok(()) => vmk_status::VMK_SUCCESS,
        Err(failure) => {
            let text = failure.to_string();
            let named = text.starts_with(function);
            keep(if named { text } else { format!("{function}: {text}") });
            failure.status()
        }
    }
}

/// Calls a function.
///
/// # Safety
/// What the words of pointers point to is memory that the device may read, and write where the function does, until what is launched
/// has ended; the stream is one of the calling thread's context.
pub(super) unsafe fn run(
    spec: &'static Spec,
    name: &'static str,
    element: Scalar,
    words: &[u64],
    workspace: Option<(u64, u64)>,
    stream: *mut c_void,
) -> vmk_status {
    answer(name, || {
        let call = Arguments { spec, name, element, words };
        match state().device(name)? {
            // SAFETY: as the caller promises.
            Chosen::Cpu(engine) => unsafe { run_on(engine, &(), &call, workspace, stream) },
            // SAFETY: as above.
            Chosen::Gpu(engine, entered) => unsafe { run_on(engine, &entered, &call, workspace, stream) },
        }
    })
}

/// # Safety
/// As for [`run`].
unsafe fn run_on<D: Device>(
    engine: &Engine<D>,
    entered: &D::Entered,
    call: &Arguments<'_>,
    workspace: Option<(u64, u64)>,
    stream: *mut c_void,
) -> Result<(), Failure> {
    let name = call.name;
    engine.device.check_stream(stream).map_err(|what| Failure::invalid(name, "stream", what))?;
    let key = Key::of(call);
    let calling = Calling { engine, entered, call, workspace, stream };
    let again = |plan: &Plan<D::Kernel>, packed: &mut Packed| {
        calling.check_buffers(&plan.buffers)?;
        // SAFETY: as the caller promises.
        unsafe { calling.start(plan, packed) }
    };
    if let Some(done) = engine.recent(&key, again) {
        return done;
    }
    let plan = match engine.known(&key) {
        Some(plan) => {
            calling.check_buffers(&plan.buffers)?;
            plan
        }
        None => {
            let (function, buffers) = Engine::<D>::outline(call)?;
            if buffers.iter().all(|buffer| buffer.bytes == 0 || !buffer.writes) {
                return Ok(());
            }
            calling.check_buffers(&buffers)?;
            engine.plan(call, &*function, buffers)?
        }
    };
    let mut packed = Packed::new();
    // SAFETY: as the caller promises.
    unsafe { calling.start(&plan, &mut packed) }?;
    engine.remember(key, plan, packed);
    Ok(())
}

/// A call of a device.
struct Calling<'a, D: Device> {
    engine: &'a Engine<D>,
    entered: &'a D::Entered,
    call: &'a Arguments<'a>,
    /// The memory to work in that was given, and its bytes.
    workspace: Option<(u64, u64)>,
    stream: *mut c_void,
}

impl<D: Device> Calling<'_, D> {
    /// Starts what a call does, whose buffers were checked.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn start(&self, plan: &Plan<D::Kernel>, packed: &mut Packed) -> Result<(), Failure> {
        let workspace = self.check_workspace(plan)?;
        // SAFETY: as the caller promises.
        unsafe { self.launch(plan, packed, workspace) }
    }

    /// That every pointer is what its buffer needs, and that nothing that is written overlaps anything else.
    fn check_buffers(&self, buffers: &[Buffer]) -> Result<(), Failure> {
        let call = self.call;
        let name = call.name;
        for (at, buffer) in buffers.iter().enumerate() {
            let Buffer { bytes, element, .. } = *buffer;
            let address = call.words[buffer.word];
            if bytes == 0 {
                continue;
            }
            let bad = |what: String| Err(Failure::invalid(name, buffer.name, what));
            if address == 0 {
                return bad(format!("is NULL: {bytes} bytes are needed there"));
            }
            if !address.is_multiple_of(element) {
                return bad(format!(
                    "is {address:#x}: it must be a multiple of {element}, the bytes of an element"
                ));
            }
            let Some(end) = address.checked_add(bytes) else {
                return bad(format!("is {address:#x}: there are no {bytes} bytes behind that"));
            };
            for other in &buffers[..at] {
                let from = call.words[other.word];
                // What was looked at before does not wrap around.
                let overlaps = other.bytes > 0 && from < end && address < from + other.bytes;
                if overlaps && (buffer.writes || other.writes) {
                    return bad(format!(
                        "is {address:#x}, and its {bytes} bytes overlap those of {}, {from:#x}: what is written must be apart",
                        other.name
                    ));
                }
            }
            self.check_memory(buffer.name, address, bytes)?;
        }
        Ok(())
    }

    /// That the memory to work in is what is needed. Its address and bytes.
    fn check_workspace(&self, plan: &Plan<D::Kernel>) -> Result<(u64, u64), Failure> {
        let call = self.call;
        let needed = plan.workspace;
        if needed == 0 {
            return Ok((0, 0));
        }
        let name = call.name;
        let own = call.workspace();
        let of = own.map_or("workspace", |(of, _)| of);
        let bad = |what: String| Err(Failure::invalid(name, of, what));
        let Some((address, bytes)) = own.map(|(_, address)| (address, u64::MAX)).or(self.workspace) else {
            return bad(format!("is needed, of {needed} bytes: call {name}_ws"));
        };
        if address == 0 || !address.is_multiple_of(WORKSPACE_ALIGN) {
            return bad(format!(
                "is {address:#x}: {needed} bytes at a multiple of {WORKSPACE_ALIGN} are needed"
            ));
        }
        if bytes < needed {
            let name = name.strip_suffix("_ws").unwrap_or(name);
            return bad(format!("has {bytes} bytes: {needed} are needed, as {name}_workspace_size tells"));
        }
        let Some(end) = address.checked_add(needed) else {
            return bad(format!("is {address:#x}: there are no {needed} bytes behind that"));
        };
        for buffer in &plan.buffers {
            let from = call.words[buffer.word];
            if buffer.bytes > 0 && from < end && address < from + buffer.bytes {
                return bad(format!(
                    "is {address:#x}, and overlaps {}, {from:#x}: it must be apart",
                    buffer.name
                ));
            }
        }
        self.check_memory(of, address, needed)?;
        Ok((address, needed))
    }

    /// That memory is there, as far as the device tells.
    fn check_memory(&self, parameter: &str, address: u64, bytes: u64) -> Result<(), Failure> {
        let name = self.call.name;
        let found = self.engine.device.check_memory(self.entered, address, bytes);
        let found = found.map_err(|error| Failure::device(name, &error))?;
        found.map_err(|what| Failure::invalid(name, parameter, what))
    }

    /// Gives a plan's launches to the device.
    ///
    /// # Safety
    /// As for [`run`]; the pointers were checked.
    unsafe fn launch(
        &self,
        plan: &Plan<D::Kernel>,
        packed: &mut Packed,
        (workspace, workspace_bytes): (u64, u64),
    ) -> Result<(), Failure> {
        let Calling { engine, entered, call, stream, .. } = *self;
        let failed = |error: vm_accel::Error| match &error {
            // CUDA_ERROR_INVALID_CONTEXT and _INVALID_HANDLE: kernels are the library's, and were found in the thread's context.
            vm_accel::Error::Driver { code: 201 | 400, .. } => {
                let what =
                    format!("is {stream:p}: {error}; give a stream of the calling thread's current context");
                Failure::invalid(call.name, "stream", what)
            }
            // A processor has no memory for what a kernel works in, or no thread with a stack for it.
            vm_accel::Error::Host { .. } => Failure::Memory { function: call.name, what: error.to_string() },
            _ => Failure::device(call.name, &error),
        };
        // The workspace is behind the last buffer.
        let place = |at: usize| match plan.buffers.get(at) {
            Some(buffer) => (call.words[buffer.word], buffer.bytes),
            None => (workspace, workspace_bytes),
        };
        let numbers = call.spec.numbers.map_or(Ok(Numbers::default()), |numbers| numbers(call))?;
        for (at, step) in plan.steps.iter().enumerate() {
            let Step { kernel, grid, operands, first } = step;
            let map = |tensor: &Tensor| engine.device.map(entered, &kernel.kernel, tensor);
            if packed.len() == at {
                let again = first.get().cloned().map(Ok);
                let given = again.unwrap_or_else(|| {
                    let given = pack(step, &place, &numbers)?;
                    let given = given.with_maps(&kernel.artifact, map)?.unwrap_or(given);
                    // Another thread's are as good.
                    let _ = first.set(given.clone());
                    Ok(given)
                });
                packed.push(given.map_err(failed)?);
            }
            let given = &mut packed[at];
            let other = |at: usize| match operands.get(at)? {
                Operand::View { buffer, offset, .. } => Some(Other::Address(place(*buffer).0 + offset)),
                Operand::Number(_) => None,
                Operand::Varying(number) => Some(Other::Number(numbers.get(*number).copied()?.into())),
            };
            // SAFETY: buffers and workspace have as many bytes as those that were packed first, and what is written is apart.
            let updated = unsafe { given.update(&kernel.artifact, other, map) };
            if updated.is_err() {
                packed.truncate(at);
            }
            updated.map_err(failed)?;
            // SAFETY: as the caller promises; a kernel that was compiled as the host's own can't be stopped.
            unsafe { engine.device.launch(entered, &kernel.kernel, *grid, &packed[at], stream) }
                .map_err(failed)?;
        }
        Ok(())
    }
}

/// Packs the arguments of a launch: `place` tells where a buffer is, and how many bytes it has.
fn pack<K>(
    step: &Step<K>,
    place: &dyn Fn(usize) -> (u64, u64),
    numbers: &Numbers,
) -> vm_accel::Result<vm_accel::Arguments> {
    let memory = |buffer: usize| {
        let (address, bytes) = place(buffer);
        // SAFETY: the caller's memory is there as long as the launches.
        unsafe { Memory::from_raw(MemoryKind::Device, address, 0, bytes) }
    };
    let memories: Vec<Memory> = (0..=PARAMETERS).map(memory).collect();
    let views = step.operands.iter().map(|operand| {
        Ok(match operand {
            Operand::View { buffer, offset, extents } => {
                let all = memories[(*buffer).min(PARAMETERS)].region();
                QueueArgument::View(all.slice(*offset, all.bytes().saturating_sub(*offset))?, *extents)
            }
            Operand::Number(number) => QueueArgument::Scalar(*number),
            Operand::Varying(number) => {
                QueueArgument::Scalar(numbers.get(*number).copied().unwrap_or(f32::NAN).into())
            }
        })
    });
    let views = views.collect::<vm_accel::Result<Vec<_>>>()?;
    vm_accel::Arguments::new(&step.kernel.artifact, views)
}

/// Tells how many bytes a function needs to work in.
///
/// # Safety
/// `bytes` is NULL or points to a number.
pub(super) unsafe fn workspace_size(
    spec: &'static Spec,
    name: &'static str,
    element: Scalar,
    words: &[u64],
    bytes: *mut usize,
) -> vmk_status {
    answer(name, || {
        // SAFETY: as the caller promises.
        let bytes = unsafe { bytes.as_mut() };
        let bytes = bytes.ok_or_else(|| Failure::invalid(name, "bytes", "is NULL: the number goes there"))?;
        let call = Arguments { spec, name, element, words };
        let resources = match state().device(name)? {
            Chosen::Cpu(engine) => engine.device.resources(),
            Chosen::Gpu(engine, _) => engine.device.resources(),
        };
        let (function, _) = Engine::<super::Cpu>::outline(&call)?;
        let needed = function.call(&resources).map_err(|error| Failure::call(name, &error))?.workspace;
        *bytes = usize::try_from(needed).map_err(|_| Failure::Memory {
            function: name,
            what: format!("{needed} bytes to work in are more than there are"),
        })?;
        Ok(())
    })
}

/// Tells how many bytes the pointers of a function point to.
///
/// # Safety
/// As for [`vmk_buffer_sizes`](super::vmk_buffer_sizes).
pub(super) unsafe fn buffer_sizes(
    name: *const c_char,
    words: *const u64,
    count: i32,
    bytes: *mut u64,
) -> vmk_status {
    const NAME: &str = "vmk_buffer_sizes";
    answer(NAME, || {
        for (parameter, null) in
            [("name", name.is_null()), ("words", words.is_null()), ("bytes", bytes.is_null())]
        {
            if null {
                return Err(Failure::invalid(NAME, parameter, "is NULL"));
            }
        }
        // SAFETY: as the caller promises.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let found = super::functions::BY_NAME.iter().find(|(known, ..)| *known == name);
        let (name, index, element) = found.ok_or_else(|| {
            Failure::invalid(NAME, "name", format!("is {name:?}, which no function that computes is called"))
        })?;
        let spec = &super::FUNCTIONS[*index];
        let wanted = spec.parameters.len();
        if usize::try_from(count) != Ok(wanted) {
            return Err(Failure::invalid(
                NAME,
                "count",
                format!("is {count}: {name} has {wanted} parameters"),
            ));
        }
        // SAFETY: as the caller promises.
        let mut given = unsafe { std::slice::from_raw_parts(words, wanted) }.to_vec();
        for (word, parameter) in given.iter_mut().zip(spec.parameters) {
            if matches!(parameter.kind, Kind::Pointer { .. } | Kind::Workspace) && *word != 0 {
                *word = WORKSPACE_ALIGN;
            }
        }
        let call = Arguments { spec, name, element: *element, words: &given };
        let (_, buffers) = Engine::<super::Cpu>::outline(&call)?;
        // SAFETY: as the caller promises.
        let bytes = unsafe { std::slice::from_raw_parts_mut(bytes, wanted) };
        bytes.fill(0);
        buffers.iter().for_each(|buffer| bytes[buffer.word] = buffer.bytes);
        Ok(())
    })
}
