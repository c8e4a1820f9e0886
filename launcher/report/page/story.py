"""What the page shows beside the result: how the run went."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from launcher.report.files import content_of
from launcher.report.page.gpu_curves import GpuCurves, read_gpu_curves
from launcher.verdict.curves import Curves
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.live import Watch
from launcher.verdict.record import RunRecord
from launcher.verdict.results import RunResult
from model_check.errors import UsageError
from model_check.forensics.manifest import DIFFERENCE

_MAX_TEXT = 6000
"""Characters of a file of evidence."""
STACKS = ".stacks.txt"


class Story(Struct, frozen=True):
    directory: Path
    record: RunRecord
    all_facts: Mapping[str, WorkerFacts] = {}
    """Worker -> what it said of itself; as the next five."""
    curves: Mapping[str, Curves] = {}
    agreed_steps: Mapping[str, int] = {}
    gpus: Mapping[str, GpuCurves] = {}
    stacks: Mapping[str, str] = {}
    """What it was doing when the run was silent: the beginning of the file."""
    differences: Mapping[str, Mapping[str, Any]] = {}
    """`difference.json` of its dossier."""

    def facts(self, worker: str) -> WorkerFacts:
        return self.all_facts.get(worker) or WorkerFacts()

    def curve(self, worker: str) -> Curves:
        return self.curves.get(worker) or Curves()

    def seconds(self, ns: int) -> float:
        """Since the run began, of a CLOCK_MONOTONIC time."""
        return max(0.0, (ns - self.record.started_ns) / 1e9)

    def clock(self, seconds: float) -> str:
        """The wall clock so long after the start, as the run's host had it; "" past year 9999."""
        with suppress(OverflowError):
            return f"{self.record.started_at + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S}"
        return ""

    @property
    def ended_ns(self) -> int:
        """The run's end, or the last thing that was heard of it."""
        end = self.record.started_ns + round((self.record.duration_s or 0.0) * 1e9)
        return max([end, *(curve.last_ns for curve in self.curves.values())])


def story_of(record: RunRecord, watch: Watch, result: RunResult, directory: Path) -> Story:
    """Of a run that is over. A file that is gone, or cut, tells nothing."""
    names = [worker.name for worker in result.workers]
    evidence = {worker.name: worker.evidence for worker in result.workers}
    return Story(
        directory=directory.absolute(),
        record=record,
        all_facts=watch.all_facts,
        curves=watch.curves,
        agreed_steps=watch.agreement.agreed_steps,
        gpus={name: found for name in record.gpus if (found := _gpu(record, directory, name))},
        stacks={name: text for name in names if (text := _text_of(evidence[name], STACKS))},
        differences={name: d for name in names if (d := _difference(evidence[name]))},
    )


def _gpu(record: RunRecord, directory: Path, worker: str) -> GpuCurves | None:
    with suppress(UsageError):
        return read_gpu_curves(directory, worker, record.started_ns)
    return None


def _text_of(evidence: list[str], ending: str) -> str:
    for path in evidence:
        if path.endswith(ending):
            with suppress(OSError):
                return content_of(Path(path)).decode(errors="replace")[:_MAX_TEXT]
    return ""


def _difference(evidence: list[str]) -> Mapping[str, Any] | None:
    with suppress(msgspec.DecodeError, OSError, ValueError):
        for path in evidence:
            if path.endswith(f"/{DIFFERENCE}"):
                found = msgspec.json.decode(content_of(Path(path)), type=dict[str, Any])
                return found if isinstance(found.get("tensors"), dict) else None
    return None
