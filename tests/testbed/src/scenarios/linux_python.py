"""What a guest's user does: arrays on the host's accelerator, beside numpy's on the guest's processor."""

import time

since = time.monotonic()
import numpy as np

print(f"numpy {np.__version__} is imported in {time.monotonic() - since:.1f} s")
since = time.monotonic()
import vmaccel as va

print(f"vmaccel {va.__version__} is imported in {time.monotonic() - since:.1f} s")
device = va.init()
assert va.default_device() == device and device.backend == "guest", device
print(f"the accelerator that the host shares is the default: {device}")


def timed(what, run, expect, tolerance=0.0):
    since = time.monotonic()
    found = np.asarray(run())
    took = time.monotonic() - since
    np.testing.assert_allclose(found, expect, rtol=tolerance, atol=tolerance)
    print(f"{what} is numpy's, in {took:.2f} s")


random = np.random.default_rng(0)
x, w, bias = (random.normal(size=shape).astype(np.float32) for shape in ((48, 32), (32, 40), (40,)))
a, b, c = va.to_device(x), va.to_device(w), va.to_device(bias)
logits = x @ w + bias
weights = np.exp(logits - logits.max(-1, keepdims=True))
timed("(a @ b + c).softmax()", lambda: (a @ b + c).softmax(), weights / weights.sum(-1, keepdims=True), 1e-5)
timed("a sum along an axis", lambda: a.sum(axis=0), x.sum(0), 1e-5)
timed("a sort", lambda: va.sort(a, axis=1), np.sort(x, axis=1))


@va.kernel
def collatz(steps: va.Out[va.int32], start: va.In[va.int64]):
    i = va.thread_id()
    n, count = start[i], 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        count += 1
    steps[i] = count


def steps(n):
    count = 0
    while n != 1:
        n, count = n // 2 if n % 2 == 0 else 3 * n + 1, count + 1
    return count


def own():
    result = va.zeros(100, dtype="int32")
    collatz[100](result, va.arange(1, 101))
    return result


timed("a kernel of the guest's own", own, [steps(n) for n in range(1, 101)])

try:
    va.empty(2**40, dtype="uint8").evaluate()
    raise SystemExit("a terabyte of 64 MB was given")
except MemoryError as error:
    print(f"the host's refusal is a MemoryError: {error}")
timed("what comes behind it", lambda: a + 1, x + 1)


@va.kernel
def endless(x: va.InOut[va.float32, 2]):
    while x[0, 0] == x[0, 0]:
        x[0, 0] += 1.0


endless[1](a)
since = time.monotonic()
try:
    np.asarray(a)
    raise SystemExit("an endless kernel ended")
except (va.DeviceError, TimeoutError) as error:
    print(f"an endless kernel is a {type(error).__name__} after {time.monotonic() - since:.1f} s: {error}")
