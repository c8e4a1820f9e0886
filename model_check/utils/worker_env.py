"""What a worker reads from its environment, once: its name and GPU, its supervisor's socket and run
directory, and its place in a job of several ranks."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from model_check.errors import ConfigError
from model_check.utils.slurm import first_address, step_key, step_port, tasks_on_node

RUN_PREFIX = "model_check_logs_"
"""A run directory that nobody named is `model_check_logs_<PID>_<timestamp>`."""
EVENTS_FD = "MODEL_CHECK_EVENTS_FD"
RUN_DIR = "MODEL_CHECK_RUN_DIR"
WORKER = "MODEL_CHECK_WORKER"
NUM_WORKERS = "MODEL_CHECK_NUM_WORKERS"
HELD = "MODEL_CHECK_HELD"
HAS_PLACE = "MODEL_CHECK_HAS_PLACE"
EXPECTED_UUID = "MODEL_CHECK_GPU_UUID"
RUN_NAME = "MODEL_CHECK_RUN_NAME"
RUN_TAG = "MODEL_CHECK_RUN_TAG"
TOKEN_CACHE = "MODEL_CHECK_TOKEN_CACHE"
STORE_FD = "MODEL_CHECK_STORE_FD"
INSTRUMENT = "MODEL_CHECK_INSTRUMENT"
"""The root of this project: the worker is a command of a person's own, whose steps are watched."""
SEED = "MODEL_CHECK_SEED"
"""With which such a command's random numbers begin."""
DETERMINISTIC = "MODEL_CHECK_DETERMINISTIC"
"""torch takes deterministic operations for it, where it has them."""
STOP_AFTER = "MODEL_CHECK_STOP_AFTER"
"""The step, counted from 0, behind which such a command ends."""
GPU_RANK = "GPU_RANK"
RANK, LOCAL_RANK, WORLD_SIZE = "RANK", "LOCAL_RANK", "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
GROUP_RANK = "GROUP_RANK"
RANK_VARIABLES = (
    GROUP_RANK,
    RANK,
    LOCAL_RANK,
    WORLD_SIZE,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
)
"""What torchrun tells a rank, and our launcher, too."""


def telemetry_path(run_dir: Path, worker: str) -> Path:
    """`gpu3.telemetry.jsonl`: what NVML said of the worker's GPU."""
    return run_dir / f"{worker.lower()}.telemetry.jsonl"


class RankEnv(Struct, frozen=True):
    """A process's place in one job of several, by torch's names of the variables."""

    rank: int
    world_size: int
    local_rank: int
    """Its number on this machine: that of its device."""
    local_world_size: int
    address: str
    port: int
    store_fd: int | None = None
    """For rank 0: a socket that is bound to `port` already."""
    is_by_torchrun: bool = False
    """torchrun itself listens at `port`."""
    attempt: int = 0
    """torchrun's count of its restarts, which share that port."""
    node: str = ""
    """Its machine, in words: `n2`, as Slurm calls it; `1 (host7)`, as torchrun counts them."""
    node_number: int = 0
    has_launcher: bool = False
    """One of ours hears it."""
    job: str = ""
    """`4711.0`, the step of Slurm: another one's ranks may listen at the same port."""
    run_dir: Path | None = None
    """Of its launcher's run."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "RankEnv | None":
        """None: this process trains alone. Raises ConfigError for a place that is no place."""
        is_told = WORLD_SIZE in environ
        told = environ if is_told else _by_srun(environ)
        size = _natural(told, WORLD_SIZE, 1)
        if size <= 1:
            return None
        rank = _natural(told, RANK)
        if rank >= size:
            raise ConfigError(f"{RANK} = {rank}: {WORLD_SIZE} is {size}, and ranks begin with 0")
        store_fd = told.get(STORE_FD, "")
        return cls(
            rank=rank,
            world_size=size,
            local_rank=_natural(told, LOCAL_RANK, rank),
            local_world_size=_natural(told, LOCAL_WORLD_SIZE, size),
            address=told.get(MASTER_ADDR) or "127.0.0.1",
            port=_natural(told, MASTER_PORT),
            store_fd=int(store_fd) if store_fd.isdigit() else None,
            is_by_torchrun=told.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_natural(told, "TORCHELASTIC_RESTART_COUNT", 0),
            node=_node(told),
            node_number=_natural(told, _node_variable(told), 0),
            has_launcher=EVENTS_FD in environ,
            job="" if is_told else step_key(environ),
            run_dir=Path(environ[RUN_DIR]) if environ.get(RUN_DIR) else None,
        )


def num_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Of the job that this process is of, or works for; 1: it trains alone."""
    is_by_srun = WORLD_SIZE not in environ and RUN_DIR not in environ
    name = "SLURM_STEP_NUM_TASKS" if is_by_srun else WORLD_SIZE
    return _positive_int(environ.get(name), default=1)


ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Of GPU memory: freed blocks of other sizes serve again. By its older name: torch before 2.12
may not heed PYTORCH_ALLOC_CONF in it (pytorch #183387)."""
ALLOCATOR_VARIABLES = frozenset(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
"""Where a person sets one of them, it stays."""


class WorkerEnv(Struct, frozen=True):
    """A worker's place in its run. A worker started by hand, with nothing set, is GPU0 (or CPU0),
    the only one."""

    name: str | None
    """`GPU3`, `CPU0`; None: not given, and the device names the worker (`name_for`)."""
    gpu_rank: int | None
    """Physical GPU index: GPU_RANK, else the first number in CUDA_VISIBLE_DEVICES; None: neither
    says it."""
    run_dir: Path | None
    events_fd: int | None
    num_workers: int
    """Workers in this run; the cores are divided among them."""
    is_held: bool
    """The supervisor says which step it may begin: it has equals."""
    expected_uuid: str | None
    """The GPU that the supervisor chose for this worker, `GPU-…` or `MIG-…`."""
    token_cache: Path | None
    """The cache entry that the run prepared, once for all workers; None: the worker prepares the
    data itself."""
    local_rank: int = 0
    """Its number among the ranks of a job on this machine."""
    run_name: str | None = None
    """By which logs for people know its run."""
    has_place: bool = False
    """No other worker of its run has its system.checkpoint_dir: it is alone in an arm of a
    comparison, on whichever GPU."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "WorkerEnv":
        run_dir = environ.get(RUN_DIR)
        events_fd = environ.get(EVENTS_FD)
        return cls(
            name=environ.get(WORKER) or None,
            gpu_rank=_gpu_rank(environ),
            run_dir=Path(run_dir) if run_dir else None,
            events_fd=int(events_fd) if events_fd and events_fd.isdigit() else None,
            num_workers=_positive_int(environ.get(NUM_WORKERS), default=1),
            is_held=bool(environ.get(HELD)),
            expected_uuid=environ.get(EXPECTED_UUID) or None,
            token_cache=Path(environ[TOKEN_CACHE]) if environ.get(TOKEN_CACHE) else None,
            local_rank=_local_rank(environ),
            run_name=environ.get(RUN_NAME) or None,
            has_place=bool(environ.get(HAS_PLACE)),
        )

    @property
    def stacks_path(self) -> Path | None:
        """The file in which the supervisor looks for this worker's stacks; None: no supervisor."""
        return stacks_path(self.run_dir, self.name) if self.run_dir and self.name else None

    @property
    def is_isolated(self) -> bool:
        """Whether others of its run write beside it, unless they are ranks of its job."""
        return self.supervised and not self.has_place

    @property
    def supervised(self) -> bool:
        """Whether a supervisor started this worker. The supervisor then prefixes its lines (else
        the worker does that), and other workers may write into the same directories."""
        return self.name is not None

    def name_for(self, device: str) -> str:
        """The worker's name, given that it trains on `device` ("cuda" or "cpu")."""
        is_gpu = device == "cuda"
        number = self.gpu_rank if is_gpu and self.gpu_rank is not None else self.local_rank
        return self.name or f"{'GPU' if is_gpu else 'CPU'}{number}"


def stacks_path(run_dir: Path, worker: str) -> Path:
    """`gpu3.stacks.txt`: what the worker was doing when the run hung."""
    return run_dir / f"{worker.lower()}.stacks.txt"


def _gpu_rank(environ: Mapping[str, str]) -> int | None:
    explicit = environ.get(GPU_RANK, "")
    if explicit.isdigit():
        return int(explicit)
    visible = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    number = _local_rank(environ) if len(visible) > 1 else 0
    known = number < len(visible) and visible[number].isdigit()
    return int(visible[number]) if known else None


def _local_rank(environ: Mapping[str, str]) -> int:
    """0 where nobody tells it; `RankEnv` judges what is told."""
    by_srun = "SLURM_LOCALID" if EVENTS_FD not in environ else ""
    text = environ.get(LOCAL_RANK) or environ.get(by_srun) or ""
    return int(text) if text.isdigit() else 0


def _by_srun(environ: Mapping[str, str]) -> Mapping[str, str]:
    """What Slurm tells the tasks of a step, by torch's names. Raises ConfigError where they are on
    several machines, and nobody tells the address of the first."""
    size = environ.get("SLURM_STEP_NUM_TASKS", "")
    if size in ("", "1") or EVENTS_FD in environ:
        return environ
    told: dict[str, str] = {}
    if environ.get("SLURM_STEP_NUM_NODES", "1") != "1" and MASTER_ADDR not in environ:
        told[MASTER_ADDR] = first_address(environ) or ""
        if not told[MASTER_ADDR]:
            raise ConfigError(
                f"SLURM_STEP_NUM_NODES = {environ['SLURM_STEP_NUM_NODES']}: ranks on several "
                f"machines need {MASTER_ADDR}, the first one's address"
            )
    return {
        MASTER_PORT: str(step_port(environ)),
        **environ,
        **told,
        WORLD_SIZE: size,
        RANK: environ.get("SLURM_PROCID", ""),
        LOCAL_RANK: environ.get("SLURM_LOCALID", ""),
        LOCAL_WORLD_SIZE: str(tasks_on_node(environ) or ""),
    }


def _node_variable(environ: Mapping[str, str]) -> str:
    """torchrun, and our launcher, tell it by another name than Slurm."""
    return GROUP_RANK if GROUP_RANK in environ else "SLURM_NODEID"


def _node(environ: Mapping[str, str]) -> str:
    if name := environ.get("SLURMD_NODENAME"):
        return name
    number = environ.get(_node_variable(environ), "")
    return f"{number} ({platform.node()})" if number else platform.node()


def _natural(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit():
        raise ConfigError(
            f"{name} = {text!r}: {WORLD_SIZE} = {environ.get(WORLD_SIZE)} says that this is a rank "
            "of a job, so torchrun's variables must be whole (or unset WORLD_SIZE to train alone)"
        )
    return int(text)


def _positive_int(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() and int(text) > 0 else default
