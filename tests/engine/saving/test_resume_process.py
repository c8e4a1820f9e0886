"""Resuming what `pretrain_main.py` trained: after an end, a notice, a signal, a SIGKILL in the
middle of a save."""

import hashlib
import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from model_check.engine.checkpoint import read_checkpoint
from model_check.events import Done, Evaluation, Saved, Step
from tests.engine.conftest import Run, Trained, Worker, signalled

MakeRun = Callable[..., Run]
Start = Callable[..., Worker]
Train = Callable[..., Trained]


def bits(worker: Trained) -> dict[int, tuple[str, str]]:
    return {e.step: (e.loss, e.grad_norm) for e in worker.events if isinstance(e, Step)}


def done(worker: Trained) -> Done:
    last = worker.events[-1]
    assert isinstance(last, Done), worker.output
    return last


def trained(train: Train, *arguments: str) -> Trained:
    worker = train(*arguments)
    assert worker.exit_code == 0, worker.output
    return worker


def assert_same_state(one: Path, other: Path) -> None:
    ours, theirs = read_checkpoint(one), read_checkpoint(other)
    for name, weight in ours["model"].items():
        assert torch.equal(weight, theirs["model"][name]), name
    for index, entry in ours["optimizer"]["state"].items():
        for name, moment in entry.items():
            assert torch.equal(moment, theirs["optimizer"]["state"][index][name])
    assert torch.equal(ours["rng"]["torch"], theirs["rng"]["torch"])
    assert ours["rng"]["python"] == theirs["rng"]["python"]
    assert (ours["step"], ours["loader"]) == (theirs["step"], theirs["loader"])


KILLED_IN_A_SAVE = """
import os, signal, sys

def die(event, arguments):
    if event == "os.rename" and str(arguments[0]).startswith(".step_4.pt."):
        name, _, directory, _ = arguments
        file = os.open(name, os.O_WRONLY, dir_fd=directory)
        os.ftruncate(file, os.fstat(file).st_size // 2)  # no more of it is on the disk
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
"""


@pytest.mark.parametrize("beside", ["false", "true"], ids=["training waits", "beside training"])
def test_a_process_killed_while_it_saves_is_resumed_to_the_bit(
    start: Start, train: Train, tmp_path: Path, beside: str
) -> None:
    saving = ("training.save_interval=2", "training.save_last=true", "--max-steps=7")
    saving += (f"training.async_save={beside}",)
    whole = trained(train, *saving, "system.checkpoint_dir=whole")
    (tmp_path / "sitecustomize.py").write_text(KILLED_IN_A_SAVE)
    killed = start(*saving, PYTHONPATH=str(tmp_path))
    assert killed.finish() == -signal.SIGKILL, killed.output
    directory = tmp_path / ".checkpoints"
    (leftover,) = directory.glob(".step_4.pt.*.tmp")
    rest = trained(train, *saving, "--resume", "auto")
    assert "Resumed from .checkpoints/step_2.pt: 2 steps done" in rest.output
    assert bits(rest) == {n: b for n, b in bits(whole).items() if n >= 2}
    assert "[CPU0] Step [2/7]" in rest.output
    assert not leftover.exists()
    assert_same_state(tmp_path / "whole" / "last.pt", directory / "last.pt")


@pytest.mark.parametrize("older", [False, True], ids=["sequences", "an older checkpoint's batches"])
def test_another_batch_size_goes_on_at_the_next_sequence(
    train: Train, tmp_path: Path, older: bool
) -> None:
    three = ("training.batch_size=2", "training.grad_accum_nums=3")
    trained(train, *three, "--max-steps=2", "training.save_last=true")
    last = tmp_path / ".checkpoints" / "last.pt"
    if older:
        saved = torch.load(last, weights_only=True)
        torch.save(saved | {"loader": {"position": 2 * 3}}, last)
    again = ("--resume", str(last), "--max-steps=3", "system.checkpoint_dir=rest")
    small = trained(train, *three, *again)
    one = ("training.batch_size=6", "training.grad_accum_nums=1", "training.resume_anyway=true")
    large = trained(train, *one, *again)
    losses = [float.fromhex(bits(worker)[2][0]) for worker in (small, large)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert "training.batch_size 2 -> 6" in large.output


def test_two_workers_of_one_name_in_one_directory_have_their_own_files(
    start: Start, train: Train, tmp_path: Path
) -> None:
    """Of two launchers. They took each other's files for their own, and removed them."""
    saving = ("training.save_interval=1", "training.keep_last=2", "training.save_last=true")
    worker = {"MODEL_CHECK_WORKER": "CPU0"}
    first = start(*saving, "--max-steps=100000", "system.seed=1", **worker)
    saves = (event for event in first.listen() if isinstance(event, Saved))
    assert next(saves)
    first.process.send_signal(signal.SIGSTOP)
    second = train("training.save_interval=2", "--max-steps=8", "system.seed=2", **worker)
    assert second.exit_code == 0, second.output
    first.process.send_signal(signal.SIGCONT)
    assert len(list(itertools.islice(saves, 8))) == 8
    first.process.send_signal(signal.SIGTERM)
    first.finish()
    found = {
        name: [read_checkpoint(path) for path in (tmp_path / ".checkpoints" / name).glob("*.pt")]
        for name in ("cpu0", "cpu0_2")
    }
    assert [saved["settings"]["system"]["seed"] for saved in found["cpu0"]] == [1, 1]
    assert sorted(saved["step"] for saved in found["cpu0_2"]) == [2, 4, 6, 8]
    assert {saved["settings"]["system"]["seed"] for saved in found["cpu0_2"]} == {2}
    in_use = f".checkpoints/cpu0 is in use by CPU0 (process {first.process.pid} on "
    assert in_use in second.output.partition("Step [0/")[0]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM], ids=["USR1", "TERM"])
def test_by_hand_a_notice_saves_and_ends_well(
    train: Train, tmp_path: Path, signum: signal.Signals
) -> None:
    options = ("--max-steps=100000", "training.save_on_signal=true")
    worker = train(*options, on_event=signalled(Step, signum))
    assert worker.exit_code == 0, worker.output
    num_done = len(bits(worker))
    text = f"ended early by {signum.name}: {num_done} of 100000 steps, saved"
    assert done(worker).early == text
    assert worker.output.splitlines()[-1] == f"[CPU0] {text}"
    last = tmp_path / ".checkpoints" / "last.pt"
    assert read_checkpoint(last)["step"] == num_done
    again = trained(
        train, "--checkpoint", str(last), f"--max-steps={num_done}", "training.save_on_signal=true"
    )
    assert done(again).early == f"had nothing left to train: {num_done} steps were done before"
    assert bits(again) == {}


def test_under_a_supervisor_a_term_stops_it_unsaved(train: Train, tmp_path: Path) -> None:
    options = ("--max-steps=100000", "training.save_on_signal=true")
    at_step = signalled(Step, signal.SIGTERM)
    worker = train(*options, on_event=at_step, MODEL_CHECK_WORKER="CPU1")
    assert worker.exit_code == 143, worker.output
    assert done(worker).early is None
    assert not (tmp_path / ".checkpoints").exists()


@pytest.mark.parametrize(
    ("which", "message"),
    [("gone.pt", "training.resume = gone.pt: no such file"), ("torn.pt", "torn.pt: damaged: ")],
)
def test_what_cannot_be_resumed_is_one_line_and_exit_code_2(
    train: Train, tmp_path: Path, which: str, message: str
) -> None:
    (tmp_path / "torn.pt").write_bytes(b"PK")
    worker = train("--resume", which)
    assert worker.exit_code == 2
    assert message in worker.output.splitlines()[-1]
    assert "Traceback" not in worker.output


def test_what_does_not_fit_is_one_line_and_exit_code_2(train: Train, tmp_path: Path) -> None:
    """Moments that torch would broadcast, and a position that the loader cannot read from."""
    trained(train, "training.save_last=true", "--max-steps=2")
    sound = torch.load(tmp_path / ".checkpoints" / "last.pt", weights_only=True)
    optimizer = sound["optimizer"]
    state = optimizer["state"] | {0: optimizer["state"][0] | {"exp_avg": torch.ones(1)}}
    misfits = {
        "exp_avg/tok_embed.weight is float32 [1], not ": {
            "optimizer": optimizer | {"state": state}
        },
        "loader.sequences is 1000000000000000, not 4": {
            "loader": sound["loader"] | {"sequences": 10**15}
        },
    }
    for words, parts in misfits.items():
        torch.save(sound | parts, tmp_path / "odd.pt")
        worker = train("--resume", "odd.pt", "--max-steps=3")
        assert worker.exit_code == 2
        assert f"odd.pt: does not fit this run: {words}" in worker.output.splitlines()[-1]
        assert "Traceback" not in worker.output
        assert bits(worker) == {}


def test_validation_splits_of_the_data_are_evaluated(train: Train, tmp_path: Path) -> None:
    rows = (json.dumps({"text": f"{number} is a number. " * 9}) for number in range(200))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    worker = trained(
        train,
        *("data.dataset=rows.jsonl", "data.validation=held_out=0.1,other=0.05"),
        *("training.eval_interval=2", "training.eval_batches=3", "training.save_best=true"),
    )
    found = [(e.step, e.split) for e in worker.events if isinstance(e, Evaluation)]
    assert found == [(n, split) for n in (2, 4) for split in ("held_out", "other")]
    lines = [line for line in worker.output.splitlines() if line.startswith("[CPU0] Eval [")]
    assert len(lines) == 4
    assert "| Perplexity: " in lines[0]
    best = read_checkpoint(tmp_path / ".checkpoints" / "best.pt")
    assert best["best_split"] == "held_out"
    assert best["data"]["dataset"] == "rows.jsonl"


def other_tokens(cache_dir: Path) -> None:
    """What another version of a library may make by the same recipe: other ids under one key."""
    (manifest,) = cache_dir.glob("tokens/*/manifest.json")
    content = json.loads(manifest.read_bytes())
    shard = manifest.with_name("tokens-00000.bin")
    ids = np.fromfile(shard, "<u2")[::-1].copy()
    shard.write_bytes(ids.tobytes())
    content["files"][shard.name]["sha256"] = hashlib.sha256(ids.tobytes()).hexdigest()
    manifest.write_text(json.dumps(content))


def test_other_tokens_under_the_same_key_are_another_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_CACHE_DIR", str(tmp_path / "own"))
    trained(train, "training.save_last=true", "--max-steps=1")
    other_tokens(tmp_path / "own")
    again = train("--resume=auto", "--max-steps=2", "data.verify=full")
    assert again.exit_code == 2
    assert "last.pt: of another run, which cannot go on exactly: data (" in again.output


def test_the_same_tokens_under_another_key_are_the_same_run(tiny_run: MakeRun) -> None:
    data = {"cache": "old", "content": "abc", "dataset": "wikitext"}
    tiny_run(training__save_last="true", data=data)()
    run = tiny_run(training__resume="auto", training__max_steps=5, data=data | {"cache": "new"})
    assert run.trainer.state.progress.step == 4
