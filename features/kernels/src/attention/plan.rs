//! How blocks divide the tiles of all heads among themselves, and what is masked of a tile.

use super::Mask;
use vm_ir::Scalar;
use vm_ir::builder::{Builder, Val};
use vm_ir::op::Axis;

/// In which order tiles are worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Head by head: where all tiles are as long.
    Heads,
    /// Head by head, each tile with its opposite: the longest with the shortest, which together are as long as any other pair.
    Pairs,
    /// The longest of all heads first, then the next shorter; every second round of blocks backwards.
    Longest,
}

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
    // Of what blocks take the next when they are done with one, and how many rounds one takes.
    let (units, halves) = match order {
        Order::Pairs => ((tiles + 1) / 2 * all_heads, 2),
        _ => (tiles * all_heads, 1),
    };
    let rounds = (units + blocks - 1).div_u(blocks) * halves;
    let own_last = blocks - 1 - block;
    b.range(b.i32(0), rounds).each(|round| {
        let place = match order {
            Order::Longest => (round & 1).eq(0).select(block, own_last),
            _ => block,
        };
        let unit = if halves == 2 { (round >> 1) * blocks + place } else { round * blocks + place };
        let (number, head, there) = match order {
            Order::Heads => (unit.rem_u(tiles), unit.div_u(tiles), unit.lt(units)),
            Order::Longest => (unit.div_u(all_heads), unit.rem_u(all_heads), unit.lt(units)),
            Order::Pairs => {
                let pairs = (tiles + 1) / 2;
                let (pair, head) = (unit.rem_u(pairs), unit.div_u(pairs));
                let opposite = tiles - 1 - pair;
                let second = (round & 1).eq(1);
                // The one in the middle has none.
                let single = second & pair.eq(opposite);
                (second.select(opposite, pair), head, unit.lt(units) & !single)
            }
        };
        let number = if ascending || order == Order::Heads { number } else { tiles - 1 - number };
        b.if_(there, || body(Tile { number, head: head.rem_u(heads), batch: head.div_u(heads) }));
    });
}

/// What queries see, as distances: of keys that begin at an index from queries that begin at another; i64.
#[derive(Clone, Copy)]
pub(super) struct Seen<'b> {
    pub(super) mask: Mask,
    /// How far keys before and behind a query's place are seen.
    pub(super) left: Option<Val<'b>>,
    pub(super) right: Option<Val<'b>>,
    /// How many keys there are, and the place of the first query.
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
        move |query, key| {
            let mut seen = key.lt(there);
            if let Some(last) = last {
                seen = seen & key.le(query + last);
            }
            if let Some(first) = first {
                seen = seen & key.ge(query + first);
            }
            seen
        }
    }
}
