"""How much memory N readers of one token cache take: `python -m benchmarks.data_readers`.

Each reader is a process that gathers every sequence, as a training worker does. Private memory
belongs to one reader alone, Python and numpy included; the tokens themselves are in the kernel's
page cache, once for all. The benchmark also measures the time to open a cache and read its first
sequence.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from model_check.data.build.request import CacheRequest
from model_check.data.build.splits import view_of
from model_check.data.cache.publish import write_synced
from model_check.data.read.manifest import (
    DOCUMENTS,
    MANIFEST,
    FileEntry,
    TokensManifest,
    hash_of,
    shard_name,
    to_bytes,
)
from model_check.data.read.token_cache import TokenCache
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.utils.held import HeldDirectory, hold

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
SHARD_TOKENS = 1 << 25
CONTEXT_LENGTH = 2048

READER = """
import sys
from pathlib import Path
import numpy as np
from model_check.data.read.token_cache import TokenCache
cache = TokenCache.open(Path(sys.argv[1]))
for first in range(0, cache.num_sequences, 16):
    cache.gather(np.arange(first, min(first + 16, cache.num_sequences)))
print("read", flush=True)
sys.stdin.read()
"""


class Random:
    """Stands for a source and a tokenizer; neither is read, since the store is written directly."""

    name = label = "random"
    size_bytes = None
    endless = False

    def identity(self) -> dict[str, Any]:
        return {"kind": "random"}

    def documents(self, repairs: Repairs) -> Iterator[str]:
        raise AssertionError("the store is written directly")

    def load(self, source: object) -> TextTokenizer:
        raise AssertionError("the store is written directly")


def make_cache(root: Path, num_tokens: int) -> Path:
    """Write a whole entry of random tokens; the path of its view."""
    wanted = CacheRequest(root, Random(), Random(), CONTEXT_LENGTH, None)
    wanted.store.mkdir(parents=True)
    wanted.view.mkdir()
    with hold(wanted.store) as store, hold(wanted.view) as directory:
        tokens = write_store(wanted, store, num_tokens)
        view = view_of(wanted, tokens, directory)
    (wanted.view / MANIFEST).write_bytes(to_bytes(view))
    return wanted.view


def write_store(wanted: CacheRequest, store: HeldDirectory, num_tokens: int) -> TokensManifest:
    random = np.random.default_rng(0)
    files: dict[str, FileEntry] = {}
    for number in range(-(-num_tokens // SHARD_TOKENS)):
        count = min(SHARD_TOKENS, num_tokens - number * SHARD_TOKENS)
        ids = random.integers(0, 50_000, count, np.uint16)
        files[shard_name(number)] = write_synced(store, shard_name(number), ids.tobytes())
    ends = np.array([num_tokens], "<u8").tobytes()
    files[DOCUMENTS] = write_synced(store, DOCUMENTS, ends)
    manifest = TokensManifest(
        hash=hash_of(wanted.tokens_key),
        key=wanted.tokens_key,
        dtype="uint16",
        shard_tokens=SHARD_TOKENS,
        num_tokens=num_tokens,
        num_documents=1,
        vocab_size=50_000,
        end_token="end",
        end_id=0,
        dataset="random",
        tokenizer="random",
        repairs={},
        files=files,
        built_with={},
    )
    (wanted.store / MANIFEST).write_bytes(to_bytes(manifest))
    return manifest


def private_bytes(pid: int) -> int:
    """Of a process, and of nobody else."""
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(f[1]) * 1024 for f in fields if f[0].startswith("Private_"))


def measure(view: Path, num_readers: int) -> list[int]:
    """The private memory of each, when it has read all sequences."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(view)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(num_readers)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "read\n"
        return [private_bytes(reader.pid) for reader in readers]
    finally:
        for reader in readers:
            reader.communicate("")


def open_times_s(view: Path, rounds: int) -> list[float]:
    """With a warm page cache: from the end of the imports to the first sequence."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        TokenCache.open(view).gather(np.array([0]))
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the store")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        view = make_cache(Path(directory), arguments.mib * MIB // 2)
        print(f"store of {arguments.mib} MiB, uint16, context {CONTEXT_LENGTH}\n")
        print("| readers | private, each |")
        print("|---|---|")
        for num_readers in arguments.readers:
            private = statistics.median(measure(view, num_readers)) / MIB
            print(f"| {num_readers} | {private:.0f} MiB |")
        times = sorted(open_times_s(view, 31))
        print(
            f"\nwarm open and first sequence: median {statistics.median(times) * 1000:.2f} ms "
            f"({times[0] * 1000:.2f} to {times[-1] * 1000:.2f}, {len(times)} times)"
        )


if __name__ == "__main__":
    main()
