"""The tokenizer that was trained on one text, for the validation texts beside it."""

from typing import Any

from model_check.data.build.wanted import Wanted
from model_check.data.read.manifest import TOKENIZER, read_tokenizer
from model_check.data.sources.source import Source
from model_check.data.tokenizers.tokenizer import (
    TextTokenizer,
    TrainedTokenizer,
    document_in,
    parse,
)


class TokenizerOfStore:
    """`trained`, as it came out of the training text `train`, whose store must be there when it is
    loaded."""

    def __init__(self, trained: TrainedTokenizer, train: Wanted) -> None:
        self.name = trained.name
        self.label = trained.label
        self._trained = trained
        self._train = train

    def identity(self) -> dict[str, Any]:
        return {"trained on": self._train.source.identity(), **self._trained.identity()}

    def load(self, source: Source) -> TextTokenizer:
        store = self._train.store
        document = document_in(read_tokenizer(store), store / TOKENIZER)
        return TextTokenizer(parse(document, store / TOKENIZER), self.name)
