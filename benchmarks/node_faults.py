"""Two nodes, a cable between them, one fault a round: does each side end in time, with the right
words?

    python -m benchmarks.node_faults --rounds 20 [--kinds cut,lose,...] [--seed S]

As root: each node is a network namespace. A round is one job of `--mode ddp` with one CPU rank a
node, a launcher on each as srun starts them, or torchrun on each (kinds `torchrun_*`); the step at
which the fault comes is drawn by a seed. Printed for each kind: right rounds, and the seconds from
the fault to the end of the last launcher that was left (of torchrun: to the words of the last
rank), median and longest.

- cut: the cable is pulled; lose: packets are lost, and nothing says so; freeze: SIGSTOP for all
  processes of a node; kill, kill_first: SIGKILL for all of the second, of the first node. The other
  side (both, of a cut) must name the node, blame nobody and end with 1.
- exit7, sigkill, nan, hang: of a rank on the second node. Both sides must name it and end with its
  code.
- port: another program has the port. Both sides must say so and end with 2.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from model_check.errors import EXIT_HANG, EXIT_NON_FINITE, EXIT_PEER_LOST, EXIT_USAGE
from tests.e2e.conftest import TINY, Launcher
from tests.e2e.nodes import Job, Node, cable, pids_on
from tests.e2e.test_ddp import LONG, SOON
from tests.e2e.test_run import read_until

LIMIT_S = 90
NUM_STEPS = 30
DRILLS = {"exit7": 7, "sigkill": 137, "nan": EXIT_NON_FINITE, "hang": EXIT_HANG}


class Verdict(NamedTuple):
    is_right: bool
    told: str
    seconds: float
    """From the fault to the end."""


def cut(_: Node, second: Node) -> None:
    second.cut()


def lose(first: Node, second: Node) -> None:
    first.lose(second)
    second.lose(first)


def freeze(_: Node, second: Node) -> None:
    for pid in pids_on(second):
        os.kill(pid, signal.SIGSTOP)


def kill(_: Node, second: Node) -> None:
    for pid in pids_on(second):
        os.kill(pid, signal.SIGKILL)


def kill_first(first: Node, second: Node) -> None:
    kill(second, first)


FAULTS: dict[str, Callable[[Node, Node], None]] = {
    "cut": cut,
    "lose": lose,
    "freeze": freeze,
    "kill": kill,
    "kill_first": kill_first,
}
LEFT = {"cut": (0, 1), "lose": (0, 1), "freeze": (0,), "kill": (0,), "kill_first": (1,)}
"""The nodes that have something to say afterwards."""
RANKS_WORDS = "error: another rank"
BY_TORCHRUN = tuple(f"torchrun_{kind}" for kind in FAULTS)
KINDS = (*FAULTS, *DRILLS, "port", *BY_TORCHRUN)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    names = parser.parse_args(argv)
    draw, began = random.Random(names.seed), time.monotonic()
    found: dict[str, list[Verdict]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(names.rounds):
            for kind in names.kinds.split(","):
                place = Path(scratch) / f"{kind}_{number}"
                verdict = _round(kind, place, Path(scratch) / "cache", draw)
                found[kind].append(verdict)
                if not verdict.is_right:
                    print(f"WRONG {kind}: {verdict.told}", flush=True)
    print(f"{'fault':20} {'right':>8}  {'median s':>8} {'longest':>8}")
    for kind, verdicts in found.items():
        right, seconds = sum(v.is_right for v in verdicts), [v.seconds for v in verdicts]
        share = f"{right}/{len(verdicts)}"
        print(f"{kind:20} {share:>8}  {median(seconds):8.1f} {max(seconds):8.1f}")
    print(f"seed {names.seed}, {time.monotonic() - began:.0f} s")


def _round(kind: str, place: Path, cache: Path, draw: random.Random) -> Verdict:
    place.mkdir()
    config = place / "tiny.json"
    config.write_text(json.dumps(TINY))
    with cable() as nodes, ExitStack() as stack:
        launcher = Launcher(place, cache, config)
        stack.callback(_end_all, nodes)
        job, step = Job(launcher, nodes), draw.randrange(1, NUM_STEPS)
        if kind in DRILLS:
            return _drilled(job, kind, step)
        if kind == "port":
            return _refused(job)
        return _disturbed(job, kind.removeprefix("torchrun_"), step, kind in BY_TORCHRUN)


def _drilled(job: Job, kind: str, step: int) -> Verdict:
    drill = f"debug.drill={'kill' if kind == 'sigkill' else kind}@{step}:CPU0"
    first, second = job.nodes
    common = ("training.max_steps=1000", SOON)
    processes = [*job.start(*common, only=first), *job.start(*common, drill, only=second)]
    read_until(processes[0], f"Step [{step - 1}/")
    began = time.monotonic()
    _wait(processes)
    summaries = [_report(job, node)["summary"] for node in (0, 1)]
    codes = [process.returncode for process in processes]
    is_right = all("CPU0 on n2 (rank 1) failed first" in text for text in summaries[:1])
    is_right &= codes == [DRILLS[kind]] * 2 and "CPU0" in summaries[1]
    return Verdict(is_right, f"{codes} {summaries}", time.monotonic() - began)


def _refused(job: Job) -> Verdict:
    first = job.nodes[0]
    code = (
        f"import socket, time; s = socket.create_server(({first.address!r}, 28999));"
        "print('Step [', flush=True); time.sleep(600)"
    )
    thief = subprocess.Popen(first.inside("python3", "-c", code), stdout=subprocess.PIPE, text=True)
    read_until(thief, "Step [")
    began = time.monotonic()
    processes = job.start(MASTER_PORT="28999")
    _wait(processes)
    thief.kill()
    thief.wait()
    codes = [process.returncode for process in processes]
    summaries = [_report(job, node)["summary"] for node in (0, 1)]
    is_right = codes == [EXIT_USAGE] * 2 and all("port 28999 of" in text for text in summaries)
    return Verdict(is_right, f"{codes} {summaries}", time.monotonic() - began)


def _disturbed(job: Job, kind: str, step: int, by_torchrun: bool) -> Verdict:
    settings = (LONG, SOON, "logging.all_ranks=true")
    processes = job.torchrun(*settings) if by_torchrun else job.start(*settings)
    read_until(processes[0], f"Step [{step}/")
    began = time.monotonic()
    FAULTS[kind](*job.nodes)
    left = LEFT[kind]
    if by_torchrun:  # its agents wait for each other for minutes: the ranks are what is ours
        outputs = [read_until(processes[node], RANKS_WORDS) for node in left]
    else:
        outputs = _wait([processes[node] for node in left])
    seconds, rights, told = time.monotonic() - began, [], []
    for node, output in zip(left, outputs, strict=True):
        if by_torchrun:
            text = next((s for s in output.splitlines() if RANKS_WORDS in s), output[-2000:])
            # torchrun gives numbers of its own.
            rights.append(" not heard for " in text and " node " in text)
        else:
            report = _report(job, node)
            text = report["summary"]
            rights.append(f"node n{2 - node} " in text and not report["culprits"])
            rights.append(processes[node].returncode == EXIT_PEER_LOST)
        told.append(text)
    return Verdict(all(rights), f"step {step}: {told}", seconds)


def _wait(processes: "Sequence[subprocess.Popen[str]]") -> list[str]:
    return [process.communicate(timeout=LIMIT_S)[0] for process in processes]


def _report(job: Job, node: int) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((job.directory(node) / "report.json").read_text())
    return report


def _end_all(nodes: Sequence[Node]) -> None:
    for node in nodes:
        for pid in pids_on(node):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
