//! The driver's tables for NVIDIA's own libraries, which `cuGetExportTable` gives: as far as the CUDA runtime needs them. What a table has and
//! what a function of it takes is known from public projects that stand for the driver.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, PoisonError};

use vm_bridge::wire::code;
use vm_cuda_api::tables::{self as known, Question, Table};

use super::caller;
use crate::{current, hand, say};

/// What a table's entry is.
type Entry = *const c_void;

/// A table as callers see it: entries, of which the first often is its length in bytes.
struct Entries<const N: usize>([Entry; N]);

// SAFETY: it is never written, and code is everybody's.
unsafe impl<const N: usize> Sync for Entries<N> {}

/// A table whose functions are unknown but for some.
const fn table<const N: usize>(functions: &[(usize, Entry)]) -> Entries<N> {
    let mut entries = [unknown as *const c_void; N];
    entries[0] = std::ptr::without_provenance(N * size_of::<Entry>());
    let mut at = 0;
    while at < functions.len() {
        entries[functions[at].0] = functions[at].1;
        at += 1;
    }
    Entries(entries)
}

extern "C" fn unknown() -> u32 {
    say::once("a function of the driver's internal tables is not supported");
    code::NOT_SUPPORTED
}

static RUNTIME: Entries<13> = table(&[
    (1, module as *const c_void),
    (2, primary as *const c_void),
    (6, module_of_wrapper as *const c_void),
    (7, nothing as *const c_void),
    (8, module_of_binary as *const c_void),
    (12, nothing as *const c_void),
]);
static THREADS: Entries<4> = table(&[(2, current_context as *const c_void)]);
static CALLBACKS: Entries<7> =
    table(&[(2, first_buffer as *const c_void), (6, second_buffer as *const c_void)]);
static STORAGE: Entries<4> = table(&[
    (0, storage_put as *const c_void),
    (1, storage_delete as *const c_void),
    (2, storage_get as *const c_void),
]);
static CREATION: Entries<2> = table(&[]);
static HEAP: Entries<3> = table(&[]);
static DEVICES: Entries<26> = table(&[]);
static CHECK: Entries<3> = table(&[(1, check as *const c_void)]);
static CONTEXTS: Entries<4> = table(&[(2, context_check as *const c_void), (3, nothing as *const c_void)]);

static NUMBERS: Entries<95> = table(&[
    (4, context_number as *const c_void),
    (39, stream_number as *const c_void),
    (51, stream as *const c_void),
]);
static TOPOLOGY: Entries<17> =
    table(&[(4, topology as *const c_void), (13, release_topology as *const c_void)]);
static FUNCTIONS: Entries<99> = table(&[(7, functions as *const c_void)]);

/// The table of a name.
pub(crate) fn find(id: &[u8; 16]) -> Option<usize> {
    let Some(table) = known::named(id) else {
        if !known::is_spared(id) {
            let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
            say::once(&format!("the driver's internal table {hex} is not supported"));
        }
        return None;
    };
    let at = match table {
        Table::Runtime => (&raw const RUNTIME).cast::<c_void>(),
        Table::Threads => (&raw const THREADS).cast(),
        Table::Callbacks => (&raw const CALLBACKS).cast(),
        Table::Storage => (&raw const STORAGE).cast(),
        Table::Creation => (&raw const CREATION).cast(),
        Table::Heap => (&raw const HEAP).cast(),
        Table::Devices => (&raw const DEVICES).cast(),
        Table::Check => (&raw const CHECK).cast(),
        Table::Contexts => (&raw const CONTEXTS).cast(),
        Table::Numbers => (&raw const NUMBERS).cast(),
        Table::Topology => (&raw const TOPOLOGY).cast(),
        Table::Functions => (&raw const FUNCTIONS).cast(),
    };
    Some(at as usize)
}

extern "C" fn current_context(to: usize) -> u32 {
    caller::write(to, current::get());
    0
}

extern "C" fn context_number(context: u64, to: usize) -> u32 {
    result(hand::context_number(context, to))
}

/// What a stream is to the driver: for those of no handle the one that stands for the default stream.
extern "C" fn stream(_: u64, stream: u64, to: usize) -> u32 {
    const LEGACY: u64 = 1;
    caller::write(to, if stream == 0 { LEGACY } else { stream });
    0
}

extern "C" fn stream_number(_: u64, stream: u64, to: usize) -> u32 {
    result(hand::stream_number(stream, to))
}

/// Two arrays of bytes, which the caller gives back: of each pair of multiprocessors its place in its cluster, and that cluster.
extern "C" fn topology(places: usize, clusters: usize) -> u32 {
    result(hand::topology().and_then(|bytes| {
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let copies = [first, second].map(|bytes| {
            // SAFETY: it takes no memory.
            let copy = unsafe { libc::malloc(bytes.len().max(1)) };
            caller::write_bytes(copy as usize, bytes);
            copy
        });
        if copies.iter().any(|copy| copy.is_null()) {
            release_topology(copies[0], copies[1]);
            return Err(code::OUT_OF_MEMORY);
        }
        caller::write(places, copies[0] as u64);
        caller::write(clusters, copies[1] as u64);
        Ok(())
    }))
}

extern "C" fn release_topology(places: *mut c_void, clusters: *mut c_void) -> u32 {
    for array in [places, clusters] {
        // SAFETY: it is one that `topology` gave, or null, and the caller gives it back.
        unsafe { libc::free(array) };
    }
    0
}

/// Calls a function of the caller's for each function of a module: how many there are.
extern "C" fn functions(
    _: u64,
    module: u64,
    each: Option<extern "C" fn(usize, u64, u64)>,
    argument: usize,
) -> u64 {
    let (Ok(found), Some(each)) = (hand::functions(module), each) else { return 0 };
    found.iter().for_each(|function| each(argument, *function, module));
    found.len() as u64
}

extern "C" fn nothing() -> u32 {
    0
}

/// A result as C sees it.
fn result(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(0)
}

extern "C" fn module(to: usize, wrapper: usize) -> u32 {
    result(hand::load_module(to, wrapper, [0; 3]))
}

extern "C" fn module_of_wrapper(to: usize, wrapper: usize, _: usize, _: usize, _: u32) -> u32 {
    result(hand::load_module(to, wrapper, [0; 3]))
}

extern "C" fn module_of_binary(binary: usize, to: usize, _: usize, _: usize, _: u32) -> u32 {
    result(hand::load_module(to, binary, [0; 3]))
}

extern "C" fn primary(to: usize, device: i32) -> u32 {
    result(hand::primary(to, device))
}

/// Memory that tools and the runtime share: what is in it is theirs.
static FIRST: [AtomicUsize; 1024] = [const { AtomicUsize::new(0) }; 1024];
static SECOND: [AtomicUsize; 14] = [const { AtomicUsize::new(0) }; 14];

extern "C" fn first_buffer(to: usize, len: usize) {
    caller::write(to, (&raw const FIRST) as u64);
    caller::write(len, FIRST.len() as u64);
}

extern "C" fn second_buffer(to: usize, len: usize) {
    caller::write(to, (&raw const SECOND) as u64);
    caller::write(len, SECOND.len() as u64);
}

/// What a library keeps of a context, and what it wants called at its end.
struct Stored {
    value: usize,
    end: Option<extern "C" fn(u64, usize, usize)>,
}

static STORED: Mutex<Option<HashMap<(u64, usize), Stored>>> = Mutex::new(None);

fn stored<T>(act: impl FnOnce(&mut HashMap<(u64, usize), Stored>) -> T) -> T {
    act(STORED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Which context is meant: nothing is the current one.
fn meant(context: u64) -> Result<u64, u32> {
    match if context == 0 { current::get() } else { context } {
        0 => Err(code::INVALID_CONTEXT),
        context => Ok(context),
    }
}

extern "C" fn storage_put(
    context: u64,
    key: usize,
    value: usize,
    end: Option<extern "C" fn(u64, usize, usize)>,
) -> u32 {
    result(meant(context).map(|context| {
        stored(|all| all.insert((context, key), Stored { value, end }));
    }))
}

extern "C" fn storage_delete(context: u64, key: usize) -> u32 {
    result(meant(context).map(|context| {
        stored(|all| all.remove(&(context, key)));
    }))
}

extern "C" fn storage_get(to: usize, context: u64, key: usize) -> u32 {
    result(meant(context).and_then(|context| {
        let value = stored(|all| all.get(&(context, key)).map(|stored| stored.value));
        caller::write(to, value.ok_or(code::INVALID_HANDLE)? as u64);
        Ok(())
    }))
}

/// What was kept of a context goes with it.
pub(crate) fn end_context(context: u64) {
    let ended: Vec<((u64, usize), Stored)> =
        stored(|all| all.extract_if(|(of, _), _| *of == context).collect());
    for ((context, key), stored) in ended {
        if let Some(end) = stored.end {
            end(context, key, stored.value);
        }
    }
}

extern "C" fn check(version: u32, seconds: u64, to: usize) -> u32 {
    let place = |table: *const c_void| table as u64;
    let question = Question {
        driver: 0,
        version,
        process: std::process::id(),
        // SAFETY: it takes and changes nothing.
        thread: unsafe { libc::pthread_self() } as u32,
        runtime: place((&raw const RUNTIME).cast()),
        check: place((&raw const CHECK).cast()),
        function: CHECK.0[1] as u64,
        seconds,
    };
    result(hand::check(question).map(|words| (0..2).for_each(|at| caller::write(to + 8 * at, words[at]))))
}

extern "C" fn context_check(_: u64, first: usize, _: usize) -> u32 {
    caller::write_half(first, 0);
    0
}
