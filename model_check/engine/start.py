"""What all ranks of a job must begin with. They add up their gradients, and never compare weights:
what differs now would differ for ever, and nothing would tell it where no launcher listens."""

from pathlib import Path

from torch import Tensor

from model_check.engine.state import TrainingState
from model_check.errors import ConfigError
from model_check.forensics.fingerprint import Fingerprint
from model_check.utils.checkpoint_names import content_of
from model_check.utils.words import few

_ADVICE = {
    "data": "share data.cache_dir, or the data set, on all nodes",
    "steps behind it": "share system.checkpoint_dir on all nodes",
    "first weights": "model.init_from must name the same file on all nodes",
    "weights": "model.init_from, or the checkpoint that is resumed, and the version of torch must "
    "be the same on all nodes",
}


def refuse_other_starts(state: TrainingState, kernel: Fingerprint) -> None:
    """Raises ConfigError."""
    world = state.context.world
    if world.is_alone:
        return
    told = world.gathered(_start_of(state, kernel))
    for what, advice in _ADVICE.items():
        if odd := [f"rank {rank}" for rank, own in enumerate(told) if own[what] != told[0][what]]:
            begin = "begins" if len(odd) == 1 else "begin"
            raise ConfigError(f"{few(odd)} {begin} with other {what} than rank 0: {advice}")


def _start_of(state: TrainingState, kernel: Fingerprint) -> dict[str, object]:
    return {
        "data": state.context.identity.data.get("content"),
        "steps behind it": state.progress.step,
        "first weights": _first_weights(state),
        "weights": _sums(list(state.model.parameters()), kernel) if not state.sharded else None,
    }


def _first_weights(state: TrainingState) -> str:
    source, directory = state.settings.model.init_from, state.context.weights
    if directory is not None:
        from model_check.hf import sample_of  # safetensors, for these runs alone

        return sample_of(directory)
    return "" if source is None else content_of(Path(source))


def _sums(parameters: list[Tensor], kernel: Fingerprint) -> list[int]:
    sums: list[int] = kernel([parameter.detach() for parameter in parameters]).tolist()  # sync
    return sums
