//! Fragments in registers.
//!
//! A group has its rows of a fragment in slabs of 64. In each a thread has what it has of a `wgmma`'s sum: of every eight
//! columns two that lie side by side, in the row of its quad and in the one eight further down. Elements of 16 bits are two to
//! a register, which is how the first factor of a `wgmma` lies, too. Of a column, the four threads of a quad have the same.

use super::fragment_number;
use super::layout::SLAB;
use crate::backend::ptx::asm::{Arg, Class, Reg, def, ins};
use crate::backend::ptx::writer::{Writer, class_of};
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::Opcode;
use vm_ir::tile::Fragment;

/// Elements of a fragment that a thread has.
pub(super) fn elements(fragment: &Fragment, groups: u32) -> u32 {
    let slabs = fragment.rows / groups / SLAB;
    slabs * fragment.columns.map_or(2, |columns| columns / 2)
}

/// Elements in a register.
fn packed(element: Scalar) -> u32 {
    4 / element.bytes().min(4)
}

impl<'k> Writer<'k> {
    /// Registers of a fragment, all zero.
    pub(super) fn zeroed(&mut self, fragment: &Fragment, groups: u32) -> Vec<Reg> {
        let count = elements(fragment, groups) / packed(fragment.element);
        (0..count).map(|_| def!(self, B32, "mov.b32", 0)).collect()
    }

    fn fragment_regs(&self, place: Place) -> Vec<Reg> {
        let number = fragment_number(place);
        let regs = number.and_then(|number| self.tiles.as_ref()?.fragments.get(number));
        regs.cloned().unwrap_or_default()
    }

    pub(super) fn fill_fragment(&mut self, op: &'k Op, place: Place) {
        let mut value = self.get(op.operands[0], 0);
        if value.class == Class::B16 {
            value = def!(self, B32, "mov.b32", Arg::List(&[value, value]));
        }
        for reg in self.fragment_regs(place) {
            self.mov(reg, value);
        }
    }

    /// Two elements that lie side by side, beginning with number `at` of the thread's.
    fn two(&mut self, regs: &[Reg], element: Scalar, at: usize) -> [Reg; 2] {
        match class_of(element) {
            Class::B16 => {
                let two = [self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16)];
                ins!(self, "mov.b32", Arg::List(&two), regs[at / 2]);
                two
            }
            _ => [regs[at], regs[at + 1]],
        }
    }

    pub(super) fn map(&mut self, op: &'k Op, first: Place) {
        let kernel = self.kernel;
        let Some(tiles) = &self.tiles else { return };
        let (groups, group, row, thread) = (tiles.tile.groups, tiles.group, tiles.row, tiles.thread);
        let Some(shape) = kernel.fragment(first) else { return };
        let computed = op.immediates.first().map_or(1, |count| *count as usize);
        let places: Vec<Place> = std::iter::once(first).chain(op.others.iter().copied()).collect();
        let of = |place: &Place| Some((kernel.fragment(*place)?, self.fragment_regs(*place)));
        let all: Vec<(&Fragment, Vec<Reg>)> = places.iter().filter_map(of).collect();
        let (targets, sources) = all.split_at(computed.min(all.len()));
        let body = &op.regions[0];

        let own = def!(self, B32, "sub.u32", group, 1);
        let top = def!(self, B32, "mad.lo.u32", own, i64::from(shape.rows / groups), row);
        let pair = def!(self, B32, "and.b32", thread, 3);
        let left = def!(self, B32, "shl.b32", pair, 1);
        let count = elements(shape, groups) as usize;
        let per_slab = count / (shape.rows / groups / SLAB) as usize;
        // A column has one element for each row, a matrix two side by side.
        let width = if shape.columns.is_some() { 2 } else { 1 };
        for at in (0..count).step_by(width) {
            let (slab, inside) = (at / per_slab, at % per_slab);
            let half = if width == 2 { inside / 2 % 2 } else { inside };
            let down = slab as i64 * i64::from(SLAB) + 8 * half as i64;
            let row = def!(self, B32, "add.u32", top, down);
            let mut given: Vec<[Reg; 2]> = Vec::new();
            for (fragment, regs) in sources {
                given.push(match (fragment.columns, width) {
                    (Some(_), _) => self.two(regs, fragment.element, at),
                    (None, _) => [regs[2 * slab + half]; 2],
                });
            }
            let mut results: Vec<Vec<Reg>> = vec![Vec::new(); targets.len()];
            for i in 0..width {
                let column = if width == 2 { (inside / 4 * 8 + i) as i64 } else { 0 };
                let column = match shape.columns {
                    Some(_) => def!(self, B32, "add.u32", left, column),
                    None => self.number(Scalar::I32, 0),
                };
                let elements = given.iter().map(|two| two[i]);
                let args: Vec<Reg> = [row, column].into_iter().chain(elements).collect();
                for (arg, reg) in body.args.iter().zip(args) {
                    self.set(*arg, 0, reg);
                }
                self.region(body);
                for (result, value) in results.iter_mut().zip(&body.yields) {
                    result.push(self.get(*value, 0));
                }
            }
            for ((fragment, regs), result) in targets.iter().zip(&results) {
                match class_of(fragment.element) {
                    Class::B16 => ins!(self, "mov.b32", regs[at / 2], Arg::List(result)),
                    _ => result.iter().zip(&regs[at..]).for_each(|(from, to)| self.mov(*to, *from)),
                }
            }
        }
    }

    /// Joins the rows of a matrix with a column: what a thread has, then its quad.
    pub(super) fn rows(&mut self, op: &'k Op, place: Place) {
        let Some(matrix) = op.others.first().copied() else { return };
        let (columns, elements) = (self.fragment_regs(place), self.fragment_regs(matrix));
        let name = match op.code {
            Opcode::RowMax => "max.f32",
            Opcode::RowMin => "min.f32",
            _ => "add.rn.f32",
        };
        let per_slab = elements.len() / (columns.len() / 2).max(1);
        for (number, column) in columns.iter().enumerate() {
            let (slab, half) = (number / 2, number % 2);
            let own = &elements[slab * per_slab..(slab + 1) * per_slab];
            let mut rest = own.iter().enumerate().filter(|(at, _)| at / 2 % 2 == half).map(|(_, reg)| *reg);
            let Some(mut joined) = rest.next() else { continue };
            for reg in rest {
                joined = def!(self, B32, name, joined, reg);
            }
            for lanes in [1i64, 2] {
                let other = def!(self, B32, "shfl.sync.bfly.b32", joined, lanes, 31, -1);
                joined = def!(self, B32, name, joined, other);
            }
            ins!(self, name, *column, *column, joined);
        }
    }
}
