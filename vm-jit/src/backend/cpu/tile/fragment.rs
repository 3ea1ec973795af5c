//! What is computed of fragments: `fill`, `map`, and joins of rows.

use super::Array;
use crate::backend::cpu::floats::Extreme;
use crate::backend::cpu::lanes::{Repr, clif, loose, own, vector};
use crate::backend::cpu::writer::Writer;
use crate::safety::cost;
use cranelift_codegen::ir::condcodes::FloatCC;
use cranelift_codegen::ir::{BlockArg, InstBuilder, Type, Value as Ssa, types};
use vm_ir::module::{Op, Place};
use vm_ir::op::Opcode;

/// Vectors that are joined side by side.
const SIDE_BY_SIDE: u32 = 4;

impl<'k> Writer<'_, 'k> {
    pub(super) fn fill(&mut self, op: &Op, place: Place) {
        let (Some(array), Some(value)) = (self.array(place), op.operands.first().copied()) else { return };
        let (value, ty) = (self.first(value), clif(array.element));
        let all = self.b.ins().splat(Type::by(ty, 128 / ty.bits()).unwrap_or(ty), value);
        let to = self.tile_address(array.at);
        // Rows are padded to as many bytes.
        let end = self.long(array.bytes() as i64);
        self.counted(end, 16, |this, at| {
            let to = this.b.ins().iadd(to, at);
            this.b.ins().store(loose(), all, to, 0);
        });
    }

    /// Neighbouring elements of a row are computed together, as neighbouring threads are; the padding behind them too.
    pub(super) fn map(&mut self, op: &'k Op, place: Place) {
        let (Some(first), [body]) = (self.array(place), &op.regions[..]) else { return };
        let places: Vec<Place> = std::iter::once(place).chain(op.others.iter().copied()).collect();
        let arrays: Vec<Array> = places.into_iter().filter_map(|place| self.array(place)).collect();
        let count = op.immediates.first().map_or(1, |count| *count as usize);
        let (computed, read) = arrays.split_at(count.min(arrays.len()));
        let begins: Vec<Ssa> = arrays.iter().map(|array| self.tile_address(array.at)).collect();
        let width = self.together_in_map(body, arrays.iter().map(|array| array.element));
        let polls = self.map_polls(op, &first, width);
        self.each_of_few(first.rows, |this, row| {
            if let Some((cost, true)) = polls {
                this.charge(cost);
            }
            let small = this.b.ins().ireduce(types::I32, row);
            let rows: Vec<Ssa> = arrays
                .iter()
                .zip(&begins)
                .map(|(array, begin)| {
                    // Of a column, an element of each row; of a row, all for each.
                    let step = match () {
                        () if array.is_column && !first.is_column => array.element.bytes(),
                        () if array.rows == 1 => 0,
                        () => array.stride(),
                    };
                    let by = this.b.ins().imul_imm_s(row, i64::from(step));
                    this.b.ins().iadd(*begin, by)
                })
                .collect();
            let end = this.long(first.columns);
            this.counted(end, width as i64, |this, at| {
                if let Some((cost, false)) = polls {
                    this.charge(cost);
                }
                this.width = width;
                let base = this.b.ins().ireduce(types::I32, at);
                let steps = match width {
                    1 => Repr::Splat(base),
                    _ => Repr::Affine { base, stride: 1, low: 0, high: i64::from(first.pitch) },
                };
                let zero = this.b.ins().iconst(types::I32, 0);
                let (i, j) = match first.is_column {
                    true => (steps, Repr::Splat(zero)),
                    false => (Repr::Splat(small), steps),
                };
                let mut values = vec![i, j];
                let address = |this: &mut Self, array: &Array, row: Ssa| {
                    let by = this.b.ins().imul_imm_s(at, i64::from(array.element.bytes()));
                    this.b.ins().iadd(row, by)
                };
                for (array, row) in read.iter().zip(&rows[computed.len()..]) {
                    values.push(match array.is_column && !first.is_column {
                        true => Repr::Splat(this.b.ins().load(clif(array.element), own(), *row, 0)),
                        false => {
                            let from = address(this, array, *row);
                            this.load_elements(own(), from, 0, array.element, width)
                        }
                    });
                }
                for (arg, value) in body.args.iter().zip(values) {
                    this.set(*arg, value);
                }
                this.region(body);
                let results: Vec<Repr> = body.yields.iter().map(|value| this.repr(*value)).collect();
                for ((array, row), result) in computed.iter().zip(&rows).zip(&results) {
                    let to = address(this, array, *row);
                    this.store_elements(own(), to, 0, array.element, result, width);
                }
                this.width = 1;
            });
        });
    }

    /// What is charged in a map that takes long, and whether for each row or else for elements that are computed together.
    fn map_polls(&self, op: &Op, first: &Array, width: usize) -> Option<(i64, bool)> {
        let each = cost::map_element(self.kernel, op, cost::Costs::Cpu);
        let (interval, row) = (self.safety.interval(), each.saturating_mul(first.columns.into()));
        let charge = |cost: u64| i64::try_from(cost).unwrap_or(i64::MAX).min(interval + 1);
        if row.saturating_mul(first.rows.into()) < interval as u64 / 16 {
            return None;
        }
        Some(match row < interval as u64 / 16 {
            true => (charge(row), true),
            false => (charge(each.saturating_mul(width as u64)), false),
        })
    }

    /// Joins the elements of each row with the element of a column.
    pub(super) fn row_op(&mut self, op: &Op, place: Place) {
        let matrix = op.others.first().and_then(|place| self.array(*place));
        let (Some(column), Some(matrix)) = (self.array(place), matrix) else { return };
        let (size, lane) = (matrix.element.bytes(), clif(matrix.element));
        let Some(ty) = vector(matrix.element) else { return };
        let [column_at, matrix_at] = [column.at, matrix.at].map(|at| self.tile_address(at));
        let code = match op.code {
            Opcode::RowMax => Opcode::Max,
            Opcode::RowMin => Opcode::Min,
            _ => Opcode::Add,
        };
        let neutral = match code {
            Opcode::Max => f64::NEG_INFINITY,
            Opcode::Min => f64::INFINITY,
            _ => 0.0,
        };
        let lanes = ty.lane_count();
        let chunk = SIDE_BY_SIDE * lanes;
        let (chunks, rest) = (matrix.columns / chunk, matrix.columns % chunk);
        self.each_of_few(matrix.rows, |this, row| {
            let by = this.b.ins().imul_imm_s(row, i64::from(matrix.stride()));
            let from = this.b.ins().iadd(matrix_at, by);
            let by = this.b.ins().imul_imm_s(row, i64::from(size));
            let at = this.b.ins().iadd(column_at, by);
            let before = this.b.ins().load(lane, own(), at, 0);
            let none = this.float(ty, neutral);
            let mut sums = vec![none; SIDE_BY_SIDE as usize];
            if chunks > 0 {
                sums = this.row_chunks(code, ty, from, chunks, &sums);
            }
            for i in 0..rest / lanes {
                let offset = (chunks * chunk + i * lanes) * size;
                let some = this.b.ins().load(ty, loose(), from, offset as i32);
                sums[i as usize] = this.joined(code, sums[i as usize], some);
            }
            let all = sums.into_iter().reduce(|a, b| this.joined(code, a, b)).unwrap_or(none);
            let mut ones: Vec<Ssa> =
                (0..lanes).map(|lane| this.b.ins().extractlane(all, lane as u8)).collect();
            for i in rest / lanes * lanes..rest {
                ones.push(this.b.ins().load(lane, own(), from, ((chunks * chunk + i) * size) as i32));
            }
            // The neutral one is joined first where it may meet NaNs.
            let all = ones.into_iter().reduce(|a, b| this.joined(code, a, b)).unwrap_or(before);
            let result = match code {
                Opcode::Add => this.b.ins().fadd(before, all),
                _ => this.extreme_of_row(code, &matrix, from, before, all),
            };
            this.b.ins().store(own(), result, at, 0);
        });
    }

    /// Joins the chunks of a row, each of whose vectors has a sum of its own.
    fn row_chunks(&mut self, code: Opcode, ty: Type, from: Ssa, chunks: u32, sums: &[Ssa]) -> Vec<Ssa> {
        let (head, done) = (self.b.create_block(), self.b.create_block());
        let at = self.b.append_block_param(head, types::I64);
        let carried: Vec<Ssa> = sums.iter().map(|_| self.b.append_block_param(head, ty)).collect();
        let results: Vec<Ssa> = sums.iter().map(|_| self.b.append_block_param(done, ty)).collect();
        let left = self.long(0);
        let first: Vec<BlockArg> = std::iter::once(left).chain(sums.to_vec()).map(BlockArg::Value).collect();
        self.b.ins().jump(head, &first);
        self.b.switch_to_block(head);
        let here = self.b.ins().iadd(from, at);
        let next: Vec<BlockArg> = carried
            .iter()
            .enumerate()
            .map(|(i, sum)| {
                let some = self.b.ins().load(ty, loose(), here, 16 * i as i32);
                self.joined(code, *sum, some).into()
            })
            .collect();
        let step = 16 * SIDE_BY_SIDE;
        let after = self.b.ins().iadd_imm_s(at, i64::from(step));
        let end = i64::from(step * chunks);
        let more = self.b.ins().icmp_imm_s(cranelift_codegen::ir::condcodes::IntCC::NotEqual, after, end);
        let again: Vec<BlockArg> = std::iter::once(after.into()).chain(next.iter().copied()).collect();
        self.b.ins().brif(more, head, &again, done, &next);
        self.b.seal_block(head);
        self.b.seal_block(done);
        self.b.switch_to_block(done);
        results
    }

    /// The sum, or the one that is less or greater; the first where they do not compare.
    fn joined(&mut self, code: Opcode, sum: Ssa, other: Ssa) -> Ssa {
        let condition = match code {
            Opcode::Add => return self.b.ins().fadd(sum, other),
            Opcode::Max => FloatCC::LessThan,
            _ => FloatCC::GreaterThan,
        };
        let rises = self.b.ins().fcmp(condition, sum, other);
        self.choose(rises, other, sum)
    }

    /// The greatest or least of a row and what was before, when that of the row was found without regard to the signs of
    /// zeros and to rows without any number: such rows are gone through once more.
    fn extreme_of_row(&mut self, code: Opcode, matrix: &Array, from: Ssa, before: Ssa, found: Ssa) -> Ssa {
        let lane = self.type_of(found);
        let [zero, most] = [0.0, f64::INFINITY].map(|bound| self.float(lane, bound));
        let size = self.b.ins().fabs(found);
        let nothing = self.b.ins().fcmp(FloatCC::Equal, size, zero);
        let infinite = self.b.ins().fcmp(FloatCC::Equal, size, most);
        let nan = self.b.ins().fcmp(FloatCC::Unordered, size, size);
        let doubtful = self.b.ins().bor(nothing, infinite);
        let doubtful = self.b.ins().bor(doubtful, nan);
        let [usual, other, end] = [0; 3].map(|_| self.b.create_block());
        let result = self.b.append_block_param(end, lane);
        self.b.ins().brif(doubtful, other, &[], usual, &[]);
        self.b.seal_block(usual);
        self.b.seal_block(other);
        self.b.switch_to_block(usual);
        self.extreme = Extreme { first: false, second: true, unsigned_zero: true };
        let one = self.number_over_nan(code, before, found);
        self.b.ins().jump(end, &[one.into()]);
        self.b.set_cold_block(other);
        self.b.switch_to_block(other);
        let (head, done) = (self.b.create_block(), self.b.create_block());
        let [at, sum] = [types::I64, lane].map(|ty| self.b.append_block_param(head, ty));
        let first = self.long(0);
        self.b.ins().jump(head, &[first.into(), before.into()]);
        self.b.switch_to_block(head);
        let here = self.b.ins().iadd(from, at);
        let next = self.b.ins().load(lane, own(), here, 0);
        self.extreme = Extreme::default();
        let sum = self.number_over_nan(code, sum, next);
        let after = self.b.ins().iadd_imm_s(at, i64::from(matrix.element.bytes()));
        let bytes = i64::from(matrix.columns * matrix.element.bytes());
        let more = self.b.ins().icmp_imm_s(cranelift_codegen::ir::condcodes::IntCC::NotEqual, after, bytes);
        self.b.ins().brif(more, head, &[after.into(), sum.into()], done, &[]);
        self.b.seal_block(head);
        self.b.seal_block(done);
        self.b.switch_to_block(done);
        self.b.ins().jump(end, &[sum.into()]);
        self.b.seal_block(end);
        self.b.switch_to_block(end);
        result
    }
}
