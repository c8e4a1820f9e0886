"""What the launchers of one job tell each other: a JSON object a line. Values only."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

MAX_LINE_BYTES = 1 << 20


class Hello(Struct, frozen=True, tag=True):
    """I am here."""

    node: int
    job: str
    """Which step of Slurm; another one's launcher is refused."""
    name: str
    host: str
    workers: list[str]
    kind: str | None
    """Of its workers: nodes of one kind must agree bit for bit. None: they are of several kinds."""
    torch: str | None
    settings: dict[str, Any]
    """Those that decide or change the steps."""
    version: str = ""
    """Of this program: launchers of two may not understand each other."""
    resume: str | None = None
    """Of the first node, where the job goes on: the checkpoint for all. None: as it began."""


class Refused(Struct, frozen=True, tag=True):
    """I do not come, and leave for this reason. The first word of such a launcher, and its last."""

    node: int
    job: str
    name: str
    why: str
    exit_code: int
    version: str = ""


class Greeting(Struct, frozen=True):
    """What is read of another version's first word."""

    job: str
    node: int
    name: str
    version: str = ""


class Ready(Struct, frozen=True, tag=True):
    """Its data are prepared."""

    node: int
    data: str
    """Equal where nodes train on the same tokens."""
    port: int = 0
    """Of the first node: where the ranks meet."""


class Follower(Struct, frozen=True, tag=True):
    """One of its ranks cannot go on without another one."""

    node: int
    worker: str
    said: str


class Failure(Struct, frozen=True, tag=True):
    """One of its ranks failed, or the launcher ends its part of the job for another reason."""

    node: int
    worker: str | None
    """None: no rank of it is blamed."""
    step: int | None
    cause: str
    exit_code: int
    signum: int | None = None
    """A signal to the launcher asked for it."""
    is_deadline: bool = False
    is_compared: bool = False
    """Not its own word: the first node has compared the bits of all."""


class Bits(Struct, frozen=True, tag=True):
    """Of a step: those that all ranks of its node share."""

    node: int
    step: int
    values: dict[str, str]
    """Quantity -> its bits."""


class Ended(Struct, frozen=True, tag=True):
    """Its workers are gone."""

    node: int
    exit_code: int


class Over(Struct, frozen=True, tag=True):
    """Its reports are written, its launcher leaves."""

    node: int
    goes_on: bool = False
    """Where the job failed, it would try again."""


class Gone(Struct, frozen=True, tag=True):
    """It left without a word, or is not heard any more. Its first node says so, or who lost it."""

    node: int
    why: str
    has_ended: bool = False
    """Its launcher is no more: it will not come again."""


class Broken(Struct, frozen=True, tag=True):
    """The link of this launcher has failed by a fault of ours. Never sent."""

    why: str


class Refusal(Struct, frozen=True, tag=True):
    """You are not of this job."""

    why: str
    is_final: bool = False
    """Or you are, and may not come."""


class Beat(Struct, frozen=True, tag=True):
    pass


Message = (
    Hello
    | Refused
    | Ready
    | Follower
    | Failure
    | Bits
    | Ended
    | Over
    | Gone
    | Broken
    | Refusal
    | Beat
)
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError for what no launcher of this version writes."""
    try:
        return _DECODER.decode(line)
    except RecursionError as error:
        raise ValueError("it is too deep") from error


def greeting(line: bytes) -> Greeting | None:
    """What another version's launcher says first; None: it is no launcher."""
    try:
        return msgspec.json.decode(line, type=Greeting)
    except (ValueError, RecursionError):
        return None


def two_versions(first: Hello | Refused, other: Hello | Greeting) -> str:
    here, there = (each.version or "another version" for each in (first, other))
    return (
        f"{first.name} runs Model Check {here}, and {other.name} {there}: install the same on all "
        "nodes"
    )


def differing(mine: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """The names whose values differ."""
    return [n for n in sorted({*mine, *others}) if mine.get(n) != others.get(n)]
