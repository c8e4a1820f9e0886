"""A golden file: the bits and the speed of a run whose workers agreed, a peer for runs with few.
What it holds, and how the workers of another run stand to it. Values only."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from launcher.verdict.agreement import DIVIDING, MUST_MATCH
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.own_command import COMMAND, CheckedCommand
from model_check.events import Evaluation, Scalar, Step, Vectors
from model_check.utils.words import few, listed, printable

SCHEMA = 1
NAME = "golden"
"""What its bits are called beside a worker's."""
ENOUGH_WORKERS = 3
"""So many must have agreed: of two that differ nobody knows which is right."""
OF_SPEED = ("group", *DIVIDING, "settings", "parameters")
"""The keys that must be equal for two step times to be compared."""
SOURCE = "source "
"""Begins the name of a command's own file; as in model_check.instrument.sources."""
Key = Mapping[str, Scalar]
_MOST_REASONS = 4
"""Of one worker, in a sentence."""
_LONGEST = 40
"""Characters of a value that a line shows."""


class Source(Struct, frozen=True, kw_only=True):
    """The run that a golden file was made of."""

    run_dir: str | None
    host: str
    started_at: Annotated[datetime, Meta(tz=True)]
    workers: Annotated[list[str], Meta(min_length=1)]
    """Those that agreed in all of its steps."""
    versions: dict[str, str | None]
    """Of software, also of what no key holds: the driver."""
    settings: dict[str, Any] = {}
    """Those that decide its steps, by name; the key holds their digest."""
    forced: str | None = None
    """Why it would not have been written without --force; null: nothing was missing."""


class Golden(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="golden"):
    """The whole file."""

    schema: int
    key: dict[str, Scalar]
    """What a worker's must equal for its bits to be compared."""
    source: Source
    step_ms: Annotated[float, Meta(gt=0)] | None = None
    """Median wall time of a step behind the warm-up, milliseconds; None: too few steps."""
    tokens_per_s: float | None = None
    """Median of the workers."""
    steps: Annotated[list[Step], Meta(min_length=1)]
    evaluations: list[Evaluation] = []
    last: Vectors | None = None
    """The fingerprints of its last step, each tensor by itself."""

    def __post_init__(self) -> None:
        numbers = [step.step for step in self.steps]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise ValueError("its steps do not follow each other")

    def why_not(self, checked: CheckedCommand | None) -> str | None:
        """Why no run of this command, or of our training (None), has bits of its kind."""
        if self.is_of_command == (checked is not None):
            return None
        what = ("our own training", "a command of your own")
        there, here = what[self.is_of_command], what[checked is not None]
        return f"it holds the bits of {there}, and {here} runs here"

    @property
    def is_of_command(self) -> bool:
        return COMMAND in self.key


class Other(Struct, frozen=True):
    """A key with another value than in the golden file. null: not told."""

    # Not `key`: the value of a field of that name is masked as a secret.
    name: str
    golden: Any
    here: Any

    def __str__(self) -> str:
        """`torch 2.12.0 there, 2.13.0 here`"""
        return f"{printable(self.name)} {_shown(self.golden)} there, {_shown(self.here)} here"


class Standing(Struct, frozen=True, kw_only=True):
    """How one worker stands to the golden file."""

    name: str
    steps: int
    """That it told."""
    equal_steps: int
    """From the first on, without a difference."""
    others: list[Other] = []
    """Why its bits cannot be compared, key by key."""
    why_not: str | None = None
    """Why they cannot, where no key tells it."""
    disagreement: Disagreement | None = None
    """The first difference; `golden` is the file."""
    speed: float | None = None
    """Its speed as a multiple of the file's; null: another device or other settings, or too few
    steps."""

    @property
    def is_comparable(self) -> bool:
        return not self.others and self.why_not is None

    @property
    def is_equal(self) -> bool:
        return self.is_comparable and self.disagreement is None

    @property
    def place(self) -> str:
        """`step 2, gradients`; of a difference."""
        found = self.disagreement
        return "" if found is None else f"step {found.step}, {found.place}"

    def __str__(self) -> str:
        """For the end of a sentence, without its speed."""
        if not self.is_comparable:
            return f"not comparable: {self.why}"
        if (found := self.disagreement) is not None:
            return f"other bits from step {found.step:,} on ({replace(found, tensor=None).place})"
        return f"equal in {self.equal_steps:,} of {self.steps:,} steps"

    @property
    def reasons(self) -> list[str]:
        """Why it is not comparable."""
        return [*filter(None, [self.why_not]), *map(str, self.others)]

    @property
    def why(self) -> str:
        """The first of them, for a sentence."""
        more = len(self.reasons) - _MOST_REASONS
        first = self.reasons[:_MOST_REASONS]
        return "; ".join([*first, f"{more} more"] if more > 0 else first)


class GoldenResult(Struct, frozen=True, kw_only=True):
    """How the workers of a run stand to a golden file."""

    file: str
    """As it was asked for."""
    source: Source
    workers: list[Standing]
    changed: list[Other] = []
    """Versions that are none of its key and differ: bits may have changed with them."""

    @property
    def label(self) -> str:
        return f"golden {printable(self.file)}"

    def of(self, worker: str) -> Standing | None:
        return next((each for each in self.workers if each.name == worker), None)

    @property
    def equal(self) -> list[str]:
        return [each.name for each in self.workers if each.is_equal]

    @property
    def differing(self) -> list[Standing]:
        return [each for each in self.workers if each.disagreement is not None]

    @property
    def odd(self) -> list[str]:
        """The workers that it names: those that differ beside one that does not, or the only one
        that can be compared."""
        names = [each.name for each in self.differing]
        return names if self.equal or len(names) == 1 else []

    @property
    def is_software(self) -> bool:
        """All that can be compared differ in the same way: no GPU does that."""
        found = [(each.disagreement, each.name) for each in self.differing]
        bits = {(d.step, d.quantity, d.bits.get(name)) for d, name in found if d is not None}
        return len(found) > 1 and len(bits) == 1 and not self.equal


def key_of(group: str, detail: Key, checked: CheckedCommand | None = None) -> dict[str, Scalar]:
    """`detail`: what a worker told of itself. `checked`: the command that it ran; None: our
    training."""
    said = {key: detail[key] for key in (*DIVIDING, *MUST_MATCH) if key in detail}
    key = {"group": group, "first_step": detail.get("first_step", 0), **said}
    if checked is None:
        return key
    sources = {name: value for name, value in detail.items() if name.startswith(SOURCE)}
    return {**key, **checked.key, **sources}


def others(golden: Key, here: Key) -> list[Other]:
    """What differs, in the order of the keys here."""
    keys = dict.fromkeys([*here, *golden])
    return [Other(k, golden.get(k), here.get(k)) for k in keys if golden.get(k) != here.get(k)]


def golden_lines(result: GoldenResult) -> Iterator[str]:
    """For people: a line for each group of workers with the same answer, more where several keys
    differ."""
    groups: dict[str, list[Standing]] = {}
    for each in result.workers:
        groups.setdefault(str(each), []).append(each)
    every = [each.name for each in result.workers]
    for those in groups.values():
        whose = _whose([each.name for each in those], every)
        yield from _told(those[0], whose)
    if speeds := [each.speed for each in result.workers if each.speed is not None]:
        low, high = f"{min(speeds):.2f}", f"{max(speeds):.2f}"
        yield f"golden: {low if low == high else f'{low} to {high}'} x its speed"
    for other in result.changed:
        yield f"golden: no key, but changed: {other}"


def _told(standing: Standing, whose: str) -> Iterator[str]:
    if standing.is_comparable:
        yield f"golden: {whose}: {standing}"
        return
    first, *more = standing.reasons
    yield f"golden: {whose}: not comparable: {first}"
    yield from (f"golden:   and: {each}" for each in more)


def _whose(names: Sequence[str], every: Sequence[str]) -> str:
    """`all 8`, `all but GPU5`, `GPU0, GPU1`"""
    rest = [name for name in every if name not in names]
    if len(names) < 3 or len(rest) >= len(names):
        return few(names)
    return f"all but {listed(rest)}" if rest else f"all {len(names)}"


def _shown(value: object) -> str:
    text = "n/a" if value is None else printable(str(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
