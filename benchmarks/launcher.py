"""Compares our launcher with torchrun (and honcho, if given) by what happens to their workers.

All of them run the same commands on the same machine, alternating in one run, so that noise hits
them alike; what counts is the ratio within one repetition, its median and spread. Times are the
workers' own stamps and the ends of processes, not what a launcher reports about itself.

    python benchmarks/launcher.py [--quick] [--repeats N] [--honcho PATH] [--only WORD]
        [--before CHECKOUT]

prints the table of docs/supervisor.md, a row as soon as it is measured. With --before, the launcher
of another checkout of this project takes its turn, too.
"""

import argparse
import math
import os
import platform
import pty
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "benchmarks" / "launcher_workers" / "worker.py"
GRACE_S = 3
HANG_S = 60.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Command = Callable[[int, Sequence[str], Path], list[str]]
"""(number of workers, command of a worker, an empty directory) -> the launcher's command line."""


def ours_of(checkout: Path) -> Command:
    def command(num_workers: int, argv: Sequence[str], directory: Path) -> list[str]:
        options = ["--device", "cpu", "--workers", str(num_workers), "--grace", str(GRACE_S)]
        options += ["--run-dir", str(directory / "run"), "--hang-timeout", "0"]
        program = ["env", f"PYTHONPATH={checkout}", sys.executable, "-m", "launcher"]
        return [*program, *options, "--", *argv]

    return command


def torchrun(num_workers: int, argv: Sequence[str], directory: Path) -> list[str]:
    program = str(Path(sys.executable).with_name("torchrun"))
    options = ["--nproc-per-node", str(num_workers), "--shutdown-timeout", str(GRACE_S)]
    return [program, *options, "--no-python", *argv]


def torchrun_with_logs(num_workers: int, argv: Sequence[str], directory: Path) -> list[str]:
    """torchrun with what ours does: prefixed lines to the terminal, and a file a worker."""
    program, *rest = torchrun(num_workers, argv, directory)
    return [program, "--tee", "3", "--log-dir", str(directory / "logs"), *rest]


def honcho(program: str) -> Command:
    def command(num_workers: int, argv: Sequence[str], directory: Path) -> list[str]:
        lines = [f"w{index}: exec {' '.join(argv)}\n" for index in range(num_workers)]
        (directory / "Procfile").write_text("".join(lines))
        return [program, "-f", str(directory / "Procfile"), "start"]

    return command


@dataclass
class Run:
    """A running launcher, and what was observed of it."""

    process: "subprocess.Popen[bytes]"
    fd: int | None
    """What it writes comes out here; None: it writes to a file."""
    dir: Path
    started: float
    num_lines: int = 0
    peak_kib: int = 0
    seen: list[float] = field(default_factory=list)
    """When each `hello` came."""

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self.watch)

    def watch(self) -> None:
        """Read the terminal to its end, as fast as it comes, and sample the memory."""
        rest = b""
        while data := self.read():
            self.num_lines += data.count(b"\n")
            self.seen += [time.monotonic()] * (rest + data).count(b"hello")
            rest = data[-4:]  # a word may come in two pieces
            self.sample()

    def read(self) -> bytes:
        assert self.fd is not None, "its lines go to a file"
        try:
            return os.read(self.fd, 1 << 20)
        except OSError:  # EIO: nobody has the terminal open any more
            return b""

    def sample(self) -> None:
        for line in read(f"/proc/{self.process.pid}/status").splitlines():
            if line.startswith("VmHWM:"):
                self.peak_kib = max(self.peak_kib, int(line.split()[1]))

    def stamps(self, what: str) -> list[float]:
        """Times of the workers' stamps of this kind, seconds."""
        paths = [path for path in self.dir.glob(f"{what}.*") if path.suffix != ".new"]
        return sorted(int(path.read_text()) / 1e9 for path in paths)

    def wait_for_stamps(self, what: str, count: int) -> None:
        deadline = time.monotonic() + HANG_S
        while len(list(self.dir.glob(f"{what}.*[0-9]"))) < count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"{self.process.args}: no {what} of {count} workers")
            self.sample()
            time.sleep(0.01)

    def cpu_s(self) -> float:
        """CPU seconds of the launcher's own process."""
        fields = read(f"/proc/{self.process.pid}/stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def pids(self) -> list[int]:
        return [int(path.name.split(".")[1]) for path in self.dir.glob("up.*[0-9]")]


def output(terminal: str, directory: Path) -> tuple[int | None, int]:
    """Returns where to read and where it writes."""
    if terminal == "pipe":
        return os.pipe()
    if terminal == "file":
        return None, os.open(directory / "terminal", os.O_WRONLY | os.O_CREAT)
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    return ours, theirs


@contextmanager
def launched(
    command: Command, num_workers: int, mode: Sequence[str], terminal: str = "pipe"
) -> Iterator[Run]:
    """Start it on `terminal` (`pipe`, `pty`: read at once; `file`). Processes that remain are
    killed."""
    directory = Path(tempfile.mkdtemp(prefix="launcher-benchmark-"))
    worker = [sys.executable, "-I", "-S", str(WORKER), str(directory), str(num_workers), *mode]
    argv = command(num_workers, worker, directory)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MODEL_CHECK_HISTORY_FILE": "", "TERM": "xterm"}
    fd, stdout = output(terminal, directory)
    with (directory / "stderr").open("wb") as errors:
        started = time.monotonic()
        process = subprocess.Popen(
            argv, stdout=stdout, stderr=errors, env=env, cwd=directory, start_new_session=True
        )
    os.close(stdout)
    run = Run(process, fd, directory, started)
    if fd is not None:
        run.reader.start()
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its helpers hold the pipe open, too
        process.wait()
        kill_workers(directory)
        if fd is not None:
            while run.reader.is_alive():  # somebody was between fork and exec, and holds the pipe
                kill_workers(directory)
                run.reader.join(0.05)
            os.close(fd)
        shutil.rmtree(directory, ignore_errors=True)


# -- what is measured: one number a run


def first_line_s(command: Command) -> float:
    with launched(command, 8, ["hello"]) as run:
        wait_until(lambda: len(run.seen) >= 1)
        return run.seen[0] - run.started


def eighth_line_s(command: Command) -> float:
    with launched(command, 8, ["hello"]) as run:
        wait_until(lambda: len(run.seen) >= 8)
        return run.seen[7] - run.started


def all_gone_s(command: Command, obeys: str = "obedient", terminal: str = "pipe") -> float:
    """From the stamp of the worker that fails until the launcher and all workers are dead."""
    with launched(command, 8, ["one-fails", obeys, "quiet"], terminal) as run:
        run.wait_for_stamps("up", 8)
        pidfds = [fd for pid in run.pids() if (fd := hold(pid)) is not None]
        run.process.wait(HANG_S)
        if run.process.returncode not in (7, 1):  # whoever crashes is gone soon, too
            raise RuntimeError(f"{run.process.args}: exit code {run.process.returncode}")
        wait_for_deaths(pidfds)
        return time.monotonic() - run.stamps("failed")[0]


def workers_gone_s(command: Command) -> float:
    """The same until the last worker is dead; the launcher may still write its report."""
    with launched(command, 8, ["one-fails", "obedient", "quiet"]) as run:
        run.wait_for_stamps("up", 8)
        wait_for_deaths([fd for pid in run.pids() if (fd := hold(pid)) is not None])
        gone = time.monotonic()
        run.process.wait(HANG_S)
        return gone - run.stamps("failed")[0]


def stubborn_gone_s(command: Command) -> float:
    return all_gone_s(command, "stubborn")


def noticed_s(command: Command) -> float:
    """Under a flood of 8 workers: from the stamp of the worker that fails until the first of its
    peers gets SIGTERM."""
    with launched(command, 8, ["one-fails", "obedient", "flood"]) as run:
        run.process.wait(HANG_S)
        return run.stamps("told")[0] - run.stamps("failed")[0]


def lines_per_s(command: Command, num_lines: int, terminal: str) -> float:
    """From the moment when all 8 workers are up until the launcher has ended: all is written."""
    with launched(command, 8, ["lines", str(num_lines)], terminal) as run:
        run.process.wait(HANG_S)
        ended = time.monotonic()
        return 8 * num_lines / (ended - run.stamps("up")[-1])


def shown_part(command: Command, num_lines: int) -> float:
    """The share of the lines of that flood that reached the pipe."""
    with launched(command, 8, ["lines", str(num_lines)]) as run:
        run.process.wait(HANG_S)
        run.reader.join(HANG_S)
        return run.num_lines / (8 * num_lines)


def peak_mb(command: Command, num_lines: int) -> float:
    with launched(command, 8, ["lines", str(num_lines)]) as run:
        run.wait_for_stamps("written", 8)
        run.sample()
        run.process.wait(HANG_S)
        return run.peak_kib / 1024


def cpu_share(command: Command, seconds: int, num_workers: int = 64) -> float:
    """CPU seconds of the launcher's process a second, at 1,000 lines a second from each worker."""
    with launched(command, num_workers, ["rate", "1000", str(seconds)]) as run:
        run.wait_for_stamps("up", num_workers)
        before, began = run.cpu_s(), time.monotonic()
        run.wait_for_stamps("written", num_workers)
        used, passed = run.cpu_s() - before, time.monotonic() - began
        run.process.wait(HANG_S)
        return used / passed


# -- the table


@dataclass(frozen=True)
class Measure:
    """One row: a name, the number of repetitions, and what to measure of a command line."""

    name: str
    repeats: int
    measure: Callable[[Command], float]
    with_logs: bool = False
    """Compared with torchrun that writes files and prefixes, as we do."""
    higher_is_better: bool = False
    show: str = "{:.3f}"
    skip: tuple[str, ...] = ()


def measures(quick: bool, few: int) -> list[Measure]:
    num_lines, seconds = (20_000, 4) if quick else (100_000, 10)
    slow, many = (1, 20) if quick else (3, 100)
    flood = f"8 x {num_lines:,} lines"
    return [
        Measure("first line of 8 workers, s", few, first_line_s),
        Measure("eighth line of 8 workers, s", few, eighth_line_s),
        Measure("failure to the last worker dead, s", few, workers_gone_s),
        Measure("failure to all gone, launcher too, s", few, all_gone_s),
        Measure("same, on a terminal, s", few, lambda command: all_gone_s(command, terminal="pty")),
        Measure("same, workers ignore SIGTERM, s", slow, stubborn_gone_s),
        # honcho had not ended this one after 60 s: lines and ends of workers come in one queue, a
        # line at a time, so a death is seen when all that was written before it is shown, and the
        # others write on meanwhile.
        Measure("noticing under a flood, s", few, noticed_s, with_logs=True, skip=("honcho",)),
        Measure(
            f"{flood} to a pipe, lines/s",
            few,
            lambda command: lines_per_s(command, num_lines, "pipe"),
            *(True, True, "{:,.0f}"),
        ),
        Measure(
            f"{flood} to a terminal, lines/s",
            few,
            lambda command: lines_per_s(command, num_lines, "pty"),
            *(True, True, "{:,.0f}"),
        ),
        Measure(
            f"{flood} to a file, lines/s",
            few,
            lambda command: lines_per_s(command, num_lines, "file"),
            *(True, True, "{:,.0f}"),
        ),
        Measure(
            "part of them shown by the pipe",
            few,
            lambda command: shown_part(command, num_lines),
            *(True, True, "{:.3f}"),
            skip=("honcho",),  # it waits for the terminal, so it shows all: row "to a pipe"
        ),
        Measure(
            "peak RSS of the launcher, MB",
            few,
            lambda command: peak_mb(command, 20_000),
            with_logs=True,
            show="{:.1f}",
        ),
        Measure(
            "CPU of the launcher, 64 x 1,000 lines/s",
            slow,
            lambda command: cpu_share(command, seconds),
            with_logs=True,
            show="{:.2f}",
        ),
        Measure(
            "noticing under a flood, ours alone, s",
            many,
            noticed_s,
            skip=("torchrun", "honcho", "before"),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller floods, fewer repetitions")
    parser.add_argument("--repeats", metavar="N", type=int, help="of most rows (5, quick: 3)")
    parser.add_argument("--honcho", metavar="PATH", help="its program; without it, it is left out")
    parser.add_argument("--before", metavar="CHECKOUT", type=Path, help="of an earlier commit")
    parser.add_argument("--only", metavar="WORD", default="", help="rows whose name has this word")
    options = parser.parse_args()
    peers = {"before": options.before and ours_of(options.before.resolve()), "torchrun": torchrun}
    peers["honcho"] = options.honcho and honcho(options.honcho)
    peers = {name: command for name, command in peers.items() if command}
    keep_bytecode(ROOT, *filter(None, [options.before]))
    print_versions(options.honcho)
    print("| measure | ours | " + " | ".join(f"{name} | better by" for name in peers) + " |")
    print("|---" * (2 + 2 * len(peers)) + "|")
    for measure in measures(options.quick, options.repeats or (3 if options.quick else 5)):
        if options.only in measure.name:
            print(row(measure, peers), flush=True)
    print(load())
    return 0


def keep_bytecode(*checkouts: Path) -> None:
    """Torch's bytecode was written at its installation, ours is written by the very first run."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    packages = [str(root / name) for root in checkouts for name in ("launcher", "model_check")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *packages], check=True)


def row(measure: Measure, peers: dict[str, Command]) -> str:
    """Measure all launchers in turns; one line of the table."""
    commands = {"ours": ours_of(ROOT), **peers}
    if measure.with_logs and "torchrun" in commands:
        commands["torchrun"] = torchrun_with_logs
    commands = {name: run for name, run in commands.items() if name not in measure.skip}
    values: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(measure.repeats):
        for name, command in commands.items():
            values[name].append(measured(measure, command))
    cells = [measure.name, spread(values["ours"], measure.show)]
    for name in peers:
        if name not in values:
            cells += ["", ""]
            continue
        ratios = [
            mine / other if measure.higher_is_better else other / mine
            for mine, other in zip(values["ours"], values[name], strict=True)
        ]
        cells += [spread(values[name], measure.show), spread(ratios, "{:.2f}") + " x"]
    return "| " + " | ".join(cells) + " |"


def measured(measure: Measure, command: Command) -> float:
    """NaN when the launcher hangs."""
    try:
        return measure.measure(command)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        print(f"{measure.name}: {error}", file=sys.stderr)
        return math.nan


def spread(values: Sequence[float], show: str) -> str:
    """`median (least to most)`; from 20 values on also the 99th percentile."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return f"hangs (> {HANG_S:.0f} s)"
    text = show.format(statistics.median(ordered))
    if len(ordered) == 1:
        return text
    if len(ordered) >= 20:
        text += ", p99 " + show.format(ordered[math.ceil(len(ordered) * 0.99) - 1])
    return f"{text} ({show.format(ordered[0])} to {show.format(ordered[-1])})"


def print_versions(honcho_program: str | None) -> None:
    code = "import torch; print('torch', torch.__version__)"
    torch = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = [f"Python {platform.python_version()}", torch.stdout.strip()]
    if honcho_program:
        version = subprocess.run([honcho_program, "version"], capture_output=True, text=True)
        told.append(version.stdout.strip())
    told += [f"Linux {platform.release()}", f"{len(os.sched_getaffinity(0))} cores", load()]
    print(", ".join(told) + "\n")


def load() -> str:
    """Runnable processes of the last 5 minutes, ours among them: the load that disturbed the
    figures."""
    return f"load {os.getloadavg()[1]:.1f}"


# -- processes


def read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def hold(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def kill_workers(directory: Path) -> None:
    """Processes that their launcher left behind; their command line holds the directory's name."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        if f"{WORKER}\0{directory}" in read(f"/proc/{name}/cmdline"):
            with suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)


def wait_for_deaths(pidfds: Sequence[int]) -> None:
    for pidfd in pidfds:
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        waiter.poll(HANG_S * 1000)
        os.close(pidfd)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("a launcher hangs")
        time.sleep(0.0005)


if __name__ == "__main__":
    sys.exit(main())
