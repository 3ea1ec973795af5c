"""What the package promises beside values: errors, processes, threads, memory."""

import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

import vmaccel as va


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (lambda: va.zeros(2) + va.zeros(3), ValueError, "broadcast"),
        (lambda: va.zeros(3)[5], IndexError, "out of bounds"),
        (lambda: va.zeros(3)[0, 0], IndexError, "too many indices"),
        (lambda: va.zeros(3).reshape(4), ValueError, "reshape"),
        (lambda: va.asarray([[1], [1, 2]]), ValueError, "length"),
        (lambda: va.asarray("text"), TypeError, "can't be made"),
        (lambda: va.zeros(3) + "x", TypeError, "unsupported"),
        (lambda: va.asarray([1], dtype="int8") + 300, OverflowError, "out of bounds"),
        (lambda: va.zeros((2, 3)) @ va.zeros((2, 3)), ValueError, "matmul"),
        (lambda: bool(va.zeros(2)), ValueError, "ambiguous"),
        (lambda: va.max(va.zeros(0)), ValueError, "identity"),
        (lambda: va.asarray([1j]) < va.asarray([1j]), TypeError, "complex128"),
        (lambda: va.init("nothing"), va.DeviceError, "names no accelerator"),
        (lambda: va.zeros(2**45), ValueError, "elements"),
    ],
)
def test_errors_say_what_is_wrong(act, error, text):
    with pytest.raises(error, match=text):
        act()


def test_the_interpreter_lives_where_memory_ends():
    with pytest.raises(MemoryError):
        va.empty(2**39, dtype="float64").evaluate()
    assert va.ones(3).sum().item() == 3


def test_kernels_are_compiled_once_for_shapes_of_a_class():
    x = va.ones(1000, dtype="float32")
    (x * 3 + 2).evaluate()
    before = va.default_device().kernels
    for n in (999, 2000, 31):
        (va.ones(n, dtype="float32").evaluate() * 5 + 7).evaluate()
    after = va.default_device().kernels
    (va.ones(77, dtype="float32").evaluate() * 5 + 7).evaluate()
    assert va.default_device().kernels == after
    assert after - before <= 3


def test_threads_share_a_device():
    failed = []

    def work(seed):
        x = np.random.default_rng(seed).random((20, 30))
        for _ in range(20):
            found = np.asarray((va.asarray(x) * 2 + 1).sum(axis=0))
            if not np.allclose(found, (x * 2 + 1).sum(0)):
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(32)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert not failed


def test_arrays_are_pickled_and_copied():
    a = va.asarray(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(a))), np.asarray(a))
    b = a.copy()
    b[0] = 9
    assert a[0, 0].item() == 0


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_a_forked_child_is_told():
    ended = run(
        "import os, vmaccel as va\n"
        "va.init('cpu'); a = va.ones(3).evaluate()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: a.sum().item()\n"
        "    except va.DeviceError as error: os._exit(7 if 'forked' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), a.sum().item())\n"
    )
    assert ended.stdout.split() == ["7", "3.0"], ended


def test_a_process_ends_with_work_under_way():
    ended = run("import vmaccel as va\nva.init('cpu')\nx = va.ones((400, 400), dtype='float32')\nfor _ in range(50): x = (x @ x).evaluate()\n")
    assert ended.returncode == 0, ended


def test_memory_is_freed():
    def resident():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    a = va.ones((1000, 1000)).evaluate()
    before = resident()
    for _ in range(300):
        a = (a * 1.0).evaluate()
    va.synchronize()
    held = resident() - before
    assert held < 500_000, f"{held} KiB are held"


def test_the_import_takes_no_numpy():
    assert run("import sys, vmaccel; sys.exit('numpy' in sys.modules)").returncode == 0


_ = os
