//! The loop over the blocks of a launch, or over its clusters.

use super::lanes::own;
use super::memory::SPARE;
use super::plan::Step;
use super::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};

/// Where the scratch memory has what the loop over blocks knows.
#[derive(Clone, Copy)]
pub(super) struct State {
    /// The number of the block at hand.
    linear: i32,
    /// That of the first that is not to be run.
    end: i32,
    /// The place of the block along each axis.
    at: i32,
    /// The blocks along each axis.
    grid: i32,
}

impl State {
    pub(super) const BYTES: u32 = 64;

    pub(super) fn from(offset: u32) -> State {
        let offset = offset as i32;
        State { linear: offset, end: offset + 8, at: offset + 16, grid: offset + 28 }
    }
}

impl<'a, 'k> Writer<'a, 'k> {
    /// The loop over the blocks from `first` to `end`; or over the clusters whose first block is one of these.
    pub(super) fn blocks(&mut self, first: Ssa, end: Ssa) {
        let cluster = i64::from(self.cluster());
        let first = match cluster {
            1 => first,
            _ => {
                let up = self.b.ins().iadd_imm_s(first, cluster - 1);
                self.b.ins().band_imm_s(up, -cluster)
            }
        };
        let [columns, rows] = [0, 1].map(|i| self.b.ins().uextend(types::I64, self.grid[i]));
        let x = self.b.ins().urem(first, columns);
        let row = self.b.ins().udiv(first, columns);
        let y = self.b.ins().urem(row, rows);
        let z = self.b.ins().udiv(row, rows);
        let at = [x, y, z].map(|at| self.b.ins().ireduce(types::I32, at));
        // Kept in memory: it is used once for a block, and registers are for the threads.
        let state = self.state;
        self.b.ins().store(own(), end, self.scratch, state.end);
        for (i, size) in self.grid.into_iter().enumerate() {
            self.b.ins().store(own(), size, self.scratch, state.grid + 4 * i as i32);
        }
        self.next_block(first, at);
        let (head, body, done) = (self.b.create_block(), self.b.create_block(), self.b.create_block());
        self.b.ins().jump(head, &[]);
        self.b.switch_to_block(head);
        let linear = self.b.ins().load(types::I64, own(), self.scratch, state.linear);
        let end = self.b.ins().load(types::I64, own(), self.scratch, state.end);
        let more = self.b.ins().icmp(IntCC::UnsignedLessThan, linear, end);
        self.b.ins().brif(more, body, &[], done, &[]);
        self.b.seal_block(body);
        self.b.seal_block(done);
        self.b.switch_to_block(body);
        let [x, y, z] = self.state_of(state.at);
        self.block = [x, y, z];
        if self.safety.zeroes_arrays() {
            self.zero_shared();
        }
        self.zero_tiles();
        let plan = self.plan;
        if plan.steps.iter().any(|step| !matches!(step, Step::Threads { .. })) {
            self.refuel();
        }
        self.run(&plan.steps);
        let linear = self.b.ins().load(types::I64, own(), self.scratch, state.linear);
        let next = self.b.ins().iadd_imm_s(linear, cluster);
        let (zero, mut at) = (self.b.ins().iconst(types::I32, 0), self.state_of(state.at));
        let mut carry = self.b.ins().iconst(types::I32, cluster);
        for (at, size) in at.iter_mut().zip(self.state_of(state.grid)) {
            let up = self.b.ins().iadd(*at, carry);
            let over = self.b.ins().icmp(IntCC::Equal, up, size);
            *at = self.b.ins().select(over, zero, up);
            carry = self.b.ins().uextend(types::I32, over);
        }
        self.next_block(next, at);
        self.b.ins().jump(head, &[]);
        self.b.seal_block(head);
        self.b.switch_to_block(done);
    }

    /// Three numbers of the state.
    fn state_of(&mut self, offset: i32) -> [Ssa; 3] {
        [0, 4, 8].map(|by| self.b.ins().load(types::I32, own(), self.scratch, offset + by))
    }

    /// Remembers which block comes next, and where it is.
    fn next_block(&mut self, linear: Ssa, at: [Ssa; 3]) {
        let state = self.state;
        self.b.ins().store(own(), linear, self.scratch, state.linear);
        for (i, at) in at.into_iter().enumerate() {
            self.b.ins().store(own(), at, self.scratch, state.at + 4 * i as i32);
        }
    }

    pub(super) fn zero_spare(&mut self) {
        if self.safety.zeroes_arrays() {
            let zero = self.b.ins().iconst(types::I32, 0);
            let zeros = self.b.ins().splat(types::I32X4, zero);
            for at in (0..SPARE).step_by(16) {
                self.b.ins().store(own(), zeros, self.scratch, (self.spare + at) as i32);
            }
        }
    }

    fn zero_shared(&mut self) {
        let bytes = i64::from(self.plan.shared_bytes);
        if bytes == 0 {
            return;
        }
        let zero = self.b.ins().iconst(types::I32, 0);
        let zeros = self.b.ins().splat(types::I32X4, zero);
        let (scratch, end) = (self.scratch, self.b.ins().iconst(types::I64, bytes));
        self.counted(end, 16, |this, at| {
            let to = this.b.ins().iadd(scratch, at);
            this.b.ins().store(own(), zeros, to, 0);
        });
    }
}
