"""What `doctor --quick` found: a summary, a table of the GPUs and the findings, or JSON. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from launcher.doctor.finding import DASH, Finding, Status, told, told_both
from launcher.report.table import aligned
from model_check.utils.secrets import masked_values
from model_check.utils.words import printable

SCHEMA = 1
_WORST_FIRST: tuple[Status, ...] = ("FAIL", "warn")
_COLUMNS = 80
_NAME = 24
"""Columns of a GPU's name."""
_CUT = "..."
_HEADER = ("", "GPU", "name", "used/total GiB", "°C", "W", "util", "ECC", "remapped")
_NUM_LEFT = 3
"""Columns of words; the others hold numbers."""


class Fault(NamedTuple):
    """One thing that speaks against a GPU."""

    source: str
    """`nvml`, `kernel log` or `history`."""
    severity: str | None
    """None: the GPU cannot be used, or does not answer."""
    figure: str
    cure: str
    exit_code: int
    """0: only told."""


class Figures(NamedTuple):
    """What NVML reports of a GPU at this moment; None: it does not report it."""

    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    utilization_percent: int | None = None
    ecc_uncorrected: int | None = None
    """Memory errors since the driver was loaded."""
    remapped_rows: int | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """Under the header of the table."""
        return (
            told_both(_gib(self.memory_used_mib), _gib(self.memory_total_mib), "{:.1f}"),
            told(self.temperature_c),
            told(self.power_w, "{:.0f}"),
            told(self.utilization_percent, "{} %"),
            told(self.ecc_uncorrected),
            told(self.remapped_rows),
        )


class Checked(NamedTuple):
    """One GPU or MIG instance, and its faults, the gravest first."""

    gpu: str
    """`GPU3`."""
    uuid: str | None
    """As the next two; None: NVML does not answer for it."""
    name: str | None
    pci_bus_id: str | None
    faults: list[Fault]
    figures: Figures = Figures()

    @property
    def exit_code(self) -> int:
        return max((fault.exit_code for fault in self.faults), default=0)

    @property
    def status(self) -> Status:
        if self.exit_code:
            return "FAIL"
        return "warn" if self.faults else "ok"


class Answer(NamedTuple):
    """What is to be written."""

    gpus: list[Checked]
    checks: list[Finding]
    """Of no one GPU."""

    @property
    def exit_code(self) -> int:
        codes = [gpu.exit_code for gpu in self.gpus] + [check.exit_code for check in self.checks]
        return max(codes, default=0)

    @property
    def status(self) -> Status:
        """The worst of all."""
        found = {gpu.status for gpu in self.gpus} | {check.status for check in self.checks}
        return next((status for status in _WORST_FIRST if status in found), "ok")


def lines_of(answer: Answer) -> Iterator[str]:
    """The summary, the table of GPUs, and each finding that the summary does not hold whole; of one
    that it holds, what to do. What could move a cursor is escaped."""
    summary = _cut(_summary(answer))
    yield summary
    if answer.gpus:
        yield from aligned([_HEADER, *map(_row, answer.gpus)], _NUM_LEFT, _COLUMNS)
    for finding in (*_findings(answer.gpus), *answer.checks):
        if printable(f"{finding.name}: {finding.found}") not in summary:
            yield printable(str(finding))
        elif finding.advice:
            yield printable(str(finding._replace(found="")))


def _row(gpu: Checked) -> tuple[str, ...]:
    name = printable(gpu.name or DASH).removeprefix("NVIDIA ")[:_NAME]
    return (f"{gpu.status:<4}", gpu.gpu, name, *gpu.figures.cells)


def _findings(gpus: Sequence[Checked]) -> Iterator[Finding]:
    for each in gpus:
        for fault in each.faults:
            status: Status = "FAIL" if fault.exit_code else "warn"
            yield Finding(status, each.gpu, fault.figure, fault.cure)


def _summary(answer: Answer) -> str:
    """`FAIL (1 of 8 GPUs): GPU3: a row of its memory waits to be remapped`."""
    num, status = len(answer.gpus), answer.status
    gpus = [each for each in answer.gpus if each.status == status]
    if status == "ok":
        return f"ok: {num} GPU{'' if num == 1 else 's'}"
    found = [f"{check.name}: {check.found}" for check in answer.checks if check.status == status]
    found += [f"{each.gpu}: {each.faults[0].figure}" for each in gpus]
    count = f" ({len(gpus)} of {num} GPUs)" if gpus else ""
    return printable(f"{status}{count}: {'; '.join(found)}")


def _cut(line: str) -> str:
    return line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - len(_CUT)]}{_CUT}"


def document_of(answer: Answer) -> str:
    """The same as JSON, with what to do (docs/telemetry.md)."""
    gpus = [
        each._asdict()
        | {"status": each.status, "faults": [*map(_without_code, each.faults)]}
        | {"figures": each.figures._asdict()}
        for each in answer.gpus
    ]
    document = {
        "schema": SCHEMA,
        "kind": "doctor_quick",
        "exit_code": answer.exit_code,
        "summary": _summary(answer),
        "gpus": gpus,
        "checks": [*map(_without_code, answer.checks)],
    }
    return json.dumps(masked_values(document), indent=2)


def _without_code(found: Fault | Finding) -> dict[str, Any]:
    fields = found._asdict()
    del fields["exit_code"]
    return fields


def _gib(mib: int | None) -> float | None:
    return None if mib is None else mib / 1024
