"""The fake driver, compiled once, and fresh processes that see the GPUs of a scenario."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.gpus.probe import START_DEADLINES
from tests.deadline import DEADLINE_S
from tests.nvml_fake.build import FakeGpu, build, environment, scenario

ROOT = Path(__file__).parents[3]

# Prints the snapshot, or what was raised, as a program without a terminal would see it.
SNAPSHOT = """
import json, sys
import msgspec
from launcher.gpus import probe
from launcher.gpus.probe import NvmlProbe
from model_check.errors import ModelCheckError
probe.START_DEADLINES = int(sys.argv[2])
try:
    snapshot = NvmlProbe(deadline_s=float(sys.argv[1])).snapshot()
except ModelCheckError as error:
    answer = {"error": str(error), "class": type(error).__name__, "exit_code": error.exit_code}
else:
    answer = msgspec.to_builtins(snapshot)
print(json.dumps(answer))
"""


@pytest.fixture(scope="session")
def nvml_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@dataclass
class Box:
    """A machine with the GPUs of a scenario: processes started through it see them."""

    nvml_dir: Path
    scenario_file: Path

    def become(self, gpus: Iterable[FakeGpu], rules: Iterable[str] = (), **system: Any) -> "Box":
        """These are the GPUs from now on, for processes that run already too. A text may hold bytes
        that are no UTF-8, as os.fsdecode gives them."""
        beside = self.scenario_file.with_suffix(".new")
        beside.write_bytes(os.fsencode(scenario(gpus, rules, **system)))
        beside.replace(self.scenario_file)
        return self

    @property
    def env(self) -> dict[str, str]:
        return environment(self.nvml_dir, self.scenario_file)

    def python(self, code: str, *arguments: str, **more_env: str) -> str:
        """What `code` prints in a fresh interpreter."""
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self.env | more_env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    def snapshot(
        self, deadline_s: float = 20.0, start_deadlines: int = START_DEADLINES, **more_env: str
    ) -> dict[str, Any]:
        """What NvmlProbe says, as plain values; when it raises: "error", "class", "exit_code"."""
        arguments = (str(deadline_s), str(start_deadlines))
        answer: dict[str, Any] = json.loads(self.python(SNAPSHOT, *arguments, **more_env))
        return answer


@pytest.fixture
def box(nvml_dir: Path, tmp_path: Path) -> Callable[..., Box]:
    """`box(gpus, rules)`: a machine with these GPUs."""
    return Box(nvml_dir, tmp_path / "scenario").become
