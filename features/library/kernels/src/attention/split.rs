//! The gradients by three kernels, one for each of dQ, dK and dV, none of which adds to memory.
//!
//! [`Backward`](super::Backward) computes weights once and multiplies five times, with three sums in registers: these have room
//! for heads of up to 128 elements, on Hopper. Here each kernel has one sum, and computes the weights again: eight products for five.
//! So it takes heads of up to 256 elements, keys and values of different sizes and all architectures, needs no sums in
//! memory, and gives the same bits at each run.

use super::backward::{THREADS, lanes, store_delta};
use super::plan::{Order, Seen, Sequence, Sequences, each_tile, narrow, wide};
use super::table::{OVERHEAD, staged};
use super::{LOG2_E, Mask, UNSEEN};
use crate::call::kernel_name;
use vm_ir::builder::{BuildError, Builder, ChannelRef, FragmentRef, IRBlock, PlaceRef, Val};
use vm_ir::types::Type;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// What a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gradient {
    /// dQ, by tiles of queries.
    Queries,
    /// dK, by tiles of keys.
    Keys,
    /// dV, by tiles of keys.
    Values,
}

impl Gradient {
    /// All of them.
    pub const ALL: [Gradient; 3] = [Gradient::Queries, Gradient::Keys, Gradient::Values];

    /// The name of the view that it is stored to.
    pub const fn name(self) -> &'static str {
        match self {
            Gradient::Queries => "dq",
            Gradient::Keys => "dk",
            Gradient::Values => "dv",
        }
    }
}

/// A variant.
///
/// Views as in [`attention`](super), but that V, O and their gradients have columns of their own number; `lse` and `delta` are of
/// f32, `[batch, heads, queries]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SplitBackward {
    /// What the views hold: f16, bf16 or f32.
    pub element: Scalar,
    /// Elements of a query and a key, and of a value: multiples of 64, up to 256.
    pub dims: [u32; 2],
    /// Which keys a query sees.
    pub mask: Mask,
    /// Are sequences of different lengths packed, one behind the other along the tokens?
    pub packed: bool,
    /// Rows of the gradient that a block has, and how many of those that they meet are copied at once; at most 32 for dK of
    /// more than 192 columns, as registers have no room for more.
    pub tile: [u32; 2],
    /// Tiles of what is met that are on their way or in use.
    pub stages: u32,
    /// Groups of warps that share the rows of a block.
    pub groups: u32,
    /// In which order tiles are worked on.
    pub order: Order,
    /// Do rows have any number of elements up to [`dims`](Self::dims)? Else just these.
    pub padded: bool,
    /// Bytes to whose multiples the views and their rows are aligned: 16, or an element's for any place in memory.
    pub align: u32,
}

/// What a kernel has in its head.
struct Head<'b> {
    b: Builder<'b>,
    /// Q, K, V and dO.
    views: [PlaceRef<'b>; 4],
    lse: PlaceRef<'b>,
    delta: Option<PlaceRef<'b>>,
    out: PlaceRef<'b>,
    scale: Val<'b>,
    /// Of each of the views, if it is a factor.
    channels: [Option<ChannelRef<'b>>; 4],
    /// S, then P, of the block's rows; and dO · Vᵀ.
    scores: FragmentRef<'b>,
    slopes: Option<FragmentRef<'b>>,
    /// P or dS as a factor.
    factor: FragmentRef<'b>,
    /// For each query the logarithm of its sum, and δ: columns if rows are queries, else rows.
    from_lse: FragmentRef<'b>,
    from_delta: Option<FragmentRef<'b>>,
    sum: FragmentRef<'b>,
    rounded: FragmentRef<'b>,
}

/// A tile: where it is, and what it meets.
struct Work<'b> {
    sequence: Sequence<'b>,
    /// The head of keys, and the heads of queries: the first, and how many.
    of_k: Val<'b>,
    first_head: Val<'b>,
    heads: Val<'b>,
    /// The first of its rows.
    row: Val<'b>,
    seen: Seen<'b>,
}

impl SplitBackward {
    /// The variant for heads of `dim` elements, 64, 128, 192 (with values of 128) or 256, with `wgmma`.
    pub const fn of(dim: u32, causal: bool) -> SplitBackward {
        let dims = if dim == 192 { [192, 128] } else { [dim, dim] };
        let (mask, order) = match causal {
            true => (Mask::Causal, Order::Balanced),
            false => (Mask::Full, Order::Heads),
        };
        let stages = if dim <= 128 { 2 } else { 1 };
        let (element, tile, groups, align) = (Scalar::Bf16, [128, 64], 2, 16);
        SplitBackward {
            element,
            dims,
            mask,
            packed: false,
            tile,
            stages,
            groups,
            order,
            padded: false,
            align,
        }
    }

    /// The variant for less shared memory and without `wgmma`.
    pub const fn small(dim: u32, causal: bool) -> SplitBackward {
        let inner = match dim {
            64 => 64,
            256 => 16,
            _ => 32,
        };
        SplitBackward { tile: [64, inner], stages: 1, groups: 1, ..SplitBackward::of(dim, causal) }
    }

    /// The name of a kernel of the variant, which tells it from all others.
    pub(super) fn name(&self, kernel: &str) -> String {
        let ([rows, met], [dim, values]) = (self.tile, self.dims);
        let (element, stages, groups) = (self.element, self.stages, self.groups);
        let of_values = if values == dim { String::new() } else { format!("_v{values}") };
        let packed = if self.packed { "_packed" } else { "" };
        let order = if self.order == Order::Balanced { "_b" } else { "" };
        let padded = if self.padded { "_padded" } else { "" };
        let anywhere = if self.align < 16 { "_any" } else { "" };
        kernel_name(&format!(
            "attention_{kernel}_{}_{element}_d{dim}{of_values}{packed}{padded}_{rows}x{met}_s{stages}_g{groups}{order}{anywhere}",
            self.mask.name()
        ))
    }

    /// Bytes of shared memory that a block of any of the kernels takes, about.
    pub(super) fn shared_bytes(&self) -> u64 {
        let ([rows, met], [dim, values]) = (self.tile, self.dims);
        let elements = (rows + self.stages * met) * (dim + values);
        u64::from(OVERHEAD + elements * self.element.bytes() + staged(rows, dim.max(values), self.element))
    }

    /// The tile of a gradient's kernel.
    fn tile_of(&self, of: Gradient) -> [u32; 2] {
        let [rows, met] = self.tile;
        let wide = of == Gradient::Keys && self.dims[0] > 192;
        [rows, if wide { met.min(32) } else { met }]
    }

    fn view<'b>(&self, b: Builder<'b>, name: &str, dim: u32, access: Access) -> PlaceRef<'b> {
        let last = if self.padded { Dim::ANY } else { Dim::Fixed(dim.into()) };
        let dims = [Dim::ANY, Dim::ANY, Dim::ANY, last];
        let align = self.align.max(self.element.bytes());
        b.view_of(name, ViewType::new(self.element, 4, access).with_dims(&dims).aligned(align))
    }

    /// The kernel that comes first, of parameters `o`, `do` and `delta`: computes δ. It has a block of threads for each 64
    /// queries along x, each head of queries along y, and each sequence along z; packed sequences are one to it.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn prepare(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let b = block.builder();
        b.name(&self.name("delta")).block_size([THREADS, 1, 1]);
        let views = ["o", "do"].map(|name| self.view(b, name, self.dims[1], Access::Read));
        let delta = b.view("delta", Scalar::F32, 3, Access::Write);
        let [_, dim] = self.dims;
        let lanes = if self.padded || self.align < 16 { 1 } else { lanes(self.element, dim) };
        store_delta(b, [dim, lanes], views, delta);
        block.kernel()
    }

    /// The kernel of a gradient, launched over any number of blocks along x. Its parameters: `q`, `k`, `v` (not for dV), `do`,
    /// `lse`, `delta` (not for dV), and the gradient; if it is [`packed`](Self::packed) `q_starts` and `k_starts`, as of the
    /// forward kernel; `scale`; of a [`Mask::Window`] `left` and `right`; and if it is packed `longest`, an i32, at least the
    /// most queries of a sequence, for dK and dV the most keys.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, of: Gradient, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let b = block.builder();
        b.name(&self.name(of.name())).tile_groups(self.groups);
        let (element, [rows, met], [dim, value_dim]) = (self.element, self.tile_of(of), self.dims);
        let slopes = of != Gradient::Values;
        let all = [("q", dim), ("k", dim), ("v", value_dim), ("do", value_dim)];
        let takes = [true, true, slopes, true];
        let given = |at: usize| {
            let (name, dim) = all[at];
            takes[at].then(|| self.view(b, name, dim, Access::Read))
        };
        let [Some(q), Some(k), v, Some(d_o)] = [0, 1, 2, 3].map(given) else { return block.kernel() };
        let lse = b.view("lse", Scalar::F32, 3, Access::Read);
        let delta = slopes.then(|| b.view("delta", Scalar::F32, 3, Access::Read));
        let columns = if of == Gradient::Values { value_dim } else { dim };
        let out = self.view(b, of.name(), columns, Access::Write);
        let starts = Sequences::starts(b, self.packed);
        let scale = b.scalar("scale", Type::F32);
        let window =
            (self.mask == Mask::Window).then(|| ["left", "right"].map(|name| b.scalar(name, Type::I32)));
        let sequences = Sequences::new(b, [q, k], starts);
        // What a block has is there once, what it meets comes by and by.
        let own =
            if of == Gradient::Queries { [true, false, false, true] } else { [false, true, true, false] };
        let channels = [0, 1, 2, 3].map(|at| {
            let ((name, dim), own) = (all[at], own[at]);
            let (rows, stages) = if own { (rows, 1) } else { (met, self.stages) };
            takes[at].then(|| b.channel(&format!("from_{name}"), element, [rows, dim], stages))
        });
        let matrix = |name, element, columns| b.fragment(name, element, [rows, columns]);
        let scores = matrix("scores", Scalar::F32, met);
        let line = |name| match of {
            Gradient::Queries => b.column(name, Scalar::F32, rows),
            _ => b.row(name, Scalar::F32, met),
        };
        let sum = matrix("sum", Scalar::F32, columns);
        let narrows = element != Scalar::F32;
        let head = Head {
            b,
            views: [q, k, v.unwrap_or(d_o), d_o],
            lse,
            delta,
            out,
            scale,
            channels,
            scores,
            slopes: slopes.then(|| matrix("slopes", Scalar::F32, met)),
            factor: if narrows { matrix("factor", element, met) } else { scores },
            from_lse: line("from_lse"),
            from_delta: slopes.then(|| line("from_delta")),
            sum,
            rounded: if narrows { matrix("rounded", element, columns) } else { sum },
        };
        let heads = narrow(k.extent(1));
        let sharing = narrow(q.extent(1)).div_u(heads);
        let which = usize::from(of != Gradient::Queries);
        let [most, batches] = sequences.extents(which);
        let tiles = (most + (rows as i32 - 1)).div_u(rows as i32);
        let of_heads = if which == 0 { narrow(q.extent(1)) } else { heads };
        each_tile(b, self.order, which == 1, [tiles, of_heads, batches], |tile| {
            let row = (wide(tile.number) * i64::from(rows)).named("row");
            let (of_k, first_head, heads) = match which {
                0 => (wide(tile.head.div_u(sharing)), wide(tile.head), b.i64(1)),
                _ => (wide(tile.head), wide(tile.head * sharing), wide(sharing)),
            };
            sequences.with(b, which, wide(tile.batch).named("batch"), row, |sequence| {
                let window = window.map(|both| both.map(|reach| reach.to(Scalar::I64)));
                let seen = sequence.seen(self.mask, window);
                let row = if self.packed { sequence.first[which] + row } else { row };
                let work = Work { sequence, of_k, first_head, heads, row, seen };
                match of {
                    Gradient::Queries => self.tile_of_queries(&head, &work),
                    _ => self.tile_of_keys(&head, &work),
                }
            });
        });
        block.kernel()
    }

    /// Turns the logarithms of sums into what is added to scores. Of queries that are columns those from `limit` on don't count.
    fn logs<'b>(&self, head: &Head<'b>, limit: Option<Val<'b>>) {
        let Head { b, from_lse, .. } = *head;
        b.map([from_lse], [from_lse], |_, query, [log]| {
            // Who sees nothing has no sum; and what lies behind a packed sequence's last query has no weight.
            let below = log.gt(UNSEEN).select(-(log * LOG2_E), 0.0);
            [limit.map_or(below, |limit| query.lt(limit).select(below, UNSEEN))]
        });
    }

    /// Of scores and slopes, what multiplies: P, or dS. `query` and `key` are the first ones, `[query, key]` the numbers of an
    /// element's in its tile, by its row and its column.
    fn factor<'b>(
        &self,
        head: &Head<'b>,
        seen: &Seen<'b>,
        [query, key]: [Val<'b>; 2],
        [queries, keys]: [u32; 2],
        numbers: impl Fn(Val<'b>, Val<'b>) -> [Val<'b>; 2],
    ) {
        let Head { b, scores, slopes, factor, from_lse, from_delta, .. } = *head;
        let scale2 = head.scale * LOG2_E;
        b.map([scores], [scores, from_lse], |_, _, [score, below]| [score.fma(scale2, below).exp2().fast()]);
        b.if_(seen.masks(query, queries, key, keys), || {
            let seen = seen.within(query, key);
            b.map([scores], [scores], |row, column, [weight]| {
                let [query, key] = numbers(row, column);
                [seen(query, key).select(weight, 0.0)]
            });
        });
        match (slopes, from_delta) {
            (Some(slopes), Some(delta)) => {
                b.map([factor], [scores, slopes, delta], |_, _, [weight, slope, delta]| {
                    [(weight * (slope - delta)).to(self.element)]
                });
            }
            _ if self.element == Scalar::F32 => {}
            _ => b.map([factor], [scores], |_, _, [weight]| [weight.to(self.element)]),
        }
    }

    /// Stores the sum, times a number.
    fn store<'b>(&self, head: &Head<'b>, at: [Val<'b>; 4], rows: Val<'b>, by: Option<Val<'b>>) {
        let Head { b, sum, rounded, out, .. } = *head;
        b.map([rounded], [sum], |_, _, [sum]| [by.map_or(sum, |by| sum * by).to(self.element)]);
        match self.packed {
            true => rounded.put_rows(out, at, rows),
            false => rounded.put(out, at),
        }
    }

    /// dQ of a tile of queries, which goes over the keys that they see.
    fn tile_of_queries<'b>(&self, head: &Head<'b>, work: &Work<'b>) {
        let Head { b, views: [q, k, v, d_o], scores, factor, from_lse, sum, .. } = *head;
        let [Some(from_q), Some(from_k), Some(from_v), Some(from_do)] = head.channels else { return };
        let (Some(slopes), Some(delta), Some(from_delta)) = (head.slopes, head.delta, head.from_delta) else {
            return;
        };
        let Work { sequence, of_k, first_head, row, seen, .. } = *work;
        let Sequence { batch, first: [_, first_key], ends: [end_queries, _], .. } = sequence;
        let ([rows, keys], zero) = (self.tile_of(Gradient::Queries), b.i64(0));
        let of_keys = i64::from(keys);
        let end = match seen.last(row + i64::from(rows - 1)) {
            Some(last) => (last + 1).min(seen.keys),
            None => seen.keys,
        };
        let begin = match seen.first(row) {
            Some(first) => first_key + (first - first_key).max(0) / of_keys * of_keys,
            None => first_key,
        };
        let at_query = [batch, first_head, row, zero];
        sum.fill(0.0);
        b.if_(end.gt(begin), || {
            from_q.fetch(q, at_query);
            from_do.fetch(d_o, at_query);
            from_lse.get(head.lse, [batch, first_head, row]);
            self.logs(head, None);
            from_delta.get(delta, [batch, first_head, row]);
            b.range(begin, end).step(of_keys).each(|key| {
                let at_key = [batch, of_k, key, zero];
                from_k.fetch(k, at_key);
                scores.product(from_q, from_k.transposed());
                from_v.fetch(v, at_key);
                slopes.product(from_do, from_v.transposed());
                from_v.release();
                self.factor(head, &seen, [row, key], [rows, keys], |row, column| [row, column]);
                sum.mma(factor, from_k);
                from_k.release();
            });
            from_q.release();
            from_do.release();
        });
        self.store(head, at_query, end_queries - row, Some(head.scale));
    }

    /// dK or dV of a tile of keys, which goes over the queries that see them, of all heads that share the keys.
    fn tile_of_keys<'b>(&self, head: &Head<'b>, work: &Work<'b>) {
        let Head { b, views: [q, k, v, d_o], scores, factor, from_lse, sum, .. } = *head;
        let [Some(from_q), Some(from_k), from_v, Some(from_do)] = head.channels else { return };
        let Work { sequence, of_k, first_head, heads, row: key, seen } = *work;
        let Sequence { batch, first: [first_query, _], ends: [end_queries, end_keys], .. } = sequence;
        let of = if from_v.is_some() { Gradient::Keys } else { Gradient::Values };
        let ([keys, queries], zero) = (self.tile_of(of), b.i64(0));
        let of_queries = i64::from(queries);
        let begin = match seen.mask {
            Mask::Full => first_query,
            _ => {
                let first = key - seen.lag - seen.right.unwrap_or(zero) - first_query;
                first_query + first.max(0) / of_queries * of_queries
            }
        };
        let end = match seen.left {
            Some(left) => (key + i64::from(keys) - seen.lag + left).min(end_queries),
            None => end_queries,
        };
        let tiles = ((end - begin + (of_queries - 1)) / of_queries).max(0);
        let at_key = [batch, of_k, key, zero];
        sum.fill(0.0);
        from_k.fetch(k, at_key);
        if let Some(from_v) = from_v {
            from_v.fetch(v, at_key);
        }
        b.range(zero, tiles * heads).fold((first_head, begin), |_, (of_q, query)| {
            let at_query = [batch, of_q, query, zero];
            let limit = self.packed.then(|| (end_queries - query).min(of_queries).to(Scalar::I32));
            from_q.fetch(q, at_query);
            scores.product(from_k, from_q.transposed());
            from_do.fetch(d_o, at_query);
            from_lse.get(head.lse, [batch, of_q, query]);
            self.logs(head, limit);
            if let (Some(from_v), Some(slopes), Some(delta), Some(from_delta)) =
                (from_v, head.slopes, head.delta, head.from_delta)
            {
                slopes.product(from_v, from_do.transposed());
                from_do.release();
                from_delta.get(delta, [batch, of_q, query]);
                self.factor(head, &seen, [query, key], [queries, keys], |row, column| [column, row]);
                sum.mma(factor, from_q);
                from_q.release();
            } else {
                from_q.release();
                self.factor(head, &seen, [query, key], [queries, keys], |row, column| [column, row]);
                sum.mma(factor, from_do);
                from_do.release();
            }
            let next = query + of_queries;
            let over = next.ge(end);
            (over.select(of_q + 1, of_q), over.select(begin, next))
        });
        from_k.release();
        if let Some(from_v) = from_v {
            from_v.release();
        }
        let by = head.slopes.map(|_| head.scale);
        self.store(head, at_key, end_keys - key, by);
    }
}
