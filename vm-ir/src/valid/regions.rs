//! Types of ops with regions.

use super::check::Checker;
use super::error::Rule;
use crate::limits::{MAX_CARRIED, MAX_CASES, MAX_UNROLL};
use crate::module::{Op, Region, Value};
use crate::op::Shape;
use crate::types::{Class, Type};
use std::collections::HashSet;

fn list(types: &[Type]) -> String {
    match types {
        [] => "nothing".to_owned(),
        _ => types.iter().map(Type::to_string).collect::<Vec<_>>().join(", "),
    }
}

impl Checker<'_> {
    fn types_of(&self, values: &[Value]) -> Vec<Type> {
        values.iter().map(|v| self.ty(*v)).collect()
    }

    /// Checks the arguments of a region.
    pub(super) fn region_args(&mut self, region: &Region, expected: &[Type]) {
        let found = self.types_of(&region.args);
        if found != expected {
            self.error(Rule::RegionArgs { expected: list(expected), found: list(&found) });
        }
    }

    /// Checks what a region yields, while its values are still visible.
    pub(super) fn yields(&mut self, region: &Region, expected: &[Type]) {
        let line = std::mem::replace(&mut self.line, region.yield_line);
        if self.scope(&region.yields) {
            let found = self.types_of(&region.yields);
            if found != expected {
                self.error(Rule::Yields { expected: list(expected), found: list(&found) });
            }
        }
        self.line = line;
    }

    pub(super) fn whole_region(&mut self, region: &Region, args: &[Type], yields: &[Type]) {
        self.region_args(region, args);
        self.region(region);
        self.yields(region, yields);
        self.close(region);
    }

    fn carried(&mut self, initial: &[Value], results: &[Type]) {
        self.cap("carried values", results.len(), MAX_CARRIED);
        let found = self.types_of(initial);
        if found != results {
            self.error(Rule::Yields { expected: list(results), found: list(&found) });
        }
        self.register_types(results);
    }

    fn register_types(&mut self, types: &[Type]) {
        for ty in types {
            if !Class::REGISTER.contains(ty.scalar()) {
                self.error(Rule::Result { expected: Class::REGISTER.to_string(), found: *ty });
            }
        }
    }

    /// Checks an op with regions, and the regions.
    pub(super) fn control(&mut self, op: &Op) {
        let results = self.types_of(&op.results);
        self.cap("results", results.len(), MAX_CARRIED);
        match op.code.shape() {
            Shape::If => {
                let condition = self.ty(op.operands[0]);
                if condition != Type::BOOL {
                    self.error(Rule::Operand { index: 1, expected: "bool".to_owned(), found: condition });
                }
                self.register_types(&results);
                for region in &op.regions {
                    self.whole_region(region, &[], &results);
                }
            }
            Shape::Switch => self.switch(op, &results),
            Shape::For => self.for_loop(op, &results),
            _ => self.while_loop(op, &results),
        }
    }

    fn switch(&mut self, op: &Op, results: &[Type]) {
        let selector = self.ty(op.operands[0]);
        if selector.is_vector() || !selector.scalar().is_int() {
            self.error(Rule::Operand { index: 1, expected: "a single integer".to_owned(), found: selector });
        } else {
            let half = i128::from(selector.scalar().mask() >> 1);
            let mut seen = HashSet::new();
            for case in op.immediates.iter().map(|c| *c as i64) {
                if !seen.insert(case) || i128::from(case) > half || i128::from(case) < -half - 1 {
                    self.error(Rule::Case(case));
                }
            }
        }
        self.cap("cases", op.immediates.len(), MAX_CASES);
        self.register_types(results);
        for region in &op.regions {
            self.whole_region(region, &[], results);
        }
    }

    fn for_loop(&mut self, op: &Op, results: &[Type]) {
        let body = &op.regions[0];
        if op.operands.len() < 3 {
            self.error(Rule::OperandCount { expected: 3 + results.len(), found: op.operands.len() });
            return;
        }
        let count = self.ty(op.operands[0]);
        if count.is_vector() || !Class::WORD.contains(count.scalar()) {
            self.error(Rule::Operand {
                index: 1,
                expected: format!("a single {}", Class::WORD),
                found: count,
            });
        }
        for (i, bound) in op.operands[1..3].iter().enumerate() {
            let found = self.ty(*bound);
            if found != count {
                self.error(Rule::Operand { index: i + 2, expected: count.to_string(), found });
            }
        }
        if op.unroll() > MAX_UNROLL {
            self.error(Rule::Number { what: "unroll factor", found: op.unroll(), limit: MAX_UNROLL });
        }
        self.carried(&op.operands[3..], results);
        let mut args = vec![count];
        args.extend_from_slice(results);
        self.whole_region(body, &args, results);
    }

    fn while_loop(&mut self, op: &Op, results: &[Type]) {
        self.carried(&op.operands, results);
        let [condition, body] = &op.regions[..] else { return };
        self.region_args(condition, results);
        self.region(condition);
        self.yields(condition, &[Type::BOOL]);
        // The body sees the carried values, and nothing else that the condition defined.
        for value in condition.ops.iter().flat_map(|op| &op.results) {
            self.visible[value.index()] = false;
        }
        self.whole_region(body, &[], results);
        self.close(condition);
    }
}
