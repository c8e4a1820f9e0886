"""A run in one sentence: what was run and compared, or why it failed. Pure."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from launcher.verdict.disagreement import quantity_name
from launcher.verdict.findings import born
from launcher.verdict.golden import GoldenResult
from launcher.verdict.record import Case
from launcher.verdict.results import Verdict, WorkerResult
from launcher.verdict.scope import what_one_showed, what_was_equal
from launcher.verdict.severity import CauseClass
from launcher.verdict.shared import Failure, shared_failure, shared_nonfinite
from model_check.errors import EXIT_USAGE, describe_exit
from model_check.events import NonFinite
from model_check.utils.words import listed

_DEADLINE = "the deadline came before"


class Summary(NamedTuple):
    text: str
    explained: Collection[str] = ()
    """Workers whose cause it tells."""


def summary(case: Case, verdict: Verdict, results: Sequence[WorkerResult]) -> Summary:
    if verdict is Verdict.PASS:
        last = "its end" if case.record.steps is None else f"all {case.record.steps:,} steps"
        until = f"; {_DEADLINE} {last}" if case.end.is_deadline else ""
        until += _unwatched(case) + _given(case)
        passed = f"{_where(case)}{_what_passed(case, results)}{_among_nodes(case)}"
        return Summary(f"{passed}{_as_golden(case)}{until}")
    reason, explained = _why_not(case, results)
    parts = [reason]
    if not case.end.is_by_bits:
        parts += _besides(case)
    told = [replay.said for replay in case.end.replays]
    clearing = [replay.said for replay in case.end.replays if replay.is_software]
    parts = [*clearing, *parts, *(said for said in told if said not in clearing)]
    explained = [*explained, *(w.name for w in results if w.cause in (*told, case.end.reason))]
    if case.end.leftovers:
        pids = ", ".join(map(str, case.end.leftovers))
        parts.append(f"could not be killed, and may still hold a GPU: pid {pids}")
    return Summary("; ".join(filter(None, parts)) + _given(case), explained)


def _given(case: Case) -> str:
    """For the end of the sentence about a command."""
    command = case.record.checked
    return "".join(f"; {each}" for each in command.given) if command else ""


def _unwatched(case: Case) -> str:
    """For the end of the sentence about a command that starts several processes."""
    most = max(len(facts.unwatched) for facts in case.all_facts.values())
    return f"; one of the {most + 1} processes of a worker that train was compared" if most else ""


def _where(case: Case) -> str:
    """For the beginning of the sentence about a part of a job that passed."""
    if (node := case.record.part) is None:
        return ""
    return f"{node.name}, node {node.number + 1} of {len(node.hosts)}: "


def _among_nodes(case: Case) -> str:
    """For the end of the same sentence."""
    if (node := case.record.part) is None:
        return ""
    first = next(iter(node.hosts))
    if node.agreed_steps is None:
        return f"; {first} has compared its bits with those of the other nodes"
    if node.agreed_steps == 0:
        return "; no two nodes are alike, so none was compared with another"
    return f"; nodes equal bit for bit at {node.agreed_steps} steps"


def names_by_text(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """(worker, text) pairs -> text -> the workers that share it, in their order."""
    sharing: dict[str, list[str]] = {}
    for name, text in pairs:
        sharing.setdefault(text, []).append(name)
    return sharing


def called(names: Sequence[str], everyone: Sequence[str]) -> str:
    """`GPU0 and GPU3`; `8 GPUs` where these are all: who looks for GPU2 wants what is said of it
    alone."""
    if len(names) < 2 or len(names) < len(everyone):
        return listed(names)
    on_gpu = all(name.startswith("GPU") for name in names)
    return f"{len(names)} {'GPUs' if on_gpu else 'CPU workers'}"


def _why_not(case: Case, results: Sequence[WorkerResult]) -> Summary:
    end = case.end
    if end.elsewhere is not None:
        return Summary(end.reason or "")
    if (shared := _what_was_shared(case)) is not None:
        return shared
    if (alike := case.changed_alike) and end.is_by_bits:
        found = case.all_facts[alike[0]].broken
        what = "" if found is None else found.what
        return Summary(f"the software, not a GPU: {what}, in {len(alike)} workers alike", alike)
    if end.is_by_bits and (told := _what_golden_tells(case)) is not None:
        return told
    if end.mismatch is not None:
        return Summary(str(end.mismatch), list(end.mismatch.values))
    broken = [row for row in results if row.name in case.broken]
    if broken and end.is_by_bits:
        names = {row.name for row in broken}
        text = "; ".join(f"{row.name}: {row.cause}" for row in broken)
        others = [d for d in end.disagreements if names.isdisjoint(d.odd or d.bits)]
        parts = [f"{text}: nothing in its program did that", *map(str, others)]
        return Summary("; ".join(parts), [*names, *(n for found in others for n in found.odd)])
    if end.disagreement and end.is_by_bits:
        odd = [name for found in end.disagreements for name in found.odd]
        return Summary("; ".join(map(str, end.disagreements)), odd)
    if end.is_by_signal or end.tied:
        return Summary(end.reason or "")
    of_host = [row.name for row in results if row.cause_class is CauseClass.HOST]
    if end.reason and of_host and not end.culprits:
        return Summary(end.reason, of_host)
    blamed = end.culprits or {row.name for row in results if row.verdict is Verdict.FAIL}
    failed = [row for row in results if row.name in blamed and row.cause]
    if len(failed) == 1 and not end.is_hang:
        first = " first" if len(results) > 1 or case.record.part is not None else ""
        who = case.record.called(failed[0].name)
        return Summary(f"{who} failed{first}: {failed[0].cause}", [failed[0].name])
    if end.is_deadline:
        missing = _what_is_missing(case, results)
        return Summary(f"{_DEADLINE} enough was compared: {missing}", [r.name for r in results])
    if end.reason:
        return Summary(end.reason, [row.name for row in results if row.cause == end.reason])
    return Summary(_what_is_missing(case, results), [row.name for row in results])


def _as_golden(case: Case) -> str:
    """For the end of the sentence about a run of several that passed."""
    golden = case.record.golden
    if golden is None or len(golden.workers) == 1:
        return ""
    num, steps = min((each.equal_steps, each.steps) for each in golden.workers)
    return f", and in {num} of {steps} steps of {golden.label}"


def _what_golden_tells(case: Case) -> Summary | None:
    """Where a golden file decides."""
    golden = case.record.golden
    if golden is None:
        return None
    if case.contradiction:
        differences = "; ".join(map(str, case.end.disagreements))
        text = f"but {listed(case.contradiction)} has the bits of {golden.label}: nobody is named"
        return Summary(f"{differences}; {text}")
    if case.is_unlike_golden:
        first = golden.differing[0]
        what = f"every worker differs from {golden.label} at {first.place}, all in the same way"
        return Summary(
            f"the software, not a GPU: {what}{_changed(golden)}",
            [each.name for each in golden.differing],
        )
    by_others = {*case.broken, *(name for found in case.end.disagreements for name in found.odd)}
    named = [name for name in case.odd_by_golden if name not in by_others]
    return _golden_names(case, golden, named) if named else None


def _golden_names(case: Case, golden: GoldenResult, named: Sequence[str]) -> Summary:
    if case.end.disagreement is not None:
        differences = "; ".join(map(str, case.end.disagreements))
        is_odd = "is the odd one" if len(named) == 1 else "are the odd ones"
        return Summary(f"{differences}; {golden.label} tells that {listed(named)} {is_odd}", named)
    told = "; ".join(
        f"{each.name} differs from {golden.label} at {each.place}: {each.disagreement.values}"
        for each in golden.differing
        if each.disagreement is not None
    )
    why = "the hardware, or a change of software that no key tells"
    return Summary(f"{told}; {why}{_changed(golden)}", named)


def _changed(golden: GoldenResult) -> str:
    """What of the software is known to have changed."""
    return f" (changed: {'; '.join(map(str, golden.changed))})" if golden.changed else ""


def _what_was_shared(case: Case) -> Summary | None:
    """What the first culprit met, where all workers did, or all of its kind: no GPU's fault."""
    first = next(iter([*case.end.culprits, *(worker.name for worker in case.workers)]), None)
    if first is None:
        return None
    if (bad := shared_nonfinite(case, first)) and _tells_the_end(case, bad.workers):
        return _shared_nonfinite(case, *bad)
    if (failure := shared_failure(case, first)) and _tells_the_end(case, failure.workers):
        return _shared_failure(case, *failure)
    return None


def _tells_the_end(case: Case, workers: Sequence[str]) -> bool:
    """Where nobody is blamed for the end of a run, what some of its workers met is not why."""
    return bool(case.end.culprits) or len(workers) == len(case.workers)


def _shared_nonfinite(case: Case, workers: Sequence[str], bad: NonFinite) -> Summary:
    is_all = len(workers) == len(case.workers)
    whose = "the settings or the data" if is_all else "the settings, the data or the kernels"
    what = f"{_who(case, workers)} met a non-finite {bad.where} at step {bad.step}"
    return Summary(f"{whose}, not a GPU: {what}{born(bad)}")


def _shared_failure(case: Case, workers: Sequence[str], failure: Failure) -> Summary:
    said = f": {failure.said.splitlines()[0]}" if failure.said else ""
    what = f"{_who(case, workers)} {_ended(failure.returncode)}{said}"
    whose = "the settings" if failure.returncode == EXIT_USAGE else "the software or the settings"
    return Summary(f"{what}; {whose}, not a GPU", workers)


def _ended(returncode: int) -> str:
    how = describe_exit(returncode)
    return f"was {how}" if returncode < 0 else f"ended with {how}"


def _who(case: Case, workers: Sequence[str]) -> str:
    is_all = len(workers) == len(case.workers)
    return "every worker" if is_all else f"the equals {listed(workers)}"


def _besides(case: Case) -> Iterator[str]:
    """Of a run that something else ended: which workers differ, and why no replay tells more."""
    end = case.end
    yield from (f"besides, {found}" for found in end.disagreements)
    in_steps = [found for found in end.disagreements if " " not in found.quantity]
    is_comparable = case.record.not_compared is None and end.exit_code != EXIT_USAGE
    is_comparable &= not case.is_job
    if (case.broken or in_steps) and is_comparable and not end.replays:
        yield "not replayed, since something else ended the run: `run.sh replay RUN_DIR` does that"


def _what_is_missing(case: Case, results: Sequence[WorkerResult]) -> str:
    """No reason to stop the run was met, and not every worker did all of its work."""
    unfinished = [row for row in results if row.verdict is not Verdict.PASS]
    causes = names_by_text((row.name, str(row.cause)) for row in unfinished)
    names = [row.name for row in results]
    missing = "; ".join(f"{called(those, names)} {cause}" for cause, those in causes.items())
    steps = min((row.steps for row in results), default=0)
    unproven = any(row.verdict is Verdict.INCONCLUSIVE for row in results)
    if unproven or steps == 0:
        return missing
    return f"{missing}; {_what_was_compared(case, names, f'{steps} steps')}"


def _what_passed(case: Case, results: Sequence[WorkerResult]) -> str:
    names = [row.name for row in results]
    if case.is_training:
        (row,) = results
        return f"{row.name} {_what_ran(case, row)}{_loss(row)}"
    steps = min(row.steps for row in results)
    if steps == 0:
        return f"{called(names, names)} ended with exit code 0"
    sharing = names_by_text((row.name, _what_ran(case, row)) for row in results)
    ran = "; ".join(f"{called(those, names)} {text}" for text, those in sharing.items())
    if len(sharing) == 1:
        each = " each" if len(names) > 1 and not case.is_job else ""
        return f"{ran}{each}; {_what_was_compared(case, names, f'{steps} steps')}"
    return f"{ran}; {_what_was_compared(case, names, f'the {steps} that each trained')}"


def _what_ran(case: Case, row: WorkerResult) -> str:
    unit = "step" if row.steps == 1 else "steps"
    job = " of one job" if case.is_job else ""
    tokens = case.all_facts[row.name].tokens
    of_text = f", {tokens:,} tokens" if tokens else ""  # a command may call no module
    return f"trained {row.steps} {unit}{job}{of_text}"


def _loss(row: WorkerResult) -> str:
    if not (isinstance(row.loss_first, float) and isinstance(row.loss_last, float)):
        return ""
    return f", loss {row.loss_first:.4f} -> {row.loss_last:.4f}"


def _what_was_compared(case: Case, names: Sequence[str], steps: str) -> str:
    if len(names) == 1:
        golden = case.record.golden
        is_part = case.record.part is not None
        is_ours = case.record.checked is None
        return what_one_showed(case.all_facts[names[0]], golden, is_part=is_part, is_ours=is_ours)
    if case.record.not_compared is not None:
        return f"not compared: {case.record.not_compared}"
    lacking = [] if case.is_job else [name for name in names if name in case.lacking]
    compared = [name for name in names if name in case.agreed_steps and name not in lacking]
    alone = [name for name in names if name not in case.agreed_steps]
    if not compared:
        return "no two of them are alike, so nothing was compared"
    agreed = min(case.agreed_steps[name] for name in compared)
    whose = f" of {listed(compared)}" if alone or lacking else ""
    all_facts = [case.all_facts[name] for name in compared]
    is_ours = case.record.checked is None
    count = f"{agreed} of {steps}"
    text = what_was_equal(all_facts, whose, count, is_job=case.is_job, is_ours=is_ours)
    if alone:
        text += f"; {listed(alone)} {'has' if len(alone) == 1 else 'have'} no equal here"
    for name in lacking:
        what = listed([quantity_name(each) for each in case.lacking[name]])
        text += f"; not compared: {what} of {name}, which did not tell them in each step"
    return text
