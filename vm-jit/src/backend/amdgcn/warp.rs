//! Ops between the threads of a warp, which is a wave or half of one.

use super::writer::{Val, Writer, int};
use vm_ir::Scalar;
use vm_ir::module::Op;
use vm_ir::op::Opcode;

impl Writer<'_> {
    /// The thread's place in its wave.
    fn wave_lane(&mut self) -> Val {
        let (none, all) = (Val::Bits(0), Val::Bits(u64::from(u32::MAX)));
        let low = self.call("i32", "llvm.amdgcn.mbcnt.lo", &[("i32", all), ("i32", none)]);
        match self.options.chip.wave() {
            32 => low,
            _ => self.call("i32", "llvm.amdgcn.mbcnt.hi", &[("i32", all), ("i32", low)]),
        }
    }

    /// A lane's value from the thread of the warp at `lane`, which is below 32.
    fn exchanged(&mut self, scalar: Scalar, value: Val, lane: Val) -> Val {
        let lane = match self.options.chip.wave() {
            32 => lane,
            _ => {
                let own = self.wave_lane();
                let half = self.def(format_args!("and i32 {own}, 32"));
                self.def(format_args!("or i32 {half}, {lane}"))
            }
        };
        let at = self.def(format_args!("shl i32 {lane}, 2"));
        let move_word =
            |w: &mut Self, word| w.call("i32", "llvm.amdgcn.ds.bpermute", &[("i32", at), ("i32", word)]);
        let ty = int(scalar);
        match scalar.bits() {
            64 => {
                let high = self.def(format_args!("lshr i64 {value}, 32"));
                let words = [value, high].map(|word| {
                    let word = self.def(format_args!("trunc i64 {word} to i32"));
                    let word = move_word(self, word);
                    self.def(format_args!("zext i32 {word} to i64"))
                });
                let high = self.def(format_args!("shl i64 {}, 32", words[1]));
                self.def(format_args!("or i64 {}, {high}", words[0]))
            }
            32 => move_word(self, value),
            _ => {
                let word = self.def(format_args!("zext {ty} {value} to i32"));
                let word = move_word(self, word);
                self.def(format_args!("trunc i32 {word} to {ty}"))
            }
        }
    }

    fn warp_lane(&mut self) -> Val {
        let own = self.wave_lane();
        self.def(format_args!("and i32 {own}, 31"))
    }

    pub(super) fn shuffle(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let scalar = self.ty(result).scalar();
        let by = self.get(op.operands[1], 0);
        let by = self.def(format_args!("and i32 {by}, 31"));
        let from = match op.code {
            Opcode::Shuffle => by,
            Opcode::ShuffleXor => {
                let own = self.warp_lane();
                self.def(format_args!("xor i32 {own}, {by}"))
            }
            code => {
                let own = self.warp_lane();
                let (name, test) = if code == Opcode::ShuffleUp { ("sub", "sge") } else { ("add", "slt") };
                let other = self.def(format_args!("{name} i32 {own}, {by}"));
                let limit = if code == Opcode::ShuffleUp { 0 } else { 32 };
                let there = self.def(format_args!("icmp {test} i32 {other}, {limit}"));
                self.def(format_args!("select i1 {there}, i32 {other}, i32 {own}"))
            }
        };
        for lane in 0..self.lanes(result) {
            let value = self.get(op.operands[0], lane);
            let moved = self.exchanged(scalar, value, from);
            self.set(result, lane, moved);
        }
    }

    /// A bit for each thread of the warp in which the bool is true.
    fn ballot(&mut self, value: Val) -> Val {
        if self.options.chip.wave() == 32 {
            return self.call("i32", "llvm.amdgcn.ballot.i32", &[("i1", value)]);
        }
        let all = self.call("i64", "llvm.amdgcn.ballot.i64", &[("i1", value)]);
        let own = self.wave_lane();
        let half = self.def(format_args!("and i32 {own}, 32"));
        let half = self.def(format_args!("zext i32 {half} to i64"));
        let all = self.def(format_args!("lshr i64 {all}, {half}"));
        self.def(format_args!("trunc i64 {all} to i32"))
    }

    pub(super) fn vote(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let value = self.get(op.operands[0], 0);
        let reg = self.vote_of(op.code, value);
        self.set(result, 0, reg);
    }

    fn vote_of(&mut self, code: Opcode, value: Val) -> Val {
        match code {
            Opcode::Ballot => self.ballot(value),
            Opcode::VoteAny => {
                let ballot = self.ballot(value);
                self.def(format_args!("icmp ne i32 {ballot}, 0"))
            }
            _ => {
                let not = self.def(format_args!("xor i1 {value}, 1"));
                let ballot = self.ballot(not);
                self.def(format_args!("icmp eq i32 {ballot}, 0"))
            }
        }
    }

    pub(super) fn reduce(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let scalar = self.ty(result).scalar();
        let mut value = self.get(op.operands[0], 0);
        if scalar == Scalar::Bool {
            let reg = match op.code {
                Opcode::WarpAnd => self.vote_of(Opcode::VoteAll, value),
                Opcode::WarpOr => self.vote_of(Opcode::VoteAny, value),
                _ => {
                    let ballot = self.ballot(value);
                    let ones = self.call("i32", "llvm.ctpop.i32", &[("i32", ballot)]);
                    self.def(format_args!("trunc i32 {ones} to i1"))
                }
            };
            return self.set(result, 0, reg);
        }
        let Some(combine) = op.code.combines() else { return };
        let (combine, own) = (Op::new(combine), self.warp_lane());
        for distance in [16, 8, 4, 2, 1] {
            let lane = self.def(format_args!("xor i32 {own}, {distance}"));
            let other = self.exchanged(scalar, value, lane);
            value = self.value_op(&combine, scalar, scalar, [value, other, Val::Bits(0)]);
        }
        self.set(result, 0, value);
    }
}
