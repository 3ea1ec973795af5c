//! The least and the greatest of three integers, kept from an error of NVIDIA's assembler.
//!
//! Where the hardware takes the least or the greatest of three signed integers in one instruction (sm_90 and sm_100),
//! `ptxas` (seen in 12.9 and 13.0, at every level of optimisation but 0) makes that of two `min.s32` or `max.s32`, the
//! outer of which may also be a comparison with a selection, and forgets that the second operand of the inner one was
//! negated: `max(max(a, -b), c)` becomes `max(a, b, c)`. So what may be a negation goes into them as a value that the
//! assembler can't trace back to it.

use super::asm::{Class, Reg, def, when};
use super::writer::Writer;
use crate::backend::flow::Edges;
use vm_ir::module::{Op, Region};
use vm_ir::op::Opcode;
use vm_ir::{Kernel, Scalar, Value};

/// The values of a kernel that come of the negation of an integer, whatever lies between: the ops there may turn out to
/// be copies when their constants are known.
pub(super) struct Negations {
    of: Vec<bool>,
    constants: Vec<Option<u64>>,
    /// Edges that were followed to find it.
    pub(super) steps: u64,
}

/// From values to those that come of them. An op with regions is a node between, numbered behind the values: what it takes and
/// what its regions yield goes into all that its regions begin with and into all that it gives.
struct Flow<'k> {
    kernel: &'k Kernel,
    edges: Vec<(usize, usize)>,
    nodes: usize,
    /// The negations.
    due: Vec<usize>,
}

impl Negations {
    pub(super) fn of(kernel: &Kernel) -> Negations {
        let count = kernel.values().len();
        let mut negations = Negations { of: vec![false; count], constants: vec![None; count], steps: 0 };
        let mut flow = Flow { kernel, edges: Vec::new(), nodes: count, due: Vec::new() };
        negations.region(kernel.body(), &mut flow);
        let Flow { edges, nodes, mut due, .. } = flow;
        let edges = Edges::new(nodes, &edges);
        negations.of.resize(nodes, false);
        due.iter().for_each(|node| negations.of[*node] = true);
        while let Some(node) = due.pop() {
            for to in edges.from(node) {
                negations.steps += 1;
                if !std::mem::replace(&mut negations.of[to], true) {
                    due.push(to);
                }
            }
        }
        negations
    }

    /// May the value be a negation?
    fn has(&self, value: Value) -> bool {
        self.of[value.index()]
    }

    fn region(&mut self, region: &Region, flow: &mut Flow<'_>) {
        region.ops.iter().for_each(|op| self.op(op, flow));
    }

    fn op(&mut self, op: &Op, flow: &mut Flow<'_>) {
        if op.code == Opcode::Const
            && let ([value], [bits]) = (&op.results[..], &op.immediates[..])
        {
            self.constants[value.index()] = Some(*bits);
        }
        // The assembler doesn't know what is in memory.
        if op.place.is_some() {
            return;
        }
        if op.regions.is_empty() {
            let Some(result) = op.result().filter(|value| flow.follows(*value)) else { return };
            flow.edges.extend(op.operands.iter().map(|value| (value.index(), result.index())));
            if self.negates(flow.kernel, op) {
                flow.due.push(result.index());
            }
            return;
        }
        let node = flow.nodes;
        flow.nodes += 1;
        for region in &op.regions {
            self.region(region, flow);
        }
        let into = op.operands.iter().chain(op.regions.iter().flat_map(|region| &region.yields));
        flow.edges.extend(into.map(|value| (value.index(), node)));
        for value in op.results.iter().chain(op.regions.iter().flat_map(|region| &region.args)) {
            if flow.follows(*value) {
                flow.edges.push((node, value.index()));
            }
        }
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
}

impl Flow<'_> {
    /// No bool is a negation, and what a bool selects comes in by itself.
    fn follows(&self, value: Value) -> bool {
        self.kernel.type_of(value).scalar() != Scalar::Bool
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_linear() {
        crate::growth::check("negations", 10, |module| {
            module.kernels().iter().map(|kernel| Negations::of(kernel).steps + 1).sum()
        });
    }
}
