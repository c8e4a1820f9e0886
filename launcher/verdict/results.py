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


class Ending(Struct, frozen=True):
    """How a worker's process ended: what the policy that stops a run and its verdict both read."""

    name: str
    returncode: int | None = None
    """As in `subprocess.Popen` (signal N is -N). None: it has not ended, it never started, or it
    could not be killed."""
    spawn_error: str | None = None
    """Why its command could not be started."""
    oom: str | None = None
    """What the cgroup counted when SIGKILL ended it; None: no OOM kill is known."""


class WorkerEnd(Ending, frozen=True, kw_only=True):
    """What is left of a worker when its run is over. The supervisor makes it, run.json keeps it."""

    pid: int | None
    """None: it never started."""
    stopped_by_us: bool
    """We ended it, so its return code is no failure of its own."""
    duration_s: float
    last_lines: tuple[str, ...] = ()
    """The end of its output, without prefix, safe to print."""
    evidence: tuple[str, ...] = ()
    """Files that the supervisor wrote to explain its end."""


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
    workers: Sequence[WorkerEnd]
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
