"""Training on prompt and target: what moves weights, what is measured, where it goes on."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_check.config.load import Request, load
from model_check.data.build.prepare import prepare
from model_check.data.read.loader import Batch, BatchLoader, evaluation_batches
from model_check.data.read.token_cache import TokenCache
from model_check.events import Evaluation
from model_check.hooks.evaluate import Evaluate
from model_check.model import IGNORED
from tests.data.trl.make_labels import TOKENIZER
from tests.engine.conftest import VOCABULARY, FakeBatch, FakeSource, Run

MakeRun = Callable[..., Run]
CONTEXT = 64


def example_cache(directory: Path, *overrides: str) -> TokenCache:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdef ", k=draw.randrange(1, 25))) for _ in range(48)]
    rows = directory / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": prompt, "completion": target}) + "\n"
            for prompt, target in zip(words[::2], words[1::2], strict=True)
        )
    )
    given = (
        "training.stage=prompt_target",
        f"data.cache_dir={directory / 'cache'}",
        f"data.dataset={rows}",
        f"data.tokenizer={TOKENIZER}",
        f"training.context_length={CONTEXT}",
        *overrides,
    )
    settings = load(Request(preset="cpu", overrides=given), lambda: False).settings
    return TokenCache.open(prepare(settings, lambda line: None).path)


def model_for(tiny_run: MakeRun, vocab_size: int) -> Any:
    changes = {"model__vocab_size": vocab_size, "training__context_length": CONTEXT}
    return tiny_run(FakeSource(length=CONTEXT), **changes).trainer.state.model.double()


def whole(cache: TokenCache, *, documents: bool = False) -> Batch:
    (batch,) = evaluation_batches(cache, cache.num_sequences, documents=documents)
    return batch


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_the_loss_is_that_of_the_targets_alone_computed_by_hand(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    batch = whole(example_cache(tmp_path))
    model = model_for(tiny_run, 340)
    log_p = model(batch.inputs).log_softmax(-1)
    expected = torch.zeros((), dtype=torch.float64)
    for row, time in (batch.targets != IGNORED).nonzero().tolist():
        expected = expected - log_p[row, time, batch.targets[row, time]]
    loss = model.summed_loss(batch.inputs, batch.targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(gradients(model, loss), gradients(model, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_nothing_of_a_prompt_moves_a_weight(tiny_run: MakeRun, tmp_path: Path) -> None:
    """No prediction within a prompt has a gradient; where nothing is a target, no weight has."""
    batch = whole(example_cache(tmp_path))
    model = model_for(tiny_run, 340)
    hidden = model.hidden(batch.inputs).detach().requires_grad_()
    model.loss(hidden, model.head_weight, batch.targets).backward()
    assert hidden.grad is not None
    moves = hidden.grad.abs().sum(-1) > 0
    assert torch.equal(moves, batch.targets != IGNORED)
    nothing = torch.full_like(batch.targets, IGNORED)
    assert all(not g.any() for g in gradients(model, model.summed_loss(batch.inputs, nothing)))


def test_packed_examples_have_the_loss_that_they_have_alone(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    alone = whole(example_cache(tmp_path))
    packed = whole(example_cache(tmp_path, "data.packing=true"), documents=True)
    assert len(packed.inputs) < len(alone.inputs)
    model = model_for(tiny_run, 340)
    one = model.summed_loss(alone.inputs, alone.targets)
    several = model.summed_loss(packed.inputs, packed.targets, packed.documents)
    assert several.item() == pytest.approx(one.item(), rel=1e-12)
    for ours, theirs in zip(gradients(model, several), gradients(model, one), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def masked(number: int) -> FakeBatch:
    """Two rows with a prompt of another length each, and padding."""
    batch = FakeSource().random(number)
    targets = batch.targets.clone()
    targets[0, : number % 5 + 1], targets[1, :3], targets[1, 9:] = IGNORED, IGNORED, IGNORED
    return FakeBatch(batch.inputs, targets)


def evaluated(tiny_run: MakeRun, batches: list[Any], **changes: Any) -> tuple[Run, Evaluation]:
    run = tiny_run(
        training__stage="prompt_target",
        training__eval_interval=2,
        training__max_steps=2,
        splits={"held": lambda: batches},
        **changes,
    )()
    return run, [event for event in run.kept.events if isinstance(event, Evaluation)][-1]


def test_accuracy_is_of_targets_and_exact_match_of_examples(tiny_run: MakeRun) -> None:
    """A head of zeros takes token 0: targets that are all 0 are an exact match."""
    batches = [masked(number) for number in range(3)]
    batches[1].targets[0][batches[1].targets[0] != IGNORED] = 0
    run, _ = evaluated(tiny_run, batches)
    model = run.trainer.state.model
    with torch.no_grad():
        model.head_weight.zero_()
    (again,) = run.hook(Evaluate).evaluate(9)
    counted = [batch.targets != IGNORED for batch in batches]
    hits = [(batch.targets == 0) & mask for batch, mask in zip(batches, counted, strict=True)]
    num_targets = sum(int(mask.sum()) for mask in counted)
    assert again.tokens == num_targets
    assert again.token_accuracy == sum(int(hit.sum()) for hit in hits) / num_targets
    assert (again.examples, again.exact_match) == (6, 1 / 6)


def test_packed_examples_are_counted_one_by_one(tiny_run: MakeRun) -> None:
    inputs = torch.zeros(1, 16, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    documents = torch.tensor([[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4])
    targets[0, 1:4], targets[0, 5:8], targets[0, 9:12] = 0, 1, 0
    batch = FakeBatch(inputs, targets, documents)
    run, _ = evaluated(tiny_run, [batch], data__document_masking="true")
    with torch.no_grad():
        run.trainer.state.model.head_weight.zero_()
    (again,) = run.hook(Evaluate).evaluate(9)
    assert (again.examples, again.exact_match, again.token_accuracy) == (3, 2 / 3, 6 / 9)


def test_they_are_told_on_the_line_and_not_of_running_text(tiny_run: MakeRun) -> None:
    run, found = evaluated(tiny_run, [masked(1)])
    (line,) = [line for line in run.kept.lines if line.startswith("Eval [2] held")]
    assert f"Token Accuracy: {found.token_accuracy:.4f} | Exact Match: 0.0000 | " in line
    plain = tiny_run(training__eval_interval=2, splits={"held": lambda: [masked(1)]})()
    assert not any("Token Accuracy" in line for line in plain.kept.lines)


@pytest.mark.parametrize("packing", ["false", "true"])
def test_it_resumes_to_the_bit(tiny_run: MakeRun, tmp_path: Path, packing: str) -> None:
    cache = example_cache(tmp_path, f"data.packing={packing}")
    common: dict[str, Any] = {
        "training__stage": "prompt_target",
        "data__document_masking": packing,
        "training__context_length": CONTEXT,
        "training__save_interval": 3,
        "training__max_steps": 7,
        "model__vocab_size": 340,
    }

    def train(name: str, **more: Any) -> Run:
        source = BatchLoader(cache, 2, 5, 0, documents=packing == "true")
        return tiny_run(source, directory=tmp_path / name, **common, **more)()

    straight = train("straight")
    resumed = train("again", training__resume=tmp_path / "straight" / "step_3.pt")
    assert resumed.bits() == straight.bits()[3:]
    for name, weight in resumed.weights().items():
        assert torch.equal(weight, straight.weights()[name]), name


def test_a_vocabulary_grows_by_the_mean_of_its_rows(tiny_run: MakeRun, tmp_path: Path) -> None:
    for tied in ("false", "true"):
        first = tiny_run(
            directory=tmp_path / tied, training__save_last="true", model__tie_word_embeddings=tied
        )()
        grown = tiny_run(
            model__init_from=tmp_path / tied / "last.pt",
            model__vocab_size=VOCABULARY + 3,
            model__tie_word_embeddings=tied,
        )
        assert any(f"3 new tokens beside {VOCABULARY}" in line for line in grown.kept.lines)
        for name, weight in grown.weights().items():
            before = first.weights()[name]
            if weight.shape == before.shape:
                assert torch.equal(weight, before)
                continue
            assert torch.equal(weight[:VOCABULARY], before)
            mean = before.double().mean(0).float()
            assert torch.equal(weight[VOCABULARY:], mean.expand(3, -1))
        grown()
