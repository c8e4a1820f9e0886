"""`examples/midi`: its tasks, and the whole way from pieces to a .mid that a model wrote."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.midi.make_pieces import RHYTHMS, make_piece, make_pieces, velocity_of
from examples.midi.make_tasks import main as make_tasks
from examples.midi.make_tasks import windows
from examples.midi.tasks import TASKS
from examples.midi.velocity_error import velocity_error
from model_check.data.sources.midi import NOTE, notes_of, read_notes
from model_check.generate.__main__ import main as generate_main
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
NOTES = np.array(
    [(0, 4, 60, 99), (4, 4, 64, 31), (9, 3, 67, 71), (16, 4, 72, 51), (20, 4, 48, 15)], NOTE
)
TINY = (
    *("model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=2"),
    *("training.max_steps=4", "training.context_length=160", "training.save_last=true"),
    *("training.learning_rate=1e-2", "training.eval_interval=4", "data.tokenizer=midi"),
    *("system.device=cpu", "debug.fingerprints=off"),
)


def asked(task: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    source, target = TASKS[task].rule(NOTES, np.random.default_rng(0))
    return source.tolist(), target.tolist()


@pytest.mark.parametrize(
    ("task", "pitches"),
    [
        ("loud", [60, 67]),
        ("soft", [64, 48]),
        ("above_median", [67, 72]),
        ("below_median", [60, 48]),
    ],
)
def test_a_task_that_divides_asks_for_some_notes_and_gives_the_others(
    task: str, pitches: list[int]
) -> None:
    source, target = asked(task)
    assert [note[2] for note in target] == pitches
    assert sorted(source + target) == sorted(NOTES.tolist())


def test_velocity_denoising_changes_velocities_alone() -> None:
    source, target = asked("velocity")
    assert target == NOTES.tolist()
    assert [note[:3] for note in source] == [note[:3] for note in target]
    assert all(1 <= note[3] <= 127 for note in source)
    assert source != target


def test_a_performance_is_asked_of_a_flat_score() -> None:
    source, target = asked("performance")
    assert target == NOTES.tolist()
    assert {note[3] for note in source} == {79}
    assert [note[0] for note in source] == [0, 4, 8, 16, 20]


def test_equal_seeds_give_equal_noise() -> None:
    assert asked("velocity") == asked("velocity")


def test_a_window_keeps_the_place_in_the_bar() -> None:
    notes = make_piece(np.random.default_rng(0), "Even", 40)
    each = list(windows(notes, 12))
    assert [len(window) for window in each] == [12, 12, 12]
    assert [int(window["start"][0]) for window in each] == [0, 16, 0]


def test_velocities_of_a_made_piece_follow_its_rule() -> None:
    for composer in RHYTHMS:
        notes = make_piece(np.random.default_rng(0), composer, 500)
        exact = velocity_of(notes["start"], notes["pitch"])
        assert np.abs(notes["velocity"] - exact).mean() < 2.5
        assert exact.std() > 10


@pytest.mark.midi
def test_made_pieces_have_a_table_and_equal_seeds_are_equal(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_pieces(tmp_path / name, 3, 24, seed=5)
    rows = list(csv.DictReader((tmp_path / "one" / "metadata.csv").read_text().splitlines()))
    assert {row["note"] for row in rows} == {"synthetic"}
    for row in rows:
        first, second = (tmp_path / name / row["midi_filename"] for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
        assert len(read_notes(first)) == 24


def train(place: Path, name: str, *overrides: str) -> tuple[Path, str]:
    """The checkpoint of a short training, and what it said."""
    command = [sys.executable, str(ROOT / "pretrain_main.py"), "--preset", "cpu", *TINY]
    command += [f"data.cache_dir={place / 'cache'}", f"system.checkpoint_dir={place / name}"]
    done = subprocess.run(
        [*command, *overrides], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place / name / "last.pt", done.stdout


@pytest.mark.midi
def test_windows_longer_than_any_piece_are_told_with_the_longest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pieces(tmp_path, 2, 96, seed=0)
    with pytest.raises(SystemExit):
        make_tasks([str(tmp_path), str(tmp_path / "tasks.jsonl"), "--notes=128"])
    assert "the longest MIDI file has 96 notes, fewer than --notes 128" in capsys.readouterr().err
    make_pieces(tmp_path, 2, 256, seed=0)
    assert make_tasks([str(tmp_path), str(tmp_path / "tasks.jsonl"), "--notes=128"]) == 0


@pytest.mark.midi
def test_from_pieces_to_a_midi_file_that_a_model_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import symusic

    pieces, tasks = tmp_path / "pieces", tmp_path / "tasks.jsonl"
    make_pieces(pieces, 4, 32, seed=0)
    (pieces / "broken.mid").write_bytes(b"no music")
    first, said = train(
        tmp_path, "one", f"data.dataset={pieces}", "data.validation=dotted=composer:Dotted"
    )
    assert "1 x file skipped: not readable as MIDI (first at broken.mid" in said
    assert "Eval [4] dotted" in said

    assert make_tasks([str(pieces), str(tasks), "--column=composer", "--notes=8"]) == 0
    assert "skipped: " in capsys.readouterr().err
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    assert {row["task"] for row in rows} == set(TASKS)
    assert {row["composer"] for row in rows} == set(RHYTHMS)
    assert all(notes_of(row["completion"].split())[1] == 0 for row in rows)

    _, said = train(
        tmp_path,
        "two",
        f"data.dataset={tasks}",
        "training.stage=prompt_target",
        f"model.init_from={first}",
        "data.validation=loud=task:loud",
    )
    assert "weights: taken from" in said
    assert "Eval [4] loud" in said

    piece, out = str(pieces / "piece_000.mid"), str(tmp_path / "out.mid")
    arguments = [str(first), "--prompt-midi", piece, "--midi", out, "--max-tokens", "20"]
    assert generate_main(arguments) == 0
    assert symusic.Score(out).note_num() >= 32


@pytest.mark.midi
def test_the_velocity_error_counts_a_note_that_is_not_said_as_the_constant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an answer that is known."""
    from examples.midi import velocity_error as module

    monkeypatch.setattr(
        module, "answer", lambda *_: "Pitch_60 Velocity_59 Duration_1.0.8 Pitch_72 Velocity_3"
    )
    source = "TASK_VELOCITY Pitch_60 Velocity_99 Duration_1.0.8 Pitch_64 Velocity_3 Duration_1.0.8"
    target = "Pitch_60 Velocity_63 Duration_1.0.8 Pitch_64 Velocity_83 Duration_1.0.8"
    error = velocity_error(None, [{"prompt": source, "completion": target}])
    assert error == (4 / 2 + 10 / 2, 10, (36 + 80) / 2, 0.5, 2)
