//! Products.

use super::{Case, Expected, random};
use crate::gemm::{Epilogue, Multiply, Product};
use vm_ir::Scalar;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in [Scalar::F32, Scalar::Bf16, Scalar::F16] {
        for [m, n, k] in [[1, 8, 16], [72, 80, 136], [130, 264, 40], [1, 1, 1], [67, 71, 33]] {
            cases.push(product(element, [m, n, k]));
        }
    }
    cases
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
