"""A whole settings file of nanotron, as settings of ours. Pure; the names are rows of `aliases`."""

from typing import Any

from model_check.config.fields import all_fields, leaves, setting_of

_NEEDED = {"general", "parallelism"}
"""Sections that each of its files has, and none of ours."""
_DEFAULTS = {
    "model.rms_norm_eps": 1e-6,
    "model.rope_scaling": None,
    "model.rope_theta": 10000.0,
    "model.tie_word_embeddings": False,
}
"""Where a file says nothing, its LlamaConfig does; a preset of ours would say something else."""
_EVERY, _HELD_OUT = "tokens.val_check_interval", {"data.validation": "auto"}
"""Its files name no text to validate on."""
_INFINI_LLAMA, _BOARD = "infini_attention", {"logging.tensorboard": True}
"""That project always writes for TensorBoard."""
_MEMORY, _GATES = "infini_attention.turn_on_memory", "infini_attention.balance_factor_lr"
"""Infini-Llama's files give the gates a rate without a memory, too."""


def is_nanotron(values: dict[str, Any]) -> bool:
    return values.keys() >= _NEEDED


def from_nanotron(values: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The settings by dotted name, and a line that lists what is not taken. Nulls ask for nothing.
    Raises ConfigError."""
    stages = values.get("data_stages") or [{}]
    first, *others = stages if isinstance(stages, list) else [stages]
    given = leaves({**values, "data_stages": first}, where)
    known = {name: value for name, value in given if _says(setting_of(name), value)}
    if known.get(_MEMORY) is False:
        known.pop(_GATES, None)
    rest = [name for name, value in given if name not in known and value not in (None, {})]
    rest += [f"data_stages[{number}]" for number in range(1, 1 + len(others))]
    settings = {setting_of(name) for name in known}
    implied = _DEFAULTS | (_HELD_OUT if known.get(_EVERY, -1) != -1 else {})
    implied |= _BOARD if _INFINI_LLAMA in values else {}
    defaults = {name: value for name, value in implied.items() if name not in settings}
    note = (
        f"{where}: read as a file of nanotron; not taken: {_by_section(rest, known)} (--mode ddp "
        "or fsdp and --gpus stand for parallelism)"
    )
    return known | defaults, note


def _says(setting: str, value: Any) -> bool:
    field = all_fields().get(setting)
    return field is not None and (value is not None or "null" in field.type_name)


def _by_section(names: list[str], known: dict[str, Any]) -> str:
    """`tokens (limit_test_batches), parallelism`: a section of which nothing is taken stands for
    its keys."""
    partly = {name.partition(".")[0] for name in known}
    keys: dict[str, list[str]] = {}
    for section, _, key in (name.partition(".") for name in names):
        keys.setdefault(section, []).append(key.rpartition(".")[2])
    return ", ".join(f"{s} ({', '.join(k)})" if s in partly else s for s, k in keys.items())
