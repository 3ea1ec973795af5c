//! Which function of the library each function of the table is. Its buffers are the pointers, in their order.

use crate::attention::{DotProductAttention, DotProductAttentionBackward, Mask};
use crate::call::Function;
use crate::elementwise::{Chain, Elementwise, Op};
use crate::experts::AuxLoss;
use crate::flat::{Activation, ActivationGradient, AdamW, Fill, GradClip};
use crate::gather::Embedding;
use crate::gemm::{Batch, Epilogue, Multiply, Product};
use crate::loss::{CrossEntropy, CrossEntropyBackward, LossOptions, Reduction};
use crate::norm::{Norm, NormBackward, NormForward};
use crate::rope::{Angles, Pairs, Rope};
use crate::sample::{Argmax, Logits, Sample, SoftmaxTopK, TopK, TopKSample, TopPSample};
use crate::scatter::ScatterAdd;
use crate::softmax::Softmax;
use crate::transpose::Transpose;
use vm_ir::Scalar;

use super::{Arguments, Invalid, Maker, Numbers};

macro_rules! makers {
    ($($name:ident $(($numbers:ident))?)+) => {
        /// What makes the functions, in the order of the table.
        pub const MAKERS: &[Maker] =
            &[$(Maker { name: stringify!($name), make: $name, numbers: makers!(@ $($numbers)?) }),+];
    };
    (@) => { None };
    (@ $numbers:ident) => { Some($numbers) };
}

makers! {
    gemm gemm_batched linear transpose embedding mqa_attention flash_attention flash_attention_lse
    flash_attention_backward rope adamw_step(adamw_step_numbers) grad_clip scatter_add zero_grad
    aux_loss_forward silu add mul scale gelu gelu_tanh silu_backward gelu_backward gelu_tanh_backward
    softmax rmsnorm layernorm layernorm_backward topk softmax_topk cross_entropy_forward
    cross_entropy_backward argmax sample topk_sample topp_sample
}

type Made = Result<Box<dyn Function>, Invalid>;

fn gemm(call: &Arguments<'_>) -> Made {
    multiply(call, Batch::One, 1)
}

fn gemm_batched(call: &Arguments<'_>) -> Made {
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

fn linear(call: &Arguments<'_>) -> Made {
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

fn transpose(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["rows", "cols"].map(|name| call.extent(name));
    let (element, align) = (call.element, call.align(&[rows, columns]));
    Ok(Box::new(Transpose { matrices: 1, rows, columns, element, align }))
}

fn embedding(call: &Arguments<'_>) -> Made {
    let [rows, columns, count] = ["rows", "dim", "count"].map(|name| call.extent(name));
    let (element, align) = (call.element, call.align(&[columns]));
    Ok(Box::new(Embedding { rows, columns, count, element, index: Scalar::I32, align }))
}

fn mqa_attention(call: &Arguments<'_>) -> Made {
    Ok(Box::new(DotProductAttention { bias: call.is("mask"), ..attention(call, 1, Mask::Full)? }))
}

fn flash_attention(call: &Arguments<'_>) -> Made {
    Ok(Box::new(heads(call)?))
}

fn flash_attention_lse(call: &Arguments<'_>) -> Made {
    Ok(Box::new(DotProductAttention { log_sums: true, ..heads(call)? }))
}

fn flash_attention_backward(call: &Arguments<'_>) -> Made {
    Ok(Box::new(DotProductAttentionBackward(DotProductAttention { log_sums: true, ..heads(call)? })))
}

/// Attention whose heads have keys of their own.
fn heads(call: &Arguments<'_>) -> Result<DotProductAttention, Invalid> {
    let mask = if call.is("is_causal") { Mask::Causal } else { Mask::Full };
    attention(call, call.extent("n_heads"), mask)
}

fn attention(call: &Arguments<'_>, shared: u64, mask: Mask) -> Result<DotProductAttention, Invalid> {
    let (length, dim, scale) = (call.extent("seq_len"), call.extent("head_dim"), call.float("scale"));
    if dim > 256 {
        return Err(Invalid::new(call.name, "head_dim", format!("is {dim}: it must be at most 256")));
    }
    if !(scale > 0.0 && scale.is_finite()) {
        let what = format!("is {scale}: it must be above 0, as a rule 1 / sqrt(head_dim)");
        return Err(Invalid::new(call.name, "scale", what));
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

fn rope(call: &Arguments<'_>) -> Made {
    let (heads, dim) = (call.extent("n_heads"), call.extent("head_dim"));
    if !dim.is_multiple_of(2) {
        return Err(Invalid::new(call.name, "head_dim", format!("is {dim}: it must be even")));
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

fn adamw_step(call: &Arguments<'_>) -> Made {
    Ok(Box::new(adamw(call, vec![call.extent("size")])?))
}

fn adamw_step_numbers(call: &Arguments<'_>) -> Result<Numbers, Invalid> {
    Ok(adamw(call, Vec::new())?.numbers())
}

fn adamw(call: &Arguments<'_>, sizes: Vec<u64>) -> Result<AdamW, Invalid> {
    let step = call.extent("step").cast_signed();
    if step < 1 {
        let what = format!("is {step}: it must be 1 or more, as steps are counted from 1");
        return Err(Invalid::new(call.name, "step", what));
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

fn grad_clip(call: &Arguments<'_>) -> Made {
    Ok(Box::new(GradClip {
        sizes: vec![call.extent("size")],
        element: call.element,
        align: call.align_of_pointers(),
        clip: call.float("clip_norm"),
    }))
}

fn scatter_add(call: &Arguments<'_>) -> Made {
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

fn zero_grad(call: &Arguments<'_>) -> Made {
    let (sizes, align) = (vec![call.extent("size")], call.align_of_pointers());
    Ok(Box::new(Fill { sizes, element: call.element, align, value: 0.0 }))
}

fn aux_loss_forward(call: &Arguments<'_>) -> Made {
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

fn silu(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::unary(Op::Silu, call.element, call.element), 0.0)
}

fn gelu(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::unary(Op::Gelu, call.element, call.element), 0.0)
}

fn gelu_tanh(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::unary(Op::GeluTanh, call.element, call.element), 0.0)
}

fn silu_backward(call: &Arguments<'_>) -> Made {
    gradient(call, Activation::Silu)
}

fn gelu_backward(call: &Arguments<'_>) -> Made {
    gradient(call, Activation::Gelu)
}

fn gelu_tanh_backward(call: &Arguments<'_>) -> Made {
    gradient(call, Activation::GeluTanh)
}

fn gradient(call: &Arguments<'_>, activation: Activation) -> Made {
    let (columns, element, align) = (call.extent("n"), call.element, call.align_of_pointers());
    Ok(Box::new(ActivationGradient { activation, rows: 1, columns, element, align }))
}

fn add(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::binary(Op::Add, call.element, call.element), 0.0)
}

fn mul(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::binary(Op::Mul, call.element, call.element), 0.0)
}

fn scale(call: &Arguments<'_>) -> Made {
    elementwise(call, Chain::scale(call.element, call.element), call.float("scale"))
}

fn softmax(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "dim"].map(|name| call.extent(name));
    let align = call.align(&[columns]);
    Ok(Box::new(Softmax { align, ..Softmax::of(rows, columns, call.element) }))
}

fn rmsnorm(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "dim"].map(|name| call.extent(name));
    let align = call.align(&[columns]);
    let of = NormForward::of(Norm::Rms, rows, columns, call.element, call.float("eps"));
    Ok(Box::new(NormForward { align, ..of }))
}

fn layernorm(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "dim"].map(|name| call.extent(name));
    let statistics = call.is("mean");
    if statistics != call.is("rstd") {
        let (name, other) = if statistics { ("rstd", "mean") } else { ("mean", "rstd") };
        let what = format!("is NULL and {other} is not: give both, or neither");
        return Err(Invalid::new(call.name, name, what));
    }
    let align = call.align(&[columns]);
    let of = NormForward::of(Norm::Layer, rows, columns, call.element, call.float("eps"));
    Ok(Box::new(NormForward { bias: true, statistics, align, ..of }))
}

fn layernorm_backward(call: &Arguments<'_>) -> Made {
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
fn k(call: &Arguments<'_>, columns: &str) -> Result<u64, Invalid> {
    let (k, all) = (call.extent("k"), call.extent(columns));
    if k > all {
        let what = format!("is {k}: it must be at most {columns}, which is {all}");
        return Err(Invalid::new(call.name, "k", what));
    }
    Ok(k)
}

fn topk(call: &Arguments<'_>) -> Made {
    Ok(Box::new(TopK { logits: logits(call, ["batch", "dim"]), k: k(call, "dim")? }))
}

fn softmax_topk(call: &Arguments<'_>) -> Made {
    let logits = logits(call, ["rows", "cols"]);
    Ok(Box::new(SoftmaxTopK { logits, k: k(call, "cols")?, renormalised: false }))
}

fn cross_entropy_forward(call: &Arguments<'_>) -> Made {
    let [rows, columns] = ["batch", "vocab_size"].map(|name| call.extent(name));
    let options = LossOptions { reduction: Reduction::None, ..LossOptions::default() };
    let align = call.align(&[columns]);
    let log_probs = call.is("log_probs").then_some(Scalar::F32);
    let of = CrossEntropy::of(rows, columns, call.element);
    Ok(Box::new(CrossEntropy { target: Scalar::I32, log_probs, options, align, ..of }))
}

fn cross_entropy_backward(call: &Arguments<'_>) -> Made {
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

fn argmax(call: &Arguments<'_>) -> Made {
    Ok(Box::new(Argmax { logits: logits(call, VOCABULARY) }))
}

fn sample(call: &Arguments<'_>) -> Made {
    Ok(Box::new(Sample { logits: logits(call, VOCABULARY), temperature: temperature(call)? }))
}

fn temperature(call: &Arguments<'_>) -> Result<f32, Invalid> {
    let temperature = call.float("temperature");
    if !(temperature.is_finite() && temperature >= 0.0) {
        let what = format!("is {temperature}: it must be finite and 0 or more");
        return Err(Invalid::new(call.name, "temperature", what));
    }
    Ok(temperature)
}

fn topk_sample(call: &Arguments<'_>) -> Made {
    let k = call.extent("k");
    if k == 0 {
        let what = "is 0, and nothing is left to draw from: it must be 1 or more";
        return Err(Invalid::new(call.name, "k", what));
    }
    Ok(Box::new(TopKSample { logits: logits(call, VOCABULARY), k, temperature: temperature(call)? }))
}

fn topp_sample(call: &Arguments<'_>) -> Made {
    let p = call.float("top_p");
    if !(0.0..=1.0).contains(&p) {
        return Err(Invalid::new(call.name, "top_p", format!("is {p}: it must be from 0 to 1")));
    }
    Ok(Box::new(TopPSample { logits: logits(call, VOCABULARY), p, temperature: temperature(call)? }))
}
