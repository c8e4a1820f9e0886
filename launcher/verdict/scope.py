"""What a run that passed has shown, and what it has not. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from launcher.verdict.facts import WorkerFacts
from launcher.verdict.golden import GoldenResult
from launcher.verdict.record import Case
from launcher.verdict.results import RunResult, Scope, Verdict
from model_check.utils.words import printable

_RULE_OF_THREE = 3
"""Of n steps without an error: with a confidence of 95 % fewer than 3 in n steps have one (Hanley,
Lippman-Hand: If nothing goes wrong, is everything all right? JAMA 1983)."""
_STATE = "gradients, weights and moments"
_STATE_AND_FLOW = "gradients, weights, moments and what flows between blocks"
_STATE_OF_COMMAND = "gradients, weights and the optimizer's state"
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def scope_of(case: Case, result: RunResult) -> Scope | None:
    """None: the run did not pass, or trained nothing (a foreign command)."""
    steps = min((worker.steps for worker in result.workers), default=0)
    if result.verdict not in (Verdict.PASS, Verdict.WARN) or steps == 0:
        return None
    all_facts = [case.all_facts[worker.name] for worker in result.workers]
    compared, golden = _compared_steps(case), case.record.golden
    golden = golden if golden and len(golden.equal) == len(result.workers) else None
    touched, memory = min(map(_memory, all_facts), key=_share)
    return Scope(
        steps=steps,
        compared_steps=compared,
        fingerprints=fingerprints_of(all_facts),
        flops=_flops(all_facts, num_ranks=len(all_facts) if case.is_job else 1),
        dtype=next(iter(_said(all_facts, "dtype")), None),
        kernels=_said(all_facts, "attention_backend"),
        memory_touched_bytes=touched,
        memory_bytes=memory,
        max_rate=max_rate(compared),
        not_shown=[
            *_not_shown(case.record.device, compared, golden, memory),
            *(_not_shown_of_job(case) if case.is_job else []),
        ],
        golden=None if golden is None else golden.file,
    )


def max_rate(num_good: int) -> float | None:
    """With a confidence of 95 %, a smaller share is bad; None: too few to tell."""
    return _RULE_OF_THREE / num_good if num_good > _RULE_OF_THREE else None


def scope_lines(scope: Scope, num_workers: int) -> Iterator[str]:
    """For people, above the verdict."""
    if checked := ", ".join(_checked(scope, num_workers)):
        yield f"checked: {checked}"
    yield f"not shown: {', '.join(scope.not_shown)}"


def fingerprints_of(all_facts: Iterable[WorkerFacts]) -> str:
    """What fingerprints all of them took in each step: `full`, `rotate` (a part) or `off`."""
    said = {str(facts.detail.get("fingerprints")).partition(",")[0] for facts in all_facts}
    return next((how for how in ("full", "rotate") if said == {how}), "off")


def what_was_equal(
    all_facts: Sequence[WorkerFacts],
    whose: str,
    count: str,
    *,
    is_job: bool = False,
    is_ours: bool = True,
) -> str:
    """Of several workers without a difference. `count`: `9 of 9 steps`. `is_job`: they are ranks,
    which read different batches. `is_ours`: they are no command of a person's own, whose model need
    have no blocks, and whose optimizer no moments."""
    if any(facts.shard for facts in all_facts):
        return _what_shards_showed(all_facts, f"{whose} equal bit for bit in {count}")
    how, equal = fingerprints_of(all_facts), f"{whose} equal bit for bit in {count}"
    state = _STATE if is_job else _STATE_AND_FLOW if is_ours else _STATE_OF_COMMAND
    has_loss = all(facts.num_losses == facts.num_steps for facts in all_facts)
    if how == "full":
        return f"{'loss, ' if has_loss else ''}{state}{equal}"
    norm = "loss and gradient norm" if has_loss else "gradient norm"
    if how == "off":
        return f"{norm}{equal}"
    whole = "the first and the last" if all(h.is_finished for h in all_facts) else "the first"
    return f"{norm}s{equal}, a part of {state} in each, all in {whole}"


def _what_shards_showed(all_facts: Sequence[WorkerFacts], equal: str) -> str:
    """Of ranks that share a model: its state exists once, or once in each copy."""
    how = fingerprints_of(all_facts)
    parts = [f"loss and gradient norm{'' if how == 'off' else 's'}{equal}"]
    if how != "off":
        part = "" if how == "full" else "a part of "
        if len({facts.shard for facts in all_facts}) < len(all_facts):
            verb = "was" if part else "were"
            parts.append(f"so {verb} {part}{_STATE} on ranks with equal shards")
        parts.append(f"{part}each shard stayed as each update left it")
    return "; ".join(parts)


def what_one_showed(
    facts: WorkerFacts,
    golden: GoldenResult | None,
    *,
    is_part: bool = False,
    is_ours: bool = True,
) -> str:
    """Of a worker that has no other to be compared with. `is_part`: other nodes have some.
    `is_ours`: no command of a person's own, which may change its weights itself."""
    parts = ["one worker here" if is_part else "one worker, so nothing to compare it with"]
    how = fingerprints_of([facts])
    if golden is not None and golden.equal:
        (of_one,) = golden.workers
        count = f"{of_one.equal_steps} of {of_one.steps} steps of {golden.label}"
        parts = [what_was_equal([facts], "", count, is_ours=is_ours)]
    if how != "off" and not is_ours:
        parts.append("no bit of its weights or of its optimizer's state flipped between updates")
    elif how != "off":
        whose = "its weights and moments" if how == "full" else "what was watched of its state"
        parts.append(f"{whose} stayed as each update left {'them' if how == 'full' else 'it'}")
    if facts.repeated:
        parts.append("the passes of its first step gave the same bits twice")
    return "; ".join(parts)


def _not_shown_of_job(case: Case) -> Iterator[str]:
    """What is summed spreads to all ranks alike, and what one rank alone holds nobody compares."""
    wrong = "what one rank computes wrong before gradients are summed"
    shards = [facts.shard for facts in case.all_facts.values()]
    asked_for = case.record.asked_for or {}
    if any(shards):
        yield f"{wrong}, or sums wrong (--mode replicate looks for it)"
        if len({*shards}) == len(shards):
            yield "a wrong gradient or update of a shard, which one rank alone holds"
    elif (interval := asked_for.get("launch.audit_interval")) is not None:
        yield f"{wrong}, but for audits every {interval} steps"
    else:
        yield f"{wrong} (launch.audit_interval and --mode replicate look for it)"


def _compared_steps(case: Case) -> int:
    """Of the worker that was compared least, with its equals or a golden file; 0: none was."""
    golden = case.record.golden
    counts = {} if golden is None else {e.name: e.equal_steps for e in golden.workers}
    if case.record.part is not None and case.record.part.agreed_steps:
        counts = dict.fromkeys(case.all_facts, case.record.part.agreed_steps)
    for name, steps in case.agreed_steps.items():
        counts[name] = max(steps, counts.get(name, 0))
    return min(counts.values(), default=0)


def _said(all_facts: Iterable[WorkerFacts], key: str) -> list[str]:
    values = (facts.detail.get(key) for facts in all_facts)
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _flops(all_facts: Sequence[WorkerFacts], num_ranks: int) -> float | None:
    """Of the worker that did least; ranks tell the tokens of all."""
    of_token = [facts.detail.get("flops_per_token") for facts in all_facts]
    known = [
        facts.tokens * flops / num_ranks
        for facts, flops in zip(all_facts, of_token, strict=True)
        if isinstance(flops, int | float)
    ]
    return min(known) if len(known) == len(all_facts) else None


def _memory(facts: WorkerFacts) -> tuple[int | None, int | None]:
    """(touched, all there is) of its GPU, bytes; None: not told, or it is a CPU."""
    memory, done = facts.detail.get("memory_bytes"), facts.done
    if not isinstance(memory, int) or done is None or done.peak_memory_bytes is None:
        return None, None
    return done.peak_memory_bytes, memory


def _share(of_one: tuple[int | None, int | None]) -> float:
    touched, memory = of_one
    return touched / memory if touched is not None and memory else 0.0


def _checked(scope: Scope, num_workers: int) -> Iterator[str]:
    work = [] if scope.flops is None else [_in_words(scope.flops)]
    work += ["a worker"] if work and num_workers > 1 else []
    work += [] if scope.dtype is None else [f"in {scope.dtype}"]
    work += [f"with {' and '.join(scope.kernels)} attention"] if scope.kernels else []
    if work:
        yield " ".join(work)
    if scope.memory_touched_bytes is not None and scope.memory_bytes is not None:
        touched, memory = scope.memory_touched_bytes / 2**30, scope.memory_bytes / 2**30
        which = "each" if num_workers > 1 else "the"
        yield f"{touched:.1f} of {memory:.1f} GiB of {which} GPU's memory"
    if scope.golden is not None:
        yield f"against golden {printable(scope.golden)}"


def _not_shown(
    device: str, compared_steps: int, golden: GoldenResult | None, memory: int | None
) -> Iterator[str]:
    if device == "cpu":
        yield "GPUs"
    else:
        yield "links between GPUs"
        yield from ["the rest of the memory"] if memory is not None else []
    yield "other kernels"
    if compared_steps == 0:
        yield "wrong numbers (nothing was compared)"
        return
    yield "faults that all workers share" + ("" if golden is None else " with the golden file")
    if compared_steps > _RULE_OF_THREE:
        yield f"errors in fewer than {_RULE_OF_THREE} of {compared_steps} steps (95 %)"
    else:
        yield f"rare errors (too few steps: {compared_steps})"


def _in_words(flops: float) -> str:
    """`120 TFLOP`"""
    thousands = 0
    while flops >= 1000 and thousands < len(_PREFIXES) - 1:
        flops, thousands = flops / 1000, thousands + 1
    return f"{flops:.{0 if flops >= 10 else 1}f} {_PREFIXES[thousands]}FLOP"
