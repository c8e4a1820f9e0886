"""What tells that a command of a person's own, and no GPU, made its workers differ. Pure."""

from collections.abc import Mapping

from msgspec import Struct

from launcher.verdict.disagreement import Disagreement
from model_check.events import Step
from model_check.utils.fingerprint import GENERATORS, INPUTS
from model_check.utils.words import listed

_FIRST_WEIGHTS = "before.weights"
_GIVEN = (INPUTS, _FIRST_WEIGHTS, "forward", "loss")
"""What differs first where a command gave its workers something else to compute."""


class CheckedCommand(Struct, frozen=True):
    """A command of a person's own, whose workers are compared."""

    seed: int | None = None
    """With which its random numbers begin; None: it seeds them itself."""
    deterministic: bool = False
    """torch takes deterministic operations for it, where it has them."""
    max_steps: int | None = None
    """It ends after so many; None: when it ends by itself."""

    @property
    def given(self) -> list[str]:
        """What it was given, for people: what it sets itself, later, wins."""
        seed, deterministic = self.seed, "deterministic operations by --deterministic"
        seeded = [] if seed is None else [f"random numbers seeded by --seed {seed}"]
        return [*seeded, *([deterministic] if self.deterministic else [])]


def why_unrepeatable(found: Disagreement, told: Mapping[str, Step], seed: int | None) -> str | None:
    """How the command differed between its workers, and what to set. None: a majority agrees, or
    nothing shows that the command differed. `told`: the step in which they differ."""
    if found.odd or found.quantity not in _GIVEN:
        return None
    names = sorted({q for step in told.values() for q in step.fp if q.startswith(GENERATORS)})
    generators = [q.removeprefix(GENERATORS) for q in names if _differs(q, told)]
    has_other_weights = found.step == 0 and _differs(_FIRST_WEIGHTS, told)
    what = ["the first weights"] if has_other_weights else []
    what += ["the batch"] if found.quantity == INPUTS else []
    if generators:
        what.append(f"random numbers ({', '.join(generators)})")
    if not what:
        return None
    cure = _cure(has_other_weights, bool(generators), seed)
    differ = "differs" if what == ["the batch"] else "differ"
    where = f"in step {found.step} {listed(what)} {differ} between workers"
    return f"the command is not repeatable: {where}: {cure}"


def _differs(quantity: str, told: Mapping[str, Step]) -> bool:
    return len({step.fp.get(quantity) for step in told.values()}) > 1


def _cure(has_other_weights: bool, has_other_generators: bool, seed: int | None) -> str:
    if not (has_other_weights or has_other_generators):
        return (
            "torch, Python and numpy draw equal random numbers, so sort the files that it reads, "
            "and seed generators of its own (numpy.random.default_rng, torch.Generator)"
        )
    if seed is None:
        when = "before the model is made" if has_other_weights else "where it begins"
        return f"give --seed N, or seed random numbers {when}, with the same number in each worker"
    if has_other_generators:
        return (
            f"it seeds them again after --seed {seed} did (torch.seed(), the time, a process "
            "number): give it a fixed seed there"
        )
    return (
        f"--seed {seed} did not make them equal: look for a generator of its own; if there is "
        "none, run three workers, which show whether one GPU alone has other weights"
    )
