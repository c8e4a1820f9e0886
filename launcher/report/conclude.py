"""A run that is over -> its verdict, its evidence in the run directory, report.json and .html."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.report.files import lines_of
from launcher.report.page.document import page
from launcher.report.page.story import story_of
from launcher.telemetry.health import slow_symptom, symptoms
from launcher.verdict.advice import advised
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.judge import Recall, judge
from launcher.verdict.live import Watch
from launcher.verdict.record import Case, RunEnd, RunRecord
from launcher.verdict.results import Judgement, LastStep, RunResult
from launcher.verdict.scope import scope_of
from launcher.verdict.slow import Slow
from model_check.config.schema import FAIL_ON
from model_check.errors import UsageError
from model_check.events import Evidence, Telemetry, decode_gpu
from model_check.forensics.manifest import (
    COMPARED_KINDS,
    DIFFERENCE,
    MANIFEST,
    DossierError,
    read_manifest,
)
from model_check.utils.fingerprint import SCHEMA
from model_check.utils.worker_env import telemetry_path


def conclude(
    record: RunRecord,
    watch: Watch,
    directory: Path,
    place: Callable[[Path, Path], Path] = run_dir.keep,
    recall: Recall | None = None,
) -> Judgement:
    """The verdict of a run with its GPUs' health and history, and what to do. `place` puts a file
    of evidence into a dossier of `directory`, where no later run writes over it, or finds it there.
    `recall`: see `judge`; None: what the record kept of the history."""
    for name, facts in watch.all_facts.items():
        facts.evidence = _placed(facts.evidence, directory / run_dir.DOSSIER / name.lower(), place)
    end, workers = record.end, record.ended
    assert end is not None, "a run that is over has an end"
    assert workers is not None
    before = record.run_dir or str(directory)
    workers = tuple(
        replace(each, evidence=_here(each.evidence, before, directory)) for each in workers
    )
    _compare_dossiers(end, watch, directory)
    all_facts = {worker.name: watch.all_facts.get(worker.name, WorkerFacts()) for worker in workers}
    case = Case(
        record,
        end,
        workers,
        all_facts,
        watch.agreement.agreed_steps,
        watch.agreement.lacking,
        symptoms={name: symptoms(name, health) for name, health in (record.healths or {}).items()},
        slow={
            name: (how, slow_symptom(how, _samples(directory, name, how)))
            for name, how in watch.slowness.found.items()
        },
        fail_on=FAIL_ON if record.fail_on is None else record.fail_on,
    )
    judgement = judge(case, recall or (lambda names: record.earlier_faults or {}))
    scope, fingerprints = scope_of(case, judgement.result), _last_steps(watch)
    result = replace(judgement.result, fingerprints=fingerprints, scope=scope)
    return replace(judgement, result=advised(result, str(directory)))


def held_against_golden(record: RunRecord, watch: Watch) -> RunRecord:
    """The record of a run that is over, with how its workers stand to the golden file that `watch`
    has, if it has one."""
    if watch.golden is None:
        return record
    golden = watch.golden.result(record, watch.all_facts, watch.last_vectors)
    return replace(record, golden=golden)


def _here(files: Sequence[str], before: str, directory: Path) -> tuple[str, ...]:
    """Files of a run directory, which may have been moved since."""
    inside = ((file, Path(file)) for file in files)
    return tuple(
        str(directory / path.relative_to(before)) if path.is_relative_to(before) else file
        for file, path in inside
    )


def _placed(
    told: Sequence[Evidence], dossier: Path, place: Callable[[Path, Path], Path]
) -> list[Evidence]:
    """Each file once, where it is by now; the dossiers, too, that a later one has set aside."""
    placed = [replace(item, path=str(place(Path(item.path), dossier))) for item in told]
    aside = sorted(dossier.absolute().glob(f"*/{MANIFEST}"))
    placed += [Evidence(path=str(path), what="dossier") for path in aside]
    return list({item.path: item for item in placed}.values())


class _Dossier(NamedTuple):
    worker: str
    path: Path
    is_broken: bool
    """It holds a state that changed by itself."""
    of_step: int
    """The step of the fault."""
    state_after: int
    """Steps."""


def _compare_dossiers(end: RunEnd, watch: Watch, directory: Path) -> None:
    """Where suspects, and one that was healthy then, kept their state: which values differ, as
    evidence. An earlier comparison stays."""
    kept = [dossier for name in watch.all_facts for dossier in _dossiers(name, directory)]
    suspects = _suspects(end, watch)
    healthy = [dossier for dossier in kept if _is_healthy(dossier, suspects)]
    for dossier in kept:
        if dossier.worker not in suspects or dossier in healthy:
            continue
        if not (path := dossier.path / DIFFERENCE).exists():
            equals = {*watch.agreement.equals(dossier.worker)} - {dossier.worker}
            _compare_with_one(dossier, [peer for peer in healthy if peer.worker in equals])
        if path.exists():
            evidence = Evidence(path=str(path), what="difference")
            watch.all_facts[dossier.worker].evidence.append(evidence)


def _dossiers(worker: str, directory: Path) -> Iterator[_Dossier]:
    """One that is healthy beside several suspects kept its state for each."""
    for path in sorted((directory / run_dir.DOSSIER / worker.lower()).rglob(MANIFEST)):
        with suppress(DossierError):
            manifest = read_manifest(path.parent)
            if manifest.kind in COMPARED_KINDS:
                state_after, of_step = manifest.state_after or 0, manifest.step or 0
                is_broken = manifest.kind == "break"
                yield _Dossier(worker, path.parent, is_broken, of_step, state_after)


def _is_healthy(dossier: _Dossier, suspects: Mapping[str, int]) -> bool:
    """One that became a suspect later may have been the healthy one of an earlier fault."""
    is_before = dossier.state_after <= suspects.get(dossier.worker, math.inf)
    return is_before and not dossier.is_broken


def _suspects(end: RunEnd, watch: Watch) -> dict[str, int]:
    """Worker -> the first step that it may have taken wrong. Where nobody is named, all that differ
    but the first."""
    found = [
        (each.step, name) for each in end.disagreements for name in each.odd or [*each.bits][1:]
    ]
    found += [
        (0 if broken.since is None else broken.since + 1, name)
        for name, facts in watch.all_facts.items()
        if (broken := facts.broken) is not None
    ]
    return {name: step for step, name in sorted(found, reverse=True)}


def _compare_with_one(suspect: _Dossier, peers: Sequence[_Dossier]) -> None:
    """With one that kept the state after the same step; best for the same fault."""
    from model_check.forensics.compare import write_difference  # numpy: 0.1 s

    def unlike(peer: _Dossier) -> tuple[bool, bool]:
        return peer.state_after != suspect.state_after, peer.of_step != suspect.of_step

    with suppress(OSError):  # a full disk: the dossiers stay
        if peers:
            write_difference(suspect.path, min(peers, key=unlike).path)


def _last_steps(watch: Watch) -> list[LastStep]:
    """One for all workers with the same bits; of those that finished, in the order of the run,
    whoever told them first."""
    steps: list[LastStep] = []
    for worker, facts in watch.all_facts.items():
        vectors = watch.last_vectors.get(worker)
        if vectors is None or not facts.is_finished:
            continue
        same = next((s for s in steps if (s.step, s.fp) == (vectors.step, vectors.fp)), None)
        if same is not None:
            same.workers.append(worker)
        else:
            steps.append(
                LastStep(workers=[worker], step=vectors.step, schema=SCHEMA, fp=vectors.fp)
            )
    return steps


def _samples(directory: Path, worker: str, slow: Slow) -> list[Telemetry]:
    """What telemetry said of its GPU while it was slow."""
    with suppress(UsageError):
        events = lines_of(telemetry_path(directory, worker), decode_gpu)
        samples = [event for event in events if isinstance(event, Telemetry)]
        return [sample for sample in samples if slow.since_ns <= sample.t <= slow.last_ns]
    return []


def write(result: RunResult, record: RunRecord, watch: Watch, directory: Path) -> None:
    """report.json and report.html, each whole or not at all. Raises StorageError."""
    run_dir.write(directory / "report.json", msgspec.to_builtins(result))
    run_dir.write_page(
        directory / "report.html", lambda: page(result, story_of(record, watch, result, directory))
    )
