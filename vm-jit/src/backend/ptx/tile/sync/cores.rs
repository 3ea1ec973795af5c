//! Products without instructions for them: element by element, in f32 or i32; and f8 as f16.

use super::super::fragment_number;
use super::product::Factor;
use crate::backend::ptx::arch::Feature;
use crate::backend::ptx::asm::{Arg, Class, Reg, def, ins};
use crate::backend::ptx::writer::Writer;
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::Opcode;

/// 2^8 twice, in f16.
const SCALE: i64 = 0x5c00_5c00;

impl<'k> Writer<'k> {
    /// Adds a product to the registers of a fragment, or puts it in its place.
    pub(super) fn multiply(
        &mut self,
        op: &'k Op,
        (mut left, right): (Option<&mut Factor>, &mut Factor),
        sums: &[Reg],
        inner: u32,
    ) {
        let (Some(sum), Some(tiles)) = (op.place.and_then(|place| self.kernel.fragment(place)), &self.tiles)
        else {
            return;
        };
        let spread = tiles.spread;
        let slabs = spread.rows(sum.rows) / spread.slab;
        let eights = spread.columns(sum.columns.unwrap_or(0)) / 8;
        if op.code == Opcode::Product {
            sums.iter().for_each(|reg| ins!(self, "mov.b32", *reg, 0));
        }
        let name = if sum.element == Scalar::I32 { "mad.lo.s32" } else { "fma.rn.f32" };
        for k in 0..inner {
            let mut lefts = Vec::new();
            for half in 0..2 * slabs {
                lefts.push(match &mut left {
                    Some(factor) => self.left_element(factor, 8 * half, k),
                    None => self.fragment_element(op.others[0], half, k),
                });
            }
            for eight in 0..eights {
                for i in 0..2 {
                    let right = self.right_element(right, 8 * eight, i, k);
                    for (half, left) in lefts.iter().enumerate() {
                        let at =
                            (half / 2 * eights as usize + eight as usize) * 4 + half % 2 * 2 + i as usize;
                        ins!(self, name, sums[at], *left, right, sums[at]);
                    }
                }
            }
        }
    }

    /// An element of a left factor: in the row of the thread's quad, `down` further.
    fn left_element(&mut self, factor: &mut Factor, down: u32, k: u32) -> Reg {
        let Some(quad) = self.tiles.as_ref().and_then(|tiles| Some(tiles.sync.as_ref()?.quad)) else {
            return Reg::NONE;
        };
        let key = [down, 0];
        let own = match factor.is_known(key) {
            true => quad,
            // Parts may reach beyond the stage by whole slabs.
            false => match self.begins(factor, down / 16 * 16).0 {
                Some(begin) => def!(self, B32, "add.u32", begin, quad),
                None => quad,
            },
        };
        let more = if factor.is_even() { down } else { down % 16 };
        self.element_in(factor, own, more, k, key)
    }

    /// An element of a right factor: in column `i` of the two that the thread has of eight.
    fn right_element(&mut self, factor: &mut Factor, eight: u32, i: u32, k: u32) -> Reg {
        let Some(in_quad) = self.tiles.as_ref().and_then(|tiles| Some(tiles.sync.as_ref()?.in_quad)) else {
            return Reg::NONE;
        };
        let key = [eight, 1 + i];
        let mut own = in_quad;
        if !factor.is_known(key) {
            own = def!(self, B32, "shl.b32", in_quad, 1);
            if let Some(begin) = self.begins(factor, eight / 16 * 16).0 {
                own = def!(self, B32, "add.u32", begin, own);
            }
            own = def!(self, B32, "add.u32", own, i64::from(i));
        }
        let more = if factor.is_even() { eight } else { eight % 16 };
        self.element_in(factor, own, more, k, key)
    }

    /// An element of a factor, as a number in 32 bits. What is not added up is the lane's `row` or `byte`, and so many further.
    fn element_in(&mut self, factor: &mut Factor, own: Reg, more: u32, k: u32, key: [u32; 2]) -> Reg {
        let (stage, element) = (factor.stage, factor.element);
        let (at, offset) = match factor.along {
            true => self.address_in(factor, key, (more, k * stage.size), |writer| {
                let none = def!(writer, B32, "mov.b32", 0);
                writer.offset_in(stage, own, none)
            }),
            false => {
                let (at, offset) = self.address_in(factor, key, (k / 8 * 8, 0), |writer| {
                    let byte = def!(writer, B32, "mul.lo.u32", own, i64::from(stage.size));
                    let byte = def!(writer, B32, "add.u32", byte, i64::from(more * stage.size));
                    let none = def!(writer, B32, "mov.b32", 0);
                    writer.offset_in(stage, none, byte)
                });
                let at = def!(self, B32, "xor.b32", at, i64::from(stage.moved(k % 8)));
                (at, offset + i64::from(k % 8 * stage.pitch()))
            }
        };
        let from = Arg::At(at, offset);
        match element {
            Scalar::F16 => {
                let half = def!(self, B16, "ld.shared.b16", from);
                def!(self, B32, "cvt.f32.f16", half)
            }
            Scalar::Bf16 => {
                let half = def!(self, B32, "ld.shared.u16", from);
                def!(self, B32, "shl.b32", half, 16)
            }
            Scalar::Tf32 => {
                let bits = def!(self, B32, "ld.shared.b32", from);
                let finite = def!(self, Pred, "testp.finite.f32", bits);
                let up = def!(self, B32, "add.u32", bits, 1 << 12);
                let rounded = def!(self, B32, "and.b32", up, -(1i64 << 13));
                def!(self, B32, "selp.b32", rounded, bits, finite)
            }
            Scalar::I8 => def!(self, B32, "ld.shared.s8", from),
            Scalar::F8E4M3 | Scalar::F8E5M2 => {
                let byte = def!(self, B32, "ld.shared.u8", from);
                let [two, _] = self.f8_as_half(element, byte);
                self.low_half(two)
            }
            _ => def!(self, B32, "ld.shared.b32", from),
        }
    }

    /// The lower of two f16, as f32.
    fn low_half(&mut self, two: Reg) -> Reg {
        let [low, high] = [self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16)];
        ins!(self, "mov.b32", Arg::List(&[low, high]), two);
        def!(self, B32, "cvt.f32.f16", low)
    }

    /// An element of a left factor that is a fragment: some thread of the quad has it.
    fn fragment_element(&mut self, place: Place, half: u32, k: u32) -> Reg {
        let (Some(fragment), Some(number)) = (self.kernel.fragment(place), fragment_number(place)) else {
            return Reg::NONE;
        };
        let Some(tiles) = &self.tiles else { return Reg::NONE };
        let Some(sync) = &tiles.sync else { return Reg::NONE };
        let (lane, eights) = (sync.lane, tiles.spread.columns(fragment.columns.unwrap_or(0)) / 8);
        let at = (half / 2 * eights + k / 8) * 4 + half % 2 * 2 + k % 2;
        let regs = &tiles.fragments[number];
        let narrow = fragment.element.bytes() == 2;
        let reg = regs[(if narrow { at / 2 } else { at }) as usize];
        let first = def!(self, B32, "and.b32", lane, 28);
        let owner = def!(self, B32, "add.u32", first, i64::from(k % 8 / 2));
        let reg = def!(self, B32, "shfl.sync.idx.b32", reg, owner, 31, -1);
        match (fragment.element, at % 2) {
            (Scalar::Bf16, 0) => def!(self, B32, "shl.b32", reg, 16),
            (Scalar::Bf16, _) => def!(self, B32, "and.b32", reg, -0x1_0000i64),
            (Scalar::F16, 0) => self.low_half(reg),
            (Scalar::F16, _) => {
                let high = def!(self, B32, "shr.u32", reg, 16);
                self.low_half(high)
            }
            (Scalar::I8, _) => def!(self, B32, "cvt.s32.s8", reg),
            (element @ (Scalar::F8E4M3 | Scalar::F8E5M2), _) => {
                let [two, _] = self.f8_as_half(element, reg);
                self.low_half(two)
            }
            _ => reg,
        }
    }

    /// Four f8 as f16: the first two, and the others. Every f8 is an f16.
    pub(super) fn f8_as_half(&mut self, element: Scalar, four: Reg) -> [Reg; 2] {
        if self.has(Feature::CvtF8) {
            let halves = [self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16)];
            ins!(self, "mov.b32", Arg::List(&halves), four);
            let name = if element == Scalar::F8E4M3 { "cvt.rn.f16x2.e4m3x2" } else { "cvt.rn.f16x2.e5m2x2" };
            return halves.map(|half| def!(self, B32, name, half));
        }
        [0x1404, 0x3424].map(|order| {
            let high = def!(self, B32, "prmt.b32", four, 0, order);
            if element == Scalar::F8E5M2 {
                // The first byte of an f16.
                return high;
            }
            // One more bit of exponent, which counts from 8 more; a magnitude of all ones is no number.
            let sign = def!(self, B32, "and.b32", high, -0x7fff_8000i64);
            let size = def!(self, B32, "and.b32", high, 0x7f00_7f00);
            let moved = def!(self, B32, "shr.u32", size, 1);
            let scale = def!(self, B32, "mov.b32", SCALE);
            let value = def!(self, B32, "mul.rn.f16x2", moved, scale);
            let rest = def!(self, B32, "xor.b32", size, 0x7f00_7f00);
            let some = def!(self, B32, "add.u32", rest, 0x7fff_7fff);
            let none = def!(self, B32, "not.b32", some);
            let none = def!(self, B32, "shr.u32", none, 15);
            let none = def!(self, B32, "and.b32", none, 0x0001_0001);
            let none = def!(self, B32, "mul.lo.u32", none, 0x7e00);
            let value = def!(self, B32, "or.b32", value, none);
            def!(self, B32, "or.b32", value, sign)
        })
    }
}
