//! One number in, one number out: four at a time, and the rest one by one.

use super::check;
use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, ViewType};
use vm_ir::{Scalar, Type};

const LANES: u8 = 4;

fn vector<'b>(k: Builder<'b>, name: &str, access: Access) -> PlaceRef<'b> {
    k.view_of(name, ViewType::new(Scalar::F32, 1, access).aligned(16))
}

/// `y[i] = f(xs[i])` for each i: a thread takes four in a row, and the last one what is left. One comparison with
/// the shortest view speaks for all of them.
fn elementwise<'b>(k: Builder<'b>, xs: &[PlaceRef<'b>], y: PlaceRef<'b>, f: impl Fn(&[Val<'b>]) -> Val<'b>) {
    k.block_size([128, 1, 1]);
    let i = (k.global_id(Axis::X) * i32::from(LANES)).named("i");
    let n = xs.iter().fold(y.extent(0), |n, x| n.min(x.extent(0))).named("n");
    k.if_else(
        (i + i32::from(LANES)).le(n),
        || {
            let v: Vec<_> = xs.iter().map(|x| x.at([i]).cached(Cache::Stream).load_vector(LANES)).collect();
            y.at([i]).cached(Cache::Stream).store(f(&v));
        },
        || {
            k.range(k.i64(0), i64::from(LANES)).each(|lane| {
                let at = i + lane;
                k.if_(at.lt(n), || {
                    let v: Vec<_> = xs.iter().map(|x| x.at([at]).load()).collect();
                    y.at([at]).store(f(&v));
                });
            });
        },
    );
}

#[test]
fn silu() {
    check("silu", |k| {
        let (x, y) = (vector(k, "x", Access::Read), vector(k, "y", Access::Write));
        elementwise(k, &[x], y, |v| v[0] / (1.0 + (-v[0]).exp()));
    });
}

#[test]
fn scale() {
    check("scale", |k| {
        let (x, y) = (vector(k, "x", Access::Read), vector(k, "y", Access::Write));
        let factor = k.scalar("factor", Type::F32);
        elementwise(k, &[x], y, |v| {
            let lanes = v[0].ty().lanes();
            v[0] * if lanes > 1 { factor.splat(lanes) } else { factor }
        });
    });
}

#[test]
fn add() {
    check("add", |k| {
        let (a, b) = (vector(k, "a", Access::Read), vector(k, "b", Access::Read));
        elementwise(k, &[a, b], vector(k, "y", Access::Write), |v| v[0] + v[1]);
    });
}

#[test]
fn mul() {
    check("mul", |k| {
        let (a, b) = (vector(k, "a", Access::Read), vector(k, "b", Access::Read));
        elementwise(k, &[a, b], vector(k, "y", Access::Write), |v| v[0] * v[1]);
    });
}
