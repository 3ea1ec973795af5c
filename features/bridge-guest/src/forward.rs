//! Calls that the table packs.

use std::sync::Arc;

use vm_bridge::wire::{code, put};
use vm_cuda_api::FUNCTIONS;

use crate::client::{client, locked};
use crate::{current, pack, say};

/// Answers for what does not cross.
pub(crate) fn unsupported(number: usize, _: &[usize]) -> Result<(), u32> {
    say::once(&format!("{} is not supported", FUNCTIONS[number].name));
    Err(code::NOT_SUPPORTED)
}

/// Sends a call, and goes on.
pub(crate) fn post(number: usize, words: &[usize]) -> Result<(), u32> {
    let mut payload = Vec::with_capacity(128);
    pack::request(number, words, &mut payload)?;
    client()?.post(number, &payload)
}

/// Sends a call, and waits for its answer.
pub(crate) fn ask(number: usize, words: &[usize]) -> Result<(), u32> {
    exchange(number, words, false)
}

/// Asks what may wait for the device.
pub(crate) fn wait(number: usize, words: &[usize]) -> Result<(), u32> {
    exchange(number, words, true)
}

fn exchange(number: usize, words: &[usize], waits: bool) -> Result<(), u32> {
    let mut payload = Vec::with_capacity(128);
    pack::request(number, words, &mut payload)?;
    pack::answer(number, words, &client()?.ask(number, &payload, waits)?)
}

/// Asks what never changes: once for the same arguments in the same context.
pub(crate) fn keep(number: usize, words: &[usize]) -> Result<(), u32> {
    let mut payload = Vec::with_capacity(128);
    pack::request(number, words, &mut payload)?;
    let reply = kept(number, payload)?;
    pack::answer(number, words, &reply)
}

/// The answer to a question that has one answer: asked once, in the same context.
pub(crate) fn kept(number: usize, payload: Vec<u8>) -> Result<Arc<[u8]>, u32> {
    /// As many as a program may ask for: then it begins anew.
    const MOST: usize = 1 << 16;
    let client = client()?;
    let len = payload.len();
    let mut key = payload;
    put(&mut key, number as u64);
    put(&mut key, current::get());
    if let Some(reply) = locked(&client.kept).get(&key) {
        return Ok(reply.clone());
    }
    let reply: Arc<[u8]> = client.ask(number, &key[..len], false)?.into();
    let mut kept = locked(&client.kept);
    if kept.len() >= MOST {
        kept.clear();
    }
    kept.insert(key, reply.clone());
    Ok(reply)
}
