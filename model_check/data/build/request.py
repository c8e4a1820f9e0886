"""Settings -> a request to the token cache, as content hashes and as directories. No writing."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from model_check.config.derived import num_micro_batches
from model_check.config.prepared_dir import DATASET
from model_check.config.schema import DocumentTokens, Settings
from model_check.config.validation import (
    DocumentFraction,
    HubSplit,
    RowsWith,
    TextPath,
    What,
    fractions,
    parse_validation,
)
from model_check.data.build.choose import check_music, choose, local_source
from model_check.data.cache.memo import Memo
from model_check.data.read.manifest import (
    SCHEMA,
    TOKEN_STORES,
    TOKENIZER,
    hash_of,
    read_tokenizer,
    short,
)
from model_check.data.read.windows import Layout, Packing, Tail, Windows
from model_check.data.sources.chat import ChatTemplate
from model_check.data.sources.documents import RowForm
from model_check.data.sources.examples import ExampleForm
from model_check.data.sources.hub_text import HubSource
from model_check.data.sources.local_text import LocalSource
from model_check.data.sources.rows import EVERY_ROW, RowRule, earlier_rows, own_paths
from model_check.data.sources.source import Source
from model_check.data.tokenizers.tokenizer import (
    BEGIN_TOKENS,
    TextTokenizer,
    TokenizerChoice,
    document_in,
    parse,
)
from model_check.data.tokenizers.trained import TrainedTokenizer
from model_check.errors import ConfigError, DataError
from model_check.utils.words import Say
from model_check.utils.worker_env import num_ranks

_LONGEST_LABEL = 40
# These words, and SCHEMA, are parts of keys: a change of one makes every cache new.
_PACKING = "windows of context_length + 1 tokens that overlap by 1; tail dropped"
_POLICIES: dict[DocumentTokens, str] = {
    "end": "document, end token; no begin token; special tokens in text are text",
    "begin_end": "begin token, document, end token; special tokens in text are text",
}
_SELECTION = "documents by the hash of their tokens, equal documents on one side"
_OF_EXAMPLES: dict[DocumentTokens, str] = {
    "end": "prompt, target, end token, apart; what a chat template writes alone",
    "begin_end": "begin token, prompt, target, end token, apart; what a chat template writes alone",
}
_ROWS = "examples of at most context_length + 1 tokens"
_OF_FEW = "of fewer than 100 documents, the last tokens"
_APART = "documents equal to one of a validation text are not trained on"
_ROOM_FOR_VALIDATION = 1.05
"""A share of the documents is only about that share of the tokens."""


@dataclass(frozen=True)
class CacheRequest:
    """One view, and the token store under it."""

    root: Path
    source: Source
    tokenizer: TokenizerChoice
    context_length: int
    num_samples: int | None
    """Sequences to train on at most; None: all that the text has."""
    stride: int | None = None
    """Tokens between the starts of sequences; None: context_length."""
    tail: Tail = "drop"
    layout: Layout | None = None
    """Of examples; None: the documents are text, cut into windows."""
    chat: ChatTemplate | None = None
    """Of examples that are messages."""
    document_tokens: DocumentTokens = "end"
    fractions: Mapping[str, float] = field(default_factory=dict)
    """Validation splits that are a share of the documents, by name."""
    or_tail: bool = False
    """Where documents are few, the end of the text validates in their place."""
    validation_texts: Mapping[str, "CacheRequest"] = field(default_factory=dict)
    """Validation splits that are texts of their own, by name."""
    validation: tuple[str, ...] = ()
    """The names of all validation splits, in the order of the setting."""

    @property
    def windows(self) -> Windows:
        return Windows(self.context_length, self.stride or self.context_length, self.tail)

    @cached_property
    def tokens_key(self) -> dict[str, Any]:
        """All that the tokens depend on. The context length only if a number of samples bounds
        them. Raises DataError."""
        return {
            "version": SCHEMA,
            "source": self.source.identity(),
            "tokenizer": self.tokenizer.identity(),
            "policy": (_POLICIES if self.layout is None else _OF_EXAMPLES)[self.document_tokens],
            "max_tokens": self.max_tokens,
        }

    @cached_property
    def tokens_hash(self) -> str:
        return hash_of(self.tokens_key)

    @cached_property
    def view_key(self) -> dict[str, Any]:
        """Options are in it only where they are used, so that keys of older views stay the same.
        Raises DataError."""
        key: dict[str, Any] = {
            "version": SCHEMA,
            "tokens": self.tokens_hash,
            "context_length": self.context_length,
            "num_samples": self.num_samples,
            "packing": _PACKING if self.layout is None else _ROWS,
        }
        if self.layout is not None:
            key["examples"] = [self.layout.packing, self.layout.truncation]
        if self.stride is not None and self.stride != self.context_length:
            key["stride"] = self.stride
        if self.tail != "drop":
            key["tail"] = self.tail
        if self.fractions:
            key["selection"] = _SELECTION
            key["fractions"] = [[name, share] for name, share in self.fractions.items()]
        if self.or_tail:
            key["few"] = _OF_FEW
        if texts := self.validation_texts:
            key["apart"] = _APART
            key["validation"] = list(self.validation)
            key["beside"] = [[name, hash_of(text.view_key)] for name, text in texts.items()]
        return key

    @property
    def max_tokens(self) -> int | None:
        """Enough for `num_samples` sequences, and for the documents that validation takes. Of
        examples all are read."""
        if self.num_samples is None or self.layout is not None:
            return None
        needed = (self.num_samples - 1) * self.windows.stride + self.context_length + 1
        if not self.fractions:
            return needed
        left = 1 - sum(self.fractions.values())
        return math.ceil(needed / left * _ROOM_FOR_VALIDATION)

    def begin_id_of(self, tokenizer: TextTokenizer) -> int | None:
        """What begins each document; None: nothing does. Raises ConfigError."""
        if self.document_tokens == "end":
            return None
        if tokenizer.begin_id is None:
            raise ConfigError(
                f"data.document_tokens = begin_end: {tokenizer.name} has no token that begins a "
                f"document (puts none before a text, has none of {', '.join(BEGIN_TOKENS)}); take "
                "data.document_tokens=end, or another data.tokenizer"
            )
        return tokenizer.begin_id

    @property
    def store_name(self) -> str:
        return short(self.tokens_hash)

    @property
    def store(self) -> Path:
        return self.root / TOKEN_STORES / self.store_name

    @cached_property
    def view(self) -> Path:
        count = "all" if self.num_samples is None else f"n{self.num_samples}"
        labels = [self.source.label, self.tokenizer.label, f"ctx{self.context_length}", count]
        readable = "__".join(_slug(label) for label in labels)
        return self.root / f"{readable}__{short(hash_of(self.view_key))}"


class StoredTokenizer:
    """`trained` as it is in the store of `request`, which must exist when it is loaded."""

    def __init__(self, trained: TrainedTokenizer, request: CacheRequest) -> None:
        self.name = trained.name
        self.label = trained.label
        self._trained = trained
        self._request = request

    def identity(self) -> dict[str, Any]:
        return {"trained on": self._request.source.identity(), **self._trained.identity()}

    def load(self, source: Source) -> TextTokenizer:
        store = self._request.store
        document = document_in(read_tokenizer(store), store / TOKENIZER)
        return TextTokenizer(parse(document, store / TOKENIZER), self.name)


def cache_root(settings: Settings) -> Path:
    """The directory of the entries: the shared cache, or a part of a prepared directory that is to
    be made."""
    if settings.data.output_dir is not None:
        return Path(settings.data.output_dir) / DATASET
    return Path(settings.data.cache_dir)


def cache_request(settings: Settings, say: Say) -> CacheRequest:
    """Raises DataError, ConfigError."""
    memo = Memo(Path(settings.data.cache_dir))
    validation = parse_validation(settings.data.validation)
    source, tokenizer, form = choose(settings, memo, say)
    _say_left_out(source, say)
    num_samples = settings.data.num_samples
    if num_samples is None and source.endless:
        training = settings.training
        ranks = num_ranks()
        a_step = num_micro_batches(settings, ranks) * ranks * training.batch_size
        num_samples = training.max_steps * a_step
    train = CacheRequest(
        root=cache_root(settings),
        source=source,
        tokenizer=tokenizer,
        context_length=settings.training.context_length,
        num_samples=num_samples,
        stride=settings.data.stride,
        tail=settings.data.tail,
        layout=_layout(settings),
        chat=form.template if isinstance(form, ExampleForm) else None,
        document_tokens=settings.data.document_tokens,
        fractions=fractions(validation),
        or_tail=any(isinstance(w, DocumentFraction) and w.or_tail for w in validation.values()),
        validation=tuple(validation),
    )
    texts = _validation_texts(train, validation, form, settings, memo, say)
    return replace(train, validation_texts=texts)


def _layout(settings: Settings) -> Layout | None:
    if settings.training.stage == "next_token":
        return None
    packing: Packing = "several" if settings.data.document_masking else "one"
    return Layout(settings.training.context_length, packing, settings.data.truncation)


def _say_left_out(source: Source, say: Say) -> None:
    if isinstance(source, LocalSource) and (line := source.left_out()):
        say(f"data: {line}")


def _validation_texts(
    train: CacheRequest,
    validation: Mapping[str, What],
    form: RowForm,
    settings: Settings,
    memo: Memo,
    say: Say,
) -> dict[str, CacheRequest]:
    own_text = {n: w for n, w in validation.items() if not isinstance(w, DocumentFraction)}
    if not own_text:
        return {}
    tokenizer: TokenizerChoice = train.tokenizer
    if isinstance(tokenizer, TrainedTokenizer):
        tokenizer = StoredTokenizer(tokenizer, train)
    found: dict[str, CacheRequest] = {}
    contents = {"the training text": train.source.identity()}
    for name in own_text:
        source = _source_of(name, own_text, train.source, form, settings, memo)
        check_music(source, train.tokenizer, settings)
        # Rows are of the training text, of which it was said already.
        if isinstance(own_text[name], TextPath):
            _say_left_out(source, say)
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
    name: str,
    validation: Mapping[str, What],
    train: Source,
    form: RowForm,
    settings: Settings,
    memo: Memo,
) -> Source:
    data = settings.data
    match validation[name]:
        case TextPath(path=path):
            place = Path(path).expanduser()
            others = map(Path, map(os.path.realpath, own_paths(validation)))
            inner = tuple(path for path in others if Path(os.path.realpath(place)) in path.parents)
            return local_source(place, settings, form, memo, EVERY_ROW, inner)
        case HubSplit(split=split):
            if not isinstance(train, HubSource):
                raise DataError(
                    f"data.validation: {name}=split:{split} is for hub datasets, not for "
                    f"{train.name}"
                )
            return train.with_split(split)
        case RowsWith(column=column, value=value) as these:
            place = Path(data.dataset)
            if not place.exists():
                raise ConfigError(
                    f"data.validation: {name}={column}:{value}: only rows of local JSONL and "
                    "parquet, and MIDI files, are divided by a column, and data.dataset is "
                    f"{data.dataset!r}; a hub dataset has splits of its own (split:NAME)"
                )
            rows = RowRule(these, earlier_rows(name, validation))
            return local_source(place, settings, form, memo, rows, own_paths(validation))
        case DocumentFraction():
            raise AssertionError("a fraction has no text of its own")


def _slug(label: str) -> str:
    """A part of a directory's name, which does not contain the separator of the parts."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:_LONGEST_LABEL] or "unnamed"
