"""What a model in training says."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_check.attention import sdpa
from model_check.config.load import Request, load
from model_check.config.schema import ModelSettings, Settings, TrainingSettings
from model_check.config.shape import geometry
from model_check.data.read.token_split import PADDING, Split
from model_check.data.sources.chat import ChatTemplate
from model_check.data.sources.chatml import CHATML
from model_check.errors import ConfigError
from model_check.generate.generate import generate
from model_check.generate.samples import Answers
from model_check.generate.sampling import Sampling
from model_check.generate.text_model import read_text_tokenizer, trained_form
from model_check.init import build_model
from model_check.model import Llama
from tests.generate.test_generate import CPU, END, bytes_tokenizer

SETTINGS = Settings(
    model=ModelSettings(
        num_layers=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=257,
        init_std=0.2,
    ),
    training=TrainingSettings(context_length=32, sample_interval=1, sample_length=12),
)
TOKENIZER = read_text_tokenizer(bytes_tokenizer().encode(), Path("t"), 257)


@pytest.fixture
def model() -> Llama:
    return build_model(SETTINGS, geometry(SETTINGS.model, 257), sdpa, CPU)


def test_an_answer_is_what_generate_says_and_the_same_each_time(model: Llama) -> None:
    answers, calls = Answers(TOKENIZER, SETTINGS), []
    text = answers(model, "ab", lambda: calls.append(1))
    seeded = Sampling(seed=SETTINGS.system.seed)
    form = trained_form(TOKENIZER, SETTINGS)
    pieces = list(generate(form.of(model), "ab", seeded, max_tokens=12))
    assert text == "".join(piece.text for piece in pieces)
    assert len(calls) == pieces[-1].num_tokens
    assert answers(model, "ab", lambda: None) == text


def test_an_answer_leaves_no_tensor_behind(model: Llama) -> None:
    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    answers = Answers(TOKENIZER, SETTINGS)
    before = num_tensors()
    answers(model, "ab", lambda: None)
    assert num_tensors() == before


def test_a_model_with_nan_says_so_and_raises_nothing(model: Llama) -> None:
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    said = Answers(TOKENIZER, SETTINGS)(model, "ab", lambda: None)
    assert said == " (the model's scores for the next token are not finite)"


class Rows(Split):
    """Sequences that are given, not read."""

    def __init__(self, rows: list[list[int]], num_prompt: int | None = None) -> None:
        self._rows, self._num_prompt, self.num_sequences = np.array(rows), num_prompt, len(rows)

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self._rows[indices]
        return rows

    def targets(self, indices: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        if self._num_prompt is None:
            return None
        places: NDArray[np.int64] = np.indices(self._rows[indices].shape)[1]
        return np.greater_equal(places, self._num_prompt)


@pytest.mark.parametrize(
    ("rows", "num_prompt", "said"),
    [
        ([list(b"upon a time"), [END, *b"ab", *[PADDING] * 8]], None, ["upon a t", "ab"]),
        ([[END] * 11, list(b"    " * 2 + b"   ")], None, []),
        ([list(b"2 plus 2 makes 4"), list(b"3 plus 3 makes 6")], 15, ["2 plus 2 makes "] * 2),
    ],
)
def test_the_beginnings_of_sequences_are_text(
    rows: list[list[int]], num_prompt: int | None, said: list[str]
) -> None:
    found = Answers(TOKENIZER, SETTINGS).beginnings(Rows(rows, num_prompt))
    assert [text.replace("3", "2") for text in found] == said


def conversation(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


@pytest.mark.parametrize(
    ("chat", "read", "said"),
    [
        (
            CHATML,
            conversation(("user", "two\nlines?")) + "<|im_start|>assistant\n",
            ["two\nlines?"],
        ),
        (
            CHATML,
            conversation(("system", "be kind"), ("user", "a"), ("assistant", "b"), ("user", "c"))
            + "<|im_start|>assistant\n",
            ["c"],
        ),
        (CHATML, "a prompt of text", []),
        (replace(CHATML, text="{{ messages[0].content }}:"), "who?:", ["who?"]),
        (replace(CHATML, text="{{ raise_exception('no') }}"), "who?", []),
    ],
)
def test_the_questions_of_conversations_are_asked(
    chat: ChatTemplate, read: str, said: list[str]
) -> None:
    settings = load(Request(overrides=("training.context_length=500",)), lambda: False).settings
    row = [*read.encode(), *b"an answer", END, PADDING]
    split = Rows([row], num_prompt=len(read.encode()))
    assert Answers(TOKENIZER, settings, chat).beginnings(split) == said


def test_a_prompt_that_nothing_can_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match="context is 32: shorten it"):
        Answers(TOKENIZER, SETTINGS).check(["a", "b" * 40])
