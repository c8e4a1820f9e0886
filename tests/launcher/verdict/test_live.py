"""Who is told what while a run goes on, as histories: credit, questions, leave to end."""

import msgspec
import pytest

from launcher.verdict.live import Watch
from launcher.verdict.observer import NEVER, SETTLE_S, SETTLE_STEPS, Dismissal
from launcher.verdict.record import Stop
from launcher.verdict.settling import GO_S
from model_check.errors import EXIT_DISAGREEMENT, EXIT_UNNAMED, EXIT_USAGE
from model_check.events import (
    AskVectors,
    Break,
    Command,
    Credit,
    Done,
    Dump,
    Event,
    Finished,
    Go,
    Kept,
    Phase,
    Step,
    Vectors,
)
from model_check.utils.evidence import EVIDENCE_BYTES_PER_S, EVIDENCE_S

SAME, OTHER = (0.5).hex(), (0.5000001).hex()


def step(number: int, loss: str = SAME, ms: float = 1.0) -> Step:
    return Step(step=number, loss=loss, grad_norm=SAME, lr=1e-5, ms=ms, tokens=8)


def watch(*names: str, max_lead: int = 2) -> Watch:
    return Watch(dict.fromkeys(names, "H100"), max_lead)


def tell(watch: Watch, *told: tuple[str, Event]) -> list[Stop]:
    return [stop for worker, event in told if (stop := watch.on_event(worker, event))]


def differing(ms: float = 1.0) -> Watch:
    """Three workers; one differed at step 4, and all were asked."""
    seen = watch("a", "b", "c")
    seen.commands()
    assert not tell(seen, ("a", step(4, ms=ms)), ("b", step(4, OTHER, ms)), ("c", step(4, ms=ms)))
    assert sorted(seen.commands()) == [(name, AskVectors(step=4)) for name in "abc"]
    return seen


def test_a_death_meanwhile_settles_a_difference_at_once() -> None:
    seen = differing()
    assert seen.tick(1.0) is None
    seen.on_end("c")
    stop = seen.tick(1.0)
    assert stop is not None
    assert (stop.exit_code, stop.culprits) == (EXIT_DISAGREEMENT, ("b",))
    seen.on_end("a")  # stopped by us: nothing is due any more
    assert seen.tick(1.0) is None
    assert seen.due == NEVER


def test_a_death_that_is_read_before_the_difference_settles_it_too() -> None:
    seen = watch("a", "b", "c", "d")
    seen.on_end("d")
    tell(seen, ("a", step(4)), ("b", step(4, OTHER)), ("c", step(4)))
    stop = seen.tick(1.0)
    assert stop is not None
    assert stop.culprits == ("b",)


def test_the_first_credit_is_there_before_anybody_speaks() -> None:
    credit = Credit(step=1)
    assert watch("a", "b").commands() == [("a", credit), ("b", credit)]


def test_credit_follows_the_slowest_and_only_the_latest_is_told() -> None:
    seen = watch("a", "b", max_lead=3)
    tell(seen, *(("a", step(n)) for n in range(3)))
    assert dict(seen.commands()) == dict.fromkeys("ab", Credit(step=2))
    tell(seen, *(("b", step(n)) for n in range(2)))
    assert dict(seen.commands()) == dict.fromkeys("ab", Credit(step=4))
    tell(seen, ("a", step(3)))
    assert seen.commands() == []


def test_a_resumed_group_gets_credit_from_its_first_step_on() -> None:
    seen = watch("a", "b")
    seen.commands()
    tell(seen, ("a", Phase(name="train", detail={"first_step": 1000})))
    assert seen.commands() == []
    tell(seen, ("b", Phase(name="train", detail={"first_step": 1000})))
    assert dict(seen.commands()) == dict.fromkeys("ab", Credit(step=1001))


@pytest.mark.parametrize("last", [Finished(), Done(exit_code=0, early="ended early")])
def test_a_worker_without_further_steps_holds_nobody(last: Event) -> None:
    seen = watch("a", "b", "c")
    tell(seen, ("a", step(0)), ("b", step(0)), ("a", step(1)), ("b", step(1)))
    seen.commands()
    tell(seen, ("c", last))
    assert seen.commands() == [("a", Credit(step=3)), ("b", Credit(step=3))]


def test_a_worker_without_equals_is_told_nothing() -> None:
    seen = Watch({"a": "A100", "b": "H100"}, max_lead=2)
    tell(seen, ("a", step(0)), ("a", Finished()), ("b", step(0)), ("b", Finished()))
    assert seen.commands() == []
    assert seen.due == NEVER


def test_all_may_go_when_the_last_step_of_the_last_is_compared() -> None:
    seen = watch("a", "b")
    tell(seen, ("a", step(0)), ("a", Finished()))
    assert Go() not in dict(seen.commands()).values()
    tell(seen, ("b", step(0)), ("b", Finished()))
    assert [name for name, command in seen.commands() if command == Go()] == ["a", "b"]


def test_a_difference_ends_the_run_when_all_have_told_their_vectors() -> None:
    seen = differing()
    vectors = Vectors(step=4)
    assert not tell(seen, ("a", vectors), ("c", vectors), ("b", Vectors(step=3)))
    (stop,) = tell(seen, ("b", vectors), ("b", vectors))
    assert (stop.exit_code, stop.culprits) == (EXIT_DISAGREEMENT, ("b",))
    assert seen.vectors == dict.fromkeys("abc", vectors)
    assert seen.due == NEVER


def test_a_worker_that_ended_well_is_not_waited_for() -> None:
    seen = differing()
    assert not tell(seen, ("a", Done(exit_code=0)), ("b", Vectors(step=4)))
    assert len(tell(seen, ("c", Vectors(step=4)))) == 1


@pytest.mark.parametrize(("ms", "patience_s"), [(1.0, SETTLE_S), (3000.0, SETTLE_STEPS * 3.0)])
def test_who_does_not_tell_is_waited_for_so_long(ms: float, patience_s: float) -> None:
    seen = differing(ms)
    assert seen.tick(100.0) is None
    assert seen.due == 100.0 + patience_s
    assert seen.tick(seen.due - 0.1) is None
    assert seen.tick(seen.due) is not None
    assert seen.tick(1000.0) is None
    assert seen.due == NEVER


def test_nobody_stays_longer_after_the_last_step_than_promised() -> None:
    seen = differing(ms=60_000.0)
    tell(seen, *((name, Finished()) for name in "abc"))
    seen.tick(100.0)
    assert seen.due == 100.0 + GO_S


def test_a_group_that_differs_gets_no_more_credit() -> None:
    seen = differing()
    tell(seen, *((name, step(5)) for name in "abc"), ("a", Finished()))
    assert seen.commands() == []


def test_a_run_that_ends_before_all_have_told_knows_the_difference() -> None:
    seen = differing()
    tell(seen, ("b", Done(exit_code=7)))
    seen.finish()
    assert seen.disagreements[0].odd == ("b",)


def test_vectors_that_were_told_unasked_are_not_asked_for() -> None:
    """Those of the last step are."""
    seen = Watch({"a": "H100", "b": "H100", "c": "A100"}, max_lead=2)
    tell(
        seen, ("a", step(9)), ("a", Vectors(step=9)), ("c", Vectors(step=9)), ("b", step(9, OTHER))
    )
    assert [name for name, told in seen.commands() if isinstance(told, AskVectors)] == ["b"]
    assert seen.vectors == {"a": Vectors(step=9)}
    assert len(tell(seen, ("b", Vectors(step=9)))) == 1


def test_the_latest_vectors_of_each_worker_are_kept() -> None:
    seen = watch("a", "b")
    tell(seen, ("a", Vectors(step=3)), ("a", Vectors(step=9)), ("b", Vectors(step=9)))
    assert seen.last_vectors == dict.fromkeys("ab", Vectors(step=9))
    assert seen.vectors == {}


BROKEN = Break(step=3, quantity="weights", tensor="w", found=[(7, 1)])


@pytest.mark.parametrize("last", [step(3), Finished()])
def test_a_broken_state_ends_the_run_at_once_where_the_others_have_come_so_far(
    last: Event,
) -> None:
    seen = watch("a", "b", "c")
    stops = tell(seen, ("a", last), ("c", last), ("b", BROKEN))
    assert [(stop.exit_code, stop.culprits) for stop in stops] == [(EXIT_DISAGREEMENT, ("b",))]


def test_the_others_may_tell_that_theirs_broke_alike_for_a_moment() -> None:
    """One that hangs, or has no credit for that step, never tells."""
    seen = watch("a", "b", "c")
    assert not tell(seen, ("a", step(3)), ("b", BROKEN))
    assert seen.tick(10.0) is None
    assert seen.due == 10.0 + SETTLE_S
    (stop,) = tell(seen, ("c", BROKEN))
    assert stop.culprits == ("b",)
    late = watch("a", "b")
    assert not tell(late, ("b", BROKEN))
    assert late.tick(10.0) is None
    assert late.tick(10.0 + SETTLE_S) is not None


def test_in_the_first_step_too_the_others_are_heard() -> None:
    first = msgspec.structs.replace(BROKEN, step=0)
    seen = watch("a", "b")
    assert not tell(seen, ("a", first))
    assert len(tell(seen, ("b", first))) == 1


def test_a_broken_state_names_its_worker() -> None:
    seen = watch("a", "b")
    (stop,) = tell(seen, ("a", step(3)), ("b", BROKEN))
    assert (stop.exit_code, stop.culprits) == (EXIT_DISAGREEMENT, ("b",))
    assert "b: w changed (bit 1 of value 7) after the start" in str(stop.reason)


def first_step(loss: str = SAME, repeated: bool = True) -> Step:
    told = Step(step=0, loss=loss, grad_norm=SAME, lr=1.0, ms=1.0, tokens=8, repeated=repeated)
    return told


VARIED, WRONG_AND_VARIED = first_step(repeated=False), first_step(OTHER, repeated=False)


@pytest.mark.parametrize("odd", [VARIED, WRONG_AND_VARIED])
@pytest.mark.parametrize("equals", ["a", "ac", "acde"])
@pytest.mark.parametrize("is_first", [True, False])
def test_one_whose_first_step_alone_does_not_repeat_itself_is_named(
    odd: Step, equals: str, is_first: bool
) -> None:
    """Also of two, and where only its rehearsal was wrong."""
    seen = watch(*sorted(f"b{equals}"))
    told: list[tuple[str, Event]] = [(name, first_step()) for name in equals]
    told.insert(0 if is_first else len(told), ("b", odd))
    stops = tell(seen, *told, *((name, Vectors(step=0)) for name in sorted(f"b{equals}")))
    assert [(stop.exit_code, stop.culprits) for stop in stops] == [(EXIT_DISAGREEMENT, ("b",))]


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_kernels_vary_where_the_first_steps_of_several_do(names: str) -> None:
    """Or that of the only one."""
    seen = watch(*names)
    varying = names[-2:]
    stops = tell(seen, *((n, VARIED if n in varying else first_step()) for n in names))
    assert [(stop.exit_code, stop.culprits) for stop in stops] == [(EXIT_USAGE, tuple(varying))]


def test_kernels_that_vary_name_nobody_when_the_run_is_over() -> None:
    """a repeats itself, and d has not told yet: b and c are no minority."""
    seen = watch("a", "b", "c", "d")
    stops = tell(seen, ("a", first_step()), ("b", WRONG_AND_VARIED), ("c", VARIED))
    assert [stop.culprits for stop in stops] == [("b", "c")]
    seen.finish()
    assert seen.disagreements == []


def test_who_varies_has_no_vote() -> None:
    """b varies, and its step agrees with a's: of a and c nobody is in the majority."""
    seen = watch("a", "b", "c")
    tell(seen, ("a", first_step()), ("b", VARIED), ("c", first_step("0x1p-3")))
    (found,) = seen.disagreements
    assert found.odd == ("b",)


def test_who_alone_varies_is_named_where_two_others_differ_too() -> None:
    """Of two the one that repeats itself is right; a third that always errs is odd among three."""
    seen = watch("a", "b", "c", "d")
    told = {"a": first_step(), "b": WRONG_AND_VARIED, "c": first_step(), "d": first_step("0x1p-3")}
    tell(seen, *told.items())
    (found,) = seen.disagreements
    assert found.odd == ("b", "d")


def test_workers_with_another_stack_end_before_their_first_step() -> None:
    seen = watch("a", "b")
    phases = [Phase(name="build", detail={"torch": version}) for version in ("2.13", "2.12")]
    (stop,) = tell(seen, *zip("ab", phases, strict=True))
    assert (stop.exit_code, stop.culprits) == (EXIT_USAGE, ())
    assert seen.mismatch is not None


def test_two_that_differ_are_another_exit_code_than_one_that_is_odd() -> None:
    seen = watch("a", "b")
    tell(seen, ("a", step(1)), ("b", step(1, OTHER)))
    stops = tell(seen, ("a", Vectors(step=1)), ("b", Vectors(step=1)))
    assert [(stop.exit_code, stop.culprits) for stop in stops] == [(EXIT_UNNAMED, ())]


def keeping(*, odd: str = OTHER, told: bool = True) -> Watch:
    """Three workers that keep evidence; b differed at step 4, and all told their vectors."""
    seen = Watch(dict.fromkeys("abc", "H100"), max_lead=2, dossier_bytes=1e9)
    tell(seen, *((name, step(number)) for number in range(4) for name in "abc"))
    tell(seen, ("a", step(4)), ("b", step(4, odd)), ("c", step(4)))
    seen.commands()
    if told:
        right = Vectors(step=4, fp={"gradients": {"v": "1", "w": "2"}, "weights": {"v": "5"}})
        wrong = Vectors(step=4, fp={"gradients": {"v": "1", "w": "3"}, "weights": {"v": "6"}})
        assert not tell(seen, ("a", right), ("b", wrong), ("c", right))
    return seen


GUILTY = ["gradients/w", "weights/v"]


def test_the_odd_one_and_a_healthy_one_keep_their_state_after_the_same_step() -> None:
    seen = keeping()
    dump = Dump(step=6, of_step=4, tensors=GUILTY)  # step 5 is the last with credit
    assert seen.commands() == [("a", dump), ("b", dump)]
    assert seen.holds_run
    assert not tell(seen, ("a", Kept(step=6, of_step=4)))
    (stop,) = tell(seen, ("b", Kept(step=6, of_step=4)))
    assert (stop.exit_code, stop.culprits) == (EXIT_DISAGREEMENT, ("b",))
    assert not seen.holds_run
    assert not tell(seen, ("b", Kept(step=6, of_step=4)))


def test_of_two_that_differ_both_keep_theirs_and_a_death_is_not_held_back() -> None:
    seen = Watch(dict.fromkeys("ab", "H100"), max_lead=2, dossier_bytes=1e9)
    tell(seen, ("a", step(4)), ("b", step(4, OTHER)))
    seen.commands()
    assert not tell(seen, ("a", Vectors(step=4)), ("b", Vectors(step=4)))
    assert [name for name, command in seen.commands() if isinstance(command, Dump)] == ["a", "b"]
    assert not seen.holds_run
    tell(seen, ("a", Kept(step=6)))  # an older worker does not say of which fault
    seen.on_end("b")
    stop = seen.tick(1.0)
    assert stop is not None
    assert stop.exit_code == EXIT_UNNAMED


def test_who_keeps_too_long_is_not_waited_for() -> None:
    seen = keeping()
    assert seen.tick(100.0) is None
    patience_s = EVIDENCE_S + SETTLE_STEPS * 3 * 0.001 + 1e9 / EVIDENCE_BYTES_PER_S
    assert seen.due == pytest.approx(100.0 + patience_s)
    assert seen.tick(seen.due - 0.1) is None
    assert seen.tick(seen.due) is not None


def test_a_death_while_they_tell_leaves_the_others_time_to_keep() -> None:
    seen = keeping(told=False)
    seen.on_end("c")
    assert seen.tick(1.0) is None
    dump = Dump(step=6, of_step=4)
    assert seen.commands() == [("a", dump), ("b", dump)]
    assert seen.holds_run
    seen.on_end("b")
    assert seen.tick(1.0) is None
    seen.on_end("a")
    assert seen.tick(1.0) is not None


def kept_by(told: list[tuple[str, Command]], of_step: int) -> list[tuple[str, int]]:
    """(worker, the state that it is to keep for this fault)"""
    dumps = [(name, dump) for name, dump in told if isinstance(dump, Dump)]
    return [(name, dump.step) for name, dump in dumps if dump.of_step == of_step]


BROKE = Break(step=4, quantity="weights", tensor="w")


def broken(*names: str) -> Watch:
    """Equals; b found in step 4 that its state changed."""
    seen = Watch(dict.fromkeys(names, "H100"), max_lead=2, dossier_bytes=1e9)
    tell(seen, *((name, step(number)) for number in range(4) for name in names))
    seen.commands()
    assert not tell(seen, ("b", step(4)), ("b", BROKE))
    return seen


def test_a_worker_that_changed_and_a_healthy_one_keep_their_state_after_the_same_step() -> None:
    seen = broken(*"abc")
    dump = Dump(step=6, of_step=4, tensors=["weights/w"])  # step 5 is the last with credit
    assert seen.commands() == [("a", dump), ("b", dump)]
    tell(seen, ("a", step(4)), ("c", step(4)))
    assert seen.commands() == []  # nobody gets further
    assert seen.holds_run
    (stop,) = tell(seen, ("a", Kept(step=6, of_step=4)), ("b", Kept(step=6, of_step=4)))
    assert stop.culprits == ("b",)


def test_one_whose_equals_have_ended_keeps_its_changed_state_where_it_is() -> None:
    seen = Watch(dict.fromkeys("ab", "H100"), max_lead=2, dossier_bytes=1e9)
    tell(seen, *((name, step(number)) for number in range(4) for name in "ab"))
    tell(seen, ("a", Done(exit_code=0)))
    seen.commands()
    assert not tell(seen, ("b", step(4)), ("b", BROKE))
    assert ("b", Dump(step=0, of_step=4, tensors=["weights/w"])) in seen.commands()
    assert len(tell(seen, ("b", Kept(step=5, of_step=4)))) == 1


def test_one_that_changed_while_a_difference_is_settled_keeps_its_state_beside_theirs() -> None:
    seen = keeping(told=False)
    tell(seen, ("b", BROKE))
    assert seen.commands() == []  # it is odd: it will be asked with the others
    tell(seen, ("c", BROKE))
    assert kept_by(seen.commands(), of_step=4) == [("c", 6)]
    tell(seen, *((name, Vectors(step=4)) for name in "abc"))
    assert kept_by(seen.commands(), of_step=4) == [("a", 6), ("b", 6)]


def test_one_that_keeps_beside_an_odd_one_and_changed_is_replaced_by_another() -> None:
    seen = keeping()
    assert kept_by(seen.commands(), of_step=4) == [("a", 6), ("b", 6)]
    tell(seen, ("a", BROKE))
    assert kept_by(seen.commands(), of_step=4) == [("a", 6), ("c", 6)]
    kept = Kept(step=6, of_step=4)
    assert not tell(seen, ("a", kept), ("b", kept))
    (stop,) = tell(seen, ("c", kept))
    assert stop.culprits == ("b",)


def test_none_of_two_that_differ_is_the_healthy_one_beside_them() -> None:
    seen = Watch(dict.fromkeys("abcd", "H100"), max_lead=2, dossier_bytes=1e9)
    tell(seen, *((name, step(number)) for number in range(4) for name in "abcd"))
    tell(seen, *((name, step(4, OTHER if name in "cd" else SAME)) for name in "abcd"))
    tell(seen, *((name, Vectors(step=4)) for name in "abcd"))
    assert kept_by(seen.commands(), of_step=4) == [("a", 6), ("b", 6), ("c", 6)]
    tell(seen, ("b", BROKE))
    assert kept_by(seen.commands(), of_step=4) == [("b", 6), ("d", 6)]


def test_a_worker_alone_that_changed_is_waited_for_until_it_ends() -> None:
    seen = Watch({"a": "H100"}, max_lead=2, dossier_bytes=0.0)
    assert not tell(seen, ("a", Break(step=3, quantity="weights", tensor="w")))
    assert seen.tick(5.0) is None
    seen.on_end("a")
    assert seen.tick(6.0) is not None


def going_on(*names: str) -> Watch:
    seen = Watch(dict.fromkeys(names, "H100"), max_lead=2, dossier_bytes=1e9, goes_on=True)
    tell(seen, *((name, step(number)) for number in range(3) for name in names))
    return seen


def test_the_others_go_on_without_the_odd_one_and_are_compared_in_each_step() -> None:
    seen = going_on(*"abcd")
    tell(seen, *((name, step(3, OTHER if name == "b" else SAME)) for name in "abcd"))
    tell(seen, *((name, step(4)) for name in "abcd"))  # they had credit
    assert not seen.dismissed
    vectors = [(name, Vectors(step=3)) for name in "abcd"]
    assert not tell(seen, *vectors)
    assert seen.dismissed == {"b": Dismissal.AWAITED}
    assert "the others go on without b" in seen.news()[0]
    told = seen.commands()
    assert ("b", Dump(step=5, of_step=3)) in told
    assert [name for name, command in told if command == Credit(step=6)] == ["a", "c", "d"]
    tell(seen, *((name, step(5)) for name in "acd"))
    assert seen.agreement.agreed_steps["a"] == 6
    tell(seen, ("b", Kept(step=5, of_step=3)), ("a", Kept(step=5, of_step=3)))
    assert seen.dismissed == {"b": Dismissal.GIVEN_UP}
    assert ("b", Go()) in seen.commands()


def test_a_second_odd_one_that_told_while_the_first_was_settled_is_found() -> None:
    seen = going_on(*"abcd")
    tell(seen, *((name, step(3, OTHER if name == "b" else SAME)) for name in "abcd"))
    tell(seen, *((name, step(4, OTHER if name == "c" else SAME)) for name in "abcd"))
    tell(seen, *((name, Vectors(step=3)) for name in "abcd"))
    assert [found.odd for found in seen.disagreements] == [("b",), ("c",)]
    asked = [name for name, command in seen.commands() if command == AskVectors(step=4)]
    assert asked == ["a", "c", "d"]


def test_one_healthy_worker_keeps_for_each_fault_and_is_no_suspect_of_another() -> None:
    """Until then nobody gets further, so it can hold the state that both suspects hold."""
    seen = going_on(*"abcd")
    tell(seen, *((name, step(3, OTHER if name == "b" else SAME)) for name in "abcd"))
    tell(seen, *((name, step(4, OTHER if name == "a" else SAME)) for name in "abcd"))
    tell(seen, *((name, Vectors(step=3)) for name in "abcd"))
    tell(seen, *((name, Vectors(step=4)) for name in "acd"))
    told = seen.commands()
    assert kept_by(told, of_step=3) == [("b", 5), ("c", 5)]
    assert kept_by(told, of_step=4) == [("a", 5), ("c", 5)]
    last_dump = max(number for number, (_, each) in enumerate(told) if isinstance(each, Dump))
    assert Credit(step=6) in [command for _, command in told[last_dump:]]
    tell(seen, ("b", Kept(step=5, of_step=3)), ("c", Kept(step=5, of_step=3)))
    assert seen.dismissed == {"b": Dismissal.GIVEN_UP, "a": Dismissal.AWAITED}
    tell(seen, ("a", Kept(step=5, of_step=4)), ("c", Kept(step=5, of_step=4)))
    assert seen.dismissed == dict.fromkeys("ab", Dismissal.GIVEN_UP)


def test_a_healthy_one_that_becomes_a_suspect_is_replaced_by_another() -> None:
    seen = going_on(*"abcd")
    tell(seen, *((name, step(3, OTHER if name == "b" else SAME)) for name in "abcd"))
    tell(seen, *((name, Vectors(step=3)) for name in "abcd"))
    assert kept_by(seen.commands(), of_step=3) == [("a", 5), ("b", 5)]
    tell(seen, ("c", step(4)), ("c", step(5)))
    tell(seen, ("a", step(4, OTHER)), ("d", step(4)))
    assert kept_by(seen.commands(), of_step=3) == [("d", 5)]  # c has passed that state
    tell(seen, ("b", Kept(step=5, of_step=3)), ("a", Kept(step=5, of_step=3)))
    assert seen.dismissed == {"b": Dismissal.AWAITED}
    tell(seen, ("d", Kept(step=5, of_step=3)))
    assert seen.dismissed == {"b": Dismissal.GIVEN_UP}


def test_one_that_died_when_it_was_asked_takes_no_time_from_a_later_fault() -> None:
    seen = going_on(*"abcdef")
    tell(seen, *((name, step(3, OTHER if name == "b" else SAME)) for name in "abcdef"))
    seen.on_end("b")
    seen.tick(1.0)
    assert seen.dismissed.keys() == {"b"}
    tell(seen, *((name, step(4, OTHER if name == "d" else SAME)) for name in "acdef"))
    assert seen.tick(2.0) is None
    assert seen.dismissed.keys() == {"b"}  # the others are still to tell their vectors
    assert seen.due == 2.0 + SETTLE_S
    tell(seen, *((name, Vectors(step=4)) for name in "acdef"))
    assert seen.dismissed.keys() == {"b", "d"}


def test_one_that_changes_while_another_is_settled_is_left_behind_too() -> None:
    seen = going_on(*"abcd")
    tell(seen, *((name, step(3, OTHER if name == "b" else SAME)) for name in "abcd"))
    tell(seen, ("c", Break(step=4, quantity="weights", tensor="w")))
    assert seen.dismissed == {"c": Dismissal.AWAITED}
    tell(seen, *((name, Vectors(step=3)) for name in "abd"))
    assert seen.dismissed.keys() == {"b", "c"}


def test_where_nobody_is_named_or_left_the_run_ends_all_the_same() -> None:
    seen = going_on("a", "b")
    tell(seen, ("a", step(3)), ("b", step(3, OTHER)))
    tell(seen, ("a", Vectors(step=3)), ("b", Vectors(step=3)))
    (stop,) = tell(seen, ("a", Kept(step=5, of_step=3)), ("b", Kept(step=5, of_step=3)))
    assert stop.exit_code == EXIT_UNNAMED
    alone = Watch({"a": "H100"}, max_lead=2, dossier_bytes=0.0, goes_on=True)
    broke = Break(step=3, quantity="weights", tensor="w")
    assert len(tell(alone, ("a", broke), ("a", Kept(step=4, of_step=3)))) == 1


@pytest.mark.parametrize("breaks_first", [True, False])
def test_one_that_differs_and_tells_that_it_changed_is_left_behind_once(breaks_first: bool) -> None:
    seen = going_on(*"abcd")
    told: list[list[tuple[str, Event]]] = [
        [("b", Break(step=3, quantity="weights", tensor="w"))],
        [(name, step(3, OTHER if name == "b" else SAME)) for name in "abcd"],
    ]
    for events in told if breaks_first else reversed(told):
        tell(seen, *events)
    tell(seen, *((name, Vectors(step=3)) for name in "abcd"), ("b", Kept(step=4, of_step=3)))
    seen.tick(1.0)
    assert seen.dismissed.keys() == {"b"}
    assert len(seen.news()) == 1
    tell(seen, *((name, step(number)) for number in (4, 5) for name in "acd"))
    assert seen.agreement.agreed_steps["a"] == 6
