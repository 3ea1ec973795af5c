//! Which function of the library each function of the ABI is. Its buffers are the pointers, in their order.

use vm_ir::Scalar;
use vm_kernels::attention::{DotProductAttention, DotProductAttentionBackward, Mask};
use vm_kernels::call::Function;
use vm_kernels::elementwise::{Chain, Elementwise, Op};
use vm_kernels::experts::AuxLoss;
use vm_kernels::flat::{Activation, ActivationGradient, AdamW, Fill, GradClip};
use vm_kernels::gather::Embedding;
use vm_kernels::gemm::{Batch, Epilogue, Multiply, Product};
use vm_kernels::loss::{CrossEntropy, CrossEntropyBackward, LossOptions, Reduction};
use vm_kernels::norm::{Norm, NormBackward, NormForward};
use vm_kernels::rope::{Angles, Pairs, Rope};
use vm_kernels::sample::{Argmax, Logits, Sample, SoftmaxTopK, TopK, TopKSample, TopPSample};
use vm_kernels::scatter::ScatterAdd;
use vm_kernels::softmax::Softmax;
use vm_kernels::transpose::Transpose;

use crate::call::{Arguments, Numbers};
use crate::error::Failure;

type Made = Result<Box<dyn Function>, Failure>;

pub(crate) fn gemm(call: &Arguments<'_>) -> Made {
    multiply(call, Batch::One, 1)
}

pub(crate) fn gemm_batched(call: &Arguments<'_>) -> Made {
    multiply(call, Batch::Batched, call.extent("batch"))
}

fn multiply(call: &Arguments<'_>, batch: Batch, matrices: u64) -> Made {
    let [m, n, k] = ["M", "N", "K"].map(|name| call.extent(name));
    let (alpha, beta) = (call.float("alpha"), call.float("beta"));
    let epilogue = Epilogue { scaled: alpha != 1.0, plus: beta != 0.0, ..Epilogue::NONE };
    let product = Product {
        element: call.element,
        output: call.element,
        epilogue,
        batch,
        matrices,
        align: call.align(&[n, k]),
        ..Product::of(m, n, k)
    };
    Ok(Box::new(Multiply { product, alpha, beta }))
}

pub(crate) fn linear(call: &Arguments<'_>) -> Made {
    let [rows, inner, columns] = ["batch", "in_dim", "out_dim"].map(|name| call.extent(name));
    let product = Product {
        element: call.element,
        output: call.element,
        b_transposed: true,
        epilogue: Epilogue { bias: call.is("bias"), ..Epilogue::NONE },
        align: call.align(&[inner, columns]),
        ..Product::of(rows, columns, inner)
    };
    Ok(Box::new(Multiply { product, alpha: 1.0, beta: 0.0 }))
}

pub(crate) fn transpose(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["rows", "cols"].map(|name| call.extent(name));
    let (element, align) = (call.element, call.align(&[rows, columns]));
    Ok(Box::new(Transpose { matrices: 1, rows, columns, element, align }))
}

pub(crate) fn embedding(call: &Arguments<'_>) -> Made {
    let [rows, columns, count] = ["rows", "dim", "count"].map(|name| call.extent(name));
    let (element, align) = (call.element, call.align(&[columns]));
    Ok(Box::new(Embedding { rows, columns, count, element, index: Scalar::I32, align }))
}

pub(crate) fn mqa_attention(call: &Arguments<'_>) -> Made {
    Ok(Box::new(DotProductAttention { bias: call.is("mask"), ..attention(call, 1, Mask::Full)? }))
}

pub(crate) fn flash_attention(call: &Arguments<'_>) -> Made {
    Ok(Box::new(heads(call)?))
}

pub(crate) fn flash_attention_lse(call: &Arguments<'_>) -> Made {
    Ok(Box::new(DotProductAttention { log_sums: true, ..heads(call)? }))
}

pub(crate) fn flash_attention_backward(call: &Arguments<'_>) -> Made {
    Ok(Box::new(DotProductAttentionBackward(DotProductAttention { log_sums: true, ..heads(call)? })))
}

/// Attention whose heads have keys of their own.
fn heads(call: &Arguments<'_>) -> Result<DotProductAttention, Failure> {
    let mask = if call.is("is_causal") { Mask::Causal } else { Mask::Full };
    attention(call, call.extent("n_heads"), mask)
}

fn attention(call: &Arguments<'_>, shared: u64, mask: Mask) -> Result<DotProductAttention, Failure> {
    let (length, dim, scale) = (call.extent("seq_len"), call.extent("head_dim"), call.float("scale"));
    if dim > 256 {
        return Err(Failure::invalid(call.name, "head_dim", format!("is {dim}: it must be at most 256")));
    }
    if !(scale > 0.0 && scale.is_finite()) {
        let what = format!("is {scale}: it must be above 0, as a rule 1 / sqrt(head_dim)");
        return Err(Failure::invalid(call.name, "scale", what));
    }
    Ok(DotProductAttention {
        element: call.element,
        fp8: None,
        batch: call.extent("batch"),
        heads: [call.extent("n_heads"), shared],
        lengths: [length, length],
        dim,
        mask,
        window: [0; 2],
        bias: false,
        log_sums: false,
        scale,
        align: call.align(&[dim]),
    })
}

pub(crate) fn rope(call: &Arguments<'_>) -> Made {
    let (heads, dim) = (call.extent("n_heads"), call.extent("head_dim"));
    if !dim.is_multiple_of(2) {
        return Err(Failure::invalid(call.name, "head_dim", format!("is {dim}: it must be even")));
    }
    Ok(Box::new(Rope {
        batch: call.extent("batch"),
        tokens: call.extent("seq_len"),
        q_heads: heads,
        k_heads: heads,
        dim: u32::try_from(dim).unwrap_or(u32::MAX),
        rows: call.extent("seq_len"),
        pairs: Pairs::Halves,
        angles: Angles::Frequencies,
        positions: false,
        first: 0,
        inverse: false,
        element: call.element,
        align: call.align(&[dim]),
    }))
}

pub(crate) fn adamw_step(call: &Arguments<'_>) -> Made {
    Ok(Box::new(adamw(call, vec![call.extent("size")])?))
}

pub(crate) fn adamw_step_numbers(call: &Arguments<'_>) -> Result<Numbers, Failure> {
    Ok(adamw(call, Vec::new())?.numbers())
}

fn adamw(call: &Arguments<'_>, sizes: Vec<u64>) -> Result<AdamW, Failure> {
    let step = call.extent("step").cast_signed();
    if step < 1 {
        let what = format!("is {step}: it must be 1 or more, as steps are counted from 1");
        return Err(Failure::invalid(call.name, "step", what));
    }
    let float = |name| f64::from(call.float(name));
    Ok(AdamW {
        sizes,
        parameter: call.element,
        gradient: call.element,
        master: false,
        scaled: false,
        align: call.align_of_pointers(),
        lr: float("lr"),
        beta1: float("beta1"),
        beta2: float("beta2"),
        eps: float("eps"),
        weight_decay: float("weight_decay"),
        step: u32::try_from(step).unwrap_or(u32::MAX),
    })
}

pub(crate) fn grad_clip(call: &Arguments<'_>) -> Made {
    Ok(Box::new(GradClip {
        sizes: vec![call.extent("size")],
        element: call.element,
        align: call.align_of_pointers(),
        clip: call.float("clip_norm"),
    }))
}

pub(crate) fn scatter_add(call: &Arguments<'_>) -> Made {
    let columns = call.extent("dim");
    Ok(Box::new(ScatterAdd {
        rows: call.extent("rows"),
        columns,
        count: call.extent("count"),
        element: call.element,
        output: Scalar::F32,
        index: Scalar::I32,
        align: call.align(&[columns]),
        deterministic: false,
    }))
}

pub(crate) fn zero_grad(call: &Arguments<'_>) -> Made {
    let (sizes, align) = (vec![call.extent("size")], call.align_of_pointers());
    Ok(Box::new(Fill { sizes, element: call.element, align, value: 0.0 }))
}

pub(crate) fn aux_loss_forward(call: &Arguments<'_>) -> Made {
    let experts = call.extent("n_experts");
    Ok(Box::new(AuxLoss {
        tokens: call.extent("batch_seq"),
        experts,
        top_k: call.extent("top_k"),
        alpha: call.float("alpha"),
        element: call.element,
        index: Scalar::I32,
        align: call.align(&[experts]),
    }))
}

fn elementwise(call: &Arguments<'_>, chain: Chain, number: f32) -> Made {
    let align = call.align_of_pointers();
    let of = Elementwise::of(chain, call.extent("n"));
    Ok(Box::new(Elementwise { align, numbers: of.numbers.map(|_| number), ..of }))
}

pub(crate) fn silu(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::unary(Op::Silu, call.element, call.element), 0.0)
}

pub(crate) fn gelu(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::unary(Op::Gelu, call.element, call.element), 0.0)
}

pub(crate) fn gelu_tanh(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::unary(Op::GeluTanh, call.element, call.element), 0.0)
}

pub(crate) fn silu_backward(call: &Arguments<'_>) -> Made {
    gradient(call, Activation::Silu)
}

pub(crate) fn gelu_backward(call: &Arguments<'_>) -> Made {
    gradient(call, Activation::Gelu)
}

pub(crate) fn gelu_tanh_backward(call: &Arguments<'_>) -> Made {
    gradient(call, Activation::GeluTanh)
}

fn gradient(call: &Arguments<'_>, activation: Activation) -> Made {
    let (columns, element, align) = (call.extent("n"), call.element, call.align_of_pointers());
    Ok(Box::new(ActivationGradient { activation, rows: 1, columns, element, align }))
}

pub(crate) fn add(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::binary(Op::Add, call.element, call.element), 0.0)
}

pub(crate) fn mul(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::binary(Op::Mul, call.element, call.element), 0.0)
}

pub(crate) fn scale(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::scale(call.element, call.element), call.float("scale"))
}

pub(crate) fn softmax(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "dim"].map(|name| call.extent(name));
    let align = call.align(&[columns]);
    Ok(Box::new(Softmax { align, ..Softmax::of(rows, columns, call.element) }))
}

pub(crate) fn rmsnorm(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "dim"].map(|name| call.extent(name));
    let align = call.align(&[columns]);
    let of = NormForward::of(Norm::Rms, rows, columns, call.element, call.float("eps"));
    Ok(Box::new(NormForward { align, ..of }))
}

pub(crate) fn layernorm(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "dim"].map(|name| call.extent(name));
    let statistics = call.is("mean");
    if statistics != call.is("rstd") {
        let (name, other) = if statistics { ("rstd", "mean") } else { ("mean", "rstd") };
        let what = format!("is NULL and {other} is not: give both, or neither");
        return Err(Failure::invalid(call.name, name, what));
    }
    let align = call.align(&[columns]);
    let of = NormForward::of(Norm::Layer, rows, columns, call.element, call.float("eps"));
    Ok(Box::new(NormForward { bias: true, statistics, align, ..of }))
}

pub(crate) fn layernorm_backward(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "dim"].map(|name| call.extent(name));
    Ok(Box::new(NormBackward {
        norm: Norm::Layer,
        rows,
        columns,
        element: call.element,
        weight: call.element,
        residual: false,
        bias: true,
        align: call.align(&[columns]),
    }))
}

fn logits(call: &Arguments<'_>, [rows, columns]: [&str; 2]) -> Logits {
    let [rows, columns] = [rows, columns].map(|name| call.extent(name));
    Logits { element: call.element, rows, columns, align: call.align(&[columns]) }
}

/// `k`, of rows of so many columns.
fn k(call: &Arguments<'_>, columns: &str) -> Result<u64, Failure> {
    let (k, all) = (call.extent("k"), call.extent(columns));
    if k > all {
        let what = format!("is {k}: it must be at most {columns}, which is {all}");
        return Err(Failure::invalid(call.name, "k", what));
    }
    Ok(k)
}

pub(crate) fn topk(call: &Arguments<'_>) -> Made {
    Ok(Box::new(TopK { logits: logits(call, ["batch", "dim"]), k: k(call, "dim")? }))
}

pub(crate) fn softmax_topk(call: &Arguments<'_>) -> Made {
    let logits = logits(call, ["rows", "cols"]);
    Ok(Box::new(SoftmaxTopK { logits, k: k(call, "cols")?, renormalised: false }))
}

pub(crate) fn cross_entropy_forward(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "vocab_size"].map(|name| call.extent(name));
    let options = LossOptions { reduction: Reduction::None, ..LossOptions::default() };
    let align = call.align(&[columns]);
    let log_probs = call.is("log_probs").then_some(Scalar::F32);
    let of = CrossEntropy::of(rows, columns, call.element);
    Ok(Box::new(CrossEntropy { target: Scalar::I32, log_probs, options, align, ..of }))
}

pub(crate) fn cross_entropy_backward(call: &Arguments<'_>) -> Made {
    let [rows, columns] = VOCABULARY.map(|name| call.extent(name));
    Ok(Box::new(CrossEntropyBackward {
        rows,
        columns,
        element: call.element,
        target: Scalar::I32,
        in_place: false,
        log_sums: false,
        options: LossOptions { reduction: Reduction::None, ..LossOptions::default() },
        align: call.align(&[columns]),
    }))
}

/// Rows of logits of a vocabulary.
const VOCABULARY: [&str; 2] = ["batch", "vocab_size"];

pub(crate) fn argmax(call: &Arguments<'_>) -> Made {
    Ok(Box::new(Argmax { logits: logits(call, VOCABULARY) }))
}

pub(crate) fn sample(call: &Arguments<'_>) -> Made {
    Ok(Box::new(Sample { logits: logits(call, VOCABULARY), temperature: temperature(call)? }))
}

fn temperature(call: &Arguments<'_>) -> Result<f32, Failure> {
    let temperature = call.float("temperature");
    if !(temperature.is_finite() && temperature >= 0.0) {
        let what = format!("is {temperature}: it must be finite and 0 or more");
        return Err(Failure::invalid(call.name, "temperature", what));
    }
    Ok(temperature)
}

pub(crate) fn topk_sample(call: &Arguments<'_>) -> Made {
    let k = call.extent("k");
    if k == 0 {
        let what = "is 0, and nothing is left to draw from: it must be 1 or more";
        return Err(Failure::invalid(call.name, "k", what));
    }
    Ok(Box::new(TopKSample { logits: logits(call, VOCABULARY), k, temperature: temperature(call)? }))
}

pub(crate) fn topp_sample(call: &Arguments<'_>) -> Made {
    let p = call.float("top_p");
    if !(0.0..=1.0).contains(&p) {
        return Err(Failure::invalid(call.name, "top_p", format!("is {p}: it must be from 0 to 1")));
    }
    Ok(Box::new(TopPSample { logits: logits(call, VOCABULARY), p, temperature: temperature(call)? }))
}
