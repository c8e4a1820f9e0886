"""Capabilities that a test asks for by a mark; where one is missing, the test is skipped with a
reason."""

import gc
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.slurm import cluster

HERE = Path(__file__).parent
REQUIRED = frozenset(filter(None, os.environ.get("MODEL_CHECK_REQUIRE", "").split(",")))
"""Capabilities that this machine promises (CI installs for them): a test that asks for one of them
and is skipped fails."""


@cache
def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def has_program(*names: str) -> Callable[[], bool]:
    return lambda: any(shutil.which(name) for name in names)


def has_packages(*names: str) -> Callable[[], bool]:
    return lambda: all(importlib.util.find_spec(name) for name in names)


@cache
def can_make_a_network() -> bool:
    """With ends of cables in it: `ip` makes them."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(("unshare", "--net", "true"), capture_output=True).returncode == 0


@cache
def can_run_slurm() -> bool:
    """Slurm's daemons are here, and may be started: as root, each in namespaces of its own."""
    if os.geteuid() != 0 or not all(map(shutil.which, cluster.PROGRAMS)):
        return False
    return subprocess.run((*cluster.MACHINE, "true"), capture_output=True).returncode == 0


CAPABILITIES: dict[str, Callable[[], bool]] = {
    "gpu": lambda: num_gpus() >= 1,
    "two_gpus": lambda: num_gpus() >= 2,
    "root": lambda: os.geteuid() == 0,
    "netns": can_make_a_network,
    "slurm": can_run_slurm,
    "browser": has_program("chromium", "chromium-browser", "google-chrome"),
    "zsh": has_program("zsh"),
    "image": lambda: all(map(shutil.which, ("buildah", "debootstrap"))),
    "triton": lambda: importlib.util.find_spec("triton") is not None,
    "midi": has_packages("symusic", "miditok"),
}


HISTORY_FILE = "MODEL_CHECK_HISTORY_FILE"


def pytest_configure(config: pytest.Config) -> None:
    # Imports and the list of tests are no garbage: each search for some goes through all of torch.
    gc.disable()
    # What the machine's GPUs did in tests is not their history. Processes with an environment of
    # their own make it of this one.
    os.environ[HISTORY_FILE] = ""
    # nohup, and a script's job in the background, ignore these, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)
    if unknown := REQUIRED - CAPABILITIES.keys():
        raise pytest.UsageError(
            f"MODEL_CHECK_REQUIRE: {', '.join(sorted(unknown))}: no such capability "
            f"(there are {', '.join(CAPABILITIES)})"
        )


WAITING = tuple(
    HERE / name
    for name in (
        *("e2e", "engine", "passkey", "shell", "launcher/doctor/test_quick.py"),
        *("launcher/gpus/test_probe.py", "launcher/telemetry/test_monitor.py"),
        "launcher/supervise/test_hangs.py",
    )
)
"""Folders and files with real processes, which take long and wait for much."""
SPREAD = 0.8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait among those that compute, and all of them before the last of these: whoever
    begins a long one last is waited for alone. mypy takes longest."""
    files = dict.fromkeys(item.path for item in items)
    waiting = [path for path in files if any(map(path.is_relative_to, WAITING))]
    others = [path for path in files if path not in set(waiting)]
    at = {path: number / len(others) for number, path in enumerate(others)}
    at |= {path: SPREAD * number / len(waiting) for number, path in enumerate(waiting)}
    at[HERE / "test_types.py"] = -1.0
    items.sort(key=lambda item: at[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, is_here in CAPABILITIES.items():
        if item.get_closest_marker(name) and not is_here():
            pytest.skip(f"this machine lacks {name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    asked = [name for name in sorted(REQUIRED) if item.get_closest_marker(name)]
    if report.skipped and asked and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        why = call.excinfo.value if call.excinfo else "no reason"
        report.longrepr = f"MODEL_CHECK_REQUIRE={','.join(asked)}, and it was skipped: {why}"
    return report


@pytest.fixture(autouse=True, scope="session")
def _no_default_history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No run of any test is in the history of this machine."""
    from launcher.history.gpu_history import path_of

    yield
    default, ours = path_of(None, os.environ), str(tmp_path_factory.getbasetemp())
    assert default is not None
    is_told = default.exists() and ours in default.read_text()
    assert not is_told, f"{default}: a test started a launcher without {HISTORY_FILE}="


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """A test draws the same numbers whatever ran before it, and in whichever process."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, with a blank in its path; skipped where a test may not mount one."""
    place = tmp_path / "small disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let a test mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
