"""A result and its story -> what the template of the page shows: what to do, which worker, since
when; a row for each; then the fault in its order. Pure."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

from launcher.report.page import gpu_table
from launcher.report.page.faults import difference_of
from launcher.report.page.figures import figures
from launcher.report.page.render import Bits, rendered
from launcher.report.page.story import Story
from launcher.report.page.tables import Table, filled
from launcher.report.page.workers import identity, not_blamed, since_when, workers_table
from launcher.report.table import number
from launcher.verdict.advice import troubled
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.golden import golden_lines
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.scope import scope_lines
from launcher.verdict.severity import CauseClass
from model_check.config.fields import setting_text
from model_check.utils.project_files import PROGRAM
from model_check.utils.words import listed

_VALIDATION = ("worker", "split", "after steps", "loss", "perplexity", "tokens/s")
_OF_EXAMPLES = ("token accuracy", "exact match")
_NUM_VALUES = 8
"""Rows of values that differ, of each worker."""
_MAX_TOLD = 4
"""Workers that are told at length; the others have their rows."""
Pairs = list[tuple[str, Any]]


def page(result: RunResult, story: Story) -> str:
    """The whole document."""
    is_watched = result.verdict is Verdict.PASS and troubled(result)
    told = [each for w in troubled(result) if _has_more(each := _about(w, result, story))]
    begun = [*dict.fromkeys(filter(None, (since_when(w, result, story) for w in _named(result))))]
    return rendered(
        "run.html",
        title=f"{result.verdict}: Model Check on {story.record.host}",
        verdict=Verdict.WARN if is_watched else result.verdict,
        headline=f"{result.verdict}: {_which(result)} on {story.record.host}",
        drill=story.record.drill,
        answers=list(_answers(result, begun)),
        workers=workers_table(result, story, begun),
        not_blamed=not_blamed(result),
        differences=[_bits(each, result.summary) for each in _differences(result)],
        replays=[each.said for each in result.replays if each.said not in result.summary],
        told=told[:_MAX_TOLD],
        not_told=listed([each["name"] for each in told[_MAX_TOLD:]]),
        **figures(result, story),
        validation=_validation(result.workers),
        gpus=gpu_table.table(result.workers),
        command=f"{PROGRAM} {shlex.join(story.record.command)}",
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


def _named(result: RunResult) -> list[WorkerResult]:
    """Those of whom the head of the page speaks."""
    by_name = {worker.name: worker for worker in result.workers}
    return [by_name[name] for name in result.culprits if name in by_name] or troubled(result)[:1]


def _answers(result: RunResult, begun: Sequence[str]) -> Iterator[tuple[str, Any]]:
    yield "do now", result.do_now
    yield "what", _what(result)
    if result.culprits:
        yield "which", tuple(map(_identity, _named(result)))
    yield "since", begun
    if result.scope is not None:
        yield "shown", tuple(scope_lines(result.scope, len(result.workers)))
    if result.golden is not None:
        lines = (line.removeprefix("golden: ") for line in golden_lines(result.golden))
        yield "golden", (result.golden.file, *lines)


def _what(result: RunResult) -> str:
    """The summary without what stands elsewhere: what to do, and the bits, which have a table."""
    what = result.summary.removeprefix(result.do_now).removeprefix("; ")
    for found in _differences(result):
        what = what.replace(f": {found.values}", "")
    return what


def _differences(result: RunResult) -> list[Disagreement]:
    return [found for found in (result.disagreement, *result.further) if found is not None]


def _identity(worker: WorkerResult) -> str:
    """`GPU3 (NVIDIA H100, GPU-1f..., bus 0000:3b:00.0, serial 1320...)`"""
    known = ", ".join(identity(worker))
    return f"{worker.name} ({known})" if known else worker.name


def _bits(found: Disagreement, said: str) -> dict[str, Any]:
    """Workers with the same bits share a row. Digits of a float that differ from the value of most
    are marked; those of a fingerprint mean nothing by themselves."""
    values = list(found.bits.values())
    usual = max(values, key=values.count)
    names: dict[str, list[str]] = {}
    for worker, bits in found.bits.items():
        names.setdefault(bits, []).append(worker)
    columns = [
        ("workers", *map(listed, names.values())),
        ("bits", *(_marked(bits, usual) for bits in names)),
        ("value", *map(_decimal, names)),
        ("differs", *("differs" if found.odd and bits != usual else "" for bits in names)),
    ]
    return {
        "head": "Before the first step" if found.is_of_trial else f"The bits of step {found.step}",
        "place": "" if found.place in said else found.place,
        "table": filled(columns),
    }


def _marked(bits: str, usual: str) -> Bits:
    if not _decimal(bits):
        return Bits([(False, bits)])
    return Bits([(one != other, one) for one, other in zip_longest(bits, usual, fillvalue="")])


def _decimal(bits: str) -> str:
    """Of a float; fingerprints have none."""
    is_float = bits.lstrip("-").startswith("0x") or bits in ("nan", "inf", "-inf")
    return f"{float.fromhex(bits):.9g}" if is_float else ""


def _about(worker: WorkerResult, result: RunResult, story: Story) -> dict[str, Any]:
    """What the head of the page does not say of it."""
    said = f"{result.summary} {result.do_now}"
    origin = _origin(worker, story)
    cause = None if difference_of(worker.name, result) else worker.cause
    texts = dict.fromkeys(filter(None, (cause, *worker.symptoms, *worker.warnings)))
    difference = story.differences.get(worker.name)
    return {
        "name": worker.name,
        "verdict": worker.verdict,
        "texts": [text for text in texts if text not in said],
        "origin": () if origin and origin[-1] in said else origin,
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
        ("started", record.started_at.isoformat(" ", "seconds")),
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
