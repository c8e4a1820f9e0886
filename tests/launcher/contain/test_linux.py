"""Pythons that were built for an old C library (conda's, uv's) lack what the kernel has."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.contain import linux
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[3]
OLD_PYTHON = (
    "import os, runpy, signal, sys\n"
    "del os.pidfd_open, os.P_PIDFD, os.memfd_create, signal.pidfd_send_signal\n"
    "runpy.run_module('launcher', run_name='__main__', alter_sys=True)\n"
)


def test_a_descriptor_of_a_process_is_had_without_pythons_help() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        pidfd = linux.pidfd_open(process.pid)
        assert not os.get_inheritable(pidfd)
        linux.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], 60)[0]
        assert process.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        linux.pidfd_send_signal(pidfd, signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(process.pid)
    os.close(pidfd)


def test_a_file_in_memory_is_had_without_pythons_help() -> None:
    fd = linux.memfd_create("model_check_test")
    assert not os.get_inheritable(fd)
    os.pwrite(fd, b"nvmlInit", 0)
    assert os.pread(fd, 100, 0) == b"nvmlInit"
    os.close(fd)


def test_a_run_ends_as_ever_under_a_python_that_lacks_them(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--run-dir", str(tmp_path / "run")]
    script = 'if [ $GPU_RANK = 1 ]; then exit 7; fi; trap "" TERM; sleep 1000 & wait'
    command = [sys.executable, "-c", OLD_PYTHON, *arguments, "--grace", "0.1", "--", "sh", "-c"]
    done = subprocess.run(
        [*command, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "CPU1 failed first" in done.stdout
