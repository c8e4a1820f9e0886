"""What a prepared directory says about itself: metadata.json, and the settings that follow from it.

A prepared directory is `tokenizer.json`, `dataset/` (a token cache of its own) and `metadata.json`,
written last.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from model_check.config.fields import given_by, setting_text
from model_check.config.schema import DocumentTokens, Stage, Truncation
from model_check.errors import ConfigError
from model_check.utils.held import hold

METADATA = "metadata.json"
DATASET = "dataset"
_LONGEST = 1 << 20


class SplitCount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One split of the data: `num_tokens` = those in its sequences + `num_dropped`."""

    num_sequences: int
    num_documents: int
    num_trained_on: int | None = None
    """Of an older version: documents of a validation split that `train` holds too, word for word;
    None for `train`."""
    num_left_out: int = 0
    """Of `train`: documents that are equal to one that validates, and are not trained on."""
    num_tokens: int
    num_dropped: int
    num_cut: int = 0
    """Examples of which a sequence holds only a part."""
    num_unfit: int = 0
    """Examples that are left out: longer than a sequence, or without a target in it."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """metadata.json of a prepared directory."""

    schema: Literal[1] = 1
    kind: Literal["prepared dataset"] = "prepared dataset"
    dataset: str
    tokenizer: str
    vocab_size: int
    end_token: str
    end_id: int
    max_length: int
    """Tokens in a sequence."""
    stride: int
    """Tokens between the starts of neighbouring sequences."""
    overlap: int
    """Tokens that neighbours share: max_length - stride."""
    tail: Literal["drop", "pad"]
    document_tokens: DocumentTokens = "end"
    stage: Stage = "next_token"
    document_masking: bool = False
    """Of examples: a sequence holds several."""
    truncation: Truncation = "keep_start"
    """Of examples."""
    validation: str | None
    """As in data.validation."""
    num_documents: int
    num_tokens: int
    splits: dict[str, SplitCount]
    """`train` first."""
    repairs: dict[str, int]
    """What was repaired or skipped in the text, and how often."""
    view: str
    """The token cache's entry, in `dataset/`."""
    built_with: dict[str, str]


def read_metadata(directory: Path) -> Metadata | None:
    """None: `directory` is not a prepared one. Raises ConfigError where it is one whose
    metadata cannot be read or understood."""
    path = directory / METADATA
    try:
        if not (directory / DATASET).is_dir():
            return None
        with hold(directory) as held:
            raw = held.read(METADATA, _LONGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(raw, type=Metadata)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not the metadata of a prepared directory ({error}); prepare it again with "
            "--force-preprocess (data.force_preprocess)"
        ) from error


def prepared_directory(dataset: str) -> tuple[Path, Metadata] | None:
    """What data.dataset = `dataset` is, where it is a prepared directory. Raises ConfigError."""
    directory = Path(dataset)
    metadata = read_metadata(directory) if dataset else None
    return None if metadata is None else (directory, metadata)


def settings_of(metadata: Metadata) -> dict[str, Any]:
    """The settings that training from the directory takes unless a person gives others: dotted name
    -> value."""
    of_examples = {
        "data.document_masking": metadata.document_masking,
        "data.truncation": metadata.truncation,
    }
    return {
        "training.stage": metadata.stage,
        **(of_examples if metadata.stage == "prompt_target" else {}),
        "training.context_length": metadata.max_length,
        "data.stride": None if metadata.overlap == 0 else metadata.stride,
        "data.tail": metadata.tail,
        "data.document_tokens": metadata.document_tokens,
        "data.validation": metadata.validation,
        "model.vocab_size": None,
    }


def check_stage(directory: Path, metadata: Metadata, preset: str, stage: Stage | None) -> None:
    """A preset may be chosen for its stage. Raises ConfigError where the directory has another."""
    if stage not in (None, metadata.stage):
        raise ConfigError(
            f"{preset}: training.stage = {stage}, but {directory} was prepared with "
            f"{metadata.stage}; take another preset, or give the text itself as data.dataset"
        )


def check_fits(
    directory: Path, metadata: Metadata, values: Mapping[str, Any], sources: Mapping[str, str]
) -> None:
    """Raises ConfigError where `values` (by dotted name) ask for other sequences than the directory
    holds, or for a model with fewer rows than the data has ids."""
    rows = values["model.vocab_size"]
    if rows is not None and rows < metadata.vocab_size:
        raise ConfigError(
            f"{given_by(sources['model.vocab_size'], 'model.vocab_size')}"
            f"model.vocab_size = {rows} is too small for {directory}, "
            f"which was prepared with {metadata.vocab_size} ids; make it larger, or "
            "null to follow the data"
        )
    asked = {**values, "model.vocab_size": None}
    if values["data.stride"] == values["training.context_length"]:
        asked["data.stride"] = None
    for name, prepared in settings_of(metadata).items():
        if asked[name] != prepared:
            ours = setting_text(values[name])
            theirs = "without" if prepared is None else f"with {setting_text(prepared)}"
            raise ConfigError(
                f"{given_by(sources[name], name)}{name} = {ours}, but {directory} was prepared "
                f"{theirs}; leave it out to follow the data, or prepare the text again with it"
            )
