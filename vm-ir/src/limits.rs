//! Caps on every count and size. A module above one is refused by whoever meets it first: the parser, the
//! decoder, the builder or the validator.

/// Kernels in a module.
pub const MAX_KERNELS: usize = 256;
/// Parameters of a kernel.
pub const MAX_PARAMS: usize = 64;
/// Shared and local arrays of a kernel.
pub const MAX_SHARED_ARRAYS: usize = 64;
/// Bytes of all shared arrays of a kernel together: what one block of an sm_90 can have. A target with less
/// rejects the kernel when it compiles it.
pub const MAX_SHARED_BYTES: u64 = 232_448;
/// Bytes of all local arrays of a kernel together, which each thread has.
pub const MAX_LOCAL_BYTES: u64 = 16 << 10;
/// Groups of warps of a tile kernel.
pub const MAX_GROUPS: u32 = 3;
/// Channels of a tile kernel.
pub const MAX_CHANNELS: usize = 16;
/// Stages of a channel.
pub const MAX_STAGES: u32 = 16;
/// Fragments of a tile kernel.
pub const MAX_FRAGMENTS: usize = 32;
/// Rows and columns of a stage or of a fragment.
pub const MAX_TILE: u32 = 512;
/// Dimensions of a view or of a shared array.
pub const MAX_RANK: usize = 4;
/// Ops of a kernel, those in nested regions included.
pub const MAX_OPS: usize = 1 << 16;
/// Ops of a kernel that a compiler has rewritten.
pub const MAX_REWRITTEN_OPS: usize = 1 << 18;
/// Values of a kernel.
pub const MAX_VALUES: usize = 1 << 17;
/// Nesting depth of regions; the body is at depth 1.
pub const MAX_DEPTH: usize = 32;
/// Values that a loop carries, or that an `if` or a `switch` yields.
pub const MAX_CARRIED: usize = 64;
/// Cases of a `switch`, the default not counted.
pub const MAX_CASES: usize = 256;
/// Bytes of a name.
pub const MAX_NAME: usize = 64;
/// Threads of a block.
pub const MAX_THREADS: u32 = 1024;
/// Threads of a block along x and y.
pub const MAX_BLOCK_XY: u32 = 1024;
/// Threads of a block along z.
pub const MAX_BLOCK_Z: u32 = 64;
/// Blocks of a cluster: what every device with clusters has room for.
pub const MAX_CLUSTER: u32 = 8;
/// Blocks that a multiprocessor may be asked to have room for.
pub const MAX_RESIDENT: u32 = 32;
/// Blocks of a grid along x.
pub const MAX_GRID_X: u32 = (1 << 31) - 1;
/// Blocks of a grid along y and z.
pub const MAX_GRID_YZ: u32 = 65_535;
/// The largest unroll hint.
pub const MAX_UNROLL: u64 = 256;
/// Bytes of a value that an access by bytes makes of `i8` elements, or takes apart: what one instruction moves.
pub const MAX_ACCESS_BYTES: u32 = 16;
/// Largest extent of a view along one dimension.
pub const MAX_EXTENT: u64 = 1 << 40;
/// Bytes of a text or binary module.
pub const MAX_MODULE_BYTES: usize = 16 << 20;
/// Errors that one validation reports before it stops looking.
pub const MAX_ERRORS: usize = 32;
/// Threads of a warp.
pub const WARP: u32 = 32;

/// The caps that rewriting a kernel raises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caps {
    pub(crate) ops: usize,
    pub(crate) values: usize,
    pub(crate) depth: usize,
    /// Bytes of shared arrays.
    pub(crate) shared: u64,
}

impl Caps {
    /// Of a kernel as it is written and sent.
    pub(crate) const WRITTEN: Caps =
        Caps { ops: MAX_OPS, values: MAX_VALUES, depth: MAX_DEPTH, shared: MAX_SHARED_BYTES };
    /// Of a kernel that a compiler [rewrote](crate::builder::Rewrite).
    pub(crate) const REWRITTEN: Caps = Caps {
        ops: MAX_REWRITTEN_OPS,
        values: 2 * MAX_REWRITTEN_OPS,
        depth: MAX_DEPTH + 4,
        // The threads' local arrays may be among them.
        shared: MAX_SHARED_BYTES + MAX_THREADS as u64 * MAX_LOCAL_BYTES,
    };
}

impl Default for Caps {
    fn default() -> Caps {
        Caps::WRITTEN
    }
}
