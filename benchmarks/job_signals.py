"""Is a worker blamed when a whole job gets a signal? `python -m benchmarks.job_signals [ROUNDS]`.

`systemctl stop`, `scancel`, `docker stop`, `killall` and a shutdown signal every process of a job,
in any order. Each round starts the real launcher with two workers on fake GPUs, so that the
telemetry sampler runs, too, and sends TERM, INT, HUP or QUIT to all its processes: workers,
launcher, guardian, sampler. A worker has default dispositions or handlers that exit with 128+N,
chosen at random. No worker may be blamed: no culprit, every row STOPPED, exit code 128+N.

Orders: the workers 30 ms before the rest; the launcher before all others; all in random order, 0 to
5 ms apart; the launcher first and short of CPU (nice 19, for 0.1 s on one core with four busy
processes); the launcher first and stopped (SIGSTOP) until 50 ms after all got the signal.
`--trainer N`: N more rounds of random order with the real trainer on the CPU.
`--killed N`: N rounds of SIGKILL to the launcher alone, at a random moment of its first half second
and beside two busy processes. Each of four workers forks at once, into a session of its own without
an environment; none of the children may outlive the guardian. With `--before CHECKOUT`, the
launcher of another checkout instead.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launcher.contain import processes
from tests.e2e.conftest import TINY
from tests.nvml_fake.build import build, environment, fake_gpu, scenario

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
DEADLINE_S = 60.0
"""A limit for hangs alone."""
WORKER = """\
import os, random, signal
dice = random.Random(os.environ["SEED"] + os.environ["MODEL_CHECK_WORKER"])
if dice.random() < 0.5:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, lambda signum, frame: os._exit(128 + signum))
print("up", flush=True)
while True: signal.pause()
"""
NUM_BURNERS = 4
HIDES = 'env -i setsid cat "$0" & exec cat "$0"'
"""Of a pipe with a name, which nobody opens at the other end."""
NUM_HIDING = 4
KILLED_WITHIN_S = 0.5


@dataclass
class Job:
    """A running launcher and all processes below it."""

    launcher: "subprocess.Popen[bytes]"
    directory: Path
    workers: list[int]
    helpers: list[int]
    """The guardian and the sampler."""

    @property
    def pids(self) -> list[int]:
        return [self.launcher.pid, *self.workers, *self.helpers]


@dataclass
class Tally:
    """Results of the rounds of one order."""

    rounds: int = 0
    nobody: int = 0
    """Rounds in which no worker was blamed."""
    with_code: int = 0
    """Rounds with the exit code 128+N."""
    left: int = 0
    """Processes that outlived the launcher."""
    longest_s: float = 0.0
    """From the first signal to the launcher's end."""
    told: Counter[str] = field(default_factory=Counter)
    """What the reports of the other rounds say."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=100, help="of each order (100)")
    parser.add_argument("--trainer", type=int, default=0, help="rounds with the real trainer (0)")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--killed", type=int, default=0, help="rounds of SIGKILL (0)")
    parser.add_argument("--before", type=Path, default=ROOT, help="the launcher to kill (ours)")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for signum in SIGNALS:  # ignored in a job of a shell's background, and inherited
        signal.signal(signum, signal.SIG_DFL)
    if options.killed:
        with tempfile.TemporaryDirectory() as name:
            play_killed(Path(name), options.before, options.killed, random.Random(options.seed))
    if not options.rounds:
        return
    print("| order | rounds | nobody blamed | exit code 128+N | processes left | longest end, s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        stage = Stage(Path(name), random.Random(options.seed))
        for order in ORDERS:
            stage.play(order, options.rounds, stage.start_command)
        if options.trainer:
            stage.play(at_random, options.trainer, stage.start_trainer, "the real trainer, ")


class Stage:
    """Runs the rounds."""

    def __init__(self, directory: Path, dice: random.Random) -> None:
        self._directory = directory
        self._dice = dice
        gpus = directory / "scenario"
        gpus.write_text(scenario(fake_gpu(i, utilization=0) for i in range(2)))
        self._gpu_env = environment(build(directory), gpus)
        self._own = {"PYTHONPATH": str(ROOT), "MODEL_CHECK_LOCK_DIR": str(directory / "locks")}

    def play(self, order: "Order", rounds: int, start: Callable[[], Job], what: str = "") -> None:
        tally = Tally()
        for _ in range(rounds):
            self._round(order, start(), tally)
        name = what + (order.__doc__ or "").rstrip(".")
        cells = (tally.rounds, tally.nobody, tally.with_code, tally.left, f"{tally.longest_s:.2f}")
        print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)
        for told, count in tally.told.most_common():
            print(f"  {count} x {told}", file=sys.stderr, flush=True)

    def _round(self, order: "Order", job: Job, tally: Tally) -> None:
        signum = self._dice.choice(SIGNALS)
        rows = [processes.read_process(pid) for pid in job.pids]
        started = time.monotonic()
        order(job, signum, self._dice)
        code = job.launcher.wait(DEADLINE_S)
        tally.longest_s = max(tally.longest_s, time.monotonic() - started)
        tally.rounds += 1
        tally.with_code += code == 128 + signum
        tally.left += sum(row is not None and lives(row) for row in rows)
        report = json.loads((job.directory / "report.json").read_text())
        verdicts = {worker["verdict"] for worker in report["workers"]}
        if not report["culprits"] and verdicts == {"STOPPED"}:
            tally.nobody += 1
        else:
            rest = ", ".join(f"{w['name']} {w['verdict']}" for w in report["workers"])
            tally.told[
                f"{signum.name}: {report['verdict']} {code}: {report['summary']}; {rest}"
            ] += 1

    def start_command(self) -> Job:
        """Two workers on fake GPUs, which report when they are up."""
        env = self._gpu_env | self._own | {"SEED": f"{self._dice.random()}"}
        command = ("--", sys.executable, "-I", "-S", "-c", WORKER)
        return self._start(env, ("launch.telemetry_interval_s=0.05", *command), "up", helpers=2)

    def start_trainer(self) -> Job:
        """Two workers with the real trainer on the CPU, after their third step."""
        config = self._directory / "tiny.json"
        config.write_text(json.dumps(TINY))
        env = {**os.environ, **self._own, "DATASET_CACHE_DIR": str(self._directory / "cache")}
        env["MODEL_CHECK_HISTORY_FILE"] = ""
        return self._start(
            env, ("--config", str(config), "--max-steps=1000000"), "Step [2/", helpers=1
        )

    def _start(self, env: dict[str, str], more: Sequence[str], up: str, helpers: int) -> Job:
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        argv = [sys.executable, "-m", "launcher", "--run-dir", str(directory / "run"), *more]
        output = (directory / "output").open("wb")
        launcher = subprocess.Popen(
            argv, cwd=directory, env=env, stdout=output, stderr=output, start_new_session=True
        )
        output.close()
        logs = [directory / "run" / f"{worker}{i}.log" for worker in ("gpu", "cpu") for i in (0, 1)]
        wait_until(lambda: sum(up in read(log) for log in logs) == 2, directory)
        wait_until(lambda: len(processes.children(launcher.pid)) >= 2 + helpers, directory)
        time.sleep(0.05)  # guardian and sampler are past their start
        children = processes.children(launcher.pid)
        lines = {pid: processes.read_proc(pid, "cmdline") for pid in children}
        workers = [pid for pid, line in lines.items() if b"from launcher." not in line]
        others = [pid for pid in children if pid not in workers]
        return Job(launcher, directory / "run", workers, others)


def play_killed(directory: Path, checkout: Path, rounds: int, dice: random.Random) -> None:
    """Prints how many rounds left a process alive."""
    num_hidden, left = 0, []
    with burnt(None, 2):
        for index in range(rounds):
            was_hidden, found = killed_round(directory / str(index), checkout, dice)
            num_hidden += was_hidden
            left += [len(found)] if found else []
    print(
        f"{rounds} SIGKILLs of the launcher, {num_hidden} when a child was hidden already: "
        f"{len(left)} left {sum(left)} processes",
        flush=True,
    )


def killed_round(directory: Path, checkout: Path, dice: random.Random) -> tuple[bool, list[int]]:
    """Whether a child was hidden when the launcher was killed, and who outlived the guardian."""
    directory.mkdir()
    held, mark = directory / "held", f"KILLED_ROUND={directory}"
    os.mkfifo(held)
    command = (sys.executable, "-m", "launcher", "--device", "cpu", "--workers", str(NUM_HIDING))
    launcher = subprocess.Popen(
        (*command, "--run-dir", str(directory / "run"), "--", "sh", "-c", HIDES, str(held)),
        env={**os.environ, "PYTHONPATH": str(checkout), "KILLED_ROUND": str(directory)},
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: bool(processes.children(launcher.pid)), directory)
    time.sleep(dice.uniform(0, KILLED_WITHIN_S))
    was_hidden = any(row.session == row.pid and row.ppid != launcher.pid for row in holders(held))
    launcher.kill()
    launcher.wait()
    wait_until(  # the guardian and the workers have the launcher's environment
        lambda: not any(processes.is_tagged(pid, mark) for pid in processes.listed_pids()),
        directory,
    )
    left = [row.pid for row in holders(held)]
    send(left, signal.SIGKILL)
    return was_hidden, left


def holders(held: Path) -> list[processes.Process]:
    """The living processes that wait for this pipe."""
    rows = [
        row
        for row in processes.process_table()
        if os.fsencode(held) in processes.read_proc(row.pid, "cmdline")
    ]
    return [row for row in rows if b"launcher" not in processes.read_proc(row.pid, "cmdline")]


def wait_until(is_so: Callable[[], bool], directory: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(read(directory / "output"))
        time.sleep(0.005)


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def lives(row: processes.Process) -> bool:
    now = processes.read_process(row.pid)
    return now is not None and now.started_ticks == row.started_ticks and now.state != "Z"


# -- orders


Order = Callable[[Job, signal.Signals, random.Random], None]


def worker_first(job: Job, signum: signal.Signals, dice: random.Random) -> None:
    """workers first, the rest 30 ms later."""
    send(dice.sample(job.workers, len(job.workers)), signum)
    time.sleep(0.03)
    send([job.launcher.pid, *job.helpers], signum)


def launcher_first(job: Job, signum: signal.Signals, dice: random.Random) -> None:
    """launcher first."""
    send(job.pids, signum)


def at_random(job: Job, signum: signal.Signals, dice: random.Random) -> None:
    """random order."""
    for pid in dice.sample(job.pids, len(job.pids)):
        send([pid], signum)
        time.sleep(dice.uniform(0, 0.005))


def starved(job: Job, signum: signal.Signals, dice: random.Random) -> None:
    """launcher first and short of CPU."""
    core = min(os.sched_getaffinity(0))
    with burnt(core):
        os.sched_setaffinity(job.launcher.pid, {core})
        os.setpriority(os.PRIO_PROCESS, job.launcher.pid, 19)
        autogroup = Path(
            f"/proc/{job.launcher.pid}/autogroup"
        )  # nice counts within a session alone
        if autogroup.exists():
            autogroup.write_text("19")
        time.sleep(0.05)
        send(job.pids, signum)
        time.sleep(0.1)


def frozen(job: Job, signum: signal.Signals, dice: random.Random) -> None:
    """launcher first and stopped meanwhile."""
    send([job.launcher.pid], signal.SIGSTOP)
    send(job.pids, signum)
    time.sleep(0.05)
    send([job.launcher.pid], signal.SIGCONT)


ORDERS: tuple[Order, ...] = (worker_first, launcher_first, at_random, starved, frozen)


def send(pids: Sequence[int], signum: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue  # it obeyed before its turn came


@contextmanager
def burnt(core: int | None, count: int = NUM_BURNERS) -> Iterator[None]:
    """Processes that keep this core, or any core, busy. Each has a session of its own: the kernel
    may divide a core among sessions."""
    command = (sys.executable, "-I", "-S", "-c", "while True: pass")
    burners = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    for burner in burners if core is not None else ():
        os.sched_setaffinity(burner.pid, {core})
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    main()
