"""Is the module that made a NaN named? `python -m benchmarks.nan_origin [--cases N] [--runs N]`.

Each case trains a tiny model in this process and injects one fault through `debug.drill`: a module
kind, a layer, forward, backward, weight, moment, gradient or loss, NaN or Inf, once or always, in
fp32, bf16 or fp16, eager, compiled or checkpointed, read at once or a step late. A fault that comes
again must be named by its module, one that does not by its block; the module is then not known, by
nature. The weights in the evidence must be those before the step, bit for bit. Of state that is
spoilt between two updates fingerprints tell first: they must name the tensor (`always`); without
them, which is tried as well (`once`), the search for NaN must name its module.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from model_check.config.drill import parse_drill
from model_check.engine.assembly import build_trainer
from model_check.errors import BrokenStateError, NonFiniteError
from model_check.events import Break, Event, NonFinite, decode
from tests.e2e.conftest import ROOT, TINY
from tests.engine.conftest import VOCABULARY, FakeSource, Kept, bare_context, make_settings

NUM_LAYERS = 2
STEP = 2
IN_BLOCK = (
    *("", ".attention_norm", ".attention", ".attention.wq", ".attention.wk", ".attention.wv"),
    *(".attention.wo", ".ffn_norm", ".feed_forward", ".feed_forward.w1", ".feed_forward.w2"),
    ".feed_forward.w3",
)
MODULES = (
    "tok_embed",
    *(f"layers.{n}{name}" for n in range(NUM_LAYERS) for name in IN_BLOCK),
    *("norm", "loss"),
)
OWNERS = (
    *(m for m in MODULES if m.rpartition(".")[2] in {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}),
    *(m for m in MODULES if m.endswith("norm")),
    "tok_embed",
    "output",
)
PARAMETERS = tuple(f"{module}.weight" for module in OWNERS)
WAYS = ("eager", "checkpointed", "compiled")


class Case(NamedTuple):
    kind: str
    name: str
    always: bool
    precision: str
    way: str
    lag: int

    @property
    def drill(self) -> str:
        return f"{self.kind}@{STEP}:all:{self.name}{':always' if self.always else ''}"

    @property
    def module(self) -> str:
        """That must be named."""
        return self.name.removesuffix(".weight")

    @property
    def is_step_fault(self) -> bool:
        """Of the numbers of a step, which are gone with it; not of the state."""
        return not self.kind.endswith(("_weight", "_moment"))

    @property
    def fingerprints(self) -> str:
        return "off" if not (self.is_step_fault or self.always) else "full"

    @property
    def wants_module(self) -> bool:
        return self.always or not self.is_step_fault


def block_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def all_cases() -> list[Case]:
    named = [
        *itertools.product(("nan_forward", "inf_forward", "nan_backward", "inf_backward"), MODULES),
        *itertools.product(
            ("nan", "inf", "nan_weight", "inf_weight", "nan_moment", "inf_moment"), PARAMETERS
        ),
    ]
    rest = itertools.product((False, True), ("fp32", "bf16", "fp16"), WAYS, (0, 1))
    return [
        Case(kind, name, *others)
        for (kind, name), others in itertools.product(named, rest)
        if not (others[1] == "fp16" and others[3])  # with a loss scale nothing is read late
    ]


class Result(NamedTuple):
    case: Case
    outcome: str
    """`module`, `block`, or what was wrong."""


def play(case: Case, directory: Path) -> Result:
    settings: dict[str, Any] = {
        "model__num_layers": NUM_LAYERS,
        "training__precision": case.precision,
        "training__use_amp": str(case.precision != "fp32").lower(),
        "training__gradient_checkpointing": str(case.way == "checkpointed").lower(),
        "training__compile": str(case.way == "compiled").lower(),
        "training__max_steps": STEP + 3,
        "training__grad_accum_nums": 2,
        "debug__drill": case.drill,
        "debug__fingerprints": case.fingerprints,
    }
    made = make_settings(**settings)
    kept = Kept()
    drill = parse_drill(case.drill, made.training.max_steps)
    context = replace(bare_context(kept, directory), drill=drill)
    trainer = build_trainer(made, FakeSource(), VOCABULARY, context, case.lag)
    try:
        trainer.run()
    except NonFiniteError:
        events = [event for event in kept.events if isinstance(event, NonFinite)]
        return Result(case, judged(case, events[-1], trainer, directory))
    except BrokenStateError:
        return Result(case, judged_change(case, kept.events))
    return Result(case, "not noticed")


def judged_change(case: Case, events: list[Event]) -> str:
    (found,) = [event for event in events if isinstance(event, Break)]
    if case.is_step_fault or found.is_finite or found.tensor != case.name:
        return f"changed: {found.what}"
    return "module"


def judged(case: Case, event: NonFinite, trainer: Any, directory: Path) -> str:
    checkpoint = directory / f"nan_grad_step_{event.step}.pt"
    # What an update has spoilt is in the dossier alone: no checkpoint may hold it.
    if not checkpoint.exists() and case.is_step_fault:
        return "no checkpoint"
    if checkpoint.exists() and not weights_are_kept(trainer, checkpoint):
        return "other weights in the evidence"
    return judged_origin(case, event)


def judged_origin(case: Case, event: NonFinite) -> str:
    if event.origin is None:
        return "nothing named"
    if case.is_step_fault and event.repeated is not case.always:
        return f"repeated: {event.repeated}"
    named = event.origin.module
    if named == case.module:
        return "module"
    if block_of(named) != block_of(case.module):
        return f"{event.origin.direction} {named}"
    return f"another module: {named}" if case.wants_module else "block"


def weights_are_kept(trainer: Any, path: Path) -> bool:
    saved = torch.load(path, weights_only=True)["model"]
    live = trainer.state.model.state_dict()
    return all(torch.equal(saved[n].view(torch.int32), live[n].view(torch.int32)) for n in live)


def play_run(case: Case, cache: Path, directory: Path) -> Result:
    """The same through `run.sh`: exit code 20, and the verdict names what the dossier names."""
    settings = directory / "tiny.json"
    precision = {"precision": case.precision, "use_amp": case.precision != "fp32"}
    training = TINY["training"] | precision | {"max_steps": STEP + 3, "grad_accum_nums": 2}
    training |= {"gradient_checkpointing": case.way == "checkpointed"}
    model = TINY["model"] | {"num_layers": NUM_LAYERS}
    settings.write_text(json.dumps(TINY | {"training": training, "model": model}))
    shell = ("bash", ROOT / "run.sh", "--config", settings, "--run-dir", directory / "run")
    drill = (f"debug.drill={case.drill}", f"debug.fingerprints={case.fingerprints}")
    done = subprocess.run(
        (*shell, "--workers", "1", *drill),
        cwd=directory,
        env={**os.environ, "DATASET_CACHE_DIR": str(cache), "MODEL_CHECK_HISTORY_FILE": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    (finding,) = (directory / "run" / "dossier" / "cpu0").glob("manifest.json")
    event = decode(json.dumps(json.loads(finding.read_bytes())["event"]).encode())
    if done.returncode != (21 if isinstance(event, Break) else 20):
        return Result(case, f"exit code {done.returncode}")
    if isinstance(event, Break):
        is_told = case.name in done.stdout.splitlines()[-1]
        return Result(
            case, judged_change(case, [event]) if is_told else "the verdict names another"
        )
    assert isinstance(event, NonFinite)
    assert event.origin is not None
    is_told = f"born in {event.origin.place}" in done.stdout.splitlines()[-1]
    return Result(case, judged_origin(case, event) if is_told else "the verdict names another")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--runs", type=int, default=0, help="so many more through run.sh")
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dice, cases = random.Random(arguments.seed), list(all_cases())
    here = sorted(dice.sample(cases, arguments.cases), key=lambda case: case.way)
    of_runs = [case for case in cases if case.way != "compiled" and case.lag == 0]
    started = time.monotonic()
    results = [played(play, case) for case in here]
    with tempfile.TemporaryDirectory() as cache:
        through_runs = partial(play_run, cache=Path(cache))
        results += [played(through_runs, case) for case in dice.sample(of_runs, arguments.runs)]
    show(results)
    counts = f"{arguments.cases} here and {arguments.runs} through run.sh"
    seconds = time.monotonic() - started
    print(f"seed {arguments.seed}, {counts}, of {len(cases)} cases, {seconds:.0f} s")
    return int(any(is_wrong(result) for result in results))


def played(play: Callable[..., Result], case: Case) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        try:
            return play(case, directory=Path(directory))
        except Exception as error:
            return Result(case, f"{type(error).__name__}: {error}")


def is_wrong(result: Result) -> bool:
    return result.outcome not in ("module", *(() if result.case.wants_module else ("block",)))


def show(results: list[Result]) -> None:
    by_kind: dict[tuple[str, bool], Counter[str]] = {}
    for result in results:
        key = (result.case.kind, result.case.always)
        outcome = "wrong" if is_wrong(result) else result.outcome
        by_kind.setdefault(key, Counter())[outcome] += 1
    print(f"{'fault':<14} {'':<6} {'cases':>5} {'module':>6} {'block':>6} {'wrong':>6}")
    for (kind, always), counts in sorted(by_kind.items()):
        row = (counts["module"], counts["block"], counts["wrong"])
        print(f"{kind:<14} {'always' if always else 'once':<6} {counts.total():>5}", end="")
        print("".join(f" {count:>6}" for count in row))
    for case, outcome in filter(is_wrong, results):
        print(f"WRONG {case.drill} {case.precision} {case.way} lag {case.lag}: {outcome}")


if __name__ == "__main__":
    sys.exit(main())
