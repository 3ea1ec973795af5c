//! Attention.

use super::{Case, Expected, random};
use crate::attention::{DotProductAttention, Mask};
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
                [[1, 1, 1, 1, 1], [3, 1, 70, 67, 20], [2, 2, 65, 130, 64]].into_iter().chain(large)
            {
                let align = if (dim * u64::from(element.bytes())).is_multiple_of(16) { 16 } else { 1 };
                let function = DotProductAttention {
                    element,
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
    cases
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
    let inputs = [random(1, element, &of_q), random(2, element, &of_k), random(3, element, &of_k)];
    let [q, k, v] = [0, 1, 2].map(|at: usize| inputs[at].to_f64s());
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
        "attention {mask:?} of {element}, bias {bias}, {heads}/{shared} x {queries} x {keys} x {dim}"
    );
    let mut buffers: Vec<Tensor> = inputs.into();
    buffers.push(Tensor::from_f64s(element, &of_q, vec![f64::NAN; (batch * queries * heads * dim) as usize]));
    buffers.extend(added);
    let tolerance = if element == Scalar::F32 { 1e-3 } else { 2e-2 };
    Case {
        name,
        function: Box::new(function),
        buffers,
        expected: vec![Expected::new(3, expected, tolerance)],
    }
}
