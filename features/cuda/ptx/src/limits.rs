//! Caps on every count and size of PTX. A module above one of its own is refused, however little of it is used; what is in functions
//! counts for the kernels that need it.

/// Bytes of a module's text.
pub const MAX_TEXT: usize = 256 << 20;
/// Bytes of a text whose functions are all read with the module, so that what is wrong with one is known then. Functions of longer ones
/// are read for the kernels that need them.
pub const MAX_EAGER: usize = 1 << 20;
/// Bytes of an identifier.
pub const MAX_NAME: usize = 4096;
/// Functions of a module.
pub const MAX_FUNCTIONS: usize = 1 << 16;
/// Variables of a module, and those of a function.
pub const MAX_VARIABLES: usize = 1 << 16;
/// Bytes of a module's variables of memory that outlives a launch.
pub const MAX_DATA: u64 = 1 << 32;
/// Initialised bytes of a variable.
pub const MAX_INITIALISED: u64 = 16 << 20;
/// Instructions of a function, those of all that a kernel calls, and those of a kernel whose calls are inlined.
pub const MAX_INSTRUCTIONS: usize = 1 << 18;
/// Operands of a kernel whose calls are inlined.
pub const MAX_INLINED_OPERANDS: usize = 1 << 20;
/// Bytes of an instruction's code with its modifiers.
pub const MAX_CODE: usize = 256;
/// Places to which parts of a kernel may go on, of all parts together.
pub const MAX_EXITS: usize = 1 << 20;
/// Registers that are looked at where regions begin and end, of all of them together.
pub const MAX_LOOKS: usize = 1 << 26;
/// Registers of a function, and those of a kernel whose calls are inlined.
pub const MAX_REGISTERS: usize = 1 << 18;
/// Operands of an instruction, those in lists included.
pub const MAX_OPERANDS: usize = 256;
/// Nesting of blocks, initialisers and operands.
pub const MAX_NESTING: usize = 64;
/// Calls within calls.
pub const MAX_CALLS: usize = 64;
/// Instructions of an end of threads that is copied to the jumps that lead there.
pub const MAX_TAIL: usize = 32;
/// Copies of such ends.
pub const MAX_TAILS: usize = 256;
/// Jumps to jumps that are followed.
pub const MAX_HOPS: usize = 64;
/// Basic blocks of a kernel.
pub const MAX_BLOCKS: usize = 1 << 15;
/// Visits of each basic block, on average, until its live registers are known.
pub const MAX_LIVE_VISITS: usize = 64;
/// Bits of the sets of live registers, of all basic blocks together.
pub const MAX_LIVE_BITS: usize = 1 << 28;
/// Regions within regions.
pub const MAX_DEPTH: usize = vm_ir::limits::MAX_DEPTH - 2;
/// Bytes of a kernel's parameters: CUDA's limit since 12.1, on devices from Volta on.
pub const MAX_PARAMETER_BYTES: u64 = 32_764;
/// Bytes of local memory of a thread.
pub const MAX_LOCAL: u64 = 16 << 10;
/// Modules of a link.
pub const MAX_MODULES: usize = 1 << 12;
/// Entries of a fat binary.
pub const MAX_ENTRIES: usize = 256;
