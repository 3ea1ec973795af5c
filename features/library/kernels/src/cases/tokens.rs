//! Rotary embedding, caches of keys and values, loads of experts.

use super::{Case, Expected, case, random, tolerance};
use crate::append::{KvAppend, Layout};
use crate::call::Function;
use crate::experts::{AuxLoss, AuxLossGradient};
use crate::rope::{Angles, Pairs, Rope};
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = ropes();
    cases.extend(appends());
    cases.extend(experts());
    cases
}

fn ropes() -> Vec<Case> {
    use Angles::{CosSin, Frequencies, Table};
    use Pairs::{Halves, Interleaved};
    use Scalar::{Bf16, F16, F32};
    let mut cases = Vec::new();
    // Sequences, tokens, heads of q and of k, elements of a head.
    for (extents, pairs, angles, element, positions, align) in [
        ([1, 1, 1, 1, 2], Halves, Frequencies, F32, false, 16),
        ([2, 5, 9, 3, 64], Halves, CosSin, Bf16, false, 16),
        ([1, 35, 4, 1, 128], Interleaved, Table, Bf16, true, 16),
        ([2, 3, 5, 0, 20], Interleaved, Frequencies, F32, true, 16),
        ([1, 7, 2, 2, 6], Interleaved, CosSin, F32, false, 4),
        ([1, 3, 1, 4, 36], Halves, Table, F16, true, 2),
        ([2, 4, 6, 2, 48], Halves, Table, F32, false, 16),
        ([1, 0, 6, 2, 48], Halves, Table, F32, false, 16),
    ] {
        for inverse in [false, true] {
            let [batch, tokens, q_heads, k_heads, dim] = extents;
            let (rows, first) = (tokens + 3, 2);
            let dim32 = dim as u32;
            let function = Rope {
                batch,
                tokens,
                q_heads,
                k_heads,
                dim: dim32,
                rows,
                pairs,
                angles,
                positions,
                first,
                inverse,
                element,
                align,
            };
            let half = dim / 2;
            let mut buffers: Vec<_> = function
                .buffers()
                .iter()
                .enumerate()
                .map(|(at, buffer)| random(at as u64 + 1, buffer.element, &buffer.extents))
                .collect();
            let tables: Vec<_> = buffers.iter().skip(2).map(Tensor::to_f64s).collect();
            // One is beyond the tables, and one before.
            let places: Vec<f64> = (0..batch * tokens)
                .map(|at| match at % 7 {
                    3 => rows as f64,
                    5 => -1.0,
                    other => (other * 5 % rows) as f64,
                })
                .collect();
            if positions {
                let last = buffers.len() - 1;
                buffers[last] = Tensor::from_f64s(Scalar::I32, &[batch, tokens], places.clone());
            }
            let angle = |position: f64, pair: u64| -> Option<(f64, f64)> {
                let known = position >= 0.0 && position < rows as f64;
                let at = || position as usize * half as usize + pair as usize;
                match angles {
                    Frequencies => Some((position * tables[0][pair as usize]).sin_cos()),
                    Table if known => Some(tables[0][at()].sin_cos()),
                    CosSin if known => Some((tables[1][at()], tables[0][at()])),
                    _ => None,
                }
            };
            let turned = |tensor: &Tensor, heads: u64| {
                let mut all = tensor.to_f64s();
                for row in 0..batch * tokens * heads {
                    let token = row / heads;
                    let position = if positions {
                        places[token as usize]
                    } else {
                        (token % tokens + u64::from(first)) as f64
                    };
                    for pair in 0..half {
                        let Some((sin, cos)) = angle(position, pair) else { continue };
                        let sin = if inverse { -sin } else { sin };
                        let [i, j] = match pairs {
                            Halves => [pair, pair + half],
                            Interleaved => [2 * pair, 2 * pair + 1],
                        }
                        .map(|at| (row * dim + at) as usize);
                        let (a, b) = (all[i], all[j]);
                        (all[i], all[j]) = (a * cos - b * sin, a * sin + b * cos);
                    }
                }
                all
            };
            let tolerance = match element {
                F32 => 1e-5,
                F16 => 2e-3,
                _ => 1e-2,
            };
            let expected = vec![
                Expected::new(0, turned(&buffers[0], q_heads), tolerance),
                Expected::new(1, turned(&buffers[1], k_heads), tolerance),
            ];
            let name = format!("rope of {element}, {extents:?}, {pairs:?}, {angles:?}, inverse {inverse}");
            cases.push(case(name, function, buffers, expected));
        }
    }
    cases
}

fn appends() -> Vec<Case> {
    use Scalar::{Bf16, F32, I8};
    let mut cases = Vec::new();
    let paged = |page| Layout::Paged { pages: 7, page, of_sequence: 3 };
    for (batch, tokens, heads, dim, layout, element, align) in [
        (1, 1, 1, 1, Layout::Contiguous { capacity: 1 }, F32, 16),
        (3, 5, 2, 24, Layout::Contiguous { capacity: 9 }, Bf16, 16),
        (4, 1, 3, 64, paged(4), Bf16, 16),
        (4, 6, 1, 5, paged(4), F32, 16),
        (4, 9, 9, 128, paged(5), Bf16, 16),
        (2, 3, 1, 7, paged(1), I8, 1),
        (2, 0, 1, 7, paged(1), F32, 16),
    ] {
        let function = KvAppend { batch, tokens, heads, dim, layout, element, align };
        let mut buffers: Vec<_> = function
            .buffers()
            .iter()
            .enumerate()
            .map(|(at, buffer)| {
                let count = buffer.len().unwrap_or(0);
                match buffer.element {
                    I8 => {
                        let numbers = (0..count).map(|i| ((i * 7 + at as u64 * 31) % 251) as f64 - 125.0);
                        Tensor::from_f64s(I8, &buffer.extents, numbers)
                    }
                    element => random(at as u64 + 1, element, &buffer.extents),
                }
            })
            .collect();
        // At the beginning, within a page, before the beginning, near the end.
        let lengths: Vec<f64> = (0..batch).map(|at| [0.0, 3.0, -2.0, 8.0][at as usize % 4]).collect();
        buffers[4] = Tensor::from_f64s(Scalar::I32, &[batch], lengths.clone());
        // Pages in another order, of which some are none; none is a page of two sequences.
        let pages = [5.0, 0.0, 7.0, 2.0, 6.0, -1.0, 4.0, 3.0, 2e9, 1.0, -2e9, 9.0];
        if let Layout::Paged { of_sequence, .. } = layout {
            let numbers = pages.iter().copied().cycle().take((batch * of_sequence) as usize);
            buffers[5] = Tensor::from_f64s(Scalar::I32, &[batch, of_sequence], numbers);
        }
        let width = (heads * dim) as usize;
        let mut expected = Vec::new();
        for which in [0, 1] {
            let (new, mut cache) = (buffers[which].to_f64s(), buffers[which + 2].to_f64s());
            for row in 0..(batch * tokens) as usize {
                let (sequence, token) = (row / tokens as usize, row % tokens as usize);
                let position = lengths[sequence] as i64 + token as i64;
                let slot = match layout {
                    Layout::Contiguous { capacity } => {
                        let room = capacity as i64;
                        (position >= 0 && position < room).then_some(sequence as i64 * room + position)
                    }
                    Layout::Paged { page, of_sequence, pages: count } => {
                        let room = i64::from(page);
                        let number = position.div_euclid(room);
                        let there = position >= 0 && number < of_sequence as i64;
                        let page = there
                            .then(|| pages[(sequence as i64 * of_sequence as i64 + number) as usize % 12]);
                        let page = page.filter(|page| *page >= 0.0 && *page < count as f64);
                        page.map(|page| page as i64 * room + position % room)
                    }
                };
                if let Some(slot) = slot {
                    cache[slot as usize * width..][..width].copy_from_slice(&new[row * width..][..width]);
                }
            }
            expected.push(Expected::exact(which + 2, cache));
        }
        let name = format!("append of {element}, {batch} x {tokens} x {heads} x {dim}, {layout:?}");
        cases.push(case(name, function, buffers, expected));
    }
    cases
}

fn experts() -> Vec<Case> {
    use Scalar::{Bf16, F16, F32, I32, I64};
    let mut cases = Vec::new();
    for (tokens, experts, top_k, element, index, align) in [
        (1, 1, 1, F32, I32, 16),
        (67, 8, 2, F32, I64, 16),
        (5000, 3, 1, F32, I32, 16),
        (300, 300, 4, F32, I32, 4),
        (0, 4, 2, F32, I32, 16),
        (33, 128, 6, F32, I64, 16),
        (67, 8, 2, Bf16, I32, 16),
        (300, 300, 4, F16, I32, 2),
        (33, 124, 6, Bf16, I64, 16),
    ] {
        let alpha = 0.01f32;
        let probabilities = random(1, element, &[tokens, experts]).to_f64s().into_iter().map(|x| x.abs());
        let probabilities = Tensor::from_f64s(element, &[tokens, experts], probabilities);
        let chosen: Vec<f64> = (0..tokens * top_k)
            .map(|at| match at % 13 {
                12 => -1.0,
                11 => experts as f64,
                other => (other * at % experts) as f64,
            })
            .collect();
        let mut counts = vec![0.0; experts as usize];
        chosen
            .iter()
            .filter(|at| **at >= 0.0 && **at < experts as f64)
            .for_each(|at| counts[*at as usize] += 1.0);
        let mut means = vec![0.0; experts as usize];
        for (at, x) in probabilities.to_f64s().iter().enumerate() {
            means[at % experts as usize] += x / tokens as f64;
        }
        let scale = f64::from(alpha) * experts as f64;
        let assigned = (tokens * top_k).max(1) as f64;
        let loss: f64 = counts.iter().zip(&means).map(|(f, p)| scale * f / assigned * p).sum();
        let one = |value| Tensor::from_f64s(F32, &[1], [value]);
        let none = |seed| random(seed, F32, &[experts]);
        let function = AuxLoss { tokens, experts, top_k, alpha, element, index, align };
        let mut of_loss = Expected::new(2, vec![loss], 1e-5);
        of_loss.scale = 1e-3;
        let expected = vec![of_loss, Expected::exact(3, counts.clone()), Expected::new(4, means, 2e-6)];
        let buffers = vec![
            probabilities,
            Tensor::from_f64s(index, &[tokens, top_k], chosen),
            one(9.0),
            none(3),
            none(4),
        ];
        cases.push(case(
            format!("load of {experts} experts of {element}, {tokens} x {top_k}"),
            function,
            buffers,
            expected,
        ));
        for accumulate in [false, true] {
            let function = AuxLossGradient { tokens, experts, top_k, alpha, element, accumulate, align };
            let before = random(5, element, &[tokens, experts]);
            let numbers = before.to_f64s().into_iter().enumerate().map(|(at, before)| {
                let gradient = 3.0 * scale * counts[at % experts as usize] / assigned / tokens as f64;
                if accumulate { before + gradient } else { gradient }
            });
            let within = if element == F32 { 2e-6 } else { tolerance(element) };
            let mut of_gradient = Expected::new(2, numbers.collect(), within);
            of_gradient.scale = if accumulate { 1.0 } else { 1e-4 };
            let counts = Tensor::from_f64s(F32, &[experts], counts.clone());
            let name = format!(
                "gradient of {experts} experts of {element}, {tokens} x {top_k}, accumulate {accumulate}"
            );
            cases.push(case(name, function, vec![counts, one(3.0), before], vec![of_gradient]));
        }
    }
    cases
}
