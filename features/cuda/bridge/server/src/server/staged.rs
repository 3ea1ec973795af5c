//! Copies in graphs of memory that only the program has.
//!
//! To the driver such a copy is a graph in a node: a function that fetches what is read from the program to memory of this process, the copy, and a
//! function that stores there what was written. So bytes are read when the node runs, and are written before anybody can see that it has: the driver
//! orders it, in clones, updates and graphs within graphs as well. Its memory is kept by an object of the driver's, as long as a graph has it. To the
//! program it is a node of a copy. Natively such memory is read before a launch returns, so a launch is waited for where a graph may read it.
//!
//! Two graphs that run never have the same memory: what a graph has is made anew each time before what runs is made of it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vm_cuda_api::{FUNCTIONS, Object, number};

use super::callbacks;
use super::hand::{Parts, records};
use super::lane::Call;
use super::nodes::{self, DEPTH, Growth};
use super::pack::{self, Refused};
use super::session::{Session, locked};
use super::sys::staged::{Memory, keep_staged, move_function, with_staged};
use super::sys::{self, Word};
use crate::wire::strided::{Form, HOST};
use crate::wire::{CHUNK, Reader, code, node, put};

/// `CUDA_ERROR_ILLEGAL_ADDRESS`: the program does not have the memory any more.
const ILLEGAL_ADDRESS: u32 = 700;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
const MOVE: u64 = 1;
/// Memory of no more bytes is taken for whatever is less.
const SMALL: u64 = 64 << 10;

/// Rows of the program's memory, `layers` times.
#[derive(Clone, Copy, Debug)]
struct Rows {
    at: u64,
    width: u64,
    pitch: u64,
    rows: u64,
    layer: u64,
    layers: u64,
}

impl Rows {
    /// Those of an end of a copy.
    fn of(copy: &[u64], is_target: bool) -> Option<Self> {
        let form = Form::Three;
        let [width, rows, layers] = form.size(copy);
        let end = form.ends()[usize::from(is_target)];
        let offset = |place| form.offset(copy, is_target, place);
        let start = offset([0; 3])?;
        let stride = |place| offset(place).map_or(0, |at| at - start);
        let at = copy[end.host].checked_add(start)?;
        Some(Self { at, width, pitch: stride([0, 1, 0]), rows, layer: stride([0, 0, 1]), layers })
    }

    /// Its parts, of no more bytes than go at once: an address, a width, a pitch and rows.
    fn parts(self) -> impl Iterator<Item = [u64; 4]> {
        let Self { at, width, pitch, rows, layer, layers } = self;
        let most = CHUNK as u64;
        // Without gaps it is one row.
        let (width, rows) = if pitch == width || rows == 1 { (width * rows, 1) } else { (width, rows) };
        (0..layers).flat_map(move |z| {
            let step = (most / width.max(1)).max(1);
            (0..rows).step_by(step as usize).flat_map(move |y| {
                (0..width).step_by(CHUNK).map(move |x| {
                    let at = at.wrapping_add(z * layer).wrapping_add(y * pitch).wrapping_add(x);
                    [at, (width - x).min(most), pitch, step.min(rows - y)]
                })
            })
        })
    }
}

/// What a session's copies have in common.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Was there ever one?
    any: AtomicU32,
    /// Memory of copies that are no more.
    spare: Mutex<Vec<Memory>>,
    /// What failed, which all calls say then; 0 before.
    pub(super) failed: AtomicU32,
}

impl Counts {
    /// Memory of so many bytes, which the driver knows: of other memory it reads what is there when a graph is launched, before anything was fetched.
    fn take(&self, session: &Session, len: u64) -> Result<Memory, u32> {
        /// `CU_MEMHOSTREGISTER_PORTABLE`, and `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
        const PORTABLE: u64 = 1;
        const KNOWN: u32 = 712;
        let driver = session.driver();
        let mut spare = locked(&self.spare);
        let fits = |memory: &Memory| memory.len() >= len && memory.len() <= len.saturating_mul(2).max(SMALL);
        let memory = match spare.iter().position(fits) {
            Some(at) => spare.swap_remove(at),
            None => {
                let mut charge = session.host().charge(0);
                // Others make room.
                while charge.grow(Memory::size(len).ok_or(code::OUT_OF_MEMORY)?).is_err() {
                    let memory = spare.pop().ok_or(code::OUT_OF_MEMORY)?;
                    // With its context it is known no more.
                    driver.named("cuMemHostUnregister", &[Word::Is(memory.at())], &mut []);
                }
                Memory::new(len, charge).ok_or(code::OUT_OF_MEMORY)?
            }
        };
        let words = [memory.at(), memory.len(), PORTABLE].map(Word::Is);
        match driver.named("cuMemHostRegister_v2", &words, &mut []) {
            0 | KNOWN => Ok(memory),
            code => {
                spare.push(memory);
                Err(code)
            }
        }
    }
}

/// A copy.
pub(super) struct Staged {
    /// As the program gave it, with the driver's handles.
    copy: Vec<u64>,
    context: u64,
    /// What is fetched, and what is stored.
    ends: [Option<Rows>; 2],
    memory: [Option<Memory>; 2],
    /// What keeps this.
    object: AtomicU64,
    callbacks: callbacks::Shared,
    counts: Arc<Counts>,
}

impl Drop for Staged {
    fn drop(&mut self) {
        // The driver calls this, and may not be called by it: it knows the memory on.
        locked(&self.counts.spare).extend(self.memory.iter_mut().filter_map(Option::take));
    }
}

impl Staged {
    pub(super) fn is_kept_by(&self, object: u64) {
        self.object.store(object, Ordering::Relaxed);
    }

    /// Fetches or stores.
    pub(super) fn move_bytes(&self, stores: bool) {
        let end = usize::from(stores);
        let (Some(rows), Some(memory)) = (self.ends[end], &self.memory[end]) else { return };
        let mut done = 0;
        for part in rows.parts() {
            let len = part[1] * part[3];
            let moved = memory.with(done, len, |bytes| self.callbacks.move_bytes(part, bytes, stores));
            if moved != Some(true) {
                self.counts.failed.store(ILLEGAL_ADDRESS, Ordering::SeqCst);
                return;
            }
            done += len;
        }
    }
}

/// A copy with its context, of which these ends are the program's memory alone.
#[derive(Clone)]
pub(super) struct Plan {
    pub(super) copy: Vec<u64>,
    pub(super) context: u64,
    pub(super) own: [bool; 2],
}

impl Plan {
    /// What the driver is to keep for it.
    fn make(&self, call: &Call<'_>) -> Result<Staged, u32> {
        let counts = call.session.staged().clone();
        counts.any.store(1, Ordering::Relaxed);
        let (copy, context, object) = (self.copy.clone(), self.context, AtomicU64::new(0));
        let (callbacks, ends, memory) = (call.session.callbacks(), [None; 2], [None, None]);
        let mut staged = Staged { copy, context, ends, memory, object, callbacks, counts };
        for end in (0..2).filter(|end| self.own[*end]) {
            let rows = Rows::of(&self.copy, end == 1).ok_or(code::INVALID_VALUE)?;
            let len = rows.width.checked_mul(rows.rows).and_then(|len| len.checked_mul(rows.layers));
            let len = len.filter(|len| *len > 0).ok_or(code::INVALID_VALUE)?;
            staged.memory[end] = Some(staged.counts.take(call.session, len)?);
            staged.ends[end] = Some(rows);
        }
        Ok(staged)
    }

    /// The copy that the driver makes.
    fn driver_copy(staged: &Staged) -> Vec<u64> {
        let (form, mut copy) = (Form::Three, staged.copy.clone());
        for (end, memory) in staged.memory.iter().enumerate() {
            if let Some(memory) = memory {
                form.pack(&mut copy, end == 1);
                copy[form.ends()[end].host] = memory.at();
            }
        }
        copy
    }

    /// Has a graph keep what it needs: where that is, and the copy that the driver makes.
    fn keep(&self, call: &Call<'_>, graph: u64) -> Result<(u64, Vec<u64>), u32> {
        let driver = call.session.driver();
        let staged = self.make(call)?;
        let copy = Self::driver_copy(&staged);
        let (object, at) = keep_staged(driver, staged)?;
        let words = [graph, object, 1, MOVE].map(Word::Is);
        let result = driver.named("cuGraphRetainUserObject", &words, &mut []);
        if result != 0 {
            driver.named("cuUserObjectRelease", &[Word::Is(object), Word::Is(1)], &mut []);
            return Err(result);
        }
        Ok((at, copy))
    }

    /// Puts the nodes into a graph that has none.
    fn fill(&self, call: &Call<'_>, graph: u64) -> Result<(), u32> {
        let driver = call.session.driver();
        let (at, copy) = self.keep(call, graph)?;
        let mut behind = 0;
        let mut add = |name: &str, of: &[u64], last: Option<u64>| {
            let mut memory = vec![0, behind];
            memory.extend(of);
            let count = u64::from(behind != 0);
            let mut words = vec![Word::At(0), Word::Is(graph), Word::At(1), Word::Is(count), Word::At(2)];
            words.extend(last.map(Word::Is));
            let result = driver.named(name, &words, &mut memory);
            behind = memory[0];
            if result == 0 { Ok(()) } else { Err(result) }
        };
        if self.own[0] {
            add("cuGraphAddHostNode", &[move_function(false), at], None)?;
        }
        add("cuGraphAddMemcpyNode", &copy, Some(self.context))?;
        if self.own[1] {
            add("cuGraphAddHostNode", &[move_function(true), at], None)?;
        }
        Ok(())
    }

    /// A graph of it, for as long as something is done with that.
    fn with_graph<T>(
        &self,
        call: &Call<'_>,
        act: impl FnOnce(u64) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        let driver = call.session.driver();
        let mut made = [0];
        let result = driver.named("cuGraphCreate", &[Word::At(0), Word::Is(0)], &mut made);
        if result != 0 {
            return Err(result.into());
        }
        let done = self.fill(call, made[0]).map_err(Refused::from).and_then(|()| act(made[0]));
        driver.named("cuGraphDestroy", &[Word::Is(made[0])], &mut []);
        done
    }
}

/// A node of such a copy: the graph in it, and its nodes with their kinds.
struct Found {
    graph: u64,
    nodes: Vec<(u64, u64)>,
    object: u64,
    plan: Plan,
}

/// Looks whether a node is one.
fn find(call: &Call<'_>, node: u64) -> Option<Found> {
    if node == 0 || call.session.staged().any.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let driver = call.session.driver();
    let ask = |name: &str, node: u64| {
        let mut memory = [0; 2];
        (driver.named(name, &[Word::Is(node), Word::At(0)], &mut memory) == 0).then_some(memory)
    };
    let kind = |node: u64| ask("cuGraphNodeGetType", node).map(|memory| memory[0] & 0xffff_ffff);
    if kind(node)? != node::GRAPH {
        return None;
    }
    let [graph, _] = ask("cuGraphChildGraphNodeGetGraph", node)?;
    let nodes = nodes::few(driver, graph, 3)?;
    let nodes: Vec<_> = nodes.into_iter().map(|node| Some((node, kind(node)?))).collect::<Option<_>>()?;
    let at = nodes.iter().find_map(|(node, kind)| {
        let [function, at] = ask("cuGraphHostNodeGetParams", *node).filter(|_| *kind == node::FUNCTION)?;
        [false, true].map(move_function).contains(&function).then_some(at)
    })?;
    let (plan, object) = with_staged(at, |staged| {
        let (copy, context) = (staged.copy.clone(), staged.context);
        let own = [0, 1].map(|end: usize| staged.ends[end].is_some());
        (Plan { copy, context, own }, staged.object.load(Ordering::Relaxed))
    });
    Some(Found { graph, nodes, object, plan })
}

impl Found {
    /// Gives the node another copy, or memory of its own.
    fn set(&self, call: &Call<'_>, plan: &Plan) -> Result<(), u32> {
        let driver = call.session.driver();
        let done = |result| if result == 0 { Ok(()) } else { Err(result) };
        if plan.own == self.plan.own {
            let (at, copy) = plan.keep(call, self.graph)?;
            for (node, kind) in &self.nodes {
                let mut memory = [0; 2];
                let words = [Word::Is(*node), Word::At(0)];
                if *kind == node::COPY {
                    done(driver.named("cuGraphMemcpyNodeSetParams", &words, &mut copy.clone()))?;
                } else {
                    done(driver.named("cuGraphHostNodeGetParams", &words, &mut memory))?;
                    memory[1] = at;
                    done(driver.named("cuGraphHostNodeSetParams", &words, &mut memory))?;
                }
            }
        } else {
            for (node, _) in &self.nodes {
                done(driver.named("cuGraphDestroyNode", &[Word::Is(*node)], &mut []))?;
            }
            plan.fill(call, self.graph)?;
        }
        let words = [self.graph, self.object, 1].map(Word::Is);
        done(driver.named("cuGraphReleaseUserObject", &words, &mut []))
    }
}

/// Gives all such nodes of a graph memory of their own, as something that runs is made of it.
pub(super) fn renew(call: &Call<'_>, graph: u64) -> Result<(), u32> {
    if call.session.staged().any.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    renew_within(call, graph, DEPTH)
}

fn renew_within(call: &Call<'_>, graph: u64, depth: usize) -> Result<(), u32> {
    let driver = call.session.driver();
    // What the driver does not know is no graph, as it will say itself.
    let (Some(depth), true) = (depth.checked_sub(1), graph != 0) else { return Ok(()) };
    for node in nodes::nodes(driver, graph).unwrap_or_default() {
        match find(call, node) {
            Some(found) => found.set(call, &found.plan)?,
            None => {
                for inner in nodes::graphs_in(driver, node) {
                    renew_within(call, inner, depth)?;
                }
            }
        }
    }
    Ok(())
}

/// What is done with a node of a copy.
enum Act {
    Add,
    Set,
    SetRunning,
}

fn act(name: &str) -> Act {
    if name.starts_with("cuGraphAdd") {
        Act::Add
    } else if name.starts_with("cuGraphExec") {
        Act::SetRunning
    } else {
        Act::Set
    }
}

/// Puts a copy into a node where it is the program's memory alone, or into a node that was made for that. `None` where it is neither.
pub(super) fn put_copy(
    call: &mut Call<'_>,
    parts: &mut Parts<'_>,
    plan: &Plan,
) -> Option<Result<u32, Refused>> {
    let function = &FUNCTIONS[call.number];
    let is_own = plan.own != [false; 2];
    let what = act(&function.name);
    if matches!(what, Act::Add) {
        return is_own.then(|| plan.with_graph(call, |graph| add(call, parts, graph)));
    }
    let mut reader = parts.reader;
    let mut real = |object| {
        let id = reader.word()?;
        Ok::<_, Refused>(call.session.handles().real(object, id)?)
    };
    let handles = (|| {
        let exec = if matches!(what, Act::SetRunning) { real(Object::Exec)? } else { 0 };
        Ok::<_, Refused>([exec, real(Object::Node)?])
    })();
    let [exec, node] = match handles {
        Ok(handles) => handles,
        Err(refused) => return Some(Err(refused)),
    };
    match find(call, node) {
        // The driver has it as another kind of node.
        None => is_own.then_some(Err(code::NOT_SUPPORTED.into())),
        Some(found) if exec == 0 => Some(found.set(call, plan).map(|()| 0).map_err(Refused::from)),
        Some(found) if found.plan.own != plan.own => Some(Err(code::NOT_SUPPORTED.into())),
        Some(_) => Some(plan.with_graph(call, |graph| {
            let words = [exec, node, graph].map(Word::Is);
            Ok(call.session.driver().named("cuGraphExecChildGraphNodeSetParams", &words, &mut []))
        })),
    }
}

/// Adds a node of a graph, as the call says whose node of a copy this is.
fn add(call: &Call<'_>, parts: &mut Parts<'_>, graph: u64) -> Result<u32, Refused> {
    let function = &FUNCTIONS[call.number];
    if node::kind(&function.name).is_none() {
        let mut any = nodes::any(node::GRAPH, vec![graph]);
        let place = sys::place_words(&mut any);
        return pack::make_with(call.session, call.number, parts.reader.0, parts.reply, Some(place));
    }
    // Node, graph, dependencies, count; then the copy, a context, and the dependencies.
    const HEADS: usize = 4;
    const REST: usize = 2;
    let id = call.session.handles().give(Object::Graph, graph)?;
    let mut payload = Vec::with_capacity(parts.reader.0.len());
    let reader = &mut parts.reader;
    let made = (|| {
        for _ in 0..HEADS {
            put(&mut payload, reader.word()?);
        }
        put(&mut payload, id);
        for _ in 0..REST {
            reader.word()?;
        }
        payload.extend_from_slice(reader.0);
        let number = number("cuGraphAddChildGraphNode").ok_or(code::NOT_SUPPORTED)?;
        pack::make(call.session, number, &payload, parts.reply)
    })();
    call.session.handles().end(Object::Graph, id);
    made
}

/// The copy of such a node, as the program gave it.
pub(super) fn copy_of(call: &Call<'_>, node: u64) -> Option<Vec<u64>> {
    find(call, node).map(|found| found.plan.copy)
}

/// The kind of a node, as the program knows it.
pub(super) fn kind(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let mut reader = parts.reader;
    let node = call.session.handles().real(Object::Node, reader.word()?)?;
    let result = pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
    if result == 0 && parts.reply.len() == 8 && find(call, node).is_some() {
        parts.reply.clear();
        put(parts.reply, node::COPY);
    }
    Ok(result)
}

/// The graph in a node; one that is a copy to the program has none.
pub(super) fn child(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    let mut reader = parts.reader;
    let node = call.session.handles().real(Object::Node, reader.word()?)?;
    if find(call, node).is_some() {
        return Err(code::INVALID_VALUE.into());
    }
    pack::make(call.session, call.number, parts.reader.0, parts.reply)
}

/// A graph that runs, and a stream: that is waited for if the program waits, whose memory is then read.
pub(super) fn launch(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    if !call.asks {
        return pack::make(call.session, call.number, parts.reader.0, parts.reply);
    }
    let mut reader = parts.reader;
    let (_, stream) = (reader.word()?, reader.word()?);
    let stream = call.session.handles().real(Object::Stream, stream)?;
    let records = records(call, stream);
    match pack::make(call.session, call.number, parts.reader.0, parts.reply)? {
        0 if !records => Ok(call.wait_for(stream)),
        result => Ok(result),
    }
}

/// What makes something that runs of a graph, which is the parameter at a place.
pub(super) fn make_of(call: &mut Call<'_>, parts: Parts<'_>, at: usize) -> Result<u32, Refused> {
    let mut reader: Reader<'_> = parts.reader;
    for _ in 0..at {
        reader.word()?;
    }
    let graph = call.session.handles().real(Object::Graph, reader.word()?)?;
    renew(call, graph)?;
    if at > 1 {
        let growth = Growth::new(call, parts.reader, nodes::size(call, graph))?;
        let result = pack::make(call.session, call.number, parts.reader.0, parts.reply)?;
        return growth.done(call, result, parts.reply);
    }
    nodes::copy_graph(call, parts, at, Object::Exec)
}

/// Which ends of a copy are memory that only the program has.
pub(super) fn own_ends(call: &Call<'_>, copy: &[u64]) -> [bool; 2] {
    let form = Form::Three;
    let is_own = |is_target: bool| {
        let end = form.ends()[usize::from(is_target)];
        copy[end.kind] & 0xffff_ffff == HOST
            && form.extent(copy, is_target).is_none_or(|extent| !call.session.has(copy[end.host], extent))
    };
    [is_own(false), is_own(true)]
}
