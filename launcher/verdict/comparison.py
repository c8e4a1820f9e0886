"""Trainings of several arms, and what they show side by side. Values and pure functions."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from signal import Signals
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from launcher.verdict.results import Conclusion, SplitResult, Verdict
from launcher.verdict.rules import Kind
from model_check.errors import EXIT_INTERNAL, EXIT_PASS, EXIT_SIGNAL_BASE, EXIT_UNPROVEN
from model_check.utils.project_files import PROGRAM
from model_check.utils.requests import TO_STOP
from model_check.utils.words import listed

_PASSED = (Verdict.PASS, Verdict.WARN)
_LOW, _HIGH = 0.1, 0.9
_MORE_TIME = "Run again with more time (--deadline): not every arm has trained."
_MORE_SEEDS = (
    "Before you choose, run again with --seeds 3: one seed does not tell a difference from chance."
)
_CHOOSE = "Choose by the figures: what differs by less than the seeds do is chance."
_OF_TEXT = ("data.", "training.context_length", "model.vocab_size")
"""Beginnings of settings that decide which tokens a loss is of."""


class TrialRecord(Struct, frozen=True, kw_only=True):
    """One training of one arm, in comparison.json."""

    arm: str
    seed: int
    directory: str
    """Within that of the comparison."""
    workers: list[str]
    exit_code: int | None = None
    """None: it was not begun, or the launcher of the comparison did not live to see its end."""
    is_stopped: bool = False
    """It was asked to end, with all others."""
    is_killed: bool = False
    """A signal ended its launcher, and not at our request."""
    last_words: str | None = None
    """What its launcher said at its end, or how that was killed."""

    @property
    def names(self) -> list[str]:
        """`infini`; where there are several seeds, also `seed 43`."""
        return [self.arm] if self.directory == self.arm else [self.arm, f"seed {self.seed}"]

    @property
    def tag(self) -> str:
        """What stands behind the name at the beginning of each of its lines."""
        return "".join(f"[{name}] " for name in self.names)


class ComparisonRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="trials"):
    """comparison.json: what was asked for, and what came of each training."""

    command: list[str]
    started_at: str
    pid: int
    host: str
    cwd: str
    preset: str
    device: str
    differing: dict[str, dict[str, Any]]
    """Setting -> arm -> its value, of the settings that are not the same in all arms."""
    trials: list[TrialRecord]
    """In the order in which they are begun."""
    signal: Annotated[int, Meta(ge=1, le=64)] | None = None
    """After which no further training was begun."""
    is_deadline: bool = False
    """launch.deadline_s came before all trainings."""

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(trial.arm for trial in self.trials))


class Measured(Conclusion, frozen=True, kw_only=True):
    """What the report of one training tells. Null: not known."""

    steps: int = 0
    is_deadline: bool = False
    """launch.deadline_s ended it."""
    parameters: int | None = None
    end_loss: float | None = None
    """The mean over the last tenth of its steps."""
    tokens_per_s: float | None = None
    """Of its slowest worker."""
    peak_memory_bytes: int | None = None
    """Of the worker that took most: of its GPU, on a CPU of the host."""
    duration_s: float | None = None
    validation: list[SplitResult] = field(default_factory=list)
    gates: list[list[float]] | None = None
    """With Infini-attention, [layers][query heads]: at the end, the share of each head's output
    that comes from its memory."""


class Spread(Struct, frozen=True, kw_only=True):
    """A figure over the seeds of an arm."""

    mean: float
    std: float | None
    """Sample standard deviation; null: there is one seed."""
    least: float
    most: float
    count: int


class Gates(Struct, frozen=True, kw_only=True):
    """Of one training."""

    seed: int
    shares: list[list[float]]
    """[layers][query heads], 0 to 1: what comes from the memory."""
    below: float
    """The share of heads below 0.1: they read the segment alone."""
    above: float
    """The share of heads above 0.9: they read the memory alone."""
    histogram: list[int]
    """Heads by tenths of their share."""


class Trial(Struct, frozen=True, kw_only=True):
    seed: int
    directory: str
    workers: list[str]
    measured: Measured


class Arm(Struct, frozen=True, kw_only=True):
    name: str
    settings: dict[str, Any]
    """Its values of the settings that differ between arms."""
    trials: list[Trial]
    figures: dict[str, Spread]
    """end_loss, tokens_per_s, peak_memory_bytes, duration_s, parameters, and `val/NAME`, the loss
    on each validation split: over the trainings that passed. Unknown ones are left out."""
    beside: dict[str, Spread]
    """Beside the first arm, seed by seed: by how much a loss is higher, where both trained as many
    steps; for all other figures, how many times as much. Empty for the first arm."""
    gates: list[Gates]


class ComparisonResult(Conclusion, frozen=True, kw_only=True, tag_field="kind", tag="comparison"):
    """report.json of a comparison, without its schema number."""

    culprits: list[str]
    """Arms of which a training failed."""
    seeds: list[int]
    arms: list[Arm]
    """In the order of the command line; the first is what the others stand beside."""
    notes: list[str]
    """Why losses do not compare."""
    run: dict[str, Any]
    """What was asked for."""


def compared(
    record: ComparisonRecord, measured: Mapping[str, Measured | None], run: dict[str, Any]
) -> ComparisonResult:
    """`measured`: directory of a training -> what it left; None: no report. `run`: see
    ComparisonResult."""
    trials: dict[str, list[Trial]] = {name: [] for name in record.arms}
    for each in record.trials:
        found = measured.get(each.directory)
        if found is None or each.is_killed:
            found = _without_report(each, record)
        if each.is_stopped:
            found = replace(found, verdict=Verdict.STOPPED, summary="was stopped")
        trials[each.arm].append(
            Trial(seed=each.seed, directory=each.directory, workers=each.workers, measured=found)
        )
    first = next(iter(trials.values()))
    arms = [_arm(name, of_arm, first, record) for name, of_arm in trials.items()]
    failed = [arm for arm in arms if any(map(_has_failed, arm.trials))]
    order = [each.directory for each in record.trials]
    every = [trial for arm in arms for trial in arm.trials]
    in_order = sorted(every, key=lambda trial: order.index(trial.directory))
    return ComparisonResult(
        verdict=_verdict(arms, failed),
        exit_code=_exit_code(record, in_order),
        summary=_summary(record, arms, failed),
        do_now=_do_now(record, in_order),
        culprits=[arm.name for arm in failed],
        seeds=sorted({trial.seed for trial in record.trials}),
        arms=arms,
        notes=list(_notes(record, arms)),
        run=run,
    )


def _without_report(trial: TrialRecord, record: ComparisonRecord) -> Measured:
    """Of a training that left none that can be read."""
    if trial.exit_code is None:
        code = EXIT_UNPROVEN if record.signal is None else EXIT_PASS
        return Measured(verdict=Verdict.STOPPED, exit_code=code, summary="was not trained")
    if trial.exit_code == EXIT_PASS:
        why = f"left no report that can be read: {trial.last_words or 'it ended with 0'}"
        return Measured(verdict=Verdict.INCONCLUSIVE, exit_code=EXIT_UNPROVEN, summary=why)
    words = trial.last_words or f"exit code {trial.exit_code}, and no report"
    return Measured(verdict=Verdict.FAIL, exit_code=trial.exit_code, summary=words)


def _arm(
    name: str, trials: Sequence[Trial], first: Sequence[Trial], record: ComparisonRecord
) -> Arm:
    by_seed = [figures_of(trial.measured) for trial in trials if _passed(trial)]
    return Arm(
        name=name,
        settings={setting: values[name] for setting, values in record.differing.items()},
        trials=list(trials),
        figures=_spreads(by_seed),
        beside={} if trials[0].directory == first[0].directory else _beside(trials, first),
        gates=[
            _gates(trial.seed, trial.measured.gates) for trial in trials if trial.measured.gates
        ],
    )


def figures_of(measured: Measured) -> dict[str, float]:
    """Those that are known, by their names in `Arm.figures`."""
    names = ("end_loss", "tokens_per_s", "peak_memory_bytes", "duration_s", "parameters")
    figures = {name: getattr(measured, name) for name in names}
    figures |= {
        f"val/{split.split}": split.loss
        for split in measured.validation
        if not isinstance(split.loss, str)
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def is_loss(figure: str) -> bool:
    """Whether a smaller one is better, and a difference tells more than a ratio."""
    return figure == "end_loss" or figure.startswith("val/")


def _beside(trials: Sequence[Trial], first: Sequence[Trial]) -> dict[str, Spread]:
    """Same seed, same data, same first values: what differs is the arm."""
    others = {trial.seed: trial.measured for trial in first if _passed(trial)}
    pairs = [(t.measured, others[t.seed]) for t in trials if _passed(t) and t.seed in others]
    return _spreads([_beside_one(*pair) for pair in pairs])


def _beside_one(measured: Measured, other: Measured) -> dict[str, float]:
    mine, others = figures_of(measured), figures_of(other)
    losses = {n: mine[n] - others[n] for n in mine if n in others and is_loss(n)}
    ratios = {n: mine[n] / others[n] for n in mine if others.get(n, 0) > 0 and not is_loss(n)}
    return ratios | (losses if measured.steps == other.steps else {})


def _notes(record: ComparisonRecord, arms: Sequence[Arm]) -> Iterator[str]:
    """Why losses do not compare."""
    if len(steps := _steps(arms)) > 1:
        yield (
            f"trainings of {min(steps):,} to {max(steps):,} steps: losses are compared of those "
            "alone that trained as many"
        )
    if names := [name for name in record.differing if name.startswith(_OF_TEXT)]:
        yield f"arms differ in {listed(names)}: their losses are of other texts, or other tokens"


def _steps(arms: Sequence[Arm]) -> set[int]:
    """Of the trainings that passed."""
    return {t.measured.steps for arm in arms for t in arm.trials if _passed(t)}


def _spreads(by_seed: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    names = dict.fromkeys(name for figures in by_seed for name in figures)
    columns = {name: [f[name] for f in by_seed if name in f] for name in names}
    return {name: _spread(values) for name, values in columns.items()}


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        mean=statistics.fmean(values),
        std=statistics.stdev(values) if len(values) > 1 else None,
        least=min(values),
        most=max(values),
        count=len(values),
    )


def _gates(seed: int, shares: list[list[float]]) -> Gates:
    every = [share for layer in shares for share in layer]
    bins = [0] * 10
    for share in every:
        bins[min(9, max(0, int(share * 10)))] += 1
    return Gates(
        seed=seed,
        shares=shares,
        below=_share(every, lambda share: share < _LOW),
        above=_share(every, lambda share: share > _HIGH),
        histogram=bins,
    )


def _share(values: Sequence[float], counts: Callable[[float], bool]) -> float:
    return sum(map(counts, values)) / len(values)


def _passed(trial: Trial) -> bool:
    return trial.measured.verdict in _PASSED


def _has_failed(trial: Trial) -> bool:
    measured = trial.measured
    if measured.verdict is Verdict.INCONCLUSIVE:  # nothing is known, or two workers differ
        return measured.exit_code not in (EXIT_PASS, EXIT_INTERNAL, EXIT_UNPROVEN)
    return measured.verdict is not Verdict.STOPPED and measured.exit_code != EXIT_PASS


def _exit_code(record: ComparisonRecord, trials: Sequence[Trial]) -> int:
    """What ended it; else of the first training that failed, in the order in which they began;
    else that something is missing."""
    if record.signal in TO_STOP:
        return EXIT_SIGNAL_BASE + record.signal
    codes = [trial.measured.exit_code for trial in trials if _has_failed(trial)]
    codes += [trial.measured.exit_code for trial in trials]
    return next((code for code in codes if code != EXIT_PASS), EXIT_PASS)


def _verdict(arms: Sequence[Arm], failed: Sequence[Arm]) -> Verdict:
    if failed:
        return Verdict.FAIL
    have_passed = all(_passed(trial) for arm in arms for trial in arm.trials)
    return Verdict.PASS if have_passed else Verdict.INCONCLUSIVE


def _summary(record: ComparisonRecord, arms: Sequence[Arm], failed: Sequence[Arm]) -> str:
    if failed:
        return f"{'; '.join(map(_why, failed))}{_of_others(arms, failed)}"
    if missing := [arm for arm in arms if not all(map(_passed, arm.trials))]:
        return _what_is_missing(record, missing)
    num_seeds = max(len(arm.trials) for arm in arms)
    seeds = f", {num_seeds} seeds each" if num_seeds > 1 else ""
    until = "; the deadline came before all steps" if _is_cut_short(arms) else ""
    return f"{_counted(arms)}{seeds}: {_losses(arms)}{until}"


def _do_now(record: ComparisonRecord, trials: Sequence[Trial]) -> str:
    """`trials`: in the order in which they began."""
    if failed := [trial for trial in trials if _has_failed(trial)]:
        read = Kind.FAILED.rule.advice.format(who=failed[0].directory, program=PROGRAM)
        return failed[0].measured.do_now or read
    if record.signal is not None:
        return Kind.STOPPED_ON_REQUEST.rule.advice
    missing = [trial for trial in trials if not _passed(trial)]
    if missing and (record.is_deadline or any(trial.measured.is_deadline for trial in missing)):
        return _MORE_TIME
    if missing:
        return missing[0].measured.do_now or Kind.END_UNSEEN.rule.advice
    for trial in trials:  # a GPU failed, and launch.fail_on lets it pass
        if trial.measured.verdict is Verdict.WARN and trial.measured.do_now:
            return trial.measured.do_now
    return _MORE_SEEDS if len({trial.seed for trial in trials}) == 1 else _CHOOSE


def _counted(arms: Sequence[Arm]) -> str:
    """`2 arms trained 60 steps`"""
    steps = sorted({min(_steps(arms)), max(_steps(arms))})
    told = " to ".join(f"{number:,}" for number in steps)
    plural = "" if len(arms) == 1 else "s"
    return f"{len(arms)} arm{plural} trained {told} step{'' if steps == [1] else 's'}"


def _what_is_missing(record: ComparisonRecord, missing: Sequence[Arm]) -> str:
    names = listed([arm.name for arm in missing])
    if record.signal is not None:
        return f"{Signals(record.signal).name} came before {names} had trained"
    if record.is_deadline or _is_cut_short(missing):
        return f"the deadline came before {names} had trained enough"
    first = {a.name: next(t for t in a.trials if not _passed(t)).measured.summary for a in missing}
    return "; ".join(f"{name}: {why}" for name, why in first.items())


def _is_cut_short(arms: Sequence[Arm]) -> bool:
    return any(trial.measured.is_deadline for arm in arms for trial in arm.trials)


def _why(arm: Arm) -> str:
    """Of its first training that failed."""
    failed = [trial for trial in arm.trials if _has_failed(trial)]
    of = f" ({len(failed)} of {len(arm.trials)} seeds)" if len(arm.trials) > 1 else ""
    return f"{arm.name} failed{of}: {failed[0].measured.summary}"


def _of_others(arms: Sequence[Arm], failed: Sequence[Arm]) -> str:
    passed = [arm.name for arm in arms if arm not in failed and all(map(_passed, arm.trials))]
    return f"; {listed(passed)} passed" if passed else ""


def _losses(arms: Sequence[Arm]) -> str:
    """`end loss full 2.3114, infini 2.2980`"""
    parts = [
        f"{arm.name} {arm.figures['end_loss'].mean:.4f}"
        for arm in arms
        if "end_loss" in arm.figures
    ]
    return f"end loss {', '.join(parts)}" if parts else "no loss is known"
