"""Decide who runs what, where, with which environment. Pure: starts nothing, reads nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.gpus.probe import Gpu
from model_check.config.load import ENVIRONMENT
from model_check.utils import worker_env

_INTERACTIVE = ("PYTHONINSPECT", "PYTHONSTARTUP")
"""They would keep a Python alive that has ended, at a prompt that nobody sees."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PYTHONPATH_BEFORE = "MODEL_CHECK_PYTHONPATH_BEFORE"
"""What PYTHONPATH was before run.sh put this project first: a foreign command gets it back."""


class WorkerSpec(Struct, frozen=True):
    """One process to start: what the supervisor must know, and nothing that it must guess."""

    name: str
    """`GPU3`, `CPU0`, `prepare`: how messages call it."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The complete environment, but for the file descriptor of the event socket."""
    log_path: Path
    events_path: Path | None = None
    """Where its events are appended, a JSON object a line; None: it has no event socket."""
    stacks_path: Path | None = None
    """Where it is written what the worker was doing when the run hung; None: nowhere."""
    prefix: str = ""
    """What every line of it begins with on the terminal; empty: `[name] `."""
    cpus: frozenset[int] = field(default_factory=frozenset)
    """CPU affinity; empty: inherited."""
    announces_itself: bool = False
    """Its first event says that it can take signals; before it, they would kill it."""


class Place(Struct, frozen=True):
    """Where one worker runs: a GPU, or a numbered slot of the CPU."""

    name: str
    index: int
    gpu: Gpu | None = None


class Surroundings(Struct, frozen=True):
    """What every worker of a run has in common."""

    root: Path
    """Where pretrain_main.py and prepare_dataset.py lie."""
    python: str
    environ: Mapping[str, str]
    run_dir: Path
    num_cores: int
    token_cache: Path | None = None


def gpu_places(gpus: Sequence[Gpu]) -> list[Place]:
    return [Place(gpu.label, gpu.index, gpu) for gpu in gpus]


def cpu_places(count: int) -> list[Place]:
    return [Place(f"CPU{index}", index) for index in range(count)]


def plan_training(places: Sequence[Place], around: Surroundings) -> list[WorkerSpec]:
    """The same training on every place: isolated processes, identical settings."""
    script, config = around.root / "pretrain_main.py", around.run_dir / "config.json"
    argv = (around.python, str(script), "--config", str(config))
    return [
        replace(
            _spec(place, argv, _trainer_env(place, len(places), around), around),
            announces_itself=True,
        )
        for place in places
    ]


def plan_command(
    places: Sequence[Place], command: Sequence[str], around: Surroundings
) -> list[WorkerSpec]:
    """A foreign command on every place: same pinning and logs, its own PYTHONPATH."""
    return [
        _spec(place, tuple(command), _command_env(place, len(places), around), around)
        for place in places
    ]


def plan_prepare(around: Surroundings) -> WorkerSpec:
    """The one process that builds or finds the token cache; it alone may talk to the hub."""
    run_dir, script = around.run_dir, around.root / "prepare_dataset.py"
    options = ("--config", str(run_dir / "config.json"), "--result", str(run_dir / "data.json"))
    argv = (around.python, str(script), *options)
    env = _own_env(_base_env(around)) | {"CUDA_VISIBLE_DEVICES": ""}
    return WorkerSpec(
        name="prepare",
        argv=argv,
        env=env,
        log_path=run_dir / "prepare.log",
        stacks_path=worker_env.stacks_path(run_dir, "prepare"),
        prefix="[launcher] ",
    )


def _spec(
    place: Place, argv: tuple[str, ...], env: dict[str, str], around: Surroundings
) -> WorkerSpec:
    stem = place.name.lower()
    return WorkerSpec(
        name=place.name,
        argv=argv,
        env=env,
        log_path=around.run_dir / f"{stem}.log",
        events_path=around.run_dir / f"{stem}.events.jsonl",
        stacks_path=worker_env.stacks_path(around.run_dir, place.name),
        cpus=place.gpu.cpus if place.gpu else frozenset(),
    )


def _trainer_env(place: Place, num_workers: int, around: Surroundings) -> dict[str, str]:
    env = _own_env(_worker_env(place, num_workers, around))
    env.pop("HF_TOKEN", None)  # the data is prepared: no worker needs the secret
    if around.token_cache is not None:
        env[worker_env.TOKEN_CACHE] = str(around.token_cache)
    return env


def _own_env(env: dict[str, str]) -> dict[str, str]:
    """Without the variables that are settings: they are in config.json, and a command line that
    overrode them must not be overridden again."""
    left_out = (*ENVIRONMENT, *_INTERACTIVE)
    return {name: value for name, value in env.items() if name not in left_out}


def _command_env(place: Place, num_workers: int, around: Surroundings) -> dict[str, str]:
    env = _worker_env(place, num_workers, around)
    before = env.pop(PYTHONPATH_BEFORE, None)
    if before is not None:
        env.pop("PYTHONPATH", None)
        if before:
            env["PYTHONPATH"] = before
    return env


def _worker_env(place: Place, num_workers: int, around: Surroundings) -> dict[str, str]:
    threads = str(max(1, around.num_cores // num_workers))
    env = _base_env(around)
    for variable in THREAD_VARIABLES:
        env.setdefault(variable, threads)
    env |= {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": place.gpu.uuid if place.gpu else "",
        worker_env.GPU_RANK: str(place.index),
        worker_env.WORKER: place.name,
        worker_env.NUM_WORKERS: str(num_workers),
    }
    if place.gpu:
        env[worker_env.EXPECTED_UUID] = place.gpu.uuid
    return env


def _base_env(around: Surroundings) -> dict[str, str]:
    return {
        **around.environ,
        "PYTHONUNBUFFERED": "1",
        worker_env.RUN_DIR: str(around.run_dir),
    }
