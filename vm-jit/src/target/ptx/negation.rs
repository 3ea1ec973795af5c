//! Loops that negate what they carry, kept from an error of NVIDIA's assembler.
//!
//! `ptxas` (seen in 12.9 and 13.0, for every architecture and at every level of optimisation but 0) takes a register
//! that a loop carries for a constant when it begins as one and each round only negates it: `s = -s` stays what it was.
//! So where a round may negate what it carries, the loop begins with a value that the assembler can't know: the other
//! one of two, if the grid has no blocks.

use super::asm::{Arg, Class, Reg, def, when};
use super::writer::Writer;
use std::collections::{HashMap, HashSet};
use vm_ir::Value;
use vm_ir::module::{Op, Region};
use vm_ir::op::Opcode;

impl<'k> Writer<'k> {
    /// Hides what the registers of a loop's carried values begin with, of those that a round may negate. `carried` has
    /// a register for each lane of each value that a round yields.
    pub(super) fn hide_negated(&mut self, looped: &'k Op, carried: &[Reg]) {
        let Some(body) = looped.regions.last() else { return };
        let mut made = HashMap::new();
        looped.regions.iter().for_each(|region| definitions(region, &mut made));
        if !made.values().any(|op| self.negates(op)) {
            return;
        }
        let mut rest = carried;
        let mut hidden = Vec::new();
        for value in &body.yields {
            let (lanes, others) = rest.split_at(self.lanes(*value));
            rest = others;
            if self.comes_of_negation(*value, &made) {
                hidden.extend(lanes.iter().copied().filter(|reg| reg.class != Class::Pred));
            }
        }
        if hidden.is_empty() {
            return;
        }
        let never = self.never();
        for reg in hidden {
            let name = ["not.pred", "not.b16", "not.b32", "not.b64"][reg.class as usize];
            when!(self, never, true, name, reg, reg);
        }
    }

    /// A predicate that is never true, which the assembler can't know: has the grid no blocks?
    pub(super) fn never(&mut self) -> Reg {
        let blocks = def!(self, B32, "mov.u32", Arg::Name("%nctaid.x"));
        def!(self, Pred, "setp.eq.u32", blocks, 0)
    }

    /// Is it a negation, or may it become one when its constants are known?
    fn negates(&self, op: &Op) -> bool {
        let constant = |index: usize| op.operands.get(index).is_some_and(|v| self.constant(*v).is_some());
        match op.code {
            Opcode::Neg => true,
            Opcode::Sub => constant(0),
            Opcode::Mul | Opcode::Div | Opcode::Fma => (0..3).any(constant),
            Opcode::DivS => constant(1),
            _ => false,
        }
    }

    fn comes_of_negation(&self, value: Value, made: &HashMap<Value, &Op>) -> bool {
        let (mut seen, mut next) = (HashSet::new(), vec![value]);
        while let Some(value) = next.pop() {
            let Some(op) = made.get(&value).filter(|_| seen.insert(value)) else { continue };
            if self.negates(op) {
                return true;
            }
            next.extend(&op.operands);
            next.extend(op.regions.iter().flat_map(|region| &region.yields));
        }
        false
    }
}

/// The op that each value of a region and the regions in it comes of.
fn definitions<'r>(region: &'r Region, made: &mut HashMap<Value, &'r Op>) {
    for op in &region.ops {
        made.extend(op.results.iter().map(|value| (*value, op)));
        op.regions.iter().for_each(|region| definitions(region, made));
    }
}
