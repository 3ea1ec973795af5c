"""A mock of the kernel's USB4 bus by umockdev, which obeys what it reads, a line each: `add NAME UUID`, `add-block NAME`, `change NAME`, `remove NAME`.

It says where its tree is, and `done` after each line.
"""

import ctypes
import sys

library = ctypes.CDLL("libumockdev.so.0")
for name, result, arguments in [
    ("new", ctypes.c_void_p, []),
    ("get_root_dir", ctypes.c_char_p, [ctypes.c_void_p]),
    ("add_devicev", ctypes.c_void_p, [ctypes.c_void_p] + 3 * [ctypes.c_char_p] + 2 * [ctypes.c_void_p]),
    ("remove_device", None, [ctypes.c_void_p, ctypes.c_char_p]),
    ("uevent", None, [ctypes.c_void_p] + 2 * [ctypes.c_char_p]),
]:
    function = getattr(library, "umockdev_testbed_" + name)
    function.restype, function.argtypes = result, arguments

bed = library.umockdev_testbed_new()


def strings(*texts):
    return (ctypes.c_char_p * (len(texts) + 1))(*[text.encode() for text in texts], None)


def add(subsystem, name, parent, *attributes):
    """Adds a device, which umockdev announces, and answers its path."""
    made = library.umockdev_testbed_add_devicev(
        bed, subsystem.encode(), name.encode(), parent, strings(*attributes), strings()
    )
    return ctypes.string_at(made)


domain = add("thunderbolt", "domain0", None, "security", "user\n", "iommu_dma_protection", "1\n", "deauthorization", "1\n")
host = add("thunderbolt", "0-0", domain, "vendor_name", "Host\n")
paths = {}
print(library.umockdev_testbed_get_root_dir(bed).decode(), flush=True)
for line in sys.stdin:
    match line.split():
        case ["add", name, uuid]:
            paths[name] = add("thunderbolt", name, host, "authorized", "0\n", "unique_id", uuid + "\n")
        case ["add-block", name]:
            paths[name] = add("block", name, None, "size", "8\n")
        case ["change", name]:
            library.umockdev_testbed_uevent(bed, paths[name], b"change")
        case ["remove", name]:
            library.umockdev_testbed_uevent(bed, paths[name], b"remove")
            library.umockdev_testbed_remove_device(bed, paths.pop(name))
    print("done", flush=True)
