"""A run that is over -> its verdict, its evidence in the run directory, report.json and .html."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.report.files import lines_of
from launcher.report.page.document import page
from launcher.report.page.story import story_of
from launcher.telemetry.health_result import with_health
from launcher.verdict.judge import judge
from launcher.verdict.live import Watch
from launcher.verdict.record import Case, RunRecord
from launcher.verdict.results import Judgement, LastStep, RunResult
from launcher.verdict.scope import scope_of
from launcher.verdict.slow import Slow
from launcher.verdict.steps import History
from model_check.config.schema import FAIL_ON
from model_check.errors import UsageError
from model_check.events import Evidence, Telemetry, decode_gpu
from model_check.forensics.manifest import DIFFERENCE, MANIFEST
from model_check.utils.fingerprint import SCHEMA


def conclude(
    record: RunRecord,
    watch: Watch,
    directory: Path,
    place: Callable[[Path, Path], Path] = run_dir.keep,
) -> Judgement:
    """The verdict of a run, and its GPUs' health. `place` puts a file of evidence into a dossier of
    `directory`, where no later run writes over it, or finds it there."""
    for name, history in watch.histories.items():
        dossier = directory / "dossier" / name.lower()
        history.evidence = [
            replace(item, path=str(place(Path(item.path), dossier))) for item in history.evidence
        ]
    end, workers = record.end, record.ended
    assert end is not None, "a run that is over has an end"
    assert workers is not None
    named = dict.fromkeys(name for found in end.disagreements for name in found.odd)
    named |= dict.fromkeys(name for name, h in watch.histories.items() if h.broken)
    for found in end.disagreements:
        if not found.odd:
            _compare_dossiers(list(found.bits)[1:], named, watch, directory)
    _compare_dossiers(list(named), named, watch, directory)
    histories = {worker.name: watch.histories.get(worker.name, History()) for worker in workers}
    case = Case(record, end, workers, histories, watch.agreement.agreed_steps)
    judgement = judge(case)
    fail_on = FAIL_ON if record.fail_on is None else record.fail_on
    slow = {
        name: (how, _samples(directory, name, how)) for name, how in watch.slowness.found.items()
    }
    result = with_health(judgement.result, record.healths or {}, fail_on, slow)
    scope, fingerprints = scope_of(case, result), _last_steps(watch)
    return replace(judgement, result=replace(result, fingerprints=fingerprints, scope=scope))


def _compare_dossiers(
    suspects: Sequence[str], named: Collection[str], watch: Watch, directory: Path
) -> None:
    """Where one that differs or changed, and an equal of it that nothing is known against, kept
    their state: which values differ, as evidence. An earlier comparison stays."""
    dossiers = {name: directory / "dossier" / name.lower() for name in watch.histories}
    kept = [name for name, path in dossiers.items() if (path / MANIFEST).exists()]
    for suspect in (name for name in suspects if name in kept):
        equals = [name for name in watch.agreement.equals(suspect) if name in kept]
        healthy = [name for name in equals if name not in (*named, suspect)]
        # One that is healthy beside several suspects kept its state for each.
        peers = [path.parent for name in healthy for path in dossiers[name].rglob(MANIFEST)]
        path = dossiers[suspect] / DIFFERENCE
        if not path.exists() and peers:
            _compare_with_one(dossiers[suspect], peers)
        if path.exists():
            watch.histories[suspect].evidence.append(Evidence(path=str(path), what="difference"))


def _compare_with_one(suspect: Path, peers: Sequence[Path]) -> None:
    """With the first that kept the state after the same step."""
    from model_check.forensics.compare import write_difference  # numpy: 0.1 s

    with suppress(OSError):  # a full disk: the dossiers stay
        any(write_difference(suspect, peer) for peer in peers)


def _last_steps(watch: Watch) -> list[LastStep]:
    """One for all workers with the same bits; of those that finished, in the order of the run,
    whoever told them first."""
    steps: list[LastStep] = []
    for worker, history in watch.histories.items():
        vectors = watch.last_vectors.get(worker)
        if vectors is None or not history.is_finished:
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
        events = lines_of(run_dir.telemetry_path(directory, worker), decode_gpu)
        samples = [event for event in events if isinstance(event, Telemetry)]
        return [sample for sample in samples if slow.since_ns <= sample.t <= slow.last_ns]
    return []


def write(result: RunResult, record: RunRecord, watch: Watch, directory: Path) -> None:
    """report.json and report.html, each whole or not at all. Raises StorageError."""
    run_dir.write(directory / "report.json", msgspec.to_builtins(result))
    run_dir.write(
        directory / "report.html", page(result, story_of(record, watch, result, directory))
    )
