"""What the watch costs: steps of a script that is watched and of one that is not, in turns; and how
long both take to their first step."""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from tests.instrument.harness import Ran, plain, watched

SCRIPT = Path(__file__).with_name("gpt.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SHAPES = {
    "nano 4x128x256": 8,
    "llama 4x128x256": 8,
    "nano 6x384x256": 2,
}
"""Shape -> the steps of a block, which takes a second or two."""
_UNLIMITED = 1 << 40
"""A permit for all steps."""


class Took(NamedTuple):
    """Seconds, by the clock and of CPU."""

    clock: float
    cpu: float


class _Script:
    """Runs in a process of its own, so many steps at a time."""

    def __init__(self, go: IO[str], took: IO[str]) -> None:
        self._go, self._took = go, took

    def run(self, num_steps: int) -> Took:
        print(num_steps, file=self._go, flush=True)
        return Took(*json.loads(self._took.readline()))

    def end(self) -> None:
        self._go.close()


@contextmanager
def _both(shape: str) -> Iterator[dict[str, _Script]]:
    """`plain` and `watched`; each waits until it is asked for steps."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadPoolExecutor(2) as pool,
        ExitStack() as stack,
    ):
        scripts, runs = {}, []
        for name in ("plain", "watched"):
            go, took = (Path(directory) / f"{name}.{what}" for what in ("go", "took"))
            for fifo in (go, took):
                os.mkfifo(fifo)
            env = ONE_THREAD | {"OWN_SHAPE": shape, "OWN_GO": str(go), "OWN_TOOK": str(took)}
            runs.append(pool.submit(_run, name, Path(directory) / name, env))
            files = stack.enter_context(open(go, "w")), stack.enter_context(open(took))
            scripts[name] = _Script(*files)
        yield scripts
        for script in scripts.values():
            script.end()
        for run in runs:
            run.result()


def _run(name: str, directory: Path, env: Mapping[str, str]) -> Ran:
    directory.mkdir(exist_ok=True)
    if name == "plain":
        ran = plain(SCRIPT, directory, sys.executable, str(SCRIPT), env=env)
    else:
        ran = watched(SCRIPT, directory, env=env, is_forked=False, first=_UNLIMITED)
    if ran.exit_code:
        raise RuntimeError(ran.stderr)
    return ran


def steps(num_blocks: int) -> None:
    print(f"{'shape':16} {'plain':>9} {'watched : plain, clock':>26} {'CPU':>26}")
    for shape, num_steps in SHAPES.items():
        with _both(shape) as scripts:
            for script in scripts.values():
                script.run(3)
            pairs = [_pair(scripts, num_steps, number % 2) for number in range(num_blocks)]
        ms = statistics.median(off.clock for off, _ in pairs) * 1000 / num_steps
        clock = _spread([on.clock / off.clock for off, on in pairs])
        cpu = _spread([on.cpu / off.cpu for off, on in pairs])
        print(f"{shape:16} {ms:6.1f} ms {clock:>26} {cpu:>26}", flush=True)


def _pair(scripts: Mapping[str, _Script], num_steps: int, is_watched_first: int) -> list[Took]:
    """Without the watch, and with it."""
    order = sorted(scripts, reverse=bool(is_watched_first))
    took = {name: scripts[name].run(num_steps) for name in order}
    return [took["plain"], took["watched"]]


def start(num_starts: int) -> None:
    env = ONE_THREAD | {"OWN_STEPS": "1", "OWN_START": "1"}
    taken: dict[str, list[Took]] = {"plain": [], "watched": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(num_starts):
            for name, of_name in taken.items():
                began = time.monotonic()
                ran = _run(name, Path(directory) / f"{name}{number}", env)
                at, cpu = json.loads(ran.stdout.splitlines()[0])
                of_name.append(Took(at - began, cpu))
    for number, clock in enumerate(("clock", "CPU")):
        off, on = ([each[number] for each in of_name] for of_name in taken.values())
        more = _spread([b - a for a, b in zip(off, on, strict=True)])
        middle = statistics.median(off)
        print(f"from the start to the first step, {clock}: {middle:.2f} s; watched, more: {more} s")


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
