"""Prepared directories: `tokenizer.json`, `dataset/` (a token cache of its own) and
`metadata.json`, written last."""

from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from model_check.config.prepared_dir import (
    DATASET,
    METADATA,
    Metadata,
    SplitCount,
    read_metadata,
)
from model_check.config.schema import Settings
from model_check.data.cache.publish import storage_errors
from model_check.data.read.manifest import (
    TOKEN_STORES,
    TOKENIZER,
    TRAIN,
    CorruptEntryError,
    SplitManifest,
    TokensManifest,
    ViewManifest,
    read_tokenizer,
    read_view,
    store_of,
    to_bytes,
)
from model_check.errors import DataError
from model_check.utils.held import HeldDirectory, hold


def find_prepared(settings: Settings) -> tuple[Path, ViewManifest, TokensManifest] | None:
    """(path of its view, the view, its store) if data.dataset is a prepared directory, else None.
    Whether it fits the settings was checked when those were loaded. Raises DataError for a damaged
    one."""
    directory = Path(settings.data.dataset)
    metadata = read_metadata(directory)
    if metadata is None:
        return None
    path = directory / DATASET / Path(metadata.view).name
    try:
        return path, *read_view(path, settings.data.verify)
    except FileNotFoundError as error:
        raise DataError(f"{path}: is gone; prepare {directory} again") from error
    except CorruptEntryError as error:
        raise DataError(f"{error}; prepare {directory} again") from error


def check_output(directory: Path, *, force: bool) -> None:
    """Raises DataError where foreign files would be replaced; unless `force`, ConfigError where our
    own cannot be understood."""
    theirs = [name for name in (TOKENIZER, METADATA) if (directory / name).exists()]
    ours = (directory / DATASET / TOKEN_STORES).is_dir()
    if not force:
        ours = read_metadata(directory) is not None or ours
    if theirs and not ours:
        raise DataError(
            f"{directory}: has a {theirs[0]} and is no prepared directory; data.output_dir must "
            "be new, empty, or one that was prepared"
        )


def check_same(directory: Path, view: Path) -> None:
    """Raises DataError where `directory` holds another preparation than `view`."""
    metadata = read_metadata(directory)
    if metadata is None or _hash_in(metadata.view) == _hash_in(view.name):
        return
    validation = f", validation {metadata.validation}" if metadata.validation else ""
    raise DataError(
        f"{directory}: holds {metadata.num_documents:,} documents of {metadata.dataset}, tokenizer "
        f"{metadata.tokenizer}, {metadata.max_length} tokens a sequence{validation}, which is not "
        "what is asked for now; --force-preprocess (data.force_preprocess) replaces it, another "
        "--output-dir (data.output_dir) leaves it"
    )


def _hash_in(view: str) -> str:
    """The rest of a view's name is only for people."""
    return view.rpartition("__")[2]


def write_prepared(
    directory: Path, view_path: Path, view: ViewManifest, tokens: TokensManifest, settings: Settings
) -> None:
    """Write the rest of a prepared directory around the entry in its `dataset/`. Files with the
    right content are left alone. Raises StorageError."""
    tokenizer = read_tokenizer(store_of(view_path, view))
    metadata = to_bytes(_metadata(view_path, view, tokens, settings))
    with storage_errors(directory), hold(directory) as held:
        for name, content in ((TOKENIZER, tokenizer), (METADATA, metadata)):
            if not _holds(held, name, content):
                held.replace(name, content)


def _holds(directory: HeldDirectory, name: str, content: bytes) -> bool:
    with suppress(OSError):
        return directory.read(name, len(content)) == content
    return False


def counts_of(view: ViewManifest, tokens: TokensManifest) -> dict[str, SplitCount]:
    """What each split holds and drops, `train` first."""
    left = tokens.num_documents - sum(split.num_documents for split in view.inner_splits())
    if view.train is not None:
        own = _count(view, replace(view.train, num_sequences=view.num_sequences))
        own = replace(own, num_trained_on=None, num_left_out=left - view.train.num_documents)
        return {TRAIN: own, **{name: _count(view, split) for name, split in view.splits.items()}}
    num_documents = left if view.num_train_documents is None else view.num_train_documents
    train = SplitManifest(
        num_sequences=view.num_sequences,
        num_tokens=view.num_train_tokens or view.num_tokens,
        num_documents=num_documents,
    )
    others = {name: _count(view, split) for name, split in view.splits.items()}
    num_left_out = left - num_documents
    own = replace(_count(view, train), num_trained_on=None, num_left_out=num_left_out)
    return {TRAIN: own, **others}


def _count(view: ViewManifest, split: SplitManifest) -> SplitCount:
    if view.examples is None:
        used = view.windows.num_used(split.num_sequences, split.num_tokens)
    else:
        used = split.num_tokens - split.num_dropped
    return SplitCount(
        num_sequences=split.num_sequences,
        num_documents=split.num_documents,
        num_trained_on=split.num_trained_on,
        num_tokens=used,
        num_dropped=split.num_tokens - used,
        num_cut=split.num_cut,
        num_unfit=split.num_unfit,
    )


def _metadata(
    view_path: Path, view: ViewManifest, tokens: TokensManifest, settings: Settings
) -> Metadata:
    stride = view.windows.stride
    return Metadata(
        dataset=view.dataset,
        tokenizer=view.tokenizer,
        vocab_size=view.vocab_size,
        end_token=tokens.end_token,
        end_id=tokens.end_id,
        max_length=view.context_length,
        stride=stride,
        overlap=view.context_length - stride,
        tail=view.tail,
        document_tokens=settings.data.document_tokens,
        stage=settings.training.stage,
        document_masking=view.examples == "several",
        truncation=settings.data.truncation,
        validation=settings.data.validation,
        num_documents=tokens.num_documents,
        num_tokens=tokens.num_tokens,
        splits=counts_of(view, tokens),
        repairs=tokens.repairs,
        view=view_path.name,
        built_with=tokens.built_with,
    )
