"""Does a whole run name the worker whose bit flipped, and nobody else, ever?

`python -m benchmarks.verdict_runs [--faults N] [--classes N] [--clean N] [--varying N] [--shared N]
[--marginal N] [--first_step N] [--steps N]`, each a part by itself, all but the last through
`bash run.sh --device cpu`:

- faults: drills drawn by a seed, in 2 to 4 workers, fp32 and bf16, all fingerprints and a rotation.
  The worker must be named, the step, the tensor, the value and the bit; of two workers that differ,
  none, unless one's state changed by itself. A PASS is right where the fault left no trace: the
  last step's fingerprints are those of a run without it.
- classes: drills that act once, always, or on all workers, each replayed; class, repeat, severity,
  verdict and exit code must be those of the table.
- clean: nobody may be named, nobody warned of.
- varying: an operation whose result varies by itself, replayed; nobody may be named gravely.
- marginal: one of 3 or 5 workers whose first block is wrong with some probability each time, in the
  run and in each replay. It may be named, nobody else; never software, never transient where a
  replay was wrong, FAIL where the weighing (launcher/verdict/alone.py) says so.
- first_step: what goes wrong in the first step, once or always, in 2, 3, 5 workers: 36 kinds.
- shared: each worker meets the same NaN, one of them 0.05 to 2 s later; nobody may be named.
- steps: two trainers in this process, one after the other: no difference, no break.

Columns of faults. step, later: found in its step, or in a later one. tensor: it is the one that the
verdict tells; effect: a rotation saw first what followed from it. can tell bit: somebody is named,
and what is compared is what flipped, not what was computed from it.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launcher.verdict.agreement import Agreement
from launcher.verdict.alone import Tally
from launcher.verdict.severity import Severity
from model_check.config.drill import BUFFERS, FORWARD_KINDS, MOMENTS, SIZES_OF_BURST
from model_check.config.schema import ModelSettings
from model_check.config.shape import parameters
from model_check.engine.assembly import build_trainer
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_NON_FINITE,
    EXIT_PASS,
    EXIT_UNNAMED,
    EXIT_USAGE,
)
from model_check.events import Step
from model_check.utils.fingerprint import describe_flip, label
from tests.e2e.conftest import ROOT, TINY
from tests.engine.conftest import VOCABULARY, FakeSource, Kept, bare_context, make_settings

NUM_LAYERS = 2
NUM_STEPS = 8
LAST = NUM_STEPS - 1
IN_WORKERS = ROOT / "tests" / "e2e" / "in_workers"
PARAMETERS = tuple(row.name for row in parameters(ModelSettings(num_layers=NUM_LAYERS)))
BLOCKS = ("tok_embed", *(f"layers.{n}" for n in range(NUM_LAYERS)), "norm", "loss")
IN_BLOCK = (
    *("attention_norm", "attention", "attention.wq", "attention.wk", "attention.wv"),
    *("attention.wo", "ffn_norm", "feed_forward", "feed_forward.w1", "feed_forward.w2"),
    "feed_forward.w3",
)
MODULES = (*BLOCKS, *(f"layers.{n}.{name}" for n in range(NUM_LAYERS) for name in IN_BLOCK))


@dataclass(frozen=True)
class Run:
    exit_code: int
    report: dict[str, Any]
    num_varied: int

    @property
    def last_step(self) -> dict[str, Any] | None:
        """The fingerprints that all workers share at the end."""
        shared = self.report["fingerprints"]
        return shared[0]["fp"] if len(shared) == 1 else None

    @property
    def suspects(self) -> list[str]:
        return [row["name"] for row in self.report["workers"] if row["verdict"] == "SUSPECT"]

    @property
    def warnings(self) -> list[str]:
        rows = self.report["workers"]
        told = [text for row in rows for text in row["warnings"]]
        return told + [str(row["slow"]) for row in rows if row["slow"]]

    @property
    def severities(self) -> set[str]:
        return {row["severity"] for row in self.report["workers"] if row["severity"]}


@dataclass(frozen=True)
class Lab:
    """Runs `run.sh`, with one token cache for all."""

    cache: Path

    def run(
        self,
        num_workers: int,
        *overrides: str,
        precision: str = "fp32",
        max_steps: int = NUM_STEPS,
        **in_workers: str,
    ) -> Run:
        """`in_workers`: what tests/e2e/in_workers reads."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            settings = directory / "tiny.json"
            settings.write_text(json.dumps(_settings(precision, max_steps)))
            env = {**os.environ, "DATASET_CACHE_DIR": str(self.cache), **in_workers}
            env["MODEL_CHECK_HISTORY_FILE"] = ""  # these faults are no GPU's
            if in_workers:
                env["PYTHONPATH"] = str(IN_WORKERS)
            command = ["bash", ROOT / "run.sh", "--device", "cpu", "--workers", str(num_workers)]
            command += ["--config", settings, "--run-dir", directory / "run", *overrides]
            done = subprocess.run(
                command, cwd=directory, env=env, capture_output=True, text=True, timeout=600
            )
            report = json.loads((directory / "run" / "report.json").read_text())
            varied = sum(f.stat().st_size for f in (directory / "run").glob("*.varied"))
            return Run(done.returncode, report, varied)


def _settings(precision: str, max_steps: int) -> dict[str, Any]:
    training = TINY["training"] | {"precision": precision, "use_amp": precision != "fp32"}
    model = TINY["model"] | {"num_layers": NUM_LAYERS}
    return TINY | {"training": training | {"max_steps": max_steps}, "model": model}


class Fault(NamedTuple):
    kind: str
    step: int
    worker: str
    name: str
    number: int
    num_workers: int
    precision: str
    budget: str

    @property
    def drill(self) -> str:
        return f"{self.kind}@{self.step}:{self.worker}:{self.name}:{self.number}"

    @property
    def is_of_state(self) -> bool:
        """Its own fingerprints tell the worker that it changed."""
        return self.kind in ("flip", "burst", "flip_moment")

    @property
    def classes(self) -> tuple[str, ...]:
        at = ("last step",) if self.step == LAST else ()
        return self.kind, self.budget, self.precision, f"{self.num_workers} workers", *at

    @property
    def tensors(self) -> tuple[str, ...]:
        """As a verdict may call what differs first."""
        if self.kind in FORWARD_KINDS:
            return _at_module(self.name)
        if self.kind == "flip_gradient":
            return (label("gradients", self.name),)
        quantity, _, name = self.name.partition(".")
        is_moment = quantity in MOMENTS
        return (label(quantity, name) if is_moment else label("weights", self.name),)

    @property
    def flip(self) -> str | None:
        """How a verdict calls what flipped; None: what is compared was computed from it."""
        if self.kind == "burst":
            return describe_flip([])
        is_seen_itself = self.kind not in FORWARD_KINDS or self.name in BLOCKS[:-1]
        return describe_flip([[0, self.number]]) if is_seen_itself else None


def _at_module(name: str) -> tuple[str, ...]:
    """What is compared next behind a module, in either pass."""
    block = ".".join(name.split(".")[:2])
    number = BLOCKS.index(block)
    if block == "loss":
        return ("the loss",)
    before = BLOCKS[max(0, number - 1)]
    return (
        label("forward", block),
        label("backward", before),
        *(label(quantity, f"{block}.") for quantity in ("gradients", "grad_norms")),
    )


def drawn(dice: random.Random, kind: str) -> Fault:
    num_workers, precision = dice.choice([2, 3, 4]), dice.choice(["fp32", "bf16"])
    name, number = dice.choice(PARAMETERS), dice.randrange(32)
    if kind in FORWARD_KINDS:
        name, number = dice.choice(MODULES), number % (32 if precision == "fp32" else 16)
    elif kind == "flip_moment":
        name = f"{dice.choice(MOMENTS)}.{name}"
    elif kind in ("flip", "burst") and dice.random() < 0.1:
        name = dice.choice(BUFFERS)
    if kind == "burst":  # a norm has 32 values
        number = dice.randint(SIZES_OF_BURST[0], 32 if "norm" in name else SIZES_OF_BURST[-1])
    return Fault(
        kind=kind,
        step=dice.choice([LAST, *range(1, LAST)]) if dice.random() < 0.8 else LAST,
        worker=f"CPU{dice.randrange(num_workers)}",
        name=name,
        number=number,
        num_workers=num_workers,
        precision=precision,
        budget=dice.choice(["full", "rotate"]),
    )


class FaultRuns:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._clean: dict[tuple[str, str], dict[str, Any] | None] = {}
        """(precision, budget) -> how a run without a fault ends."""

    def play(self, fault: Fault) -> Counter[str]:
        budget = f"debug.fingerprints={fault.budget}"
        run = self._lab.run(
            fault.num_workers, f"debug.drill={fault.drill}", budget, precision=fault.precision
        )
        outcome = self._judged(fault, run)
        if outcome["WRONG"] or outcome["other tensor"] or outcome["other step"]:
            print(f"{' '.join(outcome)}: {fault}\n    {run.exit_code} {run.report['summary']}")
        return outcome

    def _judged(self, fault: Fault, run: Run) -> Counter[str]:
        if run.exit_code == EXIT_PASS:
            is_clean = run.last_step == self._ending(fault) is not None
            return Counter(["no trace" if is_clean and not run.warnings else "WRONG"])
        if run.exit_code == EXIT_UNNAMED and not (run.suspects or run.report["culprits"]):
            may_be = fault.num_workers == 2 and not (fault.is_of_state and fault.budget == "full")
            return Counter(["nobody named" if may_be else "WRONG", *_told(fault, run)])
        if run.exit_code == EXIT_NON_FINITE and run.report["culprits"] == [fault.worker]:
            return Counter(["named", "by NaN"])
        is_named = run.report["culprits"] == run.suspects == [fault.worker]
        if run.exit_code != EXIT_DISAGREEMENT or not is_named:
            return Counter(["WRONG"])
        return Counter(["named", *_told(fault, run)])

    def _ending(self, fault: Fault) -> dict[str, Any] | None:
        key = fault.precision, fault.budget
        if key not in self._clean:
            budget = f"debug.fingerprints={fault.budget}"
            self._clean[key] = self._lab.run(2, budget, precision=fault.precision).last_step
        return self._clean[key]


def _told(fault: Fault, run: Run) -> list[str]:
    """What the verdict's sentence has right."""
    text = run.report["summary"]
    first = re.search(r"^step (\d+)|after the update of step (\d+)", text)
    at, since = first.groups() if first else (None, None)
    is_its_own = str(fault.step) == at or str(fault.step - 1) == since
    told = ["step" if is_its_own else "later"]
    told += ["other step"] * (told == ["later"] and fault.budget == "full")
    has_tensor = any(name in text for name in fault.tensors)
    told.append("tensor" if has_tensor else "other tensor" if fault.budget == "full" else "effect")
    is_before_update = fault.budget == "full" or " changed (" in text
    if has_tensor and is_before_update and fault.flip is not None and run.suspects:
        told += ["can tell bit", *(["bit"] if f"({fault.flip})" in text else [])]
    return told


KINDS = ("flip", "flip_moment", "flip_gradient", "flip_activation", "burst")
CLASSES = ("full", "rotate", "fp32", "bf16", "2 workers", "3 workers", "4 workers", "last step")
FAULT_COLUMNS = (
    *("named", "by NaN", "nobody named", "no trace", "WRONG", "step", "later", "tensor", "effect"),
    *("other tensor", "bit", "can tell bit"),
)


def faults(lab: Lab, num_runs: int, dice: random.Random) -> bool:
    runs, rows = FaultRuns(lab), {name: Counter[str]() for name in ("all", *KINDS, *CLASSES)}
    for number in range(num_runs):
        fault = drawn(dice, KINDS[number % len(KINDS)])
        outcome = runs.play(fault) + Counter(runs=1)
        for row in ("all", *fault.classes):
            rows[row] += outcome
    show(("runs", *FAULT_COLUMNS), rows)
    return rows["all"]["WRONG"] == 0


REPLAYED = "launch.replay_s=100"
EXPECTED = {
    "once": (EXIT_DISAGREEMENT, "SUSPECT", "hardware", "transient", "MONITOR"),
    "always": (EXIT_DISAGREEMENT, "FAIL", "hardware", "persistent", "ISOLATE"),
    "on all workers": (EXIT_NON_FINITE, "INCONCLUSIVE", "software", "persistent", "IGNORE"),
}
"""How often a fault comes -> exit code, and of its worker verdict, class, repeat and severity."""
BY_NAN = {
    "once": (EXIT_NON_FINITE, "FAIL", "hardware", "transient", "ISOLATE"),
    "always": (EXIT_NON_FINITE, "FAIL", "hardware", "persistent", "ISOLATE"),
}
"""The same of a flip that makes a number exceed its type, beside a worker that is finite."""
SEEN_AT_ONCE = ("flip", "flip_gradient", "flip_moment", "burst")


def classes(lab: Lab, num_runs: int, dice: random.Random) -> bool:
    rows = defaultdict[str, Counter[str]](Counter)
    for number in range(num_runs):
        how = list(EXPECTED)[number % len(EXPECTED)]
        drill, num_workers, worker = _drill_for(how, dice)
        run = lab.run(num_workers, f"debug.drill={drill}", REPLAYED)
        (row,) = (row for row in run.report["workers"] if row["name"] == worker)
        keys = ("verdict", "cause_class", "repeat", "severity")
        found = (run.exit_code, *(row[key] for key in keys))
        is_right = found in (EXPECTED[how], BY_NAN.get(how))
        if not is_right:
            print(drill, num_workers, found, run.report["summary"])
        rows[how] += Counter({"runs": 1, "right": is_right, "WRONG": not is_right})
    show(("runs", "right", "WRONG"), rows)
    return not any(row["WRONG"] for row in rows.values())


def _drill_for(how: str, dice: random.Random) -> tuple[str, int, str]:
    """The drill, the number of workers, and one that it hits."""
    if how == "on all workers":
        kind = dice.choice(("nan", "nan_forward", "inf_forward", "nan_backward"))
        num_workers = dice.choice((1, 2, 3))
        return f"{kind}@{dice.randrange(NUM_STEPS)}:all:always", num_workers, "CPU0"
    kind = dice.choice(SEEN_AT_ONCE)
    fault = drawn(dice, kind)
    few = 1 if kind != "flip_gradient" else 3
    num_workers = dice.choice(range(few, 5))
    worker = f"CPU{dice.randrange(num_workers)}"
    drill = fault._replace(worker=worker, step=dice.randrange(1, NUM_STEPS)).drill
    return drill + (":always" if how == "always" else ""), num_workers, worker


def clean(lab: Lab, num_runs: int, _dice: random.Random) -> bool:
    """4 workers on however many cores there are, two budgets and precisions in turn."""
    rows = defaultdict[str, Counter[str]](Counter)
    for number in range(num_runs):
        precision, budget = ("fp32", "bf16")[number % 2], ("full", "rotate")[number // 2 % 2]
        run = lab.run(4, f"debug.fingerprints={budget}", precision=precision)
        is_clean = run.exit_code == EXIT_PASS and run.report["verdict"] == "PASS"
        if not is_clean or run.warnings:
            print(f"{precision} {budget}: {run.exit_code} {run.report['summary']} {run.warnings}")
        outcome = Counter(runs=1, alarms=not is_clean, warnings=bool(run.warnings))
        rows["all"] += outcome
        rows[f"{precision}, {budget}"] += outcome
    show(("runs", "alarms", "warnings"), rows)
    print(f"without an alarm: less than {3 / num_runs:.1%} of runs (95 %)")
    return rows["all"]["alarms"] == 0


def varying(lab: Lab, num_runs: int, dice: random.Random) -> bool:
    rows = defaultdict[str, Counter[str]](Counter)
    for chance, num_steps in ((1.0, 10), (0.1, 20), (0.01, 30)):
        for _ in range(num_runs):
            how = f"{chance} {dice.randrange(1 << 30)}"
            run = lab.run(3, REPLAYED, max_steps=num_steps, VARYING=how)
            outcome = _outcome(run)
            rows[f"p = {chance:g}"] += Counter({"runs": 1, outcome: 1})
            if outcome == "WRONG":
                print(how, run.exit_code, run.report["summary"])
    show(("runs", "INVALID", "SUSPECT", "INCONCLUSIVE", "PASS, nothing varied", "WRONG"), rows)
    return not any(row["WRONG"] for row in rows.values())


def _outcome(run: Run) -> str:
    """INVALID, or a name that says no more than MONITOR."""
    exit_code, verdict = run.exit_code, str(run.report["verdict"])
    if exit_code == EXIT_PASS and not run.num_varied:
        return "PASS, nothing varied"
    codes = {"INVALID": EXIT_USAGE, "SUSPECT": EXIT_DISAGREEMENT, "INCONCLUSIVE": EXIT_UNNAMED}
    is_mild = run.severities <= {Severity.MONITOR, Severity.IGNORE}
    return verdict if codes.get(verdict) == exit_code and is_mild else "WRONG"


def marginal(lab: Lab, num_runs: int, dice: random.Random) -> bool:
    rows = defaultdict[str, Counter[str]](Counter)
    for chance, num_workers in product((0.02, 0.2, 1.0), (3, 5)):
        for _ in range(num_runs):
            worker = f"CPU{dice.randrange(num_workers)}"
            how = f"{chance} {dice.randrange(1 << 30)} {worker}"
            run = lab.run(num_workers, REPLAYED, VARYING=how)
            outcome = _of_marginal(run, worker, num_workers)
            rows[f"p = {chance:g}, {num_workers} workers"] += Counter({"runs": 1, outcome: 1})
            if outcome == "WRONG":
                print(how, run.exit_code, run.report["summary"], flush=True)
    columns = ("runs", "FAIL", "SUSPECT, again", "SUSPECT, transient")
    show((*columns, "PASS, nothing varied", "WRONG"), rows)
    return not any(row["WRONG"] for row in rows.values())


def _of_marginal(run: Run, worker: str, num_workers: int) -> str:
    (row,) = (row for row in run.report["workers"] if row["name"] == worker)
    if run.exit_code == EXIT_PASS and not run.num_varied:
        return "PASS, nothing varied"
    if run.exit_code != EXIT_DISAGREEMENT or run.report["culprits"] != [worker]:
        return "WRONG"
    found = (row["verdict"], row["cause_class"], row["severity"])
    (replay,) = run.report["replays"]
    wrong, times = replay["wrong"], replay["times"]
    tally = Tally(wrong, times, (num_workers - 1) * (times + 1), num_workers - 1)
    if tally.convicts:
        is_right = found == ("FAIL", "hardware", "ISOLATE")
        return "FAIL" if is_right else "WRONG"
    if wrong:
        is_right = found == ("SUSPECT", "unknown", "MONITOR") and row["repeat"] == "unsettled"
        return "SUSPECT, again" if is_right else "WRONG"
    is_right = found == ("SUSPECT", "hardware", "MONITOR") and row["repeat"] == "transient"
    return "SUSPECT, transient" if is_right else "WRONG"


FIRST_STEP = {
    "weights": "debug.drill=flip@0:{worker}:layers.1.attention.wq.weight:7",
    "moments": "debug.drill=flip_moment@0:{worker}:layers.1.attention.wq.weight:7",
    "gradient": "debug.drill=flip_gradient@0:{worker}:layers.1.attention.wq.weight:7",
    "activation": "debug.drill=flip_activation@0:{worker}:layers.0:7",
    "batch": "",
    "loss": "",
}


def first_step(lab: Lab, num_runs: int, _dice: random.Random) -> bool:
    rows = defaultdict[str, Counter[str]](Counter)
    kinds = product(FIRST_STEP, ("once", "always"), (2, 3, 5))
    for (what, how_often, num_workers), _ in product(kinds, range(num_runs)):
        worker = f"CPU{num_workers - 1}"
        drill, env = FIRST_STEP[what].format(worker=worker), {}
        if not drill:
            env["FIRST"] = f"{worker} {what} {how_often}"
        always = ":always" if how_often == "always" else ""
        run = lab.run(num_workers, *([drill + always] if drill else []), REPLAYED, **env)
        is_named = run.exit_code == EXIT_DISAGREEMENT and run.report["culprits"] == [worker]
        rows_of_two = [row["verdict"] for row in run.report["workers"]] == ["INCONCLUSIVE"] * 2
        is_unnamed = run.exit_code == EXIT_UNNAMED and rows_of_two
        outcome = "named, 21" if is_named else "23, both told" if is_unnamed else "WRONG"
        row = run.report["workers"][-1]
        rows[f"{what}, {how_often}, {num_workers}"] += Counter(
            {"runs": 1, outcome: 1, f"{row['verdict']}, {row['repeat']}": 1}
        )
        if outcome == "WRONG" or (is_unnamed and num_workers > 2):
            print(what, how_often, num_workers, run.exit_code, run.report["summary"], flush=True)
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    show(tuple(columns), rows)
    return not any(row["WRONG"] for row in rows.values())


def shared(lab: Lab, num_runs: int, dice: random.Random) -> bool:
    rows = defaultdict[str, Counter[str]](Counter)
    for _ in range(num_runs):
        num_workers, late_s = dice.choice((2, 3)), dice.uniform(0.05, 2.0)
        late = f"CPU{dice.randrange(num_workers)} {late_s:.3f}"
        kind = dice.choice(("nan", "nan_forward", "inf_forward", "nan_backward", "nan_weight"))
        run = lab.run(num_workers, f"debug.drill={kind}@{dice.randrange(NUM_STEPS)}", LATE=late)
        of_software = {row["cause_class"] for row in run.report["workers"]} == {"software"}
        code = EXIT_USAGE if kind == "nan_weight" else EXIT_NON_FINITE  # a changed state: INVALID
        is_right = run.exit_code == code and not run.report["culprits"] and of_software
        if not is_right:
            print(late, kind, run.exit_code, run.report["summary"])
        rows["all"] += Counter({"runs": 1, "nobody is named": is_right, "WRONG": not is_right})
    show(("runs", "nobody is named", "WRONG"), rows)
    return rows["all"]["WRONG"] == 0


def steps(num_steps: int) -> bool:
    """Two trainers in this process; raises BrokenStateError where state changes by itself."""
    is_equal = True
    for precision in ("fp32", "bf16"):
        agreement = Agreement({"CPU0": "cpu", "CPU1": "cpu"})
        both = zip(
            *(_steps_of(name, precision, num_steps) for name in ("CPU0", "CPU1")), strict=True
        )
        differences = [
            found
            for pair in both
            for name, event in zip(("CPU0", "CPU1"), pair, strict=True)
            if (found := agreement.record(name, event)) is not None
        ]
        agreed = agreement.agreed_steps["CPU0"]
        print(f"{precision}: {agreed:,} of {num_steps:,} steps equal in two trainers")
        is_equal &= not differences and agreed == num_steps
    return is_equal


def _steps_of(worker: str, precision: str, num_steps: int) -> Iterator[Step]:
    made = make_settings(
        training__max_steps=num_steps,
        training__precision=precision,
        training__use_amp=str(precision != "fp32").lower(),
        debug__fingerprints="full",
    )
    kept = Kept()
    with tempfile.TemporaryDirectory() as directory:
        context = bare_context(kept, Path(directory), worker)
        build_trainer(made, FakeSource(), VOCABULARY, context, 0).run()
    return (event for event in kept.events if isinstance(event, Step))


def show(columns: tuple[str, ...], rows: dict[str, Counter[str]]) -> None:
    print(f"| {' | '.join(('', *columns))} |\n|{'---|' * (len(columns) + 1)}")
    for name, counts in rows.items():
        print(f"| {name} | {' | '.join(str(counts[column]) for column in columns)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=0, metavar="RUNS")
    parser.add_argument("--classes", type=int, default=0, metavar="RUNS")
    parser.add_argument("--clean", type=int, default=0, metavar="RUNS")
    parser.add_argument("--varying", type=int, default=0, metavar="RUNS", help="of each chance")
    parser.add_argument("--marginal", type=int, default=0, metavar="RUNS", help="of each kind")
    parser.add_argument("--first_step", type=int, default=0, metavar="RUNS", help="of each kind")
    parser.add_argument("--shared", type=int, default=0, metavar="RUNS")
    parser.add_argument("--steps", type=int, default=0, help="in this process, of each precision")
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_right = True
    with tempfile.TemporaryDirectory() as cache:
        for part in (faults, classes, clean, varying, marginal, first_step, shared):
            if num_runs := getattr(arguments, part.__name__):
                began, dice = time.monotonic(), random.Random(f"{arguments.seed} {part.__name__}")
                is_right &= part(Lab(Path(cache)), num_runs, dice)
                seconds = time.monotonic() - began
                print(f"{part.__name__}: seed {arguments.seed}, {num_runs} runs, {seconds:.0f} s\n")
    return int(not (is_right and (not arguments.steps or steps(arguments.steps))))


if __name__ == "__main__":
    sys.exit(main())
