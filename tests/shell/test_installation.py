"""The environment is made once and completely, repaired if damaged, and by one start at a time."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.shell.tree import (
    BASE_PYTHON,
    WHEELS,
    FirstStart,
    Tree,
    copy_environment,
    lay_traps,
    make_tree,
    write_constraints,
)


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> FirstStart:
    """With ensurepip, in a working directory whose modules tell when one imports them."""
    tree = make_tree(tmp_path_factory.mktemp("first"), wheels)
    return FirstStart(tree, lay_traps(tree), tree("--debug"))


@pytest.fixture(scope="module")
def first_checks(
    tmp_path_factory: pytest.TempPathFactory, wheels: Path, first_start: FirstStart
) -> FirstStart:
    """check.sh in an environment to run in, by the name that CI calls it."""
    tree = make_tree(tmp_path_factory.mktemp("checks"), wheels)
    copy_environment(first_start.tree, tree)
    return FirstStart(tree, lay_traps(tree), tree("-k", "one test", script=".ci/run"))


def test_the_first_start_installs_and_then_runs(first_start: FirstStart) -> None:
    tree, done = first_start.tree, first_start.done
    assert done.returncode == 0, done.stderr
    assert '"argv": ["--debug"]' in done.stdout
    first, *_, last = done.stderr.splitlines()
    assert first.startswith(f"[launcher] installing into {tree.venv}, once: 3 packages and what")
    assert "(2 to 5 minutes; about 3 GB to download, without CUDA 0.3 GB" in first
    assert last.startswith("[launcher] installed in ")
    assert "Successfully installed alpha-1.0" in (tree.venv / "install.log").read_text()


def test_checks_on_top_of_an_environment_to_run_in_do_not_cost_torch_again(
    first_checks: FirstStart,
) -> None:
    assert "what they need (about 0.2 GB to download)" in first_checks.done.stderr


def test_the_first_start_imports_nothing_of_the_working_directory(first_start: FirstStart) -> None:
    assert not first_start.imported.exists(), first_start.imported.read_text()


def test_changed_pins_are_installed(ready: Tree) -> None:
    write_constraints(ready.root, WHEELS | {"alpha": "1.5"})
    assert ready("version", "alpha").stdout == "1.5\n"
    assert ready("version", "alpha").stderr == ""


NO_NETWORK = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:9"}


@pytest.mark.parametrize("given", [["--wheels", "{}"], ["x=1", "--wheels={}"], []])
def test_without_network_packages_come_from_a_directory_of_wheels(
    ready: Tree, given: list[str]
) -> None:
    write_constraints(ready.root, WHEELS | {"alpha": "1.5"})
    asked = [word.format(ready.wheels) for word in given]
    variable = {} if given else {"MODEL_CHECK_WHEELS": str(ready.wheels)}
    done = ready(*asked, "--", "--wheels", "mine", **NO_NETWORK, **variable)
    assert done.returncode == 0, done.stderr
    assert f"what they need (all from {ready.wheels})" in done.stderr
    others = [word for word in asked if "wheels" not in word]
    assert json.loads(done.stdout)["argv"] == [*others, "--", "--wheels", "mine"]
    assert ready("version", "alpha").stdout == "1.5\n"


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_a_directory_of_wheels_that_is_not_there_is_told_before_anything_is_installed(
    bare: Tree, name: str
) -> None:
    done = bare("--wheels", *filter(None, [name]))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"[launcher] error: --wheels {name or '(no directory was given)'}: no")


def test_a_killed_installation_is_repaired_by_the_next_start(
    bare: Tree, no_ensurepip: dict[str, str]
) -> None:
    with index_that_never_answers() as (address, asked):
        index = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": address}
        process = bare.popen(**index, **no_ensurepip)
        assert asked.wait(DEADLINE_S)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    assert not (bare.venv / "ready-run").exists()
    assert bare("version", "alpha", **no_ensurepip).stdout == "1.0\n"


def test_what_a_killed_pip_left_half_installed_is_installed_anew(ready: Tree) -> None:
    ready.unstamp()
    shutil.rmtree(ready.packages / "alpha")
    (ready.packages / "alpha-1.0.dist-info" / "INSTALLER").unlink()  # pip writes it last
    (ready.packages / "~orch").mkdir()
    assert ready("version", "alpha").stdout == "1.0\n"
    assert not (ready.packages / "~orch").exists()


def test_an_environment_whose_interpreter_is_gone_is_made_anew(
    ready: Tree, no_ensurepip: dict[str, str]
) -> None:
    python = ready.venv / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python")
    assert ready("version", "alpha", **no_ensurepip).stdout == "1.0\n"


def test_of_two_starts_at_once_one_installs(bare: Tree, no_ensurepip: dict[str, str]) -> None:
    both = [bare.popen("x", **no_ensurepip), bare.popen("x", **no_ensurepip)]
    said = [process.communicate(timeout=DEADLINE_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum(text.count("installing into") for text in said) == 1


def test_a_start_that_waits_says_for_whom(ready: Tree) -> None:
    ready.unstamp()
    lock = ready.venv / "install.lock"
    lock.write_text("pid 4711 on node7 (since 12:00:00)")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = ready.popen("x")
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == (
            "[launcher] waiting for pid 4711 on node7 (since 12:00:00), "
            f"which installs into {ready.venv}\n"
        )
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_a_ready_environment_that_is_named_is_only_read(ready: Tree) -> None:
    """It may be another user's: nobody asks for its lock."""
    python = ready.venv / "bin" / "python"
    with (ready.venv / "install.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = ready("x", MODEL_CHECK_PYTHON=str(python))
    assert (done.returncode, done.stderr) == (0, "")


def test_without_an_index_the_last_line_says_what_to_do(ready: Tree) -> None:
    write_constraints(ready.root, WHEELS | {"alpha": "9.9"})
    done = ready("x")
    assert done.returncode == 70
    assert done.stdout == ""
    assert "ERROR: Cannot install alpha" in done.stderr or "alpha==9.9" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert str(ready.venv / "install.log") in last
    assert last.startswith("[launcher] error: pip could not install the requirements into")
    assert "MODEL_CHECK_PYTHON" in last
    write_constraints(ready.root, WHEELS)
    assert ready("version", "alpha").stderr == ""  # what was ready before is ready still


def test_a_directory_with_something_else_in_it_is_refused(bare: Tree) -> None:
    photos = bare.root.parent / "photos"
    photos.mkdir()
    (photos / "one.jpg").touch()
    done = bare("x", MODEL_CHECK_VENV=str(photos))
    assert done.returncode == 2
    assert "not a Python environment" in done.stderr
    assert [path.name for path in photos.iterdir()] == ["one.jpg"]


def test_an_environment_that_a_person_made_only_gets_what_it_lacks(
    bare: Tree, no_ensurepip: dict[str, str]
) -> None:
    make = (BASE_PYTHON, "-m", "venv", "--without-pip", bare.venv)
    subprocess.run(make, check=True, timeout=DEADLINE_S)
    kept = bare.venv / "notes.txt"
    kept.write_text("mine")
    assert bare("version", "alpha", **no_ensurepip).stdout == "1.0\n"
    assert kept.read_text() == "mine"


def test_an_active_environment_that_lacks_something_is_left_alone(
    ready: Tree, ready_elsewhere: Path
) -> None:
    pyproject = ready.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("alpha>=1.0", "alpha>=1.5"))
    constraints = ready.root / "constraints.txt"
    constraints.write_text(constraints.read_text().replace("alpha==1.0", "alpha==1.5"))
    done = ready("version", "alpha", VIRTUAL_ENV=str(ready_elsewhere))
    assert done.stdout == "1.5\n"
    assert f"the active environment {ready_elsewhere} lacks" in done.stderr
    assert "pip install 'alpha>=1.5'" in done.stderr


def test_a_torch_that_is_here_is_reused_and_not_replaced(bare: Tree) -> None:
    user_base = bare.root.parent / "user"
    site = subprocess.check_output(
        [BASE_PYTHON, "-c", "import site; print(site.getusersitepackages())"],
        env={"PYTHONUSERBASE": str(user_base)},
        text=True,
    )
    vendor = {"torch": "2.12.0a0+vendor", "numpy": "1.26.4"}
    for name, version in vendor.items():
        put_distribution(Path(site.strip()), name, version)
    done = bare(
        "version",
        "torch",
        PYTHONUSERBASE=str(user_base),
        PIP_CONSTRAINT="/nowhere/of/a/vendor.txt",
    )
    assert done.stdout == "2.12.0a0+vendor\n", done.stderr
    assert "reusing torch 2.12.0a0+vendor, numpy 1.26.4" in done.stderr
    assert "about 3 GB" not in done.stderr
    assert {path.name for path in bare.packages.glob("*.dist-info")} == {"alpha-1.0.dist-info"}


def test_the_first_checks_import_nothing_of_the_working_directory(
    first_checks: FirstStart,
) -> None:
    assert not first_checks.imported.exists(), first_checks.imported.read_text()


def pytest_with(processes_a_core: int) -> str:
    processes = processes_a_core * len(os.sched_getaffinity(0))
    return f"pytest -n {processes} --dist loadfile --no-loadscope-reorder"


def test_the_checks_run_in_order_and_the_first_bad_one_ends_them(
    first_checks: FirstStart,
) -> None:
    tree, done = first_checks.tree, first_checks.done
    assert done.returncode == 0, done.stderr
    checks = ["ruff format --check .", "ruff check ."]
    assert done.stdout.splitlines() == [*checks, f"{pytest_with(2)} -m not slow"]
    done = tree(script="check.sh", BAD="ruff")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == checks[0]
    assert tree("x").stderr == ""  # the environment of the checks is one to run in, too


def test_the_checks_leave_out_slow_tests_unless_all_are_asked_for(first_checks: FirstStart) -> None:
    asked = {option: first_checks.tree(option, script="check.sh") for option in ("--all", "--fast")}
    last = {option: done.stdout.splitlines()[-1] for option, done in asked.items()}
    assert last["--all"] == pytest_with(2)
    assert last["--fast"].startswith(f"{pytest_with(4)} -m not slow tests/")


def test_arguments_of_the_checks_are_for_the_tests_and_format_and_lint_come_first(
    first_checks: FirstStart,
) -> None:
    said = first_checks.tree("-k", "one test", script="check.sh").stdout.splitlines()
    assert said == ["ruff format --check .", "ruff check .", "pytest -k one test"]
    done = first_checks.tree("-k", "one test", script="check.sh", BAD="ruff")
    assert (done.returncode, done.stdout) == (1, "ruff format --check .\n")


@pytest.mark.parametrize("script", ["check.sh", "run.sh"])
def test_scripts_explain_themselves_without_installing_anything(bare: Tree, script: str) -> None:
    done = bare("--help", script=script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: bash {script}")
    assert not bare.venv.exists()


def put_distribution(site: Path, name: str, version: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(f"VERSION = {version!r}\n")


@contextmanager
def index_that_never_answers() -> Iterator[tuple[str, threading.Event]]:
    """A package index on this machine that accepts a request, reports it, and never answers."""
    asked, over = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            over.wait()

        def log_message(self, *_: object) -> None:
            """Drops the log line: no test reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple", asked
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
