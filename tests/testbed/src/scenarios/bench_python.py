"""Times functions of arrays; says seconds as JSON: by name, one for each round."""

import json
import sys
import time

import vmaccel as va

ROUNDS = 7
device = va.init()
n = 1 << 26
a, b, c = (va.random.random(n, dtype="float32").evaluate() for _ in range(3))
print("arrays are made", file=sys.stderr, flush=True)
x, y = a[:1000] + 0.0, b[:1000] + 0.0
rows = a[: 1 << 24].reshape(1 << 12, 1 << 12)


def chain():
    """Eight functions of elements."""
    v = a * b + c
    v = v * b - c
    v = v * a + b
    (v * 0.5 + 1.0).evaluate()


def small():
    for _ in range(200):
        (x + y).evaluate()


CASES = {
    "chain of 8 functions, 2^26 f32": chain,
    "sum, 2^26 f32": lambda: a.sum().evaluate(),
    "softmax of rows, 2^24 f32": lambda: rows.softmax().evaluate(),
    "200 of a + b, 1000 f32": small,
}

seconds = {name: [] for name in CASES}
for at in range(ROUNDS + 1):
    for name, run in CASES.items():
        va.synchronize()
        since = time.perf_counter()
        run()
        va.synchronize()
        print(f"round {at}: {name}: {time.perf_counter() - since:.3f} s", file=sys.stderr, flush=True)
        # In the first round kernels are compiled.
        if at:
            seconds[name].append(round(time.perf_counter() - since, 6))
print(json.dumps({"device": device.backend, "seconds": seconds}))
