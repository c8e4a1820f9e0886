"""Rows of prompt and completion, or of messages, as examples: what training.stage=prompt_target
reads. The two forms are those of TRL's and torchtune's data sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_check.data.sources.chat import ChatTemplate, Message, TemplateError
from model_check.data.sources.documents import Example, Part, keys_of
from model_check.data.sources.text import Repairs, clean_part
from model_check.errors import DataError

_PROMPT, _COMPLETION, _MESSAGES = "prompt", "completion", "messages"
_NO_TEMPLATE = (
    "messages, and the tokenizer comes without a chat template: data.chat_template=FILE names one"
)


@dataclass(frozen=True)
class ExampleForm:
    """`{"prompt": TEXT, "completion": TEXT}`; or `{"messages": [{"role": ..., "content": TEXT},
    ...]}`, whose assistant's turns are the target; or prompt and completion that are messages."""

    template: ChatTemplate | None = None
    column: None = None

    def document(self, row: object, place: str, repairs: Repairs) -> Example | None:
        match row:
            case {"prompt": str(prompt), "completion": str(completion)}:
                texts = (clean_part(text, place, repairs) for text in (prompt, completion))
                parts = (Part(next(texts), False), Part(next(texts), True))
                return Example(parts, place=place)
            case {"messages": [*messages]}:
                return self._rendered(messages, 0, place, repairs)
            case {"prompt": [*prompt], "completion": [*completion]}:
                return self._rendered([*prompt, *completion], len(prompt), place, repairs)
        what = "row skipped: neither prompt and completion, nor messages"
        repairs.add(what, f"{place}, keys: {keys_of(row)}")
        return None

    def identity(self) -> dict[str, Any]:
        template = None if self.template is None else self.template.identity()
        return {"form": "prompt, completion; messages", "chat_template": template}

    def _rendered(
        self, messages: Sequence[object], num_before: int, place: str, repairs: Repairs
    ) -> Example | None:
        """A conversation, of which the assistant's turns after the first `num_before` messages are
        the target. Raises DataError."""
        if self.template is None:
            raise DataError(f"{place}: {_NO_TEMPLATE}")
        try:
            conversation = [_message(message, place, repairs) for message in messages]
            parts = self.template.parts(conversation, num_before)
        except TemplateError as error:
            repairs.add(f"conversation skipped: {error}", place)
            return None
        contents = tuple(message["content"] for message in conversation)
        return Example(parts, contents, place)


def _message(message: object, place: str, repairs: Repairs) -> Message:
    """Raises TemplateError."""
    match message:
        case {"role": str(), "content": str(content)} if isinstance(message, Mapping):
            return {**message, "content": clean_part(content, place, repairs)}
    raise TemplateError("a message has no role, or no content that is text")
