//! Fragments in registers.
//!
//! A part of a fragment has its rows in slabs. In each a thread has what it has of a `wgmma`'s or an `mma`'s sum: of every eight
//! columns two that lie side by side, in the row of its quad and in the one eight further down. Elements of 16 bits are two to
//! a register, which is how the first factor of a product lies, too. Of a column, the four threads of a quad have the same; of a
//! row, those of all quads.
//!
//! Elements of 8 bits are four to a register for `wgmma`: a row's two of one eight columns, and its two of the next eight. As a factor
//! a thread has four that lie side by side, so what a quad has of 16 columns is exchanged before a product ([`Writer::of_bytes`]), or, of a
//! fragment that is nothing but a factor, right where it is computed.
//! Shah et al., "FlashAttention-3", 2024, section 3.3, permute the rows of the other factor instead.

use super::layout::SLAB;
use super::{Role, fragment_number};
use crate::backend::ptx::arch::Feature;
use crate::backend::ptx::asm::{Arg, Class, Reg, def, ins, when};
use crate::backend::ptx::writer::{Writer, class_of};
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::{Opcode, Shape};
use vm_ir::tile::Fragment;
use vm_ir::{Scalar, Value};

/// How fragments are spread over the threads of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spread {
    /// Parts among which rows are divided, and columns.
    pub(super) down: u32,
    pub(super) across: u32,
    /// Rows of a slab: those that the warps of a part have, 16 each.
    pub(super) slab: u32,
}

impl From<u32> for Spread {
    /// Over groups of four warps.
    fn from(groups: u32) -> Spread {
        Spread { down: groups, across: 1, slab: SLAB }
    }
}

impl Spread {
    /// Rows of a part, and columns; more than there are where they can't be divided evenly.
    pub(super) fn rows(self, rows: u32) -> u32 {
        rows.div_ceil(self.down.max(1)).next_multiple_of(self.slab)
    }

    pub(super) fn columns(self, columns: u32) -> u32 {
        columns.div_ceil(self.across).next_multiple_of(8)
    }
}

/// How `shfl` is told that threads exchange within a quad: which bits of a thread's number stay, and how many threads there are.
const QUAD: i64 = 0x1c1f;
/// How many elements of a row are joined at a time.
const CHAINS: usize = 2;

/// Elements of a fragment that a thread has.
pub(super) fn elements(fragment: &Fragment, spread: impl Into<Spread>) -> u32 {
    let spread = spread.into();
    let slabs = spread.rows(fragment.rows) / spread.slab;
    match fragment.columns.map(|columns| spread.columns(columns)) {
        Some(columns) if fragment.is_row() => columns / 4,
        Some(columns) => slabs * columns / 2,
        None => slabs * 2,
    }
}

/// Where an element that a thread has lies in its part: in which slab, in the upper or the lower eight rows of sixteen, and in
/// which eight columns.
pub(super) struct Cell {
    pub(super) slab: u32,
    pub(super) half: u32,
    pub(super) eight: u32,
}

impl Cell {
    /// That of the thread's element with this number.
    pub(super) fn of(fragment: &Fragment, spread: impl Into<Spread>, at: usize) -> Cell {
        let (at, spread) = (at as u32, spread.into());
        let per_slab = elements(fragment, spread) / (spread.rows(fragment.rows) / spread.slab).max(1);
        let (slab, inside) = (at / per_slab.max(1), at % per_slab.max(1));
        match fragment.columns {
            Some(_) if fragment.is_row() => Cell { slab: 0, half: 0, eight: at / 2 },
            Some(_) => Cell { slab, half: inside / 2 % 2, eight: inside / 4 },
            None => Cell { slab, half: inside, eight: 0 },
        }
    }
}

/// Of four elements of 8 bits in a register, the number of the register and that of the half in which two are, of which the first
/// has number `at` of the thread's.
pub(super) fn half_register(at: usize) -> (usize, usize) {
    (at / 8 * 2 + at / 2 % 2, at / 4 % 2)
}

impl<'k> Writer<'k> {
    /// Elements in a register: two of 16 bits and, where `wgmma` multiplies, four of 8, but of a column one.
    fn packed(&self, element: Scalar, columns: Option<u32>) -> u32 {
        match columns {
            Some(_) if class_of(element) == Class::B16 => 2,
            Some(_) if element.bytes() == 1 && !self.is_sync() => 4,
            _ => 1,
        }
    }

    /// Is a fragment of 8 bits kept as products take it: is it only computed, and multiplied?
    pub(super) fn is_kept_as_factor(&self, place: Place) -> bool {
        let packs = |fragment: &Fragment| self.packed(fragment.element, fragment.columns) == 4;
        if !self.kernel.fragment(place).is_some_and(packs) {
            return false;
        }
        let mut only = true;
        self.kernel.for_each_op(&mut |op| {
            let first = usize::from(op.place.is_some());
            let at = op.place.iter().chain(&op.others).position(|other| *other == place);
            let again = op.place.iter().chain(&op.others).filter(|other| **other == place).count() > 1;
            only &= match (op.code.shape(), at) {
                (_, None) => true,
                (Shape::Map, Some(at)) => {
                    at < op.immediates.first().map_or(1, |count| *count as usize) && !again
                }
                (Shape::Mma, Some(at)) => at == first,
                _ => false,
            };
        });
        only
    }

    /// Registers of a fragment, all zero.
    pub(super) fn zeroed(&mut self, fragment: &Fragment, spread: impl Into<Spread>) -> Vec<Reg> {
        let count = elements(fragment, spread) / self.packed(fragment.element, fragment.columns);
        (0..count).map(|_| def!(self, B32, "mov.b32", 0)).collect()
    }

    pub(super) fn fragment_regs(&self, place: Place) -> Vec<Reg> {
        let number = fragment_number(place);
        let regs = number.and_then(|number| self.tiles.as_ref()?.fragments.get(number));
        regs.cloned().unwrap_or_default()
    }

    /// The register that says whether a fragment is zero without its registers being so: for a sum that is set to zero.
    pub(super) fn begin_fresh(&mut self, number: usize, role: Role) -> Option<Reg> {
        let place = Place::Fragment(number as u16);
        let (mut sum, mut zeroed) = (false, false);
        self.kernel.for_each_op(&mut |op| {
            let own = op.place == Some(place);
            sum |= own && op.code == Opcode::Mma;
            zeroed |= own && op.code == Opcode::Fill;
        });
        let kept = role == Role::Compute && sum && zeroed;
        kept.then(|| def!(self, B32, "mov.b32", 0))
    }

    fn fresh_of(&self, place: Place) -> Option<Reg> {
        self.tiles.as_ref()?.fresh.get(fragment_number(place)?).copied()?
    }

    /// Does a product add to what is there? If not it begins anew.
    pub(super) fn keeps(&mut self, op: &Op, sum: Place) -> Arg<'static> {
        let fresh = self.fresh_of(sum);
        let keeps = match (op.code, fresh) {
            (Opcode::Mma, None) => Arg::Int(1),
            (Opcode::Mma, Some(fresh)) => Arg::Reg(def!(self, Pred, "setp.eq.u32", fresh, 0)),
            _ => Arg::Int(0),
        };
        if let Some(fresh) = fresh {
            ins!(self, "mov.b32", fresh, 0);
        }
        keeps
    }

    /// Makes the registers zero of what an op works on and is to be zero.
    pub(super) fn settle_zeros(&mut self, op: &Op) {
        let sums = match op.code.shape() {
            Shape::Mma => &op.others[..],
            Shape::Fill => return,
            _ => &[],
        };
        let all = op.place.iter().chain(&op.others);
        let touched: Vec<Place> = if sums.is_empty() { all.copied().collect() } else { sums.to_vec() };
        for place in touched {
            let Some(fresh) = self.fresh_of(place) else { continue };
            let below = self.asm.new_label();
            let settled = def!(self, Pred, "setp.eq.u32", fresh, 0);
            when!(self, settled, true, "bra", Arg::Label(below));
            for reg in self.fragment_regs(place) {
                ins!(self, "mov.b32", reg, 0);
            }
            ins!(self, "mov.b32", fresh, 0);
            self.asm.place(below);
        }
    }

    pub(super) fn fill_fragment(&mut self, op: &'k Op, place: Place) {
        let fresh = self.fresh_of(place);
        if let (Some(fresh), Some(0)) = (fresh, self.constant(op.operands[0])) {
            ins!(self, "mov.b32", fresh, 1);
            return;
        }
        if let Some(fresh) = fresh {
            ins!(self, "mov.b32", fresh, 0);
        }
        let mut value = self.get(op.operands[0], 0);
        if self.is_split(place) {
            let rank = self.cluster_rank();
            let first = def!(self, Pred, "setp.eq.u32", rank, 0);
            value = def!(self, B32, "selp.b32", value, 0, first);
        }
        if value.class == Class::B16 {
            value = def!(self, B32, "mov.b32", Arg::List(&[value, value]));
        }
        let filled = self.kernel.fragment(place);
        if filled.is_some_and(|filled| self.packed(filled.element, filled.columns) == 4) {
            value = def!(self, B32, "prmt.b32", value, 0, 0);
        }
        for reg in self.fragment_regs(place) {
            self.mov(reg, value);
        }
    }

    /// Two elements that lie side by side, beginning with number `at` of the thread's.
    pub(super) fn two(&mut self, regs: &[Reg], element: Scalar, at: usize) -> [Reg; 2] {
        match class_of(element) {
            Class::B16 => {
                let two = [self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16)];
                ins!(self, "mov.b32", Arg::List(&two), regs[at / 2]);
                two
            }
            _ if self.packed(element, Some(0)) == 4 => {
                let (number, half) = half_register(at);
                [0, 8].map(|bit| def!(self, B32, "bfe.u32", regs[number], 16 * half as i64 + bit, 8))
            }
            _ => [regs[at], regs[at + 1]],
        }
    }

    /// Two bytes of registers, the lower ones of a register of 16 bits.
    fn joined_bytes(&mut self, low: Reg, high: Reg) -> Reg {
        let two = def!(self, B32, "prmt.b32", low, high, 0x0040);
        def!(self, B16, "cvt.u16.u32", two)
    }

    /// A left factor of 8 bits, 16 rows of 32 columns, as instructions take it: four elements side by side to a thread. It is given as
    /// fragments have it: the upper eight rows of 16 columns, the lower ones, and both of the other 16.
    pub(super) fn of_bytes(&mut self, regs: [Reg; 4]) -> [Reg; 4] {
        let Some(lane) = self.tiles.as_ref().map(|tiles| tiles.lane) else { return regs };
        // Two columns to a thread: 0 and 1 of the quad need what all have of the first eight columns, 2 and 3 that of the other eight.
        // So even threads offer their first halves to the one and then their second halves to the other, and odd ones conversely.
        let odd = def!(self, B32, "and.b32", lane, 1);
        let odd = def!(self, Pred, "setp.ne.u32", odd, 0);
        let upper = def!(self, B32, "and.b32", lane, 2);
        let upper = def!(self, Pred, "setp.ne.u32", upper, 0);
        let in_quad = def!(self, B32, "and.b32", lane, 3);
        // Of 0 to 3: the first is read from 0, 2, 1, 3, then from 1, 3, 0, 2.
        let fourfold = def!(self, B32, "shl.b32", in_quad, 2);
        let from = [0x3120, 0x2031].map(|table: i64| {
            let table = def!(self, B32, "mov.b32", table);
            def!(self, B32, "shr.u32", table, fourfold)
        });
        let offers = [(0x7632, 0x5410), (0x5410, 0x7632)]
            .map(|(odds, evens): (i64, i64)| def!(self, B32, "selp.b32", odds, evens, odd));
        let joins = [(0x1054, 0x5410), (0x3276, 0x7632)]
            .map(|(uppers, lowers): (i64, i64)| def!(self, B32, "selp.b32", uppers, lowers, upper));
        let mut exchanged = [Reg::NONE; 4];
        for (two, to) in regs.chunks_exact(2).zip(exchanged.chunks_exact_mut(2)) {
            let got = [0, 1].map(|i| {
                let offered = def!(self, B32, "prmt.b32", two[0], two[1], offers[i]);
                // Within a quad: the lowest bits of the number alone.
                def!(self, B32, "shfl.sync.idx.b32", offered, from[i], QUAD, -1)
            });
            to[0] = def!(self, B32, "prmt.b32", got[0], got[1], joins[0]);
            to[1] = def!(self, B32, "prmt.b32", got[0], got[1], joins[1]);
        }
        exchanged
    }

    /// The element of a column, in a row of the thread.
    pub(super) fn one(&mut self, regs: &[Reg], element: Scalar, at: usize) -> Reg {
        match class_of(element) {
            Class::B16 => self.two(&[regs[at]], element, 0)[0],
            _ => regs[at],
        }
    }

    /// The first row of a fragment that the thread has, and its first column.
    pub(super) fn corner(&mut self, fragment: &Fragment) -> [Reg; 2] {
        let Some(tiles) = &self.tiles else { return [Reg::NONE; 2] };
        let (spread, part, row, lane) = (tiles.spread, tiles.part, tiles.row, tiles.lane);
        let part_across = tiles.part_across;
        let top = match fragment.is_row() {
            true => self.number(Scalar::I32, 0),
            false => def!(self, B32, "mad.lo.u32", part, i64::from(spread.rows(fragment.rows)), row),
        };
        let Some(columns) = fragment.columns else { return [top, self.number(Scalar::I32, 0)] };
        let pair = def!(self, B32, "and.b32", lane, 3);
        let left = def!(self, B32, "shl.b32", pair, 1);
        let each = i64::from(spread.columns(columns));
        let left = part_across.map_or(left, |part| def!(self, B32, "mad.lo.u32", part, each, left));
        [top, left]
    }

    pub(super) fn map(&mut self, op: &'k Op, first: Place) {
        let kernel = self.kernel;
        let Some(spread) = self.tiles.as_ref().map(|tiles| tiles.spread) else { return };
        let Some(shape) = kernel.fragment(first) else { return };
        let computed = op.immediates.first().map_or(1, |count| *count as usize);
        let places: Vec<Place> = std::iter::once(first).chain(op.others.iter().copied()).collect();
        let of = |place: &Place| Some((kernel.fragment(*place)?, self.fragment_regs(*place)));
        let all: Vec<(&Fragment, Vec<Reg>)> = places.iter().filter_map(of).collect();
        let (targets, sources) = all.split_at(computed.min(all.len()));
        let body = &op.regions[0];
        let narrowed: Vec<Option<&Op>> =
            targets.iter().zip(&body.yields).map(|((f, _), value)| self.narrowing(body, *value, f)).collect();

        let [top, left] = self.corner(shape);
        let count = elements(shape, spread) as usize;
        // By target: first halves of registers of four, of which the second comes; and what is exchanged at the end.
        let mut halves = vec![[Reg::NONE; 2]; targets.len()];
        let mut fours: Vec<Vec<Reg>> = vec![Vec::new(); targets.len()];
        let kept: Vec<bool> = places.iter().map(|place| self.is_kept_as_factor(*place)).collect();
        // A column has one element for each row, all else two side by side.
        let width = if shape.columns.is_some() { 2 } else { 1 };
        for at in (0..count).step_by(width) {
            let Cell { slab, half, eight } = Cell::of(shape, spread, at);
            let row = match shape.is_row() {
                true => top,
                false => def!(self, B32, "add.u32", top, i64::from(slab * spread.slab + 8 * half)),
            };
            let mut given: Vec<[Reg; 2]> = Vec::new();
            for (fragment, regs) in sources {
                given.push(match fragment.columns {
                    Some(_) if fragment.is_row() => self.two(regs, fragment.element, 2 * eight as usize),
                    Some(_) => self.two(regs, fragment.element, at),
                    None => [self.one(regs, fragment.element, (2 * slab + half) as usize); 2],
                });
            }
            let mut results: Vec<Vec<Reg>> = vec![Vec::new(); targets.len()];
            for i in 0..width {
                let column = match shape.columns {
                    Some(_) => def!(self, B32, "add.u32", left, i64::from(8 * eight) + i as i64),
                    None => left,
                };
                let elements = given.iter().map(|two| two[i]);
                let args: Vec<Reg> = [row, column].into_iter().chain(elements).collect();
                for (arg, reg) in body.args.iter().zip(args) {
                    self.set(*arg, 0, reg);
                }
                self.region(body);
                for ((result, value), narrowed) in results.iter_mut().zip(&body.yields).zip(&narrowed) {
                    let value = narrowed.map_or(*value, |op| op.operands[0]);
                    result.push(self.get(value, 0));
                }
            }
            // A result that is what a source has is read before the results of other targets go there.
            for (number, result) in results.iter_mut().enumerate() {
                for reg in result {
                    if targets[..number].iter().any(|(_, regs)| regs.contains(reg)) {
                        let taken = self.asm.new_reg(reg.class);
                        self.mov(taken, *reg);
                        *reg = taken;
                    }
                }
            }
            for (number, ((fragment, regs), result)) in targets.iter().zip(&results).enumerate() {
                let (narrowed, halves) = (&narrowed[number], &mut halves[number]);
                let (fours, kept) = (&mut fours[number], kept[number]);
                match (class_of(fragment.element), fragment.element, &result[..]) {
                    // The second operand comes lower.
                    (Class::B16, Scalar::F16, [low, high]) if narrowed.is_some() => {
                        ins!(self, "cvt.rn.f16x2.f32", regs[at / 2], *high, *low);
                    }
                    (Class::B16, _, [low, high]) if narrowed.is_some() => {
                        ins!(self, "cvt.rn.bf16x2.f32", regs[at / 2], *high, *low);
                    }
                    (Class::B32, element, [low, high]) if self.packed(element, fragment.columns) == 4 => {
                        let two = match narrowed {
                            Some(_) => {
                                let format = if element == Scalar::F8E4M3 { "e4m3x2" } else { "e5m2x2" };
                                let name = format!("cvt.rn.satfinite.{format}.f32");
                                def!(self, B16, &name, *high, *low)
                            }
                            None => self.joined_bytes(*low, *high),
                        };
                        let (number, half) = half_register(at);
                        match half {
                            0 => halves[number % 2] = two,
                            _ if kept => {
                                fours.push(def!(self, B32, "mov.b32", Arg::List(&[halves[number % 2], two])));
                            }
                            _ => ins!(self, "mov.b32", regs[number], Arg::List(&[halves[number % 2], two])),
                        }
                    }
                    (Class::B16, _, [one]) => ins!(self, "mov.b32", regs[at], Arg::List(&[*one, *one])),
                    (Class::B16, ..) => ins!(self, "mov.b32", regs[at / 2], Arg::List(result)),
                    _ => result.iter().zip(&regs[at..]).for_each(|(from, to)| self.mov(*to, *from)),
                }
            }
        }
        for ((_, regs), fours) in targets.iter().zip(&fours) {
            for (four, to) in fours.chunks_exact(4).zip(regs.chunks_exact(4)) {
                let exchanged = self.of_bytes([four[0], four[1], four[2], four[3]]);
                exchanged.iter().zip(to).for_each(|(from, to)| self.mov(*to, *from));
            }
        }
    }

    /// The op by which an element of 16 or 8 bits is rounded from f32, if it is: two of them are rounded at once.
    fn narrowing(&self, body: &'k Region, value: Value, target: &Fragment) -> Option<&'k Op> {
        let op = body.ops.iter().find(|op| op.code == Opcode::FpConv && op.result() == Some(value))?;
        let from = self.ty(*op.operands.first()?).scalar();
        let narrow = match target.element {
            Scalar::F16 | Scalar::Bf16 => self.has(Feature::CvtBf16),
            Scalar::F8E4M3 | Scalar::F8E5M2 => self.packed(target.element, target.columns) == 4,
            _ => false,
        };
        (narrow && from == Scalar::F32 && target.columns.is_some()).then_some(op)
    }

    /// Joins the rows of a matrix with a column: what a thread has, then its quad.
    pub(super) fn rows(&mut self, op: &'k Op, place: Place) {
        let Some(&[matrix]) = op.others.first_chunk::<1>() else { return };
        let Some(shape) = self.kernel.fragment(matrix) else { return };
        let (columns, elements) = (self.fragment_regs(place), self.fragment_regs(matrix));
        let (name, nothing) = match op.code {
            Opcode::RowMax => ("max.f32", f32::NEG_INFINITY),
            Opcode::RowMin => ("min.f32", f32::INFINITY),
            _ => ("add.rn.f32", -0.0),
        };
        let per_slab = elements.len() / (columns.len() / 2).max(1);
        // Columns that there are not are left out.
        let there = shape.columns.unwrap_or(0);
        let left = (there % 8 != 0).then(|| self.corner(shape)[1]);
        for (number, column) in columns.iter().enumerate() {
            let (slab, half) = (number / 2, number % 2);
            let own = &elements[slab * per_slab..(slab + 1) * per_slab];
            // In several chains, as each op waits for the one before it in its chain.
            let mut chains: [Option<Reg>; CHAINS] = [None; CHAINS];
            for (at, reg) in own.iter().enumerate().filter(|(at, _)| at / 2 % 2 == half) {
                let first = (at / 4 * 8 + at % 2) as u32;
                let reg = match left.filter(|_| at as u32 / 4 * 8 + 8 > there) {
                    None => *reg,
                    Some(left) => {
                        let most = i64::from(there.saturating_sub(first));
                        let inside = def!(self, Pred, "setp.lt.u32", left, most);
                        def!(self, B32, "selp.b32", *reg, Arg::Int(nothing.to_bits().into()), inside)
                    }
                };
                let chain = &mut chains[at % CHAINS];
                *chain = Some(chain.map_or(reg, |joined| def!(self, B32, name, joined, reg)));
            }
            let ends = chains.into_iter().flatten();
            let Some(mut joined) = ends.reduce(|a, b| def!(self, B32, name, a, b)) else { continue };
            for lanes in [1i64, 2] {
                let other = def!(self, B32, "shfl.sync.bfly.b32", joined, lanes, 31, -1);
                joined = def!(self, B32, name, joined, other);
            }
            ins!(self, name, *column, *column, joined);
        }
    }
}
