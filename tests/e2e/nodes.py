"""Several nodes on one machine: each is a network namespace with an end of a veth pair, in which a
launcher, or torchrun, runs as on a machine of its own. They share the file system."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher, Run

NETWORK = "10.213.7"
PORT = 29_511
_NOBODY = "02:00:00:00:00:01"
"""A link address that no interface here has: what is sent there is lost in silence."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=DEADLINE_S)


@dataclass(frozen=True)
class Node:
    """Where a launcher runs, and how its network is reached."""

    number: int
    namespace: str | None = None
    """None: on this machine's own loopback."""

    @property
    def name(self) -> str:
        """Slurm's."""
        return f"n{self.number + 1}"

    @property
    def address(self) -> str:
        return "127.0.0.1" if self.namespace is None else f"{NETWORK}.{self.number + 1}"

    @property
    def interface(self) -> str:
        return f"{self.namespace}v"

    def inside(self, *command: str) -> list[str]:
        return [
            *(() if self.namespace is None else ("ip", "netns", "exec", self.namespace)),
            *command,
        ]

    def cut(self) -> None:
        """Pull the cable."""
        assert self.namespace is not None
        ip("-n", self.namespace, "link", "set", self.interface, "down")

    def lose(self, other: "Node") -> None:
        """From now on what is sent to the other one is lost, and nothing says so."""
        assert self.namespace is not None
        where = (other.address, "lladdr", _NOBODY, "dev", self.interface, "nud", "permanent")
        ip("-n", self.namespace, "neigh", "replace", *where)


def pids_on(node: Node) -> list[int]:
    """Every process that runs there."""
    told = subprocess.run(
        ["ip", "netns", "pids", str(node.namespace)], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in told.stdout.split()]


LOOPBACK = (Node(0), Node(1))


def hooked(directory: Path, code: str) -> dict[str, str]:
    """The environment of a launcher, and of its ranks, in which this is run first."""
    (directory / "hooks").mkdir()
    (directory / "hooks" / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{directory / 'hooks'}:{ROOT}"}


@contextmanager
def cable() -> Iterator[tuple[Node, Node]]:
    """Two nodes, joined by a veth pair."""
    one, two = (Node(number, f"mc{os.getpid()}n{number}") for number in range(2))
    names = [str(node.namespace) for node in (one, two)]
    try:
        for name in names:
            ip("netns", "add", name)
        veth = ("type", "veth", "peer", "name", two.interface, "netns", names[1])
        ip("link", "add", one.interface, "netns", names[0], *veth)
        for node, name in zip((one, two), names, strict=True):
            ip("-n", name, "addr", "add", f"{node.address}/24", "dev", node.interface)
            for interface in ("lo", node.interface):
                ip("-n", name, "link", "set", interface, "up")
        yield one, two
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=DEADLINE_S)


@dataclass
class Job:
    """One job, whose part on each node a launcher or torchrun starts."""

    launcher: Launcher
    nodes: Sequence[Node] = LOOPBACK
    number: str = field(default_factory=lambda: str(os.getpid()))
    step: str = "0"
    _node_of: dict[int, int] = field(default_factory=dict)

    def slurm(self, node: Node) -> dict[str, str]:
        """What Slurm tells the one task of a node."""
        return {
            "SLURM_JOB_ID": self.number,
            "SLURM_STEP_ID": self.step,
            "SLURM_STEP_NUM_NODES": str(len(self.nodes)),
            "SLURM_STEP_NUM_TASKS": str(len(self.nodes)),
            "SLURM_STEP_NODELIST": f"n[1-{len(self.nodes)}]",
            "SLURM_NODEID": str(node.number),
            "SLURM_PROCID": str(node.number),
            "SLURM_LOCALID": "0",
            "MASTER_ADDR": self.nodes[0].address,
        }

    def start(
        self, *more: str, workers: int = 1, only: Node | None = None, **env: str
    ) -> "list[subprocess.Popen[str]]":
        """A launcher on each node, as srun does."""
        arguments = self.launcher.arguments("--mode", "ddp", "--workers", str(workers), *more)
        started = self.nodes if only is None else [only]
        return [self._start(node, arguments, self.slurm(node) | env) for node in started]

    def torchrun(
        self, *more: str, per_node: int = 1, only: Node | None = None, **env: str
    ) -> "list[subprocess.Popen[str]]":
        """One on each node."""
        first = self.nodes[0].address
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{PORT}")
        program = (str(ROOT / "pretrain_main.py"), "--config", str(self.launcher.config))
        return [
            self._start(
                node,
                [
                    *(sys.executable, "-m", "torch.distributed.run", *rendezvous),
                    *(f"--nnodes={len(self.nodes)}", f"--nproc-per-node={per_node}"),
                    *(
                        f"--local-addr={node.address}",
                        "--rdzv-conf=is_host=" + str(not node.number),
                    ),
                    *(*program, *more),
                ],
                {"OMP_NUM_THREADS": "1"} | env,
            )
            for node in (self.nodes if only is None else [only])
        ]

    def _start(
        self, node: Node, command: list[str], env: dict[str, str]
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            node.inside(*command),
            cwd=self.launcher.cwd,
            env=self.launcher.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.launcher.started.append(process)
        self._node_of[process.pid] = node.number
        return process

    def finish(self, processes: "Sequence[subprocess.Popen[str]]", *seen: str) -> list[Run]:
        """Of each node. Whoever hangs is killed and fails the test. `seen`: what was read of each
        by now."""
        outputs: list[str] = []
        try:
            for process in processes:
                outputs.append(process.communicate(timeout=DEADLINE_S)[0])
        except subprocess.TimeoutExpired:
            for process in processes:
                os.killpg(process.pid, signal.SIGKILL)
            raise
        seen = (*seen, *[""] * (len(outputs) - len(seen)))
        return [
            Run(
                process.returncode,
                before + output,
                self.directory(self._node_of[process.pid]),
                self.launcher.cwd,
            )
            for process, before, output in zip(processes, seen, outputs, strict=True)
        ]

    def directory(self, node: int) -> Path:
        return self.launcher.cwd / "run" / f"node_{node}"

    def __call__(self, *more: str, **options: int) -> list[Run]:
        return self.finish(self.start(*more, **options))
