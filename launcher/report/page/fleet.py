"""The page of a fleet: what is wrong first, then a tile for each run, which opens its page. Pure.

A tile has no words of its own but a letter and a name: a thousand of them fit a screen or two, and
the page stays below 1 MB.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from launcher.report.page.render import rendered
from launcher.verdict.fleet import Finding, FleetResult, FleetRun, Group
from launcher.verdict.fleet_merge import name_of
from launcher.verdict.results import Verdict
from model_check.utils.words import few, printable

_GROUP_COLUMNS = ("group", "workers", "runs", "devices", "steps", "compared", "made of")
_MOST = 300
"""Findings on the page."""
_OPEN, _LONGEST = 160, 1600
"""Characters of what is said of one: without a click, and at most; its own page has all."""
_NUM_IN_HEAD = 6
_NARROW = 10
"""Characters of a name that fit a tile."""
_LETTERS = {
    Verdict.PASS: "P",
    Verdict.WARN: "W",
    Verdict.FAIL: "F",
    Verdict.SUSPECT: "S",
    Verdict.INCONCLUSIVE: "?",
    Verdict.INVALID: "I",
    Verdict.STOPPED: "■",
}
_DEAD = "D"
_SHOWN = (
    "device_name",
    "torch",
    "cuda",
    "driver",
    "attention_backend",
    "dtype",
    "settings",
    "data",
)
"""Of a group's key."""


def fleet_page(result: FleetResult) -> str:
    """The whole document."""
    title = f"{result.verdict}: {len(result.runs):,} runs"
    names = _names(result)
    return rendered(
        "fleet.html",
        title=title,
        verdict=result.verdict,
        headline=f"{result.verdict}: {names}" if names else title,
        drills=few(sorted({run.drill for run in result.runs if run.drill})),
        answers=[
            ("do now", result.do_now),
            ("what", result.summary),
            ("exit code", str(result.exit_code)),
            *(("note", note) for note in result.notes),
        ],
        findings=[_row(each, result.runs[each.run]) for each in result.findings[:_MOST]],
        num_more=max(0, len(result.findings) - _MOST),
        num_bad=sum(run.verdict is not Verdict.PASS for run in result.runs),
        num_runs=len(result.runs),
        key=_key(result.runs),
        tiles=_tiles(result),
        group_columns=_GROUP_COLUMNS,
        groups=[_group_row(at, group) for at, group in enumerate(result.groups[:_MOST])],
    )


def _names(result: FleetResult) -> str:
    """`13 nodes: node0049, node0074, ...`: those with the findings that decide, the gravest first;
    empty: there are none."""
    names = [name_of(result.runs[each.run]) for each in result.findings if each.exit_code]
    names = list(dict.fromkeys(names))
    count = f"{len(names):,} nodes: " if len(names) > 1 else ""
    more = ", ..." if len(names) > _NUM_IN_HEAD else ""
    return f"{count}{', '.join(names[:_NUM_IN_HEAD])}{more}"


def _row(finding: Finding, run: FleetRun) -> dict[str, Any]:
    device = finding.device
    begins, rest = _opened(printable(_short(finding.what, _LONGEST)))
    step = f"step {finding.step or 0:,}"
    is_told = finding.step is None or re.search(rf"\b{step}\b", finding.what)
    serial = f"serial {device.serial}" if device.serial else ""
    parts = (finding.worker, device.uuid, device.pci_bus_id, serial)
    return {
        "link": _link(run),
        "node": name_of(finding),
        "verdict": finding.verdict,
        "severity": finding.severity or "",
        "who": tuple(printable(part) for part in parts if part),
        "since": "" if is_told else f"since {step}",
        "drill": printable(finding.drill or ""),
        "begins": begins,
        "rest": rest,
        "run": printable(run.directory.rstrip("/").rpartition("/")[2]),
    }


def _opened(text: str) -> tuple[str, str]:
    """What stands open, and what a click adds: split between two words."""
    if len(text) <= _OPEN:
        return text, ""
    at = text.rfind(" ", _OPEN // 2, _OPEN)
    return text[: at if at > 0 else _OPEN], text[at if at > 0 else _OPEN :]


def _tiles(result: FleetResult) -> list[dict[str, Any]]:
    """In the order of the runs; what all names begin with is said once."""
    names = [name_of(run) for run in result.runs]
    twice = {name for name, count in Counter(names).items() if count > 1}
    labels = [
        f"{name} {printable(run.directory.rpartition('/')[2])}" if name in twice else name
        for name, run in zip(names, result.runs, strict=True)
    ]
    shared = _num_shared(labels) if len(labels) > 1 else 0
    first = {finding.run: finding for finding in reversed(result.findings)}
    return [
        _tile(run, label, _cut(label, shared), first.get(at))
        for at, (label, run) in enumerate(zip(labels, result.runs, strict=True))
    ]


def _num_shared(labels: Sequence[str]) -> int:
    """Characters that all of them begin with: those of the first and the last by alphabet."""
    low, high = min(labels), max(labels)
    return next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))


def _cut(label: str, shared: int) -> str:
    """A long one without what all have in common, but for digits: ...-node0017 keeps 0017."""
    if len(label) <= _NARROW:
        return label
    while shared and (label[shared - 1].isdigit() or shared >= len(label)):
        shared -= 1
    return label[shared:]


def _tile(run: FleetRun, label: str, short: str, finding: Finding | None) -> dict[str, Any]:
    who = "" if finding is None or finding.worker is None else f"{finding.worker}: "
    what = "" if finding is None else f": {who}{_short(finding.what, 80)}"
    return {
        "verdict": run.verdict,
        "title": printable(f"{label}: {run.verdict}{what}"),
        "letter": _DEAD if run.is_dead else _LETTERS[run.verdict],
        "short": _short(short, 24),
        "link": _link(run),
    }


def _link(run: FleetRun) -> str | None:
    return None if run.page is None else quote(run.page, errors="surrogateescape")


def _key(runs: Sequence[FleetRun]) -> list[tuple[str, str, str]]:
    """`P 982 PASS`, `S 10 SUSPECT`"""
    dead = sum(run.is_dead for run in runs)
    counts = Counter(run.verdict for run in runs if not run.is_dead)
    parts = [(_LETTERS[v], f"{counts[v]:,}", str(v)) for v in Verdict if counts[v]]
    return [*parts, *([(_DEAD, f"{dead:,}", "dead")] if dead else [])]


def _group_row(number: int, group: Group) -> tuple[str, ...]:
    why = f"not as group 1: {'; '.join(map(str, group.others))}"
    if number == 0:
        why = ", ".join(f"{name} {group.key[name]}" for name in _SHOWN if group.key.get(name))
    counts = (group.workers, group.runs, group.devices, group.steps, group.compared_steps)
    return (f"{number + 1}", *(f"{count:,}" for count in counts), _short(printable(why), 240))


def _short(value: str, longest: int) -> str:
    return value if len(value) <= longest else f"{value[: longest - 1]}…"
