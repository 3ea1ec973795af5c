//! Graphs: their nodes, what runs of them, and objects that they keep.

use super::{Out, api, give, put, read, stream, text};
use crate::{
    conditional::{self, How},
    copy::{Copy, Fill},
    error::{Error, Result},
    exec,
    ffi::{AnyNode, Copy3d, FillNode, HostNode, Instantiate, KernelNode, KernelNode2, Update},
    graph::{self, Task},
    graph_memory::Wanted,
    module::{self, Request},
    state,
    stream::Work,
    sys::{self, HostFunction},
    user_object,
};

/// The most that a list may have.
const MOST: usize = 1 << 20;
/// Bytes before what is of the kind.
const HEAD: usize = 16;

/// Handles that a pointer points to.
pub(super) fn list(at: *const u64, count: usize) -> Result<Vec<u64>> {
    if count > MOST {
        return Err(Error::InvalidValue);
    }
    (0..count).map(|index| sys::read_at(at, index).ok_or(Error::InvalidValue)).collect()
}

/// Says how many there are, or fills a list with as many as it has room for.
fn put_list(at: [*mut u64; 2], count: *mut usize, values: &[(u64, u64)]) -> Result {
    let room = sys::read(count.cast_const()).ok_or(Error::InvalidValue)?;
    if at.iter().all(|at| at.is_null()) {
        return sys::write(count, values.len()).ok_or(Error::InvalidValue);
    }
    for index in 0..room.min(MOST) {
        let (one, two) = values.get(index).copied().unwrap_or((0, 0));
        // Only edges have a second list.
        for (at, value) in at.into_iter().zip([one, two]).filter(|(at, _)| !at.is_null()) {
            let _ = sys::write(at.wrapping_add(index), value);
        }
    }
    sys::write(count, values.len().min(room)).ok_or(Error::InvalidValue)
}

fn put_nodes(at: *mut u64, count: *mut usize, nodes: &[u64]) -> Result {
    let nodes: Vec<_> = nodes.iter().map(|node| (*node, 0)).collect();
    put_list([at, std::ptr::null_mut()], count, &nodes)
}

/// Says of edges that there is nothing to say.
fn put_data(at: *mut u64, count: *mut usize) {
    for index in 0..sys::read(count.cast_const()).unwrap_or(0).min(MOST) {
        // Null where nobody asks.
        let _ = if at.is_null() { None } else { sys::write(at.wrapping_add(index), 0) };
    }
}

fn kernel(KernelNode2 { first, kernel, context }: KernelNode2) -> Result<Task> {
    let KernelNode { function, grid, block, shared, parameters, extra } = first;
    if context != 0 {
        crate::context::device_of(context)?;
    }
    let function = if function == 0 { kernel } else { function };
    let request = Request { function, grid, block, shared, stream: 0, cooperative: false, parameters, extra };
    Ok(Task::Kernel(module::prepare(&request)?))
}

fn kernel_at(at: *const KernelNode) -> Result<Task> {
    kernel(KernelNode2 { first: read(at)?, kernel: 0, context: 0 })
}

fn copy_at(at: *const Copy3d) -> Result<Task> {
    Ok(Task::Copy(Copy::of_3d(&read(at)?, false)?))
}

fn fill_at(at: *const FillNode) -> Result<Task> {
    let FillNode { at, pitch, value, unit, width, height } = read(at)?;
    if at < sys::LOWEST || ![1, 2, 4].contains(&unit) || width == 0 || height == 0 {
        return Err(Error::InvalidValue);
    }
    let fill = Fill { at, pitch, value, unit: unit as usize, width, height };
    fill.check()?;
    Ok(Task::Fill(fill))
}

fn host_at(at: *const HostNode) -> Result<Task> {
    let HostNode { function, data } = sys::host_node(at).ok_or(Error::InvalidValue)?;
    Ok(Task::Host { function: function.ok_or(Error::InvalidValue)?, data })
}

/// The task of a structure that says its kind.
fn any_at(at: *const AnyNode) -> Result<Task> {
    let kind = read(at)?.kind;
    let rest = at.wrapping_byte_add(HEAD);
    let word = || read(rest.cast::<u64>());
    match kind {
        0 => kernel(read(rest.cast())?),
        // Flags and the context are before the copy.
        1 => copy_at(rest.wrapping_byte_add(16).cast()),
        2 => fill_at(rest.cast()),
        3 => host_at(rest.cast()),
        // The ownership is behind the graph.
        4 => match sys::read_at(rest.cast::<u32>(), 2) {
            Some(0) => Ok(Task::Graph(word()?)),
            Some(1) => Ok(Task::Moved(word()?)),
            _ => Err(Error::InvalidValue),
        },
        5 => Ok(Task::Nothing),
        6 => Ok(Task::Wait(word()?)),
        7 => Ok(Task::Record(word()?)),
        11 => graph::freed(word()?),
        12 => values_at(rest.cast()),
        13 => {
            let word = |index| sys::read_at(rest.cast::<u64>(), index).ok_or(Error::InvalidValue);
            let (kind, count) = (word(1)? as u32, (word(1)? >> 32) as usize);
            let graphs = vec![0; Some(count).filter(|count| *count <= MOST).ok_or(Error::InvalidValue)?];
            Ok(Task::Conditional { handle: word(0)?, how: How::named(kind)?, graphs })
        }
        _ => Err(Error::NotSupported),
    }
}

/// What a `CUDA_BATCH_MEM_OP_NODE_PARAMS` says.
fn values_at(at: *const u64) -> Result<Task> {
    let word = |index| sys::read_at(at, index).ok_or(Error::InvalidValue);
    let (context, count, operations, flags) =
        (word(0)?, word(1)? as u32 as usize, word(2)? as usize, word(3)? as u32);
    if count == 0 || count > MOST || flags != 0 {
        return Err(Error::InvalidValue);
    }
    if context != 0 {
        crate::context::device_of(context)?;
    }
    let words = list(std::ptr::with_exposed_provenance(operations), 6 * count)?;
    let operations = words.as_chunks().0.to_vec();
    exec::works(&operations)?;
    Ok(Task::Values { context, operations, flags })
}

fn values_of(node: u64, to: *mut u64) -> Result {
    let Task::Values { context, operations, flags } = graph::task(node)? else {
        return Err(Error::InvalidValue);
    };
    let words = [context, operations.len() as u64, graph::listed(node)?, flags.into()];
    (0..4).try_for_each(|at| sys::write(to.wrapping_add(at), words[at]).ok_or(Error::InvalidValue))
}

/// Words of a `CUDA_MEM_ALLOC_NODE_PARAMS`: access descriptions, how many, how much, and where it is.
const ACCESS: usize = 11;
const LEN: usize = 13;
const AT: usize = 14;

fn wanted_at(at: *const u64) -> Result<Wanted> {
    const PINNED: u64 = 1;
    const DEVICE: u64 = 1;
    let word = |index| sys::read_at(at, index).ok_or(Error::InvalidValue);
    let (location, len) = (word(1)?, word(LEN)?);
    if word(0)? != PINNED || location & 0xffff_ffff != DEVICE || len == 0 {
        return Err(Error::InvalidValue);
    }
    let device = state::lock().device((location >> 32) as i32)?;
    Ok(Wanted { device, len })
}

/// Adds a node that allocates, and says where.
fn add_memory(node: Out<u64>, graph: u64, behind: *const u64, count: usize, params: *mut u64) -> Result {
    let wanted = wanted_at(params.cast_const())?;
    give(node, || {
        let (node, at) = graph::add_memory(graph, list(behind, count)?, wanted)?;
        sys::write(params.wrapping_add(AT), at).ok_or(Error::InvalidValue)?;
        Ok(node)
    })
}

/// Adds a node of a structure that says its kind, and writes there what comes of it.
fn add_any(node: Out<u64>, graph: u64, behind: *const u64, count: usize, params: *mut AnyNode) -> Result {
    let rest = params.wrapping_byte_add(HEAD).cast::<u64>();
    match read(params.cast_const())?.kind {
        10 => add_memory(node, graph, behind, count, rest),
        13 => give(node, || {
            let node = graph::add(graph, list(behind, count)?, any_at(params.cast_const())?)?;
            sys::write(rest.wrapping_add(2), graph::listed(node)?).ok_or(Error::InvalidValue)?;
            Ok(node)
        }),
        _ => add(node, graph, behind, count, || any_at(params.cast_const())),
    }
}

/// Adds a node.
fn add(
    node: Out<u64>,
    hGraph: u64,
    behind: *const u64,
    count: usize,
    task: impl FnOnce() -> Result<Task>,
) -> Result {
    give(node, || graph::add(hGraph, list(behind, count)?, task()?))
}

/// Returns the parameters of a kernel node. A kernel of a library is in `kernel`, and a function in `first.function`.
fn kernel_of(node: u64) -> Result<KernelNode2> {
    let Task::Kernel(launch) = graph::task(node)? else { return Err(Error::InvalidValue) };
    let (grid, block, shared) = (launch.grid, launch.block, launch.shared);
    let parameters = graph::pointers(node)?;
    let (function, kernel) = match state::lock().is_of_library(launch.function) {
        true => (0, launch.function),
        false => (launch.function, 0),
    };
    let first = KernelNode { function, grid, block, shared, parameters, extra: std::ptr::null() };
    Ok(KernelNode2 { first, kernel, context: 0 })
}

fn event_of(node: u64, records: bool) -> Result<u64> {
    match graph::task(node)? {
        Task::Record(event) if records => Ok(event),
        Task::Wait(event) if !records => Ok(event),
        _ => Err(Error::InvalidValue),
    }
}

api! {
    10000 fn cuGraphCreate(phGraph: Out<u64>, flags: u32) {
        if flags != 0 {
            return Err(Error::InvalidValue);
        }
        give(phGraph, || Ok(graph::create()))
    }
    10000 fn cuGraphDestroy(hGraph: u64) { graph::destroy(hGraph) }
    10000 fn cuGraphClone(clone: Out<u64>, hGraph: u64) { give(clone, || graph::copy(hGraph)) }
    10000 fn cuGraphNodeFindInClone(node: Out<u64>, original: u64, clone: u64) {
        give(node, || graph::find(original, clone))
    }
    10000 fn cuGraphAddKernelNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, params: *const KernelNode) {
        add(node, hGraph, behind, count, || kernel_at(params))
    }
    12000 fn cuGraphAddKernelNode_v2(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, params: *const KernelNode2) {
        add(node, hGraph, behind, count, || kernel(read(params)?))
    }
    10000 fn cuGraphAddMemcpyNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, params: *const Copy3d, context: u64) {
        crate::context::device_of(context)?;
        add(node, hGraph, behind, count, || copy_at(params))
    }
    10000 fn cuGraphAddMemsetNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, params: *const FillNode, context: u64) {
        crate::context::device_of(context)?;
        add(node, hGraph, behind, count, || fill_at(params))
    }
    10000 fn cuGraphAddHostNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, params: *const HostNode) {
        add(node, hGraph, behind, count, || host_at(params))
    }
    10000 fn cuGraphAddChildGraphNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, child: u64) {
        add(node, hGraph, behind, count, || Ok(Task::Graph(child)))
    }
    10000 fn cuGraphAddEmptyNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize) {
        add(node, hGraph, behind, count, || Ok(Task::Nothing))
    }
    11010 fn cuGraphAddEventRecordNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, event: u64) {
        add(node, hGraph, behind, count, || Ok(Task::Record(event)))
    }
    11010 fn cuGraphAddEventWaitNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, event: u64) {
        add(node, hGraph, behind, count, || Ok(Task::Wait(event)))
    }
    12020 fn cuGraphAddNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, params: *mut AnyNode) {
        add_any(node, hGraph, behind, count, params)
    }
    12030 fn cuGraphAddNode_v2(node: Out<u64>, hGraph: u64, behind: *const u64, data: *const u64, count: usize, params: *mut AnyNode) {
        let _ = data;
        add_any(node, hGraph, behind, count, params)
    }
    11040 fn cuGraphAddMemAllocNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, params: *mut u64) {
        add_memory(node, hGraph, behind, count, params)
    }
    // Graphs cache no freed memory.
    11040 fn cuDeviceGraphMemTrim(device: i32) { state::lock().device(device).map(drop) }
    11040 fn cuGraphMemAllocNodeGetParams(node: u64, params: *mut u64) {
        let (at, wanted) = graph::memory(node)?;
        let mut words = [0; AT + 1];
        (words[0], words[1]) = (1, 1 | (wanted.device as u64) << 32);
        (words[ACCESS], words[LEN], words[AT]) = (0, wanted.len, at);
        (0..words.len()).try_for_each(|at| sys::write(params.wrapping_add(at), words[at]).ok_or(Error::InvalidValue))
    }
    11040 fn cuGraphAddMemFreeNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, dptr: u64) {
        add(node, hGraph, behind, count, || graph::freed(dptr))
    }
    11040 fn cuGraphMemFreeNodeGetParams(node: u64, dptr: Out<u64>) {
        give(dptr, || match graph::task(node)? {
            Task::Other(Work::Unallocate { at }) => Ok(at),
            _ => Err(Error::InvalidValue),
        })
    }
    11070 fn cuGraphAddBatchMemOpNode(node: Out<u64>, hGraph: u64, behind: *const u64, count: usize, params: *const u64) {
        add(node, hGraph, behind, count, || values_at(params))
    }
    11070 fn cuGraphBatchMemOpNodeGetParams(node: u64, params: *mut u64) { values_of(node, params) }
    11070 fn cuGraphBatchMemOpNodeSetParams(node: u64, params: *const u64) { graph::set(node, values_at(params)?) }
    11070 fn cuGraphExecBatchMemOpNodeSetParams(exec: u64, node: u64, params: *const u64) {
        exec::set(exec, node, values_at(params)?)
    }
    12030 fn cuGraphConditionalHandleCreate(handle: Out<u64>, hGraph: u64, context: u64, default: u32, flags: u32) {
        if context != 0 {
            crate::context::device_of(context)?;
        }
        give(handle, || conditional::create(hGraph, default, flags))
    }
    11000 fn cuGraphKernelNodeGetAttribute(node: u64, attribute: u32, value: *mut [u64; 8]) {
        sys::write(value, graph::attribute(node, attribute, None)?).ok_or(Error::InvalidValue)
    }
    11000 fn cuGraphKernelNodeSetAttribute(node: u64, attribute: u32, value: *const [u64; 8]) {
        graph::attribute(node, attribute, Some(read(value)?)).map(drop)
    }
    11000 fn cuGraphKernelNodeCopyAttributes(dst: u64, src: u64) { graph::copy_attributes(dst, src) }
    10000 fn cuGraphAddDependencies(hGraph: u64, from: *const u64, to: *const u64, count: usize) {
        graph::depend(hGraph, &list(from, count)?, &list(to, count)?, true)
    }
    12030 fn cuGraphAddDependencies_v2(hGraph: u64, from: *const u64, to: *const u64, data: *const u64, count: usize) {
        let _ = data;
        graph::depend(hGraph, &list(from, count)?, &list(to, count)?, true)
    }
    10000 fn cuGraphRemoveDependencies(hGraph: u64, from: *const u64, to: *const u64, count: usize) {
        graph::depend(hGraph, &list(from, count)?, &list(to, count)?, false)
    }
    12030 fn cuGraphRemoveDependencies_v2(hGraph: u64, from: *const u64, to: *const u64, data: *const u64, count: usize) {
        let _ = data;
        graph::depend(hGraph, &list(from, count)?, &list(to, count)?, false)
    }
    10000 fn cuGraphGetNodes(hGraph: u64, nodes: *mut u64, count: *mut usize) {
        put_nodes(nodes, count, &graph::nodes(hGraph)?)
    }
    10000 fn cuGraphGetRootNodes(hGraph: u64, nodes: *mut u64, count: *mut usize) {
        put_nodes(nodes, count, &graph::roots(hGraph)?)
    }
    10000 fn cuGraphGetEdges(hGraph: u64, from: *mut u64, to: *mut u64, count: *mut usize) {
        put_list([from, to], count, &graph::edges(hGraph)?)
    }
    12030 fn cuGraphGetEdges_v2(hGraph: u64, from: *mut u64, to: *mut u64, data: *mut u64, count: *mut usize) {
        // NVIDIA's driver 580 rejects arrays without elements.
        if !from.is_null() && sys::read(count.cast_const()) == Some(0) {
            return Err(Error::InvalidValue);
        }
        put_list([from, to], count, &graph::edges(hGraph)?)?;
        put_data(data, count);
        Ok(())
    }
    10000 fn cuGraphNodeGetDependencies(node: u64, nodes: *mut u64, count: *mut usize) {
        put_nodes(nodes, count, &graph::before(node)?)
    }
    12030 fn cuGraphNodeGetDependencies_v2(node: u64, nodes: *mut u64, data: *mut u64, count: *mut usize) {
        put_nodes(nodes, count, &graph::before(node)?)?;
        put_data(data, count);
        Ok(())
    }
    10000 fn cuGraphNodeGetDependentNodes(node: u64, nodes: *mut u64, count: *mut usize) {
        put_nodes(nodes, count, &graph::behind(node)?)
    }
    12030 fn cuGraphNodeGetDependentNodes_v2(node: u64, nodes: *mut u64, data: *mut u64, count: *mut usize) {
        put_nodes(nodes, count, &graph::behind(node)?)?;
        put_data(data, count);
        Ok(())
    }
    10000 fn cuGraphNodeGetType(node: u64, kind: Out<i32>) { give(kind, || Ok(graph::task(node)?.kind())) }
    10000 fn cuGraphDestroyNode(node: u64) { graph::destroy_node(node) }
    10000 fn cuGraphKernelNodeGetParams(node: u64, params: Out<KernelNode>) {
        give(params, || {
            let KernelNode2 { first, kernel, .. } = kernel_of(node)?;
            let function = if kernel == 0 { first.function } else { crate::library::function(kernel)? };
            Ok(KernelNode { function, ..first })
        })
    }
    12000 fn cuGraphKernelNodeGetParams_v2(node: u64, params: Out<KernelNode2>) { give(params, || kernel_of(node)) }
    10000 fn cuGraphKernelNodeSetParams(node: u64, params: *const KernelNode) { graph::set(node, kernel_at(params)?) }
    12000 fn cuGraphKernelNodeSetParams_v2(node: u64, params: *const KernelNode2) {
        graph::set(node, kernel(read(params)?)?)
    }
    10000 fn cuGraphMemcpyNodeGetParams(node: u64, params: Out<Copy3d>) {
        give(params, || graph::copied(&graph::task(node)?))
    }
    10000 fn cuGraphMemcpyNodeSetParams(node: u64, params: *const Copy3d) { graph::set(node, copy_at(params)?) }
    10000 fn cuGraphMemsetNodeGetParams(node: u64, params: Out<FillNode>) {
        give(params, || graph::fill(&graph::task(node)?))
    }
    10000 fn cuGraphMemsetNodeSetParams(node: u64, params: *const FillNode) { graph::set(node, fill_at(params)?) }
    10000 fn cuGraphHostNodeGetParams(node: u64, params: Out<HostNode>) {
        give(params, || match graph::task(node)? {
            Task::Host { function, data } => Ok(HostNode { function: Some(function), data }),
            _ => Err(Error::InvalidValue),
        })
    }
    10000 fn cuGraphHostNodeSetParams(node: u64, params: *const HostNode) { graph::set(node, host_at(params)?) }
    10000 fn cuGraphChildGraphNodeGetGraph(node: u64, child: Out<u64>) {
        give(child, || match graph::task(node)? {
            Task::Graph(graph) => Ok(graph),
            _ => Err(Error::InvalidValue),
        })
    }
    11010 fn cuGraphEventRecordNodeGetEvent(node: u64, event: Out<u64>) { give(event, || event_of(node, true)) }
    11010 fn cuGraphEventRecordNodeSetEvent(node: u64, event: u64) { graph::set(node, Task::Record(event)) }
    11010 fn cuGraphEventWaitNodeGetEvent(node: u64, event: Out<u64>) { give(event, || event_of(node, false)) }
    11010 fn cuGraphEventWaitNodeSetEvent(node: u64, event: u64) { graph::set(node, Task::Wait(event)) }
    12020 fn cuGraphNodeSetParams(node: u64, params: *const AnyNode) { graph::set(node, any_at(params)?) }
    11030 fn cuGraphDebugDotPrint(hGraph: u64, path: *const std::ffi::c_char, flags: u32) {
        graph::print(hGraph, &text(path)?, flags)
    }
    11000 fn cuGraphInstantiate_v2(exec: Out<u64>, hGraph: u64, node: Out<u64>, log: *mut u8, len: usize) {
        let _ = (log, len);
        put(node, 0);
        give(exec, || exec::instantiate(hGraph, 0))
    }
    10000 fn cuGraphInstantiate(exec: Out<u64>, hGraph: u64, node: Out<u64>, log: *mut u8, len: usize) {
        let _ = (log, len);
        put(node, 0);
        give(exec, || exec::instantiate(hGraph, 0))
    }
    11040 fn cuGraphInstantiateWithFlags(exec: Out<u64>, hGraph: u64, flags: u64) {
        give(exec, || exec::instantiate(hGraph, flags))
    }
    12000 fn cuGraphInstantiateWithParams(
        exec: Out<u64>, hGraph: u64, params: *mut Instantiate
    ) / cuGraphInstantiateWithParams_ptsz as own {
        let mut given = read(params.cast_const())?;
        stream(given.stream, own);
        let made = exec::instantiate(hGraph, given.flags);
        // CUDA_GRAPH_INSTANTIATE_ERROR is 1.
        (given.node, given.result) = (0, made.is_err().into());
        sys::write(params, given).ok_or(Error::InvalidValue)?;
        give(exec, || made)
    }
    12000 fn cuGraphExecGetFlags(exec: u64, flags: Out<u64>) { give(flags, || exec::flags(exec)) }
    10000 fn cuGraphLaunch(exec: u64, hStream: u64) / cuGraphLaunch_ptsz as own {
        exec::launch(exec, stream(hStream, own))
    }
    11010 fn cuGraphUpload(exec: u64, hStream: u64) / cuGraphUpload_ptsz as own {
        stream(hStream, own);
        exec::flags(exec).map(drop)
    }
    10000 fn cuGraphExecDestroy(exec: u64) { exec::destroy(exec) }
    10010 fn cuGraphExecKernelNodeSetParams(exec: u64, node: u64, params: *const KernelNode) {
        exec::set(exec, node, kernel_at(params)?)
    }
    12000 fn cuGraphExecKernelNodeSetParams_v2(exec: u64, node: u64, params: *const KernelNode2) {
        exec::set(exec, node, kernel(read(params)?)?)
    }
    10020 fn cuGraphExecMemcpyNodeSetParams(exec: u64, node: u64, params: *const Copy3d, context: u64) {
        crate::context::device_of(context)?;
        exec::set(exec, node, copy_at(params)?)
    }
    10020 fn cuGraphExecMemsetNodeSetParams(exec: u64, node: u64, params: *const FillNode, context: u64) {
        crate::context::device_of(context)?;
        exec::set(exec, node, fill_at(params)?)
    }
    10020 fn cuGraphExecHostNodeSetParams(exec: u64, node: u64, params: *const HostNode) {
        exec::set(exec, node, host_at(params)?)
    }
    11010 fn cuGraphExecChildGraphNodeSetParams(exec: u64, node: u64, child: u64) {
        exec::set(exec, node, Task::Graph(child))
    }
    11010 fn cuGraphExecEventRecordNodeSetEvent(exec: u64, node: u64, event: u64) {
        exec::set(exec, node, Task::Record(event))
    }
    11010 fn cuGraphExecEventWaitNodeSetEvent(exec: u64, node: u64, event: u64) {
        exec::set(exec, node, Task::Wait(event))
    }
    12020 fn cuGraphExecNodeSetParams(exec: u64, node: u64, params: *const AnyNode) {
        exec::set(exec, node, any_at(params)?)
    }
    10020 fn cuGraphExecUpdate(exec: u64, hGraph: u64, node: Out<u64>, result: Out<u32>) {
        let refused = exec::update(exec, hGraph)?;
        let (why, at) = refused.unwrap_or((0, 0));
        put(node, at);
        put(result, why);
        if refused.is_some() { Err(Error::GraphExecUpdateFailure) } else { Ok(()) }
    }
    12000 fn cuGraphExecUpdate_v2(exec: u64, hGraph: u64, info: Out<Update>) {
        let refused = exec::update(exec, hGraph)?;
        let (result, node) = refused.unwrap_or((0, 0));
        put(info, Update { result, node, from: 0 });
        if refused.is_some() { Err(Error::GraphExecUpdateFailure) } else { Ok(()) }
    }
    11060 fn cuGraphNodeSetEnabled(exec: u64, node: u64, enabled: u32) { exec::enable(exec, node, enabled != 0) }
    11060 fn cuGraphNodeGetEnabled(exec: u64, node: u64, enabled: Out<u32>) {
        give(enabled, || Ok(exec::is_enabled(exec, node)?.into()))
    }
    11030 fn cuUserObjectCreate(object: Out<u64>, data: u64, destroy: Option<HostFunction>, count: u32, flags: u32) {
        give(object, || user_object::create(data, destroy, count, flags))
    }
    11030 fn cuUserObjectRetain(object: u64, count: u32) { user_object::retain(object, count) }
    11030 fn cuUserObjectRelease(object: u64, count: u32) { user_object::release(object, count) }
    11030 fn cuGraphRetainUserObject(hGraph: u64, object: u64, count: u32, flags: u32) {
        user_object::keep(hGraph, object, count, flags)
    }
    11030 fn cuGraphReleaseUserObject(hGraph: u64, object: u64, count: u32) {
        user_object::let_go(hGraph, object, count)
    }
}
