"""training.bf16_copies: matrices are cast once a step, and a run has the bits of autocast; a copy
never outlives the weights that it was made of."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from model_check import train as train_module
from model_check.engine import compile as compile_module
from model_check.engine.uncompiled import is_compiled
from model_check.errors import BrokenStateError, NonFiniteError
from model_check.events import Break, Evaluation, NonFinite, Phase
from model_check.models import weight_copies
from model_check.models.weight_copies import Multiplier, holding_copies
from model_check.train import accumulate, train_step
from tests.engine.conftest import FakeBatch, FakeSource, Run
from tests.engine.test_step import Calls, gradients, micro_batches

MakeRun = Callable[..., Run]
COPIES = {"training__bf16_copies": "true"}
BFLOAT16: dict[str, Any] = {
    "training__use_amp": "true",
    "training__grad_accum_nums": 3,
    "training__learning_rate": 1e-2,
    "training__max_grad_norm": 0.5,
    "training__max_steps": 8,
    "training__loss_chunk_rows": 24,
    "model__num_layers": 2,
}


def with_documents(number: int) -> FakeBatch:
    batch = FakeSource().random(number)
    return FakeBatch(batch.inputs, batch.targets, torch.arange(16).repeat(2, 1) // 5)


def losses_of(run: Run) -> list[str]:
    """Of its evaluations."""
    return [event.loss for event in run.kept.events if isinstance(event, Evaluation)]


def batches_of(*sizes: int) -> Iterator[FakeBatch]:
    """A split whose last batch is smaller."""
    for number, size in enumerate(sizes):
        batch = FakeSource().random(100 + number)
        yield FakeBatch(batch.inputs[:size], batch.targets[:size])


def has_taken(run: Run) -> bool:
    return run.step_context.copies_of is not None


def same_weights(one: Run, other: Run) -> bool:
    ours, theirs = one.weights(), other.weights()
    return all(map(torch.equal, ours.values(), theirs.values())) and ours.keys() == theirs.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training__gradient_checkpointing": "true"},
        {"model__tie_word_embeddings": "true"},
        {"model__attention": "infini", "model__infini__segment_length": 4},
        {"model__attention_backend": "eager"},
        {"data__document_masking": "true"},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_a_run_has_the_bits_of_autocast(tiny_run: MakeRun, changes: dict[str, Any]) -> None:
    """Losses, norms, fingerprints, evaluations and weights, with accumulation and a norm that is
    clipped."""
    make = with_documents if "data__document_masking" in changes else None

    def run(**more: Any) -> Run:
        made = tiny_run(
            FakeSource(make=make),
            splits={"val": lambda: iter([FakeSource(make=make).random(100)])},
            training__eval_interval=4,
            debug__fingerprints="full",
            **BFLOAT16 | changes | more,
        )
        return made()

    plain, ours = run(), run(**COPIES)
    assert has_taken(ours)
    assert not has_taken(plain)
    assert not any("copies" in line for line in ours.kept.lines)
    assert ours.bits() == plain.bits()
    assert max(float.fromhex(norm) for _, norm in plain.bits()) > 0.5  # clipped
    prints = [[step.fp for step in each.kept.steps()] for each in (ours, plain)]
    assert prints[0] == prints[1]
    assert losses_of(ours) == losses_of(plain)
    assert len(losses_of(ours)) == 2
    assert same_weights(ours, plain)


class Watched:
    """Sees each forward context of a run: that its copies are what the weights are, when it begins
    and when it ends."""

    def __init__(self) -> None:
        self.num_contexts = 0

    @contextmanager
    def holding(
        self, held: Sequence[tuple[Multiplier, Tensor]], dtype: torch.dtype
    ) -> Iterator[None]:
        with holding_copies(held, dtype):
            before = self.checked(held)
            yield
            assert self.checked(held) == before
        assert all(module.weight_copy is None for module, _ in held)
        self.num_contexts += 1

    def checked(self, held: Sequence[tuple[Multiplier, Tensor]]) -> list[int]:
        """How often each weight was written to."""
        for module, weight in held:
            assert module.weight_copy is not None
            fresh = weight.detach().bfloat16()  # its bits: a drill may have made a NaN
            copy = module.weight_copy.detach()
            assert torch.equal(copy.view(torch.int16), fresh.view(torch.int16))
        return [weight._version for _, weight in held]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched()
    monkeypatch.setattr(train_module, "holding_copies", watched.holding)
    return watched


def test_copies_are_those_of_the_weights_in_all_that_a_run_computes(
    tiny_run: MakeRun, tmp_path: Path, watched: Watched
) -> None:
    """Its trial, its first step twice, steps, evaluations, a resumed run."""

    def run(**changes: Any) -> Run:
        return tiny_run(
            splits={"val": lambda: batches_of(2, 1)},
            training__eval_interval=4,
            training__save_interval=4,
            **BFLOAT16 | COPIES | changes,
        )()

    whole = run()
    # 3 steps of the trial, the first step once more, 8 steps, 2 evaluations
    assert watched.num_contexts == 3 + 1 + 8 + 2
    checkpoint = tmp_path / "checkpoints" / "step_4.pt"
    for setting, taken in (("true", True), ("false", False)):
        resumed = run(training__resume=checkpoint, training__bf16_copies=setting)
        assert has_taken(resumed) is taken
        assert resumed.bits() == whole.bits()[4:]
        assert same_weights(resumed, whole)
    names = set(whole.trainer.state.model.state_dict())
    assert names == {name for name, _ in whole.trainer.state.model.named_parameters()}
    assert set(torch.load(checkpoint)["model"]) == names
    assert not any("copy" in name for name, _ in whole.trainer.state.tensors())


@pytest.mark.parametrize(
    "drill",
    [
        "flip@3:all:layers.1.feed_forward.w2.weight:30",
        "nan_weight@3:all:layers.0.attention.wq.weight",
        "nan@3:all:output.weight",
        "nan_forward@3:all:layers.1.attention.wo",
        "inf_backward@3:all:layers.0.feed_forward:always",
    ],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_fault_shows_in_the_step_and_is_named_as_under_autocast(
    tiny_run: MakeRun, watched: Watched, drill: str, lag: int
) -> None:
    """A refused step leaves the weights, and the steps behind it their copies, as they are; it is
    computed again with copies of the same weights."""
    runs = []
    for copies in ({}, COPIES):
        run = tiny_run(lag=lag, debug__drill=drill, **BFLOAT16 | copies)
        with pytest.raises((NonFiniteError, BrokenStateError)):
            run()
        runs.append(run)
    plain, ours = runs
    assert has_taken(ours)
    assert ours.bits() == plain.bits()
    assert same_weights(ours, plain) or "nan_weight" in drill
    told = [
        [replace(e, t=0) for e in run.kept.events if isinstance(e, NonFinite | Break)]
        for run in runs
    ]
    assert told[0] == told[1] != []


def test_a_step_after_a_refused_one_takes_the_weights_as_they_are(
    tiny_run: MakeRun, watched: Watched
) -> None:
    run, plain = (tiny_run(**BFLOAT16 | copies) for copies in (COPIES, {}))
    for each in (run, plain):
        state = each.trainer.state
        handle = state.model.norm.weight.register_hook(lambda grad: grad * float("nan"))
        before = each.weights()
        result = train_step(each.step_context, micro_batches(2), 0.1)
        assert bool(result.bad)
        handle.remove()
        assert all(map(torch.equal, each.weights().values(), before.values()))
        accumulate(each.step_context, micro_batches(2))
    assert all(map(torch.equal, gradients(run), gradients(plain)))


def test_a_bit_that_turns_over_in_a_copy_shows_in_its_step_and_is_gone_in_the_next(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noticed as one in what flows between blocks is: loss, norm and gradients are others
    than those of equal workers. No weight has it."""
    run, healthy = (tiny_run(**BFLOAT16 | COPIES) for _ in range(2))
    state, context = run.trainer.state, run.step_context

    def flip(module: Any, inputs: Any) -> None:
        module.weight_copy.detach().view(torch.int16).view(-1)[0] ^= 1 << 13

    before = run.weights()
    handle = state.model.layers[1].feed_forward.w1.register_forward_pre_hook(flip)
    loss = accumulate(context, micro_batches(1))
    handle.remove()
    clean = accumulate(healthy.step_context, micro_batches(1))
    assert loss != clean
    assert not any(map(torch.equal, gradients(run), gradients(healthy)))
    assert all(map(torch.equal, run.weights().values(), before.values()))
    assert accumulate(context, micro_batches(1)) == clean
    assert all(map(torch.equal, gradients(run), gradients(healthy)))


@pytest.mark.parametrize(
    ("copies", "expected"), [({}, [8, 11]), (COPIES, [8, 8])], ids=["autocast", "copies"]
)
def test_matrices_are_cast_once_a_step_and_by_autocast_the_head_in_each_micro_batch(
    tiny_run: MakeRun, copies: dict[str, str], expected: list[int]
) -> None:
    run = tiny_run(training__use_amp="true", **copies)
    model, counts = run.trainer.state.model, []
    weights = {weight.data_ptr() for _, weight in model.multiplied}
    for number in (1, 4):
        with Calls() as calls:
            accumulate(run.step_context, micro_batches(number))
        counts.append(sum(address in weights for address in calls.cast))
    assert counts == expected


OFF = r"(its loss is 3\.\d+, and 3\.\d+ by autocast|the gradient of \S+ is off .*)"


def spend(copy: Tensor, _: Tensor) -> None:
    copy.zero_()


def lie(kind: str, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A cast that is not to be trusted."""
    num_calls = 0

    def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        copy = real(weight, dtype)
        if kind == "raises":
            raise RuntimeError("no kernel image")
        if kind == "spent" and copy.requires_grad:  # good for one micro-batch
            copy.register_hook(partial(spend, copy.data))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if kind == "stale":
                copy.zero_()
            if kind == "wrong":
                copy.mul_(1.5)
            if kind == "nan":
                copy.view(-1)[0] = float("nan")
            if kind == "varies":
                copy.view(-1)[0] += num_calls
        return copy

    return cast


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raises", "RuntimeError: no kernel image"),
        ("stale", r"the gradient of \S+ is off by 1 of its size.*"),
        ("wrong", OFF),
        ("spent", OFF),
        ("nan", "its loss is nan, and .* by autocast"),
        ("varies", "3 equal steps give other bits of the loss"),
    ],
)
def test_copies_that_fail_their_trial_are_not_taken(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    plain = tiny_run(**BFLOAT16)()
    monkeypatch.setattr(weight_copies, "cast", lie(kind, weight_copies.cast))
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        run = tiny_run(**BFLOAT16 | COPIES)()
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert not has_taken(run)
    (told,) = [line for line in run.kept.lines if "not taken" in line]
    text = r"training\.bf16_copies = true: not taken, autocast casts the weights: "
    assert re.fullmatch(text + said, told), told
    assert run.bits() == plain.bits()
    train = next(e for e in run.kept.events if isinstance(e, Phase) and e.name == "train")
    assert train.detail["bf16_copies"] is False


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.timeout(900)
def test_compiled_code_casts_no_weight_and_nothing_breaks_or_compiles_again(
    tiny_run: MakeRun, watched: Watched, compiler: str
) -> None:
    """With accumulation, evaluation with a smaller last batch, and recomputed blocks."""
    from torch._dynamo.utils import counters

    def run(compiled: str, **changes: Any) -> Run:
        return tiny_run(
            splits={"val": lambda: batches_of(2, 2, 1)},
            training__compile=compiled,
            training__eval_interval=10,
            **BFLOAT16 | {"training__max_steps": 50} | changes,
        )

    ours = run("true", **COPIES)
    assert has_taken(ours)
    assert is_compiled(ours.trainer.state.model), ours.kept.lines
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        ours()
    assert counters["stats"]["unique_graphs"] == before
    assert not counters["graph_break"]
    assert len(ours.bits()) == 50
    eager = run("false")()
    for mine, theirs in zip(losses_of(ours), losses_of(eager), strict=True):
        assert float.fromhex(mine) == pytest.approx(float.fromhex(theirs), rel=2e-2)


def is_matrix(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("copies", "expected"), [({}, 7), (COPIES, 0)], ids=["autocast", "copies"])
def test_a_compiled_block_casts_its_seven_matrices_only_without_copies(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, copies: dict[str, str], expected: int
) -> None:
    """As the compiler gets it, forward and backward pass."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    casts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        given = [node for node in graph.graph.nodes if node.op == "placeholder"]
        users = [user for node in given if is_matrix(node.meta["val"]) for user in node.users]
        casts.append(sum(user.target is torch.ops.aten._to_copy.default for user in users))
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return,no-untyped-call]

    backend, real = aot_autograd(fw_compiler=count, bw_compiler=count), torch.compile

    def compile_with(function: Any, *, fullgraph: bool) -> Any:
        return real(function, fullgraph=fullgraph, backend=backend)

    monkeypatch.setattr(compile_module, "_refuse_without_compiler", lambda: None)
    monkeypatch.setattr(torch, "compile", compile_with)
    run = tiny_run(training__compile="true", **BFLOAT16 | copies)
    assert is_compiled(run.trainer.state.model), run.kept.lines
    assert max(casts) == expected
