//! Products against their definition, in the interpreter and on this machine's processor.

mod common;

use common::{compare_at, valid};
use vm_ir::interp::{Argument, Tensor};
use vm_ir::{GuestAddr, Scalar, Trust};
use vm_kernels::cases::{numbers, random};
use vm_kernels::gemm::{Activation, Auxiliary, Batch, Epilogue, Gemm, Scales};

/// By its Taylor series.
fn erf(x: f64) -> f64 {
    let mut term = x;
    let terms = (0..200).map(|n| {
        let own = term / f64::from(2 * n + 1);
        term *= -x * x / f64::from(n + 1);
        own
    });
    if x.abs() > 5.0 { x.signum() } else { terms.sum::<f64>() * std::f64::consts::FRAC_2_SQRT_PI }
}

fn value(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x * 0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
    }
}

/// A product by its definition, and its arguments: of so many matrices, or of groups that end at `ends`.
fn gemm(variant: Gemm, [m, n, k]: [u64; 3], matrices: u64, ends: &[u64]) -> (Vec<Argument>, Vec<f64>) {
    let loaded = if variant.element == Scalar::Tf32 { Scalar::F32 } else { variant.element };
    let integers = variant.element == Scalar::I8;
    let factor = |seed: u64, extents: &[u64]| match integers {
        false => random(seed, loaded, extents),
        true => {
            let numbers = numbers(seed, extents.iter().product());
            Tensor::from_f64s(loaded, extents, numbers.iter().map(|x| (x * 100.0).round()))
        }
    };
    let turned =
        |turned: bool, [rows, columns]: [u64; 2]| if turned { [columns, rows] } else { [rows, columns] };
    let shape = |many: bool, [rows, columns]: [u64; 2]| {
        if many { vec![matrices, rows, columns] } else { vec![rows, columns] }
    };
    let batched = variant.batch == Batch::Batched;
    let a = factor(1, &shape(batched, turned(variant.a_transposed, [m, k])));
    let b = factor(2, &shape(variant.batch != Batch::One, turned(variant.b_transposed, [k, n])));
    let c = random(3, variant.output, &shape(batched, [m, n]));
    let Epilogue { scaled, scales, plus, bias, activation, aux } = variant.epilogue;
    let (alpha, beta) = (0.75f32, -0.5f32);
    let of_scales = match scales {
        Scales::None => None,
        Scales::Rows => Some([random(4, Scalar::F32, &[m]), random(5, Scalar::F32, &[n])]),
        Scales::Blocks => {
            let blocks = |extent: u64| extent.div_ceil(128);
            Some([random(4, Scalar::F32, &[blocks(k), m]), random(5, Scalar::F32, &[blocks(k), blocks(n)])])
        }
    };
    let of_bias = random(6, variant.output, &[n]);
    let of_aux = random(7, variant.output, &c.extents);
    let numbers = [&a, &b, &c, &of_bias, &of_aux].map(Tensor::to_f64s);
    let scale_numbers = of_scales.as_ref().map(|both| both.each_ref().map(Tensor::to_f64s));
    let cell = |matrix: u64, i: u64, j: u64| {
        let at = |turned: bool, [rows, columns]: [u64; 2], i: u64, j: u64| {
            (if turned { j * rows + i } else { i * columns + j }) as usize
        };
        let first_a = (if batched { matrix } else { 0 } * m * k) as usize;
        let first_b = (matrix * k * n) as usize;
        let products = (0..k).map(|l| {
            let x = numbers[0][first_a + at(variant.a_transposed, [m, k], i, l)];
            let y = numbers[1][first_b + at(variant.b_transposed, [k, n], l, j)];
            let scale = match (scales, &scale_numbers) {
                (Scales::Rows, Some([a, b])) => a[i as usize] * b[j as usize],
                (Scales::Blocks, Some([a, b])) => {
                    let block = l / 128;
                    a[(block * m + i) as usize] * b[(block * n.div_ceil(128) + j / 128) as usize]
                }
                _ => 1.0,
            };
            x * y * scale
        });
        let mut x: f64 = products.sum();
        if scaled {
            x *= f64::from(alpha);
        }
        let at = ((if batched { matrix } else { 0 } * m + i) * n + j) as usize;
        let old = numbers[2][at];
        if plus {
            x += f64::from(beta) * old;
        }
        if bias {
            x += numbers[3][j as usize];
        }
        match aux {
            // By the difference of what is a little before and behind.
            Auxiliary::Gradient => {
                x * (value(activation, numbers[4][at] + 1e-5) - value(activation, numbers[4][at] - 1e-5))
                    / 2e-5
            }
            Auxiliary::None | Auxiliary::Store => value(activation, x),
        }
    };
    let wanted = match variant.batch {
        Batch::Grouped => (0..m * n)
            .map(|at| {
                let row = at / n;
                match ends.iter().position(|end| row < *end) {
                    Some(group) => cell(group as u64, row, at % n),
                    None => numbers[2][at as usize],
                }
            })
            .collect(),
        _ => {
            let many = if batched { matrices } else { 1 };
            (0..many * m * n).map(|at| cell(at / (m * n), at / n % m, at % n)).collect()
        }
    };
    let mut arguments = [a, b, c].map(Argument::Tensor).to_vec();
    let float = |x: f32| Argument::Bits(x.to_bits().into());
    arguments.extend(scaled.then(|| float(alpha)));
    arguments.extend(plus.then(|| float(beta)));
    arguments.extend(of_scales.into_iter().flatten().map(Argument::Tensor));
    arguments.extend(bias.then_some(Argument::Tensor(of_bias)));
    arguments.extend((aux != Auxiliary::None).then_some(Argument::Tensor(of_aux)));
    if variant.batch == Batch::Grouped {
        let offsets = std::iter::once(&0).chain(ends).map(|end| *end as f64);
        arguments.push(Argument::Tensor(Tensor::from_f64s(Scalar::I32, &[ends.len() as u64 + 1], offsets)));
    }
    (arguments, wanted)
}

fn check_gemm(variant: Gemm, shape: [u64; 3], blocks: u32) {
    check_gemms(variant, shape, 1, &[], blocks);
}

fn check_gemm_over(variant: Gemm, shape: [u64; 3], grid: [u32; 3]) {
    check_gemms_over(variant, shape, 1, &[], grid);
}

fn check_gemms(variant: Gemm, shape: [u64; 3], matrices: u64, ends: &[u64], blocks: u32) {
    check_gemms_over(variant, shape, matrices, ends, [blocks, 1, 1]);
}

fn check_gemms_over(variant: Gemm, shape: [u64; 3], matrices: u64, ends: &[u64], grid: [u32; 3]) {
    let (arguments, wanted) = gemm(variant, shape, matrices, ends);
    let module = valid(variant.kernel(GuestAddr(0x1000)).unwrap(), Trust::Guest);
    let within = match (variant.element, variant.output) {
        (Scalar::Tf32, _) => 5e-3,
        (_, Scalar::F32) => 1e-3,
        _ => 1e-2,
    };
    if variant.epilogue.aux == Auxiliary::Store {
        let epilogue = Epilogue { activation: Activation::None, aux: Auxiliary::None, ..variant.epilogue };
        let (_, taken) = gemm(Gemm { epilogue, ..variant }, shape, matrices, ends);
        let aux = arguments.len() - 1 - usize::from(variant.batch == Batch::Grouped);
        compare_at(&module, grid, aux, arguments.clone(), &taken, within);
    }
    compare_at(&module, grid, 2, arguments, &wanted, within);
}

#[test]
fn products() {
    let small = Gemm { tile: [64, 64, 64], stages: 2, groups: 1, ..Gemm::SMALL };
    for (a_transposed, b_transposed) in [(false, false), (false, true), (true, false), (true, true)] {
        for (element, output) in
            [(Scalar::Bf16, Scalar::Bf16), (Scalar::F16, Scalar::F16), (Scalar::Bf16, Scalar::F32)]
        {
            check_gemm(Gemm { a_transposed, b_transposed, element, output, ..small }, [72, 80, 136], 3);
        }
    }
    // One band that is lower than the others, more blocks than tiles, and the least of all.
    check_gemm(Gemm { band: 2, ..small }, [200, 72, 8], 40);
    check_gemm(small, [1, 8, 8], 1);
    check_gemm(Gemm { tile: [128, 64, 64], groups: 2, ..small }, [130, 72, 72], 2);
    // A block for each tile, and tiles that are computed transposed.
    check_gemm_over(Gemm { band: 0, ..small }, [130, 72, 72], [2, 3, 1]);
    for b_transposed in [false, true] {
        let few = Gemm { band: 0, swapped: true, tile: [16, 64, 64], b_transposed, ..small };
        check_gemm_over(few, [3, 200, 72], [4, 1, 1]);
        check_gemm_over(Gemm { output: Scalar::F32, ..few }, [20, 8, 40], [1, 2, 1]);
    }
    // A part of the inner dimension for each block of a cluster: parts of which some have nothing, and shares of a sum, or all of it.
    for (split, overlap) in [(2, false), (4, true), (8, false)] {
        for [m, n, k] in [[1, 1, 1], [3, 7, 5], [67, 131, 257], [64, 64, 64], [130, 8, 521]] {
            let split = Gemm { split, overlap, band: 0, ..small };
            let grid = |[rows, columns, _]: [u32; 3]| {
                [(n as u32).div_ceil(columns) * split.split, (m as u32).div_ceil(rows), 1]
            };
            let padded = [m, u64::next_multiple_of(n, 8), u64::next_multiple_of(k, 8)];
            check_gemm_over(split, padded, grid(split.tile));
            let few = Gemm { swapped: true, tile: [16, 64, 64], ..split };
            check_gemm_over(few, padded, grid(few.tile));
        }
        // More than one tile for each block.
        check_gemm(Gemm { split, overlap, band: 2, ..small }, [130, 200, 136], 2 * split);
        let epilogue = Epilogue { scales: Scales::Rows, bias: true, plus: true, ..Epilogue::NONE };
        let batched = Gemm { batch: Batch::Batched, epilogue, split, overlap, output: Scalar::F32, ..small };
        check_gemms(batched, [70, 72, 200], 3, &[], split);
    }
    check_gemm(Gemm { overlap: true, ..small }, [72, 80, 136], 3);
    for cluster in [2, 4, 8] {
        check_gemm(Gemm { cluster, ..small }, [330, 72, 72], 2 * cluster);
    }
}

#[test]
fn products_in_tiles_for_processors() {
    for sizes in [[4, 4, 4], [132, 260, 132], [8, 300, 8], [152, 4, 300]] {
        check_gemm(Gemm::CPU, sizes, 2);
        let turned = Gemm { a_transposed: true, b_transposed: true, tile: [96, 128, 64], ..Gemm::CPU };
        check_gemm(turned, sizes, 3);
    }
}

#[test]
fn products_of_other_types() {
    let small = Gemm { tile: [64, 64, 64], stages: 2, groups: 1, b_transposed: true, ..Gemm::SMALL };
    for (element, output) in [
        (Scalar::Tf32, Scalar::F32),
        (Scalar::F32, Scalar::F32),
        (Scalar::F8E4M3, Scalar::Bf16),
        (Scalar::F8E5M2, Scalar::F16),
        (Scalar::I8, Scalar::I32),
        (Scalar::I8, Scalar::Bf16),
    ] {
        check_gemm(Gemm { element, output, ..small }, [70, 80, 144], 3);
    }
}

#[test]
fn epilogues() {
    let small = Gemm { tile: [64, 64, 64], stages: 2, groups: 1, ..Gemm::SMALL };
    let all = Epilogue {
        scaled: true,
        plus: true,
        bias: true,
        activation: Activation::Silu,
        scales: Scales::Rows,
        ..Epilogue::NONE
    };
    let blocks = Epilogue { scales: Scales::Blocks, ..Epilogue::NONE };
    for output in [Scalar::Bf16, Scalar::F32] {
        for activation in [Activation::None, Activation::Relu, Activation::Silu, Activation::Gelu] {
            let epilogue = Epilogue { activation, bias: true, ..Epilogue::NONE };
            check_gemm(Gemm { output, epilogue, ..small }, [65, 72, 40], 2);
            for aux in [Auxiliary::Store, Auxiliary::Gradient] {
                let of = |batch| Gemm { output, batch, epilogue: Epilogue { aux, ..epilogue }, ..small };
                check_gemm(of(Batch::One), [65, 72, 40], 2);
                check_gemm_over(Gemm { band: 0, split: 2, ..of(Batch::One) }, [65, 72, 200], [4, 2, 1]);
                check_gemms(of(Batch::Batched), [65, 72, 40], 2, &[], 3);
            }
        }
        check_gemm(Gemm { output, epilogue: all, ..small }, [65, 72, 40], 2);
        let scaled = Gemm { output, epilogue: blocks, tile: [64, 64, 128], b_transposed: true, ..small };
        check_gemm(Gemm { element: Scalar::F8E4M3, ..scaled }, [65, 200, 272], 2);
    }
    check_gemm(Gemm { element: Scalar::I8, epilogue: all, b_transposed: true, ..small }, [65, 72, 48], 2);
}

#[test]
fn many_products() {
    let small = Gemm { tile: [64, 64, 64], stages: 2, groups: 1, ..Gemm::SMALL };
    let batched = Gemm { batch: Batch::Batched, ..small };
    check_gemms(batched, [70, 72, 72], 3, &[], 4);
    let epilogue = Epilogue { plus: true, ..Epilogue::NONE };
    check_gemms_over(Gemm { band: 0, ..batched }, [70, 72, 72], 3, &[], [2, 2, 3]);
    check_gemms(Gemm { cluster: 2, epilogue, ..batched }, [130, 72, 72], 2, &[], 4);
    // Groups without rows, of few and of many; rows behind the last group stay.
    let grouped = Gemm { batch: Batch::Grouped, band: 2, ..small };
    for blocks in [1, 3, 40] {
        check_gemms(grouped, [300, 72, 40], 5, &[10, 10, 200, 264, 290], blocks);
    }
    check_gemms(Gemm { epilogue, b_transposed: true, ..grouped }, [70, 72, 40], 2, &[0, 70], 2);
}
