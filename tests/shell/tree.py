"""Copies of the shell part of the tree, with a stub for the launcher, real pip and tiny wheels."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
BASE_PYTHON = Path(sys.executable).resolve()  # not of a venv, so without our requirements

COPIED = (
    *("run.sh", "train_gpu.sh", "train_auto_gpu.sh", "check.sh", ".ci/run"),
    *("launcher/__init__.py", "launcher/install/__init__.py", "launcher/install/environment.sh"),
    *("launcher/install/environment.py", "launcher/install/installation.py"),
    "launcher/install/progress.py",
    *("launcher/install/by_hand.py", "launcher/install/by_hand.sh"),
    *("launcher/install/requirements.py", "model_check/__init__.py"),
    *("model_check/errors.py", "model_check/utils/__init__.py"),
    *("model_check/utils/project_files.py", "model_check/utils/secrets.py"),
    "model_check/utils/words.py",
)

PYPROJECT = """\
[project]
name = "tiny"
dependencies = ["alpha>=1.0", "torch>=2.11", "numpy>=1.26"]
[project.optional-dependencies]
hub = []
fast = []
midi = []
dev = ["ruff", "mypy", "pytest"]
"""
WHEELS = {
    "alpha": "1.0",
    "torch": "2.13.0",
    "numpy": "2.0",
    "ruff": "1",
    "mypy": "1",
    "pytest": "1",
}

LAUNCHER = """\
import importlib, json, os, signal, sys
match sys.argv[1:]:
    case ["exit", code]:
        sys.exit(int(code))
    case ["pause"]:
        print(os.getpid(), flush=True)
        signal.pause()
    case ["version", name]:
        print(importlib.import_module(name).VERSION)
    case ["variable", name]:
        print(os.environ[name])
    case argv:
        env = os.environ.get
        print(json.dumps({"argv": argv, "cwd": os.getcwd(), "prefix": sys.prefix,
            "path": env("PYTHONPATH"), "before": env("MODEL_CHECK_PYTHONPATH_BEFORE")}))
"""
TOOL = (
    "import os, sys\nprint({name!r}, *sys.argv[1:])\nsys.exit({name!r} == os.environ.get('BAD'))\n"
)


@dataclass
class Tree:
    """A checkout in a directory with a blank in its name."""

    root: Path
    wheels: Path
    env: Mapping[str, str]
    cwd: Path = field(init=False)

    def __post_init__(self) -> None:
        self.cwd = self.root.parent / "some where"
        self.cwd.mkdir(exist_ok=True)

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def packages(self) -> Path:
        (found,) = self.venv.glob("lib/python3*/site-packages")
        return found

    def popen(
        self, *arguments: str, script: str = "run.sh", shell: str = "bash", **env: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [shell, str(self.root / script), *arguments],
            cwd=self.cwd,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(
        self, *arguments: str, script: str = "run.sh", shell: str = "bash", **env: str
    ) -> "subprocess.CompletedProcess[str]":
        process = self.popen(*arguments, script=script, shell=shell, **env)
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def seen(
        self, *arguments: str, script: str = "run.sh", shell: str = "bash", **env: str
    ) -> dict[str, Any]:
        """What the launcher received from a start that succeeded."""
        done = self(*arguments, script=script, shell=shell, **env)
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen

    def unstamp(self) -> None:
        for stamp in self.venv.glob("ready-*"):
            stamp.unlink()


def make_wheel(directory: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        f"{name}/__main__.py": TOOL.format(name=name),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (*files.items(), (f"{info}/RECORD", record)):
            wheel.writestr(path, text)


def make_tree(directory: Path, wheels: Path) -> Tree:
    """Nothing is installed in it. `python3` is the base interpreter; pip reaches only `wheels`."""
    root = directory / "a b"
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "launcher" / "__main__.py").write_text(LAUNCHER)
    (root / "pyproject.toml").write_text(PYPROJECT)
    write_constraints(root, WHEELS)
    path = directory / "bin"
    path.mkdir()
    (path / "python3").symlink_to(BASE_PYTHON)
    env = {
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(directory),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    return Tree(root, wheels, env)


def write_constraints(root: Path, versions: Mapping[str, str]) -> None:
    lines = ["# pinned", *(f"{name}=={version}" for name, version in versions.items())]
    (root / "constraints.txt").write_text("\n".join(lines) + "\n")


def lay_traps(tree: Tree) -> Path:
    """The file that modules in its working directory write to when they are imported."""
    told = tree.root.parent / "imported"
    ours = ("launcher", "model_check", "pip", "setuptools", "sitecustomize", "usercustomize")
    for name in (*sys.stdlib_module_names, *ours):
        code = f"open({str(told)!r}, 'a').write({name!r} + '\\n')\n"
        (tree.cwd / f"{name}.py").write_text(code)
    return told


def copy_environment(source: Tree, target: Tree) -> None:
    shutil.copytree(source.venv, target.venv, symlinks=True, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    """Packages as links: pip replaces files, it does not write into them."""
    (os.link if "/site-packages/" in source else shutil.copy2)(source, target)


@dataclass(frozen=True)
class FirstStart:
    """A tree that was started once, what was imported of its working directory (a file that is
    there if anything was), and the result of that start."""

    tree: Tree
    imported: Path
    done: "subprocess.CompletedProcess[str]"
