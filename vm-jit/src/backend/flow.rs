//! Facts that propagate over a kernel's values, from each to those that come of it.

/// From nodes to nodes. A node is a number: of a value, or what an analysis numbers behind the values.
pub(super) struct Edges {
    /// Where the list of each node begins in `ends`, and at last where the last one ends.
    starts: Vec<u32>,
    ends: Vec<u32>,
}

impl Edges {
    /// The edges of a graph of N nodes.
    pub(super) fn new(nodes: usize, edges: &[(usize, usize)]) -> Edges {
        let mut starts = vec![0u32; nodes + 1];
        edges.iter().for_each(|(from, _)| starts[from + 1] += 1);
        for node in 0..nodes {
            starts[node + 1] += starts[node];
        }
        let mut next = starts.clone();
        let mut ends = vec![0; edges.len()];
        for (from, to) in edges {
            ends[next[*from] as usize] = *to as u32;
            next[*from] += 1;
        }
        Edges { starts, ends }
    }

    /// Where the edges from a node lead.
    pub(super) fn from(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        self.ends[self.starts[node] as usize..self.starts[node + 1] as usize].iter().map(|to| *to as usize)
    }
}
