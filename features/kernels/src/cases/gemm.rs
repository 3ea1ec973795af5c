//! Products.

use super::elementwise::erf;
use super::training::slope;
use super::{Case, Expected, random};
use crate::call::Function as _;
use crate::flat;
use crate::gemm::{Activation, Auxiliary, Batch, Epilogue, Multiply, Product};
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

/// C = f(α · A · B + β · C + bias), of one product or a batch.
fn product_of(product: Product) -> Case {
    let Product { element, output, m, n, k, matrices, a_transposed, b_transposed, epilogue, .. } = product;
    let rows = [if a_transposed { m } else { k }, if b_transposed { k } else { n }];
    let whole = |row: u64, element: Scalar| (row * u64::from(element.bytes())).is_multiple_of(16);
    let align = if rows.iter().all(|row| whole(*row, element)) && whole(n, output) { 16 } else { 1 };
    let (alpha, beta) = (0.75, -0.5);
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
    let value = |place: u64| {
        let (matrix, i, j) = (place / (m * n), place / n % m, place % n);
        let terms = (0..k).map(|l| {
            at(0, matrix, [m, k], a_transposed, [i, l]) * at(1, matrix, [k, n], b_transposed, [l, j])
        });
        let bias = if epilogue.bias { numbers[3][j as usize] } else { 0.0 };
        let sum = alpha * terms.sum::<f64>() + beta * numbers[2][place as usize] + bias;
        if epilogue.activation == Activation::Silu { sum / (1.0 + (-sum).exp()) } else { sum }
    };
    let expected = (0..matrices * m * n).map(value).collect();
    let order = |turned| if turned { "t" } else { "n" };
    let (a, b, batch) = (order(a_transposed), order(b_transposed), product.batch.suffix());
    Case {
        name: format!("gemm{batch}_{a}{b} of {element}, {m} x {n} x {k}"),
        function: Box::new(function),
        buffers,
        expected: vec![Expected::new(2, expected, if element == Scalar::F32 { 1e-3 } else { 1e-2 })],
    }
}
