"""How workers stand to a golden file, and what a verdict makes of it: events in, words out."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.verdict.advice import advised
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.disagreement import Replay as ReplayFound
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.golden import (
    SCHEMA,
    Golden,
    GoldenResult,
    Other,
    Source,
    Standing,
    golden_lines,
    key_of,
)
from launcher.verdict.golden_watch import GoldenWatch
from launcher.verdict.own_command import CheckedCommand
from launcher.verdict.record import RunEnd
from launcher.verdict.results import RunResult, Verdict
from launcher.verdict.severity import Repeat
from model_check.events import Counters, Evaluation, NonFinite, Phase, Scalar, Step, Vectors
from tests.launcher.telemetry.test_health import health_of
from tests.launcher.verdict.test_judge import LOSS, RECORD, ended, judged, trained

DETAIL: dict[str, Scalar] = {
    "device_name": "H100",
    "num_sms": 132,
    "torch": "2.13.0",
    "settings": "abc",
    "fingerprints": "full, schema 1",
}
SOURCE = Source(
    run_dir="/r",
    host="node1",
    started_at=datetime(2026, 1, 1, tzinfo=UTC),
    workers=["GPU0", "GPU1", "GPU2"],
    versions={"driver": "535.1"},
)
SUM = "00000000000000aa"


def step(number: int, **more: Any) -> Step:
    values = {"loss": LOSS, "grad_norm": LOSS, "lr": 1e-5, "ms": 100.0, "tokens": 9}
    prints = {"before.weights": SUM, "gradients": SUM, "weights": SUM}
    return Step(step=number, **values | {"fp": prints, "taken": "all"} | more)


def other(number: int, quantity: str = "gradients", bits: str = "bb") -> Step:
    """A step with other bits."""
    return step(number, fp={**step(number).fp, quantity: bits})


def golden(num_steps: int = 8, **more: Any) -> Golden:
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "key": key_of("H100 80 GiB", DETAIL),
        "source": SOURCE,
        "step_ms": 93.0,
        "steps": [step(number) for number in range(num_steps)],
    }
    return Golden(**values | more)


def stands(
    events: dict[str, list[Any]],
    of: Golden | None = None,
    vectors: dict[str, Vectors] | None = None,
    run_settings: dict[str, Any] | None = None,
    checked: CheckedCommand | None = None,
    **changes: Any,
) -> GoldenResult:
    """How workers that told this stand to it; `changes`: in what each said of itself."""
    watch = GoldenWatch(of or golden(), "g.json", events, run_settings or {})
    all_facts = {name: WorkerFacts() for name in events}
    for name, told in events.items():
        for event in [Phase(name="build", detail=DETAIL | changes), *told]:
            watch.record(name, event)
            all_facts[name].record(event)
    record = replace(RECORD, groups=dict.fromkeys(events, "H100 80 GiB"), checked=checked)
    return watch.result(record, all_facts, vectors or {})


def equal(num_steps: int = 8) -> list[Step]:
    return [step(number) for number in range(num_steps)]


def test_equal_steps_are_counted_and_a_speed_is_told() -> None:
    (found,) = stands({"GPU0": equal()}).workers
    assert (found.is_equal, found.equal_steps, found.steps, found.speed) == (True, 8, 8, 0.93)


def test_the_first_difference_is_kept_with_both_bits() -> None:
    (found,) = stands({"GPU0": [*equal(3), other(3), other(4, "weights")]}).workers
    assert found.equal_steps == 3
    assert found.disagreement == Disagreement(3, "gradients", {"GPU0": "bb", "golden": SUM})


def test_a_validation_loss_is_compared_too() -> None:
    of = golden(evaluations=[Evaluation(step=2, split="held_out", loss=LOSS, tokens=1)])
    wrong = Evaluation(step=2, split="held_out", loss=(9.0).hex(), tokens=1)
    (found,) = stands({"GPU0": [*equal(2), wrong]}, of).workers
    assert found.disagreement is not None
    assert found.disagreement.quantity == "validation loss of held_out"


def test_the_tensor_is_named_by_the_fingerprints_of_the_last_step() -> None:
    def told(bits: int) -> Vectors:
        sums = {"a": f"{5:016x}", "b": f"{bits:016x}"}
        return Vectors(step=7, fp={"gradients": sums}, sizes={"b": (1, 32)})

    run = {"GPU0": [*equal(7), other(7)]}
    (found,) = stands(run, golden(last=told(1)), {"GPU0": told(2)}).workers
    assert found.disagreement is not None
    assert found.disagreement.tensor is not None
    assert found.disagreement.tensor.name == "b"


@pytest.mark.parametrize("key", ["device_name", "num_sms", "torch", "settings", "fingerprints"])
def test_each_key_that_differs_is_named(key: str) -> None:
    (found,) = stands({"GPU0": equal()}, **{key: "else"}).workers
    assert found.others == [Other(key, DETAIL[key], "else")]
    assert not found.is_comparable
    assert (found.speed is None) == (key in ("device_name", "num_sms", "settings"))


def test_a_key_that_only_one_of_them_has_differs() -> None:
    of = golden(key=key_of("H100 80 GiB", DETAIL | {"cudnn": 9}))
    (found,) = stands({"GPU0": equal()}, of).workers
    assert found.others == [Other("cudnn", 9, None)]
    assert str(found.others[0]) == "cudnn 9 there, n/a here"


def test_settings_that_differ_are_named_instead_of_their_digest() -> None:
    of = golden(source=replace(SOURCE, settings={"training.max_steps": 4, "system.seed": 1}))
    here = {"training.max_steps": 8, "system.seed": 1}
    (found,) = stands({"GPU0": equal()}, of, run_settings=here, settings="def").workers
    assert found.others == [Other("training.max_steps", 4, 8)]


def test_a_run_that_went_on_from_a_checkpoint_is_another_one() -> None:
    resumed = Phase(name="train", detail={"first_step": 4, "resumed": "step_4.pt"})
    (found,) = stands({"GPU0": [resumed, step(4)]}).workers
    assert [str(each) for each in found.others] == ["first_step 0 there, 4 here"]


def test_all_that_begin_with_other_weights_are_not_comparable() -> None:
    first = other(0, "before.weights")
    found = stands({"GPU0": [first, step(1)], "GPU1": [first, step(1)]})
    assert [each.is_comparable for each in found.workers] == [False, False]
    assert "began with other weights" in str(found.workers[0])
    assert stands({"GPU0": [first], "GPU1": [step(0)]}).odd == ["GPU0"]


@pytest.mark.parametrize(("drawn", "is_of_gpu"), [("2" * 16, True), ("3" * 16, False)])
def test_a_generator_that_lay_idle_does_not_explain_what_a_command_did(
    drawn: str, is_of_gpu: bool
) -> None:
    def told(number: int, python: str, forward: str = SUM) -> Step:
        return step(number, fp={"forward": forward, "rng.python": python})

    command = CheckedCommand(seed=1)
    key = key_of("H100 80 GiB", DETAIL, command)
    of = golden(key=key, steps=[told(number, "1" * 16) for number in range(3)])
    events = [told(0, "2" * 16), told(1, "2" * 16), told(2, drawn, forward="bb")]
    (worker,) = stands({"GPU0": events}, of, checked=command).workers
    assert (worker.is_comparable, worker.disagreement is not None) == (is_of_gpu, is_of_gpu)
    assert ("from step 2 on: random numbers (python)" in str(worker.why)) is not is_of_gpu


def test_one_that_told_nothing_is_not_comparable() -> None:
    (found,) = stands({"GPU0": []}).workers
    assert found.reasons == ["it told no step"]


def test_only_workers_that_differ_alike_are_softwares() -> None:
    alike = {"GPU0": [step(0), other(1)], "GPU1": [step(0), other(1)]}
    assert stands(alike).is_software
    assert stands(alike).odd == []
    assert not stands(alike | {"GPU1": [step(0), other(1, bits="cc")]}).is_software
    beside_one = stands(alike | {"GPU2": equal(2)})
    assert (beside_one.is_software, beside_one.odd) == (False, ["GPU0", "GPU1"])


def test_a_driver_that_changed_is_told_and_is_no_key() -> None:
    found = stands({"GPU0": equal()})
    assert found.changed == [Other("driver", "535.1", None)]
    assert found.workers[0].is_equal


SPEED = "golden: 0.93 x its speed"


def lines_of(found: GoldenResult) -> list[str]:
    lines = list(golden_lines(replace(found, changed=[])))
    assert max(map(len, lines)) <= 80 - len("[launcher] ")
    return lines


def test_a_line_a_group_fits_a_terminal() -> None:
    names = [f"GPU{number}" for number in range(8)]
    events: dict[str, list[Any]] = {name: equal() for name in names}
    assert lines_of(stands(events)) == ["golden: all 8: equal in 8 of 8 steps", SPEED]
    one = stands(events | {"GPU5": [*equal(6), other(6), step(7)]})
    assert lines_of(one) == [
        "golden: all but GPU5: equal in 8 of 8 steps",
        "golden: GPU5: other bits from step 6 on (gradients)",
        SPEED,
    ]
    halves = stands(events | {name: [*equal(6), other(6)] for name in names[4:]})
    assert lines_of(halves)[0] == "golden: GPU0, GPU1, GPU2, GPU3: equal in 8 of 8 steps"
    foreign = stands(events, torch="2.14", dtype="float32")
    assert lines_of(foreign) == [
        "golden: all 8: not comparable: torch 2.13.0 there, 2.14 here",
        "golden:   and: dtype n/a there, float32 here",
        SPEED,
    ]


def test_text_of_the_file_forges_no_line() -> None:
    forged = "1\n[launcher] PASS: all is well\x1b[2J" + "x" * 500
    of = golden(key=key_of("H100 80 GiB", DETAIL | {"torch": forged}))
    lines = list(golden_lines(stands({"GPU0": equal()}, of)))
    assert all(line.isprintable() and len(line) < 120 for line in lines), lines


# The verdict


def result(found: GoldenResult, end: RunEnd | None = None, **record: Any) -> RunResult:
    names = [each.name for each in found.workers]
    return judged(
        end or RunEnd(exit_code=0),
        [ended(name) for name in names],
        {name: trained() for name in names},
        dict.fromkeys(names, 3) if len(names) > 1 else {},
        golden=found,
        steps=3,
        groups=dict.fromkeys(names, "H100"),
        **record,
    )


def found_of(*workers: Standing) -> GoldenResult:
    return GoldenResult(file="g.json", source=SOURCE, workers=list(workers))


def like(name: str) -> Standing:
    return Standing(name=name, steps=3, equal_steps=3)


def unlike(name: str, bits: str = "bb") -> Standing:
    found = Disagreement(1, "gradients", {name: bits, "golden": SUM})
    return Standing(name=name, steps=3, equal_steps=1, disagreement=found)


def foreign(name: str) -> Standing:
    return Standing(name=name, steps=3, equal_steps=0, others=[Other("torch", "2.12", "2.13")])


@pytest.mark.parametrize(
    ("workers", "verdict", "code", "rows"),
    [
        ([like("GPU0")], "PASS", 0, ["PASS"]),
        ([unlike("GPU0")], "SUSPECT", 21, ["SUSPECT"]),
        ([foreign("GPU0")], "INCONCLUSIVE", 75, ["INCONCLUSIVE"]),
        ([like("GPU0"), unlike("GPU1")], "SUSPECT", 21, ["PASS", "SUSPECT"]),
        ([unlike("GPU0"), unlike("GPU1")], "INVALID", 2, ["INVALID", "INVALID"]),
        ([like("GPU0"), foreign("GPU1")], "INCONCLUSIVE", 75, ["PASS", "INCONCLUSIVE"]),
        ([unlike("GPU0"), foreign("GPU1")], "SUSPECT", 21, ["SUSPECT", "INCONCLUSIVE"]),
    ],
)
def test_what_a_run_becomes_that_passed_else(
    workers: list[Standing], verdict: str, code: int, rows: list[str]
) -> None:
    judged = result(found_of(*workers))
    assert (judged.verdict, judged.exit_code) == (verdict, code)
    assert [row.verdict for row in judged.workers] == rows
    assert judged.golden is not None


def test_no_other_end_becomes_better() -> None:
    failed = judged(
        RunEnd(exit_code=7, culprits=("GPU0",)),
        [ended("GPU0", 7), ended("GPU1", 143, stopped_by_us=True)],
        {"GPU0": trained(1), "GPU1": trained(1)},
        golden=found_of(like("GPU0"), foreign("GPU1")),
        steps=3,
    )
    assert (failed.verdict, failed.exit_code) == (Verdict.FAIL, 7)
    assert [row.verdict for row in failed.workers] == ["FAIL", "STOPPED"]


def test_what_could_not_be_killed_counts_more_than_what_could_not_be_compared() -> None:
    found = found_of(foreign("GPU0"))
    assert result(found, RunEnd(exit_code=0, leftovers=(7,))).exit_code == 70


def test_a_nan_stays_a_nan() -> None:
    facts = trained(2)
    facts.record(NonFinite(step=2, where="loss", loss="nan", grad_norm="nan", repeated=True))
    end = RunEnd(exit_code=20, culprits=("GPU0",))
    spoiled = judged(
        end, [ended("GPU0", 20)], {"GPU0": facts}, golden=found_of(like("GPU0")), steps=3
    )
    assert (spoiled.exit_code, spoiled.workers[0].cause_class) == (20, "software")


@pytest.mark.parametrize(
    ("repeat", "row"),
    [
        (Repeat.TRANSIENT, ("SUSPECT", "hardware", "MONITOR")),
        (Repeat.PERSISTENT, ("FAIL", "hardware", "ISOLATE")),
    ],
)
def test_of_two_that_differ_the_replay_counts_for_the_odd_one(
    repeat: Repeat, row: tuple[str, str, str]
) -> None:
    differ = Disagreement(1, "gradients", {"GPU0": "bb", "GPU1": SUM})
    both = ("GPU0", "GPU1")
    replays = (ReplayFound(to_step=1, suspects=both, repeats=dict.fromkeys(both, repeat)),)
    end = RunEnd(exit_code=23, disagreement=differ, replays=replays)
    found = result(found_of(unlike("GPU0"), like("GPU1")), end)
    odd, right = found.workers
    assert (odd.verdict, odd.cause_class, odd.severity) == row
    assert right.verdict is Verdict.PASS
    assert (found.exit_code, found.culprits) == (21, ["GPU0"])


def test_of_two_that_differ_and_neither_has_its_bits_nobody_is_named() -> None:
    differ = Disagreement(1, "gradients", {"GPU0": "bb", "GPU1": "cc"})
    found = found_of(unlike("GPU0"), unlike("GPU1", "cc"))
    judged = result(found, RunEnd(exit_code=23, disagreement=differ))
    assert (judged.exit_code, judged.culprits) == (23, [])


def test_an_odd_one_beside_software_that_changed_stays_named() -> None:
    names = ("GPU0", "GPU1", "GPU2")
    differ = Disagreement(2, "gradients", {"GPU0": "dd", "GPU1": "cc", "GPU2": "dd"})
    found = found_of(*map(unlike, names))
    assert found.is_software
    judged = result(found, RunEnd(exit_code=21, disagreement=differ, culprits=("GPU1",)))
    assert (judged.verdict, judged.exit_code, judged.culprits) == ("SUSPECT", 21, ["GPU1"])


def test_a_majority_that_the_file_contradicts_names_nobody() -> None:
    differ = Disagreement(2, "gradients", {"GPU0": "bb", "GPU1": SUM, "GPU2": "bb"})
    found = found_of(unlike("GPU0"), like("GPU1"), unlike("GPU2"))
    judged = result(found, RunEnd(exit_code=21, disagreement=differ, culprits=("GPU1",)))
    assert (judged.exit_code, judged.culprits) == (23, [])
    assert {row.verdict for row in judged.workers} == {Verdict.INCONCLUSIVE}


def test_what_to_do_is_told_of_each_answer_of_a_golden_file() -> None:
    def do_now(*workers: Standing) -> str:
        return advised(result(found_of(*workers)), "/run").do_now

    assert "--write-golden" in do_now(foreign("GPU0"))
    assert do_now(unlike("GPU0")).endswith("replay /run GPU0")
    assert "No GPU is to blame" in do_now(*map(unlike, ("A", "B")))


def test_a_gpu_that_its_health_condemns_fails_beside_a_file_of_another_stack() -> None:
    sick = health_of(Counters(ecc_uncorrected=0), Counters(ecc_uncorrected=3))
    judged = result(found_of(foreign("GPU0")), healths={"GPU0": sick})
    assert (judged.verdict, judged.exit_code) == (Verdict.FAIL, 22)
