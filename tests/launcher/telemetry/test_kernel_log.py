"""Xids of before a run, from records as /dev/kmsg gives them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.gpus.probe import Gpu
from launcher.telemetry.kernel_log import against, read_kernel_log, unlisted
from launcher.telemetry.xids import xid_symptom
from launcher.verdict.severity import Symptom
from tests.launcher.gpus.conftest import Box
from tests.nvml_fake.build import fake_gpu, fault

LOG = b"""\
4,812,1000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.
6,813,1001,-;usb 1-1: new device
4,814,1002,-;NVRM: Xid (PCI:0000:1c:00): 13, pid=4711, Graphics Exception
4,815,1003,-;NVRM: Xid (PCI:0000:1B:00.0): 79, pid=4711, name=python
4,816,1004,-;NVRM: Xid (PCI:0000:1b:00): 45, pid=4711, Ch 00000008
4,817,1004,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=4711, Ch 00000008
4,818,1005,-;NVRM: Xid (PCI:0001:1b:00): 48, pid=4711
"""


def said_of(log: bytes, machine: Box, directory: Path, *arguments: str) -> str:
    """What `run.sh ARGUMENTS` says on that machine, and its exit code."""
    (directory / "kmsg").write_bytes(log)
    code = (
        "import sys; from pathlib import Path\n"
        "from launcher.cli import main\n"
        "from launcher.telemetry import kernel_log\n"
        "kernel_log.KERNEL_LOG = Path(sys.argv[1])\n"
        "print('code', main(sys.argv[2:]))\n"
    )
    locks = {"MODEL_CHECK_LOCK_DIR": str(directory / "locks")}
    return machine.python(code, str(directory / "kmsg"), *arguments, **locks)


def earlier(bus_id: str, log: Path) -> list[Symptom]:
    gpu = Gpu(0, "GPU-0", "H100", pci_bus_id=bus_id)
    return [symptom for _, symptom in against([gpu], read_kernel_log(log))]


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
        (["--run-both-models", "--dry-run"], "[launcher] [full] GPU0: before this run: Xid 79 "),
        (["doctor"], "warn  GPU0 kernel log     Xid 79 (the GPU has fallen off the bus)"),
        (
            ["--dry-run"],
            "[launcher] kernel log: PCI 0000:1c:00, a GPU that NVML does not list: Xid",
        ),
        (
            ["doctor"],
            "warn  kernel log          PCI 0000:1c:00, a GPU that NVML does not list: Xid",
        ),
    ],
)
def test_an_xid_of_before_is_told_by_a_run_and_by_doctor(
    box: Callable[..., Box], tmp_path: Path, arguments: list[str], line: str
) -> None:
    assert line in said_of(LOG, box([fake_gpu(0)]), tmp_path, *arguments)


LOST = b"""\
4,1,1,-;NVRM: Xid (PCI:0000:1e:00): 79, GPU has fallen off the bus.
4,2,1,-;NVRM: GPU 0000:1e:00.0: GPU has fallen off the bus.
4,3,2,-;NVRM: The NVIDIA GPU 0000:1f:00.0 (PCI ID: 10de:2330)
4,4,2,-;NVRM: installed in this system has
4,5,2,-;NVRM: fallen off the bus and is not responding to commands.
4,6,3,-;NVRM: The NVIDIA GPU 0000:20:00.0 (PCI ID: 1)\\x0aNVRM: has\\x0aNVRM: fallen off the bus
4,7,4,-;NVRM: GPU 0000:21:00.0: RmInitAdapter failed! (0x26:0x56:1474)
4,8,5,-;NVRM: GPU 0000:22:00.0: GPU serial number is 1654.
4,9,5,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.
4,9,6,-;NVRM: Xid (PCI:0000:23:00): 31, pid=4711
"""


def test_gpus_that_are_lost_are_found_by_what_the_driver_said_of_them(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_bytes(LOST)
    listed = [Gpu(0, "GPU-0", "H100", pci_bus_id="00000000:1B:00.0")]
    found = unlisted(listed, read_kernel_log(tmp_path / "kmsg"))
    told = {each.address: (each.symptom.figure, each.is_gone) for each in found}
    assert len(found) == len(told)
    fallen, xid = ("it has fallen off the bus", True), xid_symptom(79).figure
    assert told == {
        "0000:1e:00": (xid, True),
        "0000:1f:00": fallen,
        "0000:20:00": fallen,
        "0000:21:00": ("the driver could not start it", True),
        "0000:23:00": (xid_symptom(31).figure, False),
    }


@pytest.mark.parametrize(
    ("more", "gpus", "code"),
    [
        ([], 1, 22),
        (["--gpus", "0"], 1, 0),
        (["launch.fail_on=[reset]"], 1, 0),
        ([], 0, 69),
    ],
    ids=["all", "another one", "not to fail on", "none is left"],
)
def test_a_quick_look_is_not_well_where_a_gpu_is_lost(
    box: Callable[..., Box], tmp_path: Path, more: list[str], gpus: int, code: int
) -> None:
    machine = box([fake_gpu(index) for index in range(gpus)])
    first, *said = said_of(LOST, machine, tmp_path, "doctor", "--quick", *more).splitlines()
    assert said[-1] == f"code {code}"
    assert first.startswith("FAIL" if code else "warn")
    assert any(
        "PCI 0000:1f:00, a GPU that NVML does not list: it has fallen" in line for line in said
    )


def test_a_gpu_that_nvml_counts_and_cannot_reach_may_be_the_one_that_is_lost(
    box: Callable[..., Box], tmp_path: Path
) -> None:
    """It is told by its number: 69."""
    machine = box([fake_gpu(0), fake_gpu(1)], [fault("DeviceGetHandleByIndex_v2", 1, 15)])
    said = said_of(LOST, machine, tmp_path, "doctor", "--quick")
    assert said.splitlines()[-1] == "code 69"
    assert "warn  kernel log          PCI 0000:1f:00" in said
