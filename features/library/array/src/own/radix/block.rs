//! A block's elements in the order of a digit, those of one digit as they were.

use vm_ir::Scalar;
use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::{Axis, BarrierScope};

use super::key::DIGITS;
use crate::emit::{THREADS, WARP};

const WARPS: u32 = THREADS / WARP;
/// Bits of a digit.
const BITS: i32 = DIGITS.trailing_zeros() as i32;
/// Elements of a thread that are counted one behind the other.
const TOGETHER: usize = 4;

/// A block, which has as many threads as a digit has values. Its elements are in the order of warps, of loads of a warp, and of lanes.
pub(super) struct Block<'b> {
    k: Builder<'b>,
    items: u32,
    pub(super) thread: Val<'b>,
    lane: Val<'b>,
    warp: Val<'b>,
    /// How many of each digit a warp has, then where its first one goes; and of each lane a number that nobody reads.
    counts: PlaceRef<'b>,
}

/// Where elements go.
pub(super) struct Ranked<'b> {
    /// Of each element of the thread, the place in the block.
    pub(super) to: Vec<Val<'b>>,
    /// Of the digit that is the thread's number, the first place.
    pub(super) first: Val<'b>,
    /// And how many have it.
    pub(super) count: Val<'b>,
}

impl<'b> Block<'b> {
    /// A block with so many elements of each thread.
    pub(super) fn new(k: Builder<'b>, items: u32) -> Self {
        const { assert!(THREADS == DIGITS) };
        k.block_size([THREADS, 1, 1]);
        let counts = k.shared("counts_of_warps", Scalar::I32, &[WARPS, DIGITS + WARP]);
        Self { k, items, thread: k.thread_id(Axis::X), lane: k.lane_id(), warp: k.warp_id(), counts }
    }

    /// Where the thread's elements are in the block, in its order.
    pub(super) fn places(&self) -> Vec<Val<'b>> {
        self.from(self.first())
    }

    /// The same places in what has the block's first element at `first`.
    pub(super) fn places_from(&self, first: Val<'b>) -> Vec<Val<'b>> {
        self.from(first + self.first().to(first.ty().scalar()))
    }

    fn first(&self) -> Val<'b> {
        self.warp * (self.items * WARP) as i32 + self.lane
    }

    fn from(&self, first: Val<'b>) -> Vec<Val<'b>> {
        (0..self.items).map(|item| first + (item * WARP) as i32).collect()
    }

    /// Places in the block that lie beside those of other threads.
    pub(super) fn neighbours(&self) -> Vec<Val<'b>> {
        (0..self.items).map(|item| self.thread + (item * THREADS) as i32).collect()
    }

    /// The sum of what threads before have. Each call has shared memory by its name.
    pub(super) fn sum_before(&self, name: &str, value: Val<'b>) -> Val<'b> {
        let k = self.k;
        let sums = k.shared(name, value.ty().scalar(), &[WARPS]);
        let mut up_to = value;
        for distance in [1, 2, 4, 8, 16] {
            let below = up_to.shuffle_up(distance);
            up_to = self.lane.ge(distance).select(up_to + below, up_to);
        }
        k.if_(self.lane.eq(WARP as i32 - 1), || sums.at([self.warp]).store(up_to));
        k.barrier();
        (0..WARPS as i32).fold(up_to - value, |sum, warp| {
            let of_warp = sums.at([k.i32(warp)]).load();
            self.warp.gt(warp).select(sum + of_warp, sum)
        })
    }

    /// Ranks elements by their digits.
    pub(super) fn ranked(&self, digits: &[Val<'b>]) -> Ranked<'b> {
        let k = self.k;
        let of_warp = |warp: u32| self.counts.at([k.i32(warp as i32), self.thread]);
        (0..WARPS).for_each(|warp| of_warp(warp).store(0));
        k.barrier();
        let lower = (k.i32(1) << self.lane) - 1;
        let rank = |digit: &Val<'b>| {
            // The lanes with the same digit, of which the first one counts.
            let peers = (0..BITS).fold(k.i32(-1), |peers, bit| {
                let is_set = (*digit & (1 << bit)).ne(0);
                let set = is_set.ballot();
                peers & is_set.select(set, !set)
            });
            let below = (peers & lower).popcount();
            // No branch: others count where nobody looks.
            let counter = below.eq(0).select(*digit, self.lane + DIGITS as i32);
            let before = self.counts.at([self.warp, counter]).atomic_add(peers.popcount());
            k.barrier_of(BarrierScope::Warp);
            (before, peers.ctz(), below)
        };
        // A digit and the rank by it share a register until all are counted. Some are counted before the first is asked for.
        let mut ranks = Vec::new();
        for digits in digits.chunks(TOGETHER) {
            let counted: Vec<_> = digits.iter().map(rank).collect();
            for (digit, (before, first, below)) in digits.iter().zip(counted) {
                ranks.push((before.shuffle(first) + below) << BITS | *digit);
            }
        }
        k.barrier();
        let counts: Vec<_> = (0..WARPS).map(|warp| of_warp(warp).load()).collect();
        let count = counts.iter().fold(k.i32(0), |sum, count| sum + *count);
        let first = self.sum_before("counts_before", count);
        (0..WARPS).zip(&counts).fold(first, |next, (warp, count)| {
            of_warp(warp).store(next);
            next + *count
        });
        k.barrier();
        let to = ranks.into_iter().map(|both| {
            let digit = both & (DIGITS as i32 - 1);
            self.counts.at([self.warp, digit]).load() + both.shr_u(BITS)
        });
        Ranked { to: to.collect(), first, count }
    }
}
