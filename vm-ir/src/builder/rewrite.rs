//! A kernel made of another, op by op.

use super::{BuildError, Builder, Frame, IRBlock, PlaceRef, State, Val};
use crate::limits::Caps;
use crate::module::{Kernel, Line, Numbering, Op, ParamKind, Place, Region, Value};
use crate::op::Opcode;
use crate::types::{Scalar, Type};
use crate::valid::Trust;
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
        self.rewritten(rules, None)
    }

    /// The kernel with its local arrays as parts of shared ones, for a machine whose threads have no memory of their own: a
    /// thread's part is at its number in the block times the array's size. Indices of a guest's are clamped.
    ///
    /// # Errors
    ///
    /// It grew beyond [`MAX_REWRITTEN_OPS`](crate::limits::MAX_REWRITTEN_OPS) ops, or has too many arrays.
    pub fn share_locals(&self, trust: Trust) -> Result<Kernel, BuildError> {
        struct Keep;
        impl Rewrite for Keep {
            fn rewrite<'b>(&mut self, _: Builder<'b>, _: &Kernel, _: &Op, _: &[Val<'b>]) -> Option<Val<'b>> {
                None
            }
        }
        self.rewritten(&mut Keep, Some(trust))
    }

    fn rewritten(&self, rules: &mut dyn Rewrite, locals: Option<Trust>) -> Result<Kernel, BuildError> {
        let block = IRBlock {
            state: RefCell::new(State {
                name: self.name.to_string(),
                guest: self.guest,
                block: self.block,
                cluster: self.cluster,
                resident: self.resident,
                params: self.params.clone(),
                shared: self.shared.clone(),
                local: if locals.is_some() { Vec::new() } else { self.local.clone() },
                tile: self.tile.as_deref().cloned(),
                numbering: Numbering { caps: Caps::REWRITTEN, ..Numbering::default() },
                names: HashSet::new(),
                open: vec![Frame::default()],
                line: Some(self.line),
                error: None,
            }),
        };
        let (k, new) = (block.builder(), vec![Value(0); self.values.len()]);
        let mut rewriter = Rewriter { k, old: self, new, rules, shared: Vec::new() };
        for param in &self.params {
            if let ParamKind::Scalar { value, .. } = param.kind {
                rewriter.define(value);
            }
        }
        if let Some(trust) = locals {
            rewriter.share(trust);
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
    /// By local array, where those are to be shared: what it became, and where the thread's part begins.
    shared: Vec<Part<'b>>,
}

/// A thread's part of a shared array.
#[derive(Clone, Copy)]
struct Part<'b> {
    place: PlaceRef<'b>,
    begin: Val<'b>,
    len: u32,
    trust: Trust,
}

impl<'b> Rewriter<'_, 'b> {
    /// Makes shared arrays of the local ones.
    fn share(&mut self, trust: Trust) {
        let own = self.k.local_index().to(Scalar::I64);
        for array in &self.old.local {
            let bytes = array.bytes() as u32;
            let place = self.k.shared(&array.name, Scalar::I8, &[bytes * self.old.threads()]);
            let begin = own * i64::from(bytes);
            self.shared.push(Part { place, begin, len: array.len, trust });
        }
    }

    /// Where an op is and what it takes.
    fn place(&self, op: &Op) -> (Option<Place>, Vec<Value>) {
        let mut operands = self.map(&op.operands);
        let part = match op.place {
            Some(Place::Local(array)) => self.shared.get(usize::from(array)).copied(),
            _ => None,
        };
        match (part, operands.first_mut()) {
            (Some(part), Some(index)) => {
                *index = self.k.own(self.index(op, part, Val::new(self.k, *index)));
                (Some(part.place.place()), operands)
            }
            _ => (op.place, operands),
        }
    }

    /// The index into a shared array that an op's into a local one became.
    fn index(&self, op: &Op, part: Part<'b>, index: Val<'b>) -> Val<'b> {
        let by_bytes = self.old.by_bytes(op).map_or(1, |ty| ty.bytes());
        let value = op.result().or(op.operands.last().copied());
        let lanes = value.map_or(1, |value| u32::from(self.old.type_of(value).lanes()));
        let mut index = index.to(Scalar::I64);
        if part.trust == Trust::Guest {
            let room = if by_bytes > 1 { by_bytes } else { lanes };
            let last = self.k.i64(i64::from(part.len.saturating_sub(room)));
            index = self.k.emit(Opcode::MinU, &[index, last], Type::I64);
            index = if by_bytes > 1 { index & -i64::from(by_bytes) } else { index };
        }
        part.begin + index
    }

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
        let (place, operands) = self.place(op);
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
        self.k.push_op(Op { place, operands, results, regions, ..head(op) });
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
