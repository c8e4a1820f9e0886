"""A model goes on with a text, token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from model_check.data.sources.chat import ChatTemplate, Message, TemplateError
from model_check.data.sources.text import Repairs, clean_part
from model_check.errors import ConfigError
from model_check.generate.sampling import Sampler, Sampling, StopText
from model_check.generate.text_model import TextForm, TextModel
from model_check.model import Llama


class Ended(StrEnum):
    """Why a text is over."""

    END_TOKEN = "the model ended it"
    STOP = "a stop text came"
    MAX_TOKENS = "max tokens"
    CONTEXT = "the context is full"


@dataclass(frozen=True)
class Piece:
    """What one more token adds to a text."""

    text: str
    """May be empty: a character can take several tokens."""
    num_tokens: int
    """Generated so far."""
    ended: Ended | None = None


def next_tokens(model: Llama, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Without end, and one after the other: nothing is computed that nobody asks for. Raises
    ValueError past the context, and NonFiniteError."""
    device = model.head_weight.device
    sampler, caches = Sampler(sampling), model.new_caches()
    tokens = list(ids)
    while True:
        read = torch.tensor([tokens], device=device)
        scores_BTV = model.decode(read, caches, only_last=True)
        tokens = [sampler.pick(scores_BTV[0, -1])]
        yield tokens[0]


def generate(
    text_model: TextModel,
    prompt: str,
    sampling: Sampling,
    *,
    max_tokens: int,
    stops: Sequence[str] = (),
) -> Iterator[Piece]:
    """The text that follows `prompt`, piece by piece; the last one says why it ends. Raises
    ConfigError for a prompt that nothing can follow, and NonFiniteError."""
    ids = prompt_ids(text_model, prompt)
    yield from text_after(text_model, ids, sampling, max_tokens=max_tokens, stops=stops)


def text_after(
    text_model: TextModel,
    ids: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    stops: Sequence[str] = (),
) -> Iterator[Piece]:
    """The same, after tokens that `fitting` has passed."""
    limit = text_model.context_length
    room = max_tokens if limit is None else min(max_tokens, limit + 1 - len(ids))
    decoder = text_model.tokenizer.decoder()
    stop = StopText([*text_model.end_texts, *stops])
    for number, token in enumerate(next_tokens(text_model.model, ids, sampling), 1):
        is_end = token in text_model.end_ids
        shown = "" if is_end else stop.feed(decoder(token))
        is_end = is_end or stop.found in text_model.end_texts
        ended = _why(is_end, stop.found is not None, number >= room, room < max_tokens)
        if ended is None:
            yield Piece(shown, number)
            continue
        yield Piece(shown + stop.rest(), number, ended)
        return


def prompt_ids(form: TextForm, prompt: str) -> list[int]:
    """As the model saw the beginning of a text. Raises ConfigError."""
    if form.chat is not None:
        question = {"role": "user", "content": prompt}
        return fitting(form, conversation_ids(form, form.chat, [question]))
    (ids,) = form.tokenizer.encode([_readable(form, prompt)])
    return fitting(form, ids if form.begin_id is None else [form.begin_id, *ids])


def conversation_ids(form: TextForm, chat: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """A conversation up to where the next answer begins; it may be too long. Raises ConfigError."""
    messages = [message | {"content": _readable(form, message["content"])} for message in messages]
    if (token := form.tokenizer.special_in([m["content"] for m in messages])) is not None:
        raise ConfigError(f"the prompt spells {token}, which only the chat template may write")
    try:
        parts = chat.prompt(messages)
    except TemplateError as error:
        raise ConfigError(f"the prompt: {error}") from error
    return [token for ids in form.tokenizer.encode_rendered(parts) for token in ids]


def fitting(form: TextForm, ids: list[int]) -> list[int]:
    """`ids`, where something can follow them. Raises ConfigError."""
    limit = form.context_length
    known = form.num_tokens or form.tokenizer.vocab_size
    if (strange := next((token for token in ids if token >= known), None)) is not None:
        raise ConfigError(
            f"the prompt has {form.tokenizer.spelling(strange)!r}, a token that was added to the "
            f"tokenizer (number {strange:,}), and the model knows {known:,}"
        )
    if not ids:
        raise ConfigError(
            "the prompt is empty, and this model has no token that begins a text: give it a word"
        )
    if limit is not None and len(ids) > limit:
        raise ConfigError(
            f"the prompt has {len(ids):,} tokens, and the model's context is {limit:,}: shorten it"
        )
    return ids


def _readable(form: TextForm, text: str) -> str:
    """`text` as data are cleaned. Raises ConfigError for a word that is no token."""
    text = clean_part(text, "the prompt", Repairs())
    if (word := form.tokenizer.unknown_in([text])) is not None:
        raise ConfigError(f"the prompt has {word!r}, which is no token of this model")
    return text


def _why(is_end: bool, is_stop: bool, is_full: bool, by_context: bool) -> Ended | None:
    if is_end:
        return Ended.END_TOKEN
    if is_stop:
        return Ended.STOP
    if is_full:
        return Ended.CONTEXT if by_context else Ended.MAX_TOKENS
    return None
