//! Modules and libraries: an image has no length but its own, and goes in parts.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use vm_bridge::wire::{CHUNK, LOG, Reader, code, own, put};

use super::pointers::is_managed_there;
use super::the;
use crate::client::{Client, client, locked};
use crate::known::{Layout, Memory};
use crate::sys::caller;
use crate::{current, forward, say};

/// `CUjit_option` whose values are no pointers.
const PLAIN: [u32; 11] = [0, 1, 7, 8, 9, 10, 11, 12, 13, 14, 15];
/// `CU_JIT_INFO_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER`; the option behind each is its size.
const LOGS: [u32; 2] = [3, 5];

/// A log of the program's: where it is, how long it is, and where that is said.
#[derive(Clone, Copy, Default)]
struct Log {
    at: usize,
    len: usize,
    size_at: usize,
}

/// The logs that options name.
#[derive(Clone, Copy, Default)]
pub(super) struct Logs([Log; 2]);

impl Logs {
    /// Fills them, each with no more than it has room for.
    pub(super) fn fill(&self, reader: &mut Reader<'_>) -> Result<(), u32> {
        for log in &self.0 {
            let (said, len) = (reader.word(), reader.word());
            let (Ok(said), Ok(len)) = (said, len) else { return Err(code::UNAVAILABLE) };
            let bytes = reader.bytes(len as usize).map_err(|_| code::UNAVAILABLE)?;
            if log.len > 0 {
                caller::write_bytes(log.at, &bytes[..bytes.len().min(log.len)]);
            }
            caller::write(log.size_at, said);
        }
        Ok(())
    }
}

/// Sends an image and what loads it; gives what was loaded.
fn load(number: usize, image: &[u8], options: [usize; 3]) -> Result<u64, u32> {
    let [count, kinds, values] = options;
    let client = client()?;
    for part in image.chunks(CHUNK) {
        client.post(own::IMAGE.into(), part)?;
    }
    let mut payload = Vec::new();
    let logs = pack_options([count, kinds, values], &mut payload);
    let reply = client.ask(number, &payload, false)?;
    let mut reader = Reader(&reply);
    let (Ok(result), Ok(loaded)) = (reader.word(), reader.word()) else { return Err(code::UNAVAILABLE) };
    logs.fill(&mut reader)?;
    if result != 0 {
        return Err(result as u32);
    }
    if number == the("cuModuleLoadDataEx")? {
        client.own([current::get(), 0], loaded);
    }
    Ok(loaded)
}

/// Packs options of the compiler, and how long its logs may be, each with the byte that is last in it: drivers count that one, too, where a log is cut.
pub(super) fn pack_options([count, kinds, values]: [usize; 3], payload: &mut Vec<u8>) -> Logs {
    let (mut given, mut logs) = (Vec::new(), Logs::default());
    for at in 0..count as u32 as usize {
        let (kind, value) = (caller::half(kinds + 4 * at), values + 8 * at);
        if PLAIN.contains(&kind) {
            given.push((kind, caller::word(value)));
        }
        for (log, buffer) in logs.0.iter_mut().zip(LOGS) {
            if kind == buffer {
                log.at = caller::word(value) as usize;
            } else if kind == buffer + 1 {
                (log.len, log.size_at) = ((caller::word(value) as u32 as usize).min(LOG), value);
            }
        }
    }
    for log in &mut logs.0 {
        if log.at == 0 {
            log.len = 0;
        }
    }
    put(payload, given.len() as u64);
    for (kind, value) in given {
        put(payload, kind.into());
        put(payload, value);
    }
    for log in &logs.0 {
        let last = if log.len > 0 { caller::bytes(log.at + log.len - 1, 1)[0] } else { 0 };
        put(payload, u64::from(last) << 32 | log.len as u64);
    }
    logs
}

/// Loads a module of an image in memory.
pub(crate) fn load_module(to: usize, image: usize, options: [usize; 3]) -> Result<(), u32> {
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let image = caller::image(image)?;
    caller::write(to, load(the("cuModuleLoadDataEx")?, image, options)?);
    Ok(())
}

/// All functions of a module.
pub(crate) fn functions(module: u64) -> Result<Vec<u64>, u32> {
    /// More than any module has: a server that says more lies.
    const MOST: u32 = 1 << 20;
    let mut count = 0u32;
    forward::ask(the("cuModuleGetFunctionCount")?, &[&raw mut count as usize, module as usize])?;
    if count > MOST {
        return Err(code::UNAVAILABLE);
    }
    let mut all = vec![0u64; count as usize];
    let words = [all.as_mut_ptr() as usize, count as usize, module as usize];
    forward::ask(the("cuModuleEnumerateFunctions")?, &words)?;
    Ok(all)
}

pub(super) fn file(path: usize) -> Result<Vec<u8>, u32> {
    let path = caller::text(path).ok_or(code::INVALID_VALUE)?;
    let mut image =
        std::fs::read(OsStr::from_bytes(&path[..path.len() - 1])).map_err(|_| code::FILE_NOT_FOUND)?;
    // A text of a file has no end of its own.
    image.push(0);
    Ok(image)
}

pub(crate) fn cuModuleLoad(_: usize, words: &[usize]) -> Result<(), u32> {
    let image = file(words[1])?;
    caller::write(words[0], load(the("cuModuleLoadDataEx")?, &image, [0; 3])?);
    Ok(())
}

pub(crate) fn cuModuleLoadData(_: usize, words: &[usize]) -> Result<(), u32> {
    load_module(words[0], words[1], [0; 3])
}

pub(crate) fn cuModuleLoadFatBinary(_: usize, words: &[usize]) -> Result<(), u32> {
    load_module(words[0], words[1], [0; 3])
}

pub(crate) fn cuModuleLoadDataEx(_: usize, words: &[usize]) -> Result<(), u32> {
    load_module(words[0], words[1], [words[2], words[3], words[4]])
}

pub(crate) fn cuLibraryLoadData(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, image, kinds, values, count, ..] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let image = caller::image(image)?;
    caller::write(to, load(number, image, [count, kinds, values])?);
    Ok(())
}

pub(crate) fn cuLibraryLoadFromFile(_: usize, words: &[usize]) -> Result<(), u32> {
    let [to, path, kinds, values, count, ..] = *words else { return Err(code::INVALID_VALUE) };
    let image = file(path)?;
    caller::write(to, load(the("cuLibraryLoadData")?, &image, [count, kinds, values])?);
    Ok(())
}

/// A variable of a module or a library: memory of the device.
fn global(number: usize, words: &[usize]) -> Result<(), u32> {
    let (mut at, mut len) = (0u64, 0u64);
    let asked = [&raw mut at as usize, &raw mut len as usize, words[2], words[3]];
    forward::ask(number, &asked)?;
    if is_managed_there(at)? {
        say::once(
            "managed variables are not supported: the driver places them in the server's memory; use cuMemAllocManaged",
        );
        return Err(code::NOT_SUPPORTED);
    }
    // A library's is of the current context.
    let owners = [words[2] as u64, current::get()];
    locked(&client()?.devices).insert(at, Memory { len, owners, home: 0 });
    caller::write(words[0], at);
    caller::write(words[1], len);
    Ok(())
}

pub(crate) fn cuModuleGetGlobal_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    global(number, words)
}

pub(crate) fn cuLibraryGetGlobal(number: usize, words: &[usize]) -> Result<(), u32> {
    global(number, words)
}

/// Keeps what is asked once of each function.
pub(crate) fn layout(client: &Arc<Client>, function: u64) -> Result<Layout, u32> {
    if let Some(layout) = locked(&client.known).layout(function) {
        return Ok(layout);
    }
    let reply = client.ask(own::LAYOUT.into(), &function.to_ne_bytes(), false)?;
    let mut reader = Reader(&reply);
    let mut layout = Vec::new();
    while let (Ok(offset), Ok(size)) = (reader.word(), reader.word()) {
        layout.push((offset as usize, size as usize));
    }
    let layout = Layout::from(layout);
    locked(&client.known).lay_out(function, layout.clone());
    Ok(layout)
}

/// What is known of functions may be another from now on. Libraries set the same before each launch: that is not asked again. `function` is the place
/// of the function or the kernel, `value` of what is set.
fn set(number: usize, words: &[usize], [function, value]: [usize; 2]) -> Result<(), u32> {
    let client = client()?;
    let function = words[function] as u64;
    let mut others = words.to_vec();
    let value = others.remove(value);
    let call = (number, others);
    {
        let mut known = locked(&client.known);
        if known.is_set(function, &call, value) {
            return Ok(());
        }
        known.unset(function, &call);
    }
    forward::ask(number, words)?;
    let mut known = locked(&client.known);
    known.forget_answers();
    known.set(function, call, value);
    Ok(())
}

pub(crate) fn cuFuncSetAttribute(number: usize, words: &[usize]) -> Result<(), u32> {
    set(number, words, [0, 2])
}

pub(crate) fn cuKernelSetAttribute(number: usize, words: &[usize]) -> Result<(), u32> {
    set(number, words, [2, 1])
}

pub(crate) fn cuFuncSetCacheConfig(number: usize, words: &[usize]) -> Result<(), u32> {
    set(number, words, [0, 1])
}

pub(crate) fn cuKernelSetCacheConfig(number: usize, words: &[usize]) -> Result<(), u32> {
    set(number, words, [0, 1])
}

pub(crate) fn cuFuncSetSharedMemConfig(number: usize, words: &[usize]) -> Result<(), u32> {
    set(number, words, [0, 1])
}
