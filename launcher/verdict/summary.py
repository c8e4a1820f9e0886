"""The one sentence that a run comes down to: what was run and compared, or why it failed. Pure."""

from collections.abc import Sequence

from launcher.verdict.results import Case, Verdict, WorkerResult
from model_check.errors import EXIT_DISAGREEMENT, EXIT_PASS
from model_check.events import NonFinite


def summary(case: Case, verdict: Verdict, results: Sequence[WorkerResult]) -> str:
    if verdict is Verdict.PASS:
        return _what_passed(case, results)
    parts = [_why_not(case, results)]
    difference = case.end.disagreement
    if difference and case.end.exit_code not in (EXIT_PASS, EXIT_DISAGREEMENT):
        parts.append(f"besides, {difference}")
    if case.end.leftovers:
        pids = ", ".join(map(str, case.end.leftovers))
        parts.append(f"could not be killed, and may still hold a GPU: pid {pids}")
    return "; ".join(part for part in parts if part)


def shared_nonfinite(case: Case) -> NonFinite | None:
    """The non-finite step that every worker met with the same bits; None: there is none."""
    found = [case.histories[worker.name].nonfinite for worker in case.workers]
    first = found[0] if found else None
    if first is None or len(found) < 2:
        return None
    return first if all(bad is not None and _same(bad, first) for bad in found) else None


def _same(one: NonFinite, other: NonFinite) -> bool:
    return (one.step, one.where, one.loss, one.grad_norm, one.names) == (
        other.step,
        other.where,
        other.loss,
        other.grad_norm,
        other.names,
    )


def _why_not(case: Case, results: Sequence[WorkerResult]) -> str:
    end = case.end
    if (shared := shared_nonfinite(case)) is not None:
        return (
            f"every worker met the same non-finite {shared.where} at step {shared.step}, bit for "
            "bit: the settings or the data, not a GPU"
        )
    if end.disagreement and end.exit_code in (EXIT_PASS, EXIT_DISAGREEMENT):
        return str(end.disagreement)
    if end.is_by_signal or end.tied:
        return end.reason or ""
    culprits = end.culprits or [r.name for r in results if r.verdict is Verdict.FAIL]
    failed = [result for result in results if result.name in culprits and result.cause]
    if len(failed) == 1 and not end.is_hang:
        first = " first" if len(results) > 1 else ""
        return f"{failed[0].name} failed{first}: {failed[0].cause}"
    return end.reason or _what_is_missing(case, results)


def _what_is_missing(case: Case, results: Sequence[WorkerResult]) -> str:
    """Nobody failed, and not everybody did all of it."""
    causes: dict[str, list[str]] = {}
    for result in results:
        if result.verdict is not Verdict.PASS:
            causes.setdefault(str(result.cause), []).append(result.name)
    missing = "; ".join(f"{_and(those)} {cause}" for cause, those in causes.items())
    steps = min((result.steps for result in results), default=0)
    unproven = any(result.verdict is Verdict.INCONCLUSIVE for result in results)
    if unproven or steps == 0:
        return missing
    names = [result.name for result in results]
    return f"{missing}; {_what_was_compared(case, names, f'{steps} steps')}"


def _what_passed(case: Case, results: Sequence[WorkerResult]) -> str:
    names = [result.name for result in results]
    steps = min(result.steps for result in results)
    if steps == 0:
        return f"{_and(names)} ended with exit code 0"
    sharing: dict[str, list[str]] = {}
    for result in results:
        unit = "step" if result.steps == 1 else "steps"
        tokens = case.histories[result.name].tokens
        text = f"trained {result.steps} {unit}, {tokens:,} tokens"
        sharing.setdefault(text, []).append(result.name)
    ran = "; ".join(f"{_and(those)} {text}" for text, those in sharing.items())
    if len(sharing) == 1:
        return f"{ran} each; {_what_was_compared(case, names, f'{steps} steps')}"
    return f"{ran}; {_what_was_compared(case, names, f'the {steps} that each trained')}"


def _what_was_compared(case: Case, names: Sequence[str], steps: str) -> str:
    if len(names) == 1:
        return "one worker, so nothing to compare it with"
    if (reason := case.run.get("not_compared")) is not None:
        return f"not compared: {reason}"
    compared = [name for name in names if name in case.agreed_steps]
    alone = [name for name in names if name not in case.agreed_steps]
    if not compared:
        return "no two of them are alike, so nothing was compared"
    agreed = min(case.agreed_steps[name] for name in compared)
    whose = f" of {_and(compared)}" if alone else ""
    text = f"loss and gradient norm{whose} equal bit for bit in {agreed} of {steps}"
    if alone:
        text += f"; {_and(alone)} {'has' if len(alone) == 1 else 'have'} no equal here"
    return text


def _and(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
