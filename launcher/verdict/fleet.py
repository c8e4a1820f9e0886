"""Many runs as one: what is read of each, and fleet.json. Values only."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal

from msgspec import Struct, field

from launcher.verdict.disagreement import Disagreement
from launcher.verdict.golden import Other
from launcher.verdict.results import Verdict
from launcher.verdict.severity import CauseClass, Repeat, Severity
from launcher.verdict.trace import Trace
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


class WorkerRead(Struct, frozen=True, kw_only=True):
    """What the merge needs of a worker of one run."""

    name: str
    device: Device
    verdict: Verdict
    said: str
    """What is wrong, or what to watch; empty: nothing."""
    cause_class: CauseClass | None
    severity: Severity | None
    repeat: Repeat | None
    returncode: int | None
    is_odd: bool
    """Its own run names it for other bits."""
    golden_step: int | None = None
    """The first in which it has other bits than a golden file; None: in none, or there is no file.
    """
    is_slow: bool
    """Its own run has found it slow."""
    figures: Figures
    trace: Trace | None
    key: Mapping[str, Scalar]
    """What another worker's must equal for their bits to be compared."""
    why_not: str | None
    """Why its bits can be compared with nobody's; None: they can."""
    is_rank: bool = False
    """Of a job: its ranks sum what they computed, so that a fault of one is in the bits of all."""


class PartRead(Struct, frozen=True, kw_only=True):
    """Which part of a job of several nodes a run was."""

    job: tuple[str, ...]
    """The same for all of its parts."""
    name: str
    """Of the node, in that job."""
    failed_first: tuple[str, str] | None = None
    """Node and worker that ended the job from elsewhere; None: it ended here, or nobody is named.
    """


class RunRead(Struct, frozen=True, kw_only=True):
    """One run, as its directory tells it."""

    directory: str
    """As it is shown."""
    path: str
    """Absolute."""
    page: str | None
    """Where its report.html is, relative to the fleet's page; None: it has none."""
    host: str = ""
    node: str | None = None
    scheduler: Scheduler | None = None
    started_at: str | None = None
    duration_s: float | None = None
    verdict: Verdict = Verdict.INCONCLUSIVE
    exit_code: int = 0
    summary: str = ""
    culprits: list[str] = []
    drill: str | None = None
    fails_on_speed: bool = False
    step: int | None = None
    """Of its first disagreement."""
    is_dead: bool = False
    """It never began, has no end, or cannot be read."""
    part: PartRead | None = None
    """None: of no job of several nodes."""
    workers: list[WorkerRead] = []


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


class FleetRun(Struct, frozen=True, kw_only=True):
    directory: str
    path: str
    page: str | None
    """Its report.html, relative to the fleet's page; null: it has none."""
    host: str
    node: str | None
    scheduler: Scheduler | None
    started_at: str | None
    duration_s: float | None
    verdict: Verdict
    """The gravest of the run's own and of what the merge has found."""
    exit_code: int
    """The run's own."""
    summary: str
    drill: str | None
    is_dead: bool
    workers: list[FleetWorker]

    @property
    def started_s(self) -> float | None:
        """Seconds since 1970; None: not told, or no time."""
        with suppress(ValueError, OverflowError, OSError):
            return datetime.fromisoformat(self.started_at or "").timestamp()
        return None


class FleetResult(Struct, frozen=True, kw_only=True):
    """fleet.json without its schema number."""

    verdict: Verdict
    exit_code: int
    """Of the gravest finding."""
    summary: str
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
