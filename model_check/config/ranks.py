"""What the ranks of a job share: a step, which must divide; and how long they wait for others."""

from model_check.config.schema import FsdpSettings, LaunchSettings, Settings
from model_check.errors import ConfigError

JOBS = ("ddp", "fsdp")
"""The launch.mode whose workers are the ranks of one job."""
FIRST_TIMEOUT_S = 600.0
"""Before a step shows how long steps take."""
LEAST_TIMEOUT_S = 60.0
NUM_STEPS = 10
"""A rank waits so many of its usual steps for the others, and no less than LEAST_TIMEOUT_S."""
SILENCE_PATIENCE = 10.0
"""How much longer than launch.hang_timeout_s silence may last while a worker imports, builds,
compiles, saves, evaluates; and than its steps take: a large model on a CPU takes minutes a step."""


def rank_timeout_s(launch: LaunchSettings, is_supervised: bool, step_s: float | None) -> float:
    """How long a rank waits for the others where its steps take `step_s`; None: none is done yet.
    Less than the supervisor waits for a silent worker: else all were silent alike, and nothing told
    which of them is not there."""
    if step_s is None:
        wait_s, silence_s = FIRST_TIMEOUT_S, SILENCE_PATIENCE * launch.hang_timeout_s
    else:
        wait_s = launch.rank_timeout_s or max(LEAST_TIMEOUT_S, NUM_STEPS * step_s)
        silence_s = max(launch.hang_timeout_s, SILENCE_PATIENCE * step_s)
    is_watched = is_supervised and launch.hang_timeout_s > 0
    return min(wait_s, silence_s / 2) if is_watched else wait_s


def check_ranks(settings: Settings, num_ranks: int) -> None:
    """Raises ConfigError where what a step of the job has cannot be divided by its ranks, or the
    ranks cannot share the model as they should."""
    if settings.launch.mode == "fsdp":
        _check_shards(settings, num_ranks)
    training = settings.training
    if (total := training.global_batch_size) is not None:
        _divide("global_batch_size", total, training.batch_size, num_ranks)
    if (total := training.global_grad_accum_nums) is not None:
        _divide("global_grad_accum_nums", total, 1, num_ranks)


def _check_shards(settings: Settings, num_ranks: int) -> None:
    fsdp = settings.launch.fsdp
    if num_ranks == 1 and fsdp != FsdpSettings():
        raise ConfigError(
            "launch.fsdp.*: one rank holds the whole model, and shares it with nobody"
        )
    if fsdp.shard_size is not None and num_ranks % fsdp.shard_size:
        raise ConfigError(
            f"launch.fsdp.shard_size = {fsdp.shard_size}: {num_ranks} ranks are no whole number of "
            "copies of the model"
        )
    if num_ranks > 1 and settings.training.sample_interval is not None:
        raise ConfigError(
            "training.sample_interval: no rank of launch.mode=fsdp holds the model whole, to "
            "sample from it; leave it out (training.sample_interval=null)"
        )


def sequences_of_step(training: dict[str, int | None], num_ranks: int) -> int:
    """Of a job, by the settings that a checkpoint holds."""
    batch_size = training["batch_size"] or 1
    if (total := training.get("global_batch_size")) is not None:
        return total
    if (of_job := training.get("global_grad_accum_nums")) is not None:
        return of_job * batch_size
    return (training.get("grad_accum_nums") or 1) * batch_size * num_ranks


def _divide(name: str, total: int, each: int, num_ranks: int) -> None:
    step = each * num_ranks
    if total % step == 0:
        return
    below, above = total - total % step, total - total % step + step
    near = " and ".join(str(number) for number in (below, above) if number)
    of_batches = f" x batch_size {each}" if each > 1 else ""
    divisors = [str(n) for n in range(1, min(total // each, 64) + 1) if total % (n * each) == 0]
    ranks = f"; it suits {', '.join(divisors)} ranks" if divisors else ""
    raise ConfigError(
        f"training.{name} = {total}: {num_ranks} ranks{of_batches} cannot share it evenly "
        f"({near} would do{ranks})"
    )
