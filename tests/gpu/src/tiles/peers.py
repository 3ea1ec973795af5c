"""Times PyTorch at the work that its arguments name ("attention 2 16 8192 128 1", "gradients" of the same, "decode 16 32 8 4096 128 0", "paged" of the same,
"fp8" of the same), and prints the seconds of a call as JSON: cuDNN for attention, on random numbers, as the kernels whose peers they are;
of FP8, and of bf16 with "flash" before, FlashAttention-3, if its module is there; with "torch" before, PyTorch's own, of what cuDNN has not.
"""

import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUNDS, LAUNCHES, WARM = 9, 8, 2
# Tokens of a page of a cache.
PAGE = 64


def function(kind, *extents):
    def numbers(*shape):
        return (torch.rand(shape, device="cuda") * 4 - 2).bfloat16()

    *extents, flag = extents
    attend = torch.nn.functional.scaled_dot_product_attention
    if kind == "decode":
        batch, heads, of_keys, tokens, dim = extents
        q = numbers(batch, heads, 1, dim)
        k, v = (numbers(batch, of_keys, tokens, dim) for _ in range(2))
        return lambda: attend(q, k, v, enable_gqa=True)
    if kind == "paged":
        batch, heads, of_keys, tokens, dim = extents
        pages = batch * tokens // PAGE
        q = numbers(batch, 1, heads, dim)
        k, v = (numbers(pages, PAGE, of_keys, dim) for _ in range(2))
        table = (torch.arange(pages, device="cuda", dtype=torch.int32) * 7 % pages).view(batch, -1)
        lengths = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
        return lambda: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table)
    if kind == "fp8":
        batch, heads, tokens, dim = extents
        q, k, v = (numbers(batch, tokens, heads, dim).to(torch.float8_e4m3fn) for _ in range(3))
        scales = torch.ones(batch, heads, device="cuda")
        of = {name: scales for name in ("q_descale", "k_descale", "v_descale")}
        return lambda: fa3.flash_attn_func(q, k, v, causal=bool(flag), **of)
    *rows, dim = extents
    q, k = (numbers(*extents) for _ in range(2))
    v = numbers(*rows, 128 if dim == 192 else dim)
    if kind == "flash":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return lambda: fa3.flash_attn_func(q, k, v, causal=bool(flag))
    if kind == "attention":
        return lambda: attend(q, k, v, is_causal=bool(flag))
    of = [x.requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = attend(q, k, v, is_causal=bool(flag))
    slopes = numbers(*extents)
    return lambda: torch.autograd.grad(out, of, slopes, retain_graph=True)


def measure(call):
    times = []
    for measurement in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number in range(WARM + LAUNCHES):
            if number == WARM:
                begin.record()
            call()
        end.record()
        torch.cuda.synchronize()
        if measurement > 0:  # the first warms up
            times.append(begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return times


try:
    import fa3_fwd_interface as fa3
except Exception:
    fa3 = None
if not torch.cuda.is_available():
    sys.exit("PyTorch finds no GPU")
results = {}
for work in sys.argv[1:]:
    kind, *numbers = work.split()
    if kind in ("fp8", "flash", "paged") and fa3 is None or kind == "torch" and work.removeprefix("torch ") in results:
        continue
    backends = [SDPBackend.FLASH_ATTENTION if kind == "torch" else SDPBackend.CUDNN_ATTENTION]
    if kind == "decode":  # the better of both
        backends.append(SDPBackend.FLASH_ATTENTION)
    kind, *numbers = numbers if kind == "torch" else (kind, *numbers[kind == "flash":])
    for backend in backends:
        try:
            with torch.no_grad(), sdpa_kernel([backend]):
                times = measure(function(kind, *map(int, numbers)))
            results[work] = min(results.get(work, times), times, key=statistics.median)
        except RuntimeError as error:
            print(f"{work}: {error}", file=sys.stderr)
    torch.cuda.empty_cache()
print(json.dumps(results))
