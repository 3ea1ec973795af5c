//! Atomics: one thread after the other. Shared arrays belong to the block, which one thread of the machine runs, so theirs are
//! plain; a float is added to a view's by comparing and exchanging.

use super::lanes::{Repr, clif, own};
use super::memory::Bounds;
use super::redirect::Direction;
use super::writer::Writer;
use crate::reject::RejectKind;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{AtomicRmwOp, InstBuilder, Value as Ssa};
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Opcode, Shape};

impl Writer<'_, '_> {
    /// One thread after the other.
    pub(super) fn atomic(&mut self, op: &Op) {
        let Some(place) = op.place else { return };
        let Some((rank, element)) = self.kernel.place(place) else { return };
        let scalar = self.kernel.by_bytes(op).map_or(element, |ty| ty.scalar());
        let Some(known) = self.safety.access(op).cloned() else { return };
        let args: Vec<Vec<Ssa>> = op.operands[rank..].iter().map(|v| self.each(*v)).collect();
        let mut olds = Vec::with_capacity(self.width);
        for (thread, indices) in self.each_indices(op, rank).into_iter().enumerate() {
            let Some(row) = self.row(op, place, &known, &indices, (scalar, 1)) else { return };
            let (address, within) = match row.bounds {
                Bounds::In => (row.address, None),
                Bounds::If(within) => {
                    let address =
                        self.redirect_out_of_bounds(row.address, within, Direction::Store, row.bytes());
                    (address, Some(within))
                }
                Bounds::Each { .. } => {
                    let what = "an atomic of one element would be checked as several".to_owned();
                    return self.refuse(RejectKind::Generator { what });
                }
            };
            let args: Vec<Ssa> = args.iter().map(|arg| arg[thread]).collect();
            let plain = matches!(place, Place::Shared(_));
            let old = if plain {
                self.plain_atomic(op, scalar, address, &args)
            } else {
                self.real_atomic(op, scalar, address, &args)
            };
            if let Some(old) = old {
                olds.push(match within {
                    None => old,
                    Some(within) => {
                        let zero = self.number(scalar, 0);
                        self.b.ins().select(within, old, zero)
                    }
                });
            }
        }
        if let Some(result) = op.result() {
            self.set(result, Repr::Each(olds));
        }
    }

    fn plain_atomic(&mut self, op: &Op, scalar: Scalar, address: Ssa, args: &[Ssa]) -> Option<Ssa> {
        let ty = clif(scalar);
        if op.code == Opcode::AtomicStore {
            self.b.ins().store(own(), args[0], address, 0);
            return None;
        }
        let old = self.b.ins().load(ty, own(), address, 0);
        let new = match op.code {
            Opcode::AtomicLoad => return Some(old),
            Opcode::AtomicExchange => args[0],
            Opcode::AtomicCas => {
                let there = self.b.ins().icmp(IntCC::Equal, old, args[0]);
                self.b.ins().select(there, args[1], old)
            }
            code => code.combines().and_then(|code| self.same(code, scalar, &[old, args[0]])).unwrap_or(old),
        };
        self.b.ins().store(own(), new, address, 0);
        Some(old)
    }

    fn real_atomic(&mut self, op: &Op, scalar: Scalar, address: Ssa, args: &[Ssa]) -> Option<Ssa> {
        let ty = clif(scalar);
        let ints = ty.as_int();
        let rmw = match op.code.shape() {
            Shape::AtomicLoad => {
                let bits = self.b.ins().atomic_load(ints, own(), address);
                return Some(self.cast(ty, bits));
            }
            Shape::AtomicStore => {
                let bits = self.cast(ints, args[0]);
                self.b.ins().atomic_store(own(), bits, address);
                return None;
            }
            Shape::AtomicCas => return Some(self.b.ins().atomic_cas(own(), address, args[0], args[1])),
            _ => match op.code {
                Opcode::AtomicAdd if ty.is_float() => return Some(self.atomic_sum(scalar, address, args[0])),
                Opcode::AtomicMinS => AtomicRmwOp::Smin,
                Opcode::AtomicMaxS => AtomicRmwOp::Smax,
                Opcode::AtomicMinU => AtomicRmwOp::Umin,
                Opcode::AtomicMaxU => AtomicRmwOp::Umax,
                Opcode::AtomicAnd => AtomicRmwOp::And,
                Opcode::AtomicOr => AtomicRmwOp::Or,
                Opcode::AtomicXor => AtomicRmwOp::Xor,
                Opcode::AtomicExchange => AtomicRmwOp::Xchg,
                _ => AtomicRmwOp::Add,
            },
        };
        let bits = self.cast(ints, args[0]);
        let old = self.b.ins().atomic_rmw(ints, own(), rmw, address, bits);
        Some(self.cast(ty, old))
    }

    /// A float is added by comparing and exchanging until nobody came between.
    pub(super) fn atomic_sum(&mut self, scalar: Scalar, address: Ssa, by: Ssa) -> Ssa {
        let ty = clif(scalar);
        let ints = ty.as_int();
        let (head, done) = (self.b.create_block(), self.b.create_block());
        let expected = self.b.append_block_param(head, ints);
        let first = self.b.ins().atomic_load(ints, own(), address);
        self.b.ins().jump(head, &[first.into()]);
        self.b.switch_to_block(head);
        let old = self.cast(ty, expected);
        let sum = self.b.ins().fadd(old, by);
        let new = self.cast(ints, sum);
        let seen = self.b.ins().atomic_cas(own(), address, expected, new);
        let same = self.b.ins().icmp(IntCC::Equal, seen, expected);
        self.b.ins().brif(same, done, &[], head, &[seen.into()]);
        self.b.seal_block(head);
        self.b.seal_block(done);
        self.b.switch_to_block(done);
        old
    }
}
