"""The life of arrays and devices: memory, errors, signals, processes, threads."""

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import vmaccel as va

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


def test_arrays_that_are_dropped_leave_the_devices_memory_as_it_was():
    device = va.default_device()
    keep = va.ones((100, 100)).evaluate()
    for _ in range(10):
        (keep + 1).evaluate()
    va.synchronize()
    gc.collect()
    before, free = device.in_use, device.memory[0]
    for at in range(10_000):
        (keep * float(at)).evaluate()
    va.synchronize()
    gc.collect()
    assert device.in_use == before
    assert free - device.memory[0] < 1 << 30, "10,000 arrays of 80 kB would be 800 MB, and as much for slack"


def test_del_frees_in_order():
    device = va.default_device()
    before = device.in_use
    a = va.ones((500, 500), dtype="float32").evaluate()
    for _ in range(20):
        a = (a @ a * 0.002).evaluate()
    b = a + 0
    b.evaluate()
    del a
    assert np.allclose(np.asarray(b), 1)
    del b
    gc.collect()
    assert device.in_use == before


def test_views_keep_what_they_are_of():
    device = va.default_device()
    before = device.in_use
    view = va.arange(1 << 16, dtype="int64").evaluate()[5:7]
    view.evaluate()
    gc.collect()
    assert device.in_use[1] == before[1] + 1 and view.tolist() == [5, 6]


def test_out_of_memory_is_memory_error_and_the_device_goes_on():
    for _ in range(3):
        with pytest.raises(MemoryError):
            va.empty(2**39, dtype="float64").evaluate()
        with pytest.raises(MemoryError):
            (va.ones((2**20, 1)) * va.ones((1, 2**19))).evaluate()
        assert (va.ones(3) + 1).tolist() == [2, 2, 2]


# Whoever runs the tests may ignore signals.
SLOW = """
import os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import vmaccel as va
va.init("cpu")
def slow():
    x = va.ones((1200, 1200), dtype="float32").evaluate()
    for _ in range(60): x = (x @ x * 1e-4).evaluate()
    return x
x = slow()
"""


# What is waited for goes on, so the wait that comes after sees its end.
@pytest.mark.parametrize("wait", ["va.synchronize()", "x[0, 0].item()", "x.tobytes()", "float(x[0, 0])", "x.tolist()", "x.__array__()", "x.__dlpack__()"])
@pytest.mark.skipif("va.default_device().backend != 'cpu'", reason="the work is long on the processor only")
def test_a_signal_ends_a_wait_and_the_work_goes_on(wait):
    code = SLOW + (
        "sent = []\n"
        "def send(): sent.append(time.monotonic()); os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Timer(0.2, send).start()\n"
        "try:\n"
        f"    {wait}\n"
        "    print('ended', len(sent))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', time.monotonic() - sent[0] < 5)\n"
        "va.synchronize()\n"
        "print((va.ones(3) + 1).tolist(), x.shape)\n"
    )
    ended = run(code)
    assert ended.stdout.splitlines() == ["interrupted True", "[2.0, 2.0, 2.0] (1200, 1200)"], ended


@posix
def test_a_forked_child_may_drop_what_its_parent_had_and_use_a_device_of_its_own():
    ended = run(
        "import os, gc, vmaccel as va, numpy as np\n"
        "va.init('cpu'); a = va.ones(3).evaluate(); lazy = a + 1; seen = np.asarray(a); capsule = a.__dlpack__()\n"
        "theirs = va.from_dlpack(np.zeros(5)); views = [a[1:] for _ in range(100)]\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for use in (lambda: a.sum().item(), lambda: lazy.evaluate(), lambda: np.asarray(a), lambda: a.__dlpack__(), lambda: va.from_dlpack(a, copy=True).evaluate()):\n"
        "        try: use()\n"
        "        except va.DeviceError as error: assert 'forked' in str(error), error\n"
        "        else: os._exit(9)\n"
        "    assert seen.tolist() == [1, 1, 1]\n"
        "    del a, lazy, seen, capsule, theirs, views; gc.collect()\n"
        "    va.init('cpu')\n"
        "    os._exit(7 if va.ones(4).sum().item() == 4 else 8)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), a.sum().item(), lazy.tolist())\n"
    )
    assert ended.stdout.split(maxsplit=2) == ["7", "3.0", "[2.0, 2.0, 2.0]\n"], ended


@posix
def test_a_forked_child_ends_by_itself():
    ended = run(
        "import os, sys, vmaccel as va\n"
        "va.init('cpu'); a = va.ones(3).evaluate()\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), a.sum().item())\n"
    )
    assert ended.stdout.split() == ["5", "3.0"], ended


def test_processes_are_spawned(tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing, vmaccel as va\n"
        "def work(n):\n"
        "    va.init('cpu')\n"
        "    return va.arange(n).sum().item()\n"
        "if __name__ == '__main__':\n"
        "    va.init('cpu'); a = va.ones(3).evaluate()\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
        "        print(pool.map(work, [3, 4, 5]), a.sum().item())\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "[3, 6, 10] 3.0\n", ended


def test_what_is_used_behind_the_end_of_its_device_says_so():
    ended = run(
        "import numpy as np, vmaccel as va\n"
        "va.init('cpu'); a = va.ones(3).evaluate(); lazy = a + 1; host = np.arange(3.0); theirs = va.from_dlpack(host)\n"
        "seen = np.asarray(a); capsule = (a + 2).__dlpack__()\n"
        "va.shutdown(); va.shutdown()\n"
        "class Late:\n"
        "    __dlpack_device__ = lambda self: (1, 0)\n"
        "    __dlpack__ = lambda self, **more: capsule\n"
        "for use in (lambda: a.tolist(), lambda: lazy.evaluate(), lambda: np.asarray(theirs), lambda: a.__dlpack__(), lambda: (a + 1).tolist()):\n"
        "    try: use()\n"
        "    except va.DeviceError as error: assert 'was shut down' in str(error), error\n"
        "    else: raise SystemExit('it worked')\n"
        "del a, lazy, theirs\n"
        "va.init('cpu')\n"
        "print(va.ones(2).tolist(), seen.tolist(), va.from_dlpack(Late()).tolist())\n"
    )
    assert ended.stdout == "[1.0, 1.0] [1.0, 1.0, 1.0] [3.0, 3.0, 3.0]\n", ended


def test_threads_share_a_device_and_what_others_own():
    host = np.random.default_rng(1).random((60, 50))
    failed = []

    def work(seed):
        try:
            for at in range(15):
                theirs = va.from_dlpack(host[seed:, :], device="cpu")
                found = np.asarray((theirs * 2 + at).sum(axis=0))
                if not np.allclose(found, (host[seed:] * 2 + at).sum(0)):
                    failed.append((seed, at))
                shared = np.from_dlpack(theirs)
                if shared.__array_interface__["data"] != (host[seed:].__array_interface__["data"][0], True):
                    failed.append((seed, "copied"))
        except Exception as error:  # noqa: BLE001
            failed.append((seed, error))

    before = sys.getrefcount(host)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(32)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert not failed
    del threads
    gc.collect()
    for _ in range(1000):
        va.synchronize("cpu")
        if sys.getrefcount(host) == before:
            break
    assert sys.getrefcount(host) == before


def test_owners_are_let_go_by_the_interpreter_without_another_call():
    host = np.zeros(10)
    before = sys.getrefcount(host)
    here = va.from_dlpack(host, device="cpu")
    (here + 1).tolist()
    del here
    deadline = time.monotonic() + 60
    while sys.getrefcount(host) != before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sys.getrefcount(host) == before


def test_streams_use_what_others_compute():
    device = va.default_device()
    before = device.in_use
    x = va.arange(1 << 12, dtype="float64")
    expect = np.arange(1 << 12, dtype="float64")
    for at in range(6):
        with va.stream() as a:
            left = va.sqrt(x) + at
            parts = left.reshape((64, 64)).sum(axis=0)
            assert left.device == device and a.device == device
        with va.stream() as b:
            right = (x * 0.5)[::-1] + parts.sum() * 0
            right += left
            ordered = va.sort(right)
            with va.device(b.device):
                ordered = ordered + va.zeros(1, dtype="float64")
        x = ordered @ va.eye(1 << 12, dtype="float64")[:, : 1 << 12] if at == 0 else ordered
        expect = np.sort((expect * 0.5)[::-1] + np.sqrt(expect) + at)
        a.synchronize()
    assert np.allclose(np.asarray(x), expect)
    assert "stream" in repr(a)
    kernel_input = va.ones(100, dtype="float32")
    with va.stream():
        assert va.concat([kernel_input, va.zeros(3, dtype="float32")]).sum() == 100
        assert np.asarray(kernel_input).sum() == 100
        assert float(va.random.Generator(3).random((10,)).max()) < 1
    del x, left, right, parts, ordered, kernel_input
    va.synchronize()
    gc.collect()
    assert device.in_use == before


def test_threads_have_streams_and_devices_of_their_own():
    given = va.ones((300, 300), dtype="float32").evaluate()
    wrong = []

    def work(at):
        try:
            with va.stream() as stream:
                x = given
                for _ in range(10):
                    x = (x @ given) * (1 / 300)
                y = x + at
                stream.synchronize()
            with va.device("cpu") as cpu:
                assert va.zeros(1).device == cpu
            results[at] = y
        except Exception as error:  # noqa: BLE001
            wrong.append(error)

    results = {}
    threads = [threading.Thread(target=work, args=(at,)) for at in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for at, result in results.items():
        assert np.allclose(np.asarray(result + given), at + 2, rtol=1e-4)


def test_a_device_is_shut_down_while_streams_have_work():
    done = run("import vmaccel as va, sys\nva.init(sys.argv[1])\nwith va.stream():\n x = va.ones((400, 400), dtype='float32')\n for _ in range(30): x = x @ x * .0025\n x.evaluate()\ny = (x + 1).evaluate()\nva.shutdown()\ntry: print(y.sum())\nexcept va.DeviceError as error: print('error', error)\nva.init(sys.argv[1])\nprint(va.ones(3).sum())", os.environ.get("VMACCEL_DEVICE", "cpu"))  # fmt: skip
    assert done.returncode == 0 and "error" in done.stdout and done.stdout.endswith("3.\n"), done
