"""Ten steps are five steps, a checkpoint, and five steps in a new trainer: to the bit."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_check.engine.checkpoint import read_checkpoint
from model_check.engine.run_context import Splits
from model_check.engine.stop import EndedEarly
from model_check.errors import CheckpointError, ConfigError, NonFiniteError
from model_check.events import Evaluation, Phase, Scalar
from model_check.hooks.hook import RunObserver
from tests.engine.conftest import OTHER_ARCHITECTURES, FakeBatch, FakeSource, Run

MakeRun = Callable[..., Run]


def dropout(run: Run) -> Run:
    """Make every step draw from torch's generator: what the random state is kept for."""

    def drop(_module: nn.Module, _inputs: object, out: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            torch.rand(3)  # an evaluation that draws must not shift the training
            return out
        return out * (torch.rand(out.shape) > 0.1)

    run.trainer.state.model.layers[0].register_forward_hook(drop)  # type: ignore[index,union-attr]
    return run


def flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{name}.{key}")
    else:
        yield name, tree


NOT_EQUAL = (".settings.", ".run_config.", ".run_id", ".attempt", ".kept")


def assert_equal_but_for_settings(one: Path, other: Path) -> None:
    ours, theirs = (dict(flat(read_checkpoint(path))) for path in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, theirs[name]), name
        elif not name.startswith(NOT_EQUAL):
            assert value == theirs[name], name


def held_out(number: int = 100) -> Callable[[], list[FakeBatch]]:
    return lambda: [FakeSource().random(number), FakeSource(batch_size=1).random(number + 1)]


SPLITS: Splits = {"full": held_out(), "bach": held_out(300)}
EVALUATION = {"training__eval_interval": 2, "splits": SPLITS}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"training__use_amp": "true"},
    "fp16": {"training__use_amp": "true", "training__precision": "fp16"},
    "accumulation": {"training__grad_accum_nums": 3},
    "gradient checkpointing": {"training__gradient_checkpointing": "true"},
    "late readings": {"lag": 1},
    "a schedule": {"training__lr_schedule": "cosine", "training__warmup_steps": 7},
    "evaluation in between": EVALUATION,
    "written beside training": {"training__async_save": "true"},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=list(CASES))
def test_ten_steps_are_five_and_five(
    tiny_run: MakeRun, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole_dir, rest_dir = tmp_path / "whole", tmp_path / "rest"
    common = {
        "training__max_steps": 10,
        "training__save_interval": 5,
        "training__save_last": "true",
    } | changes
    torch.manual_seed(1)
    whole = dropout(tiny_run(directory=whole_dir, **common))()
    rest_dir.mkdir()
    shutil.copy(whole_dir / "step_5.pt", rest_dir)
    torch.manual_seed(2)
    rest = tiny_run(directory=rest_dir, training__resume="auto", logging__log_interval=3, **common)
    dropout(rest)()
    assert rest.bits() == whole.bits()[5:]
    assert [step.step for step in rest.kept.steps()] == [5, 6, 7, 8, 9]
    lines = [line.split("]")[0] for line in rest.kept.lines if line.startswith("Step [")]
    assert lines == ["Step [6/10", "Step [9/10"]
    assert_equal_but_for_settings(whole_dir / "last.pt", rest_dir / "last.pt")


def test_more_steps_may_follow_a_run_that_had_ended(tiny_run: MakeRun, tmp_path: Path) -> None:
    whole = tiny_run(training__max_steps=6, directory=tmp_path / "whole")()
    tiny_run(training__max_steps=4, training__save_last="true")()
    rest = tiny_run(training__max_steps=6, training__resume="auto")()
    assert rest.bits() == whole.bits()[4:]
    (told,) = (line for line in rest.kept.lines if "other settings" in line)
    assert told == "Resumed with other settings: training.max_steps 4 -> 6"
    assert f"Resumed from {tmp_path}/checkpoints/last.pt: 4 steps done, 128 tokens" in (
        rest.kept.lines
    )
    (train,) = (e for e in rest.kept.events if isinstance(e, Phase) and e.name == "train")
    assert train.detail["first_step"] == 4


def test_a_schedule_that_is_stretched_is_told_with_both_rates(tiny_run: MakeRun) -> None:
    falling = {"training__lr_schedule": "cosine", "training__learning_rate": "0.5"}
    tiny_run(training__max_steps=4, training__save_last="true", **falling)()
    rest = tiny_run(training__max_steps=8, training__resume="auto", **falling)()
    (told,) = (line for line in rest.kept.lines if line.startswith("Learning rate: "))
    end = "2.50e-01 in the next (cosine to step 8)"
    assert told == f"Learning rate: 7.32e-02 in the last step, {end}"


def test_a_run_that_is_over_says_so_and_does_nothing(tiny_run: MakeRun) -> None:
    tiny_run(training__save_last="true")()
    again = tiny_run(training__save_last="true", training__resume="auto")
    with pytest.raises(EndedEarly, match="had nothing left to train: 4 steps were done before"):
        again()
    assert again.bits() == []


@pytest.mark.parametrize(("asked", "taken"), [("null", 1), ("3", 2)])
def test_a_resumed_run_takes_as_many_threads_as_before_unless_a_number_is_asked_for(
    tiny_run: MakeRun, asked: str, taken: int
) -> None:
    """The order of sums on a CPU depends on it; another number of workers would give another."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        tiny_run(training__save_last="true")()
        torch.set_num_threads(2)  # as the process that resumes decided for itself
        tiny_run(training__resume="auto", training__max_steps=8, system__num_threads=asked)
        assert torch.get_num_threads() == taken
    finally:
        torch.set_num_threads(before)


def test_nothing_to_resume_is_a_start_that_is_told(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = tiny_run(training__resume="auto")()
    assert run.bits() == tiny_run()().bits()
    assert f"Nothing to resume in {tmp_path}/checkpoints: starting at step 0" in run.kept.lines


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_one_falls_back_to_the_newest_sound_one(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    tiny_run(training__save_interval=1, training__save_last="true")()
    spoil(tmp_path / "checkpoints" / "last.pt")
    (tmp_path / "checkpoints" / "step_4.pt").write_bytes(b"torn")
    run = tiny_run(training__resume="auto", training__max_steps=5)
    notes = [line for line in run.kept.lines if "esumed" in line]
    assert [line.partition(": ")[0] for line in notes] == [
        "Not resumed",
        "Not resumed",
        "Resumed with other settings",
        f"Resumed from {tmp_path}/checkpoints/step_3.pt",
    ]
    assert "step_4.pt: damaged" in notes[0]
    assert "last.pt: damaged: record" in notes[1]
    with pytest.raises(
        CheckpointError, match=r"last\.pt: damaged.*`--resume .*/checkpoints` takes"
    ):
        tiny_run(training__resume=tmp_path / "checkpoints" / "last.pt")


@pytest.mark.parametrize("odd", ["dangling", "loop", "fifo", "directory"])
def test_what_is_no_file_is_told_and_hides_no_checkpoint(
    tiny_run: MakeRun, tmp_path: Path, odd: str
) -> None:
    tiny_run(training__save_interval=4)()
    path = tmp_path / "checkpoints" / "last.pt"
    match odd:
        case "dangling":
            path.symlink_to("gone.pt")
        case "loop":
            path.symlink_to("last.pt")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    run = tiny_run(training__resume="auto", training__max_steps=5)
    assert run.trainer.state.progress.step == 4
    told = [line for line in run.kept.lines if line.startswith("Not resumed: ")]
    assert len(told) == 1
    assert told[0].startswith(f"Not resumed: {path}: ")
    with pytest.raises(CheckpointError, match=r"last\.pt"):
        tiny_run(training__resume=path)


def test_auto_never_starts_afresh_beside_another_workers_checkpoints(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    parent = tmp_path / "checkpoints"
    whole = tiny_run(training__max_steps=6, directory=tmp_path / "whole")()
    tiny_run(training__save_last="true", worker="GPU3", directory=parent / "gpu3")()
    for worker, directory in (("GPU5", parent / "gpu5"), ("CPU0", parent)):
        with pytest.raises(CheckpointError, match=rf"auto: .*`--resume {parent}/gpu3` goes on"):
            tiny_run(training__resume="auto", worker=worker, directory=directory)
    rest = tiny_run(
        training__max_steps=6,
        training__resume=parent / "gpu3",
        worker="GPU5",
        directory=parent / "gpu5",
    )()
    assert rest.bits() == whole.bits()[4:]


@pytest.mark.parametrize("place", ["gpu3", "gpu3.1", "gpu0.12", "cpu1", "gpu3_2"])
def test_checkpoints_beside_ones_own_are_told_unless_of_the_same_launch(
    tiny_run: MakeRun, tmp_path: Path, place: str
) -> None:
    """A worker on a MIG slice is named GPU3.1. Workers of one launch do not wait for each other."""
    parent = tmp_path / "checkpoints"
    here = {"launch": "run_1", "worker": "GPU5", "directory": parent / "gpu5"}
    tiny_run(training__save_last="true", launch="run_1", directory=parent / place)()
    run = tiny_run(training__resume="auto", **here)
    assert run.trainer.state.progress.step == 0
    with pytest.raises(CheckpointError, match=f"--resume {parent}/{place}` goes on"):
        tiny_run(training__resume="auto", **here | {"launch": "run_2"})


def test_damaged_ones_alone_are_an_error_and_stay(tiny_run: MakeRun, tmp_path: Path) -> None:
    tiny_run(training__save_last="true")()
    spoil(tmp_path / "checkpoints" / "last.pt")
    with pytest.raises(CheckpointError, match=r"no sound checkpoint in .*\(1 damaged\)"):
        tiny_run(training__resume="auto")
    assert (tmp_path / "checkpoints" / "last.pt").exists()


def test_a_directory_means_the_newest_in_it_or_in_the_workers_own(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    tiny_run(training__save_last="true", directory=tmp_path / "before" / "gpu6")()
    for named in (tmp_path / "before", tmp_path / "before" / "gpu6"):
        run = tiny_run(training__resume=named, directory=tmp_path / "now" / "gpu6")
        assert run.trainer.state.progress.step == 4
    place = tmp_path / "now" / "gpu5"
    with pytest.raises(CheckpointError, match=r"holds no last\.pt or step_N\.pt"):
        tiny_run(training__resume=tmp_path / "before", directory=place, worker="GPU5")


def test_a_checkpoint_of_another_model_names_tensors_and_settings(tiny_run: MakeRun) -> None:
    tiny_run(training__save_last="true")()
    with pytest.raises(CheckpointError) as caught:
        tiny_run(training__resume="auto", model__num_layers=2, model__intermediate_size=48)
    text = str(caught.value)
    assert "does not fit this run: weights/layers.1.attention_norm.weight, " in text
    assert " more missing; " in text
    assert "layers.0.feed_forward.w1.weight is float32 [64, 32], not float32 [48, 32]; " in text
    assert "settings that differ: model.num_layers 1 -> 2, model.intermediate_size 64 -> 48" in text
    assert "\n" not in text


def test_a_checkpoint_of_another_vocabulary_names_the_data(tiny_run: MakeRun) -> None:
    """Which no setting of the model shows."""
    tiny_run(training__save_last="true", data={"cache": "abc", "dataset": "embedded"})()
    other = {"cache": "def", "dataset": "texts"}
    with pytest.raises(CheckpointError) as caught:
        tiny_run(training__resume="auto", model__hidden_size=48, data=other)
    assert "does not fit this run: weights/" in str(caught.value)
    assert "data.validation): abc embedded -> def texts" in str(caught.value)


@pytest.mark.parametrize("key", OTHER_ARCHITECTURES)
def test_a_checkpoint_of_another_architecture_with_equal_shapes_is_refused(
    tiny_run: MakeRun, key: str
) -> None:
    tiny_run(training__save_last="true")()
    again = {"training__resume": "auto", **OTHER_ARCHITECTURES[key]}
    with pytest.raises(CheckpointError, match=rf"cannot go on exactly: .*\bmodel\.{key}\S* .* -> "):
        tiny_run(**again)
    anyway = tiny_run(**again, training__resume_anyway="true")
    (told,) = [line for line in anyway.kept.lines if line.startswith("Resumed with other settings")]
    assert f"model.{key}" in told


def test_a_checkpoint_of_another_run_names_what_differs_unless_that_was_asked_for(
    tiny_run: MakeRun,
) -> None:
    data: dict[str, Scalar] = {"cache": "abc", "dataset": "wikitext"}
    tiny_run(training__save_last="true", data=data)()
    other = {
        "training__resume": "auto",
        "training__batch_size": 3,
        "system__seed": 7,
        "data": data | {"cache": "def"},
    }
    with pytest.raises(CheckpointError) as caught:
        tiny_run(**other)
    assert str(caught.value).partition("exactly: ")[2] == (
        "training.batch_size 2 -> 3, system.seed 42 -> 7, data (another text, tokenizer, "
        "context_length or data.validation): abc wikitext -> def wikitext "
        "(training.resume_anyway=true resumes nevertheless)"
    )
    run = tiny_run(**other, training__resume_anyway="true", training__max_steps=6)()
    assert [step.step for step in run.kept.steps()] == [4, 5]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("step", [0, 3])
def test_what_an_alarm_saved_can_be_resumed_and_repeats_the_step(
    tiny_run: MakeRun, tmp_path: Path, lag: int, step: int
) -> None:
    common = {"training__max_steps": 5, "training__learning_rate": 0.01}
    clean = tiny_run(**common)()
    with pytest.raises(NonFiniteError):
        tiny_run(**common, lag=lag, debug__drill=f"nan@{step}")()
    evidence = tmp_path / "checkpoints" / f"nan_grad_step_{step}.pt"
    again = tiny_run(**common, training__resume=evidence)()
    assert again.bits() == clean.bits()[step:]


def test_the_evidence_of_float16_has_the_loss_scale_of_its_step(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    half = {"training__use_amp": "true", "training__precision": "fp16", "training__max_steps": 5}
    tiny_run(**half, training__save_interval=3)()
    with pytest.raises(NonFiniteError):
        tiny_run(**half, lag=1, debug__drill="loss_nan@3")()
    directory = tmp_path / "checkpoints"
    saved, evidence = (
        read_checkpoint(directory / name) for name in ("step_3.pt", "nan_grad_step_3.pt")
    )
    assert evidence["optimizer"]["loss_scale"] == saved["optimizer"]["loss_scale"]


def test_a_profile_that_lies_behind_is_refused_and_one_that_has_begun_goes_on(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    tiny_run(training__save_last="true")()
    again = {"training__resume": "auto", "training__max_steps": 8}
    with pytest.raises(ConfigError, match="step 3 is never reached: the resumed run goes on with"):
        tiny_run(**again, debug__profile_steps="2-3")
    tiny_run(**again, debug__profile_steps="3-5")()
    assert (tmp_path / "checkpoints" / "profile" / "steps_4-5.json.gz").exists()


def test_a_drill_that_lies_behind_is_refused(tiny_run: MakeRun) -> None:
    tiny_run(training__save_last="true")()
    with pytest.raises(ConfigError, match="step 2 is never reached: the resumed run goes on with"):
        tiny_run(training__resume="auto", training__max_steps=6, debug__drill="nan@2")


def test_observers_get_back_what_a_checkpoint_kept_of_them(tiny_run: MakeRun) -> None:
    class Diary(RunObserver):
        told: dict[str, Scalar] | None = None

        def kept(self) -> dict[str, Scalar]:
            return {"wandb_id": "x1"}

        def restore(self, kept: dict[str, Scalar]) -> None:
            self.told = kept

    tiny_run(training__save_last="true", observers=(Diary(),))()
    diary = Diary()
    tiny_run(training__resume="auto", training__max_steps=5, observers=(diary,))
    assert diary.told == {"wandb_id": "x1"}


def test_a_checkpoint_has_what_the_other_trainers_keep(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = tiny_run(
        **EVALUATION,
        training__save_best="true",
        training__save_last="true",
    )()
    last = read_checkpoint(tmp_path / "checkpoints" / "last.pt")
    assert last["model_cfg"]["num_layers"] == 1
    assert last["settings"]["training"]["batch_size"] == 2
    assert (last["step"], last["total_tokens"]) == (4, 4 * 2 * 16)
    assert last["loss"] == float.fromhex(run.bits()[-1][0])
    evaluations = [e for e in run.kept.events if isinstance(e, Evaluation) and e.step == 4]
    assert last["val_loss"] == {e.split: float.fromhex(e.loss) for e in evaluations}
    best = read_checkpoint(tmp_path / "checkpoints" / "best.pt")
    assert (best["step"], best["best_val_loss"]) == (last["best_step"], last["best_val_loss"])
    assert last["best_split"] == "full"


@pytest.mark.parametrize("part", ["model", "exp_avg", "exp_avg_sq"])
def test_a_checkpoint_whose_weights_or_moments_are_not_finite_is_no_sound_one(
    tiny_run: MakeRun, tmp_path: Path, part: str
) -> None:
    tiny_run(training__save_interval=1, training__max_steps=2)()
    newest = tmp_path / "checkpoints" / "step_2.pt"
    saved = torch.load(newest, weights_only=True)
    tensors = saved["model"]["norm.weight"] if part == "model" else saved["optimizer"]["state"][0]
    (tensors if part == "model" else tensors[part]).view(-1)[0] = float("nan")
    torch.save(saved, newest)
    run = tiny_run(training__resume="auto", training__max_steps=3)
    assert run.trainer.state.progress.step == 1
    (told,) = (line for line in run.kept.lines if line.startswith("Not resumed: "))
    assert told.startswith(f"Not resumed: {newest}: not finite: ")
    for setting in ("training__resume", "model__init_from"):
        with pytest.raises(CheckpointError, match=r"step_2\.pt: not finite: "):
            tiny_run(**{setting: newest})


def pop(*path: Any) -> Callable[[dict[str, Any]], object]:
    def change(saved: dict[str, Any]) -> None:
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return change


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], object]:
    def change(saved: dict[str, Any]) -> None:
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = value

    return change


OTHER_CONTENTS: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"no {key}": pop(key) for key in ("step", "optimizer", "rng", "loader", "total_tokens")},
    **{f"no {key}": pop(key) for key in ("data", "val_loss", "logging", "settings", "model")},
    "step of words": put("two", "step"),
    "negative step": put(-1, "step"),
    "half a step": put(1.5, "step"),
    "a list for settings": put([1], "settings"),
    "settings without model": pop("settings", "model"),
    "settings of numbers": put(7, "settings", "training"),
    "a weight of words": put("x", "model", "norm.weight"),
    "weights with numbers for names": put(torch.zeros(1), "model", 7),
    "a list for weights": put([torch.zeros(1)], "model"),
    "integers for weights": put(torch.zeros(32, dtype=torch.int64), "model", "norm.weight"),
    "a list for data": put([], "data"),
    "no position": pop("loader", "sequences"),
    "position of words": put("x", "loader", "sequences"),
    "a moment of words": put("x", "optimizer", "state", 0, "exp_avg"),
    "no second moment": pop("optimizer", "state", 0, "exp_avg_sq"),
    "kept numbers": put([7], "kept"),
    "a loss of words": put("x", "val_loss", "held_out"),
}


@pytest.mark.parametrize("change", OTHER_CONTENTS.values(), ids=list(OTHER_CONTENTS))
def test_a_whole_file_with_other_contents_is_told_in_one_line(
    tiny_run: MakeRun, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    tiny_run(training__save_interval=1, training__max_steps=2)()
    newest = tmp_path / "checkpoints" / "step_2.pt"
    saved = torch.load(newest, weights_only=True)
    change(saved)
    torch.save(saved, newest)
    with pytest.raises(CheckpointError) as caught:
        tiny_run(training__resume=newest, training__max_steps=3)
    assert str(caught.value).startswith(f"{newest}: not a checkpoint of Model Check: ")
    assert "\n" not in str(caught.value)
    run = tiny_run(training__resume="auto", training__max_steps=3)
    assert run.trainer.state.progress.step == 1
    assert any(line.startswith(f"Not resumed: {newest}: not a ch") for line in run.kept.lines)


def test_a_directory_is_named_only_where_a_checkpoint_of_ours_lies_in_it(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs" / "theirs.pt"
    theirs.parent.mkdir()
    torch.save({"model_state_dict": {}, "epoch": 3}, theirs)
    with pytest.raises(
        CheckpointError, match="not a checkpoint of Model Check: it has no schema, "
    ) as found:
        tiny_run(training__resume=theirs)
    assert "--resume" not in str(found.value)
    tiny_run(training__save_last=True, training__max_steps=1)()
    beside = theirs.rename(tmp_path / "checkpoints" / "theirs.pt")
    with pytest.raises(CheckpointError, match=f"`--resume {beside.parent}` takes the newest sound"):
        tiny_run(training__resume=beside)
