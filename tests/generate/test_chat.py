"""`run.sh generate --chat`: a conversation by the chat template of the model."""

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from model_check.attention import sdpa
from model_check.config.schema import Settings, TrainingSettings
from model_check.config.shape import geometry
from model_check.data.sources.chat import ChatTemplate
from model_check.data.sources.chatml import CHATML
from model_check.engine.checkpoint import packed
from model_check.errors import ConfigError
from model_check.generate.__main__ import main
from model_check.generate.chat import Conversation
from model_check.generate.generate import Ended, text_after
from model_check.generate.sampling import Sampling
from model_check.generate.text_model import TextForm, TextModel, read_text_tokenizer, trained_form
from model_check.init import build_model
from tests.deadline import DEADLINE_S
from tests.generate.test_generate import CPU, bytes_tokenizer
from tests.generate.test_samples import SETTINGS

ROOT = Path(__file__).parents[2]
GREEDY = Sampling(temperature=0)


def with_marks() -> str:
    raw = Tokenizer.from_str(bytes_tokenizer())
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return str(raw.to_str())


def form_of(
    tokenizer: str, chat: ChatTemplate | None = CHATML, context_length: int = 400
) -> TextForm:
    settings = Settings(training=TrainingSettings(context_length=context_length))
    return trained_form(read_text_tokenizer(tokenizer.encode(), Path("t"), 999), settings, chat)


def says(form: TextForm, text: str) -> TextModel:
    """A model that says `text` to everything, and then `!` without end."""
    ids = iter(form.tokenizer.encode_rendered([text + "!" * 99])[0])

    def decode(read: object, caches: object, **_: object) -> torch.Tensor:
        return torch.eye(300)[next(ids)][None, None]

    model: Any = SimpleNamespace(head_weight=torch.zeros(1), new_caches=list, decode=decode)
    return form.of(model)


@pytest.mark.parametrize("tokenizer", [bytes_tokenizer(), with_marks()], ids=["text", "tokens"])
def test_an_answer_ends_where_its_turn_ends(tokenizer: str) -> None:
    """Whether the marks of the template are tokens, or a text of several."""
    model = says(form_of(tokenizer), "yes < no<|im_end|>\n<|im_start|>user\nmore")
    pieces = list(text_after(model, [65], GREEDY, max_tokens=60))
    assert "".join(piece.text for piece in pieces) == "yes < no"
    assert pieces[-1].ended is Ended.END_TOKEN


@pytest.mark.parametrize(
    ("writes", "ends"), [("{{ c }}.\n", ()), ("{{ c }}", ()), ("{{ c }}\n### \n", ("###",))]
)
def test_only_a_mark_behind_an_answer_ends_one(writes: str, ends: tuple[str, ...]) -> None:
    """What may stand in any answer does not."""
    every = "{% for m in messages %}{% set c = m.content %}" + writes + "{% endfor %}"
    assert form_of(bytes_tokenizer(), replace(CHATML, text=every)).end_texts == ends


def rendered(form: TextForm, ids: Sequence[int]) -> str:
    raw = Tokenizer.from_str(form.tokenizer.to_json())
    return str(raw.decode(list(ids), skip_special_tokens=False))


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


BEGINS = "<|im_start|>assistant\n"


def test_a_conversation_is_kept_and_begins_anew() -> None:
    form = form_of(with_marks())
    conversation = Conversation(form, "be kind", 10)
    head = turn("system", "be kind")
    first = rendered(form, conversation.ask("hi"))
    assert first == head + turn("user", "hi") + BEGINS
    conversation.answered("hi", "hello")
    second = rendered(form, conversation.ask("and?"))
    earlier = turn("user", "hi") + turn("assistant", "hello")
    assert second == head + earlier + turn("user", "and?") + BEGINS
    conversation.reset()
    assert rendered(form, conversation.ask("hi")) == first


def test_the_oldest_turns_go_where_the_context_is_full(capfd: pytest.CaptureFixture[str]) -> None:
    form = form_of(bytes_tokenizer(), context_length=200)
    conversation = Conversation(form, None, 20)
    for number in range(3):
        conversation.ask(f"question {number}")
        conversation.answered(f"question {number}", "yes")
    told = "the context is full: the oldest 2 messages are left out\n"
    assert capfd.readouterr().err == told
    assert "question 0" not in rendered(form, conversation.ask("q"))
    with pytest.raises(ConfigError, match="the model's context is 200: shorten it"):
        conversation.ask("x" * 200)
    with pytest.raises(ConfigError, match=r"a message spells <\|im_end\|>"):
        conversation.ask("<|im_end|>")
    assert "x" * 200 not in rendered(form, conversation.ask("q"))


def test_an_answer_that_spells_a_mark_does_not_end_the_conversation(
    capfd: pytest.CaptureFixture[str],
) -> None:
    conversation = Conversation(form_of(bytes_tokenizer()), None, 10)
    first = conversation.ask("hi")
    conversation.answered("hi", "a <|im_start|> b")
    assert "the conversation goes on without this answer: " in capfd.readouterr().err
    assert conversation.ask("hi") == first


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a model with random weights, which was told that it is one of chats."""
    shape = geometry(SETTINGS.model, 257)
    training = msgspec.structs.replace(SETTINGS.training, context_length=256)
    settings = msgspec.structs.replace(SETTINGS, training=training)
    state = {
        "schema": 2,
        "model": build_model(SETTINGS, shape, sdpa, CPU).state_dict(),
        "settings": msgspec.to_builtins(settings),
        "tokenizer": packed(bytes_tokenizer().encode()),
        "chat": CHATML.kept(),
    }
    torch.save(state, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def test_each_line_of_a_pipe_is_a_turn(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "hi\n\nhi\n<|im_end|>\n/reset\nhi\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main([str(checkpoint), "--chat", "--json", "--max-tokens=8"]) == 0
    out, err = capfd.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["hi", "hi", "hi"]
    assert answers[0]["text"] == answers[2]["text"]
    assert "a message spells <|im_end|>" in err
    assert err.endswith("a new conversation\n")


def test_the_end_of_the_input_ends_a_conversation_well(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    assert main([str(checkpoint), "--chat", "--max-tokens=3"]) == 0
    out, err = capfd.readouterr()
    assert (out.count("\n") >= 1, err) == (True, "(max tokens after 3 tokens)\n")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--chat"], "--chat: this model has no chat template"),
        (["--chat", "--prompt=a"], "--chat: takes its prompts from standard input, so --prompt is"),
        (["--chat", "--raw"], "--raw is unused"),
        (["--prompt=a", "--system=b"], "--system: it is for --chat"),
    ],
)
def test_what_cannot_be_a_conversation_is_one_message(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    state = torch.load(checkpoint)
    torch.save(state | {"chat": None}, checkpoint)
    assert main([str(checkpoint), *options]) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert told in err


def test_a_closed_standard_input_is_an_empty_one(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as Python has it where descriptor 0 is closed
    held = os.dup(0)
    os.close(0)
    try:
        assert main([str(checkpoint), "--chat"]) == 0
    finally:
        os.dup2(held, 0)
        os.close(held)
    assert capfd.readouterr() == ("", "")


def read_until(terminal: int, end: bytes) -> None:
    seen = b""
    while not seen.endswith(end):
        assert select([terminal], [], [], DEADLINE_S)[0], seen
        seen += os.read(terminal, 4096)


def test_a_person_sees_a_prompt_and_ctrl_d_ends_the_conversation(checkpoint: Path) -> None:
    ours, theirs = pty.openpty()
    program = [sys.executable, "-P", "-m", "model_check.generate", str(checkpoint)]
    with subprocess.Popen(
        [*program, "--chat", "--max-tokens=2"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
    ) as process:
        read_until(ours, b"> ")
        os.write(ours, b"hi\n")
        read_until(ours, b"\n> ")
        os.write(ours, b"\x04")
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)
    os.close(theirs)
