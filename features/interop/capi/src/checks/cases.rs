//! The cases of the kernel library that can be called by the ABI.

use std::any::Any;

use vm_ir::Scalar;
use vm_ir::interp::Tensor;
use vm_kernels::attention::{DotProductAttention, DotProductAttentionBackward, Mask};
use vm_kernels::call::Function;
use vm_kernels::cases::Case;
use vm_kernels::elementwise::{Chain, Elementwise, Op};
use vm_kernels::experts::AuxLoss;
use vm_kernels::flat::{self, ActivationGradient, AdamW, Fill, GradClip};
use vm_kernels::gather::Embedding;
use vm_kernels::gemm::{Activation, Auxiliary, Batch, Epilogue, Multiply, Product, Scales};
use vm_kernels::loss::{CrossEntropy, CrossEntropyBackward, LossOptions, Reduction};
use vm_kernels::norm::{Norm, NormBackward, NormForward};
use vm_kernels::rope::{Angles, Pairs, Rope};
use vm_kernels::sample::{Argmax, Logits, Sample, SoftmaxTopK, TopK, TopKSample, TopPSample};
use vm_kernels::scatter::ScatterAdd;
use vm_kernels::softmax::Softmax;
use vm_kernels::transpose::Transpose;

use super::{ARENA, Caller, WORKSPACE};
use crate::sys::by_name::{Entry, TABLE};
use crate::sys::vmk_status;

/// A function of the ABI with what is no pointer among its arguments.
struct Call {
    function: &'static str,
    element: Scalar,
    numbers: Vec<(&'static str, u64)>,
}

fn bits(number: f32) -> u64 {
    number.to_bits().into()
}

fn rows(names: [&'static str; 2], logits: &Logits, more: &[(&'static str, u64)]) -> Vec<(&'static str, u64)> {
    [&[(names[0], logits.rows), (names[1], logits.columns)], more].concat()
}

/// The call that computes a function of the library; none if there is none.
fn call_of(function: &dyn Function) -> Option<Call> {
    const VOCABULARY: [&str; 2] = ["batch", "vocab_size"];
    let any: &dyn Any = function;
    let call = |function, element, numbers: &[(&'static str, u64)]| {
        Some(Call { function, element, numbers: numbers.to_vec() })
    };
    if let Some(f) = any.downcast_ref::<Multiply>() {
        let Product { element, m, n, k, matrices, batch, .. } = f.product;
        let Epilogue { scales, bias, activation, scaled, plus, aux } = f.product.epilogue;
        let plain = (scales, activation, aux) == (Scales::None, Activation::None, Auxiliary::None)
            && f.product.output == element
            && !f.product.a_transposed
            && (scaled || f.alpha == 1.0)
            && (plus || f.beta == 0.0);
        if f.product.b_transposed {
            let linear = plain && batch == Batch::One && !scaled && !plus;
            let numbers = [("batch", m), ("in_dim", k), ("out_dim", n)];
            return linear.then(|| call("cuda_linear", element, &numbers)).flatten();
        }
        let mut numbers =
            vec![("M", m), ("N", n), ("K", k), ("alpha", bits(f.alpha)), ("beta", bits(f.beta))];
        let name = match batch {
            Batch::One => "cuda_gemm",
            Batch::Batched => "cuda_gemm_batched",
            Batch::Grouped => return None,
        };
        numbers.push(("batch", matrices));
        return (plain && !bias).then(|| call(name, element, &numbers)).flatten();
    }
    let attention = |name, f: &DotProductAttention| {
        let numbers = [
            ("batch", f.batch),
            ("seq_len", f.lengths[0]),
            ("n_heads", f.heads[0]),
            ("head_dim", f.dim),
            ("scale", bits(f.scale)),
            ("is_causal", (f.mask == Mask::Causal).into()),
        ];
        let plain = f.lengths[0] == f.lengths[1] && f.mask != Mask::Window && f.fp8.is_none();
        plain.then(|| call(name, f.element, &numbers)).flatten()
    };
    if let Some(f) = any.downcast_ref::<DotProductAttention>() {
        let name = match (f.bias, f.log_sums, f.mask, f.heads) {
            (false, false, _, [heads, shared]) if heads == shared => "cuda_flash_attention",
            (false, true, _, [heads, shared]) if heads == shared => "cuda_flash_attention_lse",
            (_, false, Mask::Full, [_, 1]) => "cuda_mqa_attention",
            _ => return None,
        };
        return attention(name, f);
    }
    if let Some(DotProductAttentionBackward(f)) = any.downcast_ref() {
        let own = f.heads[0] == f.heads[1];
        return own.then(|| attention("cuda_flash_attention_backward", f)).flatten();
    }
    if let Some(f) = any.downcast_ref::<Transpose>() {
        let numbers = [("rows", f.rows), ("cols", f.columns)];
        return (f.matrices == 1).then(|| call("cuda_transpose", f.element, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<Embedding>() {
        let numbers = [("count", f.count), ("dim", f.columns), ("rows", f.rows)];
        return (f.index == Scalar::I32).then(|| call("cuda_embedding", f.element, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<ActivationGradient>() {
        let name = match f.activation {
            flat::Activation::Silu => "cuda_silu_backward",
            flat::Activation::Gelu => "cuda_gelu_backward",
            flat::Activation::GeluTanh => "cuda_gelu_tanh_backward",
            _ => return None,
        };
        return call(name, f.element, &[("n", f.rows * f.columns)]);
    }
    if let Some(f) = any.downcast_ref::<Rope>() {
        let plain = f.q_heads == f.k_heads
            && f.pairs == Pairs::Halves
            && f.angles == Angles::Frequencies
            && !f.positions
            && f.first == 0
            && !f.inverse;
        let numbers =
            [("batch", f.batch), ("seq_len", f.tokens), ("n_heads", f.q_heads), ("head_dim", f.dim.into())];
        return plain.then(|| call("cuda_rope", f.element, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<AdamW>() {
        let float = |number: f64| bits(number as f32);
        let numbers = [
            ("lr", float(f.lr)),
            ("beta1", float(f.beta1)),
            ("beta2", float(f.beta2)),
            ("eps", float(f.eps)),
            ("weight_decay", float(f.weight_decay)),
            ("step", f.step.into()),
            ("size", *f.sizes.first()?),
        ];
        let plain = f.sizes.len() == 1 && f.parameter == f.gradient && !f.master && !f.scaled;
        return plain.then(|| call("cuda_adamw_step", f.parameter, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<GradClip>() {
        let numbers = [("clip_norm", bits(f.clip)), ("size", *f.sizes.first()?)];
        return (f.sizes.len() == 1).then(|| call("cuda_grad_clip", f.element, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<Fill>() {
        let plain = f.sizes.len() == 1 && f.value.to_bits() == 0;
        return plain.then(|| call("cuda_zero_grad", f.element, &[("size", f.sizes[0])])).flatten();
    }
    if let Some(f) = any.downcast_ref::<ScatterAdd>() {
        let numbers = [("count", f.count), ("dim", f.columns), ("rows", f.rows)];
        let plain = (f.output, f.index) == (Scalar::F32, Scalar::I32);
        return plain.then(|| call("cuda_scatter_add", f.element, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<AuxLoss>() {
        let numbers =
            [("batch_seq", f.tokens), ("n_experts", f.experts), ("top_k", f.top_k), ("alpha", bits(f.alpha))];
        return (f.index == Scalar::I32)
            .then(|| call("cuda_aux_loss_forward", f.element, &numbers))
            .flatten();
    }
    if let Some(f) = any.downcast_ref::<Elementwise>() {
        let chains = |element| {
            [
                ("cuda_silu", Chain::unary(Op::Silu, element, element)),
                ("cuda_gelu", Chain::unary(Op::Gelu, element, element)),
                ("cuda_gelu_tanh", Chain::unary(Op::GeluTanh, element, element)),
                ("cuda_add", Chain::binary(Op::Add, element, element)),
                ("cuda_mul", Chain::binary(Op::Mul, element, element)),
                ("cuda_scale", Chain::scale(element, element)),
            ]
        };
        let known = [Scalar::F32, Scalar::Bf16, Scalar::F16]
            .into_iter()
            .flat_map(|element| chains(element).map(|(name, chain)| (name, element, chain)));
        let (name, element, _) = { known }.find(|(_, _, chain)| *chain == f.chain)?;
        // The number has the place of the input that it is.
        return call(name, element, &[("n", f.rows * f.columns), ("scale", bits(f.numbers[1]))]);
    }
    if let Some(f) = any.downcast_ref::<Softmax>() {
        let plain = !f.log && f.input == f.output;
        return plain
            .then(|| call("cuda_softmax", f.input, &[("batch", f.rows), ("dim", f.columns)]))
            .flatten();
    }
    if let Some(f) = any.downcast_ref::<NormForward>() {
        let name = match (f.norm, f.bias, f.statistics) {
            (Norm::Rms, false, false) => "cuda_rmsnorm",
            (Norm::Layer, true, _) => "cuda_layernorm",
            _ => return None,
        };
        let plain = [f.weight, f.output] == [f.input; 2] && !f.residual;
        let numbers = [("batch", f.rows), ("dim", f.columns), ("eps", bits(f.epsilon))];
        return plain.then(|| call(name, f.input, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<NormBackward>() {
        let plain = f.norm == Norm::Layer && f.bias && !f.residual && f.weight == f.element;
        let numbers = [("batch", f.rows), ("dim", f.columns)];
        return plain.then(|| call("cuda_layernorm_backward", f.element, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<CrossEntropyBackward>() {
        let wanted = LossOptions { reduction: Reduction::None, ..LossOptions::default() };
        let plain = f.target == Scalar::I32 && f.options == wanted && !f.in_place && !f.log_sums;
        let numbers = [("batch", f.rows), ("vocab_size", f.columns)];
        return plain.then(|| call("cuda_cross_entropy_backward", f.element, &numbers)).flatten();
    }
    if let Some(f) = any.downcast_ref::<CrossEntropy>() {
        let wanted = LossOptions { reduction: Reduction::None, ..LossOptions::default() };
        let plain = f.target == Scalar::I32
            && f.options == wanted
            && !f.log_sums
            && matches!(f.log_probs, None | Some(Scalar::F32));
        let numbers = [("batch", f.rows), ("vocab_size", f.columns)];
        return plain.then(|| call("cuda_cross_entropy_forward", f.element, &numbers)).flatten();
    }
    let of = |name, logits: &Logits, names, more: &[(&'static str, u64)]| {
        call(name, logits.element, &rows(names, logits, more))
    };
    if let Some(f) = any.downcast_ref::<TopK>() {
        return of("cuda_topk", &f.logits, ["batch", "dim"], &[("k", f.k)]);
    }
    if let Some(f) = any.downcast_ref::<SoftmaxTopK>() {
        let k = [("k", f.k)];
        return (!f.renormalised).then(|| of("cuda_softmax_topk", &f.logits, ["rows", "cols"], &k)).flatten();
    }
    if let Some(f) = any.downcast_ref::<Argmax>() {
        return of("cuda_argmax", &f.logits, VOCABULARY, &[]);
    }
    if let Some(f) = any.downcast_ref::<Sample>() {
        return of("cuda_sample", &f.logits, VOCABULARY, &[("temperature", bits(f.temperature))]);
    }
    if let Some(f) = any.downcast_ref::<TopKSample>() {
        let more = [("k", f.k), ("temperature", bits(f.temperature))];
        return of("cuda_topk_sample", &f.logits, VOCABULARY, &more);
    }
    let f = any.downcast_ref::<TopPSample>()?;
    of(
        "cuda_topp_sample",
        &f.logits,
        VOCABULARY,
        &[("top_p", bits(f.p)), ("temperature", bits(f.temperature))],
    )
}

/// Calls the function of a case by the ABI, with all pointers at multiples of 256 or of an element alone, and compares what comes out with
/// the function's definition. The name of what was called; none if the ABI has no such function, or the case does not fit into arenas.
///
/// # Errors
/// What differs, or how the call failed.
pub fn check_case(
    caller: &mut dyn Caller,
    case: &Case,
    aligned: bool,
) -> Result<Option<&'static str>, String> {
    let Some(Call { function, element, numbers }) = call_of(&*case.function) else { return Ok(None) };
    let suffix = match element {
        Scalar::F32 => "",
        Scalar::Bf16 => "_bf16",
        Scalar::F16 => "_f16",
        _ => return Ok(None),
    };
    let find = |form: &str| {
        let name = format!("{function}{suffix}{form}");
        TABLE.iter().find(|entry| entry.name == name)
    };
    let Some(entry) = find("_ws").or_else(|| find("")) else { return Ok(None) };
    if case.buffers.iter().any(|tensor| tensor.len() * tensor.element.bytes() as usize > ARENA - 16) {
        return Ok(None);
    }
    let from = |tensor: &Tensor| if aligned { 0 } else { tensor.element.bytes() as usize };
    for (arena, tensor) in case.buffers.iter().enumerate() {
        let width = tensor.element.bytes() as usize;
        let mut bytes = vec![0xff; from(tensor)];
        (0..tensor.len()).for_each(|at| bytes.extend(&tensor.bits(at).to_le_bytes()[..width]));
        caller.write(arena, &bytes)?;
    }
    let words = words_of(caller, entry, &numbers, case, &from)?;
    let status = caller.call(entry.name, &words)?;
    if status != vmk_status::VMK_SUCCESS as i32 {
        return Err(format!("{}: {}: {status}: {}", case.name, entry.name, caller.last()));
    }
    let mut found = Vec::new();
    for (arena, tensor) in case.buffers.iter().enumerate() {
        let width = tensor.element.bytes() as usize;
        let mut bytes = vec![0; from(tensor) + tensor.len() * width];
        caller.read(arena, &mut bytes)?;
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
        let bits = bytes[from(tensor)..].chunks(width).map(number);
        found.push(Tensor::from_bits(tensor.element, &tensor.extents, bits));
    }
    case.compare(&found).map_err(|what| format!("{}: {what}", entry.name)).map(|()| Some(entry.name))
}

/// The words of a case's call.
fn words_of(
    caller: &mut dyn Caller,
    entry: &Entry,
    numbers: &[(&'static str, u64)],
    case: &Case,
    from: &dyn Fn(&Tensor) -> usize,
) -> Result<Vec<u64>, String> {
    let mut buffers = case.buffers.iter().enumerate();
    let mut word = |caller: &dyn Caller, name: &str, pointer: bool, workspace: bool| match name {
        "stream" => caller.stream(),
        "workspace_bytes" => ARENA as u64,
        _ if workspace => caller.arena(WORKSPACE),
        // One that is not there is the last of them, and may be NULL.
        _ if pointer => buffers.next().map_or(0, |(arena, tensor)| caller.arena(arena) + from(tensor) as u64),
        _ => numbers.iter().find(|(known, _)| *known == name).map_or(0, |(_, number)| *number),
    };
    let parameters = entry.parameters.iter();
    let words = parameters
        .map(|parameter| word(caller, parameter.name, parameter.is_pointer(), parameter.is_workspace()));
    Ok(words.collect())
}
