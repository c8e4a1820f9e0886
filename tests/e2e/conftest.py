"""The whole command in real processes, on a model small enough for any CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
IN_WORKERS = Path(__file__).with_name("in_workers")

TINY = {
    "model": {
        "num_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_kv_heads": 1,
        "vocab_size": None,
    },
    "training": {"max_steps": 4, "batch_size": 2, "context_length": 32, "use_amp": False},
    "data": {"dataset": "embedded", "bpe_vocab_size": 512, "num_samples": 64},
    "system": {"device": "cpu"},
    "launch": {"replay_s": 0},
}


@dataclass(frozen=True)
class Run:
    """A finished `python -m launcher`."""

    exit_code: int
    output: str
    """Its stdout and stderr as one terminal would show them."""
    directory: Path
    cwd: Path

    def lines(self, prefix: str) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(prefix)]

    def report(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return result

    def verdicts(self) -> dict[str, str]:
        return {worker["name"]: worker["verdict"] for worker in self.report()["workers"]}


@dataclass
class Launcher:
    """Starts `python -m launcher` in a directory of its own, with the session's token cache."""

    cwd: Path
    cache: Path
    config: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    """What its environment has besides."""
    module: str = "launcher"
    """`tests.scripted`: with the scripted trainer in place of the real one."""
    own: dict[str, str] = field(default_factory=dict)
    """What no test changes in it."""

    @property
    def env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        ours = {"PYTHONPATH": str(ROOT), "DATASET_CACHE_DIR": str(self.cache)}
        return env | ours | self.environ

    def arguments(self, *more: str) -> list[str]:
        base = ["--config", str(self.config), "--run-dir", str(self.cwd / "run")]
        return [sys.executable, "-m", self.module, *base, *more]

    def start(self, *more: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.arguments(*more),
            cwd=self.cwd,
            env=self.env | env | self.own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def verb(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """`python -m launcher VERB ...`; its output as one terminal would show it."""
        return subprocess.run(
            [sys.executable, "-m", self.module, *argv],
            cwd=self.cwd,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def __call__(self, *more: str, **env: str) -> Run:
        return self.finish(self.start(*more, **env))

    def finish(self, process: subprocess.Popen[str], seen: str = "") -> Run:
        """Wait for its end; a launcher that hangs is killed and fails the test."""
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Run(process.returncode, seen + output, self.cwd / "run", self.cwd)


def pid_of(worker: str, directory: Path) -> int:
    """Of the process that trains as this worker of the run in a directory."""
    tags = {f"MODEL_CHECK_WORKER={worker}".encode(), f"MODEL_CHECK_RUN_DIR={directory}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if tags <= {*(process / "environ").read_bytes().split(b"\0")}:
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"{worker} does not run")


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests: built by the first run, found by the others."""
    return tmp_path_factory.mktemp("token_cache")


def launcher_in(directory: Path, token_cache: Path) -> Launcher:
    directory.mkdir(exist_ok=True)
    config = directory / "tiny.json"
    config.write_text(json.dumps(TINY))
    return Launcher(directory, token_cache, config)


def scripted_in(directory: Path, token_cache: Path) -> Launcher:
    launcher = launcher_in(directory, token_cache)
    launcher.module = "tests.scripted"
    # Other programs of ours know a launcher by this word in its command line.
    launcher.config = Path(shutil.copy(launcher.config, directory / "launcher.json"))
    launcher.own = {"PYTHONPATH": str(ROOT)}  # without the faults that are put into a real one
    return launcher


@pytest.fixture
def launcher(tmp_path: Path, token_cache: Path) -> Iterator[Launcher]:
    """With the real trainer: 2 s of CPU for each worker."""
    launcher = launcher_in(tmp_path, token_cache)
    yield launcher
    end(launcher)


@pytest.fixture
def scripted(tmp_path: Path, token_cache: Path) -> Iterator[Launcher]:
    """With the scripted trainer: for what the launcher does with what workers say."""
    launcher = scripted_in(tmp_path, token_cache)
    yield launcher
    end(launcher)


def end(launcher: Launcher) -> None:
    for process in launcher.started:  # one that a failed test left would fail another one
        with process:
            process.kill()


@pytest.fixture
def alive() -> Callable[[Path], list[str]]:
    """The command lines of living processes that belong to the run in a directory."""

    def find(directory: Path) -> list[str]:
        tag = f"MODEL_CHECK_RUN_DIR={directory}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if tag in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    return find
