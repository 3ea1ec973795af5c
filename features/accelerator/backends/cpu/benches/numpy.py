"""The peer of the bench beside this file: numpy at its best, without temporaries of its own.

Called as `numpy.py silu|softmax ROWS COLUMNS THREADS`. For each line on its input it does the work once and prints the
seconds it took; the threads each take their share of the rows (numpy lets them run at once).
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

# This file has the library's name: look for that elsewhere.
sys.path = sys.path[1:]
import numpy as np


def silu(x, y, t):
    np.negative(x, out=t)
    np.exp(t, out=t)
    np.add(t, np.float32(1), out=t)
    np.divide(x, t, out=y)


def softmax(x, y, t):
    np.subtract(x, np.max(x, axis=1, keepdims=True), out=t)
    np.exp(t, out=t)
    np.divide(t, np.sum(t, axis=1, keepdims=True), out=y)


def main():
    work = {"silu": silu, "softmax": softmax}[sys.argv[1]]
    rows, columns, threads = map(int, sys.argv[2:])
    x = np.random.default_rng(1).uniform(-8, 8, (rows, columns)).astype(np.float32)
    y, t = np.empty_like(x), np.empty_like(x)
    # As many rows at a time as stay in a core's cache.
    step = max(1, (1 << 18) // (columns * 4))

    def share(number):
        for at in range(rows * number // threads, rows * (number + 1) // threads, step):
            end = min(at + step, rows * (number + 1) // threads)
            work(x[at:end], y[at:end], t[at:end])

    with ThreadPoolExecutor(threads) as pool:
        for _ in sys.stdin:
            start = time.perf_counter()
            list(pool.map(share, range(threads)))
            print(time.perf_counter() - start, flush=True)


main()
