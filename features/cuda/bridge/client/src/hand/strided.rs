//! Copies of two and three dimensions. Memory that only this side has goes packed: rows without gaps, as many at a time as a frame takes.

use vm_bridge::wire::strided::{DEVICE, Form, HOST, UNIFIED};
use vm_bridge::wire::{CHUNK, code, put};

use super::captures::{record, records};
use super::{is_elsewhere, shared_at};
use crate::client::{client, locked};
use crate::sys::{PAGE, caller};

fn copy(number: usize, form: Form, words: &[usize]) -> Result<(), u32> {
    let client = client()?;
    if words[0] == 0 {
        return Err(code::INVALID_VALUE);
    }
    let mut copy: Vec<u64> = (0..form.words()).map(|at| caller::word(words[0] + 8 * at)).collect();
    let stream = words.get(1).copied();
    let [width, height, depth] = form.size(&copy);
    if width == 0 || height == 0 || depth == 0 {
        return Ok(());
    }
    let mut packed = [false; 2];
    for (at, end) in form.ends().into_iter().enumerate() {
        let kind = copy[end.kind] as u32 as u64;
        let is_null = (kind == HOST && copy[end.host] < PAGE as u64)
            || ([DEVICE, UNIFIED].contains(&kind) && copy[end.device] < PAGE as u64);
        if is_null {
            return Err(code::INVALID_VALUE);
        }
        if kind == UNIFIED {
            let device = is_elsewhere(&client, copy[end.device] as usize);
            copy[end.kind] = if device { DEVICE } else { HOST };
            copy[end.host] = copy[end.device];
        }
        if copy[end.kind] as u32 as u64 == HOST {
            let extent = form.extent(&copy, at == 1).ok_or(code::INVALID_VALUE)?;
            match shared_at(&client, copy[end.host] as usize, extent as usize) {
                Some(shared) => copy[end.host] = shared as u64,
                None => packed[at] = true,
            }
        }
    }
    let send = |copy: &[u64], bulk: &[u8], asks: bool| -> Result<Vec<u8>, u32> {
        let mut payload = Vec::with_capacity(256);
        copy.iter().for_each(|word| put(&mut payload, *word));
        put(&mut payload, stream.unwrap_or(0) as u64);
        payload.extend_from_slice(bulk);
        if asks {
            client.ask(number, &payload, true)
        } else {
            client.post(number, &payload).map(|()| Vec::new())
        }
    };
    if packed == [false; 2] {
        return send(&copy, &[], stream.is_none()).map(drop);
    }
    if let Some(stream) = stream
        && form != Form::Peer
        && records(stream, number)?
    {
        return record(stream, number, &form.to_three(&copy));
    }
    // Before the program's memory is touched.
    for (at, end) in form.ends().into_iter().enumerate() {
        let extent = form.extent(&copy, at == 1).ok_or(code::INVALID_VALUE)?;
        let is_device = copy[end.kind] as u32 as u64 == DEVICE;
        if is_device && locked(&client.devices).ends_before(copy[end.device], extent) {
            return Err(code::INVALID_VALUE);
        }
    }
    parts(form, &copy, packed, stream.is_none(), &send)
}

/// Sends a structure, with bytes behind it, and waits for an answer or does not.
type Send<'a> = dyn Fn(&[u64], &[u8], bool) -> Result<Vec<u8>, u32> + 'a;

/// Copies part by part.
fn parts(form: Form, copy: &[u64], packed: [bool; 2], is_sync: bool, send: &Send<'_>) -> Result<(), u32> {
    if packed == [true, true] {
        return Err(code::NOT_SUPPORTED);
    }
    let is_target = packed[1];
    let end = form.ends()[usize::from(is_target)];
    let [width, height, depth] = form.size(copy);
    let columns = width.min(CHUNK as u64);
    let rows = (CHUNK as u64 / columns).min(height);
    for z in 0..depth {
        for y in (0..height).step_by(rows as usize) {
            for x in (0..width).step_by(columns as usize) {
                let size = [columns.min(width - x), rows.min(height - y), 1];
                let place = |row: u64| -> Result<usize, u32> {
                    let offset = form.offset(copy, is_target, [x, y + row, z]).ok_or(code::INVALID_VALUE)?;
                    Ok((copy[end.host] + offset) as usize)
                };
                let mut part = copy.to_vec();
                form.resize(&mut part, size);
                form.shift(&mut part, !is_target, [x, y, z]);
                form.pack(&mut part, is_target);
                part[end.host] = 0;
                if is_target {
                    let reply = send(&part, &[], true)?;
                    for (row, bytes) in (0..size[1]).zip(reply.chunks(size[0] as usize)) {
                        caller::write_bytes(place(row)?, bytes);
                    }
                } else {
                    let mut bytes = Vec::with_capacity((size[0] * size[1]) as usize + 8);
                    for row in 0..size[1] {
                        bytes.extend_from_slice(caller::bytes(place(row)?, size[0] as usize));
                    }
                    bytes.resize(bytes.len().next_multiple_of(8), 0);
                    send(&part, &bytes, is_sync)?;
                }
            }
        }
    }
    Ok(())
}

pub(crate) fn cuMemcpy2D_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    copy(number, Form::Two, words)
}

pub(crate) fn cuMemcpy2DUnaligned_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    copy(number, Form::Two, words)
}

pub(crate) fn cuMemcpy2DAsync_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    copy(number, Form::Two, words)
}

pub(crate) fn cuMemcpy3D_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    copy(number, Form::Three, words)
}

pub(crate) fn cuMemcpy3DAsync_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    copy(number, Form::Three, words)
}

pub(crate) fn cuMemcpy3DPeer(number: usize, words: &[usize]) -> Result<(), u32> {
    copy(number, Form::Peer, words)
}

pub(crate) fn cuMemcpy3DPeerAsync(number: usize, words: &[usize]) -> Result<(), u32> {
    copy(number, Form::Peer, words)
}
