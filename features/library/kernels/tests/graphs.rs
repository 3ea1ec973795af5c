//! Every case of every function as a graph: what it evaluates to is what kernels must come to.

use std::any::Any;
use std::collections::BTreeSet;

use vm_graph::{ValidGraph, decode, encode, evaluate, onnx, validate};
use vm_ir::Scalar;
use vm_ir::interp::Tensor;
use vm_ir::view::Access;
use vm_kernels::call::Function;
use vm_kernels::cases::{Case, all, numbers};
use vm_kernels::gemm::{Batch, Epilogue, Multiply, Product, Scales};
use vm_kernels::graph::{NoGraph, names};
use vm_kernels::strided::Strided;

/// The most elements of all buffers of a case: the evaluator takes each by itself.
const MOST: usize = 1 << 17;

/// Every reason why there is no graph, by what its message has.
const REASONS: [&str; 3] = [
    "draws by Philox, for whose 64-bit products NPUs have no operations",
    "has no elements, and arrays of a graph have some",
    "nothing that it writes has elements",
];

/// What the buffers hold behind a graph that was evaluated.
fn evaluated(function: &dyn Function, graph: &ValidGraph, before: &[Tensor]) -> Vec<Tensor> {
    let buffers = function.buffers();
    let names = names(&buffers);
    let given = graph.inputs.iter().map(|input| {
        let at = names.iter().position(|name| *name == input.name).expect("an input is a buffer");
        assert_eq!(input.ty.extents, buffers[at].extents, "{}", input.name);
        before[at].to_f64s()
    });
    let results = evaluate(graph, &given.collect::<Vec<_>>()).expect("its inputs are those of a buffer");
    let mut behind = before.to_vec();
    for (number, (output, values)) in graph.outputs.iter().zip(results).enumerate() {
        let name = output.name.strip_suffix("_out").unwrap_or(&output.name);
        let at = names.iter().position(|known| known == name).expect("an output is a buffer");
        assert_ne!(buffers[at].access, Access::Read, "{name}");
        assert_eq!(graph.output_type(number).extents, buffers[at].extents, "{name}");
        // Integers have bits, of which an f64 is not cut off.
        behind[at] = match buffers[at].element.is_int() {
            true => Tensor::from_bits(
                buffers[at].element,
                &buffers[at].extents,
                values.iter().map(|value| (*value as i64).cast_unsigned()),
            ),
            false => Tensor::from_f64s(buffers[at].element, &buffers[at].extents, values),
        };
    }
    behind
}

/// The function that is called, and of one with strided rows the one inside.
fn kind(case: &Case) -> String {
    let text = format!("{:?}", case.function);
    let any: &dyn Any = &*case.function;
    let inner =
        if any.is::<Strided>() { text.split_once("function: ").map_or("", |(_, of)| of) } else { &text };
    inner.split([' ', '(', '{']).next().unwrap_or("").to_owned()
}

#[test]
fn functions_are_their_graphs() {
    let (mut stated, mut run, mut reasons) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut wrong = Vec::new();
    for case in all() {
        let graph = match case.function.graph() {
            Ok(graph) => graph,
            Err(error @ (NoGraph::Unstated { .. } | NoGraph::Call(_))) => {
                let message = error.to_string();
                let reason = REASONS.iter().find(|reason| message.contains(*reason));
                reasons.insert(*reason.unwrap_or_else(|| panic!("{}: {message}", case.name)));
                // Draws alone have no graph whatever their extents.
                let is_empty = case.buffers.iter().any(|tensor| tensor.is_empty());
                assert!(is_empty || kind(&case).ends_with("Sample"), "{}: {message}", case.name);
                continue;
            }
            Err(error) => {
                wrong.push(format!("{}: {error}", case.name));
                continue;
            }
        };
        stated.insert(kind(&case));
        if case.buffers.iter().map(Tensor::len).sum::<usize>() > MOST {
            continue;
        }
        run.insert(kind(&case));
        if let Err(what) = case.compare(&evaluated(&*case.function, &graph, &case.buffers)) {
            wrong.push(what);
        }
        let again = validate(decode(&encode(&graph).expect("it is small")).expect("it is its bytes"));
        assert_eq!(again.expect("it is valid"), graph, "{}", case.name);
        assert!(onnx::model(&graph).len() > 20, "{}", case.name);
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(stated, run, "each has a case that is run");
    assert_eq!(reasons, BTreeSet::from(REASONS));
}

/// A product against sums of products in f64.
fn check_product(product: Product, offsets: &[u64]) {
    let Product { m, n, k, matrices, b_transposed, epilogue, .. } = product;
    let function = Multiply { product, alpha: 1.0, beta: 0.0 };
    let specified = function.buffers();
    let tensor = |(seed, at): (u64, &vm_kernels::call::Buffer)| {
        let count = at.len().unwrap_or(0);
        let values: Vec<f64> = match at.name {
            "offsets" => offsets.iter().map(|offset| *offset as f64).collect(),
            _ if at.element == Scalar::I8 => numbers(seed, count).iter().map(|x| x * 127.0).collect(),
            _ => numbers(seed, count),
        };
        Tensor::from_f64s(at.element, &at.extents, values)
    };
    let before: Vec<Tensor> = (1..).zip(&specified).map(tensor).collect();
    let all: Vec<Vec<f64>> = before.iter().map(Tensor::to_f64s).collect();
    let [a_scale, b_scale] = [3, 4].map(|at: usize| all.get(at).cloned().unwrap_or_default());
    let matrix = |row: u64| (0..matrices).find(|matrix| row < offsets[*matrix as usize + 1]).unwrap_or(0);
    let value = |at: u64| {
        let (i, j) = (at / n, at % n);
        let terms = (0..k).map(|l| {
            let scale = match epilogue.scales {
                Scales::None => 1.0,
                Scales::Rows => a_scale[i as usize] * b_scale[j as usize],
                Scales::Blocks => {
                    let of_b = l / 128 * n.div_ceil(128) + j / 128;
                    a_scale[(l / 128 * m + i) as usize] * b_scale[of_b as usize]
                }
            };
            let place = if b_transposed { j * k + l } else { l * n + j };
            all[0][(i * k + l) as usize] * all[1][(matrix(i) * k * n + place) as usize] * scale
        });
        terms.sum::<f64>()
    };
    let graph = function.graph().expect("it has one");
    let found = evaluated(&function, &graph, &before)[2].to_f64s();
    for (at, found) in (0..).zip(found) {
        let expected = value(at);
        assert!(
            (found - expected).abs() <= 4e-3 * expected.abs().max(1.0),
            "{product:?}: {at}: {found}, not {expected}"
        );
    }
}

#[test]
fn products_without_cases() {
    use Scalar::{Bf16, F8E4M3, F32, I8, I32};
    let one = |element, output, [m, n, k]: [u64; 3], scales| Product {
        element,
        output,
        b_transposed: true,
        epilogue: Epilogue { scales, ..Epilogue::NONE },
        ..Product::of(m, n, k)
    };
    check_product(one(I8, I32, [5, 7, 200], Scales::None), &[0, 5]);
    check_product(one(F8E4M3, F32, [5, 6, 40], Scales::Rows), &[0, 5]);
    check_product(one(F8E4M3, F32, [3, 130, 200], Scales::Blocks), &[0, 3]);
    for b_transposed in [false, true] {
        let (batch, matrices) = (Batch::Grouped, 3);
        let grouped = Product { batch, matrices, b_transposed, ..one(Bf16, F32, [9, 5, 8], Scales::None) };
        check_product(grouped, &[0, 4, 4, 9]);
    }
}
