"""Where a run writes when nothing says it and the working directory cannot be written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_check.config.places import fallbacks
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, TINY

pytestmark = pytest.mark.root
NOBODY = 4711

READ_ONLY = (
    'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && cd "$1" && shift && exec "$@"'
)

BY_HAND = """
import sys
from pretrain_main import Console, EventSink, Meter, Process, StopSignal, WorkerEnv, task_of
process = Process(WorkerEnv.from_environ(), EventSink(None), Console(), StopSignal(), Meter())
task_of(sys.argv[1:], process)
"""


def launcher(
    where: Path, home: Path, *arguments: str, environ: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """A launcher whose working directory is mounted read-only."""
    return in_read_only(where, home, ("-P", "-m", "launcher"), *arguments, environ=environ)


def in_read_only(
    where: Path,
    home: Path,
    program: tuple[str, ...],
    *arguments: str,
    environ: dict[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    shell = ("unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(where))
    tiny = home.parent / "tiny.json"
    tiny.write_text(json.dumps(TINY))
    ours = (sys.executable, *program, *arguments, "--config", str(tiny))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), **(environ or {})}
    return subprocess.run(
        (*shell, *ours), env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )


@pytest.fixture
def where(tmp_path: Path) -> Path:
    path = tmp_path / "where"
    path.mkdir()
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


def test_where_the_working_directory_is_read_only_a_run_keeps_its_data_at_home(
    where: Path, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("some words of a text " * 500)
    text = (f"data.dataset={tmp_path}/a.txt", "data.tokenizer=bpe")
    asked = ("--workers=1", "--max-steps=1", "training.save_last=true", *text)
    asked += ("logging.tensorboard=true",)
    run = launcher(where, home, "--run-dir", str(tmp_path / "run"), *asked)
    assert run.returncode == 0, run.stdout
    ours = home / ".cache" / "model_check"
    (checkpoints,) = (ours / "checkpoints").glob("where-*")
    assert (checkpoints / "cpu0" / "last.pt").exists()
    assert list((ours / "datasets").glob("*/manifest.json"))
    assert list((ours / "checkpoints" / "tensorboard_logs").glob("*/cpu0/events*"))
    (note,) = [line for line in run.stdout.splitlines() if "cannot be written" in line]
    assert f"data.cache_dir = {ours}/datasets, system.checkpoint_dir = {checkpoints}" in note


def test_a_trainer_without_a_launcher_says_where_it_writes_instead(where: Path, home: Path) -> None:
    """As far as it says what it will do."""
    run = in_read_only(where, home, ("-P", "-c", BY_HAND))
    assert run.returncode == 0, run.stderr
    ours = home / ".cache" / "model_check"
    (note,) = [line for line in run.stdout.splitlines() if "cannot be written" in line]
    assert f"data.cache_dir = {ours}/datasets, system.checkpoint_dir = {ours}/checkpoints" in note


def test_checkpoints_that_another_user_keeps_there_are_not_written_to(
    where: Path, home: Path, tmp_path: Path
) -> None:
    (where / ".checkpoints").mkdir()
    asked = ("--run-dir", str(tmp_path / "run"), "training.save_last=true")
    run = in_read_only(where, home, ("-P", "-m", "tests.scripted"), *asked)
    assert run.returncode == 0, run.stdout
    (checkpoints,) = (home / ".cache" / "model_check" / "checkpoints").glob("where-*")
    assert (checkpoints / "cpu0" / "last.pt").exists()


def test_a_place_that_cannot_be_used_in_a_directory_of_ones_own_is_not_left_in_silence(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--resume auto` began at step 0 elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path(".checkpoints").touch()
    assert "system.checkpoint_dir" not in fallbacks({"HOME": str(home)})


def test_a_place_that_somebody_named_is_never_another(where: Path, home: Path) -> None:
    run = launcher(where, home, f"logging.log_dir={home}", environ={"DATASET_CACHE_DIR": "mine"})
    assert run.returncode == 2
    assert "mine" in run.stdout + run.stderr
    assert not (home / ".cache" / "model_check" / "datasets").exists()


def test_a_cache_that_lies_there_is_read(where: Path, home: Path) -> None:
    (where / ".cache" / "datasets").mkdir(parents=True)
    run = launcher(where, home, "config", "show")
    assert '".cache/datasets"' in run.stdout
    assert f'"{home}/.cache/model_check/checkpoints/where-' in run.stdout


@pytest.mark.parametrize("home_directory", [".", "/dev/null", "relative"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_what_is_no_home_is_no_place_and_temporary_files_are_one_unless_another_user_made_it(
    where: Path, monkeypatch: pytest.MonkeyPatch, home_directory: str, is_ours: bool
) -> None:
    monkeypatch.chdir(where)
    monkeypatch.setattr("model_check.config.places._can_serve", lambda *_: False)
    monkeypatch.setattr("tempfile.tempdir", str(where))
    where.chmod(0o1777)
    place = where / "model_check_0"
    if not is_ours:
        place.mkdir()
        os.chown(place, NOBODY, NOBODY)
    found = {"data.cache_dir": f"{place}/datasets"} if is_ours else {}
    assert fallbacks({"HOME": home_directory}).items() >= found.items()
    assert bool(fallbacks({"HOME": home_directory})) is is_ours


def test_without_any_place_to_write_to_the_message_names_the_working_directory(
    where: Path, home: Path
) -> None:
    nowhere = {"HOME": "/dev/null", "TMPDIR": str(home)}
    (home / "model_check_0").touch()
    run = launcher(where, home, f"logging.log_dir={home}", environ=nowhere)
    assert run.returncode == 2
    assert ".cache/datasets" in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr


def test_a_user_without_a_home_trains_from_a_tree_and_an_environment_of_others(
    where: Path, tmp_path: Path
) -> None:
    """As a prolog of Slurm's: no HOME, no name for its user. It may read everything here, and write
    to one directory."""
    room, tiny = tmp_path / "room", tmp_path / "tiny.json"
    room.mkdir()
    os.chown(room, NOBODY, NOBODY)
    tiny.write_text(json.dumps(TINY))
    reads = "+dac_read_search"
    become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    become += (f"--inh-caps={reads}", f"--ambient-caps={reads}")
    asked = ("--workers=1", "--max-steps=1", "training.save_last=true", f"--run-dir={room}/run")
    ours = {"MODEL_CHECK_PYTHON": sys.executable, "MODEL_CHECK_VENV": str(where / "none")}
    done = subprocess.run(
        [*become, "bash", str(ROOT / "run.sh"), *asked, "--device=cpu", f"--config={tiny}"],
        cwd=where,
        env={"PATH": os.environ["PATH"], "TMPDIR": str(room)} | ours,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = room / f"model_check_{NOBODY}"
    assert list((kept / "checkpoints").glob("where-*/cpu0/last.pt"))
    assert list((kept / "datasets").glob("*/manifest.json"))
    assert kept.stat().st_mode & 0o777 == 0o700
