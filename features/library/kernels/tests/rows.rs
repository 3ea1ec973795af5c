//! Every variant that a function of rows or elements chooses is assembled, without spills, for old and new architectures.

#[path = "../../../../vm-jit/tests/ptxas/assembler.rs"]
#[allow(dead_code)]
mod assembler;
#[path = "../../../../vm-jit/tests/ptxas/sweep.rs"]
mod sweep;

use std::collections::HashSet;

use vm_ir::{GuestAddr, Module, Scalar, Trust, ValidModule, validate};
use vm_kernels::call::{Entry, Function};
use vm_kernels::elementwise::{Along, Chain, Elementwise, Op};
use vm_kernels::family::{Kind, Resources};
use vm_kernels::loss::{CrossEntropy, CrossEntropyBackward, LossOptions};
use vm_kernels::norm::{Norm, NormBackward, NormForward};
use vm_kernels::quantise::{Grain, Quantise};
use vm_kernels::sample::{Logits, SoftmaxTopK};
use vm_kernels::softmax::{Softmax, SoftmaxBackward};
use vm_kernels::strided::Strided;

const H200: Resources = Resources { compute_units: 132, shared_bytes: 232_448, kind: Kind::Gpu, cluster: 8 };

/// Columns of each kind of layout: parts of a warp, a warp, blocks, clusters, and none of them.
const COLUMNS: [u64; 10] = [7, 64, 768, 4096, 8192, 16_384, 50_257, 131_072, 262_144, 300_001];

fn functions() -> Vec<Box<dyn Function>> {
    let mut all: Vec<Box<dyn Function>> = Vec::new();
    for columns in COLUMNS {
        for element in [Scalar::F32, Scalar::Bf16] {
            let rows = 1024;
            all.push(Box::new(Softmax::of(rows, columns, element)));
            let (input, output) = (element, element);
            all.push(Box::new(SoftmaxBackward { rows, columns, input, output, log: true, align: 16 }));
            for norm in [Norm::Rms, Norm::Layer] {
                let forward = NormForward::of(norm, rows, columns, element, 1e-6);
                let (residual, bias, statistics) = (true, norm == Norm::Layer, true);
                all.push(Box::new(NormForward { residual, bias, statistics, ..forward }));
                let weight = Scalar::F32;
                all.push(Box::new(NormBackward {
                    norm,
                    rows,
                    columns,
                    element,
                    weight,
                    residual,
                    bias,
                    align: 16,
                }));
            }
            let forward = CrossEntropy::of(rows, columns, element);
            all.push(Box::new(CrossEntropy { log_probs: Some(Scalar::F32), log_sums: true, ..forward }));
            let (target, options) = (forward.target, LossOptions { smoothing: 0.1, ..forward.options });
            for (in_place, log_sums) in [(false, false), (true, false), (false, true), (true, true)] {
                all.push(Box::new(CrossEntropyBackward {
                    rows,
                    columns,
                    element,
                    target,
                    in_place,
                    log_sums,
                    options,
                    align: 16,
                }));
            }
            // Parts of a wider matrix, and padded rows: accesses of half the width, and one by one.
            for apart in [4, 5] {
                let softmax = Strided::new(Box::new(Softmax::of(rows, columns, element)));
                all.push(Box::new(softmax.rows("x", columns.next_multiple_of(8) + apart)));
                let chain = Elementwise { rows, ..Elementwise::of(Chain::swiglu(element, element), columns) };
                let swiglu = Strided::new(Box::new(chain)).rows("x0", 2 * columns + apart);
                all.push(Box::new(swiglu.rows("x1", 2 * columns + apart)));
            }
            let logits = Logits { element, rows, columns, align: 16 };
            all.push(Box::new(SoftmaxTopK { logits, k: 7, renormalised: false }));
            for grain in [Grain::Rows, Grain::Lines, Grain::Squares] {
                let output = if columns % 2 == 0 { Scalar::F8E4M3 } else { Scalar::F8E5M2 };
                all.push(Box::new(Quantise { rows, columns, input: element, output, grain, align: 16 }));
            }
            let mut chain = Chain::new();
            let (x, bias) = (chain.input(element, Along::All), chain.input(Scalar::F32, Along::Columns));
            let sum = chain.step(Op::Add, x, bias);
            let gelu = chain.apply(Op::Gelu, sum);
            chain.output(gelu, element);
            all.push(Box::new(Elementwise { rows, ..Elementwise::of(chain, columns) }));
        }
    }
    for chain in [
        Chain::swiglu(Scalar::Bf16, Scalar::F16),
        Chain::unary(Op::GeluTanh, Scalar::F32, Scalar::Bf16),
        Chain::cast(Scalar::Bf16, Scalar::F8E4M3),
        Chain::scale(Scalar::F8E5M2, Scalar::F32),
    ] {
        all.extend([16, 2].map(|align| -> Box<dyn Function> {
            Box::new(Elementwise { align, ..Elementwise::of(chain, 1 << 20) })
        }));
    }
    all
}

fn modules(resources: &Resources) -> Vec<ValidModule> {
    let calls = functions().into_iter().map(|function| function.call(resources).unwrap());
    let entries = calls.flat_map(|call| call.launches).map(|launch| launch.entry);
    // The k greatest are no function of a row that a layout divides.
    let entries: HashSet<Entry> =
        entries.filter(|entry| !matches!(entry, Entry::Parts(_) | Entry::Select(_))).collect();
    let mut names = HashSet::new();
    let modules = entries.into_iter().map(|entry| {
        let kernel = entry.kernel(GuestAddr(0)).unwrap();
        assert!(names.insert(kernel.name().to_owned()), "{}: twice", kernel.name());
        validate(Module::from(kernel), Trust::Guest).unwrap()
    });
    modules.collect()
}

#[test]
fn no_variant_spills() {
    assembler::with_ptxas(|folder| {
        let turing = Resources { cluster: 1, shared_bytes: 64 << 10, ..H200 };
        let [new, old] = [H200, turing].map(|resources| modules(&resources));
        let new = new.iter().map(|module| ("sm_90a", "13.0", module));
        let old = old.iter().flat_map(|module| ["sm_75", "sm_80"].map(|arch| (arch, "13.0", module)));
        let all: Vec<_> = new.chain(old).collect();
        assert!(all.len() > 200, "{}", all.len());
        assembler::assemble_for_all(folder, "3", &all);
    });
}
