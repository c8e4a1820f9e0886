"""Which scheduler started this launcher, and what it calls this machine: the name that `report
--drain` needs. Pure."""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class StartedBy(NamedTuple):
    scheduler: Literal["slurm", "kubernetes"] | None
    node: str | None


def started_by(environ: Mapping[str, str]) -> StartedBy:
    """SLURMD_NODENAME is Slurm's own, in jobs and in prologs; NODE_NAME is what the pod's manifest
    gives by the downward API (spec.nodeName), since a pod's host name is not its node's."""
    if node := environ.get("SLURMD_NODENAME"):
        return StartedBy("slurm", node)
    if "KUBERNETES_SERVICE_HOST" in environ:
        return StartedBy("kubernetes", environ.get("NODE_NAME") or None)
    return StartedBy(None, None)
