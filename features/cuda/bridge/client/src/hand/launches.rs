//! Launches: parameters are behind an array of pointers, or in a buffer, as long as the kernel says.

use std::sync::Arc;

use vm_bridge::wire::{code, put};

use super::layout;
use crate::client::{Client, client};
use crate::forward;
use crate::sys::caller;

/// `CU_LAUNCH_PARAM_…`: what is in `extra`.
const END: u64 = 0;
const BUFFER: u64 = 1;
const SIZE: u64 = 2;

/// Packs a kernel's parameters.
pub(super) fn parameters(
    client: &Arc<Client>,
    function: usize,
    [pointers, extra]: [usize; 2],
    to: &mut Vec<u8>,
) -> Result<(), u32> {
    let layout = layout(client, function as u64)?;
    let end = layout.iter().map(|(offset, size)| offset + size).max().unwrap_or(0);
    let from = to.len();
    to.resize(from + end.next_multiple_of(8), 0);
    let bytes = &mut to[from..];
    if extra != 0 {
        let (mut buffer, mut size, mut at) = (0, 0, extra);
        loop {
            match caller::word(at) {
                END => break,
                BUFFER => buffer = caller::word(at + 8) as usize,
                SIZE => size = caller::word(caller::word(at + 8) as usize) as usize,
                _ => return Err(code::INVALID_VALUE),
            }
            at += 16;
        }
        let given = caller::bytes(buffer, size.min(end));
        bytes[..given.len()].copy_from_slice(given);
        return Ok(());
    }
    if pointers == 0 && !layout.is_empty() {
        return Err(code::INVALID_VALUE);
    }
    for (index, (offset, size)) in layout.iter().enumerate() {
        let given = caller::bytes(caller::word(pointers + 8 * index) as usize, *size);
        bytes[*offset..*offset + given.len()].copy_from_slice(given);
    }
    Ok(())
}

pub(crate) fn cuLaunchKernel(number: usize, words: &[usize]) -> Result<(), u32> {
    let client = client()?;
    let mut payload = Vec::with_capacity(256);
    put(&mut payload, words[0] as u64);
    words[1..8].iter().for_each(|word| put(&mut payload, *word as u32 as u64));
    put(&mut payload, words[8] as u64);
    let extra = words.get(10).copied().unwrap_or(0);
    parameters(&client, words[0], [words[9], extra], &mut payload)?;
    client.post(number, &payload)
}

pub(crate) fn cuLaunchCooperativeKernel(number: usize, words: &[usize]) -> Result<(), u32> {
    cuLaunchKernel(number, words)
}

/// Bytes of a `CUlaunchAttribute`.
const ATTRIBUTE: usize = 72;
const MOST: usize = 32;

/// Packs a `CUlaunchConfig` with its attributes.
fn config(at: usize, to: &mut Vec<u8>) -> Result<(), u32> {
    if at == 0 {
        return Err(code::INVALID_VALUE);
    }
    // Its first five words are the grid, the block, shared memory and the stream.
    (0..5).for_each(|word| put(to, caller::word(at + 8 * word)));
    let (attributes, count) = (caller::word(at + 40) as usize, caller::half(at + 48) as usize);
    if count > MOST {
        return Err(code::INVALID_VALUE);
    }
    put(to, count as u64);
    to.extend_from_slice(caller::bytes(attributes, count * ATTRIBUTE));
    Ok(())
}

pub(crate) fn cuLaunchKernelEx(number: usize, words: &[usize]) -> Result<(), u32> {
    let [at, function, pointers, extra] = *words else { return Err(code::INVALID_VALUE) };
    let client = client()?;
    let mut payload = Vec::with_capacity(256);
    put(&mut payload, function as u64);
    config(at, &mut payload)?;
    parameters(&client, function, [pointers, extra], &mut payload)?;
    client.post(number, &payload)
}

/// How many clusters of a configuration fit, or how large they may be.
fn clusters(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, function, at] = *words else { return Err(code::INVALID_VALUE) };
    let mut payload = Vec::with_capacity(128);
    put(&mut payload, function as u64);
    config(at, &mut payload)?;
    let reply = forward::kept(number, payload)?;
    caller::write_bytes(to, reply.get(..4).ok_or(code::UNAVAILABLE)?);
    Ok(())
}

pub(crate) fn cuOccupancyMaxActiveClusters(number: usize, words: &[usize]) -> Result<(), u32> {
    clusters(number, words)
}

pub(crate) fn cuOccupancyMaxPotentialClusterSize(number: usize, words: &[usize]) -> Result<(), u32> {
    clusters(number, words)
}

pub(crate) fn cuProfilerStart(_: usize, _: &[usize]) -> Result<(), u32> {
    Ok(())
}

pub(crate) fn cuProfilerStop(_: usize, _: &[usize]) -> Result<(), u32> {
    Ok(())
}
