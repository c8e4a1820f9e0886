"""The end token of a document is the one that a tokenizer's files declare, as transformers reads
them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from model_check.data.cache.memo import Memo
from model_check.data.sources.embedded import EmbeddedSource
from model_check.data.tokenizers.tokenizer import GivenTokenizer, TextTokenizer
from model_check.errors import DataError

CONFIG, MAP, NAME = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ADDED = {"__type": "AddedToken", "content": "<|eot_id|>", "lstrip": False, "normalized": False,
         "rstrip": False, "single_word": False}  # fmt: skip
DECODER = {"added_tokens_decoder": {"4": {"content": "<|eot_id|>", "special": True}}}
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
Files = Mapping[str, Mapping[str, Any]]
KINDS: Mapping[str, tuple[tuple[str, ...], Files]] = {
    "llama 3": (LLAMA, {CONFIG: FAST | {"eos_token": "<|end_of_text|>"}}),
    "llama 3 instruct: a turn's end": (LLAMA, {CONFIG: FAST | {"eos_token": "<|eot_id|>"}}),
    "an added token": (LLAMA, {CONFIG: FAST | {"eos_token": ADDED}}),
    "the older file": (LLAMA, {CONFIG: FAST, MAP: {"eos_token": "<|eot_id|>"}}),
    "the older file, an added token": (LLAMA, {MAP: {"eos_token": ADDED}, CONFIG: FAST}),
    "both, and they differ": (
        LLAMA,
        {CONFIG: FAST | {"eos_token": "<|end_of_text|>"}, MAP: {"eos_token": "<|eot_id|>"}},
    ),
    "both, and the newer counts": (
        LLAMA,
        {
            CONFIG: FAST | DECODER | {"eos_token": "<|eot_id|>"},
            MAP: {"eos_token": "<|end_of_text|>"},
        },
    ),
    "null in the newer": (
        LLAMA,
        {CONFIG: FAST | {"eos_token": None}, MAP: {"eos_token": "<|end_of_text|>"}},
    ),
    "qwen instruct": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {CONFIG: FAST | {"eos_token": "<|im_end|>"}},
    ),
    "gpt-2: one token for both": (
        ("<|endoftext|>",),
        {CONFIG: FAST | {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}},
    ),
    "gemma: a turn's end beside it": (
        ("<bos>", "<eos>", "<end_of_turn>"),
        {CONFIG: FAST | {"eos_token": "<eos>"}},
    ),
    "gemma instruct": (
        ("<bos>", "<eos>", "<end_of_turn>"),
        {CONFIG: FAST | {"eos_token": "<end_of_turn>"}},
    ),
    "deepseek": (
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        {CONFIG: FAST | {"eos_token": "<｜end▁of▁sentence｜>"}},
    ),
    "phi: a name that nobody knows": (
        ("<|endoftext|>", "<|end|>"),
        {CONFIG: FAST | {"eos_token": "<|end|>"}},
    ),
    "bert with an end of its own": (
        ("[CLS]", "[SEP]", "[EOS]"),
        {CONFIG: FAST | {"eos_token": "[EOS]", "sep_token": "[SEP]"}},
    ),
    "a word of the vocabulary": (("</s>",), {CONFIG: FAST | {"eos_token": "END"}}),
}


def write(directory: Path, special: tuple[str, ...], files: Files) -> Path:
    words = ("[UNK]", "a", "END", "</p>", *special)
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(list(special))
    directory.mkdir(parents=True, exist_ok=True)
    raw.save(str(directory / NAME))
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


def loaded(directory: Path, end_token: str | None = None) -> TextTokenizer:
    memo = Memo(directory / "memo")
    return GivenTokenizer(directory, "t", memo, end_token).load(EmbeddedSource())


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    directory = write(tmp_path, *KINDS[kind])
    theirs: Any = AutoTokenizer
    expected = theirs.from_pretrained(directory, local_files_only=True)
    tokenizer = loaded(directory)
    assert (tokenizer.end_token, tokenizer.end_id) == (expected.eos_token, expected.eos_token_id)


def test_where_nothing_is_declared_a_known_special_token_ends(tmp_path: Path) -> None:
    assert loaded(write(tmp_path / "known", ("<s>", "</s>"), {})).end_token == "</s>"
    with pytest.raises(DataError, match=r"no eos_token is declared beside it, and none of .*</s>"):
        loaded(write(tmp_path / "none", ("<s>",), {}))


def test_a_list_of_added_tokens_may_be_long(tmp_path: Path) -> None:
    """Gemma 3's tokenizer_config.json has 1.2 MB."""
    many = {str(n): {"content": f"<unused{n}>", "special": True} for n in range(40_000)}
    config = FAST | {"eos_token": "<|eot_id|>", "added_tokens_decoder": many}
    directory = write(tmp_path, LLAMA, {CONFIG: config})
    assert (directory / CONFIG).stat().st_size > 1 << 20
    assert loaded(directory).end_token == "<|eot_id|>"


def test_a_setting_names_another_one(tmp_path: Path) -> None:
    directory = write(tmp_path, *KINDS["llama 3"])
    assert loaded(directory, "<|eot_id|>").end_token == "<|eot_id|>"
    with pytest.raises(DataError, match="'<eod>', which is to end each document, is no token of"):
        loaded(directory, "<eod>")


def test_a_declared_token_that_is_none_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, LLAMA, {CONFIG: FAST | {"eos_token": "<|eod|>"}})
    with pytest.raises(DataError, match=r"'<\|eod\|>'.*data.document_end=TOKEN names one that is"):
        loaded(directory)


@pytest.mark.parametrize("content", ["[]", "{", '{"eos_token": 3}', "\udcff"])
def test_a_declaration_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    directory = write(tmp_path, *KINDS["llama 3"])
    (directory / CONFIG).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=f"{CONFIG}: not the configuration of a tokenizer"):
        loaded(directory)


def test_the_cache_has_a_key_of_its_own_for_each_end(tmp_path: Path) -> None:
    one = write(tmp_path / "one", *KINDS["llama 3"])
    other = shutil.copytree(one, tmp_path / "other")
    (other / CONFIG).write_text(json.dumps(FAST | {"eos_token": "<|eot_id|>"}))
    memo = Memo(tmp_path / "memo")
    found = [GivenTokenizer(directory, "t", memo).identity() for directory in (one, other)]
    assert found[0] != found[1]
    assert GivenTokenizer(one, "t", memo, "<|eot_id|>").identity() == found[1]
