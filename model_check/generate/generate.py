"""A model goes on with a text, token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from model_check.data.sources.chat import ChatTemplate, TemplateError
from model_check.data.sources.text import Repairs, clean_part
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.errors import ConfigError
from model_check.generate.sampling import Sampler, Sampling, StopText
from model_check.generate.text_model import TextForm, TextModel
from model_check.models.basic_llama import BasicLlama


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


def next_tokens(model: BasicLlama, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Without end, and one after the other: nothing is computed that nobody asks for. Raises
    ValueError past the context, and NonFiniteError."""
    device = model.head_weight.device
    sampler, pasts = Sampler(sampling), None
    tokens = list(ids)
    while True:
        read = torch.tensor([tokens], device=device)
        scores_BTV, pasts = model.go_on(read, pasts, only_last=True)
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
    limit = text_model.context_length
    room = max_tokens if limit is None else min(max_tokens, limit + 1 - len(ids))
    decoder, stop = text_model.tokenizer.decoder(), StopText(stops)
    for number, token in enumerate(next_tokens(text_model.model, ids, sampling), 1):
        is_end = token in text_model.end_ids
        shown = "" if is_end else stop.feed(decoder(token))
        ended = _why(is_end, stop.is_over, number >= room, room < max_tokens)
        if ended is None:
            yield Piece(shown, number)
            continue
        yield Piece(shown + stop.rest(), number, ended)
        return


def prompt_ids(form: TextForm, prompt: str) -> list[int]:
    """As the model saw the beginning of a text. Raises ConfigError."""
    prompt = clean_part(prompt, "the prompt", Repairs())
    if (word := form.tokenizer.unknown_in([prompt])) is not None:
        raise ConfigError(f"the prompt has {word!r}, which is no token of this model")
    if form.chat is None:
        (ids,) = form.tokenizer.encode([prompt])
        begin = [] if form.begin_id is None else [form.begin_id]
    else:
        begin, ids = [], _asked(form.tokenizer, form.chat, prompt)
    limit = form.context_length
    known = form.num_tokens or form.tokenizer.vocab_size
    if (strange := next((token for token in ids if token >= known), None)) is not None:
        raise ConfigError(
            f"the prompt has {form.tokenizer.spelling(strange)!r}, a token that was added to the "
            f"tokenizer (number {strange:,}), and the model knows {known:,}"
        )
    if not (begin or ids):
        raise ConfigError(
            "the prompt is empty, and this model has no token that begins a text: give it a word"
        )
    if limit is not None and len(begin) + len(ids) > limit:
        raise ConfigError(
            f"the prompt has {len(begin) + len(ids):,} tokens, and the model's context is "
            f"{limit:,}: shorten it"
        )
    return [*begin, *ids]


def _asked(tokenizer: TextTokenizer, chat: ChatTemplate, question: str) -> list[int]:
    """The conversation up to where the answer begins. Raises ConfigError."""
    if (token := tokenizer.special_in([question])) is not None:
        raise ConfigError(f"the prompt spells {token}, which only the chat template may write")
    try:
        text = chat.prompt([{"role": "user", "content": question}])
    except TemplateError as error:
        raise ConfigError(f"the prompt: {error}") from error
    return tokenizer.encode_rendered([text])[0]


def _why(is_end: bool, is_stop: bool, is_full: bool, by_context: bool) -> Ended | None:
    if is_end:
        return Ended.END_TOKEN
    if is_stop:
        return Ended.STOP
    if is_full:
        return Ended.CONTEXT if by_context else Ended.MAX_TOKENS
    return None
