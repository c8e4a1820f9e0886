"""Does each of several runs in one checkpoint directory keep its files, and find them again?

    python -m benchmarks.shared_directory [--rounds 30] [--seed 0] [--only N] [--tree CHECKOUT]
        [--differ seed|rate] [--kinds hand,replicate,node,train,ddp,fsdp] [--keep DIR]

A round starts 2 or 3 runs in one directory: `pretrain_main.py` by hand, `run.sh`, `run.sh train`,
ddp, fsdp, or a launcher with another host name ("node"; it needs root). They differ in system.seed,
or only in the learning rate, and in what they save and keep. Each is held at one of its saves until
all have come to theirs, so that they overlap in every round; then they go on, all at once or one
after the other.

When they have ended, each must have left all that its settings promise, with its own states to the
bit, in the documented directory or in one that it has named. A run may refuse to start, before its
first step, with exit code 2. Then each is resumed with its own command line and `--resume auto`:
alone, in another order, then all at once. It must go on from its own last step to the bits of a run
that was never disturbed. Faults, one line each; the exit code is 1 where there is one:

    exit         it ended with another code than 0
    late         it refused, but after its first step, or it left files, or with another code
    lost         a file that it should have left is not there, or is another run's
    broken       a file does not load
    bits         a file or a loss is not the undisturbed run's
    elsewhere    its files lie in a directory that is neither the documented one nor named
    too many     more files than training.keep_last allows, or temporary ones
    another's    it went on from another run's state
    older        it went on from an older state than its last one
    not found    it began at step 0, although its own state is there
    refused      it would not resume, and did not name the directory of its own state

Allowed, and counted: `refused at start`, and `told where`: it would not resume, but named the
directory of its own state.
"""

import argparse
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkpoint_runs import (
    CHECKPOINTS,
    DEADLINE_S,
    KINDS,
    Broken,
    Done,
    Lab,
    Owner,
    Running,
    Saved,
    checkpoints_below,
    leftovers_below,
    parser_of,
    read,
)

ALLOWED = ("refused at start", "told where")
REFUSED = 2
MORE_STEPS = 4
"""That each resume adds."""
RELEASES = ("all at once", "one after the other", "the last one first")
RATES = (1e-3, 2e-3, 3e-3)


class Plan(NamedTuple):
    """One run of a round."""

    name: str
    kind: str
    owner: Owner
    interval: int | None
    keep: int | None
    has_last: bool
    steps: int

    def arguments(self, steps: int) -> list[str]:
        values = {"save_interval": self.interval, "keep_last": self.keep, "max_steps": steps}
        given = [f"training.{key}={value or 'null'}" for key, value in values.items()]
        return [*self.owner.arguments, *given, f"training.save_last={str(self.has_last).lower()}"]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {' '.join(self.arguments(self.steps))})"

    @property
    def documented(self) -> Path:
        isolated = self.kind in ("replicate", "node", "train")
        return Path(CHECKPOINTS, "cpu0") if isolated else Path(CHECKPOINTS)

    def promised(self, start: int, steps: int, before: Sequence[Saved]) -> set[str]:
        """The names that a run from step `start` leaves beside those of its lineage."""
        saved = {each.step for each in before if each.name != "last"}
        if self.interval is not None:
            saved |= {n for n in range(start + 1, steps + 1) if n % self.interval == 0}
        kept = sorted(saved)[-self.keep if self.keep else 0 :]
        last = {"last"} if self.has_last or any(each.name == "last" for each in before) else set()
        return {f"step_{step}" for step in kept} | last


class Round(NamedTuple):
    plans: list[Plan]
    is_in_turn: bool
    """Each is started when the one before is held; else all are started at once."""
    hold_at: list[int]
    """At which file that it creates each is held."""
    release: str
    resume_order: list[int]


class Fault(NamedTuple):
    kind: str
    text: str


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    numbers = range(options.rounds) if options.only is None else [options.only]
    began, counts = time.monotonic(), Counter[str]()
    num_bad = 0
    with tempfile.TemporaryDirectory(prefix="shared_directory_") as scratch:
        lab = Lab(Path(scratch) if options.keep is None else options.keep, options.tree)
        with ThreadPoolExecutor(options.jobs) as pool:
            plays = pool.map(lambda number: play(lab, number, options), numbers)
            for number, (drawn, found) in zip(numbers, plays, strict=True):
                counts.update(fault.kind for fault in found)
                num_bad += any(fault.kind not in ALLOWED for fault in found)
                _print_round(number, drawn, found)
    for kind, count in sorted(counts.items()):
        print(f"{kind:18} {count}{' (allowed)' if kind in ALLOWED else ''}")
    took_s = time.monotonic() - began
    print(f"seed {options.seed}: {num_bad} of {len(numbers)} rounds with a fault, {took_s:.0f} s")
    return 1 if num_bad else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, 30)
    parser.add_argument("--differ", choices=["seed", "rate"], help="default: drawn")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--keep", type=Path, help="an empty directory, which is left as it is")
    options = parser.parse_args(argv)
    if os.geteuid() != 0 and "node" in options.kinds:
        print("no run has another host name: that needs root")
        options.kinds.remove("node")
    return options


def draw_round(number: int, options: argparse.Namespace) -> Round:
    draw = random.Random(f"{options.seed}/{number}")
    num_runs = draw.choice((2, 2, 3))
    # Half of the rounds are of one kind: such runs meet in one place.
    one = draw.choice(options.kinds)
    kinds = [draw.choice(options.kinds) if number % 2 else one for _ in range(num_runs)]
    differ = draw.choice(("seed", "rate"))
    differ = options.differ or differ
    plans = []
    for index, kind in enumerate(kinds):
        by_seed = differ == "seed"
        owner = Owner(11 + index * by_seed, RATES[0 if by_seed else index])
        interval = draw.choice((1, 2, 3, None))
        has_last = interval is None or draw.random() < 0.5
        steps, keep = draw.randrange(6, 13), draw.choice((None, 1, 3))
        keep = None if interval is None else keep
        plans.append(Plan("abc"[index], kind, owner, interval, keep, has_last, steps))
    hold_at = [draw.choice((1, 1, 2)) for _ in plans]
    # A run that saves only at its end creates one file: it would be over before the next begins.
    hold_at = [1 if p.interval is None else at for p, at in zip(plans, hold_at, strict=True)]
    order = draw.sample(range(num_runs), num_runs)
    return Round(plans, draw.random() < 0.5, hold_at, draw.choice(RELEASES), order)


def _print_round(number: int, drawn: Round, found: Sequence[Fault]) -> None:
    faults = [fault for fault in found if fault.kind not in ALLOWED]
    kinds = ", ".join(plan.kind for plan in drawn.plans)
    differ = "seeds" if drawn.plans[0].owner.seed != drawn.plans[1].owner.seed else "rates"
    print(f"round {number}: {'FAULT' if faults else 'right'}: {kinds}; other {differ}", flush=True)
    if faults:
        print(f"    started {'in turn' if drawn.is_in_turn else 'at once'}", end="")
        print(f", held at file {drawn.hold_at}, released {drawn.release}")
        for plan in drawn.plans:
            print(f"    {plan}")
    for fault in found:
        allowed = " (allowed)" if fault.kind in ALLOWED else ""
        print(f"    {fault.kind}{allowed}: {fault.text}", flush=True)


def play(lab: Lab, number: int, options: argparse.Namespace) -> tuple[Round, list[Fault]]:
    drawn = draw_round(number, options)
    game = Game(lab, drawn, lab.place(f"round{number}"))
    return drawn, list(game.play())


class Game:
    """One round: what each run has left so far, by its owner."""

    def __init__(self, lab: Lab, drawn: Round, place: Path) -> None:
        self.lab, self.drawn, self.place = lab, drawn, place
        self.left: dict[Owner, list[Saved]] = {plan.owner: [] for plan in drawn.plans}
        self.known: dict[Path, Saved] = {}
        """Before the runs that are judged were started."""

    def play(self) -> Iterator[Fault]:
        plans = self.drawn.plans
        done = self._together("first", plans, 0)
        going_on = []
        yield from self._look()
        for plan in plans:
            found = list(self._judge_first(plan, done[plan.name]))
            yield from found
            if self.left[plan.owner] and not any(f.kind in ("exit", "late") for f in found):
                going_on.append(plan)
        in_order = [plans[index] for index in self.drawn.resume_order]
        still = []
        for plan in (plan for plan in in_order if plan in going_on):
            before = dict(self.left)
            if not before[plan.owner]:
                continue  # what another one lost of it is told
            run = self._start("alone", plan, 1).finish()
            yield from self._look()
            yield from self._judge_others([plan], before)
            found = list(self._judge_resume(plan, run, before[plan.owner], 1))
            yield from found
            if not found:
                still.append(plan)
        if len(still) > 1:
            before = dict(self.left)
            done = self._together("again", still, 2)
            yield from self._look()
            yield from self._judge_others(still, before)
            for plan in still:
                yield from self._judge_resume(plan, done[plan.name], before[plan.owner], 2)

    def _start(self, phase: str, plan: Plan, num_before: int, **calls: str) -> Running:
        """`num_before`: runs of this plan that have ended."""
        arguments = plan.arguments(plan.steps + MORE_STEPS * num_before)
        arguments += ["--resume", "auto"] if num_before else []
        return self.lab.start(plan.kind, self.place, f"{phase}_{plan.name}", arguments, **calls)

    def _together(self, phase: str, plans: Sequence[Plan], num_before: int) -> dict[str, Done]:
        """Each is held at a save until all have come to one, or have ended."""
        runs: list[Running] = []
        gates = [self.place / f"{phase}_{plan.name}.go" for plan in plans]
        for plan, gate, at in zip(plans, gates, self.drawn.hold_at, strict=False):
            calls = {"CALLS_AT": f"create:{at}", "CALLS_DO": f"hold:{gate}"}
            runs.append(self._start(phase, plan, num_before, **calls))
            if self.drawn.is_in_turn:
                _wait_until_held(runs)
        _wait_until_held(runs)
        numbers = list(range(len(plans)))
        for number in reversed(numbers) if self.drawn.release == RELEASES[2] else numbers:
            gates[number].touch()
            if self.drawn.release != RELEASES[0]:
                runs[number].finish()
        return {plan.name: run.finish() for plan, run in zip(plans, runs, strict=True)}

    def _look(self) -> Iterator[Fault]:
        """Read all that lies in the directory now."""
        self.known = {saved.path: saved for each in self.left.values() for saved in each}
        self.left = {owner: [] for owner in self.left}
        for path in checkpoints_below(self.place / CHECKPOINTS):
            try:
                saved = read(path)
            except Broken as error:
                yield Fault("broken", str(error))
                continue
            if saved.owner in self.left:
                self.left[saved.owner].append(saved)
            else:
                yield Fault("broken", f"{path}: of no run of this round: {saved.owner}")
        for path in leftovers_below(self.place / CHECKPOINTS):
            yield Fault("too many", f"{path} is left")

    def _judge_others(
        self, ran: Sequence[Plan], before: dict[Owner, list[Saved]]
    ) -> Iterator[Fault]:
        """Of those that did not run, nothing may have changed."""
        for plan in self.drawn.plans:
            was, now = set(before[plan.owner]), set(self.left[plan.owner])
            if plan not in ran and (gone := was - now):
                who = " and ".join(each.name for each in ran)
                yield Fault("lost", f"{plan.name}: {_names({s.name for s in gone})}, by {who}")

    def _judge_first(self, plan: Plan, run: Done) -> Iterator[Fault]:
        if run.code == 0:
            yield from self._judge_files(plan, run, plan.promised(0, plan.steps, []))
        elif run.first_step is None and run.code == REFUSED and not self.left[plan.owner]:
            yield Fault("refused at start", f"{plan.name}: {run.error}")
        else:
            is_refusal = run.code == REFUSED and "error: " in run.output
            yield Fault("late" if is_refusal else "exit", f"{plan.name}: {run.code}: {run.error}")

    def _judge_files(self, plan: Plan, run: Done, promised: set[str]) -> Iterator[Fault]:
        own = self.left[plan.owner]
        undisturbed = self.lab.undisturbed(plan.kind, plan.owner)
        names = {saved.name for saved in own}
        if lost := promised - names:
            yield Fault("lost", f"{plan.name}, {run.calls.stem}: {_names(lost)}")
        if more := names - promised:
            yield Fault("too many", f"{plan.name}, {run.calls.stem}: {_names(more)}")
        for saved in own:
            if saved.state != undisturbed.states[saved.step]:
                yield Fault("bits", f"{plan.name}: {saved.path} ({saved.step} steps)")
        if steps := undisturbed.differing(run.losses()):
            yield Fault("bits", f"{plan.name}, {run.calls.stem}: losses of steps {steps}")
        for directory in {saved.path.parent.relative_to(self.place) for saved in own}:
            if directory != plan.documented and str(directory) not in run.output:
                where = f"{plan.name}, {run.calls.stem}"
                yield Fault("elsewhere", f"{where}: {directory}, which it has not named")

    def _judge_resume(
        self, plan: Plan, run: Done, before: Sequence[Saved], num_before: int
    ) -> Iterator[Fault]:
        if not before:
            return  # what another one lost of it is told
        done = max(saved.step for saved in before)
        own = sorted({str(saved.path.parent.relative_to(self.place)) for saved in before})
        told = f"{plan.name}, {run.calls.stem}: its {done} steps are in {' and '.join(own)}: "
        source = self.known.get(self.place / run.resumed) if run.resumed else None
        if run.code != 0:
            files = {str(saved.path.relative_to(self.place)) for saved in before}
            is_told = run.code == REFUSED and _names_one_of(run, {*own, *files})
            is_early = run.first_step is None
            kind = "told where" if is_told and is_early else "refused" if is_early else "exit"
            yield Fault(kind, told + run.error)
        elif source is not None and source.owner != plan.owner:
            yield Fault("another's", f"{told}resumed from {run.resumed}")
        elif run.first_step == 0:
            yield Fault("not found", told + "began at step 0")
        elif run.first_step != done:
            yield Fault("older", f"{told}began at step {run.first_step}")
        else:
            steps = plan.steps + MORE_STEPS * num_before
            yield from self._judge_files(plan, run, plan.promised(done, steps, before))


def _wait_until_held(runs: Sequence[Running]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not all(run.is_held() or run.has_ended() for run in runs):
        assert time.monotonic() < until, "a run came to no save"
        time.sleep(0.01)


def _names_one_of(run: Done, paths: set[str]) -> bool:
    """In a message about what it refuses, and not as a part of another path."""
    text = run.output.replace(f"{run.run_dir.parent}/", "")
    errors = [line for line in text.splitlines() if "error: " in line]
    return not paths.isdisjoint(re.split(r"[\s,;:`'()]+|\.\s", " ".join(errors)))


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names))


if __name__ == "__main__":
    raise SystemExit(main())
