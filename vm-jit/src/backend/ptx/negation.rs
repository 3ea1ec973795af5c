//! Loops that negate what they carry, kept from an error of NVIDIA's assembler.
//!
//! `ptxas` (seen in 12.9 and 13.0, for every architecture and at every level of optimisation but 0) takes a register
//! that a loop carries for a constant when it begins as one and each iteration only negates it: `s = -s` stays what it was.
//! So where an iteration may negate what it carries, the loop begins with a value that the assembler can't know: the other
//! one of two, if the grid has no blocks.

use super::asm::{Arg, Class, Reg, def, when};
use super::writer::Writer;
use std::collections::HashSet;
use vm_ir::Value;
use vm_ir::module::{Op, Region};
use vm_ir::op::Opcode;

impl<'k> Writer<'k> {
    /// Hides what the registers of a loop's carried values begin with, of those that an iteration may negate. `carried` has
    /// a register for each lane of each value that an iteration yields.
    pub(super) fn hide_negated(&mut self, looped: &'k Op, carried: &[Reg]) {
        let Some(body) = looped.regions.last() else { return };
        let mut negated = HashSet::new();
        looped.regions.iter().for_each(|region| self.negated(region, &mut negated));
        if negated.is_empty() {
            return;
        }
        let mut rest = carried;
        let mut hidden = Vec::new();
        for value in &body.yields {
            let (lanes, others) = rest.split_at(self.lanes(*value));
            rest = others;
            if negated.contains(value) {
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

    /// Adds what in a region comes of a negation there. Whatever a value comes of stands before it, but for what loops carry,
    /// which is not followed.
    fn negated(&self, region: &Region, negated: &mut HashSet<Value>) {
        for op in &region.ops {
            op.regions.iter().for_each(|region| self.negated(region, negated));
            let mut of = op.operands.iter().chain(op.regions.iter().flat_map(|region| &region.yields));
            if of.any(|value| negated.contains(value)) || self.negates(op) {
                negated.extend(&op.results);
            }
        }
    }
}
