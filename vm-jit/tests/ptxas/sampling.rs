//! Top-k and draws from logits, in every variant.

use crate::assembler::{assemble_for_all, with_ptxas};
use std::collections::BTreeSet;
use vm_ir::{GuestAddr, Module, Scalar, Trust, ValidModule, validate};
use vm_kernels::call::Function;
use vm_kernels::family::{Kind, Resources};
use vm_kernels::sample::{Argmax, Logits, Sample, SoftmaxTopK, TopK, TopKSample, TopPSample};

/// The kernels of calls of all classes, each once.
fn modules(trust: Trust) -> Vec<ValidModule> {
    let resources = Resources { compute_units: 132, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };
    let mut functions: Vec<Box<dyn Function>> = Vec::new();
    for (element, align) in [(Scalar::F32, 16), (Scalar::Bf16, 16), (Scalar::F32, 4)] {
        for columns in [64, 1024, 131_072] {
            let logits = Logits { element, rows: 4, columns, align };
            functions.push(Box::new(Argmax { logits }));
            functions.push(Box::new(Sample { logits, temperature: 1.0 }));
            functions.push(Box::new(TopPSample { logits, p: 0.9, temperature: 1.0 }));
            for k in [50, 1000, 20_000] {
                let k = columns.min(k);
                functions.push(Box::new(TopK { logits, k }));
                functions.push(Box::new(TopKSample { logits, k: k - 1, temperature: 1.0 }));
            }
        }
        for columns in [8, 64, 1024] {
            let logits = Logits { element, rows: 4, columns, align };
            functions.push(Box::new(SoftmaxTopK { logits, k: 4, renormalised: columns == 8 }));
        }
    }
    let mut names = BTreeSet::new();
    let calls = functions.iter().map(|function| function.call(&resources).unwrap());
    let kernels = calls
        .flat_map(|call| call.launches)
        .map(|launch| launch.entry.kernel(GuestAddr(0)).unwrap())
        .filter(|kernel| names.insert(kernel.name().to_owned()));
    kernels.map(|kernel| validate(Module::from(kernel), trust).unwrap()).collect()
}

#[test]
fn sampling() {
    with_ptxas(|folder| {
        let (guests, trusted) = (modules(Trust::Guest), modules(Trust::Trusted));
        let targets = [("sm_75", &guests), ("sm_80", &trusted), ("sm_90a", &guests)];
        let all: Vec<_> = targets
            .iter()
            .flat_map(|(arch, modules)| modules.iter().map(move |module| (*arch, "13.0", module)))
            .collect();
        assemble_for_all(folder, "3", &all);
    });
}
