//! Ops between the threads of a warp. The validator proved that all 32 are here.

use super::exec::Machine;
use crate::limits::WARP;
use crate::module::Op;
use crate::op::Opcode;
use crate::semantics::eval;

impl Machine<'_> {
    /// Runs the op in each warp.
    pub(super) fn warp_op(&mut self, op: &Op, active: &[u32]) {
        for warp in active.chunk_by(|a, b| a / WARP == b / WARP) {
            match op.code {
                Opcode::Shuffle | Opcode::ShuffleXor | Opcode::ShuffleUp | Opcode::ShuffleDown => {
                    self.shuffle(op, warp)
                }
                Opcode::VoteAny | Opcode::VoteAll | Opcode::Ballot => self.vote(op, warp),
                _ => self.reduce(op, warp),
            }
        }
    }

    fn shuffle(&mut self, op: &Op, warp: &[u32]) {
        let Some(result) = op.result() else { return };
        let taken: Vec<Vec<u64>> = warp
            .iter()
            .map(|&thread| {
                let (lane, by) = (thread % WARP, self.get(op.operands[1], thread) as u32 % WARP);
                let from = match op.code {
                    Opcode::Shuffle => by,
                    Opcode::ShuffleXor => lane ^ by,
                    Opcode::ShuffleUp => lane.checked_sub(by).unwrap_or(lane),
                    _ if lane + by < WARP => lane + by,
                    _ => lane,
                };
                self.lanes(op.operands[0], thread - lane + from).to_vec()
            })
            .collect();
        for (thread, bits) in warp.iter().zip(&taken) {
            self.set(result, *thread, bits);
        }
    }

    fn vote(&mut self, op: &Op, warp: &[u32]) {
        let Some(result) = op.result() else { return };
        let ballot = warp
            .iter()
            .fold(0u64, |ballot, &thread| ballot | self.get(op.operands[0], thread) << (thread % WARP));
        let bits = match op.code {
            Opcode::VoteAny => u64::from(ballot != 0),
            Opcode::VoteAll => u64::from(ballot.count_ones() as usize == warp.len()),
            _ => ballot,
        };
        warp.iter().for_each(|thread| self.set(result, *thread, &[bits]));
    }

    /// Every lane combines its own with that of lane xor 16, then 8, 4, 2 and 1.
    fn reduce(&mut self, op: &Op, warp: &[u32]) {
        let Some(result) = op.result() else { return };
        let scalar = self.ty(result).scalar();
        let Some(combine) = op.code.combines() else { return };
        let mut lanes: Vec<u64> = warp.iter().map(|t| self.get(op.operands[0], *t)).collect();
        for distance in [16, 8, 4, 2, 1] {
            lanes = (0..lanes.len())
                .map(|lane| {
                    let other = lanes.get(lane ^ distance).copied().unwrap_or(lanes[lane]);
                    eval(combine, scalar, scalar, &[lanes[lane], other]).unwrap_or(0)
                })
                .collect();
        }
        for (thread, bits) in warp.iter().zip(&lanes) {
            self.set(result, *thread, &[*bits]);
        }
    }
}
