"""Many runs as one: what is read of each, and fleet.json. Values only."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from msgspec import Struct, field

from launcher.verdict.disagreement import Disagreement
from launcher.verdict.golden import Other, key_of
from launcher.verdict.nodes import JobPart
from launcher.verdict.record import RunRecord
from launcher.verdict.results import Conclusion, Outcome, RunResult, Verdict, WorkerResult
from launcher.verdict.severity import CauseClass, Repeat, Severity
from model_check.config.ranks import JOBS
from model_check.errors import EXIT_DISAGREEMENT, EXIT_PASS
from model_check.events import Scalar

Scheduler = Literal["slurm", "kubernetes"]
Seen = Literal["bits", "nonfinite", "slow", "dead", "not compared", "run"]
Place = tuple[int, str]
"""Number of a run, name of its worker."""


class Device(Struct, frozen=True, kw_only=True):
    """A GPU, as NVML described it. null: not told, or a CPU worker."""

    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    serial: str | None = None


class Figures(Struct, frozen=True, kw_only=True):
    """Of one worker. null: not told."""

    steps: int
    duration_s: float
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    temperature_max_c: int | None = None


class FleetInput(Struct, frozen=True, kw_only=True):
    """A run that is merged, as its report tells it, and where it lies."""

    directory: str
    """As it is shown."""
    path: str
    """Absolute."""
    page: str | None
    """Where its report.html is, relative to the fleet's page; None: it has none."""
    result: RunResult
    record: RunRecord | None = None
    """What was asked for; None: nothing of the run can be read."""
    devices: Mapping[str, Device] = {}
    """Worker -> its GPU."""
    job: tuple[str, ...] | None = None
    """The same for all parts of a job of several nodes; None: it ran on one node."""
    is_dead: bool = False
    """It never began, has no end, or cannot be read."""

    @property
    def workers(self) -> list[WorkerResult]:
        return self.result.workers

    @property
    def host(self) -> str:
        return self.record.host if self.record else ""

    @property
    def node(self) -> str | None:
        return self.record.node if self.record else None

    @property
    def drill(self) -> str | None:
        return self.record.drill if self.record else None

    @property
    def is_job(self) -> bool:
        """Ranks sum what they computed, so that a fault of one is in the bits of all."""
        return self.record is not None and self.record.mode in JOBS

    @property
    def part(self) -> JobPart | None:
        return self.record.part if self.record else None

    @property
    def failed_first(self) -> tuple[str, str] | None:
        """The node and the worker that ended its job from elsewhere; None: it ended here, or nobody
        is named."""
        ended, part = self.result.elsewhere, self.part
        if part is None or ended is None or ended.worker is None or ended.node == part.name:
            return None
        return ended.node, ended.worker

    @property
    def named(self) -> list[tuple[str, str]]:
        """The node and the name of each worker that its run names, as `failed_first` has them."""
        return [(self.part.name, name) for name in self.result.culprits] if self.part else []

    def is_odd(self, worker: WorkerResult) -> bool:
        """Whether its run names it for other bits."""
        return self.result.exit_code == EXIT_DISAGREEMENT and worker.name in self.result.culprits

    def key_of(self, worker: WorkerResult) -> dict[str, Scalar]:
        """What another worker's must equal for their bits to be compared: the key of a golden file,
        and what else may change bits rightly from machine to machine. The driver compiles kernels,
        ranks of a job sum what so many of them computed."""
        assert self.record is not None, "it has workers"
        versions = self.record.versions
        key = key_of(self.record.groups.get(worker.name, worker.name), worker.detail)
        key["driver"] = versions.get("driver")
        key["model_check"] = versions.get("model_check")
        if worker.detail.get("attention_backend") == "flash_attn":  # a package of its own
            key["flash_attn"] = versions.get("flash_attn")
        if self.is_job:
            ranks = self.part.num_ranks if self.part else len(self.workers)
            key |= {"mode": self.record.mode, "ranks": ranks}
        return key

    def why_not(self, worker: WorkerResult) -> str | None:
        """Why its bits can be compared with nobody's; None: they can."""
        if self.record is not None and self.record.stands_alone is not None:
            return self.record.stands_alone
        if worker.verdict is Verdict.INVALID:
            return worker.cause or "its run calls it INVALID"
        # Ranks are compared with each other all the same: they have the same sums.
        if worker.detail.get("deterministic") is False:
            return "system.deterministic is false"
        # A run of a command of the user's own, or one that ended before its first step.
        is_training = self.result.exit_code == EXIT_PASS and worker.steps
        return "it told no step" if worker.trace is None and is_training else None


class Finding(Struct, frozen=True, kw_only=True):
    """Something that is wrong, or to be watched, or not known."""

    seen: Seen
    """bits: other bits than its equals, of other runs, too; nonfinite: a NaN where they had none;
    slow: slower than the fleet; dead: a run that never began, did not end or cannot be read; not
    compared: with nobody; run: what the run itself has found."""
    run: int
    """Number in `runs`."""
    directory: str
    host: str
    node: str | None
    """What its scheduler calls the machine; null: not told."""
    worker: str | None
    """null: the run as a whole."""
    device: Device = Device()
    verdict: Verdict
    cause_class: CauseClass | None
    severity: Severity | None
    repeat: Repeat | None = None
    exit_code: int
    """0: it fails nothing."""
    step: int | None = None
    what: str
    difference: Disagreement | None = None
    """Of other bits: `majority` (or the first of those that differ) beside this worker."""
    drill: str | None = None
    """A fault that was injected into the run."""


class Group(Struct, frozen=True, kw_only=True):
    """Workers whose bits must be equal, whatever machine they are in."""

    key: dict[str, Any]
    workers: int
    runs: int
    devices: int
    """GPUs, or CPU workers: one that is in several runs counts once."""
    steps: int
    """The most that one of them told."""
    compared_steps: int
    """Told by workers that were equal to another's, all together."""
    others: list[Other] = []
    """What differs from the largest group: `golden` is that group's value."""


class FleetWorker(Struct, frozen=True, kw_only=True):
    name: str
    verdict: Verdict
    """With what the merge has found."""
    severity: Severity | None
    group: int | None
    """Number in `groups`; null: it was compared with nobody."""
    device: Device
    figures: Figures
    speed: float | None = None
    """As a multiple of its group's median; null: too few equals, or not measured."""


class FleetRun(Outcome, frozen=True, kw_only=True):
    """`verdict`: the gravest of the run's own and of what the merge has found. `exit_code`,
    `summary`: the run's own."""

    directory: str
    path: str
    page: str | None
    """Its report.html, relative to the fleet's page; null: it has none."""
    host: str
    node: str | None
    scheduler: Scheduler | None
    started_at: datetime | None
    duration_s: float | None
    drill: str | None
    is_dead: bool
    workers: list[FleetWorker]

    @property
    def started_s(self) -> float | None:
        """Seconds since 1970; None: not told."""
        return None if self.started_at is None else self.started_at.timestamp()


class FleetResult(Conclusion, frozen=True, kw_only=True, tag_field="kind", tag="fleet"):
    """fleet.json without its schema number. `exit_code`: of the gravest finding."""

    findings: list[Finding]
    """The gravest first."""
    groups: list[Group]
    """The largest first."""
    notes: list[str]
    """What was left out, or should be known."""
    runs: list[FleetRun]


class Compared(Struct):
    """What the comparison of bits has shown. Places are those of workers."""

    odd: dict[Place, "OddBits"] = field(default_factory=dict)
    cleared: set[Place] = field(default_factory=set)
    """They have the bits of a strict majority, in every step."""
    equal: set[Place] = field(default_factory=set)
    """Those, and ranks of a job that is alone: they have the bits of another worker."""
    unlike: dict[Place, str] = field(default_factory=dict)
    """They turned out not to be comparable, and why."""


class OddBits(Struct, frozen=True, kw_only=True):
    step: int
    """The first that differs; where events are gone, the last of those among which it is."""
    where: str
    """`step 57`, `steps 41 to 44`"""
    difference: Disagreement | None
    """None: the events are gone."""
    num_right: int
    """Devices, or jobs, of the strict majority that it differs from; 0: there is none."""
    is_alone: bool
    """Its own voter had the majority's bits there, too: of a rank, another of its job."""
    is_shared: bool
    """Another device, or job, gave the same wrong bits: no GPU does that."""
