"""Other libraries at the work of `peers.py`, each where it has the function: QuACK and FlashInfer, if their modules are there."""

import importlib

QUACK = "softmax softmax_backward rmsnorm layernorm rmsnorm_residual rmsnorm_backward layernorm_backward cross_entropy cross_entropy_backward"
FLASHINFER = "topk topp_sample sample"


def others(op, dtype, extents):
    """By the names of the libraries that have the function: what makes it, which fails where the library is not there."""
    if op in QUACK.split():
        return {"QuACK": lambda: quack(op, dtype, *extents)}
    return {"FlashInfer": lambda: flashinfer(op)} if op in FLASHINFER.split() else {}


def quack(op, dtype, rows, n):
    import torch

    softmax, norm, loss = (importlib.import_module(f"quack.{name}") for name in ("softmax", "rmsnorm", "cross_entropy"))

    def wide(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.float32)

    if op == "softmax":
        return softmax.softmax_fwd
    if op == "softmax_backward":
        return lambda y, dy: softmax.softmax_bwd(dy, y)
    if op.startswith("cross_entropy"):
        targets, lse, slope = torch.randint(n, (rows,), device="cuda"), wide(rows).abs() + 8, torch.full((rows,), 1 / rows, device="cuda")
        if op == "cross_entropy":
            return lambda x: loss.cross_entropy(x, targets, reduction="mean")
        return lambda x: loss.cross_entropy_bwd(x, targets, slope, lse)
    # The weights of its layer norm are of f32.
    weight = wide(n) if op.startswith("layernorm") else wide(n).to(dtype)
    bias, mean, rstd = wide(n), wide(rows), wide(rows).abs()
    return {
        "rmsnorm": lambda x: norm.rmsnorm_fwd(x, weight, eps=EPSILON),
        "rmsnorm_residual": lambda x, r: norm.rmsnorm_fwd(x, weight, residual=r, out_dtype=torch.bfloat16, eps=EPSILON),
        "rmsnorm_backward": lambda x, dy: norm.rmsnorm_bwd(x, weight, dy, rstd),
        "layernorm": lambda x: norm.layernorm_fwd(x, weight, bias, EPSILON),
        "layernorm_backward": lambda x, dy: norm.layernorm_bwd(x, weight, dy, rstd, mean),
    }[op]


def flashinfer(op):
    library = importlib.import_module("flashinfer")
    sampling = library.sampling
    return {
        "topk": lambda x: library.top_k(x, 50, sorted=True),
        # It takes probabilities of f32 alone.
        "topp_sample": lambda x: sampling.top_p_sampling_from_probs(sampling.softmax(x.float()), 0.9),
        "sample": lambda x: sampling.sampling_from_logits(x.float()),
    }[op]
