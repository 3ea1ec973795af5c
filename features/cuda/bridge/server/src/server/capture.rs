//! What a capture is waiting for: the driver returns an array of its own.

use vm_cuda_api::Object;

use super::lane::Call;
use super::pack::Refused;
use super::sys::{self, Word};
use crate::wire::{ITEMS, Reader, code, put, put_bytes};

/// Bytes of a `CUgraphEdgeData`.
const EDGE: usize = 8;

/// `cuStreamGetCaptureInfo_v2` and `_v3`: a stream, then what is wanted: status, id, graph, dependencies, with edges where there are any.
pub(super) fn info(
    call: &Call<'_>,
    mut reader: Reader<'_>,
    edges: bool,
    reply: &mut Vec<u8>,
) -> Result<u32, Refused> {
    let stream = call.session.handles().real(Object::Stream, reader.word()?)?;
    let mut memory = [0u64; 6];
    let mut words = vec![Word::Is(stream), Word::At(0), Word::At(1), Word::At(2), Word::At(3)];
    if edges {
        words.push(Word::At(4));
    }
    words.push(Word::At(5));
    let result = call.make(&words, &mut memory)?;
    let [status, id, graph, nodes, data, count] = memory;
    if result != 0 {
        return Ok(result);
    }
    let status = status & 0xffff_ffff;
    let count = if status == 1 { usize::try_from(count).unwrap_or(usize::MAX) } else { 0 };
    if count > ITEMS {
        return Err(code::INVALID_VALUE.into());
    }
    let mut handles = call.session.handles();
    put(reply, status);
    put(reply, id);
    put(reply, handles.give(Object::Graph, if status == 1 { graph } else { 0 })?);
    put(reply, count as u64);
    for node in sys::words(nodes, count) {
        put(reply, handles.give(Object::Node, node)?);
    }
    let data = if edges { sys::words(data, count * EDGE / 8) } else { Vec::new() };
    put(reply, data.len() as u64);
    data.iter().for_each(|word| put_bytes(reply, &word.to_ne_bytes()));
    Ok(0)
}
