//! The loop over the blocks of a launch, or over its clusters.

use super::lanes::own;
use super::plan::Step;
use super::spoil;
use super::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, StackSlot, StackSlotData, StackSlotKind, Value as Ssa, types};
use cranelift_frontend::FunctionBuilder;

/// State of the loop over blocks. Range analysis assumes limits of block numbers, so the state is kept on the stack, which no
/// address of a kernel's access can reach.
#[derive(Clone, Copy)]
pub(super) struct State(StackSlot);

impl State {
    /// Offset of the number of the current block.
    const LINEAR: i32 = 0;
    /// Offset of the number of the first block that is not run.
    const END: i32 = 8;
    /// Offset of the position of the block along each axis.
    const AT: i32 = 16;
    /// Offset of the number of blocks along each axis.
    const GRID: i32 = 28;
    pub(super) const BYTES: u32 = 40;

    pub(super) fn of(b: &mut FunctionBuilder<'_>) -> State {
        State(b.create_sized_stack_slot(StackSlotData::new(StackSlotKind::ExplicitSlot, State::BYTES, 3)))
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
        let state = self.state_address();
        self.b.ins().store(own(), end, state, State::END);
        for (offset, size) in (State::GRID..).step_by(4).zip(self.grid) {
            self.b.ins().store(own(), size, state, offset);
        }
        self.next_block(first, at);
        let (head, body, done) = (self.b.create_block(), self.b.create_block(), self.b.create_block());
        self.b.ins().jump(head, &[]);
        self.b.switch_to_block(head);
        let state = self.state_address();
        let linear = self.b.ins().load(types::I64, own(), state, State::LINEAR);
        let end = self.b.ins().load(types::I64, own(), state, State::END);
        let more = self.b.ins().icmp(IntCC::UnsignedLessThan, linear, end);
        self.b.ins().brif(more, body, &[], done, &[]);
        self.b.seal_block(body);
        self.b.seal_block(done);
        self.b.switch_to_block(body);
        let [x, y, z] = self.state_of(State::AT);
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
        let state = self.state_address();
        let linear = self.b.ins().load(types::I64, own(), state, State::LINEAR);
        let next = self.b.ins().iadd_imm_s(linear, cluster);
        let (zero, mut at) = (self.b.ins().iconst(types::I32, 0), self.state_of(State::AT));
        let mut carry = self.b.ins().iconst(types::I32, cluster);
        for (at, size) in at.iter_mut().zip(self.state_of(State::GRID)) {
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

    fn state_address(&mut self) -> Ssa {
        if let Some(spare) = spoil::narrow_spare() {
            return self.b.ins().iadd_imm_s(self.scratch, self.plan.bytes as i64 + 2 * spare);
        }
        self.b.ins().stack_addr(types::I64, self.state.0, 0)
    }

    /// Three numbers of the state.
    fn state_of(&mut self, offset: i32) -> [Ssa; 3] {
        let state = self.state_address();
        [0, 4, 8].map(|by| self.b.ins().load(types::I32, own(), state, offset + by))
    }

    /// Remembers which block comes next, and where it is.
    fn next_block(&mut self, linear: Ssa, at: [Ssa; 3]) {
        let state = self.state_address();
        self.b.ins().store(own(), linear, state, State::LINEAR);
        for (offset, at) in (State::AT..).step_by(4).zip(at) {
            self.b.ins().store(own(), at, state, offset);
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
