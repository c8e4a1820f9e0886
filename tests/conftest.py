"""Capabilities that a test asks for by a mark; without them it is skipped, and says so."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


CAPABILITIES = {
    "gpu": lambda: num_gpus() >= 1,
    "two_gpus": lambda: num_gpus() >= 2,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, present in CAPABILITIES.items():
        if item.get_closest_marker(name) and not present():
            pytest.skip(f"this machine has no {name}")


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
