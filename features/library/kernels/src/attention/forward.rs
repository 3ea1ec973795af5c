//! The forward kernel.

use super::plan::{Order, Seen, Sequences, each_tile, narrow, wide};
use super::{LOG2_E, Mask, UNSEEN, seen_or_zero};
use crate::call::kernel_name;
use vm_ir::builder::{BuildError, Builder, ChannelRef, FragmentRef, IRBlock, PlaceRef, Val};
use vm_ir::types::Type;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attention {
    /// What the views hold: f16, bf16 or f32.
    pub element: Scalar,
    /// Are Q, K and V of FP8 (E4M3), and only O of [`element`](Self::element)? V is transposed then, `[batch, heads, D, keys]`, as
    /// products of FP8 add up what lies side by side; rows begin at multiples of 16 bytes. Exponentials are rounded to FP8, too: they
    /// go up to 2^8, so that those below 2^-6 are not all denormal.
    pub fp8: bool,
    /// Elements of a query and a key, and of a value.
    pub dims: [u32; 2],
    /// Which keys a query sees.
    pub mask: Mask,
    /// Are sequences of different lengths packed, one behind the other along the tokens?
    pub packed: bool,
    /// Are the logarithms of the sums stored, which the gradients need?
    pub log_sums: bool,
    /// Queries of a block, and keys that are copied at once.
    pub tile: [u32; 2],
    /// Tiles of keys, and of values, that are on their way or in use. With one, nothing runs beside anything.
    pub stages: u32,
    /// Groups of warps that share the queries of a block.
    pub groups: u32,
    /// In which order tiles are worked on.
    pub order: Order,
    /// Is `bias` added to each scaled score? It is the last parameter, of f32, `[queries, keys]`, the same for all heads; −∞
    /// masks a key. Of sequences that are not packed.
    pub bias: bool,
    /// Do queries, keys and values have any number of elements up to [`dims`](Self::dims)? Else just these.
    pub padded: bool,
    /// Bytes to whose multiples the views and their rows are aligned: 16, or an element's for any place in memory, which no
    /// copying engine takes.
    pub align: u32,
}

/// The most columns of a sum: of wider values there are several.
const PART: u32 = 128;

/// What exponentials are multiplied by before they are rounded to FP8, as a power of two.
const FP8_POWER: f32 = 8.0;

/// What is kept for each query.
#[derive(Clone, Copy)]
struct Softmax<'b> {
    scores: FragmentRef<'b>,
    /// The greatest score so far, and the sum of exponentials below it.
    greatest: FragmentRef<'b>,
    sum: FragmentRef<'b>,
    /// What all that was summed is multiplied by when the greatest rises.
    shrink: FragmentRef<'b>,
    next: FragmentRef<'b>,
    scale: Val<'b>,
    /// What exponentials are multiplied by, as a power of two.
    power: f32,
    /// What is added to scores, a tile of it, and what scores are multiplied by before.
    bias: Option<(PlaceRef<'b>, FragmentRef<'b>, Val<'b>)>,
}

impl<'b> Softmax<'b> {
    /// Adds the bias, from a query and a key on.
    fn add_bias(&self, k: Builder<'b>, query: Val<'b>, key: Val<'b>) {
        let Some((view, biases, scale)) = self.bias else { return };
        biases.get(view, [query, key]);
        k.map([self.scores], [self.scores, biases], |_, _, [score, bias]| [score.fma(scale, bias)]);
    }

    /// Turns scores into exponentials, and adds them to the sums.
    fn step(&self, k: Builder<'b>) {
        let scale = self.scale;
        k.map([self.next], [self.greatest], |_, _, before| before);
        self.next.row_max(self.scores);
        k.map([self.shrink, self.next, self.greatest], [self.greatest, self.next], |_, _, [before, now]| {
            let below = seen_or_zero(now);
            [((before - below) * scale).exp2().fast(), below, now]
        });
        // Differences come first: a product with the scale is rounded, and of scores of 10^10 that rounding is beyond any exponent.
        k.map([self.scores], [self.scores, self.next], |_, _, [score, below]| {
            let score = score - below;
            let power = if self.power == 0.0 { score * scale } else { score.fma(scale, self.power) };
            [power.exp2().fast()]
        });
        k.map([self.sum], [self.sum, self.shrink], |_, _, [sum, shrink]| [sum * shrink]);
        self.sum.row_add(self.scores);
    }
}

/// Values, what is summed of them, and what is stored of that: columns from one on.
struct Part<'b> {
    column: i64,
    values: ChannelRef<'b>,
    sum: FragmentRef<'b>,
    out: FragmentRef<'b>,
}

/// What a variant has in its head.
struct Head<'b> {
    b: Builder<'b>,
    q: PlaceRef<'b>,
    k: PlaceRef<'b>,
    v: PlaceRef<'b>,
    o: PlaceRef<'b>,
    log_sums: Option<PlaceRef<'b>>,
    /// Of FP8, those of Q, K and V.
    scales: Option<[PlaceRef<'b>; 3]>,
    from_q: ChannelRef<'b>,
    from_k: ChannelRef<'b>,
    /// The weights as a factor: the scores themselves, if those need not be narrowed, nor others computed beside them.
    weights: FragmentRef<'b>,
    narrows: bool,
    softmax: Softmax<'b>,
    parts: Vec<Part<'b>>,
}

/// A tile of queries: where it is, and what it sees.
struct Work<'b> {
    /// The sequence's number, its and the head's indices, those of its first query and key, and the number of the tile's first query.
    sequence: Val<'b>,
    batch: Val<'b>,
    head: Val<'b>,
    of_k: Val<'b>,
    first_query: Val<'b>,
    first_key: Val<'b>,
    row: Val<'b>,
    queries: Val<'b>,
    seen: Seen<'b>,
}

impl Attention {
    /// The variant for heads of `dim` elements: 64, 128, 192 (with values of 128) or 256.
    pub const fn of(dim: u32, causal: bool) -> Attention {
        let dims = if dim == 192 { [192, 128] } else { [dim, dim] };
        let mask = if causal { Mask::Causal } else { Mask::Full };
        let tile = match dim {
            64 if !causal => [192, 128],
            192 => [128, 112],
            256 => [128, 64],
            _ => [128, 128],
        };
        let order = if causal { Order::Balanced } else { Order::Heads };
        let (element, groups) = (Scalar::Bf16, tile[0] / 64);
        let (fp8, packed, log_sums, bias, padded) = (false, false, false, false, false);
        let (stages, align) = (2, 16);
        Attention {
            element,
            fp8,
            dims,
            mask,
            packed,
            log_sums,
            tile,
            stages,
            groups,
            order,
            bias,
            padded,
            align,
        }
    }

    /// The variant of FP8, for heads of 64, 128, 192 (with values of 128) or 256 elements, and sequences of as many keys: among the fastest
    /// on an H200; [`Forward`](super::Forward) has the others. Of heads of 256, [packed](Self::packed) ones have registers for tiles of 96
    /// keys only.
    pub const fn fp8(dim: u32, causal: bool, keys: u64) -> Attention {
        let (tile, groups, stages) = match dim {
            64 if causal => ([128, 192], 2, 2),
            64 => ([192, 160], 3, 2),
            128 if !causal => ([128, 192], 2, 3),
            128 if keys >= 4096 => ([128, 160], 2, 2),
            _ => ([128, 128], 2, 2),
        };
        Attention { fp8: true, tile, groups, stages, ..Attention::of(dim, causal) }
    }

    /// The variant for sequences of as many keys: it differs from [`of`](Self::of) where another tile was faster on an H200.
    pub const fn of_length(dim: u32, causal: bool, keys: u64) -> Attention {
        let of = Attention::of(dim, causal);
        let (tile, groups) = match dim {
            64 if !causal && keys < 2048 => ([128, 128], 2),
            64 if causal && keys > 8192 => ([192, 128], 3),
            128 if keys >= 8192 || !causal && keys >= 4096 => ([128, 160], 2),
            _ => (of.tile, of.groups),
        };
        Attention { tile, groups, ..of }
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
        let ([dim, values], element, stages, groups) = (self.dims, self.element, self.stages, self.groups);
        let of_values = if values == dim { String::new() } else { format!("_v{values}") };
        let fp8 = if self.fp8 { "fp8_" } else { "" };
        let packed = if self.packed { "_packed" } else { "" };
        let log_sums = if self.log_sums { "_lse" } else { "" };
        let order = if self.order == Order::Balanced { "_b" } else { "" };
        let bias = if self.bias { "_bias" } else { "" };
        let padded = if self.padded { "_padded" } else { "" };
        let anywhere = if self.align < 16 { "_any" } else { "" };
        format!(
            "attention_{}_{fp8}{element}_d{dim}{of_values}{packed}{log_sums}{bias}{padded}_{queries}x{keys}_s{stages}_g{groups}{order}{anywhere}",
            self.mask.name()
        )
    }

    /// The kernel. Its parameters: `q`, `k`, `v`, `o`; with [`log_sums`](Self::log_sums) `lse`, of f32 `[batch, heads,
    /// queries]`; of [`fp8`](Self::fp8) `q_scales`, `k_scales` and `v_scales`, of f32 `[sequences, heads]`, what a head's elements are
    /// to be multiplied by, where an extent of 1 is for all; if it is [`packed`](Self::packed) `q_starts` and `k_starts`, of i32, where each sequence begins and the last
    /// ends, while the views have a batch of one; then `scale`, of a [`Mask::Window`] `left` and `right`, and if it is packed
    /// `longest`, an i32, at least the most queries of a sequence. There are fewer than 2^31 tiles.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let b = block.builder();
        b.name(&kernel_name(&self.name())).tile_groups(self.groups);
        let [queries, keys] = self.tile;
        let [dim, value_dim] = self.dims;
        let (element, factor) = (self.element, self.factor());
        let view = |name, element: Scalar, dim: u32, access| {
            let last = if self.padded { Dim::ANY } else { Dim::Fixed(dim.into()) };
            let mut dims = [Dim::ANY, Dim::ANY, Dim::ANY, last];
            if self.fp8 && name == "v" {
                dims.swap(2, 3);
            }
            let align = self.align.max(element.bytes());
            b.view_of(name, ViewType::new(element, 4, access).with_dims(&dims).aligned(align))
        };
        let (q, k) = (view("q", factor, dim, Access::Read), view("k", factor, dim, Access::Read));
        let v = view("v", factor, value_dim, Access::Read);
        let o = view("o", element, value_dim, Access::Write);
        let log_sums = self.log_sums.then(|| b.view("lse", Scalar::F32, 3, Access::Write));
        let scales = self.fp8.then(|| {
            ["q_scales", "k_scales", "v_scales"].map(|name| b.view(name, Scalar::F32, 2, Access::Read))
        });
        let starts = Sequences::starts(b, self.packed);
        let scale = b.scalar("scale", Type::F32);
        let window =
            (self.mask == Mask::Window).then(|| ["left", "right"].map(|name| b.scalar(name, Type::I32)));
        let bias = self.bias.then(|| {
            (b.view("bias", Scalar::F32, 2, Access::Read), b.fragment("biases", Scalar::F32, [queries, keys]))
        });
        let sequences = Sequences::new(b, [q, k], starts);
        let from_q = b.channel("from_q", factor, [queries, dim], 1);
        let from_k = b.channel("from_k", factor, [keys, dim], self.stages);
        let scores = b.fragment("scores", Scalar::F32, [queries, keys]);
        let narrows = factor != Scalar::F32 || self.stages > 1;
        let weights = if narrows { b.fragment("weights", factor, [queries, keys]) } else { scores };
        let parts = (0..value_dim.div_ceil(PART)).map(|number| {
            let column = number * PART;
            let columns = PART.min(value_dim - column);
            let name = |what: &str| if number == 0 { what.to_owned() } else { format!("{what}_{number}") };
            let sum = b.fragment(&name("values"), Scalar::F32, [queries, columns]);
            Part {
                column: column.into(),
                values: {
                    let dims = if self.fp8 { [columns, keys] } else { [keys, columns] };
                    b.channel(&name("from_v"), factor, dims, self.stages)
                },
                sum,
                out: match element {
                    Scalar::F32 => sum,
                    narrow => b.fragment(&name("out"), narrow, [queries, columns]),
                },
            }
        });
        let parts = parts.collect();
        let column = |name| b.column(name, Scalar::F32, queries);
        let softmax = Softmax {
            scores,
            greatest: column("greatest"),
            sum: column("sum"),
            shrink: column("shrink"),
            next: column("next"),
            scale: match self.bias {
                true => b.f32(LOG2_E),
                false => (scale * LOG2_E).named("scale2"),
            },
            power: if self.fp8 { FP8_POWER } else { 0.0 },
            bias: bias.map(|(view, biases)| (view, biases, scale)),
        };
        let head = Head { b, q, k, v, o, log_sums, scales, from_q, from_k, weights, narrows, softmax, parts };

        let window = window.map(|both| both.map(|reach| reach.to(Scalar::I64)));
        let heads = narrow(q.extent(1));
        let sharing = heads.div_u(narrow(k.extent(1)));
        let [most, batches] = sequences.extents(0);
        let tiles = (most + (queries as i32 - 1)).div_u(queries as i32);
        each_tile(b, self.order, false, [tiles, heads, batches], |tile| {
            let row = (wide(tile.number) * i64::from(queries)).named("row");
            let of_k = wide(tile.head.div_u(sharing));
            let head_number = wide(tile.head).named("head");
            let number = wide(tile.batch).named("batch");
            sequences.with(b, 0, number, row, |sequence| {
                let [first_query, first_key] = sequence.first;
                let [queries, keys] = sequence.lengths;
                // Boxes begin at columns that are multiples of 16 bytes, and keys are columns of V: so tiles begin at such a key, with
                // some of the sequence before.
                let before = (self.fp8 && self.packed).then(|| first_key & 15);
                let work = Work {
                    sequence: number,
                    batch: sequence.batch,
                    head: head_number,
                    of_k,
                    first_query,
                    first_key: before.map_or(first_key, |before| first_key - before),
                    row,
                    queries,
                    seen: Seen {
                        mask: self.mask,
                        left: window.map(|[left, _]| left),
                        right: window.map(|[_, right]| right),
                        begin: before,
                        keys: before.map_or(keys, |before| keys + before),
                        lag: before.map_or(keys, |before| keys + before) - queries,
                    },
                };
                self.tile_of(&head, &work);
            });
        });
        block.kernel()
    }

    /// What Q, K and V hold, and the weights.
    fn factor(&self) -> Scalar {
        if self.fp8 { Scalar::F8E4M3 } else { self.element }
    }

    /// An index in a view of what is at an index in a sequence. Only those of packed sequences begin anywhere.
    fn index_from<'b>(&self, first: Val<'b>, at: Val<'b>) -> Val<'b> {
        if self.packed { first + at } else { at }
    }

    /// What a tile of queries sees, joined and stored.
    fn tile_of<'b>(&self, head: &Head<'b>, work: &Work<'b>) {
        let Head { b, q, k, v, from_q, from_k, weights, narrows, parts, .. } = head;
        let scales = head.scales.map(|scales| {
            let [of_q, of_k, of_v] = scales;
            let load = |scales: PlaceRef<'b>, of: Val<'b>| {
                let at = [work.sequence, of];
                let at: [Val<'b>; 2] = std::array::from_fn(|i| at[i].min(scales.extent(i as u8) - 1));
                scales.at(at).load()
            };
            (load(of_q, work.head) * load(of_k, work.of_k), load(of_v, work.of_k))
        });
        let mut softmax = head.softmax;
        if let Some((scores, _)) = scales {
            // A bias is added to what is scaled already.
            let scale = softmax.bias.as_mut().map_or(&mut softmax.scale, |(_, _, scale)| scale);
            *scale = *scale * scores;
        }
        let softmax = &softmax;
        let (b, [queries, keys]) = (*b, self.tile);
        let Work { batch, head: of_q, of_k, first_query, first_key, row, seen, .. } = *work;
        let zero = b.i64(0);
        let of_keys = i64::from(keys);
        // From the first key that some query of the tile sees up to the last.
        let behind = match seen.last(row + i64::from(queries - 1)) {
            Some(last) => (last + 1).min(seen.keys),
            None => seen.keys,
        };
        let tiles = ((behind + (of_keys - 1)) / of_keys).named("tiles");
        let first = match seen.first(row) {
            Some(first) => first.max(0) / of_keys,
            None => zero,
        };
        let index_from = |first: Val<'b>, at: Val<'b>| self.index_from(first, at);
        let key = |at: Val<'b>| [batch, of_k, index_from(first_key, at), zero];
        let fetch_values = |at: Val<'b>| {
            for part in parts {
                let (key, column) = (index_from(first_key, at), b.i64(part.column));
                let [row, column] = if self.fp8 { [column, key] } else { [key, column] };
                part.values.fetch(*v, [batch, of_k, row, column]);
            }
        };
        let multiply = || {
            parts.iter().for_each(|part| match self.fp8 {
                true => part.sum.mma(*weights, part.values.transposed()),
                false => part.sum.mma(*weights, part.values),
            });
        };
        let masked = |at: Val<'b>| {
            b.if_(seen.masks(row, queries, at, keys), || {
                let seen = seen.within(row, at);
                b.map([softmax.scores], [softmax.scores], |query, key, [score]| {
                    [seen(query, key).select(score, UNSEEN)]
                });
            });
        };
        let round = || {
            if *narrows {
                b.map([*weights], [softmax.scores], |_, _, [score]| [score.to(self.factor())]);
            }
        };
        let shrink = || {
            for part in parts {
                b.map([part.sum], [part.sum, softmax.shrink], |_, _, [sum, shrink]| [sum * shrink]);
            }
        };
        let release_values = || parts.iter().for_each(|part| part.values.release());

        for part in parts {
            b.map([part.sum], [], |_, _, []| [b.f32(0.0)]);
        }
        softmax.greatest.fill(UNSEEN);
        softmax.sum.fill(0.0);
        b.if_(tiles.gt(first), || {
            let last = ((tiles - 1) * of_keys).named("last");
            from_q.fetch(*q, [batch, of_q, index_from(first_query, row), zero]);
            if self.stages == 1 {
                b.range(zero, tiles - first).each(|done| {
                    let at = last - done * of_keys;
                    from_k.fetch(*k, key(at));
                    softmax.scores.product(*from_q, from_k.transposed());
                    from_k.release();
                    softmax.add_bias(b, row, at);
                    masked(at);
                    softmax.step(b);
                    fetch_values(at);
                    shrink();
                    round();
                    multiply();
                    release_values();
                });
                from_q.release();
                return;
            }
            from_k.fetch(*k, key(last));
            softmax.scores.product(*from_q, from_k.transposed());
            from_k.release();
            softmax.add_bias(b, row, last);
            // From the last keys to the first: where a mask may be needed it is at the begin.
            masked(last);
            softmax.step(b);
            round();
            b.range(b.i64(1), tiles - first).each(|done| {
                let behind = last - (done - 1) * of_keys;
                let at = behind - of_keys;
                from_k.fetch(*k, key(at));
                softmax.scores.product(*from_q, from_k.transposed());
                fetch_values(behind);
                multiply();
                from_k.release();
                softmax.add_bias(b, row, at);
                if self.mask != Mask::Full || seen.begin.is_some() {
                    masked(at);
                }
                softmax.step(b);
                release_values();
                shrink();
                round();
            });
            // The next tile's queries come while this one is finished.
            from_q.release();
            fetch_values(first * of_keys);
            multiply();
            release_values();
        });
        self.store(head, work, softmax, scales.map(|(_, values)| values));
    }

    /// `scale`: what values are to be multiplied by.
    fn store<'b>(&self, head: &Head<'b>, work: &Work<'b>, softmax: &Softmax<'b>, scale: Option<Val<'b>>) {
        let Head { b, parts, .. } = head;
        let Work { batch, head: of_q, row, queries, .. } = *work;
        let at = self.index_from(work.first_query, row);
        if let Some(log_sums) = head.log_sums {
            b.map([softmax.shrink], [softmax.sum, softmax.greatest], |_, _, [sum, greatest]| {
                let log = sum.log2().fast();
                let log = if softmax.power == 0.0 { log } else { log - softmax.power };
                let log = log * std::f32::consts::LN_2;
                let log = greatest.fma(softmax.scale * std::f32::consts::LN_2, log);
                [greatest.gt(UNSEEN).select(log, f32::NEG_INFINITY)]
            });
            match self.packed {
                true => softmax.shrink.put_rows(log_sums, [batch, of_q, at], queries - row),
                false => softmax.shrink.put(log_sums, [batch, of_q, at]),
            }
        }
        // A query that sees no key has no greatest score.
        b.map([softmax.sum], [softmax.sum, softmax.greatest], |_, _, [sum, greatest]| {
            let by = sum.rcp().fast();
            [greatest.gt(UNSEEN).select(scale.map_or(by, |scale| by * scale), 0.0)]
        });
        for part in parts {
            b.map([part.out], [part.sum, softmax.sum], |_, _, [sum, by]| [(sum * by).to(self.element)]);
            let at = [batch, of_q, at, b.i64(part.column)];
            match self.packed {
                true => part.out.put_rows(head.o, at, queries - row),
                false => part.out.put(head.o, at),
            }
        }
    }
}
