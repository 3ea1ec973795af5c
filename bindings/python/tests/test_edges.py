"""What was wrong once: values, errors and ends that surprise."""

import signal

import numpy as np
import pytest
import vmaccel as va


@pytest.mark.parametrize("span", [3 * 2**61, 2**63 - 1, 3 * 2**29, 7])
def test_integers_are_of_equal_chance(span):
    drawn = np.asarray(va.random.integers(0, span, 200_000)).astype(float) / span
    assert abs(drawn.mean() - (1 - 1 / span) / 2) < 0.01 and drawn.min() >= 0 and drawn.max() < 1
    thirds = np.histogram(drawn, bins=[0, 1 / 3, 2 / 3, 1])[0] / len(drawn)
    assert span == 7 or np.abs(thirds - 1 / 3).max() < 0.01


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_random_numbers_are_below_1(dtype):
    drawn = va.random.random(1 << 18, dtype=dtype)._astype("float64")
    assert 0 <= drawn.min().item() and drawn.max().item() < 1 and abs(drawn.mean().item() - 0.5) < 0.01


class Long:
    """A sequence that says that it is longer than any."""

    def __len__(self):
        return 2**62

    def __getitem__(self, at):
        return 1


REFUSED = {
    "integers beyond their type": (ValueError, lambda: va.random.integers(-5, 5, 10, dtype="uint8")),
    "integers one beyond": (ValueError, lambda: va.random.integers(0, 257, 10, dtype="uint8")),
    "integers of a float's type": (TypeError, lambda: va.random.integers(0, 5, 10, dtype="float32")),
    "random integers in [0, 1)": (TypeError, lambda: va.random.random(3, dtype="int32")),
    "a whole number's negative power": (ValueError, lambda: va.arange(4) ** -1),
    "the same by its name": (ValueError, lambda: va.pow(va.arange(4), -2)),
    "a shape without an end": (ValueError, lambda: va.zeros(range(2**62))),
    "a shape that says so": (ValueError, lambda: va.zeros(Long())),
    "a new shape": (ValueError, lambda: va.ones(3).reshape(range(2**62))),
    "axes": (ValueError, lambda: va.ones(3).sum(axis=Long())),
    "an extent beyond 64 bits": (ValueError, lambda: va.zeros(2**63)),
    "numpy's array on the right": (TypeError, lambda: va.ones(2) + np.ones(2)),
    "numpy's array on the left": (TypeError, lambda: np.ones(2) + va.ones(2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    error, call = REFUSED[name]
    with pytest.raises(error) as raised:
        call()
    if "numpy" in name:
        assert "asarray" in str(raised.value)


VALUES = {
    "a long step": (lambda a: a[:: 2**63 - 1], lambda a: a[:: 2**63 - 1]),
    "a long step back": (lambda a: a[:: -(2**62)], lambda a: a[:: -(2**62)]),
    "steps of steps": (lambda a: a[:: 2**40][:: 2**40], lambda a: a[:: 2**40][:: 2**40]),
    "infinite over finite": (lambda a: (a + 1.0) / 0.0 // 2.0, lambda a: np.full(9, np.inf)),
    "finite over infinite": (lambda a: (a + 1.0) // float("inf"), lambda a: (a + 1.0) // np.inf),
    "modulo infinite": (lambda a: (a - 4.0) % float("inf"), lambda a: (a - 4.0) % np.inf),
    "a scalar of numpy's": (lambda a: np.int64(2) * a, lambda a: 2 * a),
    "one of another type": (lambda a: a * np.float32(0.5), lambda a: a * 0.5),
    "negative powers of arrays": (lambda a: va.asarray([2, 1, -1, -1]) ** va.asarray([-1, -2, -3, -2]), lambda a: np.array([0, 1, -1, 1])),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    ours, theirs = VALUES[name]
    np.testing.assert_array_equal(np.asarray(ours(va.arange(9))), theirs(np.arange(9)))


@va.kernel
def endless(x: va.InOut[va.float32]):
    i = va.thread_id()
    while x[i] >= 0:
        x[i] = x[i] + 1 if x[i] < 2 else 1.0


@pytest.mark.skipif(va.default_device().backend != "cpu", reason="it ends by the processor's deadline")
def test_a_deadline_is_told_after_a_signal():
    def handler(*_):
        raise RuntimeError("a signal")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        x = va.zeros(4, dtype="float32")
        endless[4](x)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(RuntimeError, match="a signal"):
            x.tolist()
        with pytest.raises(TimeoutError):
            x.tolist()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert va.ones(3).sum().item() == 3


@pytest.mark.parametrize(("a", "b"), [(256, 0), (-1, 0), (1.5, 0), (0, 2**63), (0, 2.5)])
def test_parameters_take_what_they_can_be(a, b):
    @va.kernel
    def both(y: va.Out[va.int64], a: va.uint8, b: int):
        y[0] = a + b

    with pytest.raises((OverflowError, TypeError)):
        both[1](va.zeros(1, dtype="int64"), a, b)


def test_what_was_shut_down_says_so():
    code = """
import vmaccel as va
va.init("cpu"); a = va.ones(3); va.shutdown(); va.init("cpu")
try:
    a + va.ones(3)
except va.DeviceError as error:
    print("shut down" in str(error))
"""
    import subprocess
    import sys

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout == "True\n"
