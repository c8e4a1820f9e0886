"""What a model in training says to a few prompts: with the same draws each time, so that the texts
differ by the model alone."""

from collections.abc import Callable, Iterable

import numpy as np

from model_check.config.schema import Settings
from model_check.data.read.token_split import Split
from model_check.data.sources.chat import ChatTemplate
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.errors import ConfigError, NonFiniteError
from model_check.generate.generate import generate, prompt_ids
from model_check.generate.sampling import Sampling
from model_check.generate.text_model import trained_form
from model_check.model import Llama

_NUM_SEQUENCES = 2
_NUM_FIRST = 8
"""Tokens that are enough to go on from."""


class Answers:
    """Callable, as engine.run_context.Prompts.answer. Nothing is kept between calls."""

    def __init__(
        self, tokenizer: TextTokenizer, settings: Settings, chat: ChatTemplate | None = None
    ) -> None:
        training = settings.training
        self._form = trained_form(tokenizer, settings, chat)
        self._sampling = Sampling(seed=settings.system.seed % 2**63)
        self._max_tokens = training.sample_length
        self._num_first = max(1, min(_NUM_FIRST, training.context_length // 2))

    def __call__(self, model: Llama, prompt: str, between: Callable[[], None]) -> str:
        """A model with NaN in it says that: the training finds it by itself, with evidence."""
        text, text_model = "", self._form.of(model)
        try:
            for piece in generate(text_model, prompt, self._sampling, max_tokens=self._max_tokens):
                text += piece.text
                between()
        except NonFiniteError as error:
            return f"{text} ({error})"
        return text

    def check(self, prompts: Iterable[str]) -> None:
        """Raises ConfigError for one that nothing can follow."""
        for prompt in prompts:
            prompt_ids(self._form, prompt)

    def beginnings(self, split: Split) -> list[str]:
        """How its first sequences begin, but for those whose first tokens are no text: a few tokens
        of running text, the whole prompt of an example, the user's message before the first answer
        of a conversation."""
        indices = np.arange(min(_NUM_SEQUENCES, split.num_sequences))
        masks = split.targets(indices)
        nums = [self._num_first] * len(indices) if masks is None else masks.argmax(axis=1).tolist()
        rows = split.gather(indices).tolist()
        texts = (self._prompt(ids[:num]) for ids, num in zip(rows, nums, strict=True))
        return [text for text in texts if text.strip()]

    def _prompt(self, ids: Iterable[int]) -> str:
        ids = [token for token in ids if token >= 0]  # below: padding
        tokenizer, chat = self._form.tokenizer, self._form.chat
        if chat is None:
            decode = tokenizer.decoder()
            return "".join(map(decode, ids))
        question = chat.question_in(tokenizer.rendered(ids))
        try:
            prompt_ids(self._form, question)
        except ConfigError:  # it has more turns in it, or the template wants a system's message
            return ""
        return question
