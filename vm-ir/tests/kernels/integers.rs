//! Counting, prefix sums, random numbers.

use super::check;
use vm_ir::builder::Val;
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{Scalar, Type};

#[test]
fn histogram() {
    const BINS: u32 = 64;
    check("histogram", |k| {
        k.block_size([128, 1, 1]);
        let x = k.view("x", Scalar::I32, 1, Access::Read);
        let counts_type =
            ViewType::new(Scalar::I32, 1, Access::ReadWrite).with_dims(&[Dim::Fixed(BINS.into())]);
        let counts = k.view_of("counts", counts_type);
        let local = k.shared("local", Scalar::I32, &[BINS]);
        let t = k.thread_id(Axis::X).named("t");
        k.if_(t.lt(BINS), || local.at([t]).store(0));
        k.barrier();
        let stride = k.grid_dim(Axis::X).to(Scalar::I64) * 128;
        k.range(k.global_id(Axis::X), x.extent(0)).step(stride).each(|i| {
            let bin = x.at([i]).load();
            k.if_(bin.lt_u(BINS), || {
                local.at([bin]).atomic_add(1);
            });
        });
        k.barrier();
        k.if_(t.lt(BINS), || {
            counts.at([t]).atomic_add(local.at([t]).load());
        });
    });
}

/// The running sum within the warp.
fn scan_warp<'b>(lane: Val<'b>, mut sum: Val<'b>) -> Val<'b> {
    for distance in [1, 2, 4, 8, 16] {
        let below = sum.shuffle_up(distance);
        sum = lane.ge(distance).select(sum + below, sum);
    }
    sum
}

#[test]
fn scan() {
    check("scan", |k| {
        k.block_size([256, 1, 1]);
        let x = k.view("x", Scalar::I32, 1, Access::Read);
        let y = k.view("y", Scalar::I32, 1, Access::Write);
        let totals = k.shared("totals", Scalar::I32, &[8]);
        let i = k.global_id(Axis::X).named("i");
        let (lane, warp) = (k.lane_id().named("lane"), k.warp_id().named("warp"));
        let n = x.extent(0);
        let mine = k.if_else(i.lt(n), || x.at([i]).load(), || k.i32(0));
        // Every thread comes here, those beyond the end with a zero, so the warps are whole.
        let within = scan_warp(lane, mine);
        k.if_(lane.eq(31), || totals.at([warp]).store(within));
        k.barrier();
        k.if_(warp.eq(0), || {
            let total = k.if_else(lane.lt(8), || totals.at([lane]).load(), || k.i32(0));
            let all = scan_warp(lane, total);
            k.if_(lane.lt(8), || totals.at([lane]).store(all));
        });
        k.barrier();
        let before = k.if_else(warp.gt(0), || totals.at([warp - 1]).load(), || k.i32(0));
        k.if_(i.lt(n), || y.at([i]).store(within + before));
    });
}

#[test]
fn philox() {
    check("philox", |k| {
        k.block_size([64, 1, 1]);
        let dims = [Dim::Any { multiple: 4 }];
        let out = k.view_of("out", ViewType::new(Scalar::I32, 1, Access::Write).aligned(16).with_dims(&dims));
        let seed = k.scalar("seed", Type::I64);
        let offset = k.scalar("offset", Type::I64);
        let i = k.global_id(Axis::X).named("i");
        let counter = offset + i;
        let start = [
            counter.to(Scalar::I32),
            counter.shr_u(32).to(Scalar::I32),
            k.i32(0),
            k.i32(0),
            seed.to(Scalar::I32),
            seed.shr_u(32).to(Scalar::I32),
        ];
        let done = k.range(k.i32(0), 10).unroll(10).fold(start, |_, [c0, c1, c2, c3, key0, key1]| {
            let (m0, m1) = (k.i32(0xd251_1f53u32 as i32), k.i32(0xcd9e_8d57u32 as i32));
            [
                c2.mulhi_u(m1) ^ c1 ^ key0,
                c2 * m1,
                c0.mulhi_u(m0) ^ c3 ^ key1,
                c0 * m0,
                key0 + 0x9e37_79b9u32,
                key1 + 0xbb67_ae85u32,
            ]
        });
        let first = i * 4;
        k.if_(first.lt(out.extent(0)), || out.at([first]).store(k.vector(&done[..4])));
    });
}
