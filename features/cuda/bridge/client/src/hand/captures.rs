//! Captures: whether there ever was one is known here, and who asks is answered here until then. What a capture waits for is given as a pointer to
//! an array that lives until the thread's next call.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vm_bridge::wire::{Reader, code, put};
use vm_cuda_api::FUNCTIONS;
use vm_cuda_api::names::is_per_thread;

use super::{the, the_form};

use crate::client::client;
use crate::forward;
use crate::sys::caller;

/// Did a capture ever begin in this process?
static ANY: AtomicBool = AtomicBool::new(false);
/// How many go on: no fewer than there are.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

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
    RUNNING.fetch_add(1, Ordering::SeqCst);
    forward::ask(number, words).inspect_err(|_| end())
}

/// One less.
fn end() {
    let less = |running: usize| running.checked_sub(1);
    // There may be none where the program ends what it has not begun.
    let _ = RUNNING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
}

pub(crate) fn cuStreamEndCapture(number: usize, words: &[usize]) -> Result<(), u32> {
    /// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED` and `…_UNJOINED`: it has ended without a graph.
    const ENDED: [u32; 2] = [901, 904];
    let result = forward::ask(number, words);
    if result.is_ok() || result.is_err_and(|code| ENDED.contains(&code)) {
        end();
    }
    result
}

/// Is a copy to or from a stream recorded?
pub(super) fn records(stream: usize, like: usize) -> Result<bool, u32> {
    const LEGACY: usize = 1;
    let is_legacy = stream == LEGACY || stream == 0 && !is_per_thread(&FUNCTIONS[like].name);
    if is_legacy || RUNNING.load(Ordering::SeqCst) == 0 {
        return Ok(false);
    }
    let mut status = 0u32;
    forward::ask(the_form("cuStreamIsCapturing", like)?, &[stream, &raw mut status as usize])?;
    Ok(status != 0)
}

/// Records a copy of memory that only this program has, a `CUDA_MEMCPY3D`: as a node that is put where the capture is.
pub(super) fn record(stream: usize, like: usize, copy: &[u64]) -> Result<(), u32> {
    const SET: usize = 1;
    let (mut status, mut graph, mut nodes, mut count) = (0u32, 0usize, 0usize, 0usize);
    let to = [
        &raw mut status as usize,
        0,
        &raw mut graph as usize,
        &raw mut nodes as usize,
        0,
        &raw mut count as usize,
    ];
    info(the_form("cuStreamGetCaptureInfo_v2", like)?, stream, to)?;
    let mut node = 0usize;
    let at = &raw mut node as usize;
    let context = crate::current::get() as usize;
    let words = [at, graph, nodes, count, copy.as_ptr() as usize, context];
    super::cuGraphAddMemcpyNode(the("cuGraphAddMemcpyNode")?, &words)?;
    forward::ask(the_form("cuStreamUpdateCaptureDependencies", like)?, &[stream, at, 1, SET])
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
