"""Products by cuBLAS: a digest of each, and what it takes."""

import hashlib
import statistics
import time

import torch

torch.manual_seed(0)
for kind in (torch.bfloat16, torch.float32):
    for size in (512, 2048, 8192):
        a, b = (torch.randn(size, size, device="cuda", dtype=kind) for _ in range(2))
        times = []
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                c = a @ b
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / 20)
        name = f"{str(kind)[6:]}-{size}"
        print(name, hashlib.sha256(c.view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
        print(f"time product-{name}-us {1e6 * statistics.median(times[2:]):.1f}")
