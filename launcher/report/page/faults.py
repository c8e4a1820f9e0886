"""Since when something is wrong with a worker. Pure."""

from msgspec import Struct

from launcher.report.page.story import Story
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from model_check.errors import EXIT_HANG


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
    facts, curve = story.facts(worker.name), story.curve(worker.name)
    confessed = facts.first_nonfinite or facts.broken
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
        return Since(facts.last_step, story.seconds(at_ns), is_after=True)
    return Since()
