"""How our cache and its peers handle the same faults: `python benchmarks/data_faults.py`.

Each contender of `benchmarks/data.py` prepares a text, meets a fault in the same place, and
prepares again with the same command, as its user would. The sha256 of the token stream decides:
`right` is the stream of an undisturbed run in an empty directory."""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import MB, installed, split_for_datatrove, write_text, write_tokenizer

BENCHMARK = Path(__file__).with_name("data.py")
NAMES = ["ours, tokenizers", "datasets.map", "datatrove", "litdata"]


class Place:
    """The directory of one contender: `text.jsonl`, `tokenizer.json`, `out/`."""

    def __init__(self, directory: Path, name: str, given: Path) -> None:
        self.directory = directory
        self.name = name
        shutil.copytree(given, directory)
        self.out.mkdir()

    @property
    def out(self) -> Path:
        return self.directory / "out"

    def start(self, workers: int = 1) -> subprocess.Popen[str]:
        text, tokenizer = self.directory / "text.jsonl", self.directory / "tokenizer.json"
        split_for_datatrove(text, workers)
        home = self.directory / "home"
        return subprocess.Popen(
            [
                *(sys.executable, str(BENCHMARK), "--contend"),
                *(self.name, str(text), str(tokenizer), str(self.out), str(workers)),
            ],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(home / "hf"),
                "DATA_OPTIMIZER_CACHE_FOLDER": str(home / "litdata"),
                "DATA_OPTIMIZER_DATA_CACHE_FOLDER": str(home / "litdata-data"),
                "TOKENIZERS_PARALLELISM": "false",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self) -> dict[str, Any] | str:
        """The result, or the last line of the error."""
        process = self.start()
        output, errors = process.communicate()
        if process.returncode:
            return (errors.strip().splitlines() or ["no word"])[-1][:100]
        result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        return result

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())


def killed_half_way(place: Place, seconds: float) -> None:
    process = place.start()
    time.sleep(seconds * 0.6)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def bytes_flipped(place: Place, seconds: float) -> None:
    """Eight bytes in a row (an id may be an int64), in the middle of the largest file of its
    output."""
    place.run()
    found = [path for path in place.out.rglob("*") if path.is_file() and path.name != "tokens.bin"]
    largest = max(found, key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 8] = bytes(byte ^ 1 for byte in raw[middle : middle + 8])
    largest.write_bytes(raw)


def other_text(place: Place, seconds: float) -> None:
    """The lines of the text are shuffled: same size, same name, and the time is set back."""
    place.run()
    text = place.directory / "text.jsonl"
    status = text.stat()
    lines = text.read_bytes().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    text.write_bytes(b"".join(lines))
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_tokenizer(place: Place, seconds: float) -> None:
    """A tokenizer under the same name, with two ids exchanged."""
    place.run()
    path = place.directory / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    first, second = list(vocabulary)[5000:5002]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(document))


FAULTS: dict[str, Callable[[Place, float], None]] = {
    "SIGKILL half way": killed_half_way,
    "eight bytes flipped in what it left": bytes_flipped,
    "another text, same name, size and time": other_text,
    "another tokenizer, same name": other_tokenizer,
}


def suffer(fault: str, name: str, given: Path, scratch: Path, seconds: float) -> str:
    place = Place(scratch / "place", name, given)
    try:
        FAULTS[fault](place, seconds)
        left = place.size() / MB
        again = place.run()
        shutil.rmtree(place.out)
        place.out.mkdir()
        shutil.rmtree(place.directory / "home", ignore_errors=True)
        expected = place.run()
    finally:
        shutil.rmtree(place.directory, ignore_errors=True)
    if isinstance(again, str):
        return f"refuses ({left:.1f} MB left): {again}"
    if isinstance(expected, str):
        return f"no undisturbed run: {expected}"
    same = again["sha256"] == expected["sha256"]
    return f"right ({left:.1f} MB were left)" if same else "WRONG TOKENS, no word"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, default=8)
    parser.add_argument("--only", default="", help="faults whose name has this")
    parser.add_argument("--names", nargs="+", default=NAMES, help="contenders")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    try:
        given = scratch / "given"
        given.mkdir()
        write_text(given / "text.jsonl", arguments.mb * MB)
        write_tokenizer(given / "tokenizer.json", given / "text.jsonl")
        for name in arguments.names:
            if not installed(name):
                continue
            started = time.monotonic()
            Place(scratch / "first", name, given).run()
            seconds = time.monotonic() - started
            shutil.rmtree(scratch / "first")
            for fault in FAULTS:
                if arguments.only in fault:
                    print(f"{name:18} {fault:40} ", end="", flush=True)
                    print(suffer(fault, name, given, scratch, seconds), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
