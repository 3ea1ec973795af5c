//! Matrices of any element, as f32, in the form in which a product takes them.

use super::Form;
use super::copy::Rows;
use crate::backend::cpu::isa::Architecture;
use crate::backend::cpu::lanes::{loose, own};
use crate::backend::cpu::routine::Routine;
use crate::backend::cpu::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, Type, Value as Ssa, types};
use vm_ir::Scalar;

/// Chunks that are prefetched ahead.
const AHEAD: u32 = 64;
/// Elements that are widened at once.
const GROUP: u32 = 4;

impl Writer<'_, '_> {
    /// Packs a matrix that lies row by row, and is all there.
    pub(super) fn pack(&mut self, from: Rows, element: Scalar, dims: [u32; 2], form: Form, to: Ssa) {
        let [rows, columns] = dims;
        let panel = self.tiles.panel;
        match form {
            Form::Rows => self.spread(from, element, dims, panel, [4 * columns, 4 * panel], to),
            Form::Panels => {
                let steps = [4 * panel, 4 * panel * rows];
                self.spread(from, element, dims, panel, steps, to);
            }
            Form::Turned => self.turn(from, element, dims, to),
        }
    }

    /// Row by row, in chunks of `chunk` columns; `steps` is the bytes from row to row, and from chunk to chunk, behind.
    fn spread(
        &mut self,
        from: Rows,
        element: Scalar,
        [rows, columns]: [u32; 2],
        chunk: u32,
        [down, across]: [u32; 2],
        to: Ssa,
    ) {
        let size = element.bytes();
        let (chunks, rest) = (columns / chunk, columns % chunk);
        let from_stride = from.stride;
        self.each_of_few(rows, |this, row| {
            let by = this.b.ins().imul(row, from.stride);
            let from = this.b.ins().iadd(from.at, by);
            let by = this.b.ins().imul_imm_s(row, i64::from(down));
            let to = this.b.ins().iadd(to, by);
            let row_of = |this: &mut Self, from: Ssa, to: Ssa, count: u32| {
                let groups: Vec<Ssa> = (0..count / GROUP)
                    .map(|i| this.widened(element, types::F32X4, from, (GROUP * i * size) as i32))
                    .collect();
                for (i, group) in groups.into_iter().enumerate() {
                    this.b.ins().store(loose(), group, to, 16 * i as i32);
                }
                for i in count / GROUP * GROUP..count {
                    let one = this.widened(element, types::F32, from, (i * size) as i32);
                    this.b.ins().store(own(), one, to, 4 * i as i32);
                }
            };
            if chunks > 0 && element == Scalar::F32 && this.architecture == Architecture::X86_64 {
                // Some 64 chunks ahead, whole rows.
                let ahead = this.b.ins().imul_imm_s(from_stride, i64::from((AHEAD / chunks).clamp(1, 16)));
                let [across, count] = [across, chunks].map(|n| this.long(n));
                let routine = this.routine(Routine::Chunks);
                this.b.ins().call(routine, &[from, to, across, count, ahead]);
            } else if chunks > 0 {
                this.each_of_few(chunks, |this, at| {
                    let by = this.b.ins().imul_imm_s(at, i64::from(chunk * size));
                    let from = this.b.ins().iadd(from, by);
                    let by = this.b.ins().imul_imm_s(at, i64::from(across));
                    let to = this.b.ins().iadd(to, by);
                    row_of(this, from, to, chunk);
                });
            }
            if rest > 0 {
                let from = this.b.ins().iadd_imm_s(from, i64::from(chunks * chunk * size));
                let to = this.b.ins().iadd_imm_s(to, i64::from(chunks) * i64::from(across));
                row_of(this, from, to, rest);
            }
        });
    }

    /// Panels of rows, column by column.
    fn turn(&mut self, from: Rows, element: Scalar, [rows, columns]: [u32; 2], to: Ssa) {
        let (panel, size) = (self.tiles.panel, element.bytes());
        let (panels, rest) = (rows / panel, rows % panel);
        let some = |this: &mut Self, at: Ssa, rows: u32| {
            let by = this.b.ins().imul_imm_s(at, i64::from(panel));
            let by = this.b.ins().imul(by, from.stride);
            let from = Rows { at: this.b.ins().iadd(from.at, by), ..from };
            let by = this.b.ins().imul_imm_s(at, i64::from(4 * panel * columns));
            let to = this.b.ins().iadd(to, by);
            if rows >= GROUP && columns >= GROUP {
                this.each_of_few(rows / GROUP, |this, group| {
                    let by = this.b.ins().imul(group, from.stride);
                    let by = this.b.ins().imul_imm_s(by, i64::from(GROUP));
                    let mut lines = vec![this.b.ins().iadd(from.at, by)];
                    for _ in 1..GROUP {
                        let next = this.b.ins().iadd(lines[lines.len() - 1], from.stride);
                        lines.push(next);
                    }
                    let by = this.b.ins().imul_imm_s(group, i64::from(4 * GROUP));
                    let to = this.b.ins().iadd(to, by);
                    this.each_of_few(columns / GROUP, |this, at| {
                        let by = this.b.ins().imul_imm_s(at, i64::from(GROUP * size));
                        let square = [0, 1, 2, 3].map(|i| {
                            let line = this.b.ins().iadd(lines[i], by);
                            this.widened(element, types::F32X4, line, 0)
                        });
                        let by = this.b.ins().imul_imm_s(at, i64::from(4 * GROUP * panel));
                        let to = this.b.ins().iadd(to, by);
                        for (i, column) in this.transposed(square).into_iter().enumerate() {
                            this.b.ins().store(loose(), column, to, (4 * panel) as i32 * i as i32);
                        }
                    });
                });
            }
            // What is beside the squares, one by one.
            let squares = [rows / GROUP * GROUP, columns / GROUP * GROUP];
            for (first, [high, wide]) in
                [([0, squares[1]], [squares[0], columns]), ([squares[0], 0], [rows, columns])]
            {
                if first[0] >= high || first[1] >= wide {
                    continue;
                }
                let [i, j, high, wide] = [first[0], first[1], high, wide].map(|n| this.long(n));
                this.until(i, high, 1, |this, i| {
                    let by = this.b.ins().imul(i, from.stride);
                    let line = this.b.ins().iadd(from.at, by);
                    let by = this.b.ins().imul_imm_s(i, 4);
                    let to = this.b.ins().iadd(to, by);
                    this.until(j, wide, 1, |this, j| {
                        let by = this.b.ins().imul_imm_s(j, i64::from(size));
                        let at = this.b.ins().iadd(line, by);
                        let one = this.widened(element, types::F32, at, 0);
                        let by = this.b.ins().imul_imm_s(j, i64::from(4 * panel));
                        let to = this.b.ins().iadd(to, by);
                        this.b.ins().store(own(), one, to, 0);
                    });
                });
            }
        };
        if panels > 0 {
            self.each_of_few(panels, |this, at| some(this, at, panel));
        }
        if rest > 0 {
            let at = self.long(panels);
            some(self, at, rest);
        }
    }

    /// The columns of four rows of four.
    fn transposed(&mut self, [a, b, c, d]: [Ssa; 4]) -> [Ssa; 4] {
        let ty = types::F32X4;
        let mut pick = |a: Ssa, b: Ssa, lanes: [usize; 4]| self.shuffled(ty, a, b, lanes.into_iter());
        let [ab, cd] = [(a, b), (c, d)].map(|(a, b)| pick(a, b, [0, 4, 1, 5]));
        let [ef, gh] = [(a, b), (c, d)].map(|(a, b)| pick(a, b, [2, 6, 3, 7]));
        let (low, high) = ([0, 1, 4, 5], [2, 3, 6, 7]);
        [pick(ab, cd, low), pick(ab, cd, high), pick(ef, gh, low), pick(ef, gh, high)]
    }

    /// One element as f32, or four neighbours.
    pub(super) fn widened(&mut self, element: Scalar, ty: Type, at: Ssa, offset: i32) -> Ssa {
        if element == Scalar::F32 {
            let flags = if ty.is_vector() { loose() } else { own() };
            return self.b.ins().load(ty, flags, at, offset);
        }
        let ints = ty.as_int();
        let bits = self.loaded_bits(element, ints, at, offset);
        match element {
            Scalar::I8 => self.b.ins().fcvt_from_sint(ty, bits),
            Scalar::Bf16 => {
                let bits = self.b.ins().ishl_imm_s(bits, 16);
                self.cast(ty, bits)
            }
            Scalar::Tf32 => self.nearest_tf32(bits, ty),
            Scalar::F16 => self.small_float(bits, ty, [5, 10], true),
            Scalar::F8E5M2 => {
                let bits = self.b.ins().ishl_imm_s(bits, 8);
                self.small_float(bits, ty, [5, 10], true)
            }
            _ => self.small_float(bits, ty, [4, 3], false),
        }
    }

    /// The bits of an element in 32: signed of integers, else zeros above.
    fn loaded_bits(&mut self, element: Scalar, ints: Type, at: Ssa, offset: i32) -> Ssa {
        match (element.bytes(), ints.is_vector()) {
            (4, vector) => self.b.ins().load(ints, if vector { loose() } else { own() }, at, offset),
            (2, true) => self.b.ins().uload16x4(loose(), at, offset),
            (2, false) => {
                let one = self.b.ins().load(types::I16, own(), at, offset);
                self.b.ins().uextend(types::I32, one)
            }
            (_, true) => {
                let four = self.b.ins().load(types::I32, loose(), at, offset);
                let four = self.b.ins().scalar_to_vector(types::I32X4, four);
                let bytes = self.cast(types::I8X16, four);
                if element == Scalar::I8 {
                    let words = self.b.ins().swiden_low(bytes);
                    return self.b.ins().swiden_low(words);
                }
                let words = self.b.ins().uwiden_low(bytes);
                self.b.ins().uwiden_low(words)
            }
            (_, false) => {
                let one = self.b.ins().load(types::I8, own(), at, offset);
                match element {
                    Scalar::I8 => self.b.ins().sextend(types::I32, one),
                    _ => self.b.ins().uextend(types::I32, one),
                }
            }
        }
    }

    /// A float of these bits of exponent and mantissa, which has infinities or a NaN of all ones alone.
    fn small_float(&mut self, bits: Ssa, ty: Type, [exponent, mantissa]: [u32; 2], infinite: bool) -> Ssa {
        let ints = ty.as_int();
        let magnitudes = (1i64 << (exponent + mantissa)) - 1;
        let rest = self.int(ints, magnitudes);
        let size = self.b.ins().band(bits, rest);
        let sign = self.b.ins().bxor(bits, size);
        let sign = self.b.ins().ishl_imm_s(sign, i64::from(31 - exponent - mantissa));
        // The exponent's bias is made up for by a product, which is exact, also of subnormal numbers.
        let up = self.b.ins().ishl_imm_s(size, i64::from(23 - mantissa));
        let scale = f64::from(127 - ((1 << (exponent - 1)) - 1)).exp2();
        let scale = self.float(ty, scale);
        let number = self.cast(ty, up);
        let number = self.b.ins().fmul(number, scale);
        // What has the greatest exponent, or is the one NaN, keeps its mantissa below all ones.
        let least = if infinite { magnitudes + 1 - (1 << mantissa) } else { magnitudes };
        let below = self.int(ints, least - 1);
        let special = self.b.ins().icmp(IntCC::SignedGreaterThan, size, below);
        let ones = self.int(ints, 0x7f80_0000);
        let bits = self.cast(ints, number);
        let all = self.b.ins().bor(bits, ones);
        let bits = self.choose_bits(special, all, bits);
        let bits = self.b.ins().bor(bits, sign);
        self.cast(ty, bits)
    }

    fn choose_bits(&mut self, condition: Ssa, a: Ssa, b: Ssa) -> Ssa {
        match self.type_of(a).is_vector() {
            true => self.b.ins().bitselect(condition, a, b),
            false => self.b.ins().select(condition, a, b),
        }
    }

    /// Rounded to ten bits of fraction, to the nearest, ties away from zero; what is not finite stays.
    fn nearest_tf32(&mut self, bits: Ssa, ty: Type) -> Ssa {
        let ints = ty.as_int();
        let half = self.int(ints, 1 << 12);
        let up = self.b.ins().iadd(bits, half);
        let kept = self.int(ints, !((1 << 13) - 1));
        let rounded = self.b.ins().band(up, kept);
        let rest = self.int(ints, 0x7fff_ffff);
        let size = self.b.ins().band(bits, rest);
        let infinity = self.int(ints, 0x7f80_0000);
        let finite = self.b.ins().icmp(IntCC::SignedGreaterThan, infinity, size);
        let bits = self.choose_bits(finite, rounded, bits);
        self.cast(ty, bits)
    }
}
