//! Textures and surfaces, objects that graphs keep, and the linker.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use vm_bridge::wire::{CHUNK, NOTHING, Reader, code, own, put, put_bytes};

use super::modules::Logs;
use super::{begin_calls, file, pack_options, the};
use crate::client::{Client, client, locked};
use crate::forward;
use crate::sys::caller;

/// Bytes of a `CUDA_RESOURCE_DESC`, a `CUDA_TEXTURE_DESC` and a `CUDA_RESOURCE_VIEW_DESC`.
const RESOURCE: usize = 144;
const TEXTURE: usize = 104;
const VIEW: usize = 112;

/// Asks for a handle, and writes it.
fn give(number: usize, to: usize, payload: &[u8]) -> Result<(), u32> {
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let reply = client()?.ask(number, payload, false)?;
    caller::write(to, Reader(&reply).word().map_err(|_| code::UNAVAILABLE)?);
    Ok(())
}

pub(crate) fn cuTexObjectCreate(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, resource, texture, view] = *words else { return Err(code::INVALID_VALUE) };
    if resource == 0 || texture == 0 {
        return Err(code::INVALID_VALUE);
    }
    let parts =
        [caller::bytes(resource, RESOURCE), caller::bytes(texture, TEXTURE), caller::bytes(view, VIEW)];
    give(number, to, &parts.concat())
}

pub(crate) fn cuSurfObjectCreate(number: usize, words: &[usize]) -> Result<(), u32> {
    if words[1] == 0 {
        return Err(code::INVALID_VALUE);
    }
    give(number, words[0], caller::bytes(words[1], RESOURCE))
}

pub(crate) fn cuUserObjectCreate(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, argument, function, count, flags] = *words else { return Err(code::INVALID_VALUE) };
    begin_calls(&client()?)?;
    let mut payload = Vec::new();
    [function, argument, count as u32 as usize, flags as u32 as usize]
        .iter()
        .for_each(|word| put(&mut payload, *word as u64));
    give(number, to, &payload)
}

pub(crate) fn cuLinkCreate_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    let mut payload = Vec::new();
    let logs = pack_options([words[0], words[1], words[2]], &mut payload);
    give(number, words[3], &payload)?;
    let linker = Linker { logs, made: Vec::new() };
    locked(&LINKERS).get_or_insert_default().insert(caller::word(words[3]) as usize, linker);
    Ok(())
}

/// A linker: the program's logs, which it fills until it ends, and what it made.
#[derive(Default)]
struct Linker {
    logs: Logs,
    made: Vec<u8>,
}

static LINKERS: Mutex<Option<HashMap<usize, Linker>>> = Mutex::new(None);

/// Has a linker do something: words that it returns, after what the driver says.
fn ask_linker<const N: usize>(number: usize, link: usize, payload: &[u8]) -> Result<[u64; N], u32> {
    let reply = client()?.ask(number, payload, false)?;
    let mut reader = Reader(&reply);
    let result = reader.word().map_err(|_| code::UNAVAILABLE)?;
    let mut words = [0; N];
    for word in &mut words {
        *word = reader.word().map_err(|_| code::UNAVAILABLE)?;
    }
    if let Some(linker) = locked(&LINKERS).get_or_insert_default().get(&link) {
        linker.logs.fill(&mut reader)?;
    }
    if result == 0 { Ok(words) } else { Err(result as u32) }
}

/// Sends an image to the linker.
fn add(link: usize, kind: usize, image: &[u8], name: usize, options: [usize; 3]) -> Result<(), u32> {
    let client = client()?;
    for part in image.chunks(CHUNK) {
        client.post(own::IMAGE.into(), part)?;
    }
    let mut payload = Vec::new();
    put(&mut payload, link as u64);
    put(&mut payload, kind as u32 as u64);
    pack_options(options, &mut payload);
    match caller::text(name) {
        Some(text) => {
            put(&mut payload, text.len() as u64 - 1);
            put_bytes(&mut payload, text);
        }
        None => put(&mut payload, NOTHING),
    }
    ask_linker::<0>(the("cuLinkAddData_v2")?, link, &payload).map(drop)
}

pub(crate) fn cuLinkAddData_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    let [link, kind, data, size, name, count, kinds, values] = *words else {
        return Err(code::INVALID_VALUE);
    };
    if data == 0 || size == 0 {
        return Err(code::INVALID_VALUE);
    }
    add(link, kind, caller::bytes(data, size), name, [count, kinds, values])
}

pub(crate) fn cuLinkAddFile_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    /// `CU_JIT_INPUT_PTX`, which ends with a zero. An archive ends with its last member: drivers fail on a byte behind it.
    const PTX: usize = 1;
    let [link, kind, path, count, kinds, values] = *words else { return Err(code::INVALID_VALUE) };
    let mut image = file(path)?;
    if kind != PTX {
        image.pop();
    }
    add(link, kind, &image, path, [count, kinds, values])
}

/// Fetches so many bytes that the server keeps for this thread.
pub(super) fn fetch(client: &Arc<Client>, len: usize) -> Result<Vec<u8>, u32> {
    let mut bytes = Vec::new();
    for at in (0..len).step_by(CHUNK) {
        let part = CHUNK.min(len - at);
        let mut payload = Vec::new();
        put(&mut payload, at as u64);
        put(&mut payload, part as u64);
        let reply = client.ask(own::LINKED.into(), &payload, false)?;
        bytes.extend_from_slice(reply.get(..part).ok_or(code::UNAVAILABLE)?);
    }
    Ok(bytes)
}

pub(crate) fn cuLinkComplete(number: usize, words: &[usize]) -> Result<(), u32> {
    let [link, to, size] = *words else { return Err(code::INVALID_VALUE) };
    let client = client()?;
    let [len] = ask_linker(number, link, &(link as u64).to_ne_bytes())?;
    let image = fetch(&client, len as usize)?;
    let mut linkers = locked(&LINKERS);
    let linker = linkers.get_or_insert_default().entry(link).or_default();
    linker.made = image;
    caller::write(to, linker.made.as_ptr() as u64);
    caller::write(size, len);
    Ok(())
}

pub(crate) fn cuLinkDestroy(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    locked(&LINKERS).get_or_insert_default().remove(&words[0]);
    Ok(())
}
