//! Calls that the table packs.

use std::sync::Arc;

use vm_bridge::wire::{code, put};
use vm_cuda_api::{FUNCTIONS, Kind, Object};

use crate::client::{Client, client, locked};
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
    let client = client()?;
    client.post(number, &payload)?;
    learn(&client, number, &payload, &[]);
    Ok(())
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
    let client = client()?;
    let reply = client.ask(number, &payload, waits)?;
    learn(&client, number, &payload, &reply);
    pack::answer(number, words, &reply)
}

/// Updates the cache after a call that succeeded: with the object that it has ended, or the owners of those that it has returned.
fn learn(client: &Client, number: usize, payload: &[u8], reply: &[u8]) {
    let Some(function) = FUNCTIONS.get(number) else { return };
    let head = |at: usize| payload.as_chunks().0.get(at).map_or(0, |word| u64::from_ne_bytes(*word));
    match function.parameters.first().map(|parameter| parameter.kind) {
        // Their handles may equal those of other objects, and nothing is cached of them.
        Some(Kind::Drop(Object::Texture | Object::Surface)) => {}
        Some(Kind::Drop(Object::Context)) => client.end_context(head(0)),
        Some(Kind::Drop(_)) => client.end_object(head(0)),
        _ => {}
    }
    if let (Some(owner), Some((_, returned))) =
        (function.owner, function.owner.and_then(|_| function.returned()))
    {
        let context = if returned.is_of_context() { current::get() } else { 0 };
        // The reply has handles alone.
        for object in reply.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)) {
            client.own([head(owner), context], object);
        }
    }
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
    let client = client()?;
    let of = object(number, &payload);
    let len = payload.len();
    let mut question = payload;
    put(&mut question, number as u64);
    put(&mut question, current::get());
    if let Some(reply) = locked(&client.known).answer(of, &question) {
        return Ok(reply);
    }
    let reply: Arc<[u8]> = client.ask(number, &question[..len], false)?.into();
    learn(&client, number, &question[..len], &reply);
    locked(&client.known).keep(of, question, reply.clone());
    Ok(reply)
}

/// Returns the object that a question is about: its first handle, or else the current context.
fn object(number: usize, payload: &[u8]) -> u64 {
    let parameters = FUNCTIONS.get(number).map_or(&[][..], |function| &function.parameters);
    let mut words = payload.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
    let handle = parameters.iter().position(|parameter| matches!(parameter.kind, Kind::Handle(_)));
    handle.and_then(|at| words.nth(at)).unwrap_or_else(current::get)
}
