//! Self-attention, its gradients, and what is put into a cache for it.

use super::{Case, Expected, random};
use crate::append::{AdvanceLengths, QkvAppend};
use crate::attention::{SelfAttention, SelfAttentionBackward};
use crate::call::Function;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Sequences, tokens, heads of queries and of keys, elements of a head.
    for (extents, element, causal) in [
        ([1, 1, 1, 1, 64], Scalar::Bf16, true),
        ([2, 24, 2, 2, 64], Scalar::Bf16, true),
        ([1, 70, 2, 1, 64], Scalar::F16, true),
        ([1, 67, 1, 1, 128], Scalar::Bf16, false),
        ([2, 3, 1, 1, 64], Scalar::F16, true),
        ([1, 0, 1, 1, 64], Scalar::Bf16, true),
    ] {
        let [batch, tokens, heads, shared, dim] = extents;
        let function = SelfAttention {
            element,
            batch,
            tokens,
            heads: [heads, shared],
            dim: dim as u32,
            causal,
            scale: 1.0 / (dim as f32).sqrt(),
        };
        cases.extend(trained(function));
    }
    for (extents, element, align) in [
        ([2, 3, 4, 2, 64], Scalar::Bf16, 16),
        ([1, 5, 1, 1, 7], Scalar::F32, 16),
        ([3, 1, 2, 1, 5], Scalar::I32, 4),
    ] {
        cases.push(append(extents, element, align));
    }
    for (count, by) in [(1, 1), (300, -7), (0, 1)] {
        let before: Vec<f64> = (0..count).map(|at| f64::from(at) * 3.0).collect();
        let after = before.iter().map(|length| length + f64::from(by)).collect();
        cases.push(Case {
            name: format!("{count} lengths advanced by {by}"),
            function: Box::new(AdvanceLengths { count: count as u64, by }),
            buffers: vec![Tensor::from_f64s(Scalar::I32, &[count as u64], before)],
            expected: vec![Expected::exact(0, after)],
        });
    }
    cases
}

/// Random numbers, and what they are as f64.
fn numbers(seed: u64, element: Scalar, extents: &[u64]) -> (Tensor, Vec<f64>) {
    let tensor = random(seed, element, extents);
    let numbers = tensor.to_f64s();
    (tensor, numbers)
}

/// What must not be read.
fn nothing(element: Scalar, extents: &[u64]) -> Tensor {
    let count = extents.iter().product::<u64>() as usize;
    Tensor::from_f64s(element, extents, vec![f64::NAN; count])
}

/// Forward, and backward from what forward must come to.
fn trained(function: SelfAttention) -> [Case; 2] {
    let SelfAttention { element, batch, tokens, heads: [heads, shared], causal, scale, .. } = function;
    let (dim, scale) = (function.dim as usize, f64::from(scale));
    let of_qkv = [batch, tokens, heads + 2 * shared, dim as u64];
    let (of_o, of_sums) = ([batch, tokens, heads, dim as u64], [batch, heads, tokens]);
    let (qkv, x) = numbers(1, element, &of_qkv);
    let (d_o, dy) = numbers(2, element, &of_o);
    let place = |sequence: u64, token: u64, head: u64| {
        (((sequence * tokens + token) * (heads + 2 * shared) + head) as usize) * dim
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut o = vec![0.0; dy.len()];
    let mut log_sums = vec![0.0; (batch * heads * tokens) as usize];
    let mut dx = vec![0.0; x.len()];
    for row in 0..batch * tokens * heads {
        let (sequence, token, head) = (row / heads / tokens, row / heads % tokens, row % heads);
        let own = head / (heads / shared);
        let q = place(sequence, token, head);
        let [k, v] = [heads, heads + shared].map(|first| move |key| place(sequence, key, first + own));
        let seen = if causal { token + 1 } else { tokens };
        let scores: Vec<f64> =
            (0..seen).map(|key| scale * dot(&x[q..][..dim], &x[k(key)..][..dim])).collect();
        let sum: f64 = scores.iter().map(|score| score.exp()).sum();
        log_sums[((sequence * heads + head) * tokens + token) as usize] = sum.ln();
        let weights: Vec<f64> = scores.iter().map(|score| score.exp() / sum).collect();
        let first = row as usize * dim;
        let of_dy = &dy[first..][..dim];
        let slopes: Vec<f64> = (0..seen).map(|key| dot(of_dy, &x[v(key)..][..dim])).collect();
        let delta = dot(&weights, &slopes);
        for (key, (weight, slope)) in (0..).zip(weights.iter().zip(&slopes)) {
            for at in 0..dim {
                o[first + at] += weight * x[v(key) + at];
                dx[v(key) + at] += weight * of_dy[at];
                dx[q + at] += scale * weight * (slope - delta) * x[k(key) + at];
                dx[k(key) + at] += scale * weight * (slope - delta) * x[q + at];
            }
        }
    }
    let name = format!(
        "self-attention of {element}, causal {causal}, {batch} x {tokens} x {heads}/{shared} x {dim}"
    );
    let forward = Case {
        name: name.clone(),
        function: Box::new(function),
        buffers: vec![qkv.clone(), nothing(element, &of_o), nothing(Scalar::F32, &of_sums)],
        expected: vec![Expected::new(1, o.clone(), 2e-2), Expected::new(2, log_sums.clone(), 1e-3)],
    };
    let buffers = vec![
        qkv,
        Tensor::from_f64s(element, &of_o, o),
        Tensor::from_f64s(Scalar::F32, &of_sums, log_sums),
        d_o,
        nothing(element, &of_qkv),
    ];
    let expected = vec![Expected::new(4, dx, 3e-2)];
    let function = Box::new(SelfAttentionBackward(function));
    [forward, Case { name: format!("gradients of {name}"), function, buffers, expected }]
}

fn append([batch, tokens, heads, shared, dim]: [u64; 5], element: Scalar, align: u32) -> Case {
    let capacity = tokens + 3;
    let function = QkvAppend { batch, tokens, heads: [heads, shared], dim, capacity, element, align };
    let extents: Vec<Vec<u64>> = function.buffers().into_iter().map(|buffer| buffer.extents).collect();
    let count = |at: usize| extents[at].iter().product::<u64>();
    let whole =
        |at: usize, first: u64| -> Vec<f64> { (0..count(at)).map(|x| ((first + x) % 251) as f64).collect() };
    let qkv = whole(0, 0);
    let caches = [whole(1, 100), whole(2, 200)];
    // The last token of the second sequence has no room.
    let lengths: Vec<u64> = (0..batch).map(|sequence| 2 + sequence * 2).collect();
    let mut after = caches.clone();
    for (which, cache) in (0..).zip(&mut after) {
        for row in 0..batch * tokens {
            let (sequence, token) = (row / tokens, row % tokens);
            let at = lengths[sequence as usize] + token;
            if at < capacity {
                let from = ((row * (heads + 2 * shared) + heads + which * shared) * dim) as usize;
                let to = ((sequence * capacity + at) * shared * dim) as usize;
                cache[to..][..(shared * dim) as usize]
                    .copy_from_slice(&qkv[from..][..(shared * dim) as usize]);
            }
        }
    }
    let [k, v] = caches;
    let [k_after, v_after] = after;
    let tensor = |at: usize, numbers: Vec<f64>| Tensor::from_f64s(element, &extents[at], numbers);
    let lengths = Tensor::from_f64s(Scalar::I32, &[batch], lengths.into_iter().map(|length| length as f64));
    Case {
        name: format!(
            "append of keys and values of {element}, {batch} x {tokens} x {heads}/{shared} x {dim}"
        ),
        function: Box::new(function),
        buffers: vec![tensor(0, qkv), tensor(1, k), tensor(2, v), lengths],
        expected: vec![Expected::exact(1, k_after), Expected::exact(2, v_after)],
    }
}
