"""Of each worker: since when something is wrong with it, and what to do next. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from launcher.report.page.story import Story
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.severity import CauseClass, Repeat, Severity
from model_check.errors import EXIT_HANG, EXIT_SIGNAL_BASE, EXIT_UNNAMED, EXIT_UNPROVEN
from model_check.utils.words import listed

_TROUBLED = (Verdict.FAIL, Verdict.SUSPECT, Verdict.INVALID, Verdict.INCONCLUSIVE, Verdict.WARN)
_AGAIN = "Compute the steps again: bash run.sh replay {directory}"
_NEW_GOLDEN = (
    "Make a golden file of such a device with this software: run three workers or more, then "
    "bash run.sh report RUN_DIR --write-golden FILE"
)
_TRY_AGAIN = (
    "Run again, with three workers or more: kernels are tried anew. A GPU that fails again where "
    "its equals pass goes out of service; if another one fails, the kernel varies."
)
_OF_CLASS = {
    CauseClass.SOFTWARE: "No GPU is to blame: the same went wrong in more than one. Look at the "
    "settings, the data and the software.",
    CauseClass.HOST: "No GPU is to blame. Look at this host's limits: bash run.sh doctor",
    CauseClass.USER: "No GPU is to blame: change the setting that the message names.",
}


class Since(Struct, frozen=True):
    """When a fault was seen first. None: not known."""

    step: int | None = None
    seconds: float | None = None
    """Since the run began."""
    is_after: bool = False
    """After that step, whose successor was never told."""

    def __str__(self) -> str:
        where = "" if self.step is None else f"{'after ' if self.is_after else ''}step {self.step}"
        when = "" if self.seconds is None else f"{self.seconds:.1f} s after the start"
        return ", ".join(filter(None, (where, when)))


def difference_of(worker: str, result: RunResult) -> Disagreement | None:
    """The first in which it is odd, or, where nobody is, one of those that differ."""
    for found in filter(None, [result.disagreement, *result.further]):
        if worker in (found.odd or found.bits):
            return found
    return None


def since(worker: WorkerResult, result: RunResult, story: Story) -> Since:
    history, curve = story.history(worker.name), story.curve(worker.name)
    confessed = history.first_nonfinite or history.broken
    if confessed is not None:
        return Since(confessed.step, story.seconds(confessed.t))
    if (found := difference_of(worker.name, result)) is not None:
        return Since(found.step)
    standing = result.golden.of(worker.name) if result.golden is not None else None
    if standing is not None and standing.disagreement is not None:
        return Since(standing.disagreement.step)
    if worker.symptoms and (gpu := story.gpus.get(worker.name)) and gpu.happened:
        return Since(seconds=story.seconds(gpu.happened[0].ns))
    if worker.slow is not None and worker.verdict in (Verdict.WARN, Verdict.FAIL):
        return Since(worker.slow.since_step, story.seconds(worker.slow.since_ns))
    if worker.verdict is Verdict.FAIL and not worker.symptoms and curve.last_ns:
        at_ns = curve.before_end_ns if result.exit_code == EXIT_HANG else curve.last_ns
        return Since(history.last_step, story.seconds(at_ns), is_after=True)
    return Since()


def troubled(result: RunResult) -> list[WorkerResult]:
    """Those of which there is something to say, the culprits first."""
    found = [worker for worker in result.workers if worker.verdict in _TROUBLED]
    return sorted(
        found,
        key=lambda w: (w.name not in result.culprits, _TROUBLED.index(w.verdict)),
    )


def next_step(result: RunResult, directory: str) -> str:
    """What to do now, in a sentence or two."""
    named = [worker for worker in troubled(result) if worker.name in result.culprits]
    found = named or troubled(result)
    if not found:
        return _without_trouble(result)
    if sick := [worker for worker in found if worker.symptoms]:
        return "; ".join(f"{worker.name}: {worker.symptoms[0]}" for worker in sick)
    if gravest := [worker for worker in found if worker.severity is Severity.ISOLATE]:
        return _isolate(gravest, directory)
    first = found[0]
    if told := _by_golden(first.name, result, directory):
        return told
    if first.cause_class in _OF_CLASS:
        return _OF_CLASS[first.cause_class]
    if (found_in := difference_of(first.name, result)) is not None and found_in.is_of_trial:
        return _TRY_AGAIN
    if result.exit_code == EXIT_UNNAMED:
        return f"{_AGAIN.format(directory=directory)}; or run with three workers or more."
    if result.exit_code == EXIT_HANG:
        where = f"See below where {first.name} stood"
        return f"{where}, then run again: a GPU that hangs twice goes out of service."
    if first.verdict is Verdict.WARN:
        return "; ".join(dict.fromkeys(text for w in found for text in w.warnings[:1]))
    if first.severity is Severity.MONITOR:
        return _monitor(found, directory)
    return f"Read the last lines of {first.name} below; bash run.sh doctor looks at this machine."


def _by_golden(worker: str, result: RunResult, directory: str) -> str | None:
    """Where a golden file decides."""
    golden = result.golden
    standing = None if golden is None else golden.of(worker)
    if result.exit_code == EXIT_UNPROVEN and standing is not None and not standing.is_comparable:
        return _NEW_GOLDEN
    is_named = golden is not None and worker in golden.odd and result.disagreement is None
    return f"{_AGAIN.format(directory=directory)} {worker}" if is_named else None


def _isolate(workers: Sequence[WorkerResult], directory: str) -> str:
    names = listed([worker.name for worker in workers])
    whose = "its" if len(workers) == 1 else "their"
    kept = (
        f" Keep {directory}: it holds {whose} evidence." if any(w.evidence for w in workers) else ""
    )
    return f"Take {names} out of service; the others are not in doubt.{kept}"


def _monitor(workers: Sequence[WorkerResult], directory: str) -> str:
    names = listed([worker.name for worker in workers])
    if all(worker.repeat is Repeat.TRANSIENT for worker in workers):
        return f"Keep {names} in service and run again, longer: a second time means out of service."
    return _AGAIN.format(directory=directory)


def _without_trouble(result: RunResult) -> str:
    if result.exit_code > EXIT_SIGNAL_BASE:
        return "Run again: it was stopped, and nothing is known against any worker."
    if result.verdict is Verdict.PASS:
        return "Nothing. A longer run finds rarer faults."
    return "Run again: too little was compared to tell anything."
