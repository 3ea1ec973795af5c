//! Long rows: launches count the values of a digit in each chunk of a row, and then move the elements of each chunk to their places by it.

use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use super::block::Block;
use super::key::{DIGITS, Key};
use crate::emit::THREADS;
use crate::error::Result;

/// Elements of a thread that are moved at once.
pub(super) const ITEMS: u32 = 16;
/// Elements of a block that are moved at once. Chunks are whole numbers of them.
pub(super) const TILE: u64 = (ITEMS * THREADS) as u64;

/// Elements of a thread that are stored one behind the other.
const TOGETHER: usize = 8;
/// The most tiles of a chunk.
pub(super) const MOST: u64 = 1 << 19;

/// Threads of a block that counts, each with counters of its own, of a byte.
const COUNTING: u32 = 128;
/// Tiles until a counter could overflow.
const TILES: u64 = 255 / (TILE / COUNTING as u64);

/// Blocks that move and that a unit has room for, as registers and shared memory allow.
pub(super) fn resident(key: Key, wide: bool) -> u32 {
    if wide || key.register() == Scalar::I64 { 3 } else { 4 }
}

/// What is moved with the elements.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    /// Nothing.
    Alone,
    /// Where they are.
    Places,
    /// Where they were at first.
    Origins,
}

/// A variant of the kernels.
#[derive(Clone, Copy)]
pub(super) struct Pass {
    pub(super) key: Key,
    /// Are there rows too long for places of 32 bits?
    pub(super) wide: bool,
    /// A power of two that divides where rows begin, in elements.
    pub(super) multiple: u64,
}

impl Pass {
    /// What places and counts are.
    pub(super) fn place(self) -> Scalar {
        if self.wide { Scalar::I64 } else { Scalar::I32 }
    }

    /// Elements that are counted by one load.
    pub(super) fn lanes(key: Key) -> u64 {
        16 / key.0.bytes()
    }

    fn rows<'b>(self, k: Builder<'b>, name: &str, scalar: Scalar, access: Access) -> PlaceRef<'b> {
        let dims = [Dim::ANY, Dim::Any { multiple: self.multiple as u32 }];
        let align = (self.multiple * u64::from(scalar.bytes())).min(16);
        let ty = ViewType::new(scalar, 2, access).with_dims(&dims).named(&["rows", "n"]);
        k.view_of(name, ty.aligned(align as u32))
    }

    fn counts<'b>(self, k: Builder<'b>, access: Access) -> PlaceRef<'b> {
        let dims = [Dim::ANY, Dim::Fixed(DIGITS.into()), Dim::ANY];
        let ty = ViewType::new(self.place(), 3, access).with_dims(&dims);
        k.view_of("counts", ty.named(&["rows", "", "chunks"]))
    }

    /// How often each digit is in each chunk. Parameters: `counts`, by rows, digits and chunks; the elements; where the digit is, what flips it, and how many tiles a
    /// chunk has.
    pub(super) fn count(self) -> Result<Kernel> {
        let block = IRBlock::new(GuestAddr(0));
        let k = block.builder();
        k.name("sort_count").block_size([COUNTING, 1, 1]);
        let counts = self.counts(k, Access::Write);
        let x = self.rows(k, "x", self.key.stored(), Access::Read);
        let numbers = Numbers::new(k);
        let chunk = numbers.chunk(k, counts);
        let (n, thread) = (x.extent(1), k.thread_id(Axis::X));
        // A word has the counters of four digits; those of a thread are in a bank of its own.
        let words = k.shared("words", Scalar::I32, &[DIGITS / 4, COUNTING]);
        let add = |bits: Val<'_>| {
            let digit = numbers.digit(self.key, bits.to_u(self.key.register()));
            let word = (digit >> 2, k.i32(1) << ((digit & 3) << 3));
            let counted = words.at([word.0, thread]).load() + word.1;
            words.at([word.0, thread]).store(counted);
        };
        let (lanes, tile) = (Self::lanes(self.key) as i64, TILE as i64);
        let (half, own) = (thread & 1, thread >> 1);
        let end = (chunk.first + numbers.tiles * tile).min(n);
        let last = chunk.first * 2 + ((end - chunk.first - 1) & -tile);
        let tiles = k.range(chunk.first, end).step(tile * TILES as i64);
        let zero = k.bits(Type::scalar_of(self.place()), 0);
        let totals = tiles.fold([zero; 2], |first, totals| {
            (0..DIGITS as i32 / 4).for_each(|word| words.at([k.i32(word), thread]).store(0));
            k.range(first, (first + tile * TILES as i64).min(end)).step(tile).each(|at| {
                // The last tile comes first: what is moved begins with the first one, which a cache then may still have.
                let tile_at = (last - at).max(0);
                let step = i64::from(COUNTING) * lanes;
                // In a branch of its own, loads of whole vectors need no check.
                let whole = || {
                    let at = tile_at + thread.to(Scalar::I64) * lanes;
                    let all = (0..tile / step)
                        .map(|load| x.at([chunk.row, at + load * step]).load_vector(lanes as u8));
                    for vector in all.collect::<Vec<_>>() {
                        (0..lanes as u8).for_each(|lane| add(vector.lane(lane)));
                    }
                };
                k.if_else((tile_at + tile).le(n), whole, || {
                    k.range(tile_at + thread.to(Scalar::I64), (tile_at + tile).min(n))
                        .step(i64::from(COUNTING))
                        .each(|at| add(x.at([chunk.row, at]).load()));
                });
            });
            k.barrier();
            // Two threads add up the counters of four digits, each those of half of the threads, from another bank each; then each has two digits.
            let sums =
                k.range(k.i32(0), COUNTING as i32 / 2).unroll(16).fold([k.i32(0); 2], |at, [even, odd]| {
                    let column =
                        half * (COUNTING as i32 / 2) + ((at + k.lane_id()) & (COUNTING as i32 / 2 - 1));
                    let word = words.at([own, column]).load();
                    [even + (word & 0x00ff_00ff), odd + (word.shr_u(8) & 0x00ff_00ff)]
                });
            let [even, odd] = sums.map(|sum| sum + sum.shuffle_xor(1));
            let both = half.eq(0).select(even, odd);
            k.barrier();
            [totals[0] + (both & 0xffff).to(self.place()), totals[1] + both.shr_u(16).to(self.place())]
        });
        for (total, digit) in totals.into_iter().zip([0, 2]) {
            counts.at([chunk.row, own * 4 + half + digit, chunk.number]).store(total);
        }
        Ok(block.kernel()?)
    }

    /// Moves the elements of chunks. Parameters: the elements by their digit and what is moved with them; `counts` up to each chunk; the elements, and with
    /// [`Moved::Origins`] those; and the numbers as before.
    pub(super) fn scatter(self, moved: Moved) -> Result<Kernel> {
        let block = IRBlock::new(GuestAddr(0));
        self.write_scatter(block.builder(), moved);
        Ok(block.kernel()?)
    }

    fn write_scatter<'b>(self, k: Builder<'b>, moved: Moved) {
        k.name("sort_scatter");
        let y = self.rows(k, "y", self.key.stored(), Access::Write);
        let to = (moved != Moved::Alone).then(|| self.rows(k, "to", self.place(), Access::Write));
        let counts = self.counts(k, Access::Read);
        let x = self.rows(k, "x", self.key.stored(), Access::Read);
        let from = (moved == Moved::Origins).then(|| self.rows(k, "from", self.place(), Access::Read));
        let numbers = Numbers::new(k);
        let chunk = numbers.chunk(k, counts);
        // Both kinds of elements of a tile are in shared memory at once.
        let items = if self.wide { ITEMS / 2 } else { ITEMS };
        let (place, register, tile) = (self.place(), self.key.register(), i64::from(items * THREADS));
        let threads = Block::new(k, items);
        k.resident_blocks(resident(self.key, self.wide));
        let exchange = k.shared("exchange", register, &[tile as u32]);
        let starts = k.shared("starts", place, &[DIGITS]);
        let digit = threads.thread;
        let all = counts.at([chunk.row, digit, counts.extent(2) - 1]).load();
        let before = counts.at([chunk.row, digit, (chunk.number - 1).max(0)]).load();
        let before = chunk.number.gt(0).select(before, k.bits(before.ty(), 0));
        let next = threads.sum_before("digits_before", all) + before;
        let n = x.extent(1);
        let end = (chunk.first + numbers.tiles * TILE as i64).min(n);
        k.range(chunk.first, end).step(tile).fold(next, |first, next| {
            let count = (n - first).min(tile).to(Scalar::I32);
            let places = threads.places();
            // In a branch of its own, loads of a whole tile need no check.
            let load = |view: PlaceRef<'b>| {
                let load = || -> Vec<Val<'b>> {
                    let places = threads.places_from(first);
                    places.into_iter().map(|at| view.at([chunk.row, at]).load()).collect()
                };
                k.if_else((first + tile).le(n), load, load)
            };
            let elements: Vec<_> = load(x).into_iter().map(|bits| bits.to_u(register)).collect();
            // What is behind the last element stays there.
            let digits = places.iter().zip(&elements);
            let digits =
                digits.map(|(p, bits)| p.lt(count).select(numbers.digit(self.key, *bits), k.i32(255)));
            let ranked = threads.ranked(&digits.collect::<Vec<_>>());
            starts.at([digit]).store(next - ranked.first.to(place));
            let put = |exchange: PlaceRef<'b>, values: Vec<Val<'b>>| {
                ranked.to.iter().zip(values).for_each(|(to, value)| exchange.at([*to]).store(value));
            };
            put(exchange, elements);
            let moved = to.map(|to| {
                let exchange = k.shared("origins", place, &[tile as u32]);
                let origins = match from {
                    Some(from) => load(from),
                    None => threads.places_from(first.to(place)),
                };
                put(exchange, origins);
                (to, exchange)
            });
            k.barrier();
            // Of neighbours in the tile most go to neighbouring places.
            for some in threads.neighbours().chunks(TOGETHER) {
                let elements: Vec<_> = some.iter().map(|p| exchange.at([*p]).load()).collect();
                let digits = elements.iter().map(|bits| numbers.digit(self.key, *bits));
                let starts: Vec<_> = digits.map(|digit| starts.at([digit]).load()).collect();
                let origins = |exchange: PlaceRef<'b>| some.iter().map(move |p| exchange.at([*p]).load());
                let origins = moved.map(|(to, exchange)| (to, origins(exchange).collect::<Vec<_>>()));
                // What is behind the last element goes nowhere.
                let nowhere = k.bits(Type::scalar_of(place), u64::MAX);
                let goals = some.iter().zip(starts);
                let goals = goals.map(|(p, start)| p.lt(count).select(start + p.to(place), nowhere));
                for ((at, goal), bits) in goals.enumerate().zip(elements) {
                    y.at([chunk.row, goal]).store(bits.to(self.key.stored()));
                    if let Some((to, origins)) = &origins {
                        to.at([chunk.row, goal]).store(origins[at]);
                    }
                }
            }
            next + ranked.count.to(place)
        });
    }
}

/// The numbers among the parameters.
struct Numbers<'b> {
    shift: Val<'b>,
    flip: Val<'b>,
    tiles: Val<'b>,
}

/// A block's chunk.
struct Chunk<'b> {
    row: Val<'b>,
    number: Val<'b>,
    first: Val<'b>,
}

impl<'b> Numbers<'b> {
    fn new(k: Builder<'b>) -> Self {
        Self {
            shift: k.scalar_in("shift", Type::I32, 0, 56),
            flip: k.scalar_in("flip", Type::I32, 0, 255),
            tiles: k.scalar_in("tiles", Type::I64, 1, MOST as i64),
        }
    }

    fn digit(&self, key: Key, bits: Val<'b>) -> Val<'b> {
        key.digit(bits, self.shift, self.flip)
    }

    fn chunk(&self, k: Builder<'b>, counts: PlaceRef<'b>) -> Chunk<'b> {
        let number = k.block_id(Axis::X).to(Scalar::I64);
        let chunks = counts.extent(2).max(1);
        let (row, number) = (number.div_u(chunks), number.rem_u(chunks));
        Chunk { row, number, first: number * self.tiles * TILE as i64 }
    }
}
