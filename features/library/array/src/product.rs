//! Products of matrices of types that the kernel library has none of: f64 and integers.

use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};
use vm_runtime::Argument;

use crate::Accelerator;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::evaluate;
use crate::node::Array;

/// Threads along each side of a GPU's block.
const SIDE: i64 = 16;
/// Elements of the inner dimension that a GPU's block has in shared memory at once.
const DEPTH: i64 = 16;
/// Rows that a processor's block takes, and those whose sums it has in registers at once.
const ROWS: i64 = 256;
const AT_ONCE: i64 = 2;
/// Elements of the inner dimension that it takes at once.
const PART: i64 = 256;
/// Columns that a processor's block takes at once, as one vector.
const LANES: i64 = 8;

/// a b for each matrix: `[matrices, m, k]` and `[matrices, k, n]`, of one type, which is real.
///
/// # Errors
/// What computing and launching fail with.
pub(crate) fn product(a: &Array, b: &Array, [matrices, m, k, n]: [u64; 4]) -> Result<Array> {
    let (device, dtype) = (a.device(), a.dtype());
    let result = Array::empty(device, dtype, &[matrices, m, n])?;
    // Elements of each side of a thread's part of the result.
    let own: u64 = if m.min(n) >= 1024 { 8 } else { 4 };
    let (kernel, tile) = if device.is_sequential() {
        (device.own("product", vec![dtype as u64], || of_processor(dtype))?, [ROWS as u64, LANES as u64])
    } else {
        let tile = SIDE as u64 * own;
        (device.own("product", vec![dtype as u64, own], || of_gpu(dtype, own as i64))?, [tile; 2])
    };
    let blocks = m.div_ceil(tile[0]).saturating_mul(n.div_ceil(tile[1])).saturating_mul(matrices);
    let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks < 1 << 31);
    let blocks = blocks.ok_or_else(|| {
        Error::Device(format!("{matrices} products of {m} by {n} are too many for a launch"))
    })?;
    let (x, y, to) = (evaluate::dense(a)?, evaluate::dense(b)?, evaluate::storage(&result)?);
    let arguments: [Argument<'_, Accelerator>; 3] = [
        to.buffer.shaped(&[matrices, m, n])?.into(),
        x.buffer.shaped(&[matrices, m, k])?.into(),
        y.buffer.shaped(&[matrices, k, n])?.into(),
    ];
    device.launch(&kernel, [blocks, 1, 1], &arguments)?;
    Ok(result)
}

/// The result and the operands, and where in it a block's part begins: which matrix, row and column.
fn operands<'b>(k: Builder<'b>, dtype: DType, tile: [i64; 2]) -> ([PlaceRef<'b>; 3], [Val<'b>; 3]) {
    let view = |access, names: [&str; 3]| {
        ViewType::new(dtype.stored(), 3, access).with_dims(&[Dim::ANY; 3]).named(&names)
    };
    let c = k.view_of("c", view(Access::Write, ["matrices", "m", "n"]));
    let a = k.view_of("a", view(Access::Read, ["matrices", "m", "k"]));
    let b = k.view_of("b", view(Access::Read, ["matrices", "k", "n"]));
    let number = k.block_id(Axis::X).to(Scalar::I64);
    let blocks = |d: u8, of: i64| (c.extent(d) + (of - 1)).div_u(k.i64(of));
    let (rows, columns) = (blocks(1, tile[0]), blocks(2, tile[1]));
    let row = number.div_u(columns);
    ([c, a, b], [row.div_u(rows), row.rem_u(rows) * tile[0], number.rem_u(columns) * tile[1]])
}

fn multiplied<'b>(dtype: DType, a: Val<'b>, b: Val<'b>, sum: Val<'b>) -> Val<'b> {
    if dtype.is_inexact() { a.fma(b, sum) } else { sum + a * b }
}

/// Tiles of both operands go through shared memory; each thread has `own` rows and columns of the result. What is out of bounds reads as 0.
fn of_gpu(dtype: DType, own: i64) -> Result<Kernel> {
    let block = IRBlock::new(GuestAddr(0));
    let k = block.builder();
    k.name("product");
    k.block_size([(SIDE * SIDE) as u32, 1, 1]);
    let tile = SIDE * own;
    let ([c, a, b], [matrix, row, column]) = operands(k, dtype, [tile; 2]);
    let scalar = dtype.stored();
    // A column more keeps what a warp stores apart in the banks.
    let left = k.shared("left", scalar, &[DEPTH as u32, tile as u32 + 1]);
    let right = k.shared("right", scalar, &[DEPTH as u32, tile as u32]);
    let thread = k.thread_id(Axis::X).to(Scalar::I64);
    let (tx, ty) = (thread & (SIDE - 1), thread >> 4);
    let places = |n: i64| thread + n * SIDE * SIDE;
    // Which element of a tile a thread brings: rows of the left one along its inner dimension, rows of the right one along the result's.
    let of_left = |n: i64| (places(n) & (DEPTH - 1), places(n) >> 4);
    let of_right = |n: i64| (places(n).div_u(k.i64(tile)), places(n).rem_u(k.i64(tile)));
    let inner = a.extent(2);
    let bring = |first| -> Vec<_> {
        let x = (0..own).map(|n| {
            let (depth, line) = of_left(n);
            a.at([matrix, row + line, first + depth]).load()
        });
        let y = (0..own).map(|n| {
            let (depth, line) = of_right(n);
            b.at([matrix, first + depth, column + line]).load()
        });
        x.chain(y).collect()
    };
    let put = |brought: Vec<_>| {
        for n in 0..own {
            let ((depth, line), (d, l)) = (of_left(n), of_right(n));
            left.at([depth, line]).store(brought[n as usize]);
            right.at([d, l]).store(brought[(own + n) as usize]);
        }
    };
    put(bring(k.i64(0)));
    k.barrier();
    let begun = vec![k.bits(Type::scalar_of(scalar), 0); (own * own) as usize];
    let result = k.range(k.i64(0), inner).step(DEPTH).fold(begun, |first, mut sums| {
        // The next tiles are on their way meanwhile.
        let next = bring(first + DEPTH);
        for depth in 0..DEPTH {
            let depth = k.i64(depth);
            let x: Vec<_> = (0..own).map(|n| left.at([depth, ty * own + n]).load()).collect();
            let y: Vec<_> = (0..own).map(|n| right.at([depth, tx + n * SIDE]).load()).collect();
            for (at, sum) in sums.iter_mut().enumerate() {
                *sum = multiplied(dtype, x[at / own as usize], y[at % own as usize], *sum);
            }
        }
        k.barrier();
        put(next);
        k.barrier();
        sums
    });
    for (at, sum) in result.iter().enumerate() {
        let (i, j) = (at as i64 / own, at as i64 % own);
        c.at([matrix, row + ty * own + i, column + tx + j * SIDE]).store(*sum);
    }
    Ok(block.kernel()?)
}

/// A block takes some rows of one vector of columns. A part of the right operand's columns at a time is put side by side, so that it stays in
/// the nearest cache while the rows go by, some of them at once: their sums stay in registers. Its ranges are such that no access needs a check.
fn of_processor(dtype: DType) -> Result<Kernel> {
    let block = IRBlock::new(GuestAddr(0));
    let k = block.builder();
    k.name("product");
    let ([c, a, b], [matrix, row, column]) = operands(k, dtype, [ROWS, LANES]);
    let (inner, m, n) = (a.extent(2), c.extent(1), c.extent(2));
    let scalar = Type::scalar_of(dtype.stored());
    let lanes = LANES as u8;
    let vector = Type::vector(dtype.stored(), lanes).unwrap_or(scalar);
    let (end, below) = ((column + LANES).min(n), (row + ROWS).min(m));
    let part = k.shared("part", dtype.stored(), &[PART as u32, LANES as u32]);
    let sums = k.shared("sums", dtype.stored(), &[ROWS as u32, LANES as u32]);
    k.range(matrix, (matrix + 1).min(c.extent(0))).each(|matrix| {
        k.range(column, end & -LANES).step(LANES).each(|j| {
            k.range(k.i64(0), k.i64(ROWS)).each(|i| sums.at([i, k.i64(0)]).store(k.bits(vector, 0)));
            k.range(k.i64(0), inner).step(PART).each(|first| {
                let depths = (inner - first).min(k.i64(PART));
                k.range(k.i64(0), depths).each(|depth| {
                    let own = b.at([matrix, first + depth, j]).load_vector(lanes);
                    part.at([depth, k.i64(0)]).store(own);
                });
                let some = |i: Val<'_>, rows: i64| {
                    let of = |n: i64| sums.at([i - row + n, k.i64(0)]);
                    let begun = (0..rows).map(|n| of(n).load_vector(lanes)).collect::<Vec<_>>();
                    let ended = k.range(k.i64(0), depths).fold(begun, |depth, mut sums| {
                        let y = part.at([depth, k.i64(0)]).load_vector(lanes);
                        for (n, sum) in sums.iter_mut().enumerate() {
                            let x = a.at([matrix, i + n as i64, first + depth]).load().splat(lanes);
                            *sum = multiplied(dtype, x, y, *sum);
                        }
                        sums
                    });
                    (0..rows).zip(ended).for_each(|(n, sum)| of(n).store(sum));
                };
                k.range(row, below & -AT_ONCE).step(AT_ONCE).each(|i| some(i, AT_ONCE));
                k.range(row.max(below & -AT_ONCE), below).each(|i| some(i, 1));
            });
            k.range(row, below).each(|i| {
                c.at([matrix, i, j]).store(sums.at([i - row, k.i64(0)]).load_vector(lanes));
            });
        });
        k.range(row, below).each(|i| {
            k.range(column.max(end & -LANES), end).each(|j| {
                let sum = k.range(k.i64(0), inner).fold(k.bits(scalar, 0), |depth, sum| {
                    multiplied(dtype, a.at([matrix, i, depth]).load(), b.at([matrix, depth, j]).load(), sum)
                });
                c.at([matrix, i, j]).store(sum);
            });
        });
    });
    Ok(block.kernel()?)
}
