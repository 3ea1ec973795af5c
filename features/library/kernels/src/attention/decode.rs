//! Attention of a few queries to many keys, as when a model generates: split along the keys, with a paged cache or without.
//!
//! All queries of all heads that share a head of keys are rows of one tile, so keys and values are read once for them. Blocks
//! divide the keys of a sequence ("Flash-Decoding", Dao et al., 2023); a second kernel joins what they found by the logarithms
//! of their sums. A paged cache is that of vLLM (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
//! PagedAttention", 2023).

use super::plan::{narrow, wide};
use super::{LOG2_E, UNSEEN, seen_or_zero};
use vm_ir::builder::{BuildError, Builder, ChannelRef, FragmentRef, IRBlock, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::types::Type;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant.
///
/// With H heads of keys, and R rows for each, which are the queries of the heads that share it:
///
/// | view | is |
/// | --- | --- |
/// | `q`, `o` | `[batch, H, R, D]`; row r is query r mod `queries` of the head r / `queries` among those that share the head of keys |
/// | `k`, `v` | `[batch, H, tokens, D]`, or, [`paged`](Self::paged), `[pages, H, page size, D]`; a page size is a multiple of [`keys`](Self::keys), or, [`odd`](Self::odd), any |
/// | `pages` | i32 `[batch, pages of a sequence]`: which page has the sequence's tokens from that number times the page size on |
/// | `lengths` | i32 `[batch]`: the tokens of a sequence, with those of the queries |
/// | `parts`, `sums` | f32 `[splits, batch · H, R, D]` and `[splits, batch · H, R]`: what each split found, and the logarithms of its sums |
///
/// Query i sees the keys up to its own place, `lengths` − `queries` + i; who sees none gets zeros. Strides are free as long as a
/// row's elements lie side by side and rows begin on multiples of 16 bytes: a cache that lies as `[pages, page size, H, D]` is
/// launched as it is, with its dimensions named in the order above. A page that is none has keys and values of zeros. What lies behind a
/// sequence's last token, to the end of a copy, is multiplied by 0: it must be finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Decode {
    /// What Q, K, V and O hold: f16, bf16 or f32.
    pub element: Scalar,
    /// D, the elements of a query, a key and a value: a multiple of 64 up to 256.
    pub dim: u32,
    /// Are keys and values in pages?
    pub paged: bool,
    /// Are pages of any number of tokens? A copy then ends with its page.
    pub odd: bool,
    /// Rows of a block.
    pub rows: u32,
    /// Keys that are copied at once: a multiple of 16 that divides the page size, if that is not [`odd`](Self::odd).
    pub keys: u32,
    /// How many times as many a step of softmax has.
    pub boxes: u32,
    /// Copies of keys, and of values, that are on their way or in use: at least [`boxes`](Self::boxes).
    pub stages: u32,
}

/// The most splits of a launch.
const MOST_SPLITS: u64 = 64;

/// Splits whose findings are loaded at a time: a divisor of 32.
const AT_ONCE: i32 = 8;

/// Threads of a block of the kernel that joins, a warp for each row.
const THREADS: u32 = 256;

/// What the kernel has in its head.
struct Head<'b> {
    b: Builder<'b>,
    from_q: ChannelRef<'b>,
    from_k: ChannelRef<'b>,
    from_v: ChannelRef<'b>,
    /// By box of keys: the scores, and the weights as a factor.
    scores: Vec<FragmentRef<'b>>,
    weights: Vec<FragmentRef<'b>>,
    /// By row: how many keys it sees.
    limit: FragmentRef<'b>,
    greatest: FragmentRef<'b>,
    sum: FragmentRef<'b>,
    shrink: FragmentRef<'b>,
    next: FragmentRef<'b>,
    values: FragmentRef<'b>,
    scale: Val<'b>,
}

impl Decode {
    /// The variant for a cache in pages of as many tokens; 0 for one that is not paged.
    pub const fn of(dim: u32, page: u32) -> Decode {
        let keys = match page {
            page if page % 64 == 0 => 64,
            page if page % 32 == 0 => 32,
            _ => 16,
        };
        let (boxes, stages) = match (keys, dim > 128) {
            (64, false) => (1, 4),
            (64, true) => (1, 2),
            (keys, false) => (64 / keys, 256 / keys),
            (keys, true) => (64 / keys, 128 / keys),
        };
        Decode {
            element: Scalar::Bf16,
            dim,
            paged: page > 0,
            odd: !page.is_multiple_of(16),
            rows: 64,
            keys,
            boxes,
            stages,
        }
    }

    /// The variant for less shared memory: that of sm_89, or of two blocks at a time on Hopper.
    pub const fn small(dim: u32, page: u32) -> Decode {
        let of = Decode::of(dim, page);
        let less = if of.stages / 2 > of.boxes { of.stages / 2 } else { of.boxes };
        Decode { stages: less, ..of }
    }

    /// The variant for processors, of f32.
    pub const fn cpu(dim: u32, page: u32) -> Decode {
        let of = Decode::of(dim, page);
        Decode { element: Scalar::F32, rows: 16, stages: of.boxes, ..of }
    }

    /// How many splits a launch has best, on a device that runs `resident` blocks at a time: those whose waves of blocks take the
    /// fewest steps, where each split has at least four steps to do. A wave takes about three more, to begin and to end; and as what
    /// splits find is to be joined, more of them must save a thirty-second.
    pub const fn splits(&self, resident: u64, blocks_of_a_split: u64, longest: u64) -> u32 {
        const BEGIN: u64 = 3;
        let resident = if resident == 0 { 1 } else { resident };
        let step = self.keys as u64 * self.boxes as u64;
        let steps = longest.div_ceil(if step == 0 { 1 } else { step });
        let (mut best, mut least, mut splits) = (1, u64::MAX, 1);
        while splits == 1 || splits <= MOST_SPLITS && 4 * splits <= steps {
            let waves = blocks_of_a_split.saturating_mul(splits).div_ceil(resident);
            let cost = waves.saturating_mul(steps.div_ceil(splits).saturating_add(BEGIN));
            if cost.saturating_add(cost / 32) < least {
                (best, least) = (splits, cost);
            }
            splits += 1;
        }
        best as u32
    }

    /// The name of a kernel of the variant, which tells it from all others.
    pub(super) fn name(&self, kernel: &str) -> String {
        let Decode { element, dim, paged, odd, rows, keys, boxes, stages } = self;
        let paged = match (paged, odd) {
            (false, _) => "",
            (true, false) => "_paged",
            (true, true) => "_paged_odd",
        };
        format!("attention_{kernel}_{element}_d{dim}{paged}_{rows}x{keys}x{boxes}_s{stages}")
    }

    fn view<'b>(&self, b: Builder<'b>, name: &str, element: Scalar, access: Access) -> PlaceRef<'b> {
        let dims = [Dim::ANY, Dim::ANY, Dim::ANY, Dim::Fixed(self.dim.into())];
        b.view_of(name, ViewType::new(element, 4, access).with_dims(&dims).aligned(16))
    }

    /// The first kernel. Its parameters: `q`, `k`, `v`, `pages` if it is [`paged`](Self::paged), `lengths`, `parts`, `sums`, `scale`
    /// (f32, above 0) and `queries` (i32, at least 1). It has as many blocks along x as there are splits, along y a block for each
    /// [`rows`](Self::rows) rows of each head of keys, and along z one for each sequence.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let b = block.builder();
        b.name(&self.name("decode")).tile_groups(1);
        let Decode { element, dim, rows, keys, stages, .. } = *self;
        let [q, k, v] = ["q", "k", "v"].map(|name| self.view(b, name, element, Access::Read));
        let pages = self.paged.then(|| b.view("pages", Scalar::I32, 2, Access::Read));
        let lengths = b.view("lengths", Scalar::I32, 1, Access::Read);
        let parts = self.view(b, "parts", Scalar::F32, Access::Write);
        let sums = b.view("sums", Scalar::F32, 3, Access::Write);
        let scale = b.scalar("scale", Type::F32);
        let queries = b.scalar("queries", Type::I32);
        let column = |name, element| b.column(name, element, rows);
        let of_boxes = |name: &str, element| -> Vec<_> {
            (0..self.boxes).map(|at| b.fragment(&format!("{name}_{at}"), element, [rows, keys])).collect()
        };
        let scores = of_boxes("scores", Scalar::F32);
        let weights = if element == Scalar::F32 { scores.clone() } else { of_boxes("weights", element) };
        let head = Head {
            b,
            from_q: b.channel("from_q", element, [rows, dim], 1),
            from_k: b.channel("from_k", element, [keys, dim], stages),
            from_v: b.channel("from_v", element, [keys, dim], stages),
            scores,
            weights,
            limit: column("limit", Scalar::I32),
            greatest: column("greatest", Scalar::F32),
            sum: column("sum", Scalar::F32),
            shrink: column("shrink", Scalar::F32),
            next: column("next", Scalar::F32),
            values: b.fragment("values", Scalar::F32, [rows, dim]),
            scale: (scale * LOG2_E).named("scale2"),
        };
        let [split, across, sequence] = [Axis::X, Axis::Y, Axis::Z].map(|axis| b.block_id(axis));
        let tiles = (q.extent(2) + i64::from(rows - 1)) / i64::from(rows);
        let of_head = (wide(across) / tiles.max(1)).named("head");
        let row = ((wide(across) - of_head * tiles) * i64::from(rows)).named("row");
        let (split, sequence) = (wide(split), wide(sequence).named("sequence"));
        let page_size = narrow(k.extent(2)).max(1);
        // Keys are counted as if each page were of whole copies.
        let counted = match self.odd {
            true => (page_size + (keys as i32 - 1)) & -(keys as i32),
            false => page_size,
        };
        let most = b.i64((i32::MAX / 2).into());
        let room = match pages {
            Some(pages) => pages.extent(1).min(most / counted.to(Scalar::I64)) * k.extent(2),
            None => k.extent(2).min(most),
        };
        let length = lengths.at([sequence]).load().to(Scalar::I64).max(0).min(room);
        let end = match self.odd {
            true => {
                let [size, counted] = [page_size, counted].map(|tokens| tokens.to(Scalar::I64));
                length / size * counted + length % size
            }
            false => length,
        };
        let step = i64::from(keys * self.boxes);
        let steps = (end + (step - 1)) / step;
        let splits = wide(b.grid_dim(Axis::X));
        let share = (steps + (splits - 1)) / splits;
        let first = (split * share).min(steps);
        let last = (first + share).min(steps);

        let (zero, short, queries) = (b.i64(0), length.to(Scalar::I32), queries.max(1));
        let first_row = row.to(Scalar::I32);
        // Query i sees the keys up to its own place, so that there is one more than that.
        b.map([head.limit], [], |row, _, []| [short - queries + 1 + (row + first_row).rem_u(queries)]);
        head.values.fill(0.0);
        head.greatest.fill(UNSEEN);
        head.sum.fill(0.0);
        b.if_(last.gt(first), || {
            head.from_q.fetch(q, [sequence, of_head, row, zero]);
            b.range(first, last).each(|number| {
                let key = number * step;
                let places: Vec<[Val<'_>; 4]> = (0..self.boxes)
                    .map(|at| {
                        let key = key + i64::from(at * keys);
                        match pages {
                            Some(pages) => {
                                let of = key.to(Scalar::I32).div_u(counted);
                                let row = wide(key.to(Scalar::I32) - of * counted);
                                // A step may go on behind the last page.
                                let of = wide(of).min(pages.extent(1) - 1);
                                let page = pages.at([sequence, of]).load().to(Scalar::I64);
                                [page, of_head, row, zero]
                            }
                            None => [sequence, of_head, key, zero],
                        }
                    })
                    .collect();
                for (place, scores) in places.iter().zip(&head.scores) {
                    head.from_k.fetch(k, *place);
                    scores.product(head.from_q, head.from_k.transposed());
                }
                (0..self.boxes).for_each(|_| head.from_k.release());
                let mask = || {
                    for (at, scores) in (0..).zip(&head.scores) {
                        let key = key.to(Scalar::I32) + at * keys as i32;
                        let of = self.odd.then(|| key.div_u(counted));
                        let row = of.map(|of| key - of * counted);
                        let key = of.map_or(key, |of| key - of * (counted - page_size));
                        b.map([*scores], [*scores, head.limit], |_, column, [score, limit]| {
                            let seen = (column + key).lt(limit);
                            let seen = row.map_or(seen, |row| seen & (column + row).lt(page_size));
                            [seen.select(score, UNSEEN)]
                        });
                    }
                };
                match self.odd {
                    true => mask(),
                    // Only the last keys are not seen by all.
                    false => b.if_((key + step).gt(length - wide(queries) + 1), mask),
                }
                self.softmax(&head);
                for (place, weights) in places.iter().zip(&head.weights) {
                    head.from_v.fetch(v, *place);
                    head.values.mma(*weights, head.from_v);
                }
                (0..self.boxes).for_each(|_| head.from_v.release());
            });
            head.from_q.release();
        });
        let at = (sequence * k.extent(1) + of_head).named("row_of_parts");
        b.map([head.shrink], [head.sum, head.greatest], |_, _, [sum, greatest]| {
            [greatest.gt(UNSEEN).select(sum.rcp().fast(), 0.0)]
        });
        b.map([head.values], [head.values, head.shrink], |_, _, [value, by]| [value * by]);
        head.greatest.put(sums, [split * 2, at, row]);
        head.sum.put(sums, [split * 2 + 1, at, row]);
        head.values.put(parts, [split, at, row, zero]);
        block.kernel()
    }

    /// Turns scores into exponentials, adds them to the sums, and takes off all that was summed what the greatest has risen by.
    fn softmax(&self, head: &Head<'_>) {
        let Head { b, greatest, sum, shrink, next, values, scale, .. } = head;
        b.map([*next], [*greatest], |_, _, before| before);
        head.scores.iter().for_each(|scores| next.row_max(*scores));
        b.map([*shrink, *next, *greatest], [*greatest, *next], |_, _, [before, now]| {
            let below = seen_or_zero(now);
            [((before - below) * *scale).exp2().fast(), below, now]
        });
        b.map([*sum], [*sum, *shrink], |_, _, [sum, shrink]| [sum * shrink]);
        for (scores, weights) in head.scores.iter().zip(&head.weights) {
            b.map([*scores], [*scores, *next], |_, _, [score, below]| {
                [((score - below) * *scale).exp2().fast()]
            });
            sum.row_add(*scores);
            if self.element != Scalar::F32 {
                b.map([*weights], [*scores], |_, _, [score]| [score.to(self.element)]);
            }
        }
        b.map([*values], [*values, *shrink], |_, _, [value, shrink]| [value * shrink]);
    }

    /// The second kernel, of parameters `parts`, `sums`, `o` and `scale`: joins what the splits found. It has a block of threads for each 8
    /// rows along x, each head of keys along y, and each sequence along z.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn join(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        self.join_parts(block.builder());
        block.kernel()
    }

    fn join_parts<'b>(&self, b: Builder<'b>) {
        let (element, dim) = (self.element, self.dim);
        b.name(&format!("attention_join_{element}_d{dim}")).block_size([THREADS, 1, 1]);
        let parts = self.view(b, "parts", Scalar::F32, Access::Read);
        let sums = b.view("sums", Scalar::F32, 3, Access::Read);
        let o = self.view(b, "o", element, Access::Write);
        let scale = b.scalar("scale", Type::F32) * LOG2_E;
        let (head, batch) = (wide(b.block_id(Axis::Y)), wide(b.block_id(Axis::Z)));
        let thread = b.thread_id(Axis::X);
        let (warp, lane) = (thread.shr_u(5), thread & 31);
        let row = wide(b.block_id(Axis::X)) * i64::from(THREADS / 32) + wide(warp);
        let at = batch * o.extent(1) + head;
        let splits = parts.extent(0);
        // Two elements at a time, and as many times as there are in a row.
        let columns: Vec<_> = (0..dim / 64).map(|part| wide(lane * 2 + (part * 64) as i32)).collect();
        // Warps take rows as a whole, and those behind the last row the last one, without a result: lanes tell each other weights.
        let of = row.min(o.extent(2) - 1);
        let zero = b.i64(0);
        let of_split = |first: Val<'b>, which: i64, other: f32| {
            let split = first + wide(lane);
            let found = sums.at([split.min(splits - 1) * 2 + which, at, of]).load();
            split.lt(splits).select(found, other)
        };
        let greatest = |first: Val<'b>| of_split(first, 0, UNSEEN);
        let most = b
            .range(zero, splits)
            .step(32)
            .fold(b.f32(UNSEEN), |first, most| most.max(greatest(first)))
            .warp_max();
        let below = seen_or_zero(most);
        let nothing = b.f32(0.0).splat(2);
        let zeros = vec![nothing; columns.len()];
        let (sum, found) = b.range(zero, splits).step(32).fold((b.f32(0.0), zeros), |first, (sum, found)| {
            let weight = ((greatest(first) - below) * scale).exp2().fast() * of_split(first, 1, 0.0);
            let here = (splits - first).min(32).to(Scalar::I32);
            let found = b.range(b.i32(0), here).step(AT_ONCE).fold(found, |begin, found| {
                // What several splits found is on its way at a time; behind the last there is nothing.
                let loaded: Vec<(Val<'b>, Vec<Val<'b>>)> = (0..AT_ONCE)
                    .map(|which| {
                        let split = first + wide(begin + which);
                        let load = |column: &Val<'b>| {
                            split.lt(splits).select(
                                parts.at([split.min(splits - 1), at, of, *column]).load_vector(2),
                                nothing,
                            )
                        };
                        (weight.shuffle(begin + which), columns.iter().map(load).collect())
                    })
                    .collect();
                loaded.into_iter().fold(found, |found, (weight, parts)| {
                    let added = found.into_iter().zip(parts);
                    added.map(|(found, part)| found + part * weight.splat(2)).collect()
                })
            });
            (sum + weight, found)
        });
        let sum = sum.warp_add();
        let by = sum.gt(0.0).select(sum.rcp(), 0.0);
        b.if_(row.lt(o.extent(2)), || {
            for (found, column) in found.into_iter().zip(&columns) {
                o.at([batch, head, row, *column]).store((found * by.splat(2)).to(element));
            }
        });
    }
}
