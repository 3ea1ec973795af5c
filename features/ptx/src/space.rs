//! Where generic addresses lead: which registers may hold one of which memory, whatever path was taken.

use crate::ast::{Instr, Operand, Ty};
use crate::cfg::Cfg;
use crate::live;

/// Kinds of memory, as a set.
pub(crate) type Spaces = u8;
pub(crate) const GLOBAL: Spaces = 1;
pub(crate) const SHARED: Spaces = 2;
pub(crate) const LOCAL: Spaces = 4;
/// The kernel's parameters.
pub(crate) const PARAM: Spaces = 8;

/// The spaces that each register's address may be of; none if it is of no address that is known.
pub(crate) fn spaces(cfg: &Cfg, types: &[Ty]) -> Vec<Spaces> {
    let memory = types.len();
    let mut found = vec![0; types.len() + 1];
    let mut edges: Vec<(usize, usize)> = Vec::new();
    let wide = |register: u32| types[register as usize].bits == 64;
    for instr in cfg.blocks.iter().flat_map(|block| &block.instrs) {
        let (mut from, mut to) = (Vec::new(), Vec::new());
        let operands = |range: &[Operand], all: &mut Vec<usize>| {
            for operand in range {
                if let Operand::Register(register) = operand
                    && wide(*register)
                {
                    all.push(*register as usize);
                }
            }
        };
        live::registers(instr, true, &mut |register| {
            if wide(register) {
                to.push(register as usize);
            }
        });
        let direct = match instr.opcode() {
            "cvta" => of_conversion(instr),
            "ld" | "ldu" => {
                from.push(memory);
                if instr.modifiers().any(|m| m.starts_with("param")) { GLOBAL } else { 0 }
            }
            "st" | "red" => {
                to.push(memory);
                live::registers(instr, false, &mut |register| {
                    if wide(register) {
                        from.push(register as usize);
                    }
                });
                0
            }
            "atom" => {
                from.push(memory);
                edges.extend(values(instr).filter(|r| wide(*r)).map(|r| (r as usize, memory)));
                0
            }
            _ => {
                operands(&instr.operands[1.min(instr.operands.len())..], &mut from);
                for operand in &instr.operands {
                    if let Operand::Vector(list) = operand {
                        operands(list, &mut from);
                    }
                }
                0
            }
        };
        to.iter().for_each(|to| found[*to] |= direct);
        edges.extend(from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to))));
    }
    found[memory] |= GLOBAL;
    let mut next = vec![Vec::new(); found.len()];
    edges.iter().for_each(|(from, to)| next[*from].push(*to));
    let mut raised: Vec<usize> = (0..found.len()).filter(|at| found[*at] != 0).collect();
    while let Some(from) = raised.pop() {
        for to in &next[from] {
            if found[from] & !found[*to] != 0 {
                found[*to] |= found[from];
                raised.push(*to);
            }
        }
    }
    found
}

/// The registers that an atomic puts into memory.
fn values(instr: &Instr) -> impl Iterator<Item = u32> {
    instr.operands.iter().skip(2).filter_map(|operand| match operand {
        Operand::Register(register) => Some(*register),
        _ => None,
    })
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
