//! Strided rows: which functions take them, how wide they are then accessed, and what can't be.

use std::collections::BTreeMap;

use vm_ir::Scalar;
use vm_kernels::call::{CallError, Entry, Function};
use vm_kernels::cases::all;
use vm_kernels::columns::ColumnSums;
use vm_kernels::elementwise::{Chain, Cut, Elementwise};
use vm_kernels::family::{Kind, Resources};
use vm_kernels::flat::Fill;
use vm_kernels::gather::Embedding;
use vm_kernels::norm::{Norm, NormForward};
use vm_kernels::sample::{Argmax, Logits};
use vm_kernels::scatter::{EmbeddingGradient, ScatterAdd};
use vm_kernels::softmax::Softmax;
use vm_kernels::strided::Strided;

const GPU: Resources = Resources { compute_units: 132, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };

fn strided(function: impl Function, rows: &[(&str, u64)]) -> Strided {
    rows.iter().fold(Strided::new(Box::new(function)), |strided, (name, stride)| strided.rows(name, *stride))
}

/// Every function of rows has a case of strided rows.
#[test]
fn functions_of_rows_are_called() {
    const FUNCTIONS: [&str; 30] = [
        "ActivationGradient",
        "Argmax",
        "AuxLoss",
        "AuxLossGradient",
        "ColumnSums",
        "CrossEntropy",
        "CrossEntropyBackward",
        "DecodeAttention",
        "DotProductAttention",
        "DotProductAttentionBackward",
        "Elementwise",
        "Embedding",
        "EmbeddingGradient",
        "KvAppend",
        "Multiply",
        "NormBackward",
        "NormForward",
        "QkvAppend",
        "Quantise",
        "Rope",
        "Sample",
        "ScatterAdd",
        "SelfAttention",
        "SelfAttentionBackward",
        "Softmax",
        "SoftmaxBackward",
        "SoftmaxTopK",
        "TopK",
        "TopKSample",
        "TopPSample",
    ];
    let mut found = BTreeMap::new();
    for case in all() {
        let described = format!("{:?}", case.function);
        let Some(rest) = described.strip_prefix("Strided { function: ") else { continue };
        let end = rest.find([' ', '(']).unwrap_or(rest.len());
        *found.entry(rest[..end].to_owned()).or_insert(0) += 1;
    }
    let missing: Vec<_> = FUNCTIONS.iter().filter(|name| !found.contains_key(**name)).collect();
    assert!(missing.is_empty(), "{missing:?} of {found:?}");
    assert!(found.contains_key("Transpose"), "{found:?}");
}

/// Accesses are as wide as strides, columns and alignment allow; with strides of dense rows the call is that of the function itself.
#[test]
fn widths() {
    let lanes = |function: Strided| match function.call(&GPU).unwrap().launches[0].entry {
        Entry::Softmax(rows) => (rows.layout.lanes, rows.layout.shifted),
        Entry::Norm(rows) => (rows.layout.lanes, rows.layout.shifted),
        Entry::Chain(chain) => match chain.cut {
            Cut::Rows(layout) => (layout.lanes, layout.shifted),
            Cut::Flat { lanes, .. } => (lanes, false),
            Cut::Run => (1, false),
        },
        Entry::Best(best) => (best.reader.unwrap().vector as u8, false),
        Entry::Gather(gather) => match gather.cut {
            vm_kernels::gather::Taken::Pieces(pieces) => (pieces.lanes, false),
            vm_kernels::gather::Taken::Serially => (1, false),
        },
        ref other => panic!("{other:?}"),
    };
    let softmax = |columns, element| Softmax::of(8, columns, element);
    for (columns, element, x, y, wanted) in [
        (768, Scalar::F32, 768, 768, 4),
        (768, Scalar::F32, 1024, 772, 4),
        (768, Scalar::F32, 1024, 770, 2),
        (768, Scalar::F32, 769, 768, 1),
        (768, Scalar::Bf16, 776, 2304, 8),
        (768, Scalar::Bf16, 776, 772, 4),
        (766, Scalar::Bf16, 768, 768, 2),
        // As they are where rows lie one behind the other, they would be accessed across the ends of rows.
        (767, Scalar::Bf16, 768, 768, 1),
    ] {
        let found = lanes(strided(softmax(columns, element), &[("x", x), ("y", y)]));
        assert_eq!(found, (wanted, false), "{columns} of {element}, {x} and {y} apart");
    }
    let [dense, apart] = [
        softmax(767, Scalar::Bf16).call(&GPU),
        strided(softmax(767, Scalar::Bf16), &[("x", 767)]).call(&GPU),
    ];
    assert_eq!(dense, apart);
    for (align, wanted) in [(4, 1), (8, 2), (12, 1), (16, 4), (64, 4)] {
        let mixed = Softmax { output: Scalar::F32, align, ..softmax(768, Scalar::Bf16) };
        assert_eq!(lanes(strided(mixed, &[])), (wanted, false), "bf16 to f32 at multiples of {align}");
    }
    let swiglu = Elementwise { rows: 8, ..Elementwise::of(Chain::swiglu(Scalar::Bf16, Scalar::Bf16), 2048) };
    assert_eq!(lanes(strided(swiglu, &[("x0", 4096), ("x1", 4096)])), (8, false));
    assert_eq!(lanes(strided(swiglu, &[("x0", 4096), ("x1", 4098)])), (2, false));
    let norm = NormForward::of(Norm::Rms, 8, 768, Scalar::Bf16, 1e-6);
    assert_eq!(lanes(strided(norm, &[("x", 1536)])), (8, false));
    let logits = Logits { element: Scalar::F32, rows: 8, columns: 768, align: 16 };
    assert_eq!(lanes(strided(Argmax { logits }, &[("logits", 772)])), (4, false));
    assert_eq!(lanes(strided(Argmax { logits }, &[("logits", 770)])), (1, false));
    let (element, index) = (Scalar::F16, Scalar::I32);
    let embedding = Embedding { rows: 9, columns: 64, count: 5, element, index, align: 16 };
    assert_eq!(lanes(strided(embedding, &[("table", 72)])), (8, false));
    assert_eq!(lanes(strided(embedding, &[("table", 72), ("y", 68)])), (4, false));
}

/// What can't be is said with the name of the buffer, before there are launches.
#[test]
fn strides_that_can_not_be() {
    let softmax = Softmax::of(4, 100, Scalar::F32);
    let sums = ColumnSums { rows: 4, columns: 8, element: Scalar::F32, output: Scalar::F32, align: 16 };
    let (element, output, index) = (Scalar::F32, Scalar::F32, Scalar::I32);
    let add =
        ScatterAdd { rows: 3, columns: 8, count: 4, element, output, index, align: 16, deterministic: false };
    let gradient = EmbeddingGradient { add, accumulate: false };
    let fill = Fill { sizes: vec![8], element, align: 16, value: 0.0 };
    let cases: [(Strided, &str, &str); 9] = [
        (strided(softmax, &[("x", 99)]), "x", "rows of 100 elements that begin 99 behind each other overlap"),
        (strided(softmax, &[("x", 128), ("y", 0)]), "y", "begin 0 behind each other overlap"),
        (strided(softmax, &[("y", u64::MAX)]), "y", "more bytes than can be addressed"),
        (strided(softmax, &[("y", 1 << 60)]), "y", "more bytes than can be addressed"),
        (strided(softmax, &[("z", 128)]), "z", "no such buffer; there are x, y"),
        (strided(sums, &[("y", 16)]), "y", "no rows"),
        (strided(gradient, &[("dy", 9), ("dtable", 9)]), "dtable", "in one piece"),
        (strided(fill.clone(), &[("x", 16)]), fill.buffers()[0].name, "no rows"),
        (strided(Softmax { rows: 1 << 40, ..softmax }, &[("x", 1 << 30)]), "x", "can be addressed"),
    ];
    for (function, name, words) in cases {
        for kind in [Kind::Gpu, Kind::Cpu] {
            let found = function.call(&Resources { kind, ..GPU });
            let Err(CallError::Stride { buffer, what }) = &found else { panic!("{function:?}: {found:?}") };
            assert!(buffer == name && what.contains(words), "{function:?}: {buffer}: {what}");
        }
    }
}
