//! Products: `mma.sync`, of factors that `ldmatrix` loads from stages, or that are fragments.
//!
//! An instruction adds up 32 bytes of each factor: 16 elements of 16 bits, 8 of 32, 32 of 8. Where an architecture has but a smaller one,
//! two or four of those do the same.

use super::super::{channel_number, fragment_number};
use super::stage::Stage;
use crate::backend::ptx::Options;
use crate::backend::ptx::arch::Feature;
use crate::backend::ptx::asm::{Arg, Class, Reg, def, ins};
use crate::backend::ptx::writer::Writer;
use std::collections::HashMap;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Left, Opcode, Right};
use vm_ir::{Kernel, Scalar};

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// 16 × 8 × 16 of f16 or bf16.
    Half(&'static str),
    /// 16 × 8 × 8 of f16, twice.
    HalfTwice,
    Tf32,
    /// Three products of tf32: f32 is the sum of one and a rest.
    SplitF32,
    /// 16 × 8 × 32 of f8.
    F8(&'static str, &'static str),
    /// As f16, which every f8 is.
    F8AsHalf {
        twice: bool,
    },
    /// 16 × 8 × 32 of i8.
    I8,
    /// 8 × 8 × 16 of i8, four times.
    I8FourTimes,
    /// Multiplied and added one by one.
    Cores,
}

/// The name of a type of f8 in PTX.
fn f8_name(scalar: Scalar) -> &'static str {
    if scalar == Scalar::F8E4M3 { "e4m3" } else { "e5m2" }
}

impl Kind {
    pub(super) fn of(options: &Options, a: Scalar, b: Scalar) -> Kind {
        let has = |feature| options.has(feature);
        match a {
            Scalar::F16 if has(Feature::MmaF16) => Kind::Half("f16"),
            Scalar::F16 if has(Feature::MmaF16K8) => Kind::HalfTwice,
            Scalar::Bf16 if has(Feature::MmaBf16) => Kind::Half("bf16"),
            Scalar::Tf32 if has(Feature::MmaTf32) => Kind::Tf32,
            Scalar::F32 if has(Feature::MmaTf32) => Kind::SplitF32,
            Scalar::F8E4M3 | Scalar::F8E5M2 if has(Feature::MmaF8) => Kind::F8(f8_name(a), f8_name(b)),
            Scalar::F8E4M3 | Scalar::F8E5M2 if has(Feature::MmaF16) => Kind::F8AsHalf { twice: false },
            Scalar::F8E4M3 | Scalar::F8E5M2 if has(Feature::MmaF16K8) => Kind::F8AsHalf { twice: true },
            Scalar::I8 if has(Feature::MmaI8) => Kind::I8,
            Scalar::I8 if has(Feature::MmaI8K16) => Kind::I8FourTimes,
            _ => Kind::Cores,
        }
    }
}

/// A factor in a stage.
pub(super) struct Factor {
    pub(super) element: Scalar,
    pub(super) stage: Stage,
    /// The address of the stage.
    pub(super) newest: Reg,
    /// Do the elements that are added up lie side by side in a row?
    pub(super) along: bool,
    /// The thread's part of what is not added up: its number, and how much a part has.
    pub(super) part: Option<(Reg, u32)>,
    /// Where a block of what is not added up begins at most, where parts reach beyond the stage.
    pub(super) most: Option<u32>,
    /// Addresses: by a number of rows and one of what is not added up; and by that and a number of bytes.
    lanes: HashMap<[u32; 2], Reg>,
    moved: HashMap<(Reg, u32), Reg>,
}

impl Factor {
    /// Can a constant be added to where the thread's part begins?
    pub(super) fn is_even(&self) -> bool {
        let Some((_, step)) = self.part else { return self.most.is_none() };
        let bytes = step * self.stage.size;
        let whole = bytes.is_power_of_two() || bytes.is_multiple_of(self.stage.pitch());
        self.most.is_none() && (self.along || whole)
    }

    /// Is the address known of what this key tells apart?
    pub(super) fn is_known(&self, key: [u32; 2]) -> bool {
        self.lanes.contains_key(&key)
    }
}

/// Which registers `ldmatrix` gives first: those of the next eight that are not added up (of a left factor), or of the next that are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

impl<'k> Writer<'k> {
    /// A factor of an op that is a channel.
    fn factor(&self, place: Place, along: bool, side: Side, extent: u32) -> Option<Factor> {
        let channel = self.kernel.channel(place)?;
        let number = channel_number(place)?;
        let tiles = self.tiles.as_ref()?;
        let sync = tiles.sync.as_ref()?;
        let stage = sync.layout.stages.get(number)?.1;
        let (part, parts, each) = match side {
            Side::Left => (Some(tiles.part), tiles.spread.down, tiles.spread.rows(extent)),
            Side::Right => (tiles.part_across, tiles.spread.across, tiles.spread.columns(extent)),
        };
        let there = if along { stage.rows } else { stage.columns() };
        let most = (parts * each > there).then(|| there - 16);
        Some(Factor {
            element: channel.element,
            stage,
            newest: tiles.rings.get(number)?.newest,
            along,
            part: part.map(|part| (part, each)),
            most,
            lanes: HashMap::new(),
            moved: HashMap::new(),
        })
    }

    /// Where the block of what is not added up begins that is `outer` into the thread's part; and the constant that is left to add.
    pub(super) fn begins(&mut self, factor: &Factor, outer: u32) -> (Option<Reg>, u32) {
        let Some((part, step)) = factor.part else { return (None, outer) };
        if factor.is_even() {
            return (Some(def!(self, B32, "mul.lo.u32", part, i64::from(step))), outer);
        }
        let begin = def!(self, B32, "mad.lo.u32", part, i64::from(step), i64::from(outer));
        let begin = match factor.most {
            Some(most) => def!(self, B32, "min.u32", begin, i64::from(most)),
            None => begin,
        };
        (Some(begin), 0)
    }

    /// The address in the stage of what `lane` makes, so many rows and bytes further; `key` tells apart what it makes.
    pub(super) fn address_in(
        &mut self,
        factor: &mut Factor,
        key: [u32; 2],
        (rows, bytes): (u32, u32),
        lane: impl FnOnce(&mut Self) -> Reg,
    ) -> (Reg, i64) {
        let at = match factor.lanes.get(&key) {
            Some(at) => *at,
            None => {
                let lane = lane(self);
                let at = def!(self, B32, "add.u32", lane, factor.newest);
                factor.lanes.insert(key, at);
                at
            }
        };
        let (by, more) = factor.stage.further(rows, bytes);
        let moved = match (by, factor.moved.get(&(at, by))) {
            (0, _) => at,
            (_, Some(moved)) => *moved,
            _ => {
                let moved = def!(self, B32, "xor.b32", at, i64::from(by));
                factor.moved.insert((at, by), moved);
                moved
            }
        };
        (moved, i64::from(more))
    }

    /// The registers of a block of a factor: `count` of 8 elements each that are not added up, and half an instruction's that are.
    fn load_block(
        &mut self,
        factor: &mut Factor,
        side: Side,
        outer: u32,
        step: u32,
        count: usize,
    ) -> Vec<Reg> {
        let stage = factor.stage;
        if !factor.along && stage.size != 2 {
            return (0..count as u32).map(|i| self.load_turned(factor, side, outer, step, i)).collect();
        }
        let Some(sync) = self.tiles.as_ref().and_then(|tiles| tiles.sync.as_ref()) else { return Vec::new() };
        let (lane, [bit3, bit4]) = (sync.in_eight, sync.bits);
        let (of_outer, of_inner) = if side == Side::Left { (bit3, bit4) } else { (bit4, bit3) };
        let even = factor.is_even();
        let key = [u32::MAX, if even { 0 } else { outer }];
        let left = if even { outer } else { 0 };
        let per = 32 / stage.size;
        let further = match factor.along {
            true => (left, step * 32),
            false => (step * per, left * stage.size),
        };
        let (begin, _) = match factor.is_known(key) {
            true => (None, 0),
            false => self.begins(factor, outer),
        };
        let along = factor.along;
        let (at, more) = self.address_in(factor, key, further, |writer| {
            let (halves, sides) = if along { (of_outer, of_inner) } else { (of_inner, of_outer) };
            let mut row = def!(writer, B32, "mad.lo.u32", halves, 8, lane);
            let mut byte = def!(writer, B32, "shl.b32", sides, 4);
            if let Some(begin) = begin {
                match along {
                    true => row = def!(writer, B32, "add.u32", row, begin),
                    false => byte = def!(writer, B32, "mad.lo.u32", begin, i64::from(stage.size), byte),
                }
            }
            writer.offset_in(stage, row, byte)
        });
        let regs: Vec<Reg> = (0..count).map(|_| self.asm.new_reg(Class::B32)).collect();
        let turned = if along { "" } else { ".trans" };
        let name = format!("ldmatrix.sync.aligned.m8n8.x{count}{turned}.shared.b16");
        ins!(self, &name, Arg::List(&regs), Arg::At(at, more));
        regs
    }

    /// The N-th register of a block whose elements that are added up lie one below the other, where `ldmatrix` can't turn them.
    fn load_turned(&mut self, factor: &mut Factor, side: Side, outer: u32, step: u32, number: u32) -> Reg {
        let stage = factor.stage;
        let per = 4 / stage.size;
        let (half, of_inner) =
            if side == Side::Left { (number % 2, number / 2) } else { (number / 2, number % 2) };
        let parts: Vec<Reg> = (0..per)
            .map(|e| {
                // The thread's row is a multiple of `per`, plus these.
                let row = step * 8 * per + 4 * per * of_inner + e;
                let Some((at, more)) = self.turned_address(factor, per, row, outer + 8 * half) else {
                    return Reg::NONE;
                };
                match per {
                    1 => def!(self, B32, "ld.shared.b32", Arg::At(at, more)),
                    _ => def!(self, B32, "ld.shared.u8", Arg::At(at, more)),
                }
            })
            .collect();
        match parts[..] {
            [a, b, c, d] => {
                let low = def!(self, B32, "prmt.b32", a, b, 0x0040);
                let high = def!(self, B32, "prmt.b32", c, d, 0x0040);
                def!(self, B32, "prmt.b32", low, high, 0x5410)
            }
            _ => parts[0],
        }
    }

    /// The address of an element of a factor that lies turned: `row` plus the thread's number in its quad times `per` down, `outer` plus
    /// the number of its quad to the right.
    fn turned_address(&mut self, factor: &mut Factor, per: u32, row: u32, outer: u32) -> Option<(Reg, i64)> {
        let sync = self.tiles.as_ref()?.sync.as_ref()?;
        let (quad, in_quad) = (sync.quad, sync.in_quad);
        let (stage, even) = (factor.stage, factor.is_even());
        let key = [row % 8, if even { 0 } else { outer }];
        let left = if even { outer } else { 0 };
        let (begin, _) = match factor.is_known(key) {
            true => (None, 0),
            false => self.begins(factor, outer / 16 * 16),
        };
        let inside = if even { 0 } else { outer % 16 };
        Some(self.address_in(factor, key, (row - row % 8, left * stage.size), |writer| {
            let down = def!(writer, B32, "mul.lo.u32", in_quad, i64::from(per));
            let down = def!(writer, B32, "add.u32", down, i64::from(row % 8));
            let right = match begin {
                Some(begin) => def!(writer, B32, "add.u32", begin, quad),
                None => quad,
            };
            let right = def!(writer, B32, "add.u32", right, i64::from(inside));
            let byte = def!(writer, B32, "mul.lo.u32", right, i64::from(stage.size));
            writer.offset_in(stage, down, byte)
        }))
    }

    /// The right factor of one whose left is a fragment of f32: a thread has of that the elements 2t and 2t + 1, not t and t + 4.
    fn load_paired(&mut self, factor: &mut Factor, outer: u32, step: u32) -> [Reg; 2] {
        if !factor.along {
            let load = |writer: &mut Self, factor: &mut Factor, e| {
                let at = writer.turned_address(factor, 2, 8 * step + e, outer);
                let (at, more) = at.unwrap_or((Reg::NONE, 0));
                def!(writer, B32, "ld.shared.b32", Arg::At(at, more))
            };
            return [load(self, factor, 0), load(self, factor, 1)];
        }
        let Some(sync) = self.tiles.as_ref().and_then(|tiles| tiles.sync.as_ref()) else {
            return [Reg::NONE; 2];
        };
        let (quad, in_quad, stage) = (sync.quad, sync.in_quad, factor.stage);
        // The columns of a sum are not divided where a fragment is a factor.
        let (at, more) = self.address_in(factor, [0, 0], (outer, step * 32), |writer| {
            let byte = def!(writer, B32, "shl.b32", in_quad, 3);
            writer.offset_in(stage, quad, byte)
        });
        let two = [self.asm.new_reg(Class::B32), self.asm.new_reg(Class::B32)];
        ins!(self, "ld.shared.v2.b32", Arg::List(&two), Arg::At(at, more));
        two
    }

    /// The left factor of a step, of a fragment: registers of a slab as they are, and zeros beyond the last column.
    fn of_fragment(&mut self, place: Place, slab: u32, step: u32) -> [Reg; 4] {
        let regs = self.fragment_regs(place);
        let (Some(fragment), Some(tiles)) = (self.kernel.fragment(place), &self.tiles) else {
            return [Reg::NONE; 4];
        };
        let (spread, in_quad) = (tiles.spread, tiles.sync.as_ref().map_or(Reg::NONE, |sync| sync.in_quad));
        let there = fragment.columns.unwrap_or(0);
        let per_slab = regs.len() / (spread.rows(fragment.rows) / spread.slab) as usize;
        let own = &regs[slab as usize * per_slab..][..per_slab];
        let narrow = fragment.element.bytes() == 2;
        if fragment.element.bytes() == 1 {
            let four = [[0, 0], [0, 1], [2, 0], [2, 1]].map(|[eight, half]| {
                // Two of one eight columns, and two of the next.
                let at = (4 * step as usize + eight) * 4 + 2 * half;
                let two = [at, at + 4].map(|at| match own.get(at..at + 2) {
                    Some(&[low, high]) => def!(self, B32, "prmt.b32", low, high, 0x0040),
                    _ => self.number(Scalar::I32, 0),
                });
                def!(self, B32, "prmt.b32", two[0], two[1], 0x5410)
            });
            return self.of_bytes(four);
        }
        std::array::from_fn(|i| {
            let at = 4 * step as usize + i;
            // f32: of every eight columns the rows of the quad and those below alternate after two.
            let at = if narrow { at } else { 4 * step as usize + [0, 2, 1, 3][i] };
            let Some(reg) = own.get(at).copied() else { return self.number(Scalar::I32, 0) };
            let eight = if narrow { at as u32 / 2 } else { at as u32 / 4 };
            if eight * 8 + 8 <= there {
                return reg;
            }
            // The columns 2t and 2t + 1 of these eight.
            let left = there.saturating_sub(eight * 8);
            let first = def!(self, B32, "shl.b32", in_quad, 1);
            if !narrow {
                let inside = left.saturating_sub(at as u32 % 2);
                let inside = def!(self, Pred, "setp.lt.u32", first, i64::from(inside));
                return def!(self, B32, "selp.b32", reg, 0, inside);
            }
            let both = def!(self, Pred, "setp.lt.u32", first, i64::from(left.saturating_sub(1)));
            let one = def!(self, Pred, "setp.lt.u32", first, i64::from(left));
            let low = def!(self, B32, "and.b32", reg, 0xffff);
            let some = def!(self, B32, "selp.b32", low, 0, one);
            def!(self, B32, "selp.b32", reg, some, both)
        })
    }

    /// Adds a product to a fragment, or puts it in its place.
    pub(super) fn mma_sync(&mut self, op: &'k Op, place: Place) {
        let kernel = self.kernel;
        let (Some(sum), &[a, b]) = (kernel.fragment(place), &op.others[..]) else { return };
        let Some((_, of_a)) = kernel.place(a) else { return };
        let Some((_, of_b)) = kernel.place(b) else { return };
        let (left_turned, right_turned) =
            (op.attr() == Some(Left::Transposed), op.attr() == Some(Right::Transposed));
        let columns = sum.columns.unwrap_or(0);
        let Some(mut right) = self.factor(b, right_turned, Side::Right, columns) else { return };
        let mut left = self.factor(a, !left_turned, Side::Left, sum.rows);
        let Some(spread) = self.tiles.as_ref().map(|tiles| tiles.spread) else { return };
        let Some(inner) = inner(kernel, op) else { return };
        let sums = self.fragment_regs(place);
        let kind = Kind::of(self.options, of_a, of_b);
        if kind == Kind::Cores {
            return self.multiply(op, (left.as_mut(), &mut right), &sums, inner);
        }
        let slabs = spread.rows(sum.rows) / spread.slab;
        let eights = spread.columns(columns) / 8;
        let zero = (op.code == Opcode::Product).then(|| self.number(Scalar::I32, 0));
        for step in 0..inner.div_ceil(32 / right.stage.size) {
            let mut lefts = Vec::new();
            for slab in 0..slabs {
                let regs = match &mut left {
                    Some(factor) => self.load_block(factor, Side::Left, slab * 16, step, 4),
                    None => self.of_fragment(a, slab, step).to_vec(),
                };
                lefts.push(self.prepared(kind, of_a, &regs));
            }
            for pair in 0..eights.div_ceil(2) {
                let two = if pair * 2 + 1 < eights { 2 } else { 1 };
                let regs = match (&left, kind) {
                    (None, Kind::SplitF32) => {
                        (0..two).flat_map(|i| self.load_paired(&mut right, 16 * pair + 8 * i, step)).collect()
                    }
                    _ => self.load_block(&mut right, Side::Right, 16 * pair, step, 2 * two as usize),
                };
                for (i, regs) in regs.chunks(2).enumerate() {
                    let right = self.prepared(kind, of_b, regs);
                    for (slab, left) in lefts.iter().enumerate() {
                        let at = 4 * (slab * eights as usize + 2 * pair as usize + i);
                        let from = zero.filter(|_| step == 0).map(|zero| [zero; 4]);
                        self.multiply_block(kind, left, &right, &sums[at..at + 4], from);
                    }
                }
            }
        }
    }

    /// The registers of a factor as the instructions take them, those for each instruction one behind the other.
    fn prepared(&mut self, kind: Kind, element: Scalar, regs: &[Reg]) -> Vec<Vec<Reg>> {
        let rounded = |writer: &mut Self, reg: &Reg| def!(writer, B32, "cvt.rna.tf32.f32", *reg);
        match kind {
            Kind::Tf32 => vec![regs.iter().map(|reg| rounded(self, reg)).collect()],
            Kind::SplitF32 => {
                let mut all = vec![Vec::new(); 3];
                for reg in regs {
                    let high = rounded(self, reg);
                    let rest = def!(self, B32, "sub.rn.f32", *reg, high);
                    // An infinity has no rest, and none multiplies it.
                    let finite = def!(self, Pred, "testp.finite.f32", high);
                    let rest = def!(self, B32, "selp.b32", rest, 0, finite);
                    let rest = rounded(self, &rest);
                    let number = def!(self, B32, "selp.b32", high, 0, finite);
                    all.iter_mut().zip([high, rest, number]).for_each(|(all, reg)| all.push(reg));
                }
                all
            }
            Kind::F8AsHalf { .. } => {
                let pairs: Vec<[Reg; 2]> = regs.iter().map(|reg| self.f8_as_half(element, *reg)).collect();
                // What is added up first, and then: any order that both factors have.
                match &pairs[..] {
                    [a, b, c, d] => vec![vec![a[0], b[0], a[1], b[1]], vec![c[0], d[0], c[1], d[1]]],
                    _ => pairs.iter().map(|pair| pair.to_vec()).collect(),
                }
            }
            _ => vec![regs.to_vec()],
        }
    }

    /// Adds the product of two blocks to registers of a sum.
    fn multiply_block(
        &mut self,
        kind: Kind,
        left: &[Vec<Reg>],
        right: &[Vec<Reg>],
        sums: &[Reg],
        from: Option<[Reg; 4]>,
    ) {
        let mut from = from.unwrap_or_else(|| std::array::from_fn(|i| sums[i]));
        let mut add = |writer: &mut Self, name: &str, a: &[Reg], b: &[Reg]| {
            ins!(writer, name, Arg::List(sums), Arg::List(a), Arg::List(b), Arg::List(&from));
            from = std::array::from_fn(|i| sums[i]);
        };
        const HALF: &str = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32";
        const WHOLE: &str = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32";
        const TF32: &str = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32";
        match kind {
            Kind::Half("f16") => add(self, WHOLE, &left[0], &right[0]),
            Kind::Half(_) => {
                add(self, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", &left[0], &right[0]);
            }
            Kind::HalfTwice => {
                add(self, HALF, &left[0][..2], &right[0][..1]);
                add(self, HALF, &left[0][2..], &right[0][1..]);
            }
            Kind::Tf32 => add(self, TF32, &left[0], &right[0]),
            // The smallest first.
            Kind::SplitF32 => {
                add(self, TF32, &left[1], &right[2]);
                add(self, TF32, &left[2], &right[1]);
                add(self, TF32, &left[0], &right[0]);
            }
            Kind::F8(a, b) => {
                let name = format!("mma.sync.aligned.m16n8k32.row.col.f32.{a}.{b}.f32");
                add(self, &name, &left[0], &right[0]);
            }
            Kind::F8AsHalf { twice } => {
                for (left, right) in left.iter().zip(right) {
                    match twice {
                        false => add(self, WHOLE, left, right),
                        true => {
                            add(self, HALF, &left[..2], &right[..1]);
                            add(self, HALF, &left[2..], &right[1..]);
                        }
                    }
                }
            }
            Kind::I8 => {
                add(self, "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", &left[0], &right[0]);
            }
            Kind::I8FourTimes => {
                let name = "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32";
                for (inner, half) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let own = &sums[2 * half..2 * half + 2];
                    let before = if inner == 0 { &from[2 * half..2 * half + 2] } else { own };
                    let [a, b] = [&left[0][half + 2 * inner..][..1], &right[0][inner..][..1]];
                    ins!(self, name, Arg::List(own), Arg::List(a), Arg::List(b), Arg::List(before));
                }
            }
            Kind::Cores => {}
        }
    }
}

/// How many products are added up.
pub(super) fn inner(kernel: &Kernel, op: &Op) -> Option<u32> {
    let [a, _] = op.others[..] else { return None };
    match (kernel.channel(a), op.attr()) {
        (Some(channel), Some(Left::Transposed)) => Some(channel.dims[0]),
        (Some(channel), _) => Some(channel.dims[1]),
        (None, _) => kernel.fragment(a)?.columns,
    }
}

/// Is a fragment a factor in the kernel?
pub(super) fn fragments_multiply(kernel: &Kernel) -> bool {
    let mut found = false;
    kernel.for_each_op(&mut |op| {
        let multiplies = matches!(op.code, Opcode::Mma | Opcode::Product);
        found |= multiplies && op.others.first().is_some_and(|place| fragment_number(*place).is_some());
    });
    found
}
