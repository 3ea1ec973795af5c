//! Memory that graphs allocate: it has its address from when its node is made until nothing is left that has the node, and is there from when that
//! has run until it is freed.

use crate::{
    error::{Error, Result},
    graph::{Node, Task},
    memory::Kind,
    state::{self, State},
    stream::Work,
    user_object::UserObject,
};

/// What an address is given back by.
extern "C" fn release(at: u64) {
    // It is there but for what ended with the process's devices.
    let _ = state::lock().release(at);
}

/// What a node allocates.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) device: usize,
    pub(crate) len: u64,
}

impl State {
    /// Does a task allocate, or free what another node allocates? Graphs with such nodes are neither copied nor made to run twice.
    pub(crate) fn is_of_memory(task: &Task) -> bool {
        matches!(task, Task::Other(Work::Allocate { .. } | Work::Unallocate { .. }))
    }

    /// An address for a node of a graph, which keeps it.
    pub(crate) fn reserve_for(&mut self, graph: u64, Wanted { device, len }: Wanted) -> Result<u64> {
        if !self.graphs.contains_key(&graph) {
            return Err(Error::InvalidValue);
        }
        let at = self.allocate(device, 0, len, true, |offset| Kind::Graph { offset, there: false })?;
        let id = self.id();
        self.user_objects.insert(id, UserObject::new(release, at));
        if let Some(graph) = self.graphs.get_mut(&graph) {
            graph.objects.insert(id, 1);
        }
        Ok(at)
    }

    /// Is an address one that a graph's node has?
    pub(crate) fn is_graphs(&self, at: u64) -> bool {
        matches!(self.spans.get(&at).map(|span| &span.kind), Some(Kind::Graph { .. }))
    }

    /// A graph's memory is there from now on, or is not.
    pub(crate) fn set_there(&mut self, at: u64, is: bool) -> Result {
        match self.spans.get_mut(&at).map(|span| &mut span.kind) {
            Some(Kind::Graph { there, .. }) => {
                *there = is;
                Ok(())
            }
            _ => Err(Error::InvalidValue),
        }
    }

    /// How much a node's memory is.
    pub(crate) fn wanted(&self, node: &Node) -> Result<(u64, Wanted)> {
        let Task::Other(Work::Allocate { at }) = node.task else { return Err(Error::InvalidValue) };
        let span = self.spans.get(&at).ok_or(Error::InvalidValue)?;
        Ok((at, Wanted { device: span.device, len: span.len }))
    }
}
