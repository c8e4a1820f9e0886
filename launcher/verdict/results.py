"""What is known of a run that is over, and what is concluded from it: values only."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from launcher.verdict.agreement import Disagreement
from launcher.verdict.health import Health
from launcher.verdict.severity import CauseClass, Severity
from launcher.verdict.steps import History
from model_check.errors import EXIT_SIGNAL_BASE
from model_check.events import Scalar


class Verdict(StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    """Nothing failed, and something of its GPU is to be watched, or is not known. Of a run: a GPU
    failed that launch.fail_on lets pass."""
    FAIL = "FAIL"
    SUSPECT = "SUSPECT"
    """Differs from the majority of its equals."""
    INCONCLUSIVE = "INCONCLUSIVE"
    STOPPED = "STOPPED"
    """Ended by the supervisor: nothing is known against it."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker's process ended: the part of the supervisor's record that a report needs."""

    name: str
    pid: int | None
    returncode: int | None
    """As `subprocess.Popen` has it (signal N is -N); None: it never ran, or could not be reaped."""
    stopped_by_us: bool
    duration_s: float
    spawn_error: str | None = None
    last_lines: list[str] = []
    evidence: list[str] = []
    """Files that the supervisor wrote to explain its end."""
    oom: str | None = None
    """It was killed by SIGKILL, and what the cgroup counted then."""


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the whole run ended."""

    exit_code: int
    reason: str | None = None
    """Why it was stopped; None: every worker ended by itself with exit code 0."""
    culprits: list[str] = []
    tied: list[str] = []
    """Workers that failed first together: none is blamed."""
    requests: list[int] = []
    """Signals that we got and that ask to end, or to report."""
    is_hang: bool = False
    """We ended it for silence: an exit code 124 may also be a worker's own."""
    disagreement: Disagreement | None = None
    leftovers: list[int] = []
    """Processes that could not be killed."""
    dropped_lines: int = 0
    """Lines that a slow terminal missed; the log files have them."""

    @property
    def is_by_signal(self) -> bool:
        """Somebody asked for this end, and nobody is blamed."""
        is_blameless = not (self.culprits or self.tied)
        return is_blameless and self.exit_code - EXIT_SIGNAL_BASE in self.requests


class Case(Struct, frozen=True):
    """All that a verdict is made of."""

    run: dict[str, Any]
    """run.json: command, host, versions, GPUs, data."""
    end: RunEnd
    workers: Sequence[Ended]
    histories: Mapping[str, History]
    agreed_steps: Mapping[str, int]
    """Worker -> steps at which it had the bits of all its equals; absent: it has no equal."""


class SplitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The latest evaluation of one validation split."""

    split: str
    step: int
    """Optimizer steps done before it."""
    loss: float | str | None
    perplexity: float | None
    tokens_per_s: float | None


class WorkerResult(msgspec.Struct, frozen=True, kw_only=True):
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
    warnings: list[str] = []
    """What of its GPU is to be watched, or is not known, and what to do."""
    cause_class: CauseClass | None = None
    severity: Severity | None = None
    """Of the gravest symptom of its GPU, where it decided the verdict or stands behind it."""
    symptoms: list[str] = []
    """What condemns its GPU, and what to do; the run's summary tells it, too."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """report.json without its schema number."""

    verdict: Verdict
    exit_code: int
    summary: str
    culprits: list[str]
    disagreement: str | None
    workers: list[WorkerResult]
    leftovers: list[int]
    dropped_lines: int
    run: dict[str, Any]
