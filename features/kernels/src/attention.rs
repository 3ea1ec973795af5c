//! Attention, forward: O = softmax(scale · Q · Kᵀ) · V for each head, without the matrix in between ever being in memory
//! (Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention", 2022; its softmax overlaps with products as in Shah
//! et al., "FlashAttention-3", 2024).
//!
//! Views, slowest dimension first: `q` and `o` are `[heads, queries, D]`, `k` and `v` are `[heads, keys, D]`, all of f16, bf16
//! or f32; a batch is so many heads more. Rows begin on multiples of 16 bytes. `scale` is an f32, as a rule 1/√D.
//!
//! A causal variant lets query i see the keys up to i + keys − queries: the last query sees all. A query that sees no key
//! gets zeros.
//!
//! A launch has a block for each [`Attention::tile`] queries along x, and one for each head along y.

use vm_ir::builder::{BuildError, Builder, FragmentRef, IRBlock, Val};
use vm_ir::op::Axis;
use vm_ir::types::Type;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// What the views hold: f16, bf16 or f32.
    pub element: Scalar,
    /// D, the elements of a query, a key and a value.
    pub dim: u32,
    /// Does a query see only the keys up to its own?
    pub causal: bool,
    /// Queries of a block, and keys that are copied at once.
    pub tile: [u32; 2],
    /// Tiles of keys, and of values, that are on their way or in use. With one, nothing runs beside anything.
    pub stages: u32,
    /// Groups of warps that share the queries of a block.
    pub groups: u32,
}

/// Below every score; not infinite, as differences of scores are taken.
const LEAST: f32 = -3.0e38;
/// log2 e: exponentials are powers of two.
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// What is kept for each query.
struct Softmax<'b> {
    scores: FragmentRef<'b>,
    /// The greatest score so far, and the sum of exponentials below it.
    greatest: FragmentRef<'b>,
    sum: FragmentRef<'b>,
    /// What all that was summed is multiplied by when the greatest rises.
    shrink: FragmentRef<'b>,
    next: FragmentRef<'b>,
    scale: Val<'b>,
}

impl<'b> Softmax<'b> {
    /// Turns scores into exponentials, and adds them to the sums.
    fn step(&self, k: Builder<'b>) {
        let scale = self.scale;
        k.map([self.next], [self.greatest], |_, _, before| before);
        self.next.row_max(self.scores);
        k.map([self.shrink, self.greatest], [self.greatest, self.next], |_, _, [before, now]| {
            [((before - now) * scale).exp2().fast(), now]
        });
        // Where nothing was seen yet, nothing is taken off, so that what is masked comes to zero.
        k.map([self.next], [self.greatest], |_, _, [greatest]| {
            [greatest.gt(LEAST).select(-(greatest * scale), 0.0)]
        });
        k.map([self.scores], [self.scores, self.next], |_, _, [score, below]| {
            [score.fma(scale, below).exp2().fast()]
        });
        k.map([self.sum], [self.sum, self.shrink], |_, _, [sum, shrink]| [sum * shrink]);
        self.sum.row_add(self.scores);
    }
}

impl Attention {
    /// The variant for heads of `dim` elements, 64 or 128.
    pub const fn of(dim: u32, causal: bool) -> Attention {
        Attention { element: Scalar::Bf16, dim, causal, tile: [128, 128], stages: 2, groups: 2 }
    }

    /// The variant for processors, of f32: its tiles stay in a core's L2 cache.
    pub const fn cpu(dim: u32, causal: bool) -> Attention {
        Attention {
            element: Scalar::F32,
            tile: [128, 128],
            stages: 1,
            groups: 1,
            ..Attention::of(dim, causal)
        }
    }

    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let [queries, keys] = self.tile;
        let (element, dim, stages, groups) = (self.element, self.dim, self.stages, self.groups);
        let kind = if self.causal { "causal" } else { "full" };
        format!("attention_{kind}_{element}_d{dim}_{queries}x{keys}_s{stages}_g{groups}")
    }

    /// The kernel, of parameters `q`, `k`, `v`, `o` and `scale`.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let b = block.builder();
        b.name(&self.name()).tile_groups(self.groups);
        let [queries, keys] = self.tile;
        let (element, dim) = (self.element, self.dim);
        let view = |name, access| {
            let dims = [Dim::ANY, Dim::ANY, Dim::Fixed(dim.into())];
            b.view_of(name, ViewType::new(element, 3, access).with_dims(&dims).aligned(16))
        };
        let [q, k, v] = ["q", "k", "v"].map(|name| view(name, Access::Read));
        let o = view("o", Access::Write);
        let scale = b.scalar("scale", Type::F32);
        let from_q = b.channel("from_q", element, [queries, dim], 1);
        let from_k = b.channel("from_k", element, [keys, dim], self.stages);
        let from_v = b.channel("from_v", element, [keys, dim], self.stages);
        let scores = b.fragment("scores", Scalar::F32, [queries, keys]);
        let sum = b.fragment("values", Scalar::F32, [queries, dim]);
        // The next scores are computed while the last weights are used.
        let narrowed = element != Scalar::F32 || self.stages > 1;
        let narrowed = narrowed.then(|| b.fragment("weights", element, [queries, keys]));
        let weights = narrowed.unwrap_or(scores);
        let out = match element {
            Scalar::F32 => sum,
            narrow => b.fragment("out", narrow, [queries, dim]),
        };
        let softmax = Softmax {
            scores,
            greatest: b.column("greatest", Scalar::F32, queries),
            sum: b.column("sum", Scalar::F32, queries),
            shrink: b.column("shrink", Scalar::F32, queries),
            next: b.column("next", Scalar::F32, queries),
            scale: (scale * LOG2_E).named("scale2"),
        };

        let zero = b.i64(0);
        let head = b.block_id(Axis::Y).to_u(Scalar::I64).named("head");
        // The longest first: the others fill what is left at the end.
        let number = match self.causal {
            true => b.grid_dim(Axis::X) - 1 - b.block_id(Axis::X),
            false => b.block_id(Axis::X),
        };
        let row = (number.to_u(Scalar::I64) * i64::from(queries)).named("row");
        let there = k.extent(1).named("there");
        // Keys that some query of the block sees; those behind the last are masked.
        let lag = (there - q.extent(1)).named("lag");
        let seen = match self.causal {
            true => (row + lag + i64::from(queries)).min(there),
            false => there,
        };
        let tiles = ((seen + i64::from(keys - 1)) / i64::from(keys)).named("tiles");
        b.if_(tiles.gt(zero), || {
            let last = ((tiles - 1) * i64::from(keys)).named("last");
            softmax.greatest.fill(LEAST);
            from_q.fetch(q, [head, row, zero]);
            // From the last keys to the first: where a mask may be needed it is at the begin.
            let masked = |at: Val<'_>| self.mask(b, &softmax, row, lag, there, at);
            // A block of queries reaches over the keys of several tiles.
            let more = if self.causal { i64::from(queries.div_ceil(keys)) } else { 0 };
            let narrow = || {
                if narrowed.is_some() {
                    b.map([weights], [softmax.scores], |_, _, [score]| [score.to(element)]);
                }
            };
            let shrink = || b.map([sum], [sum, softmax.shrink], |_, _, [sum, shrink]| [sum * shrink]);
            if self.stages == 1 {
                b.range(zero, tiles).each(|done| {
                    let at = last - done * i64::from(keys);
                    from_k.fetch(k, [head, at, zero]);
                    softmax.scores.product(from_q, from_k.transposed());
                    from_k.release();
                    b.if_(done.le(more), || masked(at));
                    softmax.step(b);
                    from_v.fetch(v, [head, at, zero]);
                    shrink();
                    narrow();
                    sum.mma(weights, from_v);
                    from_v.release();
                });
            } else {
                from_k.fetch(k, [head, last, zero]);
                softmax.scores.product(from_q, from_k.transposed());
                from_k.release();
                masked(last);
                softmax.step(b);
                narrow();
                b.range(b.i64(1), tiles).each(|done| {
                    let behind = last - (done - 1) * i64::from(keys);
                    let at = behind - i64::from(keys);
                    from_k.fetch(k, [head, at, zero]);
                    softmax.scores.product(from_q, from_k.transposed());
                    from_v.fetch(v, [head, behind, zero]);
                    sum.mma(weights, from_v);
                    from_k.release();
                    if more > 0 {
                        b.if_(done.le(more), || masked(at));
                    }
                    softmax.step(b);
                    from_v.release();
                    shrink();
                    narrow();
                });
                from_v.fetch(v, [head, zero, zero]);
                sum.mma(weights, from_v);
                from_v.release();
            }
            // A query that sees no key has no greatest score.
            b.map([softmax.sum], [softmax.sum, softmax.greatest], |_, _, [sum, greatest]| {
                [greatest.gt(LEAST).select(sum.rcp().fast(), 0.0)]
            });
            from_q.release();
        });
        b.map([out], [sum, softmax.sum], |_, _, [sum, by]| [(sum * by).to(element)]);
        out.put(o, [head, row, zero]);
        block.kernel()
    }

    /// Takes from the scores what their queries don't see: keys that are not there, and in a causal variant those behind.
    fn mask<'b>(
        &self,
        b: Builder<'b>,
        softmax: &Softmax<'b>,
        row: Val<'b>,
        lag: Val<'b>,
        there: Val<'b>,
        at: Val<'b>,
    ) {
        // Numbers within the tile are small, so that 32 bits do once the distance is known.
        let limit = i64::from(i32::MAX / 4);
        let narrow = |distance: Val<'b>| distance.min(limit).max(-limit).to(Scalar::I32);
        let left = narrow(there - at);
        let ahead = narrow(row + lag - at);
        b.map([softmax.scores], [softmax.scores], |query, key, [score]| {
            let mut seen = key.lt(left);
            if self.causal {
                seen = seen & key.le(query + ahead);
            }
            [seen.select(score, LEAST)]
        });
    }
}
