//! Each family against its definition, in the interpreter; and compiled for what has tile kernels.

use vm_ir::interp::{Argument, Launch, Limits, Tensor, run};
use vm_ir::{GuestAddr, Kernel, Module, Scalar, Trust, ValidModule, validate};
use vm_kernels::attention::Attention;
use vm_kernels::gemm::Gemm;

fn valid(kernel: Kernel, trust: Trust) -> ValidModule {
    validate(Module::from(kernel), trust).unwrap()
}

/// Numbers from -1 to 1, the same everywhere.
fn numbers(seed: u64, count: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn random(seed: u64, element: Scalar, extents: &[u64]) -> Tensor {
    Tensor::from_f64s(element, extents, numbers(seed, extents.iter().product()))
}

/// Runs a kernel, and compares its last tensor with what is wanted.
fn compare(module: &ValidModule, grid: [u32; 3], arguments: Vec<Argument>, wanted: &[f64], within: f64) {
    let name = module.kernels()[0].name();
    let mut launch = Launch { kernel: name.to_owned(), grid, arguments };
    run(module, &mut launch, &Limits::default()).unwrap();
    let found = launch.arguments.iter().rev().find_map(Argument::tensor).unwrap().to_f64s();
    assert_eq!(found.len(), wanted.len(), "{name}");
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let close = (found - wanted).abs() <= within * wanted.abs().max(1.0);
        assert!(close, "{name}, element {at}: {found}, not {wanted}");
    }
}

fn check_gemm(variant: Gemm, [m, n, k]: [u64; 3], blocks: u32) {
    let a = random(1, variant.element, &[m, k]);
    let of_b = if variant.b_transposed { [n, k] } else { [k, n] };
    let b = random(2, variant.element, &of_b);
    let (left, right) = (a.to_f64s(), b.to_f64s());
    let at = |i: u64, j: u64| {
        if variant.b_transposed { right[(j * k + i) as usize] } else { right[(i * n + j) as usize] }
    };
    let cells = (0..m).flat_map(|i| (0..n).map(move |j| (i, j)));
    let wanted: Vec<f64> =
        cells.map(|(i, j)| (0..k).map(|l| left[(i * k + l) as usize] * at(l, j)).sum()).collect();
    let c = random(3, variant.output, &[m, n]);
    let arguments = [a, b, c].map(Argument::Tensor).to_vec();
    let module = valid(variant.kernel(GuestAddr(0x1000)).unwrap(), Trust::Guest);
    compare(&module, [blocks, 1, 1], arguments, &wanted, 1e-2);
}

#[test]
fn products() {
    let small = Gemm { tile: [64, 64, 64], stages: 2, groups: 1, ..Gemm::SMALL };
    for b_transposed in [false, true] {
        for (element, output) in
            [(Scalar::Bf16, Scalar::Bf16), (Scalar::F16, Scalar::F16), (Scalar::Bf16, Scalar::F32)]
        {
            check_gemm(Gemm { b_transposed, element, output, ..small }, [72, 80, 136], 3);
        }
    }
    // One band that is lower than the others, more blocks than tiles, and the least of all.
    check_gemm(Gemm { band: 2, ..small }, [200, 72, 8], 40);
    check_gemm(small, [1, 8, 8], 1);
    check_gemm(Gemm { tile: [128, 64, 64], groups: 2, ..small }, [130, 72, 72], 2);
}

fn check_attention(variant: Attention, heads: u64, queries: u64, keys: u64) {
    let dim = u64::from(variant.dim);
    let [q, k, v] = [(4, queries), (5, keys), (6, keys)]
        .map(|(seed, rows)| random(seed, variant.element, &[heads, rows, dim]));
    let scale = 1.0 / (dim as f64).sqrt();
    let [of_q, of_k, of_v] = [&q, &k, &v].map(Tensor::to_f64s);
    let row = |all: &[f64], head: u64, rows: u64, at: u64| -> Vec<f64> {
        let first = ((head * rows + at) * dim) as usize;
        all[first..first + dim as usize].to_vec()
    };
    let mut wanted = Vec::new();
    for (head, query) in (0..heads).flat_map(|head| (0..queries).map(move |query| (head, query))) {
        let seen = if variant.causal { (query + keys + 1).saturating_sub(queries).min(keys) } else { keys };
        let own = row(&of_q, head, queries, query);
        let scores: Vec<f64> = (0..seen)
            .map(|key| own.iter().zip(row(&of_k, head, keys, key)).map(|(a, b)| a * b).sum::<f64>() * scale)
            .collect();
        let greatest = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - greatest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0; dim as usize];
        for (key, weight) in (0..seen).zip(&weights) {
            let value = row(&of_v, head, keys, key);
            out.iter_mut().zip(value).for_each(|(out, value)| *out += weight / sum * value);
        }
        wanted.extend(out);
    }
    let o = random(7, variant.element, &[heads, queries, dim]);
    let mut arguments: Vec<Argument> = [q, k, v, o].map(Argument::Tensor).to_vec();
    arguments.push(Argument::Bits(u64::from((scale as f32).to_bits())));
    let module = valid(variant.kernel(GuestAddr(0x1000)).unwrap(), Trust::Guest);
    let blocks = queries.div_ceil(variant.tile[0].into()) as u32;
    compare(&module, [blocks, heads as u32, 1], arguments, &wanted, 1e-2);
}

#[test]
fn attention() {
    for causal in [false, true] {
        let variant = Attention { tile: [64, 64], groups: 1, ..Attention::of(64, causal) };
        check_attention(variant, 2, 128, 128);
        check_attention(variant, 1, 70, 150);
        // Queries that see nothing, where they are more than keys.
        check_attention(variant, 1, 100, 70);
        check_attention(variant, 1, 1, 1);
        check_attention(Attention { tile: [128, 64], groups: 2, ..variant }, 1, 130, 200);
    }
}

#[test]
fn all_are_compiled() {
    let mut kernels = Vec::new();
    for b_transposed in [false, true] {
        for output in [Scalar::Bf16, Scalar::F32] {
            let large = Gemm { b_transposed, output, ..Gemm::LARGE };
            let large = if output == Scalar::F32 { Gemm { tile: [128, 128, 64], ..large } } else { large };
            kernels.push(large.kernel(GuestAddr(0)).unwrap());
            kernels.push(Gemm { b_transposed, output, ..Gemm::SMALL }.kernel(GuestAddr(0)).unwrap());
        }
    }
    for (dim, causal) in [(64, false), (64, true), (128, false), (128, true)] {
        kernels.push(Attention::of(dim, causal).kernel(GuestAddr(0)).unwrap());
    }
    for trust in [Trust::Guest, Trust::Trusted] {
        let module = validate(Module::new(kernels.clone()), trust).unwrap();
        let artifact = vm_jit::compile(&module, &"ptx:sm_90a".parse().unwrap()).unwrap();
        assert_eq!(artifact.entries.len(), kernels.len());
        let old = vm_jit::compile(&module, &"ptx:sm_80".parse().unwrap()).unwrap_err();
        assert!(old.0.iter().all(|reject| reject.kind.code() == "unsupported-tile"), "{old}");
    }
}
