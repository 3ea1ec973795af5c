//! Each family against its definition, in the interpreter; and compiled for what has tile kernels.

mod common;

use common::{compare, random, valid};
use vm_ir::interp::{Argument, Tensor};
use vm_ir::{GuestAddr, Module, Scalar, Trust, validate};
use vm_kernels::attention::Attention;
use vm_kernels::gemm::Gemm;

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
        check_attention(Attention::cpu(64, causal), 2, 130, 200);
        check_attention(Attention { element: Scalar::F32, ..variant }, 1, 70, 150);
        check_attention(Attention { stages: 1, ..variant }, 1, 100, 70);
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
        for target in ["ptx:sm_90a", "ptx:sm_80", "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:aarch64"] {
            let compiled = vm_jit::compile(&module, &target.parse().unwrap());
            assert_eq!(
                compiled.map(|artifact| artifact.entries.len()).map_err(|e| e.to_string()),
                Ok(kernels.len())
            );
        }
    }
}
