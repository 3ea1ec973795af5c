//! A matrix product through tiles in shared memory.

use super::check;
use vm_ir::Scalar;
use vm_ir::op::Axis;
use vm_ir::view::{Access, ViewType};

const TILE: u32 = 16;

#[test]
fn matmul() {
    check("matmul", |k| {
        k.block_size([TILE, TILE, 1]);
        let matrix = |name, extents: [&str; 2], access| {
            k.view_of(name, ViewType::new(Scalar::F32, 2, access).named(&extents))
        };
        let a = matrix("a", ["m", "k"], Access::Read);
        let b = matrix("b", ["k", "n"], Access::Read);
        let c = matrix("c", ["m", "n"], Access::Write);
        // One column more than the tile has, so that a column's elements lie in different banks.
        let tile_a = k.shared("tile_a", Scalar::F32, &[TILE, TILE + 1]);
        let tile_b = k.shared("tile_b", Scalar::F32, &[TILE, TILE + 1]);
        let x = k.thread_id(Axis::X).named("x");
        let y = k.thread_id(Axis::Y).named("y");
        let column = k.global_id(Axis::X).named("column");
        let row = k.global_id(Axis::Y).named("row");
        let (rows, columns, inner) = (c.extent(0), c.extent(1), a.extent(1).named("inner"));
        let sum = k.range(k.i64(0), inner).step(TILE).fold(k.f32(0.0), |start, sum| {
            let inside_a = row.lt(rows) & (start + x.to(Scalar::I64)).lt(inner);
            let from_a = k.if_else(inside_a, || a.at([row, start + x.to(Scalar::I64)]).load(), || k.f32(0.0));
            let inside_b = (start + y.to(Scalar::I64)).lt(inner) & column.lt(columns);
            let from_b =
                k.if_else(inside_b, || b.at([start + y.to(Scalar::I64), column]).load(), || k.f32(0.0));
            tile_a.at([y, x]).store(from_a);
            tile_b.at([y, x]).store(from_b);
            k.barrier();
            let sum = k
                .range(k.i32(0), TILE)
                .unroll(TILE)
                .fold(sum, |i, sum| tile_a.at([y, i]).load().fma(tile_b.at([i, x]).load(), sum));
            k.barrier();
            sum
        });
        k.if_(row.lt(rows) & column.lt(columns), || c.at([row, column]).store(sum));
    });
}
