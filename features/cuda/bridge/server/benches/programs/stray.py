"""Writes where nothing is, again and again: each time in a process of its own, as the fault stays with it."""

import subprocess
import sys
import time

STRAY = """
import cupy as cp
kernel = cp.RawKernel('extern "C" __global__ void stray(long n) { *(int *)(n + 64 * threadIdx.x) = 7; }', "stray")
kernel((64,), (256,), (0x600000000000,))
try:
    cp.cuda.runtime.deviceSynchronize()
except cp.cuda.runtime.CUDARuntimeError as error:
    raise SystemExit(3 if "illegal memory access" in str(error) else 4)
"""
end, faults = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    code = subprocess.run([sys.executable, "-c", STRAY], stderr=subprocess.DEVNULL).returncode
    if code != 3:
        raise SystemExit(f"ended with {code}")
    faults += 1
print("faults", faults)
