"""What a watched script does besides training is left as it is, and is no fault of a GPU."""

from pathlib import Path

import pytest

from model_check.events import Break, Step
from tests.instrument.harness import are_calls_alike, plain, script, watched

SIDE_EFFECTS = """
    import collections, random, threading, numpy, torch
    from torch import nn
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1 = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            self.head = nn.Linear(8, 1)
            self.register_buffer("codes", torch.ones(8))
            self.seen, self.own, self.at = collections.deque(), random.Random(3), torch.zeros(2)
            self.numbers, self.generator = numpy.zeros(2), numpy.random.default_rng(3)

        def forward(self, x):
            self.seen.append(1)
            self.at += 1
            self.numbers += 1
            self.codes.data.mul_(0.9)
            scale = 1 + self.own.random() + self.generator.random()
            x = torch.utils.checkpoint.checkpoint(self.layer1, x * self.codes, use_reentrant=False)
            return self.head(x * scale)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        roots = (x for x in [model(torch.randn(4, 8)).sum()])
        torch.autograd.backward(roots)
        optimizer.step()
        optimizer.zero_grad()
        print([p.sum().item() for p in model.state_dict().values()])
        print(len(model.seen), model.at, model.numbers, model.own.random())
"""
PARTS = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Embedding(8, 8), "head": nn.Linear(8, 8, bias=False)})
    model.head.weight = model.body.weight
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        model.head(model.body(torch.arange(8))).square().sum().backward()
        optimizer.step()
        print(model.body.weight.sum().item())
"""
CHECKPOINTED = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
        optimizer.step()
        print(model[0].weight.sum().item())
"""
MOVING = """
    import torch
    from torch import nn
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.r = (nn.Linear(8, 8) for _ in range(3))
            self.k.requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                self.k.weight.mul_(0.9).add_(self.q.weight, alpha=0.1)
            self.r.weight.data = self.r.weight.data * 0.9
            return self.r(self.q(x) * self.k(x))

    model = Model()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), [p.sum().item() for p in model.parameters()])
"""
SPARSE_INPUT = """
    import torch
    from torch import nn
    torch.manual_seed(0)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, edges, x):
            return torch.sparse.mm(edges, self.drop(self.fc(x)))

    model, edges = Graph(), torch.eye(4).to_sparse()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        loss = model(edges, torch.ones(4, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
"""
LAZY = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(model[0].weight.sum().item())
"""
SHELL = """
    import torch
    from torch import nn

    class Shell(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            args = [each.inner if isinstance(each, cls) else each for each in args]
            found = function(*args, **(kwargs or {}))
            return cls(found) if isinstance(found, torch.Tensor) else found

    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x.inner)

    torch.manual_seed(0)
    model = Model(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(Shell(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(model.weight.sum().item())
"""
SPARSE = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        model(torch.tensor([1, step])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(model.weight.sum().item())
"""
SCALE = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        (model(torch.ones(2, 4)).sum() * model.scale).backward()
        optimizer.step()
        model.scale.data.fill_(1.0 if step % 2 else 1.5)
        print(step)
"""


ENCODER = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 3)
    alone = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
    fast, taken = torch._transformer_encoder_layer_fwd, []
    torch._transformer_encoder_layer_fwd = lambda *args: (taken.append(1), fast(*args))[1]
    optimizer = torch.optim.Adam([*model.parameters(), *alone.parameters()])
    for step in range(3):
        model.train(), alone.train()
        alone(model(torch.randn(4, 32, 64))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval(), alone.eval()
        with torch.no_grad():
            print(alone(model(torch.randn(4, 32, 64))).sum().item(), len(taken))
"""
TRACED = """
    import torch
    from torch import nn
    from torch.func import functional_call, grad, vmap
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode
    torch.manual_seed(0)

    class Counting(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += 1
            return function(*args, **(kwargs or {}))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.first(x))

    def helper(x: int) -> int:
        return x + 1

    @torch.jit.script
    class Pair:
        def __init__(self, x: int):
            self.x = helper(x)

    def loss(parameters, x):
        return functional_call(model, parameters, (x,)).sum()

    model, x = Model(), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for is_training in (True, False):
            model.train(is_training)
            print(torch.jit.trace(model, x).graph)
            print(torch.jit.script(obj=model).code)
            print(len(torch.fx.symbolic_trace(model).graph.nodes))
            print(vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x))
        model.train()
        with Counting() as seen, FlopCounterMode(display=False) as counter:
            if step == 1:
                model(x).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        print(counter.get_total_flops(), seen.number)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(model.head.weight)
"""
OUTSIDE = """
    import random, torch
    from torch import nn
    torch.manual_seed(0)
    losses, own, num_calls = [], random.Random(7), 0

    class Gate(nn.Linear):
        def forward(self, x):
            global num_calls
            num_calls += 1
            x = super().forward(x) * (1 + own.random()) * (2 if num_calls > 3 else 1)
            losses.append(x.square().mean())
            return x

    model = nn.Sequential(Gate(4, 4), nn.Tanh(), Gate(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.randn(2, 4)).sum() + sum(losses)
        losses.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), num_calls, own.random())
"""


@pytest.mark.parametrize(
    "text",
    [
        *(SIDE_EFFECTS, PARTS, CHECKPOINTED, MOVING, SPARSE_INPUT, LAZY, SHELL, SPARSE, SCALE),
        *(ENCODER, OUTSIDE, TRACED),
    ],
    ids=[
        "side effects",
        "parts that share weights",
        "checkpointed",
        "weights that a forward pass moves",
        "a sparse input",
        "lazy",
        "a tensor that is a shell",
        "a sparse gradient",
        "a clamped scale",
        "a fast path that hooks would close",
        "state outside the modules",
        "traced, scripted, counted and transformed",
    ],
)
def test_what_a_script_does_besides_is_not_changed_nor_taken_for_a_fault(
    text: str, tmp_path: Path
) -> None:
    path = script(tmp_path, text)
    ran, alone = watched(path, tmp_path / "a"), plain(path, tmp_path)
    assert (ran.exit_code, ran.stderr) == (0, alone.stderr)
    assert ran.stdout == alone.stdout
    assert len(ran.of(Step)) > 1
    assert ran.of(Break) == []
    env = {"MODEL_CHECK_REPLAY": "1", "MODEL_CHECK_STOP_AFTER": "1"}
    again = watched(path, tmp_path / "b", env=env)
    assert again.steps == ran.steps[:2]
    if text != TRACED:  # none is kept
        assert are_calls_alike(again, watched(path, tmp_path / "c", env=env))
