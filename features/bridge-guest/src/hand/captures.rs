//! Captures: whether there ever was one is known here, and who asks is answered here until then. What a capture waits for is given as a pointer to
//! an array that lives until the thread's next call.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};

use vm_bridge::wire::{Reader, code, put};

use crate::client::client;
use crate::forward;
use crate::sys::caller;

/// Did a capture ever begin in this process?
static ANY: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// This thread's mode: `CU_STREAM_CAPTURE_MODE_GLOBAL` at first.
    static MODE: Cell<u32> = const { Cell::new(0) };
    static ARRAYS: RefCell<(Vec<u64>, Vec<u64>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Where what is wanted goes: status, id, graph, nodes, edges, count.
fn info(number: usize, stream: usize, to: [usize; 6]) -> Result<(), u32> {
    if !ANY.load(Ordering::SeqCst) && crate::current::get() != 0 && to[0] != 0 {
        caller::write_half(to[0], 0);
        return Ok(());
    }
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

fn begin(number: usize, words: &[usize]) -> Result<(), u32> {
    ANY.store(true, Ordering::SeqCst);
    forward::ask(number, words)
}

pub(crate) fn cuStreamBeginCapture(number: usize, words: &[usize]) -> Result<(), u32> {
    begin(number, words)
}

pub(crate) fn cuStreamBeginCapture_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    begin(number, words)
}

pub(crate) fn cuStreamBeginCaptureToGraph(number: usize, words: &[usize]) -> Result<(), u32> {
    begin(number, words)
}

/// A stream's status; with no capture ever, a handle that is none is not noticed.
fn status(number: usize, words: &[usize]) -> Result<(), u32> {
    if words[1] == 0 {
        return Err(code::INVALID_VALUE);
    }
    if ANY.load(Ordering::SeqCst) || crate::current::get() == 0 {
        return forward::ask(number, words);
    }
    caller::write_half(words[1], 0);
    Ok(())
}

pub(crate) fn cuStreamIsCapturing(number: usize, words: &[usize]) -> Result<(), u32> {
    status(number, words)
}

pub(crate) fn cuStreamGetCaptureInfo(number: usize, words: &[usize]) -> Result<(), u32> {
    status(number, words)
}

pub(crate) fn cuThreadExchangeStreamCaptureMode(number: usize, words: &[usize]) -> Result<(), u32> {
    /// `CU_STREAM_CAPTURE_MODE_RELAXED`, the last.
    const LAST: u32 = 2;
    if words[0] == 0 || caller::half(words[0]) > LAST {
        return forward::ask(number, words);
    }
    forward::post(number, words)?;
    let old = MODE.replace(caller::half(words[0]));
    caller::write_half(words[0], old);
    Ok(())
}
