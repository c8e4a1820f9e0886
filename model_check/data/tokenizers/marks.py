"""The tokens that a model knows as the beginning and the end of a text."""

from typing import NamedTuple

from model_check.config.schema import Settings
from model_check.data.tokenizers.tokenizer import TextTokenizer


class Mark(NamedTuple):
    """A token that marks where documents begin or end."""

    token: str
    id: int


class Marks(NamedTuple):
    """What the model knows of documents; None: it knows no such token, or the tokenizer is gone."""

    begin: Mark | None
    end: Mark | None


NO_MARKS = Marks(None, None)


def marks_of(tokenizer: TextTokenizer, settings: Settings) -> Marks:
    """After a training with these settings."""
    end = Mark(tokenizer.end_token, tokenizer.end_id)
    return Marks(_begin(tokenizer, end, settings), end)


def _begin(tokenizer: TextTokenizer, end: Mark, settings: Settings) -> Mark | None:
    """The begin token, where each document had one, or where the first weights may know it. Without
    one the end of a document is the begin of the next, unless that one never saw it."""
    is_marked = settings.data.document_tokens == "begin_end"
    if settings.training.stage == "prompt_target" and not is_marked:
        return None
    knows_own = is_marked or settings.model.init_from
    if knows_own and tokenizer.begin_token is not None and tokenizer.begin_id is not None:
        return Mark(tokenizer.begin_token, tokenizer.begin_id)
    return None if settings.data.document_masking else end
