"""The report of a comparison, made of what each training left in its directory."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec import Struct

from launcher import run_dir
from launcher.report.files import lines_of
from launcher.report.page.comparison import TrialCurves, comparison_page
from launcher.report.read_run import decoded, read_record, read_result
from launcher.report.table import number
from launcher.verdict.comparison import (
    Arm,
    ComparisonRecord,
    ComparisonResult,
    Gates,
    Measured,
    Spread,
    TrialRecord,
    compared,
    is_loss,
)
from launcher.verdict.results import RunResult, Verdict
from model_check.errors import EXIT_UNPROVEN, UsageError
from model_check.events import Metrics, Step, decode

_END_SHARE = 10
"""Of its steps, one in so many are the end, whose mean loss stands for the training."""
_ASKED = ("command", "started_at", "host", "cwd", "preset", "device", "differing")
_SMALL = 5e-4
_COLUMNS = ("arm", "end loss", "tokens/s", "", "GiB", "time")


def write_record(record: ComparisonRecord, directory: Path) -> None:
    """Raises StorageError."""
    run_dir.write(directory / run_dir.COMPARISON, msgspec.to_builtins(record))


def read_comparison(directory: Path) -> ComparisonRecord:
    """Raises UsageError for one whose record is damaged."""
    path = directory / run_dir.COMPARISON
    try:
        record = decoded(path, ComparisonRecord)
        _refuse_contradictions(record)
        return record
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: damaged, or not of ours: {error}") from error


def begun(record: ComparisonRecord, directory: Path) -> list[Path]:
    """The trainings that have, in the order in which they did: each is a run in a directory of its
    own."""
    paths = [directory / trial.directory for trial in record.trials]
    return [path for path in paths if os.path.isfile(path / "run.json")]


def _refuse_contradictions(record: ComparisonRecord) -> None:
    """Raises ValueError."""
    arms = {*record.arms}
    if not arms or not all(trial.workers for trial in record.trials):
        raise ValueError("it has no training, or one without workers")
    if any(values.keys() != arms for values in record.differing.values()):
        raise ValueError("`differing` and `trials` name different arms")
    for trial in record.trials:
        own = Path(trial.arm)
        if trial.directory not in (str(own), str(run_dir.seed_path(own, trial.seed))):
            raise ValueError(f"{trial.directory} is no directory of {trial.arm}")


class Left(Struct, frozen=True):
    """What the trainings of a comparison left, read again."""

    result: ComparisonResult
    curves: list[TrialCurves]

    def write(self, directory: Path) -> None:
        """report.json and report.html, each whole or not at all. Raises StorageError."""
        run_dir.write(directory / "report.json", msgspec.to_builtins(self.result))
        run_dir.write_page(
            directory / "report.html", lambda: comparison_page(self.result, self.curves)
        )


def what_is_left(
    record: ComparisonRecord, directory: Path, known: Mapping[str, RunResult] = MappingProxyType({})
) -> Left:
    """`known`: directory of a training -> its result, where its report is not written yet."""
    measured: dict[str, Measured | None] = {}
    curves: list[TrialCurves] = []
    for trial in record.trials:
        curves.append(TrialCurves(trial.arm))
        result = known.get(trial.directory)
        measured[trial.directory] = _read_trial(directory, trial, curves[-1], result)
    run = msgspec.to_builtins(record)
    return Left(compared(record, measured, {n: run[n] for n in _ASKED}), curves)


def _read_trial(
    directory: Path, trial: TrialRecord, curves: TrialCurves, result: RunResult | None
) -> Measured | None:
    """What it told of its steps goes into `curves`. None: it left no report."""
    path = directory / trial.directory
    if (result := result or read_result(path)) is None:
        return None
    try:
        gates = _read_events(path, trial.workers[0], curves)
    except UsageError as error:
        return Measured(verdict=Verdict.INCONCLUSIVE, exit_code=EXIT_UNPROVEN, summary=str(error))
    is_deadline = False
    with suppress(UsageError):
        end = read_record(path).end
        is_deadline = end is not None and end.is_deadline
    return _measured(result, curves.end_loss, gates, is_deadline=is_deadline)


def comparison_lines(result: ComparisonResult, directory: Path) -> Iterator[str]:
    """What follows the last training, unprefixed; the verdict comes last."""
    yield from _table(result.arms)
    for arm in result.arms:
        yield from (f"{arm.name}: {line}" for line in _told(arm, result.arms[0]))
    bad = [
        (arm.name, trial)
        for arm in result.arms
        for trial in arm.trials
        if trial.measured.verdict not in (Verdict.PASS, Verdict.WARN)
    ]
    yield from (f"note: {note}" for note in result.notes)
    for name, trial in bad:
        who = name if len(result.seeds) == 1 else f"{name} seed {trial.seed}"
        yield f"{who}: {trial.measured.verdict}: {trial.measured.summary}"
    yield f"arms and report: {directory}"
    yield from result.last_lines


def _table(arms: Sequence[Arm]) -> Iterator[str]:
    """A row for each arm with a figure."""
    rows = [_row(arm) for arm in arms if arm.figures]
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for cells in (_COLUMNS, *rows):
        first, *others = zip(cells, widths, strict=True)
        padded = (cell.rjust(width) for cell, width in others if width)
        yield "  ".join([first[0].ljust(first[1]), *padded]).rstrip()


def _row(arm: Arm) -> tuple[str, ...]:
    ratio = arm.beside.get("tokens_per_s")
    return (
        arm.name,
        spread_text(arm.figures.get("end_loss"), "{:.4f}"),
        spread_text(arm.figures.get("tokens_per_s"), "{:,.0f}"),
        "" if ratio is None else f"{ratio.mean:.2f}x",
        _of_mean(arm, "peak_memory_bytes", 2**30, "{:.2f}"),
        _of_mean(arm, "duration_s", 1, "{:.1f} s"),
    )


def _of_mean(arm: Arm, figure: str, unit: float, form: str) -> str:
    spread = arm.figures.get(figure)
    return number(None if spread is None else spread.mean / unit, form)


def spread_text(spread: Spread | None, form: str) -> str:
    """`2.3114`; over several seeds `2.3114 ± 0.0021`."""
    if spread is None:
        return number(None)
    mean = form.format(spread.mean)
    is_one = spread.std is None or spread.least == spread.most
    return mean if is_one else f"{mean} ± {form.format(spread.std)}"


def _told(arm: Arm, first: Arm) -> Iterator[str]:
    for figure, spread in arm.figures.items():
        if is_loss(figure) and figure != "end_loss":
            yield f"loss on {figure.removeprefix('val/')} {spread_text(spread, '{:.4f}')}"
    if (end := arm.beside.get("end_loss")) is not None:
        yield beside_text(end, first.name)
    for gates in arm.gates:
        seed = f", seed {gates.seed}" if len(arm.gates) > 1 else ""
        yield f"{gates_text(gates)}{seed}"


def beside_text(end: Spread, first: str) -> str:
    """`end loss 0.0123 lower than full's (0.0101 to 0.0150 by seed)`"""
    if end.mean == end.least == end.most == 0:
        return f"end loss equal to {first}'s"
    which = "lower" if end.mean < 0 else "higher"
    text = f"end loss {_difference(abs(end.mean))} {which} than {first}'s"
    if end.count == 1:
        return text
    return f"{text} (by seed {_difference(end.least, '+')} to {_difference(end.most, '+')})"


def _difference(loss: float, sign: str = "") -> str:
    """`+0.0123`; a small one keeps its figures: `+1.2e-05`."""
    is_small = 0 < abs(loss) < _SMALL
    return f"{loss:{sign}.1e}" if is_small else f"{loss:{sign}.4f}"


def gates_text(gates: Gates) -> str:
    """Where the heads look."""
    num = sum(gates.histogram)
    return (
        f"of {num} gates {gates.below:.0%} below 0.1 (the segment alone), {gates.above:.0%} above "
        "0.9 (the memory alone)"
    )


def _measured(
    result: RunResult,
    end_loss: float | None,
    gates: list[list[float]] | None,
    *,
    is_deadline: bool,
) -> Measured:
    workers = result.workers
    rates = [worker.tokens_per_s for worker in workers if worker.tokens_per_s is not None]
    peaks = [w.peak_memory_bytes for w in workers if w.peak_memory_bytes is not None]
    parameters = workers[0].detail.get("num_parameters") if workers else None
    return Measured(
        verdict=result.verdict,
        exit_code=result.exit_code,
        summary=result.summary,
        do_now=result.do_now,
        steps=min((worker.steps for worker in workers), default=0),
        is_deadline=is_deadline,
        parameters=parameters if isinstance(parameters, int) else None,
        end_loss=end_loss,
        tokens_per_s=min(rates, default=None),
        peak_memory_bytes=max(peaks, default=None),
        duration_s=max((worker.duration_s for worker in workers), default=None),
        validation=workers[0].validation if workers else [],
        gates=gates,
    )


def _read_events(directory: Path, worker: str, curves: TrialCurves) -> list[list[float]] | None:
    """Its gates at the end; all else goes into `curves`. Raises UsageError."""
    gates = None
    losses: list[float] = []
    for event in lines_of(directory / f"{worker.lower()}.events.jsonl", decode):
        match event:
            case Step(loss=str(bits)):
                loss = float.fromhex(bits)
                losses.append(loss)
                curves.loss.add(event.step, loss)
            case Metrics():
                gates = event.gates or gates
                if event.tokens_per_s is not None:
                    curves.tokens_per_s.add(event.step, event.tokens_per_s)
    curves.end_loss = _end_loss(losses)
    return gates


def _end_loss(losses: Sequence[float]) -> float | None:
    """Over the last tenth; None where there is none."""
    last = losses[-max(1, len(losses) // _END_SHARE) :]
    mean = sum(last) / len(last) if last else math.nan
    return mean if math.isfinite(mean) else None
