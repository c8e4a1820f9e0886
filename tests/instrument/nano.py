"""A loop as nanoGPT's: clip, dropout, tied weights. NANO_...: what a test changes in it."""

import hashlib
import os
import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F

get = os.environ.get
D, T, V, B = 32, 16, 64, 4
if seed := get("NANO_SEED", "1"):
    torch.manual_seed(int(seed))
    random.seed(int(seed))
    numpy.random.seed(int(seed))
AT = [0]
kind, name, place, bit, *_ = (get("NANO_FLIP", "") + "::::").split(":")


def vary(x):
    return x * (1 + 1e-6 * (os.urandom(1)[0] > 127))


class Varying(torch.autograd.Function):
    """Of its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return vary(gradient)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(D)
        self.fc, self.out = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        if get("NANO_NAN") == "backward" and AT[0] == 3 and self is model.h[1]:
            x = x * (x * 0).sqrt().mean().add(1)
        if get("NANO_VARIES"):
            x = vary(x) if get("NANO_VARIES") == "forward" else Varying.apply(x)
        return x + self.drop(self.out(F.gelu(self.fc(self.ln(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.wte.weight
        self.num_calls = 0

    def forward(self, idx, targets):
        self.num_calls += 1
        if self.num_calls == 1:
            print("the first call")
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, V), targets.view(-1))


def flip(tensor) -> None:
    with torch.no_grad():
        tensor.data.view(-1).view(torch.int32)[int(place)] ^= 1 << int(bit or 9)


model = GPT()
if get("NANO_PART"):
    whole = nn.Module()
    whole.net = model
if get("NANO_COMPILE"):
    model = torch.compile(model, backend="eager")
parameters = list(model.parameters())
named = dict(model.named_parameters())
if get("NANO_OPTIMIZER") == "two":
    optimizers = [
        torch.optim.AdamW([p for p in parameters if p.ndim > 1], lr=1e-3),
        torch.optim.SGD([p for p in parameters if p.ndim < 2], lr=1e-2, momentum=0.9),
    ]
elif get("NANO_OPTIMIZER") == "lbfgs":
    optimizers = [torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)]
else:
    optimizers = [torch.optim.AdamW(parameters, lr=1e-3, fused=bool(get("NANO_FUSED")))]
accumulation = int(get("NANO_ACCUMULATION", "1"))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125) if get("NANO_SCALER") else None
data = torch.arange(4096) * 7919 % V


def passes(scale=1.0):
    starts = torch.randint(len(data) - T - 1, (B,)).tolist()
    x, y = (torch.stack([data[s + o : s + o + T] for s in starts]) for o in (0, 1))
    loss = model(x, y)[1] / accumulation
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss


def closure():
    optimizers[0].zero_grad()
    return passes()


for step in range(int(get("NANO_STEPS", "6"))):
    AT[0] = step
    if get("NANO_NAN") == "forward" and step == 3:
        model.h[1].fc.weight.data[5, 7] = float("nan")
    if step == 3 and kind == "weight":
        flip(named[name])
    if step == 3 and kind not in ("", "weight", "gradient"):
        flip(next(o.state[named[name]][kind] for o in optimizers if named[name] in o.state))
    if get("NANO_OPTIMIZER") == "lbfgs":
        loss = optimizers[0].step(closure)
        print(step, loss.item())
        continue
    for _ in range(accumulation):
        loss = passes()
    if step == 3 and kind == "gradient":
        flip(named[name].grad)
    for optimizer in optimizers:
        if scaler is not None:
            scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    if scaler is not None:
        scaler.update()
    print(step, loss.item())
print(model.num_calls)
states = [x for o in optimizers for s in o.state.values() for x in s.values()]
tensors = [*parameters, *(x for x in states if isinstance(x, torch.Tensor)), torch.get_rng_state()]
contents = b"".join(x.detach().numpy().tobytes() for x in tensors)
contents += repr((random.getstate(), numpy.random.get_state())).encode()
print("END", hashlib.sha256(contents).hexdigest())
