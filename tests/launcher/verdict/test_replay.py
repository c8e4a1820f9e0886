"""What replays prove, as the events of their workers."""

from collections.abc import Mapping

import msgspec
import pytest

from launcher.verdict.alone import MAX_PASSES, NUM_CLEAN
from launcher.verdict.disagreement import Replay
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.live import Watch
from launcher.verdict.observer import Dismissal
from launcher.verdict.record import RunEnd, Stop
from launcher.verdict.replay import (
    Attempt,
    Question,
    ReplayWatch,
    answer,
    is_open,
    question_about,
    questions_of,
)
from launcher.verdict.settling import GO_S
from launcher.verdict.severity import Repeat
from model_check.events import Break, Credit, Event, Finished, NonFinite, Phase, Step

RIGHT, WRONG, OTHER = (0.5).hex(), (0.75).hex(), (0.625).hex()
QUESTION = Question(2, ("b",), ("a",))
AMONG_THREE = Question(2, ("b",), ("a", "c"))
TRANSIENT, PERSISTENT, NOT_REPLAYED = Repeat.TRANSIENT, Repeat.PERSISTENT, Repeat.NOT_REPLAYED
INTERMITTENT, UNSETTLED = Repeat.INTERMITTENT, Repeat.UNSETTLED


def step(number: int, loss: str = RIGHT, repeated: bool | None = None) -> Step:
    return Step(
        step=number, loss=loss, grad_norm=RIGHT, lr=1e-5, ms=1.0, tokens=8, repeated=repeated
    )


def steps(*losses: str) -> list[Event]:
    return [step(number, loss) for number, loss in enumerate(losses)]


def record(*losses: str) -> dict[int, Step]:
    return {number: step(number, loss) for number, loss in enumerate(losses)}


OF_HEALTHY = record(RIGHT, RIGHT, RIGHT)
RECORDS = {"a": OF_HEALTHY, "b": record(RIGHT, RIGHT, WRONG), "c": OF_HEALTHY}


def all_facts(broken: Mapping[str, Break]) -> dict[str, WorkerFacts]:
    """Of the run."""
    return {name: WorkerFacts(broken=broken.get(name)) for name in "abc"}


def replay_watch(limit_s: float = 100) -> ReplayWatch:
    return ReplayWatch(QUESTION, RECORDS, all_facts({}), limit_s)


def attempt(
    question: Question = QUESTION, broken: dict[str, Break] | None = None, **told: list[Event]
) -> Attempt:
    """What a replay shows in which these workers told so much, and finished then."""
    watch = ReplayWatch(question, RECORDS, all_facts(broken or {}), limit_s=100)
    for worker, events in told.items():
        for event in [*events, Finished()]:
            watch.on_event(worker, event)
    return watch.attempt(RunEnd(exit_code=0, reason="it ended"))


CLEAN = {"a": steps(RIGHT, RIGHT, RIGHT), "b": steps(RIGHT, RIGHT, RIGHT)}
SAME = {"a": steps(RIGHT, RIGHT, RIGHT), "b": steps(RIGHT, RIGHT, WRONG)}
ELSEWHERE = {"a": steps(RIGHT, RIGHT, RIGHT), "b": steps(RIGHT, OTHER, OTHER)}
VARIES = {"a": steps(RIGHT, OTHER, RIGHT), "b": steps(RIGHT, RIGHT, RIGHT)}
NAN = NonFinite(step=2, where="loss", loss="nan", grad_norm="nan")
OF_THREE = {"c": steps(RIGHT, RIGHT, RIGHT)}


def asked(question: Question, *told: dict[str, list[Event]]) -> tuple[Replay, int]:
    """The answer, and how many attempts were made: as many as it takes, the last one again and
    again."""
    found: list[Attempt] = []
    while True:
        found.append(attempt(question, **told[min(len(found), len(told) - 1)]))
        if not is_open(question, found):
            return answer(question, found, 0), len(found)


def test_the_right_bits_each_time_make_it_transient() -> None:
    replay, times = asked(QUESTION, CLEAN)
    assert (times, replay.repeats, replay.wrong) == (NUM_CLEAN, {"b": TRANSIENT}, 0)
    assert replay.said == "replayed 3 times (steps 0 to 2): b gave the right bits"
    early = answer(QUESTION, [attempt(**CLEAN)], 0)
    assert early.repeats == {"b": TRANSIENT}
    assert early.said.startswith("replayed once")


@pytest.mark.parametrize("wrong", [SAME, ELSEWHERE])
@pytest.mark.parametrize(
    ("question", "beside", "needed"), [(QUESTION, {}, 6), (AMONG_THREE, OF_THREE, 4)]
)
def test_wrong_each_time_is_persistent_when_chance_would_hardly_do_it(
    question: Question,
    beside: dict[str, list[Event]],
    needed: int,
    wrong: dict[str, list[Event]],
) -> None:
    """1 of C(13, 6) = 1,716, and 1 of C(14, 4) = 1,001; the same bits prove no more than others."""
    replay, times = asked(question, wrong | beside)
    assert (times, replay.wrong, replay.repeats) == (needed, needed, {"b": PERSISTENT})
    assert f"b was wrong again in {needed} of {needed} replays; a " in replay.said
    assert replay.disagreement is not None
    assert replay.disagreement.bits == {"a": RIGHT, "b": WRONG if wrong is SAME else OTHER}
    few = answer(question, [attempt(question, **wrong, **beside)] * (needed - 1), 0)
    assert few.repeats == {"b": UNSETTLED}
    assert few.said.endswith(", which is not proof yet")


def test_wrong_in_most_replays_is_intermittent() -> None:
    """As a GPU that errs in nine passes of ten: 6 of 7 were once called transient, for the last."""
    replay, times = asked(QUESTION, *[SAME] * 4, CLEAN, SAME)
    assert (times, replay.wrong, replay.repeats) == (8, 7, {"b": INTERMITTENT})
    assert "b was wrong again in 7 of 8 replays" in replay.said
    late = answer(QUESTION, [attempt(**SAME)] * 6 + [attempt(**CLEAN)], 0)
    assert late.repeats == {"b": UNSETTLED}  # 7 of C(15, 6) = 5,005


@pytest.mark.parametrize("told", [[SAME, CLEAN], [CLEAN, SAME, CLEAN], [CLEAN, CLEAN, SAME, CLEAN]])
def test_wrong_once_is_never_transient(told: list[dict[str, list[Event]]]) -> None:
    """One more clean replay, and another one, free nobody."""
    replay, times = asked(QUESTION, *told)
    assert (replay.wrong, replay.repeats) == (1, {"b": UNSETTLED})
    assert times < MAX_PASSES  # soon nothing could convict it any more


def test_a_nan_where_the_run_was_finite_is_wrong_again() -> None:
    spoilt = {"a": steps(RIGHT, RIGHT, RIGHT), "b": [*steps(RIGHT, RIGHT), NAN]}
    replay, times = asked(QUESTION, spoilt)
    assert (times, replay.repeats) == (6, {"b": PERSISTENT})


def test_where_the_run_told_other_fingerprints_the_healthy_ones_of_the_replay_count() -> None:
    """A replay that begins at a checkpoint tells all at its first step, the run a part of them."""
    watch = ReplayWatch(AMONG_THREE, RECORDS, all_facts({}), limit_s=100)
    for worker in "abc":
        told = {"gradients": "01" if worker == "b" else "00"}
        event = msgspec.structs.replace(step(2), fp=told, taken="all, all of 1")
        watch.on_event(worker, event)
        watch.on_event(worker, Finished())
    found = watch.attempt(RunEnd(exit_code=0))
    assert found.wrong["b"].quantity == "gradients"
    assert found.right == ("a", "c")


@pytest.mark.parametrize("left", ["c", "ac"])
def test_a_healthy_one_that_dies_is_gone_without_where_another_is_left(left: str) -> None:
    watch = ReplayWatch(AMONG_THREE, RECORDS, all_facts({}), limit_s=100)
    for worker in left:
        watch.on_end(worker)
    assert watch.dismissed == ({"c": Dismissal.GIVEN_UP} if left == "c" else {})


def test_a_wrong_suspect_that_hangs_holds_nobody_and_is_given_up() -> None:
    watch = ReplayWatch(AMONG_THREE, RECORDS, all_facts({}), limit_s=100)
    watch.on_event("b", step(0, OTHER))
    for worker in "ac":
        for event in [*steps(RIGHT, RIGHT, RIGHT), Finished()]:
            watch.on_event(worker, event)
    credits = [command.step for _, command in watch.commands() if isinstance(command, Credit)]
    assert max(credits) == 3  # that of a, whom c followed: b told no further step
    watch.tick(100.0)
    assert watch.dismissed == {"b": Dismissal.AWAITED}
    assert watch.due == 100.0 + GO_S
    watch.tick(100.0 + GO_S)
    assert watch.dismissed == {"b": Dismissal.GIVEN_UP}


def test_the_healthy_go_on_without_a_suspect_that_is_wrong() -> None:
    watch = ReplayWatch(AMONG_THREE, RECORDS, all_facts({}), limit_s=100)
    for event in steps(RIGHT, OTHER):
        watch.on_event("b", event)
    assert watch.dismissed == {"b": Dismissal.AWAITED}
    for worker in "ac":
        for event in [*steps(RIGHT, RIGHT, RIGHT), Finished()]:
            assert watch.on_event(worker, event) is None
    assert watch.attempt(RunEnd(exit_code=0)).right == ("a", "c")


@pytest.mark.parametrize("before", [[], [SAME], [ELSEWHERE] * 3])
def test_one_healthy_worker_that_strays_ends_the_accusation(
    before: list[dict[str, list[Event]]],
) -> None:
    replay, times = asked(QUESTION, *before, VARIES)
    assert (times, replay.doubted, replay.repeats) == (len(before) + 1, "a", {})
    assert not replay.is_software
    how_often = f"{len(before)} of {times} replay{'s' * (times != 1)}"
    assert replay.said == (
        f"computed again, b was wrong in {how_often}, and a gave other bits than in the run, too "
        "(step 1, loss): nothing tells which of them is at fault"
    )


def test_two_healthy_workers_that_stray_show_kernels_that_vary() -> None:
    other, right = steps(RIGHT, OTHER), steps(RIGHT, RIGHT, RIGHT)
    found = [attempt(AMONG_THREE, a=other, b=right, c=other)]
    assert not is_open(AMONG_THREE, found)
    replay = answer(AMONG_THREE, found, 0)
    assert (replay.is_software, replay.repeats) == (True, {})
    assert "a and c gave other bits than in the run (a: step 1, loss): kernels vary" in replay.said


STRAYS = {"c": steps(RIGHT, OTHER)}


@pytest.mark.parametrize(
    ("question", "told", "said"),
    [
        (AMONG_THREE, STRAYS, "c gave other bits than in the run (c: step 1, loss)"),
        (
            Question(2, ("b", "c"), is_named=False),
            {"b": steps(RIGHT, OTHER)} | STRAYS,  # one of them may be the one that is wrong
            "b and c gave other bits than in the run (b: step 1, loss)",
        ),
    ],
)
def test_of_a_command_one_healthy_worker_that_strays_is_enough(
    question: Question, told: dict[str, list[Event]], said: str
) -> None:
    question = msgspec.structs.replace(question, of_command=True)
    watch = ReplayWatch(question, RECORDS, all_facts({}), limit_s=100)
    stops = [watch.on_event(name, each) for name, events in told.items() for each in events]
    assert isinstance(stops[-1], Stop)
    found = [watch.attempt(RunEnd(exit_code=2, reason="it was stopped"))]
    assert not is_open(question, found)
    replay = answer(question, found, 0)
    assert (replay.is_software, replay.repeats) == (True, {})
    assert said in replay.said
    assert replay.said.endswith(
        "an operation of the command varies, so no difference proves anything"
    )


def calls(bits: str) -> list[Event]:
    """Right, and then what came of calls that are made again: `bits` of 2 times, 4, 8."""
    detail = {f"calls bits {2 << n}": bits[: n + 1] for n in range(len(bits))}
    return [*steps(RIGHT, RIGHT, RIGHT), Phase(name="train", detail=detail)]


@pytest.mark.parametrize(
    ("told", "is_software"),
    [
        ({"a": calls("123"), "b": calls("123"), "c": calls("123")}, False),
        ({"a": calls("123"), "b": calls("124"), "c": calls("123")}, False),  # the suspect
        ({"a": calls("12"), "b": calls("123"), "c": calls("123")}, False),  # slower
        ({"a": calls("124"), "b": calls("123"), "c": calls("123")}, True),
        ({"b": calls("123"), "c": calls("124")}, False),  # one healthy worker
    ],
)
def test_calls_of_healthy_workers_that_differ_are_the_commands(
    told: dict[str, list[Event]], is_software: bool
) -> None:
    question = msgspec.structs.replace(AMONG_THREE, of_command=True)
    found = attempt(question, **told)
    assert {*found.wrong} == ({"a", "c"} if is_software else set())
    replay = answer(question, [found], 0)
    assert replay.is_software is is_software
    said = "computed again, a and c differ (their models, called several times behind step 2)"
    assert replay.said.startswith(said) is is_software
    changed = msgspec.structs.replace(question, has_changed=True)
    assert attempt(changed, **told).wrong == {}


def test_calls_count_for_nothing_beside_a_healthy_worker_that_strayed() -> None:
    question = msgspec.structs.replace(AMONG_THREE, of_command=True)
    found = attempt(question, a=steps(RIGHT, OTHER), c=calls("112"))
    assert {*found.wrong} == {"a"}


@pytest.mark.parametrize(
    ("number", "quantity", "why"),
    [
        (0, "before.weights", "a began with other weights than the run"),
        (1, "inputs", "step 1 of a had another batch"),
    ],
)
def test_a_command_that_went_another_way_tells_nothing(
    number: int, quantity: str, why: str
) -> None:
    """It read what the run had written, or other files."""
    records = {"a": {n: msgspec.structs.replace(step(n), fp={quantity: "1"}) for n in range(3)}}
    question = msgspec.structs.replace(QUESTION, of_command=True)
    watch = ReplayWatch(question, records | {"b": {}}, all_facts({}), limit_s=100)
    told = [step(n) for n in range(number)]
    told.append(msgspec.structs.replace(step(number), fp={quantity: "2"}))
    stops = [watch.on_event("a", each) for each in told]
    assert isinstance(stops[-1], Stop)
    replay = answer(question, [watch.attempt(RunEnd(exit_code=2))], 0)
    assert replay.said == f"not replayed: not comparable: {why}"


def test_a_healthy_worker_whose_first_step_varies_strays() -> None:
    first = [step(0, repeated=False)]
    assert answer(QUESTION, [attempt(a=first, b=steps(RIGHT))], 0).doubted == "a"


def test_two_healthy_workers_that_stray_end_the_replay() -> None:
    watch = ReplayWatch(AMONG_THREE, RECORDS, all_facts({}), limit_s=100)
    assert watch.on_event("a", step(0, OTHER)) is None
    assert isinstance(watch.on_event("c", step(0, OTHER)), Stop)


def test_a_replay_has_its_time_from_its_first_turn_on() -> None:
    watch = replay_watch(limit_s=7)
    assert watch.tick(100.0) is None
    assert watch.due == 107.0
    assert watch.tick(106.9) is None
    stop = watch.tick(107.0)
    assert stop is not None
    assert stop.reason == "the replay took longer than 7 s"


@pytest.mark.parametrize("came", [[], steps(RIGHT), steps(RIGHT, RIGHT)])
def test_a_replay_that_came_to_no_end_proves_nothing(came: list[Event]) -> None:
    watch = replay_watch()
    for event in came:
        watch.on_event("b", event)
    cut = watch.attempt(RunEnd(exit_code=7, reason="b failed first"))
    assert not is_open(QUESTION, [cut])
    assert answer(QUESTION, [cut], 0).said == "not replayed: b failed first"
    assert answer(QUESTION, [cut], 0).repeat_of("b") is NOT_REPLAYED
    after_one = answer(QUESTION, [attempt(**SAME), cut], 0)
    assert after_one.repeats == {"b": UNSETTLED}
    assert after_one.said.endswith("a never was, which is not proof yet; then b failed first")
    assert answer(QUESTION, [attempt(**SAME)] * 6 + [cut], 0).repeats == {"b": PERSISTENT}


TWO = Question(2, ("a", "b"), is_named=False)
A_IS_ODD = {"a": steps(RIGHT, RIGHT, WRONG), "b": steps(RIGHT, RIGHT, WRONG)}
SHORT = {"a": steps(RIGHT, RIGHT), "b": steps(RIGHT, RIGHT)}


@pytest.mark.parametrize(
    ("told", "repeat", "odd", "said"),
    [
        (CLEAN, TRANSIENT, "b", "replayed: a gave its bits again, and b gave those of a"),
        (SAME, UNSETTLED, "", "replayed: a and b gave their own bits again"),
        (SHORT, TRANSIENT, "", "replayed: they agree now, and nothing tells whose bits were wrong"),
        (A_IS_ODD, TRANSIENT, "a", "replayed: b gave its bits again, and a gave those of b"),
    ],
)
def test_of_two_each_is_held_against_its_own_record(
    told: dict[str, list[Event]], repeat: Repeat, odd: str, said: str
) -> None:
    replay, _ = asked(TWO, told)
    assert replay.repeats == {"a": repeat, "b": repeat}
    assert (replay.odd, replay.named, replay.said) == (odd, "", said)


def test_of_two_the_one_that_is_wrong_in_another_way_each_time_is_named() -> None:
    replay, times = asked(TWO, ELSEWHERE)
    assert (times, replay.named, replay.repeats) == (6, "b", {"b": PERSISTENT})
    first = answer(TWO, [attempt(TWO, **ELSEWHERE)], 0)
    assert (first.odd, first.named) == ("b", "")
    assert first.said.endswith("b gave other ones, wrong in 1 of 1 replay")


def test_two_that_both_stray_show_kernels_that_vary() -> None:
    both = {"a": steps(OTHER, RIGHT, RIGHT), "b": steps(WRONG, RIGHT, RIGHT)}
    assert answer(TWO, [attempt(TWO, **both)], 0).is_software


@pytest.mark.parametrize("spoilt", [NAN, Break(step=1, quantity="weights", tensor="w", since=0)])
def test_of_two_the_one_that_met_a_nan_or_changed_gave_not_the_bits_of_the_other(
    spoilt: Event,
) -> None:
    watches = [ReplayWatch(TWO, RECORDS, all_facts({}), limit_s=100) for _ in range(6)]
    for watch in watches:
        for event in [*steps(RIGHT, RIGHT), spoilt]:
            watch.on_event("b", event)
        assert watch.dismissed == {"b": Dismissal.AWAITED}
        for event in [*steps(RIGHT, RIGHT, RIGHT), Finished()]:
            watch.on_event("a", event)
    found = [watch.attempt(RunEnd(exit_code=0)) for watch in watches]
    replay = answer(TWO, found, 0)
    assert (replay.wrong, replay.named) == (6, "b")


ALONE = Question(2, ("b",), sound_to=1, begin_by=2, has_changed=True)
BROKE = Break(step=2, quantity="weights", tensor="w", since=1, found=[(7, 3)])


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([*steps(RIGHT, RIGHT, WRONG), BROKE], {"b": UNSETTLED}),  # nobody healthy is beside it
        ([*steps(RIGHT, RIGHT, RIGHT)], {"b": TRANSIENT}),  # its record is of the changed weights
        ([*steps(RIGHT, OTHER, RIGHT)], {}),
    ],
)
def test_state_that_changed_alone_is_held_against_the_record_before_the_change(
    told: list[Event], expected: dict[str, Repeat]
) -> None:
    found = [attempt(ALONE, {"b": BROKE}, b=told)] * 2
    assert answer(ALONE, found, 0).repeats == expected


def watched(**told: list[Event]) -> Watch:
    watch = Watch(dict.fromkeys(told, "H100"), max_lead=2)
    for number in range(3):
        for worker, events in told.items():
            for event in events[number : number + 1]:
                watch.on_event(worker, event)
    for worker, events in told.items():
        for event in events[3:]:
            watch.on_event(worker, event)
    watch.finish()
    return watch


def test_the_named_one_is_asked_beside_a_healthy_one() -> None:
    watch = watched(a=steps(RIGHT, RIGHT), b=steps(RIGHT, WRONG), c=steps(RIGHT, RIGHT, RIGHT))
    assert questions_of(watch) == [Question(1, ("b",), ("c", "a"))]


def test_of_two_that_differ_both_are_asked() -> None:
    watch = watched(a=steps(RIGHT, RIGHT), b=steps(RIGHT, WRONG))
    assert questions_of(watch) == [Question(1, ("a", "b"), is_named=False)]


@pytest.mark.parametrize("is_compared", [True, False])
def test_of_two_the_one_whose_state_changed_is_asked_beside_the_other(is_compared: bool) -> None:
    """In whichever order its change and the difference that it makes are told."""
    told = {"a": steps(RIGHT, RIGHT, RIGHT), "b": [*steps(RIGHT, RIGHT, WRONG), BROKE]}
    if not is_compared:
        told["a"] = told["a"][:2]
    watch = watched(**told)
    (question,) = questions_of(watch)
    assert (question.suspects, question.healthy) == (("b",), ("a",))


def test_without_a_healthy_worker_here_no_replay_frees_a_suspect() -> None:
    """Their GPUs are out of sight, or have gone: nothing tells which bits are right."""
    watch = watched(a=steps(RIGHT, RIGHT), b=steps(RIGHT, WRONG), c=steps(RIGHT, RIGHT, RIGHT))
    (question,) = questions_of(watch)
    assert question.why_not is None
    alone = msgspec.structs.replace(question, healthy=())
    assert alone.why_not == "of no other worker here it is known that it is right"
    assert ALONE.why_not is None
    assert TWO.why_not is None


def test_each_of_several_is_asked_by_itself() -> None:
    wrong = {"b": steps(RIGHT, WRONG), "d": steps(RIGHT, OTHER)}
    right = {name: steps(RIGHT, RIGHT, RIGHT) for name in "ace"}
    questions = questions_of(watched(**right, **wrong))
    assert questions == [Question(1, (name,), ("a", "c", "e")) for name in "bd"]


def of_quantities(forward: str, gradients: str) -> list[Event]:
    fp = {"forward": forward, "gradients": gradients}
    return [msgspec.structs.replace(step(0), fp=fp, taken="all, all of 1")]


@pytest.mark.parametrize(
    ("gradients", "healthy", "can_tell"),
    [("00001", "abcd", True), ("00112", "", False), ("00012", "abc", True)],
)
def test_who_is_in_dispute_is_no_witness(gradients: str, healthy: str, can_tell: bool) -> None:
    """Of five one is odd in a first quantity; in a later one of the same step the others may differ
    from each other, two and two."""
    told = zip("abcde", "00001", gradients, strict=True)
    watch = watched(**{name: of_quantities(*each) for name, *each in told})
    question, *_ = [each for each in questions_of(watch) if each.suspects == ("e",)]
    assert (question.healthy, question.why_not is None) == (tuple(healthy), can_tell)


def fingerprinted(taken: str, quantity: str, **told: list[str]) -> Watch:
    """Each step with such fingerprints."""
    events = {
        name: [
            msgspec.structs.replace(step(n), fp={quantity: value}, taken=taken)
            for n, value in enumerate(values)
        ]
        for name, values in told.items()
    }
    watch = Watch(dict.fromkeys(told, "H100"), max_lead=6)
    for number in range(9):
        for worker, each in events.items():
            for event in each[number : number + 1]:
                watch.on_event(worker, event)
    watch.finish()
    return watch


@pytest.mark.parametrize(
    ("taken", "quantity", "begin_by"),
    [
        ("all, all of 1", "gradients", 8),
        ("all, all of 1", "before.weights", 7),
        ("2, 3 of 6", "gradients", 2),
        ("2, 3 of 6", "before.weights", 1),
        ("2, 3 of 40", "gradients", 0),
        ("", "gradients", 0),
    ],
)
def test_a_replay_begins_before_the_fault_can_have_been(
    taken: str, quantity: str, begin_by: int
) -> None:
    """What a rotation looks at in turn may have been wrong for a whole turn."""
    right, wrong = ["00"] * 9, ["00"] * 8 + ["01"]
    (question,) = questions_of(fingerprinted(taken, quantity, a=right, b=wrong, c=right))
    assert (question.to_step, question.begin_by) == (8, begin_by)


@pytest.mark.parametrize("key", ["torch", "isa", "cudnn", "math_environ", "settings"])
def test_a_replay_on_other_software_proves_nothing(key: str) -> None:
    run = {name: WorkerFacts(detail={key: "old"}) for name in "ab"}
    watch = ReplayWatch(QUESTION, RECORDS, run, 100)
    stop = watch.on_event("a", Phase(name="build", detail={key: "new"}))
    assert isinstance(stop, Stop)
    found = watch.attempt(RunEnd(exit_code=stop.exit_code, reason=stop.reason))
    said = answer(QUESTION, [found], 0).said
    assert said == f"not replayed: not comparable: {key} old in the run, new now"


def test_a_replay_whose_kernel_fails_a_trial_that_the_run_passed_proves_nothing() -> None:
    trial = "trial of attention kernel sdpa"
    run = {name: WorkerFacts(detail={trial: "passed"}) for name in "ab"}
    watch = ReplayWatch(QUESTION, RECORDS, run, 100)
    assert watch.on_event("b", Phase(name="build", detail={trial: "passed"})) is None
    stop = watch.on_event("a", Phase(name="build", detail={trial: "gave NaN"}))
    assert isinstance(stop, Stop)
    found = watch.attempt(RunEnd(exit_code=stop.exit_code, reason=stop.reason))
    said = "not comparable: trials of a's kernels went otherwise than in the run"
    assert answer(QUESTION, [found], 0).said == f"not replayed: {said}"


def test_the_first_reason_why_it_proves_nothing_stays() -> None:
    """A worker whose end is slow tells a step after its software was found to be another one."""
    first = msgspec.structs.replace(step(0), fp={"before.weights": "01"}, taken="all, all of 1")
    run = {name: WorkerFacts(detail={"isa": "old"}) for name in "ab"}
    watch = ReplayWatch(QUESTION, {"a": {0: first}, "b": {0: first}}, run, 100)
    watch.on_event("a", Phase(name="build", detail={"isa": "new"}))
    watch.on_event("a", msgspec.structs.replace(first, fp={"before.weights": "02"}))
    found = watch.attempt(RunEnd(exit_code=2))
    assert answer(QUESTION, [found], 0).said.startswith("not replayed: not comparable: isa")


def test_a_replay_that_begins_with_other_weights_is_no_sign_of_kernels_that_vary() -> None:
    first = msgspec.structs.replace(step(0), fp={"before.weights": "01"}, taken="all, all of 1")
    now = msgspec.structs.replace(first, fp={"before.weights": "02"})
    watch = ReplayWatch(QUESTION, {"a": {0: first}, "b": {0: first}}, all_facts({}), 100)
    stop = watch.on_event("a", now)
    assert isinstance(stop, Stop)
    replay = answer(QUESTION, [watch.attempt(RunEnd(exit_code=stop.exit_code))], 0)
    assert not replay.is_software
    assert replay.said == "not replayed: not comparable: a began with other weights than the run"


def test_a_worker_that_met_a_nan_is_no_healthy_one() -> None:
    nan = NonFinite(step=3, where="loss", loss="nan", grad_norm="nan")
    watch = watched(
        a=[*steps(RIGHT, RIGHT, RIGHT), nan],
        b=steps(RIGHT, RIGHT, WRONG),
        c=steps(RIGHT, RIGHT, RIGHT),
    )
    assert questions_of(watch) == [Question(2, ("b",), ("c",))]


def test_state_that_changed_is_asked_about_alone_where_there_is_no_equal() -> None:
    watch = watched(b=[*steps(RIGHT, RIGHT, RIGHT), BROKE])
    assert questions_of(watch) == [ALONE]


def test_where_nothing_differs_nothing_is_asked() -> None:
    watch = watched(a=steps(RIGHT), b=steps(RIGHT))
    assert questions_of(watch) == []
    assert question_about("b", watch) == Question(0, ("b",), ("a",), sound_to=0)
    assert question_about("a", watched(a=[], b=steps(RIGHT))) is None


def test_the_answer_keeps_what_run_json_needs() -> None:
    replay = answer(QUESTION, [attempt(**CLEAN)], from_step=1)
    assert (replay.to_step, replay.from_step, replay.times) == (2, 1, 1)
    assert (replay.wrong, replay.how_often) == (0, "0 of 1 replay")
    assert Replay(to_step=2).repeat_of("b") is NOT_REPLAYED
