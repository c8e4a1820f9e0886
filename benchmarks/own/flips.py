"""Is a flipped bit of a person's own training seen, when, and is it named: by the comparison of a
run, and by the tolerances of torch_validator (loss, norm of gradients, norm of weights, beside
those of an earlier run: relative 1e-5, 1e-4, 1e-5)."""

import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from launcher.verdict.live import Watch
from launcher.verdict.own_command import CheckedCommand
from launcher.verdict.record import Stop
from model_check.events import (
    AskVectors,
    Break,
    Command,
    Event,
    NonFinite,
    Phase,
    Step,
    Vectors,
)
from tests.instrument.harness import Ran, forks, keep_in_step, watched

SCRIPT = Path(__file__).with_name("gpt.py")
NUM_STEPS = 10
KINDS = ("weight", "gradient", "exp_avg", "exp_avg_sq", "activation")
PLACES = ("wte", "h.0.ln_1", "h.0.fc", "h.0", "h.1.qkv", "h.1.out", "h.1", "head")
"""Modules whose output is spoilt."""
WORKERS = ("CPU0", "CPU1", "CPU2")
SUSPECT = "CPU1"
TOLERANCES = (1e-5, 1e-4, 1e-5)


class Flip(NamedTuple):
    kind: str
    step: int
    name: str
    value: int
    bit: int


class Seen(NamedTuple):
    step: int
    is_named: bool = False
    said: str = ""


@dataclass
class Told:
    """What a run told: events, and its own numbers of each step."""

    events: list[Event]
    numbers: list[list[float]]

    @property
    def vectors(self) -> dict[int, Vectors]:
        return {e.step: e for e in self.events if isinstance(e, Vectors) and e.fp}

    def at(self, step: int) -> list[Event]:
        kinds = Step | Break | NonFinite
        return [e for e in self.events if isinstance(e, kinds) and e.step == step]


def main(num_flips: int, seed: int) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        clean = trained(Path(directory) / "clean", None)
        (_, names) = json.loads(clean.stdout.splitlines()[-1])
        flips = drawn(num_flips, names, seed)
        with_flips = [
            (flip, told_by(trained(Path(directory) / str(number), flip)))
            for number, flip in enumerate(flips)
        ]
    forks().close()
    cases = [(flip, *judged(flip, told, told_by(clean))) for flip, told in with_flips]
    report(cases)
    print(f"{num_flips} flips, seed {seed}: {time.monotonic() - began:.0f} s")
    return 0


def drawn(num: int, names: Sequence[str], seed: int) -> list[Flip]:
    """Each kind as often as any other."""
    rng = random.Random(seed)
    return [
        Flip(
            kind,
            rng.randrange(1, NUM_STEPS - 1),
            rng.choice(PLACES if kind == "activation" else names),
            rng.randrange(1 << 30),
            rng.randrange(32),
        )
        for kind in (KINDS[number % len(KINDS)] for number in range(num))
    ]


def trained(directory: Path, flip: Flip | None) -> Ran:
    env = {"OWN_STEPS": str(NUM_STEPS), "OWN_NUMBERS": "1", "OWN_NAMES": "1"}
    if flip is not None:
        env["OWN_FLIP"] = " ".join(map(str, flip))
    return watched(SCRIPT, directory, env=env, answer=_ask_for_all)


def _ask_for_all(event: Event) -> list[Command]:
    asked = [AskVectors(step=event.step)] if isinstance(event, Step) else []
    return [*asked, *keep_in_step(event)]


def told_by(ran: Ran) -> Told:
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return Told(ran.events, [line for line in lines if len(line) == 3])


def judged(flip: Flip, told: Told, clean: Told) -> tuple[bool, Seen | None, Seen | None]:
    """Whether it left a trace, what a run finds, and what tolerances find."""
    return _is_other(told, clean), by_run(flip, told, clean), by_tolerances(flip, told, clean)


def _is_other(told: Told, clean: Told) -> bool:
    one, other = ([e.fp for e in each.events if isinstance(e, Step)] for each in (told, clean))
    return one != other or any(isinstance(e, Break) for e in told.events)


def by_run(flip: Flip, told: Told, clean: Told) -> Seen | None:
    """Three workers, as the launcher compares them."""
    watch = Watch(dict.fromkeys(WORKERS, "cpu"), 2, command=CheckedCommand())
    by_worker = {name: told if name == SUSPECT else clean for name in WORKERS}
    for name, each in by_worker.items():
        for event in each.events:
            if isinstance(event, Phase):
                watch.on_event(name, event)
    for step in range(NUM_STEPS):
        for name, each in by_worker.items():
            for event in each.at(step):
                if isinstance(event, NonFinite):  # its process ends with it
                    said = f"{event.where}: {event.origin or event.names}"
                    return Seen(step, names_it(flip, said), said)
                stop = watch.on_event(name, event) or _answer(watch, by_worker)
                if stop is not None:
                    said = str(stop.reason)
                    is_named = stop.culprits == (SUSPECT,) and names_it(flip, said)
                    return Seen(step, is_named, said)
    return None


def _answer(watch: Watch, by_worker: Mapping[str, Told]) -> Stop | None:
    """As its workers would, until the watch has heard enough."""
    for name, command in watch.commands():
        if isinstance(command, AskVectors):
            vectors = by_worker[name].vectors
            stop = watch.on_event(name, vectors.get(command.step, Vectors(step=command.step)))
            if stop is not None:
                return stop
    return None


def names_it(flip: Flip, said: str) -> bool:
    """The tensor; of an activation the block."""
    if flip.kind != "activation":
        return flip.name in said or flip.name.rpartition(".")[0] in said
    return ".".join(flip.name.split(".")[:2]) in said


def by_tolerances(flip: Flip, told: Told, clean: Told) -> Seen | None:
    for step, (numbers, golden) in enumerate(zip(told.numbers, clean.numbers, strict=False)):
        if any(map(_is_off, numbers, golden, TOLERANCES)):
            return Seen(step)
    return Seen(len(told.numbers)) if len(told.numbers) < len(clean.numbers) else None


def _is_off(number: float, golden: float, tolerance: float) -> bool:
    return not math.isfinite(number) or abs(number - golden) > tolerance * abs(golden)


def report(cases: Sequence[tuple[Flip, bool, Seen | None, Seen | None]]) -> None:
    head = f"{'kind':11} {'flips':>5} {'trace':>5}"
    for way in ("watch", "tolerances"):
        head += f" | {way + ': seen':>16} {'same step':>9} {'later':>5} {'named':>5}"
    print(head)
    for kind in (*KINDS, "all"):
        of_kind = [case for case in cases if kind in (case[0].kind, "all")]
        row = f"{kind:11} {len(of_kind):5} {sum(case[1] for case in of_kind):5}"
        for way in (2, 3):
            found = [(case[0], case[way]) for case in of_kind if case[way] is not None]
            when = Counter(seen.step > flip.step for flip, seen in found)
            named = sum(seen.is_named for _, seen in found)
            row += f" | {len(found):16} {when[False]:9} {when[True]:5} {named:5}"
        print(row)
    for flip, has_trace, ours, _ in cases:
        if has_trace and (ours is None or not ours.is_named or ours.step < flip.step):
            print(f"    {' '.join(map(str, flip))}: {ours.said if ours else 'not seen'}")
