# GPT-2 in PyTorch, with the parameters and tokens of a folder: python3 -c ... WHAT FOLDER SIZES PROMPT GENERATED STEPS
import json, sys, time
started = time.time()
import torch
import torch.nn.functional as F

what, folder, sizes, prompt, generated, steps = sys.argv[1:]
layers, width, heads, length, vocabulary, batch = map(int, sizes.split(","))
prompt, generated, steps = int(prompt), int(generated), int(steps)
dim = width // heads
places = json.load(open(f"{folder}/parameters.json"))


def load(name, dtype, count):
    return torch.from_file(f"{folder}/{name}", shared=False, size=count, dtype=dtype)


tokens = load("tokens", torch.int32, batch * length).view(batch, length).cuda().long()
targets = load("targets", torch.int32, batch * length).view(batch, length).cuda().long()
end = max(offset + torch.Size(extents).numel() for _, offset, extents in places)
masters = load("masters", torch.float32, end)


def parameters(dtype=torch.float32, grad=False):
    """Each parameter by its name."""
    def one(offset, extents):
        count = torch.Size(extents).numel()
        return masters[offset : offset + count].view(extents).to("cuda", dtype, copy=True).requires_grad_(grad)
    return {name: one(offset, extents) for name, offset, extents in places}


def norm(p, name, h):
    return F.layer_norm(h, (width,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)


def linear(p, name, x):
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def logits(p, tokens):
    rows, count = tokens.shape
    h = F.embedding(tokens, p["wte.weight"]) + p["wpe.weight"][:count]
    for i in range(layers):
        q, k, v = linear(p, f"h.{i}.attn.qkv", norm(p, f"h.{i}.ln_1", h)).view(rows, count, 3, heads, dim).unbind(2)
        o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        h = h + linear(p, f"h.{i}.attn.out", o.transpose(1, 2).reshape(rows, count, width))
        h = h + linear(p, f"h.{i}.mlp.down", F.gelu(linear(p, f"h.{i}.mlp.up", norm(p, f"h.{i}.ln_2", h))))
    return F.linear(norm(p, "ln_f", h), p["wte.weight"])


def loss_of(p, tokens, targets):
    return F.cross_entropy(logits(p, tokens).flatten(0, 1), targets.flatten())


def wide(on):
    torch.backends.cuda.matmul.allow_tf32 = not on
    torch.set_float32_matmul_precision("highest" if on else "high")


def autocast():
    return torch.autocast("cuda", torch.bfloat16)


def optimizer(p):
    matrices = [x for x in p.values() if x.dim() > 1]
    vectors = [x for x in p.values() if x.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


def right():
    wide(True)
    p = parameters(grad=True)
    loss = loss_of(p, tokens, targets)
    loss.backward()
    reference = {name: x.grad for name, x in p.items()}
    out = torch.from_file(f"{folder}/gradients", shared=True, size=end, dtype=torch.float32)
    out.zero_()
    for name, offset, extents in places:
        out[offset : offset + reference[name].numel()] = reference[name].flatten().cpu()
    total = torch.stack([g.double().norm() for g in reference.values()]).norm().item()
    wide(False)
    p = parameters(grad=True)
    adam = optimizer(p)
    losses, off = [], []
    for step in range(steps):
        adam.zero_grad(set_to_none=True)
        with autocast():
            now = loss_of(p, tokens, targets)
        now.backward()
        losses.append(now.item())
        if step == 0:
            off = [((p[name].grad - reference[name]).norm() / reference[name].norm()).item() for name, _, _ in places]
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        adam.step()
    return {"loss": loss.item(), "narrow_loss": losses[0], "off": off, "norm": total, "losses": losses}


def timed(f, rounds, repeats):
    seconds = []
    for _ in range(rounds):
        begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            f()
        finish.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(finish) / 1e3 / repeats)
    return seconds


def train():
    wide(False)
    found = []

    def measure(name, loss_of, dtype):
        # Compiling takes long: what is measured first is what counts.
        if time.time() - started > 60:
            return print(f"{name}: no time is left", file=sys.stderr)
        p = parameters(dtype, grad=True)
        adam = optimizer(p)
        def step():
            adam.zero_grad(set_to_none=True)
            if dtype == torch.float32:
                with autocast():
                    loss = loss_of(p, tokens, targets)
            else:
                loss = loss_of(p, tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
            adam.step()
        try:
            begin = time.time()
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            print(f"{name}: ready in {time.time() - begin:.1f} s", file=sys.stderr)
            found.append((name, timed(step, 5, 3)))
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)

    measure("compiled, autocast", torch.compile(loss_of), torch.float32)
    measure("eager, autocast", loss_of, torch.float32)
    measure("compiled, weights of bf16", torch.compile(loss_of), torch.bfloat16)
    return found


def decoder(p):
    """A function from tokens and their position to the next ones, with the caches that it fills."""
    k_cache, v_cache = (
        [torch.zeros(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(layers)] for _ in range(2)
    )
    places = torch.arange(length, device="cuda")

    def step(token, position):
        h = F.embedding(token, p["wte.weight"]) + p["wpe.weight"][position]
        mask = (places <= position).view(1, 1, 1, length)
        for i in range(layers):
            qkv = linear(p, f"h.{i}.attn.qkv", norm(p, f"h.{i}.ln_1", h)).view(batch, 3, heads, 1, dim)
            q, k, v = qkv.unbind(1)
            k_cache[i].index_copy_(2, position, k)
            v_cache[i].index_copy_(2, position, v)
            o = F.scaled_dot_product_attention(q, k_cache[i], v_cache[i], attn_mask=mask)
            h = h + linear(p, f"h.{i}.attn.out", o.reshape(batch, width))
            h = h + linear(p, f"h.{i}.mlp.down", F.gelu(linear(p, f"h.{i}.mlp.up", norm(p, f"h.{i}.ln_2", h))))
        return F.linear(norm(p, "ln_f", h), p["wte.weight"]).argmax(-1)

    def begin(tokens):
        count = tokens.shape[1]
        h = F.embedding(tokens, p["wte.weight"]) + p["wpe.weight"][:count]
        for i in range(layers):
            qkv = linear(p, f"h.{i}.attn.qkv", norm(p, f"h.{i}.ln_1", h)).view(batch, count, 3, heads, dim)
            q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
            k_cache[i][:, :, :count] = k
            v_cache[i][:, :, :count] = v
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, count, width)
            h = h + linear(p, f"h.{i}.attn.out", o)
            h = h + linear(p, f"h.{i}.mlp.down", F.gelu(linear(p, f"h.{i}.mlp.up", norm(p, f"h.{i}.ln_2", h))))
        return F.linear(norm(p, "ln_f", h[:, -1]), p["wte.weight"]).argmax(-1)

    return begin, step


@torch.no_grad()
def generate():
    wide(True)
    count = generated + 1
    ours = load("generated", torch.int32, count * batch).view(count, batch).cuda().long().t()
    p = parameters()

    def short(new):
        """How far the logits of tokens fall short of the greatest."""
        whole = torch.cat([tokens[:, :prompt], new], 1)[:, :length]
        last = min(prompt + count, length)
        worst = 0.0
        for row in range(batch):
            of = logits(p, whole[row : row + 1])[0, prompt - 1 : last - 1]
            worst = max(worst, (of.max(-1).values - of.gather(-1, whole[row, prompt:last, None])[:, 0]).max().item())
        return worst

    result = {"short": short(ours)}
    narrow = parameters(torch.bfloat16)
    begin, step = decoder(narrow)

    def run(step, clone):
        token = begin(tokens[:, :prompt])
        all = [token]
        for at in positions:
            token = step(token, at)
            if clone:
                token = token.clone()
            all.append(token)
        return torch.stack(all, 1)

    positions = [torch.tensor([prompt + i], device="cuda") for i in range(generated)]
    theirs = run(step, False)
    result["narrow_short"] = short(theirs)
    result["same"] = (theirs == ours).float().mean().item()
    found = []
    for mode in ["reduce-overhead"]:
        name = f"compiled, {mode}"
        try:
            compiled = torch.compile(step, mode=mode)
            run(compiled, True)
            run(compiled, True)
            token = begin(tokens[:, :prompt])
            def decode():
                now = token
                for at in positions:
                    now = compiled(now, at).clone()
            decode()
            found.append((name, [seconds / generated for seconds in timed(decode, 8, 1)]))
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
    result["peers"] = found
    return result


print(json.dumps({"right": right, "train": train, "generate": generate}[what]()))
