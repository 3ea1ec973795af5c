//! Products.

use super::elementwise::erf;
use super::training::slope;
use super::{Case, Expected, random};
use crate::flat;
use crate::gemm::{Activation, Auxiliary, Epilogue, Multiply, Product};
use vm_ir::Scalar;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in [Scalar::F32, Scalar::Bf16, Scalar::F16] {
        let lines = [[1, 90, 29], [1, 64, 16], [75, 1, 83], [5, 1, 8], [1, 3, 100]];
        let all = [[1, 8, 16], [72, 80, 136], [130, 264, 40], [1, 1, 1], [67, 71, 33]];
        for [m, n, k] in all.into_iter().chain(lines) {
            cases.push(product(element, [m, n, k]));
        }
        cases.extend(
            [Auxiliary::Store, Auxiliary::Gradient].map(|aux| with_aux(element, [130, 264, 40], aux)),
        );
    }
    cases
}

/// C = gelu(A · B + bias), or (A · B) gelu'(aux).
fn with_aux(element: Scalar, [m, n, k]: [u64; 3], aux: Auxiliary) -> Case {
    let bias = aux == Auxiliary::Store;
    let epilogue = Epilogue { activation: Activation::Gelu, bias, aux, ..Epilogue::NONE };
    let product = Product { element, output: element, epilogue, ..Product::of(m, n, k) };
    let tensor = |seed, extents: &[u64]| random(seed, element, extents);
    let mut buffers = vec![tensor(1, &[m, k]), tensor(2, &[k, n]), tensor(3, &[m, n])];
    buffers.extend(bias.then(|| tensor(4, &[n])));
    buffers.push(tensor(5, &[m, n]));
    let numbers: Vec<Vec<f64>> = buffers.iter().map(|tensor| tensor.to_f64s()).collect();
    let sum = |at: u64| {
        let (i, j) = (at / n, at % n);
        let terms = (0..k).map(|l| numbers[0][(i * k + l) as usize] * numbers[1][(l * n + j) as usize]);
        terms.sum::<f64>() + if bias { numbers[3][j as usize] } else { 0.0 }
    };
    let last = buffers.len() - 1;
    let within = if element == Scalar::F32 { 1e-3 } else { 1e-2 };
    let sums = (0..m * n).map(sum);
    let expected = match aux {
        Auxiliary::Gradient => {
            let slopes = numbers[last].iter().map(|x| slope(flat::Activation::Gelu, *x));
            vec![Expected::new(2, sums.zip(slopes).map(|(sum, slope)| sum * slope).collect(), within)]
        }
        Auxiliary::None | Auxiliary::Store => vec![
            Expected::new(2, sums.clone().map(|x| x * 0.5 * (1.0 + erf(x / 2f64.sqrt()))).collect(), within),
            Expected::new(last, sums.collect(), within),
        ],
    };
    Case {
        name: format!("gemm of {element} with gelu, {m} x {n} x {k}, {aux:?}"),
        function: Box::new(Multiply { product, alpha: 1.0, beta: 0.0 }),
        buffers,
        expected,
    }
}

/// C = α · A · B + β · C.
fn product(element: Scalar, [m, n, k]: [u64; 3]) -> Case {
    let epilogue = Epilogue { scaled: true, plus: true, ..Epilogue::NONE };
    let product = Product { element, output: element, epilogue, ..Product::of(m, n, k) };
    let bytes = u64::from(element.bytes());
    let align = if [n, k].iter().all(|row| (row * bytes).is_multiple_of(16)) { 16 } else { 1 };
    let product = Product { align, ..product };
    let (alpha, beta) = (0.75, -0.5);
    let (a, b, c) = (random(1, element, &[m, k]), random(2, element, &[k, n]), random(3, element, &[m, n]));
    let [a_numbers, b_numbers, c_numbers] = [&a, &b, &c].map(|tensor| tensor.to_f64s());
    let value = |at: u64| {
        let (i, j) = (at / n, at % n);
        let terms = (0..k).map(|l| a_numbers[(i * k + l) as usize] * b_numbers[(l * n + j) as usize]);
        alpha * terms.sum::<f64>() + beta * c_numbers[at as usize]
    };
    let expected = (0..m * n).map(value).collect();
    Case {
        name: format!("gemm of {element}, {m} x {n} x {k}"),
        function: Box::new(Multiply { product, alpha: alpha as f32, beta: beta as f32 }),
        buffers: vec![a, b, c],
        expected: vec![Expected::new(2, expected, if element == Scalar::F32 { 1e-3 } else { 1e-2 })],
    }
}
