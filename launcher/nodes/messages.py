"""What the launchers of one job tell each other: a JSON object a line. Values only."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from model_check.events import Step

MAX_LINE_BYTES = 1 << 20


class Failure(Struct, frozen=True, tag=True):
    """One of its ranks failed, or its launcher ends its part of the job for another reason."""

    node: int
    worker: str | None
    """None: no rank of it is blamed."""
    step: int | None
    cause: str
    exit_code: int
    signum: int | None = None
    """A signal to the launcher asked for it."""
    is_deadline: bool = False
    peer_lost: bool = False
    """The rank only lost another one: that ends nothing."""
    is_own: bool = True
    """Its launcher says so itself; False: the link does, which has lost or refused that launcher,
    is broken, or has compared the bits of all nodes."""


class Join(Struct, frozen=True, tag=True):
    """The first message of a launcher."""

    node: int
    job: str
    """Which step of Slurm; another one's launcher is refused."""
    name: str
    version: str = ""
    """Of this program: launchers of two may not understand each other."""
    host: str = ""
    workers: list[str] = []
    kind: str | None = None
    """Of its workers: nodes of one kind must agree bit for bit. None: they are of several kinds."""
    torch: str | None = None
    settings: dict[str, Any] = {}
    """Those that decide or change the steps."""
    resume: str | None = None
    """Of the first node, where the job goes on: the checkpoint for all. None: as it began."""
    failure: Failure | None = None
    """Why this launcher does not join the others: then this is its last message, too."""


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


class Bits(Struct, frozen=True, tag=True):
    """All ranks of its node have the same bits after this step."""

    node: int
    step: Step


class WorkersExited(Struct, frozen=True, tag=True):
    """The workers of its node are gone."""

    node: int


class Leave(Struct, frozen=True, tag=True):
    """Its reports are written and its launcher leaves, or the first node has lost it."""

    node: int
    goes_on: bool = False
    """It would try again where the job failed. One that is not heard may do so, too."""


class JoinRejected(Struct, frozen=True, tag=True):
    """You are not of this job."""

    why: str
    is_final: bool = False
    """Or you are, and may not come."""


class Heartbeat(Struct, frozen=True, tag=True):
    pass


Message = Join | Ready | Failure | Bits | WorkersExited | Leave | JoinRejected | Heartbeat
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


def two_versions(first: Join, other: Join | Greeting) -> str:
    here, there = (each.version or "another version" for each in (first, other))
    return (
        f"{first.name} runs Model Check {here}, and {other.name} {there}: install the same on all "
        "nodes"
    )


def differing(mine: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """The names whose values differ."""
    return [n for n in sorted({*mine, *others}) if mine.get(n) != others.get(n)]
