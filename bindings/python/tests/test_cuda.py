"""Arrays on CUDA devices beside PyTorch and CuPy. `VMACCEL_DEVICE=cuda:0` runs all other tests there, too."""

import subprocess
import sys

import numpy as np
import pytest

import vmaccel as va

try:
    va.init("cuda:0")
except va.DeviceError as error:
    pytest.skip(f"there is no CUDA device: {error}", allow_module_level=True)


@pytest.fixture(autouse=True)
def here():
    with va.device("cuda:0") as device:
        yield device


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def test_the_device_says_where_it_is(here):
    a = va.arange(6, dtype="float32").reshape(2, 3)
    assert a.__dlpack_device__() == (2, 0) and here.stream_handle
    said = a.T.__cuda_array_interface__
    assert said["shape"] == (3, 2) and said["strides"] == (4, 12) and said["typestr"] == "<f4" and said["version"] == 3
    assert said["stream"] == here.stream_handle and not said["data"][1]
    with pytest.raises(ValueError, match="stream"):
        a.__dlpack__(stream=0)
    with pytest.raises(ValueError, match="copied"):
        np.asarray(a, copy=False)
    assert np.from_dlpack(a, device="cpu").tolist() == a.tolist() if np.__version__ >= "2.1" else True


@pytest.mark.parametrize("name", ["bool", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_torch_shares_memory(torch, name):
    theirs = (torch.arange(24, device="cuda").reshape(4, 6) % 7).to(getattr(torch, name))
    part = theirs[1:, ::2].T
    ours = va.from_dlpack(part)
    assert ours.dtype == name and ours.device.backend == "cuda" and ours.tolist() == part.tolist()
    back = torch.from_dlpack(ours)
    assert back.data_ptr() == part.data_ptr() and back.dtype == part.dtype and back.tolist() == part.tolist()
    copied = va.asarray(part)
    theirs.zero_()
    assert copied.tolist() == ours.tolist() or not any(map(any, ours.tolist()))
    assert va.asarray(part, copy=False).tolist() == part.tolist()


def test_streams_are_ordered(torch):
    spin = lambda: torch.cuda._sleep(50_000_000)  # noqa: E731
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for at in range(1, 20):
                x = torch.zeros(1 << 20, device="cuda")
                spin() if at % 7 == 0 else None
                x += at
                y = va.from_dlpack(x) * 2
                z = torch.from_dlpack(y) + 1
                assert z.sum().item() == (2 * at + 1) * (1 << 20)
        stream.synchronize()


def test_owners_are_let_go_when_the_device_is_done(torch):
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        x = torch.ones(1 << 20, device="cuda")
        y = (va.from_dlpack(x) + 1).evaluate()
        del x
    assert y[5].item() == 2
    del y
    for _ in range(1000):
        va.synchronize()
        if torch.cuda.memory_allocated() == before:
            break
    assert torch.cuda.memory_allocated() == before


def test_arrays_that_others_hold_stay(torch):
    device = va.default_device()
    live = device.in_use[1]
    theirs = torch.from_dlpack(va.arange(1 << 20, dtype="int64"))
    assert device.in_use[1] == live + 1
    for at in range(10):
        (va.zeros(1 << 20, dtype="int64") + at).evaluate()
    assert theirs.sum().item() == (1 << 20) * ((1 << 20) - 1) // 2
    del theirs
    assert device.in_use[1] == live


def test_the_array_interface(torch, here):
    a = va.arange(12, dtype="float32").reshape(3, 4)
    theirs = torch.as_tensor(a, device="cuda")
    assert theirs.tolist() == a.tolist()
    a[:] = 0
    assert theirs.sum().item() == 66, "what was said where stays as it was"

    class Foreign:
        tensor = torch.arange(6, device="cuda", dtype=torch.float32).reshape(2, 3)
        __cuda_array_interface__ = tensor.__cuda_array_interface__

    torch.cuda.synchronize()
    shared, copied = va.asarray(Foreign(), copy=False), va.asarray(Foreign())
    Foreign.tensor.zero_()
    torch.cuda.synchronize()
    assert shared.sum().item() == 0 and copied.sum().item() == 15


def test_cupy_shares_memory(cupy):
    theirs = cupy.arange(24, dtype="float32").reshape(4, 6)
    ours = va.from_dlpack(theirs[:, ::2])
    assert ours.tolist() == theirs[:, ::2].tolist()
    assert cupy.asarray(ours + 1).tolist() == (theirs[:, ::2] + 1).tolist()
    assert va.asarray(theirs).tolist() == theirs.tolist()


def test_other_devices_need_copies(torch):
    host = np.arange(5.0)
    assert va.from_dlpack(host).device.backend == "cpu", "an array is where its memory is"
    assert va.from_dlpack(host, device="cuda:0").tolist() == host.tolist()
    with pytest.raises((BufferError, ValueError), match="copied"):
        va.from_dlpack(host, device="cuda:0", copy=False)
    with pytest.raises((BufferError, ValueError), match="copied"):
        va.asarray(host, copy=False)
    assert np.asarray(va.asarray(host)).tolist() == host.tolist()


LOST = """
import torch, vmaccel as va
va.init("cuda:0"); a = va.ones(1000).evaluate(); va.synchronize()
torch.zeros(3, device="cuda")[torch.tensor([10**9], device="cuda")]
try: torch.cuda.synchronize()
except Exception: pass
for use in (lambda: (a + 1).tolist(), lambda: va.synchronize(), lambda: va.zeros(10**7).evaluate()):
    try: use()
    except va.DeviceLostError: print("lost")
del a
va.init("cpu"); print(va.ones(3).sum().item())
"""


def test_a_lost_device_is_an_error_and_the_interpreter_lives(torch):
    ended = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=300)
    assert ended.stdout.split() == ["lost", "lost", "lost", "3.0"], ended


def test_streams_run_beside_each_other(here, cupy):
    with va.stream() as one:
        assert one.handle and one.handle != here.stream_handle
        x = va.ones(1 << 20, dtype="float32") * 3
        assert x.__cuda_array_interface__["stream"] == one.handle
        theirs = cupy.from_dlpack(x)
        with cupy.cuda.ExternalStream(one.handle):
            doubled = theirs * 2
        again = va.from_dlpack(doubled) + 1
    with va.stream() as two:
        assert two.handle != one.handle
        total = (again + x).sum()
    assert total.item() == 10 * (1 << 20)


def test_pinned_memory_is_copied_by_every_stream():
    block = va.empty_pinned(1 << 16, "float32")
    block[:] = 2
    with va.stream():
        a = va.asarray(block) * 3
        out = va.empty_pinned(1 << 16, "float32")
        va.from_device(a, out=out)
    assert (out == 6).all() and (va.asarray(block) + a).sum().item() == 8 * (1 << 16)
