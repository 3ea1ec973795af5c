//! Products.

use super::elementwise::erf;
use super::training::slope;
use super::{Case, Expected, random};
use crate::call::Function as _;
use crate::flat;
use crate::gemm::{Activation, Auxiliary, Batch, Epilogue, Multiply, Product};
use std::rc::Rc;
use vm_ir::Scalar;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let scaled = Epilogue { scaled: true, plus: true, ..Epilogue::NONE };
    let biased = Epilogue { bias: true, activation: Activation::Silu, ..scaled };
    for element in [Scalar::F32, Scalar::Bf16, Scalar::F16] {
        let lines = [[1, 90, 29], [1, 64, 16], [75, 1, 83], [5, 1, 8], [1, 3, 100]];
        let all = [[1, 8, 16], [72, 80, 136], [130, 264, 40], [1, 1, 1], [67, 71, 33]];
        for [m, n, k] in all.into_iter().chain(lines) {
            let product = Product { element, output: element, epilogue: scaled, ..Product::of(m, n, k) };
            cases.push(product_of(product));
        }
        // Rows and columns of every kind, as far as a GPU has instructions for them.
        for (a_transposed, b_transposed) in [(false, false), (true, false), (false, true), (true, true)] {
            let order = Product { element, a_transposed, b_transposed, ..Product::of(1, 1, 43) };
            for [m, n] in [[1, 53], [37, 1]].into_iter().filter(|_| element != Scalar::F32 || !a_transposed) {
                let epilogue = if m == 1 { biased } else { scaled };
                let product = Product { m, n, output: Scalar::F32, epilogue, batch: Batch::Batched, ..order };
                cases.push(product_of(Product { matrices: 3, ..product }));
            }
        }
        // A layer's product, with and without a bias.
        for ([m, n, k], bias) in [([72, 80, 136], true), ([67, 71, 33], true), ([5, 40, 24], false)] {
            let epilogue = Epilogue { bias, ..Epilogue::NONE };
            let layer =
                Product { element, output: element, b_transposed: true, epilogue, ..Product::of(m, n, k) };
            cases.push(product_of(layer));
        }
        for aux in [Auxiliary::Store, Auxiliary::Gradient] {
            let bias = aux == Auxiliary::Store;
            let epilogue = Epilogue { activation: Activation::Gelu, bias, aux, ..Epilogue::NONE };
            cases.push(product_of(Product {
                element,
                output: element,
                epilogue,
                ..Product::of(130, 264, 40)
            }));
        }
    }
    cases
}

/// C = f(α · A · B + β · C + bias), or the sum times f'(aux), of one product or a batch.
fn product_of(product: Product) -> Case {
    let Product { element, output, m, n, k, matrices, a_transposed, b_transposed, epilogue, .. } = product;
    let rows = [if a_transposed { m } else { k }, if b_transposed { k } else { n }];
    let whole = |row: u64, element: Scalar| (row * u64::from(element.bytes())).is_multiple_of(16);
    let align = if rows.iter().all(|row| whole(*row, element)) && whole(n, output) { 16 } else { 1 };
    let Epilogue { scaled, plus, bias, activation, aux, .. } = epilogue;
    let (alpha, beta) = (if scaled { 0.75 } else { 1.0 }, if plus { -0.5 } else { 0.0 });
    let function = Multiply { product: Product { align, ..product }, alpha: alpha as f32, beta: beta as f32 };
    let buffers: Vec<_> = (1..)
        .zip(function.buffers())
        .map(|(seed, buffer)| random(seed, buffer.element, &buffer.extents))
        .collect();
    let numbers: Vec<Vec<f64>> = buffers.iter().map(|tensor| tensor.to_f64s()).collect();
    // An element of a matrix of so many rows and columns.
    let at = |of: usize, matrix: u64, [high, wide]: [u64; 2], turned: bool, [i, j]: [u64; 2]| {
        let place = if turned { j * high + i } else { i * wide + j };
        numbers[of][(matrix * high * wide + place) as usize]
    };
    let sum = |place: u64| {
        let (matrix, i, j) = (place / (m * n), place / n % m, place % n);
        let terms = (0..k).map(|l| {
            at(0, matrix, [m, k], a_transposed, [i, l]) * at(1, matrix, [k, n], b_transposed, [l, j])
        });
        let bias = if bias { numbers[3][j as usize] } else { 0.0 };
        alpha * terms.sum::<f64>() + beta * numbers[2][place as usize] + bias
    };
    let last = numbers.len() - 1;
    let value = |place: u64| match (aux, activation) {
        (Auxiliary::Gradient, _) => sum(place) * slope(flat::Activation::Gelu, numbers[last][place as usize]),
        (_, Activation::None) => sum(place),
        (_, Activation::Relu) => sum(place).max(0.0),
        (_, Activation::Silu) => sum(place) / (1.0 + (-sum(place)).exp()),
        (_, Activation::Gelu) => sum(place) * 0.5 * (1.0 + erf(sum(place) / 2f64.sqrt())),
    };
    let all = 0..matrices * m * n;
    let within = if element == Scalar::F32 { 1e-3 } else { 1e-2 };
    let mut expected = vec![Expected::new(2, all.clone().map(value).collect(), within)];
    if aux == Auxiliary::Store {
        expected.push(Expected::new(last, all.map(sum).collect(), within));
    }
    let order = |turned| if turned { "t" } else { "n" };
    let (a, b, batch) = (order(a_transposed), order(b_transposed), product.batch.suffix());
    Case {
        name: format!("gemm{batch}_{a}{b} of {element}, {m} x {n} x {k}, {activation:?}, aux {aux:?}"),
        function: Rc::new(function),
        buffers,
        expected,
    }
}
