"""Arrays beside numpy's, CuPy's and PyTorch's: what a call costs, chains of functions, library functions, copies, import.

    python benches/figures.py [--device cuda:0] [--only NAME,...] [--json FILE]

Each line is the median time of a case with its spread (quartiles), and the time of each peer that is installed as a ratio to ours: above 1
ours is faster. Peers take turns with ours in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np

import vmaccel as va


def peers(on_gpu: bool) -> dict:
    found = {}
    if not on_gpu:
        return {"numpy": np}
    for name, module in (("cupy", "cupy"), ("torch", "torch")):
        try:
            found[name] = __import__(module)
        except ImportError:
            pass
    return found


def chain(a, b, c):
    """Eight functions of elements."""
    x = a * b + c
    x = x * b - c
    x = x * a + b
    return x * 0.5 + 1.0


def cases(device: str, found: dict) -> list:
    on_gpu = not device.startswith("cpu")
    rng = np.random.default_rng(1)
    cupy, torch = found.get("cupy"), found.get("torch")
    result = []

    def arrays(*hosts, dtype=None):
        ours = [va.asarray(each, dtype=dtype) for each in hosts]
        theirs = {}
        if "numpy" in found:
            theirs["numpy"] = list(hosts)
        if cupy and dtype != "bfloat16":
            theirs["cupy"] = [cupy.asarray(each) for each in hosts]
        if torch:
            own = [torch.from_numpy(each).cuda() for each in hosts]
            theirs["torch"] = [each.bfloat16() for each in own] if dtype == "bfloat16" else own
        return ours, theirs

    def case(name, calls, hosts, ours, dtype=None, **theirs):
        mine, others = arrays(*hosts, dtype=dtype)
        each = {"vmaccel": lambda: ours(*mine).evaluate()}
        for lib, function in theirs.items():
            if lib in others:
                each[lib] = lambda function=function, own=others[lib]: function(*own)
        result.append((name, calls, each))

    f32 = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    small = (f32(1000), f32(1000))
    add = lambda a, b: a + b  # noqa: E731
    case("a + b, 1000 f32", 1000, small, add, numpy=add, cupy=add, torch=add)
    big = 26 if on_gpu else 22
    three = (f32(1 << big), f32(1 << big), f32(1 << big))
    own = chain
    compiled = torch.compile(own) if torch else None
    case(f"chain of 8, 2^{big} f32", 5, three, own, numpy=own, cupy=own, torch=compiled)
    case(f"sum, 2^{big} f32", 5, three[:1], lambda a: a.sum(), numpy=lambda a: a.sum(), cupy=lambda a: a.sum(), torch=lambda a: a.sum())
    fused = lambda a: ((a - 1.0) * (a - 1.0)).sum(axis=-1)  # noqa: E731
    case("sum of squares of rows, 4096 x 8192", 5, (f32(4096, 8192 if on_gpu else 512),), fused, numpy=fused, cupy=fused,
         torch=torch.compile(fused) if torch else None)  # fmt: skip
    rows = f32(4096, 8192) if on_gpu else f32(1024, 1024)

    def softmax(lib):
        def function(x):
            e = lib.exp(x - x.max(axis=-1, keepdims=True))
            return e / e.sum(axis=-1, keepdims=True)

        return function

    theirs = {"numpy": softmax(np), "cupy": softmax(cupy)}
    if torch:
        theirs["torch"] = lambda x: torch.softmax(x, -1)
    for dtype in ("float32", "bfloat16"):
        case(f"softmax of rows, {dtype}", 5, (rows,), lambda x: x.softmax(), dtype=dtype, **theirs if dtype == "float32" else {"torch": theirs.get("torch")})
    n = 8192 if on_gpu else 512
    mat = lambda a, b: a @ b  # noqa: E731
    case(f"matmul, {n} bfloat16", 3, (f32(n, n), f32(n, n)), mat, dtype="bfloat16", torch=mat)
    n = 4096 if on_gpu else 512
    case(f"matmul, {n} float32", 3, (f32(n, n), f32(n, n)), mat, numpy=mat, cupy=mat, torch=mat)
    case(f"matmul, {n // 2} float64", 3, (rng.standard_normal((n // 2, n // 2)), rng.standard_normal((n // 2, n // 2))), mat, numpy=mat, cupy=mat, torch=mat)
    keys = f32(1 << (24 if on_gpu else 18))
    case(f"sort, {len(keys)} f32", 2, (keys,), va.sort, numpy=np.sort, cupy=getattr(cupy, "sort", None), torch=lambda x: torch.sort(x)[0])
    case(f"cumulative sum, {len(keys)} f32", 3, (keys,), lambda x: va.cumulative_sum(x, axis=0), numpy=np.cumsum, cupy=getattr(cupy, "cumsum", None),
         torch=lambda x: torch.cumsum(x, 0))  # fmt: skip
    places = rng.integers(0, len(keys), 1 << (24 if on_gpu else 18))
    case(f"gather, {len(places)} f32", 3, (keys, places), lambda x, at: x[at], numpy=lambda x, at: x[at], cupy=lambda x, at: x[at], torch=lambda x, at: x[at])

    # Copies are whole: they are waited for.
    n = 1 << (28 if on_gpu else 22)
    size = f"{n >> 18} MiB"
    pageable, pinned = np.ones(n, np.float32), va.empty_pinned(n, "float32")
    pinned[:] = pageable
    mine = va.asarray(pageable).evaluate()
    to_device, to_host = {"vmaccel": lambda: va.asarray(pageable)}, {"vmaccel": lambda: np.asarray(mine)}
    to_device_pinned, to_host_pinned = {"vmaccel": lambda: va.asarray(pinned)}, {"vmaccel": lambda: va.from_device(mine, out=pinned)}
    if cupy:
        theirs_c = cupy.asarray(pageable)
        to_device["cupy"], to_host["cupy"] = lambda: cupy.asarray(pageable), lambda: cupy.asnumpy(theirs_c)
    if torch:
        page_locked = torch.ones(n).pin_memory()
        theirs_t = page_locked.cuda()
        to_device["torch"], to_host["torch"] = lambda: torch.from_numpy(pageable).cuda(), lambda: theirs_t.cpu()
        to_device_pinned["torch"] = lambda: theirs_t.copy_(page_locked, non_blocking=True)
        to_host_pinned["torch"] = lambda: page_locked.copy_(theirs_t, non_blocking=True)
    if "numpy" in found:
        to_device["numpy"] = to_host["numpy"] = pageable.copy
    result += [(f"to the device, {size}", 1, to_device), (f"to the host, {size}", 1, to_host)]
    result += [(f"to the device, pinned, {size}", 1, to_device_pinned), (f"to the host, pinned, {size}", 1, to_host_pinned)]
    return result


def measure(device: str, only: list[str]) -> list[dict]:
    on_gpu = not device.startswith("cpu")
    found = peers(on_gpu)

    def settle() -> None:
        va.synchronize()
        if "torch" in found:
            found["torch"].cuda.synchronize()
        if "cupy" in found:
            found["cupy"].cuda.Device().synchronize()

    lines = []
    for name, calls, each in cases(device, found):
        if only and not any(part in name for part in only):
            continue
        times = {lib: [] for lib in each}
        for call in each.values():
            for _ in range(3):
                call()
            settle()
        for _ in range(15):
            for lib, call in each.items():
                settle()
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                settle()
                times[lib].append((time.perf_counter() - begin) / calls)
        line = {"case": name, "seconds": {}}
        for lib, all_of in times.items():
            low, middle, high = statistics.quantiles(all_of, n=4)
            line["seconds"][lib] = [middle, low, high]
        lines.append(line)
        report(line)
    return lines


def report(line: dict) -> None:
    ours, low, high = line["seconds"]["vmaccel"]
    ratios = ", ".join(f"{lib} {times[0] / ours:.2f}" for lib, times in line["seconds"].items() if lib != "vmaccel")
    print(f"{line['case']:40} {1e6 * ours:12.2f} us ({1e6 * low:.2f} to {1e6 * high:.2f})  {ratios}", flush=True)


def imports() -> dict:
    """Seconds that `import` takes beside Python's own start."""

    def run(code: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begin

    taken = [run("import vmaccel") - run("pass") for _ in range(9)]
    line = {"case": "import", "seconds": {"vmaccel": [statistics.median(taken), min(taken), max(taken)]}}
    report(line)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="as vmaccel.init takes it")
    parser.add_argument("--only", default="", help="cases whose names have one of these, comma-separated")
    parser.add_argument("--json", help="a file for the figures")
    arguments = parser.parse_args()
    opened = va.init(arguments.device)
    print(opened, flush=True)
    only = [part for part in arguments.only.split(",") if part]
    lines = ([] if only else [imports()]) + measure(opened.backend, only)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"device": repr(opened), "cases": lines}, file, indent=1)


if __name__ == "__main__":
    main()
