//! A value for the whole block from one in each thread: within warps by shuffles, between them by shared
//! memory.

use vm_ir::Type;
use vm_ir::builder::{Builder, PlaceRef, Val};

/// Threads of the blocks that reduce.
pub(crate) const THREADS: u32 = 256;
/// Warps of such a block.
pub(crate) const WARPS: u32 = THREADS / 32;

/// Combines one value of each thread; all threads get the result. `scratch` holds one element for each warp;
/// a barrier must lie between two uses of it.
pub(crate) fn block_reduce<'b>(
    k: Builder<'b>,
    value: Val<'b>,
    identity: f64,
    scratch: PlaceRef<'b>,
    over_warp: impl Fn(Val<'b>) -> Val<'b>,
) -> Val<'b> {
    let of_warp = over_warp(value);
    let lane = k.lane_id();
    k.if_(lane.eq(0), || scratch.at([k.warp_id()]).store(of_warp));
    k.barrier();
    let inside = lane.lt(WARPS as i32);
    let partial = k.if_else(inside, || scratch.at([lane]).load(), || k.constant(Type::F32, identity));
    over_warp(partial)
}

/// The better of two pairs of a value and its index: the greater value, of equals the lower index.
pub(crate) fn better<'b>(a: (Val<'b>, Val<'b>), b: (Val<'b>, Val<'b>)) -> (Val<'b>, Val<'b>) {
    let wins = b.0.gt(a.0) | (b.0.eq(a.0) & b.1.lt(a.1));
    (wins.select(b.0, a.0), wins.select(b.1, a.1))
}

/// The best pair of the block, in all threads.
pub(crate) fn block_best<'b>(
    k: Builder<'b>,
    mine: (Val<'b>, Val<'b>),
    values: PlaceRef<'b>,
    indices: PlaceRef<'b>,
) -> (Val<'b>, Val<'b>) {
    let over_warp = |mut best: (Val<'b>, Val<'b>)| {
        for mask in [16, 8, 4, 2, 1] {
            best = better(best, (best.0.shuffle_xor(mask), best.1.shuffle_xor(mask)));
        }
        best
    };
    let of_warp = over_warp(mine);
    let lane = k.lane_id();
    k.if_(lane.eq(0), || {
        let warp = k.warp_id();
        values.at([warp]).store(of_warp.0);
        indices.at([warp]).store(of_warp.1);
    });
    k.barrier();
    let partial = k.if_else(
        lane.lt(WARPS as i32),
        || (values.at([lane]).load(), indices.at([lane]).load()),
        || (k.f32(f32::NEG_INFINITY), k.i32(i32::MAX)),
    );
    over_warp(partial)
}
