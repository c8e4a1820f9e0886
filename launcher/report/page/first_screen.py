"""What is seen first: the verdict, which GPU, since when, what to do; then its tiles. Pure."""

from collections.abc import Iterator, Sequence

from launcher.report.page.faults import since
from launcher.report.page.markup import SIGNS, badge, facts, folded, text
from launcher.report.page.story import Story
from launcher.report.table import number
from launcher.verdict.advice import troubled
from launcher.verdict.golden import golden_lines
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.scope import scope_lines
from launcher.verdict.severity import CauseClass
from model_check.utils.words import listed


def first_screen(result: RunResult, story: Story) -> Iterator[str]:
    is_watched = result.verdict is Verdict.PASS and troubled(result)
    verdict = Verdict.WARN if is_watched else result.verdict
    yield f'<header class="{verdict}"><h1>{SIGNS[verdict]} {text(_headline(result, story))}</h1>'
    if drill := story.record.drill:
        yield f'<p class="drill">DRILL: {text(drill)} was injected; this fault is not real</p>'
    yield from facts(_answers(result, story))
    yield "</header>"
    stopped = [worker for worker in result.workers if worker.verdict is Verdict.STOPPED]
    if shown := _in_order(result):
        tiles = "".join(_tile(worker, result, story) for worker in shown)
        yield f'<ul class="tiles">{tiles}</ul>'
    if stopped:
        yield from _stopped(stopped)


def _headline(result: RunResult, story: Story) -> str:
    """`FAIL: GPU3 on node17`, `PASS: 8 GPUs, 100 steps on node17`."""
    return f"{result.verdict}: {_which(result)} on {story.record.host}"


def _which(result: RunResult) -> str:
    if result.culprits:
        return listed(result.culprits)
    if result.verdict in (Verdict.PASS, Verdict.WARN):
        return _who_passed(result)
    if result.disagreement is not None and not result.disagreement.odd and not _is_software(result):
        return f"one of {listed(list(result.disagreement.bits))}"
    return "no GPU is named"


def _who_passed(result: RunResult) -> str:
    """`8 workers, 100 steps; watch GPU5`"""
    num, steps = len(result.workers), min((w.steps for w in result.workers), default=0)
    unit = "GPU" if any(worker.gpu for worker in result.workers) else "CPU worker"
    parts = [f"{num} {unit}{'s' * (num != 1)}", *([f"{steps:,} steps"] if steps else [])]
    watched = [worker.name for worker in troubled(result)]
    return ", ".join(parts) + (f"; watch {listed(watched)}" if watched else "")


def _is_software(result: RunResult) -> bool:
    return any(worker.cause_class is CauseClass.SOFTWARE for worker in result.workers)


def _answers(result: RunResult, story: Story) -> Iterator[tuple[str, str]]:
    by_name = {worker.name: worker for worker in result.workers}
    named = [by_name[name] for name in result.culprits if name in by_name] or troubled(result)[:1]
    if result.culprits:
        yield "which", "<br>".join(text(_identity(worker)) for worker in named)
    yield "since", "<br>".join(dict.fromkeys(_since(worker, result, story) for worker in named))
    yield "do now", text(result.do_now)
    words = (f"{worker.name}: {worker.do_now}" for worker in named if worker.do_now)
    yield "GPU", "<br>".join(map(text, words))
    yield "what", text(result.summary)
    if result.scope is not None:
        lines = scope_lines(result.scope, len(result.workers))
        yield "shown", "<br>".join(map(text, lines))
    if result.golden is not None:
        lines = (line.removeprefix("golden: ") for line in golden_lines(result.golden))
        yield "golden", "<br>".join(map(text, (result.golden.file, *lines)))


def _since(worker: WorkerResult, result: RunResult, story: Story) -> str:
    """`step 57, 12.3 s after the start (2026-11-23 05:00:12)`"""
    begun = since(worker, result, story)
    if begun.seconds is None:
        return text(begun)
    return text(f"{begun} ({story.clock(begun.seconds)})")


def _identity(worker: WorkerResult) -> str:
    """`GPU3 (NVIDIA H100, GPU-1f..., bus 0000:3b:00.0, serial 1320...)`"""
    gpu = worker.gpu or {}
    serial = gpu.get("serial")
    bus = gpu.get("pci_bus_id")
    parts = [gpu.get("name"), gpu.get("uuid"), bus and f"bus {bus}", serial and f"serial {serial}"]
    known = ", ".join(filter(None, parts))
    return f"{worker.name} ({known})" if known else worker.name


def _in_order(result: RunResult) -> list[WorkerResult]:
    """Whoever there is something to say of comes first; those that were stopped have no tile."""
    first = troubled(result)
    passed = [worker for worker in result.workers if worker.verdict is Verdict.PASS]
    return [*first, *passed]


def _tile(worker: WorkerResult, result: RunResult, story: Story) -> str:
    gpu = worker.gpu or {}
    pairs = [
        ("since", _since(worker, result, story)),
        ("why" if worker.verdict is not Verdict.PASS else "result", text(_worst(worker))),
        ("model", text(gpu.get("name") or worker.detail.get("device_name") or "")),
        ("UUID", text(gpu.get("uuid") or "")),
        ("bus", text(gpu.get("pci_bus_id") or "")),
        ("serial", text(gpu.get("serial") or "")),
    ]
    severity = f" <small>{text(worker.severity)}</small>" if worker.severity else ""
    head = f"<h3>{text(worker.name)} {badge(worker.verdict)}{severity}</h3>"
    return f'<li class="{worker.verdict}">{head}{"".join(facts(pairs))}</li>'


def _worst(worker: WorkerResult) -> str:
    """What is wrong, or the figure that comes next to it."""
    if told := next(filter(None, [*worker.symptoms, *worker.warnings, worker.cause]), None):
        return told.removeprefix(f"{worker.name}: ")
    parts = []
    if worker.loss_last is not None:
        parts.append(f"loss {number(worker.loss_first)} → {number(worker.loss_last)}")
    if worker.tokens_per_s is not None:
        parts.append(f"{worker.tokens_per_s:,.0f} tokens/s")
    if (health := worker.telemetry) is not None and health.temperature_max_c is not None:
        parts.append(f"{health.temperature_max_c} °C at most")
    return ", ".join(parts)


def _stopped(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """One line; who they are is folded."""
    names = listed([worker.name for worker in workers])
    causes = list(dict.fromkeys(worker.cause for worker in workers))
    how = causes[0] if len(causes) == 1 and causes[0] else "stopped"
    title = f"{SIGNS[Verdict.STOPPED]} {names}: {how}; nothing is known against them"
    who = "".join(f"<li>{text(_identity(w))}: {w.steps:,} steps</li>" for w in workers)
    yield from folded(title, [f"<ul>{who}</ul>"])
