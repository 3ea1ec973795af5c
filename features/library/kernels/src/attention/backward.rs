//! The gradients: of O's gradient, those of Q, K and V.
//!
//! With P = softmax(scale · Q · Kᵀ): dV = Pᵀ · dO, dS = P ∘ (dO · Vᵀ − δ), dK = scale · dSᵀ · Q, dQ = scale · dS · K, where δ
//! is the sum of each row of dO ∘ O. P comes again from the logarithms of sums that the forward kernel has stored. A block has
//! a tile of keys and goes over the queries that see them; it adds its share of dQ to a sum in memory.
//!
//! Packed sequences and other heads have [`SplitBackward`](super::SplitBackward).

use super::plan::{Order, Seen, each_tile, narrow, wide};
use super::{LOG2_E, Mask, UNSEEN};
use vm_ir::builder::{BuildError, Builder, ChannelRef, Factor, FragmentRef, IRBlock, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::types::Type;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant.
///
/// Views as in [`attention`](super); `delta` is of f32, `[batch, heads, queries]` as `lse` is. `sums`, of f32, is where dQ is
/// added up: `[batch, heads, queries, D]`, or, where [`turned`](Self::turned), `[batch, heads, tiles · D, 64]`: for each tile of
/// 64 queries, the last one whole, a row for each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backward {
    /// What the views hold: f16 or bf16.
    pub element: Scalar,
    /// D, the elements of a query, a key and a value: 64 or 128.
    pub dim: u32,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Queries that are copied at once, and keys of a block.
    pub tile: [u32; 2],
    /// Tiles of queries, and of O's gradient, that are on their way or in use; at least 2.
    pub stages: u32,
    /// Groups of warps that share the keys of a block.
    pub groups: u32,
    /// In which order tiles of keys are worked on.
    pub order: Order,
}

/// One of the three kernels, in the order in which they are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackwardPass {
    /// [`Backward::prepare`].
    Prepare,
    /// [`Backward::kernel`].
    Main,
    /// [`Backward::finish`].
    Finish,
}

/// Threads of a block of the kernels that are no tile kernels, and the queries it has.
pub(super) const THREADS: u32 = 256;
const QUERIES: u32 = 64;

/// What the main kernel has in its head.
struct Head<'b> {
    b: Builder<'b>,
    views: [PlaceRef<'b>; 4],
    lse: PlaceRef<'b>,
    delta: PlaceRef<'b>,
    sums: PlaceRef<'b>,
    outs: [PlaceRef<'b>; 2],
    scale: Val<'b>,
    from_q: ChannelRef<'b>,
    from_do: ChannelRef<'b>,
    from_k: ChannelRef<'b>,
    from_v: ChannelRef<'b>,
    /// dSᵀ, from where it is a factor of dQ.
    sent: ChannelRef<'b>,
    /// Sᵀ, then Pᵀ; and dO · Vᵀ, transposed.
    scores: FragmentRef<'b>,
    slopes: FragmentRef<'b>,
    /// Pᵀ and dSᵀ as factors.
    weights: FragmentRef<'b>,
    changes: FragmentRef<'b>,
    /// What the sums of scores and slopes begin with.
    from_lse: FragmentRef<'b>,
    from_delta: FragmentRef<'b>,
    dk: FragmentRef<'b>,
    dv: FragmentRef<'b>,
    dq: FragmentRef<'b>,
    out: FragmentRef<'b>,
}

/// A tile of keys: where it is, and who sees it.
struct Work<'b> {
    batch: Val<'b>,
    of_k: Val<'b>,
    key: Val<'b>,
    /// The tile's number.
    number: Val<'b>,
    /// The heads of queries that share the head of keys: the first, and how many.
    first_head: Val<'b>,
    heads: Val<'b>,
    seen: Seen<'b>,
}

/// The most neighbours of a row of `dim` elements that a lane of a warp loads at once: 16 bytes or fewer.
pub(super) fn lanes(element: Scalar, dim: u32) -> u32 {
    let most = 16 / element.bytes().max(1);
    [8, 4, 2].into_iter().find(|lanes| *lanes <= most && (dim / 32).is_multiple_of(*lanes)).unwrap_or(1)
}

/// Stores δ, the sum of each row of dO ∘ O, of 64 rows along x by a block of threads. Of a row of up to `dim` elements a lane loads `lanes` at once;
/// with one, rows may be shorter.
pub(super) fn store_delta<'b>(
    b: Builder<'b>,
    [dim, lanes]: [u32; 2],
    views: [PlaceRef<'b>; 2],
    delta: PlaceRef<'b>,
) {
    let [head, batch] = [Axis::Y, Axis::Z].map(|axis| b.block_id(axis).to_u(Scalar::I64));
    let row = b.block_id(Axis::X).to_u(Scalar::I64) * i64::from(QUERIES);
    let thread = b.thread_id(Axis::X);
    let (warp, lane) = (thread.shr_u(5), thread & 31);
    let [queries, length] = [2, 3].map(|dimension| views[0].extent(dimension));
    let columns: Vec<_> =
        (0..dim / 32 / lanes).map(|part| wide((lane + (part * 32) as i32) * lanes as i32)).collect();
    let warps = THREADS / 32;
    let own: Vec<_> = (0..QUERIES / warps).map(|number| row + wide(warp + (number * warps) as i32)).collect();
    // All are loaded before one is needed.
    let load = |query: Val<'b>, column: Val<'b>| {
        let column = if lanes > 1 { column } else { column.min(length - 1) };
        let at = [batch, head, query.min(queries - 1), column];
        views.map(|view| if lanes > 1 { view.at(at).load_vector(lanes as u8) } else { view.at(at).load() })
    };
    let loaded: Vec<Vec<_>> =
        own.iter().map(|query| columns.iter().map(|column| load(*query, *column)).collect()).collect();
    for (query, parts) in own.into_iter().zip(loaded) {
        let terms = parts.into_iter().zip(&columns).flat_map(|(both, column)| {
            let [x, y] = both.map(|elements| elements.to(Scalar::F32));
            let products = x * y;
            match lanes {
                1 => vec![column.lt(length).select(products, 0.0)],
                _ => (0..lanes as u8).map(|lane| products.lane(lane)).collect(),
            }
        });
        let sum = terms.reduce(|sum, term| sum + term).unwrap_or(b.f32(0.0)).warp_add();
        b.if_(lane.eq(0) & query.lt(queries), || delta.at([batch, head, query]).store(sum));
    }
}

impl Backward {
    /// The variant for heads of `dim` elements, 64 or 128.
    pub const fn of(dim: u32, causal: bool) -> Backward {
        let mask = if causal { Mask::Causal } else { Mask::Full };
        let tile = if dim == 64 { [128, 128] } else { [64, 128] };
        let order = if causal { Order::Balanced } else { Order::Heads };
        Backward { element: Scalar::Bf16, dim, mask, tile, stages: 3, groups: 2, order }
    }

    /// Is dQ added up with a row for each element, and not for each query? So it is where there are too few queries in a tile
    /// for the groups to share.
    pub const fn turned(&self) -> bool {
        self.tile[0] < 64 * self.groups
    }

    /// The kernel of a pass.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn pass(&self, pass: BackwardPass, guest: GuestAddr) -> Result<Kernel, BuildError> {
        match pass {
            BackwardPass::Prepare => self.prepare(guest),
            BackwardPass::Main => self.kernel(guest),
            BackwardPass::Finish => self.finish(guest),
        }
    }

    /// Bytes of shared memory that a block of the main kernel takes, about.
    pub(super) fn shared_bytes(&self) -> u64 {
        const OVERHEAD: u64 = 2048;
        let ([queries, keys], dim) = (self.tile.map(u64::from), u64::from(self.dim));
        let elements = 2 * u64::from(self.stages) * queries * dim + 2 * keys * dim + keys * queries;
        let sums = queries * dim * 4;
        OVERHEAD + elements * u64::from(self.element.bytes()) + sums
    }

    /// The name of a kernel of the variant, which tells it from all others.
    pub(super) fn name(&self, kernel: &str) -> String {
        let [queries, keys] = self.tile;
        let (element, dim, stages, groups) = (self.element, self.dim, self.stages, self.groups);
        let order = if self.order == Order::Balanced { "_b" } else { "" };
        format!(
            "attention_{kernel}_{}_{element}_d{dim}_{queries}x{keys}_s{stages}_g{groups}{order}",
            self.mask.name()
        )
    }

    fn view<'b>(&self, b: Builder<'b>, name: &str, access: Access) -> PlaceRef<'b> {
        let dims = [Dim::ANY, Dim::ANY, Dim::ANY, Dim::Fixed(self.dim.into())];
        b.view_of(name, ViewType::new(self.element, 4, access).with_dims(&dims).aligned(16))
    }

    fn sums<'b>(&self, b: Builder<'b>, access: Access) -> PlaceRef<'b> {
        let dim = Dim::Fixed(self.dim.into());
        let dims = match self.turned() {
            true => [Dim::ANY, Dim::ANY, Dim::Any { multiple: self.dim }, Dim::Fixed(QUERIES.into())],
            false => [Dim::ANY, Dim::ANY, Dim::ANY, dim],
        };
        b.view_of("sums", ViewType::new(Scalar::F32, 4, access).with_dims(&dims).aligned(16))
    }

    /// The kernel that comes first, of parameters `o`, `do`, `delta` and `sums`: computes δ, and sets the sums to zero. It has a
    /// block of threads for each 64 queries along x, each head of queries along y, and each sequence along z.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn prepare(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let b = block.builder();
        b.name(&self.name("prepare")).block_size([THREADS, 1, 1]);
        let [o, d_o] = ["o", "do"].map(|name| self.view(b, name, Access::Read));
        let delta = b.view("delta", Scalar::F32, 3, Access::Write);
        let sums = self.sums(b, Access::Write);
        let [head, batch] = [Axis::Y, Axis::Z].map(|axis| b.block_id(axis).to_u(Scalar::I64));
        let row = b.block_id(Axis::X).to_u(Scalar::I64) * i64::from(QUERIES);
        let thread = b.thread_id(Axis::X);
        store_delta(b, [self.dim, lanes(self.element, self.dim)], [o, d_o], delta);
        // Four elements at once.
        let (rows, fours) = if self.turned() { (self.dim, QUERIES / 4) } else { (QUERIES, self.dim / 4) };
        for number in 0..rows * fours / THREADS {
            let down = wide(thread.div_u(fours as i32) + (number * (THREADS / fours)) as i32);
            let across = wide(thread.rem_u(fours as i32) * 4);
            // A tile of 64 queries has a row for each of its elements, or of its queries.
            let down = if self.turned() { row * i64::from(self.dim / QUERIES) + down } else { row + down };
            b.if_(down.lt(sums.extent(2)), || {
                sums.at([batch, head, down, across]).store(b.f32(0.0).splat(4));
            });
        }
        block.kernel()
    }

    /// The kernel that comes last, of parameters `sums`, `dq` and `scale`: scales the sums and rounds them. Its launch is as
    /// that of [`prepare`](Self::prepare).
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn finish(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let b = block.builder();
        b.name(&self.name("finish")).block_size([THREADS, 1, 1]);
        let sums = self.sums(b, Access::Read);
        let dq = self.view(b, "dq", Access::Write);
        let scale = b.scalar("scale", Type::F32);
        let turned = self.turned().then(|| b.shared("turned", Scalar::F32, &[self.dim, QUERIES + 1]));
        let [head, batch] = [Axis::Y, Axis::Z].map(|axis| b.block_id(axis).to_u(Scalar::I64));
        let row = b.block_id(Axis::X).to_u(Scalar::I64) * i64::from(QUERIES);
        let thread = b.thread_id(Axis::X);
        let fours = if self.turned() { QUERIES / 4 } else { self.dim / 4 };
        let rows = THREADS / fours;
        let (down, across) = (thread.div_u(fours as i32), thread.rem_u(fours as i32) * 4);
        let steps = if self.turned() { self.dim } else { QUERIES } / rows;
        let downs: Vec<_> = (0..steps).map(|number| down + (number * rows) as i32).collect();
        // All are loaded before one is needed.
        let first = if self.turned() { row * i64::from(self.dim / QUERIES) } else { row };
        let last = sums.extent(2) - 1;
        let loaded: Vec<_> = downs
            .iter()
            .map(|down| sums.at([batch, head, (first + wide(*down)).min(last), wide(across)]).load_vector(4))
            .collect();
        let Some(turned) = turned else {
            for (down, four) in downs.into_iter().zip(loaded) {
                let query = row + wide(down);
                b.if_(query.lt(dq.extent(2)), || {
                    let out = (four * scale.splat(4)).to(self.element);
                    dq.at([batch, head, query, wide(across)]).store(out);
                });
            }
            return block.kernel();
        };
        for (down, four) in downs.into_iter().zip(loaded) {
            for lane in 0..4 {
                turned.at([down, across + i32::from(lane)]).store(four.lane(lane));
            }
        }
        b.barrier();
        let (warp, pair) = (thread.shr_u(5), (thread & 31) * 2);
        for number in 0..QUERIES / (THREADS / 32) {
            let across = warp + (number * (THREADS / 32)) as i32;
            let query = row + wide(across);
            b.if_(query.lt(dq.extent(2)), || {
                for first in (0..self.dim as i32).step_by(64) {
                    let down = pair + first;
                    let low = turned.at([down, across]).load().splat(2);
                    let two = low.with_lane(1, turned.at([down + 1, across]).load());
                    dq.at([batch, head, query, wide(down)]).store((two * scale.splat(2)).to(self.element));
                }
            });
        }
        block.kernel()
    }

    /// The main kernel, of parameters `q`, `k`, `v`, `do`, `lse`, `delta`, `sums`, `dk`, `dv`, `scale`, and of a
    /// [`Mask::Window`] `left` and `right`.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let b = block.builder();
        b.name(&self.name("backward")).tile_groups(self.groups);
        let [queries, keys] = self.tile;
        let (element, dim) = (self.element, self.dim);
        let views = ["q", "k", "v", "do"].map(|name| self.view(b, name, Access::Read));
        let [q, k, ..] = views;
        let [lse, delta] = ["lse", "delta"].map(|name| b.view(name, Scalar::F32, 3, Access::Read));
        let sums = self.sums(b, Access::ReadWrite);
        let outs = ["dk", "dv"].map(|name| self.view(b, name, Access::Write));
        let scale = b.scalar("scale", Type::F32);
        let window =
            (self.mask == Mask::Window).then(|| ["left", "right"].map(|name| b.scalar(name, Type::I32)));
        let channel = |name, dims, stages| b.channel(name, element, dims, stages);
        let matrix = |name, element, dims| b.fragment(name, element, dims);
        let head = Head {
            b,
            views,
            lse,
            delta,
            sums,
            outs,
            scale,
            from_q: channel("from_q", [queries, dim], self.stages),
            from_do: channel("from_do", [queries, dim], self.stages),
            from_k: channel("from_k", [keys, dim], 1),
            from_v: channel("from_v", [keys, dim], 1),
            sent: channel("sent", [keys, queries], 1),
            scores: matrix("scores", Scalar::F32, [keys, queries]),
            slopes: matrix("slopes", Scalar::F32, [keys, queries]),
            weights: matrix("weights", element, [keys, queries]),
            changes: matrix("changes", element, [keys, queries]),
            from_lse: b.row("from_lse", Scalar::F32, queries),
            from_delta: b.row("from_delta", Scalar::F32, queries),
            dk: matrix("sum_k", Scalar::F32, [keys, dim]),
            dv: matrix("sum_v", Scalar::F32, [keys, dim]),
            dq: matrix("sum_q", Scalar::F32, if self.turned() { [dim, queries] } else { [queries, dim] }),
            out: matrix("out", element, [keys, dim]),
        };
        let window = window.map(|both| both.map(|reach| reach.to(Scalar::I64)));
        let heads = narrow(k.extent(1));
        let sharing = narrow(q.extent(1)).div_u(heads);
        let tiles = (narrow(k.extent(2)) + (keys as i32 - 1)).div_u(keys as i32);
        each_tile(b, self.order, true, [tiles, heads, narrow(q.extent(0))], |tile| {
            self.tile_of(
                &head,
                &Work {
                    batch: wide(tile.batch).named("batch"),
                    of_k: wide(tile.head).named("head"),
                    number: wide(tile.number),
                    key: (wide(tile.number) * i64::from(keys)).named("key"),
                    first_head: wide(tile.head * sharing),
                    heads: wide(sharing),
                    seen: Seen {
                        mask: self.mask,
                        left: window.map(|[left, _]| left),
                        right: window.map(|[_, right]| right),
                        begin: None,
                        keys: k.extent(2),
                        lag: (k.extent(2) - q.extent(2)).named("lag"),
                    },
                },
            );
        });
        block.kernel()
    }

    /// The gradients of a tile of keys and values.
    fn tile_of<'b>(&self, head: &Head<'b>, work: &Work<'b>) {
        let Head { b, scale, from_q, from_do, from_k, from_v, sent, scores, slopes, .. } = *head;
        let Head { weights, changes, from_lse, from_delta, dk, dv, dq, out, .. } = *head;
        let [q, k, v, d_o] = head.views;
        let Work { batch, of_k, key, number, first_head, heads, seen } = *work;
        let (zero, element) = (b.i64(0), self.element);
        let [queries, keys] = self.tile;
        let of_queries = i64::from(queries);
        // From the tile of the first query that sees some of the keys up to the last query that does.
        let begin = match seen.mask {
            Mask::Full => zero,
            _ => {
                let first = key - seen.lag - seen.right.unwrap_or(zero);
                first.max(0) / of_queries * of_queries
            }
        };
        let end = match seen.left {
            Some(left) => (key + i64::from(keys) - seen.lag + left).min(q.extent(2)),
            None => q.extent(2),
        };
        let tiles = (end - begin + (of_queries - 1)) / of_queries;
        let count = (tiles.max(0) * heads).named("count");
        // Blocks that have tiles of one head begin at queries of their own, lest all add to the same share of dQ at once.
        let start = match seen.mask {
            Mask::Full => number % tiles * of_queries,
            _ => begin,
        };
        let scale2 = scale * LOG2_E;

        // Sums of scores begin with what makes weights of them, and those of slopes with what is taken off.
        let unscaled = -scale.rcp();
        let begin_sums = || {
            b.map([from_lse], [from_lse], |_, _, [log]| [log.gt(UNSEEN).select(log * unscaled, 0.0)]);
            b.map([scores, slopes], [from_lse, from_delta], |_, _, [log, delta]| [log, -delta]);
        };
        let get_rows = |of_q: Val<'b>, query: Val<'b>| {
            from_lse.get(head.lse, [batch, of_q, query]);
            from_delta.get(head.delta, [batch, of_q, query]);
        };

        b.map([dk, dv], [], |_, _, []| [b.f32(0.0); 2]);
        from_k.fetch(k, [batch, of_k, key, zero]);
        from_v.fetch(v, [batch, of_k, key, zero]);
        get_rows(first_head, start);
        begin_sums();
        b.range(zero, count).fold((first_head, start), |_, (of_q, query)| {
            from_q.fetch(q, [batch, of_q, query, zero]);
            scores.mma(from_k, from_q.transposed());
            from_do.fetch(d_o, [batch, of_q, query, zero]);
            slopes.mma(from_v, from_do.transposed());
            b.map([weights], [scores], |_, _, [score]| [(score * scale2).exp2().fast().to(element)]);
            b.if_(seen.masks(query, queries, key, keys), || {
                let seen = seen.within(query, key);
                b.map([weights], [weights], |key, query, [weight]| {
                    [seen(query, key).select(weight, b.bits(element.into(), 0))]
                });
            });
            dv.mma(weights, from_do);
            // The rounded weights take half the registers.
            b.map([changes], [weights, slopes], |_, _, [weight, slope]| {
                [(weight.to(Scalar::F32) * slope).to(element)]
            });
            let next = query + of_queries;
            let next = next.ge(end).select(begin, next);
            let next_head = next.eq(start).select(of_q + 1, of_q);
            changes.send(sent);
            match self.turned() {
                true => dq.product(Factor::from(from_k).transposed(), sent),
                false => dq.product(sent.transposed(), from_k),
            }
            dk.mma(changes, from_q);
            from_do.release();
            get_rows(next_head, next);
            match self.turned() {
                true => dq.put_add(head.sums, [batch, of_q, query * i64::from(self.dim / QUERIES), zero]),
                false => dq.put_add(head.sums, [batch, of_q, query, zero]),
            }
            begin_sums();
            sent.release();
            from_q.release();
            (next_head, next)
        });
        from_k.release();
        from_v.release();
        let [of_dk, of_dv] = head.outs;
        b.map([out], [dv], |_, _, [sum]| [sum.to(element)]);
        out.put(of_dv, [batch, of_k, key, zero]);
        b.map([out], [dk], |_, _, [sum]| [(sum * scale).to(element)]);
        out.put(of_dk, [batch, of_k, key, zero]);
    }
}
