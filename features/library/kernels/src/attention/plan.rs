//! How blocks divide the tiles of all heads among themselves, and what is masked of a tile.

use super::Mask;
use vm_ir::Scalar;
use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::types::Type;
use vm_ir::view::Access;

/// In which order tiles are worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Head by head: where all tiles take as long.
    Heads,
    /// Where some take longer, so that all blocks have as much to do. Of short sequences head by head, each tile with its
    /// opposite: the longest with the shortest. Of long ones the longest of all heads first, then the next shorter, every
    /// second round of blocks backwards; of short ones all heads at once would be too many for the cache.
    Balanced,
}

/// As many tiles make a long sequence (measured on an H200).
const LONG: i32 = 48;

/// An extent as an i32, from which tiles are counted.
pub(super) fn narrow(extent: Val<'_>) -> Val<'_> {
    extent.min(i64::from(i32::MAX / 2)).to(Scalar::I32)
}

/// A number that is not negative as an index.
pub(super) fn wide(number: Val<'_>) -> Val<'_> {
    number.to_u(Scalar::I64)
}

/// A tile of a head.
#[derive(Clone, Copy)]
pub(super) struct Tile<'b> {
    /// Its number among the head's, the head's among the sequence's, and the sequence's; i32.
    pub(super) number: Val<'b>,
    pub(super) head: Val<'b>,
    pub(super) batch: Val<'b>,
}

/// Runs `body` for each tile that is this block's, of `tiles` in each of `heads` in each of `batches`, all i32. The longest
/// tiles are the last ones; `ascending` if they are the first.
pub(super) fn each_tile<'b>(
    b: Builder<'b>,
    order: Order,
    ascending: bool,
    [tiles, heads, batches]: [Val<'b>; 3],
    body: impl FnOnce(Tile<'b>),
) {
    let (block, blocks) = (b.block_id(Axis::X), b.grid_dim(Axis::X));
    let all_heads = heads * batches;
    let rounds_of = |units: Val<'b>| (units + blocks - 1).div_u(blocks);
    if order == Order::Heads {
        let units = tiles * all_heads;
        b.range(b.i32(0), rounds_of(units)).each(|round| {
            let unit = round * blocks + block;
            let head = unit.div_u(tiles);
            let number = unit - head * tiles;
            let tile = Tile { number, head: head.rem_u(heads), batch: head.div_u(heads) };
            b.if_(unit.lt(units), || body(tile));
        });
        return;
    }
    let long = tiles.ge(LONG);
    let pairs = (tiles + 1) / 2;
    // A pair takes two rounds.
    let units = long.select(tiles, pairs) * all_heads;
    let shift = long.select(b.i32(0), 1);
    b.range(b.i32(0), rounds_of(units) << shift).each(|round| {
        let odd = (round & 1).eq(1);
        let place = (long & odd).select(blocks - 1 - block, block);
        let unit = (round >> shift) * blocks + place;
        let slow = unit.div_u(long.select(all_heads, pairs));
        let fast = unit - slow * long.select(all_heads, pairs);
        let opposite = tiles - 1 - fast;
        let number = long.select(slow, odd.select(opposite, fast));
        let head = long.select(fast, slow);
        // The one in the middle has none.
        let single = !long & odd & fast.eq(opposite);
        let number = if ascending { number } else { tiles - 1 - number };
        let tile = Tile { number, head: head.rem_u(heads), batch: head.div_u(heads) };
        b.if_(unit.lt(units) & !single, || body(tile));
    });
}

/// A sequence: where its queries and keys begin in the views, where they end, and how many there are; i64.
#[derive(Clone, Copy)]
pub(super) struct Sequence<'b> {
    pub(super) batch: Val<'b>,
    pub(super) first: [Val<'b>; 2],
    pub(super) ends: [Val<'b>; 2],
    pub(super) lengths: [Val<'b>; 2],
}

impl<'b> Sequence<'b> {
    /// What its queries see, by their indices in the views and those of keys.
    pub(super) fn seen(&self, mask: Mask, window: Option<[Val<'b>; 2]>) -> Seen<'b> {
        let [end_queries, end_keys] = self.ends;
        Seen {
            mask,
            left: window.map(|[left, _]| left),
            right: window.map(|[_, right]| right),
            begin: None,
            keys: end_keys,
            lag: (end_keys - end_queries).named("lag"),
        }
    }
}

/// The sequences of a launch: those of a batch, all as long, or packed ones.
#[derive(Clone, Copy)]
pub(super) struct Sequences<'b> {
    /// Views of queries and of keys, `[batch, heads, tokens, D]`.
    views: [PlaceRef<'b>; 2],
    /// Of packed ones, where each begins and the last ends, and how many tokens a tile may begin below in any.
    packed: Option<([PlaceRef<'b>; 2], Val<'b>)>,
}

impl<'b> Sequences<'b> {
    /// Where packed sequences begin: parameters `q_starts` and `k_starts`, if there are such.
    pub(super) fn starts(b: Builder<'b>, packed: bool) -> Option<[PlaceRef<'b>; 2]> {
        packed.then(|| ["q_starts", "k_starts"].map(|name| b.view(name, Scalar::I32, 1, Access::Read)))
    }

    /// The last parameter of packed ones is `longest`.
    pub(super) fn new(
        b: Builder<'b>,
        views: [PlaceRef<'b>; 2],
        starts: Option<[PlaceRef<'b>; 2]>,
    ) -> Sequences<'b> {
        Sequences { views, packed: starts.map(|starts| (starts, b.scalar("longest", Type::I32))) }
    }

    /// The most tokens of a sequence, of queries (0) or keys (1), and how many sequences there are; i32.
    pub(super) fn extents(&self, which: usize) -> [Val<'b>; 2] {
        match self.packed {
            Some(([of_q, _], longest)) => [longest, narrow(of_q.extent(0)) - 1],
            None => [narrow(self.views[which].extent(2)), narrow(self.views[0].extent(0))],
        }
    }

    /// Has `body` do what is to be done for a sequence, if `row` is one of its queries (0) or keys (1).
    pub(super) fn with(
        &self,
        b: Builder<'b>,
        which: usize,
        number: Val<'b>,
        row: Val<'b>,
        body: impl FnOnce(Sequence<'b>),
    ) {
        let zero = b.i64(0);
        let Some((starts, _)) = self.packed else {
            let lengths = self.views.map(|view| view.extent(2));
            return body(Sequence { batch: number, first: [zero; 2], ends: lengths, lengths });
        };
        let bounds =
            starts.map(|starts| [number, number + 1].map(|at| starts.at([at]).load().to(Scalar::I64)));
        let first = bounds.map(|[begin, _]| begin);
        let ends = bounds.map(|[_, end]| end);
        let lengths = bounds.map(|[begin, end]| end - begin);
        b.if_(row.lt(lengths[which]), || body(Sequence { batch: zero, first, ends, lengths }));
    }
}

/// What queries see, as distances: of keys that begin at an index from queries that begin at another; i64.
#[derive(Clone, Copy)]
pub(super) struct Seen<'b> {
    pub(super) mask: Mask,
    /// How far keys before and behind a query's place are seen.
    pub(super) left: Option<Val<'b>>,
    pub(super) right: Option<Val<'b>>,
    /// The first key, if it is not that at 0.
    pub(super) begin: Option<Val<'b>>,
    /// Where keys end, and the place of the first query.
    pub(super) keys: Val<'b>,
    pub(super) lag: Val<'b>,
}

impl<'b> Seen<'b> {
    /// The place of the last key that a query sees, if that is bounded.
    pub(super) fn last(&self, query: Val<'b>) -> Option<Val<'b>> {
        match (self.mask, self.right) {
            (Mask::Full, _) => None,
            (_, None) => Some(query + self.lag),
            (_, Some(right)) => Some(query + self.lag + right),
        }
    }

    /// The place of the first key that a query sees, if that is bounded.
    pub(super) fn first(&self, query: Val<'b>) -> Option<Val<'b>> {
        self.left.map(|left| query + self.lag - left)
    }

    /// Does a query of the `queries` from one on not see some key of the `keys` from another on?
    pub(super) fn masks(&self, query: Val<'b>, queries: u32, key: Val<'b>, keys: u32) -> Val<'b> {
        let end = key + i64::from(keys);
        let mut masks = end.gt(self.keys);
        if let Some(last) = self.last(query) {
            masks = masks | end.gt(last + 1);
        }
        if let Some(first) = self.first(query + i64::from(queries - 1)) {
            masks = masks | key.lt(first);
        }
        if let Some(begin) = self.begin {
            masks = masks | key.lt(begin);
        }
        masks
    }

    /// Tells of a key and a query, by their numbers in their tiles (i32), whether the one is seen by the other.
    pub(super) fn within(
        &self,
        query: Val<'b>,
        key: Val<'b>,
    ) -> impl Fn(Val<'b>, Val<'b>) -> Val<'b> + use<'b> {
        // Numbers within a tile are small, so that 32 bits do once the distance is known.
        let limit = i64::from(i32::MAX / 4);
        let short = |distance: Val<'b>| distance.min(limit).max(-limit).to(Scalar::I32);
        let there = short(self.keys - key);
        let last = self.last(query).map(|last| short(last - key));
        let first = self.first(query).map(|first| short(first - key));
        let begin = self.begin.map(|begin| short(begin - key));
        move |query, key| {
            let mut seen = key.lt(there);
            if let Some(last) = last {
                seen = seen & key.le(query + last);
            }
            if let Some(first) = first {
                seen = seen & key.ge(query + first);
            }
            if let Some(begin) = begin {
                seen = seen & key.ge(begin);
            }
            seen
        }
    }
}
