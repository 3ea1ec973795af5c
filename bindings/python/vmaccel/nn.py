"""Functions of networks, by the kernel library, of which `vmaccel.kernels` has all."""

from __future__ import annotations

from typing import Optional

from . import _vmaccel, kernels
from ._creation import zeros_like
from ._functions import _narrow, _wide, any
from ._vmaccel import Array

__all__ = ["attention", "cross_entropy", "gelu", "layer_norm", "log_softmax", "relu", "rms_norm", "sigmoid", "silu", "softmax", "top_k"]


def softmax(x: Array, /, *, axis: int = -1) -> Array:
    """e^x over its sum along an axis."""
    return x.softmax(axis)


def log_softmax(x: Array, /, *, axis: int = -1) -> Array:
    """The logarithm of softmax."""
    wide = _wide(x)
    shifted = wide - wide._reduce("max", axis, True)
    return _narrow(shifted - shifted._unary("exp")._reduce("sum", axis, True)._unary("log"), x)


def relu(x: Array, /) -> Array:
    """x, or 0 where x is less."""
    return x._unary("relu")


def sigmoid(x: Array, /) -> Array:
    """1 / (1 + e^-x)."""
    return x._unary("sigmoid")


def silu(x: Array, /) -> Array:
    """x / (1 + e^-x) (Elfwing et al. 2017)."""
    return x._unary("silu")


def gelu(x: Array, /, *, approximate: bool = False) -> Array:
    """x Φ(x) (Hendrycks and Gimpel 2016); approximately by tanh."""
    return x._unary("gelu_tanh" if approximate else "gelu")


def rms_norm(x: Array, weight: Array, /, *, epsilon: float = 1e-6) -> Array:
    """x / √(mean x² + ε) · weight along the last axis (Zhang and Sennrich 2019)."""
    return kernels.rmsnorm(x, weight._astype(x._dtype), eps=epsilon)


def layer_norm(x: Array, weight: Array, bias: Optional[Array] = None, /, *, epsilon: float = 1e-5) -> Array:
    """(x − mean) / √(variance + ε) · weight + bias along the last axis (Ba et al. 2016)."""
    bias = zeros_like(weight) if bias is None else bias
    return kernels.layernorm(x, weight._astype(x._dtype), bias._astype(x._dtype), eps=epsilon)


def attention(q: Array, k: Array, v: Array, /, *, causal: bool = False, scale: Optional[float] = None) -> Array:
    """softmax(scale · q kᵀ) v for each head; q, k and v are [batch, tokens, heads, dim], and heads of q may share those of k and v."""
    return _vmaccel.attention(q, k, v, causal, scale)


def cross_entropy(logits: Array, targets: Array, /) -> Array:
    """The cross-entropy of each row of logits with its target."""
    narrow = targets._astype("int32")
    if targets._dtype in ("int64", "uint32", "uint64") and bool(any(narrow != targets)):
        raise ValueError("a target is beyond int32")
    return kernels.cross_entropy_forward(logits, narrow)


def top_k(x: Array, k: int, /) -> tuple[Array, Array]:
    """The k greatest of each row, the greatest first, and their places."""
    values, places = kernels.topk(x, k=k)
    return values, places._astype("int64")
