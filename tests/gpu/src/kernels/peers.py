"""Times PyTorch at the work that its arguments name ("softmax 8192 32768"), and prints the seconds of a call as JSON.

Measured as the kernels are whose peer this is: eager and compiled take turns, a measurement is of a few calls one behind
the other, and inputs come in turn from several sets, none of which is in a cache when it is used again. The output's
memory comes from PyTorch's pool.
"""

import json
import sys

import torch

SETS, ROUNDS, LAUNCHES, WARM, EPSILON, FACTOR = 3, 15, 6, 3, 1e-6, 2.5


def functions(op, columns):
    """By name: the op as PyTorch users write it, eager and compiled."""
    weights = torch.rand(columns if op == "rmsnorm" else 1, device="cuda")
    eager = {
        "silu": lambda a, b: torch.nn.functional.silu(a),
        "add": lambda a, b: torch.add(a, b),
        "mul": lambda a, b: torch.mul(a, b),
        "scale": lambda a, b: torch.mul(a, FACTOR),
        "softmax": lambda a, b: torch.softmax(a, -1),
        "rmsnorm": lambda a, b: torch.nn.functional.rms_norm(a, (columns,), weights, EPSILON),
    }[op]
    return {"eager": eager, "compiled": torch.compile(eager, dynamic=False)}


def measure(op, rows, columns):
    shape = (rows, columns) if op in ("softmax", "rmsnorm") else (columns,)
    inputs = [[torch.randn(shape, device="cuda") for _ in range(2 if op in ("add", "mul") else 1)] for _ in range(SETS)]
    inputs = [(pair[0], pair[-1]) for pair in inputs]
    times = {}
    peers = functions(op, columns)
    turn = 0
    for function in peers.values():
        function(*inputs[0])
    for measurement in range(ROUNDS + 1):
        for name, function in peers.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for call in range(WARM + LAUNCHES):
                if call == WARM:
                    begin.record()
                turn = (turn + 1) % SETS
                function(*inputs[turn])
            end.record()
            torch.cuda.synchronize()
            if measurement > 0:  # the first warms up
                times.setdefault(name, []).append(begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return list(times.items())


if not torch.cuda.is_available():
    sys.exit("PyTorch finds no GPU")
results = {}
for work in sys.argv[1:]:
    op, rows, columns = work.split()
    with torch.no_grad():
        results[work] = measure(op, int(rows), int(columns))
    torch.cuda.empty_cache()
print(json.dumps(results))
