"""Many readers of one cache do not hold it many times."""

from pathlib import Path

from benchmarks.data_readers import MIB, make_cache, measure


def test_a_reader_holds_no_more_of_a_large_store_than_of_a_small_one(tmp_path: Path) -> None:
    small, large = make_cache(tmp_path / "1", MIB), make_cache(tmp_path / "32", 32 * MIB)
    (least,) = measure(small, 1)
    # Tokens of two bytes.
    assert max(measure(large, 2)) < least + 8 * MIB
