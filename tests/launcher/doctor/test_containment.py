"""Whether a cgroup can hold what workers start, in the places where a run may be started."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.contain.cgroup import Cgroup
from tests.launcher.supervise.cgroups import inside, new_cgroup, threaded

ROOT = Path(__file__).parents[3]
NOBODY = 65534
LOOKS = (
    "import os, sys\n"
    "from launcher.doctor.machine import check_containment\n"
    "uid = int(sys.argv[1])\n"
    "os.setresuid(uid, uid, uid)\n"
    "print(check_containment())\n"
)
HOLDS = "ok    containment         a cgroup holds all that workers start\n"
NONE = (
    "warn  containment         no cgroup of version 2 can be made: a child that leaves its session"
)


@pytest.fixture
def made() -> Iterator[Cgroup]:
    with new_cgroup() as made:
        yield made


def told(made: Cgroup, prefix: tuple[str, ...] = (), uid: int | None = None) -> str:
    """The doctor's line for a process of this user in this cgroup."""
    look = (sys.executable, "-c", LOOKS, str(os.geteuid() if uid is None else uid))
    command = (*inside(made.directory), *prefix, *look)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_where_a_cgroup_can_be_made_it_holds_and_none_is_left(made: Cgroup) -> None:
    assert told(made) == HOLDS
    assert not list(Path(made.directory).glob("model_check_*"))


@pytest.mark.root
def test_a_user_needs_a_cgroup_that_is_delegated_to_him(made: Cgroup) -> None:
    assert told(made, uid=NOBODY).startswith(NONE)
    for path in (made.directory, f"{made.directory}/cgroup.procs"):
        os.chown(path, NOBODY, NOBODY)
    assert told(made, uid=NOBODY) == HOLDS


def test_a_process_that_cannot_enter_is_noticed(made: Cgroup) -> None:
    with threaded(made.directory):
        line = told(made)
    assert line.startswith("warn  containment         workers cannot enter a cgroup: a child")
    assert "systemd-run --user --scope -p Delegate=yes" in line


def test_a_cgroup_that_may_have_no_children_holds_nobody(made: Cgroup) -> None:
    Path(made.directory, "cgroup.max.descendants").write_text("0")
    assert told(made).startswith(NONE)


@pytest.mark.root
@pytest.mark.parametrize("mount", ["-o remount,ro,bind", "-t tmpfs none"], ids=["ro", "v1"])
def test_a_read_only_or_missing_mount_holds_nobody(made: Cgroup, mount: str) -> None:
    """A container's usual mount; a machine that has cgroups of version 1 alone."""
    directory = made.directory
    shell = f'mount --bind {directory} {directory}; mount {mount} {directory}; exec "$@"'
    assert told(made, ("unshare", "--mount", "sh", "-c", shell, "sh")).startswith(NONE)


@pytest.mark.root
def test_a_directory_that_only_looks_like_a_cgroup_stays_as_it_is(made: Cgroup) -> None:
    """Where version 1 is in use, /sys/fs/cgroup is a tmpfs, in which root can write anything."""
    directory = made.directory
    shell = (
        f'mount -t tmpfs none {directory}; echo 1 > {directory}/cgroup.procs; "$@"; ls {directory}'
    )
    lines = told(made, ("unshare", "--mount", "sh", "-c", shell, "sh")).splitlines()
    assert lines[0].startswith(NONE)
    assert lines[1:] == ["cgroup.procs"]
