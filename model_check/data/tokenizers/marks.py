"""The tokens that a model knows as the beginning and the end of a text."""

from typing import NamedTuple

from model_check.config.schema import Settings
from model_check.data.sources.chat import ChatTemplate, TemplateError
from model_check.data.tokenizers.tokenizer import TextTokenizer


class Mark(NamedTuple):
    """A token that marks where documents begin or end."""

    token: str
    id: int


class Marks(NamedTuple):
    """What the model knows of documents; None: it knows no such token."""

    begin: Mark | None
    end: Mark


def marks_of(tokenizer: TextTokenizer, settings: Settings) -> Marks:
    """After a training with these settings."""
    end = Mark(tokenizer.end_token, tokenizer.end_id)
    return Marks(_begin(tokenizer, end, settings), end)


def ends_of_answers(tokenizer: TextTokenizer, chat: ChatTemplate | None) -> list[int]:
    """The first special token that a chat template writes behind an answer; empty where there is
    none, or no answer without more. Raises DataError."""
    if chat is None:
        return []
    try:
        return tokenizer.special_ids(chat.end())[:1]
    except TemplateError:
        return []


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
