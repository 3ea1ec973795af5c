//! Functions in their plain form, as programs in C call them.

use std::rc::Rc;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;

use super::{Case, Expected, numbers, random, tolerance};
use crate::call::Function;
use crate::elementwise::{Chain, Elementwise, Op};
use crate::flat::Fill;
use crate::gemm::{Batch, Epilogue, Multiply, Product};
use crate::loss::{CrossEntropy, LossOptions, Reduction};
use crate::rope::{Angles, Pairs, Rope};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in [Scalar::F32, Scalar::Bf16, Scalar::F16] {
        cases.push(elementwise("silu", Chain::unary(Op::Silu, element, element), element, |x| {
            x / (1.0 + (-x).exp())
        }));
        cases.push(elementwise("scale", Chain::scale(element, element), element, |x| x * 0.75));
        cases.push(zero(element));
        cases.push(products(element));
        cases.push(rope(element));
        cases.extend([None, Some(Scalar::F32)].map(|log_probs| losses(element, log_probs)));
    }
    cases
}

/// A function's buffers of random numbers.
fn inputs(function: &dyn Function) -> Vec<Tensor> {
    let buffers = function.buffers().into_iter();
    buffers.zip(1..).map(|(buffer, seed)| random(seed, buffer.element, &buffer.extents)).collect()
}

fn elementwise(name: &str, chain: Chain, element: Scalar, of: fn(f64) -> f64) -> Case {
    let function = Elementwise { numbers: [0.75; 4], align: element.bytes(), ..Elementwise::of(chain, 1001) };
    let buffers = inputs(&function);
    let expected = buffers[0].to_f64s().into_iter().map(of).collect();
    Case {
        name: format!("{name} of {element}"),
        function: Rc::new(function),
        buffers,
        expected: vec![Expected::new(1, expected, tolerance(element))],
    }
}

fn zero(element: Scalar) -> Case {
    let function = Fill { sizes: vec![1001], element, align: element.bytes(), value: 0.0 };
    let before = Tensor::from_f64s(element, &[1001], vec![f64::NAN; 1001]);
    Case {
        name: format!("zeros of {element}"),
        function: Rc::new(function),
        buffers: vec![before],
        expected: vec![Expected::exact(0, vec![0.0; 1001])],
    }
}

/// C = A · B of each of three.
fn products(element: Scalar) -> Case {
    const COUNT: u64 = 3;
    let (m, n, k) = (17, 19, 23);
    let product = Product {
        element,
        output: element,
        epilogue: Epilogue::NONE,
        batch: Batch::Batched,
        matrices: COUNT,
        align: 1,
        ..Product::of(m, n, k)
    };
    let function = Multiply { product, alpha: 1.0, beta: 0.0 };
    let buffers = inputs(&function);
    let (a, b) = (buffers[0].to_f64s(), buffers[1].to_f64s());
    let value = |at: u64| {
        let (of, i, j) = (at / (m * n), at / n % m, at % n);
        let terms = (0..k).map(|l| a[((of * m + i) * k + l) as usize] * b[((of * k + l) * n + j) as usize]);
        terms.sum()
    };
    let expected = (0..COUNT * m * n).map(value).collect();
    Case {
        name: format!("gemm of {element}, batched"),
        function: Rc::new(function),
        buffers,
        expected: vec![Expected::new(2, expected, if element == Scalar::F32 { 1e-3 } else { 1e-2 })],
    }
}

/// q and k, turned by the token's place times a frequency.
fn rope(element: Scalar) -> Case {
    let (batch, tokens, heads, dim) = (2, 5, 3, 8);
    let function = Rope {
        batch,
        tokens,
        q_heads: heads,
        k_heads: heads,
        dim: dim as u32,
        rows: tokens,
        pairs: Pairs::Halves,
        angles: Angles::Frequencies,
        positions: false,
        first: 0,
        inverse: false,
        element,
        align: element.bytes(),
    };
    let buffers = inputs(&function);
    let frequencies = buffers[2].to_f64s();
    let expected = [0, 1].map(|buffer: usize| {
        let x = buffers[buffer].to_f64s();
        let half = dim / 2;
        let value = |at: u64| {
            let (place, i) = (at / dim / heads % tokens, at % dim);
            let (sin, cos) = (place as f64 * frequencies[(i % half) as usize]).sin_cos();
            let (other, sign) = if i < half { (at + half, -1.0) } else { (at - half, 1.0) };
            x[at as usize] * cos + sign * x[other as usize] * sin
        };
        let values = (0..batch * tokens * heads * dim).map(value).collect();
        Expected::new(buffer, values, tolerance(element).max(1e-4))
    });
    Case {
        name: format!("rope of {element}, as in C"),
        function: Rc::new(function),
        buffers,
        expected: expected.into(),
    }
}

/// The losses of rows by themselves, of which the second is ignored.
fn losses(element: Scalar, log_probs: Option<Scalar>) -> Case {
    let (rows, columns) = (4, 77u64);
    let options = LossOptions { reduction: Reduction::None, ..LossOptions::default() };
    let of = CrossEntropy::of(rows, columns, element);
    let function = CrossEntropy { target: Scalar::I32, log_probs, options, align: element.bytes(), ..of };
    let targets = [3, -100, 0, 76];
    let mut buffers = inputs(&function);
    let logits = numbers(1, rows * columns).into_iter().map(|number| 4.0 * number);
    buffers[0] = Tensor::from_f64s(element, &[rows, columns], logits);
    buffers[1] = Tensor::from_f64s(Scalar::I32, &[rows], targets.map(f64::from));
    let all = buffers[0].to_f64s();
    let (mut losses, mut logs) = (Vec::new(), Vec::new());
    for (row, target) in all.chunks(columns as usize).zip(targets) {
        let sum = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        losses.push(usize::try_from(target).map_or(0.0, |target| sum - row[target]));
        logs.extend(row.iter().map(|x| x - sum));
    }
    let mut expected = vec![Expected::new(2, losses, 1e-4)];
    expected.extend(log_probs.map(|_| Expected::new(3, logs, 1e-4)));
    let more = log_probs.map_or("", |_| " and logarithms");
    Case {
        name: format!("cross-entropy of {element} by rows{more}, targets of i32"),
        function: Rc::new(function),
        buffers,
        expected,
    }
}
