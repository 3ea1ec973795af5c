//! Races: two threads at one element with nothing that orders them, one of them writing.
//!
//! Each element remembers its last write and its last reads, with the number of barriers that the block and
//! the warp had then passed. Accesses of two threads are ordered if a barrier of their block lies between
//! them, or, in one warp, a barrier of the warp. Of two blocks, a gather of their cluster orders the accesses to shared
//! arrays, and nothing any others. Atomics do not race with atomics.

use crate::limits::WARP;
use crate::types::{Class, Scalar};

/// When and by whom an element was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// The block, counted through the grid.
    pub(super) block: u64,
    /// The cluster, counted through the grid.
    pub(super) cluster: u64,
    /// Gathers that the cluster had passed; 0 in a view, whose accesses they don't order.
    pub(super) cluster_epoch: u32,
    /// The thread in the block.
    pub(super) thread: u32,
    /// Barriers that the block had passed.
    pub(super) block_epoch: u32,
    /// Barriers that the warp had passed.
    pub(super) warp_epoch: u32,
    /// Was it an atomic?
    pub(super) atomic: bool,
}

impl Stamp {
    /// Could the two have happened at once?
    fn unordered(&self, other: &Stamp) -> bool {
        if self.cluster != other.cluster {
            return true;
        }
        if self.cluster_epoch != other.cluster_epoch {
            return false;
        }
        if self.block != other.block {
            return true;
        }
        if self.thread == other.thread || self.block_epoch != other.block_epoch {
            return false;
        }
        self.thread / WARP != other.thread / WARP || self.warp_epoch == other.warp_epoch
    }

    /// What keeps this access and another one apart, to memory of this element that is shared or is not. Threads that meet
    /// at one element most often combine what they have there, which an atomic does.
    pub(super) fn remedy(&self, other: &Stamp, (element, shared): (Scalar, bool), tile: bool) -> String {
        let same_block = (self.cluster, self.block) == (other.cluster, other.block);
        if shared && !same_block {
            return "gather into two arrays in turns, or put another gather between them".to_owned();
        }
        if self.atomic != other.atomic {
            let barrier = if same_block { ", or put a barrier between them" } else { "" };
            return format!("make both atomic{barrier}");
        }
        if tile {
            let each = "no order is among blocks: add with put.add, or give each block a box of its own";
            return each.to_owned();
        }
        let scope = if same_block { "block" } else { "device" };
        let atomic = Class::WORD_ARITH
            .contains(element)
            .then(|| format!("use an atomic, such as atomic.add.{scope}, if both combine into the element"));
        match (same_block, atomic) {
            (true, None) => "put a barrier between them".to_owned(),
            (true, Some(atomic)) => format!("put a barrier between them, or {atomic}"),
            (false, None) => "no barrier orders two blocks: give each an element of its own".to_owned(),
            (false, Some(atomic)) => {
                format!("no barrier orders two blocks: {atomic}, else give each one of its own")
            }
        }
    }

    /// Do the two conflict, if one of them writes?
    fn races(&self, other: &Stamp) -> bool {
        !(self.atomic && other.atomic) && self.unordered(other)
    }
}

/// The last accesses to one element.
#[derive(Clone, Copy, Debug, Default)]
struct Touched {
    write: Option<Stamp>,
    /// The last reads of two different threads.
    reads: [Option<Stamp>; 2],
}

/// The last accesses to all elements of a place.
#[derive(Clone, Debug, Default)]
pub(super) struct Shadow {
    touched: Vec<Touched>,
}

impl Shadow {
    /// Bytes that it takes for each element.
    pub(super) const BYTES: u64 = size_of::<Touched>() as u64;

    pub(super) fn new(elements: usize) -> Shadow {
        Shadow { touched: vec![Touched::default(); elements] }
    }

    /// Has the element been written?
    pub(super) fn written(&self, element: usize) -> bool {
        self.touched.get(element).is_some_and(|t| t.write.is_some())
    }

    /// Notes a read; gives a write that it races with.
    pub(super) fn read(&mut self, element: usize, now: Stamp) -> Option<Stamp> {
        let touched = self.touched.get_mut(element)?;
        let race = touched.write.filter(|w| w.races(&now));
        match touched.reads[0] {
            Some(last) if (last.block, last.thread) != (now.block, now.thread) => {
                touched.reads = [Some(now), Some(last)];
            }
            _ => touched.reads[0] = Some(now),
        }
        race
    }

    /// Notes a write; gives an access that it races with.
    pub(super) fn write(&mut self, element: usize, now: Stamp) -> Option<Stamp> {
        let touched = self.touched.get_mut(element)?;
        let race =
            [touched.write, touched.reads[0], touched.reads[1]].into_iter().flatten().find(|t| t.races(&now));
        *touched = Touched { write: Some(now), reads: [None; 2] };
        race
    }
}
