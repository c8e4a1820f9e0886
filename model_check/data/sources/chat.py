"""Conversations as text, by the chat template of a model of transformers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from model_check.data.sources.documents import Part
from model_check.utils.words import first_line

Message = dict[str, Any]
"""`role`, `content`, and whatever else the template reads."""
ASSISTANT = "assistant"


class TemplateError(Exception):
    """A conversation that the template does not take; the text says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of transformers, in Jinja."""

    text: str
    begin_token: str | None
    """What the template calls bos_token ..."""
    end_token: str | None
    """... and eos_token."""

    def identity(self) -> list[str | None]:
        """Its part of the cache key."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return [digest, self.begin_token, self.end_token]

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the assistant's answer begins. Raises TemplateError."""
        return self._text(messages, asks=True)

    def parts(self, messages: Sequence[Message], num_before: int = 0) -> tuple[Part, ...]:
        """The conversation up to the assistant's last turn. Its turns after the first `num_before`
        messages are the target; where the template writes earlier turns in another way than the
        last, the last alone. Raises TemplateError."""
        turns = [n for n in range(num_before, len(messages)) if _is_answer(messages[n])]
        if not turns:
            raise TemplateError("it has no turn of the assistant to learn")
        try:
            return self._divided(messages, turns)
        except TemplateError:
            if len(turns) == 1:
                raise
            return self._divided(messages, turns[-1:])

    def _divided(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[Part, ...]:
        parts: list[Part] = []
        done = ""
        for turn in turns:
            asked = self._text(messages[:turn], asks=True)
            answered = self._text(messages[: turn + 1], asks=False)
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise TemplateError("its chat template writes an asked turn in another way")
            parts += [Part(asked[len(done) :], False), Part(answered[len(asked) :], True)]
            done = answered
        return tuple(parts)

    def _text(self, messages: Sequence[Message], *, asks: bool) -> str:
        """`asks`: the beginning of an answer of the assistant follows."""
        try:
            rendered: str = _renderer(self.begin_token, self.end_token).apply_chat_template(
                list(messages),
                chat_template=self.text,
                tokenize=False,
                add_generation_prompt=asks,
            )
        # A template may do anything: its errors are Jinja's, its own words, or Python's.
        except Exception as error:
            raise TemplateError(f"its chat template says: {first_line(error)}") from error
        return rendered


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == ASSISTANT)


@cache
def _renderer(begin_token: str | None, end_token: str | None) -> Any:
    """A tokenizer of transformers that renders, and tokenizes nothing."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    nothing = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=nothing, bos_token=begin_token, eos_token=end_token)
