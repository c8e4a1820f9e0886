"""The lines that end a run: the last words of workers that failed, table, warnings, and last of all
the verdict. And what a stopped training can go on from. Writes nothing."""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.report.files import intact
from launcher.report.table import number, table
from launcher.verdict.advice import troubled
from launcher.verdict.golden import golden_lines
from launcher.verdict.last_lines import last_lines
from launcher.verdict.results import Judgement, WorkerResult
from launcher.verdict.scope import scope_lines
from launcher.verdict.severity import CauseClass
from launcher.verdict.summary import called, names_by_text
from model_check.config.ranks import JOBS
from model_check.config.schema import Settings, TrainingSettings
from model_check.events import Saved
from model_check.utils.project_files import PROGRAM
from model_check.utils.secrets import masked_argv

_CLEAR = 0.2
"""Of its time one rank must wait less than the next, for the others to wait for it."""
_MANY_STEPS = 20


def closing_lines(
    judgement: Judgement,
    directory: Path,
    tail_lines: int,
    *,
    has_report: bool = True,
    more: Iterable[str] = (),
) -> Iterator[str]:
    """What follows the workers, unprefixed. `tail_lines` of each failed worker come first, the
    culprit's after the others': a page of the terminal ends with the verdict. `more`: see
    `checkpoint_lines` and `line_on_check`."""
    result = judgement.result
    if tail_lines and len(result.workers) > 1:  # the lines of a single worker stand right above
        yield from _last_words(judgement, tail_lines)
    if len(result.workers) > 1 or any(worker.steps for worker in result.workers):
        yield from table(result.workers)
    for worker in result.workers:
        if worker.name in judgement.unexplained:
            yield f"{worker.name}: {worker.cause}"
        yield from (f"{worker.name}: evidence: {path}" for path in worker.evidence)
    yield from _to_do(result.workers)
    yield from _validation(result.workers)
    yield from waits(result.workers)
    yield from _warnings(result.workers)
    if result.run.get("checked") is not None:
        yield from _notes(result.workers)
    if result.dropped_lines:
        yield f"{result.dropped_lines} lines were too fast for this terminal; the logs have them"
    yield from more
    yield f"{'logs and report' if has_report else 'logs'}: {directory}"
    if result.golden is not None:
        yield from golden_lines(result.golden)
    if result.scope is not None and not judgement.is_training:
        yield from scope_lines(result.scope, len(result.workers))
    # What to do about symptoms stands in their own lines, each about one GPU.
    says_more = any(not (worker.symptoms or worker.warnings) for worker in troubled(result))
    yield from result.last_lines if says_more else [result.line]


def _last_words(judgement: Judgement, tail_lines: int) -> Iterator[str]:
    """What all say that ended alike, once."""
    result, told = judgement.result, set[tuple[str, ...]]()
    for worker in sorted(result.workers, key=lambda worker: worker.name in result.culprits):
        tail = last_lines(worker.last_lines, tail_lines)
        is_quoted = len(tail) == 1 and worker.name in judgement.quoted
        is_told = tuple(tail) in told and worker.cause_class is CauseClass.SOFTWARE
        told.add(tuple(tail))
        if tail and not is_quoted and not is_told:
            yield f"last lines of {worker.name}:"
            yield from (f"  | {line}" for line in tail)


def _to_do(workers: Sequence[WorkerResult]) -> Iterator[str]:
    pairs = ((worker.name, worker.do_now) for worker in workers if worker.do_now)
    yield from (f"{who}: {text}" for who, text in _told(pairs, workers))


def _validation(workers: Sequence[WorkerResult]) -> Iterator[str]:
    pairs = ((worker.name, _splits(worker)) for worker in workers if worker.validation)
    yield from (f"{who}: {text}" for who, text in _told(pairs, workers))


def _told(
    pairs: Iterable[tuple[str, str]], workers: Sequence[WorkerResult]
) -> Iterator[tuple[str, str]]:
    """Who, and what is said of it. All workers share a line (`all 8 GPUs`); of some of them each
    has its own, so that `grep GPU2` finds what concerns GPU2, and nothing else."""
    everyone, pairs = [worker.name for worker in workers], list(dict.fromkeys(pairs))
    sharing = names_by_text(pairs)
    for name, text in pairs:
        if not _are_all(sharing[text], everyone):
            yield name, text
        elif name == everyone[0]:
            yield f"all {called(everyone, everyone)}", text


def _are_all(names: Sequence[str], everyone: Sequence[str]) -> bool:
    """Of several."""
    return 1 < len(names) == len(everyone)


def _splits(worker: WorkerResult) -> str:
    parts = [
        f"{split.split} {number(split.loss)}"
        + ("" if split.perplexity is None else f" (perplexity {split.perplexity:.2f})")
        + ("" if split.exact_match is None else f", exact match {split.exact_match:.4f}")
        for split in worker.validation
    ]
    return f"validation after {worker.validation[-1].step} steps: {', '.join(parts)}"


def waits(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """Of a job: how long each rank waited; and for whom, where one waits much less than all others
    in many steps."""
    shares = {worker.name: worker.waiting for worker in workers if worker.waiting is not None}
    if len(shares) < 2:
        return
    each = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    least, next_to_it = sorted(shares.values())[:2]
    is_clear = next_to_it - least >= _CLEAR and min(w.steps for w in workers) >= _MANY_STEPS
    late = min(shares, key=lambda name: shares[name])
    whom = f"; {late} by far the least: they wait for it" if is_clear else ""
    yield f"ranks waited for each other: {each} of the time{whom}"


def _warnings(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """What is wrong with the GPUs."""
    pairs = (
        (worker.name, warning.removeprefix(f"{worker.name}: "))
        for worker in workers
        for warning in worker.warnings
    )
    yield from (f"warning: {who}: {text}" for who, text in _told(pairs, workers))


def _notes(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """Of a command: our own training has said them itself."""
    pairs = ((w.name, note) for w in workers for note in w.notes if note not in (w.cause or ""))
    yield from (f"note: {who}: {text}" for who, text in _told(pairs, workers))


def line_on_check(command: Sequence[str], device: str) -> str:
    """For a command that ended well and was compared with nothing."""
    on_cpu = "--device cpu " if device == "cpu" else ""
    again = f"{PROGRAM} check {on_cpu}-- {shlex.join(masked_argv(command))}"
    return f"a training with torch can be compared bit for bit: {again}"


def checkpoint_lines(
    settings: Settings,
    preset: str,
    saved: Mapping[str, Sequence[Saved]],
    *,
    is_stopped: bool,
    speaks: str,
) -> Iterator[str]:
    """Where the checkpoints of a training are, and what to do with them. `saved`: who writes them
    -> what was written. `is_stopped`: by a signal, which left nothing where none was due.
    `speaks`: `text`, `chat` or `music`, which its data are."""
    training = settings.training
    newest = {worker: intact(own)[-1:] for worker, own in saved.items()}
    paths = [_as_given(Path(event.path)) for own in newest.values() for event in own]
    asked_for = training.save_interval is not None or training.save_last
    if not paths:
        if is_stopped and asked_for:
            yield f"this run saved no checkpoint{_what_a_signal_does(training)}"
        return
    parent = os.path.commonpath([path.parent for path in paths])
    names = ((w, Path(own[0].path).name if own else "none") for w, own in newest.items())
    whose = {name: _whose(who, list(saved)) for name, who in names_by_text(names).items()}
    found = ", ".join(f"{name} ({who})" for name, who in whose.items())
    told = f"checkpoints in {parent}: {found}" if len(saved) > 1 else f"checkpoint: {paths[0]}"
    if is_stopped:
        yield f"{told}; --resume auto goes on from there{_what_a_signal_does(training)}"
        return
    yield told
    yield f"next: {PROGRAM} {shlex.join(['generate', str(paths[0]), *_ASK[speaks]])}"
    if len(saved) == 1:
        step = max(event.step for own in newest.values() for event in own)
        how = ["--preset", preset, *_where(settings, next(iter(saved)))]
        yield f"train on: {_command_to_go_on(settings, how, paths[0], step)}"


_ASK = {
    "text": ("--prompt", "Once upon a time"),
    "chat": ("--chat",),
    "music": ("--prompt-midi", "begins.mid", "--midi", "goes_on.mid"),
}
"""How `generate` asks a model that was trained on such data."""


def _where(settings: Settings, writer: str) -> list[str]:
    if settings.launch.mode in JOBS:
        return ["--mode", settings.launch.mode]
    is_gpu = writer.startswith("GPU")
    return ["--gpu", writer.removeprefix("GPU")] if is_gpu else ["--workers", "1"]


def _command_to_go_on(settings: Settings, how: Sequence[str], path: Path, step: int) -> str:
    """A whole one: the checkpoint has the settings of model, training and data."""
    steps, place = settings.training.max_steps, settings.system.checkpoint_dir
    more = ["--max-steps", str(2 * steps)] if step >= steps else []
    is_usual = place == Settings().system.checkpoint_dir
    kept = [] if is_usual else [f"system.checkpoint_dir={place}"]
    return f"{PROGRAM} {shlex.join([*how, '--resume', str(path.parent), *more, *kept])}"


def _as_given(path: Path) -> Path:
    """Relative where it lies below the working directory, as people give it."""
    with suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def _what_a_signal_does(training: TrainingSettings) -> str:
    if training.save_on_signal:
        return " (a SIGUSR1 instead would have saved first)"
    return " (with training.save_on_signal=true a SIGUSR1 saves, then ends the run)"


def _whose(names: Sequence[str], everyone: Sequence[str]) -> str:
    are_all = _are_all(names, everyone)
    return f"all {called(names, everyone)}" if are_all else ", ".join(names)
