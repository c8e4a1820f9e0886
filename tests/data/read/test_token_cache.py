"""The format: which tokens a sequence has, and that what is not whole is refused."""

from pathlib import Path

import numpy as np
import pytest

from model_check.data.build.build import build_tokens
from model_check.data.read.manifest import (
    DOCUMENTS,
    MANIFEST,
    TOKENIZER,
    read_tokens,
    shard_name,
)
from model_check.data.read.token_cache import TokenCache
from model_check.errors import DataError
from model_check.utils.held import hold
from tests.data.lab import Lab
from tests.data.numbers import END_ID, NumberText, NumberTokenizer, number_cache


def test_every_token_but_the_first_is_a_label_once_up_to_the_tail(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, NumberText(range(50), range(50, 90)), context_length=9)
    stream = [*range(50), END_ID, *range(50, 90), END_ID]
    windows = cache.gather(np.arange(cache.num_sequences))
    assert cache.num_tokens == len(stream)
    assert cache.num_sequences == 10  # 91 labels
    assert windows[:, 1:].ravel().tolist() == stream[1:91]
    assert windows[:, :-1].ravel().tolist() == stream[:90]


def test_a_sequence_longer_than_two_shards_is_whole(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, NumberText(range(60)), context_length=20)
    assert cache.gather(np.array([1]))[0].tolist() == list(range(20, 41))


def test_document_ends_are_behind_the_end_tokens(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, NumberText(range(5), range(3)), context_length=2)
    assert cache.store.document_ends.read().tolist() == [6, 10]


def test_a_bounded_store_stops_at_the_token(tmp_path: Path) -> None:
    cache = number_cache(
        tmp_path, NumberText(range(5), range(50), range(9)), context_length=4, max_tokens=9
    )
    assert cache.num_tokens == 9
    assert cache.store.document_ends.read().tolist() == [6, 9]
    assert cache.gather(np.array([1]))[0].tolist() == [4, END_ID, 0, 1, 2]


def test_a_sequence_beyond_the_end_is_refused(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, NumberText(range(50)), context_length=9)
    with pytest.raises(IndexError, match="sequence 5 of 5"):
        cache.gather(np.array([5]))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_take_four_bytes_once_two_do_not_hold_them(
    tmp_path: Path, vocab_size: int, dtype: str
) -> None:
    numbers = NumberText(range(vocab_size - 20, vocab_size))
    tokenizer = NumberTokenizer(vocab_size)
    with hold(tmp_path) as directory:
        manifest = build_tokens(directory, numbers, tokenizer, {}, None, lambda line: None)
    assert manifest.dtype == dtype
    ids = np.fromfile(tmp_path / shard_name(0), dtype)
    assert ids.tolist() == [*range(vocab_size - 20, vocab_size), END_ID]


def test_the_manifest_lists_every_file_of_the_store(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, NumberText(range(20)), context_length=4)
    (store,) = (tmp_path / "tokens").iterdir()
    names = {path.name for path in store.iterdir()}
    assert names == {*cache.tokens.files, MANIFEST}
    assert {shard_name(0), shard_name(2), DOCUMENTS, TOKENIZER} <= names


def test_a_missing_cache_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such token cache; prepare_dataset"):
        TokenCache.open(tmp_path / "nowhere")


def test_a_torn_shard_is_refused_by_its_size_and_a_changed_one_by_its_sum(lab: Lab) -> None:
    path = lab.prepare(lab.text()).path
    (store,) = lab.stores()
    shard = store / shard_name(0)
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    TokenCache.open(path, "size")
    with pytest.raises(DataError, match=r"tokens-00000.bin: its content changed"):
        TokenCache.open(path, "full")
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"tokens-00000.bin: has [\d,]+ bytes instead of"):
        TokenCache.open(path, "size")
    TokenCache.open(path, "off")


def test_an_edited_manifest_is_refused(lab: Lab) -> None:
    lab.prepare(lab.text())
    (store,) = lab.stores()
    manifest = store / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"vocab_size": 300', b'"vocab_size": 301'))
    with pytest.raises(DataError, match="it was edited"):
        read_tokens(store, "off")
