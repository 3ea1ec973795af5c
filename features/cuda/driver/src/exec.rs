//! Graphs that run: copies of what nodes did when each was made, which can be changed.

use crate::{
    error::{Error, Result},
    graph::Task,
    state::{self, State},
    stream::Work,
    user_object::{self, Kept},
};
use std::collections::BTreeMap;

/// `CUgraphExecUpdateResult`.
const TOPOLOGY: u32 = 2;
const KIND: u32 = 3;

/// A graph that runs.
#[derive(Clone)]
pub(crate) struct Exec {
    graph: u64,
    flags: u64,
    steps: Vec<Step>,
    objects: Kept,
}

/// A node of it.
#[derive(Clone)]
pub(crate) struct Step {
    node: u64,
    pub(crate) task: Task,
    /// Those that it is behind, by their places.
    behind: Vec<usize>,
    enabled: bool,
    /// What a graph in it does, and the objects that graph keeps. Of a condition each of its graphs is a step.
    pub(crate) inner: Vec<Step>,
    objects: Kept,
}

/// Objects that steps keep, those of graphs within graphs too.
fn kept(steps: &[Step]) -> Kept {
    let mut all = Kept::new();
    for step in steps {
        for (id, count) in step.objects.iter().map(|(id, count)| (*id, *count)).chain(kept(&step.inner)) {
            *all.entry(id).or_default() += count;
        }
    }
    all
}

impl State {
    /// What the nodes of a graph do now.
    fn steps(&self, graph: u64) -> Result<Vec<Step>> {
        let nodes = &self.graphs.get(&graph).ok_or(Error::InvalidValue)?.nodes;
        let places: BTreeMap<u64, usize> = nodes.iter().copied().zip(0..).collect();
        let step = |id: &u64| {
            let node = &self.nodes[id];
            let behind = node.behind.iter().filter_map(|node| places.get(node).copied()).collect();
            let within =
                |graph: &u64| Ok::<_, Error>((self.steps(*graph)?, self.graphs[graph].objects.clone()));
            let (inner, objects) = match &node.task {
                Task::Graph(graph) => within(graph)?,
                Task::Conditional { graphs, .. } => {
                    let step = |graph: &u64| {
                        let ((inner, objects), task) = (within(graph)?, Task::Graph(*graph));
                        Ok(Step { node: *graph, task, behind: Vec::new(), enabled: true, inner, objects })
                    };
                    (graphs.iter().map(step).collect::<Result<_>>()?, Kept::new())
                }
                _ => Default::default(),
            };
            Ok(Step { node: *id, task: node.task.clone(), behind, enabled: true, inner, objects })
        };
        nodes.iter().map(step).collect()
    }

    fn run(&mut self, stream: u64, steps: &[Step]) -> Result {
        for at in order(steps)? {
            let step = &steps[at];
            if !step.enabled {
                continue;
            }
            let work = match &step.task {
                Task::Graph(_) | Task::Moved(_) => {
                    self.run(stream, &step.inner)?;
                    continue;
                }
                Task::Record(event) => {
                    let mark = self.submit(stream, Work::Record { event: *event }, Vec::new())?;
                    self.mark(*event, mark);
                    continue;
                }
                Task::Wait(event) => {
                    let behind = self.mark_of(*event).into_iter().collect();
                    self.submit(stream, Work::Nothing, behind)?;
                    continue;
                }
                Task::Kernel(launch) => Work::Launch(launch.clone()),
                Task::Copy(copy) => Work::Copy(copy.clone()),
                Task::Fill(fill) => Work::Fill(fill.clone()),
                Task::Host { function, data } => Work::Host { function: *function, data: *data },
                Task::Nothing => Work::Nothing,
                Task::Values { operations, .. } => {
                    for work in works(operations)? {
                        self.submit(stream, work, Vec::new())?;
                    }
                    continue;
                }
                Task::Conditional { handle, how, .. } => {
                    Work::Conditional { handle: *handle, how: *how, graphs: step.inner.clone() }
                }
                Task::Other(work) => work.clone(),
            };
            self.submit(stream, work, Vec::new())?;
        }
        Ok(())
    }

    fn step(&mut self, exec: u64, node: u64) -> Result<&mut Step> {
        let exec = self.execs.get_mut(&exec).ok_or(Error::InvalidValue)?;
        exec.steps.iter_mut().find(|step| step.node == node).ok_or(Error::InvalidValue)
    }
}

/// In which order steps run.
pub(crate) fn order(steps: &[Step]) -> Result<Vec<usize>> {
    let mut done = vec![false; steps.len()];
    let next = |_| {
        // Of those that may run the last is taken, so that a dependency that is missing shows.
        let ready = |at: &usize| !done[*at] && steps[*at].behind.iter().all(|before| done[*before]);
        let at = (0..steps.len()).rev().find(ready).ok_or(Error::InvalidValue)?;
        done[at] = true;
        Ok(at)
    };
    steps.iter().map(next).collect()
}

/// What operations on values do.
pub(crate) fn works(operations: &[[u64; 6]]) -> Result<Vec<Work>> {
    let work = |&[operation, at, value, flags, ..]: &[u64; 6]| match operation as u32 {
        1 => Ok(Work::Wait { at, value: value & 0xffff_ffff, wide: false, flags: flags as u32 }),
        2 => Ok(Work::Write { at, value: value & 0xffff_ffff, wide: false }),
        4 => Ok(Work::Wait { at, value, wide: true, flags: flags as u32 }),
        5 => Ok(Work::Write { at, value, wide: true }),
        3 | 6 => Ok(Work::Nothing),
        _ => Err(Error::InvalidValue),
    };
    operations.iter().map(work).collect()
}

/// `cuGraphInstantiate`.
pub(crate) fn instantiate(graph: u64, flags: u64) -> Result<u64> {
    let mut state = state::lock();
    state.current()?;
    if flags & !15 != 0 {
        return Err(Error::InvalidValue);
    }
    let steps = state.steps(graph)?;
    let has_memory = steps.iter().any(|step| State::is_of_memory(&step.task));
    if has_memory && state.execs.values().any(|exec| exec.graph == graph) {
        return Err(Error::NotSupported);
    }
    let objects = state.graphs[&graph].objects.clone();
    state.keep_objects(&objects);
    state.keep_objects(&kept(&steps));
    let id = state.id();
    state.execs.insert(id, Exec { graph, flags, steps, objects });
    Ok(id)
}

/// `cuGraphLaunch`.
pub(crate) fn launch(exec: u64, handle: u64) -> Result {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    let exec = state.execs.get(&exec).ok_or(Error::InvalidValue)?.clone();
    if exec.steps.iter().any(|step| matches!(step.task, Task::Conditional { .. })) {
        state.submit(stream, Work::Assign(exec.steps.clone()), Vec::new())?;
    }
    state.run(stream, &exec.steps)?;
    if state.streams[&stream].capture.is_some() {
        return Ok(());
    }
    // What it keeps is there until it has run, whatever becomes of it meanwhile.
    for kept in [exec.objects, kept(&exec.steps)].into_iter().filter(|kept| !kept.is_empty()) {
        state.keep_objects(&kept);
        state.submit(stream, Work::LetGo(kept), Vec::new())?;
    }
    Ok(())
}

/// `cuGraphExecGetFlags`.
pub(crate) fn flags(exec: u64) -> Result<u64> {
    Ok(state::lock().execs.get(&exec).ok_or(Error::InvalidValue)?.flags)
}

/// Gives a node of an executable graph another task of its kind.
pub(crate) fn set(exec: u64, node: u64, task: Task) -> Result {
    let mut state = state::lock();
    let (inner, objects) = match task {
        Task::Graph(graph) => (state.steps(graph)?, state.graphs[&graph].objects.clone()),
        Task::Record(event) | Task::Wait(event) if !state.events.contains_key(&event) => {
            return Err(Error::InvalidValue);
        }
        _ => Default::default(),
    };
    let step = state.step(exec, node)?;
    if step.task.kind() != task.kind() || differs(&step.inner, &inner).is_some() {
        return Err(Error::InvalidValue);
    }
    let new = Step { node, task, behind: step.behind.clone(), enabled: step.enabled, inner, objects };
    let old = std::mem::replace(step, new.clone());
    state.exchange_objects(kept(&[old]), kept(&[new]));
    Ok(())
}

/// Why one can't become the other: the result, and the place.
fn differs(old: &[Step], new: &[Step]) -> Option<(u32, usize)> {
    if old.len() != new.len() {
        return Some((TOPOLOGY, new.len().min(old.len())));
    }
    old.iter().zip(new).enumerate().find_map(|(at, (old, new))| {
        let why = if old.task.kind() != new.task.kind() {
            KIND
        } else if old.behind != new.behind || differs(&old.inner, &new.inner).is_some() {
            TOPOLOGY
        } else {
            return None;
        };
        Some((why, at))
    })
}

/// `cuGraphExecUpdate`: why not, and at which node.
pub(crate) fn update(exec: u64, graph: u64) -> Result<Option<(u32, u64)>> {
    let mut state = state::lock();
    let new = state.steps(graph)?;
    let exec = state.execs.get_mut(&exec).ok_or(Error::InvalidValue)?;
    if let Some((why, at)) = differs(&exec.steps, &new) {
        return Ok(Some((why, new.get(at).map_or(0, |step| step.node))));
    }
    let (old, now) = (kept(&exec.steps), kept(&new));
    for (old, new) in exec.steps.iter_mut().zip(new) {
        // Nodes are still found by those that it was made of.
        (old.task, old.inner, old.objects) = (new.task, new.inner, new.objects);
    }
    state.exchange_objects(old, now);
    Ok(None)
}

/// `cuGraphNodeSetEnabled`: of kernels, copies and fills.
pub(crate) fn enable(exec: u64, node: u64, enabled: bool) -> Result {
    let mut state = state::lock();
    let step = state.step(exec, node)?;
    if step.task.kind() > 2 {
        return Err(Error::InvalidValue);
    }
    step.enabled = enabled;
    Ok(())
}

/// `cuGraphNodeGetEnabled`.
pub(crate) fn is_enabled(exec: u64, node: u64) -> Result<bool> {
    Ok(state::lock().step(exec, node)?.enabled)
}

/// `cuGraphExecDestroy`.
pub(crate) fn destroy(exec: u64) -> Result {
    let mut state = state::lock();
    let exec = state.execs.remove(&exec).ok_or(Error::InvalidValue)?;
    let mut ended = Vec::new();
    state.let_objects_go(kept(&exec.steps), &mut ended);
    state.let_objects_go(exec.objects, &mut ended);
    drop(state);
    user_object::end(ended);
    Ok(())
}
