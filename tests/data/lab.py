"""A cache directory to prepare in, builders that are processes of their own, and a hub on the
loopback interface."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs

import pytest

from model_check.config.load import Request, load
from model_check.config.schema import Settings
from model_check.data.build.prepare import Prepared, prepare
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40
WORDS = "the model checks every GPU of a box and says which one cannot train "
_PLACES = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "DATASET_CACHE_DIR", "HTTP_PROXY")


def usual(cache: Path, dataset: object, given: Sequence[str]) -> list[str]:
    """Small and quick: vocabulary 300, context 16. With the backend that everybody has. Without
    those that are given, and without a size for a vocabulary that is another one."""
    settings = {
        "data.cache_dir": cache,
        "data.dataset": dataset,
        "data.tokenizer": "bpe",
        "data.bpe_vocab_size": 300,
        "data.tokenizer_backend": "tokenizers",
        "data.hub_timeout_s": 30,
        "training.context_length": 16,
    }
    others = dict(text.split("=", 1) for text in given if text.startswith("data.tokenizer="))
    if others.get("data.tokenizer", "bpe") not in ("auto", "bpe", "wordpiece"):
        del settings["data.bpe_vocab_size"]
    names = {text.partition("=")[0] for text in given}
    return [f"{name}={value}" for name, value in settings.items() if name not in names]


def settings_for(cache: Path, dataset: object, *overrides: str) -> Settings:
    request = Request(preset="cpu", overrides=(*usual(cache, dataset, overrides), *overrides))
    return load(request, lambda: False).settings


@dataclass
class Lab:
    """One cache directory, and what was said while preparing in it."""

    dir: Path
    said: list[str] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        return self.dir / "cache"

    def text(self, content: str | bytes = WORDS * 20, name: str = "notes.txt") -> Path:
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def prepare(self, dataset: object, *overrides: str) -> Prepared:
        self.said.clear()
        return prepare(settings_for(self.cache, dataset, *overrides), self.said.append)

    def stores(self) -> list[Path]:
        return sorted((self.cache / "tokens").glob("*"))

    def unfinished(self) -> list[Path]:
        return sorted(self.cache.glob(".tmp-*"))

    def views(self) -> list[Path]:
        return sorted(self.cache.glob("[!.]*__*"))


def snapshot(directory: Path) -> dict[str, tuple[int, int, int]]:
    """(inode, size, mtime) of everything below: equal when nothing was written."""
    found = {}
    for path in [directory, *directory.rglob("*")]:
        st = path.lstat()
        found[str(path)] = (st.st_ino, st.st_size, st.st_mtime_ns)
    return found


@dataclass
class Builder:
    """`prepare_dataset.py` in a process of its own."""

    process: subprocess.Popen[str]
    heard: str = ""

    def finish(self) -> tuple[int, str]:
        """(exit code, all that it wrote)"""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, self.heard + output

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard += line
            if text in line:
                return
        raise AssertionError(f"the builder ended without saying {text!r}")


def start_builder(
    cache: Path,
    dataset: object,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    program: Sequence[str] = (sys.executable,),
) -> Builder:
    """`program` runs prepare_dataset.py."""
    settings = usual(cache, dataset, arguments)
    clean = {k: v for k, v in os.environ.items() if k.upper() not in _PLACES}
    process = subprocess.Popen(
        [*program, str(ROOT / "prepare_dataset.py"), "--preset", "cpu", *settings, *arguments],
        env={**clean, **(environ or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ends_with_the_test(process)
    return Builder(process)


_started: list[subprocess.Popen[str]] = []


def ends_with_the_test(process: subprocess.Popen[str]) -> None:
    """One that a failed test left would fail another one."""
    _started.append(process)


def end_builders() -> None:
    while _started:
        with _started.pop() as process:
            process.kill()


def wait_until(happened: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < end, f"never seen: {what}"
        time.sleep(0.002)


def write_tokenizer(
    path: Path, *, vocab_size: int = 280, end: str = "</s>", begin: str | None = None
) -> Path:
    """A small byte-level BPE whose special tokens are `end` and `begin`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # a test counts imports

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end, begin] if begin else [end],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS * 20], trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tokenizer.to_str())
    return path


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class FakeHub:
    """Answers what huggingface_hub and datasets ask, from repositories of bytes."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        """`models/acme/tiny`, `datasets/acme/text` -> path -> content."""
        self.refusals: dict[str, Answer] = {}
        """Start of a URL path -> what is answered instead."""
        self.requests: list[str] = []
        self.changed_on_the_way: dict[str, int] = {}
        """End of a URL path -> how often its bytes still come changed."""
        self.refuses_after: dict[str, int] = {}
        """End of a URL path -> how often it is sent before each request for it is refused."""
        self.tells_checksums = True
        """In answer to a request for them; ETags come anyway."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path.startswith("http://"):  # we are its proxy
                    path = "/" + path.partition("://")[2].partition("/")[2]
                hub.requests.append(f"{self.command} {path}")
                answer = hub.answer(path, self.headers.get("Range"))
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                asked = self.rfile.read(int(self.headers["Content-Length"]))
                hub.requests.append(f"POST {self.path}")
                answer = hub.checksums(self.path, parse_qs(asked.decode()).get("paths", []))
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def answer(self, path: str, wanted_range: str | None) -> Answer:
        for end, times in self.refuses_after.items():
            asked = sum(each.startswith("GET") and each.endswith(end) for each in self.requests)
            if path.endswith(end) and asked > times:
                return Answer(500)
        for start, refusal in self.refusals.items():
            if path.startswith(start):
                return refusal
        if path == "/" or path.endswith("/auth-check"):
            return Answer(200)
        for name, files in self.repos.items():
            url = name.removeprefix("models/")
            if path.startswith(f"/api/{name}/tree/"):
                return _tree(files, path.partition("/tree/")[2].partition("/")[2])
            if path == f"/api/{name}" or path.startswith(f"/api/{name}/revision/"):
                return _info(url, files)
            if path.startswith(f"/{url}/resolve/"):
                file = path.partition("/resolve/")[2].partition("/")[2]
                if file in files:
                    return self._sent(path, _file(file, files[file], wanted_range))
                return Answer(404, headers={"X-Error-Code": "EntryNotFound"})
        return Answer(404, headers={"X-Error-Code": "RepoNotFound"})

    def checksums(self, path: str, names: Sequence[str]) -> Answer:
        """`paths-info` of a repository."""
        name = path.removeprefix("/api/").partition("/paths-info/")[0]
        if not self.tells_checksums or name not in self.repos:
            return Answer(404)
        return _json([_described(file, self.repos[name][file]) for file in names])

    def _sent(self, path: str, answer: Answer) -> Answer:
        for end, times in self.changed_on_the_way.items():
            if path.endswith(end) and times and f"GET {path}" == self.requests[-1]:
                self.changed_on_the_way[end] -= 1
                answer.body = answer.body.replace(b"e", b"o")
        return answer


def is_large(file: str) -> bool:
    """Whether git-lfs holds it."""
    return file.endswith((".safetensors", ".parquet"))


def _described(file: str, content: bytes) -> dict[str, object]:
    size, sha256 = len(content), hashlib.sha256(content).hexdigest()
    oid = hashlib.sha1(b"blob %d\0" % size + content).hexdigest()
    large = {"oid": sha256, "size": size, "pointerSize": 130} if is_large(file) else None
    return {"type": "file", "path": file, "size": size, "oid": oid, "lfs": large}


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _info(url: str, files: Mapping[str, bytes]) -> Answer:
    siblings = [{"rfilename": name} for name in files]
    name = url.removeprefix("datasets/")
    return _json({"_id": "1", "id": name, "sha": COMMIT, "siblings": siblings, "tags": []})


def _tree(files: Mapping[str, bytes], directory: str) -> Answer:
    prefix = f"{directory}/" if directory else ""
    entries = {}
    for name, content in files.items():
        if name.startswith(prefix):
            child, below, _ = name.removeprefix(prefix).partition("/")
            kind = "directory" if below else "file"
            size = len(content)
            entries[child] = {"type": kind, "path": prefix + child, "size": size, "oid": "0" * 40}
    return _json(list(entries.values()))


def _file(file: str, content: bytes, wanted_range: str | None) -> Answer:
    told = _described(file, content)
    etag = hashlib.sha256(content).hexdigest() if told["lfs"] else told["oid"]
    headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
    if wanted_range is None:
        return Answer(200, content, headers)
    first, _, last = wanted_range.removeprefix("bytes=").partition("-")
    begin, end = int(first), min(int(last or len(content)), len(content) - 1)
    headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
    return Answer(206, content[begin : end + 1], headers)


def run_tool(*arguments: object, **environ: str) -> tuple[int, str]:
    """`prepare_dataset.py` with nothing but `arguments`, in this process: (exit code, all that it
    wrote)."""
    import prepare_dataset  # a test counts imports

    clean = {k: v for k, v in os.environ.items() if k.upper() not in _PLACES}
    output = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {**clean, **environ}, clear=True))
        for name in ("_stop_on_signals", "mask_others"):  # for good
            stack.enter_context(patch.object(prepare_dataset, name))
        stack.enter_context(redirect_stdout(output))
        stack.enter_context(redirect_stderr(output))
        stack.enter_context(_no_hang())
        try:
            code = prepare_dataset.main([str(argument) for argument in arguments])
        except SystemExit as end:  # --help
            code = int(end.code or 0)
    return code, output.getvalue()


def build_here(cache: Path, dataset: object, *arguments: str) -> tuple[int, str]:
    """As `start_builder`, in this process and to the end."""
    return run_tool("--preset", "cpu", *usual(cache, dataset, arguments), *arguments)


@contextmanager
def _no_hang() -> Iterator[None]:
    def fail(signum: int, frame: object) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(DEADLINE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
