"""The directory of a model's safetensors: a local one, or the hub's, fetched once."""

import json
from pathlib import Path

from model_check.config.schema import Settings
from model_check.data.sources.hub import Hub
from model_check.errors import DataError
from model_check.utils.checkpoint_names import is_sharded
from model_check.utils.words import Say

_BESIDE = ("config.json", "tokenizer.json")
_FORMS = (
    ("model.safetensors", ("model.safetensors.index.json", "model*.safetensors")),
    ("pytorch_model.bin", ("pytorch_model.bin.index.json", "pytorch_model*.bin")),
)
"""The older form, which has to be unpickled, only where there is no other."""
SAFETENSORS = ".safetensors"


def weights_directory(settings: Settings, say: Say) -> Path | None:
    """The directory, or the file of safetensors, that `model.init_from` names; None where it is a
    checkpoint of ours, or not set. Raises DataError.

    Files that are here already are used without a request: eight workers would make eight.
    """
    source = settings.model.init_from
    if source is None:
        return None
    place = Path(source)
    if place.is_dir() and not is_sharded(place):
        return place
    if place.is_file() and place.suffix == SAFETENSORS:
        return place
    if place.exists():
        return None
    if source.count("/") != 1 or source.endswith(".pt"):
        raise DataError(
            f"model.init_from = {source!r}: no file or directory that is here, and no hub id"
        )
    if (cached := _cached(source)) is not None:
        return cached
    say(f"weights: fetching {source}, to be held against the hub's checksums")
    hub = Hub(settings.data)
    for _, patterns in _FORMS:
        directory = hub.model_files(source, (*_BESIDE, *patterns), "name a local directory")
        if _has_weights(directory):
            return directory
    raise DataError(
        f"{source}: has neither {' nor '.join(name for name, _ in _FORMS)} (nor their shards) on "
        f"{hub.endpoint}"
    )


def _cached(repo: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(repo, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return directory if _has_weights(directory) else None


def _has_weights(directory: Path) -> bool:
    """All of them: a model may have several files, which an index names."""
    return any(
        (directory / name).is_file() or _has_shards(directory, directory / f"{name}.index.json")
        for name, _ in _FORMS
    )


def _has_shards(directory: Path, index: Path) -> bool:
    """An index that is damaged is told when it is read."""
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
        return bool(files) and all((directory / file).is_file() for file in files)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return True
