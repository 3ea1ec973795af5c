//! `while` loops that carry integers which go in steps from thread to thread, and to which each iteration adds what the threads agree
//! on: `for (i = thread; i < n; i += threads)`, as PTX has it. They stay such integers, so that neighbouring threads' accesses are rows.
//!
//! Before an iteration it is asked whether one of them overflows within the threads that are run together. Where that is so, and where the
//! threads do not agree on another iteration, each goes on by itself, from that iteration on.

use super::lanes::{Repr, clif};
use super::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{BlockArg, InstBuilder, Value as Ssa};
use vm_ir::module::Op;
use vm_ir::op::{Effect, Opcode};
use vm_ir::valid::Uniformity;
use vm_ir::{Scalar, Value};

/// What is known of a value that a loop carries.
#[derive(Clone, Copy, PartialEq)]
enum Carried {
    /// It goes in such steps, and an iteration adds or subtracts a value that the threads agree on, if there is one.
    Steps {
        stride: i64,
        by: Option<(Opcode, Value)>,
    },
    Any,
}

/// The magnitude that integers which go in steps keep below, so that nothing computed from them overflows soon.
fn most(scalar: Scalar) -> i64 {
    if scalar == Scalar::I32 { i64::from(i32::MAX) } else { 1 << 60 }
}

impl<'k> Writer<'_, 'k> {
    /// What a `while` carries, if some of it goes in steps. Its condition must do nothing, as it may be computed twice.
    fn carried_steps(&mut self, op: &'k Op) -> Option<Vec<Carried>> {
        let [condition, body] = &op.regions[..] else { return None };
        if self.width == 1 || condition.ops.iter().any(|op| op.code.effect() != Effect::Pure) {
            return None;
        }
        let mut all = Vec::with_capacity(op.operands.len());
        for ((first, carried), next) in op.operands.iter().zip(&condition.args).zip(&body.yields) {
            let ty = self.kernel.type_of(*carried);
            let fits = !ty.is_vector() && matches!(ty.scalar(), Scalar::I32 | Scalar::I64);
            let stride = match fits.then(|| self.repr(*first)) {
                Some(Repr::Affine { stride, .. }) if (1..=1 << 16).contains(&stride) => stride,
                _ => {
                    all.push(Carried::Any);
                    continue;
                }
            };
            let by = (next != carried).then(|| {
                let adds = body.ops.iter().find(|op| op.results.contains(next))?;
                let (code, by) = match (adds.code, &adds.operands[..]) {
                    (Opcode::Add, [a, by]) if a == carried => (Opcode::Add, *by),
                    (Opcode::Add, [by, a]) if a == carried => (Opcode::Add, *by),
                    (Opcode::Sub, [a, by]) if a == carried => (Opcode::Sub, *by),
                    _ => return None,
                };
                (by != *carried && self.facts.uniformity(by) != Uniformity::Thread).then_some((code, by))
            });
            all.push(match by {
                None => Carried::Steps { stride, by: None },
                Some(Some(by)) => Carried::Steps { stride, by: Some(by) },
                Some(None) => Carried::Any,
            });
        }
        all.iter().any(|carried| *carried != Carried::Any).then_some(all)
    }

    /// What a value is to a join of `carried`.
    fn pass_carried(&mut self, value: Value, carried: Value, known: Carried, args: &mut Vec<BlockArg>) {
        match known {
            Carried::Steps { .. } => args.push(self.first(value).into()),
            Carried::Any => args.extend(self.pass(&[value], &[carried], None)),
        }
    }

    /// A `while` that carries integers in steps; was it one?
    pub(super) fn while_in_steps(&mut self, op: &'k Op) -> bool {
        let Some(known) = self.carried_steps(op) else { return false };
        let [condition, body] = &op.regions[..] else { return false };
        let end = self.join(&op.results, None);
        let head = self.b.create_block();
        let mut args = Vec::new();
        for ((first, carried), known) in op.operands.iter().zip(&condition.args).zip(&known) {
            match known {
                Carried::Steps { .. } => {
                    self.b.append_block_param(head, clif(self.scalar(*carried)));
                }
                Carried::Any => self.add_params(head, &[*carried], None),
            }
            self.pass_carried(*first, *carried, *known, &mut args);
        }
        self.b.ins().jump(head, &args);
        self.b.switch_to_block(head);
        let mut at = 0;
        let mut fits: Option<Ssa> = None;
        for (carried, known) in condition.args.iter().zip(&known) {
            let Carried::Steps { stride, .. } = *known else {
                self.take(head, at, &[*carried], None);
                at += self.joined_types(*carried).len();
                continue;
            };
            let base = self.b.block_params(head)[at];
            at += 1;
            let most = most(self.scalar(*carried));
            self.set(*carried, Repr::Affine { base, stride, low: -most, high: most });
            // As unsigned numbers, those from the least up to where the last thread's is the most.
            let above_least = self.b.ins().iadd_imm_s(base, most);
            let room = self.int(self.type_of(base), 2 * most - stride * (self.width as i64 - 1));
            let one = self.b.ins().icmp(IntCC::UnsignedLessThanOrEqual, above_least, room);
            fits = Some(match fits {
                None => one,
                Some(others) => self.b.ins().band(others, one),
            });
        }
        let now: Vec<(Value, Repr)> = condition.args.iter().map(|v| (*v, self.repr(*v))).collect();
        let [on, inside, alone] = [0; 3].map(|_| self.b.create_block());
        match fits {
            Some(fits) => self.b.ins().brif(fits, on, &[], alone, &[]),
            None => self.b.ins().jump(on, &[]),
        };
        self.b.seal_block(on);
        self.b.switch_to_block(on);
        self.region(condition);
        let goes_on = condition.yields[0];
        let results = self.pass(&condition.args, &op.results, None);
        if self.differs(goes_on) {
            let some = self.b.create_block();
            self.vote_of(goes_on, (inside, &[]), some, (end, &results));
            self.b.switch_to_block(some);
            self.b.ins().jump(alone, &[]);
        } else {
            let more = self.first(goes_on);
            self.enter(more, (inside, &[]), (end, &results));
        }
        self.b.seal_block(inside);
        self.b.switch_to_block(inside);
        self.region(body);
        self.poll_point(op);
        let mut again = Vec::new();
        for ((next, carried), known) in body.yields.iter().zip(&condition.args).zip(&known) {
            match *known {
                Carried::Steps { by: Some((code, by)), .. } => {
                    let (base, by) = (self.first(*carried), self.first(by));
                    let next = match code {
                        Opcode::Sub => self.b.ins().isub(base, by),
                        _ => self.b.ins().iadd(base, by),
                    };
                    again.push(next.into());
                }
                _ => self.pass_carried(*next, *carried, *known, &mut again),
            }
        }
        self.b.ins().jump(head, &again);
        self.b.seal_block(head);
        self.b.seal_block(alone);
        self.b.set_cold_block(alone);
        self.b.switch_to_block(alone);
        self.apart(op, &now, end, |w| {
            let end = w.join(&op.results, None);
            let head = w.join(&condition.args, None);
            let args = w.pass(&condition.args, &condition.args, None);
            w.b.ins().jump(head, &args);
            w.while_from(op, None, head, None, end);
            w.arrive(end, &op.results, None);
        });
        self.arrive(end, &op.results, None);
        true
    }
}
