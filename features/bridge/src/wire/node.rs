//! Kinds of graphs' nodes, as the driver numbers them, and what crosses of their parameters.

/// A kernel.
pub const KERNEL: u64 = 0;
/// A copy.
pub const COPY: u64 = 1;
/// A fill.
pub const FILL_KIND: u64 = 2;
/// A function of the program.
pub const FUNCTION: u64 = 3;
/// A graph.
pub const GRAPH: u64 = 4;
/// Nothing.
pub const EMPTY: u64 = 5;
/// A wait for an event.
pub const WAIT: u64 = 6;
/// An event's record.
pub const RECORD: u64 = 7;

/// Words of a kernel's grid, block and shared memory.
pub const GRID: usize = 4;
/// Words of a `CUDA_MEMSET_NODE_PARAMS`.
pub const FILL: usize = 5;

/// Functions that put parameters into nodes, and the kind where all of a function's are of one.
pub const SETTERS: [(&str, Option<u64>); 19] = [
    ("cuGraphAddKernelNode", Some(KERNEL)),
    ("cuGraphAddKernelNode_v2", Some(KERNEL)),
    ("cuGraphKernelNodeSetParams", Some(KERNEL)),
    ("cuGraphKernelNodeSetParams_v2", Some(KERNEL)),
    ("cuGraphExecKernelNodeSetParams", Some(KERNEL)),
    ("cuGraphExecKernelNodeSetParams_v2", Some(KERNEL)),
    ("cuGraphAddMemcpyNode", Some(COPY)),
    ("cuGraphMemcpyNodeSetParams", Some(COPY)),
    ("cuGraphExecMemcpyNodeSetParams", Some(COPY)),
    ("cuGraphAddMemsetNode", Some(FILL_KIND)),
    ("cuGraphMemsetNodeSetParams", Some(FILL_KIND)),
    ("cuGraphExecMemsetNodeSetParams", Some(FILL_KIND)),
    ("cuGraphAddHostNode", Some(FUNCTION)),
    ("cuGraphHostNodeSetParams", Some(FUNCTION)),
    ("cuGraphExecHostNodeSetParams", Some(FUNCTION)),
    ("cuGraphAddNode", None),
    ("cuGraphAddNode_v2", None),
    ("cuGraphNodeSetParams", None),
    ("cuGraphExecNodeSetParams", None),
];

/// The kind of what a function puts into nodes, where it is always one.
#[must_use]
pub fn kind(function: &str) -> Option<u64> {
    SETTERS.iter().find(|(name, _)| *name == function).and_then(|(_, kind)| *kind)
}
