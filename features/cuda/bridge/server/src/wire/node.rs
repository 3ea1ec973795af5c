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
/// A graph that the node owns from then on: `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`.
pub const MOVED: u64 = GRAPH | 1 << 32;
/// Nothing.
pub const EMPTY: u64 = 5;
/// A wait for an event.
pub const WAIT: u64 = 6;
/// An event's record.
pub const RECORD: u64 = 7;

/// Memory that is allocated, and that is freed.
pub const ALLOCATE: u64 = 10;
/// See [`ALLOCATE`].
pub const FREE: u64 = 11;
/// Waits for values of memory, and writes of such.
pub const VALUES: u64 = 12;
/// Graphs that run as a condition says.
pub const CONDITIONAL: u64 = 13;

/// Words of a `CUDA_MEM_ALLOC_NODE_PARAMS`, and which of it are descriptions of access, how many, how much is allocated, and where that is.
pub const ALLOCATION: usize = 15;
/// See [`ALLOCATION`].
pub const ACCESS: usize = 11;
/// See [`ALLOCATION`].
pub const LEN: usize = 13;
/// See [`ALLOCATION`].
pub const AT: usize = 14;
/// Bytes of a `CUmemAccessDesc`, and the most that a node has: one of each device.
pub const DESCRIPTION: usize = 12;
/// See [`DESCRIPTION`].
pub const DESCRIPTIONS: u64 = 64;
/// Words of a `CUstreamBatchMemOpParams`, and the most that a node has.
pub const OPERATION: usize = 6;
/// See [`OPERATION`].
pub const OPERATIONS: u64 = 256;

/// `CUlaunchAttributeID` without handles or pointers of the host.
pub const PLAIN: [u32; 12] = [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 14];

/// Words of a kernel's grid, block and shared memory.
pub const GRID: usize = 4;
/// Words of a `CUDA_MEMSET_NODE_PARAMS`.
pub const FILL: usize = 5;

/// Functions that put parameters into nodes, and the kind where all of a function's are of one.
pub const SETTERS: [(&str, Option<u64>); 23] = [
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
    ("cuGraphAddMemAllocNode", Some(ALLOCATE)),
    ("cuGraphAddBatchMemOpNode", Some(VALUES)),
    ("cuGraphBatchMemOpNodeSetParams", Some(VALUES)),
    ("cuGraphExecBatchMemOpNodeSetParams", Some(VALUES)),
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
