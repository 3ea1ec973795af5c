//! Products of matrices: strips of rows of the left factor times panels of columns of the right one.

use super::copy::Rows;
use super::{Form, right_form};
use crate::backend::cpu::isa::Architecture;
use crate::backend::cpu::lanes::{loose, own};
use crate::backend::cpu::micro::{self, Micro};
use crate::backend::cpu::routine::Routine;
use crate::backend::cpu::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{BlockArg, InstBuilder, Value as Ssa, types};
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Left, Opcode};

/// Products of fewer sums than this are written out: a call takes longer.
const SMALL: u32 = 1 << 11;
/// Rows of a strip that is written out.
const WRITTEN: u32 = 4;

/// A left factor: its first element, and the bytes from row to row and from column to column.
#[derive(Clone, Copy)]
struct Factor {
    at: Ssa,
    row: u32,
    column: u32,
}

/// A product: its extents, and where its sums are.
#[derive(Clone, Copy)]
struct Job {
    rows: u32,
    panels: u32,
    inner: u32,
    adds: bool,
    /// Bytes from row to row of the sums.
    pitch: u32,
}

impl Writer<'_, '_> {
    pub(super) fn mma(&mut self, op: &Op, place: Place) {
        let (Some(sum), &[a, b]) = (self.array(place), &op.others[..]) else { return };
        let Some(right) = self.stage(b) else { return };
        let form = right_form(op);
        let inner = if form == Form::Turned { right.dims[1] } else { right.dims[0] };
        let Some(left) = self.left(op, a, inner) else { return };
        let mut panels = self.tile_address(right.at);
        if right.form != form {
            let from = Rows { at: panels, stride: self.long(4 * right.dims[1]) };
            panels = self.tile_address(self.tiles.right);
            self.pack(from, Scalar::F32, right.dims, form, panels);
        }
        let adds = op.code == Opcode::Mma;
        let (rows, pitch) = (sum.rows, 4 * sum.pitch);
        let job = Job { rows, panels: sum.pitch / self.tiles.panel, inner, adds, pitch };
        let to = self.tile_address(sum.at);
        if sum.element == Scalar::F32 {
            return self.multiply(job, left, panels, to);
        }
        // Sums of at most 512 products of two bytes are exact in f32.
        let sums = self.tile_address(self.tiles.sums);
        self.multiply(Job { adds: false, ..job }, left, panels, sums);
        let end = self.long(sum.bytes() as i64);
        self.counted(end, 16, |this, at| {
            let [from, to] = [sums, to].map(|begin| this.b.ins().iadd(begin, at));
            let found = this.b.ins().load(types::F32X4, loose(), from, 0);
            let mut found = this.b.ins().fcvt_to_sint_sat(types::I32X4, found);
            if adds {
                let before = this.b.ins().load(types::I32X4, loose(), to, 0);
                found = this.b.ins().iadd(before, found);
            }
            this.b.ins().store(loose(), found, to, 0);
        });
    }

    fn left(&mut self, op: &Op, place: Place, inner: u32) -> Option<Factor> {
        if let Some(stage) = self.stage(place) {
            let (at, pitch) = (self.tile_address(stage.at), 4 * stage.dims[1]);
            return Some(match op.attr() == Some(Left::Transposed) {
                true => Factor { at, row: 4, column: pitch },
                false => Factor { at, row: pitch, column: 4 },
            });
        }
        let array = self.array(place)?;
        let at = self.tile_address(array.at);
        if array.element == Scalar::F32 {
            return Some(Factor { at, row: array.stride(), column: 4 });
        }
        let from = Rows { at, stride: self.long(array.stride()) };
        let at = self.tile_address(self.tiles.left);
        self.pack(from, array.element, [array.rows, inner], Form::Rows, at);
        Some(Factor { at, row: 4 * inner, column: 4 })
    }

    fn multiply(&mut self, job: Job, left: Factor, panels: Ssa, sums: Ssa) {
        let panel = self.tiles.panel;
        let small = job.rows * job.inner * job.panels < SMALL / panel;
        let most = match self.architecture {
            Architecture::X86_64 if !small => Some(micro::rows(panel)),
            _ => None,
        };
        // Strips of as even a height as can be: the first are a row higher than the others.
        let count = job.rows.div_ceil(most.unwrap_or(WRITTEN));
        let (low, higher) = (job.rows / count, job.rows % count);
        self.each_of_few(job.panels, |this, at| {
            let by = this.b.ins().imul_imm_s(at, i64::from(4 * panel * job.inner));
            let panel_at = this.b.ins().iadd(panels, by);
            let by = this.b.ins().imul_imm_s(at, i64::from(4 * panel));
            let sums = this.b.ins().iadd(sums, by);
            for (first, strips, rows) in [(0, higher, low + 1), (higher * (low + 1), count - higher, low)] {
                if strips == 0 {
                    continue;
                }
                this.each_of_few(strips, |this, at| {
                    let row = this.b.ins().imul_imm_s(at, i64::from(rows));
                    let row = this.b.ins().iadd_imm_s(row, i64::from(first));
                    let [from, to] = [(left.at, left.row), (sums, job.pitch)].map(|(begin, stride)| {
                        let by = this.b.ins().imul_imm_s(row, i64::from(stride));
                        this.b.ins().iadd(begin, by)
                    });
                    let left = Factor { at: from, ..left };
                    match most {
                        Some(_) => this.call_micro(job, rows, left, panel_at, to),
                        None => this.strip(job, rows, left, panel_at, to),
                    }
                });
            }
        });
    }

    fn call_micro(&mut self, job: Job, rows: u32, left: Factor, panel: Ssa, sums: Ssa) {
        let turned = left.column != 4;
        let routine = Routine::Micro(Micro { rows: rows as u8, turned, adds: job.adds });
        let routine = self.routine(routine);
        let stride = if turned { left.column } else { left.row };
        let [inner, stride, pitch] = [job.inner, stride, job.pitch].map(|n| self.long(n));
        self.b.ins().call(routine, &[left.at, panel, sums, inner, stride, pitch]);
    }

    /// A strip times a panel, in vectors of the code generator: sums of sixteen columns at a time.
    fn strip(&mut self, job: Job, rows: u32, left: Factor, panel: Ssa, sums: Ssa) {
        let width = 4 * self.tiles.panel as i32;
        for begin in (0..width).step_by(64) {
            let zero = self.float(types::F32X4, 0.0);
            let count = 4 * rows as usize;
            let (head, done) = (self.b.create_block(), self.b.create_block());
            let [at, from, by] = [0; 3].map(|_| self.b.append_block_param(head, types::I64));
            let carried: Vec<Ssa> =
                (0..count).map(|_| self.b.append_block_param(head, types::F32X4)).collect();
            let last: Vec<Ssa> = (0..count).map(|_| self.b.append_block_param(done, types::F32X4)).collect();
            let inner = self.long(job.inner);
            let first: Vec<BlockArg> =
                [inner, left.at, panel].into_iter().chain(vec![zero; count]).map(BlockArg::Value).collect();
            self.b.ins().jump(head, &first);
            self.b.switch_to_block(head);
            let columns = [0, 16, 32, 48].map(|i| self.b.ins().load(types::F32X4, loose(), by, begin + i));
            let mut next = Vec::with_capacity(count);
            for row in 0..rows {
                let one = self.b.ins().load(types::F32, own(), from, (row * left.row) as i32);
                let one = self.b.ins().splat(types::F32X4, one);
                for (i, column) in columns.into_iter().enumerate() {
                    next.push(self.b.ins().fma(one, column, carried[4 * row as usize + i]));
                }
            }
            let at = self.b.ins().iadd_imm_s(at, -1);
            let from = self.b.ins().iadd_imm_s(from, i64::from(left.column));
            let by = self.b.ins().iadd_imm_s(by, i64::from(width));
            let more = self.b.ins().icmp_imm_s(IntCC::NotEqual, at, 0);
            let results: Vec<BlockArg> = next.into_iter().map(BlockArg::Value).collect();
            let again: Vec<BlockArg> =
                [at, from, by].into_iter().map(BlockArg::Value).chain(results.iter().copied()).collect();
            self.b.ins().brif(more, head, &again, done, &results);
            self.b.seal_block(head);
            self.b.seal_block(done);
            self.b.switch_to_block(done);
            for (i, mut sum) in last.into_iter().enumerate() {
                let offset = (i as u32 / 4 * job.pitch) as i32 + begin + 16 * (i as i32 % 4);
                if job.adds {
                    let before = self.b.ins().load(types::F32X4, loose(), sums, offset);
                    sum = self.b.ins().fadd(before, sum);
                }
                self.b.ins().store(loose(), sum, sums, offset);
            }
        }
    }
}
