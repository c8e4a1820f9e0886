"""The passkey task: where the key stands, what counts, and what is told of it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from model_check.errors import ConfigError
from model_check.model import IGNORED, Llama
from model_check.passkey import __main__ as passkey
from model_check.passkey.task import (
    ARMS,
    MARK,
    NUM_DIGITS,
    QUESTION,
    SHORTEST,
    Questions,
    accuracies,
    ask,
    by_depth,
    by_segments,
    last_place,
    settings_of,
)
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
SHORT = ("training.max_steps=2",)


@pytest.mark.parametrize("length", [SHORTEST, 64])
def test_the_digits_stand_behind_the_mark_and_are_asked_for_at_the_end(length: int) -> None:
    places = torch.arange(last_place(length) + 1)
    question = ask(places, length, torch.Generator().manual_seed(0))
    assert question.inputs.shape == question.targets.shape == (len(places), length)
    for place, row, targets in zip(places, question.tokens, question.targets, strict=True):
        key = row[place + 1 : place + 1 + NUM_DIGITS]
        assert row[place] == MARK
        assert (key < 10).all()
        assert row[-NUM_DIGITS - 1] == QUESTION
        assert torch.equal(row[-NUM_DIGITS:], key)
        assert torch.equal(targets[-NUM_DIGITS:], key)
        assert (targets[:-NUM_DIGITS] == IGNORED).all()
        noise = torch.cat((row[:place], row[place + 1 + NUM_DIGITS : -NUM_DIGITS - 1]))
        assert ((noise >= 10) & (noise < MARK)).all()


def test_every_arm_of_a_seed_reads_the_same_rows() -> None:
    streams = [Questions(settings_of(arm, 1, SHORT)).batches() for arm in ARMS]
    for _ in range(2):
        first, *others = [next(stream).inputs for stream in streams]
        assert all(torch.equal(first, other) for other in others)
    other = next(Questions(settings_of("full", 2, SHORT)).batches())
    assert not torch.equal(first, other.inputs)
    rows = settings_of("full", 1, SHORT).training.batch_size
    assert torch.equal(next(Questions(settings_of("full", 1, SHORT)).batches(rows)).inputs, first)


def test_a_model_that_knows_has_one_and_one_that_guesses_a_tenth() -> None:
    settings = settings_of("full", 0, SHORT)

    class Knows(Llama):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, tokens: torch.Tensor, documents: object = None) -> torch.Tensor:
            places = (tokens == MARK).int().argmax(1)
            answers = torch.zeros(*tokens.shape, 47)
            for row, place in enumerate(places.tolist()):
                for number in range(NUM_DIGITS):
                    digit = tokens[row, place + 1 + number]
                    answers[row, -NUM_DIGITS + number, digit if self.training is False else 0] = 1
            return answers

    class Guesses(Knows):
        def forward(self, tokens: torch.Tensor, documents: object = None) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 47)  # always 0

    grid = accuracies(Knows(), settings, 4)
    assert by_depth(grid) == dict.fromkeys((0.0, 0.25, 0.5, 0.75, 1.0), 1.0)
    assert float(accuracies(Guesses(), settings, 64).mean()) == pytest.approx(0.1, abs=0.01)


def test_a_digit_is_as_far_as_segments_lie_between_it_and_its_question() -> None:
    grid = torch.zeros(last_place(64) + 1, NUM_DIGITS)
    grid[0] = 1.0  # digits at 1, 2, 3; asked for at 61, 62, 63
    found = by_segments(grid, 64, 16)
    assert list(found) == [0, 1, 2, 3]
    assert found[3] == pytest.approx(NUM_DIGITS / (15 + 14 + 13))
    assert found[0] == found[1] == found[2] == 0


def test_the_arm_decides_the_attention_and_a_setting_that_one_lacks_is_for_the_others() -> None:
    given = (*SHORT, "model.infini.segment_length=8", "model.infini.gate_lr=0.1")
    kinds = {arm: settings_of(arm, 0, given).model for arm in ARMS}
    assert [model.attention for model in kinds.values()] == ["full", "local", "infini", "infini"]
    assert [model.infini.update for model in kinds.values()][2:] == ["linear", "delta"]
    assert {model.infini.segment_length for model in kinds.values()} == {8}


def test_a_text_too_short_for_a_question_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"context_length = 7: a question takes {SHORTEST}"):
        settings_of("full", 0, (*SHORT, "training.context_length=7"))


def test_every_arm_is_trained_tested_and_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert passkey.main(["--seeds", "2", "--rows", "1", "--arms", "local,infini", *SHORT]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:3] == ["attention", "depth", "0"]
    assert [line.split()[0] for line in table[1:3]] == ["local", "infini"]
    assert passkey.main(["--seeds=1", "--rows=1", "--arms=infini-delta", "--json", *SHORT]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["arm"] == "infini-delta"
    assert result["loss"] > 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arms", "sparse"], "error: --arms: no 'sparse'; there are full, local, infini"),
        (["--arms", ","], "error: --arms: no ','"),
        (["--seeds", "0"], "error: --seeds and --rows: at least 1"),
        (["training.max_step=3"], "did you mean"),
        (["model.attention=local"], "error: model.attention=local: passkey takes --arms for it"),
        (["seed=7"], "error: seed=7: passkey takes --seeds for it"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert passkey.main(argv) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_however_it_is_stopped_nobody_is_left(tmp_path: Path, signum: int, code: int) -> None:
    command = [sys.executable, "-m", "model_check.passkey", "--arms", "full,local", "--seeds", "1"]
    process = subprocess.Popen(
        [*command, "training.max_steps=1000000"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = wait_for_children(process.pid)
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
    _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code
    assert "Traceback" not in told
    until = time.monotonic() + DEADLINE_S
    while any(Path(f"/proc/{pid}/stat").exists() for pid in children):
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for_children(pid: int) -> list[int]:
    """Two that train: they have torch in their memory."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        trains = [p for p in map(int, " ".join(texts).split()) if "libtorch_cpu" in maps_of(p)]
        if len(trains) == 2:
            return trains
        time.sleep(0.05)
    raise AssertionError("nobody trains")


def maps_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""
