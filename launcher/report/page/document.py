"""A result and its story -> what the template of the page shows: what to do, which worker, since
when; a row for each; then the fault in its order. Pure."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from launcher.report.page import gpu_table
from launcher.report.page.faults import difference_of, since
from launcher.report.page.figures import figures
from launcher.report.page.render import rendered
from launcher.report.page.story import Story
from launcher.report.table import COLUMNS, number, row
from launcher.verdict.advice import troubled
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.golden import golden_lines
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.scope import scope_lines
from launcher.verdict.severity import CauseClass
from model_check.config.fields import setting_text
from model_check.utils.words import listed

_VALIDATION = ("worker", "split", "after steps", "loss", "perplexity", "tokens/s")
_OF_EXAMPLES = ("token accuracy", "exact match")
_NUM_VALUES = 8
"""Rows of values that differ, of each worker."""
_MAX_TOLD = 4
"""Workers that are told at length; the others have their rows."""
Pairs = list[tuple[str, Any]]


class Table(Struct, frozen=True):
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def page(result: RunResult, story: Story) -> str:
    """The whole document."""
    is_watched = result.verdict is Verdict.PASS and troubled(result)
    told = [each for w in troubled(result) if _has_more(each := _about(w, result, story))]
    return rendered(
        "run.html",
        title=f"{result.verdict}: Model Check on {story.record.host}",
        verdict=Verdict.WARN if is_watched else result.verdict,
        headline=f"{result.verdict}: {_which(result)} on {story.record.host}",
        drill=story.record.drill,
        answers=list(_answers(result, story)),
        workers=_workers(result, story),
        differences=[_bits(each) for each in filter(None, [result.disagreement, *result.further])],
        replays=[each.said for each in result.replays if each.said not in result.summary],
        told=told[:_MAX_TOLD],
        not_told=listed([each["name"] for each in told[_MAX_TOLD:]]),
        **figures(result, story),
        validation=_validation(result.workers),
        gpus=Table(gpu_table.COLUMNS, gpu_table.rows(result.workers)),
        asked=_asked(result, story),
        folded=_folded(result),
    )


def _which(result: RunResult) -> str:
    """`GPU3`; `8 GPUs, 100 steps; watch GPU5`"""
    if result.culprits:
        return listed(result.culprits)
    if result.verdict in (Verdict.PASS, Verdict.WARN):
        return _who_passed(result)
    is_software = any(worker.cause_class is CauseClass.SOFTWARE for worker in result.workers)
    if result.disagreement is not None and not result.disagreement.odd and not is_software:
        return f"one of {listed(list(result.disagreement.bits))}"
    return "no GPU is named"


def _who_passed(result: RunResult) -> str:
    num, steps = len(result.workers), min((w.steps for w in result.workers), default=0)
    unit = "GPU" if any(worker.gpu for worker in result.workers) else "CPU worker"
    parts = [f"{num} {unit}{'s' * (num != 1)}", *([f"{steps:,} steps"] if steps else [])]
    watched = [worker.name for worker in troubled(result)]
    return ", ".join(parts) + (f"; watch {listed(watched)}" if watched else "")


def _answers(result: RunResult, story: Story) -> Iterator[tuple[str, Any]]:
    by_name = {worker.name: worker for worker in result.workers}
    named = [by_name[name] for name in result.culprits if name in by_name] or troubled(result)[:1]
    yield "do now", result.do_now
    if result.culprits:
        yield "which", tuple(_identity(worker) for worker in named)
    yield "since", tuple(dict.fromkeys(filter(None, (_since(w, result, story) for w in named))))
    yield "what", result.summary
    if result.scope is not None:
        yield "shown", tuple(scope_lines(result.scope, len(result.workers)))
    if result.golden is not None:
        lines = (line.removeprefix("golden: ") for line in golden_lines(result.golden))
        yield "golden", (result.golden.file, *lines)


def _since(worker: WorkerResult, result: RunResult, story: Story) -> str:
    """`step 57, 12.3 s after the start (2026-11-23 05:00:12)`"""
    begun = since(worker, result, story)
    return str(begun) if begun.seconds is None else f"{begun} ({story.clock(begun.seconds)})"


def _identity(worker: WorkerResult) -> str:
    """`GPU3 (NVIDIA H100, GPU-1f..., bus 0000:3b:00.0, serial 1320...)`"""
    known = ", ".join(_gpu(worker))
    return f"{worker.name} ({known})" if known else worker.name


def _gpu(worker: WorkerResult) -> tuple[str, ...]:
    gpu = worker.gpu or {}
    named = [(word, gpu.get(key)) for word, key in (("bus ", "pci_bus_id"), ("serial ", "serial"))]
    parts = [
        gpu.get("name"),
        gpu.get("uuid"),
        *(f"{word}{value}" for word, value in named if value),
    ]
    return tuple(str(part) for part in parts if part)


def _workers(result: RunResult, story: Story) -> Table:
    """A row for each, those first of which there is something to say."""
    order = [*troubled(result), *(w for w in result.workers if w.verdict in _CALM)]
    rows = []
    for worker in order:
        name, verdict, *figures = row(worker)
        device = _gpu(worker) or (str(worker.detail.get("device_name", "")),)
        rows.append((name, verdict, _state(worker, result, story), *figures, device))
    name, verdict, *figures = COLUMNS
    return Table((name, verdict, "what to do", *figures, "device"), rows)


_CALM = (Verdict.PASS, Verdict.STOPPED)


def _state(worker: WorkerResult, result: RunResult, story: Story) -> tuple[str, ...]:
    """What to do with it, and since when something is wrong."""
    if worker.verdict is Verdict.STOPPED:
        return (f"{worker.cause}; nothing is known against it",)
    begun = _since(worker, result, story) if worker.verdict not in _CALM else ""
    return tuple(filter(None, (worker.do_now, begun and f"since {begun}")))


def _bits(found: Disagreement) -> dict[str, Any]:
    """Workers with the same bits share a row. Digits of a float that differ from the value of most
    are marked; those of a fingerprint mean nothing by themselves."""
    values = list(found.bits.values())
    usual = max(values, key=values.count)
    names: dict[str, list[str]] = {}
    for worker, bits in found.bits.items():
        names.setdefault(bits, []).append(worker)
    return {
        "head": "Before the first step"
        if found.is_of_trial
        else f"Step {found.step}: the bits part",
        "place": found.place,
        "rows": [
            {
                "names": listed(those),
                "bits": _marked(bits, usual),
                "decimal": _decimal(bits),
                "differs": "differs" if found.odd and bits != usual else "",
            }
            for bits, those in names.items()
        ],
    }


def _marked(bits: str, usual: str) -> list[tuple[bool, str]]:
    """(whether it differs, characters)"""
    if not _decimal(bits):
        return [(False, bits)]
    return [(one != other, one) for one, other in zip_longest(bits, usual, fillvalue="")]


def _decimal(bits: str) -> str:
    """Of a float; fingerprints have none."""
    is_float = bits.lstrip("-").startswith("0x") or bits in ("nan", "inf", "-inf")
    return f"{float.fromhex(bits):.9g}" if is_float else ""


def _about(worker: WorkerResult, result: RunResult, story: Story) -> dict[str, Any]:
    """What the head of the page does not say of it."""
    said = f"{result.summary} {result.do_now}"
    cause = None if difference_of(worker.name, result) else worker.cause
    texts = dict.fromkeys(filter(None, (cause, *worker.symptoms, *worker.warnings)))
    difference = story.differences.get(worker.name)
    return {
        "name": worker.name,
        "verdict": worker.verdict,
        "texts": [text for text in texts if text not in said],
        "origin": _origin(worker, story),
        "flips": [] if difference is None else _values(difference),
        "flips_title": ""
        if difference is None
        else f"{difference.get('odd')} beside {difference.get('peer')}, value by value",
        "evidence": [_link(path, story) for path in worker.evidence],
        "stacks": story.stacks.get(worker.name),
        "last_lines": "\n".join(worker.last_lines),
    }


def _has_more(about: Mapping[str, Any]) -> bool:
    """Than its name and verdict."""
    return any(value for key, value in about.items() if key not in ("name", "verdict"))


def _origin(worker: WorkerResult, story: Story) -> tuple[str, ...]:
    """Step, module, tensor and counts of what was not finite."""
    found = story.facts(worker.name).nonfinite
    if found is None or found.origin is None:
        return ()
    origin = found.origin
    shape = " x ".join(map(str, origin.shape)) or "scalar"
    place = (origin.direction, origin.module, origin.tensor)
    return (str(found.step), *place, shape, origin.counts)


def _values(difference: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Value by value, what the dossiers differ in."""
    rows = [row for name, found in difference["tensors"].items() for row in _rows(name, found)]
    return rows[:_NUM_VALUES]


def _rows(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for value in found.get("first", []):
        index = ", ".join(map(str, value.get("index", [])))
        told = (value.get(key, "") for key in ("odd", "peer", "xor", "bits"))
        yield (name, f"[{index}]", *map(str, told))


def _link(path: str, story: Story) -> tuple[str, str]:
    """Where it is, and a link if that lies in the run directory: such a link holds wherever the
    directory is moved to."""
    inside = os.path.relpath(path, story.directory)
    return (path, "") if inside.startswith("..") else (inside, quote(inside))


def _validation(workers: Sequence[WorkerResult]) -> Table:
    """A row for each split of each worker."""
    splits = [(worker.name, split) for worker in workers for split in worker.validation]
    of_examples = any(split.exact_match is not None for _, split in splits)
    rows = [
        (
            name,
            split.split,
            str(split.step),
            number(split.loss),
            number(split.perplexity, "{:.2f}"),
            number(split.tokens_per_s, "{:,.0f}"),
            number(split.token_accuracy, "{:.4f}"),
            number(split.exact_match, "{:.4f}"),
        )
        for name, split in splits
    ]
    columns = [*_VALIDATION, *_OF_EXAMPLES] if of_examples else _VALIDATION
    return Table(columns, [row[: len(columns)] for row in rows])


def _asked(result: RunResult, story: Story) -> Pairs:
    """What differs from the preset is open, all else folded."""
    record = story.record
    return [
        ("host", record.host),
        ("started", record.started_at.isoformat(timespec="seconds")),
        ("command", " ".join(record.command)),
        ("exit code", str(result.exit_code)),
        ("preset", record.preset),
        *((name, _shown(value)) for name, value in (record.asked_for or {}).items()),
    ]


def _folded(result: RunResult) -> list[tuple[str, Pairs]]:
    notes = {worker.name: worker.notes for worker in result.workers if worker.notes}
    details = {worker.name: worker.detail for worker in result.workers if worker.detail}
    return [
        ("notes of the workers", _each(notes)),
        ("versions, groups, GPUs, data", _each(result.run)),
        ("what each worker told", _each(details)),
    ]


def _each(values: Mapping[str, Any]) -> Pairs:
    return [(name, _shown(value)) for name, value in values.items()]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return setting_text(value)
