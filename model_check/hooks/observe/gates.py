"""How much of each head's output comes from the memory of Infini-attention."""

from model_check.config.attention import KINDS
from model_check.config.parameter import Group
from model_check.config.schema import Settings
from model_check.engine.schedule import learning_rate
from model_check.utils.words import Say

REACH = 4.0
"""A gate that moved so far from 0 takes 98 % of one side. (In a published attempt at 8 billion
parameters the rates allowed 0.03, and 95 % of the gates stayed near a half: HF blog, A failed
experiment: Infini-Attention.)"""
_LOW, _HIGH = 0.1, 0.9
_MOST_LOOKED_AT = 10_000


def scalars_of(shares: list[list[float]]) -> dict[str, float]:
    """By the names that TensorBoard and W&B show."""
    if not shares:
        return {}
    flat = [share for layer in shares for share in layer]
    named = {
        "gates/share_below_0.1": sum(share < _LOW for share in flat) / len(flat),
        "gates/share_above_0.9": sum(share > _HIGH for share in flat) / len(flat),
    }
    for number, layer in enumerate(shares):
        of_layer = {"mean": sum(layer) / len(layer), "min": min(layer), "max": max(layer)}
        named |= {f"gates/layer_{number}/{what}": value for what, value in of_layer.items()}
    return named


def gate_reach(settings: Settings) -> float:
    """How far Adam can move a gate in the whole run: a step moves it by the learning rate at
    most, or little more."""
    training = settings.training
    stride = -(-training.max_steps // _MOST_LOOKED_AT)
    steps = range(0, training.max_steps, stride)
    mean = sum(learning_rate(step, training) for step in steps) / len(steps)
    share = settings.model.infini.gate_lr / training.learning_rate
    return mean * training.max_steps * share


def tell_limits(settings: Settings, say: Say) -> None:
    """A line where segments make no difference, or gates cannot leave the middle."""
    kind = KINDS[settings.model.attention]
    if why := kind.same_as_full(settings):
        say(f"warning: {why}, so this is full attention")
        return
    has_gates = any(row.group is Group.GATE for row in kind.parameters)
    if not has_gates or (reach := gate_reach(settings)) >= REACH:
        return
    needed = settings.model.infini.gate_lr * REACH / reach
    say(
        f"warning: {settings.training.max_steps} steps are too few to open a gate: set "
        f"model.infini.gate_lr={needed:.2g}, or train longer"
    )
