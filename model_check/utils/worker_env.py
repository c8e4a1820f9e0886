"""What a worker reads from its environment, once: its name and GPU, and its supervisor's socket and
run directory."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

EVENTS_FD = "MODEL_CHECK_EVENTS_FD"
RUN_DIR = "MODEL_CHECK_RUN_DIR"
WORKER = "MODEL_CHECK_WORKER"
NUM_WORKERS = "MODEL_CHECK_NUM_WORKERS"
HELD = "MODEL_CHECK_HELD"
EXPECTED_UUID = "MODEL_CHECK_GPU_UUID"
RUN_TAG = "MODEL_CHECK_RUN_TAG"
TOKEN_CACHE = "MODEL_CHECK_TOKEN_CACHE"
GPU_RANK = "GPU_RANK"


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
        )

    @property
    def stacks_path(self) -> Path | None:
        """The file in which the supervisor looks for this worker's stacks; None: no supervisor."""
        return stacks_path(self.run_dir, self.name) if self.run_dir and self.name else None

    @property
    def supervised(self) -> bool:
        """Whether a supervisor started this worker. The supervisor then prefixes its lines (else
        the worker does that), and other workers may write into the same directories."""
        return self.name is not None

    def name_for(self, device: str) -> str:
        """The worker's name, given that it trains on `device` ("cuda" or "cpu")."""
        return self.name or (f"GPU{self.gpu_rank or 0}" if device == "cuda" else "CPU0")


def stacks_path(run_dir: Path, worker: str) -> Path:
    """`gpu3.stacks.txt`: what the worker was doing when the run hung."""
    return run_dir / f"{worker.lower()}.stacks.txt"


def _gpu_rank(environ: Mapping[str, str]) -> int | None:
    explicit = environ.get(GPU_RANK, "")
    if explicit.isdigit():
        return int(explicit)
    first = re.match(r"\s*(\d+)", environ.get("CUDA_VISIBLE_DEVICES", ""))
    return int(first.group(1)) if first else None


def _positive_int(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() and int(text) > 0 else default
