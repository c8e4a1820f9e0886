"""A start in a ready environment: the launcher's arguments and environment, and its exit code."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.install.requirements import Requirement
from tests.deadline import DEADLINE_S
from tests.shell.tree import ROOT, Tree


def test_arguments_arrive_as_they_were_given(ready: Tree) -> None:
    given = ["a b", "*", "q\"uo'te", "$HOME", "", "--x=1", "back\\slash", "é\n"]
    (ready.cwd / "file").touch()  # a glob that is expanded would show
    assert ready.seen(*given)["argv"] == given


def test_the_working_directory_stays_the_users(ready: Tree) -> None:
    assert ready.seen()["cwd"] == str(ready.cwd)


def test_modules_in_the_working_directory_are_not_ours(ready: Tree) -> None:
    (ready.cwd / "launcher").mkdir()
    (ready.cwd / "launcher" / "__init__.py").touch()
    (ready.cwd / "json.py").write_text("raise SystemExit('shadowed')")
    assert ready.seen("x")["argv"] == ["x"]


def test_a_link_to_the_script_finds_its_tree(ready: Tree) -> None:
    (ready.root.parent / "link.sh").symlink_to(ready.root / "run.sh")
    assert ready.seen(script="../link.sh")["prefix"] == str(ready.venv)


@pytest.mark.parametrize("before", ["", "/somewhere:/else"])
def test_the_callers_python_path_is_kept_and_told(ready: Tree, before: str) -> None:
    seen = ready.seen(PYTHONPATH=before)
    assert seen["before"] == before
    assert seen["path"] == (f"{ready.root}:{before}" if before else str(ready.root))


@pytest.mark.parametrize(
    ("before", "kept"), [(":", ""), (":/a", ":/a"), ("/a:", ":/a"), ("/a:::/b", ":/a:/b")]
)
def test_an_empty_element_of_the_python_path_is_not_the_working_directory(
    ready: Tree, before: str, kept: str
) -> None:
    """`PYTHONPATH=$PYTHONPATH:/a` leaves an empty entry where the variable was not set."""
    (ready.cwd / "types.py").write_text("raise SystemExit('imported')")
    seen = ready.seen(PYTHONPATH=before)
    assert (seen["path"], seen["before"]) == (f"{ready.root}{kept}", before)


def test_the_library_of_another_python_is_not_taken(ready: Tree) -> None:
    done = ready("x", PYTHONHOME="/nowhere")
    assert (done.returncode, json.loads(done.stdout)["argv"]) == (0, ["x"])
    (line,) = done.stderr.splitlines()
    assert line.startswith("[launcher] PYTHONHOME is left out")


def test_a_start_without_a_path_gives_its_children_one(ready: Tree) -> None:
    """As a prolog of Slurm's: a compiler finds its assembler by PATH."""
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        ["/usr/bin/env", "-i", bash, ready.root / "run.sh", "variable", "PATH"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert "/usr/bin" in done.stdout.split(":"), done.stderr


def test_the_exit_code_is_the_launchers(ready: Tree) -> None:
    assert ready("exit", "7").returncode == 7


def test_a_signal_goes_to_the_launcher_itself(ready: Tree) -> None:
    process = ready.popen("pause")
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid  # no process of ours in between
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGTERM


def test_a_ready_environment_starts_one_python_and_says_nothing(
    ready: Tree, recorder: Callable[[Path], Path]
) -> None:
    python = ready.venv / "bin" / "python"
    calls = recorder(python)
    stamp = ready.venv / "ready-run"
    stamp.write_text(f"{stamp.read_text().splitlines()[0]}\n{python}\n")  # made by the recorder
    done = ready("--debug")
    assert (done.returncode, done.stderr) == (0, "")
    assert calls.read_text() == "-P -m launcher --debug\n"


@pytest.mark.root
@pytest.mark.parametrize(("owner", "is_told"), [(4711, True), (0, False)])
def test_an_environment_of_another_user_is_told_before_it_runs(
    ready: Tree, owner: int, is_told: bool
) -> None:
    os.chown(ready.venv, owner, owner)
    done = ready("x")
    assert done.returncode == 0
    told = "belongs to another user (UNKNOWN), whose programs now run as you"
    assert (f"[launcher] {ready.venv} {told}" in done.stderr) == is_told


def test_another_interpreter_behind_the_link_is_noticed(
    ready: Tree, no_ensurepip: dict[str, str]
) -> None:
    stamp = ready.venv / "ready-run"
    stamp.write_text(f"{stamp.read_text().splitlines()[0]}\n/usr/bin/env\n")
    done = ready(**no_ensurepip)
    assert done.returncode == 0
    assert "[launcher] installing into" in done.stderr


def test_an_interpreter_that_has_all_is_used_as_it_is(bare: Tree, ready_elsewhere: Path) -> None:
    for env in (
        {"MODEL_CHECK_PYTHON": f"{ready_elsewhere}/bin/python"},
        {"VIRTUAL_ENV": str(ready_elsewhere)},
    ):
        assert bare.seen(**env)["prefix"] == str(ready_elsewhere)
    assert not bare.venv.exists()


def test_without_a_python_the_start_ends_with_one_line(bare: Tree) -> None:
    done = bare(MODEL_CHECK_PYTHON="/nowhere/python")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("[launcher] error: no Python 3.11 or newer among: /nowhere/python")


@pytest.mark.parametrize(
    ("script", "given", "expected"),
    [
        ("train_gpu.sh", [], ["--gpu", "0"]),
        ("train_gpu.sh", ["3"], ["--gpu", "3"]),
        ("train_gpu.sh", ["3", "--debug"], ["--gpu", "3", "--debug"]),
        ("train_gpu.sh", ["--debug"], ["--gpu", "0", "--debug"]),
        ("train_gpu.sh", ["", "--debug"], ["--gpu", "0", "--debug"]),
        ("train_gpu.sh", ["system.seed=1"], ["--gpu", "0", "system.seed=1"]),
        ("train_gpu.sh", ["GPU-5d1c", "--", "a b"], ["--gpu", "GPU-5d1c", "--", "a b"]),
        ("train_auto_gpu.sh", [], ["--gpus", "auto"]),
        ("train_auto_gpu.sh", ["--config", "a b"], ["--gpus", "auto", "--config", "a b"]),
    ],
)  # fmt: skip
def test_the_scripts_for_one_gpu(
    ready: Tree, script: str, given: list[str], expected: list[str]
) -> None:
    assert ready.seen(*given, script=script)["argv"] == expected


@pytest.mark.parametrize(
    ("script", "given", "begins", "means"),
    [
        ("train_gpu.sh", "nine", "--gpus nine: 'nine' is not", "--gpu nine"),
        ("train_auto_gpu.sh", "--debug", "--gpus: GPUs were asked for", "--gpus auto"),
        ("train_gpu.sh", "--nonsense", "--nonsense: no such option", None),
        ("run.sh", "--gpus=nine", "--gpus nine: 'nine' is not", None),
    ],
)
def test_an_option_that_nobody_typed_is_explained(
    tmp_path: Path, script: str, given: str, begins: str, means: str | None
) -> None:
    ours = {"MODEL_CHECK_PYTHON": sys.executable, "MODEL_CHECK_VENV": str(tmp_path / "none")}
    env = {**os.environ, **ours, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", ROOT / script, given]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode != 0, done.stdout) == (True, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"[launcher] error: {begins}")
    assert line.endswith(f"; {script} means run.sh {means}") is (means is not None)


@pytest.mark.parametrize("script", ["run.sh", "train_gpu.sh", "train_auto_gpu.sh", "check.sh"])
@pytest.mark.parametrize(
    ("ostype", "version", "is_refused"),
    [
        ("darwin23", "5.2.37(1)-release", True),
        ("msys", "5.2.26(1)-release", True),
        ("linux-gnu", "3.2.57(1)-release", True),
        ("linux-gnu", "4.3.48(1)-release", True),
        ("linux-gnu", "4.4.20(1)-release", False),
        ("linux-musl", "10.0.1(1)-release", False),
    ],
)
def test_another_system_or_an_old_bash_is_one_line_and_exit_code_2(
    bare: Tree, script: str, ostype: str, version: str, is_refused: bool
) -> None:
    pretend = f"OSTYPE={ostype} BASH_VERSION='{version}'; source ./{script}"
    env = {**bare.env, "MODEL_CHECK_PYTHON": "/nowhere"}
    done = subprocess.run(
        ["bash", "-c", pretend, "bash"], cwd=bare.root, env=env, capture_output=True, text=True
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("[launcher] error: Model Check needs Linux and bash 4.4") is is_refused
    assert (f"this is bash {version} on {ostype}" in line) is is_refused


@pytest.mark.parametrize("script", ["run.sh", "train_gpu.sh", "train_auto_gpu.sh"])
def test_a_script_that_sh_starts_is_the_same(ready: Tree, script: str) -> None:
    given = ("3", "--debug", "a b")
    by_bash = ready.seen(*given, script=script)["argv"]
    assert ready.seen(*given, script=script, shell="sh")["argv"] == by_bash


def test_the_checks_that_sh_starts_are_the_same(ready: Tree) -> None:
    assert ready("--help", script="check.sh", shell="sh").stdout.startswith("usage: bash check.sh")


@pytest.mark.parametrize(
    ("minimum", "version", "met"),
    [
        ("2.11", "2.13.0+cpu", True),
        ("2.11", "2.11.0a0+50eac811a6.nv25.12", True),
        ("2.11", "2.9.1", False),
        ("2.0.0", "2", True),
        ("", "0.1", True),
        ("1", None, False),
        ("1", "unknown", False),
    ],
)
def test_a_requirement_is_met_from_its_minimum_on(
    minimum: str, version: str | None, met: bool
) -> None:
    assert Requirement("x", minimum).met_by(version) is met


def test_a_quick_look_installs_nothing_and_says_what_does(bare: Tree) -> None:
    done = bare("doctor", "--json", "--quick")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"{bare.venv} is not ready: `bash {bare.root}/run.sh doctor` makes it, once" in line
    assert not bare.venv.exists()
    assert not [*bare.root.rglob("__pycache__")]


def test_a_quick_look_takes_any_environment_that_is_ready(
    ready: Tree, ready_elsewhere: Path
) -> None:
    assert ready.seen("doctor", "--quick")["prefix"] == str(ready.venv)
    assert not [*(ready.root / "launcher").rglob("__pycache__")]
    elsewhere = ready.seen("doctor", "--quick", VIRTUAL_ENV=str(ready_elsewhere))
    assert elsewhere["prefix"] == str(ready_elsewhere)
