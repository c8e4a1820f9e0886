"""What a person can change after a NaN. Pure, and without torch."""

from model_check.config.derived import precision
from model_check.config.schema import Settings


def advice(settings: Settings, *, is_fresh: bool) -> str:
    """The settings that can have made it and can still be changed, with their values, in a line.
    `is_fresh`: the weights began at random."""
    training = settings.training
    lower = {"training.learning_rate": training.learning_rate}
    if is_fresh:
        lower["model.init_std"] = settings.model.init_std
    if training.max_grad_norm is not None:
        lower["training.max_grad_norm"] = training.max_grad_norm
    ways = [f"lower {', '.join(f'{name} ({value:g})' for name, value in lower.items())}"]
    if training.max_grad_norm is None:
        ways.append("training.max_grad_norm=1 (null)")
    if (now := precision(training)) != "fp32":
        exact = "use_amp=false" if training.precision is None else "precision=fp32"
        ways.append(f"training.{exact} ({now})")
    if not settings.debug.dump_tensors:
        ways.append("debug.dump_tensors=true, which also --debug sets, to see every tensor")
    return f"If the settings made it: {'; '.join(ways)}"
