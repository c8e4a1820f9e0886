"""What this node's supervisor tells the other nodes of its job: which of its ranks failed, and why
it ends its part."""

from collections.abc import Sequence

from launcher.supervise import policy
from launcher.supervise.outcome import OtherNodes
from launcher.supervise.policy import WorkerView
from launcher.verdict.record import Stop
from model_check.errors import EXIT_NON_FINITE, describe_exit
from model_check.utils.requests import request_of


def tell_failures(workers: Sequence[WorkerView], nodes: OtherNodes) -> None:
    """At once: the order in which they are told decides who was first, and the others wait for what
    is known, while evidence is saved here. A request that a rank followed is told with the end, if
    it is one."""
    for worker in policy.suspects(workers):
        code, peer_lost = policy.exit_code(worker), policy.lost_a_peer(worker)
        if peer_lost or request_of(code) is None:
            what = (step_of(worker), _cause(worker, code), code)
            nodes.tell_failure(worker.name, *what, peer_lost=peer_lost)


def tell_end(stop: Stop, workers: Sequence[WorkerView], nodes: OtherNodes) -> None:
    """Why our part of the job ends."""
    known = {worker.name: worker for worker in workers}
    reason = str(stop.reason)
    for name in stop.culprits:
        cause = reason.removeprefix(f"{name} failed first: ").removeprefix(f"{name} ")
        nodes.tell_failure(name, step_of(known[name]), cause, stop.exit_code)
    if stop.culprits:
        return
    nodes.tell_failure(
        *(None, None, reason, stop.exit_code),
        signum=None if stop.tied else request_of(stop.exit_code),
        is_deadline=stop.is_deadline,
    )


def step_of(worker: WorkerView) -> int | None:
    """In which it failed."""
    if worker.confession is not None:
        return worker.confession.step
    return None if worker.last_step is None else worker.last_step + 1


def _cause(worker: WorkerView, exit_code: int) -> str:
    said = worker.spawn_error or worker.error
    if said:
        return said.strip().splitlines()[0]
    if exit_code == EXIT_NON_FINITE:
        return "it met a NaN or Inf"
    return describe_exit(worker.returncode or exit_code)
