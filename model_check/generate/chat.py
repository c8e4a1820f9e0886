"""A conversation with a model: a line is a turn, by the chat template of the model."""

import sys
from collections.abc import Iterator

from model_check.data.sources.chat import ASSISTANT, Message
from model_check.errors import ConfigError, UsageError
from model_check.generate.generate import conversation_ids, fitting
from model_check.generate.text_model import TextForm
from model_check.utils.standard_streams import complain, put

_HELP = "a line is your turn; /reset begins a new conversation, /exit or Ctrl-D ends"


class Conversation:
    """The turns so far, and what the model reads of them."""

    def __init__(self, form: TextForm, system: str | None, answer_length: int) -> None:
        """Raises UsageError for a model that was taught no conversations."""
        if form.chat is None:
            raise UsageError(
                "--chat: this model has no chat template: it was not trained on conversations; "
                "--prompt TEXT goes on with a text"
            )
        self._form, self._chat = form, form.chat
        self._answer_length = answer_length
        self._head = [] if system is None else [_message("system", system)]
        self._turns: list[Message] = []

    def reset(self) -> None:
        self._turns = []

    def ask(self, question: str) -> list[int]:
        """The ids after which the answer begins; the oldest turns go where there is no room for
        them. Raises ConfigError for a question that cannot be asked."""
        turns = [*self._turns, _message("user", question)]
        ids, num_gone = self._ids(turns), 0
        while len(turns) > num_gone + 1 and not self._has_room(ids):
            num_gone += 2
            ids = self._ids(turns[num_gone:])
        fitting(self._form, ids)
        if num_gone:
            complain(f"the context is full: the oldest {num_gone} messages are left out")
        del self._turns[:num_gone]
        return ids

    def answered(self, question: str, answer: str) -> None:
        """Keeps both, unless the answer spells what only the chat template may write: no further
        question could be asked."""
        turns = [_message("user", question), _message(ASSISTANT, answer)]
        try:
            self._ids([*turns, turns[0]])
        except ConfigError as error:
            complain(f"the conversation goes on without this answer: {error}")
            return
        self._turns += turns

    def _ids(self, turns: list[Message]) -> list[int]:
        return conversation_ids(self._form, self._chat, [*self._head, *turns])

    def _has_room(self, ids: list[int]) -> bool:
        """An answer may take as much as it was given, but never more than half of the context."""
        limit = self._form.context_length
        return limit is None or len(ids) + min(self._answer_length, limit // 2) <= limit


def questions(conversation: Conversation) -> Iterator[str]:
    """The lines of standard input that are questions, to its end or /exit. Raises ConfigError."""
    is_person = sys.stdin.isatty() and sys.stdout.isatty()
    if is_person:
        import readline  # noqa: F401  # arrow keys and earlier lines in `input`

        complain(_HELP)
    while (line := _line("> " if is_person else "")) not in (None, "/exit"):
        if line == "/reset":
            conversation.reset()
            complain("a new conversation")
        elif line:
            yield line
    if is_person and line is None:
        put("")  # Ctrl-D leaves the cursor behind the prompt


def _line(prompt: str) -> str | None:
    """None at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input: is not UTF-8: {error}") from error


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
