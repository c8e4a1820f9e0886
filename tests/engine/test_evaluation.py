"""Validation: the right numbers, and no trace in the training."""

import itertools
import math
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model_check.engine.rng import rng_states
from model_check.engine.stop import Terminated
from model_check.engine.uncompiled import untouched
from model_check.events import Beat, Evaluation, Note, Phase
from model_check.hooks import lockstep
from model_check.hooks.evaluate import Evaluate, _evaluation, perplexity
from model_check.model import IGNORED
from tests.engine.conftest import FakeBatch, FakeSource, Run
from tests.engine.saving.test_resume import SPLITS, dropout, flat, held_out

MakeRun = Callable[..., Run]


def evaluations(run: Run) -> list[Evaluation]:
    return [event for event in run.kept.events if isinstance(event, Evaluation)]


def test_the_rate_of_a_short_evaluation_is_of_its_own_time() -> None:
    told = _evaluation(0, "held_out", torch.tensor([0.0, 100, 0, 0, 0]), seconds=0.25)
    assert told.tokens_per_s == 400


def test_training_goes_on_as_if_nobody_had_looked(tiny_run: MakeRun) -> None:
    torch.manual_seed(1)
    plain = dropout(tiny_run(training__max_steps=6))()
    torch.manual_seed(1)
    watched = dropout(tiny_run(training__max_steps=6, training__eval_interval=1, splits=SPLITS))()
    assert watched.bits() == plain.bits()
    assert all(torch.equal(w, plain.weights()[n]) for n, w in watched.weights().items())
    assert len(evaluations(watched)) == 6 * len(SPLITS)


def test_casting_weights_once_for_all_batches_changes_no_bit(tiny_run: MakeRun) -> None:
    batches = [FakeSource().random(number) for number in (100, 101, 102)]
    splits = {"val": lambda: iter(batches)}
    run = tiny_run(training__use_amp="true", training__eval_interval=4, splits=splits)()
    model, total = run.trainer.state.model, torch.zeros((), dtype=torch.float64)
    for batch in batches:
        with untouched(model), run.step_context.forward_context():
            total += model.summed_loss(batch.inputs, batch.targets)
    (evaluation,) = evaluations(run)
    assert evaluation.loss == (float(total) / evaluation.tokens).hex()


def test_no_state_is_touched(tiny_run: MakeRun) -> None:
    run = dropout(tiny_run(training__eval_interval=1, splits=SPLITS))()
    model, optimizer = run.trainer.state.model, run.trainer.state.optimizer
    model.layers[0].eval()  # type: ignore[index,union-attr,operator]

    def everything() -> dict[str, Any]:
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return dict(
            flat(
                {
                    "model": dict(model.state_dict()),
                    "gradients": {
                        n: None if g is None else g.clone() for n, g in gradients.items()
                    },
                    "optimizer": optimizer.state_dict()["state"],
                    "rng": rng_states(),
                    "modes": [module.training for module in model.modules()],
                }
            )
        )

    before = everything()
    assert len(list(run.hook(Evaluate).evaluate(9))) == 2
    for name, value in everything().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[name]), name
        else:
            assert value == before[name], name


def test_the_loss_is_the_mean_over_all_targets_that_count(tiny_run: MakeRun) -> None:
    part = FakeSource(batch_size=1).random(5)
    part = FakeBatch(part.inputs, part.targets.clone())
    part.targets[:, 4:] = IGNORED
    whole = FakeSource(batch_size=3).random(6)
    run = tiny_run(training__eval_interval=2, splits={"odd": lambda: [whole, part]})()
    logits = [run.trainer.state.model(b.inputs) for b in (whole, part)]  # type: ignore[operator]
    losses = [
        torch.nn.functional.cross_entropy(
            x.flatten(0, 1), b.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        for x, b in zip(logits, (whole, part), strict=True)
    ]
    expected = (losses[0] + losses[1]).item() / (3 * 16 + 4)
    last = evaluations(run)[-1]
    assert float.fromhex(last.loss) == pytest.approx(expected, rel=1e-5)
    assert last.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert last.tokens == 3 * 16 + 4


def test_it_comes_every_interval_and_once_at_the_end(tiny_run: MakeRun) -> None:
    run = tiny_run(training__max_steps=5, training__eval_interval=2, splits=SPLITS)()
    assert [(e.step, e.split) for e in evaluations(run)] == [
        (step, split) for step in (2, 4, 5) for split in ("full", "bach")
    ]
    phases = [event.name for event in run.kept.events if isinstance(event, Phase)]
    assert phases == ["build", "train", *(["eval", "train"] * 3)]
    lines = [line for line in run.kept.lines if line.startswith("Eval [")]
    assert lines[0].startswith("Eval [2] full | Loss: ")
    assert "tokens/s" in lines[0]
    assert len(lines) == 6


@pytest.mark.parametrize(("asked", "decides"), [(None, "full"), ("bach", "bach")])
def test_the_best_is_that_of_one_split(tiny_run: MakeRun, asked: str | None, decides: str) -> None:
    named = {"training__best_split": asked} if asked else {}
    run = tiny_run(
        training__max_steps=8,
        training__learning_rate=0.01,
        training__eval_interval=1,
        splits=SPLITS,
        **named,
    )()
    losses = [float.fromhex(e.loss) for e in evaluations(run) if e.split == decides]
    marks = [e.best for e in evaluations(run) if e.split == decides]
    assert marks == [loss < min(losses[:n], default=9e9) for n, loss in enumerate(losses)]
    assert not any(e.best for e in evaluations(run) if e.split != decides)
    progress = run.trainer.state.progress.validation
    assert progress.best_val_loss == min(losses)
    assert progress.best_step == losses.index(min(losses)) + 1


def test_a_long_evaluation_says_that_it_lives(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [FakeSource().random(number) for number in range(4)]
    run = tiny_run(training__eval_interval=4, splits={"full": lambda: batches})
    monkeypatch.setattr(lockstep, "BEAT_S", 0.0)
    run()
    beats = [event for event in run.kept.events if isinstance(event, Beat)]
    assert len(beats) == len(batches)


def test_a_signal_ends_a_long_evaluation(tiny_run: MakeRun) -> None:
    def endless() -> Iterator[FakeBatch]:
        for number in itertools.count():
            if number == 3:
                run.stop.signum = signal.SIGTERM
            yield FakeSource().random(number)

    run = tiny_run(training__eval_interval=1, splits={"full": endless})
    with pytest.raises(Terminated):
        run()
    assert evaluations(run) == []


def test_a_loss_that_is_nan_is_told_and_never_the_best(tiny_run: MakeRun) -> None:
    def spoilt() -> Iterator[FakeBatch]:
        weight = run.trainer.state.model.norm.weight.data  # type: ignore[union-attr,operator]
        kept = weight[0].item()
        weight[0] = math.nan
        yield from held_out()()
        weight[0] = kept  # weights that stay so end the run

    run = tiny_run(training__max_steps=1, training__eval_interval=1, splits={"full": spoilt})
    run()
    (evaluation,) = evaluations(run)
    assert (evaluation.loss, evaluation.perplexity, evaluation.best) == ("nan", None, False)
    assert "Eval [1] full | Loss: nan | Perplexity: n/a" in run.kept.lines[-2]
    notes = [event.text for event in run.kept.events if isinstance(event, Note)]
    assert notes == ["validation loss of full is nan after 1 steps"]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "aten::mm"
        return func(*args, **(kwargs or {}))


def test_an_evaluation_computes_no_gradient(tiny_run: MakeRun) -> None:
    run = tiny_run(training__eval_interval=1, splits={"full": lambda: [FakeSource().random(1)]})
    with Products() as products:
        list(run.hook(Evaluate).evaluate(1))
    assert products.count == 7 + 1, "seven in the block, one in the head"


def test_a_perplexity_beyond_all_numbers_is_none() -> None:
    assert [perplexity(loss) for loss in (0.0, 1e4, math.inf, math.nan)] == [1.0, None, None, None]
