//! Memory: which addresses are a device's, and which are memory of both sides, is known here.

use std::os::fd::AsFd;

use vm_bridge::wire::{WINDOW, code, control, put};

use super::the;
use crate::client::{Client, client, locked};
use crate::forward;
use crate::sys::{caller, window};

const PAGE: u64 = 4096;

/// Is it an address of a device?
pub(crate) fn is_device(client: &Client, at: usize) -> bool {
    let devices = locked(&client.devices);
    devices.range(..=at as u64).next_back().is_some_and(|(start, len)| at as u64 - start < *len)
}

/// Is it an address of a device, as far as can be told? What is mapped nowhere in this process is no memory of it.
pub(crate) fn is_elsewhere(client: &Client, at: usize) -> bool {
    is_device(client, at) || !window::is_mapped(at)
}

/// The registered memory at an address: where it begins, and how long it is.
pub(crate) fn registered_at(client: &Client, at: usize) -> Option<(u64, u64)> {
    let registered = locked(&client.registered);
    let (start, (len, _)) = registered.range(..=at as u64).next_back()?;
    (at as u64 - start < *len).then_some((*start, *len))
}

pub(crate) fn cuMemHostRegister_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
    const ALREADY: u32 = 712;
    let (client, at, len, flags) = (client()?, words[0] as u64, words[1] as u64, words[2] as u32);
    let end = at.checked_add(len).ok_or(code::INVALID_VALUE)?;
    if at == 0 || len == 0 || flags & !0xf != 0 {
        return Err(code::INVALID_VALUE);
    }
    let mut registered = locked(&client.registered);
    let before = registered.range(..end).next_back();
    if before.is_some_and(|(start, (len, _))| start + len > at) || is_shared(&client, words[0], 1) {
        return Err(ALREADY);
    }
    registered.insert(at, (len, flags));
    Ok(())
}

pub(crate) fn cuMemHostUnregister(_: usize, words: &[usize]) -> Result<(), u32> {
    /// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
    const NOT: u32 = 713;
    // Copies of it have taken their bytes, or have brought them.
    locked(&client()?.registered).remove(&(words[0] as u64)).map(drop).ok_or(NOT)
}

pub(crate) fn cuMemHostGetFlags(number: usize, words: &[usize]) -> Result<(), u32> {
    let flags = locked(&client()?.registered).get(&(words[1] as u64)).map(|(_, flags)| *flags);
    match flags {
        Some(flags) => {
            caller::write_half(words[0], flags);
            Ok(())
        }
        None => forward::ask(number, words),
    }
}

/// Is all of a range memory that both sides have?
pub(crate) fn is_shared(client: &Client, at: usize, len: usize) -> bool {
    if !WINDOW.contains(&(at as u64)) {
        return false;
    }
    let windows = locked(&client.windows);
    let found = windows.range(..=at as u64).next_back();
    found.is_some_and(|(start, known)| {
        at as u64 - start <= *known && len as u64 <= known - (at as u64 - start)
    })
}

/// Asks for memory, and remembers it.
fn allocate(number: usize, words: &[usize], len: u64) -> Result<(), u32> {
    forward::ask(number, words)?;
    locked(&client()?.devices).insert(caller::word(words[0]), len);
    Ok(())
}

pub(crate) fn cuMemAlloc_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    allocate(number, words, words[1] as u64)
}

pub(crate) fn cuMemAllocAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    allocate(number, words, words[1] as u64)
}

pub(crate) fn cuMemAllocFromPoolAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    allocate(number, words, words[1] as u64)
}

pub(crate) fn cuMemAllocPitch_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    let len = caller::word(words[1]) * words[3] as u64;
    locked(&client()?.devices).insert(caller::word(words[0]), len);
    Ok(())
}

pub(crate) fn cuMemAddressReserve(number: usize, words: &[usize]) -> Result<(), u32> {
    allocate(number, words, words[1] as u64)
}

pub(crate) fn cuMemAddressFree(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    locked(&client()?.devices).remove(&(words[0] as u64));
    Ok(())
}

pub(crate) fn cuMemFree_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    // Programs rely on it that work has ended then, as it has with the driver.
    let (client, at) = (client()?, words[0] as u64);
    let known = locked(&client.devices).remove(&at);
    let result = forward::wait(number, words);
    if let (Err(_), Some(len)) = (result, known) {
        locked(&client.devices).insert(at, len);
    }
    result
}

/// Frees what is known without waiting; of what is not, the driver says what is wrong.
pub(crate) fn cuMemFreeAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    match locked(&client()?.devices).remove(&(words[0] as u64)) {
        Some(_) => forward::post(number, words),
        None => forward::ask(number, words),
    }
}

/// Allocates memory that both sides have.
fn host_allocate(to: usize, len: usize, flags: u32) -> Result<(), u32> {
    /// Places that are tried: another library may have taken one.
    const TRIES: u32 = 64;
    if to == 0 || len == 0 || flags & !7 != 0 {
        return Err(code::INVALID_VALUE);
    }
    let client = client()?;
    let len = (len as u64).checked_next_multiple_of(PAGE).ok_or(code::OUT_OF_MEMORY)?;
    let mut from = WINDOW.start;
    for _ in 0..TRIES {
        let at = place(&client, from, len).ok_or(code::OUT_OF_MEMORY)?;
        let Ok(file) = window::make(at, len) else {
            // Something else has it.
            from = at + len;
            continue;
        };
        locked(&client.windows).insert(at, len);
        let forget = || {
            locked(&client.windows).remove(&at);
            window::free(at, len);
        };
        let mut payload = Vec::new();
        put(&mut payload, at);
        put(&mut payload, flags.into());
        let made = client
            .order([control::WINDOW, at, len, 0], Some(file.as_fd()))
            .and_then(|()| client.ask(the("cuMemHostAlloc")?, &payload, false));
        return match made {
            Ok(_) => {
                caller::write(to, at);
                Ok(())
            }
            Err(code) => {
                forget();
                Err(code)
            }
        };
    }
    Err(code::OUT_OF_MEMORY)
}

/// The first free place of the window from an address on.
fn place(client: &Client, from: u64, len: u64) -> Option<u64> {
    let mut at = from;
    for (start, known) in locked(&client.windows).iter() {
        if *start >= at && start - at >= len {
            break;
        }
        at = at.max(start + known);
    }
    (at.checked_add(len)? <= WINDOW.end).then_some(at)
}

pub(crate) fn cuMemHostAlloc(_: usize, words: &[usize]) -> Result<(), u32> {
    host_allocate(words[0], words[1], words[2] as u32)
}

pub(crate) fn cuMemAllocHost_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    host_allocate(words[0], words[1], 0)
}

pub(crate) fn cuMemFreeHost(number: usize, words: &[usize]) -> Result<(), u32> {
    let (client, at) = (client()?, words[0] as u64);
    let len = locked(&client.windows).get(&at).copied().ok_or(code::INVALID_VALUE)?;
    client.ask(number, &at.to_ne_bytes(), true)?;
    window::free(at, len);
    locked(&client.windows).remove(&at);
    Ok(())
}

pub(crate) fn cuMemHostGetDevicePointer_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    let client = client()?;
    if registered_at(&client, words[1]).is_some() {
        return Err(code::NOT_SUPPORTED);
    }
    if words[0] == 0 || words[2] as u32 != 0 || !is_shared(&client, words[1], 1) {
        return Err(code::INVALID_VALUE);
    }
    caller::write(words[0], words[1] as u64);
    Ok(())
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
