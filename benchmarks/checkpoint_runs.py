"""Tiny runs for the programs that test checkpoints: how they are started, what is in the files that
they leave, and what an undisturbed run would have left.

Of the product only the documented commands and file formats are used, so another tree can be
tested with them. `file_calls.c` is preloaded where a run must be held, killed or refused at one
call to the file system.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from tests.e2e.conftest import TINY
from tests.nvml_fake.build import FLAGS

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ".checkpoints"
MANIFEST = "manifest.json"
DEADLINE_S = 240.0
"""For one run. A limit for hangs alone."""
LONGEST = 24
"""Steps of the undisturbed runs."""
KINDS = ("hand", "replicate", "node", "train", "ddp", "fsdp")
_ATTEMPT = re.compile(r"[0-9a-f]{16}")
_COMPUTES = {"hand": "replicate", "node": "replicate"}
"""Kind -> another kind that computes the same bits."""
_TRAINING = {
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "num_workers": 0,
    "save_on_signal": False,
}


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that programs of rounds share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        type=int,
        metavar="N",
        help="repeat this round alone; with the same --seed and other options",
    )
    parser.add_argument("--tree", type=lambda text: Path(text).resolve(), default=ROOT)
    parser.add_argument("--jobs", type=int, default=2, help="rounds at once")
    return parser


class Owner(NamedTuple):
    """What tells the runs of one directory apart."""

    seed: int
    rate: float

    @property
    def arguments(self) -> list[str]:
        return [f"system.seed={self.seed}", f"training.learning_rate={self.rate}"]


class Saved(NamedTuple):
    """A checkpoint that was read."""

    path: Path
    owner: Owner
    step: int
    state: str
    """A digest of all that decides how the run goes on."""

    @property
    def name(self) -> str:
        """`step_4` or `last`."""
        return self.path.name.removesuffix(".pt")


class Broken(Exception):
    """A checkpoint cannot be read, or is not whole."""


@dataclass(frozen=True)
class Done:
    """A run that ended."""

    code: int
    output: str
    run_dir: Path
    calls: Path

    @property
    def first_step(self) -> int | None:
        """The step with which it began; None: it took none."""
        found = re.search(r"Step \[(\d+)/", self.output)
        return int(found[1]) if found else None

    @property
    def error(self) -> str:
        """Its first error line, or else its last line."""
        lines = self.output.splitlines()
        errors = [line for line in lines if "error: " in line]
        return (errors or lines[-1:] or ["it printed nothing"])[0]

    @property
    def resumed(self) -> str | None:
        found = re.search(r"Resumed from (\S+): ", self.output)
        return found[1] if found else None

    def losses(self) -> dict[int, str]:
        """Step -> exact loss, from its events; without a launcher there are none."""
        found = {}
        for path in self.run_dir.glob("*.events.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and (event := json.loads(line))["kind"] == "step":
                    found[event["step"]] = event["loss"]
        return found


@dataclass
class Running:
    """A run that was started; its output goes to a file."""

    process: "subprocess.Popen[bytes]"
    output: Path
    run_dir: Path
    calls: Path

    def finish(self) -> Done:
        """Wait for its end and that of all its processes; one that hangs is killed, and its code
        is 124."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = 124
        until = time.monotonic() + 30
        while (left := _of_run(self.calls)) and code != 124 and time.monotonic() < until:
            time.sleep(0.02)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return Done(code, self.output.read_text(errors="replace"), self.run_dir, self.calls)

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def is_held(self) -> bool:
        return self.calls.exists() and bool(
            re.search(r"^\S+ \d+ hit ", self.calls.read_text(), re.M)
        )


def _of_run(calls: Path) -> list[int]:
    """Living processes of a run, told by the log of calls in their environment."""
    tag, found = f"CALLS_LOG={calls}".encode(), []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if tag in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


@dataclass
class Lab:
    """Starts runs of `tree`; one token cache for all."""

    scratch: Path
    tree: Path
    _undisturbed: dict[tuple[str, Owner], "Undisturbed"] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.scratch = self.scratch.resolve()
        self._library = self.scratch / "file_calls.so"
        compiler = shutil.which("gcc") or shutil.which("cc")
        assert compiler, "a C compiler is needed (gcc or cc)"
        source = Path(__file__).with_name("file_calls.c")
        subprocess.run([compiler, *FLAGS, "-o", str(self._library), str(source)], check=True)
        tiny: dict[str, Any] = TINY
        settings = tiny | {
            "training": tiny["training"] | _TRAINING,
            "system": tiny["system"] | {"num_threads": 1},
            "logging": {"log_interval": 1},
        }
        (self.scratch / "tiny.json").write_text(json.dumps(settings))
        words = (f"the quick brown fox number {number} jumps over the dog" for number in range(400))
        (self.scratch / "text.txt").write_text("\n".join(words))

    def place(self, name: str) -> Path:
        """A directory to start runs in; runs of one place share its `.checkpoints`."""
        place = self.scratch / name
        place.mkdir()
        return place

    def start(
        self, kind: str, place: Path, name: str, arguments: Sequence[str], **calls: str
    ) -> Running:
        """`name`: of its run directory. `calls`: what file_calls.c shall do."""
        run_dir, log = place / name, place / f"{name}.calls"
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPATH": str(self.tree), "PYTHONPYCACHEPREFIX": str(self.scratch / "compiled")}
        env |= {"DATASET_CACHE_DIR": str(self.scratch / "cache"), "OMP_NUM_THREADS": "1"}
        env |= {"MODEL_CHECK_HISTORY_FILE": "", "LD_PRELOAD": str(self._library)}
        env |= {"CALLS_DIR": f"{place / CHECKPOINTS}", "CALLS_LOG": str(log)}
        with (place / f"{name}.out").open("wb") as output:
            process = subprocess.Popen(
                self._command(kind, run_dir, arguments),
                cwd=place,
                env=env | calls,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return Running(process, place / f"{name}.out", run_dir, log)

    def _command(self, kind: str, run_dir: Path, arguments: Sequence[str]) -> list[str]:
        python = [sys.executable, "-P"]
        config = ["--config", str(self.scratch / "tiny.json")]
        if kind == "hand":
            return [*python, str(self.tree / "pretrain_main.py"), *config, *arguments]
        options = [*config, "--run-dir", str(run_dir), *arguments]
        launcher = [*python, "-m", "launcher"]
        if kind == "train":
            return [*launcher, "train", str(self.scratch / "text.txt"), *options]
        if kind in ("ddp", "fsdp"):
            return [*launcher, "--mode", kind, "--workers", "2", *options]
        node = [] if kind != "node" else [*_NODE, f"node-{run_dir.name[-1]}"]
        return [*node, *launcher, "--workers", "1", *options]

    def undisturbed(self, kind: str, owner: Owner) -> "Undisturbed":
        """What a run of this kind and owner leaves when nothing disturbs it; it is made once."""
        key = (_COMPUTES.get(kind, kind), owner)
        with self._lock:
            if key not in self._undisturbed:
                self._undisturbed[key] = self._run_undisturbed(*key)
            return self._undisturbed[key]

    def _run_undisturbed(self, kind: str, owner: Owner) -> "Undisturbed":
        place = self.place(f"undisturbed_{kind}_{owner.seed}_{owner.rate}")
        saving = ["training.save_interval=1", f"training.max_steps={LONGEST}"]
        saving += ["training.keep_last=null", "training.save_last=false"]
        done = self.start(kind, place, "run", [*owner.arguments, *saving]).finish()
        assert done.code == 0, done.output
        saved = [read(path) for path in checkpoints_below(place / CHECKPOINTS)]
        states = {each.step: each.state for each in saved}
        assert len(states) == LONGEST, states
        shutil.rmtree(place / CHECKPOINTS)
        return Undisturbed(states, done.losses())


_NODE = [
    *("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"),
    *("sh", "-c", 'hostname "$0"; "$@"; exit $?'),
]


class Undisturbed(NamedTuple):
    states: dict[int, str]
    """Steps done -> the digest of the state."""
    losses: dict[int, str]

    def differing(self, losses: Mapping[int, str]) -> list[int]:
        return [step for step, loss in losses.items() if self.losses[step] != loss]


def checkpoints_below(directory: Path) -> Iterator[Path]:
    """Files and sharded checkpoints by whatever name, but no hidden ones: those are temporary."""
    for path in sorted(directory.rglob("*")):
        is_file = path.suffix == ".pt" and not _ATTEMPT.fullmatch(path.parent.name)
        is_hidden = any(part[0] == "." for part in path.relative_to(directory).parts)
        if (is_file or (path / MANIFEST).is_file()) and not is_hidden:
            yield path


def leftovers_below(directory: Path) -> list[Path]:
    """Temporary files, hidden directories, and those of sharded saves that no manifest names."""
    found = list(directory.rglob(".*.tmp"))
    for path in directory.rglob("*"):
        is_attempt = bool(_ATTEMPT.fullmatch(path.name)) and not _is_named(path)
        if path.is_dir() and (is_attempt or path.name[0] == "."):
            found.append(path)
    return found


def _is_named(attempt: Path) -> bool:
    """By the manifest beside it."""
    with suppress(OSError, ValueError):
        manifest = json.loads((attempt.parent / MANIFEST).read_text())
        return bool(manifest["directory"] == attempt.name)
    return False


def read(path: Path) -> Saved:
    """Raises Broken."""
    try:
        return _read_sharded(path) if path.is_dir() else _saved(path, _load(path), [])
    except Exception as error:  # whatever torch makes of a torn file
        raise Broken(f"{path}: {type(error).__name__}: {str(error).splitlines()[:1]}") from error


def _read_sharded(path: Path) -> Saved:
    manifest = json.loads((path / MANIFEST).read_text())
    files = path / manifest["directory"]
    shards = []
    for name, entry in sorted(manifest["files"].items()):
        content = (files / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise Broken(f"{files / name}: not what the manifest names")
        if name.endswith(".safetensors"):
            shards.append(load_file(files / name))
    return _saved(path, _load(files / "common.pt"), shards)


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _saved(path: Path, state: dict[str, Any], shards: Sequence[Mapping[str, Any]]) -> Saved:
    settings = state["settings"]
    owner = Owner(settings["system"]["seed"], settings["training"]["learning_rate"])
    names = ("model", "optimizer", "rng", "rng_of_ranks", "loader", "step", "loss", "total_tokens")
    digest = hashlib.sha256()
    _add([[state.get(name) for name in names], shards], digest)
    return Saved(path, owner, state["step"], digest.hexdigest())


def _add(tree: Any, digest: Any) -> None:
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            digest.update(str(key).encode())
            _add(tree[key], digest)
    elif isinstance(tree, list | tuple):
        for each in tree:
            _add(each, digest)
    elif isinstance(tree, torch.Tensor):
        digest.update(f"{tree.dtype} {tuple(tree.shape)}".encode())
        digest.update(tree.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update((tree.hex() if isinstance(tree, float) else repr(tree)).encode())
