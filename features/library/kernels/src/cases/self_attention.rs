//! Self-attention, its gradients, and what is put into a cache for it.

use super::attention::{Defined, define, nothing, of};
use super::{Case, Expected, random};
use crate::append::{AdvanceLengths, QkvAppend};
use crate::attention::{DotProductAttention, Mask, SelfAttention, SelfAttentionBackward};
use crate::call::Function;
use std::rc::Rc;
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
            function: Rc::new(AdvanceLengths { count: count as u64, by }),
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

/// Forward, and backward from what forward must come to.
fn trained(function: SelfAttention) -> [Case; 2] {
    let SelfAttention { element, batch, tokens, heads: [heads, shared], causal, scale, .. } = function;
    let dim = u64::from(function.dim);
    let of_qkv = [batch, tokens, heads + 2 * shared, dim];
    let (of_o, of_sums) = ([batch, tokens, heads, dim], [batch, heads, tokens]);
    let (qkv, x) = numbers(1, element, &of_qkv);
    let (d_o, dy) = numbers(2, element, &of_o);
    let mask = if causal { Mask::Causal } else { Mask::Full };
    let apart = of(element, mask, [heads, shared, tokens, tokens, dim]);
    // A token's queries, keys and values lie side by side.
    let widths = [heads, shared, shared].map(|heads| (heads * dim) as usize);
    let starts = [0, widths[0], widths[0] + widths[1]];
    let parts = [0, 1, 2].map(|at: usize| -> Vec<f64> {
        x.chunks(widths.iter().sum()).flat_map(|token| &token[starts[at]..][..widths[at]]).copied().collect()
    });
    let parts = parts.each_ref().map(Vec::as_slice);
    let Defined { o, log_sums, gradients } =
        define(&DotProductAttention { batch, scale, ..apart }, parts, None, &dy);
    let mut dx = Vec::new();
    for token in 0..(batch * tokens) as usize {
        let each = gradients.iter().zip(widths);
        each.for_each(|(gradient, width)| dx.extend_from_slice(&gradient[token * width..][..width]));
    }
    let name = format!(
        "self-attention of {element}, causal {causal}, {batch} x {tokens} x {heads}/{shared} x {dim}"
    );
    let forward = Case {
        name: name.clone(),
        function: Rc::new(function),
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
    let function = Rc::new(SelfAttentionBackward(function));
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
        function: Rc::new(function),
        buffers: vec![tensor(0, qkv), tensor(1, k), tensor(2, v), lengths],
        expected: vec![Expected::exact(1, k_after), Expected::exact(2, v_after)],
    }
}
