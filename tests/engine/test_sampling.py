"""Samples: what the model says, and no trace in the training."""

import itertools
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model_check.dist.world import World
from model_check.engine.rng import rng_states
from model_check.engine.run_context import Prompts
from model_check.engine.stop import Terminated
from model_check.events import Beat, Phase, Sample
from model_check.generate.generate import next_tokens
from model_check.generate.sampling import Sampling
from model_check.hooks import lockstep
from model_check.hooks.lockstep import Lockstep
from model_check.hooks.sample import MakeSamples
from model_check.model import Llama
from tests.engine.conftest import Run
from tests.engine.saving.test_resume import dropout, flat

MakeRun = Callable[..., Run]


def answer(model: Llama, prompt: str, between: Callable[[], None]) -> str:
    """Eight tokens, as numbers; it draws wherever it can."""
    assert not any(module.training for module in model.modules())
    tokens = next_tokens(model, [len(prompt)], Sampling())
    text = ""
    for token in itertools.islice(tokens, 8):
        text += f" {token}"
        draws = (torch.rand(3), random.random(), np.random.rand())
        assert len(draws) == 3
        between()
    return text


ASKED = Prompts(["a", "bc\n"], answer)
INFINI = {"model__attention": "infini", "model__infini__segment_length": 4}


def samples(run: Run) -> list[Sample]:
    return [event for event in run.kept.events if isinstance(event, Sample)]


@pytest.mark.parametrize("model", [{}, INFINI], ids=["full", "infini"])
def test_training_goes_on_as_if_nobody_had_asked(tiny_run: MakeRun, model: dict[str, Any]) -> None:
    torch.manual_seed(1)
    plain = dropout(tiny_run(training__max_steps=6, **model))()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    asked = {"training__sample_interval": 1, "prompts": ASKED}
    watched = dropout(tiny_run(training__max_steps=6, **asked, **model))()
    assert watched.bits() == plain.bits()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(w, plain.weights()[n]) for n, w in watched.weights().items())
    assert len(samples(watched)) == 6 * 2


def test_no_state_is_touched(tiny_run: MakeRun) -> None:
    run = tiny_run(training__sample_interval=1, prompts=ASKED)()
    state = run.trainer.state
    state.model.layers[0].eval()  # type: ignore[operator]

    def everything() -> dict[str, Any]:
        kept = {
            "model": dict(state.model.state_dict()),
            "gradients": {n: p.grad for n, p in state.model.named_parameters()},
            "optimizer": state.optimizer.state_dict()["state"],
            "rng": rng_states(),
            "modes": [module.training for module in state.model.modules()],
        }
        return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in flat(kept)}

    before = everything()
    assert len(list(run.hook(MakeSamples).samples(9))) == 2
    for name, value in everything().items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(value, before[name]) if is_tensor else value == before[name], name


def test_they_come_every_interval_and_once_at_the_end(tiny_run: MakeRun) -> None:
    run = tiny_run(training__max_steps=5, training__sample_interval=2, prompts=ASKED)()
    told = [(sample.step, sample.prompt) for sample in samples(run)]
    assert told == [(step, prompt) for step in (2, 4, 5) for prompt in ("a", "bc\n")]
    phases = [event.name for event in run.kept.events if isinstance(event, Phase)]
    assert phases == ["build", "train", *(["eval", "train"] * 3)]
    lines = [line for line in run.kept.lines if line.startswith("Sample | ")]
    assert len(lines) == 6
    assert lines[1] == f'Sample | step 2 | "bc\\n" -> "{samples(run)[1].text}"'


def test_without_prompts_nothing_is_sampled(tiny_run: MakeRun) -> None:
    assert samples(tiny_run(training__sample_interval=1)()) == []
    assert samples(tiny_run(prompts=ASKED)()) == []


def test_a_long_sample_says_that_it_lives(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(training__sample_interval=4, prompts=Prompts(["a"], answer))
    monkeypatch.setattr(lockstep, "BEAT_S", 0.0)
    run()
    assert len([event for event in run.kept.events if isinstance(event, Beat)]) >= 4


def test_a_signal_ends_a_long_sample(tiny_run: MakeRun) -> None:
    def endless(model: Llama, prompt: str, between: Callable[[], None]) -> str:
        for number in itertools.count():
            if number == 3:
                run.stop.signum = signal.SIGTERM
            between()
        return prompt

    run = tiny_run(training__sample_interval=1, prompts=Prompts(["a"], endless))
    with pytest.raises(Terminated):
        run()
    assert samples(run) == []
    assert all(module.training for module in run.trainer.state.model.modules())


class FurtherRank(World):
    rank = 1


def test_the_first_rank_of_a_job_speaks_for_all(tiny_run: MakeRun) -> None:
    run = tiny_run(training__sample_interval=1, prompts=ASKED)
    state, client = run.trainer.state, run.hook(Lockstep)._client
    further = replace(state, context=replace(state.context, world=FurtherRank()))
    assert list(MakeSamples(further, ASKED, client).samples(1)) == []
    assert len(list(MakeSamples(state, ASKED, client).samples(1))) == 2
