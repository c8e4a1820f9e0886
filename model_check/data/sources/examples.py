"""Rows of prompt and completion, or of messages, as examples: what training.stage=prompt_target
reads. The two forms are those of TRL's and torchtune's data sets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from model_check.data.sources.chat import ChatTemplate, Message, TemplateError, is_answer
from model_check.data.sources.documents import Example, Part, keys_of
from model_check.data.sources.text import Repairs, clean_part

_UNREAD = ("tools", "functions", "documents", "chat_template_kwargs", "images", "videos", "audios")
"""Of a row: what would change its text."""


@dataclass(frozen=True)
class ExampleForm:
    """`{"prompt": TEXT, "completion": TEXT}`; or `{"messages": [{"role": ..., "content": TEXT},
    ...]}`, whose assistant's turns are the target, but for those that say that they are not to be
    learned (`chat.NOT_LEARNED`); or prompt and completion that are messages."""

    template: ChatTemplate
    column: None = None

    def document(self, row: object, place: str, repairs: Repairs) -> Example | None:
        if isinstance(row, Mapping):
            for key in (key for key in _UNREAD if row.get(key)):
                repairs.add(f"row whose {key!r} is not read", place)
        match row:
            case {"prompt": str(prompt), "completion": str(completion)}:
                return _written(prompt, completion, place, repairs)
            case {"messages": [*messages]}:
                return self._rendered(messages, 0, place, repairs)
            case {"prompt": [*prompt], "completion": [*completion]}:
                return self._rendered([*prompt, *completion], len(prompt), place, repairs)
            case {"prompt": _, "completion": _}:
                repairs.add("row skipped: prompt or completion is no text", place)
                return None
        what = "row skipped: neither prompt and completion, nor messages"
        repairs.add(what, f"{place}, keys: {keys_of(row)}")
        return None

    def identity(self) -> dict[str, Any]:
        form = "prompt, completion; messages, some not learned"
        return {"form": form, "chat_template": self.template.identity()}

    def _rendered(
        self, messages: Sequence[object], num_before: int, place: str, repairs: Repairs
    ) -> Example | None:
        """A conversation, of which the assistant's turns after the first `num_before` messages are
        the target. Raises DataError."""
        _check(self.template)
        try:
            conversation = [_message(message, place, repairs) for message in messages]
            parts = self.template.parts(conversation, num_before)
        except TemplateError as error:
            repairs.add(f"conversation skipped: {error}", place)
            return None
        num_answers = sum(map(is_answer, conversation[num_before:]))
        if sum(part.is_target for part in parts) < num_answers:
            repairs.add("conversation of which the last answer alone is learned", place)
        return Example(parts, tuple(_texts_in(conversation)), place)


@cache
def _check(template: ChatTemplate) -> None:
    """Once. Raises DataError."""
    template.check()


def _written(prompt: str, completion: str, place: str, repairs: Repairs) -> Example | None:
    if not (prompt or completion):
        repairs.add("row skipped: prompt and completion are empty", place)
        return None
    read, learned = (clean_part(text, place, repairs) for text in (prompt, completion))
    return Example((Part(read, False), Part(learned, True)), place=place)


def _message(message: object, place: str, repairs: Repairs) -> Message:
    """Raises TemplateError."""
    match message:
        case {"role": str(), "content": str()} if isinstance(message, Mapping):
            return {key: _cleaned(value, place, repairs) for key, value in message.items()}
        case {"role": str(), "content": _}:
            raise TemplateError("a content is no text (lists, tool calls are not read)")
    raise TemplateError("a message has no role, or no content")


def _cleaned(value: Any, place: str, repairs: Repairs) -> Any:
    """Whatever of a message a template may write."""
    match value:
        case str():
            return clean_part(value, place, repairs)
        case Mapping():
            return {key: _cleaned(item, place, repairs) for key, item in value.items()}
        case list():
            return [_cleaned(item, place, repairs) for item in value]
    return value


def _texts_in(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            yield from chain.from_iterable(map(_texts_in, value.values()))
        case list():
            yield from chain.from_iterable(map(_texts_in, value))
