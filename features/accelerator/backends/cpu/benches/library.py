"""The peers of the bench beside this file: numpy at its best, without temporaries of its own, and PyTorch.

Called as `library.py numpy|torch WORK ELEMENT THREADS SIZE...`. For each line on its input it does the work once and prints the
seconds that took. The first line that it prints says what it is; that is empty where there is no such peer. Of numpy the threads each
take their share of the rows (it lets them run at once), as many at a time as stay in a core's cache.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

# This folder has a file with a library's name: look for that elsewhere.
sys.path = sys.path[1:]


def by_numpy(work, element, threads, sizes):
    import numpy as np

    if element in ("bf16", "f16"):
        return None
    random = np.random.default_rng(1)
    f32 = lambda *shape: random.uniform(-1, 1, shape).astype(np.float32)
    one = np.float32(1)

    def sigmoid(x, t):
        np.negative(x, out=t)
        np.exp(t, out=t)
        np.add(t, one, out=t)

    def silu(x, y, t):
        sigmoid(x, t)
        np.divide(x, t, out=y)

    def swiglu(x, u, y, t):
        sigmoid(x, t)
        np.divide(x, t, out=t)
        np.multiply(t, u, out=y)

    def gelu_tanh(x, y, t):
        np.multiply(x, x, out=t)
        np.multiply(t, np.float32(0.044715), out=t)
        np.add(t, one, out=t)
        np.multiply(t, x, out=t)
        np.multiply(t, np.float32(0.7978845608), out=t)
        np.tanh(t, out=t)
        np.add(t, one, out=t)
        np.multiply(t, x, out=t)
        np.multiply(t, np.float32(0.5), out=y)

    def tanh(x, y, t):
        np.tanh(x, out=y)

    def add(x, u, y, t):
        np.add(x, u, out=y)

    def softmax(x, y, t):
        np.subtract(x, np.max(x, axis=1, keepdims=True), out=t)
        np.exp(t, out=t)
        np.divide(t, np.sum(t, axis=1, keepdims=True), out=y)

    def rmsnorm(x, w, y, t):
        np.multiply(x, x, out=t)
        r = one / np.sqrt(np.mean(t, axis=1, keepdims=True) + np.float32(1e-5))
        np.multiply(x, r, out=t)
        np.multiply(t, w, out=y)

    def layernorm(x, w, y, t):
        np.subtract(x, np.mean(x, axis=1, keepdims=True), out=y)
        np.multiply(y, y, out=t)
        r = one / np.sqrt(np.mean(t, axis=1, keepdims=True) + np.float32(1e-5))
        np.multiply(y, r, out=t)
        np.multiply(t, w, out=y)

    def cross_entropy(x, targets, t):
        top = np.max(x, axis=1, keepdims=True)
        np.subtract(x, top, out=t)
        np.exp(t, out=t)
        return np.log(np.sum(t, axis=1)) + top[:, 0] - np.take_along_axis(x, targets[:, None], 1)[:, 0]

    def adamw(p, g, m, v, t):
        np.multiply(m, np.float32(0.9), out=m)
        np.multiply(g, np.float32(0.1), out=t)
        np.add(m, t, out=m)
        np.multiply(v, np.float32(0.999), out=v)
        np.multiply(g, g, out=t)
        np.multiply(t, np.float32(0.001), out=t)
        np.add(v, t, out=v)
        np.multiply(p, np.float32(0.99999), out=p)
        np.sqrt(v, out=t)
        np.add(t, np.float32(1e-8), out=t)
        np.divide(m, t, out=t)
        np.multiply(t, np.float32(1e-3), out=t)
        np.subtract(p, t, out=p)

    def argmax(x, y):
        np.argmax(x, axis=1, out=y)

    def topk(x):
        k = sizes[2]
        best = np.argpartition(x, -k, axis=1)[:, -k:]
        values = np.take_along_axis(x, best, 1)
        order = np.argsort(-values, axis=1)
        return np.take_along_axis(values, order, 1), np.take_along_axis(best, order, 1)

    def topp(x, t):
        np.subtract(x, np.max(x, axis=1, keepdims=True), out=t)
        np.exp(t, out=t)
        np.divide(t, np.sum(t, axis=1, keepdims=True), out=t)
        for row in t:
            order = np.argsort(-row)
            mass = np.cumsum(row[order])
            last = np.searchsorted(mass, np.float32(0.9))
            order[np.searchsorted(mass, np.float32(0.4) * mass[last])]

    def sample(x, t):
        np.subtract(x, np.max(x, axis=1, keepdims=True), out=t)
        np.exp(t, out=t)
        np.cumsum(t, axis=1, out=t)
        for row in t:
            np.searchsorted(row, np.float32(0.4) * row[-1])

    def embedding(indices, y):
        np.take(table, indices, axis=0, out=y, mode="clip")

    def scan(x, y):
        np.cumsum(x.reshape(-1, 256), axis=1, out=y.reshape(-1, 256), dtype=np.int32)

    rows, columns = sizes[:2]
    shape = (rows, columns)
    wide = lambda count: [f32(*shape) for _ in range(count)] + [np.empty(shape, np.float32) for _ in range(2)]
    shared = ()
    if work in ("silu", "gelu_tanh", "tanh", "softmax"):
        arrays = wide(1)
    elif work in ("add", "swiglu"):
        arrays = wide(2)
    elif work in ("rmsnorm", "layernorm"):
        x, y, t = wide(1)
        arrays = [x, y, t]
        weight = f32(columns)
    elif work == "cross_entropy":
        arrays = [f32(*shape), random.integers(0, columns, rows), np.empty(shape, np.float32)]
    elif work == "adamw":
        arrays = wide(4)[:5]
        arrays[3] = np.abs(arrays[3])
    elif work == "argmax":
        arrays = [f32(*shape), np.empty(rows, np.int64)]
    elif work == "topk":
        arrays = [f32(*shape) * 8]
    elif work in ("topp", "sample"):
        arrays = [f32(*shape) * 8, np.empty(shape, np.float32)]
    elif work == "embedding":
        table = f32(sizes[2], columns)
        arrays = [random.integers(0, sizes[2], rows), np.empty(shape, np.float32)]
    elif work == "scan":
        arrays = [random.integers(-100, 100, shape, dtype=np.int32), np.empty(shape, np.int32)]
    elif work == "transpose":
        x, y = f32(*shape), np.empty((columns, rows), np.float32)
        bounds = [rows * i // threads for i in range(threads + 1)]
        return f"numpy {np.__version__}", lambda i: np.copyto(
            y[:, bounds[i] : bounds[i + 1]], x[bounds[i] : bounds[i + 1]].T
        )
    elif work == "batched":
        m, n, k = sizes[1:]
        a, b, c = f32(rows, m, k), f32(rows, k, n), np.empty((rows, m, n), np.float32)
        bounds = [rows * i // threads for i in range(threads + 1)]
        return f"numpy {np.__version__}", lambda i: np.matmul(
            a[bounds[i] : bounds[i + 1]], b[bounds[i] : bounds[i + 1]], out=c[bounds[i] : bounds[i + 1]]
        )
    elif work == "line":
        # A product of one row or column; numpy shares it out among threads by itself.
        a, b, y = f32(rows, sizes[2]), f32(sizes[2], columns), np.empty(rows * columns, np.float32)
        left, right = (a[0], b) if rows == 1 else (a, b[:, 0].copy())
        return f"numpy {np.__version__}", lambda i: i or np.matmul(left, right, out=y)
    else:
        return None
    run = locals()[work]
    if work in ("rmsnorm", "layernorm"):
        inner = run
        run = lambda x, y, t: inner(x, weight, y, t)
    step = max(1, (1 << 18) // (columns * 4))

    def share(number):
        for at in range(rows * number // threads, rows * (number + 1) // threads, step):
            end = min(at + step, rows * (number + 1) // threads)
            run(*(array[at:end] for array in arrays))

    return f"numpy {np.__version__}", share


def by_torch(work, element, threads, sizes):
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    ty = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}.get(element, torch.float32)
    rows, columns = sizes[:2]
    of = lambda *shape: (torch.rand(shape) * 2 - 1).to(ty)
    x, u = of(rows, columns), of(rows, columns)
    y = torch.empty_like(x)
    weight = of(columns)
    targets = torch.randint(0, columns, (rows,))

    def topp(x):
        probabilities = torch.softmax(x.float(), -1)
        ordered, order = probabilities.sort(-1, descending=True)
        mass = ordered.cumsum(-1)
        ordered[mass - ordered > 0.9] = 0
        order.gather(1, torch.multinomial(ordered, 1))

    works = {
        "silu": lambda: torch.ops.aten.silu.out(x, out=y),
        "gelu": lambda: torch.ops.aten.gelu.out(x, out=y),
        "gelu_tanh": lambda: torch.ops.aten.gelu.out(x, approximate="tanh", out=y),
        "tanh": lambda: torch.tanh(x, out=y),
        "add": lambda: torch.add(x, u, out=y),
        "swiglu": lambda: torch.mul(F.silu(x), u, out=y),
        "softmax": lambda: torch.softmax(x, -1, out=y),
        "log_softmax": lambda: torch.log_softmax(x, -1, out=y),
        "rmsnorm": lambda: F.rms_norm(x, (columns,), weight, 1e-5),
        "layernorm": lambda: F.layer_norm(x, (columns,), weight, None, 1e-5),
        "cross_entropy": lambda: F.cross_entropy(x, targets),
        "argmax": lambda: torch.argmax(x, -1),
    }
    if work == "cast":
        z = torch.empty((rows, columns), dtype=torch.bfloat16 if element == "f32" else torch.float32)
        run = lambda: z.copy_(x)
    elif work == "adamw":
        m, v, step = of(rows, columns), of(rows, columns).abs(), torch.tensor(1.0)
        y.copy_(x)
        run = lambda: torch._fused_adamw_(
            [y], [u], [m], [v], [], [step],
            amsgrad=False, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, maximize=False,
        )
    elif work == "topk":
        x *= 8
        run = lambda: torch.topk(x, sizes[2])
    elif work == "topp":
        x *= 8
        run = lambda: topp(x)
    elif work == "sample":
        x *= 8
        run = lambda: torch.multinomial(torch.softmax(x.float(), -1), 1)
    elif work == "embedding":
        table, indices = of(sizes[2], columns), torch.randint(0, sizes[2], (rows,))
        run = lambda: torch.index_select(table, 0, indices, out=y)
    elif work == "transpose":
        z = torch.empty((columns, rows), dtype=ty)
        run = lambda: z.copy_(x.T)
    elif work == "batched":
        m, n, k = sizes[1:]
        a, b, c = of(rows, m, k), of(rows, k, n), torch.empty((rows, m, n), dtype=ty)
        run = lambda: torch.bmm(a, b, out=c)
    elif work == "line":
        a, b, y = of(rows, sizes[2]), of(sizes[2], columns), torch.empty(rows * columns, dtype=ty)
        left, right = (a[0], b) if rows == 1 else (a, b[:, 0].clone())
        run = lambda: torch.matmul(left, right, out=y)
    elif work == "scan":
        s = torch.randint(-100, 100, (rows * columns // 256, 256), dtype=torch.int32)
        z = torch.empty_like(s)
        run = lambda: torch.cumsum(s, 1, out=z, dtype=torch.int32)
    else:
        run = works.get(work)
    return run and (f"PyTorch {torch.__version__.split('+')[0]}", run)


def main():
    peer, work, element = sys.argv[1:4]
    threads, *sizes = map(int, sys.argv[4:])
    made = (by_numpy if peer == "numpy" else by_torch)(work, element, threads, sizes)
    print(made[0] if made else "", flush=True)
    if not made:
        return
    run = made[1]
    with ThreadPoolExecutor(threads) as pool:
        for _ in sys.stdin:
            start = time.perf_counter()
            if peer == "torch":
                run()
            elif threads == 1:
                run(0)
            else:
                list(pool.map(run, range(threads)))
            print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        import torch

        torch.set_grad_enabled(False)
    main()
