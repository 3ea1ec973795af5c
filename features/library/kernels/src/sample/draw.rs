//! Draws from the logits of a row, by what the first pass has left of its chunks.
//!
//! A token is drawn by inverting the distribution function twice, with 64 random bits each: which chunk, and which of its columns.
//! So the logits are read once, and one chunk of each row again.
//!
//! Of the most likely tokens alone it is drawn by rejection: a token is drawn of all, and what is above it is summed up in another
//! pass. If that is less than what is wanted, the token is one of these, and else the next is drawn of those above it. It takes
//! 1 / p passes at most, on average, and seldom more than two.

use super::chunk::{CHUNK, Piece, Reader, chunks};
use super::numbers::{Nan, philox, running, scaled, weight};
use super::parts::weigh;
use vm_ir::builder::{BuildError, Builder, Carry, IRBlock, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// What is drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Candidates {
    /// All of a row that is one chunk, without a first pass.
    Chunk,
    /// All of a row.
    All,
    /// The most likely tokens whose probabilities reach a part of 1: `part`, in 2^-64.
    Mass,
    /// The most likely tokens of this number: `part`.
    Count,
}

/// A variant. Parameters: the logits, `output` of i32 and `seeds` of i64, `[rows]`, the scale; `maxima` and `sums` of the first pass but
/// for a chunk, and `part` where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Draw {
    /// How rows are read.
    pub reader: Reader,
    /// What is drawn from.
    pub candidates: Candidates,
    /// Warps of a block, which has a row: one, but for [`Candidates::Mass`] and [`Candidates::Count`].
    pub warps: u32,
}

/// A search for the first place at which a running sum exceeds a target.
#[derive(Clone, Copy)]
pub(super) struct Found<'b> {
    /// The place, or −1.
    pub(super) at: Val<'b>,
    /// The sum of all that was looked at.
    pub(super) sum: Val<'b>,
}

impl<'b> Found<'b> {
    pub(super) fn none(k: Builder<'b>) -> Found<'b> {
        Found { at: k.i32(-1), sum: k.i64(0) }
    }
}

impl<'b> Carry<'b> for Found<'b> {
    fn values(&self) -> Vec<Val<'b>> {
        vec![self.at, self.sum]
    }

    fn rebuild(&self, values: &[Val<'b>]) -> Self {
        if let [at, sum] = *values { Found { at, sum } } else { *self }
    }
}

/// Looks at one more number of each lane; the first lane's has the place `first`.
pub(super) fn find<'b>(so_far: Found<'b>, target: Val<'b>, first: Val<'b>, number: Val<'b>) -> Found<'b> {
    let k = target.builder();
    let upto = so_far.sum + running(k, number);
    let lanes = upto.gt(target).ballot();
    let hit = so_far.at.lt(0) & lanes.ne(0);
    Found { at: hit.select(first + lanes.ctz(), so_far.at), sum: upto.shuffle(31) }
}

/// A search for the column of a chunk, and its logit.
#[derive(Clone, Copy)]
struct Token<'b> {
    column: Val<'b>,
    logit: Val<'b>,
    sum: Val<'b>,
}

impl<'b> Carry<'b> for Token<'b> {
    fn values(&self) -> Vec<Val<'b>> {
        vec![self.column, self.logit, self.sum]
    }

    fn rebuild(&self, values: &[Val<'b>]) -> Self {
        if let [column, logit, sum] = *values { Token { column, logit, sum } } else { *self }
    }
}

impl<'b> Token<'b> {
    fn none(k: Builder<'b>) -> Token<'b> {
        Token { column: k.i32(-1), logit: k.f32(f32::NEG_INFINITY), sum: k.i64(0) }
    }

    /// Looks at more of the chunk, for where the weights exceed a target.
    fn find(
        self,
        read: &[Piece<'b>],
        target: Val<'b>,
        weight: impl Fn(Val<'b>, Val<'b>) -> Val<'b>,
    ) -> Token<'b> {
        let k = target.builder();
        let mut so_far = self;
        for piece in read {
            let weights: Vec<_> = piece.each().map(|(x, column)| weight(x, column)).collect();
            let of_lane = weights.iter().copied().reduce(|a, b| a + b).unwrap_or(k.i64(0));
            let upto = so_far.sum + running(k, of_lane);
            let lanes = upto.gt(target).ballot();
            // What this lane comes to, if it is the one: the last at which the sum before does not exceed the target.
            let mut before = upto - of_lane;
            let (mut column, mut logit) = (so_far.column, so_far.logit);
            for ((x, at), weight) in piece.each().zip(&weights) {
                let reaches = before.le(target);
                (column, logit) = (reaches.select(at, column), reaches.select(x, logit));
                before = before + *weight;
            }
            let lane = lanes.ctz();
            let hit = so_far.column.lt(0) & lanes.ne(0);
            so_far = Token {
                column: hit.select(column.shuffle(lane), so_far.column),
                logit: hit.select(logit.shuffle(lane), so_far.logit),
                sum: upto.shuffle(31),
            };
        }
        so_far
    }
}

/// What the first pass has left.
#[derive(Clone, Copy)]
struct Parts<'b> {
    maxima: PlaceRef<'b>,
    sums: PlaceRef<'b>,
}

/// A kernel being written.
struct Writer<'b> {
    k: Builder<'b>,
    of: Draw,
    x: PlaceRef<'b>,
    row: Val<'b>,
    scale: Val<'b>,
    seed: Val<'b>,
}

/// What may be drawn.
#[derive(Clone, Copy)]
struct Above<'b> {
    /// All?
    all: Val<'b>,
    /// Else those above this logit in this column.
    logit: Val<'b>,
    column: Val<'b>,
}

impl<'b> Above<'b> {
    /// Is a logit?
    fn has(&self, x: Val<'b>, column: Val<'b>) -> Val<'b> {
        x.gt(self.logit) | (x.eq(self.logit) & column.lt(self.column))
    }
}

impl<'b> Carry<'b> for Above<'b> {
    fn values(&self) -> Vec<Val<'b>> {
        vec![self.all, self.logit, self.column]
    }

    fn rebuild(&self, values: &[Val<'b>]) -> Self {
        if let [all, logit, column] = *values { Above { all, logit, column } } else { *self }
    }
}

impl Draw {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let from = match self.candidates {
            Candidates::Chunk => "chunk",
            Candidates::All => "all",
            Candidates::Mass => "mass",
            Candidates::Count => "count",
        };
        format!("sample_{from}_{}_{}", self.warps, self.reader.name())
    }

    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([32 * self.warps, 1, 1]);
        let x = self.reader.view(k, "logits");
        let output = k.view("output", Scalar::I32, 1, Access::Write);
        let seeds = k.view("seeds", Scalar::I64, 1, Access::Read);
        let scale = k.scalar("scale", Type::F32);
        let of_chunk = self.candidates == Candidates::Chunk;
        let is_likely = matches!(self.candidates, Candidates::Mass | Candidates::Count);
        let access = if is_likely { Access::ReadWrite } else { Access::Read };
        let parts = (!of_chunk).then(|| Parts {
            maxima: k.view("maxima", Scalar::F32, 2, Access::Read),
            sums: k.view("sums", Scalar::I64, 2, access),
        });
        let part = is_likely.then(|| k.scalar("part", Type::I64));
        let row = k.block_id(Axis::X).to(Scalar::I64);
        let writer = Writer { k, of: *self, x, row, scale, seed: seeds.at([row]).load() };
        let token = match (parts, part) {
            (Some(parts), Some(part)) => writer.most_likely(parts, part),
            (Some(parts), None) => {
                let max = writer.greatest(parts);
                let all = Above { all: k.bool(true), logit: max, column: k.i32(-1) };
                let drawn = writer.draw(parts, max, all, k.i32(0)).above.column;
                max.gt(f32::NEG_INFINITY).select(drawn, k.i32(-1))
            }
            (None, _) => writer.of_chunk(),
        };
        k.if_(k.thread_id(Axis::X).eq(0), || output.at([row]).store(token));
        block.kernel()
    }
}

/// A token that was drawn, and the sum of what it was drawn from.
struct Drawn<'b> {
    /// What is above it.
    above: Above<'b>,
    total: Val<'b>,
}

impl<'b> Writer<'b> {
    /// Of a row of one chunk.
    fn of_chunk(&self) -> Val<'b> {
        let k = self.k;
        let read = self.of.reader.chunk(self.x, self.row, k.i32(0), Nan::Least);
        let logits: Vec<_> = read.iter().flat_map(|piece| piece.logits.iter().copied()).collect();
        let (max, sum) = weigh(&logits, self.scale);
        let target = philox(self.seed, k.i32(0))[1].mulhi_u(sum);
        let token = Token::none(k).find(&read, target, |x, _| weight(x, max, self.scale));
        max.gt(f32::NEG_INFINITY).select(token.column, k.i32(-1))
    }

    /// The greatest logit of the row.
    fn greatest(&self, parts: Parts<'b>) -> Val<'b> {
        let k = self.k;
        let chunks = parts.maxima.extent(1);
        let mine = k.range(k.lane_id().to(Scalar::I64), chunks).step(32);
        mine.fold(k.f32(f32::NEG_INFINITY), |chunk, max| max.max(parts.maxima.at([self.row, chunk]).load()))
            .warp_max()
    }

    /// Draws, each warp by itself. Of all by the sums of the first pass, each below its chunk's greatest logit; else by sums of
    /// what is above, below the row's.
    fn draw(&self, parts: Parts<'b>, max: Val<'b>, above: Above<'b>, counter: Val<'b>) -> Drawn<'b> {
        let k = self.k;
        let lane = k.lane_id();
        let count = parts.sums.extent(1);
        let sum_of = |first: Val<'b>| {
            let chunk = (first + lane).to(Scalar::I64);
            let inside = chunk.lt(count);
            let of =
                |place: PlaceRef<'b>, none| k.if_else(inside, || place.at([self.row, chunk]).load(), || none);
            let sum = of(parts.sums, k.i64(0));
            let of_all = weight(of(parts.maxima, k.f32(f32::NAN)), max, self.scale);
            above.all.select(scaled(sum, of_all), sum)
        };
        let chunks = || k.range(k.i32(0), count.to(Scalar::I32)).step(32);
        let total = chunks().fold(k.i64(0), |first, sum| sum + sum_of(first)).warp_add();
        let [first, second] = philox(self.seed, counter);
        let target = first.mulhi_u(total);
        let found = chunks().fold(Found::none(k), |first, so_far| find(so_far, target, first, sum_of(first)));
        let chunk = found.at.max(0);
        let wide = chunk.to(Scalar::I64);
        let below = above.all.select(parts.maxima.at([self.row, wide]).load(), max);
        let target = second.mulhi_u(parts.sums.at([self.row, wide]).load());
        let place = (self.x, self.row, self.of.reader.first(chunk));
        let Token { column, logit, .. } =
            self.of.reader.fold_part(place, (Nan::Least, 4), Token::none(k), |so_far, read| {
                so_far.find(read, target, |x, column| {
                    let has = above.all | above.has(x, column);
                    has.select(weight(x, below, self.scale), k.i64(0))
                })
            });
        Drawn { above: Above { all: k.bool(false), logit, column }, total }
    }

    /// One of the most likely tokens.
    fn most_likely(&self, parts: Parts<'b>, part: Val<'b>) -> Val<'b> {
        let k = self.k;
        let zero = k.i32(0);
        let goes_on = k.shared("goes_on", Scalar::I32, &[1]);
        let above_it = k.shared("above", Scalar::I64, &[1]);
        let is_first = k.thread_id(Axis::X).eq(0);
        let max = self.greatest(parts);
        k.if_(is_first, || goes_on.at([zero]).store(max.gt(f32::NEG_INFINITY).to(Scalar::I32)));
        let none = Above { all: k.bool(true), logit: max, column: k.i32(-1) };
        let (above, ..) = k.while_(
            (none, zero, k.i64(0)),
            |_| goes_on.at([zero]).load_uniform().ne(0),
            |(above, counter, all)| {
                let drawn = self.draw(parts, max, above, counter);
                let all = above.all.select(drawn.total, all);
                k.if_(is_first, || above_it.at([zero]).store(0));
                // Until now the sums were read.
                k.barrier();
                let above = drawn.above;
                let sum = self.sum_above(parts, max, above);
                k.if_(k.lane_id().eq(0), || {
                    above_it.at([zero]).atomic_add(sum);
                });
                k.barrier();
                k.if_(is_first, || {
                    let enough = match self.of.candidates {
                        Candidates::Count => part,
                        _ => all.mulhi_u(part).max_u(1),
                    };
                    let is_above = above_it.at([zero]).load().ge_u(enough);
                    goes_on.at([zero]).store(is_above.to(Scalar::I32));
                });
                (above, counter + 1, all)
            },
        );
        above.column
    }

    /// Writes for each chunk of this warp the sum of what is above, and gives what all of them come to: their sum, or how many
    /// are above.
    fn sum_above(&self, parts: Parts<'b>, max: Val<'b>, above: Above<'b>) -> Val<'b> {
        let k = self.k;
        // Counting takes registers.
        let batch = if self.of.candidates == Candidates::Count { 16 } else { 32 };
        k.range(k.warp_id(), chunks(self.x)).step(self.of.warps).fold(k.i64(0), |chunk, all| {
            let place = (self.x, self.row, self.of.reader.first(chunk));
            let none = (k.i64(0), k.i32(0));
            let (sum, count) = self.of.reader.fold_part(place, (Nan::Least, batch), none, |so_far, read| {
                read.iter().flat_map(Piece::each).fold(so_far, |(sum, count), (x, column)| {
                    let has = above.has(x, column);
                    let weight = has.select(weight(x, max, self.scale), k.i64(0));
                    (sum + weight, count + has.to(Scalar::I32))
                })
            });
            let sum = sum.warp_add();
            k.if_(k.lane_id().eq(0), || {
                parts.sums.at([self.row, chunk.to(Scalar::I64)]).store(sum);
            });
            match self.of.candidates {
                Candidates::Count => all + count.warp_add().to(Scalar::I64),
                _ => all + sum,
            }
        })
    }
}

// A chunk's weights add up to 2^50 at most, which `scaled` takes.
const _: () = assert!((CHUNK as u64) << super::numbers::WEIGHT_BITS <= 1 << 50);
