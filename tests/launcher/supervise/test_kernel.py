"""What only the kernel can do to a run: no memory, no processes, a disk that hangs, being pid 1.

Each of these needs root, or a delegated cgroup, and is skipped with its reason where it can't be.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.contain import cgroup, processes
from tests.deadline import DEADLINE_S
from tests.launcher.supervise.cgroups import cgroups_of, limited
from tests.launcher.supervise.lab import (
    ROOT,
    Lab,
    Launch,
    OwnProcess,
    is_alive,
    python,
    sh,
    wait_until_dead,
)

SLEEP = sh("exec sleep 1000")
UP = sh("echo $$ > $LAB/up.pid; echo up; exec sleep 1000")
GREEDY = python("held = []\nwhile True: held.append(bytearray(1 << 22))")
MEMORY = "96M"
WITHOUT_SYSCALL = Path(__file__).with_name("without_syscall.py")
PIDFD_OPEN, PIDFD_SEND_SIGNAL = "434", "424"


def test_a_worker_out_of_memory_is_137_and_told_by_the_cgroups_counter(
    lab: Lab, launch: Launch
) -> None:
    limits = {"memory.limit_in_bytes": MEMORY, "memory.max": MEMORY, "memory.swap.max": "0"}
    with limited("memory", limits) as prefix:
        run = launch(SLEEP, GREEDY, prefix=prefix)
        assert run.wait() == 137
    told = "the cgroup counted an OOM kill (limit 96 MiB)"
    assert [record["oom"] for record in run.outcome["workers"]] == [None, told]
    assert run.outcome["culprits"] == []
    assert told in run.outcome["reason"]


def test_no_process_left_for_a_worker_is_70_and_takes_the_others_down(
    lab: Lab, launch: Launch
) -> None:
    with limited("pids", {"pids.max": "6"}) as prefix:  # us, the guardian, a printer's thread
        run = launch(*[UP] * 8, prefix=prefix)
        assert run.wait() == 70
    assert "EAGAIN" in run.outcome["reason"]
    assert any(record["stopped_by_us"] for record in run.outcome["workers"])
    assert not [pid for pid in lab.pids().values() if is_alive(pid)]


@pytest.mark.parametrize("syscall", [PIDFD_OPEN, PIDFD_SEND_SIGNAL])
def test_a_kernel_without_pidfds_is_70_and_one_line_that_says_what_is_needed(
    lab: Lab, syscall: str
) -> None:
    command = [sys.executable, str(WITHOUT_SYSCALL), syscall, sys.executable, "-m", "launcher"]
    command += ["--device", "cpu", "--run-dir", str(lab.dir / "run"), "--", "true"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 70
    assert b"Traceback" not in done.stdout + done.stderr
    assert done.stdout.count(b"Linux 5.4") == 1


def test_a_guardian_that_cannot_be_watched_is_none_and_leaves_no_process() -> None:
    code = (
        "import os\n"
        "from launcher.contain import processes\n"
        "from launcher.contain.lifeline import Lifeline\n"
        "me = os.getpid()\n"
        "try: Lifeline(processes.Family('0' * 32, 0, me, os.getsid(0), frozenset()))\n"
        "except OSError: print(processes.children(me))\n"
    )
    command = [sys.executable, str(WITHOUT_SYSCALL), PIDFD_OPEN, sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.stdout, done.stderr) == (b"[]\n", b"")


# -- a disk that hangs


@pytest.fixture
def hung_disk(lab: Lab) -> Iterator[tuple[str, ...]]:
    """What goes before a command that shall have one, at `$LAB/disk`."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs root and /dev/fuse")
    helper = str(Path(__file__).with_name("stuck_disk.py"))
    yield (sys.executable, helper, str(lab.dir / "disk"))
    pids = lab.pids()
    left_in = cgroups_of(pids["stuck"]) if "stuck" in pids and is_alive(pids["stuck"]) else []
    if "disk" in pids and is_alive(pids["disk"]):
        os.kill(pids["disk"], signal.SIGKILL)
    wait_until_dead(list(pids.values()))
    for directory in left_in:
        cgroup.clear(str(directory))


IT_HANGS = "until [ -s $LAB/disk.asked ]; do sleep 0.02; done"
STUCK = python(
    "import os\n"
    "open(os.environ['LAB'] + '/stuck.pid', 'w').write(f'{os.getpid()}\\n')\n"
    "print('up', flush=True)\n"
    "os.stat(os.environ['LAB'] + '/disk/file')"
)


def test_a_worker_that_sigkill_leaves_is_named_and_left_in_bounded_time(
    lab: Lab, launch: Launch, hung_disk: tuple[str, ...]
) -> None:
    run = launch(STUCK, sh(f"{IT_HANGS}; exit 5"), grace_s=0.2, prefix=hung_disk)
    line = run.wait_for("SIGKILL has no effect on")
    stuck = lab.pids()["stuck"]
    assert f"pid {stuck} (state D" in line
    assert run.wait() == 5
    assert run.outcome["leftovers"] == [stuck]
    assert run.outcome["workers"][0]["returncode"] is None
    assert is_alive(stuck), "it was no such disk"


def test_who_was_left_behind_is_reaped_when_he_dies_after_all(
    lab: Lab, launch: Launch, hung_disk: tuple[str, ...]
) -> None:
    """Two runs in one process, as data preparation and training are: a grandchild whom the first
    one could not kill dies during the second."""
    frees = sh("kill -9 $(cat $LAB/disk.pid); until [ -e $LAB/freed ]; do sleep 0.02; done")
    hides = sh(f"setsid sh -c 'echo $$ > $LAB/stuck.pid; exec cat $LAB/disk/file' & {IT_HANGS}")
    run = launch(hides, grace_s=0.1, prefix=hung_disk, then=[frees])
    run.wait_for("SIGKILL has no effect on")
    stuck = lab.pids()["stuck"]
    while processes.read_process(stuck) is not None:
        os.sched_yield()
    (lab.dir / "freed").touch()
    assert run.wait() == 0


# -- the first process of a container

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def first_process(lab: Lab, launch: Launch) -> Launch:
    """`launch`, in a pid namespace of its own."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("needs unshare and nsenter")
    if subprocess.run((*CONTAINER, "true"), capture_output=True).returncode != 0:
        pytest.skip("no pid namespace can be made (needs root)")

    def start(*commands: tuple[str, ...], grace_s: float = 30.0) -> OwnProcess:
        return launch(*commands, grace_s=grace_s, prefix=CONTAINER)

    return start


def pid_one(run: OwnProcess) -> int:
    """As we see it from outside."""
    (pid,) = processes.children(run.process.pid)
    return pid


def docker_exec(run: OwnProcess, code: str) -> None:
    """A process of its own session, whose parent is not among those that the container sees."""
    enter = ("nsenter", "-t", str(pid_one(run)), "-p", "-m", "setsid", "--wait")
    subprocess.run((*enter, "sh", "-c", code), check=True)


FAMILY = sh(
    "setsid sh -c 'trap \"\" TERM; sleep 1000' & (setsid sleep 1000 &) & "
    "env -i setsid sleep 1000 & sleep 0.1; echo up; "
    "until [ -e $LAB/go ]; do sleep 0.02; done; exit 3"
)


def test_pid_1_ends_a_run_as_ever_and_leaves_strangers_alone(
    lab: Lab, first_process: Launch
) -> None:
    run = first_process(FAMILY, SLEEP, grace_s=0.2)
    run.wait_for("[W0] up")
    trap = 'trap "echo hit > $LAB/hit" TERM; echo > $LAB/there; while :; do sleep 0.05; done'
    docker_exec(run, f"export LAB={lab.dir}; setsid sh -c '{trap}' > /dev/null 2>&1 &")
    while not (lab.dir / "there").exists():
        os.sched_yield()
    (lab.dir / "go").touch()
    assert run.wait() == 3
    assert run.outcome["leftovers"] == []
    assert run.outcome["culprits"] == ["W0"]
    assert not (lab.dir / "hit").exists(), "a process of `docker exec` was taken for ours"


def test_pid_1_is_stopped_by_a_signal_like_anybody(lab: Lab, first_process: Launch) -> None:
    run = first_process(SLEEP, sh("echo up; exec sleep 1000"))
    run.wait_for("[W1] up")
    os.kill(pid_one(run), signal.SIGTERM)
    assert run.wait() == 143


@pytest.mark.root
@pytest.mark.parametrize("stage", ["run.sh", "Python"])
def test_a_sigterm_while_pid_1_starts_ends_it(tmp_path: Path, stage: str) -> None:
    """The kernel drops a signal to pid 1 that has its default action."""
    start = ["bash", str(ROOT / "run.sh"), "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*CONTAINER, *start, "--", "sleep", "20"],
        cwd=tmp_path,
        env=os.environ | {"MODEL_CHECK_VENV": str(ready_environment(tmp_path / "venv"))},
        stdout=subprocess.DEVNULL,
    )
    while not (children := processes.children(process.pid)):
        os.sched_yield()
    first = children[0]
    if stage == "run.sh":
        wait_for_trap(first)
    while (
        stage == "Python"
        and b"/python" not in processes.read_proc(first, "cmdline").split(b"\0")[0]
    ):
        os.sched_yield()
    os.kill(first, signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 143


def ready_environment(directory: Path) -> Path:
    """One that run.sh takes for its own, so that it installs none: it runs this interpreter."""
    python = directory / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    sources = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    (directory / "ready-run").write_text(f"{hashlib.sha256(sources).hexdigest()}\n{python}\n")
    return directory


def wait_for_trap(pid: int) -> None:
    """Until this shell catches SIGTERM."""
    bit = 1 << (signal.SIGTERM - 1)
    while True:
        status = processes.read_proc(pid, "status").decode()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) & bit:
            return


def test_pid_1_reaps_who_came_back_to_it(lab: Lab, first_process: Launch) -> None:
    counts = python(
        "import glob, os, time\n"
        "def dead(): return [p for p in glob.glob('/proc/[0-9]*/stat') if ') Z ' in read(p)]\n"
        "def read(path):\n"
        "    try: return open(path).read()\n"
        "    except OSError: return ''\n"
        "print('up', flush=True)\n"
        "while not os.path.exists(os.environ['LAB'] + '/go'): time.sleep(0.02)\n"
        "while dead(): time.sleep(0.02)\n"
    )
    run = first_process(counts)
    run.wait_for("[W0] up")
    docker_exec(run, "for i in 1 2 3; do (setsid sleep 0.05 &) & done")
    (lab.dir / "go").touch()
    assert run.wait() == 0  # a zombie that stays would keep the worker waiting
