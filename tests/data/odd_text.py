"""Random texts of what pre-tokenizers disagree about, and what the real ones make of a text."""

import random
from collections.abc import Iterator

from tokenizers import Regex, pre_tokenizers

from model_check.data.tokenizers.patterns import GPT_2, LLAMA_3, O200K, QWEN_2

PATTERNS = {"gpt2": GPT_2, "llama3": LLAMA_3, "qwen2": QWEN_2, "o200k": O200K}

FEW = [
    *"asLl1'.([ \t\n\r\f",
    "\x1c",
    "\x85",
    "\xa0",
    "\u3000",
    "\u017f",
    "é",
    "\u0301",
    "中",
    "½",
    "’",
]
ODD = [
    *FEW,
    *'bzAZSTtDdVvErRmM09"!-_,<|>{}\\/\v',
    *["  ", "   ", "\n\n", "\r\n", "'s", "'S", "'ll", "'LL", "'Ve", "'\u017f", "don't"],
    *["\x00", "\x01", "\x1d", "\x1f", "\x7f", "\u1680", "\u180e", "\u2003", "\u2028", "\u2029"],
    *["\u200b", "\u200d", "\u202f", "\ufeff", "\ufff9", "\ufffd", "\u0378", "\ue000", "\U0010fffd"],
    *["e\u0301", "\u212a", "İ", "ß", "ﬁ", "ﬅ", "ª", "º", "\u02bc", "\u0345", "\u00ad", "\u00b5"],
    *[
        "文",
        "。",
        "，",
        "\u3005",
        "\u3007",
        "\u30fb",
        "\u30fc",
        "か",
        "한",
        "\u1100\u1161",
        "\U00020000",
    ],
    *[
        "я",
        "ё",
        "א",
        "ع",
        "\u064b",
        "ह",
        "\u093f",
        "ไ",
        "\u0e33",
        "١",
        "٣",
        "Ⅷ",
        "²",
        "①",
        "\U0001d7d8",
    ],
    *[
        "\U0001f600",
        "\U0001f468",
        "\U0001f1e9",
        "“",
        "—",
        "…",
        "€",
        "→",
        "─",
        "«",
        "\u2044",
        "\u2150",
    ],
    *["<|endoftext|>", "</s>"],
]


def pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == GPT_2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def odd_texts(seed: int, count: int) -> Iterator[str]:
    """Long ones of all of it or of a little of it, some with any character of Unicode in them, and
    short ones, since the end of a text matters."""
    rng = random.Random(seed)
    for number in range(count):
        pool = ODD if number % 4 == 0 else rng.sample(ODD, rng.choice([3, 5, 10]))
        parts = rng.choices(pool, k=1000)
        if number % 5 == 0:
            parts = [part if rng.random() < 0.8 else any_character(rng) for part in parts]
        text = "".join(parts)
        yield from (text, text[: rng.randrange(1, 12)], text[: rng.randrange(12, 60)])


def any_character(rng: random.Random) -> str:
    """Half of them from the scripts that are in use; never a surrogate."""
    number = rng.randrange(1, rng.choice([0x3100, 0x110000]))
    return chr(number) if not 0xD800 <= number <= 0xDFFF else "\ud7a3"
