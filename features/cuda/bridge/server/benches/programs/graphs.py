"""PyTorch's captured graphs: callables that are captured forward and backward, with and without autocast, and of many streams."""

import hashlib
import itertools
import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
import torch.nn as nn

torch.use_deterministic_algorithms(True, warn_only=True)


class Layers(nn.Module):
    def __init__(self, all):
        super().__init__()
        self.all, self.other = all, nn.Linear(512, 8)
        self.first, self.second, self.drop = nn.Linear(512, 256), nn.Linear(256, 512), nn.Dropout(0.1)

    def forward(self, inputs):
        output = self.drop(self.second(torch.relu(self.first(inputs["x"]))))
        return {"output": output + 0 * self.other(inputs["y"]).sum() if self.all else output}


def train(amp, unused):
    torch.manual_seed(5)
    torch.cuda.manual_seed(5)
    model = Layers(not unused).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {name: torch.randn(640, 512, device="cuda", requires_grad=True) for name in "xy"}
    target = torch.randn(640, 512, device="cuda")
    with torch.autocast("cuda", enabled=amp, cache_enabled=False):
        call = torch.cuda.make_graphed_callables(model, (inputs,), allow_unused_input=unused)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", enabled=amp, cache_enabled=False):
            made = call({name: value.detach().clone().requires_grad_() for name, value in inputs.items()})
            loss = (made["output"].float() - target).square().mean()
        loss.backward()
        optimizer.step()
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
    print(amp, unused, loss.item().hex(), digest.hexdigest()[:32])


for amp, unused in itertools.product((False, True), (True, False)):
    train(amp, unused)

x = torch.randn(1 << 20, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
graph, side = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(3)]
with torch.cuda.graph(graph):
    here, parts = torch.cuda.current_stream(), []
    for index, stream in enumerate(side):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            parts.append((x * (index + 1)).sin().sum())
        here.wait_stream(stream)
    total = torch.stack(parts)
for _ in range(100):
    graph.replay()
print([value.hex() for value in total.tolist()])
