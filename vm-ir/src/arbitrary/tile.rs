//! Random tile kernels.
//!
//! What is multiplied, and summed along rows, are small whole numbers, so that every order of summing gives the same result.
//! Other fragments hold anything. Each block writes parts of views of its own, or adds whole numbers.

use super::Random;
use crate::builder::{Builder, ChannelRef, Factor, FragmentRef, IRBlock, PlaceRef, Val};
use crate::interp::{Argument, Launch, Tensor};
use crate::module::{GuestAddr, Module};
use crate::op::{Axis, Shape, TABLE, Width};
use crate::tile::multiplies;
use crate::types::{Class, Scalar, Type};
use crate::view::{Access, ViewType};

/// Rows and columns of what is multiplied: odd ones, and those around the sizes in which processors compute.
const EXTENTS: [u32; 12] = [1, 2, 3, 5, 7, 8, 13, 16, 17, 24, 33, 40];
/// The same of what the matrix instructions of warp groups take: rows of a group, columns, and bytes of what is added up.
const ROWS: u32 = 64;
const COLUMNS: [u32; 4] = [16, 32, 48, 64];
const INNER: [u32; 3] = [32, 64, 128];
/// What their fragments hold.
const HELD: [Scalar; 4] = [Scalar::F32, Scalar::I32, Scalar::F16, Scalar::Bf16];
/// Bytes at whose multiples they copy.
const ALIGN: u32 = 16;
/// Where boxes begin, beside what is near.
const FAR: [i64; 6] = [i64::MIN, i64::MAX, 1 << 40, -(1 << 40), i32::MAX as i64, i32::MIN as i64];
/// The greatest number that is multiplied.
const MOST: i64 = 3;
/// Statements, and the deepest nesting of control flow.
const STATEMENTS: usize = 14;
const DEPTH: u32 = 2;

/// The shapes of a random tile kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileShapes {
    /// Small, and mostly odd.
    Odd,
    /// What an architecture copies and multiplies by its instructions for whole groups of warps, from views that promise an
    /// alignment of 16 bytes; and boxes that a cluster shares.
    Whole,
}

/// The random tile kernel of this seed, named `random`, and a launch for it.
pub fn tile_kernel(seed: u64, shapes: TileShapes) -> (Module, Launch) {
    let whole = shapes == TileShapes::Whole;
    let block = IRBlock::new(GuestAddr(seed));
    let mut random = Random(seed ^ 0x2545_f491_4f6c_dd1d);
    random.next();
    let groups = random.pick(&[1, 1, 1, 2]);
    let cluster = random.pick(&[1, 1, 1, 2]);
    let grid = cluster * (1 + random.below(2) as u32);
    let k = block.builder().name("random").cluster_size(cluster).tile_groups(groups);
    let sum = random.pick(&[Scalar::F32, Scalar::F32, Scalar::F32, Scalar::I32]);
    let factors: Vec<(Scalar, Scalar)> = Scalar::ALL
        .iter()
        .flat_map(|a| Scalar::ALL.iter().map(move |b| (*a, *b)))
        .filter(|(a, b)| multiplies(*a, *b, sum))
        .collect();
    let (left, right) = random.pick(&factors);
    let [rows, columns, inner] = match shapes {
        TileShapes::Odd => [0; 3].map(|_| random.pick(&EXTENTS)),
        TileShapes::Whole => [ROWS, random.pick(&COLUMNS), random.pick(&INNER) / left.bytes()],
    };
    let rows = rows * groups;
    let turned = match whole && left.bytes() != 2 {
        true => [false, true],
        false => [random.below(2) == 0, random.below(2) == 0],
    };
    let dims = |[a, b]: [u32; 2], turned: bool| if turned { [b, a] } else { [a, b] };

    let mut arguments = Vec::new();
    let mut view = |random: &mut Random, name: &str, element: Scalar, extents: &[u64], access: Access| {
        let mut extents = extents.to_vec();
        if let (true, [_, .., last]) = (whole, &mut extents[..]) {
            *last = last.next_multiple_of((ALIGN / element.bytes()).into());
        }
        let count = extents.iter().product::<u64>();
        let span = 2 * MOST as usize + 1;
        let numbers: Vec<f64> = (0..count).map(|_| (random.below(span) as i64 - MOST) as f64).collect();
        arguments.push(Argument::Tensor(Tensor::from_f64s(element, &extents, numbers)));
        let ty = ViewType::new(element, extents.len(), access);
        k.view_of(name, if whole { ty.aligned(ALIGN) } else { ty })
    };
    let in_memory = |element: Scalar| if element == Scalar::Tf32 { Scalar::F32 } else { element };
    let near = |random: &mut Random, of: u32| random.below(2 * of as usize + 3) as u64;
    let sources = [(left, "a", [rows, inner], turned[0]), (right, "b", [inner, columns], turned[1])];
    let [a, b] = sources.map(|(element, name, [high, wide], turned)| {
        let [high, wide] = dims([high, wide], turned);
        let mut extents = vec![near(&mut random, high), near(&mut random, wide)];
        if random.below(3) == 0 {
            extents.insert(0, 2);
        }
        let place = view(&mut random, name, in_memory(element), &extents, Access::Read);
        (place, extents.len())
    });
    let blocks = u64::from(grid);
    let any: Vec<Scalar> = Class::DATA.scalars().filter(|scalar| !whole || HELD.contains(scalar)).collect();
    let other = random.pick(&any);
    let extents = [blocks, near(&mut random, rows), near(&mut random, columns)];
    let sums = view(&mut random, "sums", sum, &extents, Access::ReadWrite);
    let others = view(&mut random, "others", other, &extents, Access::ReadWrite);
    let lines = view(&mut random, "lines", Scalar::F32, &[blocks, 64], Access::ReadWrite);
    let added = [near(&mut random, rows), near(&mut random, columns)];
    let total = view(&mut random, "total", sum, &added, Access::ReadWrite);
    let numbers = view(&mut random, "numbers", Scalar::I32, &[9], Access::Read);
    let mut indices = Vec::new();
    for n in 0..3 {
        indices.push(k.scalar(&format!("n{n}"), Type::I64));
        let bits = match random.below(3) {
            0 => random.pick(&FAR),
            _ => random.below(60) as i64 - 20,
        };
        arguments.push(Argument::Bits(bits as u64));
    }
    let stages = 1 + random.below(2) as u32;
    let from_a = k.channel("from_a", left, dims([rows, inner], turned[0]), stages);
    let of_b = dims([inner, columns], turned[1]);
    let multicast = whole && cluster > 1 && random.below(2) == 0;
    let from_b = match multicast {
        true => k.multicast("from_b", right, of_b, stages),
        false => k.channel("from_b", right, of_b, stages),
    };
    // What is sent may be a factor on both sides.
    let sent = (left != Scalar::Tf32).then(|| {
        let fragment = k.fragment("factor", left, [rows, inner]);
        (fragment, k.channel("sent", left, [rows, inner], 1))
    });
    // Where a block may have some of the iterations; of the columns it has its share, or all.
    let split = (rows > 1).then(|| {
        let shared = if columns.is_multiple_of(cluster) { random.pick(&[1, cluster]) } else { 1 };
        Split {
            channels: [
                k.channel("split_a", left, dims([rows, inner], turned[0]), stages),
                k.channel("split_b", right, dims([inner, columns], turned[1]), stages),
            ],
            sum: k.fragment("split", sum, [rows, columns]),
            part: k.fragment("part", sum, [rows, columns / shared]),
        }
    });
    let block_number = k.block_id(Axis::X).to_u(Scalar::I64);
    indices.extend([block_number, k.cluster_rank().to(Scalar::I64)]);
    let mut maker = Maker {
        k,
        random,
        stages,
        sources: [(a.0, a.1, from_a, turned[0]), (b.0, b.1, from_b, turned[1])],
        sent,
        split,
        sum: k.fragment("sum", sum, [rows, columns]),
        other: k.fragment("other", other, [rows, columns]),
        before: k.fragment("before", Scalar::F32, [rows, inner]),
        column: k.column("column", Scalar::F32, rows),
        whole: (sum == Scalar::F32).then(|| k.column("whole", Scalar::F32, rows)),
        row: k.row("row", Scalar::F32, columns),
        elements: [sum, other, left],
        views: [sums, others, lines, total, numbers],
        block: block_number,
        indices,
        clustered: cluster > 1,
        multicast,
        depth: 0,
    };
    maker.statements(STATEMENTS);
    maker.results();
    let launch = Launch { kernel: "random".to_owned(), grid: [grid, 1, 1], arguments };
    (Module::new(block.kernel().into_iter().collect()), launch)
}

/// What the blocks of a cluster add up together.
#[derive(Clone, Copy)]
struct Split<'b> {
    channels: [ChannelRef<'b>; 2],
    sum: FragmentRef<'b>,
    part: FragmentRef<'b>,
}

struct Maker<'b> {
    k: Builder<'b>,
    random: Random,
    stages: u32,
    /// The factors' views, with their ranks, channels, and whether they are given transposed.
    sources: [(PlaceRef<'b>, usize, ChannelRef<'b>, bool); 2],
    /// A left factor, and a channel that it is sent to.
    sent: Option<(FragmentRef<'b>, ChannelRef<'b>)>,
    split: Option<Split<'b>>,
    /// Whole numbers, as all sums.
    sum: FragmentRef<'b>,
    /// Anything, as large as the sum; and as the left factor.
    other: FragmentRef<'b>,
    before: FragmentRef<'b>,
    column: FragmentRef<'b>,
    /// Whole numbers.
    whole: Option<FragmentRef<'b>>,
    row: FragmentRef<'b>,
    /// Of sums, of anything, and of left factors.
    elements: [Scalar; 3],
    /// What sums, anything, columns and rows go to; what is added to; and whole numbers that are loaded.
    views: [PlaceRef<'b>; 5],
    block: Val<'b>,
    /// Scalars of i64.
    indices: Vec<Val<'b>>,
    clustered: bool,
    /// Do the blocks of a cluster fetch the second factor together?
    multicast: bool,
    depth: u32,
}

impl<'b> Maker<'b> {
    fn statements(&mut self, count: usize) {
        for _ in 0..count {
            match self.random.below(15) {
                0..=3 => self.product(),
                4 => self.send(),
                5 | 6 => self.map(),
                7 => self.factor(),
                8 => self.join(),
                9 => self.fill(),
                10 => self.copy(),
                11 => self.scalar(),
                12 if self.depth < DEPTH => self.choice(),
                13 if self.depth < DEPTH => self.repeated(),
                14 => self.split(),
                _ => self.map(),
            }
        }
    }

    fn nested(&mut self, count: usize) {
        let known = self.indices.len();
        self.depth += 1;
        self.statements(count);
        self.depth -= 1;
        self.indices.truncate(known);
    }

    fn choice(&mut self) {
        // Blocks of a cluster go one way: the first are the launch's numbers.
        let value = if self.clustered { self.random.pick(&self.indices[..3]) } else { self.index() };
        let condition = value.lt(self.random.below(9) as i64);
        let k = self.k;
        let this = std::cell::RefCell::new(self);
        let one = || {
            let mut this = this.borrow_mut();
            let count = this.random.below(4);
            this.nested(count);
        };
        k.if_else(condition, one, one);
    }

    fn repeated(&mut self) {
        let k = self.k;
        let (high, step) = (self.random.below(30) as i64, self.random.pick(&[8, 13, 16]));
        let count = 1 + self.random.below(4);
        k.range(k.i64(0), k.i64(high)).step(k.i64(step)).each(|at| {
            self.indices.push(at);
            self.nested(count);
            self.indices.pop();
        });
    }

    fn index(&mut self) -> Val<'b> {
        let near = self.random.below(24) as i64 - 8;
        let value = self.random.pick(&self.indices.clone());
        match self.random.below(6) {
            0 => value,
            1 => value + near,
            2 => value & 31,
            _ => self.k.i64(if near < 0 && self.random.below(3) > 0 { 0 } else { near }),
        }
    }

    /// One that is the same in all blocks: the first are the launch's numbers.
    fn launched(&mut self) -> Val<'b> {
        match self.random.below(2) {
            0 => self.random.pick(&self.indices[..3]),
            _ => self.k.i64(self.random.below(20) as i64),
        }
    }

    fn scalar(&mut self) {
        let at = self.index();
        let made = match self.random.below(3) {
            0 => self.views[4].at([at]).load().to(Scalar::I64),
            1 => at * self.index(),
            _ => self.views[0].extent(1) - at,
        };
        self.indices.push(made);
    }

    fn fetch(&mut self, side: usize) {
        let (view, rank, channel, _) = self.sources[side];
        let together = side == 1 && self.multicast;
        let [first, row, column] = [0; 3].map(|_| match together {
            true => self.launched(),
            false => self.index(),
        });
        match rank {
            2 => channel.fetch(view, [row, column]),
            _ => channel.fetch(view, [first, row, column]),
        }
    }

    /// Boxes are fetched, as far ahead as there are stages, and multiplied; or a fragment is the left factor.
    fn product(&mut self) {
        let ahead = 1 + self.random.below(self.stages as usize);
        let adds = self.random.below(3) > 0;
        let [(_, _, from_a, a_turned), (_, _, from_b, b_turned)] = self.sources;
        let of_fragment = self.sent.filter(|_| self.random.below(3) == 0);
        for _ in 0..ahead {
            if of_fragment.is_none() {
                self.fetch(0);
            }
            self.fetch(1);
        }
        let factor = |channel: ChannelRef<'b>, turned: bool| match turned {
            true => channel.transposed(),
            false => Factor::from(channel),
        };
        for _ in 0..ahead {
            let left = match of_fragment {
                Some((fragment, _)) => Factor::from(fragment),
                None => factor(from_a, a_turned),
            };
            let right = factor(from_b, b_turned);
            match adds {
                true => self.sum.mma(left, right),
                false => self.sum.product(left, right),
            }
            if of_fragment.is_none() {
                from_a.release();
            }
            from_b.release();
        }
        // It stays small.
        let floats = self.elements[0] == Scalar::F32;
        self.k.map([self.sum], [self.sum], |_, _, [x]| {
            [if floats { x.max(-4096.0).min(4096.0) } else { x.max(-4096).min(4096) }]
        });
    }

    /// A sum of the iterations of a loop that the blocks of a cluster may share.
    fn split(&mut self) {
        let Some(Split { channels, sum, part }) = self.split else { return };
        let k = self.k;
        let begin = self.random.below(3) as i64;
        match self.elements[0] {
            Scalar::F32 => sum.fill(begin as f32),
            _ => sum.fill(begin),
        }
        let ahead = 1 + self.random.below(self.stages as usize);
        k.for_cluster(|number| {
            let number = number.to(Scalar::I64);
            for _ in 0..ahead {
                for (channel, (view, rank, ..)) in channels.into_iter().zip(self.sources) {
                    // The same in all blocks: the first indices are the launch's numbers.
                    let [first, row, column] = [0; 3].map(|_| match self.random.below(4) {
                        0 => self.random.pick(&self.indices[..3]),
                        1 => number * (self.random.below(20) as i64),
                        2 => number + (self.random.below(9) as i64 - 4),
                        _ => k.i64(self.random.below(20) as i64),
                    });
                    match rank {
                        2 => channel.fetch(view, [row, column]),
                        _ => channel.fetch(view, [first, row, column]),
                    }
                }
            }
            let turned = self.sources.map(|source| source.3);
            for _ in 0..ahead {
                let [left, right] = [0, 1].map(|side| match turned[side] {
                    true => channels[side].transposed(),
                    false => Factor::from(channels[side]),
                });
                sum.mma(left, right);
                channels.into_iter().for_each(ChannelRef::release);
            }
        });
        part.share(sum);
        part.put(self.views[0], [self.block, self.index(), self.index()]);
    }

    fn send(&mut self) {
        let Some((fragment, channel)) = self.sent else { return };
        let (_, _, from_b, turned) = self.sources[1];
        self.fetch(1);
        fragment.send(channel);
        let right = if turned { from_b.transposed() } else { Factor::from(from_b) };
        self.sum.product(channel, right);
        channel.release();
        from_b.release();
    }

    /// A left factor of anything: small whole numbers.
    fn factor(&mut self) {
        let Some((fragment, _)) = self.sent else { return };
        let scale = self.random.below(5) as f32 - 2.0;
        let element = self.elements[2];
        self.k.map([fragment], [self.before], |i, j, [x]| {
            let x = (x * scale + (i - j).to(Scalar::F32)).floor();
            let x = x.max(-(MOST as f32)).min(MOST as f32);
            [if element == Scalar::F32 { x } else { x.to(element) }]
        });
    }

    fn fill(&mut self) {
        let number = self.random.below(9) as f32 - 4.0;
        match self.random.below(4) {
            0 => self.before.fill(number),
            1 => self.column.fill(number / 4.0),
            2 => self.row.fill(number),
            _ => {
                let bits = self.random.bits(self.elements[1]);
                self.other.fill(self.k.bits(self.elements[1].into(), bits));
            }
        }
    }

    fn join(&mut self) {
        match (self.random.below(4), self.whole) {
            (0, Some(whole)) => whole.row_add(self.sum),
            (1, Some(whole)) => whole.row_min(self.sum),
            (2, _) => self.column.row_min(self.before),
            _ => self.column.row_max(self.before),
        }
    }

    /// Something of all that is at hand.
    fn map(&mut self) {
        let k = self.k;
        let (other, before, column, row, sum) = (self.other, self.before, self.column, self.row, self.sum);
        let element = self.elements[1];
        match self.random.below(5) {
            0 => k.map([column], [column], |i, j, [x]| [self.on_values(vec![i, j, x], Scalar::F32)]),
            1 => k.map([row], [row], |i, j, [x]| [self.on_values(vec![i, j, x], Scalar::F32)]),
            2 => k.map([before], [before, column], |i, j, [x, y]| {
                [self.on_values(vec![i, j, x, y], Scalar::F32)]
            }),
            3 => k.map([other], [other, sum, column, row], |i, j, [x, y, z, w]| {
                [self.on_values(vec![i, j, x, y, z, w], element)]
            }),
            // Two at once: what one had may be the other's result.
            _ => k.map([other, sum], [sum, other], |i, j, [x, y]| {
                let kept = if y.ty() == x.ty() && self.random.below(2) == 0 { y } else { x };
                [self.on_values(vec![i, j, x, y], element), kept]
            }),
        }
    }

    /// Ops on these values, and on scalars of the block; the last has this type.
    fn on_values(&mut self, mut values: Vec<Val<'b>>, to: Scalar) -> Val<'b> {
        values.push(self.random.pick(&self.indices.clone()));
        for _ in 0..1 + self.random.below(6) {
            let row = self.random.pick(TABLE);
            if row.error.is_some_and(|error| error.precise_ulps > 0) {
                continue;
            }
            let a = values[values.len() - 1 - self.random.below(values.len().min(5))];
            let scalar = a.ty().scalar();
            let made = match row.shape {
                Shape::Unary(class)
                | Shape::Binary(class)
                | Shape::Ternary(class)
                | Shape::Compare(class)
                    if class.contains(scalar) =>
                {
                    let count = row.shape.operands().unwrap_or(1);
                    let operands: Vec<Val<'b>> =
                        (0..count).map(|i| if i == 0 { a } else { self.like(&values, scalar) }).collect();
                    let compares = matches!(row.shape, Shape::Compare(_));
                    self.k.emit(row.opcode, &operands, if compares { Type::BOOL } else { scalar.into() })
                }
                Shape::Select => {
                    let condition = self.like(&values, Scalar::Bool);
                    let other = self.like(&values, scalar);
                    condition.select(a, other)
                }
                Shape::Convert(from, class, width) if from.contains(scalar) => {
                    let fits = |to: &Scalar| match width {
                        Width::Any => *to != scalar,
                        Width::Wider => scalar.bits() < to.bits(),
                        Width::Narrower => scalar.bits() > to.bits(),
                    };
                    let scalars: Vec<Scalar> = class.scalars().filter(fits).collect();
                    if scalars.is_empty() {
                        continue;
                    }
                    let to = self.random.pick(&scalars);
                    self.k.emit(row.opcode, &[a], to.into())
                }
                _ => continue,
            };
            values.push(made);
        }
        let last = values.iter().rev().find(|value| value.ty().scalar() == to).copied();
        last.unwrap_or_else(|| {
            let last = values[values.len() - 1];
            let last = if last.ty() == Type::BOOL { last.to(Scalar::I32) } else { last };
            if last.ty().scalar() == to { last } else { last.to(to) }
        })
    }

    /// One of these values, of a type, or a number.
    fn like(&mut self, values: &[Val<'b>], scalar: Scalar) -> Val<'b> {
        let fitting: Vec<Val<'b>> = values.iter().copied().filter(|v| v.ty() == scalar.into()).collect();
        match fitting.is_empty() || self.random.below(4) == 0 {
            true if scalar != Scalar::Bool || fitting.is_empty() => {
                let bits = self.random.bits(scalar);
                self.k.bits(scalar.into(), bits)
            }
            _ => self.random.pick(&fitting),
        }
    }

    /// Boxes into fragments, and fragments into what the block has of the views.
    fn copy(&mut self) {
        let [sums, others, lines, total, _] = self.views;
        let (block, [row, column]) = (self.block, [0; 2].map(|_| self.index()));
        match self.random.below(12) {
            0 => self.other.get(others, [block, row, column]),
            1 => self.column.get(lines, [block, column]),
            2 => self.row.get(lines, [block, column]),
            3 => self.other.put(others, [block, row, column]),
            4 => self.sum.put(sums, [block, row, column]),
            5 => self.column.put(lines, [block, column]),
            6 => self.row.put(lines, [block, column]),
            7 => self.sum.put_add(total, [row, column]),
            8 => self.sum.put_rows(sums, [block, row, column], self.index()),
            9 => self.column.put_rows(lines, [block, column], self.index()),
            10 => self.row.put_rows(lines, [block, column], self.index()),
            _ => match self.sent {
                // Small whole numbers are in the factors' views.
                Some((fragment, _)) if !self.sources[0].3 && self.sources[0].1 == 2 => {
                    fragment.get(self.sources[0].0, [row, column]);
                }
                _ => self.other.put(others, [block, row, column]),
            },
        }
    }

    /// Everything is seen.
    fn results(&mut self) {
        let [sums, others, lines, total, _] = self.views;
        let (k, block) = (self.k, self.block);
        let zero = k.i64(0);
        self.sum.put(sums, [block, zero, zero]);
        self.other.put(others, [block, zero, zero]);
        self.sum.put_add(total, [zero, zero]);
        self.column.put(lines, [block, zero]);
        self.row.put(lines, [block, k.i64(20)]);
        if let Some(whole) = self.whole {
            whole.put(lines, [block, k.i64(40)]);
        }
        self.column.row_max(self.before);
        self.column.put(lines, [block, k.i64(52)]);
    }
}
