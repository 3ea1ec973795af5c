//! Calls that no table unpacks.
//!
//! | functions | because |
//! | --- | --- |
//! | loads of modules and libraries | an image has no length but its own, and may be larger than a frame: it comes in parts |
//! | launches | parameters are behind an array of pointers, as long as the kernel says |
//! | copies | bytes of the program's memory go with them, or memory that both have is named |
//! | memory of the host | the program's own, mapped here too, is made known to the driver |
//! | textures, surfaces | their description may have an array in it |
//! | the linker | what it makes is memory of the driver's, of any length |
//! | functions of the program | they are called there, when the driver calls |
//! | nodes of graphs by their parameters | their structures have pointers, and memory of the program in them |
//! | memory of other programs | their handles go by value, and the driver's own go to no program |
//! | captures' dependencies | the driver returns an array of its own |
//! | `cuInit` | a worker gives calls of the system up once the driver has begun |

use std::sync::LazyLock;

use vm_cuda_api::{FUNCTIONS, Kind, Object, number};

use super::handles::Layout;
use super::host::Image;
use super::lane::{Call, Lane, PINNED};
use super::options::Options;
use super::pack::Refused;
use super::sys::{self, Word};
use super::{callbacks, capture, ipc, nodes, objects, pointers, special, staged, strided};
use crate::wire::node;
use crate::wire::strided::Form;
use crate::wire::{CHUNK, Malformed, Reader, code, control, own, put, put_bytes};

/// What a call comes with, and what it returns.
pub(super) struct Parts<'a> {
    pub(super) lane: &'a mut Lane,
    pub(super) reader: Reader<'a>,
    pub(super) reply: &'a mut Vec<u8>,
}

type Handler = fn(&mut Call<'_>, Parts<'_>) -> Result<u32, Refused>;

const HANDLERS: [(&str, Handler); 80] = [
    ("cuInit", initialise),
    ("cuModuleLoadDataEx", module),
    ("cuLibraryLoadData", library),
    ("cuLaunchKernel", launch),
    ("cuLaunchCooperativeKernel", launch),
    ("cuLaunchKernelEx", launch_extended),
    ("cuMemcpyHtoD_v2", to_device),
    ("cuMemcpyHtoDAsync_v2", to_device),
    ("cuMemcpyDtoH_v2", to_host),
    ("cuMemcpyDtoHAsync_v2", to_host),
    ("cuMemcpyHtoA_v2", to_device),
    ("cuMemcpyHtoAAsync_v2", to_device),
    ("cuMemcpyAtoH_v2", to_host),
    ("cuMemcpyAtoHAsync_v2", to_host),
    ("cuMemcpy2D_v2", |call, parts| strided::copy(call, parts, Form::Two)),
    ("cuMemcpy2DUnaligned_v2", |call, parts| strided::copy(call, parts, Form::Two)),
    ("cuMemcpy2DAsync_v2", |call, parts| strided::copy(call, parts, Form::Two)),
    ("cuMemcpy3D_v2", |call, parts| strided::copy(call, parts, Form::Three)),
    ("cuMemcpy3DAsync_v2", |call, parts| strided::copy(call, parts, Form::Three)),
    ("cuMemcpy3DPeer", |call, parts| strided::copy(call, parts, Form::Peer)),
    ("cuMemcpy3DPeerAsync", |call, parts| strided::copy(call, parts, Form::Peer)),
    ("cuLaunchHostFunc", |call, parts| callbacks::add(call, parts.reader, control::FUNCTION)),
    ("cuStreamAddCallback", |call, parts| callbacks::add(call, parts.reader, control::CALLBACK)),
    ("cuGraphKernelNodeGetParams", nodes::kernel_of),
    ("cuGraphKernelNodeGetParams_v2", nodes::kernel_of),
    ("cuGraphMemcpyNodeGetParams", nodes::copy_of),
    ("cuGraphHostNodeGetParams", nodes::function_of),
    ("cuGraphExecUpdate", nodes::update),
    ("cuGraphExecUpdate_v2", nodes::update),
    ("cuGraphInstantiateWithParams", nodes::instantiate),
    ("cuGraphDebugDotPrint", nodes::print),
    ("cuGraphMemAllocNodeGetParams", special::allocation_of),
    ("cuGraphBatchMemOpNodeGetParams", special::values_of),
    ("cuGraphConditionalHandleCreate", special::condition),
    ("cuGraphKernelNodeGetAttribute", special::attribute),
    ("cuGraphKernelNodeSetAttribute", special::attribute),
    ("cuStreamSetAttribute", special::attribute),
    ("cuStreamBatchMemOp", special::batch),
    ("cuStreamBatchMemOp_v2", special::batch),
    ("cuGraphLaunch", staged::launch),
    ("cuGraphNodeGetType", staged::kind),
    ("cuGraphChildGraphNodeGetGraph", staged::child),
    ("cuGraphInstantiate", |call, parts| staged::make_of(call, parts, 1)),
    ("cuGraphInstantiate_v2", |call, parts| staged::make_of(call, parts, 1)),
    ("cuGraphInstantiateWithFlags", |call, parts| staged::make_of(call, parts, 1)),
    ("cuGraphExecChildGraphNodeSetParams", |call, parts| staged::make_of(call, parts, 2)),
    ("cuGraphDestroy", nodes::destroy),
    ("cuGraphDestroyNode", nodes::destroy_node),
    ("cuOccupancyMaxActiveClusters", clusters),
    ("cuOccupancyMaxPotentialClusterSize", clusters),
    ("cuPointerGetAttributes", |call, parts| pointers::attributes(call, parts.reader, parts.reply)),
    ("cuTexObjectCreate", objects::texture),
    ("cuSurfObjectCreate", objects::surface),
    ("cuUserObjectCreate", objects::user),
    ("cuLinkCreate_v2", objects::link),
    ("cuLinkAddData_v2", objects::link_data),
    ("cuLinkComplete", objects::link_complete),
    ("cuLinkDestroy", objects::link_destroy),
    ("cuMemExportToShareableHandle", ipc::export_file),
    ("cuMemImportFromShareableHandle", ipc::import_file),
    ("cuIpcGetMemHandle", ipc::export_memory),
    ("cuIpcOpenMemHandle_v2", ipc::open_memory),
    ("cuIpcCloseMemHandle", ipc::close_memory),
    ("cuIpcGetEventHandle", ipc::export_event),
    ("cuIpcOpenEventHandle", ipc::open_event),
    ("cuIpcOpenMemHandle", ipc::open_memory),
    ("cuEventCreate", ipc::event),
    ("cuMemFree_v2", free),
    ("cuMemHostAlloc", host_allocate),
    ("cuMemFreeHost", host_free),
    ("cuStreamBeginCapture", begin_capture),
    ("cuStreamBeginCapture_v2", begin_capture),
    ("cuStreamBeginCaptureToGraph", begin_capture),
    ("cuStreamEndCapture", end_capture),
    ("cuGraphRetainUserObject", nodes::retain),
    ("cuGraphReleaseUserObject", nodes::release),
    ("cuGraphClone", |call, parts| nodes::copy_graph(call, parts, 1, Object::Graph)),
    ("cuGraphAddChildGraphNode", |call, parts| nodes::copy_graph(call, parts, 4, Object::Node)),
    ("cuStreamGetCaptureInfo_v2", |call, parts| capture::info(call, parts.reader, false, parts.reply)),
    ("cuStreamGetCaptureInfo_v3", |call, parts| capture::info(call, parts.reader, true, parts.reply)),
];

/// The handlers by their functions' numbers.
static BY_NUMBER: LazyLock<Vec<Option<Handler>>> = LazyLock::new(|| {
    let mut all = vec![None; FUNCTIONS.len()];
    let setters = node::SETTERS.map(|(name, _)| (name, nodes::set as Handler));
    for (name, handler) in HANDLERS.into_iter().chain(setters) {
        for name in [name.to_owned(), format!("{name}_ptsz"), format!("{name}_ptds")] {
            if let Some(at) = number(&name) {
                all[at] = Some(handler);
            }
        }
    }
    all
});

/// Returns whether a function has a handler.
#[cfg(test)]
pub(super) fn is_made_by_hand(number: usize) -> bool {
    BY_NUMBER[number].is_some()
}

/// Makes a call that is packed by hand; `None` when it is not.
pub(super) fn make(
    lane: &mut Lane,
    call: &mut Call<'_>,
    payload: &[u8],
    reply: &mut Vec<u8>,
) -> Option<Result<u32, Refused>> {
    let handler = match u16::try_from(call.number).ok()? {
        own::LAYOUT => layout,
        own::LINKED => objects::linked,
        own::TOPOLOGY => topology,
        own::PRINTED => printed,
        own::IMAGE => |_: &mut Call<'_>, parts: Parts<'_>| parts.lane.append(parts.reader.0),
        _ => (*BY_NUMBER.get(call.number)?)?,
    };
    Some(handler(call, Parts { lane, reader: Reader(payload), reply }))
}

/// Flags.
fn initialise(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let flags = parts.reader.word()?;
    match call.make(&[Word::Is(flags)], &mut [])? {
        0 => Ok(call.session.started()),
        code => Ok(code),
    }
}

fn topology(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    match call.session.driver().topology() {
        Ok(bytes) => {
            put_bytes(parts.reply, &bytes);
            Ok(0)
        }
        Err(code) => Ok(code),
    }
}

fn printed(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    if let Some((to, bytes)) = call.session.prints().and_then(|prints| prints.take()) {
        put(parts.reply, to);
        put(parts.reply, bytes.len() as u64);
        put_bytes(parts.reply, &bytes);
    }
    Ok(0)
}

fn layout(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let function = parts.reader.word()?;
    call.session.lay_out(function)?;
    let handles = call.session.handles();
    for (offset, size) in handles.function(function)?.1.into_iter().flatten() {
        put(parts.reply, *offset);
        put(parts.reply, *size);
    }
    Ok(0)
}

/// An image, which the driver reads to its own end: that must be within what came.
fn image(parts: &mut Parts<'_>) -> Result<Image, Refused> {
    let mut image = parts.lane.image.take();
    let bytes = &mut image.bytes;
    if bytes.is_empty() || crate::wire::image::len(bytes).is_none_or(|len| len > bytes.len()) {
        return Err(code::INVALID_IMAGE.into());
    }
    // A text may be read a little beyond its end.
    bytes.extend_from_slice(&[0; 16]);
    Ok(image)
}

/// Loads an image and replies with the driver's result and the handle. The driver keeps a copy of the image.
fn load(
    call: &Call<'_>,
    parts: &mut Parts<'_>,
    object: Object,
    image: Image,
    load: impl FnMut() -> Result<u64, u32>,
) -> Result<u32, Refused> {
    let len = image.bytes.len() as u64;
    let (result, id) = match call.session.quota().load(call.session, object, len, load) {
        Ok(real) => (0, call.session.give(object, real, None, true)?),
        Err(code) => (code, 0),
    };
    call.session.handles().hold(object, id, image.charge);
    put(parts.reply, result.into());
    put(parts.reply, id);
    Ok(0)
}

fn module(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let mut options = Options::read(&mut parts.reader)?;
    let image = image(&mut parts)?;
    let [count, kinds, values] = options.words();
    let words = [options.out(), Word::Is(sys::place(&image.bytes)), count, kinds, values];
    load(call, &mut parts, Object::Module, image, || options.make(call, &words))?;
    options.put_logs(parts.reply);
    Ok(0)
}

fn library(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let mut options = Options::read(&mut parts.reader)?;
    let image = image(&mut parts)?;
    let (none, no) = (Word::Is(0), Word::Is(0));
    let [count, kinds, values] = options.words();
    let words = [options.out(), Word::Is(sys::place(&image.bytes)), kinds, values, count, none, none, no];
    load(call, &mut parts, Object::Library, image, || options.make(call, &words))?;
    options.put_logs(parts.reply);
    Ok(0)
}

/// Parameters in words, then pointers to them: where the pointers begin.
pub(super) fn parameters(
    layout: &Layout,
    reader: &mut Reader<'_>,
    memory: &mut Vec<u64>,
) -> Result<usize, Refused> {
    let end = layout.iter().map(|(offset, size)| offset.saturating_add(*size)).max().unwrap_or(0);
    let bytes = reader.bytes(usize::try_from(end).map_err(|_| Malformed)?)?;
    let from = memory.len();
    memory.extend(bytes.chunks(8).map(|chunk| {
        chunk.first_chunk().map_or_else(
            || {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_ne_bytes(word)
            },
            |word| u64::from_ne_bytes(*word),
        )
    }));
    let pointers = memory.len();
    memory.resize(pointers + layout.len() + 1, 0);
    let base = sys::place_words(memory) + 8 * from as u64;
    for (pointer, (offset, _)) in memory[pointers..].iter_mut().zip(layout.iter()) {
        *pointer = base + offset;
    }
    Ok(pointers)
}

fn launch(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let reader = &mut parts.reader;
    let id = reader.word()?;
    // The last is `extra`, which cooperative ones don't take.
    let mut words = [Word::Is(0); 11];
    for word in &mut words[1..8] {
        *word = Word::Is(reader.word()?);
    }
    let stream = reader.word()?;
    let memory = &mut parts.lane.memory;
    memory.clear();
    loop {
        let handles = call.session.handles();
        if let (function, Some(layout)) = handles.function(id)? {
            words[0] = Word::Is(function);
            words[8] = Word::Is(handles.real(Object::Stream, stream)?);
            words[9] = Word::At(parameters(layout, reader, memory)?);
            break;
        }
        drop(handles);
        call.session.lay_out(id)?;
    }
    let count = FUNCTIONS[call.number].parameters.len();
    Ok(call.make(&words[..count], memory)?)
}

/// Words of a `CUlaunchAttribute`, and of a `CUlaunchConfig`.
const ATTRIBUTE: usize = 9;
const CONFIG: usize = 7;
/// `CUlaunchAttributeID` of those that begin with an event.
const EVENTS: [u32; 2] = [7, 12];

/// A `CUlaunchConfig` with its attributes: words that begin with it.
fn config(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Vec<u64>, Refused> {
    const MOST: u64 = 32;
    // Three words of a grid and a block, two numbers each, and one of shared memory: as the structure has them.
    let mut memory = vec![reader.word()?, reader.word()?, reader.word()?, reader.word()?];
    memory[3] &= 0xffff_ffff;
    memory.push(call.session.handles().real(Object::Stream, reader.word()?)?);
    let count = reader.word()?;
    if count > MOST {
        return Err(Refused::Malformed);
    }
    memory.extend([0, count]);
    for _ in 0..count {
        let from = memory.len();
        for _ in 0..ATTRIBUTE {
            memory.push(reader.word()?);
        }
        let kind = memory[from] as u32;
        if EVENTS.contains(&kind) {
            memory[from + 1] = call.session.handles().real(Object::Event, memory[from + 1])?;
        } else if !node::PLAIN.contains(&kind) {
            return Err(code::NOT_SUPPORTED.into());
        }
    }
    Ok(memory)
}

/// Says in a configuration where its attributes are. The memory stays where it is from now on.
fn place_attributes(memory: &mut [u64]) {
    memory[CONFIG - 2] = sys::place_words(memory) + 8 * CONFIG as u64;
}

fn launch_extended(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let reader = &mut parts.reader;
    let id = reader.word()?;
    let mut memory = config(call, reader)?;
    call.session.lay_out(id)?;
    let (function, pointers) = {
        let handles = call.session.handles();
        let (function, layout) = handles.function(id)?;
        (function, parameters(layout.ok_or(code::INVALID_HANDLE)?, reader, &mut memory)?)
    };
    place_attributes(&mut memory);
    let words = [Word::At(0), Word::Is(function), Word::At(pointers), Word::Is(0)];
    Ok(call.make(&words, &mut memory)?)
}

/// How many clusters of a configuration fit, or how large they may be.
fn clusters(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let function = call.session.handles().real(Object::Function, parts.reader.word()?)?;
    let mut memory = config(call, &mut parts.reader)?;
    let out = memory.len();
    memory.push(0);
    place_attributes(&mut memory);
    let words = [Word::At(out), Word::Is(function), Word::At(0)];
    let result = call.make(&words, &mut memory)?;
    put(parts.reply, memory[out]);
    Ok(result)
}

/// Whether memory of this process, which will not stay, would be recorded.
pub(super) fn records(call: &Call<'_>, stream: u64) -> bool {
    let mut memory = [0];
    let words = [Word::Is(stream), Word::At(0)];
    call.session.may_capture() && {
        let result = call.session.driver().named("cuStreamIsCapturing", &words, &mut memory);
        result != 0 || memory[0] & 0xffff_ffff != 0
    }
}

fn begin_capture(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let stream = call.session.handles().real(Object::Stream, Reader(parts.reader.0).word()?)?;
    call.session.captures();
    let result = super::pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    if result == 0 {
        call.session.begins_capture(stream);
    }
    Ok(result)
}

/// Payload: a stream. The returned graph is charged for its nodes.
fn end_capture(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let stream = call.session.handles().real(Object::Stream, Reader(parts.reader.0).word()?)?;
    let result = super::pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    let id = Reader(parts.reply).word().unwrap_or(0);
    let graph = call.session.handles().real(Object::Graph, id);
    if let (0, Ok(graph)) = (result, graph) {
        // The capture was charged before. The graph replaces that charge, so it may exceed the rest of the budget.
        let bytes = nodes::size_up_to(call, graph, u64::MAX);
        let mut handles = call.session.handles();
        let growth = handles.growth(Object::Graph, id, 0, bytes);
        handles.add_parameters(Object::Graph, id, 0, call.session.host().charge(growth));
    }
    call.session.ends_capture(stream);
    Ok(result)
}

/// A stream for functions that have one, as their last parameter.
fn stream_of(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Option<u64>, Refused> {
    let stream = reader.word()?;
    let has = FUNCTIONS[call.number]
        .parameters
        .last()
        .is_some_and(|last| last.kind == Kind::Handle(Object::Stream));
    Ok(if has { Some(call.session.handles().real(Object::Stream, stream)?) } else { None })
}

/// The device's end of a copy: an address, or an array and an offset.
fn end_of(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Vec<u64>, Refused> {
    let is_array = |kind: &Kind| *kind == Kind::Handle(Object::Array);
    if FUNCTIONS[call.number].parameters.iter().any(|each| is_array(&each.kind)) {
        return Ok(vec![call.session.handles().real(Object::Array, reader.word()?)?, reader.word()?]);
    }
    Ok(vec![reader.word()?])
}

/// Makes a copy with these arguments, one of which may be a buffer of this process.
fn copy(call: &Call<'_>, words: &[u64]) -> Result<u32, Refused> {
    let words: Vec<Word> = words.iter().map(|word| Word::Is(*word)).collect();
    Ok(call.make(&words, &mut [])?)
}

/// The device's end, count, stream, host address or 0; with 0 the bytes follow.
fn to_device(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let reader = &mut parts.reader;
    let mut words = end_of(call, reader)?;
    let count = reader.word()?;
    let stream = stream_of(call, reader)?;
    let host = reader.word()?;
    let from = match host {
        0 if count > CHUNK as u64 => return Err(Refused::Malformed),
        0 => {
            if stream.is_some_and(|stream| records(call, stream)) {
                return Err(code::NOT_SUPPORTED.into());
            }
            match call.bulk {
                Some((place, len)) if len as u64 >= count => place,
                Some(_) => return Err(Refused::Malformed),
                None => sys::place(reader.last(count as usize)?),
            }
        }
        at if call.session.has(at, count) => at,
        _ => return Err(code::INVALID_VALUE.into()),
    };
    // Who waits for the answer may wait for the device.
    if stream.is_none() || call.asks {
        call.pass();
    }
    let source = (host == 0).then(|| parts.lane.source(call, (from, count as usize), stream.is_some()));
    let from = source.as_ref().map_or(from, |source| source.place);
    words.extend([from, count].into_iter().chain(stream));
    let result = copy(call, &words)?;
    let waits = result == 0 && source.is_some_and(|source| source.waits);
    Ok(stream.filter(|_| waits).map_or(result, |stream| call.wait_for(stream)))
}

/// The device's end, count, stream, host address or 0; with 0 the bytes are returned.
fn to_host(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let reader = &mut parts.reader;
    let from = end_of(call, reader)?;
    let count = reader.word()?;
    let stream = stream_of(call, reader)?;
    let words = |to: u64| -> Vec<u64> {
        [to].into_iter().chain(from.iter().copied()).chain([count]).chain(stream).collect()
    };
    match reader.word()? {
        0 if count > CHUNK as u64 => Err(Refused::Malformed),
        0 => {
            if stream.is_some_and(|stream| records(call, stream)) {
                return Err(code::NOT_SUPPORTED.into());
            }
            if stream.is_none() {
                call.pass();
            }
            if count >= PINNED as u64 {
                parts.lane.pin(call.session);
            }
            let mut bytes = if parts.lane.room.is_some() { Vec::new() } else { vec![0; count as usize] };
            let to = parts.lane.room.unwrap_or_else(|| sys::place_mut(&mut bytes));
            let mut result = copy(call, &words(to))?;
            if let Some(stream) = stream {
                // Copies to memory that is not the driver's have ended when they return; but not all drivers need say so.
                let waited = call.wait_for(stream);
                result = if result == 0 { waited } else { result };
            }
            match parts.lane.room {
                Some(_) => parts.lane.there = Some(count as usize),
                None => put_bytes(parts.reply, &bytes),
            }
            Ok(result)
        }
        at if call.session.has(at, count) => {
            if stream.is_none() {
                call.pass();
            }
            copy(call, &words(at))
        }
        _ => Err(code::INVALID_VALUE.into()),
    }
}

/// It waits for the device.
fn free(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    call.pass();
    super::pack::make(call.session, call.number, parts.reader.0, parts.reply)
}

/// `CU_MEMHOSTREGISTER_PORTABLE` and `_DEVICEMAP`, which allocations have too.
const REGISTER_FLAGS: u64 = 3;

/// An address of a window, and flags: its memory is made known to the driver.
fn host_allocate(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let (at, flags) = (parts.reader.word()?, parts.reader.word()?);
    let len = call.session.begin_registration(at)?;
    let words = [Word::Is(at), Word::Is(len), Word::Is(flags & REGISTER_FLAGS)];
    let result = call.session.driver().named("cuMemHostRegister_v2", &words, &mut []);
    if result != 0 {
        call.session.unmap(at, true);
    }
    Ok(result)
}

/// An address, and 1 where its context has ended, and the driver has let go of it with that.
fn host_free(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let at = parts.reader.word()?;
    let has_ended = parts.reader.word().is_ok_and(|word| word == 1);
    call.session.window(at).ok_or(code::INVALID_VALUE)?;
    call.pass();
    let driver = call.session.driver();
    if !call.session.may_capture() {
        // What uses it has run then; where that failed, the next call says so. A capture would end by it.
        driver.named("cuCtxSynchronize", &[], &mut []);
    }
    let result = driver.named("cuMemHostUnregister", &[Word::Is(at)], &mut []);
    if result == 0 || has_ended {
        call.session.unmap(at, result == 0);
    }
    Ok(result)
}
