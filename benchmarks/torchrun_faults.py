"""What torchrun does in the faults of docs/supervisor.md: `python benchmarks/torchrun_faults.py`.

Each run has two workers that do not import `torch`. It prints a line a fault: exit code, seconds,
processes that live on, the worker that it blames, its last line. A fault that needs root (cgroups,
tmpfs, FUSE) says so where it cannot be made.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUCK_DISK = ROOT / "tests/launcher/supervise/stuck_disk.py"
PYTHON = (sys.executable, "-I", "-S", "-c")
BY_RANK = "if [ $LOCAL_RANK = 0 ]; then %s; else %s; fi"
UNTIL = "until [ -s $LAB/%s ]; do sleep 0.02; done"
GREEDY = "exec python3 -I -S -c 'a = []\nwhile 1: a.append(bytearray(1 << 22))'"
HOP = (
    "import os, time\n"
    "if os.fork(): time.sleep(0.3); os._exit(5)\n"
    "os.setsid()\n"
    "fd = os.open(os.environ['LAB'] + '/beats', os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
    "for _ in range(4000):\n"
    "    os.write(fd, b'.')\n"
    "    time.sleep(0.003)\n"
    "    if os.fork(): os._exit(0)\n"
)


@dataclass(frozen=True)
class Fault:
    """A worker's shell code, torchrun's own flags, and what surrounds it."""

    name: str
    code: str
    workers: int = 2
    flags: tuple[str, ...] = ()
    before: str = ""
    """Shell code to run first, in torchrun's own process."""
    prefix: tuple[str, ...] = ()
    limit_s: float = 60.0


def faults(lab: str) -> Iterator[Fault]:
    tee = ("--tee", "3", "--log-dir", f"{lab}/logs")
    tmpfs = f"mkdir {lab}/logs && mount -t tmpfs -o size=64k none {lab}/logs; "
    first = f"echo 1 > $LAB/said; {UNTIL % 'dead'}; exit 20"
    dies_of_it = f"{UNTIL % 'said'}; echo 1 > $LAB/dead; exit 1"
    yield Fault("out of memory", BY_RANK % ("exec sleep 60", GREEDY), before=_cgroup("memory"))
    yield Fault("no process left", "exec sleep 60", 40, before=_cgroup("pids"))
    yield Fault("no descriptor left", "exec sleep 60", 40, tee, before="ulimit -n 64; ")
    yield Fault("the second dies of the first", BY_RANK % (first, dies_of_it))
    yield Fault("the first dies of the second", BY_RANK % (dies_of_it, first))
    yield Fault(
        "two in one instant", BY_RANK % (f"{UNTIL % 'go'}; exit 3", "echo 1 > $LAB/go; exit 4")
    )
    yield Fault("silent", BY_RANK % ("exec sleep 600", "exec sleep 600"), limit_s=20)
    bare = (
        "env -i LAB=$LAB setsid sh -c 'echo $$ > $LAB/bare.pid; exec sleep 60' & sleep 0.3; exit 5"
    )
    yield Fault("grandchild without environment", BY_RANK % ("exec sleep 60", bare))
    yield Fault("runaway", f'exec {sys.executable} -I -S -c "{HOP}"')
    says = f"exec {' '.join(PYTHON)} 'for i in range(9000): print(\"line of a flood\", i)'"
    yield Fault("full log disk", says, flags=tee, before=tmpfs, prefix=("unshare", "-m"))
    gone = f"sleep 1; [ $LOCAL_RANK = 0 ] && rm -rf {lab}/logs; sleep 1; echo late; exit 0"
    yield Fault("log directory vanishes", gone, flags=tee)
    stuck = "echo $$ > $LAB/stuck.pid; exec cat $LAB/disk/file"
    disk = (sys.executable, str(STUCK_DISK), f"{lab}/disk")
    code = BY_RANK % (stuck, f"{UNTIL % 'disk.asked'}; exit 5")
    flags = ("--shutdown-timeout", "3")
    yield Fault("state D", code, flags=flags, prefix=disk, limit_s=240)


def _cgroup(controller: str) -> str:
    """Runs in a child of our own cgroup (version 1 or 2); `clean` removes it when it is empty."""
    limit = {"memory": "limit_in_bytes=700M max=700M", "pids": "max=40"}[controller]
    return f"{sys.executable} {__file__} --enter {controller} $$ {limit}; "


def enter(controller: str, pid: str, *limits: str) -> None:
    directory = own_cgroup(controller) / f"torchrun_fault_{pid}"
    directory.mkdir()
    for limit in limits:
        name, _, value = limit.partition("=")
        if (file := directory / f"{controller}.{name}").exists():
            file.write_text(value)
    (directory / "cgroup.procs").write_text(pid)


def own_cgroup(controller: str) -> Path:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    if controller in paths:
        return Path("/sys/fs/cgroup", controller, paths[controller].lstrip("/"))
    return Path("/sys/fs/cgroup", paths[""].lstrip("/"))


def clean() -> None:
    for controller in ("memory", "pids"):
        for directory in own_cgroup(controller).glob("torchrun_fault_*"):
            with contextlib.suppress(OSError):
                directory.rmdir()


def play(fault: Fault, lab: Path) -> str:
    torchrun = (str(Path(sys.executable).with_name("torchrun")), *fault.flags)
    if "--shutdown-timeout" not in fault.flags:
        torchrun += ("--shutdown-timeout", "3")
    worker = ("--nproc-per-node", str(fault.workers), "--no-python", "/bin/sh", str(lab / "worker"))
    (lab / "worker").write_text(fault.code)  # in an argument it would replace `$$`
    command = ("/bin/sh", "-c", fault.before + 'exec "$@"', "sh", *torchrun, *worker)
    started = time.monotonic()
    with (lab / "output").open("wb") as output:
        process = subprocess.Popen(
            (*fault.prefix, *command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "LAB": str(lab), "OMP_NUM_THREADS": "1", "FAULT": lab.name},
            start_new_session=True,
        )
        ended = _wait(process, fault.limit_s)
    took_s = time.monotonic() - started
    text = (lab / "output").read_text(errors="replace")
    left, runs_on = _left(lab), _beats(lab)
    alive = "it runs on" if runs_on else f"{len(left)} live on"
    row = f"{fault.name}: {ended} after {took_s:.1f} s; {alive}; {_words(text)}"
    while runs_on:  # nobody catches it: it ends by itself
        runs_on = _beats(lab)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    clean()
    return row


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> str:
    try:
        return f"exit code {process.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "still there"


def _left(lab: Path) -> list[int]:
    """Living processes of this fault, found by its environment or by the pid that they wrote
    down."""
    time.sleep(0.5)
    found = {int(path.read_text()) for path in lab.glob("*.pid") if path.read_text().strip()}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"FAULT={lab.name}".encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
    return [pid for pid in found if _is_alive(pid)]


def _beats(lab: Path) -> bool:
    """Whether the escaped process runs on: a search of the process table may miss it."""
    beats = lab / "beats"
    before = beats.stat().st_size if beats.exists() else 0
    time.sleep(0.5)
    return beats.exists() and beats.stat().st_size > before


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _words(text: str) -> str:
    blamed = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(\S+)", text, re.S)
    first = re.search(r"failed \(exitcode: (\S+)\) local_rank: (\d+)", text)
    oom = "OOM is named" if re.search("out of memory|OOM", text, re.I) else ""
    error = re.findall(r"^(?:\w+Error|OSError|RuntimeError).*", text, re.M)
    parts = [f"blames rank {blamed[1]} ({blamed[2]})" if blamed else "blames nobody"]
    parts += [f"says {first[0]!r}" if first else "", oom, error[-1][:120] if error else ""]
    return ", ".join(part for part in parts if part)


def main() -> None:
    if "--enter" in sys.argv:
        enter(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name holds this")
    only = parser.parse_args().only
    for index, fault in enumerate(faults("LAB")):
        if only in fault.name:
            with tempfile.TemporaryDirectory(prefix="torchrun_fault_") as lab:
                print(play(list(faults(lab))[index], Path(lab)), flush=True)


if __name__ == "__main__":
    main()
