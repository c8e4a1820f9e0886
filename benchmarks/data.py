"""Compares our token cache with datasets.map, datatrove and litdata: `python benchmarks/data.py`.

All get the same text and the same tokenizer.json; every run is a process of its own with empty
caches, and the contenders take turns. A number counts only if the sha256 of the token stream
(uint32, an end token after each document) is the same for all. A peer that is not installed is left
out, and a line says so:

    python -m venv --system-site-packages peers
    peers/bin/pip install datatrove litdata orjson gigatoken tiktoken
    peers/bin/python benchmarks/data.py

With --before another checkout of this project takes its turns, too.

Then: how long it takes to open a prepared cache of 100 MB, and how much memory eight readers take.
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

END = "<|endoftext|>"
MB = 1e6
DOCUMENT_CHARACTERS = 4000
BASE = "datasets.map"
NEEDS = {
    "ours, tokenizers": (),
    "ours, tiktoken": ("tiktoken",),
    "ours, gigatoken": ("gigatoken",),
    BASE: ("datasets", "pyarrow"),
    "datatrove": ("datatrove", "orjson"),
    "litdata": ("litdata",),
}


# ---- the text and the tokenizer


def sources() -> Iterator[str]:
    """Python source text of this installation; each document is a part of a file."""
    for base in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(base).rglob("*.py")):
            text = path.read_text(errors="replace").replace("\r", "").replace("\0", "")
            for start in range(0, len(text), DOCUMENT_CHARACTERS):
                part = text[start : start + DOCUMENT_CHARACTERS]
                if part.strip() and END not in part:
                    yield part


def write_text(path: Path, num_bytes: float) -> None:
    with path.open("w") as file:
        for text in sources():
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            if file.tell() >= num_bytes:
                return


def write_tokenizer(path: Path, text: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with text.open() as lines:
        sample = [json.loads(line)["text"] for line, _ in zip(lines, range(2000), strict=False)]
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))


# ---- the contenders: each fills `out` and gives its token stream back


def ours(backend: str, text: Path, tokenizer: Path, out: Path, workers: int) -> list[Any]:
    from model_check.config.load import Request, load
    from model_check.data.build.prepare import prepare
    from model_check.data.read.token_cache import TokenCache

    overrides = (
        f"data.cache_dir={out}",
        f"data.dataset={text}",
        f"data.tokenizer={tokenizer}",
        f"data.tokenizer_backend={backend}",
        f"data.num_proc={workers}",
        "data.verify=full",  # of a cache that is there: a fault is to be noticed
    )
    settings = load(Request(preset="cpu", overrides=overrides), lambda: False).settings
    prepared = prepare(settings, lambda line: None)
    tokens = TokenCache.open(prepared.path).tokens
    store = out / "tokens" / Path(TokenCache.open(prepared.path).view.tokens).name
    return [np.fromfile(store / name, tokens.dtype) for name in tokens.shard_names()]


def datasets_map(text: Path, tokenizer: Path, out: Path, workers: int) -> list[Any]:
    """As nanoGPT uses it, but with batches, and from Arrow to the file without Python numbers."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    encoder = Tokenizer.from_file(str(tokenizer))
    end = encoder.token_to_id(END)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = encoder.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*each.ids, end] for each in found]}

    data = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(out))
    num_proc = workers if workers > 1 else None
    ids = data.map(encode, batched=True, num_proc=num_proc, remove_columns=["text"])
    with (out / "tokens.bin").open("wb") as file:
        for batch in ids.with_format("arrow").iter(1000):
            file.write(batch["ids"].combine_chunks().flatten().to_numpy().astype("<u4").tobytes())
    return [np.fromfile(out / "tokens.bin", "<u4")]


def datatrove(text: Path, tokenizer: Path, out: Path, workers: int) -> list[Any]:
    """datatrove divides work by files, so it gets one file for each task."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    parts = text.parent / f"parts{workers}"
    pipeline = [
        JsonlReader(str(parts)),
        DocumentTokenizer(
            str(out / "tokens"),
            tokenizer_name_or_path=str(tokenizer),
            eos_token=END,
            shuffle_documents=False,
            batch_size=1000,
        ),
    ]
    logs = str(out / "logs")
    LocalPipelineExecutor(pipeline, tasks=workers, workers=workers, logging_dir=logs).run()
    return [np.fromfile(path, "<u2") for path in sorted((out / "tokens").glob("*.ds"))]


def litdata(text: Path, tokenizer: Path, out: Path, workers: int) -> list[Any]:
    """litdata gets ordered slices of the lines; its chunk files are read by their documented
    layout."""
    from litdata import TokensLoader, optimize

    lines = text.read_text().split("\n")[:-1]
    slices = [lines[start : start + 256] for start in range(0, len(lines), 256)]
    optimize(
        functools.partial(litdata_tokens, str(tokenizer)),
        slices,
        str(out / "chunks"),
        num_workers=workers,
        chunk_bytes="64MB",
        item_loader=TokensLoader(),
        keep_data_ordered=True,
        verbose=False,
    )
    index = json.loads((out / "chunks" / "index.json").read_text())
    return [chunk_tokens(out / "chunks" / chunk["filename"]) for chunk in index["chunks"]]


@functools.cache
def encoder_of(tokenizer: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(tokenizer)


def litdata_tokens(tokenizer: str, lines: list[str]) -> Iterator[Any]:
    import torch

    encoder = encoder_of(tokenizer)
    end = encoder.token_to_id(END)
    texts = [json.loads(line)["text"] for line in lines]
    for each in encoder.encode_batch_fast(texts, add_special_tokens=False):
        yield torch.tensor([*each.ids, end], dtype=torch.int32)


def chunk_tokens(path: Path) -> Any:
    raw = path.read_bytes()
    num_items = int(np.frombuffer(raw, "<u4", 1)[0])
    first = int(np.frombuffer(raw, "<u4", 1, offset=4)[0])
    assert first == 4 * (num_items + 2)
    return np.frombuffer(raw, "<i4", offset=first)


CONTENDERS: dict[str, Callable[[Path, Path, Path, int], list[Any]]] = {
    "ours, tokenizers": lambda *a: ours("tokenizers", *a),
    "ours, tiktoken": lambda *a: ours("tiktoken", *a),
    "ours, gigatoken": lambda *a: ours("gigatoken", *a),
    BASE: datasets_map,
    "datatrove": datatrove,
    "litdata": litdata,
}


def contend(name: str, text: Path, tokenizer: Path, out: Path, workers: int) -> None:
    """Runs in a process of its own: the last line of stdout is the result."""
    stream = CONTENDERS[name](text, tokenizer, out, workers)
    digest = hashlib.sha256()
    for part in stream:
        digest.update(part.astype("<u4").tobytes())
    peak_kib = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    result = {
        "tokens": sum(part.size for part in stream),
        "sha256": digest.hexdigest(),
        "peak_mb": peak_kib * 1024 / MB,
        "disk_mb": disk / MB,
    }
    print(json.dumps(result))


# ---- the comparison


def measure(
    name: str, program: Path, text: Path, tokenizer: Path, workers: int
) -> dict[str, Any] | str:
    """One run by `program`, this file of some checkout; the reason as text where it failed. The
    time includes reading the stream for its hash, for all alike."""
    with tempfile.TemporaryDirectory(dir=text.parent) as out:
        arguments = [program, "--contend", name, text, tokenizer, out, workers]
        cpu_before = cpu_of_children()
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={
                **os.environ,
                "TOKENIZERS_PARALLELISM": "false",
                "RAYON_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": f"{out}/hf",
                "DATA_OPTIMIZER_CACHE_FOLDER": f"{out}/litdata",
                "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{out}/litdata-data",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
        cpu = cpu_of_children() - cpu_before
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no word"])[-1][:160]
    return {"seconds": seconds, "cpu": cpu, **json.loads(done.stdout.strip().splitlines()[-1])}


def cpu_of_children() -> float:
    """Seconds: the cost of a run on a machine that has other work, too."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(text: Path, tokenizer: Path, workers: int, rounds: int, before: Path | None) -> None:
    names = [name for name in CONTENDERS if installed(name)]
    contenders = {name: (name, Path(__file__)) for name in names}
    if before:
        program = before.resolve() / "benchmarks" / "data.py"
        ours = [name for name in names if name.startswith("ours")]
        contenders |= {f"before: {name}": (name, program) for name in ours}
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in contenders}
    split_for_datatrove(text, workers)
    for number in range(rounds):
        for label in list(contenders)[:: 1 if number % 2 else -1]:  # there and back
            result = measure(*contenders[label], text, tokenizer, workers)
            if isinstance(result, str):
                print(f"  {label}: failed: {result}")
                continue
            runs[label].append(result)
    expected = runs["ours, tokenizers"][0]["sha256"]
    size = text.stat().st_size / MB
    print(f"\n{workers} process{'es' * (workers > 1)}, {size:.0f} MB, {rounds} rounds, wall time")
    print(
        f"{'':26} {'median s':>9} {'range':>13} {'MB/s':>6} {'x map':>6} {'CPU s':>6} {'x map':>6} "
        f"{'peak MB':>8} {'disk':>6}"
    )
    for name, results in runs.items():
        if not results:
            continue
        if any(result["sha256"] != expected for result in results):
            print(f"{name:26} other tokens: no number")
            continue
        report(name, results, runs[BASE], size)


def report(
    name: str, results: list[dict[str, Any]], base: list[dict[str, Any]], size: float
) -> None:
    seconds, cpu = ([result[key] for result in results] for key in ("seconds", "cpu"))
    median, median_cpu = statistics.median(seconds), statistics.median(cpu)
    last = results[-1]
    print(
        f"{name:26} {median:9.2f} {min(seconds):6.2f}-{max(seconds):6.2f} {size / median:6.1f} "
        f"{ratio_of(base, results, 'seconds'):6.2f} {median_cpu:6.2f} "
        f"{ratio_of(base, results, 'cpu'):6.2f} {last['peak_mb']:8.0f} {last['disk_mb']:6.1f}",
        flush=True,
    )


def ratio_of(base: list[dict[str, Any]], own: list[dict[str, Any]], key: str) -> float:
    """Median over the rounds; 0 where there is nothing to compare with."""
    ratios = [theirs[key] / ours[key] for theirs, ours in zip(base, own, strict=False)]
    return statistics.median(ratios) if ratios else 0.0


def split_for_datatrove(text: Path, workers: int) -> None:
    parts = text.parent / f"parts{workers}"
    parts.mkdir(exist_ok=True)
    lines = text.read_bytes().splitlines(keepends=True)
    each = -(-len(lines) // workers)
    for number in range(workers):
        part = b"".join(lines[number * each : (number + 1) * each])
        (parts / f"{number:02}.jsonl").write_bytes(part)


def installed(name: str) -> bool:
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        print(f"  {name}: left out, {' and '.join(missing)} not installed")
    return not missing


# ---- reading a prepared cache

READER = """
import sys, time; sys.path.insert(0, sys.argv[2])
from pathlib import Path
import numpy as np
from model_check.data.read.token_cache import TokenCache
started = time.perf_counter()
cache = TokenCache.open(Path(sys.argv[1]))
cache.gather(np.arange(8))
print(f"{(time.perf_counter() - started) * 1000:.2f}", flush=True)
for first in range(0, len(cache) - 64, 64):
    cache.gather(np.arange(first, first + 64))
print("read", flush=True)
sys.stdin.read()
"""


def reading(directory: Path, rounds: int) -> None:
    view = cache_of(directory, num_tokens=50_000_000)
    alone = [open_once(view) for _ in range(rounds)]
    print(
        f"\nopening a cache of 100 MB, first batch of 8: median {statistics.median(alone):.1f} ms"
    )
    print(f"  ({min(alone):.1f} to {max(alone):.1f}, {rounds} processes)")
    for count in (1, 8):
        rss, pss = memory_of(view, count)
        print(
            f"{count} reader{'s' * (count > 1)} of all of it: resident {rss:,.0f} MB summed, ",
            end="",
        )
        print(f"{pss:,.0f} MB with shared pages counted once")


def cache_of(directory: Path, num_tokens: int) -> Path:
    """A cache of random tokens, published by the product's own code."""
    from model_check.data.cache.shards import ShardWriter
    from model_check.data.read.manifest import (
        MANIFEST,
        TokensManifest,
        ViewManifest,
        hash_of,
        shard_name,
        short,
        to_bytes,
    )
    from model_check.utils.held import hold

    store = directory / "tokens" / short(hash_of({}))
    store.mkdir(parents=True)
    rng = np.random.default_rng(1)
    shard_tokens = 1 << 23
    with hold(store) as held:
        with ShardWriter(held, shard_name, "uint16", shard_tokens) as writer:
            writer.write(rng.integers(0, 50_000, num_tokens, np.uint16))
        with ShardWriter(held, lambda _: "documents.bin", "uint64", None) as ends:
            ends.write(np.array([num_tokens], np.uint64))
    common: dict[str, Any] = {"vocab_size": 50_000, "dataset": "random", "tokenizer": "none"}
    tokens = TokensManifest(
        hash=hash_of({}),
        key={},
        dtype="uint16",
        shard_tokens=shard_tokens,
        num_tokens=num_tokens,
        num_documents=1,
        end_token=END,
        end_id=0,
        repairs={},
        files={**writer.files, **ends.files},
        built_with={},
        **common,
    )
    (store / MANIFEST).write_bytes(to_bytes(tokens))
    view = ViewManifest(
        hash=hash_of({}),
        key={},
        tokens=f"tokens/{store.name}",
        tokens_hash=tokens.hash,
        context_length=1024,
        num_sequences=(num_tokens - 1) // 1024,
        num_tokens=num_tokens,
        **common,
    )
    path = directory / f"view__{short(view.hash)}"
    path.mkdir()
    (path / MANIFEST).write_bytes(to_bytes(view))
    return path


def start_reader(view: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(view), str(ROOT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def open_once(view: Path) -> float:
    """Milliseconds, without the imports."""
    reader = start_reader(view)
    assert reader.stdout is not None
    found = float(reader.stdout.readline())
    reader.communicate()
    return found


def memory_of(view: Path, count: int) -> tuple[float, float]:
    """(RSS, PSS) of all readers, MB, once each has read everything."""
    readers = [start_reader(view) for _ in range(count)]
    for reader in readers:
        assert reader.stdout is not None
        while reader.stdout.readline() != "read\n":
            pass
    found = [rollup(reader.pid) for reader in readers]
    for reader in readers:
        reader.communicate()
    return sum(rss for rss, _ in found), sum(pss for _, pss in found)


def rollup(pid: int) -> tuple[float, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return fields["Rss"] * 1024 / MB, fields["Pss"] * 1024 / MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--directory", type=Path, help="where to work (a temporary one)")
    parser.add_argument("--before", metavar="CHECKOUT", type=Path, help="of an earlier commit")
    parser.add_argument("--contend", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contend:
        name, text, tokenizer, out, workers = arguments.contend
        contend(name, Path(text), Path(tokenizer), Path(out), int(workers))
        return
    directory = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        text, tokenizer = directory / "text.jsonl", directory / "tokenizer.json"
        write_text(text, arguments.mb * MB)
        write_tokenizer(tokenizer, text)
        for workers in arguments.workers:
            compare(text, tokenizer, workers, arguments.rounds, arguments.before)
        reading(directory / "cache", arguments.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
