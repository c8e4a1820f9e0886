"""A fleet on the terminal: what is wrong, what stands apart, the verdict last. Pure."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.verdict.fleet import Finding, FleetResult
from launcher.verdict.fleet_merge import name_of
from model_check.utils.words import few, printable

_MOST = 40
"""Lines of findings."""


def fleet_lines(result: FleetResult, output: Path | None) -> Iterator[str]:
    """Unprefixed. `output`: where its page and report are; None: they could not be written."""
    yield from (printable(note) for note in result.notes)
    lines = list(finding_lines(result.findings))
    yield from lines[:_MOST]
    if len(lines) > _MOST:
        where = "" if output is None else f": {output / 'fleet.json'}"
        yield f"and {len(lines) - _MOST:,} more{where}"
    if output is not None:
        yield f"page and report: {output / 'fleet.html'}, {output / 'fleet.json'}"
    yield from result.last_lines


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each; workers of one run of which the same is said share one."""
    shared: dict[tuple[object, ...], list[Finding]] = {}
    for each in findings:
        shared.setdefault((each.run, each.verdict, each.severity, _said(each)), []).append(each)
    for those in shared.values():
        yield _line(those)


def _said(finding: Finding) -> str:
    """Slow workers of one node differ in their figures alone."""
    return "slow" if finding.seen == "slow" else finding.what


def _line(those: Sequence[Finding]) -> str:
    first = those[0]
    workers = [each.worker for each in those if each.worker is not None]
    who = f"{name_of(first)} {few(workers)}".rstrip()
    severity = f" {first.severity}" if first.severity else ""
    drill = f" DRILL {first.drill}:" if first.drill else ""
    known = f" ({identity(first)})" if len(those) == 1 and identity(first) else ""
    line = f"{first.verdict}{severity}: {who}{known}:{drill} {first.what} [{first.directory}]"
    return printable(line)


def identity(finding: Finding) -> str:
    """`GPU-1f..., bus 0000:3b:00.0, serial 1320...`"""
    device = finding.device
    bus = device.pci_bus_id and f"bus {device.pci_bus_id}"
    serial = device.serial and f"serial {device.serial}"
    return ", ".join(filter(None, [device.uuid, bus, serial]))
