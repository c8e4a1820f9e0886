"""Many readers of one cache: real processes, and what the kernel counts for them."""

from pathlib import Path

from benchmarks.data_readers import MIB, make_cache, measure


def test_eight_readers_hold_the_tokens_in_memory_once(tmp_path: Path) -> None:
    view = make_cache(tmp_path, 8 * MIB)  # tokens of two bytes
    found = measure(view, 8)
    assert [reader["rss"] for reader in found] == [16 * MIB] * 8
    assert sum(reader["pss"] for reader in found) < 17 * MIB
