"""A transformer's training in PyTorch: losses and weights to the last bit, and what a step takes."""

import hashlib
import os
import statistics
import sys
import time

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
# Its gradients depend on the order in which blocks come.
torch.backends.cuda.enable_cudnn_sdp(False)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
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


model = nn.Sequential(nn.Embedding(1024, width), *(Block() for _ in range(layers)), nn.Linear(width, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
words = torch.randint(1024, (steps, batch, tokens + 1), device="cuda")
times = []
for step in range(steps):
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        scores = model(words[step, :, :-1])
    loss = F.cross_entropy(scores.float().flatten(0, 1), words[step, :, 1:].flatten())
    loss.backward()
    optimizer.step()
    said = loss.item()
    times.append(time.perf_counter() - start)
    if step % 10 == 9:
        print("loss", step, said.hex())
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
print("weights", digest.hexdigest())
print(f"time training-step-ms {1e3 * statistics.median(times[steps // 6 :]):.3f}")
