//! Nodes of graphs by their parameters. A node reads and writes when its graph runs: memory that only this program has the server asks for then.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

use vm_bridge::wire::node::{
    self, ACCESS, ALLOCATION, AT, DESCRIPTION, DESCRIPTIONS, FILL, GRID, LEN, OPERATION, OPERATIONS,
};
use vm_bridge::wire::strided::{DEVICE, Form, HOST, UNIFIED};
use vm_bridge::wire::{Reader, code, put, put_bytes};
use vm_cuda_api::FUNCTIONS;

use super::launches::parameters;
use super::objects::fetch;
use super::{begin_calls, is_elsewhere, layout, shared_at};
use crate::client::{Client, client, locked};
use crate::known::Memory;
use crate::sys::caller;
use crate::{forward, pack, say};

/// Where what is of the kind begins in a `CUgraphNodeParams`.
const UNION: usize = 16;
/// Words of one.
const ANY: usize = 32;
/// Where in a `CUDA_KERNEL_NODE_PARAMS` the pointers to parameters are, those that are one buffer, and, in the second form, the kernel and the context.
const POINTERS: usize = 40;
const EXTRA: usize = 48;
const LIBRARY_KERNEL: usize = 56;
const CONTEXT: usize = 64;

/// Packs a kernel, whose structure ends earlier in its first form.
fn kernel(client: &Arc<Client>, at: usize, is_first: bool, to: &mut Vec<u8>) -> Result<(), u32> {
    let rest = |offset: usize| if is_first { 0 } else { caller::word(at + offset) };
    let id = match caller::word(at) {
        0 => rest(LIBRARY_KERNEL),
        function => function,
    };
    put(to, id);
    (1..=GRID).for_each(|word| put(to, caller::word(at + 8 * word)));
    put(to, rest(CONTEXT));
    let pointers = [POINTERS, EXTRA].map(|offset| caller::word(at + offset) as usize);
    parameters(client, id as usize, pointers, to)
}

fn copy(client: &Arc<Client>, at: usize, context: u64, to: &mut Vec<u8>) -> Result<(), u32> {
    let form = Form::Three;
    let mut copy: Vec<u64> = (0..form.words()).map(|word| caller::word(at + 8 * word)).collect();
    for (is_target, end) in [false, true].into_iter().zip(form.ends()) {
        if copy[end.kind] as u32 as u64 == UNIFIED {
            let device = is_elsewhere(client, copy[end.device] as usize);
            copy[end.kind] = if device { DEVICE } else { HOST };
            copy[end.host] = copy[end.device];
        }
        let extent = form.extent(&copy, is_target).ok_or(code::INVALID_VALUE)?;
        if copy[end.kind] as u32 as u64 != HOST {
            continue;
        }
        if let Some(shared) = shared_at(client, copy[end.host] as usize, extent as usize) {
            copy[end.host] = shared as u64;
        } else {
            begin_calls(client)?;
            if !is_target {
                client.fetches.store(true, SeqCst);
            }
        }
    }
    put(to, context);
    copy.iter().for_each(|word| put(to, *word));
    Ok(())
}

/// Packs what is put into a node: its kind, and the structure.
fn structure(client: &Arc<Client>, number: usize, at: usize, to: &mut Vec<u8>) -> Result<(), u32> {
    let name = &FUNCTIONS[number].name;
    if at == 0 {
        return Err(code::INVALID_VALUE);
    }
    let known = node::kind(name);
    let kind = known.unwrap_or_else(|| caller::half(at).into());
    let (is_any, at) = (known.is_none(), if known.is_none() { at + UNION } else { at });
    let kind = match kind {
        node::GRAPH => match caller::half(at + 8) {
            0 => node::GRAPH,
            1 => node::MOVED,
            _ => return Err(code::INVALID_VALUE),
        },
        kind => kind,
    };
    put(to, kind);
    match kind {
        node::KERNEL => kernel(client, at, !is_any && !name.ends_with("_v2"), to),
        // Flags, and the context, are before the copy.
        node::COPY if is_any => copy(client, at + 16, caller::word(at + 8), to),
        node::COPY => copy(client, at, 0, to),
        node::FILL_KIND => {
            (0..FILL).for_each(|word| put(to, caller::word(at + 8 * word)));
            put(to, if is_any { caller::word(at + 8 * FILL) } else { 0 });
            Ok(())
        }
        node::FUNCTION => {
            begin_calls(client)?;
            (0..2).for_each(|word| put(to, caller::word(at + 8 * word)));
            Ok(())
        }
        node::GRAPH | node::MOVED | node::WAIT | node::RECORD => {
            put(to, caller::word(at));
            Ok(())
        }
        node::EMPTY => Ok(()),
        node::ALLOCATE => {
            [0, 1, 3, 4].iter().for_each(|word| put(to, caller::word(at + 8 * word)));
            let (list, count) = (caller::word(at + 8 * ACCESS) as usize, caller::word(at + 8 * (ACCESS + 1)));
            if count > DESCRIPTIONS || (count > 0 && list == 0) {
                return Err(code::INVALID_VALUE);
            }
            put(to, count);
            put_bytes(to, caller::bytes(list, count as usize * DESCRIPTION));
            put(to, caller::word(at + 8 * LEN));
            Ok(())
        }
        node::FREE => {
            put(to, caller::word(at));
            Ok(())
        }
        node::VALUES => {
            let (count, list) = (caller::half(at + 8), caller::word(at + 16) as usize);
            if u64::from(count) > OPERATIONS || (count > 0 && list == 0) {
                return Err(code::INVALID_VALUE);
            }
            [caller::word(at), count.into(), caller::half(at + 24).into()]
                .iter()
                .for_each(|word| put(to, *word));
            put_bytes(to, caller::bytes(list, count as usize * 8 * OPERATION));
            Ok(())
        }
        node::CONDITIONAL => {
            [0, 1, 3].iter().for_each(|word| put(to, caller::word(at + 8 * word)));
            Ok(())
        }
        kind => {
            say::once(&format!("nodes of graphs of the kind {kind} are not supported"));
            Err(code::NOT_SUPPORTED)
        }
    }
}

fn set(number: usize, words: &[usize]) -> Result<(), u32> {
    let client = client()?;
    let at = FUNCTIONS[number].parameters.iter().position(|each| each.kind == vm_cuda_api::Kind::Other);
    let at = at.and_then(|at| words.get(at)).copied().ok_or(code::INVALID_VALUE)?;
    let mut payload = Vec::with_capacity(512);
    structure(&client, number, at, &mut payload)?;
    pack::request(number, words, &mut payload)?;
    let reply = client.ask(number, &payload, false)?;
    pack::answer(number, words, &reply)?;
    let name = &FUNCTIONS[number].name;
    if !name.starts_with("cuGraphAdd") {
        return Ok(());
    }
    let known = node::kind(name);
    returned(
        &client,
        words[1] as u64,
        known.unwrap_or_else(|| caller::half(at).into()),
        if known.is_none() { at + UNION } else { at },
        &reply,
    )
}

/// What was written into the structure of a new node: where its memory is, or its graphs, which stay where they are as long as it is there.
fn returned(client: &Client, graph: u64, kind: u64, at: usize, reply: &[u8]) -> Result<(), u32> {
    let words: Vec<u64> = reply.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    let (Some(first), Some(last)) = (words.first(), words.last()) else { return Ok(()) };
    match kind {
        node::ALLOCATE => {
            caller::write(at + 8 * AT, *last);
            let memory = Memory { len: caller::word(at + 8 * LEN), owners: [graph, 0], home: 0 };
            locked(&client.devices).insert(*last, memory);
        }
        node::CONDITIONAL => caller::write(at + 16, keep(*first as usize, &words[1..])),
        _ => {}
    }
    Ok(())
}

macro_rules! setters {
    ($($name:ident)*) => { $(pub(crate) fn $name(number: usize, words: &[usize]) -> Result<(), u32> { set(number, words) })* };
}

setters! {
    cuGraphAddKernelNode cuGraphAddKernelNode_v2 cuGraphKernelNodeSetParams cuGraphKernelNodeSetParams_v2 cuGraphExecKernelNodeSetParams
    cuGraphExecKernelNodeSetParams_v2 cuGraphAddMemcpyNode cuGraphMemcpyNodeSetParams cuGraphExecMemcpyNodeSetParams cuGraphAddMemsetNode
    cuGraphMemsetNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphAddHostNode cuGraphHostNodeSetParams cuGraphExecHostNodeSetParams
    cuGraphAddMemAllocNode cuGraphAddBatchMemOpNode cuGraphBatchMemOpNodeSetParams cuGraphExecBatchMemOpNodeSetParams
    cuGraphAddNode cuGraphAddNode_v2 cuGraphNodeSetParams cuGraphExecNodeSetParams
}

/// Parameters of a node's kernel, and pointers to each.
struct Shown {
    bytes: Box<[u8]>,
    pointers: Box<[u64]>,
}

/// Those that programs were shown, by the nodes: they stay until the node has others, or ends.
static SHOWN: Mutex<Option<HashMap<usize, Shown>>> = Mutex::new(None);

/// Where pointers to a node's parameters are.
fn show(node: usize, layout: &[(usize, usize)], bytes: &[u8]) -> u64 {
    if layout.is_empty() {
        return 0;
    }
    let mut all = locked(&SHOWN);
    let all = all.get_or_insert_default();
    let is_new = all.get(&node).is_none_or(|shown| *shown.bytes != *bytes);
    if is_new {
        let bytes: Box<[u8]> = bytes.into();
        let pointers = layout.iter().map(|(offset, _)| (bytes.as_ptr() as usize + offset) as u64).collect();
        all.insert(node, Shown { bytes, pointers });
    }
    all.get(&node).map_or(0, |shown| shown.pointers.as_ptr() as u64)
}

/// Words that a node has as long as it is there, or until others are.
fn keep(node: usize, words: &[u64]) -> u64 {
    if words.is_empty() {
        return 0;
    }
    let mut all = locked(&SHOWN);
    let shown = all.get_or_insert_default().entry(node);
    let shown = shown.or_insert_with(|| Shown { bytes: Box::default(), pointers: Box::default() });
    if *shown.pointers != *words {
        shown.pointers = words.into();
    }
    shown.pointers.as_ptr() as u64
}

/// A node's structure, in words, and those that it points to.
fn structure_of(number: usize, words: &[usize], len: usize) -> Result<(Vec<u64>, Vec<u64>), u32> {
    let [node, to] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let reply = client()?.ask(number, &(node as u64).to_ne_bytes(), false)?;
    let mut all: Vec<u64> = reply.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    if all.len() < len {
        return Err(code::UNAVAILABLE);
    }
    let behind = all.split_off(len);
    Ok((all, behind))
}

pub(crate) fn cuGraphMemAllocNodeGetParams(number: usize, words: &[usize]) -> Result<(), u32> {
    let (mut all, behind) = structure_of(number, words, ALLOCATION)?;
    all[ACCESS] = keep(words[0], &behind);
    all.iter().enumerate().for_each(|(at, word)| caller::write(words[1] + 8 * at, *word));
    Ok(())
}

pub(crate) fn cuGraphBatchMemOpNodeGetParams(number: usize, words: &[usize]) -> Result<(), u32> {
    let (all, behind) = structure_of(number, words, 3)?;
    let all = [all[0], all[1], keep(words[0], &behind), all[2]];
    all.iter().enumerate().for_each(|(at, word)| caller::write(words[1] + 8 * at, *word));
    Ok(())
}

/// A node's structure that says its kind: by the function of the kind.
pub(crate) fn cuGraphNodeGetParams(_: usize, words: &[usize]) -> Result<(), u32> {
    let [node, to] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let mut kind = 0u32;
    forward::ask(super::the("cuGraphNodeGetType")?, &[node, &raw mut kind as usize])?;
    let mut all = [0u64; ANY];
    all[0] = kind.into();
    let base = all.as_mut_ptr() as usize;
    let place = |word: usize| base + 8 * word;
    let (of, context) = (place(UNION / 8), crate::current::get());
    let by = |name: &str, of: usize| Ok::<_, u32>((super::the(name)?, [node, of]));
    match u64::from(kind) {
        node::KERNEL => {
            let (number, words) = by("cuGraphKernelNodeGetParams_v2", of)?;
            cuGraphKernelNodeGetParams_v2(number, &words)?;
        }
        node::COPY => {
            let (number, words) = by("cuGraphMemcpyNodeGetParams", of + 16)?;
            cuGraphMemcpyNodeGetParams(number, &words)?;
            caller::write(of + 8, context);
        }
        node::FILL_KIND => {
            let (number, words) = by("cuGraphMemsetNodeGetParams", of)?;
            forward::ask(number, &words)?;
            caller::write(of + 8 * FILL, context);
        }
        node::FUNCTION => {
            let (number, words) = by("cuGraphHostNodeGetParams", of)?;
            cuGraphHostNodeGetParams(number, &words)?;
        }
        node::ALLOCATE => {
            let (number, words) = by("cuGraphMemAllocNodeGetParams", of)?;
            cuGraphMemAllocNodeGetParams(number, &words)?;
        }
        node::VALUES => {
            let (number, words) = by("cuGraphBatchMemOpNodeGetParams", of)?;
            cuGraphBatchMemOpNodeGetParams(number, &words)?;
        }
        node::EMPTY => {}
        kind => {
            let name = match kind {
                node::GRAPH => "cuGraphChildGraphNodeGetGraph",
                node::WAIT => "cuGraphEventWaitNodeGetEvent",
                node::RECORD => "cuGraphEventRecordNodeGetEvent",
                node::FREE => "cuGraphMemFreeNodeGetParams",
                _ => return Err(code::NOT_SUPPORTED),
            };
            let (number, words) = by(name, of)?;
            forward::ask(number, &words)?;
        }
    }
    (0..ANY).for_each(|word| caller::write(to + 8 * word, caller::word(place(word))));
    Ok(())
}

fn kernel_of(number: usize, words: &[usize], is_first: bool) -> Result<(), u32> {
    let [node, to] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let client = client()?;
    let reply = client.ask(number, &(node as u64).to_ne_bytes(), false)?;
    let mut reader = Reader(&reply);
    let mut word = || reader.word().map_err(|_| code::UNAVAILABLE);
    let function = word()?;
    let grid = (0..GRID).map(|_| word()).collect::<Result<Vec<_>, _>>()?;
    let (kernel, context) = (word()?, word()?);
    let layout = layout(&client, if function == 0 { kernel } else { function })?;
    let end = layout.iter().map(|(offset, size)| offset + size).max().unwrap_or(0);
    let bytes = reader.bytes(end).map_err(|_| code::UNAVAILABLE)?;
    caller::write(to, function);
    // The last of these words is a number of 32 bits.
    for (at, word) in grid.iter().enumerate() {
        caller::write_bytes(to + 8 + 8 * at, &word.to_ne_bytes()[..if at + 1 == GRID { 4 } else { 8 }]);
    }
    caller::write(to + POINTERS, show(node, &layout, bytes));
    caller::write(to + EXTRA, 0);
    if !is_first {
        caller::write(to + LIBRARY_KERNEL, kernel);
        caller::write(to + CONTEXT, context);
    }
    Ok(())
}

pub(crate) fn cuGraphKernelNodeGetParams(number: usize, words: &[usize]) -> Result<(), u32> {
    kernel_of(number, words, true)
}

pub(crate) fn cuGraphKernelNodeGetParams_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    kernel_of(number, words, false)
}

/// Asks for so many words of a node.
fn words_of(number: usize, words: &[usize], count: usize) -> Result<(), u32> {
    let [node, to] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let reply = client()?.ask(number, &(node as u64).to_ne_bytes(), false)?;
    caller::write_bytes(to, reply.get(..8 * count).ok_or(code::UNAVAILABLE)?);
    Ok(())
}

pub(crate) fn cuGraphMemcpyNodeGetParams(number: usize, words: &[usize]) -> Result<(), u32> {
    words_of(number, words, Form::Three.words())
}

pub(crate) fn cuGraphHostNodeGetParams(number: usize, words: &[usize]) -> Result<(), u32> {
    words_of(number, words, 2)
}

/// Asks what is answered with the driver's result, then what is there in either case.
fn ask_result<const N: usize>(number: usize, payload: &[u64]) -> Result<(u32, [u64; N]), u32> {
    let mut bytes = Vec::new();
    payload.iter().for_each(|word| put(&mut bytes, *word));
    let reply = client()?.ask(number, &bytes, false)?;
    let mut reader = Reader(&reply);
    let result = reader.word().map_err(|_| code::UNAVAILABLE)? as u32;
    let mut words = [0; N];
    for word in &mut words {
        *word = reader.word().map_err(|_| code::UNAVAILABLE)?;
    }
    Ok((result, words))
}

/// The driver's result.
fn told(result: u32) -> Result<(), u32> {
    if result == 0 { Ok(()) } else { Err(result) }
}

pub(crate) fn cuGraphExecUpdate(number: usize, words: &[usize]) -> Result<(), u32> {
    let [exec, graph, node_to, result_to] = *words else { return Err(code::INVALID_VALUE) };
    let (result, [why, node, _]) = ask_result(number, &[exec as u64, graph as u64])?;
    caller::write(node_to, node);
    caller::write_half(result_to, why as u32);
    told(result)
}

pub(crate) fn cuGraphExecUpdate_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    let [exec, graph, to] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let (result, [why, node, from]) = ask_result(number, &[exec as u64, graph as u64])?;
    caller::write_half(to, why as u32);
    caller::write(to + 8, node);
    caller::write(to + 16, from);
    told(result)
}

pub(crate) fn cuGraphInstantiateWithParams(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, graph, at] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 || at == 0 {
        return Err(code::INVALID_VALUE);
    }
    let payload = [graph as u64, caller::word(at), caller::word(at + 8)];
    let (result, [exec, node, why]) = ask_result(number, &payload)?;
    caller::write(at + 16, node);
    caller::write_half(at + 24, why as u32);
    told(result)?;
    caller::write(to, exec);
    Ok(())
}

pub(crate) fn cuGraphDebugDotPrint(number: usize, words: &[usize]) -> Result<(), u32> {
    let [graph, path, flags] = *words else { return Err(code::INVALID_VALUE) };
    let path = caller::text(path).ok_or(code::INVALID_VALUE)?;
    let mut payload = Vec::new();
    put(&mut payload, graph as u64);
    put(&mut payload, flags as u32 as u64);
    let client = client()?;
    let reply = client.ask(number, &payload, false)?;
    let len = Reader(&reply).word().map_err(|_| code::UNAVAILABLE)? as usize;
    let text = fetch(&client, len)?;
    std::fs::write(OsStr::from_bytes(&path[..path.len() - 1]), text).map_err(|_| code::OPERATING_SYSTEM)
}

/// What programs were shown of these nodes is no more.
fn hide(nodes: &[usize]) {
    if let Some(all) = &mut *locked(&SHOWN) {
        nodes.iter().for_each(|node| drop(all.remove(node)));
    }
}

pub(crate) fn cuGraphDestroyNode(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    hide(words);
    Ok(())
}

pub(crate) fn cuGraphDestroy(number: usize, words: &[usize]) -> Result<(), u32> {
    let nodes = if locked(&SHOWN).as_ref().is_some_and(|all| !all.is_empty()) {
        nodes_of(words[0]).unwrap_or_default()
    } else {
        Vec::new()
    };
    forward::ask(number, words)?;
    hide(&nodes);
    Ok(())
}

/// The nodes of a graph.
fn nodes_of(graph: usize) -> Result<Vec<usize>, u32> {
    let number = super::the("cuGraphGetNodes")?;
    let mut count = 0usize;
    forward::ask(number, &[graph, 0, &raw mut count as usize])?;
    let mut nodes = vec![0; count];
    forward::ask(number, &[graph, nodes.as_mut_ptr() as usize, &raw mut count as usize])?;
    Ok(nodes)
}

/// What is launched is waited for once a graph may read memory which only this program has: that is read when its node runs, and natively before the launch returns.
pub(crate) fn cuGraphLaunch(number: usize, words: &[usize]) -> Result<(), u32> {
    if client()?.fetches.load(SeqCst) { forward::wait(number, words) } else { forward::post(number, words) }
}
