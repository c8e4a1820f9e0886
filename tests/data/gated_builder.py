"""A builder that stops wherever it is told to: `gated_builder.py ROOT TEXT TOKENIZER GATE`.

GATE is a number (wait before the document with that number, from 0), `rename` (before the store is
renamed into place) or `renamed` (right after). At the gate it says `at the gate` and waits until
stdin ends. It says how many documents it has tokenized.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from model_check.data.build.build import BuildOptions
from model_check.data.build.make import make
from model_check.data.build.request import CacheRequest
from model_check.data.cache.memo import Memo
from model_check.data.sources.documents import TextColumn
from model_check.data.sources.local_text import LocalSource
from model_check.data.sources.source import Source
from model_check.data.tokenizers.tokenizer import TextTokenizer

ONE_DOCUMENT_A_TASK = BuildOptions(save_every_s=0.0, task_bytes=1)


def wait_at_the_gate() -> None:
    print("at the gate", flush=True)
    sys.stdin.read()


class GatedTokenizer(TextTokenizer):
    def __init__(self, path: Path, gate: str) -> None:
        raw = Tokenizer.from_file(str(path))
        raw.normalizer = normalizers.Sequence([])  # nothing, but so only `tokenizers` fits
        super().__init__(raw, "gated")
        self.num_texts = 0
        self._gate = gate

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if str(self.num_texts) == self._gate:
            wait_at_the_gate()
        self.num_texts += len(texts)
        return super().encode(texts)


class Choice:
    """The tokenizer at `path`, which waits at `gate`."""

    name = label = "gated"

    def __init__(self, path: Path, gate: str = "never") -> None:
        self.tokenizer = GatedTokenizer(path, gate)

    def identity(self) -> dict[str, Any]:
        return {"kind": "gated", "content": self.tokenizer.to_json()}

    def load(self, source: Source) -> TextTokenizer:
        return self.tokenizer


def wanted(root: Path, text: Path, choice: Choice) -> CacheRequest:
    return CacheRequest(root, LocalSource(text, TextColumn("text"), Memo(root)), choice, 16, None)


def gate_the_rename(gate: str) -> None:
    """Only that of a token store: `tokens/<hash>`."""
    rename = os.rename

    def gated(source: Any, target: Any, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        is_store = os.readlink(f"/proc/self/fd/{dst_dir_fd}").endswith("/tokens")
        if is_store and gate == "rename":
            wait_at_the_gate()
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if is_store and gate == "renamed":
            wait_at_the_gate()

    os.rename = gated  # type: ignore[assignment]


def main(root: str, text: str, tokenizer: str, gate: str) -> None:
    gate_the_rename(gate)
    choice = Choice(Path(tokenizer), gate)
    make(wanted(Path(root), Path(text), choice), "size", print, ONE_DOCUMENT_A_TASK)
    print(f"tokenized {choice.tokenizer.num_texts} documents", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
