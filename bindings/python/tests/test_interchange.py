"""Memory that is shared with other libraries: numpy, DLPack, array interfaces."""

import ctypes
import gc
import sys

import numpy as np
import pytest

import vmaccel as va

TYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64", "complex128"]

cpu_only = pytest.mark.skipif("va.default_device().backend != 'cpu'", reason="the host can't read the device's memory")


def address(array):
    return array.__array_interface__["data"][0]


def values(name, shape):
    return (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype(name)


@cpu_only
@pytest.mark.parametrize("name", TYPES)
def test_numpy_sees_the_arrays_memory(name):
    host = values(name, (3, 4))
    a = va.asarray(host)
    for view, expect in [(a, host), (a.T, host.T), (a[1], host[1]), (a[::-1, 1::2], host[::-1, 1::2]), (a[:0], host[:0]), (a[2, 3], host[2, 3])]:
        for seen in (np.asarray(view), np.asarray(view, copy=False), np.from_dlpack(view)):
            assert np.array_equal(seen, expect) and seen.dtype == expect.dtype
            assert not seen.flags.writeable and not seen.flags.owndata
    assert address(np.asarray(a)) == address(np.asarray(a)) == address(np.from_dlpack(a))
    assert address(np.asarray(a[1])) == address(np.asarray(a)) + 4 * host.itemsize


@cpu_only
def test_what_is_shared_stays_when_the_array_changes_or_goes():
    a = va.arange(1000, dtype="int64") * 3
    views = [np.asarray(a), np.from_dlpack(a), np.asarray(a[1:])]
    a[:] = 7
    a += 1
    del a
    gc.collect()
    for at in range(20):
        (va.zeros(1000, dtype="int64") + at).evaluate()
    va.synchronize()
    expect = np.arange(1000) * 3
    assert np.array_equal(views[0], expect) and np.array_equal(views[1], expect) and np.array_equal(views[2], expect[1:])


def test_numpy_gets_copies_where_they_are_asked_for():
    a = va.asarray([1.5, 2.5])
    for own in (np.array(a), np.array(a, copy=True), np.asarray(a, dtype="float32")):
        own[0] = 9
    assert a[0].item() == 1.5
    with pytest.raises(ValueError, match="cop(y|ied)"):
        np.asarray(a, dtype="int8", copy=False)
    half = va.asarray([1.5, -2.0], dtype="bfloat16")
    if "ml_dtypes" not in sys.modules:
        assert np.asarray(half).dtype == np.float32 and np.asarray(half).tolist() == [1.5, -2.0]
        with pytest.raises(ValueError, match="bfloat16"):
            np.asarray(half, copy=False)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes have no buffer protocol before Python 3.12")
@pytest.mark.skipif(va.default_device().backend != "cpu", reason="the host can't see the memory")
def test_memoryview():
    view = memoryview(va.asarray(values("int32", (2, 3))))
    assert view.readonly and view.shape == (2, 3) and view.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("part", [(), (slice(None, None, -1), slice(1, None, 2)), (slice(0, 0),), (1, 2)])
def test_dlpack_from_numpy_and_back(name, part):
    host = values(name, (3, 4))[part]
    if not isinstance(host, np.ndarray):
        host = np.asarray(host)
    here = va.from_dlpack(host, device="cpu")
    assert here.dtype == name and here.shape == host.shape and here.device.backend == "cpu"
    assert np.array_equal(np.from_dlpack(here), host)
    if host.size:
        assert address(np.from_dlpack(here)) == address(host)
        assert address(np.asarray(va.from_dlpack(host, device="cpu", copy=True))) != address(host)


def test_imports_are_computed_with():
    host = values("float64", (40, 50))
    part = host[::2, ::-3]
    here = va.from_dlpack(part, device="cpu")
    assert np.allclose(np.asarray(here @ here.T + 1), part @ part.T + 1)
    assert np.allclose(np.asarray(here.sum(axis=0)), part.sum(0))
    odd = host.reshape(-1)[1:9]
    assert np.array_equal(np.asarray(va.sort(va.from_dlpack(odd, device="cpu"), descending=True)), odd[::-1])


@cpu_only
def test_the_rule_of_aliases():
    host = np.zeros(4)
    copied, taken, asked = va.asarray(host), va.from_dlpack(host), va.asarray(host, copy=False)
    host[0] = 5
    assert copied[0].item() == 0 and taken[0].item() == 5 and asked[0].item() == 5
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    assert address(np.asarray(va.asarray(frozen, copy=False))) == address(frozen)
    assert address(np.asarray(va.from_dlpack(frozen))) == address(frozen)


@pytest.mark.parametrize(
    ("source", "more", "text"),
    [
        (np.zeros(3, dtype=">f8"), {}, "can only be copied"),
        (np.zeros(3), {"dtype": "float32"}, "only in a copy"),
        (np.frombuffer(bytes(17), dtype="u1")[1:].view("f8"), {}, "aligned"),
        (np.zeros(3, dtype=[("a", "i4"), ("b", "i1")])["a"], {}, "can only be copied"),
        ([1, 2], {}, "can only be copied"),
        (3.0, {}, "can only be copied"),
    ],
)
@cpu_only
def test_copy_false_copies_nothing(source, more, text):
    with pytest.raises(ValueError, match=text):
        va.asarray(source, copy=False, **more)
    assert np.array_equal(np.asarray(va.asarray(source, **more)), np.asarray(source))
    own = va.asarray(source)
    assert va.asarray(own, copy=False) is own
    with pytest.raises(ValueError, match="copied"):
        va.asarray(own, dtype="int8", copy=False)


def test_owners_are_kept_and_let_go():
    owner = np.arange(100.0)
    before = sys.getrefcount(owner)
    device = "cpu"
    arrays = [va.from_dlpack(owner, device=device), va.asarray(owner, device=device, copy=False), va.from_dlpack(owner, device=device)[10:20]]
    assert sys.getrefcount(owner) >= before + 2
    results = [(each * 2).evaluate() for each in arrays]
    del arrays
    assert results[0][3].item() == 6
    for _ in range(1000):
        if sys.getrefcount(owner) == before:
            break
        va.synchronize(device)
    assert sys.getrefcount(owner) == before


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Unversioned(ctypes.Structure):
    pass


Delete = ctypes.CFUNCTYPE(None, ctypes.POINTER(Unversioned))
Unversioned._fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Delete)]


class Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", Delete), ("flags", ctypes.c_uint64), ("tensor", Tensor)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype, capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]


class Producer:
    """Another library, which says of its memory what the test wants, and counts how often that is let go of."""

    def __init__(self, shape=(4,), strides=None, offset=0, element=(2, 32, 1), device=(1, 0), data=None, version=None, said=None):
        self.memory = (ctypes.c_float * 16)(*range(16))
        self.extents, self.strides = (ctypes.c_int64 * 8)(*shape), (ctypes.c_int64 * 8)(*(strides or ()))
        self.device, self.deleted, self.versions = said or device, 0, []
        self.delete = Delete(self.count)
        self.managed = Versioned(*version, None, self.delete, 1) if version else Unversioned(deleter=self.delete)
        tensor = self.managed.tensor
        tensor.data = ctypes.addressof(self.memory) if data is None else data
        tensor.device, tensor.ndim = (ctypes.c_int32 * 2)(*device), len(shape)
        tensor.code, tensor.bits, tensor.lanes = element
        tensor.shape = ctypes.cast(self.extents, ctypes.POINTER(ctypes.c_int64))
        if strides is not None:
            tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = offset

    def count(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **more):
        self.name = b"dltensor_versioned" if isinstance(self.managed, Versioned) else b"dltensor"
        if self.name == b"dltensor" and "max_version" in more:
            raise TypeError("it knows no max_version")
        self.capsule = new_capsule(ctypes.addressof(self.managed), self.name, None)
        return self.capsule


def let_go(producer):
    for _ in range(1000):
        va.synchronize("cpu")
        if producer.deleted:
            break
    va.synchronize("cpu")
    return producer.deleted


@pytest.mark.parametrize("version", [None, (1, 0), (1, 7)])
@pytest.mark.parametrize(
    ("more", "expect"),
    [
        ({}, [0, 1, 2, 3]),
        ({"offset": 8}, [2, 3, 4, 5]),
        ({"shape": (2, 2), "strides": (1, 4)}, [[0, 4], [1, 5]]),
        ({"shape": (3,), "strides": (-2,), "offset": 16}, [4, 2, 0]),
        ({"shape": (2, 3), "strides": (0, 1)}, [[0, 1, 2], [0, 1, 2]]),
        ({"shape": ()}, 0),
        ({"shape": (2, 0)}, [[], []]),
        ({"shape": (0,), "data": 0}, []),
        ({"shape": (2,), "element": (5, 64, 1)}, [1j, 2 + 3j]),
        ({"shape": (1,), "element": (4, 16, 1), "offset": 6}, [1.0]),
        ({"shape": (2,), "offset": 1, "element": (1, 8, 1)}, [0, 0]),
        ({"shape": (1,), "offset": 2, "element": (1, 32, 1)}, None),
    ],
)
def test_tensors_of_others(more, expect, version):
    producer = Producer(version=version, **more)
    here = va.from_dlpack(producer, device="cpu")
    assert capsule_name(producer.capsule) == b"used_" + producer.name
    if expect is not None:
        assert (here + 0).tolist() == expect
    del here
    assert let_go(producer) == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"shape": (-1,)}, "extent of -1"),
        ({"shape": (2**62, 2**62)}, "extents|elements"),
        ({"shape": (2**41,)}, "elements"),
        ({"shape": (2, 2), "strides": (2**62, 1)}, "addresses"),
        ({"shape": (2,), "strides": (-(2**63),)}, "addresses"),
        ({"offset": 2**64 - 1}, "tensor at"),
        ({"offset": 2**63}, "addresses"),
        ({"data": 0}, "addresses"),
        ({"element": (2, 32, 4)}, "lanes"),
        ({"element": (2, 33, 1)}, "bits"),
        ({"element": (3, 64, 1)}, "no type"),
        ({"element": (0, 4, 1)}, "no type"),
        ({"device": (7, 0)}, "type 7"),
        ({"device": (2, 0), "said": (1, 0)}, "not what was asked"),
        ({"version": (2, 0)}, "DLPack 2"),
    ],
)
def test_hostile_tensors_are_refused_and_let_go_once(more, text):
    producer = Producer(**more)
    with pytest.raises((BufferError, ValueError), match=text):
        va.from_dlpack(producer)
    consumed = hasattr(producer, "capsule") and capsule_name(producer.capsule).startswith(b"used_")
    assert (let_go(producer) if consumed else producer.deleted) == (1 if consumed else 0)


def test_a_capsule_is_consumed_once():
    producer = Producer()
    capsule = producer.__dlpack__()

    class Again(Producer):
        def __dlpack__(self, **more):
            return capsule

    first = va.from_dlpack(Again(), device="cpu")
    with pytest.raises(BufferError, match="consumed"):
        va.from_dlpack(Again(), device="cpu")
    with pytest.raises(BufferError, match="no capsule"):
        capsule = 3
        va.from_dlpack(Again(), device="cpu")
    assert first.tolist() == [0, 1, 2, 3]


def test_misaligned_tensors_are_copied_but_for_copy_false():
    producer = Producer(shape=(2,), offset=2)
    with pytest.raises(BufferError, match="aligned"):
        va.from_dlpack(producer, device="cpu", copy=False)
    assert let_go(producer) == 1
    again = Producer(shape=(2,), offset=2)
    copied = va.from_dlpack(again, device="cpu")
    assert let_go(again) == 1, "nothing is kept of what was copied"
    assert copied.tobytes() == bytes(again.memory)[2:10]


@cpu_only
@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_capsules(version):
    a = va.asarray(values("float32", (2, 3)))[:, ::2]
    device = va.default_device()
    capsule = a.__dlpack__(max_version=version)
    versioned = version is not None and version[0] >= 1
    name = b"dltensor_versioned" if versioned else b"dltensor"
    assert capsule_name(capsule) == name
    managed = (Versioned if versioned else Unversioned).from_address(capsule_pointer(capsule, name))
    tensor = managed.tensor
    assert [tensor.ndim, tensor.code, tensor.bits, tensor.lanes, *tensor.device] == [2, 2, 32, 1, 1, 0]
    assert [tensor.shape[0], tensor.shape[1], tensor.strides[0], tensor.strides[1]] == [2, 2, 3, 2]
    if versioned:
        assert (managed.major, managed.flags) == (1, 1), "read only"
        copied = a.__dlpack__(max_version=version, copy=True)
        assert Versioned.from_address(capsule_pointer(copied, name)).flags == 2, "the consumer's own"
    # One that is dropped without a consumer lets go of the array, as does the deleter of one that had one.
    del a, capsule
    gc.collect()
    big = va.zeros(10**6).evaluate()
    live = device.in_use
    capsules = [big.__dlpack__(), big.__dlpack__(max_version=(1, 0))]
    del big
    assert device.in_use == live
    del capsules
    assert device.in_use[1] == live[1] - 1


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"stream": 3}, ValueError, "stream"),
        ({"stream": -2}, ValueError, "stream"),
        ({"dl_device": (2, 9)}, BufferError, "can't go"),
        ({"max_version": 1}, TypeError, "max_version"),
    ],
)
@cpu_only
def test_wrong_questions_of_consumers(more, error, text):
    with pytest.raises(error, match=text):
        va.zeros(3).__dlpack__(**more)
    assert va.zeros(3).__dlpack_device__() == (1, 0)
    assert not hasattr(va.zeros(3), "__cuda_array_interface__")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"typestr": ">f8"}, "no type"),
        ({"typestr": ""}, "no type"),
        ({"shape": (-1,)}, "negative"),
        ({"shape": (2**41,)}, "elements"),
        ({"strides": (8, 8)}, "strides"),
        ({"strides": (4,)}, "whole number"),
        ({"data": (0, True)}, "addresses"),
        ({"data": (2**64 - 8, True)}, "addresses"),
        ({"mask": 3}, "masked"),
    ],
)
def test_hostile_interfaces_are_refused(change, text):
    owner = np.zeros(3)
    before = sys.getrefcount(owner)
    with pytest.raises((TypeError, ValueError, BufferError), match=text):
        va._vmaccel.from_interface({**owner.__array_interface__, **change}, owner, "cpu")
    va.synchronize("cpu")
    assert sys.getrefcount(owner) == before


def test_torch_on_the_host():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    here = va.from_dlpack(theirs.T, device="cpu")
    assert here.tolist() == theirs.T.tolist()
    theirs[0, 0] = 7
    assert here[0, 0].item() == 7
    assert torch.from_dlpack(here + 1).tolist() == (theirs.T + 1).tolist()
    assert va.from_dlpack(theirs.bfloat16(), device="cpu").dtype == "bfloat16"


def test_jax_on_the_host():
    jax = pytest.importorskip("jax")
    theirs = jax.numpy.arange(12.0).reshape(3, 4)
    assert np.array_equal(np.asarray(va.from_dlpack(theirs, device="cpu")), np.asarray(theirs))
    assert np.array_equal(np.asarray(jax.dlpack.from_dlpack(va.asarray([1.0, 2.0], device="cpu"))), [1, 2])


def test_pinned_memory_is_numpys_and_copied_by_the_device():
    block = va.empty_pinned((3, 4), "float32")
    assert block.shape == (3, 4) and block.dtype == np.float32 and not block.any()
    block[...] = np.arange(12).reshape(3, 4)
    array = va.asarray(block)
    block[...] = -1
    assert array.tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert va.from_device(array * 2, out=block) is block and block[2, 3] == 22
    part = block[1]
    va.from_device(va.zeros(4, dtype="float32"), out=part)
    assert block.tolist()[1] == [0, 0, 0, 0] and block[0, 1] == 2


@pytest.mark.parametrize(
    "out",
    [np.zeros(4), np.zeros(3, "float32"), np.zeros((4, 2), "float32")[:, 0], np.frombuffer(bytes(16), "float32")],
    ids=["another type", "another shape", "strides", "read only"],
)
def test_elements_only_go_where_they_fit(out):
    with pytest.raises(ValueError):
        va.from_device(va.ones(4, dtype="float32"), out=out)


@cpu_only
def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    host = np.array([1.5, -2.0, 3.0], dtype=ml_dtypes.bfloat16)
    assert va.asarray(host).dtype == "bfloat16" and va.asarray(host).tolist() == [1.5, -2, 3]
    seen = np.asarray(va.asarray(host, copy=False))
    assert seen.dtype == host.dtype and seen.tolist() == host.tolist() and address(seen) == address(host)
