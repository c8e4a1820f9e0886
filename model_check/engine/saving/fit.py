"""Whether the parts of a checkpoint fit each other and this run: compares what it holds with what
this run would have saved after as many steps. No value of a weight or a moment is read."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from model_check.config.derived import precision
from model_check.config.ranks import sequences_of_step
from model_check.config.schema import Settings
from model_check.config.shape import Geometry, geometry
from model_check.data.read.manifest import LONGEST
from model_check.engine.checkpoint import tokenizer_of
from model_check.engine.rng import put_back
from model_check.engine.state import NO_STEPS, Counts, TrainingState, counts_of
from model_check.errors import CheckpointError
from model_check.loss_scale import STEPS_UNTIL_DOUBLED, is_value
from model_check.utils.checkpoint_names import steps_of
from model_check.utils.words import few, first_line, printable

_MOST_COUNTED_STEPS = 1 << 24
"""The optimizer counts in float32, where 2^24 + 1 is 2^24."""
_LEAST_LOSS = -0.01
"""A mean cross entropy is not less than 0, but for rounding."""
_NUM_SHOWN = 4
_LONGEST = 80


@dataclass(frozen=True)
class Form:
    """What a tensor must have to take the place of another one."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """Returns the dtype and shape of `tensor`."""
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Such:
    """Stands for every value that has a property."""

    text: str
    holds: Callable[[Any], bool]


# The loss of a faulty step may be NaN; before the first step it is None.
_LOSS = Such("a loss", lambda loss: loss is None or not loss < _LEAST_LOSS)


def refuse_misfits(path: Path, saved: Mapping[str, Any], state: TrainingState, why: str) -> None:
    """Raises CheckpointError with the names of what does not fit. `saved`: with settings that are
    complete. `why`: how the runs differ, for the message."""
    found, wanted = _found(saved, state), _wanted(path, saved, state)
    all_misfits = list(misfits(found, wanted))
    if has_since(saved):
        all_misfits += other_counts(saved)
    tokenizer_of(saved, path, LONGEST)
    if all_misfits:
        num_more = len(all_misfits) - _NUM_SHOWN
        more = f"; and {num_more} more" if num_more > 0 else ""
        told = "; ".join(all_misfits[:_NUM_SHOWN])
        raise CheckpointError(f"{path}: does not fit this run: {told}{more}{why}")


def has_since(saved: Mapping[str, Any]) -> bool:
    """Whether the checkpoint says since when each step reads as many sequences as now. An older one
    does not, and a resume with training.resume_anyway may have changed the number."""
    return saved.get("since") is not None


def other_counts(saved: Mapping[str, Any]) -> list[str]:
    """The counts that do not follow from the steps and the settings of the checkpoint."""
    now, since = counts_of(saved)
    training = saved["settings"]["training"]
    num_sequences = sequences_of_step(training, saved.get("num_ranks", 1))
    wanted = since.after(now.step, num_sequences, training["context_length"])
    found, fitting = (
        {"loader.sequences": counts.sequences, "total_tokens": counts.tokens}
        for counts in (now, wanted)
    )
    return list(misfits(found, fitting))


def _found(saved: Mapping[str, Any], state: TrainingState) -> dict[str, Any]:
    """The contents of the checkpoint, with tensors by the names that a sharded one gives them."""
    optimizer = {"loss_scale": None} | saved["optimizer"]
    moments = optimizer.pop("state")
    found: dict[str, Any] = {"step": saved["step"]}
    if "shards" in saved:
        manifest = saved["shards"].manifest
        entries = manifest.tensors.items()
        found |= {name: Form(getattr(torch, t.dtype), (*t.shape,)) for name, t in entries}
        found["manifest"] = {"step": manifest.step, "world.ranks": manifest.world.ranks}
    else:
        names = dict(enumerate(state.optimizer.named))
        found |= {f"weights/{name}": weight for name, weight in saved["model"].items()}
        found |= {
            f"{kind}/{names.get(number, number)}": tensor
            for number, own in moments.items()
            for kind, tensor in own.items()
        }
    if saved.get("model_cfg") is not None:
        found["model_cfg"] = msgspec.to_builtins(msgspec.convert(saved["model_cfg"], Geometry))
    best = ("best_split", "best_val_loss", "best_step")
    return found | {
        "optimizer": optimizer,
        "rng": saved["rng"],
        "rng_of_ranks": saved.get("rng_of_ranks", []),
        "loader": saved["loader"],
        "since": saved.get("since"),
        "loss": saved.get("loss"),
        "val_loss": saved["val_loss"],
        ", ".join(best): [saved[name] for name in best],
        "kept": saved.get("kept", []),
    }


def _wanted(path: Path, saved: Mapping[str, Any], state: TrainingState) -> dict[str, Any]:
    """The contents that this run would have saved with the settings and ranks of the checkpoint."""
    settings = msgspec.convert(saved["settings"], Settings)
    step, num_ranks = saved["step"], saved.get("num_ranks", 1)
    num_steps = torch.tensor(min(step, _MOST_COUNTED_STEPS), dtype=torch.float32)
    tensors = state.weights_and_moments()
    wanted: dict[str, Any] = {"step": step if (named := steps_of(path)) is None else named}
    wanted |= {name: Form(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    optimizer: dict[str, Any] = {
        "param_groups": state.optimizer.param_groups(settings.training),
        "loss_scale": _loss_scale(settings, step),
    }
    if "shards" in saved:
        optimizer["step"] = num_steps
        wanted["manifest"] = {"step": step, "world.ranks": num_ranks}
    else:
        wanted |= {f"step/{name}": num_steps for name in state.optimizer.named}
    if saved.get("model_cfg") is not None:
        shape = geometry(settings.model, state.shape.vocab_size)
        wanted["model_cfg"] = msgspec.to_builtins(shape)
    of_ranks = saved.get("rng_of_ranks", [])
    fills_ranks = len(of_ranks) in ({0, num_ranks} if num_ranks > 1 else {0})
    read = "position" if saved["loader"].get("sequences") is None else "sequences"
    return wanted | {
        "optimizer": optimizer,
        "rng": _as_put_back(of_ranks[0] if of_ranks else saved["rng"]),
        "rng_of_ranks": [*map(_as_put_back, of_ranks)]
        if fills_ranks
        else Such(f"one for each of {num_ranks} ranks", lambda _: False),
        "loader": {read: saved["loader"][read]},  # `other_counts` looks at it
        "since": _since(step),
        "loss": _LOSS,
        "val_loss": dict.fromkeys(saved["val_loss"], _LOSS),
        "best_split, best_val_loss, best_step": _best(saved),
        "kept": _kept(step),
    }


def _loss_scale(settings: Settings, step: int) -> dict[str, Such] | None:
    if precision(settings.training) != "fp16":
        return None
    most = min(step, STEPS_UNTIL_DOUBLED - 1)
    scalar = Form(torch.float32, ())
    return {
        "value": Such(
            "a float32 power of two", lambda found: Form.of(found) == scalar and is_value(found)
        ),
        "num_good": Such(
            f"a float32 count up to {most}",
            lambda found: Form.of(found) == scalar and float(found) in range(most + 1),
        ),
    }


def _since(step: int) -> Such:
    def could_be(found: Mapping[str, int] | None) -> bool:
        since = Counts(**found) if found else NO_STEPS
        is_begun = 0 < since.step <= since.sequences <= since.tokens
        return since.step <= step and (is_begun or since == NO_STEPS)

    return Such(f"the counts after a step up to {step}", could_be)


def _best(saved: Mapping[str, Any]) -> Such:
    def is_best(found: list[Any]) -> bool:
        split, loss, step = found
        if None in found:
            return found == [None, None, None]
        latest = saved["val_loss"].get(split)
        is_of_step = 0 < step <= saved["step"] and (step < saved["step"] or loss == latest)
        return latest is not None and is_of_step and math.isfinite(loss) and loss >= _LEAST_LOSS

    return Such(f"a split of val_loss, its loss, and a step up to {saved['step']}", is_best)


def _kept(step: int) -> Such:
    def are_kept(names: list[str]) -> bool:
        steps = [steps_of(Path(name)) for name in names if Path(name).name == name]
        is_step = [each is not None and each <= step for each in steps]
        return len(set(names)) == len(names) == len(steps) and all(is_step)

    return Such(f"different names of checkpoints up to step_{step}", are_kept)


def _as_put_back(states: Any) -> Any:
    """Returns the random states as they are after they were set; the present ones stay."""
    try:
        back = put_back(states)
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as e:
        return Such(f"a random state ({type(e).__name__}: {first_line(e):.100})", lambda _: False)
    if not (states["cuda"] and back["cuda"]):
        back["cuda"] = Such("the state of at most one GPU", _are_of_gpu)
    return back


def _are_of_gpu(found: Any) -> bool:
    is_list = isinstance(found, list) and len(found) < 2
    return is_list and all(
        isinstance(each, Tensor) and each.dtype == torch.uint8 and each.dim() == 1 for each in found
    )


def misfits(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """`NAME is FOUND, not WANTED` for each part of two trees of dicts and lists that differs."""
    match wanted:
        case dict() if isinstance(found, dict):
            at = f"{name}." if name else ""
            keys = {
                "missing": [key for key in wanted if key not in found],
                "unexpected": [key for key in found if key not in wanted],
            }
            for what, odd in keys.items():
                if odd:
                    yield f"{few([printable(f'{at}{key}') for key in odd])} {what}"
            for key in wanted:
                if key in found:
                    yield from misfits(found[key], wanted[key], f"{at}{key}")
        case list() | tuple() if type(found) is type(wanted) and len(found) == len(wanted):
            for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
                yield from misfits(one, other, f"{name}.{number}")
        case _ if not _fits(found, wanted):
            has, needs = _shown(found), _shown(wanted)
            yield f"{name} is {has}, not {needs}" if has != needs else f"{name} has other values"


def _fits(found: Any, wanted: Any) -> bool:
    match wanted:
        case Such():
            return wanted.holds(found)
        case Form():
            return wanted == (Form.of(found) if isinstance(found, Tensor) else found)
        case Tensor():
            is_tensor = isinstance(found, Tensor) and Form.of(found) == Form.of(wanted)
            return is_tensor and torch.equal(found, wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def _shown(value: Any) -> str:
    match value:
        case Such():
            return value.text
        case Tensor():
            has_value = value.dim() == 0 and value.device.type == "cpu"
            return f"{Form.of(value)}{f' {value.item():.9g}' if has_value else ''}"
        case dict() | list() | tuple() if len(str(value)) > _LONGEST:
            return f"{type(value).__name__} of {len(value)}"
    return printable(repr(value) if isinstance(value, str) else str(value))[:_LONGEST]
