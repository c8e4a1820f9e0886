"""A command of a person's own that differs by itself is told apart from a GPU that does."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from launcher.verdict.advice import advised
from launcher.verdict.disagreement import Disagreement, Replay
from launcher.verdict.live import Watch
from launcher.verdict.own_command import CheckedCommand, words_of
from launcher.verdict.past import is_transient, past_runs
from launcher.verdict.record import RunEnd, Stop
from launcher.verdict.results import RunResult, Verdict
from launcher.verdict.severity import Repeat
from model_check.errors import EXIT_USAGE
from model_check.events import AskVectors, Done, Finished, Note, Phase, Step
from tests.launcher.verdict.test_fleet import Fleet, asked, steps
from tests.launcher.verdict.test_judge import LOSS, ended, judged, trained

NAMES = ("a", "b", "c")
EQUAL = {"inputs": "1", "before.weights": "2", "gradients": "3", "momentum_buffer": "4"}
OWN_SEED, SEEDED = CheckedCommand(), CheckedCommand(seed=7)


def step(number: int, repeated: bool | None = None, **fp: str) -> Step:
    fp = EQUAL | {name.replace("_in_", "."): value for name, value in fp.items()}
    told = {"step": number, "loss": LOSS, "grad_norm": LOSS, "lr": 0.0, "ms": 1.0, "tokens": 8}
    return Step(**told, fp=fp, repeated=repeated)


def watch(command: CheckedCommand | None = OWN_SEED, *names: str) -> Watch:
    return Watch(dict.fromkeys(names or NAMES, "cpu"), max_lead=2, command=command)


def stops(seen: Watch, told: Mapping[str, Step]) -> list[Stop]:
    return [stop for name, each in told.items() if (stop := seen.on_event(name, each))]


def in_each(number: int, *names: str, **kinds: str) -> dict[str, Step]:
    """Workers that differ in these quantities."""
    names = names or NAMES
    at = {name: f"{number}" for number, name in enumerate(names)}
    return {name: step(number, **{k: v + at[name] for k, v in kinds.items()}) for name in names}


WEIGHTS, BATCH = {"before_in_weights": "5"}, {"inputs": "5"}
RANDOM = {"rng_in_torch": "6", "rng_in_numpy": "7"}


@pytest.mark.parametrize(
    ("number", "kinds", "command", "what", "cure"),
    [
        (0, WEIGHTS | BATCH | RANDOM, OWN_SEED, "the first weights, the batch and random numbers "
         "(numpy, torch) differ", "give --seed N, or seed random numbers before the model is made"),
        (0, WEIGHTS | RANDOM, SEEDED, "the first weights and", "it seeds them again after --seed"),
        (0, WEIGHTS, SEEDED, "the first weights differ", "--seed 7 did not make them equal"),
        (3, BATCH | RANDOM, OWN_SEED, "in step 3 the batch and random", "give --seed N, or seed"),
        (3, BATCH, OWN_SEED, "in step 3 the batch differs", "generators of its own"),
        (3, BATCH, SEEDED, "in step 3 the batch differs", "sort the files that it reads"),
    ],
)  # fmt: skip
def test_what_a_command_does_otherwise_in_each_worker_is_told_with_its_cure(
    number: int, kinds: dict[str, str], command: CheckedCommand, what: str, cure: str
) -> None:
    seen = watch(command)
    (stop,) = stops(seen, in_each(number, **kinds))
    assert (stop.exit_code, stop.culprits) == (EXIT_USAGE, ())
    assert what in str(stop.reason)
    assert cure in str(stop.reason)
    assert seen.disagreements == []


def test_of_two_workers_no_majority_is_needed() -> None:
    (stop,) = stops(watch(OWN_SEED, "a", "b"), in_each(0, "a", "b", **WEIGHTS))
    assert "the first weights differ" in str(stop.reason)


def is_asked(seen: Watch) -> bool:
    """As of a difference that a GPU may have made."""
    return {type(command) for _, command in seen.commands()} >= {AskVectors}


@pytest.mark.parametrize("kinds", [{"gradients": "5"}, {"momentum_buffer": "5"}])
def test_what_a_step_computed_is_a_matter_of_gpus(kinds: dict[str, str]) -> None:
    seen = watch()
    assert not stops(seen, in_each(0, **kinds))
    assert is_asked(seen)


def test_weights_that_differ_later_are_a_matter_of_gpus() -> None:
    seen = watch()
    assert not stops(seen, in_each(1, **WEIGHTS))
    assert is_asked(seen)


def test_one_of_three_is_named_whatever_differs() -> None:
    seen = watch()
    told = in_each(0, **BATCH) | {"a": step(0), "c": step(0)}
    assert not stops(seen, told)
    assert is_asked(seen)
    assert [found.odd for found in seen.disagreements] == [("b",)]


def test_our_own_trainer_seeds_itself() -> None:
    seen = watch(None)
    assert not stops(seen, in_each(0, **WEIGHTS))
    assert is_asked(seen)


def test_random_numbers_alone_are_no_difference() -> None:
    seen = watch()
    assert not stops(seen, in_each(0, **RANDOM))
    assert seen.agreement.agreed_steps == dict.fromkeys(NAMES, 1)
    assert seen.agreement.lacking == {}


def test_what_a_step_began_with_is_no_matter_of_whose_passes_varied() -> None:
    seen = watch(None)
    told = {name: step(0, name != "b", inputs="1" if name == "a" else "2") for name in "abc"}
    assert not stops(seen, told)
    assert [found.odd for found in seen.disagreements] == [("a", "b")]


PYTHON = "rng.python"


def of_python(number: int, states: str, **fp: dict[str, str]) -> dict[str, Step]:
    """a and b, whose generators of Python have these states."""
    each = zip("ab", states.split(), strict=True)
    return {name: step(number, **{PYTHON: state}, **fp.get(name, {})) for name, state in each}


AT_1, AT_2, AT_3 = (8 * digit for digit in "123")
ONE, OTHER, THIRD = 2 * AT_1, 2 * AT_2, 2 * AT_3
"""Of a generator that nothing is drawn from in the step."""


@pytest.mark.parametrize(
    ("before", "then", "is_of_command"),
    [
        (f"{ONE} {OTHER}", f"{ONE} {OTHER}", False),
        (f"{ONE} {OTHER}", f"{ONE} {THIRD}", True),
        (f"{ONE} {ONE}", f"{ONE} {OTHER}", True),
        (f"{ONE} {OTHER}", f"{ONE} {AT_2}{AT_3}", True),  # in the step itself
        (f"{ONE} {AT_2}{AT_3}", f"{ONE} {AT_2}{AT_3}", True),
    ],
)
def test_a_generator_that_differed_before_and_lay_idle_explains_nothing(
    before: str, then: str, is_of_command: bool
) -> None:
    seen = watch(OWN_SEED, "a", "b")
    assert not stops(seen, of_python(0, before))
    later = of_python(1, then, a={"forward": "1"}, b={"forward": "2"})
    assert bool(stops(seen, later)) is is_of_command
    assert is_asked(seen) is not is_of_command


def test_nobody_waits_for_one_that_has_done_its_last_step() -> None:
    seen = watch(OWN_SEED, "a", "b", "c")
    seen.on_event("a", Phase(name="build", detail={"device_name": "x"}))
    seen.on_event("a", Finished())
    assert not stops(seen, {"b": step(0), "c": step(0)})
    assert seen.agreement.agreed_steps["b"] == 1


def checked(facts: Mapping[str, Any], end: RunEnd | None = None, **record: Any) -> RunResult:
    groups = dict.fromkeys(facts, "cpu")
    agreed = {name: each.num_steps for name, each in facts.items()}
    ends = [ended(name) for name in facts]
    end = end or RunEnd(exit_code=0)
    record = {"checked": OWN_SEED, "groups": groups} | record
    return judged(end, ends, dict(facts), agreed, **record)


def test_a_checked_command_tells_its_seed_and_no_blocks_or_moments() -> None:
    facts = {"CPU0": trained(), "CPU1": trained()}
    for each in facts.values():
        each.detail = {"fingerprints": "full, schema 1"}
    result = checked(facts, checked=SEEDED)
    assert result.exit_code == 0
    assert result.summary == (
        "2 CPU workers trained 3 steps, 300 tokens each; loss, gradients, weights and the "
        "optimizer's state equal bit for bit in 3 of 3 steps; random numbers seeded by --seed 7"
    )


def unwatched(steps: int, *, note: str = "", is_done: bool = False) -> Any:
    facts = trained(steps)
    facts.done = facts.done if is_done else None
    if note:
        facts.record(Note(text=note))
    return facts


@pytest.mark.parametrize(
    ("facts", "kind", "cause"),
    [
        (unwatched(0), "not_watched", "showed no step of a torch optimizer"),
        (unwatched(0, note="not watched: no"), "not_watched",
         "showed no step of a torch optimizer: not watched: no"),
        (unwatched(2, note="not watched: no"), "not_watched_to_end",
         "was watched for 2 steps only: not watched: no"),
        (unwatched(2, note="no fingerprint is taken"), "not_watched_to_end",
         "was watched for 2 steps only: its equals did 3"),
        (unwatched(2, is_done=True), "not_watched_to_end",
         "was watched for 2 steps only: its equals did 3"),
        (unwatched(3), "not_watched_to_end", "was watched for 3 steps only"),
    ],
)  # fmt: skip
def test_what_was_not_seen_never_passes(facts: Any, kind: str, cause: str) -> None:
    result = checked({"CPU0": trained(3), "CPU1": facts})
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 75)
    assert [row.kind for row in result.workers] == ["passed", kind]
    assert result.workers[1].cause == cause
    assert f"CPU1 {cause}" in result.summary


def test_a_command_that_was_stopped_or_failed_is_no_matter_of_what_was_seen() -> None:
    end = RunEnd(exit_code=7, reason="CPU1 failed", culprits=("CPU1",))
    facts = {"CPU0": unwatched(0), "CPU1": unwatched(0)}
    ends = [ended("CPU0", -15, stopped_by_us=True), ended("CPU1", 7)]
    result = judged(end, ends, facts, {}, checked=OWN_SEED)
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 7)


def test_the_deadline_of_a_checked_command_counts_its_steps() -> None:
    facts = {name: unwatched(12) for name in ("CPU0", "CPU1")}
    ends = [ended(name, -15, stopped_by_us=True) for name in facts]
    end = RunEnd(exit_code=0, is_deadline=True)
    record = {"checked": OWN_SEED, "groups": dict.fromkeys(facts, "cpu")}
    result = judged(end, ends, facts, dict.fromkeys(facts, 12), **record)
    assert (result.verdict, result.exit_code) == (Verdict.PASS, 0)
    assert result.summary.endswith("; the deadline came before its end")


def test_a_command_that_differs_by_itself_is_invalid() -> None:
    seen = watch()
    stops(seen, in_each(0, **WEIGHTS))
    end = RunEnd(exit_code=0, mismatch=seen.mismatch)  # found when all had ended
    result = checked({name: trained(1) for name in NAMES}, end)
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.INVALID, 2, [])
    assert {row.kind for row in result.workers} == {"starts_differ"}


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        (OWN_SEED, "Run the same again with --deterministic"),
        (CheckedCommand(deterministic=True), "--deterministic was not enough."),
    ],
)
def test_a_command_that_varies_in_a_replay_is_invalid_and_told_what_to_give(
    command: CheckedCommand, cure: str
) -> None:
    found = Disagreement(1, "loss", {"CPU0": "1", "CPU1": "2", "CPU2": "1"})
    replay = Replay(to_step=1, suspects=("CPU1",), times=1, is_software=True, said="it varies")
    end = RunEnd(exit_code=21, disagreement=found, replays=(replay,))
    result = advised(checked({n: trained(2) for n in found.bits}, end, checked=command), "run")
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.INVALID, 2, [])
    assert [(row.kind, row.cause) for row in result.workers] == [
        ("command_varies", "it varies")
    ] * 3
    assert cure in result.do_now
    assert result.summary.startswith("it varies; step 1: CPU1 differs in the loss")
    assert result.summary.endswith("".join(f"; {each}" for each in command.given))


@pytest.mark.parametrize(
    ("command", "kind", "counts"),
    [
        (OWN_SEED, "odd_once_of_command", False),
        (CheckedCommand(deterministic=True), "odd_once", True),
    ],
)
def test_one_difference_of_a_command_counts_against_a_gpu_where_its_operations_repeat(
    command: CheckedCommand, kind: str, counts: bool
) -> None:
    found = Disagreement(1, "loss", {"CPU0": "1", "CPU1": "2", "CPU2": "1"})
    replay = Replay(to_step=1, suspects=("CPU1",), times=3, repeats={"CPU1": Repeat.TRANSIENT})
    end = RunEnd(exit_code=21, disagreement=found, replays=(replay,), culprits=("CPU1",))
    result = advised(checked({n: trained(2) for n in found.bits}, end, checked=command), "run")
    row = result.workers[1]
    assert (result.verdict, row.kind, result.culprits) == (Verdict.SUSPECT, kind, ["CPU1"])
    assert ("with --deterministic" in result.do_now) is not counts
    run = past_runs(result, datetime(2026, 1, 1, tzinfo=UTC))[1]
    assert is_transient(run) is counts


def test_a_single_worker_claims_no_more_than_it_showed() -> None:
    facts = trained()
    facts.detail = {"fingerprints": "full, schema 1"}
    told = checked({"CPU0": facts}).summary
    assert "nothing to compare it with; no bit of its weights or of its optimizer's state" in told


def test_a_run_of_a_command_is_not_compared_with_other_runs() -> None:
    (run,) = Fleet().add(steps(), steps()).runs
    assert run.why_not(run.workers[0]) is None
    why = asked(run, checked=OWN_SEED).why_not(run.workers[0])
    assert why == "a command of your own is compared within its run alone"


def test_a_command_is_the_same_wherever_its_python_lies() -> None:
    words = ("python", "train.py", "--lr", "0.1")
    for python in ("python3", "/usr/bin/python3.12", "./.venv/bin/python"):
        assert words_of((python, *words[1:])) == words
    assert words_of(("/opt/bin/torchrun", "--x", "a/b.py")) == ("torchrun", "--x", "a/b.py")
    keys = [CheckedCommand(words=each).key for each in (words, (*words[:3], "0.2"))]
    assert keys[0]["command"] != keys[1]["command"]


def test_done_is_what_says_that_it_was_watched_to_its_end() -> None:
    facts = unwatched(3)
    facts.record(Done(exit_code=0))
    assert checked({"CPU0": facts}).exit_code == 0
