"""Times PyTorch's cuBLAS at the products that it reads, a line each, on random numbers, and answers with the seconds of a call as JSON, or
why there is none. A product: M, N, K, types of the factors and of C, transpositions, the kind of batch, matrices, epilogue, how many second
factors take turns, and how many calls make a graph (0 for none).
"""

import itertools
import json
import sys
import time

import torch

# Measurements, calls (or graphs) of each, and seconds of work before them.
ROUNDS, LAUNCHES, WARM = 9, 4, 0.15
TYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "tf32": torch.float32,
    "f32": torch.float32,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
    "i32": torch.int32,
}


def numbers(element, *shape):
    if element == "i8":
        return torch.randint(-100, 101, shape, device="cuda", dtype=torch.int8)
    return (torch.rand(shape, device="cuda") * 2 - 1).to(TYPES[element])


def function(m, n, k, element, output, order, batch, matrices, epilogue):
    torch.backends.cuda.matmul.allow_tf32 = element == "tf32"
    dtype = TYPES[output]

    def factor(many, rows, columns, turned):
        lead = [matrices] if many else []
        shape = [columns, rows] if turned else [rows, columns]
        made = numbers(element, *lead, *shape)
        return made.transpose(-1, -2) if turned else made

    a = factor(batch == "batched", m, k, order[0] == "t")
    b = factor(batch != "one", k, n, order[1] == "t")
    if element == "f8e4m3":
        ones = lambda *shape: torch.ones(shape, device="cuda")
        scales = {
            "alpha": lambda: (ones(1), ones(1)),
            "rows": lambda: (ones(m, 1), ones(1, n)),
            "blocks": lambda: (ones(k // 128, m).t(), ones(n // 128, k // 128).t()),
        }
        of_a, of_b = scales[epilogue]()
        fast = epilogue != "blocks"
        return lambda: torch._scaled_mm(a, b, scale_a=of_a, scale_b=of_b, out_dtype=dtype, use_fast_accum=fast)
    if element == "i8":
        return lambda: torch._int_mm(a, b)
    if batch == "grouped":
        ends = torch.arange(1, matrices + 1, device="cuda", dtype=torch.int32) * (m // matrices)
        return lambda: torch._grouped_mm(a, b, offs=ends)
    bias = numbers(output, n)
    out = torch.empty([matrices] * (batch == "batched") + [m, n], device="cuda", dtype=dtype)
    old = numbers(output, m, n) if epilogue == "plus" else None
    return {
        "none": lambda: torch.matmul(a, b, out=out),
        "plus": lambda: torch.addmm(old, a, b, beta=-0.5, alpha=0.75, out=out),
        "bias": lambda: torch.addmm(bias, a, b, out=out),
        "relu": lambda: torch._addmm_activation(bias, a, b, use_gelu=False),
        "gelu": lambda: torch._addmm_activation(bias, a, b, use_gelu=True),
        "silu": lambda: torch.nn.functional.silu(torch.addmm(bias, a, b, out=out)),
    }[epilogue]


def in_turn(product, weights):
    calls = itertools.cycle([function(*product) for _ in range(weights)])
    return lambda: next(calls)()


def graphed(call, count):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return graph.replay


def measure(call, graph):
    """Seconds of a call by measurement, on a device that is as warm as work makes it."""
    end = time.monotonic() + WARM
    while time.monotonic() < end:
        for _ in range(LAUNCHES):
            call()
        torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        for _ in range(LAUNCHES):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / LAUNCHES / max(graph, 1))
    return times


if not torch.cuda.is_available():
    sys.exit("PyTorch finds no GPU")
print("ready", flush=True)
made = (None, None)
with torch.no_grad():
    for line in sys.stdin:
        m, n, k, element, output, order, batch, matrices, epilogue, weights, graph = line.split()
        try:
            if made[0] != line:
                made = (None, None)
                torch.cuda.empty_cache()
                product = (int(m), int(n), int(k), element, output, order, batch, int(matrices), epilogue)
                call = in_turn(product, int(weights))
                made = (line, graphed(call, int(graph)) if int(graph) else call)
            answer = {"seconds": measure(made[1], int(graph)), "reason": ""}
        except Exception as error:  # PyTorch has not all of them
            answer = {"seconds": [], "reason": str(error).split("\n")[0]}
        print(json.dumps(answer), flush=True)
