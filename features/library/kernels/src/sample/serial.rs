//! The greatest of each row by one thread, as a processor does it.
//!
//! Almost no element of a row is greater than the greatest so far, or than the least of those that are kept. So elements are compared with
//! that bound in vectors, many at a time, and looked at one by one only where one of them passes it.

use super::numbers::{NONE, Nan, pair, unpair, value};
use vm_ir::builder::{BuildError, Builder, IRBlock, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// What is found of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Serially {
    /// Its greatest: `output` of i32, `[rows]`, as [`Best`](super::Best) writes it.
    Best(Nan),
    /// The greatest pair of key and column of each of its parts: `pairs` of i64, `[rows, parts]`. The grid has the parts along y.
    Parts(Nan),
    /// Its k greatest, as [`Select`](super::Select) writes them: `values`, `indices` and `k`, of which shared memory has room for this power of
    /// two.
    Sorted(u32),
}

/// A variant. Parameters: the logits, and what is written. A block, which is a thread, has a row or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Serial {
    /// What the logits are: f32, bf16 or f16.
    pub element: Scalar,
    /// What is found of each row.
    pub what: Serially,
}

/// Vectors of a group, whose elements are looked at one by one if one of them passes the bound.
const GROUP: i32 = 4;
/// Groups of a tile, all of which are compared before that.
const TILE: i32 = 4;

/// A kernel being written.
#[derive(Clone, Copy)]
struct Writer<'b> {
    k: Builder<'b>,
    x: PlaceRef<'b>,
    row: Val<'b>,
    /// Elements of a vector of 16 bytes.
    lanes: u8,
}

impl Serial {
    /// The greatest k.
    pub const MOST: u64 = 2047;

    /// What finds the k greatest, at most [`Serial::MOST`].
    pub fn sorted(element: Scalar, k: u64) -> Serial {
        let room = (k.min(Serial::MOST) as u32).max(31).next_power_of_two();
        Serial { element, what: Serially::Sorted(room) }
    }

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let what = match self.what {
            Serially::Best(nan) => format!("argmax_{}", nan.name()),
            Serially::Parts(nan) => format!("best_{}", nan.name()),
            Serially::Sorted(room) => format!("topk_{room}"),
        };
        format!("serial_{what}_{}", self.element)
    }

    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name());
        let ty = ViewType::new(self.element, 2, Access::Read).named(&["rows", "columns"]);
        let x = k.view_of("logits", ty);
        let lanes = (16 / self.element.bytes()).clamp(4, 8) as u8;
        let row = || k.block_id(Axis::X).to(Scalar::I64).named("row");
        match self.what {
            Serially::Best(nan) => {
                let output =
                    k.view_of("output", ViewType::new(Scalar::I32, 1, Access::Write).named(&["rows"]));
                let writer = Writer { k, x, row: row(), lanes };
                k.if_(writer.row.lt(x.extent(0)), || {
                    let (best, column) = writer.best(nan, k.i32(0), writer.columns());
                    let column = match nan {
                        Nan::Greatest => column,
                        Nan::Least => best.gt(f32::NEG_INFINITY).select(column, k.i32(-1)),
                    };
                    output.at([writer.row]).store(column);
                });
            }
            Serially::Parts(nan) => {
                let pairs = k
                    .view_of("pairs", ViewType::new(Scalar::I64, 2, Access::Write).named(&["rows", "parts"]));
                let writer = Writer { k, x, row: row(), lanes };
                k.if_(writer.row.lt(x.extent(0)), || {
                    // Whole tiles, as equal as may be.
                    let tile = i64::from(writer.tile());
                    let tiles = (x.extent(1) + (tile - 1)).div_u(tile);
                    let each = (tiles + (pairs.extent(1) - 1)).div_u(pairs.extent(1)) * tile;
                    let part = k.block_id(Axis::Y).to(Scalar::I64);
                    let columns = x.extent(1);
                    let begin = (part * each).min(columns).to(Scalar::I32);
                    let end = ((part + 1) * each).min(columns).to(Scalar::I32);
                    let (best, column) = writer.best(nan, begin, end);
                    let of_part = begin.lt(end).select(pair(nan.key(best), column), k.i64(NONE));
                    pairs.at([writer.row, part]).store(of_part);
                });
            }
            Serially::Sorted(room) => {
                let matrix = |name, element| {
                    k.view_of(name, ViewType::new(element, 2, Access::Write).named(&["rows", "k"]))
                };
                let (values, indices) = (matrix("values", self.element), matrix("indices", Scalar::I32));
                let wanted = k.scalar_in("k", Type::I32, 1, room.into());
                let heap = Heap { k, of: k.shared("heap", Scalar::I64, &[2 * room + 2]) };
                let writer = Writer { k, x, row: row(), lanes };
                k.if_(writer.row.lt(x.extent(0)), || {
                    writer.fill(heap, wanted);
                    k.range(k.i32(0), wanted).each(|number| {
                        let (key, column) = unpair(heap.of.at([k.i32(0)]).load());
                        let rank = (wanted - 1) - number;
                        values.at([writer.row, rank]).store(value(key).to(self.element));
                        indices.at([writer.row, rank]).store(column);
                        heap.replace(k.i64(i64::MAX));
                    });
                });
            }
        }
        block.kernel()
    }
}

impl<'b> Writer<'b> {
    fn columns(self) -> Val<'b> {
        self.x.extent(1).to(Scalar::I32)
    }

    /// Elements of a tile.
    fn tile(self) -> i32 {
        TILE * GROUP * i32::from(self.lanes)
    }

    /// So many vectors from a column on, as f32.
    fn vectors(self, column: Val<'b>, count: i32) -> Vec<Val<'b>> {
        let places = (0..count).map(|at| if at == 0 { column } else { column + at * i32::from(self.lanes) });
        places.map(|at| self.x.at([self.row, at]).load_vector(self.lanes).to(Scalar::F32)).collect()
    }

    fn element(self, column: Val<'b>) -> Val<'b> {
        self.x.at([self.row, column]).load().to(Scalar::F32)
    }

    /// Does one of these pass the bound?
    fn passes(self, nan: Nan, vectors: &[Val<'b>], bound: Val<'b>) -> Val<'b> {
        let k = self.k;
        let bound = bound.splat(self.lanes);
        // A NaN is neither greater nor less.
        let masks = vectors.iter().map(|x| match nan {
            Nan::Greatest => x.le(bound),
            Nan::Least => x.gt(bound),
        });
        let ty = Type::vector(Scalar::I64, self.lanes / 2).unwrap_or(Type::I64);
        let lanes = |mask: Val<'b>| {
            let wide = mask.to_u(Scalar::I32).bitcast(ty);
            (0..self.lanes / 2).map(move |lane| wide.lane(lane))
        };
        match nan {
            Nan::Greatest => {
                let all = masks.reduce(|a, b| a & b).unwrap_or(k.bool(true));
                lanes(all).reduce(|a, b| a & b).unwrap_or(k.i64(0)).ne(1i64 << 32 | 1)
            }
            Nan::Least => {
                let any = masks.reduce(|a, b| a | b).unwrap_or(k.bool(false));
                lanes(any).reduce(|a, b| a | b).unwrap_or(k.i64(0)).ne(0)
            }
        }
    }

    /// The greatest of some columns and the first that has it. A row of none but −∞ has its first column; one with NaNs besides, which are
    /// least, any.
    fn best(self, nan: Nan, begin: Val<'b>, end: Val<'b>) -> (Val<'b>, Val<'b>) {
        let k = self.k;
        let tile = self.tile();
        let infinity = k.f32(f32::INFINITY);
        let bound = |best: Val<'b>| best.ne(best).select(infinity, best);
        // The greatest so far, and the first column of its tile.
        let start = (k.f32(f32::NEG_INFINITY), begin);
        let whole = end & -tile;
        let state = k.range(begin, whole).step(tile).fold(start, |column, (best, at)| {
            let vectors = self.vectors(column, TILE * GROUP);
            k.if_else(
                self.passes(nan, &vectors, bound(best)),
                || {
                    let of_tile = vectors.iter().copied().reduce(|a, b| nan.greater(a, b)).unwrap_or(best);
                    let lanes = (0..self.lanes).map(|lane| of_tile.lane(lane));
                    let of_tile = lanes.reduce(|a, b| nan.greater(a, b)).unwrap_or(best);
                    // Behind a NaN there is nothing greater.
                    (of_tile, best.ne(best).select(at, column))
                },
                || (best, at),
            )
        });
        let (best, at) = k.range(begin.max(whole), end).fold(state, |column, (best, at)| {
            let x = self.element(column);
            let passes = match nan {
                Nan::Greatest => best.eq(best) & !x.le(best),
                Nan::Least => x.gt(best),
            };
            (passes.select(x, best), passes.select(column, at))
        });
        let last = end - 1;
        let column = k.while_(
            at,
            |column| {
                let x = self.element(column);
                let is_it = match nan {
                    Nan::Greatest => x.eq(best) | x.ne(x),
                    Nan::Least => x.eq(best),
                };
                column.lt(last) & !is_it
            },
            |column| column + 1,
        );
        (best, column)
    }

    /// Fills a heap with the greatest pairs of the row.
    fn fill(self, heap: Heap<'b>, wanted: Val<'b>) {
        let k = self.k;
        k.range(k.i32(0), wanted).each(|at| heap.of.at([at]).store(NONE));
        k.range(wanted, wanted * 2 + 1).each(|at| heap.of.at([at]).store(i64::MAX));
        // What is not above it is in no case among them. There is none before so many are there, which NaN stands for.
        let bound = |least: Val<'b>| {
            let key = unpair(least).0;
            key.gt(f32::INFINITY.to_bits() as i32).select(k.f32(f32::INFINITY), value(key))
        };
        let take = |column: Val<'b>, least: Val<'b>| {
            let pair = pair(Nan::Greatest.key(self.element(column)), column);
            let push = || {
                heap.replace(pair);
                heap.of.at([k.i32(0)]).load()
            };
            k.if_else(pair.gt(least), push, || least)
        };
        let group = GROUP * i32::from(self.lanes);
        let of_group = |column: Val<'b>, least: Val<'b>| {
            let passes = self.passes(Nan::Greatest, &self.vectors(column, GROUP), bound(least));
            let each = || k.range(column, column + group).fold(least, take);
            k.if_else(passes, each, || least)
        };
        let of_tile = |column: Val<'b>, least: Val<'b>| {
            let passes = self.passes(Nan::Greatest, &self.vectors(column, TILE * GROUP), bound(least));
            let each = || k.range(column, column + self.tile()).step(group).fold(least, of_group);
            k.if_else(passes, each, || least)
        };
        let whole = self.columns() & -self.tile();
        let least = k.range(k.i32(0), whole).step(self.tile()).fold(k.i64(NONE), of_tile);
        k.range(whole, self.columns()).fold(least, take);
    }
}

/// Pairs in shared memory, the least first, none less than the one at half its place: a heap. Behind them stands what is greater than all.
#[derive(Clone, Copy)]
struct Heap<'b> {
    k: Builder<'b>,
    of: PlaceRef<'b>,
}

impl<'b> Heap<'b> {
    /// Puts a pair in the place of the least.
    fn replace(self, pair: Val<'b>) {
        let k = self.k;
        // The lesser of the two behind a place, and where it is.
        let behind = |at: Val<'b>| {
            let at = at * 2 + 1;
            let (a, b) = (self.of.at([at]).load(), self.of.at([at + 1]).load());
            let second = b.lt(a);
            (second.select(at + 1, at), second.select(b, a))
        };
        let first = k.i32(0);
        let (next, least) = behind(first);
        let (at, _, _) = k.while_(
            (first, next, least),
            |(_, _, least)| least.lt(pair),
            |(at, next, least)| {
                self.of.at([at]).store(least);
                let (further, least) = behind(next);
                (next, further, least)
            },
        );
        self.of.at([at]).store(pair);
    }
}
