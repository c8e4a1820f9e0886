"""The levels of `run.sh check`: the settings that each stands for, and what is said before it
starts: what runs, for how long, and what it does not test."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

from launcher.gpus.sizes import PRODUCTION
from launcher.verdict.own_command import CheckedCommand
from model_check.config.load import Loaded
from model_check.config.schema import Settings
from model_check.errors import UsageError

_GPUS = {"system.device": "cuda"}
"""A node whose driver is gone must not pass for its CPU."""
MAX_STEPS, SEED, DETERMINISTIC = "training.max_steps", "system.seed", "system.deterministic"
LEVELS: dict[str, dict[str, Any]] = {
    "quick": {**_GPUS, MAX_STEPS: 20},
    "full": _GPUS,
    "burnin": {**_GPUS, "launch.soak_s": 3600.0, "launch.on_suspect": "continue"},
}
"""Level -> settings, below those that a person gives."""
DEFAULT = "full"

_NOT_TESTED = "not tested: memory, PCIe and NVLink bandwidth, power; dcgmi diag -r 3 does"
_ON_CPU = "how long it takes on a CPU is not known; not tested: GPUs"
_START_AND_END_S = 8.0
"""As one H100 took 12.5 s for 20 steps of 208 ms."""
_MEASURED = "NVIDIA H100 80GB HBM3"


def notes_on_level(
    level: str, loaded: Loaded, gpu_names: Collection[str], check: CheckedCommand | None
) -> Iterator[str]:
    """Lines for a person. `gpu_names`: the drivers' names of the GPUs taken; empty on a CPU.
    `check`: of a command; None: our training."""
    settings = loaded.settings
    steps = f"the same {settings.training.max_steps} training steps"
    what = steps if check is None else "your command"
    soak_s = settings.launch.soak_s
    again = f", again and again for {duration(soak_s)}" if soak_s else ""
    yield f"check {level}: {what} on all workers at once{again}"
    if check is not None:
        yield from _notes_on_command(check)
    if not gpu_names:
        yield _ON_CPU
        return
    if check is None:
        yield f"{'each round' if soak_s else 'it'} takes {_time(loaded, gpu_names)}"
    yield _NOT_TESTED


def _notes_on_command(check: CheckedCommand) -> Iterator[str]:
    yield "what its torch optimizers do is compared bit for bit; the command itself is not changed"
    if (steps := check.max_steps) is not None:
        yield f"it ends after {steps} step{'s' * (steps != 1)}"
    yield from check.given


def run_seconds(settings: Settings, gpu_name: str) -> float | None:
    """How long a run takes whose text is prepared, start and end included; None: nothing is known
    of this GPU, or of its float32."""
    # Only a check and a plan wait for these imports.
    from model_check.config.gpu_models import gpu_model
    from model_check.config.memory import expected_geometry
    from model_check.config.roofline import plan_step

    with suppress(UsageError):
        if plan := plan_step(settings, expected_geometry(settings), gpu_model(gpu_name)):
            return _START_AND_END_S + settings.training.max_steps * plan.step_ms / 1000
    return None


def _time(loaded: Loaded, gpu_names: Collection[str]) -> str:
    seconds = [run_seconds(loaded.settings, name) for name in gpu_names]
    known = [s for s in seconds if s is not None]
    if len(known) < len(seconds):
        return "a time that is not known for this GPU and these settings"
    is_measured = _is_measured(loaded, gpu_names)
    how = "by times measured on one H100" if is_measured else "computed, not measured"
    return f"about {duration(max(known))} ({how}); a first run prepares its text before that"


def _is_measured(loaded: Loaded, gpu_names: Collection[str]) -> bool:
    """Whether the step is the one that was timed. Its number may differ."""
    acts = ("model.", "training.", "system.deterministic")
    asked = {
        source
        for name, source in loaded.sources.items()
        if name.startswith(acts) and name not in (MAX_STEPS, *_GPUS)
    }
    return {*gpu_names} == {_MEASURED} and asked <= {"default", f"preset {PRODUCTION}"}


def duration(seconds: float) -> str:
    """As people say it: `30 s`, `12 min`, `1 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.3g} h"
