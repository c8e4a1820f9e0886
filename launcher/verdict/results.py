"""What is concluded from a run that is over: values only."""

from collections.abc import Set
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

from launcher.verdict.disagreement import Disagreement, Replay
from launcher.verdict.golden import GoldenResult
from launcher.verdict.health import Health
from launcher.verdict.nodes import Elsewhere
from launcher.verdict.severity import CauseClass, Repeat, Severity
from launcher.verdict.slow import Slow
from launcher.verdict.trace import Trace
from model_check.events import ExitCode, Natural, Scalar

# What is read may be damaged, or another's: numbers are bounded as far as figures are made of them.
WorkerName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
"""It is a part of the names of its files."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Up to 30 years, as any run of ours."""
Rate = Annotated[float, Meta(ge=0, le=1e18)]


class Verdict(StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    """Nothing failed, but something of its GPU should be watched, or is not known. Of a run: a GPU
    failed, and launch.fail_on lets it pass."""
    FAIL = "FAIL"
    SUSPECT = "SUSPECT"
    """Differs from the majority of its equals, or its state changed by itself."""
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    """It could not be compared: nothing is known of its GPU."""
    STOPPED = "STOPPED"
    """Ended by the supervisor: nothing is known against it."""


INNOCENT = (Verdict.PASS, Verdict.STOPPED)
"""Of workers: nothing is known against them."""


class SplitResult(Struct, frozen=True, kw_only=True):
    """The latest evaluation of one validation split."""

    split: str
    step: int
    """Optimizer steps done before it."""
    loss: float | str | None
    perplexity: float | None
    tokens_per_s: float | None
    token_accuracy: float | None = None
    """Of training.stage=prompt_target, as exact_match: shares, 0 to 1."""
    exact_match: float | None = None


class WorkerResult(Struct, frozen=True, kw_only=True):
    """One row of the table, one entry of report.json."""

    name: WorkerName
    verdict: Verdict
    kind: str | None = None
    """Which row of the table in docs/findings.md decided; null: an older version wrote this."""
    cause: str | None
    steps: Natural
    loss_first: float | str | None
    loss_last: float | str | None
    tokens_per_s: Rate | None
    peak_memory_bytes: Natural | None
    duration_s: Seconds
    waiting: float | None = None
    """The share of its steps behind the first in which it waited for the other ranks of its job, 0
    to 1; null: it trained alone, or hardly at all."""
    returncode: int | None
    gpu: dict[str, Any] | None = None
    detail: dict[str, Scalar] = {}
    validation: list[SplitResult] = []
    notes: list[str] = []
    evidence: list[str] = []
    last_lines: list[str] = []
    telemetry: Health | None = None
    """What NVML said of its GPU; None: there was no telemetry."""
    slow: Slow | None = None
    """Where it was slower than its equals, or than before."""
    warnings: list[str] = []
    """What of its GPU should be watched, or is not known, and what to do."""
    cause_class: CauseClass | None = None
    severity: Severity | None = None
    """How its cause is classed, and how grave it is, or the gravest symptom of its GPU where one
    decided or supports the verdict; null: not classed."""
    repeat: Repeat | None = None
    """Of other bits and of a NaN: whether they came again when the step was computed again."""
    do_now: str | None = None
    """What to do with its GPU, and why, in words; null: nothing is to be done."""
    symptoms: list[str] = []
    """What condemns its GPU, and what to do. The run's summary tells it, too."""
    trace: Trace | None = None
    """All its steps as a few numbers, for a comparison with other runs (`run.sh report DIR ...`);
    null: it told no step, or an older version wrote this."""


class LastStep(Struct, frozen=True, kw_only=True):
    """The fingerprints of the last step, of workers with the same ones."""

    workers: list[str]
    step: int
    schema: int
    fp: dict[str, dict[str, str]]
    """Quantity -> tensor -> fingerprint, hex."""


class Scope(Struct, frozen=True, kw_only=True):
    """What a run that passed has shown: of the worker that did least."""

    steps: int
    compared_steps: int
    """At which a worker had the bits of all its equals; 0: nothing was compared."""
    fingerprints: str
    """What was compared in each step: `full`: the state and what flows; `rotate`: a part of that by
    turns, all of it in the first and the last; `off`: loss and gradient norm."""
    flops: float | None
    """Floating point operations of the matrix products in its steps; causal attention."""
    dtype: str | None
    """Of matrix products."""
    kernels: list[str]
    """The attention backends that were used."""
    memory_touched_bytes: int | None
    """Peak of its allocations; None, like `memory_bytes`: not told, or a CPU."""
    memory_bytes: int | None
    """All that its GPU has."""
    max_rate: float | None
    """With a confidence of 95 %, a smaller share of a worker's steps has an error: 3 /
    compared_steps. None: too few steps to tell."""
    not_shown: list[str]
    golden: str | None = None
    """The golden file whose bits every worker had; None: there was none, or not every worker."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of a run, or of several that belong together."""

    verdict: Verdict
    exit_code: ExitCode
    summary: str

    @property
    def line(self) -> str:
        return f"{self.verdict}: {self.summary} (exit code {self.exit_code})"


class Conclusion(Outcome, frozen=True, kw_only=True):
    """What every report begins with: of a run, of rounds, of a comparison, of a fleet."""

    do_now: str = ""
    """What to do, in a sentence or two; empty: an older version wrote this."""

    @property
    def last_lines(self) -> list[str]:
        """With which a terminal ends."""
        return [f"do now: {self.do_now}", self.line] if self.do_now else [self.line]


class RunResult(Conclusion, frozen=True, kw_only=True, tag_field="kind", tag="report"):
    """report.json without its schema number."""

    culprits: list[str]
    disagreement: Disagreement | None
    """The first."""
    workers: list[WorkerResult]
    leftovers: list[int]
    dropped_lines: int
    run: dict[str, Any]
    further: list[Disagreement] = []
    """Found later, where the run went on without those that were named (launch.on_suspect)."""
    replays: list[Replay] = []
    """What came of computing the steps to each fault again."""
    fingerprints: list[LastStep] = []
    """Of a run that came to its last step."""
    scope: Scope | None = None
    """None: it did not pass, or trained nothing."""
    golden: GoldenResult | None = None
    """How its workers stand to a golden file; None: no file was asked for."""
    elsewhere: Elsewhere | None = None
    """What ended the job on another node; None: it ended here, or is no job of several nodes."""


class Decision(Struct, frozen=True):
    """What a run comes down to."""

    verdict: Verdict
    exit_code: int
    culprits: list[str]
    """All that are named, whoever ended the run first: its exit code is that one's."""


class Judgement(Struct, frozen=True):
    """A result, and what its summary leaves to the lines that end a run."""

    result: RunResult
    unexplained: Set[str]
    """Workers with a cause that the summary does not tell."""
    quoted: Set[str]
    """Workers whose last line the summary quotes."""
    is_training: bool = False
    """What it shows of the hardware is for the report alone."""
