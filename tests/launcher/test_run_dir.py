"""The run directory: where it is, what is refused, what never gets into it."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import run_dir
from launcher.output.append_file import AppendFile
from model_check.errors import StorageError
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
NOBODY = 65534
ONE = ("--device", "cpu", "--workers", "1")


def test_the_default_is_named_by_process_and_time(tmp_path: Path) -> None:
    pattern = r"model_check_logs_\d+_\d{8}_\d{6}"
    assert re.fullmatch(f"/tmp/{pattern}", str(run_dir.default_path(None)))
    assert re.fullmatch(pattern, run_dir.default_path(str(tmp_path)).name)
    assert run_dir.default_path(str(tmp_path)).parent == tmp_path


def test_a_directory_with_files_of_another_run_is_refused(tmp_path: Path) -> None:
    assert run_dir.create(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "new" / "gpu0.log").touch()
    with pytest.raises(StorageError, match="must be new or empty"):
        run_dir.create(tmp_path / "new")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_we_make_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = run_dir.create(tmp_path / "parent" / "run")
        assert mode_of(path) == 0o700
        (path / run_dir.LAUNCHER_LOG).unlink()
        path.rmdir()  # while the run goes on
        run_dir.write(path / "report.json", b"{}")
        assert mode_of(path) == 0o700
    finally:
        os.umask(before)


@pytest.mark.root
def test_another_user_reads_nothing_of_a_run(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "launcher", *ONE, "--", "echo", "hello")
    umask = {"umask": 0, "cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, **umask)  # type: ignore[call-overload]
    assert run.returncode == 0, run.stdout
    (directory,) = re.findall(r"run directory (/tmp/\S+)", run.stdout)
    try:
        assert (Path(directory) / "cpu0.log").read_text() == "hello\n"
        for seen in (directory, f"{directory}/cpu0.log", f"{directory}/run.json"):
            other = subprocess.run(
                ["find", seen], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True
            )
            assert b"Permission denied" in other.stderr
            assert other.stdout in (b"", f"{directory}\n".encode())
    finally:
        shutil.rmtree(directory)


def vanished(path: Path) -> Path:
    """A run directory that somebody deleted during the run."""
    run_dir.create(path)
    shutil.rmtree(path)
    return path


def test_evidence_of_a_run_whose_directory_vanished_is_private(tmp_path: Path) -> None:
    weights = tmp_path / "nan.pt"
    weights.write_text("weights")
    path = vanished(tmp_path / "run")
    kept = run_dir.keep(weights, path / "dossier" / "gpu0")
    assert kept == path / "dossier" / "gpu0" / "nan.pt"
    assert mode_of(path) == 0o700


@pytest.mark.root
@pytest.mark.parametrize("trap", ["directory", "link"])
def test_nothing_is_written_where_another_user_took_the_place_of_a_run_directory(
    tmp_path: Path, trap: str
) -> None:
    tmp_path.chmod(0o1777)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "report.json").write_text("precious")
    path = vanished(tmp_path / "run")
    if trap == "directory":
        path.mkdir(0o777)
    else:
        path.symlink_to(mine)
    os.lchown(path, 4711, 4711)
    with pytest.raises(StorageError, match="another user"):
        run_dir.write(path / "report.json", b"{}")
    weights = tmp_path / "nan.pt"
    weights.write_text("weights")
    assert run_dir.keep(weights, path / "dossier" / "gpu0") == weights
    said: list[str] = []
    AppendFile(path / "cpu0.log", said.append).write(b"secret")
    assert "another user" in said[0]
    assert (mine / "report.json").read_text() == "precious"
    assert [p.name for p in path.iterdir()] == ([] if trap == "directory" else ["report.json"])


@pytest.mark.parametrize("plant", ["link", "hard link", "pipe", "file"])
def test_a_log_that_another_user_laid_ready_is_not_written_to(tmp_path: Path, plant: str) -> None:
    mine, log = tmp_path / "bashrc", tmp_path / "run" / "cpu0.log"
    mine.write_text("precious")
    log.parent.mkdir()
    log.parent.chmod(0o777)
    match plant:
        case "link":
            log.symlink_to(mine)
        case "hard link":
            log.hardlink_to(mine)
        case "pipe":
            os.mkfifo(log)
        case "file" if os.geteuid() == 0:
            log.touch()
            os.chown(log, 4711, 4711)
        case _:
            pytest.skip("only root can give a file away")
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    said: list[str] = []
    AppendFile(log, said.append).write(b"secret")
    assert "the run goes on without this file" in said[0]
    assert mine.read_text() == "precious"
    assert os.read(reader, 100) in (b"", b"precious")
    os.close(reader)


def test_a_directory_that_was_laid_ready_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o750)
    assert mode_of(run_dir.create(tmp_path / "run")) == 0o750


@pytest.mark.root
def test_a_link_that_somebody_else_laid_ready_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "mine")
    os.lchown(tmp_path / "run", 4711, 4711)
    for path in (tmp_path / "run", tmp_path / "run" / "logs" / "of_now"):
        with pytest.raises(StorageError, match="is a link that another user may have made"):
            run_dir.create(path)
    assert not list((tmp_path / "mine").iterdir())


def test_a_place_that_cannot_be_made_says_where_and_what_next(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--run-dir") as caught:
        run_dir.create(tmp_path / "file" / "run")
    assert str(tmp_path / "file" / "run") in str(caught.value)


def test_of_two_launchers_in_one_directory_the_second_is_refused(tmp_path: Path) -> None:
    """Before either has written a word."""
    run_dir.create(tmp_path / "run")
    with pytest.raises(StorageError, match="is not empty"):
        run_dir.create(tmp_path / "run")


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o1777, 0o1770], ids=["of all", "of a group"])
def test_a_directory_that_somebody_else_laid_ready_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 4711, 4711)
    with pytest.raises(StorageError, match="belongs to another user"):
        run_dir.create(tmp_path / "run")
    tmp_path.chmod(0o700)
    assert run_dir.create(tmp_path / "run")


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o1777, 0o1770], ids=["of all", "of a group"])
@pytest.mark.parametrize("taken_by", ["directory", "file", "link", "link to nothing", "our own"])
def test_a_default_name_that_was_taken_is_left_for_another_one(
    tmp_path: Path, taken_by: str, mode: int
) -> None:
    tmp_path.chmod(mode)
    mine, path = tmp_path / "mine", tmp_path / "model_check_logs_1_20260101_000000"
    mine.mkdir()
    match taken_by:
        case "directory":
            path.mkdir(0o777)
        case "file":
            path.touch()
        case "link":
            path.symlink_to(mine)
        case "link to nothing":
            path.symlink_to(mine / "nothing")
        case "our own":
            run_dir.create(path)
    os.lchown(path, *((0, 0) if taken_by == "our own" else (4711, 4711)))
    made = run_dir.create_default(path)
    assert made.parent == tmp_path
    assert re.fullmatch(rf"{path.name}_[0-9a-f]{{16}}", made.name)
    assert mode_of(made) == 0o700
    assert list(mine.iterdir()) == []


@pytest.mark.root
def test_a_run_whose_default_names_were_all_taken_goes_on(tmp_path: Path) -> None:
    """Another user has made every name that the next minute can bring for this very process."""
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o1777)
    code = (
        "import os, sys, time\n"
        "for s in range(60):\n"
        "    stamp = time.strftime('%Y%m%d_%H%M%S', time.localtime(time.time() + s))\n"
        "    path = f'{sys.argv[1]}/model_check_logs_{os.getpid()}_{stamp}'\n"
        "    os.mkdir(path, 0o777); os.chown(path, 4711, 4711)\n"
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'launcher', *sys.argv[2:]])\n"
    )
    command = (sys.executable, "-P", "-c", code, str(logs), f"logging.log_dir={logs}", *ONE)
    run = subprocess.run(
        [*command, "--", "echo", "hello"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (directory,) = re.findall(r"run directory (\S+)", run.stdout)
    assert (Path(directory) / "cpu0.log").read_text() == "hello\n"
    assert (tmp_path / ".logs" / "latest").readlink() == Path(directory)


@pytest.mark.root
def test_the_link_to_the_latest_run_is_not_made_where_another_users_link_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "latest").write_text("precious")
    monkeypatch.chdir(tmp_path)
    Path(".logs").symlink_to(mine)
    os.lchown(".logs", 4711, 4711)
    run_dir.link_latest(tmp_path / "run")
    assert [path.name for path in mine.iterdir()] == ["latest"]
    assert (mine / "latest").read_text() == "precious"


def test_evidence_is_found_where_it_was_kept_whatever_lies_at_its_old_place(tmp_path: Path) -> None:
    original, dossier = tmp_path / "nan.pt", tmp_path / "dossier" / "gpu0"
    original.write_text("weights")
    kept = run_dir.keep(original, dossier)
    original.unlink()
    original.write_text("of a later run")
    assert run_dir.kept(original, dossier) == kept
    assert kept.read_text() == "weights"


def test_evidence_that_was_not_kept_is_told_where_it_was(tmp_path: Path) -> None:
    original, dossier = tmp_path / "nan.pt", tmp_path / "dossier" / "gpu0"
    assert run_dir.keep(original, dossier) == original
    original.write_text("of a later run")
    assert run_dir.kept(original, dossier) == original


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("runs/mine", "mine"),
        ("runs/mine/restart_2", "mine"),
        ("runs/mine/round_003", "mine/round_003"),
        ("runs/restarted_1", "restarted_1"),
    ],
)
def test_rounds_of_different_runs_are_told_apart_and_restarts_go_on(
    directory: str, name: str
) -> None:
    assert run_dir.name_of(Path(directory)) == name


def test_a_page_that_cannot_be_made_is_an_error_that_costs_no_verdict(tmp_path: Path) -> None:
    """Who writes a report tells a StorageError and goes on."""

    def fails() -> str:
        raise OverflowError("int too large to convert to float")

    with pytest.raises(StorageError, match=r"cannot be made \(OverflowError: int too large"):
        run_dir.write_page(tmp_path / "report.html", fails)
    run_dir.write_page(tmp_path / "report.html", lambda: "whole")
    assert (tmp_path / "report.html").read_text() == "whole"
