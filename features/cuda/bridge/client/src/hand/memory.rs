//! Memory: which addresses are a device's, and which are memory of both sides, is known here.

use std::sync::Arc;

use vm_bridge::wire::{WINDOW, code};

use super::{current_device, free_managed, managed_at, share_mapped, unshare};
use crate::client::{Client, Registered, client, locked};
use crate::known::Memory;
use crate::sys::{PAGE, caller, there, window};
use crate::{current, forward};

/// Is it an address of a device?
pub(crate) fn is_device(client: &Client, at: usize) -> bool {
    locked(&client.devices).has(at as u64)
}

/// Is it an address of a device, as far as can be told? What is mapped nowhere in this process is no memory of it.
pub(crate) fn is_elsewhere(client: &Client, at: usize) -> bool {
    is_device(client, at) || !window::is_mapped(at)
}

/// The registered memory at an address, and where it begins.
pub(crate) fn registered_at(client: &Client, at: usize) -> Option<(u64, Registered)> {
    let registered = locked(&client.registered);
    let (start, memory) = registered.range(..=at as u64).next_back()?;
    (at as u64 - start < memory.len).then_some((*start, *memory))
}

pub(crate) fn cuMemHostRegister_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
    const ALREADY: u32 = 712;
    let (client, at, len, flags) = (client()?, words[0] as u64, words[1] as u64, words[2] as u32);
    let end = at.checked_add(len).ok_or(code::INVALID_VALUE)?;
    if at < PAGE as u64 || len == 0 || flags & !0xf != 0 {
        return Err(code::INVALID_VALUE);
    }
    current_device()?;
    if !there::is_mapped(words[0], words[1]) {
        return Err(code::INVALID_VALUE);
    }
    let context = current::get();
    {
        let mut registered = locked(&client.registered);
        let before = registered.range(..end).next_back();
        if before.is_some_and(|(start, memory)| start + memory.len > at) || is_shared(&client, words[0], 1) {
            return Err(ALREADY);
        }
        registered.insert(at, Registered { len, flags, shared: None, context });
    }
    let Some(shared) = share_mapped(&client, at, end, flags) else { return Ok(()) };
    match locked(&client.registered).get_mut(&at) {
        Some(memory) => memory.shared = Some(shared),
        // Another thread has been quicker to unregister it.
        None => unshare(&client, shared, false)?,
    }
    Ok(())
}

pub(crate) fn cuMemHostUnregister(_: usize, words: &[usize]) -> Result<(), u32> {
    /// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
    const NOT: u32 = 713;
    let client = client()?;
    if locked(&client.own).contains_key(&(words[0] as u64)) {
        return Err(code::INVALID_VALUE);
    }
    // Copies of it have taken their bytes, or have brought them.
    let memory = locked(&client.registered).remove(&(words[0] as u64)).ok_or(NOT)?;
    memory.shared.map_or(Ok(()), |shared| unshare(&client, shared, false))
}

/// What was registered in a context has ended with it.
pub(crate) fn end_registered(client: &Arc<Client>, context: u64) {
    let of = |_: &u64, memory: &mut Registered| memory.context == context;
    let ended: Vec<_> = locked(&client.registered).extract_if(.., of).collect();
    for shared in ended.into_iter().filter_map(|(_, memory)| memory.shared) {
        // Whatever the driver says of it: nobody has asked.
        let _ = unshare(client, shared, true);
    }
}

/// Where both sides have all of a range.
pub(crate) fn shared_at(client: &Client, at: usize, len: usize) -> Option<usize> {
    if is_shared(client, at, len) {
        return Some(at);
    }
    let (start, memory) = registered_at(client, at)?;
    let from = at as u64 - start;
    let is_whole = from.checked_add(len as u64).is_some_and(|end| end <= memory.len);
    memory.shared.filter(|_| is_whole).map(|shared| (shared + from) as usize)
}

/// Is all of a range memory that both sides have?
fn is_shared(client: &Client, at: usize, len: usize) -> bool {
    if !WINDOW.contains(&(at as u64)) {
        return false;
    }
    let windows = locked(&client.windows);
    let found = windows.range(..=at as u64).next_back();
    found.is_some_and(|(start, known)| {
        at as u64 - start <= *known && len as u64 <= known - (at as u64 - start)
    })
}

/// Remembers memory that was allocated in the current context.
fn remember(at: u64, len: u64, is_home: bool) -> Result<(), u32> {
    let context = current::get();
    let memory = Memory { len, owners: [context, 0], home: if is_home { context } else { 0 } };
    locked(&client()?.devices).insert(at, memory);
    Ok(())
}

pub(crate) fn cuMemAlloc_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    remember(caller::word(words[0]), words[1] as u64, true)
}

/// The memory is of the stream's device, which need not be the current one.
pub(crate) fn cuMemAllocAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    remember(caller::word(words[0]), words[1] as u64, false)
}

pub(crate) fn cuMemAllocFromPoolAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    cuMemAllocAsync(number, words)
}

pub(crate) fn cuMemAllocPitch_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    remember(caller::word(words[0]), caller::word(words[1]) * words[3] as u64, true)
}

pub(crate) fn cuMemGetAddressRange_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    let Some(found) = managed_at(&*client()?, words[2] as u64) else { return forward::ask(number, words) };
    current_device()?;
    caller::write(words[0], found.start);
    caller::write(words[1], found.len);
    Ok(())
}

pub(crate) fn cuMemAddressReserve(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    let memory = Memory { len: words[1] as u64, owners: [0; 2], home: 0 };
    locked(&client()?.devices).insert(caller::word(words[0]), memory);
    Ok(())
}

pub(crate) fn cuMemAddressFree(number: usize, words: &[usize]) -> Result<(), u32> {
    forget_while(words[0] as u64, || forward::ask(number, words))
}

/// Forgets memory, which something else may be at once it was freed, unless that fails.
fn forget_while(at: u64, free: impl FnOnce() -> Result<(), u32>) -> Result<(), u32> {
    let client = client()?;
    let known = locked(&client.devices).remove(at);
    let result = free();
    if let (Err(_), Some(memory)) = (result, known) {
        locked(&client.devices).insert(at, memory);
    }
    result
}

pub(crate) fn cuMemFree_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    if free_managed(&client()?, words[0] as u64)? {
        return Ok(());
    }
    // Programs rely on it that work has ended then, as it has with the driver.
    forget_while(words[0] as u64, || forward::wait(number, words))
}

/// Frees what is known without waiting; of what is not, the driver says what is wrong.
pub(crate) fn cuMemFreeAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    let known = locked(&client()?.devices).remove(words[0] as u64);
    match known {
        Some(_) => forward::post(number, words),
        None => forward::ask(number, words),
    }
}

/// Bytes of an attribute of a pool: the first three say yes or no.
fn pool_attribute(attribute: usize) -> usize {
    if (1..=3).contains(&(attribute as u32)) { 4 } else { 8 }
}

pub(crate) fn cuMemPoolGetAttribute(number: usize, words: &[usize]) -> Result<(), u32> {
    let mut value = 0u64;
    forward::ask(number, &[words[0], words[1], &raw mut value as usize])?;
    caller::write_bytes(words[2], &value.to_ne_bytes()[..pool_attribute(words[1])]);
    Ok(())
}

pub(crate) fn cuMemPoolSetAttribute(number: usize, words: &[usize]) -> Result<(), u32> {
    let mut value = [0; 8];
    let bytes = caller::bytes(words[2], pool_attribute(words[1]));
    value[..bytes.len()].copy_from_slice(bytes);
    forward::ask(number, &[words[0], words[1], value.as_ptr() as usize])
}
