"""Tokenizers trained on the text itself: a byte-level BPE, and a byte-level WordPiece.

WordPiece as BERT has it loses blanks, case and rare characters. Over the byte alphabet nothing is
lost: every byte is a piece at the start of a word and within it, so no word is unknown.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from model_check.data.sources.documents import text_of
from model_check.data.sources.source import Source
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.tokenizer import END_OF_TEXT, TextTokenizer
from model_check.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINING_CHARACTERS = 16 << 20
"""A tokenizer is trained on the first documents, up to so many characters: bounded memory."""
_RECIPE = 3
"""Counts changes of the training that change the result."""
_ENDLESS_WORD = re.compile(r"\S{1000}(?=\S)")
WITHIN = "\u2022"
"""Marks a piece within a word. The usual ## could also be two characters of a text; this one is no
letter of the byte alphabet."""
SMALLEST_VOCABULARY = 1024
"""Twice 256 bytes, the end token, and some merges."""
_LONGEST_WORD = 64
"""Characters. The search for the longest piece takes time quadratic in the length of a word."""
_WORDPIECE_RECIPE = 1


class TrainedTokenizer:
    """A byte-level BPE. The identity of the source decides its content, so its own part of the key
    is the recipe alone."""

    kind = "bpe"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.name = self.label = f"{self.kind}{vocab_size}"

    def identity(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "vocab_size": self._vocab_size,
            "training_characters": TRAINING_CHARACTERS,
            "recipe": _RECIPE,
        }

    def load(self, source: Source) -> TextTokenizer:
        texts = map(text_of, source.documents(Repairs()))
        sample = first_characters(texts, TRAINING_CHARACTERS)
        return TextTokenizer(self._train(map(without_endless_words, sample)), self.name)

    def _train(self, texts: Iterator[str]) -> "Tokenizer":
        """Deterministic: the same texts give the same tokenizer, byte for byte."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self._vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return tokenizer


class TrainedWordPiece(TrainedTokenizer):
    """A byte-level WordPiece."""

    kind = "wordpiece"

    def __init__(self, vocab_size: int) -> None:
        """Raises ConfigError for a vocabulary that holds no more than the bytes."""
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.bpe_vocab_size = {vocab_size}: wordpiece needs {SMALLEST_VOCABULARY} or more"
            )
        super().__init__(vocab_size)

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"wordpiece_recipe": _WORDPIECE_RECIPE}

    def _train(self, texts: Iterator[str]) -> "Tokenizer":
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.WordPiece(continuing_subword_prefix=WITHIN))
        _read_as_bytes(tokenizer)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        within = [WITHIN + letter for letter in alphabet]
        trainer = trainers.WordPieceTrainer(
            vocab_size=self._vocab_size,
            # Bytes within words get their ids before training. The trainer would give them in the
            # order of a hash map, which differs in each run, and only to bytes that it saw there.
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
    """Bytes within words are no longer special tokens, and no word is too long."""
    from tokenizers import Tokenizer

    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:1]
    document["model"]["continuing_subword_prefix"] = WITHIN
    document["model"]["max_input_chars_per_word"] = _LONGEST_WORD
    return Tokenizer.from_str(json.dumps(document))


def without_endless_words(text: str) -> str:
    """Training takes time quadratic in the longest word (240,000 characters without a blank: 22 s),
    and such a word is no sample of a language. Encoding does not change it."""
    return _ENDLESS_WORD.sub(r"\g<0> ", text)


def first_characters(documents: Iterable[str], limit: int) -> Iterator[str]:
    """The first documents, the last one cut, since one alone may be larger than the memory."""
    left = limit
    for text in documents:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
