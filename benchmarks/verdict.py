"""Is a flipped bit seen, when, and is it named? `python -m benchmarks.verdict [--faults N]`.

Two healthy workers and one with a fault, compared as a run compares them: by the events of their
steps. A fault is one bit, or the same bit of 2 to 64 neighbours (at a multiple of 32), of a weight,
a buffer, a moment, a gradient or what flows through a module, forward or backward; at any moment of
a step: before the forward pass, between two blocks, behind the backward pass, before the update,
behind it, before the next step. It is drawn by a seed. What leaves no trace (every later number is
what it is without the fault) is out of anybody's reach, and counted apart.
"""

import argparse
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import torch
from torch import Tensor, nn

from launcher.verdict.agreement import Agreement
from launcher.verdict.disagreement import Disagreement, explain
from model_check.engine.assembly import build_trainer
from model_check.engine.results import AsyncMetrics, StepData
from model_check.engine.training_run import TrainingRun
from model_check.events import Break, Step, Vectors
from model_check.forensics.checksums import ChecksumVector
from model_check.forensics.fingerprint import eager_fingerprint
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.checksums import Checksums
from model_check.hooks.fingerprints import Fingerprints
from model_check.train import StepContext, gather, train_step
from model_check.utils.fingerprint import NUM_COLUMNS
from tests.engine.conftest import VOCABULARY, FakeSource, Kept, bare_context, make_settings

NUM_STEPS = 12
NUM_SLOTS = 4
"""Of the rotation, about."""
LR = 1e-3
STATE_MOMENTS = (
    *("before the forward pass", "between two blocks", "behind the backward pass"),
    *("just before the update", "just behind the update", "before the next step"),
)
GRADIENT_MOMENTS = STATE_MOMENTS[2:4]
STATE = ("weight", "buffer", "exp_avg", "exp_avg_sq")
FLOW = ("forward", "backward")


class Fault(NamedTuple):
    kind: str
    moment: str
    step: int
    name: str
    """Of a tensor or a module."""
    first: int
    num_values: int
    bit: int
    micro_batch: int = 0
    site: int = 0
    """Between two blocks: before this one."""

    def spoil(self, tensor: Tensor) -> tuple[int, int]:
        """The first value of it, and the bit."""
        width = torch.int16 if tensor.element_size() == 2 else torch.int32
        bits = 8 * tensor.element_size()
        bit = self.bit % bits
        mask = (1 << bit) - ((1 << bits) if bit == bits - 1 else 0)
        first = self.first % tensor.numel()
        if self.num_values > 1:
            first -= first % 32
        # Not detach(): autograd would notice.
        tensor.data.view(width).view(-1)[first : first + self.num_values] ^= mask
        return first, bit


class Tampered(Fingerprints):
    """Calls `act` at each moment of a step, with the number of the next site, or of the block that
    is updated."""

    act: Callable[[str, int], None]
    step = -1

    def begin(self, step: int) -> None:
        self.step = step
        super().begin(step)
        self.act("before the forward pass", 0)

    def see(self, x_BTE: Tensor) -> None:
        super().see(x_BTE)
        self.act("between two blocks", self._flow.next_site)

    def begin_update(self) -> None:
        self.act("behind the backward pass", 0)
        super().begin_update()

    def before(self, number: int, gradients: Sequence[Tensor]) -> None:
        super().before(number, gradients)
        self.act("just before the update", number)

    def after(self, number: int) -> None:
        self.act("just behind the update", number)
        super().after(number)

    def end_update(self, grad_norms: Tensor) -> ChecksumVector:
        prints = super().end_update(grad_norms)
        self.act("before the next step", 0)
        return prints


@dataclass
class Taken:
    """A step as its worker tells it, and all that it left."""

    event: Step
    vectors: Vectors
    broken: Break | None
    left: dict[str, Tensor]


@dataclass
class World:
    """One precision and one budget: a trainer, and how each step of a healthy worker looks."""

    trainer: TrainingRun
    context: StepContext
    prints: Tampered
    data: list[StepData]
    before: list[tuple[dict[str, Tensor], Any]] = field(default_factory=list)
    """Before each step: the state, and what of it the step before took."""
    clean: list[Taken] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """Of the state, by quantity and name."""
        state = self.trainer.state
        names = [name for name, _ in state.model.named_parameters()]
        found = {f"weight {n}": p.detach() for n, p in state.model.named_parameters()}
        found |= {f"buffer {n}": b for n, b in state.model.named_buffers()}
        for kind, moments in state.optimizer.moments.items():
            found |= {f"{kind} {n}": m for n, m in zip(names, moments, strict=True)}
        return found | {f"exp_avg {n}": t for n, t in state.optimizer.scalars.items()}

    def snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def restore(self, step: int) -> None:
        """As it was before that step."""
        state, self.prints._left = self.before[step]
        self.prints._step = None
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])

    def steps(self, first: int, log: ChecksumLog) -> Iterator[Taken]:
        state = self.trainer.state
        log.begin(self.prints.of_state_now())
        checksums = Checksums(self.prints, log, Mock())
        for data in self.data[first:]:
            result = train_step(self.context, data, LR, [checksums])
            (metrics,) = AsyncMetrics(0).push(data, LR, result)
            checksums.on_result(metrics)
            event = Step(
                step=data.step,
                loss=metrics.loss.hex(),
                grad_norm=metrics.grad_norm.hex(),
                lr=LR,
                ms=1.0,
                tokens=1,
                fp=log.roll_ups,
            )
            left = self.snapshot() | {
                f"gradient {n}": p.grad.clone()
                for n, p in state.model.named_parameters()
                if p.grad is not None
            }
            yield Taken(event, log.vectors(data.step), log.check(), left)


def world(precision: str, budget: str) -> World:
    settings = make_settings(
        model__num_layers=2,
        training__precision=precision,
        training__use_amp=str(precision != "fp32").lower(),
        training__max_steps=NUM_STEPS,
        training__grad_accum_nums=2,
    )
    trainer = build_trainer(settings, FakeSource(), VOCABULARY, bare_context(Kept()), 0)
    model, optimizer = trainer.state.model, trainer.state.optimizer
    all_bytes = 7 * sum(parameter.nbytes for parameter in optimizer.parameters)
    prints = Tampered(
        model,
        optimizer,
        eager_fingerprint,
        sites=model.sites,
        last_step=NUM_STEPS - 1,
        budget_bytes=None if budget == "full" else all_bytes / NUM_SLOTS,
        site_bytes=4 * 2 * 2 * 16 * 32,
    )
    prints.act = _nothing
    context = replace(trainer.trainer.context, watchers=(prints,), update_watcher=prints)
    stream = FakeSource().batches()
    data = [gather(stream, step, 2, context.device) for step in range(NUM_STEPS)]
    made = World(trainer, context, prints, data)
    for taken in _clean(made):
        made.clean.append(taken)
    return made


def _clean(made: World) -> Iterator[Taken]:
    made.before.append((made.snapshot(), made.prints._left))
    for taken in made.steps(0, ChecksumLog()):
        made.before.append((made.snapshot(), made.prints._left))
        yield taken


def drawn(made: World, draw: random.Random) -> Fault:
    kind = draw.choice([*STATE, "gradient", *FLOW])
    step = draw.randrange(1, NUM_STEPS - 1)
    common: dict[str, Any] = {
        "kind": kind,
        "step": step,
        "num_values": draw.choice([1, 1, 1, draw.randint(2, 64)]),
        "bit": draw.randrange(32),
        "micro_batch": draw.randrange(2),
    }
    if kind in FLOW:
        names = [n for n, m in made.trainer.state.model.named_modules() if _flows(n, m)]
        name, first = draw.choice(names), draw.randrange(1 << 20)
        return Fault(moment="in its pass", name=name, first=first, **common)
    moments = GRADIENT_MOMENTS if kind == "gradient" else STATE_MOMENTS
    sizes = {
        name.split(" ", 1)[1]: tensor.numel()
        for name, tensor in made.clean[0].left.items()
        if name.split(" ")[0] == kind
    }
    name = draw.choices(list(sizes), [*sizes.values()])[0]
    first = draw.randrange(sizes[name])
    site = draw.randrange(1, 5)
    return Fault(moment=draw.choice(moments), name=name, first=first, site=site, **common)


def _flows(name: str, module: nn.Module) -> bool:
    """Whether it is called in both passes; the head is not, and an embedding hands back nothing."""
    return name not in ("", "loss", "output", "layers") and not isinstance(module, nn.ModuleList)


class Seen(NamedTuple):
    fault: Fault
    has_trace: bool
    at: int | None
    """The step in which it was noticed; None: never."""
    is_gone: bool = False
    """Not noticed, and at the end of the run every bit of the state is what it has to be."""
    is_right: bool = False
    """The worker, and nobody else."""
    tensor: str = ""
    flip: tuple[tuple[int, int], ...] = ()
    place: tuple[int, int] | None = None
    """Of the value and bit that were turned over."""
    by_loss: bool = False
    by_norm: bool = False
    by_xor: bool = False
    by_hash: bool = False


def play(made: World, fault: Fault) -> Seen:
    """From the step before the fault to the one that notices it, or to the end."""
    made.restore(fault.step - 1)
    injection = Injection(made, fault)
    traced, by = False, Counter[str]()
    agreement = Agreement({"GPU0": "", "GPU1": "", "GPU2": ""})
    try:
        for taken in made.steps(fault.step - 1, ChecksumLog()):
            clean = made.clean[taken.event.step]
            traced |= _differs(taken, clean)
            if taken.event.step == fault.step:
                by = _others(taken, clean)
            found = _noticed(agreement, clean, taken)
            if found is not None:
                at = taken.event.step
                return Seen(fault, True, at, False, *found, injection.place, **by)
    finally:
        injection.close()
    is_gone = _equal(made.snapshot(), made.clean[-1].left)
    return Seen(fault, traced, None, is_gone, **by)


def _noticed(
    agreement: Agreement, clean: Taken, taken: Taken
) -> tuple[bool, str, tuple[tuple[int, int], ...]] | None:
    if (broken := taken.broken) is not None:
        flip = tuple((value, bit) for value, bit in broken.found)
        return True, f"{broken.quantity} {broken.tensor}", flip
    difference: Disagreement | None = None
    for name, event in (("GPU0", clean), ("GPU1", taken), ("GPU2", clean)):
        difference = agreement.record(name, event.event)
    if difference is None:
        return None
    sent = {"GPU0": clean.vectors, "GPU1": taken.vectors, "GPU2": clean.vectors}
    difference = explain(difference, sent)
    named = difference.tensor
    flips = named.found.get("GPU1", []) if named else []
    tensor = f"{difference.quantity} {named.name if named else ''}"
    flip = tuple((value, bit) for value, bit in flips)
    return difference.odd == ("GPU1",), tensor, flip


class Injection:
    """One fault, put in once."""

    def __init__(self, made: World, fault: Fault) -> None:
        self._made = made
        self._fault = fault
        self._is_due = True
        self.place: tuple[int, int] | None = None
        """Value and bit."""
        made.prints.act = self._act
        self._remove: Callable[[], None] = lambda: None
        if fault.kind in FLOW:
            module = made.trainer.state.model.get_submodule(fault.name)
            self._remove = module.register_forward_hook(self._forward).remove

    def close(self) -> None:
        self._made.prints.act = _nothing
        self._remove()

    def _act(self, moment: str, site: int) -> None:
        fault = self._fault
        is_here = True
        if moment == "between two blocks":
            is_here = self._now() == (fault.micro_batch, fault.site)
        elif "the update" in moment:
            is_here = site == self._block()
        if moment == fault.moment and self._is_its_step() and is_here:
            self._is_due = False
            self._act_on(fault)

    def _block(self) -> int:
        """The number of the one that updates the tensor, or what belongs to it."""
        state = self._made.trainer.state
        names = [name for name, _ in state.model.named_parameters()]
        if self._fault.name not in names:
            return 0
        number = names.index(self._fault.name)
        first = self._fault.first % state.optimizer.parameters[number].numel()
        return next(
            n
            for n, block in enumerate(state.optimizer.blocks)
            if any(p.owner == number and p.first <= first < p.end for p in block.parts)
        )

    def _act_on(self, fault: Fault) -> None:
        if fault.kind == "gradient":
            gradient = self._made.trainer.state.model.get_parameter(fault.name).grad
            assert gradient is not None
            self.place = fault.spoil(gradient)
        else:
            self.place = fault.spoil(self._made.tensors()[f"{fault.kind} {fault.name}"])

    def _forward(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        is_here = self._now()[0] == self._fault.micro_batch
        if not (self._is_its_step() and is_here):
            return None
        self._is_due = False
        if self._fault.kind == "forward":
            return self._spoilt(output)
        output.register_hook(self._spoilt)  # type: ignore[no-untyped-call]
        return None

    def _spoilt(self, tensor: Tensor) -> Tensor:
        values = tensor.detach().clone()
        value, bit = self._fault.spoil(values)
        rows_before = self._now()[0] * -(-values.numel() // NUM_COLUMNS)
        self.place = value + rows_before * NUM_COLUMNS, bit
        return _with_values(tensor, values)

    def _is_its_step(self) -> bool:
        return self._is_due and self._made.prints.step == self._fault.step

    def _now(self) -> tuple[int, int]:
        return self._made.prints._flow.micro_batch, self._made.prints._flow.next_site


class _WithValues(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, _tensor: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """`values`, whose gradient goes where that of `tensor` goes."""
    spoilt: Tensor = _WithValues.apply(tensor, values)
    return spoilt


def _nothing(moment: str, site: int) -> None:
    pass


def _differs(taken: Taken, clean: Taken) -> bool:
    """Whether anything that the step computed or left is not what it is without the fault."""
    if (taken.event.loss, taken.event.fp) != (clean.event.loss, clean.event.fp):
        return True
    return not _equal(taken.left, clean.left)


def _equal(found: dict[str, Tensor], clean: dict[str, Tensor]) -> bool:
    return all(torch.equal(_bits(t), _bits(clean[name])) for name, t in found.items())


def _others(taken: Taken, clean: Taken) -> dict[str, bool]:
    """Which simpler comparisons notice it in its step."""
    loss = taken.event.loss != clean.event.loss
    return {
        "by_loss": loss,
        "by_norm": loss or taken.event.grad_norm != clean.event.grad_norm,
        "by_xor": any(_xor(t) != _xor(clean.left[name]) for name, t in taken.left.items()),
        "by_hash": any(_hash(t) != _hash(clean.left[name]) for name, t in taken.left.items()),
    }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


def _xor(tensor: Tensor) -> int:
    return int(np.bitwise_xor.reduce(_bits(tensor).numpy().ravel()))


def _hash(tensor: Tensor) -> int:
    return int(torch.hash_tensor(tensor).view(torch.int64))


def is_single(fault: Fault) -> bool:
    """One bit, of a tensor whose fingerprint is the next thing that is made of it."""
    if fault.kind == "forward" and fault.num_values == 1:
        return fault.name in ("tok_embed", "layers.0", "layers.1", "norm")
    is_taken_next = fault.kind not in FLOW and fault.moment != STATE_MOMENTS[3]
    return fault.num_values == 1 and is_taken_next


def is_named(seen: Seen) -> bool:
    """The tensor, or what flows right behind the module."""
    fault = seen.fault
    if fault.kind in ("weight", "buffer"):
        return seen.tensor.split(" ")[-1] == fault.name and "weights" in seen.tensor
    if fault.kind not in FLOW:
        return seen.tensor.split(" ")[-1] == fault.name
    return _block(fault.name) in _neighbours(seen.tensor)


def _block(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _neighbours(tensor: str) -> set[str]:
    """The blocks in which a difference may have been born that is first seen there: the one that
    handed it on; of a gradient also the one behind, which computed it."""
    quantity, name = tensor.split(" ")
    order = ["tok_embed", "layers.0", "layers.1", "norm", "loss"]
    block = _block(name)
    if quantity != "backward":
        return {block}
    return {block, order[order.index(block) + 1]}


class Row:
    """Of a class of faults."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.late: list[int] = []

    def add(self, seen: Seen) -> None:
        fault, counts = seen.fault, self.counts
        counts["injected"] += 1
        counts["traced"] += seen.has_trace
        counts["found"] += seen.at is not None
        counts["false"] += seen.at is not None and not seen.is_right
        counts["named"] += seen.at is not None and is_named(seen)
        counts["gone"] += seen.has_trace and seen.is_gone
        counts["single"] += seen.at is not None and is_single(fault)
        counts["flip"] += is_single(fault) and seen.flip == (seen.place,)
        for way in ("by_loss", "by_norm", "by_xor", "by_hash"):
            counts[way] += seen.has_trace and getattr(seen, way)
        if seen.at is not None:
            # What comes behind the last look of a step is due at the next one.
            due = fault.step + (fault.moment == STATE_MOMENTS[-1])
            counts["same"] += seen.at <= due
            self.late.append(max(0, seen.at - due))

    def cells(self) -> list[str]:
        c = self.counts
        return [
            *(str(c[name]) for name in ("injected", "traced", "gone", "found", "same")),
            str(max(self.late, default=0)),
            *(str(c[name]) for name in ("false", "named")),
            f"{c['flip']}/{c['single']}",
            *(str(c[name]) for name in ("by_loss", "by_norm", "by_xor", "by_hash")),
        ]


HEAD = (
    *("faults", "injected", "left a trace", "unseen, gone at the end", "found", "in its step"),
    "steps late at most",
    *("wrong worker", "tensor or block right", "value and bit right"),
    *("by loss", "by loss or norm", "by XOR", "by torch.hash_tensor"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=2400, help="of both precisions and budgets")
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    rows: defaultdict[tuple[str, ...], Row] = defaultdict(Row)
    for precision in ("fp32", "bf16"):
        for budget in ("full", "rotate"):
            made = world(precision, budget)
            draw = random.Random(f"{arguments.seed} {precision} {budget}")
            for _ in range(arguments.faults // 4):
                seen = play(made, drawn(made, draw))
                how = "one bit" if seen.fault.num_values == 1 else "burst"
                for key in (("all",), (seen.fault.kind,), (seen.fault.moment,), (how,)):
                    rows[precision, budget, *key].add(seen)
                is_reached = seen.has_trace and not seen.is_gone
                if is_reached and (seen.at is None or not seen.is_right):
                    print("missed:", precision, budget, seen)
    print(f"seed {arguments.seed}, {arguments.faults} faults, {time.monotonic() - began:.0f} s\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for key, row in sorted(rows.items(), key=lambda item: (item[0][:2], item[0][2] != "all")):
        print(f"| {', '.join(key)} | {' | '.join(row.cells())} |")


if __name__ == "__main__":
    main()
