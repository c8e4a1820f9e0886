"""A named encoding of tiktoken, converted to a tokenizer.json. Used only if both give the same
ids."""

import hashlib
import re
from functools import cached_property
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from model_check.data.cache.memo import Memo
from model_check.data.sources.source import Source
from model_check.data.tokenizers.tokenizer import PROBE, TextTokenizer, byte_letters
from model_check.errors import DataError

if TYPE_CHECKING:
    from tiktoken import Encoding
    from tokenizers import Tokenizer

DEFAULT_ENCODING = "cl100k_base"
_POSSESSIVE = re.compile(r"([+?*]|\{\d+(?:,\d*)?\})\+")
"""`\\p{L}++`, `{1,3}+`: `tokenizers` would read the last + as a repetition."""


class TiktokenTokenizer:
    """`cl100k_base`, `gpt2`, `o200k_base`, ...: any name that the installed tiktoken knows."""

    def __init__(self, encoding: str, memo: Memo) -> None:
        self._encoding_name = encoding
        self._memo = memo
        self.name = self.label = f"tiktoken-{encoding}"

    def identity(self) -> dict[str, Any]:
        return {"kind": "tiktoken", "encoding": self._encoding_name, "content": self._content}

    def load(self, source: Source) -> TextTokenizer:
        encoding = self._encoding
        tokenizer = TextTokenizer(converted(encoding), self.name)
        if tokenizer.encode([PROBE])[0] != encoding.encode_ordinary(PROBE):
            raise DataError(
                f"{self.name}: its conversion to a tokenizer.json gives other ids than tiktoken; "
                "take another encoding, or a tokenizer.json"
            )
        return tokenizer

    @cached_property
    def _content(self) -> str:
        signature = f"tiktoken {metadata.version('tiktoken')} {self._encoding_name}"
        return self._memo.remember(signature, lambda: _content_of(self._encoding))

    @cached_property
    def _encoding(self) -> "Encoding":
        import tiktoken

        try:
            return tiktoken.get_encoding(self._encoding_name)
        except ValueError as error:
            known = ", ".join(tiktoken.list_encoding_names())
            raise DataError(f"{self.name}: no such encoding (there are {known})") from error
        # tiktoken fetches it over the network, with errors of several packages.
        except Exception as error:
            raise DataError(
                f"{self.name}: tiktoken cannot fetch it ({type(error).__name__}); fetch it once "
                "with network, with TIKTOKEN_CACHE_DIR set to a directory that stays"
            ) from error


def converted(encoding: "Encoding") -> "Tokenizer":
    """Ranks -> merges: the bytes of a token merge, by the lower ranks, into its two parts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks: dict[bytes, int] = encoding._mergeable_ranks
    letters = byte_letters()
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    by_rank = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    merges = []
    for _, token in by_rank:
        left, right = _parts(token, ranks)
        merges.append((spelt[left], spelt[right]))
    vocabulary = {spelt[token]: rank for token, rank in ranks.items()} | encoding._special_tokens
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    pattern = Regex(_POSSESSIVE.sub(r"\1", encoding._pat_str))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(encoding._special_tokens))
    return tokenizer


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that the merge of `token` joins. Raises DataError where there are none."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right) for left, right in pairwise(parts)]
        lower = [(rank, at) for at, rank in enumerate(pairs) if rank is not None]
        if not lower:
            raise DataError(f"tiktoken: no merges lead to the token {token!r}")
        _, at = min(lower)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _content_of(encoding: "Encoding") -> str:
    digest = hashlib.sha256(encoding._pat_str.encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(f"{rank} {token.hex()}\n".encode())
    digest.update(repr(sorted(encoding._special_tokens.items())).encode())
    return digest.hexdigest()
