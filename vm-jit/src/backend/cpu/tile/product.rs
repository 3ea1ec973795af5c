//! Products of matrices: strips of rows of the left factor times panels of columns of the right one.

use super::copy::Rows;
use super::{Form, Stage, right_form};
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

/// A left factor.
#[derive(Clone, Copy)]
struct Factor {
    at: Ssa,
    /// Are rows neighbours, not columns?
    turned: bool,
    /// The bytes between columns then, else between rows; how many where it was packed.
    stride: Ssa,
    packed: u32,
}

impl Factor {
    /// Bytes from row to row, and from column to column, where it was packed.
    fn steps(&self) -> [u32; 2] {
        if self.turned { [4, self.packed] } else { [self.packed, 4] }
    }
}

/// A right factor: the first panel, and the bytes from row to row and from panel to panel.
#[derive(Clone, Copy)]
struct Panels {
    at: Ssa,
    down: Ssa,
    across: Ssa,
}

/// A product: its extents, and where its sums are.
#[derive(Clone, Copy)]
struct Job {
    rows: u32,
    columns: u32,
    inner: u32,
    adds: bool,
    /// May what is multiplied be where it is in views?
    stays: bool,
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
        let [at, down, across] = self.stage_place(&right);
        let mut panels = Panels { at, down, across };
        if right.form != form {
            let packed = Stage { at: self.tiles.right, element: Scalar::F32, form, told: None, ..right };
            self.stage_of(Rows { at, stride: down }, &packed);
            let [at, down, across] = self.stage_place(&packed);
            panels = Panels { at, down, across };
        }
        let adds = op.code == Opcode::Mma;
        let stays = [a, b].iter().any(|place| self.stage(*place).is_some_and(|stage| stage.told.is_some()));
        let (rows, pitch) = (sum.rows, 4 * sum.pitch);
        let job = Job { rows, columns: sum.pitch, inner, adds, stays, pitch };
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
            let [at, stride, _] = self.stage_place(&stage);
            let turned = op.attr() == Some(Left::Transposed);
            return Some(Factor { at, turned, stride, packed: 4 * stage.dims[1] });
        }
        let array = self.array(place)?;
        let mut at = self.tile_address(array.at);
        let mut packed = array.stride();
        if array.element != Scalar::F32 {
            let from = Rows { at, stride: self.long(packed) };
            at = self.tile_address(self.tiles.left);
            self.pack(from, array.element, [array.rows, inner], Form::Rows, at);
            packed = 4 * inner;
        }
        Some(Factor { at, turned: false, stride: self.long(packed), packed })
    }

    fn multiply(&mut self, job: Job, left: Factor, panels: Panels, sums: Ssa) {
        let panel = self.tiles.panel;
        let small = !job.stays && job.rows * job.inner * job.columns < SMALL;
        let most = match self.architecture {
            Architecture::X86_64 if !small => Some(micro::rows(panel)),
            _ => None,
        };
        // Strips of as even a height as can be: the first are a row higher than the others.
        let count = job.rows.div_ceil(most.unwrap_or(WRITTEN));
        let (low, higher) = (job.rows / count, job.rows % count);
        let strips = |this: &mut Self, at: Ssa, columns: u32| {
            let by = this.b.ins().imul(at, panels.across);
            let panels = Panels { at: this.b.ins().iadd(panels.at, by), ..panels };
            let by = this.b.ins().imul_imm_s(at, i64::from(4 * panel));
            let sums = this.b.ins().iadd(sums, by);
            for (first, strips, rows) in [(0, higher, low + 1), (higher * (low + 1), count - higher, low)] {
                if strips == 0 {
                    continue;
                }
                this.each_of_few(strips, |this, at| {
                    let row = this.b.ins().imul_imm_s(at, i64::from(rows));
                    let row = this.b.ins().iadd_imm_s(row, i64::from(first));
                    let by = match left.turned {
                        true => this.b.ins().imul_imm_s(row, 4),
                        false => this.b.ins().imul(row, left.stride),
                    };
                    let left = Factor { at: this.b.ins().iadd(left.at, by), ..left };
                    let by = this.b.ins().imul_imm_s(row, i64::from(job.pitch));
                    let to = this.b.ins().iadd(sums, by);
                    match most {
                        Some(_) => this.call_micro(job, [rows, columns], left, panels, to),
                        None => this.strip(job, [rows, columns], left, panels.at, to),
                    }
                });
            }
        };
        let (whole, rest) = (job.columns / panel, job.columns % panel);
        if whole > 0 {
            self.each_of_few(whole, |this, at| strips(this, at, panel));
        }
        if rest > 0 {
            let at = self.long(whole);
            strips(self, at, rest);
        }
    }

    fn call_micro(&mut self, job: Job, [rows, columns]: [u32; 2], left: Factor, panels: Panels, sums: Ssa) {
        let narrow = columns < self.tiles.panel;
        let routine = Micro { rows: rows as u8, turned: left.turned, adds: job.adds, narrow };
        let routine = self.routine(Routine::Micro(routine));
        let [inner, pitch] = [job.inner, job.pitch].map(|n| self.long(n));
        self.b.ins().call(routine, &[left.at, panels.at, sums, inner, left.stride, pitch, panels.down]);
    }

    /// A strip times a panel, in vectors of the code generator: sums of sixteen columns at a time.
    fn strip(&mut self, job: Job, [rows, columns]: [u32; 2], left: Factor, panel: Ssa, sums: Ssa) {
        let width = 4 * self.tiles.panel as i32;
        let [row_step, column_step] = left.steps();
        for begin in (0..4 * columns as i32).step_by(64) {
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
                let one = self.b.ins().load(types::F32, own(), from, (row * row_step) as i32);
                let one = self.b.ins().splat(types::F32X4, one);
                for (i, column) in columns.into_iter().enumerate() {
                    next.push(self.b.ins().fma(one, column, carried[4 * row as usize + i]));
                }
            }
            let at = self.b.ins().iadd_imm_s(at, -1);
            let from = self.b.ins().iadd_imm_s(from, i64::from(column_step));
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
