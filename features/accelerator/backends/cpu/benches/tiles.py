"""The peers of the bench beside this file: numpy with its BLAS, and PyTorch.

Called as `tiles.py numpy|torch gemm M N K THREADS`, or `tiles.py torch attention HEADS ROWS DIM THREADS`, of full attention. For each line
on its input it does the work once and prints the seconds it took. The first line that it prints says what it is.
"""

import sys
import time

# This folder has a file with a library's name: look for that elsewhere.
sys.path = sys.path[1:]


def numpy(work, sizes):
    import numpy as np

    m, n, k = sizes
    random = np.random.default_rng(1)
    a, b = (random.uniform(-1, 1, size).astype(np.float32) for size in [(m, k), (k, n)])
    c = np.empty((m, n), np.float32)
    return f"numpy {np.__version__}", lambda: np.matmul(a, b, out=c)


def pytorch(work, sizes, threads):
    import torch

    torch.set_num_threads(threads)
    name = f"PyTorch {torch.__version__}"
    if work == "gemm":
        m, n, k = sizes
        a, b, c = (torch.rand(size) * 2 - 1 for size in [(m, k), (k, n), (m, n)])
        return name, lambda: torch.mm(a, b, out=c)
    heads, rows, dim = sizes
    q, k, v = (torch.rand(1, heads, rows, dim) * 2 - 1 for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention

    def run():
        with torch.no_grad():
            attention(q, k, v)

    return name, run


def main():
    peer, work = sys.argv[1:3]
    *sizes, threads = map(int, sys.argv[3:])
    name, run = numpy(work, sizes) if peer == "numpy" else pytorch(work, sizes, threads)
    print(name, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


main()
