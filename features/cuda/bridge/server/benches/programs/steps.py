"""What a step of a transformer's training takes in PyTorch, eager and compiled."""

import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
width, heads, layers, tokens, batch = 512, 8, 6, 256, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.mixed(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(1024, width), *(Block() for _ in range(layers)), nn.Linear(width, 1024))

    def forward(self, words):
        with torch.autocast("cuda", torch.bfloat16):
            scores = self.layers(words[:, :-1])
        return F.cross_entropy(scores.float().flatten(0, 1), words[:, 1:].flatten())


words = torch.randint(1024, (batch, tokens + 1), device="cuda")
for way in ("eager", "compiled"):
    net = Net().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loss_of = torch.compile(net) if way == "compiled" else net
    times = []
    for _ in range(120):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(words)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - start)
    print(f"time {way}-step-ms {1e3 * statistics.median(times[20:]):.3f}")
