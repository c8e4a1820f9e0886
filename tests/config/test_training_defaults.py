"""What a training gets that nobody asked for: checkpoints, and a warm-up that fits."""

from pathlib import Path

import pytest

from launcher.arguments import parse_run
from model_check.config.load import Loaded, load, preset_names, to_json, with_checkpoints


def typed(*argv: str, num_copies: int = 1) -> Loaded:
    loaded = load(parse_run(argv, {}).request, lambda: False)
    return with_checkpoints(loaded, num_copies=num_copies)


def saving(*argv: str, num_copies: int = 1) -> tuple[bool, int | None, int | None]:
    training = typed(*argv, num_copies=num_copies).settings.training
    return training.save_last, training.save_interval, training.keep_last


@pytest.mark.parametrize(
    "place", ["--save_dir=there", "out_dir=there", "system.checkpoint_dir=there"]
)
def test_a_place_for_checkpoints_is_asking_for_them(place: str) -> None:
    (note,) = typed(place).decisions
    assert note.startswith("checkpoints go to there: last.pt at the end (")
    assert saving(place) == (True, None, None)
    assert saving(place, "--max_steps", "100000") == (True, 10_000, 2)


def test_a_long_training_saves_every_tenth_of_it() -> None:
    assert saving("--max-steps=1000") == (False, None, None)
    assert saving("--max-steps=1001") == (True, 100, 2)
    (note,) = typed("--max-steps=20000").decisions
    assert ".checkpoints: step_N.pt every 2,000 steps (the newest 2 stay)" in note


def test_several_workers_that_would_save_the_same_are_a_check() -> None:
    assert saving("--max-steps=20000", num_copies=8) == (False, None, None)
    assert saving("--max-steps=20000", "--save_dir=there", num_copies=8) == (True, 2000, 2)


def test_nothing_that_an_earlier_run_has_kept_is_removed_unasked(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_text("")
    for more in ("training.keep_last=null", "training.resume=auto"):
        assert saving("--max-steps=20000", more) == (True, 2000, None)


@pytest.mark.parametrize(
    "own", ["training.save_last=false", "training.save_interval=null", "training.save_last=true"]
)
def test_what_a_person_says_of_saving_stays(own: str) -> None:
    loaded = typed("--max-steps=20000", "system.checkpoint_dir=there", own)
    assert loaded.settings.training.save_interval is None
    assert not loaded.decisions


@pytest.mark.parametrize("rounds", ["--repeat=3", "--soak=30m"])
def test_rounds_that_compute_the_same_steps_save_none(rounds: str) -> None:
    assert saving("--max-steps=20000", rounds) == (False, None, None)


def test_a_short_training_on_text_of_ones_own_says_that_it_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (note,) = typed(f"data.dataset={tmp_path}").decisions
    assert note.startswith("this training saves no checkpoint: training.save_last=true keeps")
    assert not typed("--preset=train", f"data.dataset={tmp_path}").decisions
    assert not typed("data.dataset=embedded").decisions


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize(
    "more",
    [[], ["--max-steps=2000"], ["--save_dir=there"], ["data.validation=null"], ["--mode=fsdp"]],
)
def test_the_settings_of_a_run_decide_nothing_again(
    tmp_path: Path, preset: str, more: list[str]
) -> None:
    """They are what each worker reads."""
    (tmp_path / "a.txt").write_text("words")
    settings = typed(f"--preset={preset}", f"data.dataset={tmp_path}", *more).settings
    file = tmp_path / "config.json"
    file.write_bytes(to_json(settings))
    again = typed("--config", str(file))
    assert (to_json(again.settings), again.decisions) == (to_json(settings), ())


def test_what_a_preset_asks_for_and_nothing_can_give_is_not_asked_for() -> None:
    training = typed("--preset=train", "data.validation=null").settings.training
    assert (training.eval_interval, training.sample_interval) == (None, 100)
    assert typed("--preset=train", "--mode=fsdp").settings.training.sample_interval is None


def test_a_warm_up_that_nobody_gave_is_no_longer_than_the_training() -> None:
    loaded = typed("--preset=train", "--max-steps=15")
    assert loaded.settings.training.warmup_steps == 1
    (note,) = loaded.decisions
    assert note.startswith("training.warmup_steps = 1, a tenth of max_steps: preset train has 20")
    assert typed("--preset=train", "--max-steps=20").settings.training.warmup_steps == 20
