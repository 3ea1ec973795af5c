//! Attention and its gradients.

#[cfg(test)]
use super::numbers;
use super::{Case, Expected, random};
use crate::attention::{DotProductAttention, DotProductAttentionBackward, Fp8Scales, Mask};
use crate::call::Function as _;
use std::rc::Rc;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

/// Attention of [heads, heads of keys, queries, keys, elements], of memory that is aligned as its rows are.
pub(super) fn of(
    element: Scalar,
    mask: Mask,
    [heads, shared, queries, keys, dim]: [u64; 5],
) -> DotProductAttention {
    DotProductAttention {
        element,
        fp8: None,
        batch: 1 + u64::from(dim == 20),
        heads: [heads, shared],
        lengths: [queries, keys],
        dim,
        mask,
        window: [9, 3],
        bias: false,
        log_sums: false,
        scale: 0.7,
        align: if (dim * u64::from(element.bytes())).is_multiple_of(16) { 16 } else { 1 },
    }
}

pub(super) fn cases() -> Vec<Case> {
    use Mask::{Causal, Full, Window};
    use Scalar::{Bf16, F16, F32};
    let mut cases = Vec::new();
    for element in [F32, Bf16, F16] {
        for (bias, mask) in [(false, Full), (false, Causal), (true, Full), (true, Causal)] {
            // Queries of 200 f32 take the most shared memory.
            let large = (element == F32 && !bias && mask == Full).then_some([1, 1, 3, 5, 200]);
            let all = [[1, 1, 1, 1, 1], [2, 1, 5, 7, 8], [3, 1, 70, 67, 20], [2, 2, 65, 130, 64]];
            for extents in all.into_iter().chain(large) {
                let log_sums = extents[2] == 5;
                cases.push(case(DotProductAttention { bias, log_sums, ..of(element, mask, extents) }));
            }
        }
        for mask in [Full, Causal] {
            let own = of(element, mask, [3, 3, 33, 33, 20]);
            cases.push(case(DotProductAttention { log_sums: true, ..own }));
        }
        let window = of(element, Window, [2, 1, 33, 30, 20]);
        cases.push(case(DotProductAttention { log_sums: true, ..window }));
    }
    for (fp8, extents, mask, bias) in [
        (Fp8Scales::Heads, [4, 2, 70, 67, 64], Causal, false),
        (Fp8Scales::Tensor, [2, 2, 65, 130, 128], Full, false),
        (Fp8Scales::Heads, [3, 1, 33, 20, 48], Full, true),
    ] {
        let element = if bias { F32 } else { Bf16 };
        let function = of(element, mask, extents);
        let (batch, fp8, log_sums, scale, align) = (2, Some(fp8), bias, 0.3, 16);
        cases.push(case(DotProductAttention { batch, fp8, bias, log_sums, scale, align, ..function }));
    }
    for (element, mask, extents) in [
        (F32, Full, [2, 1, 5, 7, 8]),
        (F32, Causal, [3, 1, 70, 67, 20]),
        (F32, Window, [1, 1, 33, 40, 80]),
        (F32, Full, [1, 1, 3, 5, 200]),
        (F32, Causal, [2, 2, 40, 30, 64]),
        (F32, Causal, [3, 3, 33, 33, 20]),
        // Rows that begin anywhere, and heads that are filled up.
        (Bf16, Full, [1, 1, 5, 5, 7]),
        (Bf16, Window, [2, 1, 20, 33, 96]),
        (F16, Causal, [2, 1, 33, 20, 40]),
        (Bf16, Causal, [2, 1, 9, 17, 192]),
        (F16, Full, [1, 1, 12, 12, 256]),
        // In one pass.
        (Bf16, Causal, [2, 1, 65, 70, 64]),
        (F16, Window, [2, 2, 33, 50, 128]),
        (F16, Full, [4, 2, 40, 40, 64]),
        // Without queries, and without keys.
        (Bf16, Full, [1, 1, 0, 5, 64]),
        (F32, Causal, [2, 1, 4, 0, 64]),
    ] {
        cases.push(gradients(of(element, mask, extents)));
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

/// Of a bias: numbers, and masks at some keys; all keys of the second query, and of the next two finite numbers that mask none if they are everywhere.
fn biases(queries: u64, keys: u64) -> Tensor {
    let mut numbers = random(5, Scalar::F32, &[queries, keys]).to_f64s();
    for (at, number) in (0..).zip(&mut numbers) {
        let (query, key): (u64, u64) = (at / keys, at % keys);
        match query {
            1 => *number = f64::NEG_INFINITY,
            // All keys weigh the same.
            2 => *number = -1e30,
            3 => *number = f64::from(f32::MIN),
            _ if (key + query).is_multiple_of(5) && key > 0 => *number = f64::from(f32::MIN),
            _ => {}
        }
    }
    Tensor::from_f64s(Scalar::F32, &[queries, keys], numbers)
}

/// What attention comes to, and its gradients.
pub(super) struct Defined {
    pub(super) o: Vec<f64>,
    pub(super) log_sums: Vec<f64>,
    /// Of Q, K and V, from that of O.
    pub(super) gradients: [Vec<f64>; 3],
}

/// Attention of Q, K and V, with a bias, and its gradients from that of O.
pub(super) fn define(
    function: &DotProductAttention,
    [q, k, v]: [&[f64]; 3],
    bias: Option<&[f64]>,
    d_o: &[f64],
) -> Defined {
    let DotProductAttention { batch, heads: [heads, shared], lengths: [queries, keys], mask, .. } = *function;
    let (dim, scale) = (function.dim as usize, f64::from(function.scale));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut o = vec![0.0; q.len()];
    let mut log_sums = vec![0.0; (batch * heads * queries) as usize];
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|of| vec![0.0; of.len()]);
    for row in 0..batch * queries * heads {
        let (of, query, head) = (row / heads / queries, row / heads % queries, row % heads);
        let place = |key: u64| ((of * keys + key) * shared + head / (heads / shared)) as usize * dim;
        let first = row as usize * dim;
        let score = |key: u64| {
            let distance = (key + queries) as i64 - (query + keys) as i64;
            let [left, right] = function.window.map(i64::from);
            let seen = match mask {
                Mask::Full => true,
                Mask::Causal => distance <= 0,
                Mask::Window => (-left..=right).contains(&distance),
            };
            let score = scale * dot(&q[first..][..dim], &k[place(key)..][..dim]);
            match bias {
                _ if !seen => f64::NEG_INFINITY,
                None => score,
                // A large bias takes what an f32 can't hold beside it.
                Some(all) => f64::from((score + all[(query * keys + key) as usize]) as f32),
            }
        };
        let scores: Vec<f64> = (0..keys).map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> =
            scores.iter().map(|x| if *x == f64::NEG_INFINITY { 0.0 } else { (x - most).exp() }).collect();
        let sum: f64 = weights.iter().sum();
        log_sums[((of * heads + head) * queries + query) as usize] = most + sum.ln();
        let weights: Vec<f64> = weights.iter().map(|x| if sum == 0.0 { 0.0 } else { x / sum }).collect();
        let from = d_o.get(first..).map_or(&[][..], |from| &from[..dim.min(from.len())]);
        let slopes: Vec<f64> = (0..keys).map(|key| dot(from, &v[place(key)..])).collect();
        let delta = dot(&weights, &slopes);
        for (key, (weight, slope)) in (0..).zip(weights.iter().zip(&slopes)) {
            let (place, change) = (place(key), scale * weight * (slope - delta));
            for at in 0..dim {
                o[first + at] += weight * v[place + at];
                dq[first + at] += change * k[place + at];
                dk[place + at] += change * q[first + at];
                dv[place + at] += weight * from.get(at).unwrap_or(&0.0);
            }
        }
    }
    Defined { o, log_sums, gradients: [dq, dk, dv] }
}

/// What must not be read.
pub(super) fn nothing(element: Scalar, extents: &[u64]) -> Tensor {
    let count = extents.iter().product::<u64>() as usize;
    Tensor::from_f64s(element, extents, vec![f64::NAN; count])
}

fn case(function: DotProductAttention) -> Case {
    let DotProductAttention { element, heads: [heads, shared], lengths: [queries, keys], dim, mask, .. } =
        function;
    let specified = function.buffers();
    let inputs = [0, 1, 2].map(|at| random(at as u64 + 1, specified[at].element, &specified[at].extents));
    let scaled = [0, 1, 2].map(|at: usize| {
        let (tensor, numbers) = scales(&function, at);
        let [_, tokens, heads, dim] = inputs[at].extents[..] else { return (tensor, Vec::new()) };
        let by = |place: u64| numbers[(place / dim / heads / tokens * heads + place / dim % heads) as usize];
        (tensor, (0..).zip(inputs[at].to_f64s()).map(|(place, x)| x * by(place)).collect::<Vec<f64>>())
    });
    let added = function.bias.then(|| biases(queries, keys));
    let numbers = added.as_ref().map(Tensor::to_f64s);
    let Defined { o, log_sums, .. } =
        define(&function, [0, 1, 2].map(|at: usize| &scaled[at].1[..]), numbers.as_deref(), &[]);
    let name = format!(
        "attention {mask:?} of {element}, fp8 {:?}, bias {}, {heads}/{shared} x {queries} x {keys} x {dim}",
        function.fp8, function.bias
    );
    let mut buffers: Vec<Tensor> = inputs.into();
    buffers.push(nothing(element, &specified[3].extents));
    buffers.extend(added);
    buffers.extend(scaled.into_iter().filter_map(|(tensor, _)| tensor));
    let tolerance = match element {
        // Weights have three bits behind the first.
        _ if function.fp8.is_some() => 6e-2,
        Scalar::F32 => 1e-3,
        _ => 2e-2,
    };
    let mut expected = vec![Expected::new(3, o, tolerance)];
    if let Some(buffer) = specified.get(buffers.len()) {
        expected.push(Expected::new(buffers.len(), log_sums, tolerance));
        buffers.push(nothing(Scalar::F32, &buffer.extents));
    }
    Case { name, function: Rc::new(function), buffers, expected }
}

/// The gradients, from what attention must come to.
fn gradients(function: DotProductAttention) -> Case {
    let DotProductAttention { element, heads: [heads, shared], lengths: [queries, keys], dim, mask, .. } =
        function;
    let name = format!(
        "gradients of attention {mask:?} of {element}, {heads}/{shared} x {queries} x {keys} x {dim}"
    );
    let function = DotProductAttentionBackward(function);
    let specified = function.buffers();
    let tensor = |at: usize| random(at as u64 + 1, specified[at].element, &specified[at].extents);
    let [q, k, v, d_o] = [0, 1, 2, 5].map(tensor);
    let numbers = [&q, &k, &v, &d_o].map(Tensor::to_f64s);
    let [of_q, of_k, of_v, of_do] = numbers.each_ref().map(Vec::as_slice);
    let Defined { o, log_sums, gradients } = define(&function.0, [of_q, of_k, of_v], None, of_do);
    let given =
        |at: usize, numbers| Tensor::from_f64s(specified[at].element, &specified[at].extents, numbers);
    let mut buffers = vec![q, k, v, given(3, o), given(4, log_sums), d_o];
    buffers.extend(specified[6..].iter().map(|buffer| nothing(element, &buffer.extents)));
    let tolerance = if element == Scalar::F32 { 1e-3 } else { 3e-2 };
    let expected = (6..).zip(gradients).map(|(at, gradient)| Expected::new(at, gradient, tolerance));
    Case { name, function: Rc::new(function), buffers, expected: expected.collect() }
}

/// The definition's gradients are the slopes of its sums of products with O's gradient.
#[test]
fn gradients_are_slopes() {
    const STEP: f64 = 1e-5;
    for mask in [Mask::Full, Mask::Causal, Mask::Window] {
        let function = of(Scalar::F32, mask, [4, 2, 6, 13, 3]);
        let buffers = DotProductAttentionBackward(function).buffers();
        let [q, k, v, d_o] = [0, 1, 2, 5].map(|at: usize| numbers(at as u64 + 1, buffers[at].len().unwrap()));
        let factors = [q, k, v];
        let define =
            |factors: &[Vec<f64>; 3]| define(&function, factors.each_ref().map(Vec::as_slice), None, &d_o);
        let sum =
            |factors: &[Vec<f64>; 3]| define(factors).o.iter().zip(&d_o).map(|(a, b)| a * b).sum::<f64>();
        for (which, gradient) in define(&factors).gradients.iter().enumerate() {
            for (at, found) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut factors = factors.clone();
                    factors[which][at] += by;
                    sum(&factors)
                };
                let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!((found - slope).abs() < 1e-7, "{mask:?}, {which}, {at}: {found}, not {slope}");
            }
        }
    }
}
