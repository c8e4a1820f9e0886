"""What differs between workers that must be equal, and who differs. Values and pure functions."""

from collections.abc import Collection, Mapping, Set
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from launcher.verdict.alone import minority
from launcher.verdict.severity import Repeat
from model_check.events import Natural, Scalar, Vectors
from model_check.utils.fingerprint import BEFORE, describe_flip, flipped, label
from model_check.utils.trials import PASSED, TRIAL_OF
from model_check.utils.words import listed

CALLS = "calls"
"""The quantity of what a command called, made again several times behind the last step."""
REPEATED, EQUAL, VARIED = "repeated", "equal", "other bits"
"""The quantity of a first step that was computed twice, and what its two passes were."""
_NAMES = {
    "inputs": "inputs of its model",
    REPEATED: "passes of the first step, computed twice",
    "before.weights": "weights before the update",
    "before.exp_avg": "first moments before the update",
    "before.exp_avg_sq": "second moments before the update",
    "forward": "outputs of its blocks",
    "backward": "gradients between its blocks",
    "grad_norms": "norms of its gradients",
    "grad_norm": "gradient norm",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}


def quantity_name(quantity: str) -> str:
    """In words."""
    if quantity in _NAMES or not quantity.startswith(BEFORE):
        return _NAMES.get(quantity, quantity)
    return f"{quantity.removeprefix(BEFORE)} before the update"


class Tensor(Struct, frozen=True):
    """The first tensor that differs, in the order of computation."""

    name: str
    found: Mapping[str, list[tuple[int, int]]]
    """Each odd worker, where nobody is odd each that differs from the first -> (value, bit) that
    flipped; several where the sums leave a choice, none where more than one bit differs. Empty: the
    sums cannot tell."""
    num_others: int = 0
    """Tensors of the same quantity that differ, too."""


class Dispute(Struct, frozen=True):
    """A later quantity of a step in which workers differ, and no majority tells who is odd."""

    quantity: str
    bits: Mapping[str, str]
    """Worker -> exact value."""


class Disagreement(Struct, frozen=True):
    """The first step at which the bits of one group differ; or the trial of a kernel before it."""

    step: Natural
    quantity: str
    """The first that differs, of utils.fingerprint.QUANTITIES; or `validation loss of SPLIT`, or
    `trial of KERNEL`."""
    bits: Annotated[Mapping[str, str], Meta(min_length=2)]
    """Worker -> exact value: a loss or norm as `float.hex()`, of a trial `passed` or what the
    kernel did, else the roll-up of fingerprints."""
    others: tuple[str, ...] = ()
    """The workers that differ from the rest in a later quantity of this step alone, or in a later
    trial."""
    named: tuple[str, ...] | None = None
    """Those that are odd, where the passes of the first step tell more than its bits; None: those
    that differ from a strict majority."""
    dispute: Dispute | None = None
    """In which the others differ, too."""
    tensor: Tensor | None = None

    @property
    def odd(self) -> tuple[str, ...]:
        """The workers that differ from a strict majority; none when no value has one."""
        odd: Collection[str] = self.named if self.named is not None else minority(self.bits)
        if self.is_of_trial:
            odd = _failed_alone(self.bits)
        return tuple(name for name in self.bits if name in odd or name in self.others)

    @property
    def disputed(self) -> tuple[str, ...]:
        """No witness against anybody: they differ from each other."""
        return () if self.dispute is None else tuple(self.dispute.bits)

    @property
    def is_of_trial(self) -> bool:
        """Kernels were tried before the first step, and workers have no bits yet."""
        return self.quantity.startswith(TRIAL_OF)

    @property
    def two_that_differ(self) -> tuple[str, ...]:
        """The first worker of each of two values."""
        first: dict[str, str] = {}
        for worker, bits in self.bits.items():
            first.setdefault(bits, worker)
        return tuple(first.values())[:2]

    @property
    def place(self) -> str:
        """`weights: layers.7.attention.wq.weight, bit 3 of value 77,777`"""
        if self.tensor is None:
            return quantity_name(self.quantity)
        places = [describe_flip(found) for found in self.tensor.found.values()]
        more = f" and {self.tensor.num_others} more" if self.tensor.num_others else ""
        flips = f" ({'; '.join(dict.fromkeys(places))})" if places else ""
        return f"{label(self.quantity, self.tensor.name)}{flips}{more}"

    def __str__(self) -> str:
        if self.is_of_trial:
            return self._of_trial()
        where = self.place if self.tensor else f"the {self.place}"
        if not self.odd:
            what = f"workers differ in {where}, and no majority tells which is right"
        else:
            what = f"{listed(self.odd)} differ{'s' if len(self.odd) == 1 else ''} in {where}"
        return f"step {self.step}: {what}: {self.values}"

    def _of_trial(self) -> str:
        failed = {name: shown for name, shown in self.bits.items() if shown != PASSED}
        passed = [name for name in self.bits if name not in failed]
        kernel = self.quantity.removeprefix(TRIAL_OF)
        what = "; ".join(f"{name}: its {kernel} {shown}" for name, shown in failed.items())
        later = [name for name in self.others if name in passed]
        further = f"; {listed(later)} failed a later trial" if later else ""
        if self.odd:
            count = f"{len(passed)} equals" if len(passed) > 1 else listed(passed)
            return f"{what}; {count} passed{further}"
        return f"{what}; {listed(passed)} passed; no majority of equals passed"

    @property
    def values(self) -> str:
        """`CPU0 and CPU2 1.5 (0x1.8p+0), CPU1 2 (0x1p+1)`"""
        by_bits: dict[str, list[str]] = {}
        for worker, bits in self.bits.items():
            by_bits.setdefault(bits, []).append(worker)
        return ", ".join(f"{listed(names)} {_shown(bits)}" for bits, names in by_bits.items())


def _shown(bits: str) -> str:
    is_float = bits.lstrip("-").startswith("0x") or bits in ("nan", "inf", "-inf")
    return f"{float.fromhex(bits):.9g} ({bits})" if is_float else bits


class Mismatch(Struct, frozen=True):
    """Workers that were to be compared, and cannot be."""

    key: str
    values: Mapping[str, Scalar]
    said: str = ""
    """In words, where a command itself makes its workers differ."""

    @property
    def is_of_command(self) -> bool:
        return bool(self.said)

    def __str__(self) -> str:
        if self.said:
            return self.said
        values = ", ".join(f"{worker} {value}" for worker, value in self.values.items())
        return f"not comparable: the workers differ in {self.key}: {values}"


class Replay(Struct, frozen=True, kw_only=True):
    """What came of it; run.json keeps it."""

    to_step: int
    suspects: tuple[str, ...] = ()
    """The workers that were asked."""
    from_step: int = 0
    """It began with this step: not 0 from a checkpoint."""
    times: int = 0
    """How often the steps were computed again."""
    repeats: Mapping[str, Repeat] = {}
    """Suspect -> whether its fault came again; nothing of one of which that is not known."""
    wrong: int | None = None
    """In how many of these `times` the suspect was wrong; None: not known, or an older run."""
    odd: str = ""
    """Of two that differ, and no majority, the one that gave other bits than in the run, beside
    the other one, which never did; or that failed a kernel's trial again and again. Empty: none."""
    doubted: str = ""
    """The healthy worker that gave other bits than in the run: then nobody is named."""
    is_software: bool = False
    """Several did: nobody is named."""
    said: str = ""
    """In words, for the end of a sentence."""
    disagreement: Disagreement | None = None
    """The first difference between the replays, where the steps were computed last."""

    @property
    def how_often(self) -> str:
        """The suspect was wrong: `2 of 4 replays`."""
        if self.wrong is None:
            return "its replay"
        return f"{self.wrong} of {self.times} replay{'s' * (self.times != 1)}"

    @property
    def named(self) -> str:
        """Of two that differ the one whose device it must be. Empty: none."""
        is_named = self.repeats.get(self.odd) in (Repeat.PERSISTENT, Repeat.INTERMITTENT)
        return self.odd if is_named else ""

    def repeat_of(self, worker: str) -> Repeat:
        return self.repeats.get(worker, Repeat.NOT_REPLAYED)


def _failed_alone(shown: Mapping[str, str]) -> Set[str]:
    """The workers that failed a trial which a strict majority passed. One that passes where most
    fail is not odd: its kernel may vary."""
    odd = minority({worker: str(each == PASSED) for worker, each in shown.items()})
    return {worker for worker in odd if shown[worker] != PASSED}


def explain(found: Disagreement, vectors: Mapping[str, Vectors]) -> Disagreement:
    """The disagreement with the first tensor that differs, by the fingerprints that the workers
    sent of its step."""
    tensors = {
        name: vectors[name].fp[found.quantity]
        for name in found.bits
        if name in vectors and found.quantity in vectors[name].fp
    }
    if len(tensors) < 2:
        return found
    shared = [n for n in next(iter(tensors.values())) if all(n in fp for fp in tensors.values())]
    differing = [n for n in shared if len({fp[n] for fp in tensors.values()}) > 1]
    if not differing:
        return found
    first = differing[0]
    values = {name: int(fp[first], 16) for name, fp in tensors.items()}
    size = vectors[next(iter(tensors))].sizes.get(first, (0, 0))
    tensor = Tensor(first, _flips(values, found.odd, size, found.quantity), len(differing) - 1)
    return replace(found, tensor=tensor)


def _flips(
    values: Mapping[str, int], odd: tuple[str, ...], size: tuple[int, int], found_in: str
) -> dict[str, list[tuple[int, int]]]:
    right = next((value for worker, value in values.items() if worker not in odd), None)
    num_values, num_bits = size
    if right is None or num_bits == 0 or found_in == "grad_norms":
        return {}
    return {
        worker: flipped(right, value, num_values, num_bits)
        for worker, value in values.items()
        if value != right
    }
