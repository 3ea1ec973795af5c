"""Times PyTorch, and other libraries (`others.py`), at the work that its arguments name ("softmax f32 65536 768 1"; the last number is
whether PyTorch compiles it too), and prints as JSON, by library, the seconds of a call ("Ok") or why there are none ("Err").

Several processes compile at the same time, and then measure one after the other: eager and compiled take turns, a measurement is of
a few calls one behind the other, and inputs come in turn from several sets, none of which is in a cache when it is used again.
"""

import json
import os
import subprocess
import sys
import time

SETS, ROUNDS, WARM, EPSILON = 3, 5, 2, 1e-6
MOVED, PROCESSES = 2 << 30, 12
# Fills of a GiB before short calls.
SHORT = 8
# Seconds after which a process compiles nothing more.
COMPILING = float(os.environ.get("PEERS_COMPILING", "25"))


def calls(op, dtype, extents):
    """What makes a set of inputs; by name, the op as PyTorch users write it; and the op for the compiler, if it is another."""
    import torch
    import torch.nn.functional as F

    def numbers(*shape, dtype=dtype):
        return torch.randn(shape, device="cuda", dtype=dtype)

    def integers(below, *shape):
        return torch.randint(below, shape, device="cuda")

    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    aten = torch.ops.aten
    rows, n = (extents + [1])[:2] if len(extents) < 3 else extents[:2]

    def matrix():
        return numbers(rows, n)

    if op == "softmax":
        return lambda: (matrix(),), lambda x: torch.softmax(x, -1), None
    if op == "softmax_backward":
        def formula(y, dy):
            product = dy.float() * y.float()
            return (product - y.float() * product.sum(-1, keepdim=True)).to(dtype)
        return lambda: (matrix(), matrix()), lambda y, dy: aten._softmax_backward_data(dy, y, -1, dtype), formula
    if op == "rmsnorm":
        weight = numbers(n)
        return lambda: (matrix(),), lambda x: F.rms_norm(x, (n,), weight, EPSILON), None
    if op == "layernorm":
        weight, bias = numbers(n), numbers(n)
        return lambda: (matrix(),), lambda x: F.layer_norm(x, (n,), weight, bias, EPSILON), None
    if op == "rmsnorm_residual":
        weight = numbers(n)
        def residual(x, r):
            h = x + r
            return h, F.rms_norm(h, (n,), weight, EPSILON).bfloat16()
        return lambda: (matrix(), matrix()), residual, None
    if op == "rmsnorm_backward":
        weight, rstd = numbers(n), numbers(rows, 1, dtype=torch.float32).abs()
        def formula(x, dy):
            hat, wide = x.float() * rstd, dy.float()
            g = wide * weight.float()
            dx = (g - hat * (g * hat).mean(-1, keepdim=True)) * rstd
            return dx.to(dtype), (wide * hat).sum(0).to(dtype)
        eager = lambda x, dy: aten._fused_rms_norm_backward(dy, x, [n], rstd, weight, [True, True])
        return lambda: (matrix(), matrix()), eager, formula
    if op == "layernorm_backward":
        weight, bias = numbers(n), numbers(n)
        mean, rstd = numbers(rows, 1, dtype=torch.float32), numbers(rows, 1, dtype=torch.float32).abs()
        def formula(x, dy):
            hat, wide = (x.float() - mean) * rstd, dy.float()
            g = wide * weight.float()
            dx = (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True)) * rstd
            return dx.to(dtype), (wide * hat).sum(0).to(dtype), wide.sum(0).to(dtype)
        eager = lambda x, dy: aten.native_layer_norm_backward(dy, x, [n], mean, rstd, weight, bias, [True] * 3)
        return lambda: (matrix(), matrix()), eager, formula
    if op == "cross_entropy":
        targets = integers(n, rows)
        return lambda: (matrix(),), lambda x: F.cross_entropy(x, targets), None
    if op == "cross_entropy_backward":
        targets, columns = integers(n, rows), torch.arange(n, device="cuda")
        def formula(x):
            one = (columns == targets[:, None]).float()
            return ((torch.softmax(x.float(), -1) - one) / rows).to(dtype)
        def eager(x):
            # As autograd does it, from the logarithms of the probabilities on.
            slope = aten.nll_loss_backward(torch.ones((), device="cuda", dtype=dtype), x, targets, None, 1, -100, total)
            return aten._log_softmax_backward_data(slope, x, -1, dtype)
        total = torch.tensor(float(rows), device="cuda", dtype=dtype)
        return lambda: (matrix(),), eager, formula
    if op == "silu":
        return lambda: (numbers(rows),), F.silu, None
    if op == "cast":
        return lambda: (numbers(rows),), lambda x: x.to(other), None
    if op == "swiglu":
        return lambda: (numbers(rows), numbers(rows)), lambda gate, up: F.silu(gate) * up, None
    if op == "silu_backward":
        return lambda: (numbers(rows), numbers(rows)), lambda dy, x: aten.silu_backward(dy, x), None
    if op == "swiglu_backward":
        def swiglu(dy, gate, up):
            return aten.silu_backward(dy * up, gate), dy * F.silu(gate)
        return lambda: (numbers(rows), numbers(rows), numbers(rows)), swiglu, None
    if op == "adamw":
        if dtype != torch.float32:
            return None  # its moments would be of bf16 too
        def step():
            parameter = torch.nn.Parameter(numbers(rows))
            parameter.grad = numbers(rows)
            optimizer = torch.optim.AdamW([parameter], fused=True)
            optimizer.step()
            return optimizer, parameter
        return step, lambda optimizer, _: optimizer.step(), False
    if op == "grad_norm":
        return lambda: (numbers(rows),), lambda x: torch.nn.utils.get_total_norm([x]), False
    if op in ("embedding", "embedding_gradient"):
        count, vocabulary, columns = extents
        which = integers(vocabulary, count)
        if op == "embedding":
            return lambda: (numbers(vocabulary, columns),), lambda table: F.embedding(which, table), False
        dense = lambda dy: aten.embedding_dense_backward(dy, which, vocabulary, -1, False)
        return lambda: (numbers(count, columns),), dense, False
    if op == "column_sums":
        return lambda: (matrix(),), lambda x: x.sum(0), None
    if op == "transpose":
        return lambda: (matrix(),), lambda x: x.t().contiguous(), None
    if op == "rope":
        batch, tokens, heads, of_keys, dim = extents
        angle = numbers(tokens, 1, dim // 2, dtype=torch.float32)
        cos, sin = angle.cos(), angle.sin()
        def turn(x):
            a, b = x.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(dtype)
        both = lambda: (numbers(batch, tokens, heads, dim), numbers(batch, tokens, of_keys, dim))
        return both, lambda q, k: (turn(q), turn(k)), None
    if op == "argmax":
        return lambda: (matrix(),), lambda x: x.argmax(-1), False
    if op == "topk":
        return lambda: (matrix(),), lambda x: torch.topk(x, 50), False
    if op == "sample":
        return lambda: (matrix(),), lambda x: torch.multinomial(torch.softmax(x.float(), -1), 1), False
    if op == "topp_sample":
        def nucleus(x):
            p, order = torch.sort(torch.softmax(x.float(), -1), descending=True)
            p = p.masked_fill(p.cumsum(-1) - p >= 0.9, 0.0)
            return order.gather(-1, torch.multinomial(p, 1))
        return lambda: (matrix(),), nucleus, False
    raise ValueError(op)


def reason(error):
    """An error's last line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


def prepare(work):
    """The work with its functions, compiled where that is wanted, and why libraries have none."""
    import torch

    op, element, *extents, compiled = work.split()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[element]
    extents = list(map(int, extents))
    of = calls(op, dtype, extents)
    if of is None:
        return None
    make, eager, formula = of
    functions, without = {"PyTorch eager": eager}, {}
    inputs = make()
    if compiled == "1" and formula is not False and time.monotonic() - STARTED < COMPILING:
        function = torch.compile(formula or eager, dynamic=False)
        function(*inputs)
        functions["PyTorch compiled"] = function
    for name, library in others(op, dtype, extents).items():
        try:
            function = library()
            function(*inputs)
            functions[name] = function
        except Exception as error:
            without[name] = reason(error)
    size = sum(x.nbytes for x in inputs if hasattr(x, "nbytes"))
    return work.rsplit(" ", 1)[0], make, functions, without, 2 * max(size, 1 << 24)


def measure(make, functions, without, moved):
    import torch

    inputs = [make() for _ in range(max(SETS, min(32, (512 << 20) // moved + 1)))]
    lead = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    count = min(max(MOVED // moved, 5), 48)
    times, turn = {}, 0
    for measurement in range(ROUNDS + 1):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # While the device is busy with that, the calls are queued.
            for _ in range(1 if moved > 1 << 28 else SHORT):
                lead.fill_(0)
            for call in range(WARM + count):
                if call == WARM:
                    begin.record()
                turn = (turn + 1) % len(inputs)
                function(*inputs[turn])
            end.record()
            torch.cuda.synchronize()
            if measurement > 0:  # the first warms up
                times.setdefault(name, []).append(begin.elapsed_time(end) / 1e3 / count)
    return [(name, {"Ok": all}) for name, all in times.items()] + [(name, {"Err": why}) for name, why in without.items()]


def child(works):
    import torch

    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU")
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    ready, results = [], {}
    with torch.no_grad():
        for work in works:
            try:
                ready.append(prepare(work))
            except Exception as error:  # a peer less
                print(f"{work}: {error}"[:300], file=sys.stderr)
            torch.cuda.empty_cache()
        print("ready", file=answers, flush=True)
        if not sys.stdin.readline():
            return
        for name, *work in filter(None, ready):
            try:
                results[name] = measure(*work)
            except Exception as error:
                print(f"{name}: {error}"[:300], file=sys.stderr)
            torch.cuda.empty_cache()
    print(json.dumps(results), file=answers, flush=True)


STARTED = time.monotonic()
if sys.argv[1:2] == ["--child"]:
    child(sys.argv[2:])
    sys.exit()
script = open("/proc/self/cmdline").read().split("\0")[2]
environment = dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1")
parts = [sys.argv[1 + at :: PROCESSES] for at in range(PROCESSES)]
children = [
    subprocess.Popen(
        [sys.executable, "-c", script, "--child", *part], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    for part in filter(None, parts)
]
results = {}
ready = [process.stdout.readline() == "ready\n" for process in children]
for process, is_ready in zip(children, ready):
    if is_ready:
        line, _ = process.communicate("go\n")
        results.update(json.loads(line.strip().splitlines()[-1]) if line.strip() else {})
if not results:
    sys.exit("PyTorch measured nothing")
print(json.dumps(results))
