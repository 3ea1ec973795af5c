//! Modules and functions: images that programs load, what is in them, and launches.
//!
//! A text whose first line is `vm-cuda-fake`, behind `// ` where it is PTX as well, or a fat binary that has this somewhere in it, has the
//! driver's [own kernels](crate::builtin). Others have what their PTX says, where the driver was built to run it (`ptx`).

use crate::{
    builtin::BuiltIn,
    error::{Error, Result},
    image,
    memory::Kind,
    state::{self, State},
    stream::Work,
    sys,
};
use std::{
    ffi::{c_char, c_void},
    sync::{Arc, MutexGuard},
};

const MAGIC: &str = "vm-cuda-fake";
const COMMENT: &str = "// ";
/// Threads of a block, and blocks of a grid.
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];
/// Bytes of a block's shared memory.
const SHARED: u64 = 227 << 10;
/// Bytes of all parameters.
const PARAMETERS: usize = 32_764;

/// What an image holds.
pub(crate) trait Program: Send + Sync {
    /// The names of its kernels.
    fn kernels(&self) -> Vec<String>;

    fn kernel(&self, name: &str) -> Option<Arc<dyn Kernel>>;

    /// Bytes of its variables, which are one range of each context's memory.
    fn size(&self) -> u64 {
        0
    }

    /// A variable: where in the range, and its bytes.
    fn variable(&self, _name: &str) -> Option<(u64, u64)> {
        None
    }

    /// Whether the variable that has this byte of the range is managed.
    fn is_managed(&self, _offset: u64) -> bool {
        false
    }

    /// Whether it has managed variables.
    fn has_managed(&self) -> bool {
        false
    }

    /// What is in the range where it begins at this address, all else being zero.
    fn contents(&self, _address: u64) -> Vec<(u64, Vec<u8>)> {
        Vec::new()
    }
}

/// A kernel of a program.
pub(crate) trait Kernel: Send + Sync {
    fn name(&self) -> &str;

    /// Offsets and sizes of its parameters.
    fn parameters(&self) -> Vec<(usize, usize)>;

    /// `CUfunction_attribute`, as far as the kernel decides it.
    fn attribute(&self, attribute: i32) -> i32;

    /// The most threads of a block.
    fn max_threads(&self) -> u32 {
        MAX_BLOCK[0]
    }

    /// Can blocks of a grid wait for each other?
    fn cooperates(&self) -> bool {
        true
    }

    /// Its code for launches of this shape.
    fn prepare(&self, shape: &Shape) -> Result<Arc<dyn Run>>;
}

/// `CUfunction_attribute` of kernels without code: registers, and the versions of their PTX and their binary.
pub(crate) fn without_code(attribute: i32) -> i32 {
    match attribute {
        4 => 16,
        5 | 6 => 90,
        _ => 0,
    }
}

/// What a kernel's code may depend on.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Shape {
    pub(crate) block: [u32; 3],
    /// Bytes of shared memory that the launch adds.
    pub(crate) shared: u32,
    /// Where in the arena the variables of its module begin.
    pub(crate) data: u64,
}

/// Code that runs.
pub(crate) trait Run: Send + Sync {
    /// Runs a grid, with the state unlocked where that takes long.
    fn run(
        &self,
        state: MutexGuard<'static, State>,
        context: u64,
        grid: [u32; 3],
        parameters: &[u8],
    ) -> (MutexGuard<'static, State>, Result);
}

/// A program in a context.
pub(crate) struct Module {
    pub(crate) context: u64,
    program: Arc<dyn Program>,
    /// Where its variables are; 0 where it has none.
    data: u64,
    /// Whether its variables are freed with it.
    owns_data: bool,
}

/// A kernel in a context.
pub(crate) struct Function {
    pub(crate) module: u64,
    pub(crate) kernel: Arc<dyn Kernel>,
}

/// A kernel with its parameters.
#[derive(Clone)]
pub(crate) struct Launch {
    code: Arc<dyn Run>,
    /// The function, or the kernel of a library.
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) parameters: Arc<[u8]>,
}

impl Launch {
    pub(crate) fn run(
        &self,
        state: MutexGuard<'static, State>,
        context: u64,
    ) -> (MutexGuard<'static, State>, Result) {
        self.code.run(state, context, self.grid, &self.parameters)
    }
}

/// Why an image is none that can be loaded, in words for who compiled it.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) error: Error,
    pub(crate) reason: String,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { error, reason: error.to_string() }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        refusal.error
    }
}

fn is_built_in(image: &[u8]) -> bool {
    if state::config().settings.tests.is_none() {
        return false;
    }
    if image::is_fat(image) {
        return image.windows(MAGIC.len()).any(|bytes| bytes == MAGIC.as_bytes());
    }
    let first = image.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii_end();
    first.strip_prefix(COMMENT.as_bytes()).unwrap_or(first) == MAGIC.as_bytes()
}

/// Whether the kernels of an image are not of its PTX.
pub(crate) fn is_own(image: &[u8]) -> bool {
    is_built_in(image) || state::config().kernels.is_some()
}

/// Reads an image that [`image::at`] or [`image::of`] returned.
pub(crate) fn read(mut image: Vec<u8>, max_registers: Option<u32>) -> Result<Arc<dyn Program>, Refusal> {
    let is_fat = image::is_fat(&image);
    if !is_fat {
        image = String::from_utf8_lossy(&image).into_owned().into_bytes();
    }
    if is_built_in(&image) {
        return Ok(Arc::new(BuiltIn));
    }
    if let Some(named) = &state::config().kernels {
        return Ok(Arc::new(named.clone()));
    }
    crate::ptx::read(&image, max_registers)
}

/// `cuModuleLoadData`, of an image that `image` copies.
pub(crate) fn load(
    image: impl FnOnce() -> Result<Vec<u8>>,
    max_registers: Option<u32>,
) -> Result<u64, Refusal> {
    state::lock().current()?;
    let program = read(image()?, max_registers)?;
    let mut state = state::lock();
    let context = state.current()?;
    Ok(state.add_module(context, program, None)?)
}

impl State {
    /// Loads a program into a context. `shared_data` is the address of its variables if they are already allocated.
    pub(crate) fn add_module(
        &mut self,
        context: u64,
        program: Arc<dyn Program>,
        shared_data: Option<u64>,
    ) -> Result<u64> {
        let device = self.contexts.get(&context).ok_or(Error::InvalidContext)?.device;
        let data = match shared_data {
            Some(data) => data,
            None => self.allocate_variables(device, context, &*program)?,
        };
        let id = self.id();
        self.modules.insert(id, Module { context, program, data, owns_data: shared_data.is_none() });
        Ok(id)
    }

    /// Allocates and initializes the variables of a program. Returns 0 if it has none.
    pub(crate) fn allocate_variables(
        &mut self,
        device: usize,
        context: u64,
        program: &dyn Program,
    ) -> Result<u64> {
        let data = match program.size() {
            0 => return Ok(0),
            size => self.allocate(device, context, size, true, |offset| Kind::Data { offset })?,
        };
        self.initialize_variables(data, program)?;
        Ok(data)
    }

    /// Writes the initial values of a program's variables.
    pub(crate) fn initialize_variables(&self, data: u64, program: &dyn Program) -> Result {
        for (offset, bytes) in program.contents(data) {
            self.variables(data + offset, bytes.len()).ok_or(Error::InvalidImage)?.write(&bytes);
        }
        Ok(())
    }

    /// Whether a byte of the variables that begin at `data` is of a managed one.
    pub(crate) fn is_managed_variable(&self, data: u64, at: u64) -> bool {
        let mut modules = self.modules.values().map(|module| (module.data, &module.program));
        let program = modules.find(|(of, _)| *of == data).map(|(_, program)| program);
        let program = program.or_else(|| self.libraries.program_at(data));
        program.is_some_and(|program| program.is_managed(at - data))
    }

    /// Removes a module with all that is its.
    pub(crate) fn remove_module(&mut self, id: u64) -> Result {
        let module = self.modules.remove(&id).ok_or(Error::InvalidHandle)?;
        let functions = self.functions.extract_if(.., |_, function| function.module == id);
        let ended: Vec<u64> = functions.map(|(function, _)| function).chain([id]).collect();
        self.free_ids(ended);
        if module.data == 0 || !module.owns_data { Ok(()) } else { self.release(module.data) }
    }
}

/// The image in a file.
pub(crate) fn file(path: *const c_char) -> Result<Vec<u8>> {
    let path = sys::text(path, 4096).ok_or(Error::InvalidValue)?;
    image::of(std::fs::read(path).map_err(|_| Error::FileNotFound)?)
}

/// `cuModuleUnload`: waits for all work of the context's device.
pub(crate) fn unload(id: u64) -> Result {
    let state = state::lock();
    state.current()?;
    let context = state.modules.get(&id).ok_or(Error::InvalidHandle)?.context;
    let device = state.contexts.get(&context).ok_or(Error::InvalidHandle)?.device;
    crate::memory::drain_device(state, device)?.remove_module(id)
}

/// `cuModuleGetFunction`.
pub(crate) fn function(module: u64, name: *const c_char) -> Result<u64> {
    let name = sys::text(name, 4096).ok_or(Error::InvalidValue)?;
    let state = state::lock();
    state.current()?;
    let program = &state.modules.get(&module).ok_or(Error::InvalidHandle)?.program;
    let kernel = program.kernel(&name).ok_or(Error::NotFound)?;
    drop(state);
    Ok(function_of(module, kernel))
}

/// The function of a kernel in a module.
pub(crate) fn function_of(module: u64, kernel: Arc<dyn Kernel>) -> u64 {
    let mut state = state::lock();
    let same = |function: &Function| function.module == module && function.kernel.name() == kernel.name();
    if let Some((&id, _)) = state.functions.iter().find(|(_, known)| same(known)) {
        return id;
    }
    let id = state.id();
    state.functions.insert(id, Function { module, kernel });
    id
}

/// `cuModuleGetFunctionCount` and `cuModuleEnumerateFunctions`: all of a module.
pub(crate) fn functions(module: u64) -> Result<Vec<u64>> {
    let state = state::lock();
    let program = Arc::clone(&state.modules.get(&module).ok_or(Error::InvalidHandle)?.program);
    drop(state);
    let names = program.kernels().into_iter();
    Ok(names.filter_map(|name| program.kernel(&name)).map(|kernel| function_of(module, kernel)).collect())
}

/// `cuModuleGetGlobal`: address and size.
pub(crate) fn global(module: u64, name: *const c_char) -> Result<(u64, usize)> {
    let name = sys::text(name, 4096).ok_or(Error::InvalidValue)?;
    let state = state::lock();
    state.current()?;
    let module = state.modules.get(&module).ok_or(Error::InvalidHandle)?;
    let (offset, size) = module.program.variable(&name).ok_or(Error::NotFound)?;
    Ok((module.data + offset, size as usize))
}

/// The module of a function.
pub(crate) fn module_of(function: u64) -> Result<u64> {
    state::lock().functions.get(&function).map(|function| function.module).ok_or(Error::InvalidHandle)
}

/// The name of a function or kernel.
pub(crate) fn name(handle: u64) -> Result<String> {
    Ok(state::lock().kernel(handle)?.name().to_owned())
}

/// Offsets and sizes of a function's parameters.
pub(crate) fn parameters(handle: u64) -> Result<Vec<(usize, usize)>> {
    Ok(state::lock().kernel(handle)?.parameters())
}

/// `cuFuncGetParamInfo`: offset and size.
pub(crate) fn parameter(function: u64, index: usize) -> Result<(usize, usize)> {
    parameters(function)?.get(index).copied().ok_or(Error::InvalidValue)
}

/// `cuFuncGetAttribute`.
pub(crate) fn attribute(function: u64, attribute: i32) -> Result<i32> {
    let kernel = state::lock().kernel(function)?;
    match attribute {
        0 => Ok(kernel.max_threads() as i32),
        8 => Ok(48 << 10),
        1..=15 => Ok(kernel.attribute(attribute)),
        _ => Err(Error::InvalidValue),
    }
}

/// `cuFuncSetAttribute`: checks the value. Launches do not depend on it.
pub(crate) fn set_attribute(function: u64, attribute: i32, value: i32) -> Result {
    const DYNAMIC_SHARED: i32 = 8;
    let kernel = state::lock().kernel(function)?;
    let is_valid = match attribute {
        DYNAMIC_SHARED => {
            u64::try_from(value).is_ok_and(|value| value + kernel.attribute(1).max(0) as u64 <= SHARED)
        }
        // The attributes below are read-only.
        9..=15 => true,
        _ => false,
    };
    if is_valid { Ok(()) } else { Err(Error::InvalidValue) }
}

/// A launch as the program says it.
pub(crate) struct Request {
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) stream: u64,
    /// Do its blocks wait for each other?
    pub(crate) cooperative: bool,
    pub(crate) parameters: *const *const c_void,
    pub(crate) extra: *const c_void,
}

/// Launches a function; parameters are read before it returns.
pub(crate) fn launch(request: &Request) -> Result {
    let stream = state::lock().stream(request.stream)?;
    let launch = prepare(request).inspect_err(|error| {
        // A program that ignores the error must not get a graph without the kernel.
        if matches!(error, Error::NotSupported | Error::InvalidPtx) {
            state::lock().invalidate_capture_of(stream);
        }
    })?;
    state::lock().submit(stream, Work::Launch(launch), Vec::new()).map(drop)
}

/// What launches a function, with its parameters.
pub(crate) fn prepare(request: &Request) -> Result<Launch> {
    let &Request { function: named, grid, block, shared, cooperative, parameters, extra, .. } = request;
    let state = state::lock();
    let kernel = state.kernel(named)?;
    let fits = |sides: [u32; 3], most: [u32; 3]| {
        sides.iter().zip(most).all(|(side, most)| (1..=most).contains(side))
    };
    let threads = || block.iter().product::<u32>();
    if !fits(grid, MAX_GRID) || !fits(block, MAX_BLOCK) || threads() > kernel.max_threads() {
        return Err(if state.is_runtimes(named) { Error::InvalidConfiguration } else { Error::InvalidValue });
    }
    if u64::from(shared) + kernel.attribute(1).max(0) as u64 > SHARED {
        return Err(Error::InvalidValue);
    }
    if cooperative && !kernel.cooperates() && grid != [1; 3] {
        return Err(Error::CooperativeLaunchTooLarge);
    }
    let mut parameters = arguments(&kernel.parameters(), parameters, extra)?;
    if cooperative {
        // The flag of a cooperative launch (`vm_ptx::Translated::parameters_in_memory`).
        parameters.resize(parameters.len().next_multiple_of(8), 0);
        parameters.extend(1u64.to_le_bytes());
    }
    drop(state);
    let function = if module_of(named).is_ok() { named } else { crate::library::function(named)? };
    let state = state::lock();
    let known = state.functions.get(&function).and_then(|function| state.modules.get(&function.module));
    let data = known.ok_or(Error::InvalidHandle)?.data;
    let shape = Shape { block, shared, data: state.arena.offset(data) };
    drop(state);
    let code = kernel.prepare(&shape)?;
    Ok(Launch { code, function: named, grid, block, shared, parameters: parameters.into() })
}

impl State {
    /// Invalidates the capture that a stream is in, if any.
    fn invalidate_capture_of(&mut self, stream: u64) {
        if let Some(capture) = self.streams.get(&stream).and_then(|stream| stream.capture) {
            self.invalidate(capture);
        }
    }
}

/// The block of parameters, of pointers to each or as it is.
fn arguments(
    places: &[(usize, usize)],
    pointers: *const *const c_void,
    extra: *const c_void,
) -> Result<Vec<u8>> {
    let size = places.iter().map(|(at, size)| at + size).max().unwrap_or(0).min(PARAMETERS);
    let mut block = vec![0; size];
    if extra.is_null() {
        for (index, &(at, size)) in places.iter().enumerate() {
            let from = sys::read_at(pointers, index).ok_or(Error::InvalidValue)?;
            let bytes = sys::bytes(from, size).ok_or(Error::InvalidValue)?;
            block.get_mut(at..at + size).ok_or(Error::InvalidValue)?.copy_from_slice(&bytes);
        }
        return Ok(block);
    }
    if !pointers.is_null() {
        return Err(Error::InvalidValue);
    }
    // CU_LAUNCH_PARAM_BUFFER_POINTER, its size, and the end.
    let (mut from, mut len) = (std::ptr::null(), None);
    for pair in 0..3usize {
        let word = |index: usize| {
            sys::read_at(extra.cast::<*const c_void>(), 2 * pair + index).ok_or(Error::InvalidValue)
        };
        match word(0)?.addr() {
            0 => break,
            1 => from = word(1)?,
            2 => len = sys::read(word(1)?.cast::<usize>()),
            _ => return Err(Error::InvalidValue),
        }
    }
    let bytes = sys::bytes(from, len.ok_or(Error::InvalidValue)?.min(size)).ok_or(Error::InvalidValue)?;
    block[..bytes.len()].copy_from_slice(&bytes);
    Ok(block)
}
