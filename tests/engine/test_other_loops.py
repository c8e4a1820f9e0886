"""Fingerprints, the search for NaN, evidence and drills on a loop that is not ours: plain modules
and an optimizer of torch.optim."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_check.config.drill import parse_drill
from model_check.engine.results import AsyncMetrics, StepData, StepResult
from model_check.errors import BrokenStateError, NonFiniteError
from model_check.events import Break, NonFinite
from model_check.forensics.fingerprint import fingerprint_for
from model_check.forensics.manifest import read_manifest
from model_check.forensics.optimizer import TorchOptimizer
from model_check.forensics.origin import Search
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.checksums import Checksums, DeterminismCheck, StateCheck
from model_check.hooks.evidence import EvidenceWriter
from model_check.hooks.fingerprints import Fingerprints
from model_check.hooks.hook import Hook
from model_check.hooks.inject import Injector
from model_check.hooks.lockstep import Lockstep, SupervisorClient
from model_check.hooks.nonfinite import NonFiniteHandler
from model_check.hooks.site_monitor import SiteMonitor
from tests.engine.conftest import Kept, bare_context

NUM_STEPS = 6
MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """Of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Loop:
    """Trains a net; its hooks begin with the second step, when the optimizer has a state."""

    def __init__(self, optimizer: MakeOptimizer, directory: Path, drill: str | None = None) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters())
        self.kept = Kept()
        self._passes(self._data(0))
        self.optimizer.step()
        context = replace(
            bare_context(self.kept, directory),
            drill=parse_drill(drill, NUM_STEPS) if drill else None,
        )
        seen = TorchOptimizer(self.model, self.optimizer)
        sites = ["blocks.0", "blocks.1"]
        self.monitor, log = SiteMonitor(sites), ChecksumLog()
        kernel = fingerprint_for(torch.device("cpu"))
        self.fingerprints = Fingerprints(
            self.model, seen, kernel, sites=sites, last_step=NUM_STEPS - 1
        )
        for site in sites:
            self.model.get_submodule(site).register_forward_hook(self._see)
        evidence = EvidenceWriter(self.model, seen, context, 2**20)
        injector = Injector(context.drill, "CPU0", self.model, seen)
        nonfinite = NonFiniteHandler(
            self.model,
            seen,
            context,
            self._again,
            self.monitor,
            injector,
            evidence,
            lag=0,
            proves=True,
        )
        client = SupervisorClient(self.kept, context.stop, on_notice=False)
        checks = (self.fingerprints, log, nonfinite, evidence, client, context)
        state_check = StateCheck(self.model, seen, *checks, num_steps=NUM_STEPS)
        self.hooks: list[Hook] = [
            DeterminismCheck(self._watched, self.fingerprints, log, is_deterministic=True),
            injector,
            Checksums(self.fingerprints, log, state_check),
            nonfinite,
            state_check,
            Lockstep(client, lambda: None, num_steps=NUM_STEPS, keeps_step=False),
        ]
        self.seen, self.log = seen, log
        self.is_watched = False

    def run(self) -> "Loop":
        self.vectors = []
        for step in range(1, NUM_STEPS):
            self._train(self._data(step))
            self.vectors.append(self.log.vectors(step))
        return self

    def _train(self, data: StepData) -> None:
        for hook in self.hooks:
            hook.before_step(data)
        loss = self._watched(data)
        for hook in self.hooks:
            hook.after_backward(data)
        norms = self.seen.grad_norms()
        norm = torch.linalg.vector_norm(norms)
        bad = ~(loss.isfinite() & norm.isfinite())
        (block,) = self.seen.blocks
        self.fingerprints.before(0, block.gradients())
        if not bad:
            self.optimizer.step()
        self.fingerprints.after(0)
        result = StepResult(loss, norm, bad, norms)
        for hook in self.hooks:
            hook.after_update(data, result)
        for metrics in AsyncMetrics(0).push(data, 0.1, result):
            for hook in self.hooks:
                hook.on_result(metrics)

    def _data(self, step: int) -> StepData:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(3, 8, generator=generator), torch.randn(3, 4, generator=generator)
        return StepData(step, [(x, y)], 3, 3)

    def _watched(self, data: StepData) -> Tensor:
        self.is_watched = True
        for watcher in (self.monitor, self.fingerprints):
            watcher.begin(data.step)
        loss = self._passes(data)
        for watcher in (self.monitor, self.fingerprints):
            watcher.end_micro_batch()
        self.is_watched = False
        return loss

    def _again(self, data: StepData, search: Search) -> Tensor:
        loss = self._passes(data)
        search.end_micro_batch()
        return loss

    def _passes(self, data: StepData) -> Tensor:
        self.optimizer.zero_grad()
        ((x, y),) = data.micro_batches
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        return loss.detach()

    def _see(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        if self.is_watched:
            self.monitor.see(output)
            self.fingerprints.see(output)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_two_loops_have_equal_fingerprints_and_nothing_is_found(
    optimizer: MakeOptimizer, tmp_path: Path
) -> None:
    one, other = (Loop(optimizer, tmp_path).run() for _ in range(2))
    assert one.vectors == other.vectors
    kinds = {"exp_avg", "exp_avg_sq", "step"} if optimizer is adamw else {"momentum_buffer"}
    passes = {"forward", "backward", "gradients", "grad_norms"}
    state = {"weights", *kinds}
    assert set(one.vectors[0].fp) == passes | state | {f"before.{kind}" for kind in state}
    assert one.kept.events == []


@pytest.mark.parametrize("kind", ["weights", "exp_avg", "momentum_buffer"])
def test_a_bit_of_the_state_that_turns_over_is_named(kind: str, tmp_path: Path) -> None:
    loop = Loop(momentum if kind == "momentum_buffer" else adamw, tmp_path)

    class Flip(Hook):
        def before_step(self, data: StepData) -> None:
            if data.step == 3:
                tensor = loop.seen.kept(2)[kind]
                tensor.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 9)

    loop.hooks.insert(1, Flip())
    with pytest.raises(BrokenStateError):
        loop.run()
    found = loop.kept.events[-1]
    assert isinstance(found, Break)
    assert (found.quantity, found.tensor) == (kind, "blocks.1.0.weight")
    assert (found.step, found.since, found.found) == (3, 2, [(5, 9)])


@pytest.mark.parametrize(
    ("drill", "name"),
    [
        ("flip_gradient@3:all:head.weight:7", "head.weight"),
        ("flip@3:all:blocks.0.0.weight", "blocks.0.0.weight"),
    ],
)
def test_a_fault_of_a_drill_shows_between_two_loops(drill: str, name: str, tmp_path: Path) -> None:
    loop, clean = Loop(adamw, tmp_path, drill), Loop(adamw, tmp_path).run()
    if drill.startswith("flip@"):
        with pytest.raises(BrokenStateError, match=name):
            loop.run()
        return
    loop.run()
    pairs = zip(loop.vectors, clean.vectors, strict=True)
    differ = [a.fp["gradients"] != b.fp["gradients"] for a, b in pairs]
    assert differ == [False, False, True, True, True]
    ours, theirs = loop.vectors[2].fp["gradients"], clean.vectors[2].fp["gradients"]
    assert [key for key in ours if ours[key] != theirs[key]] == [name]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("is_always", [True, False])
def test_the_module_that_made_a_nan_is_named_and_evidence_kept(
    direction: str, is_always: bool, tmp_path: Path
) -> None:
    loop = Loop(adamw, tmp_path)
    is_due = [True]

    def spoil(tensor: Tensor) -> Tensor:
        if not is_due[0]:
            return tensor
        is_due[0] = is_always
        return tensor * float("nan")

    def spoil_forward(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        if direction == "forward":
            return spoil(output)
        output.register_hook(spoil)  # type: ignore[no-untyped-call]
        return output

    loop.hooks.insert(1, Spoils(loop.model.blocks[1], spoil_forward))
    with pytest.raises(NonFiniteError):
        loop.run()
    found = [event for event in loop.kept.events if isinstance(event, NonFinite)][-1]
    assert found.origin is not None
    assert (found.step, found.origin.direction) == (3, direction)
    assert found.repeated is is_always
    assert found.origin.module.startswith("blocks.1" if direction == "forward" else "")
    manifest = read_manifest(tmp_path / "dossier")
    assert "weights/head.weight" in manifest.tensors


class Spoils(Hook):
    """The module computes with this hook in step 3."""

    def __init__(self, module: nn.Module, hook: Callable[..., Tensor]) -> None:
        self._module, self._hook = module, hook

    def before_step(self, data: StepData) -> None:
        if data.step == 3:
            self._module.register_forward_hook(self._hook, prepend=True)
