//! Nodes of graphs that allocate memory, that wait for values of it, and whose graphs run as a condition says; and attributes of kernels' nodes.
//!
//! | kind | words, behind it |
//! | --- | --- |
//! | allocation | what is allocated and where, flags, how many descriptions of access, these, how many bytes |
//! | free | address |
//! | values | context, how many operations, flags, these |
//! | condition | its handle, what it is and how many graphs it has, context |
//!
//! A condition's handle is the driver's own, as kernels are given it.

use std::collections::HashMap;

use vm_cuda_api::{FUNCTIONS, Object};

use super::hand::Parts;
use super::host::cost;
use super::lane::Call;
use super::nodes::{Made, is_any};
use super::pack::{self, Refused};
use super::reach::reach;
use super::sys::{self, Word};
use crate::wire::node::{
    ACCESS, ALLOCATE, ALLOCATION, AT, CONDITIONAL, DESCRIPTION, DESCRIPTIONS, LEN, OPERATION, OPERATIONS,
    PLAIN,
};
use crate::wire::{ITEMS, Reader, code, put, put_bytes};

/// Bytes of an operation of a node, and of all descriptions of access that an allocation may have.
pub(super) const OPERATION_BYTES: u64 = 8 * OPERATION as u64;
pub(super) const ALLOCATION_BYTES: u64 = DESCRIPTIONS * DESCRIPTION as u64;

/// What the driver does not tell of conditions.
#[derive(Debug, Default)]
pub(super) struct Conditions {
    /// The graphs of each node.
    pub(super) graphs: HashMap<u64, Vec<u64>>,
    /// The handles of each graph.
    handles: HashMap<u64, Vec<u64>>,
}

impl Conditions {
    /// A node or a graph has ended: the handles that end with it.
    pub(super) fn end(&mut self, object: Object, real: u64) -> Vec<u64> {
        match object {
            Object::Graph => self.handles.remove(&real).unwrap_or_default(),
            _ => {
                self.graphs.remove(&real);
                Vec::new()
            }
        }
    }
}

pub(super) fn allocation(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Made, Refused> {
    // What a graph has the driver keeps, and does not tell.
    if call.session.quota().is_limited() {
        return Err(code::NOT_SUPPORTED.into());
    }
    let mut words = vec![0; ALLOCATION];
    words[0] = reader.word()?;
    words[1] = reader.word()?;
    // Flags for what is beside the memory; security and names are for handles, which it has not.
    words[3] = reader.word()?;
    words[4] = reader.word()? & 0xffff;
    let count = reader.word()?;
    if count > DESCRIPTIONS {
        return Err(Refused::Malformed);
    }
    let bytes = reader.bytes(count as usize * DESCRIPTION)?;
    (words[ACCESS + 1], words[LEN]) = (count, reader.word()?);
    let mut made = Made::plain(words);
    made.bytes = ALLOCATION_BYTES;
    if count > 0 {
        let mut memory = Vec::new();
        pack::append(&mut memory, bytes);
        made.behind = Some((memory, 0, ACCESS));
    }
    Ok(made)
}

/// Reads as many `CUstreamBatchMemOpParams`, and checks their addresses.
fn operations(call: &Call<'_>, reader: &mut Reader<'_>, count: u64) -> Result<Vec<u64>, Refused> {
    /// `CU_STREAM_MEM_OP_…`: those with an address, by how many bytes it is of, and those without. The driver does not know others.
    const FOUR: [u64; 2] = [1, 2];
    const EIGHT: [u64; 2] = [4, 5];
    const NONE: [u64; 2] = [3, 6];
    if count > OPERATIONS {
        return Err(code::INVALID_VALUE.into());
    }
    let mut memory = Vec::new();
    pack::append(&mut memory, reader.bytes(8 * OPERATION * count as usize)?);
    for operation in memory.chunks(OPERATION) {
        let len = match operation[0] & 0xffff_ffff {
            kind if FOUR.contains(&kind) => 4,
            kind if EIGHT.contains(&kind) => 8,
            kind if NONE.contains(&kind) => 0,
            _ => return Err(code::NOT_SUPPORTED.into()),
        };
        reach(call.session, operation[1], Some(len))?;
    }
    Ok(memory)
}

/// Payload: a stream, the number of operations, whether the array is there, flags, and the operations.
pub(super) fn batch(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let mut reader = parts.reader;
    let (_, count, is_there, _) = (reader.word()?, reader.word()?, reader.word()?, reader.word()?);
    if is_there != 0 {
        operations(call, &mut reader, count)?;
    }
    pack::make(call.session, call.number, parts.reader.0, parts.reply)
}

pub(super) fn values(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Made, Refused> {
    let (context, count, flags) = (reader.word()?, reader.word()?, reader.word()?);
    let memory = operations(call, reader, count)?;
    let context = call.session.handles().real(Object::Context, context)?;
    let mut made = Made::plain(vec![context, count, 0, flags & 0xffff_ffff]);
    (made.behind, made.bytes) = (Some((memory, 0, 2)), OPERATION_BYTES * count);
    Ok(made)
}

pub(super) fn conditional(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Made, Refused> {
    let (handle, what, context) = (reader.word()?, reader.word()?, reader.word()?);
    if what >> 32 > ITEMS as u64 {
        return Err(code::INVALID_VALUE.into());
    }
    let handles = call.session.handles();
    let handle = handles.real(Object::Conditional, handle)?;
    let mut made = Made::plain(vec![handle, what, 0, handles.real(Object::Context, context)?]);
    // The driver makes the graphs.
    made.bytes = cost(Object::Graph) * (what >> 32);
    Ok(made)
}

/// What the driver wrote into the structure of a node that it has added: where memory is, or graphs.
pub(super) fn returned(call: &Call<'_>, kind: u64, of: &[u64], reply: &mut Vec<u8>) -> Result<(), Refused> {
    let node = Reader(reply).word().unwrap_or(0);
    match kind {
        ALLOCATE => {
            call.session.ranges().add(of[AT], of[LEN]);
            put(reply, of[AT]);
        }
        CONDITIONAL => {
            let graphs = sys::words(of[2], (of[1] >> 32) as usize);
            let mut handles = call.session.handles();
            let node = handles.real(Object::Node, node)?;
            for graph in &graphs {
                put(reply, handles.give(Object::Graph, *graph)?);
            }
            drop(handles);
            call.session.conditions().graphs.insert(node, graphs);
        }
        _ => {}
    }
    Ok(())
}

/// A handle of a condition.
pub(super) fn condition(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let mut reader = parts.reader;
    reader.word()?;
    let graph = call.session.handles().real(Object::Graph, reader.word()?)?;
    let result = pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    if let (0, Ok(handle)) = (result, Reader(parts.reply).word()) {
        call.session.conditions().handles.entry(graph).or_default().push(handle);
    }
    Ok(result)
}

/// A node or a stream, and an attribute: those alone that have neither handles nor addresses of the host.
pub(super) fn attribute(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let mut reader = parts.reader;
    reader.word()?;
    if !PLAIN.contains(&(reader.word()? as u32)) {
        return Err(code::NOT_SUPPORTED.into());
    }
    pack::make(call.session, call.number, parts.reader.0, parts.reply)
}

/// Asks for a node's structure.
fn ask(call: &Call<'_>, mut reader: Reader<'_>, len: usize) -> Result<(u32, Vec<u64>), Refused> {
    let node = call.session.handles().real(Object::Node, reader.word()?)?;
    let mut memory = vec![0; len];
    let result = call.make(&[Word::Is(node), Word::At(0)], &mut memory)?;
    Ok((result, memory))
}

/// A node: what it allocates, then descriptions of access.
pub(super) fn allocation_of(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let (result, mut words) = ask(call, parts.reader, ALLOCATION)?;
    if result == 0 {
        let count = if words[ACCESS] == 0 { 0 } else { words[ACCESS + 1].min(DESCRIPTIONS) };
        let bytes = sys::bytes(words[ACCESS], count as usize * DESCRIPTION);
        // Security is memory of this process, if anything.
        (words[2], words[ACCESS], words[ACCESS + 1]) = (0, 0, count);
        words.iter().for_each(|word| put(parts.reply, *word));
        put_bytes(parts.reply, &bytes);
    }
    Ok(result)
}

/// A node: its context, how many operations, flags, these.
pub(super) fn values_of(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let (result, words) = ask(call, parts.reader, 4)?;
    if result == 0 {
        let count = (words[1] & 0xffff_ffff).min(OPERATIONS);
        put(parts.reply, call.session.handles().give(Object::Context, words[0])?);
        put(parts.reply, count);
        put(parts.reply, words[3]);
        sys::words(words[2], OPERATION * count as usize).iter().for_each(|word| put(parts.reply, *word));
    }
    Ok(result)
}

/// Is it a call that adds a node?
pub(super) fn adds(call: &Call<'_>) -> bool {
    FUNCTIONS[call.number].name.starts_with("cuGraphAdd")
}

/// What is of the kind in a structure.
pub(super) fn of_kind<'a>(call: &Call<'_>, words: &'a [u64], head: usize) -> &'a [u64] {
    &words[if is_any(call) { head } else { 0 }..]
}
