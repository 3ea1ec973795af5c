//! Every variant that a function of training chooses is assembled, without spills, for old and new architectures; and what a guest's whole blocks run has
//! no checks.

#[path = "../../../../vm-jit/tests/ptxas/assembler.rs"]
#[allow(dead_code)]
mod assembler;
#[path = "../../../../vm-jit/tests/ptxas/sweep.rs"]
mod sweep;

use std::collections::HashSet;

use vm_ir::{GuestAddr, Module, Scalar, Trust, ValidModule, validate};
use vm_kernels::append::{KvAppend, Layout};
use vm_kernels::call::{CallError, Entry, Function};
use vm_kernels::columns::ColumnSums;
use vm_kernels::experts::{AuxLoss, AuxLossGradient};
use vm_kernels::family::{Kind, Resources};
use vm_kernels::flat::{Activation, ActivationGradient, AdamW, Fill, GradClip, Sgd};
use vm_kernels::gather::Embedding;
use vm_kernels::rope::{Angles, Pairs, Rope};
use vm_kernels::scatter::ScatterAdd;
use vm_kernels::strided::Strided;
use vm_kernels::transpose::Transpose;

const H200: Resources = Resources { compute_units: 132, shared_bytes: 232_448, kind: Kind::Gpu, cluster: 8 };

fn adamw(sizes: Vec<u64>, parameter: Scalar, master: bool, align: u32) -> AdamW {
    let (lr, beta1, beta2, eps, weight_decay, step) = (1e-3, 0.9, 0.999, 1e-8, 0.1, 1);
    let gradient = parameter;
    let scaled = master;
    AdamW { sizes, parameter, gradient, master, scaled, align, lr, beta1, beta2, eps, weight_decay, step }
}

fn functions() -> Vec<Box<dyn Function>> {
    use Scalar::{Bf16, F16, F32, I8, I32, I64};
    let mut all: Vec<Box<dyn Function>> = Vec::new();
    for element in [F32, Bf16] {
        let master = element != F32;
        for (sizes, align) in [(vec![1 << 20], 16), (vec![99; 11], 16), (vec![1000], 4)] {
            all.push(Box::new(adamw(sizes.clone(), element, master, align)));
            let (momentum, dampening, nesterov) = (0.9, 0.0, true);
            all.push(Box::new(Sgd {
                sizes: sizes.clone(),
                parameter: element,
                gradient: element,
                master,
                scaled: master,
                align,
                lr: 0.1,
                momentum,
                dampening,
                nesterov,
                weight_decay: 0.0,
            }));
            all.push(Box::new(GradClip { sizes: sizes.clone(), element, align, clip: 1.0 }));
            all.push(Box::new(Fill { sizes, element, align, value: 0.0 }));
        }
        let activations =
            [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Swiglu];
        for activation in activations {
            let gradient =
                |rows, columns| ActivationGradient { activation, rows, columns, element, align: 16 };
            all.push(Box::new(gradient(1, 1 << 20)));
            for (columns, apart) in [(4096, 0), (4096, 4), (769, 0), (11_008, 0)] {
                let halves = Strided::new(Box::new(gradient(64, columns)));
                let halves = halves.rows("dy", columns + apart).rows("gate", 2 * columns + apart);
                all.extend(
                    (activation == Activation::Swiglu).then(|| -> Box<dyn Function> { Box::new(halves) }),
                );
            }
        }
        for columns in [768, 769, 4096] {
            let (rows, count, index, align) = (50_257, 8192, I64, 16);
            all.push(Box::new(Embedding { rows, columns, count, element, index, align }));
            all.push(Box::new(ColumnSums { rows, columns, element, output: element, align }));
            for deterministic in [false, true] {
                let output = F32;
                let index = I32;
                all.push(Box::new(ScatterAdd {
                    rows,
                    columns,
                    count,
                    element,
                    output,
                    index,
                    align,
                    deterministic,
                }));
            }
        }
        for (rows, columns) in [(4096, 768), (33, 65)] {
            all.push(Box::new(Transpose { matrices: 2, rows, columns, element, align: 16 }));
        }
        for (pairs, dim, inverse) in [
            (Pairs::Halves, 128, false),
            (Pairs::Interleaved, 64, true),
            (Pairs::Halves, 80, true),
            (Pairs::Interleaved, 6, false),
        ] {
            for angles in [Angles::CosSin, Angles::Table, Angles::Frequencies] {
                all.push(Box::new(Rope {
                    batch: 2,
                    tokens: 1024,
                    q_heads: 32,
                    k_heads: 8,
                    dim,
                    rows: 4096,
                    pairs,
                    angles,
                    positions: inverse,
                    first: 0,
                    inverse,
                    element,
                    align: 16,
                }));
            }
        }
        for layout in
            [Layout::Contiguous { capacity: 4096 }, Layout::Paged { pages: 1024, page: 16, of_sequence: 256 }]
        {
            let (batch, tokens, heads, dim) = (16, 1, 8, 128);
            all.push(Box::new(KvAppend { batch, tokens, heads, dim, layout, element, align: 16 }));
        }
    }
    for element in [I8, F16, I64] {
        all.push(Box::new(Transpose { matrices: 1, rows: 128, columns: 128, element, align: 16 }));
    }
    let (tokens, top_k, alpha, align) = (8192, 2, 0.01, 16);
    for (experts, element) in [8, 256, 8192].into_iter().flat_map(|experts| [(experts, F32), (experts, Bf16)])
    {
        all.push(Box::new(AuxLoss { tokens, experts, top_k, alpha, element, index: I32, align }));
        for accumulate in [false, true] {
            all.push(Box::new(AuxLossGradient { tokens, experts, top_k, alpha, element, accumulate, align }));
        }
    }
    all
}

fn entries(functions: &[Box<dyn Function>]) -> Vec<Entry> {
    let mut seen = HashSet::new();
    let calls = functions.iter().map(|function| function.call(&H200).unwrap());
    calls
        .flat_map(|call| call.launches)
        .map(|launch| launch.entry)
        .filter(|entry| seen.insert(*entry))
        .collect()
}

fn valid(entry: &Entry, trust: Trust) -> ValidModule {
    validate(Module::from(entry.kernel(GuestAddr(0)).unwrap()), trust).unwrap()
}

#[test]
fn all_are_assembled() {
    let entries = entries(&functions());
    let names: HashSet<_> =
        entries.iter().map(|entry| entry.kernel(GuestAddr(0)).unwrap().name().to_owned()).collect();
    assert_eq!(names.len(), entries.len(), "two variants have one name");
    let guests: Vec<_> = entries.iter().map(|entry| valid(entry, Trust::Guest)).collect();
    let own: Vec<_> = entries.iter().map(|entry| valid(entry, Trust::Trusted)).collect();
    assembler::with_ptxas(|folder| {
        let older = ["sm_75", "sm_80"]
            .into_iter()
            .flat_map(|arch| guests.iter().map(move |module| (arch, "13.0", module)));
        let newer = guests.iter().chain(&own).map(|module| ("sm_90a", "13.0", module));
        assembler::assemble_for_all(folder, "3", &older.chain(newer).collect::<Vec<_>>());
    });
}

/// Instructions of a kernel on Hopper.
fn instructions(entry: &Entry, trust: Trust) -> usize {
    let compiled = vm_jit::compile(&valid(entry, trust), &"ptx:sm_90a".parse().unwrap()).unwrap();
    compiled.text().unwrap().lines().filter(|line| line.trim_end().ends_with(';')).count()
}

/// Of a guest's elementwise kernel only the loop over what is left of a tensor is checked and polled: what the whole blocks run is the same code.
#[test]
fn whole_blocks_have_no_checks() {
    let mut seen = 0;
    for entry in entries(&functions()) {
        let Entry::Flat(flat) = entry else { continue };
        if flat.shape.tensors > 1 {
            continue;
        }
        seen += 1;
        let (guest, own) = (instructions(&entry, Trust::Guest), instructions(&entry, Trust::Trusted));
        assert!(guest <= own + 48, "{}: {guest} instructions, the host's own {own}", flat.name());
    }
    assert!(seen > 20, "{seen}");
}

#[test]
fn what_there_is_no_kernel_for_is_said() {
    let check = |function: &dyn Function, wanted: &str| match function.call(&H200) {
        Err(CallError::Unsupported { what, .. }) => assert!(what.contains(wanted), "{what}"),
        other => panic!("{function:?}: {other:?}"),
    };
    let plain = || adamw(vec![8], Scalar::F32, false, 16);
    check(&AdamW { step: 0, ..plain() }, "step 0");
    check(&AdamW { gradient: Scalar::I8, ..plain() }, "i8; there are f32, f16 and bf16");
    check(&AdamW { sizes: vec![u64::MAX], ..plain() }, "tensor 0 has 18446744073709551615 elements");
    let embedding =
        Embedding { rows: 8, columns: 8, count: 8, element: Scalar::F32, index: Scalar::F32, align: 16 };
    check(&embedding, "indices of f32; there are i32 and i64");
    check(&Embedding { count: u64::MAX, index: Scalar::I64, ..embedding }, "18446744073709551615 rows");
    let add = ScatterAdd {
        rows: 8,
        columns: 8,
        count: 8,
        element: Scalar::F32,
        output: Scalar::Bf16,
        index: Scalar::I32,
        align: 16,
        deterministic: false,
    };
    check(&add, "atomics on bf16");
    check(&ScatterAdd { count: 1 << 31, deterministic: true, ..add }, "2147483648 rows");
    let transpose =
        Transpose { matrices: 1 << 40, rows: 1 << 40, columns: 1 << 40, element: Scalar::F32, align: 4 };
    check(&transpose, "at most 1 · (2^31 − 1)");
    let rope = Rope {
        batch: 1,
        tokens: 1,
        q_heads: 1,
        k_heads: 1,
        dim: 7,
        rows: 1,
        pairs: Pairs::Halves,
        angles: Angles::Table,
        positions: false,
        first: 0,
        inverse: false,
        element: Scalar::F32,
        align: 16,
    };
    check(&rope, "heads of 7 elements");
    check(&Rope { dim: 1 << 20, ..rope }, "heads of 1048576 elements");
    let (element, index) = (Scalar::F32, Scalar::I32);
    let loss = AuxLoss { tokens: 8, experts: 8193, top_k: 1, alpha: 1.0, element, index, align: 16 };
    check(&loss, "8193 experts; at most 8192");
    let layout = Layout::Paged { pages: 1, page: 0, of_sequence: 1 };
    let append = KvAppend { batch: 1, tokens: 1, heads: 1, dim: 1, layout, element: Scalar::F32, align: 16 };
    check(&append, "pages of 0 tokens");
}
