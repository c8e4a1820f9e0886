"""The story of a failure in its order: what was seen, bit by bit; what came of computing it again;
the files that prove it; the last lines; where a silent worker stood. Pure."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from launcher.report.page.faults import difference_of
from launcher.report.page.markup import badge, section, table, text
from launcher.report.page.story import Story
from launcher.verdict.advice import troubled
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from model_check.utils.words import listed

_NUM_VALUES = 8
"""Rows of values that differ, of each worker."""
_MAX_TOLD = 4
"""Workers that are told at length; the others have their tiles."""


def failure(result: RunResult, story: Story) -> Iterator[str]:
    """Nothing of a run that passed."""
    told = [w for w in troubled(result) if w.verdict is not Verdict.WARN or w.slow or w.symptoms]
    content = [line for worker in told[:_MAX_TOLD] for line in _about(worker, result, story)]
    yield from section("What happened", [*_bits_of_all(result), *content, *_more(told)])


def _more(told: Sequence[WorkerResult]) -> Iterator[str]:
    if rest := told[_MAX_TOLD:]:
        names = listed([worker.name for worker in rest])
        yield f"<p>{text(names)}: see their tiles and files</p>"


def _bits_of_all(result: RunResult) -> Iterator[str]:
    for found in filter(None, [result.disagreement, *result.further]):
        head = "Before the first step" if found.is_of_trial else f"Step {found.step}: the bits part"
        yield f"<h3>{head}</h3><p>{text(found.place)}</p>"
        yield from _side_by_side(found)
    for replay in result.replays:
        if replay.said:
            yield f"<p>Computed again: {text(replay.said)}</p>"


def _side_by_side(found: Disagreement) -> Iterator[str]:
    """Digits of a float that differ from the value of most are marked; those of a fingerprint mean
    nothing by themselves."""
    values = list(found.bits.values())
    usual = max(values, key=values.count)
    rows = "".join(
        f'<tr><th scope="row">{text(listed(names))}</th><td><code>{_marked(bits, usual)}</code>'
        f"</td><td>{text(_decimal(bits))}</td>"
        f"<td>{'differs' if found.odd and bits != usual else ''}</td></tr>"
        for bits, names in _by_bits(found).items()
    )
    yield f'<div class="scroll" tabindex="0"><table><tbody>{rows}</tbody></table></div>'


def _by_bits(found: Disagreement) -> dict[str, list[str]]:
    """Workers with the same bits share a row."""
    names: dict[str, list[str]] = {}
    for worker, bits in found.bits.items():
        names.setdefault(bits, []).append(worker)
    return names


def _marked(bits: str, usual: str) -> str:
    if not _decimal(bits):
        return text(bits)
    pairs = zip_longest(bits, usual, fillvalue="")
    return "".join(text(a) if a == b else f"<mark>{text(a)}</mark>" for a, b in pairs)


def _decimal(bits: str) -> str:
    """Of a float; fingerprints have none."""
    is_float = bits.lstrip("-").startswith("0x") or bits in ("nan", "inf", "-inf")
    return f"{float.fromhex(bits):.9g}" if is_float else ""


def _about(worker: WorkerResult, result: RunResult, story: Story) -> Iterator[str]:
    yield f"<h3>{text(worker.name)} {badge(worker.verdict)}</h3>"
    told = dict.fromkeys((worker.cause, *worker.symptoms, *worker.warnings))
    yield from (f"<p>{text(line)}</p>" for line in told if line)
    yield from _origin(worker, story)
    if (found := difference_of(worker.name, result)) is not None and found.tensor is not None:
        yield f"<p>Step {found.step}: {text(found.place)}</p>"
    if difference := story.differences.get(worker.name):
        yield from _values(difference)
    yield from _evidence(worker, story)
    if stacks := story.stacks.get(worker.name):
        yield f'<h4>Where it stood</h4><pre tabindex="0">{text(stacks)}</pre>'
    if worker.last_lines:
        lines = text("\n".join(worker.last_lines))
        yield f'<h4>Its last lines</h4><pre tabindex="0">{lines}</pre>'


def _origin(worker: WorkerResult, story: Story) -> Iterator[str]:
    """Step, module, tensor and counts of what was not finite."""
    found = story.history(worker.name).nonfinite
    if found is None or found.origin is None:
        return
    origin = found.origin
    shape = " x ".join(map(str, origin.shape)) or "scalar"
    cells = (str(found.step), origin.direction, origin.module, origin.tensor, shape, origin.counts)
    columns = ("step", "pass", "module", "tensor", "shape", "counts")
    yield from table(columns, [cells])


def _values(difference: Mapping[str, Any]) -> Iterator[str]:
    """Value by value, what the dossiers differ in."""
    rows = [row for name, found in difference["tensors"].items() for row in _rows(name, found)]
    if rows:
        columns = ("tensor", "index", "odd", "peer", "XOR", "bits")
        title = f"{difference.get('odd')} beside {difference.get('peer')}, value by value"
        yield f"<h4>{text(title)}</h4>"
        yield from table(columns, rows[:_NUM_VALUES])


def _rows(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for value in found.get("first", []):
        index = ", ".join(map(str, value.get("index", [])))
        told = (value.get(key, "") for key in ("odd", "peer", "xor", "bits"))
        yield (name, f"[{index}]", *map(str, told))


def _evidence(worker: WorkerResult, story: Story) -> Iterator[str]:
    """Links that hold wherever the directory is moved to."""
    items = [f"<li>{_link(path, story)}</li>" for path in worker.evidence]
    if items:
        yield f"<p>Evidence:</p><ul>{''.join(items)}</ul>"


def _link(path: str, story: Story) -> str:
    inside = os.path.relpath(path, story.directory)
    if inside.startswith(".."):
        return f"<code>{text(path)}</code>"
    return f'<a href="{text(inside)}">{text(inside)}</a>'
