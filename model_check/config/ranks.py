"""Whether a step can be shared among the ranks of a job."""

from model_check.config.schema import Settings
from model_check.errors import ConfigError


def check_ranks(settings: Settings, num_ranks: int) -> None:
    """Raises ConfigError where what a step of the job has cannot be divided by its ranks."""
    training = settings.training
    if (total := training.global_batch_size) is not None:
        _divide("global_batch_size", total, training.batch_size, num_ranks)
    if (total := training.global_grad_accum_nums) is not None:
        _divide("global_grad_accum_nums", total, 1, num_ranks)


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
