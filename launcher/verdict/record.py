"""run.json: what was asked for, where it ran, how it ended. Values only; `report` reads it again.

A field that may be absent from the file is None, and None is then not written: the run has not come
so far, its launcher was killed, or an older version wrote the file.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from launcher.verdict.disagreement import Disagreement, Mismatch, Replay
from launcher.verdict.facts import WorkerFacts, changed_alike
from launcher.verdict.golden import GoldenResult
from launcher.verdict.health import Health
from launcher.verdict.nodes import Elsewhere, JobPart
from launcher.verdict.own_command import CheckedCommand
from launcher.verdict.past import EarlierFaults
from launcher.verdict.results import Seconds, WorkerName
from launcher.verdict.severity import Symptom
from launcher.verdict.slow import Slow
from model_check.config.ranks import JOBS
from model_check.errors import EXIT_DISAGREEMENT, EXIT_PASS, EXIT_SIGNAL_BASE, EXIT_UNNAMED
from model_check.events import ExitCode, MonotonicNs

FAULT_OF_HOST = " (a fault of this host; `run.sh doctor` looks at its limits)"
_ERROR = "error: "
"""How our programs begin the line that says why they end."""
NO_HOST_MEMORY = "killed for want of host memory: SIGKILL (9)"


class WorkerEnd(Struct, frozen=True, kw_only=True):
    """What is left of a worker when its run is over. The supervisor makes it, run.json keeps it."""

    name: str
    returncode: int | None = None
    """As in `subprocess.Popen` (signal N is -N). None: it has not ended, it never started, or it
    could not be killed."""
    spawn_error: str | None = None
    """Why its command could not be started."""
    oom: str | None = None
    """What the cgroup counted when SIGKILL ended it: the kernel did, for want of host memory. None:
    no OOM kill is known."""
    pid: int | None
    """None: it never started."""
    stopped_by_us: bool
    """We ended it, so its return code is no failure of its own."""
    duration_s: Seconds
    last_lines: tuple[str, ...] = ()
    """The end of its output, without prefix, safe to print."""
    evidence: tuple[str, ...] = ()
    """Files that the supervisor wrote to explain its end."""

    @property
    def last_error(self) -> str | None:
        """Why it ended, by its last line, as our programs say it; None: the line says something
        else."""
        last = self.last_lines[-1] if self.last_lines else ""
        return last.removeprefix(_ERROR) if last.startswith(_ERROR) else None


class Stop(Struct, frozen=True):
    """Why a run ends before all its workers do: the supervisor decides it, the verdict tells it."""

    reason: str | None
    """A sentence for people; None only in a `RunEnd`."""
    exit_code: ExitCode
    culprits: tuple[str, ...] = ()
    """Names of the workers that are blamed; none: a signal to us, or a tie."""
    is_hang: bool = False
    """It ends for silence: what the workers are doing is saved before any of them is stopped. An
    exit code 124 alone may also be a worker's own."""
    is_deadline: bool = False
    """It ends for launch.deadline_s: its workers are judged by what they did until then."""
    tied: tuple[str, ...] = ()
    """Names of the workers that failed together: it is unknown which was first, so none is
    blamed."""
    elsewhere: Elsewhere | None = None
    """It ends for what another node told, or for a node that is not heard any more."""
    outlasts_deaths: bool = False
    """Also where nobody is named, a worker that has died meanwhile died of this."""


class RunEnd(Stop, frozen=True, kw_only=True):
    """How the whole run ended: by a Stop, or because every worker was done."""

    reason: str | None = None
    """Why it was stopped; None: every worker ended by itself with exit code 0."""
    requests: tuple[int, ...] = ()
    """The signals that we got and that ask to end, or to report, each once."""
    disagreement: Disagreement | None = None
    mismatch: Mismatch | None = None
    """Why workers could not be compared."""
    further: tuple[Disagreement, ...] = ()
    """Those that were found later, where the run went on without the workers named first."""
    replays: tuple[Replay, ...] = ()
    """What came of computing the steps to each fault again."""
    leftovers: tuple[int, ...] = ()
    """Pids that are alive after everything: SIGKILL has no effect on them."""
    dropped_lines: int = 0
    """Lines that a slow terminal missed; the log files have them."""

    @property
    def is_by_bits(self) -> bool:
        """No worker, node or request ended it: all is done, or a comparison of bits ended it."""
        return self.exit_code in (EXIT_PASS, EXIT_DISAGREEMENT, EXIT_UNNAMED)

    @property
    def disagreements(self) -> list[Disagreement]:
        return [*filter(None, [self.disagreement]), *self.further]

    @property
    def workers(self) -> set[str]:
        """All that it names."""
        named = {*self.culprits, *self.tied}
        return named.union(*(found.bits for found in self.disagreements))

    @property
    def is_by_signal(self) -> bool:
        """A signal to us asked for this end, and no worker is blamed."""
        is_blameless = not (self.culprits or self.tied)
        return is_blameless and self.exit_code - EXIT_SIGNAL_BASE in self.requests


class RunRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="run"):
    """run.json without its schema number. Nothing in it looks like a secret."""

    command: list[str]
    started_at: Annotated[datetime, Meta(tz=True)]
    started_ns: MonotonicNs
    pid: int
    """The launcher's."""
    cwd: str
    host: str
    scheduler: Literal["slurm", "kubernetes"] | None = None
    """What started it; None: neither."""
    node: str | None = None
    """What the scheduler calls this machine; None: it has not told."""
    kernel: str
    python: str
    run_dir: str | None = None
    preset: str
    device: str
    mode: str
    drill: str | None
    asked_for: dict[str, Any] | None = None
    """The settings that neither the preset nor a default gave."""
    steps: int | None
    """The step at which training ends; None: a foreign command."""
    checked: CheckedCommand | None = None
    """A command of a person's own, whose steps are compared; None: our trainer, or a command that
    is compared with nothing."""
    workers: list[WorkerName]
    groups: dict[str, str]
    """Worker -> the group whose members must agree bit for bit."""
    not_compared: str | None
    """Why the bits of workers are not compared; None: they are."""
    fail_on: list[str] | None = None
    on_suspect: str | None = None
    telemetry_interval_s: float | None = None
    versions: dict[str, str | None]
    gpus: dict[str, dict[str, Any]]
    """Worker -> its GPU as NVML described it."""
    notes: list[str] | None = None
    part: JobPart | None = None
    """Its part of a job of several nodes; None: of no such job."""
    data: dict[str, Any] | None = None
    """What the preparer said of the token cache."""
    duration_s: Seconds | None = None
    end: RunEnd | None = None
    ended: tuple[WorkerEnd, ...] | None = None
    healths: dict[str, Health | None] | None = None
    """Of the workers whose GPUs were watched; None: nothing was told of the GPU."""
    earlier_faults: dict[str, EarlierFaults] | None = None
    """What the history held when the run was over, of the workers that it concerned: a report that
    is made again, maybe elsewhere, says the same."""
    golden: GoldenResult | None = None
    """How its workers stand to a golden file; None: no file was asked for."""

    @property
    def own_command(self) -> list[str]:
        """What stands behind `--`, without its secrets; empty: our trainer ran."""
        return self.command[self.command.index("--") + 1 :] if "--" in self.command else []

    @property
    def stands_alone(self) -> str | None:
        """Why its bits are compared with no other run; None: they may be."""
        within = "a command of your own is compared within its run alone"
        return self.not_compared or (within if self.checked is not None else None)

    def called(self, worker: str) -> str:
        """Of several nodes, each may have a GPU3."""
        return worker if self.part is None else self.part.called(worker)

    @property
    def asked(self) -> dict[str, Any]:
        """What report.json repeats: all but how the run ended."""
        without_end = msgspec.structs.replace(
            self, end=None, ended=None, healths=None, earlier_faults=None, golden=None
        )
        asked: dict[str, Any] = msgspec.to_builtins(without_end)
        del asked["kind"]
        return asked


class Case(Struct, frozen=True):
    """All that a verdict is made of."""

    record: RunRecord
    end: RunEnd
    workers: Sequence[WorkerEnd]
    all_facts: Mapping[str, WorkerFacts]
    agreed_steps: Mapping[str, int]
    """Worker -> steps at which it had the bits of all its equals; absent: it has no equal."""
    lacking: Mapping[str, Collection[str]] = {}
    """Worker -> quantities that its equals told in some step and it did not."""
    symptoms: Mapping[str, Sequence[Symptom]] = {}
    """Worker -> what telemetry tells of its GPU."""
    slow: Mapping[str, tuple[Slow, Symptom]] = {}
    """Worker -> how slow it was, and what telemetry told of its GPU meanwhile."""
    fail_on: Collection[str] = ()
    """launch.fail_on: the symptoms that fail a run."""

    @property
    def healths(self) -> Mapping[str, Health | None]:
        """Of the workers whose GPUs were to be watched; None: nothing was reported of this one."""
        return self.record.healths or {}

    @property
    def is_job(self) -> bool:
        """Whether the workers were the ranks of one."""
        return self.record.mode in JOBS

    @property
    def is_training(self) -> bool:
        """Whether one worker trained for its checkpoints, and had nothing to be compared with."""
        if self.record.command[:1] == ["check"]:
            return False
        is_alone = len(self.workers) == 1 and self.record.part is None
        saves = any(facts.saved for facts in self.all_facts.values())
        return is_alone and saves and self.record.golden is None

    @property
    def broken(self) -> list[str]:
        """The workers whose state changed by itself, and not that of all alike."""
        broken = [name for name, facts in self.all_facts.items() if facts.broken is not None]
        return [] if self.changed_alike else broken

    @property
    def changed_alike(self) -> list[str]:
        return changed_alike(self.all_facts)

    @property
    def suspects(self) -> list[str]:
        """Those that are named for other bits."""
        odd = [name for found in self.end.disagreements for name in found.odd]
        if self.contradiction:
            odd = []
        if self.end.elsewhere is not None:  # the comparison of several nodes names them
            odd += self.end.culprits
        named = dict.fromkeys([*self.broken, *odd, *self.odd_by_replay, *self.odd_by_golden])
        return [name for name in named if name not in self.doubted]

    @property
    def differs(self) -> bool:
        """Bits do, or a state changed by itself."""
        return self.end.disagreement is not None or bool(self.suspects or self.doubted)

    @property
    def odd_by_replay(self) -> list[str]:
        """Of two that differed the one that was wrong again and again."""
        return [replay.named for replay in self.end.replays if replay.named]

    @property
    def doubted(self) -> list[str]:
        """Those whose replay nothing settles, since a healthy worker was wrong in it, too."""
        return [name for each in self.end.replays if each.doubted for name in each.suspects]

    @property
    def odd_by_golden(self) -> list[str]:
        """Those that the golden file names."""
        golden = self.record.golden
        return golden.odd if golden is not None and not self.contradiction else []

    @property
    def is_unlike_golden(self) -> bool:
        """All workers differ from the golden file in the same way, and not from each other."""
        golden = self.record.golden
        is_so = golden is not None and golden.is_software
        return is_so and not self.suspects and self.end.disagreement is None

    @property
    def contradiction(self) -> list[str]:
        """The workers that differ from a majority, and have the bits of the golden file where that
        majority has not: then nobody is named."""
        golden = self.record.golden
        if golden is None:
            return []
        unlike = {each.name for each in golden.differing}
        found = [each for each in self.end.disagreements if unlike.intersection(each.bits)]
        return [name for each in found for name in each.odd if name in golden.equal]
