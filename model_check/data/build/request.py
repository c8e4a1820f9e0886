"""Settings -> what is wanted of the token cache: sources, tokenizer, windows, validation splits."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from model_check.config.derived import num_micro_batches
from model_check.config.prepared_dir import DATASET
from model_check.config.schema import Settings
from model_check.config.validation import (
    DocumentFraction,
    HubSplit,
    RowsWith,
    TextPath,
    What,
    fractions,
    parse_validation,
)
from model_check.data.build.choose import Say, choose
from model_check.data.build.store_tokenizer import TokenizerOfStore
from model_check.data.build.wanted import Wanted
from model_check.data.cache.memo import Memo
from model_check.data.sources.hub_text import HubSource
from model_check.data.sources.local_text import LocalSource
from model_check.data.sources.rows import RowRule, Value, earlier_values, own_paths
from model_check.data.sources.source import Source
from model_check.data.tokenizers.tokenizer import TokenizerChoice, TrainedTokenizer
from model_check.errors import ConfigError, DataError


def cache_root(settings: Settings) -> Path:
    """The directory of the entries: in a prepared directory that is to be made, or the shared
    cache."""
    if settings.data.output_dir is not None:
        return Path(settings.data.output_dir).expanduser() / DATASET
    return Path(settings.data.cache_dir).expanduser()


def want(settings: Settings, say: Say) -> Wanted:
    """Raises DataError, ConfigError."""
    memo = Memo(Path(settings.data.cache_dir).expanduser())
    validation = parse_validation(settings.data.validation)
    source, tokenizer = choose(settings, memo, say)
    _tell_left_out(source, say)
    num_samples = settings.data.num_samples
    if num_samples is None and source.endless:
        training = settings.training
        num_samples = training.max_steps * num_micro_batches(settings) * training.batch_size
    train = Wanted(
        root=cache_root(settings),
        source=source,
        tokenizer=tokenizer,
        context_length=settings.training.context_length,
        num_samples=num_samples,
        stride=settings.data.stride,
        tail=settings.data.tail,
        fractions=fractions(validation),
        validation=tuple(validation),
    )
    return replace(train, beside=_beside(train, validation, settings, memo, say))


def _tell_left_out(source: Source, say: Say) -> None:
    if isinstance(source, LocalSource) and (line := source.left_out()):
        say(f"data: {line}")


def _beside(
    train: Wanted, validation: Mapping[str, What], settings: Settings, memo: Memo, say: Say
) -> dict[str, Wanted]:
    own_text = {n: w for n, w in validation.items() if not isinstance(w, DocumentFraction)}
    if not own_text:
        return {}
    tokenizer: TokenizerChoice = train.tokenizer
    if isinstance(tokenizer, TrainedTokenizer):
        tokenizer = TokenizerOfStore(tokenizer, train)
    found: dict[str, Wanted] = {}
    contents = {"the training text": train.source.identity()}
    for name in own_text:
        source = _source_of(name, own_text, train.source, settings, memo)
        if isinstance(own_text[name], TextPath):  # rows are of the training text, which was told
            _tell_left_out(source, say)
        identity = source.identity()
        for other, content in contents.items():
            if content == identity:
                raise DataError(f"data.validation: {name} is the same text as {other}")
        contents[name] = identity
        found[name] = replace(
            train,
            source=source,
            tokenizer=tokenizer,
            num_samples=train.num_samples if source.endless else None,
            tail="pad",
            fractions={},
            validation=(),
        )
    return found


def _source_of(
    name: str, validation: Mapping[str, What], train: Source, settings: Settings, memo: Memo
) -> Source:
    data = settings.data
    match validation[name]:
        case TextPath(path=path):
            place = Path(path).expanduser()
            if not place.exists():
                raise DataError(
                    f"data.validation: {name}: no such file or directory ({place.absolute()})"
                )
            others = map(Path, map(os.path.realpath, own_paths(validation)))
            inner = tuple(path for path in others if Path(os.path.realpath(place)) in path.parents)
            return LocalSource(place, data.text_column, memo, without=inner)
        case HubSplit(split=split):
            if not isinstance(train, HubSource):
                raise DataError(
                    f"data.validation: {name}=split:{split} is for hub datasets, not for "
                    f"{train.name}"
                )
            return train.with_split(split)
        case RowsWith(column=column, value=value):
            place = Path(data.dataset).expanduser()
            if not place.exists():
                raise ConfigError(
                    f"data.validation: {name}={column}:{value}: only rows of local JSONL and "
                    f"parquet are divided by a column, and data.dataset is {data.dataset!r}; a hub "
                    "dataset has splits of its own (split:NAME)"
                )
            rows = RowRule(Value(column, value), earlier_values(name, validation))
            return LocalSource(place, data.text_column, memo, rows, own_paths(validation))
        case DocumentFraction():
            raise AssertionError("a fraction has no text of its own")
