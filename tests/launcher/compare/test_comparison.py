"""Which training of a comparison runs when and where, and with which settings."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.arguments import parse_run
from launcher.compare.arms import Arm
from launcher.compare.comparison import asked_of, loaded_of, make_comparison, plan_turns
from launcher.devices import Hold
from launcher.gpus.probe import NvmlProbe
from launcher.plan import cpu_places
from model_check.config.inert import acting
from model_check.config.load import load


def turns(arms: str, seeds: Sequence[int], num_places: int, replicas: int = 1) -> list[list[str]]:
    """`a42@0`: arm, seed and first place of each training."""
    planned = plan_turns([Arm(name, ()) for name in arms], seeds, cpu_places(num_places), replicas)
    return [[f"{t.arm}{t.seed}@{t.workers[0][len('CPU') :]}" for t in turn] for turn in planned]


@pytest.mark.parametrize(
    ("arms", "seeds", "num_places", "expected"),
    [
        ("ab", [1], 2, [["a1@0", "b1@1"]]),
        ("ab", [1], 1, [["a1@0"], ["b1@0"]]),
        ("ab", [1, 2], 2, [["a1@0", "b1@1"], ["a2@1", "b2@0"]]),
        ("ab", [1, 2], 3, [["a1@0", "b1@1"], ["a2@1", "b2@2"]]),
        ("ab", [1, 2, 3], 4, [["a1@0", "b1@1", "a2@2", "b2@3"], ["a3@1", "b3@2"]]),
        ("abc", [1], 2, [["a1@0", "b1@1"], ["c1@0"]]),
        (
            "abcd",
            [1, 2],
            2,
            [["a1@0", "b1@1"], ["c1@0", "d1@1"], ["a2@1", "b2@0"], ["c2@1", "d2@0"]],
        ),
    ],
)
def test_arms_of_a_seed_run_at_once_and_change_places(
    arms: str, seeds: list[int], num_places: int, expected: list[list[str]]
) -> None:
    assert turns(arms, seeds, num_places) == expected


def test_replicas_are_neighbours() -> None:
    assert turns("ab", [1], 5, replicas=2) == [["a1@0", "b1@2"]]


@pytest.mark.parametrize(
    "options",
    [
        # Precision beside a preset's use_amp; what a preset has for a CPU alone; what one derives.
        ("--preset=train", "data.dataset=embedded", "--max-steps=20"),
        ("--preset=infini-tiny", "training.global_batch_size=16", "training.lr_schedule=constant"),
        ("--preset=debug", "model.rope_scaling.factor=8", "system.checkpoint_dir=x"),
    ],
)
def test_a_training_has_the_settings_of_its_arm(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arms = ("--arm", "fp32", "training.precision=fp32", "--arm", "bf16", "training.precision=bf16")
    arguments = parse_run(["--device=cpu", *options, *arms], {})
    comparison = make_comparison(arguments, NvmlProbe(), {}, Hold.LOOK)
    for trial in comparison.turns[0]:
        given = load(asked_of(trial, comparison, None), lambda: False).settings
        wanted = loaded_of(trial, comparison).settings
        for section in ("model", "training", "data", "logging", "debug"):
            assert getattr(acting(given), section) == getattr(wanted, section)
