//! The walk over a kernel's ops: form, scope, access and trust.

use super::error::{Rule, ValidationError};
use super::{KernelFacts, Trust};
use crate::limits::{Caps, MAX_ERRORS, WARP};
use crate::module::{Kernel, Line, Op, Region, Value, index_count};
use crate::op::{BarrierScope, Group, Opcode, PlaceRule};
use crate::types::Type;
use std::collections::HashMap;

/// The state of the walk.
pub(super) struct Checker<'k> {
    pub(super) kernel: &'k Kernel,
    pub(super) trust: Trust,
    pub(super) caps: Caps,
    pub(super) facts: KernelFacts,
    pub(super) errors: Vec<ValidationError>,
    /// How many rules were broken, those beyond the reported ones included.
    pub(super) broken: usize,
    /// The line and the op that errors are about.
    pub(super) line: Line,
    pub(super) op: Option<&'static str>,
    /// Which values the op at hand may use.
    pub(super) visible: Vec<bool>,
    /// How many regions the op at hand is in.
    pub(super) depth: usize,
    /// Is it in the region of a `map`?
    pub(super) in_map: bool,
    /// By channel: the op that fills its stages.
    pub(super) filled_by: HashMap<usize, Opcode>,
}

impl<'k> Checker<'k> {
    pub(super) fn new(kernel: &'k Kernel, trust: Trust, caps: Caps) -> Checker<'k> {
        Checker {
            kernel,
            trust,
            caps,
            facts: KernelFacts {
                uniformity: Vec::new(),
                steady: Vec::new(),
                shared_bytes: 0,
                ops: 0,
                depth: 0,
                block_barriers: false,
                warp_ops: false,
                atomics: false,
            },
            errors: Vec::new(),
            broken: 0,
            line: Line(0),
            op: None,
            visible: vec![false; kernel.values.len()],
            depth: 0,
            in_map: false,
            filled_by: HashMap::new(),
        }
    }

    /// Notes a broken rule.
    pub(super) fn error(&mut self, kind: Rule) {
        self.broken += 1;
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(ValidationError {
                kernel: self.kernel.name.to_string(),
                guest: self.kernel.guest,
                line: self.line.0,
                op: self.op,
                kind,
            });
        }
    }

    /// Notes a count above its cap.
    pub(super) fn cap(&mut self, what: &'static str, found: usize, limit: usize) {
        if found > limit {
            self.error(Rule::TooMany { what, found: found as u64, limit: limit as u64 });
        }
    }

    /// Checks the body.
    pub(super) fn body(&mut self) {
        let body = &self.kernel.body;
        self.region_args(body, &[]);
        self.region(body);
        self.yields(body, &[]);
        self.close(body);
    }

    /// Checks the ops of a region and makes its values visible, until [`Checker::close`].
    pub(super) fn region(&mut self, region: &Region) {
        self.depth += 1;
        self.facts.depth = self.facts.depth.max(self.depth);
        if self.depth > self.caps.depth {
            self.error(Rule::Depth(self.caps.depth));
        } else {
            for arg in &region.args {
                self.visible[arg.index()] = true;
            }
            for op in &region.ops {
                self.one_op(op);
            }
        }
        self.depth -= 1;
    }

    /// Hides what a region defined.
    pub(super) fn close(&mut self, region: &Region) {
        let defined = region.ops.iter().flat_map(|op| &op.results).chain(&region.args);
        for value in defined {
            self.visible[value.index()] = false;
        }
    }

    fn one_op(&mut self, op: &Op) {
        let before = (self.line, self.op);
        self.line = op.line;
        self.op = Some(op.code.mnemonic());
        self.facts.ops += 1;
        if self.facts.ops == self.caps.ops + 1 {
            self.cap("ops", self.facts.ops, self.caps.ops);
        }
        self.trust_of(op);
        self.attributes(op);
        if self.kind_of_kernel(op)
            && self.scope(&op.operands)
            && self.place(op)
            && self.other_places(op)
            && self.counts(op)
        {
            self.access(op);
            self.op_types(op);
        } else {
            self.regions_only(op);
        }
        self.note_facts(op);
        for result in &op.results {
            self.visible[result.index()] = true;
        }
        (self.line, self.op) = before;
    }

    fn trust_of(&mut self, op: &Op) {
        if op.code.trusted_only() && self.trust != Trust::Trusted {
            self.error(Rule::Trusted);
        }
    }

    fn attributes(&mut self, op: &Op) {
        let row = op.code.info();
        for (i, index) in op.attrs.iter().enumerate() {
            let words = row.attrs.get(i).map_or(1, |kind| kind.words().len());
            if usize::from(*index) >= words {
                self.error(Rule::Attribute(*index));
            }
        }
    }

    /// Are all of the values visible?
    pub(super) fn scope(&mut self, values: &[Value]) -> bool {
        let mut all = true;
        for value in values {
            if !self.visible.get(value.index()).is_some_and(|v| *v) {
                self.error(Rule::Scope(self.kernel.value_name(*value)));
                all = false;
            }
        }
        all
    }

    /// Has the op as many operands, numbers, results and regions as its row says?
    fn counts(&mut self, op: &Op) -> bool {
        let shape = op.code.shape();
        let indices = index_count(self.kernel, op);
        let found = op.operands.len();
        let before = self.broken;
        let wrong_indices = |rank: usize| match shape.operands() {
            // With the number of other operands fixed, what is missing or over is indices.
            Some(others) => found != rank + others,
            None => false,
        };
        if let Some(place) = op.place
            && matches!(shape.place(), PlaceRule::Any | PlaceRule::Shared | PlaceRule::Box)
            && wrong_indices(indices)
        {
            let others = shape.operands().unwrap_or(0);
            self.error(Rule::IndexCount {
                name: self.kernel.place_name(place).to_owned(),
                expected: indices,
                found: found.saturating_sub(others),
            });
            return false;
        }
        if let Some(expected) = shape.operands()
            && found != indices + expected
        {
            self.error(Rule::OperandCount { expected: indices + expected, found });
        }
        if let Some(expected) = shape.immediates()
            && op.immediates.len() != expected
        {
            self.error(Rule::ImmediateCount { expected, found: op.immediates.len() });
        }
        if !shape.has_regions() || shape.is_tile() {
            let expected = usize::from(shape.has_result());
            if op.results.len() != expected {
                self.error(Rule::ResultCount { expected, found: op.results.len() });
            }
        }
        let expected = shape.regions().unwrap_or(op.immediates.len() + 1);
        if op.regions.len() != expected {
            self.error(Rule::RegionCount { expected, found: op.regions.len() });
        }
        self.broken == before
    }

    /// Checks the regions of an op whose own form is wrong, so that errors inside are found too.
    fn regions_only(&mut self, op: &Op) {
        for region in &op.regions {
            self.region(region);
        }
        for region in &op.regions {
            self.close(region);
        }
    }

    fn note_facts(&mut self, op: &Op) {
        let converges = op.converges();
        self.facts.block_barriers |= converges == Some(BarrierScope::Block);
        let warp = converges == Some(BarrierScope::Warp) || op.code == Opcode::ClusterGather;
        if warp && !self.kernel.threads().is_multiple_of(WARP) {
            self.error(Rule::PartialWarp(self.kernel.threads()));
        }
        if op.code == Opcode::LoadUniform && self.kernel.cluster > 1 {
            self.error(Rule::InCluster);
        }
        self.facts.warp_ops |= warp;
        self.facts.atomics |= op.code.info().group == Group::Atomics;
    }

    /// The type of a value.
    pub(super) fn ty(&self, value: Value) -> Type {
        self.kernel.type_of(value)
    }
}
