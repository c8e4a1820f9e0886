"""A Slurm of several nodes on this machine: Debian's own daemons, as root.

Each machine of it (the controller with munge, every node) is a bash in a pid namespace of its own,
with a host name of its own. It waits for the end of its stdin, of which this process holds the
other end: when this process ends, however it does, the kernel kills all that ever ran there. Files
are below one directory, which the machines see as /etc/slurm, too, and a machine's own directory in
it (`n1`) as /etc/slurm/own; ports are free ones.
"""

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.deadline import DEADLINE_S
from tests.ports import free_port

CONTROL = "control"
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "unshare")
MACHINE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")
DAEMONS_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_MOUNTS = "mount --bind {name} own\nmount --rbind . /etc/slurm\n"
_CONTROLLER = """\
munged --foreground --force --key-file=munge.key --socket=$PWD/munge.socket \
    --pid-file=$PWD/munge.pid --seed-file=$PWD/munge.seed &
until [[ -S munge.socket ]]; do sleep 0.01; done
slurmctld -D -c -f $PWD/slurm.conf &
"""
_NODE = "slurmd -D -N {name} -f $PWD/slurm.conf &\n"
_CONF = """\
ClusterName=model-check
SlurmctldHost={control}({address})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/control.pid
SlurmdPidFile={directory}/%n.pid
SlurmdLogFile={directory}/%n.slurmd.log
SlurmctldLogFile={directory}/slurmctld.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO
"""


@dataclass(frozen=True)
class Node:
    """A node of the cluster, and where on the network it is."""

    name: str
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()
    """The command that starts a process where this address is: `ip netns exec NAME`."""
    cpus: int = 2


@dataclass
class Cluster:
    """Started by `started`; `directory` holds its files, the daemons' logs among them."""

    directory: Path
    nodes: Sequence[Node]
    control: Node
    ports: Mapping[str, int]
    """Machine -> the port of its daemon."""
    _machines: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _restarted: set[str] = field(default_factory=set)

    @property
    def environ(self) -> dict[str, str]:
        """What srun, sbatch and scontrol need to find it."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(
        self, *command: str | Path, deadline_s: float = DEADLINE_S, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """A finished command of Slurm's (`srun`, ...); its output as a terminal would show it."""
        return subprocess.run(
            self.control.enter + tuple(map(str, command)),
            env={**os.environ, **self.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s,
        )

    def told(self, *command: str | Path) -> str:
        """What a command that must succeed says."""
        done = self.run(*command)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def state(self, node: str) -> str:
        """`idle`, `allocated`, `drained`, ...; with a mark (`idle*`) where it does not answer."""
        return self.told("sinfo", "--noheader", "--nodes", node, "--format", "%T")

    def reason(self, node: str) -> str:
        """Why it takes no jobs; `none`."""
        return self.told("sinfo", "--noheader", "--nodes", node, "--format", "%E")

    def wait_for(self, what: str, is_so: Callable[[], bool], deadline_s: float = 100) -> None:
        """Fails, with what the daemons wrote, where it is not so by then."""
        until = time.monotonic() + deadline_s
        while not is_so():
            assert time.monotonic() < until, f"not {what}\n{self.logs()}"
            time.sleep(0.02)

    def wait_for_state(self, node: str, *states: str, deadline_s: float = 100) -> None:
        is_so = lambda: self.state(node) in states  # noqa: E731
        self.wait_for(f"{node} {' or '.join(states)}", is_so, deadline_s)

    def wait_until_idle(self) -> None:
        for node in self.nodes:
            self.wait_for_state(node.name, "idle")

    @contextmanager
    def configured(self, **lines: str | Path | int) -> Iterator[None]:
        """`Prolog=...` and its like in slurm.conf for a while. Then every node is idle again."""
        conf = self.directory / "slurm.conf"
        before = conf.read_text()
        conf.write_text(before + "".join(f"{name}={value}\n" for name, value in lines.items()))
        self.told("scontrol", "reconfigure")
        try:
            yield
        finally:
            conf.write_text(before)
            self.told("scontrol", "reconfigure")
            self.recover()

    def recover(self) -> None:
        """End all jobs, and take every node into service again."""
        self.told("scancel", "--user=root")
        for node in self.nodes:
            if node.name in self._restarted:  # else its jobs, of which it knows nothing, stay
                self._update(node.name, "state=down", "reason=restarted")
        self._restarted.clear()
        for node in self.nodes:
            self.wait_for(f"{node.name} without a job", lambda node=node: self._is_free(node.name))
            if self.state(node.name) != "idle":
                self._update(node.name, "state=resume")
        self.wait_until_idle()

    def _update(self, node: str, *what: str) -> None:
        self.told("scontrol", "update", f"nodename={node}", *what)

    def _is_free(self, node: str) -> bool:
        return self.told("squeue", "--noheader", "--nodelist", node) == ""

    def pids(self, name: str) -> list[int]:
        """All processes of a machine, as this process sees them; its bash is the first."""
        (first,) = _children(self._machines[name].pid)
        home = os.readlink(f"/proc/{first}/ns/pid")
        return [first, *(pid for pid in _all_pids() if pid != first and _namespace(pid) == home)]

    def start(self, name: str) -> None:
        """Switch a machine on: the controller or a node."""
        machine = next(node for node in (self.control, *self.nodes) if node.name == name)
        daemons = _CONTROLLER if machine is self.control else _NODE.format(name=name)
        script = f"hostname {name}\n{_MOUNTS.format(name=name)}{daemons}read -r _\n"
        with (self.directory / f"{name}.out").open("ab") as out:
            self._machines[name] = subprocess.Popen(
                [*machine.enter, *MACHINE, "bash", "-c", script],
                cwd=self.directory,
                env={"PATH": DAEMONS_PATH, "LC_ALL": "C.UTF-8"},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is not theirs
            )

    def stop(self, name: str) -> None:
        """Switch a machine off: every process of it is gone on return."""
        self._restarted.add(name)
        with self._machines.pop(name) as process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(DEADLINE_S)

    def write_conf(self) -> None:
        text = _CONF.format(
            control=CONTROL,
            address=self.control.address,
            port=self.ports[CONTROL],
            directory=self.directory,
        )
        for node in self.nodes:
            text += (
                f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} "
                f"Port={self.ports[node.name]} CPUs={node.cpus} RealMemory=1000 State=UNKNOWN\n"
            )
        (self.directory / "slurm.conf").write_text(text)

    def logs(self) -> str:
        """The end of what each daemon wrote."""
        paths = [*self.directory.glob("*.out"), *self.directory.glob("*.log")]
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(paths)
        )


@contextmanager
def started(
    directory: Path, nodes: Sequence[Node], control: Node = Node(CONTROL)
) -> Iterator[Cluster]:
    """A cluster whose nodes are idle. It is gone, with all that ran in it, at the end."""
    names = [control.name, *(node.name for node in nodes)]
    ports = {name: free_port() for name in names}
    cluster = Cluster(directory, nodes, control, ports)
    for name in ("state", "own", *names):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    cluster.write_conf()
    with ExitStack() as running:
        for name in names:
            cluster.start(name)
            running.callback(lambda name=name: name in cluster._machines and cluster.stop(name))
        cluster.wait_for("a controller", lambda: cluster.run("sinfo").returncode == 0)
        cluster.wait_until_idle()
        yield cluster


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
