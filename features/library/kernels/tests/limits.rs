//! Functions of more matrices, sequences, rows or heads than a grid has blocks along y and z.

mod common;

use std::rc::Rc;
use vm_ir::interp::Tensor;
use vm_ir::limits::MAX_GRID_YZ;
use vm_ir::{Scalar, Trust};
use vm_kernels::append::{KvAppend, Layout, QkvAppend};
use vm_kernels::attention::{
    DecodeAttention, DotProductAttention, DotProductAttentionBackward, Mask, SelfAttention,
    SelfAttentionBackward,
};
use vm_kernels::call::Function;
use vm_kernels::cases::{Case, Expected, random};
use vm_kernels::family::{Kind, Problem, Resources};
use vm_kernels::gemm::{Batch, Epilogue, Multiply, Product};
use vm_kernels::rope::{Angles, Pairs, Rope};

const GPU: Resources = Resources { compute_units: 132, shared_bytes: 232_448, kind: Kind::Gpu, cluster: 8 };
const OLDER: Resources = Resources { shared_bytes: 101_376, cluster: 1, ..GPU };
const CPU: Resources = Resources { compute_units: 4, shared_bytes: 1 << 30, kind: Kind::Cpu, cluster: 1 };
/// More than a grid has.
const MANY: u64 = 70_000;

fn product(element: Scalar, matrices: u64, [m, n, k]: [u64; 3]) -> Product {
    let batch = if matrices > 1 { Batch::Batched } else { Batch::One };
    Product { element, output: element, batch, matrices, align: 1, ..Product::of(m, n, k) }
}

fn multiply(product: Product) -> Multiply {
    Multiply { product, alpha: 1.0, beta: 0.0 }
}

fn rope([batch, q_heads, k_heads]: [u64; 3]) -> Rope {
    Rope {
        batch,
        tokens: 1,
        q_heads,
        k_heads,
        dim: 2,
        rows: 1,
        pairs: Pairs::Halves,
        angles: Angles::Frequencies,
        positions: true,
        first: 0,
        inverse: false,
        element: Scalar::F32,
        align: 16,
    }
}

#[test]
fn grids_are_what_launches_have() {
    let (element, heads, scale, align) = (Scalar::Bf16, [2, 1], 1.0, 16);
    let attention = DotProductAttention {
        element,
        fp8: None,
        batch: MANY,
        heads,
        lengths: [3, 5],
        dim: 64,
        mask: Mask::Causal,
        window: [0; 2],
        bias: false,
        log_sums: true,
        scale,
        align,
    };
    let of_itself = SelfAttention { element, batch: MANY, tokens: 3, heads, dim: 64, causal: true, scale };
    let decode =
        |layout| DecodeAttention { element, batch: MANY, heads, dim: 64, layout, packed: true, scale };
    let append = |layout| KvAppend { batch: MANY, tokens: 1, heads: 1, dim: 64, layout, element, align };
    let whole = Layout::Contiguous { capacity: 3 };
    let paged = Layout::Paged { pages: 9, page: 16, of_sequence: 2 };
    let mut functions: Vec<Box<dyn Function>> = vec![
        Box::new(attention),
        Box::new(DotProductAttentionBackward(attention)),
        Box::new(DotProductAttentionBackward(DotProductAttention { dim: 80, ..attention })),
        Box::new(DotProductAttentionBackward(DotProductAttention {
            batch: 1,
            heads: [MANY; 2],
            ..attention
        })),
        Box::new(of_itself),
        Box::new(SelfAttentionBackward(of_itself)),
        Box::new(decode(whole)),
        Box::new(decode(paged)),
        Box::new(append(whole)),
        Box::new(append(paged)),
        Box::new(QkvAppend { batch: MANY, tokens: 1, heads, dim: 64, capacity: 3, element, align }),
        Box::new(rope([MANY, 3, 1])),
        Box::new(rope([1, 5 * MANY, 5 * MANY])),
    ];
    for element in [Scalar::F32, Scalar::Bf16] {
        for (matrices, extents) in [
            (MANY, [1, 1, 1]),
            (MANY, [2, 3, 3]),
            (MANY, [200, 8, 16]),
            (1, [20_000_000, 2, 16]),
            (1, [20_000_000, 1, 16]),
            (1, [1, 20_000_000, 16]),
            (1, [20_000_000, 300, 16]),
        ] {
            functions.push(Box::new(multiply(product(element, matrices, extents))));
        }
    }
    for (function, resources) in
        functions.iter().flat_map(|function| [GPU, OLDER, CPU].map(|resources| (function, resources)))
    {
        let call = function.call(&resources).unwrap_or_else(|error| panic!("{function:?}: {error}"));
        assert!(!call.launches.is_empty(), "{function:?}");
        for launch in call.launches {
            let [_, y, z] = launch.grid;
            assert!(y.max(z) <= MAX_GRID_YZ && y.min(z) > 0, "{function:?}: {:?}", launch.grid);
        }
    }
    // Other variants, which a tuner may take.
    for resources in [GPU, OLDER] {
        for problem in [product(element, MANY, [2, 3, 3]), product(element, 1, [20_000_000, 2, 16])] {
            for variant in problem.variants(&resources) {
                let [_, y, z] = problem.grid(&variant, &resources);
                assert!(y.max(z) <= MAX_GRID_YZ, "{variant:?}");
            }
        }
    }
}

/// Runs a case on this processor.
fn check(case: &Case) {
    let machine = common::machine::Machine::all().pop().unwrap();
    case.check(&CPU, Trust::Guest, &mut |module, launch, strides| match machine.run_strided(
        module,
        launch,
        strides,
        1 << 40,
    )? {
        0 => Ok(()),
        stop => Err(format!("it was stopped: {stop}")),
    })
    .unwrap_or_else(|error| panic!("{error}"));
}

fn of(
    function: impl Function + 'static,
    edit: impl Fn(&mut [Tensor], &[Vec<f64>]) -> (usize, Vec<f64>),
) -> Case {
    let specified = function.buffers();
    let mut buffers: Vec<_> =
        (1..).zip(&specified).map(|(seed, buffer)| random(seed, buffer.element, &buffer.extents)).collect();
    let numbers: Vec<_> = buffers.iter().map(Tensor::to_f64s).collect();
    let (buffer, values) = edit(&mut buffers, &numbers);
    let name = format!("{function:?}");
    Case { name, function: Rc::new(function), buffers, expected: vec![Expected::new(buffer, values, 1e-4)] }
}

#[test]
fn many_products() {
    for [m, n, k] in [[1, 1, 1], [2, 3, 3]] {
        let epilogue = Epilogue { scaled: true, ..Epilogue::NONE };
        let product = Product { epilogue, ..product(Scalar::F32, MANY, [m, n, k]) };
        check(&of(multiply(product), |_, numbers| {
            let sum = |place: u64| {
                let (matrix, i, j) = (place / (m * n), place / n % m, place % n);
                let term = |l| {
                    numbers[0][((matrix * m + i) * k + l) as usize]
                        * numbers[1][((matrix * k + l) * n + j) as usize]
                };
                (0..k).map(term).sum()
            };
            (2, (0..MANY * m * n).map(sum).collect())
        }));
    }
}

#[test]
fn many_sequences_turned() {
    check(&of(rope([MANY, 1, 1]), |buffers, numbers| {
        let positions: Vec<f64> = (0..MANY).map(|at| (at % 17) as f64).collect();
        buffers[3] = Tensor::from_f64s(Scalar::I32, &[MANY, 1], positions.clone());
        let turned = numbers[1].chunks(2).zip(&positions).flat_map(|(pair, position)| {
            let (sin, cos) = (position * numbers[2][0]).sin_cos();
            [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin]
        });
        (1, turned.collect())
    }));
}

#[test]
fn many_sequences_appended() {
    let (batch, capacity, align, element) = (MANY, 2, 4, Scalar::F32);
    check(&of(
        QkvAppend { batch, tokens: 1, heads: [1, 1], dim: 1, capacity, element, align },
        |buffers, numbers| {
            let lengths: Vec<f64> = (0..MANY).map(|at| (at % 3) as f64).collect();
            buffers[3] = Tensor::from_f64s(Scalar::I32, &[MANY], lengths.clone());
            let mut cache = numbers[2].clone();
            for (sequence, length) in lengths.into_iter().enumerate().filter(|(_, length)| *length < 2.0) {
                cache[sequence * 2 + length as usize] = numbers[0][sequence * 3 + 2];
            }
            (2, cache)
        },
    ));
}
