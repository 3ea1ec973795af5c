//! Charges the edges of graphs to the budget of host memory.
//!
//! An edge is charged to the node that it leads to. Copies of graphs are charged with their edges by [`nodes::size`](super::nodes::size). While a stream
//! is captured, each call on it adds an edge from every node that the stream depends on.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use vm_cuda_api::{FUNCTIONS, Item, Kind, Object, Way};

use super::effects::{self, Effect};
use super::host::{Charge, EDGE};
use super::session::Session;
use super::sys::{Driver, Word};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

/// How a call that takes nodes changes edges.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Change {
    /// Adds a node, which depends on the nodes.
    AddsNode,
    /// Adds edges to the nodes of the last array.
    Adds,
    /// Removes edges to the nodes of the last array.
    Removes,
    /// Sets what the next node of a capture depends on.
    Captures,
}

/// The change that each function makes, and the parameter of its last array of nodes.
static CHANGES: LazyLock<Vec<Option<(Change, usize)>>> = LazyLock::new(|| {
    let is_nodes =
        |kind| matches!(kind, Kind::Pointer { way: Way::In, item: Item::Handle(Object::Node), .. });
    let change = |name: &str| match name {
        _ if name.starts_with("cuGraphAddDependencies") => Change::Adds,
        _ if name.starts_with("cuGraphRemoveDependencies") => Change::Removes,
        _ if name.starts_with("cuGraphAdd") => Change::AddsNode,
        _ => Change::Captures,
    };
    let of = |function: &vm_cuda_api::Function| {
        let at = function.parameters.iter().rposition(|parameter| is_nodes(parameter.kind))?;
        Some((change(&function.name), at))
    };
    FUNCTIONS.iter().map(of).collect()
});

/// A change of edges that a call is about to make.
pub(super) struct Pending {
    change: Change,
    /// Driver handles of the nodes.
    nodes: Vec<u64>,
    charge: Charge,
}

/// Returns the parameter that has the nodes whose edges a call changes.
pub(super) fn parameter(number: usize) -> Option<usize> {
    CHANGES.get(number).copied().flatten().map(|(_, at)| at)
}

/// Takes memory for the edges that a call adds.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` if the budget has no room.
pub(super) fn before(session: &Session, number: usize, nodes: &[u64]) -> Result<Option<Pending>, u32> {
    let Some((change, _)) = CHANGES.get(number).copied().flatten() else { return Ok(None) };
    let count = if change == Change::Removes { 0 } else { nodes.len() as u64 };
    let charge = session.host().take(EDGE * count)?;
    Ok(Some(Pending { change, nodes: nodes.to_vec(), charge }))
}

impl Pending {
    /// Charges the edges after the call has succeeded. `made` is the handle of the node that it has added.
    pub(super) fn done(self, session: &Session, made: u64) {
        match self.change {
            Change::AddsNode => session.handles().add_edges(made, self.charge),
            Change::Adds => {
                // Each edge takes its own part of the charge.
                drop(self.charge);
                let mut handles = session.handles();
                for node in self.nodes {
                    if let Some(id) = handles.id(Object::Node, node) {
                        handles.add_edges(id, session.host().charge(EDGE));
                    }
                }
            }
            Change::Removes => recount(session, self.nodes),
            Change::Captures => session.record_more(self.charge),
        }
    }
}

/// Returns the charges of edges that nodes no longer have.
pub(super) fn recount(session: &Session, nodes: Vec<u64>) {
    for node in nodes.into_iter().collect::<BTreeSet<_>>() {
        let Some(id) = session.handles().id(Object::Node, node) else { continue };
        if let Some(count) = count(session.driver(), "cuGraphNodeGetDependencies", node, 1) {
            session.handles().keep_edges(id, count);
        }
    }
}

/// Returns the nodes that depend on a node.
pub(super) fn dependents(driver: &Driver, node: u64) -> Vec<u64> {
    let Some(count) = count(driver, "cuGraphNodeGetDependentNodes", node, 1).map(|count| count as usize)
    else {
        return Vec::new();
    };
    let mut memory = vec![0; 1 + 2 * count];
    memory[0] = count as u64;
    let words = [Word::Is(node), Word::At(1), Word::At(1 + count), Word::At(0)];
    if count == 0
        || driver.named("cuGraphNodeGetDependentNodes_v2", &words, &mut memory) != 0
            && driver.named("cuGraphNodeGetDependentNodes", &[words[0], words[1], words[3]], &mut memory) != 0
    {
        return Vec::new();
    }
    memory.truncate(1 + count);
    memory.split_off(1)
}

/// Returns the number of edges of a graph that has so many nodes: the most that there can be if the driver does not report it.
pub(super) fn of_graph(driver: &Driver, graph: u64, nodes: u64) -> u64 {
    let most = nodes * nodes.saturating_sub(1) / 2;
    if most == 0 { 0 } else { count(driver, "cuGraphGetEdges", graph, 2).unwrap_or(most) }
}

/// Returns the bytes of the edges to a node that a call adds to a capture: one from each node that its stream depends on.
pub(super) fn of_capture(session: &Session, number: usize, payload: &[u8]) -> u64 {
    let Some((effect, is_per_thread)) = effects::of(number).filter(|_| session.is_recorded()) else {
        return 0;
    };
    let at = match effect {
        Effect::Launches(at) | Effect::Works(at) | Effect::Waits(at) | Effect::Copies(Some(at)) => at,
        Effect::LaunchesGraph => 1,
        _ => return 0,
    };
    let Some(word) = payload.as_chunks().0.get(at).map(|word| u64::from_ne_bytes(*word)) else { return 0 };
    let stream = match session.handles().real(Object::Stream, word) {
        Ok(0) if is_per_thread => PER_THREAD,
        // The legacy default stream cannot be captured.
        Ok(0) | Err(_) => return 0,
        Ok(stream) => stream,
    };
    let mut memory = [0; 6];
    let [status, id, graph, nodes, data, count] = std::array::from_fn(Word::At);
    let third = [Word::Is(stream), status, id, graph, nodes, data, count];
    let second = [Word::Is(stream), status, id, graph, nodes, count];
    let driver = session.driver();
    if driver.named("cuStreamGetCaptureInfo_v3", &third, &mut memory) != 0
        && driver.named("cuStreamGetCaptureInfo_v2", &second, &mut memory) != 0
    {
        return 0;
    }
    let is_active = memory[0] & 0xffff_ffff == 1;
    if is_active { EDGE.saturating_mul(memory[5]) } else { 0 }
}

/// Makes a call that returns as many arrays without edge data, of which only the length is wanted.
fn count(driver: &Driver, name: &str, of: u64, arrays: usize) -> Option<u64> {
    let mut memory = [0];
    // The second form has one more array, of edge data.
    [(format!("{name}_v2"), arrays + 1), (name.to_owned(), arrays)].into_iter().find_map(|(name, arrays)| {
        let mut words = vec![Word::Is(of)];
        words.resize(1 + arrays, Word::Is(0));
        words.push(Word::At(0));
        (driver.named(&name, &words, &mut memory) == 0).then_some(memory[0])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_cuda_api::number;

    #[test]
    fn every_function_that_takes_nodes_changes_edges() {
        let check = |name: &str, change: Change, at: usize| {
            assert_eq!(CHANGES[number(name).expect(name)], Some((change, at)), "{name}");
        };
        check("cuGraphAddNode_v2", Change::AddsNode, 2);
        check("cuGraphAddKernelNode", Change::AddsNode, 2);
        check("cuGraphAddDependencies_v2", Change::Adds, 2);
        check("cuGraphRemoveDependencies", Change::Removes, 2);
        check("cuStreamUpdateCaptureDependencies_ptsz", Change::Captures, 1);
        for (function, change) in FUNCTIONS.iter().zip(&*CHANGES) {
            let is_capture = function.name.contains("Capture");
            assert_eq!(
                matches!(change, Some((Change::Captures, _))),
                change.is_some() && is_capture,
                "{}",
                function.name
            );
            let adds_nodes = function.name.starts_with("cuGraphAdd") && function.name.contains("Node");
            assert!(!adds_nodes || matches!(change, Some((Change::AddsNode, _))), "{}", function.name);
        }
    }
}
