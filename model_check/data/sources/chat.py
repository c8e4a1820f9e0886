"""Conversations as text, by the chat template of a model of transformers."""

import hashlib
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from model_check.data.sources.declared import Declared, declared_in
from model_check.data.sources.documents import Part
from model_check.errors import DataError
from model_check.utils.files import read_text
from model_check.utils.words import first_line

TEMPLATE = "chat_template.jinja"
"""Where transformers keeps a template; older models have it in the tokenizer_config.json."""
Kept = dict[str, str | None]
Message = dict[str, Any]
"""`role`, `content`, and whatever else the template reads."""
ASSISTANT = "assistant"
NOT_LEARNED = {"weight": 0, "train": False, "loss": False, "masked": True}
"""What says of a turn that it is context alone: of OpenAI, axolotl, ms-swift, torchtune."""
_DAY = "26 Jul 2024"
"""What Llama 3's templates would write today's date for: ids must not depend on the day. It is what
Llama 3.1's writes where nobody tells it."""
_WHICH = "the chat template (data.chat_template=FILE, else the tokenizer's own)"
_PLACEHOLDER = "a-question-of-nobody"
RENDER_S = 10.0
"""A conversation takes a template a millisecond; one of a stranger may never end."""
RENDER_BYTES = 1 << 30
"""Or write a text that fills the memory."""


class _TooLong(BaseException):
    """No handler of a template, or of Jinja, takes it for an error of its own."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raises _TooLong after RENDER_S, MemoryError beyond RENDER_BYTES. Only the main thread can be
    told the time; a training has its own use for the signal, and a template that made its data."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def give_up(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise _TooLong

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space() + RENDER_BYTES
    most = most if soft == resource.RLIM_INFINITY else min(soft, most)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, RENDER_S)
        yield
    finally:  # of which the signal may still come in the first line
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Of this process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


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

    def kept(self) -> Kept:
        """As a token store and a checkpoint keep it; `chat_of` reads it."""
        return asdict(self)

    def identity(self) -> list[str | None]:
        """Its part of the cache key."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return [digest, self.begin_token, self.end_token]

    def prompt(self, messages: Sequence[Message]) -> list[str]:
        """The conversation up to where the assistant's answer begins, cut where training cuts it.
        Raises TemplateError."""
        whole = self._text(messages, asks=True)
        turns = [n for n, message in enumerate(messages) if is_answer(message)]
        try:
            parts = [part.text for part in self._divided(messages, turns)]
        except TemplateError:
            return [whole]
        read = "".join(parts)
        return [*parts, whole[len(read) :]] if whole.startswith(read) else [whole]

    def question_in(self, asked: str) -> str:
        """The last message of the user in a text that `prompt` made; empty where it cannot be told
        from the rest. Raises DataError."""
        try:
            around = "".join(self.prompt([{"role": "user", "content": _PLACEHOLDER}]))
        except TemplateError:
            return ""
        before, _, after = around.partition(_PLACEHOLDER)
        if not (before in asked and asked.endswith(after)):
            return ""
        start = asked.rfind(before) + len(before) if before else 0
        return asked[start : len(asked) - len(after)]

    def end(self) -> str:
        """What it writes behind any answer. Raises TemplateError, DataError."""
        yes, no = self._two_answers()
        pairs = zip(reversed(yes), reversed(no), strict=False)
        same = takewhile(lambda pair: pair[0] == pair[1], pairs)
        return "".join(letter for letter, _ in same)[::-1]

    def check(self) -> None:
        """Raises DataError where it leaves answers out: there would be nothing to learn."""
        try:
            yes, no = self._two_answers()
        except TemplateError:  # it may want a system's message, or more
            return
        if yes == no:
            raise DataError(f"{_WHICH} leaves out what the assistant says")

    def _two_answers(self) -> tuple[str, str]:
        question = {"role": "user", "content": "a question"}
        answers = ({"role": ASSISTANT, "content": content} for content in ("yes", "no"))
        yes, no = (self._text([question, answer], asks=False) for answer in answers)
        return yes, no

    def parts(self, messages: Sequence[Message], num_before: int = 0) -> tuple[Part, ...]:
        """The conversation up to the assistant's last turn. Its turns after the first `num_before`
        messages are the target; where the template writes earlier turns in another way than the
        last, the last alone. Raises TemplateError."""
        turns = [n for n in range(num_before, len(messages)) if is_answer(messages[n])]
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
                raise TemplateError(
                    "the chat template asks in another way than it writes an answer "
                    "(data.chat_template=FILE takes another)"
                )
            parts += [Part(asked[len(done) :], False), Part(answered[len(asked) :], True)]
            done = answered
        return tuple(parts)

    def _text(self, messages: Sequence[Message], *, asks: bool) -> str:
        """`asks`: the beginning of an answer of the assistant follows. Raises TemplateError,
        DataError for what is no template."""
        renderer = _renderer(self.begin_token, self.end_token)
        try:
            with _limited():
                rendered: str = renderer.apply_chat_template(
                    list(messages),
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=asks,
                    date_string=_DAY,
                )
        except _TooLong as error:
            raise DataError(
                f"{_WHICH} did not end within {RENDER_S:g} s for one conversation"
            ) from error
        except MemoryError as error:
            raise DataError(
                f"{_WHICH} took more than {RENDER_BYTES >> 20} MiB for one conversation, "
                "or than this process may have"
            ) from error
        # A template may do anything: its errors are Jinja's, its own words, or Python's.
        except Exception as error:
            if type(error).__name__ == "TemplateSyntaxError":
                line = getattr(error, "lineno", "?")
                why = f"is not Jinja, line {line}: {first_line(error)}"
                raise DataError(f"{_WHICH} {why}") from error
            raise TemplateError(f"its chat template says: {first_line(error)}") from error
        return rendered


def chat_of(kept: Any, source: object) -> ChatTemplate | None:
    """What `ChatTemplate.kept` left in `source`; None: nothing. Raises DataError."""
    try:
        return msgspec.convert(kept, ChatTemplate | None)
    except msgspec.ValidationError as error:
        raise DataError(f"{source}: its chat template is damaged: {error}") from error


def _template_in(found: Any) -> str | None:
    """Of a tokenizer_config.json: the one that is called default, where there are several. None
    where it is no template: rows of prompt and completion need none."""
    match found:
        case str(text):
            return text
        case [*named]:
            return next((t["template"] for t in named if _is_default(t)), None)
        case _:
            return None


def template_of(directory: Path | None, given: Path | None = None) -> ChatTemplate | None:
    """The file `given` (data.chat_template), else what lies in the directory of a tokenizer; None:
    there is none. Raises DataError."""
    declared = Declared() if directory is None else declared_in(directory)
    if given is not None:
        text: str | None = _text(given, "data.chat_template")
    elif directory is not None and (directory / TEMPLATE).is_file():
        text = _text(directory / TEMPLATE, "the tokenizer's chat template")
    else:
        text = _template_in(declared.chat_template)
    if text is None:
        return None
    if not text.strip():
        raise DataError(f"{given or directory}: the chat template is empty")
    return ChatTemplate(text, declared.begin, declared.end)


def _text(path: Path, what: str) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why: Any = getattr(error, "strerror", None) or error
        raise DataError(f"{what} = {path}: cannot be read: {why}") from error


def _is_default(template: object) -> bool:
    match template:
        case {"name": "default", "template": str()}:
            return True
        case _:
            return False


def is_answer(message: Message) -> bool:
    """Whether the assistant says it, to be learned. Raises TemplateError for a weight that is
    neither 0 nor 1."""
    for name, value in NOT_LEARNED.items():
        if name in message and message[name] not in (None, value, not value):
            raise TemplateError(f"a message's {name} = {message[name]!r}: 0 and 1 alone are known")
    is_left_out = any(message.get(name) == value for name, value in NOT_LEARNED.items())
    return bool(message["role"] == ASSISTANT) and not is_left_out


@cache
def _renderer(begin_token: str | None, end_token: str | None) -> Any:
    """A tokenizer of transformers that renders, and tokenizes nothing."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    nothing = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=nothing, bos_token=begin_token, eos_token=end_token)
