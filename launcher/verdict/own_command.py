"""A command of a person's own: which one it is, and what tells that it made its workers differ, and
no GPU. Pure."""

import os
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from msgspec import Struct

from launcher.verdict.disagreement import Disagreement
from model_check.events import Scalar, Step
from model_check.utils.fingerprint import GENERATORS, INPUTS
from model_check.utils.words import listed

_FIRST_WEIGHTS = "before.weights"
_GIVEN = (INPUTS, _FIRST_WEIGHTS, "forward", "loss")
"""What differs first where a command gave its workers something else to compute."""
COMMAND = "command"
"""The name of its digest in a key."""
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")


class CheckedCommand(Struct, frozen=True):
    """A command of a person's own, whose workers are compared."""

    seed: int | None = None
    """With which its random numbers begin; None: it seeds them itself."""
    deterministic: bool = False
    """torch takes deterministic operations for it, where it has them."""
    max_steps: int | None = None
    """It ends after so many; None: when it ends by itself."""
    words: tuple[str, ...] = ()
    """Its command line as other hosts may give it, too; secrets are masked."""

    @property
    def given(self) -> list[str]:
        """What it was given, for people: what it sets itself, later, wins."""
        seed, deterministic = self.seed, "deterministic operations by --deterministic"
        seeded = [] if seed is None else [f"random numbers seeded by --seed {seed}"]
        return [*seeded, *([deterministic] if self.deterministic else [])]

    @property
    def key(self) -> dict[str, Scalar]:
        """What of it decides its steps, beside its files."""
        words = "\0".join(self.words).encode(errors="backslashreplace")
        return {COMMAND: blake2b(words, digest_size=8).hexdigest(), "seed": self.seed}

    @property
    def told(self) -> dict[str, str]:
        """The same by name, to say what differs where the digest does."""
        return {f"word {number} of the command": w for number, w in enumerate(self.words, 1)}


def words_of(command: Sequence[str]) -> tuple[str, ...]:
    """A command line without what differs between hosts: where the program and a Python lie, and
    which Python it is."""
    program, *rest = command
    program = os.path.basename(program) if os.path.isabs(program) else program
    return tuple("python" if _PYTHON.fullmatch(word) else word for word in (program, *rest))


class GivenOtherwise(Struct, frozen=True):
    """What workers that differ had been given to compute, as far as it differs."""

    weights: bool
    """The first weights."""
    batch: bool
    generators: list[str]
    """`torch`, `numpy`: those of random numbers, that may have made them differ."""
    idle: bool = False
    """Others differ, too, from which nothing was drawn."""

    @property
    def words(self) -> list[str]:
        """Empty: nothing of it differs."""
        what = ["the first weights"] if self.weights else []
        what += ["the batch"] if self.batch else []
        numbers = f"random numbers ({', '.join(self.generators)})"
        return [*what, numbers] if self.generators else what


def given_otherwise(
    found: Disagreement, told: Mapping[str, Step], before: Mapping[str, Step]
) -> GivenOtherwise:
    """`told`: the step in which they differ. `before`: the one before it, in which they were equal,
    as far as there is one."""
    if found.quantity not in _GIVEN:
        return GivenOtherwise(False, False, [])
    names = sorted({q for step in told.values() for q in step.fp if q.startswith(GENERATORS)})
    differing = [name for name in names if _differs(name, told)]
    drawn = [name for name in differing if not _is_idle(name, told, before)]
    return GivenOtherwise(
        weights=found.step == 0 and _differs(_FIRST_WEIGHTS, told),
        batch=found.quantity == INPUTS,
        generators=[name.removeprefix(GENERATORS) for name in drawn],
        idle=drawn != differing,
    )


def why_unrepeatable(
    found: Disagreement, told: Mapping[str, Step], before: Mapping[str, Step], seed: int | None
) -> str | None:
    """How the command differed between its workers, and what to set. None: a majority agrees, or
    nothing shows that the command differed. `told`, `before`: as of `given_otherwise`."""
    given = given_otherwise(found, told, before)
    if found.odd or not (what := given.words):
        return None
    cure = _cure(given.weights, bool(given.generators) or given.idle, seed)
    differ = "differs" if what == ["the batch"] else "differ"
    where = f"in step {found.step} {listed(what)} {differ} between workers"
    return f"the command is not repeatable: {where}: {cure}"


def _differs(quantity: str, told: Mapping[str, Step]) -> bool:
    return len({step.fp.get(quantity) for step in told.values()}) > 1


def _is_idle(generator: str, told: Mapping[str, Step], before: Mapping[str, Step]) -> bool:
    """Whether it differed in the step before, too, and nothing was drawn from it in that step, in
    this one, or between them: then it explains nothing."""
    if before.keys() != told.keys() or not _differs(generator, before):
        return False
    states = (
        (step.fp.get(generator, ""), before[name].fp.get(generator, ""))
        for name, step in told.items()
    )
    return all(now == was and now[:8] == now[8:] for now, was in states)


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
