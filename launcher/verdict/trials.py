"""Trials of kernels that some equals passed and others failed: a difference before the first step.
Pure. Workers with equal stacks try the same kernels in the same order, on the same numbers."""

from collections.abc import Mapping

from msgspec.structs import replace

from launcher.verdict.disagreement import Disagreement
from model_check.events import Phase, Scalar
from model_check.utils.trials import PASSED, TRIAL_OF, trials_in
from model_check.utils.words import listed


def has_failed_one(told: Mapping[str, Scalar]) -> bool:
    return any(shown != PASSED for shown in trials_in(told).values())


def outcomes(told: Mapping[str, Scalar]) -> dict[str, bool]:
    """Trial -> whether it was passed: the kernels that a worker takes follow from it."""
    return {trial: shown == PASSED for trial, shown in trials_in(told).items()}


def compare_trials(told: Mapping[str, Phase]) -> Disagreement | None:
    """The first trial that some of these equals passed and others failed. `others`: those that are
    odd in a later one."""
    found: Disagreement | None = None
    trials = {name: trials_in(phase.detail) for name, phase in sorted(told.items())}
    for trial in dict.fromkeys(trial for each in trials.values() for trial in each):
        shown = {name: each[trial] for name, each in trials.items() if trial in each}
        if not 0 < sum(each == PASSED for each in shown.values()) < len(shown):
            continue
        difference = Disagreement(0, trial, shown)
        others = () if found is None else (*found.others, *difference.odd)
        found = difference if found is None else replace(found, others=others)
    return found


def what_its_trial_showed(worker: str, found: Disagreement, told: Mapping[str, Scalar]) -> str:
    """`its attention kernel flash_attn gave other bits of dq in 3 equal calls; 7 equals passed`;
    `told`: all that this worker told of itself."""
    shown, trial = found.bits[worker], found.quantity
    if shown == PASSED and worker in found.odd:  # it failed a later one
        trial, shown = next((t, s) for t, s in reversed(trials_in(told).items()) if s != PASSED)
        return f"its {_kernel(trial)} {shown}; its equals passed"
    passed = [name for name, each in found.bits.items() if each == PASSED]
    failed = [name for name in found.bits if name not in passed]
    if shown != PASSED:
        return f"its {_kernel(trial)} {shown}; {_counted(passed)} passed"
    return f"its {_kernel(trial)} passed its trial, and that of {listed(failed)} did not"


def _counted(names: list[str]) -> str:
    return f"{len(names)} equals" if len(names) > 1 else names[0]


def _kernel(trial: str) -> str:
    return trial.removeprefix(TRIAL_OF)
