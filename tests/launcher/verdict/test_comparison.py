"""What trainings of several arms show side by side."""

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.report.comparison import comparison_lines
from launcher.verdict.comparison import (
    ComparisonRecord,
    ComparisonResult,
    Measured,
    TrialRecord,
    compared,
)
from launcher.verdict.results import SplitResult, Verdict

SEEDS = (42, 43, 44)


def record(**more: Any) -> ComparisonRecord:
    trials = [
        TrialRecord(arm=arm, seed=seed, directory=f"{arm}/seed_{seed}", workers=["CPU0"])
        for seed in SEEDS
        for arm in ("full", "infini")
    ]
    told: dict[str, Any] = {
        "command": [],
        "started_at": "",
        "pid": 1,
        "host": "here",
        "cwd": "/",
        "preset": "cpu",
        "device": "cpu",
        "differing": {"model.attention": {"full": "full", "infini": "infini"}},
        "trials": trials,
    }
    return ComparisonRecord(**told | more)


def passed(loss: float, rate: float = 100.0, **more: Any) -> Measured:
    told: dict[str, Any] = {"end_loss": loss, "tokens_per_s": rate, "steps": 10}
    return Measured(verdict=Verdict.PASS, exit_code=0, summary="", **told | more)


def failed(code: int) -> Measured:
    return Measured(verdict=Verdict.FAIL, exit_code=code, summary=f"why {code}", end_loss=9.0)


def measured(**trials: Measured | None) -> dict[str, Measured | None]:
    """All others passed with the same loss."""
    usual = {trial.directory: passed(2.0) for trial in record().trials}
    return usual | {name.replace("_", "/seed_"): value for name, value in trials.items()}


def result(of: ComparisonRecord | None = None, **trials: Measured | None) -> ComparisonResult:
    return compared(of or record(), measured(**trials), {})


def test_seeds_give_mean_and_spread() -> None:
    (full, _) = result(full_42=passed(1.0), full_43=passed(2.0), full_44=passed(4.5)).arms
    spread = full.figures["end_loss"]
    assert (spread.mean, spread.least, spread.most, spread.count) == (2.5, 1.0, 4.5, 3)
    assert spread.std == pytest.approx(math.sqrt((1.5**2 + 0.5**2 + 2.0**2) / 2))


def test_an_arm_stands_beside_the_first_one_seed_by_seed() -> None:
    trials = {
        "full_42": passed(1.0, 100.0),
        "full_43": passed(3.0, 200.0),
        "infini_42": passed(1.5, 50.0),
        "infini_43": passed(3.5, 100.0),
        "infini_44": passed(2.5, 50.0),
    }
    full, infini = result(**trials).arms
    assert full.beside == {}
    loss, rate = infini.beside["end_loss"], infini.beside["tokens_per_s"]
    assert (loss.mean, loss.std, loss.count) == (0.5, 0.0, 3)
    assert (rate.mean, rate.std) == (0.5, 0.0)


def test_what_failed_has_no_part_in_the_figures() -> None:
    full, infini = result(infini_43=failed(20)).arms
    assert (full.figures["end_loss"].count, infini.figures["end_loss"].count) == (3, 2)
    assert infini.beside["end_loss"].count == 2


def test_the_first_that_failed_in_the_order_of_their_begin_gives_the_exit_code() -> None:
    told = result(full_44=failed(1), infini_43=failed(20))
    assert (told.exit_code, told.culprits, told.verdict) == (20, ["full", "infini"], Verdict.FAIL)
    assert "full failed (1 of 3 seeds): why 1; infini failed (1 of 3 seeds): why 20" in told.summary


def test_what_to_do_is_that_of_the_first_that_failed_or_to_choose() -> None:
    replace_it = replace(failed(21), do_now="Take GPU3 out of service.")
    assert result(full_44=failed(1), infini_43=replace_it).do_now == replace_it.do_now
    assert result(full_44=failed(1)).do_now.startswith("Read the last lines of full/seed_44; ")
    assert result().do_now.startswith("Choose by the figures")
    warned = Measured(verdict=Verdict.WARN, exit_code=0, summary="", do_now="Reset GPU1.")
    assert result(full_43=warned).do_now == "Reset GPU1."
    one = record(trials=[trial for trial in record().trials if trial.seed == 43])
    assert "--seeds 3" in result(one).do_now
    missing = {"infini_43": None}
    assert "stopped" in result(record(signal=15), **missing).do_now
    assert "--deadline" in result(record(is_deadline=True), **missing).do_now


def test_a_training_that_failed_is_called_by_its_arm_and_where_there_are_several_its_seed() -> None:
    several = list(comparison_lines(result(infini_43=failed(20)), Path("/r")))
    assert "infini seed 43: FAIL: why 20" in several
    only = [trial for trial in record().trials if trial.seed == 43]
    trials = {trial.directory: passed(2.0) for trial in only} | {"infini/seed_43": failed(20)}
    alone = list(comparison_lines(compared(record(trials=only), trials, {}), Path("/r")))
    assert "infini: FAIL: why 20" in alone


def test_who_was_stopped_has_not_failed() -> None:
    stopped = [
        TrialRecord(
            arm=each.arm,
            seed=each.seed,
            directory=each.directory,
            workers=each.workers,
            exit_code=143,
            is_stopped=True,
        )
        for each in record().trials
    ]
    told = result(record(trials=stopped, signal=15), full_42=failed(143))
    assert (told.exit_code, told.verdict, told.culprits) == (143, Verdict.INCONCLUSIVE, [])
    assert told.summary == "SIGTERM came before full and infini had trained"


def test_a_request_to_save_and_end_begins_no_other_and_is_no_failure() -> None:
    told = result(record(signal=10), infini_44=None)
    assert (told.exit_code, told.verdict, told.culprits) == (0, Verdict.INCONCLUSIVE, [])
    assert told.summary == "SIGUSR1 came before infini had trained"


def test_a_deadline_leaves_a_comparison_open() -> None:
    told = result(record(is_deadline=True), infini_44=None)
    assert (told.exit_code, told.verdict, told.culprits) == (75, Verdict.INCONCLUSIVE, [])
    assert told.summary == "the deadline came before infini had trained enough"


def test_steps_are_those_that_were_trained() -> None:
    told = result(infini_43=passed(1.5, steps=7, is_deadline=True))
    assert told.verdict is Verdict.PASS
    assert told.summary.startswith("2 arms trained 7 to 10 steps, 3 seeds each: ")
    assert told.summary.endswith("; the deadline came before all steps")
    assert any("trainings of 7 to 10 steps" in note for note in told.notes)
    _, infini = told.arms
    assert (infini.beside["end_loss"].count, infini.beside["tokens_per_s"].count) == (2, 3)


def test_losses_of_other_tokens_are_told() -> None:
    (note,) = result(record(differing={"data.bpe_vocab_size": {"full": 1, "infini": 2}})).notes
    assert note.startswith("arms differ in data.bpe_vocab_size: their losses are of other texts")


def test_nothing_left_to_train_is_no_pass_and_no_failure() -> None:
    done = Measured(verdict=Verdict.INCONCLUSIVE, exit_code=0, summary="nothing left to train")
    told = result(full_42=done)
    assert (told.exit_code, told.verdict, told.culprits) == (0, Verdict.INCONCLUSIVE, [])
    assert told.summary == "full: nothing left to train"


def ended(name: str, **how: Any) -> ComparisonRecord:
    """That training of it ended so."""
    trials = [replace(t, **how) if t.directory == name else t for t in record().trials]
    return record(trials=trials)


def test_one_that_ended_well_and_left_no_report_proves_nothing() -> None:
    told = result(ended("full/seed_42", exit_code=0, last_words="PASS: all"), full_42=None)
    assert (told.exit_code, told.verdict, told.culprits) == (75, Verdict.INCONCLUSIVE, [])
    assert told.summary == "full: left no report that can be read: PASS: all"


def test_a_launcher_that_was_killed_is_a_failure_whatever_it_left() -> None:
    how = {"exit_code": 137, "is_killed": True, "last_words": "its launcher was killed"}
    told = result(ended("full/seed_42", **how), full_42=passed(2.0))
    assert (told.exit_code, told.culprits) == (137, ["full"])
    assert told.summary == "full failed (1 of 3 seeds): its launcher was killed; infini passed"


def test_one_that_left_no_report_is_told_by_its_last_words() -> None:
    first, *others = record().trials
    dead = TrialRecord(
        arm=first.arm,
        seed=first.seed,
        directory=first.directory,
        workers=first.workers,
        exit_code=2,
        last_words="error: no such place",
    )
    told = result(record(trials=[dead, *others]), full_42=None)
    assert (told.exit_code, told.culprits) == (2, ["full"])
    assert "error: no such place" in told.summary


def test_gates_are_counted_by_tenths() -> None:
    shares = [[0.0, 0.05, 0.1, 0.95], [1.0, 0.5, 0.55, 0.89]]
    _, infini = result(infini_42=passed(1.0, gates=shares)).arms
    (gates,) = infini.gates
    assert gates.histogram == [2, 1, 0, 0, 0, 2, 0, 0, 1, 2]
    assert (gates.below, gates.above, gates.seed) == (2 / 8, 2 / 8, 42)


def test_each_split_has_its_loss() -> None:
    splits = [
        SplitResult(split=name, step=10, loss=loss, perplexity=None, tokens_per_s=None)
        for name, loss in (("bach", 1.25), ("satie", "NaN"))
    ]
    full, _ = result(full_42=passed(1.0, validation=splits)).arms
    assert full.figures["val/bach"].mean == 1.25
    assert "val/satie" not in full.figures
