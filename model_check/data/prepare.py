"""Find or build the token cache that the settings ask for. No torch: one process prepares for all
workers, and a cache that is there is found within a fraction of a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model_check.config.derived import num_micro_batches
from model_check.config.schema import Settings
from model_check.data.choose import choose
from model_check.data.manifest import CorruptEntryError, ViewManifest, read_view
from model_check.data.memo import Memo
from model_check.data.tokenizer import use_threads
from model_check.data.wanted import Wanted
from model_check.errors import ConfigError

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
    seconds: float


def prepare(settings: Settings, say: Say) -> Prepared:
    """The cache for `settings`, built unless it is there. `say` gets lines for people.

    Raises DataError (the text or the tokenizer cannot be had, the text is too short), StorageError
    (the cache directory), ConfigError (the tokenizer has more ids than the model has rows).
    """
    started = time.monotonic()
    use_threads(settings.data.num_proc)
    wanted = _wanted(settings, say)
    try:
        view, hit = read_view(wanted.view, settings.data.verify)[0], True
    except (FileNotFoundError, CorruptEntryError):
        from model_check.data.make import make  # numpy and filelock: only who builds pays for them

        view, hit = make(wanted, settings.data.verify, say)
    _check_vocabulary(settings, view)
    if wanted.num_samples is not None and view.num_sequences < wanted.num_samples:
        say(f"data: {view.num_sequences:,} sequences: {view.dataset} has no more")
    return Prepared(
        path=wanted.view.absolute(),
        hit=hit,
        dataset=view.dataset,
        num_tokens=view.num_tokens,
        num_sequences=view.num_sequences,
        vocab_size=view.vocab_size,
        seconds=time.monotonic() - started,
    )


def _wanted(settings: Settings, say: Say) -> Wanted:
    root = Path(settings.data.cache_dir).expanduser()
    source, tokenizer = choose(settings, Memo(root), say)
    num_samples = settings.data.num_samples
    if num_samples is None and source.endless:
        training = settings.training
        num_samples = training.max_steps * num_micro_batches(settings) * training.batch_size
    return Wanted(root, source, tokenizer, settings.training.context_length, num_samples)


def _check_vocabulary(settings: Settings, view: ViewManifest) -> None:
    rows = settings.model.vocab_size
    if rows is not None and rows < view.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {rows} is too small for the tokenizer {view.tokenizer}, which has "
            f"{view.vocab_size} ids; make it larger, or null to follow the tokenizer"
        )
