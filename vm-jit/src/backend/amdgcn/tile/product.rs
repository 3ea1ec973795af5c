//! Products, by the instructions that a chip has: MFMA of CDNA, WMMA of RDNA.

use super::super::Chip;
use super::super::writer::{Val, Writer};
use super::factor::{Factor, Side, Step};
use super::layout::words;
use super::{SLAB, fragment_number};
use crate::backend::stage::PIECE;
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Left, Opcode, Right};

/// An instruction that adds the product of 16 rows and 16 columns.
#[derive(Clone, Copy, Debug)]
struct Instruction {
    /// Words that a lane gives of each factor, and their type.
    words: u32,
    ty: &'static str,
    /// Without `llvm.amdgcn.`.
    name: &'static str,
}

const fn instruction(words: u32, ty: &'static str, name: &'static str) -> Instruction {
    Instruction { words, ty, name }
}

const F32: &[Instruction] = &[instruction(1, "float", "mfma.f32.16x16x4f32")];
const F16_16: Instruction = instruction(2, "<4 x half>", "mfma.f32.16x16x16f16");
const F16_32: Instruction = instruction(4, "<8 x half>", "mfma.f32.16x16x32.f16");
const BF16_16: Instruction = instruction(2, "<4 x i16>", "mfma.f32.16x16x16bf16.1k");
const BF16_32: Instruction = instruction(4, "<8 x bfloat>", "mfma.f32.16x16x32.bf16");
const I8_16: Instruction = instruction(1, "i32", "mfma.i32.16x16x16i8");
const I8_32: Instruction = instruction(2, "i64", "mfma.i32.16x16x32.i8");
const I8_64: Instruction = instruction(4, "<4 x i32>", "mfma.i32.16x16x64.i8");

const WMMA_BF16_11: Instruction = instruction(8, "<16 x i16>", "wmma.f32.16x16x16.bf16.v8f32.v16i16");
const WMMA_BF16_12: Instruction = instruction(4, "<8 x i16>", "wmma.f32.16x16x16.bf16.v8f32.v8i16");
const WMMA_I8_11: Instruction = instruction(4, "<4 x i32>", "wmma.i32.16x16x16.iu8.v8i32.v4i32");
const WMMA_I8_12: Instruction = instruction(2, "<2 x i32>", "wmma.i32.16x16x16.iu8.v8i32.v2i32");
const WMMA_F16_11: Instruction = instruction(8, "<16 x half>", "wmma.f32.16x16x16.f16.v8f32.v16f16");
const WMMA_F16_12: Instruction = instruction(4, "<8 x half>", "wmma.f32.16x16x16.f16.v8f32.v8f16");

/// How factors of a type are multiplied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Multiplier {
    /// Those that take the most first; none where it is done one by one.
    instructions: &'static [Instruction],
    /// Does each lane take all of what an instruction adds up?
    whole: bool,
}

impl Multiplier {
    pub(super) fn of(chip: Chip, element: Scalar) -> Multiplier {
        let whole = chip == Chip::Gfx1100;
        let cdna = chip.wave() == 64;
        let instructions: &[Instruction] = match (element, chip) {
            (Scalar::Tf32 | Scalar::F32, _) if cdna => F32,
            (Scalar::Bf16, Chip::Gfx950) => &[BF16_32, BF16_16],
            (Scalar::Bf16, Chip::Gfx1100) => &[WMMA_BF16_11],
            (Scalar::Bf16, Chip::Gfx1201) => &[WMMA_BF16_12],
            (Scalar::Bf16, _) => &[BF16_16],
            (Scalar::I8, Chip::Gfx90a) => &[I8_16],
            (Scalar::I8, Chip::Gfx942) => &[I8_32],
            (Scalar::I8, Chip::Gfx950) => &[I8_64, I8_32],
            (Scalar::I8, Chip::Gfx1100) => &[WMMA_I8_11],
            (Scalar::I8, Chip::Gfx1201) => &[WMMA_I8_12],
            // f8, too, as f16.
            (Scalar::F16 | Scalar::F8E4M3 | Scalar::F8E5M2, _) => match chip {
                Chip::Gfx950 => &[F16_32, F16_16],
                Chip::Gfx1100 => &[WMMA_F16_11],
                Chip::Gfx1201 => &[WMMA_F16_12],
                _ => &[F16_16],
            },
            _ => &[],
        };
        Multiplier { instructions, whole }
    }
}

impl<'k> Writer<'k> {
    /// Adds a product to a fragment, or puts it in its place.
    pub(super) fn mma(&mut self, op: &'k Op, place: Place) {
        let kernel = self.kernel;
        let (Some(sum), &[a, b]) = (kernel.fragment(place), &op.others[..]) else { return };
        let (Some(number), Some((_, element))) = (fragment_number(place), kernel.place(a)) else { return };
        let turned = [op.attr() == Some(Left::Transposed), op.attr() == Some(Right::Transposed)];
        let columns = sum.columns.unwrap_or(0);
        let Some(mut right) = self.factor(b, turned[1], Side::Right, columns) else { return };
        let mut left = self.factor(a, !turned[0], Side::Left, sum.rows);
        let multiplier = self.multiplier(element);
        let Some((kept, mut sums)) = self.registers(number) else { return };
        if op.code == Opcode::Product {
            sums.fill(Val::Zero);
        }
        if multiplier.instructions.is_empty() {
            self.multiply_by_cores(a, left.as_ref(), &right, kept, &mut sums);
            return self.set_registers(number, &sums);
        }
        let step = self.step(left.as_ref(), &right, multiplier);
        let steps = right.inner() / step.depth();
        let of_f8 = matches!(element, Scalar::F8E4M3 | Scalar::F8E5M2);
        let in_step = step.run * right.stage.size / 4 * if of_f8 { 2 } else { 1 };
        // As many steps at a time as the largest instruction takes.
        let largest = multiplier.instructions.first().map_or(1, |one| one.words);
        let fits = |count: &u32| count * in_step <= largest && steps.is_multiple_of(*count);
        let together = [4, 2].into_iter().find(fits).unwrap_or(1);
        for first in (0..steps).step_by(together as usize) {
            let each = first..first + together;
            let mut lefts = Vec::new();
            for slab in 0..kept.slabs {
                let mut all = Vec::new();
                for n in each.clone() {
                    all.extend(match &mut left {
                        Some(left) => self.run(left, step, slab, n * step.depth()),
                        None => self.run_of_fragment(a, slab, n, multiplier.whole),
                    });
                }
                lefts.push(if of_f8 { self.f8_as_half(element, &all) } else { all });
            }
            for block in 0..kept.blocks {
                if self.is_too_long() {
                    return;
                }
                let mut all = Vec::new();
                for n in each.clone() {
                    all.extend(self.run(&mut right, step, block, n * step.depth()));
                }
                let of_right = right.element;
                let all = if of_f8 { self.f8_as_half(of_right, &all) } else { all };
                for (slab, left) in (0..).zip(&lefts) {
                    let sum: &mut Val = &mut sums[(slab * kept.blocks + block) as usize];
                    *sum = self.multiplied(multiplier, left, &all, *sum);
                }
            }
        }
        if self.options.chip.wave() == 32 {
            // LLVM 22 moves WMMA to where its sum is used, which may be where some lanes alone are.
            for sum in &mut sums {
                *sum = self.stays(kept.ty, *sum);
            }
        }
        self.set_registers(number, &sums);
    }

    /// A value that LLVM computes here, and knows nothing of.
    pub(super) fn stays(&mut self, ty: &str, value: Val) -> Val {
        self.def(format_args!("call {ty} asm sideeffect \"\", \"=v,0\"({ty} {value})"))
    }

    /// What lanes take at a time: of stages as much as a load may be.
    fn step(&self, left: Option<&Factor>, right: &Factor, multiplier: Multiplier) -> Step {
        let lanes = self.options.chip.wave() / SLAB;
        if multiplier.whole {
            return Step { run: SLAB, lanes: 1 };
        }
        let mut step = Step { run: SLAB / lanes, lanes };
        let Some(left) = left else { return step };
        let fits = |step: Step| {
            let within = |factor: &Factor| {
                !factor.along || (factor.stage.pitch() / factor.stage.size).is_multiple_of(step.depth())
            };
            step.run * right.stage.size <= PIECE
                && right.inner().is_multiple_of(step.depth())
                && within(left)
                && within(right)
        };
        while fits(Step { run: 2 * step.run, lanes }) {
            step.run *= 2;
        }
        step
    }

    /// The sum of a register and the product of words of factors, which come to 16 rows and columns.
    fn multiplied(&mut self, multiplier: Multiplier, left: &[Val], right: &[Val], sum: Val) -> Val {
        let (mut sum, mut at) = (sum, 0);
        let count = if multiplier.instructions[0].name.starts_with("mfma") { 4 } else { 8 };
        while at < left.len() {
            let fits = |one: &&Instruction| one.words as usize <= left.len() - at;
            let Some(one) = multiplier.instructions.iter().find(fits) else { return sum };
            let end = at + one.words as usize;
            // The right factor first: so the product comes transposed.
            let [right, left] = [&right[at..end], &left[at..end]].map(|some| {
                let all = self.of_words(some);
                self.def(format_args!("bitcast {} {all} to {}", words(one.words), one.ty))
            });
            let is_int = one.name.contains(".i32.");
            let each = if is_int { "i32" } else { "float" };
            let ty = format!("<{count} x {each}>");
            let before = self.def(format_args!("bitcast {} {sum} to {ty}", words(count)));
            let (yes, no) = (("i1", Val::Bits(1)), ("i1", Val::Bits(0)));
            let none = ("i32", Val::Bits(0));
            let (a, b, c) = ((one.ty, right), (one.ty, left), (ty.as_str(), before));
            let args = match (count, is_int) {
                (4, _) => vec![a, b, c, none, none, none],
                (_, true) => vec![yes, a, yes, b, c, no],
                _ => vec![a, b, c],
            };
            let after = self.call(&ty, &format!("llvm.amdgcn.{}", one.name), &args);
            sum = self.def(format_args!("bitcast {ty} {after} to {}", words(count)));
            at = end;
        }
        sum
    }
}
