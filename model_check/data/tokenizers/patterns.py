"""The split patterns of the pre-tokenizers in use, and where a long text may be cut under them.

A pre-tokenizer reads from left to right. At each place it takes the first alternative of its
pattern that matches, and looks at nothing before that place. So from a border of pre-tokens on, the
pre-tokens depend on the text after that border alone, and the ids of a text are those of its parts
in a row wherever a cut is such a border: no model of `tokenizers` looks beyond a pre-token.
"""

import re
from collections.abc import Iterator

GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""The pattern of a ByteLevel pre-tokenizer of `tokenizers`."""
GPT_2_SPELT_OUT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

WINDOW = 1 << 20
"""Characters of a window, approximately."""
SURELY_NO_BLANK = (
    r"[^ \t\v\f\r\n\x1c-\x1f\x85\xa0\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff"
    r"\ufff0-\uffff]"
)
"""All except blanks, and characters that some engine could take for one."""


def has_windows(pattern: str) -> bool:
    """Whether a pre-tokenizer that splits by `pattern` cuts where `windows` does."""
    return pattern in (GPT_2, GPT_2_SPELT_OUT, LLAMA_3, QWEN_2, O200K)


def windows(text: str) -> Iterator[str]:
    """The text in parts of about a million characters, so that a long one is never encoded as a
    whole. Sound where `has_windows`: no alternative takes a space after a character that is surely
    no blank. A text without a space is one part."""
    before_a_blank = re.compile(rf"{SURELY_NO_BLANK}(?= )")
    start = 0
    while found := before_a_blank.search(text, start + WINDOW):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]
