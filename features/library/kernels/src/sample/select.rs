//! The k greatest of each row, in order: of all, or sampled from.
//!
//! One block has a row. Where the first pass has left the greatest key of each group of a row (a lane's part of a chunk), the k-th
//! greatest of so many groups' keys is a bound that k elements reach, and hardly more do: these are read again, alone, and sorted. Should
//! more reach it than shared memory holds, as where many are equal, or without a first pass, the k-th greatest pair of key and
//! column is found digit by digit, with a histogram for each; and k that are more than shared memory holds are found by as many as
//! it does.

use super::chunk::{Reader, chunks};
use super::draw::{Found, find};
use super::numbers::{LEAST_KEY, NONE, Nan, pair, philox, unpair, value, weight};
use vm_ir::builder::{BuildError, Builder, IRBlock, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Where elements come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// All of a row that has at most [`Select::ROOM`] elements.
    All,
    /// Groups whose keys the first pass has left, `keys`; k is at most [`Select::ROOM`]. Their number is the greatest keys that each
    /// thread holds: all of them together are to be some times more than k.
    Groups(u32),
    /// The row, read again for each digit.
    Row,
}

/// What is made of the k greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// They are written: `values` of the logits' type and `indices` of i32, `[rows, k]`.
    Sorted,
    /// One of them is drawn: `output` of i32; `seeds` of i64, `[rows]`; and the scale.
    Drawn,
}

/// A variant. Parameters: the logits, `keys` where it has them, what is written and what that takes, `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Select {
    /// How rows are read.
    pub reader: Reader,
    /// Threads of a block: whole warps, and at least 256.
    pub threads: u32,
    /// Where elements come from.
    pub source: Source,
    /// What is made of them. What is drawn has at most [`Select::ROOM`] to be drawn from.
    pub output: Output,
}

/// A kernel being written.
struct Writer<'b> {
    k: Builder<'b>,
    of: Select,
    nan: Nan,
    x: PlaceRef<'b>,
    row: Val<'b>,
    thread: Val<'b>,
    /// Pairs.
    found: PlaceRef<'b>,
    /// How many have been found, also those for which there is no room.
    count: PlaceRef<'b>,
}

impl Select {
    /// Pairs that shared memory holds.
    pub const ROOM: u32 = 4096;

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let source = match self.source {
            Source::All => "all".to_owned(),
            Source::Groups(held) => format!("groups{held}"),
            Source::Row => "row".to_owned(),
        };
        let output = if self.output == Output::Sorted { "topk" } else { "topk_sample" };
        format!("{output}_{source}_{}_{}", self.threads, self.reader.name())
    }

    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([self.threads, 1, 1]);
        let x = self.reader.view(k, "logits");
        let keys =
            matches!(self.source, Source::Groups(_)).then(|| k.view("keys", Scalar::I32, 2, Access::Read));
        // Parameters come first.
        let writer = || Writer {
            k,
            of: *self,
            nan: if self.output == Output::Sorted { Nan::Greatest } else { Nan::Least },
            x,
            row: k.block_id(Axis::X).to(Scalar::I64),
            thread: k.thread_id(Axis::X),
            found: k.shared("found", Scalar::I64, &[Self::ROOM]),
            count: k.shared("count", Scalar::I32, &[1]),
        };
        match self.output {
            Output::Sorted => {
                let values = k.view("values", self.reader.element, 2, Access::Write);
                let indices = k.view("indices", Scalar::I32, 2, Access::Write);
                let wanted = k.scalar_in("k", Type::I32, 1, i32::MAX.into());
                let writer = writer();
                writer.select(keys, wanted, &|first, count| {
                    k.range(writer.thread, count).step(self.threads).each(|rank| {
                        let (key, column) = unpair(writer.found.at([rank]).load());
                        values.at([writer.row, first + rank]).store(value(key).to(self.reader.element));
                        indices.at([writer.row, first + rank]).store(column);
                    });
                });
            }
            Output::Drawn => {
                let output = k.view("output", Scalar::I32, 1, Access::Write);
                let seeds = k.view("seeds", Scalar::I64, 1, Access::Read);
                let scale = k.scalar("scale", Type::F32);
                let wanted = k.scalar_in("k", Type::I32, 1, Self::ROOM.into());
                let writer = writer();
                writer.select(keys, wanted, &|_, count| writer.draw(output, seeds, scale, count));
            }
        }
        block.kernel()
    }
}

impl<'b> Writer<'b> {
    /// Finds the greatest, sorts them and hands them to `use_them`: the rank of the first in `found`, and how many are there.
    fn select(&self, keys: Option<PlaceRef<'b>>, wanted: Val<'b>, use_them: &dyn Fn(Val<'b>, Val<'b>)) {
        let k = self.k;
        let room = Select::ROOM as i32;
        let first = k.i32(0);
        match (self.of.source, keys) {
            (Source::Groups(held), Some(keys)) => {
                let bound = self.bound(keys, held, wanted);
                self.clear();
                self.collect_groups(keys, bound);
                k.if_(self.count.at([first]).load_uniform().gt(room), || {
                    let exact = self.nth(wanted, k.i64(i64::MAX));
                    self.clear();
                    self.collect(exact, k.i64(i64::MAX));
                });
                self.sort();
                use_them(first, wanted);
            }
            (Source::All, _) => {
                self.clear();
                self.collect(k.i64(NONE + 1), k.i64(i64::MAX));
                self.sort();
                use_them(first, wanted);
            }
            _ => {
                k.range(first, wanted).step(room).fold(k.i64(i64::MAX), |first, last| {
                    let count = (wanted - first).min(room);
                    let exact = self.nth(count, last);
                    self.clear();
                    self.collect(exact, last);
                    self.sort();
                    use_them(first, count);
                    let last = self.found.at([count - 1]).load();
                    k.barrier();
                    last
                });
            }
        }
    }

    /// A key that at least `wanted` groups reach, and almost no more.
    fn bound(&self, keys: PlaceRef<'b>, held: u32, wanted: Val<'b>) -> Val<'b> {
        let k = self.k;
        let threads = self.of.threads;
        let groups = keys.extent(1);
        // As unsigned numbers, the greatest of each thread's groups. Groups that there are not have 0.
        let start = vec![k.i32(0); held as usize];
        let held =
            k.range(self.thread.to(Scalar::I64), groups).step(threads * held).fold(start, |at, held| {
                let next = held.iter().zip(0u32..).map(|(so_far, step)| {
                    let at = at + i64::from(step * threads);
                    let key = k.if_else(at.lt(groups), || keys.at([self.row, at]).load(), || k.i32(i32::MIN));
                    so_far.max_u(key ^ i32::MIN)
                });
                next.collect::<Vec<_>>()
            });
        const DIGITS: i32 = 18;
        let counts = k.shared("counts", Scalar::I32, &[DIGITS as u32]);
        k.if_(self.thread.lt(DIGITS), || counts.at([self.thread]).store(0));
        k.barrier();
        let bound = k.range(k.i32(0), DIGITS).fold(k.i32(0), |digit, bound| {
            let next = bound | k.i32(1) << (k.i32(31) - digit);
            let reach = held.iter().map(|key| key.ge_u(next).to(Scalar::I32)).reduce(|a, b| a + b);
            let reach = reach.unwrap_or(k.i32(0)).warp_add();
            k.if_(k.lane_id().eq(0), || {
                counts.at([digit]).atomic_add(reach);
            });
            k.barrier();
            counts.at([digit]).load().ge(wanted).select(next, bound)
        });
        bound ^ i32::MIN
    }

    /// Begins to collect.
    fn clear(&self) {
        let k = self.k;
        k.barrier();
        k.if_(self.thread.eq(0), || self.count.at([k.i32(0)]).store(0));
        k.barrier();
    }

    fn push(&self, is_one: Val<'b>, pair: Val<'b>) {
        let k = self.k;
        k.if_(is_one, || {
            let place = self.count.at([k.i32(0)]).atomic_add(1);
            k.if_(place.lt_u(Select::ROOM), || self.found.at([place]).store(pair));
        });
    }

    /// Calls `each` for what a lane has of a chunk, with the pair.
    fn pairs(&self, place: (PlaceRef<'b>, Val<'b>, Val<'b>), each: &dyn Fn(Val<'b>)) {
        let columns = self.x.extent(1).to(Scalar::I32);
        self.of.reader.fold_part(place, (self.nan, 16), (), |(), read| {
            for piece in read {
                let inside = piece.first.lt(columns);
                for (x, column) in piece.each() {
                    each(inside.select(pair(self.nan.key(x), column), self.k.i64(NONE)));
                }
            }
        });
    }

    /// Collects the elements of groups which reach a key that reach it themselves.
    fn collect_groups(&self, keys: PlaceRef<'b>, bound: Val<'b>) {
        let k = self.k;
        let least = (bound.to(Scalar::I64) << 32) + 1;
        k.range(self.thread.to(Scalar::I64), keys.extent(1)).step(self.of.threads).each(|group| {
            k.if_(keys.at([self.row, group]).load().ge(bound), || {
                let group = group.to(Scalar::I32);
                let first = (group >> 5) * super::chunk::CHUNK + (group & 31) * self.of.reader.vector;
                let place = (self.x, self.row, first);
                self.pairs(place, &|pair| self.push(pair.ge(least), pair));
            });
        });
    }

    /// Calls `each` for all pairs of the row, by whole warps.
    fn scan(&self, each: &dyn Fn(Val<'b>)) {
        let k = self.k;
        k.range(k.warp_id(), chunks(self.x)).step(self.of.threads / 32).each(|chunk| {
            self.pairs((self.x, self.row, self.of.reader.first(chunk)), each);
        });
    }

    /// Collects pairs from `least` up to, not including, `end`.
    fn collect(&self, least: Val<'b>, end: Val<'b>) {
        self.scan(&|pair| self.push(pair.ge(least) & pair.lt(end), pair));
    }

    /// The `rank`-th greatest of the pairs below `end`.
    fn nth(&self, rank: Val<'b>, end: Val<'b>) -> Val<'b> {
        let k = self.k;
        let bins = k.shared("bins", Scalar::I32, &[256]);
        let lane = k.lane_id();
        let (nth, _) = k.range(k.i32(0), 8).fold((k.i64(0), rank), |digit, (prefix, rank)| {
            let shift = (k.i32(56) - digit * 8).to(Scalar::I64);
            k.if_(self.thread.lt(256), || bins.at([self.thread]).store(0));
            k.barrier();
            self.scan(&|pair| {
                // Of pairs that begin as the prefix does, the next digit; of others more than that.
                let rest = (pair ^ NONE ^ prefix).shr_u(shift);
                let bin = (rest.lt_u(256) & pair.lt(end)).select(rest.to(Scalar::I32), k.i32(256));
                // Digits are often the same throughout a warp.
                let same = bin.eq(bin.shuffle(0)).all();
                let counts = bin.lt(256) & (!same | lane.eq(0));
                k.if_(counts, || {
                    bins.at([bin]).atomic_add(same.select(k.i32(32), k.i32(1)));
                });
            });
            k.barrier();
            // Each warp by itself: a lane has eight bins, and behind it are greater ones.
            let counts: Vec<_> = (0..8).map(|bin| bins.at([lane * 8 + bin]).load()).collect();
            let of_lane = counts.iter().copied().reduce(|a, b| a + b).unwrap_or(k.i32(0));
            let mut from = of_lane;
            for distance in [1, 2, 4, 8, 16] {
                let above = from.shuffle_down(distance);
                from = (lane + distance).lt(32).select(from + above, from);
            }
            let here = k.i32(31) - from.ge(rank).ballot().clz();
            let mut above = from - of_lane;
            let (mut bin, mut left) = (lane * 8, rank - above);
            let mut is_open = k.bool(true);
            for (at, count) in (0i32..8).zip(&counts).rev() {
                let is_it = is_open & (above + *count).ge(rank);
                bin = is_it.select(lane * 8 + at, bin);
                left = is_it.select(rank - above, left);
                is_open = is_open & !is_it;
                above = above + *count;
            }
            let (bin, left) = (bin.shuffle(here), left.shuffle(here));
            k.barrier();
            (prefix | bin.to_u(Scalar::I64) << shift, left)
        });
        nth ^ NONE
    }

    /// Sorts what was found, the greatest first.
    fn sort(&self) {
        let k = self.k;
        let threads = self.of.threads;
        let count = self.count.at([k.i32(0)]).load_uniform().min(Select::ROOM as i32).max(2);
        let size = k.i32(1) << (k.i32(32) - (count - 1).clz());
        k.range(self.count.at([k.i32(0)]).load() + self.thread, size)
            .step(threads)
            .each(|place| self.found.at([place]).store(NONE));
        k.barrier();
        // Bitonic.
        k.while_(
            k.i32(2),
            |run| run.le(size),
            |run| {
                k.while_(
                    run.shr_u(1),
                    |stride| stride.gt(0),
                    |stride| {
                        k.range(self.thread, size.shr_u(1)).step(threads).each(|at| {
                            let low = at & (stride - 1);
                            let a = (at - low) * 2 + low;
                            let b = a + stride;
                            let falls = (a & run).eq(0);
                            let (first, second) = (self.found.at([a]).load(), self.found.at([b]).load());
                            let (greater, lesser) = (first.max(second), first.min(second));
                            self.found.at([a]).store(falls.select(greater, lesser));
                            self.found.at([b]).store(falls.select(lesser, greater));
                        });
                        k.barrier();
                        stride.shr_u(1)
                    },
                );
                run << 1
            },
        );
    }

    /// Draws one of the first `count` that were found.
    fn draw(&self, output: PlaceRef<'b>, seeds: PlaceRef<'b>, scale: Val<'b>, count: Val<'b>) {
        let k = self.k;
        k.if_(k.warp_id().eq(0), || {
            let greatest = unpair(self.found.at([k.i32(0)]).load()).0;
            let weight = |rank: Val<'b>| {
                let key = unpair(self.found.at([rank]).load()).0;
                rank.lt(count).select(weight(value(key), value(greatest), scale), k.i64(0))
            };
            let ranks = || k.range(k.i32(0), count).step(32);
            let lane = k.lane_id();
            let total = ranks().fold(k.i64(0), |rank, sum| sum + weight(rank + lane)).warp_add();
            let [target, _] = philox(seeds.at([self.row]).load(), k.i32(0));
            let target = target.mulhi_u(total);
            let Found { at: rank, .. } =
                ranks().fold(Found::none(k), |rank, so_far| find(so_far, target, rank, weight(rank + lane)));
            let column = unpair(self.found.at([rank.max(0)]).load()).1;
            let drawn = (rank.ge(0) & greatest.gt(LEAST_KEY)).select(column, k.i32(-1));
            k.if_(lane.eq(0), || output.at([self.row]).store(drawn));
        });
    }
}
