"""`model.geometry`: a model's sizes by one word. A size of ours, a local directory, or a hub id.

It gives the keys of [model] that describe a shape; a key that is given by name overrides it. No
torch, no transformers: a config.json is JSON. A child process fetches that of a hub model, so that
huggingface_hub is not imported here, and a network that hangs has a time limit.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from model_check.config.attention import KINDS
from model_check.config.checkpoint_settings import settings_in
from model_check.config.own_head import has_own_head
from model_check.config.shape import swiglu_width
from model_check.errors import ConfigError
from model_check.utils.child import child_command
from model_check.utils.files import read_text
from model_check.utils.first_bytes import what_is

_FETCH_LIMIT_S = 120.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

Fetch = Callable[[str, bool], Path]
"""(hub id, offline) -> its config.json. Raises ConfigError."""


def _size(hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": swiglu_width(hidden),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": None,
        "vocab_size": None,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


SIZES: Mapping[str, dict[str, Any]] = {
    "tiny": _size(256, 6, 8, 8),
    "small": _size(768, 12, 12, 12),
    "medium": _size(1024, 24, 16, 8),
    "large": _size(1536, 24, 16, 8),
    "xl": _size(2048, 32, 32, 8),
}
"""The vocabulary is the tokenizer's. With 32,000 tokens: 21, 134, 344, 721 and 1549 million
parameters."""


HF_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""The keys of [model] and what transformers' config.json calls them. It has the rotary embedding
elsewhere (`_rope`)."""
HF_SCALING_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context_length": "original_max_position_embeddings",
}
"""The same for [model.rope_scaling]."""
LLAMA = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What our model has no switch for. With another value its numbers would be wrong, and nothing
would say so."""
_WHERE_ABSENT = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""What transformers takes for a key that config.json lacks; null heads: as many as there are
query heads."""


def geometry_values(name: str, *, offline: bool, fetch: Fetch | None = None) -> dict[str, Any]:
    """The keys of [model] that `name` stands for. Raises ConfigError.

    `fetch`: gets the config.json of a hub model; None: in a child process.
    """
    if name in SIZES:
        return dict(SIZES[name])
    path = Path(name)
    if (model := model_in(path)) is not None:
        return model
    if path.suffix == ".pt" and path.is_file():
        raise ConfigError(f"model.geometry = {name!r}: no checkpoint that can be read")
    if path.is_dir() or path.is_file():
        file = path / "config.json" if path.is_dir() else path
        return {**read_config(file), "model_path": str(file.parent)}
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"model.geometry = {name!r}: no size ({', '.join(SIZES)}), no directory that is here, "
            "and no hub id (organisation/model)"
        )
    return {**read_config((fetch or fetch_config)(name, offline)), "model_path": name}


def shape_of_weights(name: str, *, offline: bool) -> dict[str, Any]:
    """The keys of [model] that the weights of model.init_from need: of a checkpoint, a directory, a
    file of it, or a hub id. Empty where nothing tells them: who loads the weights says why. Raises
    ConfigError."""
    path = Path(name)
    if not path.exists():
        is_on_hub = _HUB_ID.fullmatch(name) and not name.endswith((".pt", ".safetensors"))
        return read_config(_config_of_weights(name, offline=offline)) if is_on_hub else {}
    if (model := model_in(path)) is not None:
        return model
    file = (path if path.is_dir() else path.parent) / "config.json"
    return read_config(file) if file.is_file() else {}


def _config_of_weights(repo: str, *, offline: bool) -> Path:
    """Weights that were fetched once are found without the hub. Raises ConfigError."""
    try:
        return fetch_config(repo, True, "model.init_from")
    except ConfigError:
        if offline:
            raise
    return fetch_config(repo, False, "model.init_from")


def model_in(checkpoint: Path) -> dict[str, Any] | None:
    """The shape of the model in a checkpoint of ours; None: it is none that can be read."""
    if (settings := settings_in(checkpoint)) is None:
        return None
    model = msgspec.to_builtins(settings.model)
    kind = KINDS[settings.model.attention]
    own = () if kind.is_llama else ("attention", *(name.split(".")[1] for name in kind.settings))
    return {key: model[key] for key in (*SIZES["tiny"], *own)}


def read_config(file: Path) -> dict[str, Any]:
    """The keys of [model] from a transformers config.json. Raises ConfigError where it describes a
    model other than our LLaMA."""
    config = _read_json(file)
    for key, value in LLAMA.items():
        if (found := config.get(key, value)) != value:
            raise ConfigError(
                f"{file}: {key} = {found!r}: only {value!r} is trained here (the LLaMA family)"
            )
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"{file}: quantization_config: quantized weights are not trained here; save the model "
            "without it (transformers' model.dequantize())"
        )
    given = {**_WHERE_ABSENT, **config}
    if given["tie_word_embeddings"] is True and has_own_head(file.parent):
        given["tie_word_embeddings"] = False
    given["num_key_value_heads"] = given["num_key_value_heads"] or given.get("num_attention_heads")
    try:
        return {key: given[hf_key] for key, hf_key in HF_KEYS.items()} | _rope(config, file)
    except KeyError as error:
        raise ConfigError(f"{file}: has no {error}: not the config.json of a LLaMA") from error


def fetch_config(repo: str, offline: bool, setting: str = "model.geometry") -> Path:
    """A hub model's config.json, through huggingface_hub in a process of its own."""
    command = child_command("model_check.data.sources.hub", repo, "config.json")
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"} if offline else None
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_FETCH_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{setting} = {repo!r}: not fetched within {_FETCH_LIMIT_S:g} s; download its "
            "config.json and name the directory"
        ) from error
    if not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"{setting}: {last.removeprefix('error: ')}")
    return Path(done.stdout.strip())


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(file))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"model.geometry: {file}: cannot be read: {why}") from error
    except json.JSONDecodeError as error:
        if (what := what_is(file)) is not None:
            raise ConfigError(f"{file}: it is {what}") from error
        raise ConfigError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    # Nested too deeply, or a number of more than 4,300 digits.
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{file}: not the config.json of a model: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: not the config.json of a model")
    return config


def _rope(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """transformers 5 keeps all of it in rope_parameters; earlier versions kept theta outside."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        raise ConfigError(
            f"{file}: {key} = {rope!r}: expected an object with rope_type, factor and the like, or "
            "null"
        )
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        raise ConfigError(f"{file}: rope_type = {kind!r}: only default and llama3 are known here")
    if lacking := [name for name in HF_SCALING_KEYS.values() if name not in rope]:
        raise ConfigError(f"{file}: {key} has no {', '.join(lacking)}, which llama3 needs")
    scaling = {ours: rope[hf_key] for ours, hf_key in HF_SCALING_KEYS.items()}
    return {"rope_theta": theta, "rope_scaling": scaling}
