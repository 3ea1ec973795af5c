# Code generated from features/library/kernels/functions.txt; do not edit. VMK_WRITE_HEADER=1 cargo test --package vm-capi --test header
"""Every function of the kernel library, by the names that they have in C without `cuda_`.

Arrays are those of `float32`, `bfloat16` or `float16`, of one type in a call, where no type is said. Shapes say what fits together: `batch...` are any number
of dimensions, also none. An array that is given does not change: what a function changes comes back. A `TypeError` or a `ValueError` names the
argument that can't be, what it is and what it must be.
"""

from __future__ import annotations

from typing import Literal, Optional, Union, overload

from ._vmaccel import Array, run_kernel

__all__ = [
    "adamw_step", "add", "argmax", "aux_loss_forward", "cross_entropy_backward", "cross_entropy_forward", "embedding", "flash_attention",
    "flash_attention_backward", "flash_attention_lse", "gelu", "gelu_backward", "gelu_tanh", "gelu_tanh_backward", "gemm", "gemm_batched",
    "grad_clip", "layernorm", "layernorm_backward", "linear", "mqa_attention", "mul", "rmsnorm", "rope", "sample", "scale", "scatter_add",
    "silu", "silu_backward", "softmax", "softmax_topk", "topk", "topk_sample", "topp_sample", "transpose", "zero_grad",
]  # fmt: skip


def gemm(a: Array, b: Array, c: Optional[Array] = None, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """c = alpha a b + beta c. a is [M, K], b is [K, N], c is [M, N]. With beta 0 c is not read, and may be None.

    Takes
        a: [M, K]
        b: [K, N]
        c: [M, N]; or None, where beta is 0
    Gives
        c: [M, N]
    """
    return run_kernel("gemm", a, b, c, alpha, beta)


def gemm_batched(a: Array, b: Array, c: Optional[Array] = None, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """gemm for each of batch matrices, one behind the other.

    Takes
        a: [batch, M, K]
        b: [batch, K, N]
        c: [batch, M, N]; or None, where beta is 0
    Gives
        c: [batch, M, N]
    """
    return run_kernel("gemm_batched", a, b, c, alpha, beta)


def linear(input: Array, weight: Array, bias: Optional[Array] = None) -> Array:
    """A layer's product as torch.nn.Linear has it: output = input weight' + bias. input is [batch, in_dim], weight [out_dim, in_dim], output
    [batch, out_dim]; bias is None or [out_dim].

    Takes
        input: [batch..., in_dim]
        weight: [out_dim, in_dim]
        bias: [out_dim]; or None
    Gives
        output: [batch..., out_dim]
    """
    return run_kernel("linear", input, weight, bias)


def transpose(input: Array) -> Array:
    """output[j, i] = input[i, j]. input is [rows, cols], output [cols, rows].

    Takes
        input: [rows, cols]
    Gives
        output: [cols, rows]
    """
    return run_kernel("transpose", input)


def embedding(table: Array, indices: Array) -> Array:
    """output[i, :] = table[indices[i], :], of count rows of dim elements; table has rows rows, and what has another index becomes 0.

    Takes
        table: [rows, dim]
        indices: [count...] of int32
    Gives
        output: [count..., dim]
    """
    return run_kernel("embedding", table, indices)


def mqa_attention(q: Array, k: Array, v: Array, mask: Optional[Array] = None, *, scale: Optional[float] = None) -> Array:
    """Multi-query attention: output = softmax(scale q k' + mask) v for each head. q and output are [batch, seq_len, n_heads, head_dim], k and
    v [batch, seq_len, head_dim], which all heads share. mask is None, or [seq_len, seq_len] floats that are added to the scores of each
    query (row) with each key (column), the same for all sequences and heads: -inf masks a key, and a query all of whose keys are masked gets
    zeros. head_dim is at most 256, scale above 0. scale is 1 / sqrt(head_dim) where it is None.

    Takes
        q: [batch, seq_len, n_heads, head_dim]
        k, v: [batch, seq_len, head_dim]
        mask: [seq_len, seq_len] of float32; or None
    Gives
        output: [batch, seq_len, n_heads, head_dim]
    """
    return run_kernel("mqa_attention", q, k, v, mask, scale)


def flash_attention(q: Array, k: Array, v: Array, *, scale: Optional[float] = None, is_causal: bool = False) -> Array:
    """Attention: output = softmax(scale q k') v for each head. q, k, v and output are [batch, seq_len, n_heads, head_dim]. If is_causal, a
    query sees the keys up to its own place. head_dim is at most 256, scale above 0. scale is 1 / sqrt(head_dim) where it is None.

    Takes
        q, k, v: [batch, seq_len, n_heads, head_dim]
    Gives
        output: [batch, seq_len, n_heads, head_dim]
    """
    return run_kernel("flash_attention", q, k, v, scale, is_causal)


def flash_attention_lse(q: Array, k: Array, v: Array, *, scale: Optional[float] = None, is_causal: bool = False) -> tuple[Array, Array]:
    """flash_attention, and in log_sums, [batch, n_heads, seq_len], the logarithm of each query's sum of e^score, which
    flash_attention_backward needs. scale is 1 / sqrt(head_dim) where it is None.

    Takes
        q, k, v: [batch, seq_len, n_heads, head_dim]
    Gives
        output: [batch, seq_len, n_heads, head_dim]
        log_sums: [batch, n_heads, seq_len] of float32
    """
    return run_kernel("flash_attention_lse", q, k, v, scale, is_causal)


def flash_attention_backward(q: Array, k: Array, v: Array, output: Array, log_sums: Array, doutput: Array, *, scale: Optional[float] = None, is_causal: bool = False) -> tuple[Array, Array, Array]:
    """The gradients of attention, dq, dk and dv, from doutput, that of its output; output and log_sums are those of flash_attention_lse. Of
    bf16 and f16, with a head_dim of 64 or 128, dq is added up in any order. scale is 1 / sqrt(head_dim) where it is None.

    Takes
        q, k, v, output: [batch, seq_len, n_heads, head_dim]
        log_sums: [batch, n_heads, seq_len] of float32
        doutput: [batch, seq_len, n_heads, head_dim]
    Gives
        dq, dk, dv: [batch, seq_len, n_heads, head_dim]
    """
    return run_kernel("flash_attention_backward", q, k, v, output, log_sums, doutput, scale, is_causal)


def rope(q: Array, k: Array, freqs: Array) -> tuple[Array, Array]:
    """Rotary position embedding of q and k, both [batch, seq_len, n_heads, head_dim]: the elements i and i + head_dim / 2 of a head are turned
    by the angle of the token's place in its sequence times freqs[i]. freqs is [head_dim / 2]; head_dim is even and at most 512.

    Takes
        q, k: [batch, seq_len, n_heads, head_dim]
        freqs: [head_dim / 2] of float32
    Gives
        q, k: [batch, seq_len, n_heads, head_dim]
    """
    return run_kernel("rope", q, k, freqs)


def adamw_step(param: Array, grad: Array, m: Array, v: Array, *, lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01, step: int) -> tuple[Array, Array, Array]:
    """A step of AdamW as torch.optim.AdamW does it, of param and its gradient, with m and v in f32; step counts from 1.

    Takes
        param, grad: [size...]
        m, v: [size...] of float32
    Gives
        param: [size...]
        m, v: [size...] of float32
    """
    return run_kernel("adamw_step", param, grad, m, v, lr, beta1, beta2, eps, weight_decay, step)


def grad_clip(grad: Array, *, clip_norm: float) -> tuple[Array, Array]:
    """Multiplies grad by min(1, clip_norm / (norm + 1e-6)), and gives its norm of before in total_norm.

    Takes
        grad: [size...]
    Gives
        grad: [size...]
        total_norm: [] of float32
    """
    return run_kernel("grad_clip", grad, clip_norm)


def scatter_add(input: Array, indices: Array, output: Array) -> Array:
    """output[indices[i], :] += input[i, :], of count rows of dim elements; output has rows rows, and what has another index is left out. Sums
    are made in f32 by atomics, in any order.

    Takes
        input: [count..., dim]
        indices: [count...] of int32
        output: [rows, dim] of float32
    Gives
        output: [rows, dim] of float32
    """
    return run_kernel("scatter_add", input, indices, output)


def zero_grad(grad: Array) -> Array:
    """Zeros, as many as grad has.

    Takes
        grad: [size...]
    Gives
        grad: [size...]
    """
    return run_kernel("zero_grad", grad)


def aux_loss_forward(router_probs: Array, expert_indices: Array, *, alpha: float) -> tuple[Array, Array, Array]:
    """The load-balancing loss of a mixture of experts: aux_loss = alpha N sum f_i P_i, of the share f_i of the indices that name expert i, and
    the mean P_i of its probabilities. router_probs is [batch_seq, n_experts], expert_indices [batch_seq, top_k]; f_counts[i] is how often
    expert i was chosen, p_means[i] is P_i. n_experts is at most 8192.

    Takes
        router_probs: [batch_seq..., n_experts]
        expert_indices: [batch_seq..., top_k] of int32
    Gives
        aux_loss: [] of float32
        f_counts, p_means: [n_experts] of float32
    """
    return run_kernel("aux_loss_forward", router_probs, expert_indices, alpha)


def silu(input: Array) -> Array:
    """output[i] = input[i] / (1 + exp(-input[i])).

    Takes
        input: [n...]
    Gives
        output: [n...]
    """
    return run_kernel("silu", input)


def add(a: Array, b: Array) -> Array:
    """output[i] = a[i] + b[i].

    Takes
        a, b: [n...]
    Gives
        output: [n...]
    """
    return run_kernel("add", a, b)


def mul(a: Array, b: Array) -> Array:
    """output[i] = a[i] b[i].

    Takes
        a, b: [n...]
    Gives
        output: [n...]
    """
    return run_kernel("mul", a, b)


def scale(input: Array, *, scale: float) -> Array:
    """output[i] = scale input[i].

    Takes
        input: [n...]
    Gives
        output: [n...]
    """
    return run_kernel("scale", input, scale)


def gelu(input: Array) -> Array:
    """output[i] = input[i] (1 + erf(input[i] / sqrt(2))) / 2.

    Takes
        input: [n...]
    Gives
        output: [n...]
    """
    return run_kernel("gelu", input)


def gelu_tanh(input: Array) -> Array:
    """output[i] = input[i] (1 + tanh(sqrt(2 / pi) (input[i] + 0.044715 input[i]^3))) / 2, which is near to gelu.

    Takes
        input: [n...]
    Gives
        output: [n...]
    """
    return run_kernel("gelu_tanh", input)


def silu_backward(doutput: Array, input: Array) -> Array:
    """The gradient of silu: dinput[i] = doutput[i] silu'(input[i]).

    Takes
        doutput, input: [n...]
    Gives
        dinput: [n...]
    """
    return run_kernel("silu_backward", doutput, input)


def gelu_backward(doutput: Array, input: Array) -> Array:
    """The gradient of gelu: dinput[i] = doutput[i] gelu'(input[i]).

    Takes
        doutput, input: [n...]
    Gives
        dinput: [n...]
    """
    return run_kernel("gelu_backward", doutput, input)


def gelu_tanh_backward(doutput: Array, input: Array) -> Array:
    """The gradient of gelu_tanh: dinput[i] = doutput[i] gelu_tanh'(input[i]).

    Takes
        doutput, input: [n...]
    Gives
        dinput: [n...]
    """
    return run_kernel("gelu_tanh_backward", doutput, input)


def softmax(input: Array) -> Array:
    """The softmax of each row of input, [batch, dim].

    Takes
        input: [batch..., dim]
    Gives
        output: [batch..., dim]
    """
    return run_kernel("softmax", input)


def rmsnorm(input: Array, weight: Array, *, eps: float = 1e-6) -> Array:
    """Each row of input, [batch, dim], divided by the root of the mean of its squares and eps, times weight, [dim].

    Takes
        input: [batch..., dim]
        weight: [dim]
    Gives
        output: [batch..., dim]
    """
    return run_kernel("rmsnorm", input, weight, eps)


@overload
def layernorm(input: Array, weight: Array, bias: Array, *, eps: float = 1e-5, statistics: Literal[False] = False) -> Array: ...

@overload
def layernorm(input: Array, weight: Array, bias: Array, *, eps: float = 1e-5, statistics: Literal[True]) -> tuple[Array, Array, Array]: ...

@overload
def layernorm(input: Array, weight: Array, bias: Array, *, eps: float = 1e-5, statistics: bool) -> Union[Array, tuple[Array, Array, Array]]: ...


def layernorm(input: Array, weight: Array, bias: Array, *, eps: float = 1e-5, statistics: bool = False) -> Union[Array, tuple[Array, Array, Array]]:
    """Each row of input, [batch, dim], less its mean, divided by the root of its variance and eps, times weight, plus bias, both [dim]. With
    statistics also mean and rstd, [batch], the mean and the reciprocal of that root, which layernorm_backward needs.

    Takes
        input: [batch..., dim]
        weight, bias: [dim]
    Gives
        output: [batch..., dim]
        mean, rstd: [batch...] of float32; with statistics
    """
    return run_kernel("layernorm", input, weight, bias, eps, statistics)


def layernorm_backward(input: Array, weight: Array, doutput: Array, mean: Array, rstd: Array) -> tuple[Array, Array, Array]:
    """The gradients of a layer norm from doutput, that of its output, [batch, dim]: dinput, [batch, dim], and dweight and dbias, [dim]. input,
    weight, mean and rstd are those of layernorm.

    Takes
        input: [batch..., dim]
        weight: [dim]
        doutput: [batch..., dim]
        mean, rstd: [batch...] of float32
    Gives
        dinput: [batch..., dim]
        dweight, dbias: [dim]
    """
    return run_kernel("layernorm_backward", input, weight, doutput, mean, rstd)


def topk(input: Array, *, k: int) -> tuple[Array, Array]:
    """The k greatest of each row of input, [batch, dim], the greatest first, in values, [batch, k], and where they are in indices, [batch, k].
    Of equal ones the first counts as greater, and NaN as greater than all. k is at most dim, dim at most 8388608 (2^23).

    Takes
        input: [batch..., dim]
    Gives
        values: [batch..., k]
        indices: [batch..., k] of int32
    """
    return run_kernel("topk", input, k)


def softmax_topk(input: Array, *, k: int) -> tuple[Array, Array]:
    """The softmax of each row of input, [rows, cols], of which the k greatest are kept: weights and indices, [rows, k]. k is at most cols,
    cols at most 8388608 (2^23).

    Takes
        input: [rows..., cols]
    Gives
        weights: [rows..., k]
        indices: [rows..., k] of int32
    """
    return run_kernel("softmax_topk", input, k)


@overload
def cross_entropy_forward(logits: Array, targets: Array, *, log_probs: Literal[False] = False) -> Array: ...

@overload
def cross_entropy_forward(logits: Array, targets: Array, *, log_probs: Literal[True]) -> tuple[Array, Array]: ...

@overload
def cross_entropy_forward(logits: Array, targets: Array, *, log_probs: bool) -> Union[Array, tuple[Array, Array]]: ...


def cross_entropy_forward(logits: Array, targets: Array, *, log_probs: bool = False) -> Union[Array, tuple[Array, Array]]:
    """The cross-entropy of each row of logits, [batch, vocab_size], with its target: loss, [batch], and with log_probs the logarithms of the
    softmax, [batch, vocab_size]. Rows whose target is -100 are ignored: their loss is 0. One that is otherwise below 0 or not below
    vocab_size makes the row's loss NaN. vocab_size is at least 1, if there are rows.

    Takes
        logits: [batch..., vocab_size]
        targets: [batch...] of int32
    Gives
        loss: [batch...] of float32
        log_probs: [batch..., vocab_size] of float32; with log_probs
    """
    return run_kernel("cross_entropy_forward", logits, targets, log_probs)


def cross_entropy_backward(logits: Array, targets: Array, dloss: Array) -> Array:
    """The gradient of cross_entropy_forward: dlogits, [batch, vocab_size], is dloss[i] (softmax(logits[i, :]) less 1 at the target), and 0 in
    rows that are ignored. dloss, [batch], is the gradient of each row's loss: 1 / batch for that of their mean.

    Takes
        logits: [batch..., vocab_size]
        targets: [batch...] of int32
        dloss: [batch...] of float32
    Gives
        dlogits: [batch..., vocab_size]
    """
    return run_kernel("cross_entropy_backward", logits, targets, dloss)


def argmax(logits: Array) -> Array:
    """The place of the greatest of each row of logits, [batch, vocab_size]; of equal ones the first. vocab_size is 1 to 8388608 (2^23).

    Takes
        logits: [batch..., vocab_size]
    Gives
        output: [batch...] of int32
    """
    return run_kernel("argmax", logits)


def sample(logits: Array, seeds: Array, *, temperature: float = 1.0) -> Array:
    """A place of each row of logits, [batch, vocab_size], drawn with the probability softmax(logits / temperature) by the row's seed; at
    temperature 0 the greatest. The same seed draws the same. vocab_size is 1 to 8388608 (2^23).

    Takes
        logits: [batch..., vocab_size]
        seeds: [batch...] of int64
    Gives
        output: [batch...] of int32
    """
    return run_kernel("sample", logits, seeds, temperature)


def topk_sample(logits: Array, seeds: Array, *, k: int, temperature: float = 1.0) -> Array:
    """sample of the k greatest alone, from 1; vocab_size, or more, are all.

    Takes
        logits: [batch..., vocab_size]
        seeds: [batch...] of int64
    Gives
        output: [batch...] of int32
    """
    return run_kernel("topk_sample", logits, seeds, k, temperature)


def topp_sample(logits: Array, seeds: Array, *, top_p: float, temperature: float = 1.0) -> Array:
    """sample of the fewest greatest whose probabilities reach top_p, 0 to 1.

    Takes
        logits: [batch..., vocab_size]
        seeds: [batch...] of int64
    Gives
        output: [batch...] of int32
    """
    return run_kernel("topp_sample", logits, seeds, top_p, temperature)
