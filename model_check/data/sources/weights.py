"""The directory of a model's safetensors: a local one, or the hub's, fetched once."""

from pathlib import Path

from model_check.config.schema import Settings
from model_check.data.sources.hub import Hub
from model_check.errors import DataError
from model_check.utils.checkpoint_names import is_sharded
from model_check.utils.words import Say

_PATTERNS = ("config.json", "tokenizer.json", "model.safetensors.index.json", "model*.safetensors")
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
    say(f"weights: fetching {source}")
    hub = Hub(settings.data)
    directory = hub.model_files(source, _PATTERNS, "name a local directory")
    if not _has_weights(directory):
        raise DataError(f"{source}: has no safetensors on {hub.endpoint}")
    return directory


def _cached(repo: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(repo, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return directory if _has_weights(directory) else None


def _has_weights(directory: Path) -> bool:
    """All of them: a model may have several numbered files."""
    if (directory / "model.safetensors").is_file():
        return True
    numbered = list(directory.glob("model-*-of-*.safetensors"))
    counts = {file.stem.rpartition("-")[2] for file in numbered}
    return any(len(numbered) >= int(count) for count in counts if count.isdigit())
