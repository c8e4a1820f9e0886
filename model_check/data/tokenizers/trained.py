"""A byte-level WordPiece trained on the text.

WordPiece as BERT has it loses blanks, case and rare characters. Over the byte alphabet nothing is
lost: every byte is a piece at the start of a word and within it, so no word is unknown.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from model_check.data.sources.source import Source
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.tokenizer import (
    END_OF_TEXT,
    TRAINING_CHARACTERS,
    TextTokenizer,
    TrainedTokenizer,
    first_characters,
    without_endless_words,
)
from model_check.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WITHIN = "\u2022"
"""Marks a piece within a word. Not the usual ##: that could also be a text's own two characters,
where this one is no letter of the byte alphabet."""
SMALLEST_VOCABULARY = 1024
"""Twice 256 bytes, the end token, and some merges."""
_LONGEST_WORD = 64
"""Characters. The search for the longest piece is quadratic in a word's length."""
_RECIPE = 1


class TrainedWordPiece(TrainedTokenizer):
    """What it is follows from the source's identity, so its key names the recipe alone."""

    def __init__(self, vocab_size: int) -> None:
        """Raises ConfigError for a vocabulary that holds no more than the bytes."""
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.bpe_vocab_size = {vocab_size}: wordpiece needs {SMALLEST_VOCABULARY} or more"
            )
        super().__init__(vocab_size)
        self._num_ids = vocab_size
        self.name = self.label = f"wordpiece{vocab_size}"

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"kind": "wordpiece", "wordpiece_recipe": _RECIPE}

    def load(self, source: Source) -> TextTokenizer:
        sample = first_characters(source.documents(Repairs()), TRAINING_CHARACTERS)
        texts = (without_endless_words(text) for text in sample)
        return TextTokenizer(_train(texts, self._num_ids), self.name)


def _train(texts: Iterator[str], vocab_size: int) -> "Tokenizer":
    """Deterministic: the same texts give the same tokenizer, byte for byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(continuing_subword_prefix=WITHIN))
    _read_as_bytes(tokenizer)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    within = [WITHIN + letter for letter in alphabet]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        # Bytes within words have their ids before training: it would give them in the order of a
        # hash map, another one in each run, and only those that it saw there.
        special_tokens=[END_OF_TEXT, *within],
        initial_alphabet=alphabet,
        continuing_subword_prefix=WITHIN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finished(tokenizer)


def _read_as_bytes(tokenizer: "Tokenizer") -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Split(Regex(f".{{1,{_LONGEST_WORD}}}"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(WITHIN, ""), decoders.Fuse(), decoders.ByteLevel()]
    )


def _finished(tokenizer: "Tokenizer") -> "Tokenizer":
    """Bytes within words are no special tokens any more, and no word is too long."""
    from tokenizers import Tokenizer

    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:1]
    document["model"]["continuing_subword_prefix"] = WITHIN
    document["model"]["max_input_chars_per_word"] = _LONGEST_WORD
    return Tokenizer.from_str(json.dumps(document))
