"""What replays prove, as the events of two workers."""

from collections.abc import Mapping

import msgspec
import pytest

from launcher.verdict.disagreement import Replay
from launcher.verdict.live import Watch
from launcher.verdict.record import RunEnd, Stop
from launcher.verdict.replay import (
    NUM_OF_OTHER_BITS,
    NUM_OF_SAME_BITS,
    Attempt,
    Question,
    ReplayWatch,
    answer,
    is_open,
    question_about,
    questions_of,
)
from launcher.verdict.severity import Repeat
from launcher.verdict.steps import History
from model_check.events import Break, Event, Finished, NonFinite, Phase, Step

RIGHT, WRONG, OTHER = (0.5).hex(), (0.75).hex(), (0.625).hex()
QUESTION = Question(2, ("b",), "a")
TRANSIENT, PERSISTENT, NOT_REPLAYED = Repeat.TRANSIENT, Repeat.PERSISTENT, Repeat.NOT_REPLAYED


def step(number: int, loss: str = RIGHT, repeated: bool | None = None) -> Step:
    return Step(
        step=number, loss=loss, grad_norm=RIGHT, lr=1e-5, ms=1.0, tokens=8, repeated=repeated
    )


def steps(*losses: str) -> list[Event]:
    return [step(number, loss) for number, loss in enumerate(losses)]


def record(*losses: str) -> dict[int, Step]:
    return {number: step(number, loss) for number, loss in enumerate(losses)}


RECORDS = {"a": record(RIGHT, RIGHT, RIGHT), "b": record(RIGHT, RIGHT, WRONG)}


def histories(broken: Mapping[str, Break]) -> dict[str, History]:
    """Of the run."""
    return {name: History(broken=broken.get(name)) for name in "ab"}


def replay_watch(limit_s: float = 100) -> ReplayWatch:
    return ReplayWatch(QUESTION, RECORDS, histories({}), limit_s)


def attempt(
    question: Question = QUESTION, broken: dict[str, Break] | None = None, **told: list[Event]
) -> Attempt:
    """What a replay shows in which these workers told so much, and finished then."""
    watch = ReplayWatch(question, RECORDS, histories(broken or {}), limit_s=100)
    for worker, events in told.items():
        for event in [*events, Finished()]:
            watch.on_event(worker, event)
    return watch.attempt(RunEnd(exit_code=0, reason="it ended"))


CLEAN = {"a": steps(RIGHT, RIGHT, RIGHT), "b": steps(RIGHT, RIGHT, RIGHT)}
SAME = {"a": steps(RIGHT, RIGHT, RIGHT), "b": steps(RIGHT, RIGHT, WRONG)}
ELSEWHERE = {"a": steps(RIGHT, RIGHT, RIGHT), "b": steps(RIGHT, OTHER, OTHER)}
VARIES = {"a": steps(RIGHT, OTHER, RIGHT), "b": steps(RIGHT, RIGHT, RIGHT)}


def test_the_right_bits_once_make_it_transient() -> None:
    found = [attempt(**CLEAN)]
    assert not is_open(QUESTION, found)
    assert answer(QUESTION, found, 0).repeats == {"b": TRANSIENT}


def test_the_same_wrong_bits_are_persistent_when_they_came_twice() -> None:
    once = attempt(**SAME)
    assert is_open(QUESTION, [once])
    found = [once] * NUM_OF_SAME_BITS
    assert not is_open(QUESTION, found)
    replay = answer(QUESTION, found, 0)
    assert replay.repeats == {"b": PERSISTENT}
    assert replay.said == "replayed twice (steps 0 to 2): b gave the same wrong bits again"
    assert replay.disagreement is not None
    assert replay.disagreement.step == 2


def test_the_same_wrong_bits_once_are_enough_where_the_time_is_out() -> None:
    assert answer(QUESTION, [attempt(**SAME)], 0).repeats == {"b": PERSISTENT}


@pytest.mark.parametrize("times", range(1, NUM_OF_OTHER_BITS + 1))
def test_other_wrong_bits_are_persistent_when_they_came_often(times: int) -> None:
    found = [attempt(**ELSEWHERE)] * times
    is_enough = times == NUM_OF_OTHER_BITS
    assert is_open(QUESTION, found) != is_enough
    replay = answer(QUESTION, found, 0)
    assert replay.repeats == ({"b": PERSISTENT} if is_enough else {})
    assert "b was wrong again, with other bits" in replay.said
    assert (f"{NUM_OF_OTHER_BITS} times in a row would prove it" in replay.said) != is_enough


@pytest.mark.parametrize("last", [SAME, ELSEWHERE])
def test_one_clean_replay_among_others_makes_it_transient(last: dict[str, list[Event]]) -> None:
    found = [attempt(**last), attempt(**CLEAN)]
    assert not is_open(QUESTION, found)
    assert answer(QUESTION, found, 0).repeats == {"b": TRANSIENT}


@pytest.mark.parametrize("before", [[], [SAME], [ELSEWHERE] * 3])
def test_a_healthy_worker_that_strays_clears_everybody(
    before: list[dict[str, list[Event]]],
) -> None:
    found = [*(attempt(**each) for each in before), attempt(**VARIES)]
    assert not is_open(QUESTION, found)
    replay = answer(QUESTION, found, 0)
    assert (replay.is_software, replay.repeats) == (True, {})
    assert "a gave other bits than in the run (step 1, loss)" in replay.said


def test_a_healthy_worker_whose_first_step_varies_clears_everybody() -> None:
    first = [step(0, repeated=False)]
    replay = answer(QUESTION, [attempt(a=first, b=steps(RIGHT))], 0)
    assert replay.is_software


def test_a_healthy_worker_that_strays_ends_the_replay() -> None:
    watch = replay_watch()
    assert isinstance(watch.on_event("a", step(0, OTHER)), Stop)


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
    assert after_one.repeats == {}
    assert after_one.said.endswith("b gave the same wrong bits again; then b failed first")
    assert answer(QUESTION, [attempt(**SAME)] * 2 + [cut], 0).repeats == {"b": PERSISTENT}


TWO = Question(2, ("a", "b"), is_named=False)


@pytest.mark.parametrize(
    ("told", "repeat", "said"),
    [
        (CLEAN, TRANSIENT, "replayed: a gave its bits again, and b gave those of a"),
        (SAME, PERSISTENT, "replayed: a and b gave their own bits again"),
        (ELSEWHERE, NOT_REPLAYED, "replayed: they differ again, in another way"),
        (
            {"a": steps(RIGHT, RIGHT), "b": steps(RIGHT, RIGHT)},
            TRANSIENT,
            "replayed: they agree now, and nothing tells whose bits were wrong",
        ),
        (
            {"a": steps(RIGHT, RIGHT, WRONG), "b": steps(RIGHT, RIGHT, WRONG)},
            TRANSIENT,
            "replayed: b gave its bits again, and a gave those of b",
        ),
    ],
)
def test_of_two_each_is_held_against_its_own_record(
    told: dict[str, list[Event]], repeat: Repeat, said: str
) -> None:
    found = [attempt(TWO, **told)]
    assert not is_open(TWO, found)
    replay = answer(TWO, found, 0)
    assert (replay.repeat_of("a"), replay.said) == (repeat, said)


def test_two_that_both_stray_show_kernels_that_vary() -> None:
    both = {"a": steps(OTHER, RIGHT, RIGHT), "b": steps(WRONG, RIGHT, RIGHT)}
    assert answer(TWO, [attempt(TWO, **both)], 0).is_software


ALONE = Question(2, ("b",), sound_to=1, begin_by=2)
BROKE = Break(step=2, quantity="weights", tensor="w", since=1, found=[(7, 3)])


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([*steps(RIGHT, RIGHT, WRONG), BROKE], {"b": PERSISTENT}),
        ([*steps(RIGHT, RIGHT, RIGHT)], {"b": TRANSIENT}),  # its record is of the changed weights
        ([*steps(RIGHT, OTHER, RIGHT)], {}),
    ],
)
def test_state_that_changed_alone_is_held_against_the_record_before_the_change(
    told: list[Event], expected: dict[str, Repeat]
) -> None:
    found = [attempt(ALONE, {"b": BROKE}, b=told)] * 2
    assert answer(ALONE, found, 0).repeats == expected


def test_state_that_changes_at_another_place_gave_other_bits() -> None:
    elsewhere = Break(step=2, quantity="weights", tensor="v", since=1)
    found = [attempt(ALONE, {"b": BROKE}, b=[*steps(RIGHT, RIGHT, WRONG), elsewhere])]
    assert answer(ALONE, found, 0).repeats == {}
    assert is_open(ALONE, found)


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
    assert questions_of(watch) == [Question(1, ("b",), "c")]


def test_of_two_that_differ_both_are_asked() -> None:
    watch = watched(a=steps(RIGHT, RIGHT), b=steps(RIGHT, WRONG))
    assert questions_of(watch) == [Question(1, ("a", "b"), is_named=False)]


def test_each_of_several_is_asked_by_itself() -> None:
    wrong = {"b": steps(RIGHT, WRONG), "d": steps(RIGHT, OTHER)}
    right = {name: steps(RIGHT, RIGHT, RIGHT) for name in "ace"}
    questions = questions_of(watched(**right, **wrong))
    assert questions == [Question(1, ("b",), "a"), Question(1, ("d",), "a")]


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
    run = {name: History(detail={key: "old"}) for name in "ab"}
    watch = ReplayWatch(QUESTION, RECORDS, run, 100)
    stop = watch.on_event("a", Phase(name="build", detail={key: "new"}))
    assert isinstance(stop, Stop)
    found = watch.attempt(RunEnd(exit_code=stop.exit_code, reason=stop.reason))
    said = answer(QUESTION, [found], 0).said
    assert said == f"not replayed: not comparable: {key} old in the run, new now"


def test_a_replay_whose_kernel_fails_a_trial_that_the_run_passed_proves_nothing() -> None:
    trial = "trial of attention kernel sdpa"
    run = {name: History(detail={trial: "passed"}) for name in "ab"}
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
    run = {name: History(detail={"isa": "old"}) for name in "ab"}
    watch = ReplayWatch(QUESTION, {"a": {0: first}, "b": {0: first}}, run, 100)
    watch.on_event("a", Phase(name="build", detail={"isa": "new"}))
    watch.on_event("a", msgspec.structs.replace(first, fp={"before.weights": "02"}))
    found = watch.attempt(RunEnd(exit_code=2))
    assert answer(QUESTION, [found], 0).said.startswith("not replayed: not comparable: isa")


def test_a_replay_that_begins_with_other_weights_is_no_sign_of_kernels_that_vary() -> None:
    first = msgspec.structs.replace(step(0), fp={"before.weights": "01"}, taken="all, all of 1")
    now = msgspec.structs.replace(first, fp={"before.weights": "02"})
    watch = ReplayWatch(QUESTION, {"a": {0: first}, "b": {0: first}}, histories({}), 100)
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
    assert questions_of(watch) == [Question(2, ("b",), "c")]


def test_state_that_changed_is_asked_about_alone_where_there_is_no_equal() -> None:
    watch = watched(b=[*steps(RIGHT, RIGHT, RIGHT), BROKE])
    assert questions_of(watch) == [ALONE]


def test_where_nothing_differs_nothing_is_asked() -> None:
    watch = watched(a=steps(RIGHT), b=steps(RIGHT))
    assert questions_of(watch) == []
    assert question_about("b", watch) == Question(0, ("b",), "a", sound_to=0)
    assert question_about("a", watched(a=[], b=steps(RIGHT))) is None


def test_the_answer_keeps_what_run_json_needs() -> None:
    replay = answer(QUESTION, [attempt(**CLEAN)], from_step=1)
    assert (replay.to_step, replay.from_step, replay.times) == (2, 1, 1)
    assert Replay(to_step=2).repeat_of("b") is NOT_REPLAYED
