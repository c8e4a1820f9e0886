"""A kernel that fails its trial on some of its equals is judged before the first step."""

from typing import Any

import pytest

from launcher.verdict.agreement import PATIENCE_S
from launcher.verdict.live import Watch
from launcher.verdict.observer import Dismissal
from launcher.verdict.record import Stop
from launcher.verdict.trials import what_its_trial_showed
from model_check.errors import EXIT_DISAGREEMENT, EXIT_UNNAMED, EXIT_USAGE
from model_check.events import Go, Phase, Scalar
from tests.launcher.verdict.test_agreement import OTHER, step

FLASH, SDPA, ADAMW = (
    f"trial of {kernel}"
    for kernel in ("attention kernel flash_attn", "attention kernel sdpa", "fused AdamW")
)
PASSED, VARIES = "passed", "gave other bits of dq in 3 equal calls"
GOOD = {FLASH: PASSED, "attention_backend": "flash_attn", ADAMW: PASSED}
BAD = {FLASH: VARIES, SDPA: PASSED, "attention_backend": "sdpa", ADAMW: PASSED}
STACK = {"torch": "2.13", "attention_candidates": "flash_attn of flash-attn 2.8, sdpa, eager"}


def told(watch: Watch, *said: tuple[str, dict[str, Any]]) -> list[Stop]:
    stops = []
    for name, detail in said:
        all_told: dict[str, Scalar] = STACK | detail
        stops.append(watch.on_event(name, Phase(name="build", detail=all_told)))
    return [stop for stop in stops if stop is not None]


def equals(num: int, **options: Any) -> Watch:
    return Watch({f"GPU{n}": "H100" for n in range(num)}, max_lead=2, **options)


def each(num: int, bad: dict[int, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"GPU{n}", bad.get(n, GOOD)) for n in range(num)]


def test_one_of_eight_is_named_with_its_kernel_and_what_it_did() -> None:
    seen = equals(8, dossier_bytes=1e9)
    (stop,) = told(seen, *each(8, {3: BAD}))
    assert (stop.exit_code, stop.culprits) == (EXIT_DISAGREEMENT, ("GPU3",))
    said = f"its attention kernel flash_attn {VARIES}; 7 equals passed"
    assert stop.reason == f"GPU3: {said}"
    (found,) = seen.disagreements
    assert what_its_trial_showed("GPU3", found, STACK | BAD) == said
    assert not [command for _, command in seen.commands() if type(command).__name__ == "Dump"]


@pytest.mark.parametrize("bad", [(1,), (0, 1), (0, 1, 2)])
def test_without_a_majority_that_passed_nobody_is_named(bad: tuple[int, ...]) -> None:
    """Not either the only one that passes: a kernel that varies may do so once."""
    num = 2 if len(bad) == 1 else 4
    (stop,) = told(equals(num), *each(num, dict.fromkeys(bad, BAD)))
    assert (stop.exit_code, stop.culprits) == (EXIT_UNNAMED, ())
    assert all(f"GPU{n}: its attention kernel flash_attn" in str(stop.reason) for n in bad)


def test_a_kernel_that_all_fail_alike_or_not_alike_ends_nothing() -> None:
    bad = [BAD, BAD | {FLASH: "raised RuntimeError: no kernel image"}]
    seen = equals(2)
    assert told(seen, ("GPU0", bad[0])) == []
    assert seen.holds_run
    assert told(seen, ("GPU1", bad[1])) == []
    assert not seen.holds_run
    assert seen.disagreements == []


@pytest.mark.parametrize(
    "other", [{"torch": "2.12"}, {"attention_candidates": "flash_attn of flash-attn 2.9"}]
)
def test_a_trial_that_another_stack_fails_is_a_matter_of_the_stack(other: dict[str, str]) -> None:
    (stop,) = told(equals(2), ("GPU0", GOOD), ("GPU1", BAD | other))
    assert (stop.exit_code, stop.culprits) == (EXIT_USAGE, ())
    assert f"the workers differ in {next(iter(other))}" in str(stop.reason)


def test_another_kernel_without_a_failed_trial_is_not_comparable() -> None:
    kernels = [GOOD | {"attention_kernel": kernel} for kernel in ("flash", "math")]
    (stop,) = told(equals(2), ("GPU0", kernels[0]), ("GPU1", kernels[1]))
    assert stop.exit_code == EXIT_USAGE
    assert "the workers differ in attention_kernel" in str(stop.reason)


def test_other_kinds_of_device_are_no_equals() -> None:
    seen = equals(2)
    assert not told(seen, ("GPU0", GOOD | {"num_sms": 132}), ("GPU1", BAD | {"num_sms": 114}))
    assert seen.disagreements == []


def test_two_that_fail_in_different_kernels_are_both_named() -> None:
    bad = {1: BAD, 4: GOOD | {ADAMW: "raised TypeError: x", "optimizer": "plain"}}
    seen = equals(8)
    (stop,) = told(seen, *each(8, bad))
    assert stop.culprits == ("GPU1", "GPU4")
    (found,) = seen.disagreements
    assert found.quantity in (FLASH, ADAMW)
    assert "its fused AdamW raised TypeError: x" in what_its_trial_showed(
        "GPU4", found, STACK | bad[4]
    )


def test_one_that_dies_of_its_trial_waits_for_the_others_a_minute_at_most() -> None:
    seen = equals(3)
    told(seen, ("GPU1", BAD))
    seen.on_end("GPU1")
    assert seen.holds_run
    assert seen.tick(seen.due) is None
    assert (seen.holds_run, seen.due) == (False, float("inf"))
    again = equals(3)
    told(again, ("GPU1", BAD))
    again.on_end("GPU1")
    (stop,) = told(again, ("GPU0", GOOD), ("GPU2", GOOD))
    assert stop.culprits == ("GPU1",)


def test_one_that_dies_of_its_trial_waits_for_those_whose_device_is_unknown_yet() -> None:
    seen, device = equals(3), {"num_sms": 132}
    told(seen, ("GPU0", GOOD | device), ("GPU1", BAD | device))
    seen.on_end("GPU1")
    assert seen.tick(1.0) is None
    assert seen.holds_run
    (stop,) = told(seen, ("GPU2", GOOD | device))
    assert stop.culprits == ("GPU1",)


def test_a_trial_comes_before_the_bits_that_follow_from_it() -> None:
    seen = equals(3)
    told(seen, ("GPU0", GOOD), ("GPU1", BAD))
    for name, loss in (("GPU0", (0.5).hex()), ("GPU1", OTHER)):
        seen.on_event(name, step(0, loss))
    assert seen.due == PATIENCE_S
    (stop,) = told(seen, ("GPU2", GOOD))
    assert "flash_attn" in str(stop.reason)


def test_the_others_go_on_without_the_suspect() -> None:
    seen = equals(3, goes_on=True)
    assert told(seen, *each(3, {1: BAD})) == []
    assert seen.dismissed == {"GPU1": Dismissal.GIVEN_UP}
    assert ("GPU1", Go()) in seen.commands()
    assert seen.disagreements[0].odd == ("GPU1",)
