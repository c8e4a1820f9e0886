"""What is concluded from a run that is over: values only."""

from collections.abc import Set
from enum import StrEnum
from typing import Any

from msgspec import Struct

from launcher.verdict.disagreement import Disagreement
from launcher.verdict.health import Health
from launcher.verdict.severity import CauseClass, Severity
from launcher.verdict.slow import Slow
from model_check.events import Scalar


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


class SplitResult(Struct, frozen=True, kw_only=True):
    """The latest evaluation of one validation split."""

    split: str
    step: int
    """Optimizer steps done before it."""
    loss: float | str | None
    perplexity: float | None
    tokens_per_s: float | None


class WorkerResult(Struct, frozen=True, kw_only=True):
    """One row of the table, one entry of report.json."""

    name: str
    verdict: Verdict
    cause: str | None
    steps: int
    loss_first: float | str | None
    loss_last: float | str | None
    tokens_per_s: float | None
    peak_memory_bytes: int | None
    duration_s: float
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
    """Of the gravest symptom of its GPU, where a symptom decided or supports the verdict; of a host
    that could not start the worker or had no memory for it."""
    symptoms: list[str] = []
    """What condemns its GPU, and what to do. The run's summary tells it, too."""


class LastStep(Struct, frozen=True, kw_only=True):
    """The fingerprints of the last step, of workers with the same ones."""

    workers: list[str]
    step: int
    schema: int
    fp: dict[str, dict[str, str]]
    """Quantity -> tensor -> fingerprint, hex."""


class RunResult(Struct, frozen=True, kw_only=True):
    """report.json without its schema number."""

    verdict: Verdict
    exit_code: int
    summary: str
    culprits: list[str]
    disagreement: Disagreement | None
    workers: list[WorkerResult]
    leftovers: list[int]
    dropped_lines: int
    run: dict[str, Any]
    fingerprints: list[LastStep] = []
    """Of a run that came to its last step."""


class Judgement(Struct, frozen=True):
    """A result, and what its summary leaves to the lines that end a run."""

    result: RunResult
    unexplained: Set[str]
    """Workers with a cause that the summary does not tell."""
    quoted: Set[str]
    """Workers whose last line the summary quotes."""
