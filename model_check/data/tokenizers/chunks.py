"""Cut a text where a byte-level tokenizer is sure to cut it, with one regular expression of Python.

A pre-tokenizer of the two kinds below reads from left to right. At each place it takes the first
alternative of its pattern that matches, and looks at nothing before that place. Each alternative
takes one character at least, and the last ones take any. So from a border of pre-tokens on, the
pre-tokens depend on the text after that border alone. Call a cut at q after a border p sound when q
is a border of the whole text's pre-tokens, too, and [p, q) alone has the pre-tokens that it has
within the text. A text begins at a border. By induction, if every cut is sound, the pre-tokens of a
text are those of its chunks in a row, and so are the ids: no model of `tokenizers` looks beyond a
pre-token.

Python's `re` knows neither \\p{L} nor the same blanks, so this one decides about characters that
every version of Unicode agrees on: sure letters (L below), ASCII digits (N), sure other signs (O),
ASCII blanks (S, of which H end no line). All others are unsure (U). Two ways to cut:

*One pre-token.* The pattern's own alternatives with L, N, O, S for its classes, each where those
before it in the pattern surely do not match, and only if no U stands where its run could have
continued. Then the chunk is what the pre-tokenizer takes at p. Alone it is taken whole, too: a run
is a run without what ends it, and blanks at the end of a text are taken together.

*Several pre-tokens,* where U is involved: from p up to the first place q where the character before
is surely no blank (B, nearly all of Unicode), and
- a blank of S follows (Llama 3: one of H), or the text ends. No alternative takes a blank after
  another character, except line ends after signs in Llama 3. So q is a border. The only look ahead,
  `\\s+(?!\\S)`, is from the end of a run of blanks; runs before q end before that B.
- or, Llama 3 only, q stands behind line ends, and before another B. Only `[\\r\\n]*` after signs
  and the alternatives of blanks take a line end, and none of them continues with a B. Blanks before
  q end in a line end, so `\\s*[\\r\\n]+` takes them, and it does not look ahead.
Where there is no such q, up to the end of the text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

# Without U+017F, which (?i:'s) takes for an s.
_L = (
    r"A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\u017e\u0180-\u0233\u0388-\u038a\u038e-\u03a1\u03a3-\u03ce"
    r"\u0400-\u0481\u048a-\u0513\u05d0-\u05ea\u0621-\u063a\u0641-\u064a\u3041-\u3094\u30a1-\u30fa"
    r"\u4e00-\u9fa5\uac00-\ud7a3"
)
_N = "0-9"
_O = (
    r"!-/:-@\[-`{-~\xa1-\xa9\xab\xac\xae-\xb1\xb6-\xb8\xbb\xbf\xd7\xf7\u2010-\u2027\u2030-\u205e"
    r"\u20a0-\u20b1\u2190-\u2426\u2500-\u2767\u3001-\u3003\u3008-\u3020\uff01-\uff0f\uff1a-\uff20"
)
_H = r" \t\v\f"
_S = _H + r"\r\n"
_U = rf"[^{_L}{_N}{_O}{_S}]"
_END = rf"(?!{_U})"
# Characters that some engine could take for a blank, without the letters and signs between them.
_DOUBTFUL = (
    r"\x1c-\x1f\x85\xa0\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff0-\uffff"
)
_B = rf"[^{_S}{_DOUBTFUL}]"
_SEVERAL = rf"(?:[{_S}]*+[^{_S}]++)+?"
_REST = r"[\s\S]++"

_CUTS = {
    GPT_2: (
        rf"'(?:[sdmt]|ll|ve|re)| ?(?:[{_L}]++|[{_N}]++|[{_O}]++){_END}"
        rf"|[{_S}]++\Z|[{_S}]+(?=[{_S}][{_L}{_N}{_O}])|[\t\v\f\r\n](?=[{_L}{_N}{_O}])"
        rf"|{_SEVERAL}(?<={_B})|{_REST}"
    ),
    LLAMA_3: (
        rf"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])|[{_H}{_O}]?[{_L}]++{_END}|[{_N}]{{1,3}}+{_END}"
        rf"|(?: [{_O}]|[{_O}](?![{_L}]))[{_O}]*+{_END}[\r\n]*+"
        rf"|[{_S}]*[\r\n](?=[{_H}]*+(?:[{_L}{_N}{_O}]|\Z))"
        rf"|[{_H}]++\Z|[{_H}]+(?=[{_H}][{_L}{_N}{_O}])|[{_H}](?=[{_N}])|[\t\v\f](?=[{_O}])"
        rf"|{_SEVERAL}(?:(?<={_B})(?=[{_H}]|\Z)|[\r\n]++(?={_B}))|{_REST}"
    ),
}

WINDOW = 1 << 20
"""Characters of a window, approximately."""
_BEFORE_A_BLANK = rf"{_B}(?= )"


def cut_for(pattern: str) -> re.Pattern[str] | None:
    """The expression whose `findall` cuts a text into chunks, for a pre-tokenizer that splits by
    `pattern`; None where there is no such expression."""
    cut = _CUTS.get(pattern)
    # Not compiled at import, since that takes 10 ms.
    return None if cut is None else re.compile(cut)


def has_windows(pattern: str) -> bool:
    """Whether a pre-tokenizer that splits by `pattern` cuts where `windows` does."""
    return pattern in (GPT_2, GPT_2_SPELT_OUT, LLAMA_3, QWEN_2, O200K)


def windows(text: str) -> Iterator[str]:
    """The text in parts of about a million characters, so that a long one is never encoded as a
    whole. Sound where `has_windows`: no alternative takes a space after a character that is surely
    no blank. A text without a space is one part."""
    before_a_blank = re.compile(_BEFORE_A_BLANK)
    start = 0
    while found := before_a_blank.search(text, start + WINDOW):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def by_windows(
    encode: Callable[[Sequence[str]], list[NDArray[Any]]],
    texts: Sequence[str],
    parts: Callable[[str], Iterable[str]] = windows,
) -> list[NDArray[Any]]:
    """The ids of each text; a long one is encoded part by part."""
    if max(map(len, texts), default=0) <= WINDOW:
        return encode(texts)
    return [np.concatenate([encode([part])[0] for part in parts(text)]) for text in texts]
