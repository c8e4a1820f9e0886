"""What `doctor --quick` found, as a line a GPU or as JSON. Pure."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from launcher.doctor.finding import Finding, Status
from model_check.utils.secrets import masked_values
from model_check.utils.words import printable

SCHEMA = 1
_WORST_FIRST: tuple[Status, ...] = ("FAIL", "warn")
_COLUMNS = 80
_NAME = 24
"""Columns of a GPU's name."""
_CUT = "..."


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


class Checked(NamedTuple):
    """One GPU or MIG instance, and its faults, the gravest first."""

    gpu: str
    """`GPU3`."""
    uuid: str | None
    """As the next two; None: NVML does not answer for it."""
    name: str | None
    pci_bus_id: str | None
    faults: list[Fault]

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
    """The summary, a line a GPU, and the other checks; what could move a cursor is escaped."""
    yield _cut(_summary(answer))
    for each in answer.gpus:
        name = printable(each.name or "").removeprefix("NVIDIA ")[:_NAME]
        figures = printable("; ".join(fault.figure for fault in each.faults))
        told = ": ".join(filter(None, (name, figures)))
        yield _cut(f"{each.status:<4}  {each.gpu}  {told}")
    yield from (printable(str(check)) for check in answer.checks)
    if any(each.faults for each in answer.gpus):
        yield "what to do: --json, and on an idle machine `run.sh doctor`"


def _summary(answer: Answer) -> str:
    """`FAIL (1 of 8 GPUs): GPU3: a row of its memory waits to be remapped`."""
    num, status = len(answer.gpus), answer.status
    gpus = [each for each in answer.gpus if each.status == status]
    if status == "ok":
        return f"ok: {num} GPU{'' if num == 1 else 's'}"
    told = [f"{check.name}: {check.found}" for check in answer.checks if check.status == status]
    told += [f"{each.gpu}: {each.faults[0].figure}" for each in gpus]
    count = f" ({len(gpus)} of {num} GPUs)" if gpus else ""
    return printable(f"{status}{count}: {'; '.join(told)}")


def _cut(line: str) -> str:
    return line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - len(_CUT)]}{_CUT}"


def document_of(answer: Answer) -> str:
    """The same as JSON, with what to do (docs/telemetry.md)."""
    gpus = [
        each._asdict() | {"status": each.status, "faults": [*map(_without_code, each.faults)]}
        for each in answer.gpus
    ]
    document = {
        "schema": SCHEMA,
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
