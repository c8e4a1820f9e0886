"""What Slurm tells a process of the step that it is a task of: which nodes, and where their ranks
meet. Slurm's names of variables; `scontrol` is asked only for an address that no resolver knows."""

import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress

from msgspec import Struct

from model_check.errors import ConfigError

NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PORTS = (20_000, 12_000)
"""The first port that the ranks, or the launchers, of a step meet at, and how many there are: below
those that Linux gives to outgoing connections."""
_PORTS_OF_STEPS = 7417
"""From the port of a step of a Slurm job to that of the next: neither jobs nor steps that run at
once, whose numbers are close to each other, get the same."""
_SCONTROL_S = 10.0
_ITEM = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_MOST_NODES = 100_000


class SlurmStep(Struct, frozen=True):
    """The step that this process is a task of."""

    key: str
    """`4711.0`; `4711.0+1` when the job was requeued: the tasks of another one are strangers."""
    node: int
    """Number of this node in the step, from 0."""
    num_nodes: int
    num_tasks: int
    names: tuple[str, ...]
    """Of its nodes, in the order of their numbers."""
    port: int
    """Where its processes meet, at the address of the first node."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "SlurmStep | None":
        """None: this process is no task of a step, or its only one. Raises ConfigError for
        variables that contradict each other."""
        if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
            return None
        num_nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
        num_tasks = _number(environ, "SLURM_STEP_NUM_TASKS", num_nodes)
        if num_tasks == 1:
            return None
        names = tuple(expand(_nodelist(environ))) or (socket.gethostname(),)
        node = _number(environ, "SLURM_NODEID", 0)
        if len(names) != num_nodes or node >= num_nodes:
            raise ConfigError(
                f"SLURM_STEP_NUM_NODES = {num_nodes}, SLURM_NODEID = {node}, and the list of nodes "
                f"is {_nodelist(environ)!r}: these contradict each other"
            )
        return cls(step_key(environ), node, num_nodes, num_tasks, names, step_port(environ))


def expand(nodelist: str) -> Iterator[str]:
    """`gpu[08-10],login` -> gpu08, gpu09, gpu10, login. Raises ConfigError."""
    for number, name in enumerate(_expand(nodelist)):
        if number >= _MOST_NODES:
            raise ConfigError(f"{nodelist[:80]!r}: more than {_MOST_NODES} nodes")
        yield name


def tasks_on_node(environ: Mapping[str, str]) -> int | None:
    """Of the step, on this node: `2(x3),1` means 2 on each of three nodes and 1 on the last. (Not
    SLURM_NTASKS_PER_NODE: srun tells what was asked for, also where it could not honour it.) None:
    Slurm does not tell. Raises ConfigError."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    left = _number(environ, "SLURM_NODEID", 0)
    for item in text.split(",") if text else ():
        if (found := _TASKS.fullmatch(item)) is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE = {text[:80]!r}: Slurm writes 2(x3),1")
        left -= int(found[2] or 1)
        if left < 0:
            return int(found[1])
    return None


def first_address(environ: Mapping[str, str]) -> str | None:
    """A name or an address of the step's first node, which this machine can connect to; None: no
    list of nodes is told. Raises ConfigError."""
    name = next(_expand(_nodelist(environ)), None)
    if name is None:
        return None
    with suppress(OSError):
        socket.getaddrinfo(name, None)
        return name
    return _asked_of_slurm(name)


def step_key(environ: Mapping[str, str]) -> str:
    """Empty: no step."""
    if "SLURM_STEP_ID" not in environ:
        return ""
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    again = "" if restarts in ("", "0") else f"+{restarts}"
    return f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}{again}"


def step_port(environ: Mapping[str, str]) -> int:
    """Of a step: a job may run several at once."""
    first, count = _PORTS
    job, step = (
        int(text) if (text := environ.get(name, "")).isdigit() else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    return first + (job + _PORTS_OF_STEPS * step) % count


def _nodelist(environ: Mapping[str, str]) -> str:
    return next(filter(None, (environ.get(name) for name in NODELISTS)), "")


def _expand(nodelist: str) -> Iterator[str]:
    if nodelist.count("[") != nodelist.count("]"):
        raise _no_list(nodelist)
    for item in _ITEM.findall(nodelist):
        head, bracket, rest = item.partition("[")
        if not bracket:
            yield item
            continue
        ranges, _, tail = rest.partition("]")
        ends = [*_expand(tail)] or [""]
        yield from (f"{head}{number}{end}" for number in _numbers(ranges, nodelist) for end in ends)


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    """`08-10,12` -> 08, 09, 10, 12: as wide as they are written."""
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit()):
            raise _no_list(nodelist)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


def _no_list(nodelist: str) -> ConfigError:
    return ConfigError(f"{nodelist[:80]!r}: no list of nodes that Slurm would write")


def _asked_of_slurm(name: str) -> str:
    """What slurm.conf calls NodeAddr."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["scontrol", "show", "node", name],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_S,
        )
        if (found := _ADDRESS.search(done.stdout)) is not None:
            return found[1]
    raise ConfigError(
        f"{name}: the step's first node has a name that this machine cannot resolve, and scontrol "
        "knows no address of it: set MASTER_ADDR to one"
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ConfigError(f"{name} = {text!r}: not a number")
    return int(text)
