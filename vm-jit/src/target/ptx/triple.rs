//! The least and the greatest of three integers, kept from an error of NVIDIA's assembler.
//!
//! Where the hardware takes the least or the greatest of three signed integers in one instruction (sm_90 and sm_100),
//! `ptxas` (seen in 12.9 and 13.0, at every level of optimisation but 0) makes that of two `min.s32` or `max.s32`, the
//! outer of which may also be a comparison with a selection, and forgets that the second operand of the inner one was
//! negated: `max(max(a, -b), c)` becomes `max(a, b, c)`. So what may be a negation goes into them as a value that the
//! assembler can't trace back to it.

use super::asm::{Class, Reg, def, when};
use super::writer::Writer;
use vm_ir::module::{Op, Region};
use vm_ir::op::Opcode;
use vm_ir::{Kernel, Scalar, Value};

/// The values of a kernel that come of the negation of an integer, whatever lies between: the ops there may turn out to
/// be copies when their constants are known.
pub(super) struct Negations {
    of: Vec<bool>,
    constants: Vec<Option<u64>>,
    changed: bool,
}

impl Negations {
    pub(super) fn of(kernel: &Kernel) -> Negations {
        let count = kernel.values().len();
        let mut negations = Negations { of: vec![false; count], constants: vec![None; count], changed: true };
        // What a loop carries comes of what its rounds yield.
        while std::mem::take(&mut negations.changed) {
            negations.region(kernel, kernel.body());
        }
        negations
    }

    /// May the value be a negation?
    fn has(&self, value: Value) -> bool {
        self.of[value.index()]
    }

    fn region(&mut self, kernel: &Kernel, region: &Region) {
        region.ops.iter().for_each(|op| self.op(kernel, op));
    }

    fn op(&mut self, kernel: &Kernel, op: &Op) {
        if op.code == Opcode::Const
            && let ([value], [bits]) = (&op.results[..], &op.immediates[..])
        {
            self.constants[value.index()] = Some(*bits);
        }
        // The assembler doesn't know what is in memory.
        if op.place.is_some() {
            return;
        }
        let mut negated = self.any(&op.operands) || self.negates(kernel, op);
        for region in &op.regions {
            self.add(kernel, &region.args, negated);
            self.region(kernel, region);
            negated |= self.any(&region.yields);
        }
        op.regions.iter().for_each(|region| self.add(kernel, &region.args, negated));
        self.add(kernel, &op.results, negated);
    }

    /// Is it a negation, or may it become one when more is known of its operands?
    fn negates(&self, kernel: &Kernel, op: &Op) -> bool {
        let Some(result) = op.results.first() else { return false };
        let scalar = kernel.values()[result.index()].ty.scalar();
        let constant = |index: usize| op.operands.get(index).and_then(|value| self.constants[value.index()]);
        let not_minus_one = |index| constant(index).is_some_and(|bits| bits != scalar.mask());
        scalar.is_int()
            && match op.code {
                Opcode::Neg => true,
                Opcode::Sub => constant(0).is_none_or(|bits| bits == 0) && constant(1).is_none(),
                Opcode::Mul => !not_minus_one(0) && !not_minus_one(1),
                Opcode::DivS => !not_minus_one(1),
                _ => false,
            }
    }

    fn any(&self, values: &[Value]) -> bool {
        values.iter().any(|value| self.has(*value))
    }

    fn add(&mut self, kernel: &Kernel, values: &[Value], negated: bool) {
        for value in values {
            // No bool is a negation, and what a bool selects comes in by itself.
            let new =
                negated && !self.has(*value) && kernel.values()[value.index()].ty.scalar() != Scalar::Bool;
            self.of[value.index()] |= new;
            self.changed |= new;
        }
    }
}

impl Writer<'_> {
    /// The register of an operand of a signed lesser or greater, hidden from the assembler if it may be a negation.
    pub(super) fn hide_operand(&mut self, op: &Op, index: usize, reg: Reg) -> Reg {
        let negated = op.operands.get(index).is_some_and(|value| self.negations.has(*value));
        if negated { self.hide(reg) } else { reg }
    }

    /// The register, hidden from the assembler, if it has 32 bits: only of those it makes one of three operands.
    pub(super) fn hide(&mut self, reg: Reg) -> Reg {
        if reg.class != Class::B32 {
            return reg;
        }
        let hidden = def!(self, B32, "mov.b32", reg);
        let never = self.never();
        when!(self, never, true, "not.b32", hidden, hidden);
        hidden
    }
}
