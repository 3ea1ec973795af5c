//! Rows of tables by their numbers, sums of columns, transposes.

use super::{Case, Expected, case, random};
use crate::columns::ColumnSums;
use crate::gather::Embedding;
use crate::scatter::{EmbeddingGradient, ScatterAdd};
use crate::transpose::Transpose;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

fn tolerance(element: Scalar) -> f64 {
    match element {
        Scalar::F32 => 1e-5,
        Scalar::F16 => 2e-3,
        _ => 1e-2,
    }
}

/// Indices into so many rows, some of which are none: many of one row, some of all.
fn indices(index: Scalar, count: u64, rows: u64) -> Vec<f64> {
    let most = if index == Scalar::I32 { 2_147_483_647.0 } else { 9e15 };
    let number = |at: u64| match at % 11 {
        3 => -1.0,
        5 => rows as f64,
        7 => most,
        8 => -most,
        1 | 4 | 9 => (rows / 2) as f64,
        _ => (at * 7 % rows) as f64,
    };
    (0..count).map(number).collect()
}

fn row(index: f64, rows: u64) -> Option<usize> {
    (index >= 0.0 && index < rows as f64).then_some(index as usize)
}

pub(super) fn cases() -> Vec<Case> {
    use Scalar::{Bf16, F16, F32, I8, I32, I64};
    let mut cases = Vec::new();
    for (element, index, rows, columns, count, align) in [
        (F32, I32, 1, 1, 1, 16),
        (Bf16, I64, 13, 24, 37, 16),
        (F32, I32, 7, 769, 5, 16),
        (F16, I32, 50, 1096, 12, 16),
        (Bf16, I32, 5, 264, 9, 4),
        (I8, I64, 5, 33, 40, 16),
        (F32, I32, 5, 8, 0, 16),
    ] {
        let function = Embedding { rows, columns, count, element, index, align };
        let table = match element {
            I8 => Tensor::from_f64s(
                I8,
                &[rows, columns],
                (0..rows * columns).map(|at| (at % 251) as f64 - 125.0),
            ),
            _ => random(1, element, &[rows, columns]),
        };
        let numbers = table.to_f64s();
        let at = indices(index, count, rows);
        let wanted = at.iter().flat_map(|index| match row(*index, rows) {
            Some(row) => numbers[row * columns as usize..][..columns as usize].to_vec(),
            None => vec![0.0; columns as usize],
        });
        let expected = vec![Expected::exact(2, wanted.collect())];
        let y = Tensor::from_f64s(element, &[count, columns], vec![3.0; (count * columns) as usize]);
        let buffers = vec![table, Tensor::from_f64s(index, &[count], at), y];
        let name = format!("embedding of {element}, {count} of {rows} x {columns} by {index}");
        cases.push(case(name, function, buffers, expected));
    }
    for (element, output, index, rows, columns, count, align) in [
        (F32, F32, I32, 1, 1, 1, 16),
        (F32, F32, I64, 9, 1, 100, 16),
        (Bf16, F32, I32, 13, 24, 137, 16),
        (Bf16, Bf16, I64, 40, 301, 70, 16),
        (F16, F32, I32, 6, 264, 35, 2),
        (F32, F32, I32, 6, 4, 0, 16),
    ] {
        for deterministic in [false, true] {
            if !deterministic && output != F32 {
                continue;
            }
            let add = ScatterAdd { rows, columns, count, element, output, index, align, deterministic };
            for accumulate in [true, false] {
                let x = random(1, element, &[count, columns]);
                let before = random(2, output, &[rows, columns]);
                let mut sums =
                    if accumulate { before.to_f64s() } else { vec![0.0; (rows * columns) as usize] };
                let at = indices(index, count, rows);
                for (index, x) in at.iter().zip(x.to_f64s().chunks(columns as usize)) {
                    let Some(row) = row(*index, rows) else { continue };
                    for (sum, x) in sums[row * columns as usize..].iter_mut().zip(x) {
                        *sum += x;
                    }
                }
                let buffers = vec![x, Tensor::from_f64s(index, &[count], at), before];
                let expected = vec![Expected::new(2, sums, tolerance(output))];
                let name = format!(
                    "scatter of {element} to {output}, {count} to {rows} x {columns} by {index}, deterministic {deterministic}, accumulate {accumulate}"
                );
                cases.push(match accumulate {
                    true if deterministic => case(name, add, buffers, expected),
                    _ => case(name, EmbeddingGradient { add, accumulate }, buffers, expected),
                });
            }
        }
    }
    for (element, output, rows, columns, align) in [
        (F32, F32, 1, 1, 16),
        (Bf16, F32, 1000, 40, 16),
        (Bf16, Bf16, 33, 769, 16),
        (F16, F32, 67, 264, 2),
        (Bf16, F32, 9, 24, 16),
        (F32, F16, 40, 7, 16),
        (F32, F32, 31, 132, 16),
        (F32, Bf16, 0, 9, 16),
        (F32, F32, 9, 0, 16),
    ] {
        let function = ColumnSums { rows, columns, element, output, align };
        let x = random(1, element, &[rows, columns]);
        let mut sums = vec![0.0; columns as usize];
        for (at, x) in x.to_f64s().iter().enumerate() {
            sums[at % columns as usize] += x;
        }
        let y = random(2, output, &[columns]);
        let expected = vec![Expected::new(1, sums, tolerance(output))];
        let name = format!("column sums of {element} to {output}, {rows} x {columns}");
        cases.push(case(name, function, vec![x, y], expected));
    }
    for (element, matrices, rows, columns, align) in [
        (F32, 1, 1, 1, 16),
        (F32, 3, 65, 67, 16),
        (Bf16, 2, 66, 130, 16),
        (Bf16, 1, 130, 258, 16),
        (Bf16, 1, 64, 64, 4),
        (F16, 2, 63, 66, 16),
        (Bf16, 1, 66, 2, 2),
        (Bf16, 3, 6, 10, 16),
        (F16, 2, 16, 12, 16),
        (F32, 2, 5, 7, 16),
        (I8, 2, 70, 31, 16),
        (I64, 1, 33, 65, 16),
        (F32, 2, 0, 5, 16),
    ] {
        let function = Transpose { matrices, rows, columns, element, align };
        let count = matrices * rows * columns;
        let x = match element {
            I8 | I64 => Tensor::from_f64s(
                element,
                &[matrices, rows, columns],
                (0..count).map(|at| (at % 251) as f64 - 125.0),
            ),
            _ => random(1, element, &[matrices, rows, columns]),
        };
        let numbers = x.to_f64s();
        let wanted = (0..count).map(|at| {
            let (matrix, rest) = (at / (rows * columns), at % (rows * columns));
            let (j, i) = (rest / rows, rest % rows);
            numbers[((matrix * rows + i) * columns + j) as usize]
        });
        let expected = vec![Expected::exact(1, wanted.collect())];
        let y = Tensor::from_f64s(element, &[matrices, columns, rows], vec![1.0; count as usize]);
        let name = format!("transpose of {element}, {matrices} x {rows} x {columns}");
        cases.push(case(name, function, vec![x, y], expected));
    }
    cases
}
