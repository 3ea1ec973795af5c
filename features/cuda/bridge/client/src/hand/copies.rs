//! Copies between the program's memory and a device's: bytes go with the call, but those of memory that both sides have.

use std::sync::Arc;

use vm_bridge::wire::strided::{ARRAY, DEVICE, Form, HOST};
use vm_bridge::wire::{CHUNK, code, put, put_bytes};
use vm_cuda_api::{FUNCTIONS, names::is_per_thread};

use super::captures::{record, records};
use super::{is_elsewhere, shared_at, the_form};
use crate::client::{Client, client, locked};
use crate::forward;
use crate::sys::{PAGE, caller};

/// Copies of so many bytes never wait in the driver: they are staged.
const STAGED: usize = 64 << 10;

/// Bytes that go to a device at once: while it reads one part, this side copies the next.
const PART: usize = CHUNK / 4;

/// Bytes that come from a device at once. The driver waits for each part, so that small ones take longer.
const PART_BACK: usize = CHUNK;

/// A device's end of a copy: an address, or an offset in an array.
#[derive(Clone, Copy)]
struct End {
    array: Option<usize>,
    at: usize,
}

impl End {
    /// A copy between it and memory of the program, as a `CUDA_MEMCPY3D`.
    fn copy(self, host: usize, len: usize, to_host: bool) -> Vec<u64> {
        let form = Form::Three;
        let mut copy = vec![0; form.words()];
        let [from, to] = form.ends();
        let (device, program) = if to_host { (from, to) } else { (to, from) };
        (copy[program.kind], copy[program.host]) = (HOST, host as u64);
        match self.array {
            Some(array) => {
                (copy[device.kind], copy[device.array]) = (ARRAY, array as u64);
                copy[device.origin[0].unwrap_or(0)] = self.at as u64;
            }
            None => (copy[device.kind], copy[device.device]) = (DEVICE, self.at as u64),
        }
        [from, to].iter().for_each(|end| copy[end.pitch] = len as u64);
        form.resize(&mut copy, [len as u64, 1, 1]);
        copy
    }
}

impl From<usize> for End {
    fn from(at: usize) -> Self {
        Self { array: None, at }
    }
}

/// What is before the bytes, or in their place.
fn head(end: End, from: usize, len: usize, stream: usize, host: usize) -> Vec<u8> {
    let mut payload = Vec::with_capacity(48);
    let words = [end.at + from, len, stream, host];
    end.array.iter().chain(&words).for_each(|word| put(&mut payload, *word as u64));
    payload
}

/// Rejects null and offsets from null as memory of the program, unless the copy is empty.
fn check_host(at: usize, len: usize) -> Result<(), u32> {
    if at < PAGE && len > 0 { Err(code::INVALID_VALUE) } else { Ok(()) }
}

/// Rejects a range of a device that is longer than the memory that is known there, before the program's memory is touched.
fn check_device(client: &Client, end: End, len: usize) -> Result<(), u32> {
    let ends = end.array.is_none() && locked(&client.devices).ends_before(end.at as u64, len as u64);
    if ends { Err(code::INVALID_VALUE) } else { Ok(()) }
}

/// Copies to a device; without a stream it has ended when this returns.
fn to_device(
    number: usize,
    to: impl Into<End>,
    from: usize,
    len: usize,
    stream: Option<usize>,
) -> Result<(), u32> {
    let to = to.into();
    let client = client()?;
    check_host(from, len)?;
    let of = stream.unwrap_or(0);
    if let Some(shared) = shared_at(&client, from, len) {
        let payload = head(to, 0, len, of, shared);
        return match stream {
            Some(_) => client.post(number, &payload),
            None => client.ask(number, &payload, true).map(drop),
        };
    }
    if let Some(stream) = stream
        && records(stream, number)?
    {
        return record(stream, number, &to.copy(from, len, false));
    }
    check_device(&client, to, len)?;
    for at in (0..len).step_by(PART) {
        let part = PART.min(len - at);
        let (mut payload, mut bytes) = (head(to, at, part, of, 0), caller::bytes(from + at, part));
        if to.array.is_some() {
            // What is before bytes that stay where they are has no room for an array.
            put_bytes(&mut payload, bytes);
            bytes = &[];
        }
        // The first may wait for what the stream does before it, and nobody may have to wait for those behind it then. The last one's answer is that of
        // all.
        let (is_first, is_last) = (at == 0 && len > STAGED, at + part == len && stream.is_none());
        if is_first || is_last {
            client.ask_bulk(number, [&payload, bytes], true)?;
        } else {
            client.post_bulk(number, &payload, bytes)?;
        }
    }
    Ok(())
}

/// Copies from a device; to memory that only this side has it has ended when this returns.
fn to_host(
    number: usize,
    to: usize,
    from: impl Into<End>,
    len: usize,
    stream: Option<usize>,
) -> Result<(), u32> {
    let from = from.into();
    let client = client()?;
    check_host(to, len)?;
    let of = stream.unwrap_or(0);
    if let Some(shared) = shared_at(&client, to, len) {
        let payload = head(from, 0, len, of, shared);
        return match stream {
            Some(_) => client.post(number, &payload),
            None => client.ask(number, &payload, true).map(drop),
        };
    }
    if let Some(stream) = stream
        && records(stream, number)?
    {
        return record(stream, number, &from.copy(to, len, true));
    }
    check_device(&client, from, len)?;
    let parts = caller::bytes_mut(to, len).chunks_mut(PART_BACK).enumerate();
    client.ask_many(
        number,
        len,
        parts.map(|(at, part)| (head(from, at * PART_BACK, part.len(), of, 0), part)),
    )
}

pub(crate) fn cuMemcpyHtoD_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    to_device(number, words[0], words[1], words[2], None)
}

pub(crate) fn cuMemcpyHtoDAsync_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    to_device(number, words[0], words[1], words[2], Some(words[3]))
}

pub(crate) fn cuMemcpyDtoH_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    to_host(number, words[0], words[1], words[2], None)
}

pub(crate) fn cuMemcpyDtoHAsync_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    to_host(number, words[0], words[1], words[2], Some(words[3]))
}

/// Copies between any two places: what each is says its address.
fn anywhere(number: usize, words: &[usize], stream: Option<usize>) -> Result<(), u32> {
    let (to, from, len) = (words[0], words[1], words[2]);
    let client: Arc<Client> = client()?;
    [to, from].into_iter().try_for_each(|at| check_host(at, len))?;
    let form = |with: &str, without: &str| the_form(if stream.is_some() { with } else { without }, number);
    match (is_elsewhere(&client, to), is_elsewhere(&client, from)) {
        (true, true) => {
            let number = form("cuMemcpyDtoDAsync_v2", "cuMemcpyDtoD_v2")?;
            let words: Vec<usize> = [to, from, len].into_iter().chain(stream).collect();
            forward::post(number, &words)
        }
        (true, false) => to_device(form("cuMemcpyHtoDAsync_v2", "cuMemcpyHtoD_v2")?, to, from, len, stream),
        (false, true) => to_host(form("cuMemcpyDtoHAsync_v2", "cuMemcpyDtoH_v2")?, to, from, len, stream),
        (false, false) => {
            if let Some(stream) = stream
                && records(stream, number)?
            {
                let mut copy = End::from(0).copy(from, len, false);
                let [_, target] = Form::Three.ends();
                (copy[target.kind], copy[target.host]) = (HOST, to as u64);
                return record(stream, number, &copy);
            }
            // Behind what the stream does before, which may write what is read.
            forward::wait(the_form("cuStreamSynchronize", number)?, &[stream.unwrap_or(0)])?;
            caller::copy(to, from, len);
            Ok(())
        }
    }
}

pub(crate) fn cuMemcpy(number: usize, words: &[usize]) -> Result<(), u32> {
    anywhere(number, words, None)
}

pub(crate) fn cuMemcpyAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    anywhere(number, words, Some(words[3]))
}

pub(crate) fn cuMemcpyHtoA_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    to_device(number, End { array: Some(words[0]), at: words[1] }, words[2], words[3], None)
}

pub(crate) fn cuMemcpyHtoAAsync_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    to_device(number, End { array: Some(words[0]), at: words[1] }, words[2], words[3], Some(words[4]))
}

pub(crate) fn cuMemcpyAtoH_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    to_host(number, words[0], End { array: Some(words[1]), at: words[2] }, words[3], None)
}

pub(crate) fn cuMemcpyAtoHAsync_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    to_host(number, words[0], End { array: Some(words[1]), at: words[2] }, words[3], Some(words[4]))
}

/// Bytes of a `CUmemcpyAttributes`, which begins with when what is copied may be read: one of these three.
const ATTRIBUTES: usize = 24;
pub(super) const ORDERS: std::ops::RangeInclusive<u32> = 1..=3;
/// What is said where none of a batch failed alone.
pub(super) const NONE: u64 = u64::MAX;

/// Many copies, which may be made in any order: they are made one after the other.
fn batch(number: usize, words: &[usize], fail_to: usize) -> Result<(), u32> {
    let [to, from, lens, count, attributes, places, many, ..] = *words else {
        return Err(code::INVALID_VALUE);
    };
    let stream = *words.last().ok_or(code::INVALID_VALUE)?;
    caller::write(fail_to, NONE);
    let is_legacy = stream == 1 || stream == 0 && !is_per_thread(&FUNCTIONS[number].name);
    if [to, from, lens, attributes, places].contains(&0)
        || is_legacy
        || count == 0
        || !(1..=count).contains(&many)
    {
        return Err(code::INVALID_VALUE);
    }
    let word = |at: usize, index: usize| caller::word(at + 8 * index) as usize;
    let places: Vec<_> = (0..many).map(|index| word(places, index)).collect();
    let orders = (0..many).map(|index| caller::half(attributes + ATTRIBUTES * index));
    if places[0] != 0
        || !places.is_sorted_by(|a, b| a < b)
        || places[many - 1] >= count
        || !orders.into_iter().all(|order| ORDERS.contains(&order))
    {
        return Err(code::INVALID_VALUE);
    }
    let copy = the_form("cuMemcpyAsync", number)?;
    for index in 0..count {
        let words = [word(to, index), word(from, index), word(lens, index), stream];
        anywhere(copy, &words, Some(stream)).inspect_err(|_| caller::write(fail_to, index as u64))?;
    }
    Ok(())
}

pub(crate) fn cuMemcpyBatchAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    batch(number, words, words[7])
}

pub(crate) fn cuMemcpyBatchAsync_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    batch(number, words, 0)
}
