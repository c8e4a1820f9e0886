"""What can be known to fail before our trainer starts: memory, places to write to, a drill that no
worker would run. What may fail is a note, what must fail is refused."""

from collections.abc import Sequence
from pathlib import Path

from launcher.contain.memory import HERE, Membership, memory_room
from launcher.doctor.finding import gib
from launcher.doctor.machine import check_open_files
from launcher.doctor.storage import try_to_write
from launcher.plan import Place
from model_check.config.backends import flash_fallback
from model_check.config.dataset import check_path
from model_check.config.derived import precision
from model_check.config.drill import (
    FLIP_KINDS,
    MOMENT_KINDS,
    WEIGHT_KINDS,
    check_name,
    parse_drill,
)
from model_check.config.memory import (
    advice,
    check_host_memory,
    estimate_memory,
    expected_geometry,
    num_shards,
    state_bytes,
)
from model_check.config.places import refuse_unwritable
from model_check.config.prompts import given_prompts
from model_check.config.ranks import JOBS
from model_check.config.resume import check_resume
from model_check.config.schema import Settings
from model_check.config.shape import parameters
from model_check.config.wandb import check_wandb
from model_check.errors import ConfigError
from model_check.utils.host_memory import available_memory_bytes, host_memory_bytes

COPY_BYTES = 12
"""Of a parameter: float32, with two moments."""


def check_training(
    settings: Settings,
    places: Sequence[Place],
    num_ranks: int | None = None,
) -> list[str]:
    """Notes for a person before our trainer starts on `places`. `num_ranks`: of the job, on all its
    nodes; None: those of `places`. Raises ConfigError and StorageError for what cannot work."""
    names = [place.name for place in places]
    check_worker_settings(settings)
    device = "cuda" if any(place.gpu for place in places) else "cpu"
    num_ranks = num_ranks or len(places)
    notes = check_drill(settings, names, num_ranks)
    check_checkpoint_dir(settings, names)
    if obstacle := flash_fallback(settings, device):
        notes.append(f"flash_attn falls back to sdpa: {obstacle}")
    notes += check_open_files(len(places))
    if device == "cpu" and precision(settings.training) == "fp16":
        notes.append("float16 is slow on a CPU: bfloat16 and float32 are several times as fast")
    if device == "cpu":
        return [*notes, *check_memory([settings] * len(places), num_ranks=num_ranks)]
    memory = check_gpu_memory(settings, places, num_ranks)
    return [*notes, *memory, *check_copies(settings, len(places))]


def check_worker_settings(settings: Settings) -> None:
    """Refuse what a supervised worker could not do. Raises ConfigError."""
    if settings.system.device_id != 0:
        raise ConfigError(
            f"system.device_id = {settings.system.device_id}: a supervised worker sees one device, "
            "number 0 (--gpus chooses GPUs)"
        )
    check_resume(settings.training.resume)
    check_wandb(settings.logging)
    given_prompts(settings.training)
    check_path(settings.data.dataset)


def check_drill(settings: Settings, workers: Sequence[str], num_ranks: int) -> list[str]:
    """A note for a fault that nobody can notice. Raises ConfigError for one that no worker would
    have."""
    text = settings.debug.drill
    if text is None:
        return []
    drill = parse_drill(text, settings.training.max_steps)
    check_name(drill, [row.name for row in parameters(settings.model)])
    if drill.worker is not None and drill.worker not in workers:
        there_are = ", ".join(workers)
        raise ConfigError(
            f"debug.drill = {text!r}: this run has no worker {drill.worker} (it has {there_are})"
        )
    # State that changed tells on itself, where fingerprints are taken.
    is_of_state = drill.kind in (*WEIGHT_KINDS, *MOMENT_KINDS)
    is_seen_alone = is_of_state and settings.debug.fingerprints != "off"
    # A value of a sharded model exists once in each copy: else there is nothing to compare.
    has_peers = num_shards(settings, num_ranks) < num_ranks
    is_seen = is_seen_alone or (drill.worker and has_peers)
    # Else a flip is noticed by comparison, or where a number becomes NaN or Inf.
    if drill.kind not in FLIP_KINDS or is_seen:
        return []
    where = "in every worker" if drill.worker is None else f"in {drill.worker}"
    told = f"{drill.kind} {where}: nobody can notice it, unless it overflows, and the run passes"
    return [f"debug.drill: {told}"]


def check_memory(
    workers: Sequence[Settings], membership: Membership = HERE, num_ranks: int | None = None
) -> list[str]:
    """Refuse CPU workers, each with its settings, whose weights, gradients and moments alone exceed
    the memory that host and control group have left; a note when the estimate of all does.
    `num_ranks`: as in `check_training`."""
    settings, num_workers = workers[0], len(workers)
    num_ranks = num_ranks or num_workers
    available, room, below = available_memory_bytes(), memory_room(membership), ""
    if room is not None and room.left_bytes <= available:
        available = room.left_bytes
        below = f" below this control group's limit of {gib(room.limit_bytes)}"
    needed = sum(state_bytes(each, num_ranks) for each in workers)
    if needed > available:
        counts = dict.fromkeys(expected_geometry(each).num_parameters for each in workers)
        raise ConfigError(
            f"{num_workers} CPU workers with {' and '.join(f'{n:,}' for n in counts)} parameters "
            f"need {gib(needed)} for weights, gradients and moments alone; "
            f"{gib(available)} are available{below} (a smaller model.*, fewer --workers, "
            "or --preset cpu)"
        )
    check_host_memory(settings, num_workers, host_memory_bytes(), num_ranks)
    estimate = sum(estimate_memory(each, "cpu", num_ranks).total for each in workers)
    if estimate <= available:
        return []
    return [
        f"memory may not suffice: {num_workers} CPU workers take about {gib(estimate)}, "
        f"{gib(available)} are available{below}; {advice(settings)}"
    ]


def check_gpu_memory(
    settings: Settings, places: Sequence[Place], num_ranks: int | None = None
) -> list[str]:
    """`check_memory` for GPUs, each with what it has free now. One that does not tell is not
    judged."""
    shape, num_ranks = expected_geometry(settings), num_ranks or len(places)
    estimate = estimate_memory(settings, "cuda", num_ranks)
    needed = 0 if settings.launch.fsdp.cpu_offload else state_bytes(settings, num_ranks)
    shard = f" (a shard of {num})" if (num := num_shards(settings, num_ranks)) > 1 else ""
    notes = []
    for place in places:
        if place.gpu is None or place.gpu.free_mib is None:
            continue
        free = place.gpu.free_mib << 20
        has = f"{place.gpu.title} has {gib(free)} free"
        if needed > free:
            raise ConfigError(
                f"{has}; weights, gradients and moments of {shape.num_parameters:,} parameters"
                f"{shard} alone need {gib(needed)}: a smaller model.*, or other --gpus"
            )
        if estimate.total > free:
            notes.append(
                f"{has}, and this run takes about {estimate.describe()}; {advice(settings)}"
            )
    return notes


def check_copies(settings: Settings, num_workers: int, membership: Membership = HERE) -> list[str]:
    """A note where the host has no room for the copies of weights and moments that checkpoints are
    written from while GPUs train on."""
    training, shape = settings.training, expected_geometry(settings)
    if training.async_save is False or not (training.save_interval or training.save_best):
        return []
    # The ranks of a job write one checkpoint.
    num_copies = 1 if settings.launch.mode in JOBS else num_workers
    needed = num_copies * shape.num_parameters * COPY_BYTES
    room = memory_room(membership)
    available = min([available_memory_bytes(), *([room.left_bytes] if room else [])])
    if needed <= available:
        return []
    return [
        f"host memory may not suffice: {num_copies} copies of weights and moments to save from "
        f"take {gib(needed)}, {gib(available)} are available; training.async_save=false needs none"
    ]


def check_checkpoint_dir(settings: Settings, workers: Sequence[str]) -> None:
    """Raises StorageError where checkpoints are asked for and their directory cannot be written.
    Each worker looks for itself, too, when it has started."""
    parent = Path(settings.system.checkpoint_dir)
    for directory in (parent, *(parent / worker.lower() for worker in workers)):
        try:
            try_to_write(directory)
        except OSError as error:
            refuse_unwritable(settings, directory, error)
