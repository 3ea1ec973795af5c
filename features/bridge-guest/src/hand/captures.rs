//! What a capture waits for: the caller gets a pointer to an array that lives until the thread's next call.

use std::cell::RefCell;

use vm_bridge::wire::{Reader, code, put};

use crate::client::client;
use crate::sys::caller;

thread_local! {
    static ARRAYS: RefCell<(Vec<u64>, Vec<u64>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Where what is wanted goes: status, id, graph, nodes, edges, count.
fn info(number: usize, stream: usize, to: [usize; 6]) -> Result<(), u32> {
    let mut payload = Vec::new();
    put(&mut payload, stream as u64);
    let reply = client()?.ask(number, &payload, false)?;
    let mut reader = Reader(&reply);
    let mut word = || reader.word().map_err(|_| code::UNAVAILABLE);
    let (status, id, graph, count) = (word()?, word()?, word()?, word()? as usize);
    let nodes = (0..count).map(|_| word()).collect::<Result<Vec<_>, _>>()?;
    let edges = word()? as usize;
    let edges = (0..edges).map(|_| word()).collect::<Result<Vec<_>, _>>()?;
    let [status_to, id_to, graph_to, nodes_to, edges_to, count_to] = to;
    caller::write_half(status_to, status as u32);
    let address = |array: &Vec<u64>| if array.is_empty() { 0 } else { array.as_ptr() as u64 };
    ARRAYS.with_borrow_mut(|arrays| {
        *arrays = (nodes, edges);
        caller::write(nodes_to, address(&arrays.0));
        caller::write(edges_to, address(&arrays.1));
    });
    caller::write(id_to, id);
    caller::write(graph_to, graph);
    caller::write(count_to, count as u64);
    Ok(())
}

pub(crate) fn cuStreamGetCaptureInfo_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    let [stream, status, id, graph, nodes, count] = *words else { return Err(code::INVALID_VALUE) };
    info(number, stream, [status, id, graph, nodes, 0, count])
}

pub(crate) fn cuStreamGetCaptureInfo_v3(number: usize, words: &[usize]) -> Result<(), u32> {
    let [stream, status, id, graph, nodes, edges, count] = *words else { return Err(code::INVALID_VALUE) };
    info(number, stream, [status, id, graph, nodes, edges, count])
}
