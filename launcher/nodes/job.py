"""One job on all places: what it cannot be asked for, and where its ranks find each other: a port
of loopback that is taken before they start, so that nobody else can take it, and two jobs on one
machine never meet. Rank 0 is the one that listens there: until it comes, the others are refused."""

import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from launcher.plan import Meeting, Place
from model_check.config.ranks import check_ranks
from model_check.config.resume import acting_settings
from model_check.config.schema import Settings
from model_check.errors import ConfigError, InternalError, UsageError
from model_check.utils.project_files import version
from model_check.utils.slurm import SlurmStep, first_address
from model_check.utils.worker_env import MASTER_ADDR, MASTER_PORT

if TYPE_CHECKING:
    from launcher.nodes.nodes import Nodes

_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_DRILL = "debug.drill"
"""The one setting of those that act that nodes may have of their own: a fault is one node's."""
_RESUME = "training.resume"
_NOT_IN_A_JOB = "--mode {} runs one job, and {}: leave it out, or run --mode replicate"


def check_job(
    settings: Settings, places: Sequence[Place], command: Sequence[str], num_nodes: int = 1
) -> None:
    """As far as one node can tell. Raises UsageError or ConfigError."""
    launch, mode = settings.launch, settings.launch.mode
    if command:
        raise UsageError(
            f"--mode {mode} is for our trainer: a command of your own is a job by its own launcher "
            f"(torchrun), or runs on every GPU alone without --mode {mode}"
        )
    if launch.golden is not None:
        why = "launch.golden holds isolated workers against it"
        raise ConfigError(_NOT_IN_A_JOB.format(mode, why))
    if launch.on_suspect == "continue":
        why = "no rank goes on without another one (on_suspect)"
        raise ConfigError(_NOT_IN_A_JOB.format(mode, why))
    if slices := [place.name for place in places if place.gpu and place.gpu.mig_index is not None]:
        raise ConfigError(
            f"--mode {mode}: NCCL joins whole GPUs; {', '.join(slices)}: MIG instances"
        )
    if num_nodes == 1:
        check_ranks(settings, len(places))
    elif launch.repeat is not None or launch.soak_s > 0:
        # Each node would decide by what it saw, and by its own clock, whether there is another one.
        raise ConfigError(
            "launch.repeat and launch.soak_s: a job on several nodes has no rounds; leave them "
            "out, and repeat srun itself"
        )


def nodes_of_job(environ: Mapping[str, str]) -> SlurmStep | None:
    """The step of Slurm whose launchers, one a node, make one job; None: the job is this node's
    alone. Raises ConfigError."""
    step = SlurmStep.from_environ(environ)
    if step is None:
        return None
    if step.num_tasks != step.num_nodes:
        raise ConfigError(
            f"srun started {step.num_tasks} launchers on {step.num_nodes} "
            f"node{'s' if step.num_nodes > 1 else ''}, and each of them starts all ranks of its "
            "node itself: srun --ntasks-per-node=1 bash run.sh ..."
        )
    return step


def note_on_nodes(environ: Mapping[str, str], step: SlurmStep | None, num_here: int) -> str | None:
    """For the plan of a job: its nodes, or those that it leaves out."""
    if step is not None:
        first, total = step.node * num_here, step.num_nodes * num_here
        last = first + num_here - 1
        ranks = f"rank {first}" if num_here == 1 else f"ranks {first} to {last}"
        return (
            f"node {step.names[step.node]}, {step.node + 1} of the {step.num_nodes} of Slurm step "
            f"{step.key}: {ranks} of {total}, if each has as many; the first is {step.names[0]}"
        )
    num_nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_STEP_ID" in environ or num_nodes == "1":
        return None
    return (
        f"this Slurm job has {num_nodes} nodes, and this launcher works on one: `srun "
        "--ntasks-per-node=1 bash run.sh ...` starts one on each, as one job"
    )


def join_nodes(
    step: SlurmStep,
    settings: Settings,
    groups: Mapping[str, str],
    torch: str | None,
    environ: Mapping[str, str],
    silence_s: float,
    part: str,
) -> "Nodes":
    """This launcher's place among those of the job, which nobody knows yet. Raises ConfigError.

    `groups`: worker -> its kind. `part`: which round or restart: another one's launchers may still
    be leaving.
    """
    # A run on one machine does not wait for these imports.
    from launcher.nodes.messages import Join
    from launcher.nodes.nodes import Nodes

    # Where a job goes on, the first node chooses from where, for all.
    of_a_node = (_DRILL, _RESUME) if part else (_DRILL,)
    join = Join(
        node=step.node,
        job=name_of_meeting(step, part),
        name=step.names[step.node],
        host=platform.node(),
        workers=list(groups),
        kind=kinds.pop() if len(kinds := {*groups.values()}) == 1 else None,
        torch=torch,
        settings={**acting_settings(msgspec.to_builtins(settings)), **dict.fromkeys(of_a_node)},
        version=version(),
        resume=settings.training.resume if part else None,
    )
    address, port = meeting_place(step, environ)
    return Nodes(step, join, address, port, silence_s)


def meeting_place(step: SlurmStep, environ: Mapping[str, str]) -> tuple[str, int]:
    """Of the launchers of a job. Raises ConfigError."""
    address = environ.get(MASTER_ADDR) or first_address(environ) or "127.0.0.1"
    port = environ.get(MASTER_PORT) or str(step.port)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{MASTER_PORT} = {port!r}: no port")
    return address, int(port)


def name_of_meeting(step: SlurmStep, part: str) -> str:
    """`4711.0`, `4711.0 restart_1`"""
    return f"{step.key} {part}".rstrip()


@contextmanager
def open_meeting(address: str | None = None) -> Iterator[Meeting]:
    """Taken until the ranks are gone. `address`: of this machine, where ranks on other nodes come
    to, or of all its addresses, where that one is translated on the way here; None: on loopback.
    Raises InternalError where no port is free."""
    places = _LOOPBACKS
    if address is not None:
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        places = ((family, str(place[0])), (family, "::" if family == socket.AF_INET6 else ""))
    with _taken(places) as taken:
        host, port = taken.getsockname()[:2]
        yield Meeting(address or host, port, taken.fileno())


def _taken(places: Sequence[tuple[socket.AddressFamily, str]]) -> socket.socket:
    for family, address in places:
        with suppress(OSError), ExitStack() as stack:
            taken = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            taken.bind((address, 0))
            stack.pop_all()
            return taken
    where = " or ".join(address or "any address" for _, address in places)
    raise InternalError(f"no port is free on {where}, where ranks find each other")
