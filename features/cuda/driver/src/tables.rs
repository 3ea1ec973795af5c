//! What `cuGetExportTable` gives: the driver's tables for NVIDIA's runtime, as far as that needs them (`vm_cuda_api::tables`).

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError, atomic::AtomicUsize},
};

use crate::{
    context, device,
    error::{Error, Result},
    image, module, state, stream, sys,
};
use vm_cuda_api::tables::{Device, Question, Table, answer, named};

/// A table: its length in bytes, but for storage of contexts, and functions.
fn entries<const N: usize>(functions: &[(usize, usize)]) -> Vec<usize> {
    let mut entries = vec![unknown as *const () as usize; N];
    entries[0] = N * size_of::<usize>();
    functions.iter().for_each(|&(at, function)| entries[at] = function);
    entries
}

macro_rules! table {
    ($($name:ident: $length:literal, $($at:literal $function:ident),*;)*) => {
        $(static $name: LazyLock<Vec<usize>> =
            LazyLock::new(|| entries::<$length>(&[$(($at, $function as *const () as usize)),*]));)*
    };
}

table! {
    RUNTIME: 13, 1 module_of, 2 primary, 6 module_of, 7 nothing, 8 module_in, 12 nothing;
    THREADS: 4, 2 current;
    CALLBACKS: 7, 2 first_buffer, 6 second_buffer;
    STORAGE: 4, 0 put, 1 delete, 2 get;
    CREATION: 2,;
    HEAP: 3,;
    DEVICES: 26,;
    CHECK: 3, 1 check;
    CONTEXTS: 4, 2 plain, 3 nothing;
    NUMBERS: 95, 4 number, 39 stream_number, 51 stream;
    TOPOLOGY: 17, 4 topology, 13 release;
    FUNCTIONS: 99, 7 functions;
}

/// The table of a name of 16 bytes.
pub(crate) fn find(name: *const [u8; 16]) -> Result<u64> {
    let name = sys::read(name).ok_or(Error::InvalidValue)?;
    let table = match named(&name).ok_or(Error::NotFound)? {
        Table::Runtime => &RUNTIME,
        Table::Threads => &THREADS,
        Table::Callbacks => &CALLBACKS,
        Table::Storage => &STORAGE,
        Table::Creation => &CREATION,
        Table::Heap => &HEAP,
        Table::Devices => &DEVICES,
        Table::Check => &CHECK,
        Table::Contexts => &CONTEXTS,
        Table::Numbers => &NUMBERS,
        Table::Topology => &TOPOLOGY,
        Table::Functions => &FUNCTIONS,
    };
    Ok(table.as_ptr().expose_provenance() as u64)
}

fn code(result: Result) -> i32 {
    result.map_or_else(Error::code, |()| 0)
}

fn give(at: *mut u64, value: Result<u64>) -> i32 {
    code(value.and_then(|value| sys::write(at, value).ok_or(Error::InvalidValue)))
}

extern "C" fn unknown() -> i32 {
    Error::NotSupported.code()
}

extern "C" fn nothing() -> i32 {
    0
}

extern "C" fn module_of(to: *mut u64, image: u64) -> i32 {
    give(to, module::load(|| image::at(image), None).map_err(Error::from))
}

extern "C" fn module_in(image: u64, to: *mut u64) -> i32 {
    give(to, module::load(|| image::at(image), None).map_err(Error::from))
}

extern "C" fn primary(to: *mut u64, device: i32) -> i32 {
    give(to, context::retain_primary(device))
}

extern "C" fn current(to: *mut u64) -> i32 {
    give(to, context::get_current())
}

extern "C" fn number(context: u64, to: *mut u64) -> i32 {
    give(to, context::id_of(context))
}

/// What a stream is to the driver: the one that stands for the default stream has no handle.
extern "C" fn stream(_context: u64, stream: u64, to: *mut u64) -> i32 {
    const LEGACY: u64 = 1;
    give(to, Ok(if stream == 0 { LEGACY } else { stream }))
}

extern "C" fn stream_number(_context: u64, stream: u64, to: *mut u64) -> i32 {
    give(to, stream::facts(stream).map(|facts| facts.3))
}

/// Of each pair of multiprocessors its place in its cluster, and that cluster: four clusters of two pairs.
extern "C" fn topology(places: *mut *mut c_void, clusters: *mut *mut c_void) -> i32 {
    let made = [[0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3]].map(sys::of_the_c_library);
    let written = [places, clusters].iter().zip(made).all(|(to, array)| sys::write(*to, array).is_some());
    code(written.then_some(()).ok_or(Error::InvalidValue))
}

extern "C" fn release(places: *mut c_void, clusters: *mut c_void) -> i32 {
    [places, clusters].into_iter().for_each(sys::to_the_c_library);
    0
}

/// Calls a function for each of a module's: how many there are.
extern "C" fn functions(
    _context: u64,
    module: u64,
    each: Option<extern "C" fn(u64, u64, u64)>,
    argument: u64,
) -> u64 {
    let (Ok(all), Some(each)) = (module::functions(module), each) else { return 0 };
    all.iter().for_each(|function| each(argument, *function, module));
    all.len() as u64
}

/// Memory that tools and the runtime share.
static FIRST: [AtomicUsize; 1024] = [const { AtomicUsize::new(0) }; 1024];
static SECOND: [AtomicUsize; 14] = [const { AtomicUsize::new(0) }; 14];

fn buffer(to: *mut u64, len: *mut u64, buffer: &'static [AtomicUsize]) {
    sys::write(to, buffer.as_ptr().expose_provenance() as u64);
    sys::write(len, buffer.len() as u64);
}

extern "C" fn first_buffer(to: *mut u64, len: *mut u64) {
    buffer(to, len, &FIRST);
}

extern "C" fn second_buffer(to: *mut u64, len: *mut u64) {
    buffer(to, len, &SECOND);
}

/// What is kept of a context by a key, and what is called when the context ends.
struct Kept {
    value: u64,
    end: Option<extern "C" fn(u64, u64, u64)>,
}

static KEPT: LazyLock<Mutex<HashMap<(u64, u64), Kept>>> = LazyLock::new(Mutex::default);

fn all() -> MutexGuard<'static, HashMap<(u64, u64), Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The context that is meant: nothing is the current one.
fn meant(context: u64) -> Result<u64> {
    match if context == 0 { context::get_current()? } else { context } {
        0 => Err(Error::InvalidContext),
        context => Ok(context),
    }
}

extern "C" fn put(context: u64, key: u64, value: u64, end: Option<extern "C" fn(u64, u64, u64)>) -> i32 {
    code(meant(context).map(|context| {
        all().insert((context, key), Kept { value, end });
    }))
}

extern "C" fn delete(context: u64, key: u64) -> i32 {
    code(meant(context).map(|context| {
        all().remove(&(context, key));
    }))
}

extern "C" fn get(to: *mut u64, context: u64, key: u64) -> i32 {
    let value = meant(context).map(|context| all().get(&(context, key)).map(|kept| kept.value));
    give(to, value.and_then(|value| value.ok_or(Error::InvalidHandle)))
}

/// What was kept of a context that has ended goes, and who kept it is told.
pub(crate) fn ended(context: u64) {
    let ended: Vec<_> = all().extract_if(|(of, _), _| *of == context).collect();
    for ((context, key), Kept { value, end }) in ended {
        if let Some(end) = end {
            end(context, key, value);
        }
    }
}

/// Nothing is special about a context.
extern "C" fn plain(_context: u64, to: *mut u32) -> i32 {
    sys::write(to, 0);
    0
}

/// The runtime's check of the driver.
extern "C" fn check(version: u32, seconds: u64, to: *mut u64) -> i32 {
    let place = |table: &LazyLock<Vec<usize>>| table.as_ptr().expose_provenance() as u64;
    let question = Question {
        driver: state::config().settings.version as u32,
        version,
        process: std::process::id(),
        thread: sys::thread() as u32,
        runtime: place(&RUNTIME),
        check: place(&CHECK),
        function: CHECK[1] as u64,
        seconds,
    };
    let device = |device: i32| -> Result<Device> {
        let place = [50, 33, 34].map(|attribute| device::attribute(attribute, device));
        let [domain, bus, slot] = place;
        Ok(Device { uuid: device::uuid(device)?, place: [domain?, bus?, slot?] })
    };
    let answered = || {
        let devices = (0..device::count()?).map(device).collect::<Result<Vec<_>>>()?;
        let words = answer(&question, &devices);
        (0..2).try_for_each(|at| sys::write(to.wrapping_add(at), words[at]).ok_or(Error::InvalidValue))
    };
    code(answered())
}
