//! Cross-entropy and its gradient.

use super::{Case, Expected, LONG, numbers, odd_shapes, random, shapes, tolerance};
use crate::loss::{CrossEntropy, CrossEntropyBackward, LossOptions, Reduction};
use std::rc::Rc;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

const IGNORED: i64 = -100;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let reductions = [Reduction::None, Reduction::Sum, Reduction::Mean];
    for (at, (extents, element, _)) in shapes().into_iter().chain(odd_shapes()).enumerate() {
        let reduction = reductions[at % 3];
        let (smoothing, z) = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)][at % 4];
        let options = LossOptions { ignored: IGNORED, smoothing, z, reduction };
        let target = [Scalar::I64, Scalar::I32][at % 2];
        // A row is ignored, where there are others.
        let targets =
            (0..extents[0]).map(|row| if row == 1 { IGNORED } else { (row * 5 % extents[1]) as i64 });
        cases.extend(both(extents, element, target, options, targets.collect(), at % 2 == 0));
    }
    let options = LossOptions { reduction: Reduction::None, ..LossOptions::default() };
    let all = [0, 4, -1, 5, IGNORED, i64::from(i32::MAX), i64::MIN, 1 << 32];
    cases.extend(both([8, 5], Scalar::F32, Scalar::I64, options, all.to_vec(), true));
    let mean = LossOptions { reduction: Reduction::Mean, ..options };
    cases.extend(both([2, 5], Scalar::F32, Scalar::I32, mean, vec![IGNORED; 2], false));
    cases.extend(both([1500, 3], Scalar::Bf16, Scalar::I32, mean, vec![2; 1500], false));
    // More rows than one block adds up.
    let some = (0..8_200).map(|row| if row % 3 == 0 { IGNORED } else { row % 2 });
    cases.extend(both([8_200, 2], Scalar::F32, Scalar::I64, mean, some.collect(), false));
    cases.extend(both([1, 33_000], Scalar::F32, Scalar::I64, mean, vec![32_999], false));
    for (columns, element) in LONG {
        let options = if columns % 4 == 0 { options } else { LossOptions { smoothing: 0.1, ..mean } };
        let target = columns as i64 - 1;
        cases.extend(both([1, columns], element, Scalar::I32, options, vec![target], columns > 1 << 17));
    }
    // Long rows that begin anywhere, whose targets are before, among and behind what vectors take of them.
    let somewhere = [0, 50_256, 1, 25_000, 50_255, 7, 50_250, IGNORED];
    for (element, rows) in [(Scalar::F32, 4), (Scalar::Bf16, 8)] {
        let targets = somewhere[..rows as usize].to_vec();
        cases.extend(both([rows, 50_257], element, Scalar::I64, mean, targets, false));
    }
    cases.extend(both([0, 5], Scalar::F32, Scalar::I64, mean, vec![], false));
    cases
}

/// Loss and gradient; with logarithms of the probabilities, and in place; and, of half of them, by the sums that the loss keeps.
fn both(
    extents: [u64; 2],
    element: Scalar,
    target: Scalar,
    options: LossOptions,
    targets: Vec<i64>,
    more: bool,
) -> [Case; 2] {
    let [rows, columns] = extents;
    let n = columns as f64;
    let values = numbers(21 + columns, rows * columns).iter().map(|x| x * 4.0).collect::<Vec<_>>();
    let logits = Tensor::from_f64s(element, &extents, values);
    let x = logits.to_f64s();
    let (smoothing, z) = (f64::from(options.smoothing), f64::from(options.z));
    let count = targets.iter().filter(|target| **target != IGNORED).count() as f64;
    let divisor = if options.reduction == Reduction::Mean { count } else { 1.0 };
    let dlosses: Vec<f64> = match options.reduction {
        Reduction::None => (0..rows).map(|row| 0.5 + row as f64).collect(),
        _ => vec![0.75],
    };
    let log_sums = more == columns.is_multiple_of(2);
    let (mut losses, mut log_probs, mut sums, mut gradient) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (row, (x, target)) in x.chunks((columns as usize).max(1)).zip(&targets).enumerate() {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        let valid = (0..columns as i64).contains(target);
        let ignored = *target == IGNORED;
        let mean = x.iter().sum::<f64>() / n;
        let own = if valid { x[*target as usize] } else { f64::NAN };
        let loss = lse - (1.0 - smoothing) * own - smoothing * mean + z * lse * lse;
        losses.push(if ignored { 0.0 } else { loss });
        log_probs.extend(x.iter().map(|x| x - lse));
        sums.push(lse);
        let d = if valid { dlosses[row.min(dlosses.len() - 1)] / divisor } else { f64::NAN };
        gradient.extend(x.iter().enumerate().map(|(j, x)| {
            let hit = if j as i64 == *target { 1.0 - smoothing } else { 0.0 };
            let one = d * ((x - lse).exp() * (1.0 + 2.0 * z * lse) - hit - smoothing / n);
            if ignored { 0.0 } else { one }
        }));
    }
    let untouched = random(22, Scalar::F32, &[1]);
    let loss = match options.reduction {
        Reduction::None => losses,
        // Without rows nothing is launched.
        _ if rows == 0 => untouched.to_f64s(),
        _ => vec![losses.iter().sum::<f64>() / divisor],
    };
    let described = format!(
        "of {element}, {rows} x {columns}, {target}, {:?}, smoothing {smoothing}, z {z}{}",
        options.reduction,
        if log_sums { ", with sums" } else { "" }
    );
    let bits = targets.iter().map(|number| match target {
        Scalar::I32 => u64::from((*number as i32).cast_unsigned()),
        _ => number.cast_unsigned(),
    });
    let targets = Tensor::from_bits(target, &[rows], bits);
    let losses = match options.reduction {
        Reduction::None => random(22, Scalar::F32, &[rows]),
        _ => untouched,
    };
    let forward = CrossEntropy {
        element,
        target,
        options,
        log_probs: more.then_some(element),
        log_sums,
        ..CrossEntropy::of(rows, columns, element)
    };
    let mut expected = vec![Expected::new(2, loss, 1e-5)];
    let mut buffers = vec![logits.clone(), targets.clone(), losses];
    if more {
        expected.push(Expected::new(3, log_probs, tolerance(element)));
        buffers.push(random(23, element, &extents));
    }
    if log_sums {
        expected.push(Expected::new(buffers.len(), sums.clone(), 1e-5));
        buffers.push(random(25, Scalar::F32, &[rows]));
    }
    let in_place = more;
    let backward =
        CrossEntropyBackward { rows, columns, element, target, in_place, log_sums, options, align: 16 };
    let mut given =
        vec![logits, targets, Tensor::from_f64s(Scalar::F32, &[dlosses.len() as u64], dlosses.clone())];
    if log_sums {
        given.push(Tensor::from_f64s(Scalar::F32, &[rows], sums));
    }
    let written = if in_place { 0 } else { given.len() };
    if !in_place {
        given.push(random(24, element, &extents));
    }
    let gradient = Expected::new(written, gradient, tolerance(element));
    [
        Case { name: format!("cross-entropy {described}"), function: Rc::new(forward), buffers, expected },
        Case {
            name: format!("gradient of a cross-entropy {described}"),
            function: Rc::new(backward),
            buffers: given,
            expected: vec![gradient],
        },
    ]
}
