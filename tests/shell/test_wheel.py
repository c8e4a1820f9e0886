"""The wheel: what it holds, and that its commands run in an empty environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
TOPS = ("launcher", "model_check")
SMALL = ("training.context_length=32", "data.dataset=a.txt", "data.tokenizer=bpe")
PROGRAMS = {"pretrain_main.py", "prepare_dataset.py"}


def packages() -> set[str]:
    inits = [path for top in TOPS for path in (ROOT / top).rglob("__init__.py")]
    return {".".join(path.parent.relative_to(ROOT).parts) for path in inits}


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = list(map(str, command))
    return subprocess.run(
        arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by `python -m build` of a copy: a build writes beside its sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*TOPS, "config"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*PROGRAMS, "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    options = ("--wheel", "--no-isolation", "--outdir", out, copy)
    done = run(sys.executable, "-m", "build", *options, cwd=out)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands in an environment that holds the wheel, and sees ours for the
    rest: torch alone takes longer to install than everything here."""
    where = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(where, with_pip=False, symlinks=True)
    python = where / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    ours = Path(sysconfig.get_path("purelib"))
    (where / "lib" / version / "site-packages" / "rest.pth").write_text(f"{ours}\n")
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    done = run(*install, "--no-deps", "--no-index", wheel, cwd=where)
    assert done.returncode == 0, done.stdout + done.stderr
    return where / "bin"


def test_every_package_is_shipped() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages() | {"model_check.project"}


def test_the_wheel_holds_our_two_packages_and_what_lies_at_the_top(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(TOPS)
    presets = {f"config/presets/{path.name}" for path in (ROOT / "config" / "presets").iterdir()}
    carried = {"pyproject.toml", "constraints.txt"} | PROGRAMS | presets
    project = {name.removeprefix("model_check/project/") for name in names if "/project/" in name}
    assert project == carried


def test_the_wheel_holds_what_is_compiled_later(wheel: Path) -> None:
    sources = {str(path.relative_to(ROOT)) for top in TOPS for path in (ROOT / top).rglob("*.c")}
    assert sources
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("command", ["model-check", "model-check-prepare", "model-check-train"])
def test_every_command_tells_its_version(commands: Path, tmp_path: Path, command: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    done = run(commands / command, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"model-check {project['version']}\n")


def test_the_help_names_the_command_that_was_typed(commands: Path, tmp_path: Path) -> None:
    done = run(commands / "model-check", "--help", cwd=tmp_path)
    assert done.stdout.startswith("usage: model-check [OPTIONS]"), done.stderr


def test_an_installed_model_check_runs_where_no_checkout_is(commands: Path, tmp_path: Path) -> None:
    """It prepares data and trains, as the two other commands do."""
    (tmp_path / "a.txt").write_text("some words of a text " * 500)
    options = ("--debug", "--max-steps", "2", "--workers", "1", "--run-dir", tmp_path / "run")
    done = run(commands / "model-check", *options, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: CPU0 trained 2 steps" in done.stdout
    assert str(ROOT) not in (tmp_path / "run" / "run.json").read_text()


def test_the_doctor_of_an_installation_knows_what_is_required(
    commands: Path, tmp_path: Path
) -> None:
    done = run(commands / "model-check", "doctor", cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert "torch" in done.stdout
