"""Which process runs what, where, with which environment. Pure: starts nothing, reads nothing."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from launcher import run_dir
from launcher.gpus.probe import Gpu
from launcher.verdict.own_command import CheckedCommand
from model_check.config.load import ENVIRONMENT
from model_check.utils import wire, worker_env
from model_check.utils.project_files import PROJECT

_INTERACTIVE = ("PYTHONINSPECT", "PYTHONSTARTUP")
"""They would keep a Python that has ended alive, at a prompt that nobody sees."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_MOST_COMPILE_THREADS = 32
PYTHONPATH_BEFORE = "MODEL_CHECK_PYTHONPATH_BEFORE"
"""What PYTHONPATH was before run.sh put this project first: a foreign command gets it back."""


class WorkerSpec(Struct, frozen=True):
    """One process to start: all that the supervisor must know of it."""

    name: str
    """`GPU3`, `CPU0`, `prepare`: its name in messages."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The complete environment, but for the file descriptor of the event socket."""
    log_path: Path
    events_path: Path | None = None
    """Where its events are appended, a JSON object a line; None: it has no event socket."""
    stacks_path: Path | None = None
    """Where the worker's stacks are written when the run hangs; None: nowhere."""
    prefix: str | None = None
    """The beginning of each of its lines on the terminal; None: `[name] `."""
    cpus: frozenset[int] = field(default_factory=frozenset)
    """CPU affinity; empty: inherited."""
    announces_itself: bool = False
    """Its first event says that it can take signals. Before that event a signal would kill it."""
    inherited_fds: tuple[int, ...] = ()
    """Descriptors of ours that it gets, under their numbers."""


class Place(Struct, frozen=True):
    """Where one worker runs: a GPU, or a numbered slot of the CPU."""

    name: str
    index: int
    gpu: Gpu | None = None

    @property
    def kind(self) -> str:
        """Workers on places of one kind are compared bit for bit. In whole GiB: boards of one model
        differ by a few MiB that the driver takes."""
        if self.gpu is None:
            return "cpu"
        gib = None if self.gpu.total_mib is None else round(self.gpu.total_mib / 1024)
        return f"{self.gpu.name} {'unknown memory' if gib is None else f'{gib} GiB'}"


class Meeting(Struct, frozen=True):
    """Where the ranks of a job find each other: a port that is taken."""

    address: str
    port: int
    fd: int | None
    """The socket that is bound to it; rank 0 gets it. None: rank 0 is on another node."""


class LaunchContext(Struct, frozen=True):
    """What every worker of a run has in common."""

    environ: Mapping[str, str]
    run_dir: Path
    num_cores: int
    is_busy: bool = False
    """Other processes work on these cores."""
    token_cache: Path | None = None
    held: frozenset[str] = frozenset()
    """The workers that are told which step they may begin."""
    num_ranks: int | None = None
    """Of one job, whose ranks the workers are; None: they train isolated."""
    first_rank: int = 0
    """The number of the first worker, where other nodes have ranks of the job, too."""
    has_other_nodes: bool = False
    node: int = 0
    """Its number among those."""
    meeting: Meeting | None = None
    """Where these find each other; None: none of them is to start."""
    comparison: Path | None = None
    """The directory of the comparison that this training is of: its checkpoint directory is its
    own."""


def gpu_places(gpus: Sequence[Gpu]) -> list[Place]:
    return [Place(gpu.label, gpu.index, gpu) for gpu in gpus]


def cpu_places(count: int, first: int = 0) -> list[Place]:
    return [Place(f"CPU{index}", index) for index in range(first, first + count)]


def plan_training(places: Sequence[Place], context: LaunchContext) -> list[WorkerSpec]:
    """The same training on every place: isolated processes, identical settings; or the ranks of
    one job."""
    argv = _program("pretrain_main.py", context)
    specs = [_spec(p, argv, _trainer_env(p, len(places), context), context) for p in places]
    specs = [replace(spec, announces_itself=True) for spec in specs]
    if context.num_ranks is None:
        return specs
    return [_as_rank(at, spec, places, context) for at, spec in enumerate(specs)]


def _as_rank(
    local_rank: int, spec: WorkerSpec, places: Sequence[Place], context: LaunchContext
) -> WorkerSpec:
    """With all GPUs in sight: NCCL joins no others."""
    meeting, rank = context.meeting, context.first_rank + local_rank
    env = dict(spec.env)
    if not context.has_other_nodes:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # this host's name may mean another interface
    env |= {
        worker_env.RANK: str(rank),
        worker_env.LOCAL_RANK: str(local_rank),
        worker_env.WORLD_SIZE: str(context.num_ranks),
        worker_env.LOCAL_WORLD_SIZE: str(len(places)),
        worker_env.GROUP_RANK: str(context.node),
        "CUDA_VISIBLE_DEVICES": ",".join(place.gpu.uuid for place in places if place.gpu),
    }
    if meeting is None:
        return replace(spec, env=env)
    inherited = () if rank > 0 or meeting.fd is None else (meeting.fd,)
    env |= {
        worker_env.MASTER_ADDR: meeting.address,
        worker_env.MASTER_PORT: str(meeting.port),
        worker_env.STORE_FD: "".join(map(str, inherited)),
    }
    return replace(spec, env=env, inherited_fds=inherited)


class ReplayPlan(Struct, frozen=True):
    """What the workers of a replay compute again."""

    to_step: int
    number: int
    """Which replay of its run this is, from 1."""
    resume: Path | None = None
    """The checkpoint that they begin with; None: the start."""
    command: Sequence[str] = ()
    """A command of a person's own, which begins at its start; empty: our trainer."""
    check: CheckedCommand | None = None
    """How that is compared."""


def plan_replay(
    places: Sequence[Place], num_workers: int, context: LaunchContext, replay: ReplayPlan
) -> list[WorkerSpec]:
    """A part of what `num_workers` computed, again on some of their places."""
    directory = context.run_dir
    return [
        replace(
            spec,
            log_path=directory / f"{spec.name.lower()}.replay{replay.number}.log",
            events_path=directory / f"{spec.name.lower()}.replay{replay.number}.events.jsonl",
            prefix=f"[{spec.name} replay] ",
        )
        for spec in _replaying(places, num_workers, context, replay)
    ]


def _replaying(
    places: Sequence[Place], num_workers: int, context: LaunchContext, replay: ReplayPlan
) -> list[WorkerSpec]:
    if replay.check is not None:
        check = replace(replay.check, max_steps=replay.to_step + 1)
        specs = plan_command(places, replay.command, context, check, num_workers)
        return [replace(spec, env={**spec.env, wire.REPLAY: "1"}) for spec in specs]
    resume = "null" if replay.resume is None else str(replay.resume)
    argv = _program("pretrain_main.py", context)
    argv += ("--replay-to", str(replay.to_step), f"training.resume={resume}")
    specs = [_spec(p, argv, _trainer_env(p, num_workers, context), context) for p in places]
    return [replace(spec, announces_itself=True) for spec in specs]


def plan_command(
    places: Sequence[Place],
    command: Sequence[str],
    context: LaunchContext,
    check: CheckedCommand | None = None,
    num_workers: int | None = None,
) -> list[WorkerSpec]:
    """A foreign command on every place: same pinning and logs, its own PYTHONPATH. `check`: its
    workers are compared; None: they are not. `num_workers`: those of the run; None: one a place."""
    argv, specs = tuple(command), []
    for place in places:
        env = _command_env(place, num_workers or len(places), context)
        if check is not None:
            env |= _instruments(check, env, is_held=place.name in context.held)
        specs.append(_spec(place, argv, env, context))
    return specs


def _instruments(check: CheckedCommand, env: Mapping[str, str], *, is_held: bool) -> dict[str, str]:
    """What makes a Python that imports torch tell its steps, besides `env`."""
    site = str(PROJECT / "model_check" / "instrument" / "site")
    told = {
        "PYTHONPATH": os.pathsep.join(filter(None, [site, env.get("PYTHONPATH")])),
        # The order of sets of strings, and with it that of parameters or files, may hang on it.
        "PYTHONHASHSEED": env.get("PYTHONHASHSEED", "0"),
        wire.INSTRUMENT: str(PROJECT),
    }
    if is_held:
        told[wire.HELD] = "1"
    if check.seed is not None:
        told[wire.SEED] = str(check.seed)
    if check.deterministic:
        told[wire.DETERMINISTIC] = "1"
        # On several streams cuBLAS repeats its bits only with a workspace of fixed size.
        told["CUBLAS_WORKSPACE_CONFIG"] = env.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if check.max_steps is not None:
        told[wire.STOP_AFTER] = str(check.max_steps - 1)
    return told


def plan_prepare(context: LaunchContext) -> WorkerSpec:
    """The one process that builds or finds the token cache; it alone may talk to the hub."""
    directory = context.run_dir
    env = _own_env(_base_env(context)) | {"CUDA_VISIBLE_DEVICES": ""}
    if context.num_ranks is not None:
        env[worker_env.WORLD_SIZE] = str(context.num_ranks)
    return WorkerSpec(
        name="prepare",
        argv=(*_program("prepare_dataset.py", context), "--result", str(directory / "data.json")),
        env=env,
        log_path=directory / "prepare.log",
        stacks_path=worker_env.stacks_path(directory, "prepare"),
        prefix="[launcher] ",
    )


def _program(script: str, context: LaunchContext) -> tuple[str, ...]:
    """A program of ours with the settings of the run."""
    config = context.run_dir / "config.json"
    return (sys.executable, str(PROJECT / script), "--config", str(config))


def _spec(
    place: Place, argv: tuple[str, ...], env: dict[str, str], context: LaunchContext
) -> WorkerSpec:
    stem = place.name.lower()
    return WorkerSpec(
        name=place.name,
        argv=argv,
        env=env,
        log_path=context.run_dir / f"{stem}.log",
        events_path=context.run_dir / f"{stem}.events.jsonl",
        stacks_path=worker_env.stacks_path(context.run_dir, place.name),
        cpus=place.gpu.cpus if place.gpu else frozenset(),
    )


def _trainer_env(place: Place, num_workers: int, context: LaunchContext) -> dict[str, str]:
    env = _own_env(_worker_env(place, num_workers, context))
    # The data is prepared: no worker needs the secret.
    env.pop("HF_TOKEN", None)
    if context.is_busy and THREAD_VARIABLES[0] not in context.environ:
        # A thread that waits by spinning takes the core that the thread it waits for needs: beside
        # two other processes on two cores, 0.8 of the rate of one thread, and 1.5 with this. On an
        # idle machine it costs a sixth. It changes no bits.
        env.setdefault("OMP_WAIT_POLICY", "passive")
    if place.gpu and not worker_env.ALLOCATOR_VARIABLES & env.keys():
        env |= worker_env.ALLOCATOR
    if context.comparison and num_workers == 1:
        env[worker_env.HAS_PLACE] = "1"
    if place.name in context.held:
        env[wire.HELD] = "1"
    if context.token_cache is not None:
        env[worker_env.TOKEN_CACHE] = str(context.token_cache)
    return env


def _own_env(env: dict[str, str]) -> dict[str, str]:
    """`env` without the variables that are settings: their values are in config.json, where the
    command line may have overridden them; and without a place in a job that this launcher itself
    is of."""
    left_out = (*ENVIRONMENT, *_INTERACTIVE, *worker_env.RANK_VARIABLES)
    return {name: value for name, value in env.items() if name not in left_out}


def _command_env(place: Place, num_workers: int, context: LaunchContext) -> dict[str, str]:
    env = _worker_env(place, num_workers, context)
    if (before := env.pop(PYTHONPATH_BEFORE, None)) is not None:
        env.pop("PYTHONPATH", None)
        if before:
            env["PYTHONPATH"] = before
    return env


def _worker_env(place: Place, num_workers: int, context: LaunchContext) -> dict[str, str]:
    env = {
        **thread_variables(context.num_cores // num_workers),  # unless a person decided
        **_base_env(context),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": place.gpu.uuid if place.gpu else "",
        worker_env.GPU_RANK: str(place.index),
        wire.WORKER: place.name,
        worker_env.NUM_WORKERS: str(num_workers),
    }
    if place.gpu:
        env[worker_env.EXPECTED_UUID] = place.gpu.uuid
    return env


def thread_variables(num_cores: int) -> dict[str, str]:
    """The environment of a worker that has so many cores for itself. torch.compile makes a pool of
    processes, by torch's default as many as the machine has cores."""
    threads = max(1, num_cores)
    compile_threads = str(min(_MOST_COMPILE_THREADS, threads))
    of_compile = {"TORCHINDUCTOR_COMPILE_THREADS": compile_threads}
    return dict.fromkeys(THREAD_VARIABLES, str(threads)) | of_compile


def _base_env(context: LaunchContext) -> dict[str, str]:
    return {
        **context.environ,
        "PYTHONUNBUFFERED": "1",
        wire.RUN_DIR: str(context.run_dir),
        worker_env.RUN_NAME: run_dir.name_of(context.run_dir, context.comparison),
    }
