//! How large a kernel may become in the code generator, counted on what is there.
//!
//! The code generator packs its numbers into fields and checks most of them in debug builds only: a number that does not fit
//! becomes another, and the code is wrong without an error. So a function is refused far below, by counts of what it really
//! has: while it is written (so that no more is written), when it is, behind the optimiser, in its last order, and as machine code.
//!
//! Time is bounded by counts too. Only a small function is optimised, for that takes longer than in proportion to it; one
//! that the optimiser makes too large is compiled as it was written. So what is refused is decided by what was written.
//!
//! | number | holds | what is past it | counted here |
//! | --- | --- | --- | --- |
//! | `ir::Value`, `Inst`, `Block` | 2^32 − 1 (2^24 for values up to Cranelift 0.133) | another one is meant | [`VALUES`], [`INSTS`], [`BLOCKS`] |
//! | operands of all instructions (`ValueListPool`) | 2^32 − 1 | another list is meant | [`VALUES`] bounds their sources, [`OPERANDS`] their number |
//! | parameters of a block, results of an instruction (`ValueDef`) | 2^16 − 1 | another one is meant | [`PARAMETERS`] |
//! | kinds of flags of memory (`MemFlags`) | 2^16 − 1 | an error | a handful, fixed in the code |
//! | order in the dominator tree, two bits of each | 2^30 blocks | wrong order | [`BLOCKS`] |
//! | nodes that the e-graph adds to one instruction | 500 extractions, 5 deep, 5 kept | growth, not an error | [`OPTIMISED`], then all from the start |
//! | virtual registers: `regalloc2::VReg` has 30 bits, `machinst::Reg` one less with its class | 2^29 − 1 | an error | bounded by [`INSTS`] |
//! | `regalloc2::ProgPoint`, an instruction and two bits | 2^30 instructions | another one is meant | bounded by [`INSTS`] |
//! | slot of an operand in its instruction (`regalloc2::Use`) | 2^16 − 1 | an error | [`PARAMETERS`] |
//! | `regalloc2::SpillSlot`, with those from the top down for moves | 2^24 | slots become one | [`FRAME`] bounds them to 2^22 |
//! | `regalloc2::Allocation` | 2^28 | another one is meant | [`FRAME`] |
//! | offsets in the frame, in code, of labels and constants | 2^31 − 1 (u32 within the code) | an error or a wrong offset | [`FRAME`], [`CODE`] |
//! | branches: ±2^31 on x86-64, ±2^20 and ±2^27 on Arm, behind which islands are put | as given | a panic, which is an error here | [`CODE`] |

use super::live::Live;
use crate::reject::RejectKind;
use cranelift_codegen::flowgraph::ControlFlowGraph;
use cranelift_codegen::ir::Function;

/// Instructions of a function.
pub(super) const INSTS: usize = 1 << 19;
/// Values of a function, those that the optimiser added included.
pub(super) const VALUES: usize = 1 << 22;
/// Operands of all instructions that take any number of them.
pub(super) const OPERANDS: usize = 1 << 23;
/// Blocks of a function.
pub(super) const BLOCKS: usize = 1 << 17;
/// Parameters of one block.
pub(super) const PARAMETERS: usize = 1 << 14;
/// Steps of [`Live`](super::live::Live): how far the values of a function live, all together.
pub(super) const LIVE: usize = 1 << 24;
/// Instructions of a function that goes through the e-graph, which may make a hundred of one.
pub(super) const OPTIMISED: usize = 1 << 14;
/// Instructions of a function whose registers are allocated with care, for which no time is known that is linear.
pub(super) const THOROUGH: usize = 1 << 16;
/// Steps of [`Live`](super::live::Live) for one.
pub(super) const THOROUGH_LIVE: usize = 1 << 20;
/// Bytes of a frame: what [`STACK`](super::STACK) has room for beside what calls the function.
pub(super) const FRAME: usize = super::STACK - (1 << 20);
/// Bytes of code.
pub(super) const CODE: usize = 1 << 26;

fn within(what: &'static str, needed: usize, available: usize) -> Result<(), RejectKind> {
    match needed <= available {
        true => Ok(()),
        false => Err(RejectKind::Size { what, needed: needed as u64, available: available as u64 }),
    }
}

/// What is counted for each op that is written.
pub(super) fn growing(func: &Function) -> Result<(), RejectKind> {
    within("instructions", func.dfg.num_insts(), INSTS)?;
    within("values", func.dfg.num_values(), VALUES)?;
    within("blocks", func.dfg.num_blocks(), BLOCKS)
}

/// Everything that a function has: as it was written, and behind the optimiser.
pub(super) fn whole(func: &Function) -> Result<(), RejectKind> {
    growing(func)?;
    let mut operands = 0;
    for block in func.layout.blocks() {
        within("values that go into one block", func.dfg.block_params(block).len(), PARAMETERS)?;
        for inst in func.layout.block_insts(block) {
            operands += func.dfg.inst_values(inst).count();
        }
    }
    within("operands", operands, OPERANDS)
}

/// What a function may have come to in the e-graph.
pub(super) fn optimised(func: &Function) -> Result<(), RejectKind> {
    whole(func)?;
    within("instructions", func.dfg.num_insts(), 2 * OPTIMISED)
}

/// How far its values live.
pub(super) fn live(func: &Function, cfg: &ControlFlowGraph) -> Result<Live, RejectKind> {
    let too_far = RejectKind::Size {
        what: "values that live from block to block, added up",
        needed: LIVE as u64 + 1,
        available: LIVE as u64,
    };
    Live::of(func, cfg, LIVE).ok_or(too_far)
}

/// What machine code has: its bytes, and those of its frame.
pub(super) fn emitted(code: usize, frame: usize) -> Result<(), RejectKind> {
    within("bytes of code", code, CODE)?;
    within("bytes of stack", frame, FRAME)
}
