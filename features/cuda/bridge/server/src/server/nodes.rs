//! Nodes of graphs by their parameters: structures with handles, pointers to a kernel's parameters, and memory that is copied.
//!
//! What is put into a node is its kind, then by that:
//!
//! | kind | words |
//! | --- | --- |
//! | kernel | function or kernel, grid, block and shared memory as `CUDA_KERNEL_NODE_PARAMS` has them, context, parameters |
//! | copy | context, a `CUDA_MEMCPY3D` |
//! | fill | a `CUDA_MEMSET_NODE_PARAMS`, context |
//! | function | it, its argument |
//! | graph, event | it |
//!
//! A node reads and writes when its graph runs: of the host's memory what both sides have for long, and of a device's what the program has.

use std::collections::HashMap;

use vm_cuda_api::{FUNCTIONS, Kind, Object};

use super::edges;
use super::effects::Effect;
use super::hand::{Parts, parameters};
use super::handles::Layout;
use super::host::{Charge, EDGE, NODE, REFERENCE, cost};
use super::lane::Call;
use super::pack::{self, Refused};
use super::reach::reach;
use super::session::Session;
use super::special::{self, ALLOCATION_BYTES, OPERATION_BYTES};
use super::staged::{self, Plan};
use super::sys::{self, Driver, Word};
use crate::wire::node::{self, FILL, GRID, OPERATIONS};
use crate::wire::strided::{ARRAY, DEVICE, Form, HOST};
use crate::wire::{Reader, code, put, put_bytes};

/// Words of a `CUDA_KERNEL_NODE_PARAMS_v2`, and where in it the parameters, the kernel of a library and the context are.
const KERNEL: usize = 9;
const POINTERS: usize = 5;
const LIBRARY_KERNEL: usize = 7;
const CONTEXT: usize = 8;
/// Words of a `CUgraphNodeParams`, and those before what is of the kind.
const ANY: usize = 32;
const HEAD: usize = 2;
/// How many graphs within graphs are looked through, and how many nodes of each.
pub(super) const DEPTH: usize = 16;
const MOST: usize = 1 << 20;
/// Bytes of a kernel's parameters if the driver does not report them: 32 KiB, the most that there can be, of 4096 parameters.
const MOST_PARAMETERS: u64 = (32 << 10) + 4096 * PLACE;
/// Bytes for the place of a kernel's parameter.
const PLACE: u64 = 16;
/// `CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE` and `_KERNEL_NODE_PARAMS`.
const VERBOSE: u64 = 1;
const KERNEL_PARAMETERS: u64 = 4;

/// A structure, and memory that it points to.
pub(super) struct Made {
    words: Vec<u64>,
    /// A copy, which may be of memory that only the program has.
    plan: Option<Plan>,
    /// Memory that it points to, from where, and the word that points there: of a kernel, pointers to its parameters.
    pub(super) behind: Option<(Vec<u64>, usize, usize)>,
    /// An upper bound of the host memory that the driver needs for it, without the node.
    pub(super) bytes: u64,
}

impl Made {
    /// One that points to nothing.
    pub(super) fn plain(words: Vec<u64>) -> Self {
        Self { words, plan: None, behind: None, bytes: 0 }
    }
}

fn kernel(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Made, Refused> {
    let id = reader.word()?;
    let mut words = vec![0];
    for _ in 0..GRID {
        words.push(reader.word()?);
    }
    let context = reader.word()?;
    call.session.lay_out(id)?;
    let handles = call.session.handles();
    let (function, layout) = handles.function(id)?;
    let mut arguments = Vec::new();
    let layout = layout.ok_or(code::INVALID_HANDLE)?;
    let bytes = of_layout(layout);
    let pointers = parameters(layout, reader, &mut arguments)?;
    words.extend([0, 0, 0, handles.real(Object::Context, context)?]);
    // Structures of before libraries have no place of their own for their kernels.
    let has_place = is_second(call) || is_any(call);
    let place = if handles.is_kernel(id) && has_place { LIBRARY_KERNEL } else { 0 };
    words[place] = function;
    Ok(Made { behind: Some((arguments, pointers, POINTERS)), bytes, ..Made::plain(words) })
}

fn copy(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Made, Refused> {
    let form = Form::Three;
    let context = call.session.handles().real(Object::Context, reader.word()?)?;
    let mut copy: Vec<u64> = (0..form.words()).map(|_| reader.word()).collect::<Result<_, _>>()?;
    for (is_target, end) in [false, true].into_iter().zip(form.ends()) {
        let extent = form.extent(&copy, is_target).ok_or(code::INVALID_VALUE)?;
        match copy[end.kind] & 0xffff_ffff {
            DEVICE => reach(call.session, copy[end.device], Some(extent))?,
            ARRAY => copy[end.array] = call.session.handles().real(Object::Array, copy[end.array])?,
            // What only the program has is asked of it.
            HOST if copy[end.host] != 0 => {}
            HOST => return Err(code::INVALID_VALUE.into()),
            _ => return Err(code::NOT_SUPPORTED.into()),
        }
    }
    let mut words = if is_any(call) { vec![0, context] } else { Vec::new() };
    words.extend(&copy);
    let own = staged::own_ends(call, &copy);
    // A copy of the program's memory is a graph of three nodes.
    let bytes = if own == [false; 2] { 0 } else { cost(Object::Graph) + 3 * NODE };
    Ok(Made { plan: Some(Plan { copy, context, own }), bytes, ..Made::plain(words) })
}

fn fill(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Made, Refused> {
    let mut words: Vec<u64> = (0..FILL).map(|_| reader.word()).collect::<Result<_, _>>()?;
    let [at, pitch, unit, width, height] = words[..] else { return Err(Refused::Malformed) };
    let rows = height.saturating_sub(1).checked_mul(pitch);
    let len = width.checked_mul(unit >> 32).and_then(|row| rows?.checked_add(row));
    reach(call.session, at, len)?;
    let context = call.session.handles().real(Object::Context, reader.word()?)?;
    if is_any(call) {
        words.push(context);
    }
    Ok(Made::plain(words))
}

/// Functions of which the structure says itself what kind it is.
pub(super) fn is_any(call: &Call<'_>) -> bool {
    node::kind(&FUNCTIONS[call.number].name).is_none()
}

/// Is it the second form of its function?
fn is_second(call: &Call<'_>) -> bool {
    FUNCTIONS[call.number].name.ends_with("_v2")
}

/// The structure of a node.
fn structure(call: &Call<'_>, reader: &mut Reader<'_>) -> Result<Made, Refused> {
    let kind = reader.word()?;
    if node::kind(&FUNCTIONS[call.number].name).is_some_and(|known| known != kind) {
        return Err(Refused::Malformed);
    }
    let one = |reader: &mut Reader<'_>, object| -> Result<Made, Refused> {
        let real = call.session.handles().real(object, reader.word()?)?;
        if real == 0 {
            return Err(code::INVALID_VALUE.into());
        }
        Ok(Made::plain(vec![real]))
    };
    let mut made = match kind {
        node::KERNEL => kernel(call, reader)?,
        node::COPY => copy(call, reader)?,
        node::FILL_KIND => fill(call, reader)?,
        node::FUNCTION => {
            let (function, argument) = (reader.word()?, reader.word()?);
            if function == 0 {
                return Err(code::INVALID_VALUE.into());
            }
            Made::plain(call.session.function(function, argument)?.to_vec())
        }
        node::GRAPH => {
            let mut made = one(reader, Object::Graph)?;
            staged::renew(call, made.words[0])?;
            made.bytes = size(call, made.words[0]);
            made
        }
        node::MOVED => {
            // Its handle holds its charge, and ends with the graph that it is in.
            let mut made = one(reader, Object::Graph)?;
            staged::renew(call, made.words[0])?;
            made.words.push(1);
            made
        }
        node::EMPTY => Made::plain(Vec::new()),
        node::WAIT | node::RECORD => one(reader, Object::Event)?,
        node::ALLOCATE => special::allocation(call, reader)?,
        node::FREE => Made::plain(vec![reader.word()?]),
        node::VALUES => special::values(call, reader)?,
        node::CONDITIONAL => special::conditional(call, reader)?,
        _ => return Err(code::NOT_SUPPORTED.into()),
    };
    let mut at = 0;
    if is_any(call) {
        at = HEAD;
        made.words = any(kind & 0xffff_ffff, made.words);
    }
    if let Some((memory, from, word)) = &mut made.behind {
        made.words[at + *word] = sys::place_words(memory) + 8 * *from as u64;
    }
    Ok(made)
}

/// A structure that says its kind.
pub(super) fn any(kind: u64, of: Vec<u64>) -> Vec<u64> {
    let mut words = vec![kind, 0];
    words.extend(of);
    words.resize(ANY, 0);
    words
}

/// What is put into a node, then what the table says.
pub(super) fn set(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let mut ahead = parts.reader;
    let (kind, graph) = (ahead.word()?, ahead.word());
    let mut made = structure(call, &mut parts.reader)?;
    let growth = Growth::new(call, parts.reader, made.bytes)?;
    let of = growth.of;
    if let Some(plan) = &mut made.plan {
        // A copy's function says its context behind the dependencies.
        if !is_any(call) && plan.own != [false; 2] {
            plan.context = context_of(call, parts.reader)?;
        }
        if let Some(done) = staged::put_copy(call, &mut parts, plan) {
            return growth.done(call, done?, parts.reply);
        }
    }
    let child = if kind == node::GRAPH {
        call.session.handles().real(Object::Graph, graph.unwrap_or(0))?
    } else {
        0
    };
    let references = if child == 0 { 0 } else { references(call, child) };
    let place = sys::place_words(&mut made.words);
    let result = pack::make_with(call.session, call.number, parts.reader.0, parts.reply, Some(place))?;
    growth.done(call, result, parts.reply)?;
    if result == 0 && kind == node::MOVED {
        // Behind whether the node is wanted.
        let mut rest = parts.reader;
        let owner = rest.word().and_then(|_| rest.word())?;
        call.session.handles().own((Object::Graph, owner), (Object::Graph, graph?));
    }
    if result == 0 && references > 0 {
        let mut rest = parts.reader;
        match of {
            (Object::Exec, exec) => call.session.handles().copy_references(Object::Exec, exec, references),
            // The graph is behind whether the node is wanted.
            (_, 0) => {
                let owner = rest.word().and_then(|_| rest.word())?;
                call.session.handles().copy_references(Object::Graph, owner, references);
            }
            _ => call.session.handles().stray_references(references),
        }
    }
    if result == 0 && special::adds(call) {
        special::returned(call, kind, special::of_kind(call, &made.words, HEAD), parts.reply)?;
    }
    Ok(result)
}

/// The context that a function of copies says: its last parameter, or the current one.
fn context_of(call: &Call<'_>, mut reader: Reader<'_>) -> Result<u64, Refused> {
    let parameters = &FUNCTIONS[call.number].parameters;
    if parameters.last().is_none_or(|last| last.kind != Kind::Handle(Object::Context)) {
        let mut memory = [0];
        let result = call.session.driver().named("cuCtxGetCurrent", &[Word::At(0)], &mut memory);
        return if result == 0 { Ok(memory[0]) } else { Err(result.into()) };
    }
    for _ in 1..parameters.len() {
        reader.word()?;
    }
    Ok(call.session.handles().real(Object::Context, reader.word()?)?)
}

/// A node: its kernel, and that's parameters.
pub(super) fn kernel_of(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let node = call.session.handles().real(Object::Node, parts.reader.word()?)?;
    let mut memory = [0; KERNEL];
    let result = call.make(&[Word::Is(node), Word::At(0)], &mut memory)?;
    if result != 0 {
        return Ok(result);
    }
    let is_kernel = call.session.handles().knows(Object::Kernel, memory[0]);
    let function = match is_kernel {
        true => call.session.handles().give(Object::Kernel, memory[0])?,
        false => function(call, memory[0])?,
    };
    let kernel = call.session.handles().give(Object::Kernel, memory[LIBRARY_KERNEL])?;
    let id = if function == 0 { kernel } else { function };
    call.session.lay_out(id)?;
    let mut handles = call.session.handles();
    let layout = handles.function(id)?.1.ok_or(code::INVALID_HANDLE)?;
    let end = layout.iter().map(|(offset, size)| offset + size).max().unwrap_or(0);
    let mut bytes = vec![0; usize::try_from(end).map_err(|_| code::INVALID_VALUE)?];
    let pointers = sys::words(memory[POINTERS], layout.len());
    if pointers.len() != layout.len() {
        return Err(code::NOT_SUPPORTED.into());
    }
    for (pointer, (offset, size)) in pointers.into_iter().zip(layout) {
        let value = sys::bytes(pointer, *size as usize);
        bytes[*offset as usize..][..value.len()].copy_from_slice(&value);
    }
    put(parts.reply, function);
    memory[1..=GRID].iter().for_each(|word| put(parts.reply, *word));
    put(parts.reply, kernel);
    put(parts.reply, handles.give(Object::Context, memory[CONTEXT])?);
    put_bytes(parts.reply, &bytes);
    Ok(0)
}

/// Returns the number of a node's function. A program that launched a library's kernel has no handle of the function yet.
fn function(call: &Call<'_>, real: u64) -> Result<u64, u32> {
    if real == 0 || call.session.handles().knows(Object::Function, real) {
        return call.session.handles().give(Object::Function, real);
    }
    let mut module = [0];
    // Drivers before CUDA 11 fail.
    let _ = call.session.driver().named("cuFuncGetModule", &[Word::At(0), Word::Is(real)], &mut module);
    let module = call.session.handles().id(Object::Module, module[0]);
    let id = call.session.give(Object::Function, real, module, false)?;
    if module.is_none() {
        call.session.handles().stray(id);
    }
    Ok(id)
}

/// A node: its copy.
pub(super) fn copy_of(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let node = call.session.handles().real(Object::Node, parts.reader.word()?)?;
    let mut memory = vec![0; Form::Three.words()];
    let result = match staged::copy_of(call, node) {
        Some(copy) => {
            memory = copy;
            0
        }
        None => call.make(&[Word::Is(node), Word::At(0)], &mut memory)?,
    };
    if result == 0 {
        for end in Form::Three.ends() {
            memory[end.array] = call.session.handles().give(Object::Array, memory[end.array])?;
        }
        memory.iter().for_each(|word| put(parts.reply, *word));
    }
    Ok(result)
}

/// A node: its function of the program.
pub(super) fn function_of(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let node = call.session.handles().real(Object::Node, parts.reader.word()?)?;
    let mut memory = [0; 2];
    let result = call.make(&[Word::Is(node), Word::At(0)], &mut memory)?;
    if result == 0 {
        let known = call.session.known_function(memory[1]).ok_or(code::NOT_SUPPORTED)?;
        known.iter().for_each(|word| put(parts.reply, *word));
    }
    Ok(result)
}

/// An executable graph, and the graph that it is to be as. Answered with what the driver says, which is also why not: the result, and two nodes.
pub(super) fn update(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let id = parts.reader.word()?;
    let (exec, graph) = {
        let handles = call.session.handles();
        (handles.real(Object::Exec, id)?, handles.real(Object::Graph, parts.reader.word()?)?)
    };
    staged::renew(call, graph)?;
    let growth = Growth::of(call, (Object::Exec, id), 0, size(call, graph))?;
    // The result and two nodes: a structure, or a node and the result.
    let mut memory = [0; 3];
    let mut words = vec![Word::Is(exec), Word::Is(graph)];
    words.extend(if is_second(call) { vec![Word::At(0)] } else { vec![Word::At(1), Word::At(0)] });
    let result = call.make(&words, &mut memory)?;
    // A failed update may have changed some nodes.
    growth.done(call, 0, &[])?;
    let mut handles = call.session.handles();
    put(parts.reply, result.into());
    put(parts.reply, memory[0] & 0xffff_ffff);
    for node in &memory[1..] {
        put(parts.reply, handles.give(Object::Node, *node)?);
    }
    Ok(0)
}

/// A graph, flags and a stream. Answered with what the driver says, and with that the executable graph, a node and the result.
pub(super) fn instantiate(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let (graph, flags, stream) = {
        let handles = call.session.handles();
        let graph = handles.real(Object::Graph, parts.reader.word()?)?;
        let flags = parts.reader.word()?;
        (graph, flags, handles.real(Object::Stream, parts.reader.word()?)?)
    };
    staged::renew(call, graph)?;
    let growth = Growth::of(call, (Object::Exec, 0), 0, size(call, graph))?;
    let mut memory = [0, flags, stream, 0, 0];
    let words = [Word::At(0), Word::Is(graph), Word::At(1)];
    let result = call.make(&words, &mut memory)?;
    put(parts.reply, result.into());
    let id = call.session.handles().make(Object::Exec, if result == 0 { memory[0] } else { 0 })?;
    growth.given(call, id);
    let references = references(call, graph);
    let mut handles = call.session.handles();
    handles.copy_references(Object::Exec, id, references);
    put(parts.reply, id);
    put(parts.reply, handles.give(Object::Node, memory[3])?);
    put(parts.reply, memory[4] & 0xffff_ffff);
    Ok(0)
}

/// What nodes are called by their kinds.
const KINDS: [&str; 14] = [
    "kernel",
    "copy",
    "fill",
    "function",
    "graph",
    "empty",
    "wait",
    "record",
    "signal",
    "wait for a signal",
    "allocate",
    "free",
    "values",
    "condition",
];

/// The name of a node's kernel. With `shape`, also its grid, block and shared memory.
fn name(driver: &Driver, node: u64, shape: bool) -> Option<String> {
    let mut memory = [0; KERNEL];
    let asked = driver.named("cuGraphKernelNodeGetParams_v2", &[Word::Is(node), Word::At(0)], &mut memory);
    let (function, kernel) = (memory[0], memory[LIBRARY_KERNEL]);
    let (ask, real) = if function == 0 { ("cuKernelGetName", kernel) } else { ("cuFuncGetName", function) };
    let mut text = [0];
    if asked != 0 || driver.named(ask, &[Word::At(0), Word::Is(real)], &mut text) != 0 {
        return None;
    }
    // Mangled names consist of letters, digits, `_` and `$`.
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_$".contains(byte);
    let mut label: String =
        sys::text(text[0], pack::NAME).into_iter().filter(is_plain).map(char::from).collect();
    if shape {
        let half = |at: usize| (memory[1 + at / 2] >> (32 * (at % 2))) as u32;
        let [x, y, z, bx, by, bz, shared] = std::array::from_fn(half);
        label += &format!("\\n<<<({x}, {y}, {z}), ({bx}, {by}, {bz}), {shared}>>>");
    }
    Some(label)
}

/// A graph and flags: a text is kept by the lane, and how long it is is returned. The driver would write a file, which no worker may make: this text has
/// kinds, names of kernels, and edges.
pub(super) fn print(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let graph = call.session.handles().real(Object::Graph, parts.reader.word()?)?;
    let shape = parts.reader.word()? & (VERBOSE | KERNEL_PARAMETERS) != 0;
    let driver = call.session.driver();
    let nodes = nodes(driver, graph)?;
    let mut text = "digraph dot {\n".to_owned();
    for (place, node) in nodes.iter().enumerate() {
        let mut memory = [0];
        driver.named("cuGraphNodeGetType", &[Word::Is(*node), Word::At(0)], &mut memory);
        let kind = if staged::copy_of(call, *node).is_some() { node::COPY } else { memory[0] & 0xffff_ffff };
        let name = KINDS.get(kind as usize).map_or_else(|| format!("kind {kind}"), |name| (*name).to_owned());
        let label =
            if kind == node::KERNEL { self::name(driver, *node, shape).unwrap_or(name) } else { name };
        text += &format!("\"{place}\" [label=\"{label}\"];\n");
    }
    let mut memory = vec![0];
    let none = Word::Is(0);
    let result =
        driver.named("cuGraphGetEdges_v2", &[Word::Is(graph), none, none, none, Word::At(0)], &mut memory);
    let count = if result == 0 { (memory[0] as usize).min(MOST) } else { return Ok(result) };
    memory = vec![0; 1 + 3 * count];
    memory[0] = count as u64;
    if count > 0 {
        let words = [Word::Is(graph), Word::At(1), Word::At(1 + count), Word::At(1 + 2 * count), Word::At(0)];
        let result = driver.named("cuGraphGetEdges_v2", &words, &mut memory);
        if result != 0 {
            // Without a text: the client fetches none after an error.
            return Ok(result);
        }
    }
    let places: HashMap<u64, usize> = nodes.into_iter().zip(0..).collect();
    for (from, to) in memory[1..].iter().zip(&memory[1 + count..1 + 2 * count]) {
        if let (Some(from), Some(to)) = (places.get(from), places.get(to)) {
            text += &format!("\"{from}\" -> \"{to}\";\n");
        }
    }
    text += "}\n";
    parts.lane.made.set(text.len(), || text.into_bytes())?;
    put(parts.reply, parts.lane.made.bytes.len() as u64);
    Ok(0)
}

/// Memory that a call has taken for parameters of nodes, before the driver has them.
pub(super) struct Growth {
    /// The node or graph to charge. Its number is 0 if the call returns it.
    of: (Object, u64),
    /// The driver's handle of the node in an executable graph.
    part: u64,
    charge: Charge,
}

impl Growth {
    /// Takes memory for the parameters of the node that the call adds, or that its first parameters name.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the budget has no room.
    pub(super) fn new(call: &Call<'_>, mut reader: Reader<'_>, bytes: u64) -> Result<Self, Refused> {
        let first = FUNCTIONS[call.number].parameters.first().map(|first| first.kind);
        let (of, part) = match first {
            Some(Kind::Handle(Object::Exec)) => {
                let exec = reader.word()?;
                let node = call.session.handles().real(Object::Node, reader.word()?)?;
                ((Object::Exec, exec), node)
            }
            Some(Kind::Handle(Object::Node)) => ((Object::Node, reader.word()?), 0),
            _ => ((Object::Node, 0), 0),
        };
        Ok(Self::of(call, of, part, bytes)?)
    }

    /// Takes the bytes that the parameters of a part of an object need beyond its charge.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the budget has no room.
    fn of(call: &Call<'_>, of: (Object, u64), part: u64, bytes: u64) -> Result<Self, u32> {
        let growth = call.session.handles().growth(of.0, of.1, part, bytes);
        Ok(Self { of, part, charge: call.session.host().take(growth)? })
    }

    /// Charges the object after a call that succeeded. The reply of a call that made the object begins with its number.
    pub(super) fn done(self, call: &Call<'_>, result: u32, reply: &[u8]) -> Result<u32, Refused> {
        if result == 0 {
            let id = if self.of.1 == 0 { Reader(reply).word()? } else { self.of.1 };
            self.given(call, id);
        }
        Ok(result)
    }

    /// Charges the object that has this number.
    fn given(self, call: &Call<'_>, id: u64) {
        call.session.handles().add_parameters(self.of.0, id, self.part, self.charge);
    }
}

/// Returns an upper bound of the bytes that a driver needs for the parameters of a kernel: their values, and for each its place and a pointer.
fn of_layout(layout: &Layout) -> u64 {
    let end = layout.iter().map(|(offset, size)| offset.saturating_add(*size)).max().unwrap_or(0);
    end.saturating_add(PLACE * layout.len() as u64)
}

/// Returns the same for a function or a kernel by its driver handle, which the program may not know.
fn of_kernel(session: &Session, object: Object, real: u64) -> Result<u64, u32> {
    let id = session.handles().id(object, real);
    let Some(id) = id else {
        let name = if object == Object::Kernel { "cuKernelGetParamInfo" } else { "cuFuncGetParamInfo" };
        return Ok(of_layout(&session.layout(name, real)?));
    };
    session.lay_out(id)?;
    let handles = session.handles();
    Ok(of_layout(handles.function(id)?.1.ok_or(code::INVALID_HANDLE)?))
}

/// Returns how much more than its payload a launch needs in a graph.
pub(super) fn of_launch(call: &Call<'_>, effect: Effect, payload: &[u8]) -> u64 {
    let id = Reader(payload).word();
    let (Effect::Launches(_), true, Ok(id)) = (effect, call.session.is_recorded(), id) else { return 0 };
    // The launch itself fails if the driver does not know the function.
    let _ = call.session.lay_out(id);
    let handles = call.session.handles();
    handles.function(id).ok().and_then(|(_, layout)| layout).map_or(0, |layout| PLACE * layout.len() as u64)
}

/// Returns an upper bound of the bytes that a node's parameters need beyond [`NODE`]. `known` caches the bytes of each function.
fn of_node(call: &Call<'_>, node: u64, kind: u64, known: &mut HashMap<u64, u64>) -> u64 {
    let ask = |name: &str, memory: &mut [u64]| {
        call.session.driver().named(name, &[Word::Is(node), Word::At(0)], memory) == 0
    };
    match kind {
        node::KERNEL => {
            let mut memory = [0; KERNEL];
            if !ask("cuGraphKernelNodeGetParams_v2", &mut memory) {
                return MOST_PARAMETERS;
            }
            let [function, kernel] = [memory[0], memory[LIBRARY_KERNEL]];
            let real = if function == 0 { kernel } else { function };
            *known.entry(real).or_insert_with(|| {
                let is_kernel = function == 0 || call.session.handles().knows(Object::Kernel, real);
                let object = if is_kernel { Object::Kernel } else { Object::Function };
                of_kernel(call.session, object, real).unwrap_or(MOST_PARAMETERS)
            })
        }
        node::VALUES => {
            let mut memory = [0; 4];
            let is_known = ask("cuGraphBatchMemOpNodeGetParams", &mut memory);
            OPERATION_BYTES * if is_known { memory[1] & 0xffff_ffff } else { OPERATIONS }
        }
        node::ALLOCATE => ALLOCATION_BYTES,
        _ => 0,
    }
}

/// Returns an upper bound of the host memory of a graph and the graphs in it. Stops counting when a copy would exceed the budget.
pub(super) fn size(call: &Call<'_>, graph: u64) -> u64 {
    size_up_to(call, graph, call.session.host().left())
}

/// Returns the same, and stops counting beyond `most` bytes.
pub(super) fn size_up_to(call: &Call<'_>, graph: u64, most: u64) -> u64 {
    let driver = call.session.driver();
    let (mut bytes, mut left, mut known) = (0u64, vec![graph], HashMap::new());
    while let Some(graph) = left.pop() {
        // The driver itself rejects a handle that is no graph.
        let nodes = nodes(driver, graph).unwrap_or_default();
        let count = nodes.len() as u64;
        let edges = EDGE.saturating_mul(edges::of_graph(driver, graph, count));
        bytes = bytes.saturating_add(cost(Object::Graph) + NODE * count).saturating_add(edges);
        bytes = bytes.saturating_add(REFERENCE.saturating_mul(call.session.handles().references(graph)));
        if bytes > most {
            break;
        }
        for node in nodes {
            let kind = kind_of(driver, node);
            bytes = bytes.saturating_add(kind.map_or(0, |kind| of_node(call, node, kind, &mut known)));
            left.extend(graphs_within(call, node));
        }
    }
    bytes
}

/// The graphs of a node: a child graph, and those that a condition chooses from.
fn graphs_within(call: &Call<'_>, node: u64) -> Vec<u64> {
    let mut graphs = graphs_in(call.session.driver(), node);
    graphs.extend(call.session.conditions().graphs.get(&node).into_iter().flatten());
    graphs
}

/// Returns an upper bound of the references to user objects that a copy of a graph has.
fn references(call: &Call<'_>, graph: u64) -> u64 {
    if !call.session.handles().has_references() {
        return 0;
    }
    let (mut count, mut left) = (0u64, vec![graph]);
    while let Some(graph) = left.pop() {
        count = count.saturating_add(call.session.handles().references(graph));
        let nodes = nodes(call.session.driver(), graph).unwrap_or_default();
        left.extend(nodes.into_iter().flat_map(|node| graphs_within(call, node)));
    }
    count
}

/// A graph and a user object, how often, and flags.
pub(super) fn retain(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let mut reader = parts.reader;
    let (graph, object, count) = (reader.word()?, reader.word()?, reader.word()?);
    let charge = call.session.host().take(REFERENCE)?;
    let result = pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    if result == 0 {
        call.session.handles().retain_user_object(graph, object, count, charge);
    }
    Ok(result)
}

/// A graph and a user object, and how often.
pub(super) fn release(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let mut reader = parts.reader;
    let (graph, object, count) = (reader.word()?, reader.word()?, reader.word()?);
    let result = pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    if result == 0 {
        call.session.handles().release_user_object(graph, object, count);
    }
    Ok(result)
}

/// Makes a call that copies a graph, parameter `at`, into the object that it returns first. Charges the copy to that object.
pub(super) fn copy_graph(
    call: &Call<'_>,
    parts: Parts<'_>,
    at: usize,
    object: Object,
) -> Result<u32, Refused> {
    let mut reader: Reader<'_> = parts.reader;
    for _ in 0..at {
        reader.word()?;
    }
    let graph = call.session.handles().real(Object::Graph, reader.word()?)?;
    let growth = Growth::of(call, (object, 0), 0, size(call, graph))?;
    let references = references(call, graph);
    let result = pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    growth.done(call, result, parts.reply)?;
    if result == 0 && references > 0 {
        // A node's are those of the graph that it was added to, which is behind whether the node is wanted.
        let mut reader = parts.reader;
        let (of, id) = match object {
            Object::Node => (Object::Graph, reader.word().and_then(|_| reader.word())?),
            _ => (object, Reader(parts.reply).word()?),
        };
        call.session.handles().copy_references(of, id, references);
    }
    Ok(result)
}

/// The nodes of a graph.
pub(super) fn nodes(driver: &Driver, graph: u64) -> Result<Vec<u64>, u32> {
    let mut memory = vec![0];
    let ask = |nodes: Word, memory: &mut [u64]| match driver.named(
        "cuGraphGetNodes",
        &[Word::Is(graph), nodes, Word::At(0)],
        memory,
    ) {
        0 => Ok(()),
        code => Err(code),
    };
    ask(Word::Is(0), &mut memory)?;
    let count = (memory[0] as usize).min(MOST);
    memory = vec![0; 1 + count];
    memory[0] = count as u64;
    if count > 0 {
        ask(Word::At(1), &mut memory)?;
    }
    Ok(memory.split_off(1))
}

/// The nodes of a graph that has no more than a few.
pub(super) fn few(driver: &Driver, graph: u64, most: usize) -> Option<Vec<u64>> {
    let mut memory = [0];
    let result = driver.named("cuGraphGetNodes", &[Word::Is(graph), Word::Is(0), Word::At(0)], &mut memory);
    (result == 0 && memory[0] <= most as u64).then(|| nodes(driver, graph).ok()).flatten()
}

/// A graph ends with its nodes.
pub(super) fn destroy(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let graph = call.session.handles().real(Object::Graph, parts.reader.clone().word()?)?;
    let mut gone = Vec::new();
    gone.push((Object::Graph, graph));
    within(call, graph, DEPTH, &mut gone);
    let result = pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    if result == 0 {
        end(call, gone);
    }
    Ok(result)
}

/// What the program has handles of is no more.
fn end(call: &Call<'_>, gone: Vec<(Object, u64)>) {
    let (mut handles, mut conditions) = (call.session.handles(), call.session.conditions());
    for (object, real) in gone {
        for id in conditions.end(object, real) {
            handles.end(Object::Conditional, id);
        }
        handles.end_real(object, real);
    }
}

/// A node ends, and the graph that is in it.
pub(super) fn destroy_node(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let node = call.session.handles().real(Object::Node, parts.reader.clone().word()?)?;
    let mut gone = Vec::new();
    child(call, node, DEPTH, &mut gone);
    gone.push((Object::Node, node));
    let dependents = edges::dependents(call.session.driver(), node);
    let result = pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    if result == 0 {
        end(call, gone);
        edges::recount(call.session, dependents);
    }
    Ok(result)
}

/// What a graph has of which the program may have handles.
fn within(call: &Call<'_>, graph: u64, depth: usize, gone: &mut Vec<(Object, u64)>) {
    if graph == 0 {
        return;
    }
    // What the driver does not tell is no graph, and is not destroyed either.
    for node in nodes(call.session.driver(), graph).unwrap_or_default() {
        gone.push((Object::Node, node));
        child(call, node, depth, gone);
    }
}

/// The same of the graphs in a node.
fn child(call: &Call<'_>, node: u64, depth: usize, gone: &mut Vec<(Object, u64)>) {
    let Some(depth) = depth.checked_sub(1) else { return };
    let mut graphs = graphs_in(call.session.driver(), node);
    graphs.extend(call.session.conditions().graphs.get(&node).into_iter().flatten());
    for graph in graphs {
        gone.push((Object::Graph, graph));
        within(call, graph, depth, gone);
    }
}

/// Returns the kind of a node.
fn kind_of(driver: &Driver, node: u64) -> Option<u64> {
    let mut memory = [0];
    let is_known =
        node != 0 && driver.named("cuGraphNodeGetType", &[Word::Is(node), Word::At(0)], &mut memory) == 0;
    is_known.then_some(memory[0] & 0xffff_ffff)
}

/// The graphs in a node.
pub(super) fn graphs_in(driver: &Driver, node: u64) -> Vec<u64> {
    let mut memory = [0];
    let is_graph = kind_of(driver, node) == Some(node::GRAPH);
    let asked = is_graph
        && driver.named("cuGraphChildGraphNodeGetGraph", &[Word::Is(node), Word::At(0)], &mut memory) == 0;
    if asked { memory.to_vec() } else { Vec::new() }
}
