//! Ops between the threads of a warp. The validator proved that all 32 are here, so the mask is full; threads
//! of a guest's kernel that left early count for nothing.

use super::asm::{Arg, Class, Reg, def, ins};
use super::writer::{Writer, class_of};
use crate::legal::Way;
use vm_ir::Scalar;
use vm_ir::module::Op;
use vm_ir::op::Opcode;

const ALL: Arg<'static> = Arg::Int(-1);

impl Writer<'_> {
    pub(super) fn shuffle(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let scalar = self.ty(result).scalar();
        let lane_arg = match self.constant(op.operands[1]) {
            Some(bits) => Arg::Int((bits & 31) as i64),
            None => Arg::Reg(self.get(op.operands[1], 0)),
        };
        let (name, clamp) = match op.code {
            Opcode::Shuffle => ("shfl.sync.idx.b32", 31),
            Opcode::ShuffleXor => ("shfl.sync.bfly.b32", 31),
            Opcode::ShuffleUp => ("shfl.sync.up.b32", 0),
            _ => ("shfl.sync.down.b32", 31),
        };
        // Of `idx` and `bfly` the hardware takes five bits; of a distance it takes more.
        let lane_arg = match (op.code, lane_arg) {
            (Opcode::ShuffleUp | Opcode::ShuffleDown, Arg::Reg(reg)) => {
                Arg::Reg(def!(self, B32, "and.b32", reg, 31))
            }
            (_, arg) => arg,
        };
        for lane in 0..self.lanes(result) {
            let value = self.get(op.operands[0], lane);
            let moved = self.move_lane(name, scalar, value, lane_arg, clamp);
            self.set(result, lane, moved);
        }
    }

    fn move_lane(&mut self, name: &str, scalar: Scalar, value: Reg, lane: Arg, clamp: i64) -> Reg {
        match class_of(scalar) {
            Class::B64 => {
                let (low, high) = (self.asm.new_reg(Class::B32), self.asm.new_reg(Class::B32));
                ins!(self, "mov.b64", Arg::List(&[low, high]), value);
                let low = def!(self, B32, name, low, lane, clamp, ALL);
                let high = def!(self, B32, name, high, lane, clamp, ALL);
                def!(self, B64, "mov.b64", Arg::List(&[low, high]))
            }
            Class::B16 => {
                let wide = def!(self, B32, "mov.b32", Arg::List(&[value, value]));
                let wide = def!(self, B32, name, wide, lane, clamp, ALL);
                let (low, high) = (self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16));
                ins!(self, "mov.b32", Arg::List(&[low, high]), wide);
                low
            }
            _ => def!(self, B32, name, value, lane, clamp, ALL),
        }
    }

    pub(super) fn vote(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let value = self.get(op.operands[0], 0);
        let reg = match op.code {
            Opcode::VoteAny => def!(self, Pred, "vote.sync.any.pred", value, ALL),
            Opcode::VoteAll => def!(self, Pred, "vote.sync.all.pred", value, ALL),
            _ => def!(self, B32, "vote.sync.ballot.b32", value, ALL),
        };
        self.set(result, 0, reg);
    }

    pub(super) fn reduce(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let scalar = self.ty(result).scalar();
        let value = self.get(op.operands[0], 0);
        let reg = match self.way(op.code, scalar, scalar) {
            Way::Native => self.redux(op.code, scalar, value),
            _ if scalar == Scalar::Bool => match op.code {
                Opcode::WarpAnd => def!(self, Pred, "vote.sync.all.pred", value, ALL),
                Opcode::WarpOr => def!(self, Pred, "vote.sync.any.pred", value, ALL),
                _ => {
                    let ballot = def!(self, B32, "vote.sync.ballot.b32", value, ALL);
                    let ones = def!(self, B32, "popc.b32", ballot);
                    let odd = def!(self, B32, "and.b32", ones, 1);
                    def!(self, Pred, "setp.ne.u32", odd, 0)
                }
            },
            _ => {
                let Some(combine) = op.code.combines() else { return };
                let combine = Op::new(combine);
                let mut value = value;
                for distance in [16, 8, 4, 2, 1] {
                    let other = self.move_lane("shfl.sync.bfly.b32", scalar, value, Arg::Int(distance), 31);
                    value = self.value_op(&combine, scalar, scalar, [value, other, Reg::NONE]);
                }
                value
            }
        };
        self.set(result, 0, reg);
    }

    fn redux(&mut self, code: Opcode, scalar: Scalar, value: Reg) -> Reg {
        let (name, signed) = match code {
            Opcode::WarpAdd => ("redux.sync.add.u32", false),
            Opcode::WarpMinS => ("redux.sync.min.s32", true),
            Opcode::WarpMaxS => ("redux.sync.max.s32", true),
            Opcode::WarpMinU => ("redux.sync.min.u32", false),
            Opcode::WarpMaxU => ("redux.sync.max.u32", false),
            Opcode::WarpAnd => ("redux.sync.and.b32", false),
            Opcode::WarpOr => ("redux.sync.or.b32", false),
            _ => ("redux.sync.xor.b32", false),
        };
        let value = if signed { self.signed(scalar, value) } else { value };
        let reg = def!(self, B32, name, value, ALL);
        self.fill(scalar, reg)
    }
}
