//! Inserts warp barriers into code that expects the threads of a warp to run in lockstep.
//!
//! CUDA does not promise lockstep without `__syncwarp`, but devices run a warp in lockstep while its threads take the same path, and code
//! depends on it: reductions that end with one warp and volatile shared memory, and kernels of one warp. Our back ends run the threads
//! of a warp one after the other up to a barrier. A barrier is needed between two accesses if the later one may read or overwrite data of
//! another thread's earlier access. Volatile accesses count; in a block of one warp all accesses do.

use crate::ast::{Instr, Operand};
use crate::cfg::Cfg;
use crate::space::{LOCAL, Spaces};

/// The possible kinds of the last access, as a set.
type Pending = u8;
const LOAD: Pending = 1;
const STORE: Pending = 2;

/// Which accesses are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ordered {
    Volatile,
    All,
}

impl Ordered {
    /// Returns the kind of an access, or `None` for other instructions.
    fn kind(self, instr: &Instr, spaces: &[Spaces]) -> Option<Pending> {
        let kind = match instr.opcode() {
            "ld" => LOAD,
            "st" => STORE,
            // Volatile accesses do not depend on atomics.
            "atom" | "red" if self == Ordered::All => STORE,
            _ => return None,
        };
        let private =
            instr.modifiers().any(|m| matches!(m, "local" | "const" | "nc") || m.starts_with("param"));
        let is_local = |operand: &Operand| match operand {
            Operand::Address(base, _) => {
                matches!(**base, Operand::Register(at) if spaces.get(at as usize) == Some(&LOCAL))
            }
            _ => false,
        };
        let ordered = self == Ordered::All || instr.modifiers().any(|m| m == "volatile");
        (ordered && !private && !instr.operands.iter().any(is_local)).then_some(kind)
    }
}

/// Returns whether a barrier is needed between a pending access and the next one.
fn conflict(pending: Pending, kind: Pending) -> bool {
    match kind {
        LOAD => pending & STORE != 0,
        _ => pending & LOAD != 0,
    }
}

/// Returns the kernel with a warp barrier between each two accesses that need one, or `None` if it needs none. A kernel that may have
/// locks gets none either: a thread that waits for another thread's lock would never reach the barrier.
pub(crate) fn with_barriers(cfg: &Cfg, spaces: &[Spaces], ordered: Ordered) -> Option<Cfg> {
    let all = || cfg.blocks.iter().flat_map(|block| &block.instrs);
    let is_lock =
        |instr: &Instr| instr.opcode() == "atom" && instr.modifiers().any(|m| matches!(m, "cas" | "exch"));
    if all().any(is_lock) || !all().any(|instr| ordered.kind(instr, spaces).is_some()) {
        return None;
    }
    let after = |instr: &Instr, pending| match ordered.kind(instr, spaces) {
        Some(kind) => kind,
        None if instr.is_of_warps() || (instr.is_barrier() && instr.guard.is_none()) => 0,
        None => pending,
    };
    // The kinds that may be pending at the start of each block.
    let mut pending = vec![0; cfg.blocks.len() + 1];
    let mut changed: Vec<usize> = (0..cfg.blocks.len()).collect();
    while let Some(at) = changed.pop() {
        let block = &cfg.blocks[at];
        let left = block.instrs.iter().fold(pending[at], |pending, instr| after(instr, pending));
        for to in block.end.targets() {
            if left & !pending[to] != 0 {
                pending[to] |= left;
                if to < cfg.blocks.len() {
                    changed.push(to);
                }
            }
        }
    }
    let mut done = cfg.clone();
    let mut added = false;
    for (block, mut pending) in done.blocks.iter_mut().zip(pending) {
        for instr in std::mem::take(&mut block.instrs) {
            if ordered.kind(&instr, spaces).is_some_and(|kind| conflict(pending, kind)) {
                added = true;
                let (code, operands) = ("bar.warp.sync".into(), vec![Operand::Int(u64::from(u32::MAX))]);
                block.instrs.push(Instr { code, operands, guard: None, ..instr.clone() });
            }
            pending = after(&instr, pending);
            block.instrs.push(instr);
        }
    }
    added.then_some(done)
}
