//! One block for each row of a matrix.

use super::check;
use super::reduce::{THREADS, WARPS, better, block_best, block_reduce};
use vm_ir::builder::{Builder, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{Scalar, Type};

/// The row of this block.
fn row<'b>(k: Builder<'b>) -> Val<'b> {
    k.block_id(Axis::X).named("row")
}

/// The thread's number.
fn thread<'b>(k: Builder<'b>) -> Val<'b> {
    k.thread_id(Axis::X).named("t")
}

/// A loop over the columns that are this thread's.
fn columns<'b>(k: Builder<'b>, thread: Val<'b>, count: Val<'b>) -> vm_ir::builder::Range<'b> {
    k.range(thread.to(Scalar::I64), count).step(THREADS)
}

/// The running maximum and the sum of exponentials below it, one element further. Of the two exponentials, that of the
/// element and that by which the sum shrinks, one is always 1.
fn online<'b>((max, sum): (Val<'b>, Val<'b>), x: Val<'b>) -> (Val<'b>, Val<'b>) {
    let power = (-(max - x).abs()).exp();
    (max.max(x), x.gt(max).select(sum.fma(power, 1.0), sum + power))
}

/// The row's maximum, and its sum of exponentials below that.
fn max_and_sum<'b>(
    k: Builder<'b>,
    x: vm_ir::builder::PlaceRef<'b>,
    row: Val<'b>,
) -> (Val<'b>, Val<'b>, Val<'b>, Val<'b>) {
    let maxima = k.shared("maxima", Scalar::F32, &[WARPS]);
    let sums = k.shared("sums", Scalar::F32, &[WARPS]);
    let t = thread(k);
    let n = x.extent(1).named("n");
    // Not −∞: from that nothing can be taken.
    let start = (k.f32(f32::MIN), k.f32(0.0));
    let (mine, partial) = columns(k, t, n).unroll(4).fold(start, |j, (max, sum)| {
        online((max.named("running_max"), sum.named("running_sum")), x.at([row, j.named("j")]).load())
    });
    let max = block_reduce(k, mine, f64::NEG_INFINITY, maxima, Val::warp_max).named("max");
    let sum = block_reduce(k, partial * (mine - max).exp(), 0.0, sums, Val::warp_add).named("sum");
    (t, n, max, sum)
}

#[test]
fn softmax() {
    check("softmax", |k| {
        k.block_size([THREADS, 1, 1]);
        let x = k.view("x", Scalar::F32, 2, Access::Read);
        let y = k.view("y", Scalar::F32, 2, Access::Write);
        let row = row(k);
        let (t, n, max, sum) = max_and_sum(k, x, row);
        let factor = sum.rcp();
        columns(k, t, n).unroll(4).each(|j| {
            y.at([row, j]).store((x.at([row, j]).load() - max).exp() * factor);
        });
    });
}

#[test]
fn cross_entropy() {
    check("cross_entropy", |k| {
        k.block_size([THREADS, 1, 1]);
        let x = k.view("logits", Scalar::F32, 2, Access::Read);
        let targets = k.view("targets", Scalar::I32, 1, Access::Read);
        let losses = k.view("losses", Scalar::F32, 1, Access::Write);
        let row = row(k);
        let (t, _, max, sum) = max_and_sum(k, x, row);
        k.if_(t.eq(0), || {
            let target = targets.at([row]).load();
            losses.at([row]).store(max + sum.log() - x.at([row, target]).load());
        });
    });
}

#[test]
fn rmsnorm() {
    check("rmsnorm", |k| {
        k.block_size([THREADS, 1, 1]);
        let wide = |access| {
            ViewType::new(Scalar::F32, 2, access).aligned(16).with_dims(&[Dim::ANY, Dim::Any { multiple: 4 }])
        };
        let x = k.view_of("x", wide(Access::Read));
        let weights =
            ViewType::new(Scalar::F32, 1, Access::Read).aligned(16).with_dims(&[Dim::Any { multiple: 4 }]);
        let w = k.view_of("w", weights);
        let y = k.view_of("y", wide(Access::Write));
        let epsilon = k.scalar("epsilon", Type::F32);
        let sums = k.shared("sums", Scalar::F32, &[WARPS]);
        let row = row(k);
        let first = thread(k).to(Scalar::I64) * 4;
        let n = x.extent(1).named("n");
        let columns = || k.range(first, n).step(THREADS * 4);
        let squares =
            columns().unroll(2).fold(k.constant(Type::vector(Scalar::F32, 4).unwrap(), 0.0), |j, sum| {
                let v = x.at([row, j]).load_vector(4);
                v.fma(v, sum)
            });
        let mine = (squares.lane(0) + squares.lane(1)) + (squares.lane(2) + squares.lane(3));
        let sum = block_reduce(k, mine, 0.0, sums, Val::warp_add);
        let factor = (sum / n.to(Scalar::F32) + epsilon).rsqrt().named("factor");
        let factors = factor.splat(4);
        columns().unroll(2).each(|j| {
            let v = x.at([row, j]).load_vector(4);
            y.at([row, j]).store(v * factors * w.at([j]).load_vector(4));
        });
    });
}

#[test]
fn argmax() {
    check("argmax", |k| {
        k.block_size([THREADS, 1, 1]);
        let x = k.view("x", Scalar::F32, 2, Access::Read);
        let best = k.view("best", Scalar::I32, 1, Access::Write);
        let values = k.shared("values", Scalar::F32, &[WARPS]);
        let indices = k.shared("indices", Scalar::I32, &[WARPS]);
        let row = row(k);
        let t = thread(k);
        let n = x.extent(1);
        let start = (k.f32(f32::NEG_INFINITY), k.i32(i32::MAX));
        let mine = columns(k, t, n)
            .fold(start, |j, so_far| better(so_far, (x.at([row, j]).load(), j.to(Scalar::I32))));
        let (_, index) = block_best(k, mine, values, indices);
        k.if_(t.eq(0), || best.at([row]).store(index));
    });
}

#[test]
fn topk() {
    check("topk", |k| {
        k.block_size([THREADS, 1, 1]);
        let x = k.view("x", Scalar::F32, 2, Access::Read);
        let top = k.view("values", Scalar::F32, 2, Access::Write);
        let top_at = k.view("indices", Scalar::I32, 2, Access::Write);
        let values = k.shared("warp_values", Scalar::F32, &[WARPS]);
        let indices = k.shared("warp_indices", Scalar::I32, &[WARPS]);
        let row = row(k);
        let t = thread(k);
        let n = x.extent(1).named("n");
        // Each round finds the best of those that come behind the last one found.
        let start = (k.f32(f32::INFINITY), k.i32(-1));
        k.range(k.i64(0), top.extent(1)).fold(start, |round, last| {
            let none = (k.f32(f32::NEG_INFINITY), k.i32(i32::MAX));
            let mine = columns(k, t, n).fold(none, |j, so_far| {
                let this = (x.at([row, j]).load(), j.to(Scalar::I32));
                let behind = this.0.lt(last.0) | (this.0.eq(last.0) & this.1.gt(last.1));
                let next = better(so_far, this);
                (behind.select(next.0, so_far.0), behind.select(next.1, so_far.1))
            });
            let found = block_best(k, mine, values, indices);
            k.if_(t.eq(0), || {
                top.at([row, round]).store(found.0);
                top_at.at([row, round]).store(found.1);
            });
            k.barrier();
            found
        });
    });
}

#[test]
fn rope() {
    check("rope", |k| {
        k.block_size([64, 1, 1]);
        let even = [Dim::ANY, Dim::ANY, Dim::Any { multiple: 2 }];
        let x = k.view_of("x", ViewType::new(Scalar::F32, 3, Access::Read).with_dims(&even));
        let positions = k.view("positions", Scalar::I32, 1, Access::Read);
        let y = k.view_of("y", ViewType::new(Scalar::F32, 3, Access::Write).with_dims(&even));
        let base = k.scalar("base", Type::F32);
        let token = k.block_id(Axis::X).named("token");
        let head = k.block_id(Axis::Y).named("head");
        let half = x.extent(2).div_u(2).named("half");
        let position = positions.at([token]).load().to(Scalar::F32);
        let slope = base.log2() / half.to(Scalar::F32);
        k.range(k.thread_id(Axis::X).to(Scalar::I64), half).step(64).each(|i| {
            let angle = position * (-(i.to(Scalar::F32) * slope)).exp2();
            let (sin, cos) = (angle.sin(), angle.cos());
            let a = x.at([token, head, i]).load();
            let b = x.at([token, head, i + half]).load();
            y.at([token, head, i]).store(a * cos - b * sin);
            y.at([token, head, i + half]).store(b * cos + a * sin);
        });
    });
}
