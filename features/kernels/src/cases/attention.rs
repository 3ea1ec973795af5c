//! Attention.

use super::{Case, Expected, random};
use crate::attention::{DotProductAttention, Fp8Scales, Mask};
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in [Scalar::F32, Scalar::Bf16, Scalar::F16] {
        for (bias, mask) in
            [(false, Mask::Full), (false, Mask::Causal), (true, Mask::Full), (true, Mask::Causal)]
        {
            // [heads, heads of keys, queries, keys, elements]
            // Queries of 200 f32 take the most shared memory.
            let large = (element == Scalar::F32 && !bias && mask == Mask::Full).then_some([1, 1, 3, 5, 200]);
            for [heads, shared, queries, keys, dim] in
                [[1, 1, 1, 1, 1], [2, 1, 5, 7, 8], [3, 1, 70, 67, 20], [2, 2, 65, 130, 64]]
                    .into_iter()
                    .chain(large)
            {
                let align = if (dim * u64::from(element.bytes())).is_multiple_of(16) { 16 } else { 1 };
                let function = DotProductAttention {
                    element,
                    fp8: None,
                    batch: 1 + u64::from(dim == 20),
                    heads: [heads, shared],
                    lengths: [queries, keys],
                    dim,
                    mask,
                    bias,
                    scale: 0.7,
                    align,
                };
                cases.push(case(function));
            }
        }
    }
    for (fp8, [heads, shared, queries, keys, dim], mask, bias) in [
        (Fp8Scales::Heads, [4, 2, 70, 67, 64], Mask::Causal, false),
        (Fp8Scales::Tensor, [2, 2, 65, 130, 128], Mask::Full, false),
        (Fp8Scales::Heads, [3, 1, 33, 20, 48], Mask::Full, true),
    ] {
        cases.push(case(DotProductAttention {
            element: if bias { Scalar::F32 } else { Scalar::Bf16 },
            fp8: Some(fp8),
            batch: 2,
            heads: [heads, shared],
            lengths: [queries, keys],
            dim,
            mask,
            bias,
            scale: 0.3,
            align: 16,
        }));
    }
    cases
}

/// Scales of FP8, and what the number of a row of heads is to be multiplied by.
fn scales(function: &DotProductAttention, which: usize) -> (Option<Tensor>, Vec<f64>) {
    let (batch, heads) = (function.batch, function.heads[usize::from(which > 0)]);
    let first = [0.5, 1.5, 2.0][which];
    let each = |at: u64| match function.fp8 {
        None => 1.0,
        Some(Fp8Scales::Tensor) => first,
        Some(Fp8Scales::Heads) => first / (1.0 + at as f64 / 4.0),
    };
    let numbers: Vec<f64> = (0..batch * heads).map(each).collect();
    let extents = match function.fp8 {
        None => return (None, numbers),
        Some(Fp8Scales::Tensor) => [1, 1],
        Some(Fp8Scales::Heads) => [batch, heads],
    };
    let count = extents.iter().product::<u64>() as usize;
    (Some(Tensor::from_f64s(Scalar::F32, &extents, numbers[..count].iter().copied())), numbers)
}

/// Of a bias: numbers, and masks at some keys; all keys of the second query.
fn biases(queries: u64, keys: u64) -> Tensor {
    let mut numbers = random(5, Scalar::F32, &[queries, keys]).to_f64s();
    for (at, number) in (0..).zip(&mut numbers) {
        let (query, key): (u64, u64) = (at / keys, at % keys);
        match query {
            1 => *number = f64::NEG_INFINITY,
            _ if (key + query).is_multiple_of(5) && key > 0 => *number = f64::from(f32::MIN),
            _ => {}
        }
    }
    Tensor::from_f64s(Scalar::F32, &[queries, keys], numbers)
}

fn case(function: DotProductAttention) -> Case {
    let DotProductAttention {
        element,
        batch,
        heads: [heads, shared],
        lengths: [queries, keys],
        dim,
        mask,
        bias,
        scale,
        ..
    } = function;
    let (of_q, of_k) = ([batch, queries, heads, dim], [batch, keys, shared, dim]);
    let factor = if function.fp8.is_some() { Scalar::F8E4M3 } else { element };
    let inputs = [random(1, factor, &of_q), random(2, factor, &of_k), random(3, factor, &of_k)];
    let scaled = [0, 1, 2].map(|at: usize| {
        let (tensor, numbers) = scales(&function, at);
        let [_, tokens, heads, dim] = inputs[at].extents[..] else { return (tensor, Vec::new()) };
        let by = |place: u64| numbers[(place / dim / heads / tokens * heads + place / dim % heads) as usize];
        (tensor, (0..).zip(inputs[at].to_f64s()).map(|(place, x)| x * by(place)).collect())
    });
    let [q, k, v] = [0, 1, 2].map(|at: usize| &scaled[at].1);
    let added = bias.then(|| biases(queries, keys));
    let numbers = added.as_ref().map(Tensor::to_f64s);
    let mut expected = Vec::new();
    for row in 0..batch * queries * heads {
        let (of, query, head) = (row / heads / queries, row / heads % queries, row % heads);
        let place = |key: u64| (((of * keys + key) * shared + head / (heads / shared)) * dim) as usize;
        let weight = |key: u64| {
            let seen = mask == Mask::Full || key + queries <= query + keys;
            let added = numbers.as_ref().map_or(0.0, |all| all[(query * keys + key) as usize]);
            if !seen || added < -3e38 {
                return 0.0;
            }
            let terms = (0..dim as usize).map(|at| q[row as usize * dim as usize + at] * k[place(key) + at]);
            (f64::from(scale) * terms.sum::<f64>() + added).exp()
        };
        let weights: Vec<f64> = (0..keys).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        for at in 0..dim as usize {
            let all = (0..).zip(&weights).map(|(key, weight)| weight * v[place(key) + at]);
            expected.push(if sum == 0.0 { 0.0 } else { all.sum::<f64>() / sum });
        }
    }
    let name = format!(
        "attention {mask:?} of {element}, fp8 {:?}, bias {bias}, {heads}/{shared} x {queries} x {keys} x {dim}",
        function.fp8
    );
    let mut buffers: Vec<Tensor> = inputs.into();
    buffers.push(Tensor::from_f64s(element, &of_q, vec![f64::NAN; (batch * queries * heads * dim) as usize]));
    buffers.extend(added);
    let scales = scaled.iter().filter_map(|(tensor, _)| tensor.clone());
    buffers.extend(scales);
    let tolerance = match element {
        // Weights have three bits behind the first.
        _ if function.fp8.is_some() => 6e-2,
        Scalar::F32 => 1e-3,
        _ => 2e-2,
    };
    Case {
        name,
        function: Box::new(function),
        buffers,
        expected: vec![Expected::new(3, expected, tolerance)],
    }
}
