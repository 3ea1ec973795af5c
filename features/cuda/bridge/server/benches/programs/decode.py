"""Decoding with a cache in PyTorch, kernel by kernel and as a CUDA graph: the words, and what one takes."""

import statistics
import time

import torch
import torch.nn.functional as F

torch.manual_seed(0)
width, heads, layers, longest, batch = 1024, 16, 12, 512, 4
make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
table = make(8192, width)
blocks = [(make(3 * width, width), make(width, width), make(4 * width, width), make(width, 4 * width)) for _ in range(layers)]
caches = torch.zeros(layers, 2, batch, heads, longest, width // heads, device="cuda", dtype=torch.bfloat16)
word, place = torch.zeros(batch, dtype=torch.long, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
columns = torch.arange(longest, device="cuda")


def step():
    x = table[word]
    seen = (columns <= place)[None, None, None]
    for (mixed, out, wide, narrow), cache in zip(blocks, caches):
        q, k, v = F.linear(F.layer_norm(x, (width,)), mixed).view(batch, 3, heads, 1, -1).unbind(1)
        cache[0].index_copy_(2, place, k)
        cache[1].index_copy_(2, place, v)
        y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen)
        x = x + F.linear(y.reshape(batch, width), out)
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), wide)), narrow)
    word.copy_(F.linear(F.layer_norm(x, (width,)), table).argmax(-1))
    place.add_(1)


@torch.no_grad()
def run(name, one):
    word.fill_(1), place.zero_(), caches.zero_()
    words, times = [], []
    for _ in range(64):
        start = time.perf_counter()
        one()
        words.append(word.tolist())
        times.append(time.perf_counter() - start)
    print(name, words)
    print(f"time {name}-ms {1e3 * statistics.median(times[8:]):.3f}")


run("decode", step)
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    step()
run("decode-graph", graph.replay)
