"""Interfaces that are not there end a job before it starts, and blame no rank."""

import shutil
import socket
import subprocess
import sys

import pytest

from launcher.nodes import interfaces
from launcher.nodes.interfaces import check_interfaces
from model_check.errors import ConfigError
from tests.deadline import DEADLINE_S
from tests.shell.tree import ROOT

HERE = [(1, "lo"), (2, "eth0"), (3, "ib0")]


@pytest.mark.parametrize(
    ("name", "value", "is_there"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth9, ib0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "ib1", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,ib", False),
        ("NCCL_SOCKET_IFNAME", "bond", False),
        ("NCCL_SOCKET_IFNAME", "", True),
    ],
)
def test_a_name_is_read_as_its_library_reads_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_there: bool
) -> None:
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: HERE)
    if is_there:
        check_interfaces({name: value}, is_here_alone=True)
        return
    with pytest.raises(ConfigError, match=r"no such network .*eth0, ib0, lo\)") as caught:
        check_interfaces({name: value}, is_here_alone=False)
    assert str(caught.value).startswith(f"{name}={value}: ")
    assert caught.value.exit_code == 2


def test_nccls_are_nothing_to_ranks_on_a_cpu() -> None:
    check_interfaces({"NCCL_SOCKET_IFNAME": "none9"}, is_here_alone=True, on_gpus=False)


def test_those_of_this_machine_are_taken() -> None:
    for _, name in socket.if_nameindex():
        check_interfaces({"GLOO_SOCKET_IFNAME": name}, is_here_alone=True)
    check_interfaces({}, is_here_alone=True)


IN_A_SPACE = """
from launcher.nodes.interfaces import check_interfaces
check_interfaces({"GLOO_SOCKET_IFNAME": "lo"}, is_here_alone=True)
check_interfaces({}, is_here_alone=False)
check_interfaces({}, is_here_alone=True)
"""


@pytest.mark.root
def test_a_loopback_that_is_down_is_the_hosts_fault() -> None:
    """A new network namespace has one that is down."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("this machine has no unshare")
    done = subprocess.run(
        [unshare, "-n", sys.executable, "-c", IN_A_SPACE],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert "loopback interface of this machine (or container) is down" in done.stderr
    assert done.stderr.count('File "<string>"') == 1
    assert "line 5" in done.stderr
