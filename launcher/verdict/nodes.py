"""A job on several nodes: which part of it this run was, and what ended it on another one. Values
only."""

from msgspec import Struct

from model_check.events import Natural


class Elsewhere(Struct, frozen=True, kw_only=True):
    """What ended a job of several nodes, on another node than this."""

    node: str
    worker: str | None = None
    """The first culprit; None: nobody is blamed."""
    rank: int | None = None
    step: int | None = None
    """In which it failed; None: before its first, or unknown."""
    cause: str
    exit_code: int
    signum: int | None = None
    """The signal to that node's launcher that asked for it."""

    @property
    def told(self) -> str:
        if self.worker is None:
            return f"{self.node}: {self.cause}"
        step = "" if self.step is None else f" in step {self.step}"
        return f"{of_node(self.worker, self.node, self.rank)} failed first{step}: {self.cause}"


class LostPeer(Struct, frozen=True):
    """A rank on another node that lost one of its job."""

    name: str
    said: str
    heard_at: float


class JobPart(Struct, frozen=True, kw_only=True):
    """Which part of a job of several nodes this run was."""

    number: int
    name: str
    job: str | None = None
    """The same for all parts: the step of Slurm, as `4711.0`; after a requeue `4711.0+1`."""
    num_ranks: Natural
    """Of the whole job."""
    ranks: dict[str, int]
    """Worker of this node -> its rank."""
    hosts: dict[str, str]
    """Name of each node, in their order -> its host."""
    agreed_steps: int | None = None
    """At so many steps the nodes of each kind had the same bits: the first node compares them; null
    on all others."""

    def called(self, worker: str) -> str:
        return of_node(worker, self.name, self.ranks.get(worker))


def of_node(worker: str, node: str, rank: int | None) -> str:
    """`GPU3 on n2 (rank 11)`"""
    return f"{worker} on {node}" + ("" if rank is None else f" (rank {rank})")
