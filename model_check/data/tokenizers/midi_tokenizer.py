"""The tokenizer of music: a word of a text is the name of a token (`sources/midi`)."""

from functools import cached_property
from typing import Any

from model_check.data.cache.memo import Memo
from model_check.data.sources.midi_files import encoding_of
from model_check.data.sources.source import Source
from model_check.data.tokenizers.tokenizer import END_OF_TEXT, TextTokenizer


class MidiTokenizer:
    """Its vocabulary is fixed, so that a model of pieces can go on to learn tasks."""

    name = label = "midi"

    def __init__(self, memo: Memo) -> None:
        self._memo = memo

    def identity(self) -> dict[str, Any]:
        return {"kind": "midi", "encoding": self._encoding}

    def load(self, source: Source) -> TextTokenizer:
        return midi_tokenizer()

    @cached_property
    def _encoding(self) -> str:
        return encoding_of(self._memo)


def midi_tokenizer() -> TextTokenizer:
    """Raises DataError where the packages are missing."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from model_check.data.sources.midi import vocabulary

    words = {name: number for number, name in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # No word, so that no text forges it.
    tokenizer.add_special_tokens([END_OF_TEXT])
    return TextTokenizer(tokenizer, MidiTokenizer.name)
