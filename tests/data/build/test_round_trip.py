"""What goes in comes out: the tokens of every source, decoded, are its text; nothing is lost that
is not said."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from model_check.data.read.token_cache import TokenCache
from model_check.data.sources import embedded
from model_check.data.sources.embedded import EmbeddedSource
from model_check.data.sources.text import Repairs
from model_check.errors import ConfigError
from tests.data.lab import WORDS, FakeHub, Lab, start_builder, write_tokenizer

TEXTS = [
    f"one {WORDS}",
    "  Ünïcödé, 中文, \U0001f469\u200d\U0001f467, <|endoftext|> and </s>\n\n\tend  ",
    "def f(x):\n    return x ** 2  # 12345\n" * 30,
    "x" * 500,
]


def as_txt(lab: Lab) -> Path:
    for number, text in enumerate(TEXTS):
        lab.text(text, f"corpus/{number}.txt")
    return lab.dir / "corpus"


def as_jsonl(lab: Lab) -> Path:
    return lab.text("\n".join(json.dumps({"text": text}) for text in TEXTS), "d.jsonl")


def as_packed_jsonl(lab: Lab) -> Path:
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    return lab.text(gzip.compress(lines.encode()), "d.jsonl.gz")


def as_parquet(lab: Lab) -> Path:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": TEXTS}), lab.dir / "d.parquet", row_group_size=3)
    return lab.dir / "d.parquet"


def documents_of(cache: TokenCache, store: Path) -> list[str]:
    """Every document of the store, decoded, without its end token."""
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    tokenizer.decoder = ByteLevel()
    shards = [np.fromfile(store / name, cache.tokens.dtype) for name in cache.tokens.shard_names()]
    ids = np.concatenate(shards)
    ends = np.fromfile(store / "documents.bin", "<u8").astype(np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    assert (ids[ends - 1] == cache.end_id).all()
    return [
        tokenizer.decode(ids[start : end - 1].tolist(), skip_special_tokens=False)
        for start, end in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("backend", ["tokenizers", "gigatoken", "tiktoken"])
@pytest.mark.parametrize("source", [as_txt, as_jsonl, as_packed_jsonl, as_parquet])
def test_the_tokens_of_a_source_are_its_text(
    lab: Lab, source: Callable[[Lab], Path], backend: str
) -> None:
    if backend != "tokenizers":
        pytest.importorskip(backend)
    cache = TokenCache.open(
        lab.prepare(source(lab), f"data.tokenizer_backend={backend}").path, "full"
    )
    (store,) = lab.stores()
    assert documents_of(cache, store) == TEXTS
    assert any(f"tokenizing with {backend}" in line for line in lab.said)


def test_a_prepared_directory_is_its_text(lab: Lab) -> None:
    out = lab.dir / "out"
    lab.prepare(as_txt(lab), f"data.output_dir={out}")
    found = lab.prepare(out)
    (store,) = (out / "dataset" / "tokens").iterdir()
    assert found.hit
    assert documents_of(TokenCache.open(found.path, "full"), store) == TEXTS


def test_a_hub_dataset_is_its_text(lab: Lab, hub: FakeHub) -> None:
    pytest.importorskip("datasets")
    parquet = as_parquet(lab).read_bytes()
    card = "---\nconfigs:\n- config_name: default\n  data_files: train-*\n---\n"
    hub.repos["datasets/acme/notes"] = {
        "README.md": card.encode(),
        "train-00000-of-00001.parquet": parquet,
    }
    environ = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(lab.dir / "hf")}
    code, output = start_builder(lab.cache, "acme/notes", environ=environ).finish()
    assert code == 0, output
    ((store,), (view,)) = lab.stores(), lab.views()
    assert documents_of(TokenCache.open(view, "full"), store) == TEXTS


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("name", ["notes.parquet", "notes.jsonl"])
def test_a_hub_dataset_that_comes_with_other_bytes_is_never_trained_on(
    lab: Lab, hub: FakeHub, times: int, name: str
) -> None:
    pytest.importorskip("datasets")
    content = (as_parquet if name.endswith("parquet") else as_jsonl)(lab).read_bytes()
    hub.repos["datasets/acme/notes"] = {name: content}
    hub.changed_on_the_way = {f"/{name}": times}
    environ = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(lab.dir / "hf")}
    for _ in range(2 if times > 1 else 1):  # nor by the next run, which finds it all on the disk
        code, output = start_builder(lab.cache, "acme/notes", environ=environ).finish()
        assert code == (2 if times > 1 else 0), output
        if times > 1:
            assert f"acme/notes: {name} came with other bytes than" in output
    if times == 1:
        ((store,), (view,)) = lab.stores(), lab.views()
        assert documents_of(TokenCache.open(view, "full"), store) == TEXTS


def test_the_embedded_text_comes_back(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "MAX_BYTES", 1 << 20)
    cache = TokenCache.open(lab.prepare("embedded", "data.bpe_vocab_size=400").path)
    (store,) = lab.stores()
    assert documents_of(cache, store) == list(EmbeddedSource().documents(Repairs()))


def test_repairs_are_told_when_built_when_found_and_when_it_fails(lab: Lab) -> None:
    good = lab.text(json.dumps({"text": WORDS * 9}) + "\n{broken\n", "d.jsonl")
    line = "data: 1 x line skipped: not JSON (first at d.jsonl:2)"
    assert not lab.prepare(good).hit
    assert line in lab.said
    assert lab.prepare(good).hit
    assert line in lab.said
    bad = lab.text("{broken\n", "e.jsonl")
    with pytest.raises(Exception, match=r"e.jsonl: no usable text: 1 x line skipped: not JSON"):
        lab.prepare(bad, "data.tokenizer_backend=tokenizers")


def test_a_line_of_megabytes_is_one_document(lab: Lab) -> None:
    text = WORDS * 40_000  # 2.8 MB
    cache = TokenCache.open(
        lab.prepare(lab.text(json.dumps({"text": text}), "d.jsonl"), "data.num_samples=50").path
    )
    assert cache.num_sequences == 50


class Pieces(NamedTuple):
    """A store with begin tokens: the texts between, and how often each mark is in it."""

    texts: list[str]
    num_begins: int
    num_ends: int


def pieces_of(cache: TokenCache) -> Pieces:
    tokenizer = Tokenizer.from_file(str(cache.store.path / "tokenizer.json"))
    shards = [np.fromfile(cache.store.path / n, "<u2") for n in cache.tokens.shard_names()]
    ids = np.concatenate(shards)
    begin, end = tokenizer.token_to_id("<s>"), cache.end_id
    ends = cache.store.document_ends.read().astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    assert (ids[starts] == begin).all()
    assert (ids[ends - 1] == end).all()
    tokenizer.decoder = ByteLevel()
    texts = [
        tokenizer.decode(ids[a + 1 : b - 1].tolist(), skip_special_tokens=False)
        for a, b in zip(starts, ends, strict=True)
    ]
    return Pieces(texts, int((ids == begin).sum()), int((ids == end).sum()))


def test_with_begin_end_each_document_begins_and_ends_with_its_token(lab: Lab) -> None:
    """A text that spells the begin token does not become it."""
    texts = [f"{text} <s> not a begin {number}" for number, text in enumerate(TEXTS * 3)]
    source = lab.text("\n".join(json.dumps({"text": text}) for text in texts), "d.jsonl")
    tokenizer = write_tokenizer(lab.dir / "tokenizer.json", begin="<s>")
    asked = f"data.tokenizer={tokenizer}"
    plain = lab.prepare(source, asked)
    marked = lab.prepare(source, asked, "data.document_tokens=begin_end")
    assert marked.view.num_tokens == plain.view.num_tokens + len(texts)
    assert pieces_of(TokenCache.open(marked.path)) == (texts, len(texts), len(texts))
    assert lab.prepare(source, asked, "data.document_tokens=begin_end").hit
    assert len(lab.stores()) == 2


@pytest.mark.parametrize("named", ["bpe", "tokenizer.json"])
def test_a_tokenizer_without_a_begin_token_is_refused(lab: Lab, named: str) -> None:
    write_tokenizer(lab.dir / "tokenizer.json")
    name = named if named == "bpe" else lab.dir / named
    with pytest.raises(ConfigError, match=r"begin_end: .* has no token that begins a document \("):
        lab.prepare(lab.text(), f"data.tokenizer={name}", "data.document_tokens=begin_end")
    assert lab.stores() == []
