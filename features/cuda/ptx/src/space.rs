//! Where generic addresses lead: which registers may hold one of which memory, whatever path was taken.
//!
//! Programs also split addresses into parts and keep them in memory. So the analysis follows data into all registers except predicates.
//! All memory is one node.

use std::ops::BitOr;

use crate::ast::{Instr, Operand, Space, Ty};
use crate::cfg::Cfg;
use crate::live;

/// Kinds of memory, as a set.
pub(crate) type Spaces = u8;
pub(crate) const GLOBAL: Spaces = 1;
pub(crate) const SHARED: Spaces = 2;
pub(crate) const LOCAL: Spaces = 4;
/// The kernel's parameters.
pub(crate) const PARAM: Spaces = 8;

/// The spaces that each register's address may be of. A register of unknown origin may hold an address of any space that the kernel
/// makes addresses of.
pub(crate) fn spaces(cfg: &Cfg, types: &[Ty]) -> Vec<Spaces> {
    let memory = types.len();
    let mut found = vec![0; types.len() + 1];
    let mut edges: Vec<(usize, usize)> = Vec::new();
    let bits = |node: usize| types.get(node).map_or(64, |ty| ty.bits * u32::from(ty.lanes));
    for instr in cfg.blocks.iter().flat_map(|block| &block.instrs) {
        let registers = |defined| {
            let mut all = Vec::new();
            live::registers(instr, defined, &mut |register| all.push(register as usize));
            all.retain(|register| bits(*register) > 1);
            all
        };
        let values = |first: usize| {
            let mut all = Vec::new();
            let operands = instr.operands.get(first..).unwrap_or_default();
            operands
                .iter()
                .for_each(|operand| live::in_operand(operand, false, &mut |r| all.push(r as usize)));
            all
        };
        let (mut from, mut to) = (Vec::new(), registers(true));
        let mut direct = 0;
        match instr.opcode() {
            "cvta" => direct = of_conversion(instr),
            "ld" | "ldu" if instr.reads_parameter() => direct = GLOBAL,
            "ld" | "ldu" => from.push(memory),
            "st" | "red" => {
                to.push(memory);
                from = values(1);
            }
            "atom" => {
                from.push(memory);
                edges.extend(values(2).into_iter().map(|value| (value, memory)));
            }
            _ => {
                from = registers(false);
                if joins(instr) || instr.operands.iter().any(is_global) {
                    direct = GLOBAL;
                }
            }
        }
        to.iter().filter(|to| bits(**to) >= 64).for_each(|to| found[*to] |= direct);
        edges.extend(from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to))));
    }
    found[memory] |= GLOBAL;
    let any = found.iter().fold(0, |any, spaces| any | spaces);
    // Most numbers in narrow registers are indices, so these do not track `GLOBAL`: a shared address plus an index that was
    // loaded remains a shared address. A wide register that joins parts of other addresses may be global, too.
    spread(&mut found, &edges, |from, to, spaces| match (bits(from) < 64, bits(to) < 64) {
        (_, true) => spaces & !GLOBAL,
        (true, false) => spaces | GLOBAL,
        (false, false) => spaces,
    });
    found.iter_mut().filter(|spaces| **spaces == 0).for_each(|spaces| *spaces = any);
    found
}

/// Propagates the set of each node along its edges, until nothing changes. `passed` returns the part of a set that passes along an edge.
pub(crate) fn spread<S>(found: &mut [S], edges: &[(usize, usize)], passed: impl Fn(usize, usize, S) -> S)
where
    S: Copy + Default + PartialEq + BitOr<Output = S>,
{
    let mut next = vec![Vec::new(); found.len()];
    edges.iter().for_each(|(from, to)| next[*from].push(*to));
    let mut raised: Vec<usize> = (0..found.len()).filter(|at| found[*at] != S::default()).collect();
    while let Some(from) = raised.pop() {
        for to in &next[from] {
            let joined = found[*to] | passed(from, *to, found[from]);
            if joined != found[*to] {
                found[*to] = joined;
                raised.push(*to);
            }
        }
    }
}

/// May it move bits into the upper half of 64 bits, and so join the parts of a global address? Shifts and products that scale an index by
/// a constant do not.
fn joins(instr: &Instr) -> bool {
    let below = |bound: u64| matches!(instr.operands.get(2), Some(Operand::Int(literal)) if *literal < bound);
    match instr.opcode() {
        "mov" | "argument" => {
            let parts = |operand: &Operand| matches!(operand, Operand::Vector(list) if list.len() > 1);
            instr.operands.iter().skip(1).any(parts)
        }
        "bfi" => true,
        "shl" => !below(8),
        "mul" | "mad" => !instr.modifiers().any(|modifier| modifier == "wide") && !below(1 << 16),
        _ => false,
    }
}

/// Is it the address of a variable in memory of the device, which is generic as it is?
fn is_global(operand: &Operand) -> bool {
    match operand {
        Operand::Symbol(symbol) => matches!(symbol.space, Space::Global | Space::Const),
        Operand::Sum(base, _) => is_global(base),
        _ => false,
    }
}

fn of_conversion(instr: &Instr) -> Spaces {
    match instr.modifiers().next() {
        Some("shared" | "shared::cta") => SHARED,
        Some("local") => LOCAL,
        Some("param" | "param::entry") => PARAM,
        Some("to") => 0,
        _ => GLOBAL,
    }
}
