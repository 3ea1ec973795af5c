//! Managed memory: memory of the host that both sides have at one address. It never moves: the device accesses it over the bus.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use vm_bridge::wire::code;
use vm_cuda_api::hints::{Hints, Location};

use super::host::{DEVICE_MAP, free_on_both, on_both};
use super::{current_device, the};
use crate::client::{Client, client, locked};
use crate::sys::caller;
use crate::{forward, say};

/// The program's managed memory.
#[derive(Default)]
pub(crate) struct Managed {
    allocations: BTreeMap<u64, Allocation>,
    hints: Hints,
}

#[derive(Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) start: u64,
    /// Its length in bytes, as the program asked for it.
    pub(crate) len: u64,
    /// The device that was current.
    pub(crate) device: i32,
}

/// The managed memory at an address.
pub(crate) fn managed_at(client: &Client, at: u64) -> Option<Allocation> {
    let managed = locked(&client.managed);
    let (_, found) = managed.allocations.range(..=at).next_back()?;
    (at - found.start < found.len).then_some(*found)
}

pub(crate) fn cuMemAllocManaged(_: usize, words: &[usize]) -> Result<(), u32> {
    /// `CU_MEM_ATTACH_GLOBAL` and `CU_MEM_ATTACH_HOST`, of which one is given.
    const ATTACH: [u32; 2] = [1, 2];
    let (to, len, flags) = (words[0], words[1], words[2] as u32);
    if to == 0 || len == 0 || !ATTACH.contains(&flags) {
        return Err(code::INVALID_VALUE);
    }
    let client = client()?;
    let device = current_device()?;
    let Some(start) = on_both(&client, len, DEVICE_MAP)? else {
        say::once(
            "cannot allocate managed memory: program and server share no memory; give the guest a window",
        );
        return Err(code::NOT_SUPPORTED);
    };
    locked(&client.managed).allocations.insert(start, Allocation { start, len: len as u64, device });
    caller::write(to, start);
    Ok(())
}

/// Frees managed memory that begins at an address, after the work of the context has ended. Returns whether there is some.
pub(crate) fn free_managed(client: &Arc<Client>, at: u64) -> Result<bool, u32> {
    // Freed once, and by one thread.
    let Some(found) = locked(&client.managed).allocations.remove(&at) else { return Ok(false) };
    if let Err(code) = free_on_both(client, at) {
        locked(&client.managed).allocations.insert(at, found);
        return Err(code);
    }
    locked(&client.managed).hints.forget(at..at + found.len);
    Ok(true)
}

/// Checks a range of managed memory and the location that a hint about it names.
fn hinted(client: &Client, at: usize, len: usize, location: Option<Location>) -> Result<Range<u64>, u32> {
    let (at, len) = (at as u64, len as u64);
    current_device()?;
    if let Some(device) = location.and_then(Location::device) {
        /// `CUDA_ERROR_INVALID_DEVICE`.
        const INVALID_DEVICE: u32 = 101;
        let mut count = 0i32;
        forward::keep(the("cuDeviceGetCount")?, &[&raw mut count as usize])?;
        if !(0..count).contains(&device) {
            return Err(INVALID_DEVICE);
        }
    }
    let found = managed_at(client, at).ok_or(code::INVALID_VALUE)?;
    let last = at.checked_add(len).filter(|last| len > 0 && *last <= found.start + found.len);
    Ok(at..last.ok_or(code::INVALID_VALUE)?)
}

fn advise(words: &[usize], location: Option<Location>) -> Result<(), u32> {
    let (client, advice) = (client()?, words[2] as i32);
    let used = location.filter(|_| !Hints::ignores_location(advice));
    let range = hinted(&client, words[0], words[1], used)?;
    let is_advice = locked(&client.managed).hints.advise(range, advice, location.unwrap_or(Location::HOST));
    if is_advice { Ok(()) } else { Err(code::INVALID_VALUE) }
}

pub(crate) fn cuMemAdvise(_: usize, words: &[usize]) -> Result<(), u32> {
    advise(words, Some(Location::of_device(words[3] as i32)))
}

pub(crate) fn cuMemAdvise_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    advise(words, Location::parse(words[3] as u64))
}

/// Remembers where memory was to go.
fn prefetch(words: &[usize], to: Option<Location>, stream: usize) -> Result<(), u32> {
    let client = client()?;
    let to = to.ok_or(code::INVALID_VALUE)?;
    let range = hinted(&client, words[0], words[1], Some(to))?;
    check_stream(stream)?;
    locked(&client.managed).hints.prefetch(range, to);
    Ok(())
}

/// Checks that there is such a stream.
fn check_stream(stream: usize) -> Result<(), u32> {
    let mut flags = 0u32;
    forward::keep(the("cuStreamGetFlags")?, &[stream, &raw mut flags as usize])
}

pub(crate) fn cuMemPrefetchAsync(_: usize, words: &[usize]) -> Result<(), u32> {
    prefetch(words, Some(Location::of_device(words[2] as i32)), words[3])
}

pub(crate) fn cuMemPrefetchAsync_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    if words[3] as u32 != 0 {
        return Err(code::INVALID_VALUE);
    }
    prefetch(words, Location::parse(words[2] as u64), words[4])
}

/// Writes an attribute of a range.
fn attribute([to, len, attribute]: [usize; 3], range: &[usize]) -> Result<(), u32> {
    let client = client()?;
    let range = hinted(&client, range[0], range[1], None)?;
    let numbers = locked(&client.managed).hints.attribute(range, attribute as i32, len);
    let numbers = numbers.filter(|_| to != 0).ok_or(code::INVALID_VALUE)?;
    numbers.iter().enumerate().for_each(|(at, number)| caller::write_half(to + 4 * at, *number as u32));
    Ok(())
}

pub(crate) fn cuMemRangeGetAttribute(_: usize, words: &[usize]) -> Result<(), u32> {
    attribute([words[0], words[1], words[2]], &words[3..])
}

pub(crate) fn cuMemRangeGetAttributes(_: usize, words: &[usize]) -> Result<(), u32> {
    let [to, lens, attributes, count, ..] = *words else { return Err(code::INVALID_VALUE) };
    if [to, lens, attributes].contains(&0) || count == 0 {
        return Err(code::INVALID_VALUE);
    }
    for at in 0..count {
        let [to, len] = [to, lens].map(|of| caller::word(of + 8 * at) as usize);
        attribute([to, len, caller::half(attributes + 4 * at) as usize], &words[4..])?;
    }
    Ok(())
}

/// Devices access the memory at any time, so there is nothing to attach.
pub(crate) fn cuStreamAttachMemAsync(_: usize, words: &[usize]) -> Result<(), u32> {
    /// `CU_MEM_ATTACH_GLOBAL`, `…_HOST` and `…_SINGLE`.
    const ATTACH: [u32; 3] = [1, 2, 4];
    let [stream, at, len, flags] = *words else { return Err(code::INVALID_VALUE) };
    let found = managed_at(&*client()?, at as u64).filter(|found| found.start == at as u64);
    let is_whole = found.is_some_and(|found| len == 0 || len as u64 == found.len);
    if !is_whole || !ATTACH.contains(&(flags as u32)) {
        return Err(code::INVALID_VALUE);
    }
    check_stream(stream)
}
