"""Xids of before a run, from records as /dev/kmsg gives them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.gpus.probe import Gpu
from launcher.telemetry.kernel_log import earlier_xids
from launcher.telemetry.xids import xid_symptom
from launcher.verdict.severity import Symptom
from tests.launcher.gpus.conftest import Box
from tests.nvml_fake.build import fake_gpu

LOG = b"""\
4,812,1000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.
6,813,1001,-;usb 1-1: new device
4,814,1002,-;NVRM: Xid (PCI:0000:1c:00): 13, pid=4711, Graphics Exception
4,815,1003,-;NVRM: Xid (PCI:0000:1B:00.0): 79, pid=4711, name=python
4,816,1004,-;NVRM: Xid (PCI:0000:1b:00): 45, pid=4711, Ch 00000008
4,817,1004,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=4711, Ch 00000008
4,818,1005,-;NVRM: Xid (PCI:0001:1b:00): 48, pid=4711
"""


def earlier(bus_id: str, log: Path) -> list[Symptom]:
    gpu = Gpu(0, "GPU-0", "H100", pci_bus_id=bus_id)
    return [symptom for _, symptom in earlier_xids([gpu], log)]


@pytest.mark.parametrize(
    ("bus_id", "xids"),
    [
        ("00000000:1B:00.0", [79, 31]),
        ("00000000:1C:00.0", [13]),
        ("00000001:1B:00.0", [48]),
        ("00000000:1D:00.0", []),
        ("", []),
    ],
)
def test_each_gpu_has_its_own_earlier_xids(tmp_path: Path, bus_id: str, xids: list[int]) -> None:
    (tmp_path / "kmsg").write_bytes(LOG)
    assert earlier(bus_id, tmp_path / "kmsg") == [xid_symptom(xid) for xid in xids]


def test_a_log_that_never_ends_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """/dev/kmsg would block for the next record."""
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(fd, LOG)
    assert earlier("00000000:1B:00.0", pipe) == [xid_symptom(79), xid_symptom(31)]
    os.close(fd)


def test_a_log_that_may_not_be_read_tells_nothing(tmp_path: Path) -> None:
    assert earlier("00000000:1B:00.0", tmp_path / "none") == []
    assert earlier("00000000:1B:00.0", tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dry-run"], "GPU0: before this run: Xid 79 (the GPU has fallen off the bus): power-"),
        (["--run-both-models", "--dry-run"], "[launcher] GPU0: before this run: Xid 79 "),
        (["doctor"], "warn  GPU0 kernel log     Xid 79 (the GPU has fallen off the bus)"),
    ],
)
def test_an_xid_of_before_is_told_by_a_run_and_by_doctor(
    box: Callable[..., Box], tmp_path: Path, arguments: list[str], line: str
) -> None:
    (tmp_path / "kmsg").write_bytes(LOG)
    code = (
        "import sys; from functools import partial; from pathlib import Path\n"
        "import launcher.launch, launcher.doctor.doctor\n"
        "from launcher.cli import main\n"
        "from launcher.telemetry.kernel_log import earlier_xids\n"
        "of_test = partial(earlier_xids, path=Path(sys.argv[1]))\n"
        "launcher.launch.earlier_xids = launcher.doctor.doctor.earlier_xids = of_test\n"
        "main(sys.argv[2:])\n"
    )
    locks = {"MODEL_CHECK_LOCK_DIR": str(tmp_path / "locks")}
    said = box([fake_gpu(0)]).python(code, str(tmp_path / "kmsg"), *arguments, **locks)
    assert line in said
