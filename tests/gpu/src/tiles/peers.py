"""Times PyTorch at the work that its arguments name ("attention 2 16 8192 128 1", "gradients" of the same, "decode 16 32 8 4096 128 0", "paged" and
"flashinfer" of the same, "fp8" of the same), and prints as JSON the seconds of a call ("Ok") or why there are none ("Err"): cuDNN for attention,
on random numbers, as the kernels whose peers they are; of FP8, of pages, and of bf16 with "flash" before, FlashAttention-3, if its module is there,
and FlashInfer likewise; with "torch" before, PyTorch's own, of what cuDNN has not.
"""

import importlib
import json
import os
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUNDS, LAUNCHES, WARM, LEAD = 9, 8, 2, 4
# Tokens of a page of a cache.
PAGE = 64
# Bytes of FlashInfer's workspace.
WORKSPACE = 512 << 20
# Modules of other libraries, by what they are asked for.
MODULES = {kind: "fa3_fwd_interface" for kind in ("fp8", "flash", "paged")} | {"flashinfer": "flashinfer"}


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
    if kind in MODULES:
        library = importlib.import_module(MODULES[kind])
    if kind in ("paged", "flashinfer"):
        batch, heads, of_keys, tokens, dim = extents
        pages = batch * tokens // PAGE
        q = numbers(batch, 1, heads, dim)
        k, v = (numbers(pages, PAGE, of_keys, dim) for _ in range(2))
        table = torch.arange(pages, device="cuda", dtype=torch.int32) * 7 % pages
        if kind == "flashinfer":
            workspace = torch.zeros(WORKSPACE, device="cuda", dtype=torch.uint8)
            decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=bool(flag))
            first = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * (pages // batch)
            last = torch.full((batch,), PAGE, device="cuda", dtype=torch.int32)
            decode.plan(first, table, last, heads, of_keys, dim, PAGE, q_data_type=q.dtype, kv_data_type=k.dtype)
            q = q.squeeze(1)
            return lambda: decode.run(q, (k, v))
        table = table.view(batch, -1)
        lengths = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
        return lambda: library.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table)
    if kind == "fp8":
        batch, heads, tokens, dim = extents
        q, k, v = (numbers(batch, tokens, heads, dim).to(torch.float8_e4m3fn) for _ in range(3))
        scales = torch.ones(batch, heads, device="cuda")
        of = {name: scales for name in ("q_descale", "k_descale", "v_descale")}
        return lambda: library.flash_attn_func(q, k, v, causal=bool(flag), **of)
    *rows, dim = extents
    q, k = (numbers(*extents) for _ in range(2))
    v = numbers(*rows, 128 if dim == 192 else dim)
    if kind == "flash":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return lambda: library.flash_attn_func(q, k, v, causal=bool(flag))
    if kind == "attention":
        return lambda: attend(q, k, v, is_causal=bool(flag))
    of = [x.requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = attend(q, k, v, is_causal=bool(flag))
    slopes = numbers(*extents)
    return lambda: torch.autograd.grad(out, of, slopes, retain_graph=True)


def measure(call):
    lead = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    times = []
    for measurement in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # While the device is busy with that, the calls are queued.
        for _ in range(LEAD):
            lead.fill_(0)
        for number in range(WARM + LAUNCHES):
            if number == WARM:
                begin.record()
            call()
        end.record()
        torch.cuda.synchronize()
        if measurement > 0:  # the first warms up
            times.append(begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return times


# What libraries print is no answer.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
if not torch.cuda.is_available():
    sys.exit("PyTorch finds no GPU")
results = {}
for work in sys.argv[1:]:
    kind, *numbers = work.split()
    if kind == "torch" and "Ok" in results.get(work.removeprefix("torch "), {}):
        continue
    backends = [SDPBackend.FLASH_ATTENTION if kind == "torch" else SDPBackend.CUDNN_ATTENTION]
    if kind == "decode":  # the better of both
        backends.append(SDPBackend.FLASH_ATTENTION)
    given = numbers[1:] if kind in ("torch", "flash") else numbers
    kind = numbers[0] if kind == "torch" else kind
    found, reason = [], ""
    # FlashInfer without tensor cores, and with them.
    for flag in (0, 1) if kind == "flashinfer" else given[-1:]:
        for backend in backends if kind not in MODULES else backends[:1]:
            try:
                with torch.no_grad(), sdpa_kernel([backend]):
                    found.append(measure(function(kind, *map(int, [*given[:-1], flag]))))
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
            torch.cuda.empty_cache()
    results[work] = {"Ok": min(found, key=statistics.median)} if found else {"Err": reason}
print(json.dumps(results), file=answers, flush=True)
