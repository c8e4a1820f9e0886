"""Golden files: made of a run whose workers agreed, written whole, read again."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launcher.report.files import content_of, lines_of
from launcher.verdict.golden import ENOUGH_WORKERS, SCHEMA, Golden, Source, key_of
from launcher.verdict.golden_watch import usual_ms
from launcher.verdict.live import Watch
from launcher.verdict.own_command import CheckedCommand
from launcher.verdict.record import RunRecord
from launcher.verdict.results import Judgement, Verdict
from model_check.config.resume import acting_settings
from model_check.errors import StorageError, UsageError
from model_check.events import Evaluation, Event, Step, decode, readable
from model_check.utils.files import check_replaceable, read_whole, write_atomic
from model_check.utils.secrets import masked_values
from model_check.utils.words import listed

_LONGEST = 1 << 28
"""Bytes: half a million steps."""


class Finished(Struct, frozen=True):
    """A run that is over, and its verdict."""

    directory: Path
    judgement: Judgement
    record: RunRecord
    watch: Watch


class _Agreed(Struct, frozen=True):
    """The workers of one kind that agreed in as many steps, from the first on."""

    workers: list[str]
    num_steps: int


class _Schema(Struct):
    schema: int


def golden_of(run: Finished, *, force: bool) -> Golden:
    """Of the kind of which most workers agreed, as far as they did. `force`: also where something
    is missing. Raises UsageError where it is, or where the bits would prove nothing."""
    if useless := _useless(run):
        raise UsageError(f"{run.directory}: no golden file can be made of this run: {useless}")
    agreed = max(_agreed(run.watch), key=lambda each: (len(each.workers), each.num_steps))
    lacks = "; ".join(_lacks(run, agreed))
    if lacks and not force:
        raise UsageError(
            f"{run.directory}: no golden file: {lacks}. Run {ENOUGH_WORKERS} workers or more of "
            "one kind to the end (--force writes what there is, and why it was not enough)"
        )
    try:
        return _made(run, agreed, lacks or None)
    except ValueError as error:  # a line of its events was torn
        raise UsageError(f"{run.directory}: no golden file: {error}") from error


def write_golden(path: Path, golden: Golden) -> None:
    """Whole or not at all; what looks like a secret is masked. Raises StorageError."""
    document = msgspec.to_builtins(golden)
    document |= {key: masked_values(readable(document[key])) for key in ("key", "source")}
    try:
        check_replaceable(path)
        write_atomic(path, msgspec.json.encode(document) + b"\n")
    except OSError as error:
        raise StorageError(
            f"{path}: cannot write the golden file: {error.strerror or error}"
        ) from error


def read_golden(path: Path) -> Golden:
    """Raises UsageError."""
    try:
        content = read_whole(path, _LONGEST)
        schema = msgspec.json.decode(content, type=_Schema).schema
        if schema != SCHEMA:
            raise UsageError(f"{path}: a golden file of another version (schema {schema})")
        return msgspec.json.decode(content, type=Golden)
    except OSError as error:
        raise UsageError(f"{path}: no golden file: {error.strerror or error}") from error
    # What is not UTF-8 is a ValueError, as is every error of msgspec.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: damaged, or no golden file: {error}") from error


def settings_of(directory: Path, checked: CheckedCommand | None = None) -> dict[str, Any]:
    """The settings of a run that decide its steps, or its command, by name; empty where its file
    tells none."""
    if checked is not None:
        return {**checked.told}
    with suppress(OSError, ValueError, RecursionError):
        content = content_of(directory / "config.json")
        tree = msgspec.json.decode(content, type=dict[str, Any])
        return acting_settings({name: s for name, s in tree.items() if isinstance(s, dict)})
    return {}


def what_was_written(path: Path, golden: Golden) -> str:
    """For people."""
    source = golden.source
    text = f"golden file {path}: {len(golden.steps):,} steps of {listed(source.workers)}"
    return f"{text}; forced: {source.forced}" if source.forced else text


def _useless(run: Finished) -> str | None:
    """Why the bits of a run prove nothing; None: they may."""
    if run.record.steps is None and run.record.checked is None:
        return "a command of your own ran there, without `check`"
    if run.record.not_compared is not None:
        return run.record.not_compared
    if any(facts.repeated is False for facts in run.watch.all_facts.values()):
        return "its kernels vary"
    if not any(agreed.num_steps for agreed in _agreed(run.watch)):
        return "no step was told, or they differ from the first on"
    return None


def _agreed(watch: Watch) -> Iterator[_Agreed]:
    """Of each kind those that agreed in most steps."""
    for kind in {tuple(watch.agreement.equals(name)): None for name in watch.all_facts}:
        counts = {name: _num_agreed(name, watch) for name in kind}
        most = max(counts.values())
        yield _Agreed([name for name in kind if counts[name] == most], most)


def _num_agreed(worker: str, watch: Watch) -> int:
    """One without equals agrees with itself."""
    return watch.agreement.agreed_steps.get(worker, watch.all_facts[worker].num_steps)


def _lacks(run: Finished, agreed: _Agreed) -> Iterator[str]:
    result, record = run.judgement.result, run.record
    if result.verdict is not Verdict.PASS:
        yield f"its verdict is {result.verdict} (exit code {result.exit_code})"
    if record.drill is not None:
        yield f"it is a drill ({record.drill})"
    if len(agreed.workers) < ENOUGH_WORKERS:
        them = f"{listed(agreed.workers)} agreed" if len(agreed.workers) > 1 else "one worker"
        yield f"{them}, and {ENOUGH_WORKERS} are needed"
    to_do = (record.steps or 0) - run.watch.all_facts[agreed.workers[0]].first_step
    if agreed.num_steps < to_do:
        yield f"{agreed.num_steps:,} of {to_do:,} steps were compared"


def _made(run: Finished, agreed: _Agreed, forced: str | None) -> Golden:
    record, watch = run.record, run.watch
    first, *_ = agreed.workers
    told = list(_told(run.directory, first))
    steps = [event for event in told if isinstance(event, Step)][: agreed.num_steps]
    if not steps:
        raise UsageError(f"{run.directory}: no golden file: the events of {first} are gone")
    is_whole = agreed.num_steps == watch.all_facts[first].num_steps
    last_step = steps[-1].step
    evaluations = [event for event in told if isinstance(event, Evaluation)]
    vectors = watch.last_vectors.get(first)
    return Golden(
        schema=SCHEMA,
        key=key_of(record.groups[first], watch.all_facts[first].detail, record.checked),
        source=_source(run, agreed.workers, forced),
        step_ms=_usual_ms(run.directory, agreed.workers),
        tokens_per_s=_tokens_per_s(run, agreed),
        steps=[replace(step, t=0, busy_ms=None, repeated=None) for step in steps],
        evaluations=[replace(e, t=0) for e in evaluations if is_whole or e.step <= last_step],
        last=replace(vectors, t=0) if vectors and vectors.step == last_step else None,
    )


def _told(directory: Path, worker: str) -> Iterator[Event]:
    return lines_of(directory / f"{worker.lower()}.events.jsonl", decode)


def _source(run: Finished, workers: list[str], forced: str | None) -> Source:
    record = run.record
    return Source(
        run_dir=record.run_dir,
        host=record.host,
        started_at=record.started_at,
        workers=workers,
        versions=record.versions,
        settings=settings_of(run.directory, record.checked),
        forced=forced,
    )


def _usual_ms(directory: Path, workers: Sequence[str]) -> float | None:
    told = (_told(directory, name) for name in workers)
    each = [usual_ms([e.ms for e in events if isinstance(e, Step)]) for events in told]
    return median(known) if (known := list(filter(None, each))) else None


def _tokens_per_s(run: Finished, agreed: _Agreed) -> float | None:
    done = [run.watch.all_facts[name].done for name in agreed.workers]
    known = [each.tokens_per_s for each in done if each and each.tokens_per_s]
    return median(known) if known else None
