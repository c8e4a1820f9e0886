"""The tokens that a model knows as the beginning and the end of a text."""

from typing import NamedTuple

from model_check.config.schema import Settings
from model_check.data.sources.chat import ChatTemplate, TemplateError
from model_check.data.tokenizers.tokenizer import TextTokenizer

_SHORTEST_MARK = 3
"""Characters. A full stop that a template writes behind an answer would end its first sentence."""


class Mark(NamedTuple):
    """A token that marks where documents begin or end."""

    token: str
    id: int


class Marks(NamedTuple):
    """What the model knows of documents; None: it knows no such token."""

    begin: Mark | None
    end: Mark


class EndOfAnswers(NamedTuple):
    """At most one of both has an element."""

    ids: list[int]
    """The first special token of the end."""
    texts: list[str]
    """The end itself, where none of its marks is a special token of the tokenizer."""


def marks_of(tokenizer: TextTokenizer, settings: Settings) -> Marks:
    """After a training with these settings."""
    end = Mark(tokenizer.end_token, tokenizer.end_id)
    return Marks(_begin(tokenizer, end, settings), end)


def end_of_answers(tokenizer: TextTokenizer, chat: ChatTemplate | None) -> EndOfAnswers:
    """What a chat template writes behind each answer. Raises DataError."""
    try:
        end = "" if chat is None else chat.end()
    except TemplateError:  # it takes no conversation of one question
        end = ""
    ids = tokenizer.special_ids(end)[:1]
    is_mark = len(end.strip()) >= _SHORTEST_MARK
    return EndOfAnswers(ids, [end.strip()] if is_mark and not ids else [])


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
