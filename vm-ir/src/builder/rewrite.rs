//! A kernel made of another, op by op.

use super::{BuildError, Builder, Frame, IRBlock, State, Val};
use crate::limits::Caps;
use crate::module::{Kernel, Line, Numbering, Op, ParamKind, Region, Value};
use crate::op::Opcode;
use crate::types::Type;
use std::cell::RefCell;
use std::collections::HashSet;

/// What becomes of the ops of a kernel, as [`Kernel::rewrite`] comes by them.
pub trait Rewrite {
    /// What stands for the result of `op`, an op without regions that has one: a value that is built here, of the new
    /// `operands`; or `None` to keep the op.
    fn rewrite<'b>(
        &mut self,
        k: Builder<'b>,
        kernel: &Kernel,
        op: &Op,
        operands: &[Val<'b>],
    ) -> Option<Val<'b>>;
}

impl<'b> Builder<'b> {
    /// An op on values like another: of its code, with its attributes.
    pub fn like(self, op: &Op, operands: &[Val<'b>], ty: Type) -> Val<'b> {
        let operands = operands.iter().map(|val| self.own(*val)).collect();
        self.push_one(Op { operands, ..head(op) }, ty)
    }
}

impl Kernel {
    /// The kernel with other ops in the place of some. What is built for an op is from the op's line. It may grow up to
    /// [`MAX_REWRITTEN_OPS`](crate::limits::MAX_REWRITTEN_OPS) ops.
    ///
    /// # Errors
    ///
    /// It grew beyond that, or what `rules` built can't be written.
    pub fn rewrite(&self, rules: &mut dyn Rewrite) -> Result<Kernel, BuildError> {
        let block = IRBlock {
            state: RefCell::new(State {
                name: self.name.to_string(),
                guest: self.guest,
                block: self.block,
                cluster: self.cluster,
                resident: self.resident,
                params: self.params.clone(),
                shared: self.shared.clone(),
                tile: self.tile.as_deref().cloned(),
                numbering: Numbering { caps: Caps::REWRITTEN, ..Numbering::default() },
                names: HashSet::new(),
                open: vec![Frame::default()],
                line: Some(self.line),
                error: None,
            }),
        };
        let mut rewriter =
            Rewriter { k: block.builder(), old: self, new: vec![Value(0); self.values.len()], rules };
        for param in &self.params {
            if let ParamKind::Scalar { value, .. } = param.kind {
                rewriter.define(value);
            }
        }
        rewriter.ops(&self.body);
        Ok(Kernel { line: self.line, ..block.kernel()? })
    }
}

struct Rewriter<'a, 'b> {
    k: Builder<'b>,
    old: &'a Kernel,
    /// By old value.
    new: Vec<Value>,
    rules: &'a mut dyn Rewrite,
}

impl Rewriter<'_, '_> {
    /// Gives an old value its new number.
    fn define(&mut self, old: Value) -> Value {
        let def = &self.old.values[old.index()];
        let new = self.k.define_named(def.ty, def.name.clone());
        self.new[old.index()] = new;
        new
    }

    fn map(&self, values: &[Value]) -> Vec<Value> {
        values.iter().map(|value| self.new[value.index()]).collect()
    }

    fn ops(&mut self, region: &Region) {
        region.ops.iter().for_each(|op| self.op(op));
    }

    fn region(&mut self, region: &Region) -> Region {
        let args = region.args.iter().map(|arg| self.define(*arg)).collect();
        let k = self.k;
        let (new, ()) = k.in_region(args, || self.ops(region));
        Region { yields: self.map(&region.yields), yield_line: region.yield_line, ..new }
    }

    fn op(&mut self, op: &Op) {
        if self.k.failed() {
            return;
        }
        self.set_line(op.line);
        let operands = self.map(&op.operands);
        if let ([result], true) = (&op.results[..], op.regions.is_empty()) {
            let vals: Vec<Val<'_>> = operands.iter().map(|value| Val::new(self.k, *value)).collect();
            if let Some(val) = self.rules.rewrite(self.k, self.old, op, &vals) {
                let new = self.k.own(val);
                self.new[result.index()] = new;
                let mut state = self.k.block.state.borrow_mut();
                let name = &mut state.numbering.values[new.index()].name;
                *name = name.take().or(self.old.values[result.index()].name.clone());
                return;
            }
        }
        let regions = op.regions.iter().map(|region| self.region(region)).collect();
        self.set_line(op.line);
        let results: Vec<Value> = op.results.iter().map(|result| self.define(*result)).collect();
        if let (Opcode::Const, [result], [bits]) = (op.code, &results[..], &op.immediates[..]) {
            self.k.know_constant(*result, *bits);
        }
        self.k.push_op(Op { operands, results, regions, ..head(op) });
    }

    fn set_line(&self, line: Line) {
        self.k.block.state.borrow_mut().line = Some(line);
    }
}

/// The op without what it takes, gives and contains.
fn head(op: &Op) -> Op {
    Op {
        attrs: op.attrs,
        place: op.place,
        others: op.others.clone(),
        immediates: op.immediates.clone(),
        ..Op::new(op.code)
    }
}
