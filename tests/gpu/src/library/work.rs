//! What is measured: functions of the library with the extents that matter, and the bytes that they can't but move.

use std::fmt;
use std::sync::Arc;

use vm_ir::Scalar;
use vm_ir::view::Access;
use vm_kernels::call::Function;
use vm_kernels::columns::ColumnSums;
use vm_kernels::elementwise::{Chain, Elementwise, Op};
use vm_kernels::flat::{Activation, ActivationGradient, AdamW, GradNorm};
use vm_kernels::gather::Embedding;
use vm_kernels::loss::{CrossEntropy, CrossEntropyBackward, LossOptions, Reduction};
use vm_kernels::norm::{Norm, NormBackward, NormForward};
use vm_kernels::rope::{Angles, Pairs, Rope};
use vm_kernels::sample::{Argmax, Logits, Sample, TopK, TopPSample};
use vm_kernels::scatter::{EmbeddingGradient, ScatterAdd};
use vm_kernels::softmax::{Softmax, SoftmaxBackward};
use vm_kernels::transpose::Transpose;

/// Rows and columns of matrices whose rows are reduced: from short ones to the longest, some of an odd number of columns.
const SHAPES: [[u64; 2]; 12] = [
    [1_048_576, 64],
    [262_144, 256],
    [65_536, 768],
    [65_536, 1023],
    [32_768, 4096],
    [16_384, 5120],
    [8192, 8191],
    [8192, 16_384],
    [4096, 32_768],
    [2048, 50_257],
    [1024, 131_072],
    [512, 262_144],
];
/// Elements of vectors.
const SIZES: [u64; 12] = [
    (1 << 23) + 1,
    1 << 24,
    20_000_003,
    1 << 25,
    (1 << 25) + 7,
    50_331_648,
    1 << 26,
    (1 << 26) + 1,
    100_000_007,
    100_663_296,
    1 << 27,
    (1 << 27) + 5,
];
/// Rows and columns of tables, of sums of columns and of transposes.
const TABLES: [[u64; 2]; 6] =
    [[65_536, 768], [65_536, 1023], [32_768, 4096], [16_384, 5120], [8192, 16_384], [2048, 50_257]];
/// Rows and columns of logits that are sampled from.
const LOGITS: [[u64; 2]; 4] = [[64, 32_000], [256, 50_257], [256, 131_072], [1024, 131_072]];
/// Sequences, tokens, heads of queries and of keys, and elements of a head.
const ROTATED: [[u64; 5]; 6] = [
    [8, 1024, 12, 12, 64],
    [16, 2048, 12, 12, 64],
    [4, 4096, 32, 8, 128],
    [8, 4096, 32, 8, 128],
    [1, 16_384, 32, 32, 128],
    [3, 4097, 32, 8, 128],
];

/// What a figure is to reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Goal {
    /// A part of a copy's bandwidth.
    OfCopy(f64),
    /// So many milliseconds at most.
    Milliseconds(f64),
    /// No more than its peer.
    Peer,
}

/// A function of certain extents.
#[derive(Clone, Debug)]
pub(super) struct Work {
    /// What computes it.
    pub(super) function: Arc<dyn Function + Send + Sync>,
    /// Its name for the peers: the operation, its type, its extents.
    pub(super) key: String,
    /// Bytes that a call reads and writes, each element once.
    pub(super) bytes: u64,
    /// Indices and targets are less.
    pub(super) below: u64,
    /// Is a peer compiled, which takes seconds?
    pub(super) compiled: bool,
    /// What it is to reach.
    pub(super) goal: Goal,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = self.key.split(' ');
        let [name, element] = [words.next(), words.next()].map(Option::unwrap_or_default);
        write!(f, "{name} {element} {}", words.collect::<Vec<_>>().join("×"))
    }
}

/// The figures of a function, of one type: a test.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) works: Vec<Work>,
}

/// Bytes of all buffers, those that are read and written twice; but for those that only processors read.
fn bytes(function: &dyn Function, written: &[&str]) -> u64 {
    let of = |buffer: vm_kernels::call::Buffer| {
        let times = if buffer.access == Access::ReadWrite && !written.contains(&buffer.name) { 2 } else { 1 };
        times * buffer.len().unwrap_or(0) * u64::from(buffer.element.bytes())
    };
    function.buffers().into_iter().map(of).sum()
}

struct Groups(Vec<Group>);

impl Groups {
    /// A function of f32 and bf16, of these extents; of every fourth of which a peer is compiled.
    fn add<const N: usize, F: Function + Send + Sync + 'static>(
        &mut self,
        name: &str,
        extents: &[[u64; N]],
        goal: Goal,
        of: impl Fn([u64; N], Scalar) -> F,
        moved: impl Fn([u64; N], Scalar, &F) -> u64,
    ) {
        for element in [Scalar::F32, Scalar::Bf16] {
            let works = extents.iter().enumerate().map(|(number, &extents)| {
                let function = of(extents, element);
                let bytes = moved(extents, element, &function);
                let list = extents.map(|extent| extent.to_string()).join(" ");
                Work {
                    function: Arc::new(function),
                    key: format!("{name} {element} {list}"),
                    bytes,
                    below: extents[N.min(2) - 1],
                    compiled: number % 4 == 2,
                    goal,
                }
            });
            self.0.push(Group { name: format!("{name} of {element}"), works: works.collect() });
        }
    }
}

/// All that there are figures of.
pub(super) fn groups() -> Vec<Group> {
    let mut all = Groups(Vec::new());
    rows(&mut all);
    vectors(&mut all);
    tables(&mut all);
    decoding(&mut all);
    all.0
}

fn rows(all: &mut Groups) {
    const EPSILON: f32 = 1e-6;
    let copy = Goal::OfCopy(0.95);
    let every = |_: [u64; 2], _: Scalar, function: &dyn Function| bytes(function, &["y"]);
    all.add("softmax", &SHAPES, copy, |[m, n], t| Softmax::of(m, n, t), |s, t, f| every(s, t, f));
    let backward = |[rows, columns]: [u64; 2], t| SoftmaxBackward {
        rows,
        columns,
        input: t,
        output: t,
        log: false,
        align: 16,
    };
    all.add("softmax_backward", &SHAPES, copy, backward, |s, t, f| every(s, t, f));
    for (norm, name) in [(Norm::Rms, "rmsnorm"), (Norm::Layer, "layernorm")] {
        let bias = norm == Norm::Layer;
        let forward = |[m, n]: [u64; 2], t| NormForward { bias, ..NormForward::of(norm, m, n, t, EPSILON) };
        all.add(name, &SHAPES, copy, forward, |s, t, f| every(s, t, f));
        let backward = |[rows, columns]: [u64; 2], t| NormBackward {
            norm,
            rows,
            columns,
            element: t,
            weight: t,
            residual: false,
            bias,
            align: 16,
        };
        all.add(&format!("{name}_backward"), &SHAPES, copy, backward, |s, t, f| every(s, t, f));
    }
    // A residual, RMS norm and a cast in one.
    let residual = |[m, n]: [u64; 2], t| NormForward {
        residual: true,
        output: Scalar::Bf16,
        ..NormForward::of(Norm::Rms, m, n, t, EPSILON)
    };
    all.add("rmsnorm_residual", &SHAPES, copy, residual, |s, t, f| every(s, t, f));
    all.add("cross_entropy", &SHAPES, copy, |[m, n], t| CrossEntropy::of(m, n, t), |s, t, f| every(s, t, f));
    let backward = |[rows, columns]: [u64; 2], element| CrossEntropyBackward {
        rows,
        columns,
        element,
        target: Scalar::I64,
        in_place: false,
        log_sums: true,
        options: LossOptions { reduction: Reduction::None, ..LossOptions::default() },
        align: 16,
    };
    all.add("cross_entropy_backward", &SHAPES, copy, backward, |s, t, f| every(s, t, f));
}

fn vectors(all: &mut Groups) {
    let copy = Goal::OfCopy(0.95);
    let sizes = SIZES.map(|n| [n]);
    let every = |_: [u64; 1], _: Scalar, function: &dyn Function| bytes(function, &[]);
    let chain = |chain: fn(Scalar) -> Chain| move |[n]: [u64; 1], t| Elementwise::of(chain(t), n);
    all.add("silu", &sizes, copy, chain(|t| Chain::unary(Op::Silu, t, t)), |s, t, f| every(s, t, f));
    let other = |t| if t == Scalar::F32 { Scalar::Bf16 } else { Scalar::F32 };
    let cast = |[n]: [u64; 1], t| Elementwise::of(Chain::cast(t, other(t)), n);
    all.add("cast", &sizes, copy, cast, |s, t, f| every(s, t, f));
    all.add("swiglu", &sizes, copy, chain(|t| Chain::swiglu(t, t)), |s, t, f| every(s, t, f));
    let gradient = |activation| {
        move |[columns]: [u64; 1], element| ActivationGradient {
            activation,
            rows: 1,
            columns,
            element,
            align: 16,
        }
    };
    all.add("silu_backward", &sizes[6..9], copy, gradient(Activation::Silu), |s, t, f| every(s, t, f));
    all.add("swiglu_backward", &sizes[6..9], copy, gradient(Activation::Swiglu), |s, t, f| every(s, t, f));
    let step = |[n]: [u64; 1], t| AdamW { step: 10, ..AdamW::of(&[n], t) };
    all.add("adamw", &sizes, copy, step, |s, t, f| every(s, t, f));
    let norm = |[n]: [u64; 1], element| GradNorm { sizes: vec![n], element, align: 16, clip: Some(1.0) };
    all.add("grad_norm", &sizes[6..9], copy, norm, |s, t, f| every(s, t, f));
}

fn tables(all: &mut Groups) {
    let copy = Goal::OfCopy(0.95);
    /// Rows of the table of embeddings.
    const VOCABULARY: u64 = 50_304;
    let wide: Vec<[u64; 3]> =
        TABLES[..4].iter().map(|&[count, columns]| [count, VOCABULARY, columns]).collect();
    let moved = |[count, _, columns]: [u64; 3], t: Scalar| 2 * count * columns * u64::from(t.bytes());
    let lookup = |[count, rows, columns]: [u64; 3], element| Embedding {
        rows,
        columns,
        count,
        element,
        index: Scalar::I32,
        align: 16,
    };
    all.add("embedding", &wide, copy, lookup, |s, t, _| moved(s, t));
    let gradient = |[count, rows, columns]: [u64; 3], element| EmbeddingGradient {
        add: ScatterAdd {
            rows,
            columns,
            count,
            element,
            output: element,
            index: Scalar::I32,
            align: 16,
            deterministic: true,
        },
        accumulate: false,
    };
    all.add("embedding_gradient", &wide, Goal::Peer, gradient, |[count, rows, columns], t, _| {
        (count + rows) * columns * u64::from(t.bytes())
    });
    let sums = |[rows, columns]: [u64; 2], t| ColumnSums { rows, columns, element: t, output: t, align: 16 };
    all.add("column_sums", &TABLES, copy, sums, |_, _, f| bytes(f, &[]));
    let transpose =
        |[rows, columns]: [u64; 2], element| Transpose { matrices: 1, rows, columns, element, align: 16 };
    all.add("transpose", &TABLES, copy, transpose, |_, _, f| bytes(f, &[]));
    let rope = |[batch, tokens, q_heads, k_heads, dim]: [u64; 5], element| Rope {
        batch,
        tokens,
        q_heads,
        k_heads,
        dim: dim as u32,
        rows: tokens,
        pairs: Pairs::Halves,
        angles: Angles::CosSin,
        positions: false,
        first: 0,
        inverse: false,
        element,
        align: 16,
    };
    all.add("rope", &ROTATED, copy, rope, |_, _, f| bytes(f, &[]));
}

fn decoding(all: &mut Groups) {
    let logits = |[rows, columns]: [u64; 2], element| Logits { element, rows, columns, align: 16 };
    let read = |[rows, columns]: [u64; 2], t: Scalar| rows * columns * u64::from(t.bytes());
    let argmax = |s, t| Argmax { logits: logits(s, t) };
    all.add(
        "argmax",
        &[LOGITS[2], LOGITS[3], SHAPES[4], SHAPES[9]],
        Goal::OfCopy(0.95),
        argmax,
        |s, t, _| read(s, t),
    );
    let most = Goal::Milliseconds(0.15);
    let chosen = [LOGITS[0], LOGITS[1], LOGITS[2]];
    all.add("topk", &chosen, most, |s, t| TopK { logits: logits(s, t), k: 50 }, |s, t, _| read(s, t));
    let mass = |s, t| TopPSample { logits: logits(s, t), p: 0.9, temperature: 1.0 };
    all.add("topp_sample", &chosen, most, mass, |s, t, _| read(s, t));
    let draw = |s, t| Sample { logits: logits(s, t), temperature: 1.0 };
    all.add("sample", &chosen, most, draw, |s, t, _| read(s, t));
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use vm_kernels::family::{Kind, Resources};

    use super::*;

    #[test]
    fn every_work_is_a_call_of_its_own_that_moves_bytes() {
        let device = Resources { compute_units: 132, shared_bytes: 227 << 10, kind: Kind::Gpu, cluster: 8 };
        let mut keys = HashSet::new();
        for work in groups().iter().flat_map(|group| &group.works) {
            assert!(keys.insert(work.key.clone()), "{work}");
            let call = work.function.call(&device).unwrap();
            assert!(!call.launches.is_empty(), "{work}");
            assert!((1 << 21..1 << 32).contains(&work.bytes), "{work}: {}", work.bytes);
        }
    }

    #[test]
    fn bytes_count_what_is_read_and_written() {
        let softmax = Softmax::of(2, 8, Scalar::F32);
        assert_eq!(bytes(&softmax, &["y"]), 2 * 2 * 8 * 4);
        let step = groups().into_iter().find(|group| group.name == "adamw of f32").unwrap();
        // Parameter, m and v are read and written, the gradient is read.
        assert_eq!(step.works[1].bytes, (7 * 4) << 24);
    }
}
