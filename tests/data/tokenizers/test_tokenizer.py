"""Tokenizers that are given: what identifies them, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from model_check.data.cache.memo import Memo
from model_check.data.sources.embedded import EmbeddedSource
from model_check.data.tokenizers.tokenizer import GivenTokenizer, TextTokenizer
from model_check.data.tokenizers.trained import first_characters
from model_check.errors import ConfigError, DataError
from tests.data.lab import WORDS, Lab, write_tokenizer


def identity(path: Path) -> dict[str, object]:
    return GivenTokenizer(path, "tiny", Memo(path.parent / "memo")).identity()


def test_padding_and_truncation_are_not_part_of_a_tokenizer(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    before = identity(path)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    path.write_text(tokenizer.to_str(pretty=True))
    assert identity(path) == before


def test_another_vocabulary_is_another_tokenizer(tmp_path: Path) -> None:
    first = identity(write_tokenizer(tmp_path / "tokenizer.json"))
    assert identity(write_tokenizer(tmp_path / "tokenizer.json", vocab_size=281)) != first


def test_truncation_in_the_file_does_not_cut_documents(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(5)
    path.write_text(tokenizer.to_str())
    loaded = GivenTokenizer(path, "tiny", Memo(tmp_path)).load(EmbeddedSource())
    assert len(loaded.encode([WORDS * 3])[0]) > 5


def test_an_end_token_not_marked_special_is_not_forged_either(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    document = json.loads(path.read_text())
    document["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    loaded = GivenTokenizer(path, "tiny", Memo(tmp_path)).load(EmbeddedSource())
    assert loaded.end_id not in loaded.encode(["one </s> two"])[0]


def test_a_model_directory_gives_its_tokenizer(lab: Lab) -> None:
    write_tokenizer(lab.dir / "my-llama" / "tokenizer.json")
    path = lab.text()
    options = ("data.tokenizer=model", f"model.model_path={lab.dir / 'my-llama'}")
    prepared = lab.prepare(path, *options)
    assert "__my-llama__" in prepared.path.name
    assert prepared.view.vocab_size == 280
    assert lab.prepare(path, *options).hit


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{oops", "not JSON"),
        ("{}", "it has no model"),
        ('{"model": {"type": "Nonsense"}}', "not a tokenizer.json that `tokenizers` reads"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(lab: Lab, content: str, message: str) -> None:
    bad = lab.text(content, "tokenizer.json")
    with pytest.raises(DataError, match=message):
        lab.prepare(lab.text(), f"data.tokenizer={bad}")


def test_a_vocabulary_without_an_end_token_is_refused(lab: Lab) -> None:
    bad = write_tokenizer(lab.dir / "tokenizer.json", end="<pad>")
    with pytest.raises(DataError, match="no token that ends a document"):
        lab.prepare(lab.text(), f"data.tokenizer={bad}")


TEMPLATES = {
    "nothing": None,
    "before": "<first> $A",
    "before and after": "<first> $A </s>",
    "the end token before": "</s> $A",
    "after": "$A <first>",
}


@pytest.mark.parametrize(
    ("template", "known", "begin"),
    [
        ("nothing", None, None),
        ("nothing", "<s>", "<s>"),
        ("before", None, "<first>"),
        ("before", "<s>", "<first>"),
        ("before and after", None, "<first>"),
        ("the end token before", None, None),
        ("the end token before", "<s>", "<s>"),
        ("after", None, None),
    ],
)
def test_the_begin_token_is_the_tokenizers_own_before_a_known_one(
    tmp_path: Path, template: str, known: str | None, begin: str | None
) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", begin=known)
    raw = Tokenizer.from_file(str(path))
    raw.add_special_tokens(["<first>"])
    if text := TEMPLATES[template]:
        ids = [(name, raw.token_to_id(name)) for name in ("<first>", "</s>") if name in text]
        raw.post_processor = processors.TemplateProcessing(text, special_tokens=ids)
    tokenizer = TextTokenizer(raw, "tiny")
    assert tokenizer.begin_token == begin
    assert tokenizer.begin_id == (None if begin is None else raw.token_to_id(begin))


def test_a_begin_token_that_a_text_could_forge_is_none(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", begin="<s>")
    document = json.loads(path.read_text())
    document["added_tokens"][1]["special"] = False
    tokenizer = TextTokenizer(Tokenizer.from_str(json.dumps(document)), "tiny")
    assert tokenizer.begin_token is None


def test_a_tokenizer_that_is_not_there_is_refused(lab: Lab) -> None:
    with pytest.raises(DataError, match=r"data.tokenizer = 'nowhere.json': no such file"):
        lab.prepare(lab.text(), "data.tokenizer=nowhere.json")


def test_a_model_with_fewer_rows_than_ids_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size = 100 is too small"):
        lab.prepare(lab.text(), "model.vocab_size=100")


def test_what_is_trained_on_is_bounded_however_long_a_document_is() -> None:
    assert list(first_characters(["abc", "defg", "hij"], 5)) == ["abc", "de"]
    assert list(first_characters(["abc", "de", "f"], 5)) == ["abc", "de"]
    assert list(first_characters(["abc"], 5)) == ["abc"]


def test_one_endless_word_does_not_stop_the_training(lab: Lab) -> None:
    """Its training took time quadratic in the word: a minute and more for this one."""
    prepared = lab.prepare(lab.text("x" * 400_000))
    assert prepared.view.num_tokens > 0


def test_a_tokenizer_that_depends_on_chance_is_refused(lab: Lab) -> None:
    path = write_tokenizer(lab.dir / "tokenizer.json")
    document = json.loads(path.read_text())
    for dropout in (0.1, 1.0):
        document["model"]["dropout"] = dropout
        path.write_text(json.dumps(document))
        with pytest.raises(
            DataError, match=rf"tokenizer\.json: its BPE has a dropout of {dropout}"
        ):
            lab.prepare(lab.text(), f"data.tokenizer={path}")
    document["model"]["dropout"] = 0.0
    path.write_text(json.dumps(document))
    lab.prepare(lab.text(), f"data.tokenizer={path}")


def change_token(document: dict[str, Any], spelling: str) -> None:
    document["added_tokens"][0]["content"] = spelling


def change_prefix(document: dict[str, Any], spelling: str) -> None:
    document["model"]["continuing_subword_prefix"] = spelling


def add_key(document: dict[str, Any], spelling: str) -> None:
    document[spelling] = None


@pytest.mark.parametrize("change", [change_token, change_prefix, add_key])
@pytest.mark.parametrize("half", ["\ud800", "a\udfffb", "\udc00\ud83d"], ids=ascii)
def test_half_a_character_in_a_tokenizer_is_refused(
    lab: Lab, change: Callable[[dict[str, Any], str], None], half: str
) -> None:
    path = write_tokenizer(lab.dir / "tokenizer.json")
    document = json.loads(path.read_text())
    change(document, half)
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"tokenizer\.json: '.*' in it is half a character"):
        lab.prepare(lab.text(), f"data.tokenizer={path}")


def test_half_a_character_in_bytes_is_refused(lab: Lab) -> None:
    path = write_tokenizer(lab.dir / "tokenizer.json")
    path.write_bytes(path.read_bytes().replace(b'"version"', b'"\xed\xa0\x80": 1, "version"'))
    with pytest.raises(DataError, match=r"tokenizer\.json: not JSON: 'utf-8' codec can't decode"):
        lab.prepare(lab.text(), f"data.tokenizer={path}")


def test_a_character_that_is_spelt_in_halves_is_one(lab: Lab) -> None:
    path = write_tokenizer(lab.dir / "tokenizer.json")
    document = json.loads(path.read_text())
    document["model"]["vocab"]["\U0001f600"] = len(document["model"]["vocab"])
    path.write_text(json.dumps(document))
    assert "\\ud83d" in path.read_text()
    lab.prepare(lab.text(), f"data.tokenizer={path}")


@pytest.mark.parametrize("number", [0, 200])
def test_two_tokens_of_one_id_are_refused(lab: Lab, number: int) -> None:
    """`tokenizers` takes the file, and refuses what it makes of it."""
    path = write_tokenizer(lab.dir / "tokenizer.json")
    document = json.loads(path.read_text())
    merged = "".join(document["model"]["merges"][0])
    document["model"]["vocab"][merged] = number
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=f"two tokens of its vocabulary have the id {number}$"):
        lab.prepare(lab.text(), f"data.tokenizer={path}")


@pytest.mark.parametrize("number", [1 << 24, 1 << 31, (1 << 32) - 1])
def test_a_token_with_an_id_beyond_all_vocabularies_is_refused(lab: Lab, number: int) -> None:
    """`tokenizers` goes through all ids below it to write itself: minutes."""
    path = write_tokenizer(lab.dir / "tokenizer.json")
    document = json.loads(path.read_text())
    document["model"]["vocab"]["far"] = number
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=rf"a token has the id {number:,}: a model would have a r"):
        lab.prepare(lab.text(), f"data.tokenizer={path}")


def test_where_the_library_panics_the_tokenizer_is_refused(lab: Lab) -> None:
    """Its BPE cuts the prefix of a word's later parts off where a merge joins them, although this
    part has none."""
    path = write_tokenizer(lab.dir / "tokenizer.json")
    document = json.loads(path.read_text())
    document["model"]["continuing_subword_prefix"] = "\u0120\u0120\u0120\u0120"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"that `tokenizers` reads: range"):
        lab.prepare(lab.text(), f"data.tokenizer={path}")


def test_an_end_that_nothing_declares_is_told(lab: Lab) -> None:
    path = write_tokenizer(lab.dir / "t" / "tokenizer.json")
    told = "data: documents end with </s>, by its name: no tokenizer_config.json or "
    lab.prepare(lab.text(), f"data.tokenizer={path}")
    assert any(line.startswith(told) for line in lab.said)
    lab.said.clear()
    (path.parent / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    lab.prepare(lab.text(), f"data.tokenizer={path}")
    lab.prepare(lab.text(), "data.tokenizer=bpe", "data.document_end=null")
    assert not any("by its name" in line for line in lab.said)


def words(*more: str) -> Tokenizer:
    """A vocabulary of words."""
    known = ["one", "two", *more]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(["<|endoftext|>"])
    return raw


def test_a_word_without_a_token_is_told_where_no_token_stands_for_it() -> None:
    closed, opened = TextTokenizer(words(), "closed"), TextTokenizer(words("[UNK]"), "open")
    assert closed.unknown_in(["one two", " two\tthree four"]) == "three"
    assert closed.unknown_in(["one", ""]) is None
    assert closed.unknown_in(["one <|endoftext|>"]) == "<|endoftext|>"
    assert opened.unknown_in(["three"]) is None


def test_a_text_with_such_a_word_is_left_out_and_counted(lab: Lab) -> None:
    path = lab.dir / "words.json"
    words().save(str(path))
    rows = [{"text": "one two " * 20}, {"text": "one three"}]
    text = lab.text("\n".join(map(json.dumps, rows)), "d.jsonl")
    prepared = lab.prepare(text, f"data.tokenizer={path}")
    assert prepared.view.num_tokens == 41
    assert any(
        "1 x document skipped: it has a word that is no token (first at a text: 'three')" in line
        for line in lab.said
    )


def test_a_spelling_that_the_normalizer_makes_is_a_special_token() -> None:
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = ("<|endoftext|>", "<|im_end|>")
    raw.add_special_tokens([AddedToken(mark, normalized=True, special=True) for mark in marks])
    tokenizer = TextTokenizer(raw, "t")
    for text in ("a <|IM_END|> b", "\uff1c|im_end|\uff1e"):
        assert tokenizer.special_in(["harmless", text]) == "<|im_end|>"
    assert tokenizer.special_in(["harmless", ""]) is None
