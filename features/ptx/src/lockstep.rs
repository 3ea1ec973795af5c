//! Barriers for code that expects the threads of a warp to run in lockstep.
//!
//! Devices run the threads of a warp one instruction at a time as long as they take the same way, and much code depends on that without a
//! `__syncwarp`, though CUDA does not promise it: reductions of the last warp by volatile shared memory, and kernels of one warp. Back
//! ends run one thread after the other up to a barrier. So a warp waits between two accesses of which the later could see, or
//! overwrite, what another thread's earlier one has to do with: of volatile ones, and, in a block of one warp, of all.

use crate::ast::{Instr, Operand};
use crate::cfg::Cfg;
use crate::space::{LOCAL, Spaces};

/// What the last access before an instruction may be.
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
    /// What an instruction leaves pending, unless it is no such access.
    fn kind(self, instr: &Instr, spaces: &[Spaces]) -> Option<Pending> {
        let kind = match instr.opcode() {
            "ld" => LOAD,
            "st" => STORE,
            // Order their own accesses.
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

/// Must the warp wait between what is pending and an access?
fn conflict(pending: Pending, kind: Pending) -> bool {
    match kind {
        LOAD => pending & STORE != 0,
        _ => pending & LOAD != 0,
    }
}

/// Returns the kernel with barriers of warps between such accesses, or nothing if it needs none or has locks: threads that wait for each
/// other's would never come to them.
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
    // What may be pending where each block begins.
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
