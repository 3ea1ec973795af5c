//! Graphs: nodes, and which is behind which.

use crate::{
    conditional::How,
    copy::{Copy, Fill},
    error::{Error, Result},
    ffi::{Copy3d, FillNode},
    graph_memory::Wanted,
    module::Launch,
    state::{self, State},
    stream::Work,
    sys::HostFunction,
    user_object::{self, Ended, Kept},
};
use std::collections::{BTreeMap, BTreeSet};

/// What a node does.
#[derive(Clone)]
pub(crate) enum Task {
    Kernel(Launch),
    Copy(Copy),
    Fill(Fill),
    Host {
        function: HostFunction,
        data: u64,
    },
    /// A graph of the node's own.
    Graph(u64),
    /// A graph of the program's that becomes the node's own.
    Moved(u64),
    Nothing,
    Wait(u64),
    Record(u64),
    /// Waits for values of memory, and writes there, as `CUstreamBatchMemOpParams` says.
    Values {
        context: u64,
        operations: Vec<[u64; 6]>,
        flags: u32,
    },
    Conditional {
        handle: u64,
        how: How,
        graphs: Vec<u64>,
    },
    /// What captures record that no node can be made of by hand.
    Other(Work),
}

impl Task {
    /// `CUgraphNodeType`.
    pub(crate) fn kind(&self) -> i32 {
        match self {
            Self::Kernel(_) => 0,
            Self::Copy(_) => 1,
            Self::Fill(_) => 2,
            Self::Host { .. } => 3,
            Self::Graph(_) | Self::Moved(_) => 4,
            Self::Nothing => 5,
            Self::Wait(_) => 6,
            Self::Record(_) => 7,
            Self::Other(Work::Allocate { .. }) => 10,
            Self::Other(Work::Free { .. } | Work::Unallocate { .. }) => 11,
            Self::Other(_) | Self::Values { .. } => 12,
            Self::Conditional { .. } => 13,
        }
    }
}

pub(crate) struct Node {
    graph: u64,
    pub(crate) task: Task,
    pub(crate) behind: Vec<u64>,
    /// The node that it is a copy of.
    origin: u64,
    /// Where each parameter of a kernel is, for who asks; the graphs of a conditional node; operations on values.
    pointers: Box<[u64]>,
    /// Attributes of a kernel that were set.
    attributes: BTreeMap<u32, [u64; 8]>,
}

impl Graph {
    /// One that runs as a condition says.
    pub(crate) fn of_condition() -> Self {
        Self { is_inner: true, is_conditional: true, ..Self::default() }
    }

    /// May it have a node? Graphs that run as a condition says have work of devices alone.
    fn takes(&self, task: &Task) -> bool {
        !self.is_conditional || matches!(task.kind(), 0..=2 | 4 | 5 | 13)
    }
}

#[derive(Default)]
pub(crate) struct Graph {
    /// In the order they were made in.
    pub(crate) nodes: Vec<u64>,
    /// Is it in a node?
    is_inner: bool,
    /// Is that node a conditional one?
    is_conditional: bool,
    pub(crate) objects: Kept,
}

impl State {
    /// A node that a capture records.
    pub(crate) fn put_captured(&mut self, graph: u64, behind: Vec<u64>, work: Work) -> u64 {
        let task = match work {
            Work::Launch(launch) => Task::Kernel(launch),
            Work::Copy(copy) => Task::Copy(copy),
            Work::Fill(fill) => Task::Fill(fill),
            Work::Host { function, data } => Task::Host { function, data },
            Work::Nothing => Task::Nothing,
            work => Task::Other(work),
        };
        self.put_node(graph, behind, task, 0)
    }

    fn put_node(&mut self, graph: u64, behind: Vec<u64>, task: Task, origin: u64) -> u64 {
        let id = self.id();
        let pointers = match &task {
            Task::Conditional { graphs, .. } => graphs.as_slice().into(),
            _ => Box::default(),
        };
        self.nodes.insert(id, Node { graph, task, behind, origin, pointers, attributes: BTreeMap::new() });
        if let Some(graph) = self.graphs.get_mut(&graph) {
            graph.nodes.push(id);
        }
        id
    }

    fn graph(&self, id: u64) -> Result<&Graph> {
        self.graphs.get(&id).ok_or(Error::InvalidValue)
    }

    fn node(&self, id: u64) -> Result<&Node> {
        self.nodes.get(&id).ok_or(Error::InvalidValue)
    }

    /// Nodes of a graph, each once.
    pub(crate) fn are_of(&self, graph: u64, nodes: &[u64]) -> Result {
        let of = |id: &u64| self.nodes.get(id).is_some_and(|node| node.graph == graph);
        let is_set = nodes.iter().collect::<BTreeSet<_>>().len() == nodes.len();
        if is_set && nodes.iter().all(of) { Ok(()) } else { Err(Error::InvalidValue) }
    }

    /// A task of a node of its own: a graph in it is a copy.
    fn own(&mut self, task: Task) -> Result<Task> {
        Ok(match task {
            Task::Graph(graph) => Task::Graph(self.copy_graph(graph, true)?),
            Task::Record(event) | Task::Wait(event) if !self.events.contains_key(&event) => {
                return Err(Error::InvalidValue);
            }
            // Their graphs can't be copied.
            Task::Conditional { .. } => return Err(Error::NotSupported),
            Task::Moved(_) => return Err(Error::InvalidValue),
            task if Self::is_of_memory(&task) => return Err(Error::NotSupported),
            task => task,
        })
    }

    /// A task of a new node.
    fn own_new(&mut self, graph: u64, task: Task) -> Result<Task> {
        match task {
            Task::Conditional { handle, how, graphs } => {
                let graphs = self.graphs_for(graph, handle, how, graphs.len() as u32)?;
                Ok(Task::Conditional { handle, how, graphs })
            }
            Task::Moved(child) => {
                let moved = self.graphs.get_mut(&child).filter(|moved| child != graph && !moved.is_inner);
                moved.ok_or(Error::InvalidValue)?.is_inner = true;
                Ok(Task::Graph(child))
            }
            task if Self::is_of_memory(&task) => Ok(task),
            task => self.own(task),
        }
    }

    fn copy_graph(&mut self, graph: u64, is_inner: bool) -> Result<u64> {
        let (nodes, objects) = (self.graph(graph)?.nodes.clone(), self.graph(graph)?.objects.clone());
        let id = self.id();
        let objects = self.keep_objects(&objects);
        self.graphs.insert(id, Graph { is_inner, objects, ..Graph::default() });
        let mut copies = BTreeMap::new();
        for node in nodes {
            let (task, behind) = (self.node(node)?.task.clone(), self.node(node)?.behind.clone());
            let task = self.own(task)?;
            copies.insert(node, (self.put_node(id, Vec::new(), task, node), behind));
        }
        for (copy, behind) in copies.values() {
            let behind = behind.iter().filter_map(|node| copies.get(node)).map(|(copy, _)| *copy).collect();
            if let Some(node) = self.nodes.get_mut(copy) {
                node.behind = behind;
            }
        }
        Ok(id)
    }

    fn drop_task(&mut self, task: &Task, ended: &mut Ended) {
        match task {
            Task::Graph(graph) => self.drop_graph(*graph, ended),
            Task::Conditional { graphs, .. } => {
                graphs.iter().for_each(|graph| self.drop_graph(*graph, ended))
            }
            _ => {}
        }
    }

    pub(crate) fn drop_graph(&mut self, graph: u64, ended: &mut Ended) {
        self.conditions.retain(|_, condition| !condition.is_of(graph));
        let id = graph;
        let Some(graph) = self.graphs.remove(&id) else { return };
        self.free_ids(graph.nodes.iter().copied().chain([id]));
        for node in graph.nodes {
            if let Some(node) = self.nodes.remove(&node) {
                self.drop_task(&node.task, ended);
            }
        }
        self.let_objects_go(graph.objects, ended);
    }

    /// Is a node behind another, by however many?
    fn is_behind(&self, node: u64, other: u64) -> bool {
        let (mut left, mut seen) = (vec![node], BTreeSet::new());
        while let Some(node) = left.pop() {
            if node == other {
                return true;
            }
            if seen.insert(node) {
                left.extend(self.nodes.get(&node).into_iter().flat_map(|node| &node.behind));
            }
        }
        false
    }
}

/// `cuGraphCreate`: an empty one.
pub(crate) fn create() -> u64 {
    let mut state = state::lock();
    let id = state.id();
    state.graphs.insert(id, Graph::default());
    id
}

/// Adds a node behind others.
pub(crate) fn add(graph: u64, behind: Vec<u64>, task: Task) -> Result<u64> {
    let mut state = state::lock();
    if !state.graph(graph)?.takes(&task) {
        return Err(Error::NotSupported);
    }
    state.are_of(graph, &behind)?;
    let task = state.own_new(graph, task)?;
    Ok(state.put_node(graph, behind, task, 0))
}

/// Gives a node another task of its kind.
pub(crate) fn set(node: u64, task: Task) -> Result {
    let mut state = state::lock();
    if state.node(node)?.task.kind() != task.kind()
        || matches!(task, Task::Graph(_) | Task::Conditional { .. })
        || State::is_of_memory(&task)
    {
        return Err(Error::InvalidValue);
    }
    let task = state.own(task)?;
    if let Some(node) = state.nodes.get_mut(&node) {
        (node.task, node.pointers) = (task, Box::default());
    }
    Ok(())
}

/// What a node does.
pub(crate) fn task(node: u64) -> Result<Task> {
    Ok(state::lock().node(node)?.task.clone())
}

/// Where the parameters of a node's kernel are: they are the node's.
pub(crate) fn pointers(node: u64) -> Result<*const *const std::ffi::c_void> {
    let mut state = state::lock();
    let Task::Kernel(launch) = &state.node(node)?.task else { return Err(Error::InvalidValue) };
    let places = state.kernel(launch.function)?.parameters();
    let base = launch.parameters.as_ptr().expose_provenance();
    let node = state.nodes.get_mut(&node).ok_or(Error::InvalidValue)?;
    if node.pointers.is_empty() {
        node.pointers = places.iter().map(|(offset, _)| (base + offset) as u64).collect();
    }
    Ok(node.pointers.as_ptr().cast())
}

/// `cuGraphAddDependencies`, and with `adds` false `cuGraphRemoveDependencies`: all or none.
pub(crate) fn depend(graph: u64, from: &[u64], to: &[u64], adds: bool) -> Result {
    let mut state = state::lock();
    state.graph(graph)?;
    let before: Vec<_> =
        to.iter().map(|to| Ok((*to, state.node(*to)?.behind.clone()))).collect::<Result<_>>()?;
    let change = |state: &mut State| {
        for (from, to) in from.iter().zip(to) {
            state.are_of(graph, &[*from])?;
            state.are_of(graph, &[*to])?;
            let has = state.node(*to)?.behind.contains(from);
            if has == adds || (adds && state.is_behind(*from, *to)) {
                return Err(Error::InvalidValue);
            }
            let Some(node) = state.nodes.get_mut(to) else { return Err(Error::InvalidValue) };
            if adds {
                node.behind.push(*from);
            } else {
                node.behind.retain(|node| node != from);
            }
        }
        Ok(())
    };
    let changed = change(&mut state);
    if changed.is_err() {
        for (to, behind) in before {
            if let Some(node) = state.nodes.get_mut(&to) {
                node.behind = behind;
            }
        }
    }
    changed
}

/// `cuGraphGetNodes`.
pub(crate) fn nodes(graph: u64) -> Result<Vec<u64>> {
    Ok(state::lock().graph(graph)?.nodes.clone())
}

/// `cuGraphGetRootNodes`.
pub(crate) fn roots(graph: u64) -> Result<Vec<u64>> {
    let state = state::lock();
    let nodes = state.graph(graph)?.nodes.iter();
    Ok(nodes.copied().filter(|node| state.nodes[node].behind.is_empty()).collect())
}

/// `cuGraphGetEdges`: from which to which.
pub(crate) fn edges(graph: u64) -> Result<Vec<(u64, u64)>> {
    let state = state::lock();
    let edges = |to: &u64| state.nodes[to].behind.iter().map(|from| (*from, *to)).collect::<Vec<_>>();
    Ok(state.graph(graph)?.nodes.iter().flat_map(edges).collect())
}

/// `cuGraphNodeGetDependencies`.
pub(crate) fn before(node: u64) -> Result<Vec<u64>> {
    Ok(state::lock().node(node)?.behind.clone())
}

/// `cuGraphNodeGetDependentNodes`.
pub(crate) fn behind(node: u64) -> Result<Vec<u64>> {
    let graph = state::lock().node(node)?.graph;
    Ok(edges(graph)?.into_iter().filter(|(from, _)| *from == node).map(|(_, to)| to).collect())
}

/// Adds a node that allocates memory of a device: that, and where the memory is.
pub(crate) fn add_memory(graph: u64, behind: Vec<u64>, wanted: Wanted) -> Result<(u64, u64)> {
    let mut state = state::lock();
    state.are_of(graph, &behind)?;
    if state.graph(graph)?.is_conditional {
        return Err(Error::NotSupported);
    }
    let at = state.reserve_for(graph, wanted)?;
    Ok((state.put_node(graph, behind, Task::Other(Work::Allocate { at }), 0), at))
}

/// A task that frees what a graph's node has allocated.
pub(crate) fn freed(at: u64) -> Result<Task> {
    let is_graphs = state::lock().is_graphs(at);
    is_graphs.then_some(Task::Other(Work::Unallocate { at })).ok_or(Error::InvalidValue)
}

/// Where a node's memory is, and what it is.
pub(crate) fn memory(node: u64) -> Result<(u64, Wanted)> {
    let state = state::lock();
    state.wanted(state.node(node)?)
}

/// Where the list is that a node has: graphs of a condition, or operations.
pub(crate) fn listed(node: u64) -> Result<u64> {
    let mut state = state::lock();
    let operations = match &state.node(node)?.task {
        Task::Values { operations, .. } => Some(operations.as_flattened().into()),
        Task::Conditional { .. } => None,
        _ => return Err(Error::InvalidValue),
    };
    let node = state.nodes.get_mut(&node).ok_or(Error::InvalidValue)?;
    if let Some(operations) = operations {
        node.pointers = operations;
    }
    Ok(node.pointers.as_ptr().expose_provenance() as u64)
}

/// `CUlaunchAttributeID` that nodes have.
const ATTRIBUTES: [u32; 7] = [1, 2, 4, 5, 8, 9, 10];

/// `cuGraphKernelNodeGetAttribute` and `cuGraphKernelNodeSetAttribute`: the value, which another is put in the place of.
pub(crate) fn attribute(node: u64, attribute: u32, new: Option<[u64; 8]>) -> Result<[u64; 8]> {
    let mut state = state::lock();
    let node = state.nodes.get_mut(&node).ok_or(Error::InvalidValue)?;
    if !matches!(node.task, Task::Kernel(_)) || !ATTRIBUTES.contains(&attribute) {
        return Err(Error::InvalidValue);
    }
    let old = node.attributes.get(&attribute).copied().unwrap_or_default();
    new.map(|new| node.attributes.insert(attribute, new));
    Ok(old)
}

/// `cuGraphKernelNodeCopyAttributes`.
pub(crate) fn copy_attributes(to: u64, from: u64) -> Result {
    let mut state = state::lock();
    let are_kernels =
        [to, from].iter().all(|node| matches!(state.node(*node), Ok(Node { task: Task::Kernel(_), .. })));
    if !are_kernels {
        return Err(Error::InvalidValue);
    }
    let attributes = state.node(from)?.attributes.clone();
    state.nodes.get_mut(&to).ok_or(Error::InvalidValue)?.attributes = attributes;
    Ok(())
}

/// `cuGraphDestroyNode`: not of one that allocates or frees.
pub(crate) fn destroy_node(id: u64) -> Result {
    let mut state = state::lock();
    if State::is_of_memory(&state.node(id)?.task) {
        return Err(Error::NotSupported);
    }
    let node = state.nodes.remove(&id).ok_or(Error::InvalidValue)?;
    state.free_ids([id]);
    if let Some(graph) = state.graphs.get_mut(&node.graph) {
        graph.nodes.retain(|node| *node != id);
    }
    state.nodes.values_mut().for_each(|node| node.behind.retain(|node| *node != id));
    let mut ended = Vec::new();
    state.drop_task(&node.task, &mut ended);
    drop(state);
    user_object::end(ended);
    Ok(())
}

/// `cuGraphClone`.
pub(crate) fn copy(graph: u64) -> Result<u64> {
    state::lock().copy_graph(graph, false)
}

/// `cuGraphNodeFindInClone`.
pub(crate) fn find(node: u64, graph: u64) -> Result<u64> {
    let state = state::lock();
    let found = state.graph(graph)?.nodes.iter().find(|copy| state.nodes[copy].origin == node);
    found.copied().ok_or(Error::InvalidValue)
}

/// `cuGraphDestroy`: not of one that is in a node.
pub(crate) fn destroy(graph: u64) -> Result {
    let mut state = state::lock();
    if state.graph(graph)?.is_inner {
        return Err(Error::InvalidValue);
    }
    let mut ended = Vec::new();
    state.drop_graph(graph, &mut ended);
    drop(state);
    user_object::end(ended);
    Ok(())
}

/// `cuGraphDebugDotPrint`.
pub(crate) fn print(graph: u64, path: &str, flags: u32) -> Result {
    let (nodes, edges) = (nodes(graph)?, edges(graph)?);
    let state = state::lock();
    let place = |node: &u64| nodes.iter().position(|known| known == node).unwrap_or(0);
    let mut text = "digraph dot {\n".to_owned();
    for node in &nodes {
        let task = &state.nodes[node].task;
        let mut label = format!("kind {}", task.kind());
        if let Task::Kernel(launch) = task {
            label = state.kernel(launch.function)?.name().to_owned();
            if flags != 0 {
                label += &format!(" {:?} {:?}", launch.grid, launch.block);
            }
        }
        text += &format!("\"{}\" [label=\"{label}\"];\n", place(node));
    }
    for (from, to) in edges {
        text += &format!("\"{}\" -> \"{}\";\n", place(&from), place(&to));
    }
    std::fs::write(path, text + "}\n").map_err(|_| Error::InvalidValue)
}

/// The structure of a fill.
pub(crate) fn fill(task: &Task) -> Result<FillNode> {
    let Task::Fill(Fill { at, pitch, value, unit, width, height }) = *task else {
        return Err(Error::InvalidValue);
    };
    Ok(FillNode { at, pitch, value, unit: unit as u32, width, height })
}

/// The structure of a copy.
pub(crate) fn copied(task: &Task) -> Result<Copy3d> {
    match task {
        Task::Copy(copy) => Ok(copy.structure()),
        _ => Err(Error::InvalidValue),
    }
}
