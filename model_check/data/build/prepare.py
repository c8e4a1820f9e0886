"""Find or build the token cache that the settings ask for. No torch: one process prepares for all
workers, and a cache that is there is found within a fraction of a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model_check.config.prepared_dir import SplitCount
from model_check.config.schema import Settings
from model_check.data.build.discard import discard
from model_check.data.build.request import want
from model_check.data.build.wanted import Wanted
from model_check.data.cache.prepared import (
    check_output,
    check_same,
    counts_of,
    find_prepared,
    write_prepared,
)
from model_check.data.cache.publish import PlaceError
from model_check.data.read.manifest import (
    CorruptEntryError,
    TokensManifest,
    ViewManifest,
    read_view,
)
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.tokenizer import use_threads
from model_check.errors import ConfigError, DataError, StorageError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A token cache that is whole."""

    path: Path
    hit: bool
    """It was there: nothing was tokenized by this process."""
    dataset: str
    """The text as it really is: `embedded`, `Salesforce/wikitext`, `notes.txt`."""
    num_tokens: int
    num_sequences: int
    vocab_size: int
    splits: dict[str, SplitCount]
    """What each split holds and drops, `train` first."""
    seconds: float


def prepare(settings: Settings, say: Say, bar: Say | None = None) -> Prepared:
    """The cache for `settings`, built unless it is there. `say` gets lines for people; `bar` draws
    over what it drew before.

    Raises DataError (the text or the tokenizer cannot be had, the text is too short), StorageError
    (the cache directory), ConfigError (the tokenizer has more ids than the model has rows).
    """
    started = time.monotonic()
    use_threads(settings.data.num_proc)
    if (ready := find_prepared(settings)) is not None:
        _tell_what_is_not_used(settings, say)
        return _prepared(*ready, hit=True, started=started)
    if settings.data.output_dir is None:
        wanted = want(settings, say)
        view, tokens, hit = _found_or_made(wanted, settings, say, bar)
    else:
        wanted, view, tokens, hit = _laid_out(Path(settings.data.output_dir), settings, say, bar)
    return _prepared(wanted.view, view, tokens, hit=hit, started=started)


def _laid_out(
    output_dir: Path, settings: Settings, say: Say, bar: Say | None
) -> tuple[Wanted, ViewManifest, TokensManifest, bool]:
    """Like `_found_or_made`, in a prepared directory."""
    output_dir, force = output_dir.expanduser(), settings.data.force_preprocess
    check_output(output_dir, force=force)
    wanted = want(settings, say)
    if not force:
        check_same(output_dir, wanted.view)
    try:
        view, tokens, hit = _found_or_made(wanted, settings, say, bar)
        write_prepared(output_dir, wanted.view, view, tokens, settings)
    except PlaceError as error:
        raise StorageError(
            f"{error.problem}; set --output-dir (data.output_dir) to a directory {error.which}"
        ) from error
    return wanted, view, tokens, hit


def _tell_what_is_not_used(settings: Settings, say: Say) -> None:
    """Of a prepared directory nothing is prepared any more."""
    data = settings.data
    if data.force_preprocess:
        raise ConfigError(
            f"data.force_preprocess: {data.dataset} is prepared, and the text that it was made "
            "from is not in it; give that as data.dataset and the directory as data.output_dir"
        )
    if data.num_samples is not None:
        say(f"data: {data.dataset} is used whole: data.num_samples is for preparing")


def _found_or_made(
    wanted: Wanted, settings: Settings, say: Say, bar: Say | None
) -> tuple[ViewManifest, TokensManifest, bool]:
    """(view, its store, whether it was there)"""
    verify = settings.data.verify
    if settings.data.force_preprocess:
        discard(wanted)
    try:
        view, tokens = read_view(wanted.view, verify)
        hit = True
        for line in Repairs.of(tokens.repairs, tokens.repair_places).lines():
            say(f"data: {line}")
    except (FileNotFoundError, CorruptEntryError):
        # numpy: only a build pays for its import.
        from model_check.data.build.filling import How
        from model_check.data.build.make import make

        how = How(settings.data.tokenizer_backend, settings.data.num_proc)
        try:
            _, hit = make(wanted, verify, say, how, bar)
            view, tokens = read_view(wanted.view, "off")
        except FileNotFoundError as error:
            raise DataError(
                f"{error}: was removed meanwhile (by --gc --older-than 0?); prepare again"
            ) from error
    _check_vocabulary(settings, view)
    if wanted.num_samples is not None and view.num_sequences < wanted.num_samples:
        say(f"data: {view.num_sequences:,} sequences: {view.dataset} has no more{_but_for(view)}")
    return view, tokens, hit


def _prepared(
    path: Path, view: ViewManifest, tokens: TokensManifest, *, hit: bool, started: float
) -> Prepared:
    return Prepared(
        path=path.absolute(),
        hit=hit,
        dataset=view.dataset,
        num_tokens=view.num_tokens,
        num_sequences=view.num_sequences,
        vocab_size=view.vocab_size,
        splits=counts_of(view, tokens),
        seconds=time.monotonic() - started,
    )


def _but_for(view: ViewManifest) -> str:
    return f" beside {', '.join(view.splits)}" if view.splits else ""


def _check_vocabulary(settings: Settings, view: ViewManifest) -> None:
    rows = settings.model.vocab_size
    if rows is not None and rows < view.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {rows} is too small for the tokenizer {view.tokenizer}, which has "
            f"{view.vocab_size} ids; make it larger, or null to follow the tokenizer"
        )
