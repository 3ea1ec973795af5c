//! The fake's functions for code: modules, launches, graphs.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use vm_accel::Grid;

use super::calls::{INVALID, call, find, forget, give, push};
use super::stream::{Command, Stream};
use super::{Object, handle, lock, object, with_objects};
use crate::sys::{self, PARAM_BUFFER, PARAM_END, PARAM_SIZE, Status};

const NOT_FOUND: Status = 500;

fn module(object: &Object) -> Option<Arc<object::Loaded>> {
    if let Object::Module(module) = object { Some(Arc::clone(module)) } else { None }
}

pub(super) unsafe extern "C" fn hipModuleLoadData(at: *mut sys::Module, image: *const c_void) -> Status {
    call("hipModuleLoadData", |state| {
        // SAFETY: the caller gives a whole ELF file.
        let loaded = unsafe { object::load(image.cast(), &state.options.architecture) }?;
        give(at, handle(state, Object::Module(Arc::new(loaded))))
    })
}

pub(super) unsafe extern "C" fn hipModuleUnload(at: sys::Module) -> Status {
    const NAME: &str = "hipModuleUnload";
    call(NAME, |state| {
        let module = find(state, NAME, at, module)?;
        let used = |stream: &Arc<Stream>| stream.pending(|command| command.launches(&module));
        if !state.is_lost() && lock(&state.streams).iter().any(used) {
            state.fault(NAME, format_args!("a launch of its kernels has not run"));
            return Err(INVALID);
        }
        let own = |object: &Object| matches!(object, Object::Function(of, _) if Arc::ptr_eq(of, &module));
        with_objects(|objects| objects.retain(|_, (_, object)| !own(object)));
        forget(at);
        Ok(())
    })
}

pub(super) unsafe extern "C" fn hipModuleGetFunction(
    at: *mut sys::Function,
    of: sys::Module,
    name: *const c_char,
) -> Status {
    const NAME: &str = "hipModuleGetFunction";
    call(NAME, |state| {
        let module = find(state, NAME, of, module)?;
        // SAFETY: the caller gives a string that ends with a zero byte.
        let name = unsafe { CStr::from_ptr(name) };
        let place = module.0.iter().position(|ready| ready.kernel.symbol.as_bytes() == name.to_bytes());
        let place = place.ok_or(NOT_FOUND)?;
        give(at, handle(state, Object::Function(module, place)))
    })
}

/// A kernel of a module.
fn function(object: &Object) -> Option<(Arc<object::Loaded>, usize)> {
    if let Object::Function(module, place) = object { Some((Arc::clone(module), *place)) } else { None }
}

pub(super) unsafe extern "C" fn hipFuncGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    of: sys::Function,
) -> Status {
    const NAME: &str = "hipFuncGetAttribute";
    call(NAME, |state| {
        let (module, place) = find(state, NAME, of, function)?;
        match attribute {
            sys::FUNCTION_BLOCK_THREADS => {
                let block = module.0[place].kernel.cpu.signature().block;
                give(value, block.iter().product::<u32>() as c_int)
            }
            _ => Err(INVALID),
        }
    })
}

/// The block of parameters that `extra` tells of.
///
/// # Safety
/// It is null, or a list of pairs that ends with `PARAM_END`, in which `PARAM_SIZE` is followed by the address of a size.
unsafe fn block(extra: *mut *mut c_void) -> Option<(*const u8, usize)> {
    let (mut start, mut bytes) = (std::ptr::null(), None);
    if extra.is_null() {
        return Some((start, 0));
    }
    for pair in 0..3 {
        // SAFETY: the list ends with `PARAM_END`, which is at the place of a pair's first at the latest.
        let place = unsafe { extra.add(2 * pair) };
        // SAFETY: as above.
        let key = unsafe { place.read() }.addr();
        if key == PARAM_END {
            return Some((start, bytes?));
        }
        // SAFETY: a value follows each key but the last.
        let place = unsafe { place.add(1) };
        // SAFETY: as above.
        let value = unsafe { place.read() };
        match key {
            PARAM_BUFFER => start = value.cast_const().cast(),
            // SAFETY: it is the address of the size.
            PARAM_SIZE => bytes = Some(unsafe { value.cast::<usize>().read() }),
            _ => return None,
        }
    }
    None
}

pub(super) unsafe extern "C" fn hipModuleLaunchKernel(
    of: sys::Function,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: sys::Stream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    const NAME: &str = "hipModuleLaunchKernel";
    call(NAME, |state| {
        let (module, place) = find(state, NAME, of, function)?;
        let kernel = &module.0[place].kernel;
        // SAFETY: as the caller promises.
        let given = unsafe { block(extra) }.filter(|_| parameters.is_null());
        let Some((start, bytes)) = given else {
            state.fault(NAME, format_args!("it is given no block of parameters"));
            return Err(INVALID);
        };
        let (grid, threads) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let wanted = (kernel.params.bytes as usize, kernel.cpu.signature().block, 0);
        if (bytes, threads, shared_bytes) != wanted {
            let given = (bytes, threads, shared_bytes);
            state.fault(
                NAME,
                format_args!(
                    "bytes of parameters, block and bytes of shared memory are {given:?}, not {wanted:?}"
                ),
            );
            return Err(INVALID);
        }
        let all = |(&blocks, size): (&u32, u32)| blocks.checked_mul(size).is_some_and(|threads| threads > 0);
        if !grid.iter().zip(threads).all(all) {
            state.fault(NAME, format_args!("no grid is {grid:?} blocks of {threads:?} threads"));
            return Err(INVALID);
        }
        let mut words = vec![0u64; bytes.div_ceil(8)];
        // SAFETY: the caller gives that many bytes, and the words have as many at least.
        unsafe { start.copy_to(words.as_mut_ptr().cast(), bytes) };
        let words = words.into();
        push(state, NAME, stream, Command::Launch { module, place, grid: Grid(grid), words })
    })
}

pub(super) unsafe extern "C" fn hipGraphInstantiateWithFlags(
    at: *mut sys::GraphExec,
    graph: sys::Graph,
    _: c_ulonglong,
) -> Status {
    const NAME: &str = "hipGraphInstantiateWithFlags";
    call(NAME, |state| {
        let commands = find(state, NAME, graph, |object| match object {
            Object::Graph(commands) => Some(commands.clone()),
            _ => None,
        })?;
        give(at, handle(state, Object::Executable(commands.into())))
    })
}

/// What was instantiated.
fn executable(object: &Object) -> Option<Arc<[Command]>> {
    if let Object::Executable(commands) = object { Some(Arc::clone(commands)) } else { None }
}

pub(super) unsafe extern "C" fn hipGraphLaunch(graph: sys::GraphExec, stream: sys::Stream) -> Status {
    const NAME: &str = "hipGraphLaunch";
    call(NAME, |state| {
        let commands = find(state, NAME, graph, executable)?;
        push(state, NAME, stream, Command::Replay(commands))
    })
}

pub(super) unsafe extern "C" fn hipGraphExecDestroy(graph: sys::GraphExec) -> Status {
    const NAME: &str = "hipGraphExecDestroy";
    call(NAME, |state| {
        find(state, NAME, graph, executable)?;
        forget(graph);
        Ok(())
    })
}

pub(super) unsafe extern "C" fn hipGraphDestroy(graph: sys::Graph) -> Status {
    const NAME: &str = "hipGraphDestroy";
    call(NAME, |state| {
        find(state, NAME, graph, |object| matches!(object, Object::Graph(_)).then_some(()))?;
        forget(graph);
        Ok(())
    })
}
