//! Inserts warp barriers into code that expects the threads of a warp to run in lockstep.
//!
//! CUDA does not promise lockstep without `__syncwarp`, but devices run a warp in lockstep while its threads take the same path, and code
//! depends on it: reductions that end with one warp and volatile shared memory, and kernels of one warp. Our back ends run the threads
//! of a warp one after the other up to a barrier. A barrier is needed between two accesses if the later one may read or overwrite data of
//! another thread's earlier access. Volatile accesses count; in a block of one warp all accesses do. Accesses by different pointers of the
//! kernel's parameters do not overlap.

use std::collections::HashMap;

use crate::ast::{Instr, Operand, Space, Symbol, Ty};
use crate::cfg::{Block, Cfg};
use crate::live;
use crate::space::{LOCAL, Spaces, spread};

/// The set of pointers from which an address may be computed: parameters of the kernel, and the constants below.
type Bases = u64;
const ANY: Bases = 1 << 63;
const SHARED: Bases = 1 << 62;
const VARIABLES: Bases = 1 << 61;
/// The parameters from this number on share a bit.
const LAST: u32 = 60;

/// The accesses since the last barrier, by the bases of their addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pending {
    loads: Bases,
    stores: Bases,
}

/// Which accesses are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ordered {
    Volatile,
    All,
}

/// The kinds of memory and the bases of each register's addresses.
struct Addresses<'a> {
    spaces: &'a [Spaces],
    bases: Vec<Bases>,
}

impl<'a> Addresses<'a> {
    fn of(cfg: &Cfg, types: &[Ty], spaces: &'a [Spaces]) -> Self {
        let mut parameters = HashMap::new();
        let (mut bases, mut edges) = (vec![0; types.len()], Vec::new());
        let wide = |instr: &Instr, defined| {
            let mut all = Vec::new();
            live::registers(instr, defined, &mut |register| all.push(register as usize));
            all.retain(|register| types.get(*register).is_some_and(|ty| ty.bits >= 64));
            all
        };
        for instr in cfg.blocks.iter().flat_map(|block| &block.instrs) {
            let to = wide(instr, true);
            let is_load = matches!(instr.opcode(), "ld" | "ldu" | "atom");
            let from = match instr.operands.get(1) {
                Some(Operand::Address(base, offset)) if instr.reads_parameter() => match **base {
                    Operand::Symbol(Symbol { space: Space::Param, offset: at }) => {
                        let next = parameters.len() as u32;
                        let number = parameters.entry(at.wrapping_add(*offset as u64)).or_insert(next);
                        1 << (*number).min(LAST)
                    }
                    _ => ANY,
                },
                _ if is_load => ANY,
                _ => instr.operands.iter().fold(0, |all, operand| all | of_symbol(operand)),
            };
            to.iter().for_each(|to| bases[*to] |= from);
            if !is_load {
                let sources = wide(instr, false);
                edges.extend(sources.iter().flat_map(|from| to.iter().map(move |to| (*from, *to))));
            }
        }
        spread(&mut bases, &edges, |_, _, bases| bases);
        Self { spaces, bases }
    }

    /// Returns the access that an instruction makes, or `None` if it makes no ordered one.
    fn access(&self, instr: &Instr, ordered: Ordered) -> Option<Pending> {
        let is_load = match instr.opcode() {
            "ld" => true,
            "st" => false,
            // Volatile accesses do not depend on atomics.
            "atom" | "red" if ordered == Ordered::All => false,
            _ => return None,
        };
        let is_private = |m: &str| matches!(m, "local" | "const" | "nc") || m.starts_with("param");
        let is_ordered = ordered == Ordered::All || instr.modifiers().any(|m| m == "volatile");
        if !is_ordered || instr.modifiers().any(is_private) {
            return None;
        }
        let address = instr.operands.iter().find_map(|operand| match operand {
            Operand::Address(base, _) => Some(&**base),
            _ => None,
        });
        let bases = match address {
            _ if instr.modifiers().any(|m| m.starts_with("shared")) => SHARED,
            Some(Operand::Register(at)) if self.spaces.get(*at as usize) == Some(&LOCAL) => return None,
            Some(Operand::Register(at)) => self.bases.get(*at as usize).copied().unwrap_or(0),
            Some(other) => of_symbol(other),
            None => 0,
        };
        let bases = if bases == 0 { ANY } else { bases };
        Some(if is_load { Pending { loads: bases, stores: 0 } } else { Pending { loads: 0, stores: bases } })
    }
}

fn of_symbol(operand: &Operand) -> Bases {
    match operand {
        Operand::Symbol(symbol) if symbol.space == Space::Shared => SHARED,
        Operand::Symbol(symbol) if matches!(symbol.space, Space::Global | Space::Const) => VARIABLES,
        Operand::Sum(base, _) | Operand::Address(base, _) => of_symbol(base),
        _ => 0,
    }
}

impl Pending {
    /// Returns whether a barrier is needed before an access: between loads and a store, and between stores and a load.
    fn conflicts(self, access: Pending) -> bool {
        let overlap = |a: Bases, b: Bases| a & b != 0 || (a != 0 && b != 0 && (a | b) & ANY != 0);
        overlap(self.stores, access.loads) || overlap(self.loads, access.stores)
    }

    fn with(self, other: Pending) -> Pending {
        Pending { loads: self.loads | other.loads, stores: self.stores | other.stores }
    }
}

/// Returns the kernel with a warp barrier between each two accesses that need one, or `None` if it needs none. A kernel that may have
/// locks gets none either: a thread that waits for another thread's lock would never reach the barrier.
pub(crate) fn with_barriers(cfg: &Cfg, types: &[Ty], spaces: &[Spaces], ordered: Ordered) -> Option<Cfg> {
    let all = || cfg.blocks.iter().flat_map(|block| &block.instrs);
    let is_lock =
        |instr: &Instr| instr.opcode() == "atom" && instr.modifiers().any(|m| matches!(m, "cas" | "exch"));
    let addresses = Addresses { spaces, bases: vec![0; types.len()] };
    if all().any(is_lock) || !all().any(|instr| addresses.access(instr, ordered).is_some()) {
        return None;
    }
    let addresses = Addresses::of(cfg, types, spaces);
    let is_barrier = |instr: &Instr| instr.is_of_warps() || (instr.is_barrier() && instr.guard.is_none());
    let after = |pending: Pending, instr: &Instr| match addresses.access(instr, ordered) {
        Some(access) => pending.with(access),
        None if is_barrier(instr) => Pending::default(),
        None => pending,
    };
    // By block: its own accesses since its last barrier, and whether it has a barrier, which ends all earlier accesses.
    let own = |block: &Block| {
        let left = block.instrs.iter().fold(Pending::default(), after);
        (left, block.instrs.iter().any(is_barrier))
    };
    let own: Vec<_> = cfg.blocks.iter().map(own).collect();
    // The accesses that may be pending at the start of each block.
    let mut pending = vec![Pending::default(); cfg.blocks.len() + 1];
    let mut changed: Vec<usize> = (0..cfg.blocks.len()).collect();
    while let Some(at) = changed.pop() {
        let (own, has_barrier) = own[at];
        let left = if has_barrier { own } else { pending[at].with(own) };
        for to in cfg.blocks[at].end.targets() {
            let joined = pending[to].with(left);
            if joined != pending[to] {
                pending[to] = joined;
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
            if addresses.access(&instr, ordered).is_some_and(|access| pending.conflicts(access)) {
                added = true;
                pending = Pending::default();
                let (code, operands) = ("bar.warp.sync".into(), vec![Operand::Int(u64::from(u32::MAX))]);
                block.instrs.push(Instr { code, operands, guard: None, ..instr.clone() });
            }
            pending = after(pending, &instr);
            block.instrs.push(instr);
        }
    }
    added.then_some(done)
}
